"""The output of plain lm-eval against that of `fcsd evaluate` for the same model: no
item differs, and lm-eval's own files are the same.
"""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from fcsd.cli.main import main
from fcsd.evaluation.lm_eval.write import write_lm_eval
from fcsd.evaluation.read import read_any_result
from fcsd.evaluation.results import write_result
from fcsd.pipeline.tiny.models import tiny_tokenizer
from fcsd.report.comparison import compare_all, read_evaluated
from tests.evaluation.test_runner import (
    CHOICE,
    GENERATION,
    judge,
    likelihood,
    model,
    place,
    plain_lm_eval,
    write_rows,
)
from tests.support import documented_keys, json_lines

__all__ = ["model", "place"]  # fixtures

GROUP = {"task": "t_uneven", "dataset": "o/uneven", "metric": "acc,none"}


@pytest.fixture(scope="module")
def folders(
    model: Any, place: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """Return the folders of lm-eval's results and of fcsd's for the same model: two
    tasks, and a group of 12 and 5 items.
    """
    import lm_eval
    from lm_eval.loggers import EvaluationTracker
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    folder = tmp_path_factory.mktemp("both")
    rows = json_lines(place / "data/o/choice/test.jsonl")
    write_rows(place / "data/o/uneven", rows, "test", "train")
    short = place / "data/o/uneven/train.jsonl"
    short.write_text("".join(short.read_text().splitlines(keepends=True)[:5]))
    here = CHOICE | {"dataset_path": str(place / "data/o/uneven")}
    parts = [
        here | {"task": "t_long"},
        here | {"task": "t_short", "test_split": "train"},
    ]
    for part in parts:
        (place / "mine" / f"{part['task']}.yaml").write_text(yaml.safe_dump(part))
    group = {
        "group": "t_uneven", "task": ["t_long", "t_short"],
        "aggregate_metric_list": [{"metric": "acc", "weight_by_size": True}],
    }  # fmt: skip
    (place / "mine" / "t_uneven.yaml").write_text(yaml.safe_dump(group))

    row = likelihood(metric="acc_norm,none", num_fewshot=2)
    made, samples = judge(
        model, place, row, GENERATION, likelihood(**GROUP), name="mine"
    )
    write_result(made, samples, folder / "mine")
    write_lm_eval(made, samples, folder / "mine" / "lm_eval")

    def keep(output: Any, tracker: Any) -> None:
        tracker.general_config_tracker.model_name_sanitized = "x"
        by_task = output.pop("samples")
        tracker.save_results_aggregated(output, by_task)
        for name, items in by_task.items():
            tracker.save_results_samples(name, items)

    for task, shots, data in (
        ("t_choice", 2, "o/choice"),
        ("t_answers", 0, "o/answers"),
    ):
        tracker = EvaluationTracker(output_path=str(folder / "theirs"))
        keep(
            plain_lm_eval(model, place, task, shots, data, evaluation_tracker=tracker),
            tracker,
        )
    tracker = EvaluationTracker(output_path=str(folder / "theirs"))
    lm = HFLM(pretrained=copy.deepcopy(model), tokenizer=tiny_tokenizer(), batch_size=1)
    manager = TaskManager(include_path=[str(place / "mine")], include_defaults=False)
    keep(
        lm_eval.simple_evaluate(
            lm, tasks=["t_uneven"], task_manager=manager, evaluation_tracker=tracker
        ),
        tracker,
    )
    return folder / "theirs", folder / "mine"


def test_results_of_lm_eval_and_of_fcsd_are_compared_item_by_item(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    theirs, mine = folders
    evaluated = read_evaluated(theirs, [mine])
    (comparison,) = compare_all(evaluated).values()
    rows = comparison["tasks"]
    assert {
        task: (row["metric"], row["num_fewshot"], row["num_items"])
        for task, row in rows.items()
    } == {
        "t_choice": ("acc_norm,none", 2, 12),
        "t_answers": ("exact_match,none", 0, 6),
        "t_uneven": ("acc,none", 0, 17),
    }
    assert [(row["delta"], row["gained"], row["lost"]) for row in rows.values()] == [
        (0, 0, 0)
    ] * 3
    assert {
        name: row["num_items"] for name, row in rows["t_uneven"]["members"].items()
    } == {"t_long": 12, "t_short": 5}
    one, other = (each["samples"]["t_choice"] for each in evaluated.values())
    for key in ("prompt", "choices", "target"):
        assert [sample[key] for sample in one] == [sample[key] for sample in other]
    words = ["compare", str(theirs), str(mine), "--output", str(tmp_path / "c")]
    assert main(words) == 0


def test_lm_evals_files_of_fcsd_say_what_those_of_lm_eval_say(
    folders: tuple[Path, Path],
) -> None:
    """Scores, standard errors (of the group too), counts, and the hashes over all items
    of a task.
    """
    theirs, mine = folders
    (file,) = mine.glob("lm_eval/mine/results_*.json")
    ours = json.loads(file.read_text())
    seen = set()
    for other in theirs.glob("x/results_*.json"):
        whole = json.loads(other.read_text())
        whole["results"].pop("g", None)  # the nameless group around one task
        for task, row in whole["results"].items():
            seen.add(task)
            own = ours["results"][task]
            shared = (own.keys() & row.keys()) - {"sample_count"}
            assert {"name", "alias", "sample_len"} < shared and len(shared) == 5, shared
            assert {key: own[key] for key in shared} == pytest.approx(
                {key: row[key] for key in shared}
            )
        for part in ("task_hashes", "n-shot", "n-samples"):
            said = {task: value for task, value in whole[part].items() if task != "g"}
            assert {task: ours[part][task] for task in said} == said, part
        for task in whole.get("groups", {}):
            assert ours["groups"][task]["sample_count"]["acc,none"] == 17
            assert set(ours["group_subtasks"][task]) == set(
                whole["group_subtasks"][task]
            )
        assert set(whole["config"]) - set(ours["config"]) <= {
            "model_num_parameters", "model_revision", "model_sha", "use_cache", "random_seed", "numpy_seed",
            "torch_seed",
        }  # fmt: skip
    assert seen == set(ours["results"]) and set(ours["configs"]) == seen - {
        "t_uneven"
    }, "samples for every one"


def test_a_sample_in_lm_evals_files_has_lm_evals_fields_and_values(
    folders: tuple[Path, Path],
) -> None:
    theirs, mine = folders
    for task, metric in (
        ("t_choice", "acc_norm"),
        ("t_answers", "exact_match"),
        ("t_short", "acc"),
    ):
        ours, other = (
            json_lines(next(place.glob(f"samples_{task}_*")))
            for place in (mine / "lm_eval" / "mine", theirs / "x")
        )
        assert len(ours) == len(other)
        for own, row in zip(
            ours, sorted(other, key=lambda row: row["doc_id"]), strict=True
        ):
            assert row.keys() - own.keys() <= {"acc", "acc_norm"}
            assert own.keys() <= row.keys()
            # we have no `doc`, and do not keep whether a choice is the greedy one
            same = {
                "doc_id", "target", "arguments", "filter", "doc_hash", "prompt_hash", "target_hash", metric,
            }  # fmt: skip
            if task == "t_answers":
                same = (same - {"arguments"}) | {"resps", "filtered_resps"}
                assert (
                    own["arguments"]["gen_args_0"]["arg_0"]
                    == row["arguments"]["gen_args_0"]["arg_0"]
                )
            else:
                values = [
                    [float(each[0]) for each in rows]
                    for rows in (own["filtered_resps"], row["filtered_resps"])
                ]
                assert values[0] == pytest.approx(values[1], abs=1e-4)
            assert {key: own[key] for key in same} == {key: row[key] for key in same}


def test_every_key_of_a_result_and_of_its_samples_is_documented(
    folders: tuple[Path, Path],
) -> None:
    whole = json.loads((folders[1] / "results.json").read_text())
    used = {*whole, *whole["settings"]}.union(*whole["tasks"].values())
    for file in folders[1].glob("samples_*.jsonl"):
        used |= json.loads(file.read_text().splitlines()[0]).keys()
    assert used - documented_keys("results.json") == set()


def test_a_task_of_lm_eval_has_the_floor_that_shipped_suites_have(
    tmp_path: Path,
) -> None:
    metric = "prompt_level_strict_acc"
    report = {
        "results": {"ifeval": {f"{metric},none": 0.5}},
        "configs": {"ifeval": {"output_type": "generate_until"}},
    }
    (tmp_path / "results_1.json").write_text(json.dumps(report))
    row = {"prompt_hash": "p", "filter": "none", "doc": {}, "target": ""}
    rows = [
        row | {"doc_id": n, "doc_hash": f"d{n}", metric: n, "resps": [["a"]], "filtered_resps": ["a"]}
        for n in range(2)
    ]  # fmt: skip
    lines = "".join(json.dumps(line) + "\n" for line in rows)
    (tmp_path / "samples_ifeval_1.jsonl").write_text(lines)
    result, _ = read_any_result(tmp_path)
    assert result["tasks"]["ifeval"]["floor"] == 0.14
