"""An evaluation under a router bias: batch j belongs to endpoint j mod N, in one
process as on N ranks.
"""

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fcsd import compare
from fcsd.base.files import read_json
from fcsd.cli.main import main as fcsd_main
from fcsd.evaluation.config import EvaluationConfig
from fcsd.evaluation.lm_eval import tasks as likelihood
from fcsd.evaluation.runner import prepare_evaluation
from fcsd.evaluation.suites import load_suite
from fcsd.model.config import ModelConfig
from fcsd.model.families.routers import find_routers
from fcsd.model.load import ModelFolder
from fcsd.parallel.launch import join_launch
from fcsd.parallel.place import load_for_evaluation
from fcsd.pipeline.tiny.models import tiny_tokenizer
from fcsd_steering.cli import main
from fcsd_steering.evaluate import biased_routers
from fcsd_steering.routing.bias import BiasTables, router_bias, write_tables
from tests.evaluation.test_ranks import BATCH, place
from tests.reference.ranks import run_ranks

__all__ = ["place"]  # the fixture


def tables_of(model: Any, num_endpoints: int, size: float = 2.0) -> BiasTables:
    """Random tables, large enough to change choices."""
    routers = find_routers(model)
    shape = (len(routers), num_endpoints, routers[0].num_experts)
    return BiasTables(
        kind="camoe",
        strength=1.0,
        selection=False,
        layers=tuple(router.layer for router in routers),
        tables=(size * np.random.default_rng(0).standard_normal(shape)).astype(
            np.float32
        ),
        placement=np.tile(np.arange(shape[2]) % num_endpoints, (len(routers), 1)),
        model_type=model.config.model_type.removeprefix("farskip_"),
        num_hidden_layers=model.config.num_hidden_layers,
    )


def model_of(place: Path) -> Any:
    """Load the model of the fixture `place`."""
    folder = ModelFolder(ModelConfig(), place / "model")
    return load_for_evaluation(folder, join_launch())


def samples_of(model: Any, folder: Path, launch: Any, batches: Any = None) -> Any:
    """Return the samples of the suite beside the model."""
    config = EvaluationConfig(data_root=str(folder / "data"), batch_size=BATCH)
    suite = load_suite(folder / "suite.yaml")
    with prepare_evaluation(
        tiny_tokenizer(), suite, config, progress=False, ranks=launch.ranks
    ) as evaluate:
        return evaluate(model, "model", batches)[1]


def of_one_endpoint(rank: int, folder: Path, endpoints: int) -> Any:
    """Return what a rank finds that is an endpoint: its bias never changes, and nothing
    tells it of batches.
    """
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ.setdefault("RANK", str(rank))
    launch = join_launch().for_evaluation()
    model = load_for_evaluation(ModelFolder(ModelConfig(), folder / "model"), launch)
    with router_bias(model, tables_of(model, endpoints)) as steering:
        steering.endpoint = rank
        return samples_of(model, folder, launch)


def steered(rank: int, folder: Path, endpoints: int) -> Any:
    """Return what a rank finds of any number of ranks, told which batch it asks."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    launch = join_launch().for_evaluation()
    model = load_for_evaluation(ModelFolder(ModelConfig(), folder / "model"), launch)
    with biased_routers(model, tables_of(model, endpoints)) as batches:
        return samples_of(model, folder, launch, batches)


@pytest.mark.breadth
def test_one_process_finds_item_for_item_what_ranks_find_that_are_the_endpoints(
    place: Path,
) -> None:
    alone = steered(0, place, 2)
    first, second = run_ranks(of_one_endpoint, 2, place, 2)
    assert alone == first == second
    model = model_of(place)
    unbiased = samples_of(model, place, join_launch())
    # each task would notice a bias that is left out
    for task, items in unbiased.items():
        assert items != alone[task]


@pytest.mark.breadth
def test_the_number_of_ranks_changes_nothing_when_it_is_not_the_number_of_endpoints(
    place: Path,
) -> None:
    first, second = run_ranks(steered, 2, place, 3)
    assert first == second == steered(0, place, 3)


def evaluated(folder: Path, output: Path, tables: Path, *options: Any) -> int:
    """Return the exit status of the command on the one task of the suite that is soon done."""
    common = [
        "--suite", str(folder / "suite.yaml"), "--task", "t_answers", "--data-root", str(folder / "data"),
    ]  # fmt: skip
    words = ["evaluate", str(folder / "model"), str(tables), *common]
    return main([*words, "--output", str(output), *options])


def test_results_say_by_which_tables_and_batch_size_they_came(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = model_of(place)
    for name, size in (("a", 2.0), ("b", 3.0)):
        write_tables(tmp_path / name, tables_of(model, 2, size))
    settings = []
    for index, (name, batch_size) in enumerate((("a", 2), ("a", 3), ("b", 2))):
        out = tmp_path / str(index)
        batch = ["--batch-size", str(batch_size)]
        assert evaluated(place, out, tmp_path / name, *batch) == 0
        settings.append(read_json(out / "results.json")["settings"])
    biases = [each["router_bias"] for each in settings]
    assert biases[0] == biases[1] != biases[2]
    assert biases[0].startswith("camoe 1 over 2 endpoints, tables ")
    assert [each["batch_size"] for each in settings] == [2, 3, 2]
    # `fcsd compare` reads them, and says what differs.
    text = str(compare(tmp_path / "0", tmp_path / "2"))
    assert f"router bias: {biases[0]} (" in text
    capsys.readouterr()
    assert evaluated(place, tmp_path / "3", tmp_path / "none") == 2
    missing = "none: no such file; write one with `fcsd-steer bias`"
    assert missing in capsys.readouterr().err


def test_an_evaluation_that_was_cut_off_continues_and_no_other_takes_its_folder(
    place: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = model_of(place)
    for name, size in (("a", 2.0), ("b", 3.0)):
        write_tables(tmp_path / name, tables_of(model, 2, size))
    asked, run_task = list[str](), likelihood.run_task

    def until_the_second(language_model: Any, row: Any, *items: Any) -> Any:
        asked.append(row.task)
        if len(asked) == 2:
            raise KeyboardInterrupt
        return run_task(language_model, row, *items)

    monkeypatch.setattr(likelihood, "run_task", until_the_second)
    words = [tmp_path / "out", tmp_path / "a", "--batch-size", "2", "--task", "t_group"]
    assert evaluated(place, *words) == 130
    first, second = asked
    assert evaluated(place, *words) == 0
    assert asked == [first, second, second]
    assert list((tmp_path / "out").glob("samples_*.jsonl"))
    assert not (tmp_path / "out" / "finished-tasks").exists()
    # In one go, and without a folder of finished tasks, the same comes out.
    assert evaluated(place, tmp_path / "whole", *words[1:]) == 0
    both = [read_json(tmp_path / name / "results.json") for name in ("out", "whole")]
    assert both[0]["tasks"] == both[1]["tasks"]
    # A finished one is not asked again.
    asked.clear()
    assert evaluated(place, *words) == 0 and asked == []
    capsys.readouterr()
    assert evaluated(place, words[0], tmp_path / "b", *words[2:]) == 2
    message = capsys.readouterr().err
    assert "was made with other settings (router_bias: " in message


def test_the_same_weights_with_another_connectivity_are_another_model(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = model_of(place)
    write_tables(tmp_path / "a", tables_of(model, 2))
    words = [tmp_path / "out", tmp_path / "a", "--batch-size", "2"]
    assert evaluated(place, *words) == 0
    shutil.copytree(place, tmp_path / "place")
    regular = tmp_path / "place" / "regular"
    assert fcsd_main(["unconvert", str(tmp_path / "place/model"), str(regular)]) == 0
    shutil.rmtree(tmp_path / "place" / "model")
    regular.rename(tmp_path / "place" / "model")
    capsys.readouterr()
    assert evaluated(tmp_path / "place", *words) == 2
    assert "model, its configuration" in capsys.readouterr().err


def test_own_text_is_refused_where_no_original_is_loaded(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The steered model would count as its own original, with a divergence of 0."""
    write_tables(tmp_path / "tables", tables_of(model_of(place), 2, 2.0))
    words = [
        "evaluate",
        place / "model",
        tmp_path / "tables",
        "--output",
        tmp_path / "out",
    ]
    words += ["--suite", "paper11_own_text", "--task", "own_text"]
    assert main([str(word) for word in words]) == 2
    assert "suite paper11_own_text: has own text" in capsys.readouterr().err


def test_tables_of_another_model_are_refused_before_weights_are_read(
    place: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = model_of(place)
    other = replace(tables_of(model, 2), model_type="mixtral")
    write_tables(tmp_path / "tables", other)
    monkeypatch.setattr("fcsd.parallel.place.load_for_evaluation", None)
    assert evaluated(place, tmp_path / "out", tmp_path / "tables") == 2
    message = "the tables belong to a mixtral, but the model is a qwen3_moe;"
    assert message in capsys.readouterr().err
