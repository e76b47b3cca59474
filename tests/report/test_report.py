"""Tables, figures, report and model card, from results written by hand."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from huggingface_hub import metadata_load, parse_eval_result_entries
from huggingface_hub.repocard_data import model_index_to_eval_results

from fcsd.base.artifact import Stage
from fcsd.base.files import checkpoint_files, read_json
from fcsd.base.text import calibration_kl_text, markdown
from fcsd.base.writing import write_json, write_text
from fcsd.evaluation.results import SCHEMA_VERSION, read_numbers, write_result
from fcsd.evaluation.scores import compare
from fcsd.model.connectivity.modeling import auto_map, modeling_source
from fcsd.model.families import FAMILIES
from fcsd.recipe.layout import RunLayout
from fcsd.recipe.recipe import Recipe
from fcsd.report import comparison as comparison_module
from fcsd.report import report as report_module
from fcsd.report.comparison import settings_tables
from fcsd.report.publish.card import model_card, write_card, write_publication
from fcsd.report.report import write_report
from fcsd.report.table import models_table, percent, result_table, with_error
from fcsd.report.training import _last_loss
from fcsd.report.verdict import outcome
from fcsd.training.card.facts import Facts
from tests.support import documented_keys, user_error

SCORES = {
    "original": {"code": [1, 1, 1, 0], "choice": [1, 0, 1, 0]},
    "converted": {"code": [0, 0, 0, 0], "choice": [0, 0, 1, 0]},
    "fcsd": {"code": [1, 1, 0, 1], "choice": [1, 0, 1, 0]},
}
KL = {"original": 0.0, "converted": 1.25, "fcsd": 0.0125}


def result(
    name: str, limit: int | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a result in the format of `fcsd evaluate`, its standard errors by hand:
    sqrt(p (1 - p) / 3).
    """
    tasks, samples = {}, {}
    for task, metric in (("code", "pass@1"), ("choice", "acc,none")):
        scores = SCORES[name][task]
        share = sum(scores) / 4
        tasks[task] = {
            "metric": metric, "value": share, "stderr": (share * (1 - share) / 3) ** 0.5, "num_items": 4,
            "num_fewshot": 0,
            "kind": "code" if task == "code" else "likelihood", "headline": True, "dataset": f"/somewhere/a/{task}",
        }  # fmt: skip
        samples[task] = [
            {
                "doc_id": i, "doc_hash": f"d{i}", "prompt_hash": f"p{i}", "score": float(score),
            }
            for i, score in enumerate(scores)
        ]  # fmt: skip
    suite = {
        "tasks": [
            {"task": task, "dataset": f"a/{task}", "kind": tasks[task]["kind"]}
            for task in tasks
        ]
    }
    settings = {
        "limit": limit, "dtype": "float32", "device": "cpu", "decoding": "greedy", "suite": suite,
    }  # fmt: skip
    whole = {
        "schema_version": SCHEMA_VERSION, "suite": "s", "model": name, "tasks": tasks, "mean": 0.5, "mean_stderr": 0.1,
        "settings": settings, "sandbox": {"landlock": "abi7"}, "wall_s": 1.0,
        "kl_to_original": {"kl": KL[name], "stderr": 0.001, "num_tokens": 10},
    }  # fmt: skip
    return whole, samples


MBPP = {"kind": "code", "task": "mbpp_plus", "dataset": "evalplus/mbppplus"}


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    return Recipe.model_validate(
        {
            "name": "x",
            "output_dir": str(tmp_path / "run"),
            "model": {"path": "some/base"},
            "data": {"train": [{"path": "d"}]},
            "early_stopping": {"suite": "paper11", "task": "mbpp_plus", "limit": 40},
            "publication": {"license": "apache-2.0", "repo_id": "me/x"},
        }
    )


def evaluated(whole: dict[str, Any], samples: dict[str, Any], folder: Path) -> None:
    """Write a result as its stage does."""
    stage = Stage(folder, "evaluate", {}, {})
    stage.start()
    write_result(whole, samples, folder)
    stage.finish({})


@pytest.fixture
def run(recipe: Recipe) -> Path:
    """Return a run's folder as the stages leave it."""
    folder = Path(recipe.output_dir)
    for name in SCORES:
        evaluated(*result(name), folder / "evaluate" / name)
    config = {
        "num_hidden_layers": 4,
        "farskip": {"version": 1, "layers": [2, 3], "attention": "partial", "mlp": "outdated"},
    }  # fmt: skip
    for place in ("convert", "distill"):
        (folder / place / "model").mkdir(parents=True)
        write_json(folder / place / "model" / "config.json", config)
    model = folder / "convert" / "model"
    files = checkpoint_files(model)
    conversion = Stage(folder / "convert", "convert", {}, {})
    conversion.finish({}, {f"model/{name}": facts for name, facts in files.items()})
    assert recipe.early_stopping is not None
    settings = {
        "objective": {"name": "kl"},
        "train": recipe.train.model_dump(),
        "early_stopping": recipe.early_stopping.settings,
    }
    stage = Stage(folder / "distill", "distill", settings, {})
    stage.start()
    write_text(
        stage.folder / "history.jsonl",
        '{"step": 5, "loss": 0.5, "kl": 0.5, "tokens_per_second": 131072}\n'
        '{"step": 10, "loss": 0.25, "kl": 0.25, "tokens_per_second": 65536}\n',
    )
    points = [
        {"step": 0, "score": 0.0, "stderr": 0.0},
        {"step": 10, "score": 0.5, "stderr": 0.08},
    ]
    write_json(stage.folder / "scores.json", {"metric": "pass@1", "points": points})
    stopping = {"num_scores": 2, "num_items": 40, "num_items_total": 378, "best_stderr": 0.08, "scoring_s": 90.0,
                "run_s": 3600.0, "share_of_time": 0.025}  # fmt: skip
    results = {
        "steps": 10, "best_step": 10, "best_score": 0.5, "early_stopping": stopping,
        "hardware": {"device": "NVIDIA H200", "processes": 8},
    }  # fmt: skip
    stage.finish(results | {"skipped_steps": 2})
    return folder


@pytest.fixture
def without_details(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write reports without figures and single answers, which take long."""
    for name in ("_figures", "write_details"):
        monkeypatch.setattr(f"fcsd.report.report.{name}", lambda *_: {})


def test_the_report_states_every_model_and_the_paired_differences(
    recipe: Recipe, run: Path
) -> None:
    table = write_report(recipe, list(SCORES), run / "report")
    rows = {
        line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:-1]]
        for line in table.splitlines()
        if "|" in line
    }
    assert rows["model"] == [
        "rewired", "training", "code pass@1", "choice acc", "mean", "KL to original",
    ]  # fmt: skip
    assert rows["original"] == ["0", "-", "75.0 ± 25.0", "50.0 ± 28.9", "50.0", "0"]
    assert rows["converted"][0] == "2/4" and rows["converted"][-1] == "1.250"
    assert rows["fcsd"][:3] == [
        "2/4",
        "kl, 10 steps, best at 10, 2 skipped steps",
        "75.0 ± 25.0",
    ]
    # the main model of the run comes before the untrained one
    said = table.split("\n\n")[-1].splitlines()
    # a line for each kind of tasks
    for line, start in zip(
        said,
        (
            "fcsd, by likelihood of given answers: all 4 items have the original's score",
            "fcsd, by what it writes: the one task that counts changed by 0.0 points (",
            "converted, by likelihood of given answers: the one task that counts changed"
            " by -25.0 points (95 % interval",
            "converted, by what it writes: the one task that counts changed by -75.0",
        ),
        strict=True,
    ):
        assert line.startswith(start), line
    report = json.loads((run / "report" / "report.json").read_text())
    assert report.keys() - documented_keys("report.json") == set()
    lost = report["comparisons"]["converted"]["tasks"]["code"]
    assert (lost["delta"], lost["gained"], lost["lost"], lost["p_value"]) == (
        -0.75,
        0,
        3,
        0.25,
    )  # 2 * (1/2)^3
    kept = report["comparisons"]["fcsd"]["tasks"]["code"]
    assert (kept["delta"], kept["gained"], kept["lost"], kept["p_value"]) == (
        0.0, 1, 1, 1.0,
    )  # fmt: skip
    text = (run / "report" / "report.md").read_text()
    assert "(items.html)" in text and (run / "report" / "items.html").is_file()
    assert len(list((run / "report" / "lm_eval").glob("*/results_*.json"))) == 3
    assert (
        "choice of checkpoint: pass@1 on `evalplus/mbppplus`, split `test`, every 1000"
        " steps" in text
    )
    assert (
        "| fcsd     | 50.0 ± 8.0 % |      10 | 40 of 378 items |      2 |      2 min,"
        " 2.5 % |" in text
    )
    assert (
        "pass@1 on `evalplus/mbppplus`, split `test` during training; the band is one"
        " standard error" in text
    )
    assert "Mean over the last steps: fcsd 0.375 (10)." in text
    for figure in ("loss.png", "pass_at_1.png", "deltas.png"):
        assert f"({figure})" in text
        assert (run / "report" / figure).read_bytes().startswith(b"\x89PNG")


def test_the_report_begins_with_its_outcome_its_making_and_the_way_to_all_answers(
    recipe: Recipe, run: Path
) -> None:
    write_report(recipe, list(SCORES), run / "report")
    manifest = read_json(run / "distill" / "manifest.json")
    day, clock = manifest["finished"][:10], manifest["finished"][11:16]
    title, outcome, made, items, *_ = (
        (run / "report" / "report.md").read_text().split("\n\n")
    )
    assert title == "# Report of `x`"
    # 3 of 4 and 2 of 4 items of both; the mean's interval is that of the verdict below.
    assert re.fullmatch(
        r"\*\*`fcsd` is not measurably worse than the original:\*\* it scores 62\.5 per"
        r" cent over 2 tasks, the original 62\.5; a loss of up to \d+\.\d points is not"
        r" excluded\.",
        outcome,
    )
    # 5 steps of 131,072 tokens at 131,072 tokens per second take 5 s; 5 more at half
    # that, 10 s.
    assert made == (
        f"Finished on {day}; `fcsd` was trained for 10 of 2000 steps, on 1,310,720"
        " tokens, in 15 s (87,381 tokens per second), on 8 × NVIDIA H200."
    )
    assert items.startswith("**[Every answer side by side](items.html)**")
    text = (run / "report" / "report.md").read_text()
    row = next(line for line in text.splitlines() if line.startswith("| fcsd     | 20"))
    cells = [cell.strip() for cell in row.split("|")[1:-1]]
    # 8 GPUs for 15 s are 1/30 of a GPU hour.
    assert cells == ["fcsd", f"{day} {clock}", "8 × NVIDIA H200", "10", "1,310,720",
                     "15 s", "87,381", "0.0333"]  # fmt: skip


@pytest.mark.parametrize(
    ("converted", "limit", "said"),
    [
        ([0, 0, 0, 0] * 8, None, "**`m` is worse than the original:** it scores 0.0"),
        ([1, 1, 1, 1] * 8, None, "**`m` is better than the original:** it scores 100.0"),
        ([1, 0, 1, 0] * 8, None, "**`m` scores as the original does, on every item.**"),
        ([0, 0, 0, 0] * 8, 32, "**In a quick look: `m` is worse than the original:**"),
    ],
)  # fmt: skip
def test_the_outcome_is_one_plain_sentence(
    converted: list[int], limit: int | None, said: str
) -> None:
    assert outcome("m", compared([1, 0, 1, 0] * 8, converted, limit)).startswith(said)


def compared(
    original: list[int], converted: list[int], limit: int | None
) -> dict[str, Any]:
    whole, samples = result("fcsd", limit)
    both = []
    for scores in (original, converted):
        items = [
            samples["code"][0]
            | {"doc_id": i, "doc_hash": f"d{i}", "score": float(score)}
            for i, score in enumerate(scores)
        ]
        row = whole["tasks"]["code"] | {
            "num_items": len(scores),
            "value": sum(scores) / len(scores),
        }
        both.append(
            {"result": whole | {"tasks": {"code": row}}, "samples": {"code": items}}
        )
    return compare(*both)


def test_settings_are_one_table_in_which_only_what_differs_names_models() -> None:
    evaluated = {name: {"result": result(name)[0]} for name in SCORES}
    changed = evaluated["fcsd"]["result"]
    changed["settings"] |= {"dtype": "bfloat16"}
    changed["tasks"]["choice"]["prompts_cut"] = 3
    changed["sandbox"] = {
        "namespaces": ["user", "pid"],
        "seccomp": True,
        "rlimits": False,
    }
    tasks, settings = settings_tables(evaluated)
    asked = [line.split("|")[1].strip() for line in tasks.splitlines()[2:]]
    assert asked == ["code", "choice"]
    rows = dict(
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in settings.splitlines()[2:]
    )
    assert rows["precision"] == "float32 (original, converted); bfloat16 (fcsd)"
    assert rows["prompts cut on the left"] == "choice 3 (fcsd)"
    assert rows["computed on"] == "cpu" and rows["items"] == "all"
    assert rows["sandbox"] == (
        "landlock abi7 (original, converted); namespaces user pid, seccomp, without"
        " rlimits (fcsd)"
    )
    assert "[" not in settings and "True" not in settings


def test_a_result_of_weights_that_are_gone_is_refused(
    recipe: Recipe, run: Path
) -> None:
    for place, key in (("distill", "outputs"), ("evaluate/fcsd", "inputs")):
        manifest = json.loads((run / place / "manifest.json").read_text())
        del manifest["sha256"]
        write_json(
            run / place / "manifest.json",
            manifest | {key: {"model": f"weights of {place}"}},
        )
    with user_error("was measured on other weights than those in"):
        write_report(recipe, list(SCORES), run / "report")


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("distill/history.jsonl", '"loss": 0.25', '"loss": 0.15'),
        ("distill/scores.json", '"score": 0.5', '"score": 0.6'),
        ("evaluate/fcsd/results.json", '"stderr": ', '"stderr": 1'),
        ("evaluate/original/samples_code.jsonl", '"doc_id": 0', '"doc_id": 7'),
        ("distill/manifest.json", '"best_score": 0.5', '"best_score": 0.6'),
    ],
)
def test_a_figure_that_is_not_what_its_stage_left_enters_no_report(
    recipe: Recipe, run: Path, file: str, old: str, new: str
) -> None:
    text = (run / file).read_text()
    assert old in text
    (run / file).write_text(text.replace(old, new, 1))
    with user_error(
        rf"{file.rpartition('/')[0]}.*(differs from what the stage wrote|is damaged)"
    ):
        write_report(recipe, list(SCORES), run / "report")
    assert not (run / "report").exists()


@pytest.mark.usefixtures("without_details")
def test_the_report_says_when_the_checkpoint_was_chosen_by_items_that_are_reported(
    recipe: Recipe, run: Path
) -> None:
    for dataset, said in (("a/code", True), ("a/other", False)):
        suite = run.parent / "stopping.yaml"
        rows = [MBPP | {"dataset": dataset}]
        suite.write_text(yaml.safe_dump({"name": "stopping", "tasks": rows}))
        stopping = {
            "suite": str(suite), "task": "mbpp_plus", "every_steps": 5, "patience": 2, "min_delta": 0.02,
        }  # fmt: skip
        plan = Recipe.model_validate(recipe.dump() | {"early_stopping": stopping})
        write_report(plan, list(SCORES), run / "report")
        text = (run / "report" / "report.md").read_text()
        assert f"pass@1 on `{dataset}`" in text
        assert (
            "The same items are graded in code: they are not an independent test"
            in text
        ) == said


@pytest.mark.usefixtures("without_details")
def test_the_layers_of_a_multimodal_wrapper_are_those_of_its_text_stack(
    recipe: Recipe, run: Path
) -> None:
    path = run / "distill" / "model" / "config.json"
    config = json.loads(path.read_text())
    write_json(
        path,
        {
            "text_config": {"num_hidden_layers": config.pop("num_hidden_layers")},
            **config,
        },
    )
    assert "| 2/4 |" in " ".join(
        write_report(recipe, list(SCORES), run / "report").split()
    )


@pytest.mark.usefixtures("without_details")
def test_a_quick_look_is_marked_as_one(recipe: Recipe, run: Path) -> None:
    for name in SCORES:
        evaluated(*result(name, limit=4), run / "evaluate" / name)
    printed = write_report(recipe, list(SCORES), run / "report")
    assert "Only the first 4 items of every task" in printed
    assert (
        "Only the first 4 items of every task"
        in (run / "report" / "report.md").read_text()
    )
    assert "Only the first 4 items" in result_table(
        read_numbers(run / "evaluate" / "fcsd")
    )


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("convert/model/config.json", r"differs from .* \(model/config\.json"),
        ("distill/history.jsonl", r"differs from .* \(history\.jsonl: .* -> null"),
        ("distill/manifest.json", r"manifest\.json: no such file, although fcsd has"),
        ("convert/manifest.json", r"manifest\.json: no such file, although converted"),
    ],
)
def test_a_run_with_a_changed_config_or_a_file_less_is_not_reported(
    recipe: Recipe, run: Path, file: str, said: str
) -> None:
    if file.endswith("config.json"):
        write_json(run / file, read_json(run / file) | {"num_hidden_layers": 5})
    else:
        (run / file).unlink()
    with user_error(said):
        write_report(recipe, list(SCORES), run / "report")


@pytest.mark.usefixtures("without_details")
def test_an_unfinished_evaluation_is_left_out_with_a_line(
    recipe: Recipe, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "evaluate" / "fcsd" / "manifest.json").unlink()
    write_report(recipe, list(SCORES), run / "report")
    assert "evaluate/fcsd: is not finished" in capsys.readouterr().err


@pytest.mark.usefixtures("without_details")
def test_a_model_that_differs_from_its_stages_record_is_not_published(
    recipe: Recipe, run: Path
) -> None:
    write_report(recipe, list(SCORES), run / "report")
    model = run / "convert" / "model"
    write_json(model / "config.json", read_json(model / "config.json") | {"x": 1})
    with user_error(r"differs from .* \(model/config\.json\.x"):
        write_publication(recipe, None, model, run / "report", run / "publish")
    assert not (run / "publish").exists()


def test_the_card_says_what_was_measured_and_no_place_of_this_machine(
    recipe: Recipe, run: Path
) -> None:
    write_report(recipe, list(SCORES), run / "report")
    write_publication(
        recipe, None, run / "distill" / "model", run / "report", run / "publish"
    )
    card = (run / "publish" / "README.md").read_text()
    front = yaml.safe_load(card.split("---")[1])
    assert front["license"] == "apache-2.0"
    assert front["base_model"] == "some/base"
    assert "farskip" in front["tags"]
    (entry,) = front["model-index"]
    assert {
        row["dataset"]["type"]: row["metrics"][0]["value"] for row in entry["results"]
    } == {"a/code": 75.0, "a/choice": 50.0}
    assert "https://arxiv.org/abs/2511.11505" in card
    assert "@article{dukler2025farskip,\n" in card
    table = [line for line in card.splitlines() if line.startswith("| ")]
    assert (
        len(table) == 4 and max(map(len, table)) < 120 and "| accuracy, 0-shot" in card
    ), "the Hub's column is narrow"
    assert "2 of 4 decoder layers" in card
    assert 'from_pretrained("me/x", trust_remote_code=True)' in card
    published = [
        file.read_text()
        for file in (run / "publish").iterdir()
        if file.suffix in (".md", ".json")
    ]
    assert len(published) >= 4 and not any("/somewhere" in text for text in published)
    assert "items.html" not in (run / "publish" / "report.md").read_text()
    assert not (run / "publish" / "items.html").exists(), (
        "the questions of benchmarks are not published"
    )
    assert (run / "publish" / "config.json").is_file()
    assert (run / "publish" / "report.md").is_file()


@pytest.mark.usefixtures("without_details")
def test_a_finished_training_without_its_model_is_not_published(
    recipe: Recipe, run: Path
) -> None:
    write_report(recipe, list(SCORES), run / "report")
    (run / "distill" / "model" / "config.json").unlink()
    for _ in range(2):  # an empty folder, and none
        with user_error(
            r"distill/model: holds no model, although its stage has finished"
        ):
            write_publication(
                recipe, None, run / "distill" / "model", run / "report", run / "publish"
            )
        assert not (run / "publish").exists()
        (
            (run / "distill" / "model").rmdir()
            if (run / "distill" / "model").exists()
            else None
        )
    (run / "distill" / "manifest.json").unlink()
    with user_error(r"no such model yet; distil it first \(`fcsd"):
        write_publication(
            recipe, None, run / "distill" / "model", run / "report", run / "publish"
        )


def test_what_is_published_is_neither_a_link_nor_changed_code(
    recipe: Recipe, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_report(recipe, list(SCORES), run / "report")
    model, family = run / "distill" / "model", FAMILIES["qwen3_moe"]
    config = read_json(model / "config.json") | {
        "model_type": "farskip_qwen3_moe",
        "num_experts": 8,
    }
    write_json(model / "config.json", config | {"auto_map": auto_map(family)})
    write_text(model / "modeling_farskip.py", "import os")
    (model / "additional_chat_templates").mkdir()
    write_text(model / "additional_chat_templates" / "tools.jinja", "x")
    write_publication(recipe, None, model, run / "report", run / "publish")
    assert (run / "publish" / "modeling_farskip.py").read_text() == modeling_source(
        family
    )
    assert (
        run / "publish" / "additional_chat_templates" / "tools.jinja"
    ).read_text() == "x"
    assert "is not what this fcsd writes for qwen3_moe" in capsys.readouterr().err
    (run / "secret").touch()
    (model / "anything").symlink_to(run / "secret")
    with user_error(r"anything: is a link to .*secret"):
        write_publication(recipe, None, model, run / "report", run / "publish")


def test_results_are_data_that_the_hubs_own_classes_read(tmp_path: Path) -> None:
    whole, _ = result("fcsd")
    whole["settings"]["suite"]["tasks"][1] |= {
        "dataset": "openai/gsm8k",
        "dataset_name": "main",
        "split": "test",
    }
    whole["tasks"]["choice"] |= {
        "metric": "exact_match,flexible-extract",
        "num_fewshot": 5,
        "revision": "c" * 40,
    }
    config = {
        "num_hidden_layers": 4,
        "farskip": {"layers": [0], "attention": "full", "mlp": "outdated"},
    }
    licence = {
        "license": "other",
        "license_name": "mine",
        "license_link": "LICENSE.txt",
    }
    facts = Facts(
        "x", config, base="some/base", licence=licence, result=whole, chat=False
    )
    write_card(facts, tmp_path)
    name, rows = model_index_to_eval_results(
        metadata_load(tmp_path / "README.md")["model-index"]
    )
    (row,) = [row for row in rows if row.dataset_type == "openai/gsm8k"]
    assert (name, row.metric_type, row.metric_value) == ("x", "exact_match", 50.0)
    assert row.metric_name == "exact match (flexible extract), per cent"
    assert (row.dataset_config, row.dataset_split, row.dataset_args) == (
        "main",
        "test",
        {"num_few_shot": 5},
    )
    entries = {
        file.stem: parse_eval_result_entries(yaml.safe_load(file.read_text()))
        for file in (tmp_path / ".eval_results").iterdir()
    }
    (entry,) = entries["choice"]
    # The task's id is that in the data set's eval.yaml, which is not the configuration.
    assert (entry.dataset_id, entry.task_id, entry.dataset_revision) == (
        "openai/gsm8k",
        "gsm8k",
        "c" * 40,
    )
    assert (entry.value, entries["code"][0].task_id) == (50.0, "default")
    card = (tmp_path / "README.md").read_text()
    assert (
        "license_link: https://huggingface.co/some/base/blob/main/LICENSE.txt" in card
    )
    assert "sandbox (landlock abi7)" in card and re.search(r"\| code +\| +pass@1", card)
    assert 'tokenizer("The main topics of linear algebra are"' in card
    assert "messages" not in card


@pytest.mark.parametrize(
    ("sides", "text"),
    [
        ({"attention": "partial", "mlp": "outdated"}, "3/4"),
        ({"attention": "partial", "mlp": "full"}, "3/4 (attention only)"),
        ({"attention": "full", "mlp": "outdated"}, "3/4 (mlp only)"),
        ({"attention": "partial", "mlp": [1, 2]}, "3/4 (mlp of 2)"),
    ],
)
def test_the_table_counts_rewired_layers_and_names_a_side_that_is_alone(
    sides: dict[str, Any], text: str, tmp_path: Path
) -> None:
    config = {"num_hidden_layers": 4, "farskip": {"layers": [0, 1, 2], **sides}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    layout: Any = SimpleNamespace(model=lambda _: tmp_path)
    assert report_module._layers(layout, "fcsd") == text


def test_a_card_says_in_which_layers_the_mlp_side_is_outdated() -> None:
    field = {"layers": [0, 1, 2], "attention": "partial"}
    equations = {
        "outdated": "m = o_(k-1)\n",
        "full": "m = o_(k-1) + attn_k(a)\n",
        (1, 2): "m = o_(k-1) in layers 1, 2; o_(k-1) + attn_k(a) in the others\n",
    }
    for mlp, equation in equations.items():
        written = mlp if isinstance(mlp, str) else list(mlp)
        config = {
            "num_hidden_layers": 4,
            "farskip": {**field, "mlp": written},
            "auto_map": {"AutoConfig": "m.C", "AutoModelForCausalLM": "m.M"},
        }
        facts = Facts("x", config, training={"stage": "convert", "settings": {}})
        assert equation in model_card(facts).text


def test_a_multimodal_card_names_its_own_classes() -> None:
    config = {
        "text_config": {"num_hidden_layers": 8},
        "farskip": {"layers": [0, 5], "attention": "partial", "mlp": "full"},
        "auto_map": {"AutoConfig": "m.C", "AutoModelForImageTextToText": "m.M", "AutoModelForMultimodalLM": "m.M"},
    }  # fmt: skip
    card = model_card(Facts("x", config, training={"stage": "convert", "settings": {}}))
    assert "import AutoModelForImageTextToText, AutoProcessor" in card.text
    assert "2 of 8 decoder layers" in card.text
    assert "Needs transformers >=5.23,<6 (made with " in card.text
    assert "processor = AutoProcessor" in card.text
    assert card.data.pipeline_tag == "image-text-to-text"
    assert "**Rewired, but not trained.**" in card.text and "What are" not in card.text


def test_the_card_names_another_teacher_adapters_and_what_was_left_out() -> None:
    config = {
        "num_hidden_layers": 4,
        "farskip": {"layers": [0], "attention": "full", "mlp": "outdated"},
    }
    training = {
        "stage": "distill",
        "inputs": {"original": "a", "teacher": "b"},
        "settings": {
            "objective": {"name": "kl"}, "lora": {"r": 16}, "train": {"learning_rate": 1e-4},
            "early_stopping": {"metric": "heldout_kl"},
        },
        "results": {"steps": 3, "best_step": 2, "decontamination": {"num_left_out": 12}},
    }  # fmt: skip
    text = model_card(Facts("x", config, training=training)).text
    assert "teacher is another checkpoint" in text and "LoRA of rank 16 merged" in text
    assert "step 2 was chosen by KL to the original on held-out text." in text
    assert "12 examples that overlap with test items were left out." in text


@pytest.mark.parametrize(
    ("model_type", "said"),
    [
        (
            "farskip_qwen3_moe",
            "`vllm serve me/x`, with the plugin fcsd-serving beside it, which is on no package index",
        ),
        ("farskip_doge", "vLLM and SGLang have no plugin for its family."),
    ],
)  # fmt: skip
def test_the_card_has_the_command_that_serves_the_model_where_there_is_one(
    model_type: str, said: str
) -> None:
    farskip = {"layers": [0], "attention": "full", "mlp": "outdated"}
    config = {"model_type": model_type, "num_hidden_layers": 4, "farskip": farskip}
    assert said in model_card(Facts("x", config, where="me/x")).text


def test_markdown_is_aligned() -> None:
    assert markdown(["a", "bb"], [["long", "1"]]).splitlines() == [
        "| a    | bb |",
        "|------|---:|",
        "| long |  1 |",
    ]


def test_many_tasks_of_few_models_stand_below_each_other() -> None:
    whole, _ = result("original")
    row = whole["tasks"]["choice"]
    models = {
        name: {
            "layers": "0",
            "training": "-",
            "result": whole | {"tasks": {f"t{i}": row for i in range(11)}},
        }
        for name in ("original", "fcsd")
    }
    lines = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in models_table(models).splitlines()
    ]
    assert lines[0] == ["model", "original", "fcsd"]
    assert lines[4] == ["t0 acc", "50.0 ± 28.9", "50.0 ± 28.9"]
    assert [line[0] for line in lines[-2:]] == ["mean", "KL to original"]


@pytest.mark.usefixtures("without_details")
def test_in_a_narrow_terminal_the_table_has_no_scores_of_tasks_and_sentences_are_wrapped(
    recipe: Recipe, run: Path
) -> None:
    for columns, has_tasks in ((200, True), (80, False)):
        printed = write_report(recipe, list(SCORES), run / "report", columns)
        lines = printed.splitlines()
        assert ("code pass@1" in lines[0]) == has_tasks
        assert lines[0].split("|")[-3:-1] == [" mean ", " KL to original "]
        assert max(map(len, lines)) <= columns
    whole = write_report(recipe, list(SCORES), run / "report")
    assert max(map(len, whole.splitlines())) > 200
    assert " ".join(whole.splitlines()[-1].split()) in " ".join(printed.split())
    assert "code pass@1" in (run / "report" / "report.md").read_text()


def test_what_is_not_known_is_a_dash() -> None:
    assert (percent(None), percent(float("nan")), percent(0.5)) == ("-", "-", "50.0")
    # A value that rounds to 0 has no sign.
    assert percent(-0.0001) == "0.0"
    assert (with_error("50.0", None), with_error("50.0", 0.01)) == (
        "50.0 ± –",
        "50.0 ± 1.0",
    )


def test_models_side_by_side_are_drawn_only_where_a_table_is_too_much(
    recipe: Recipe, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_report(recipe, list(SCORES), run / "report")
    assert not (run / "report" / "models.png").exists()
    monkeypatch.setattr(report_module, "_FEW_TASKS", 1)
    write_report(recipe, list(SCORES), run / "report")
    assert (run / "report" / "models.png").is_file()


def test_recipe_and_long_tables_are_folded(
    recipe: Recipe, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_report(recipe, list(SCORES), run / "report")
    page = (run / "report" / "report.md").read_text()
    assert re.search(
        r"<details><summary>The whole"
        r" recipe[^\n]*</summary>\n\n```yaml\n(.|\n)*```\n\n</details>\n$",
        page,
    )
    assert page.count("<details>") == 1
    for module in (report_module, comparison_module):
        monkeypatch.setattr(module, "LONG_TABLE", 2)
    write_report(recipe, list(SCORES), run / "report")
    page = (run / "report" / "report.md").read_text()
    for summary in ("Every task of every model", "converted, task by task (2 tasks)"):
        assert f"<details><summary>{summary}</summary>\n\n|" in page


def test_the_alternative_text_of_a_figure_is_its_first_sentence() -> None:
    captions = {
        "layers.png": "KL (paper Fig. 3), and alone. More of it.",
        "x.png": "One of 2.5.",
    }
    one, two = comparison_module.figure_parts(captions)
    assert one.startswith("![KL (paper Fig. 3), and alone](layers.png)\n\n")
    assert two.startswith("![One of 2.5](x.png)")


def test_guessing_gives_one_over_the_number_of_choices() -> None:
    whole, samples = result("original")
    for sample, count in zip(samples["choice"], (2, 2, 4, 4), strict=True):
        sample["loglikelihoods"] = [-1.0] * count
    assert comparison_module.chance_levels(
        {"original": {"result": whole, "samples": samples}}
    ) == {"choice": 0.375}


def test_the_last_loss_is_a_mean_over_fifty_steps_of_what_was_logged() -> None:
    points = [{"step": step, "loss": float(step)} for step in (10, 30, 60, 80)]
    assert _last_loss(points) == f"{(20 * 80 + 30 * 60) / 50:.4g} (50)"
    assert _last_loss([{"step": 100, "loss": 2.0}]) == "2 (100)"
    assert _last_loss([]) == ""


def test_the_report_says_what_a_calibration_measured_of_its_result(
    tmp_path: Path,
) -> None:
    kl = {
        "num_tokens": 3072,
        "calibrated": {"kl": 0.764, "stderr": 0.02},
        "copied": {"kl": 6.2, "stderr": None},  # of a single row
    }
    layout = RunLayout(tmp_path)

    def said(kl: Any) -> list[str]:
        write_json(
            layout.stage("calibrated") / "manifest.json",
            {"results": {"tokens": 24576, "kl": kl}},
        )
        calibrated = report_module._calibrated(["calibrated"], layout)
        assert (
            report_module._calibration(calibrated["calibrated"])
            == "none; calibrated on 24,576 tokens"
        )
        return [
            calibration_kl_text(kl)
            for kl in report_module._calibrations(calibrated).values()
        ]

    layout.stage("calibrated").mkdir(parents=True)
    text = (
        "KL to the original 0.7640 ± 0.0200 nats per token, with copied weights 6.2000,"
        " on 3,072 tokens"
    )
    assert said(kl) == [f"{text} that no map was fitted on"]
    worse = kl | {"copied": {"kl": 0.7, "stderr": 0.01}}
    assert said(worse)[0].endswith("(the calibration did not help: give more text)")
    assert said(None) == []
