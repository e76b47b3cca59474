"""An evaluation under a router bias: batch j belongs to endpoint j mod N, in one
process as on N ranks.
"""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fcsd.base.files import read_json
from fcsd.cli.main import main
from fcsd.evaluation import stage as stage_module
from fcsd.evaluation.config import EvaluationConfig, load_suite
from fcsd.evaluation.runner import prepare_evaluation
from fcsd.evaluation.steered import biased_routers
from fcsd.model.config import ModelConfig
from fcsd.model.families.routers import find_routers
from fcsd.model.load import ModelFolder
from fcsd.parallel.launch import join_launch
from fcsd.parallel.place import load_for_evaluation
from fcsd.pipeline.tiny.models import tiny_tokenizer
from fcsd.steering.routing.bias import BiasTables, router_bias, write_tables
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
    with biased_routers(model, tables_of(model, endpoints), BATCH) as batches:
        return samples_of(model, folder, launch, batches)


@pytest.mark.breadth
def test_one_process_finds_item_for_item_what_ranks_find_that_are_the_endpoints(
    place: Path,
) -> None:
    alone = steered(0, place, 2)
    first, second = run_ranks(of_one_endpoint, 2, place, 2)
    assert alone == first == second
    model = load_for_evaluation(
        ModelFolder(ModelConfig(), place / "model"), join_launch()
    )
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


def evaluated(folder: Path, output: Path, *options: str) -> int:
    """Return the exit status of the command on the one task of the suite that is soon done."""
    common = [
        "--suite",
        str(folder / "suite.yaml"),
        "--tasks",
        "t_answers",
        "--data-root",
        str(folder / "data"),
    ]
    return main(
        ["evaluate", str(folder / "model"), *common, "--output", str(output), *options]
    )


def test_the_command_keeps_results_apart_by_tables_and_batch_size(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = load_for_evaluation(
        ModelFolder(ModelConfig(), place / "model"), join_launch()
    )
    for name, size in (("a", 2.0), ("b", 3.0)):
        write_tables(tmp_path / name, tables_of(model, 2, size))
    cache, biases = ["--cache", str(tmp_path / "cache")], []
    for index, options in enumerate(
        (["--batch-size", "2"], ["--router-bias", "a", "--batch-size", "2"],
         ["--router-bias", "a", "--batch-size", "3"], ["--router-bias", "b", "--batch-size", "2"])
    ):  # fmt: skip
        words = [str(tmp_path / word) if word in "ab" else word for word in options]
        assert evaluated(place, tmp_path / str(index), *words, *cache) == 0
        biases.append(
            read_json(tmp_path / str(index) / "results.json")["settings"].get(
                "router_bias"
            )
        )
    # finished tasks, none found for another
    assert len(list((tmp_path / "cache").iterdir())) == 4
    assert biases[0] is None and biases[1] == biases[2] != biases[3]
    assert biases[1] == {
        "kind": "camoe", "strength": 1.0, "endpoints": 2, "selection": False, "sha256": biases[1]["sha256"],
    }  # fmt: skip
    capsys.readouterr()
    assert (
        evaluated(
            place,
            tmp_path / "1",
            "--router-bias",
            str(tmp_path / "b"),
            "--batch-size",
            "2",
        )
        == 2
    )
    assert (
        "was made with other settings (router_bias.sha256: " in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--batch-size", "auto"],
            "--batch-size auto: has no meaning with --router-bias",
        ),
        (
            ["--server", "http://localhost:1"],
            "all hold the same tokens; evaluate in memory, without --server",
        ),
    ],
)
def test_what_has_no_endpoint_is_refused(
    place: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    message: str,
) -> None:
    model = load_for_evaluation(
        ModelFolder(ModelConfig(), place / "model"), join_launch()
    )
    write_tables(tmp_path / "tables", tables_of(model, 2))
    assert (
        evaluated(
            place, tmp_path / "out", "--router-bias", str(tmp_path / "tables"), *options
        )
        == 2
    )
    assert message in capsys.readouterr().err
    assert (
        evaluated(place, tmp_path / "out", "--router-bias", str(tmp_path / "none")) == 2
    )
    assert "none: no such file; `fcsd bias` writes one" in capsys.readouterr().err


def test_tables_of_another_model_are_refused_before_weights_are_read(
    place: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = load_for_evaluation(
        ModelFolder(ModelConfig(), place / "model"), join_launch()
    )
    write_tables(
        tmp_path / "tables", replace(tables_of(model, 2), model_type="mixtral")
    )
    monkeypatch.setattr(stage_module, "load_for_evaluation", None)
    assert (
        evaluated(place, tmp_path / "out", "--router-bias", str(tmp_path / "tables"))
        == 2
    )
    assert (
        "the tables are of a mixtral, and the model is a qwen3_moe;"
        in capsys.readouterr().err
    )
