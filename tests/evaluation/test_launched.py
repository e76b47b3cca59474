"""`fcsd evaluate`, `layers` and `run` in a launch of two processes write what one
process writes, also after a kill.
"""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

from fcsd.base.files import read_json
from fcsd.cli.main import main
from fcsd.evaluation.lm_eval import tasks as likelihood
from fcsd.evaluation.results import read_result
from fcsd.evaluation.stage import FINISHED_TASKS
from fcsd.evaluation.suites import load_suite
from fcsd.model.connectivity import load_model
from fcsd.parallel.launch import input_device
from fcsd.pipeline.tiny.models import tiny_tokenizer
from tests.evaluation.test_ranks import place
from tests.parallel.test_engines import launch, outcomes
from tests.support import Bench, command_words, evaluate, few, in_forked_ranks

__all__ = ["place"]  # a fixture


def command(place: Path, output: Path, *more: str) -> list[str]:
    batch = () if "--batch-size" in more else ("--batch-size", "2")
    return [
        "evaluate", str(place / "model"), "--suite", str(place / "suite.yaml"), "--data-root", str(place / "data"),
        *batch, "--output", str(output), *more,
    ]  # fmt: skip


def comparable(folder: Path) -> Any:
    """Return a result without what differs between two runs of one process."""
    result, samples = read_result(folder)
    return {key: value for key, value in result.items() if key != "wall_s"}, samples


@pytest.mark.breadth
def test_an_evaluation_whose_process_was_killed_continues_with_the_next_task(
    place: Path, tmp_path: Path
) -> None:
    def killed_in_the_second_task(rank: int) -> int:
        run = likelihood.run_task

        def deadly(wrapper: Any, row: Any, *rest: Any) -> Any:
            if rank == 1 and row.task == "t_answers":
                os.kill(os.getpid(), signal.SIGKILL)
            return run(wrapper, row, *rest)

        likelihood.run_task = deadly  # a fork of its own
        return main(command(place, tmp_path / "out"))

    (status, text), (second, _) = in_forked_ranks(
        killed_in_the_second_task, 2, tmp_path
    )
    assert status not in (0, -signal.SIGKILL) and second == -signal.SIGKILL
    assert "rank 1 of 2 ended without an error: killed" in text
    assert len(list((tmp_path / "out" / FINISHED_TASKS).iterdir())) == 1

    (status, first), (other, second) = in_forked_ranks(
        lambda _: main(command(place, tmp_path / "out")), 2, tmp_path
    )
    assert (status, other) == (0, 0), first + second
    assert "[2/4] t_answers: 5 items\n" in first and "t_group:" not in first
    assert first.count("[3/4] t_code") == 1 and first.count("| t_group ") == 1
    assert "t_code" not in second and "t_group" not in second
    assert main(command(place, tmp_path / "one")) == 0
    assert comparable(tmp_path / "out") == comparable(tmp_path / "one")
    assert not (tmp_path / "out" / FINISHED_TASKS).exists()


@pytest.mark.breadth
def test_expert_parallel_processes_evaluate_as_one(place: Path, tmp_path: Path) -> None:
    assert main(command(place, tmp_path / "one", "--limit", "2")) == 0
    assert launch(
        "cpu_2_ep",
        command(place, tmp_path / "ep", "--limit", "2", "--expert-parallel", "2"),
    ) == [0]
    one, other = (
        read_json(tmp_path / name / "results.json")["tasks"] for name in ("one", "ep")
    )
    assert one == other and one["t_group"]["num_items"] == 4


@pytest.mark.parametrize(
    ("config", "more", "message"),
    [
        ("cpu_2", ["--device-map", "auto"], "--device-map: works with one process"),
        ("cpu_2_fsdp2", ["--batch-size", "auto"], "shards the weights over 2; give a number"),
    ],
)  # fmt: skip
def test_a_wrong_argument_is_refused_by_all_processes_and_printed_by_one(
    place: Path, tmp_path: Path, config: str, more: list[str], message: str
) -> None:
    endings = [
        rank[0] for rank in outcomes(config, command(place, tmp_path / "out", *more))
    ]
    assert [status for status, _ in endings] == [2, 2]
    assert sum(message in text for _, text in endings) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("engine", few(["fsdp2", "ep"], 1))
def test_a_run_spread_over_two_ranks_leaves_the_results_of_one_process(
    bench: Bench, place: Path, engine: str
) -> None:
    """Covers all stages, including the KL to the original, under FSDP2 and expert
    parallelism.
    """
    parallel = ["--expert-parallel", "2"] if engine == "ep" else []
    rows = yaml.safe_load((place / "suite.yaml").read_text())["tasks"][:2]
    (place / "short.yaml").write_text(yaml.safe_dump({"name": "short", "tasks": rows}))
    changes: dict[str, Any] = {
        "data": {
            "train": [{"path": str(bench.rows)}], "heldout": {"path": str(bench.rows)}, "heldout_examples": 3,
            "max_length": 32,
        },
        "evaluation": {"suite": str(place / "short.yaml"), "data_root": str(place / "data"), "batch_size": 2},
    }  # fmt: skip

    def whole(name: str, *more: str) -> list[str]:
        recipe = command_words(
            "run", bench.recipe(name, **changes), "--set train.max_steps=2"
        )
        return [*recipe, "--set", "evaluation.layer_study=true", *more]

    assert main(whole("one")) == 0
    assert launch(f"cpu_2_{engine}", whole(engine, *parallel)) == [0]
    for name in ("original", "converted", "fcsd"):
        (a, samples), (b, others) = (
            read_result(bench.folder / each / "evaluate" / name)
            for each in ("one", engine)
        )
        assert a["kl_to_original"]["kl"] == pytest.approx(
            b["kl_to_original"]["kl"], rel=0.01, abs=1e-6
        )
        for task, items in samples.items():
            assert [each["doc_hash"] for each in items] == [
                each["doc_hash"] for each in others[task]
            ]
        if name != "fcsd":  # trained in another order of sums
            assert [task["value"] for task in a["tasks"].values()] == [
                task["value"] for task in b["tasks"].values()
            ]
        assert (bench.folder / engine / "report" / "report.md").is_file()
        assert (bench.folder / engine / "publish" / "README.md").is_file()
    # A layer study rewires whole copies: it is postponed, and the same recipe in one
    # process adds it.
    points = read_json(bench.folder / "one" / "layers" / "layers.json")["points"]
    assert not (bench.folder / engine / "layers").exists()
    assert main(whole(engine)) == 0
    assert (
        read_json(bench.folder / engine / "report" / "report.json")["layers"]["points"]
        == points
    )


def test_a_layer_study_of_two_copies_leaves_the_bytes_of_one_process_and_is_refused_for_parts(
    bench: Bench, place: Path, tmp_path: Path
) -> None:
    base = [
        "layers", str(bench.base), "--text", str(bench.rows), "--text-examples", "5", "--max-length", "32",
        "--sides", "last",
    ]  # fmt: skip
    assert launch("cpu_2", [*base, "--output", str(tmp_path / "two")]) == [0]
    assert main([*base, "--output", str(tmp_path / "one")]) == 0
    one, two = (
        json.loads((tmp_path / name / "layers.json").read_text())
        for name in ("one", "two")
    )
    assert one == two and len(one["points"]) == 2
    endings = [
        rank[0]
        for rank in outcomes(
            "cpu_2_fsdp2", [*base, "--output", str(tmp_path / "parts")]
        )
    ]
    assert [status for status, _ in endings] == [2, 2]
    assert sum("rewires whole copies of the model" in text for _, text in endings) == 1


@pytest.mark.breadth
def test_a_model_whose_weights_are_brought_to_the_device_layer_by_layer_is_scored_the_same(
    place: Path, tmp_path: Path
) -> None:
    """This is what --device-map auto does with weights that do not fit; here all
    weights are on disk.
    """
    suite = load_suite(place / "suite.yaml")
    suite.tasks[:] = suite.tasks[:3]
    made = []
    for options in (
        {},
        {
            "device_map": "auto",
            "max_memory": {"cpu": 100_000},
            "offload_folder": tmp_path / "off",
        },
    ):
        model = load_model(place / "model", **options)
        result, samples = evaluate(
            model,
            tiny_tokenizer(),
            suite,
            data_root=place / "data",
            batch_size=3,
            progress=False,
        )
        made.append((result["tasks"], samples))
    assert model.device.type == "meta" and input_device(model).type == "cpu"
    assert made[0] == made[1]
