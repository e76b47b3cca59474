"""A bad step on one rank of two is skipped on both, under every engine."""

import os
import warnings
from pathlib import Path
from typing import Any

import pytest

from fcsd.training.run import train
from tests.parallel.test_engines import ENGINES, environment
from tests.reference.ranks import run_ranks
from tests.support import ROOT, few
from tests.training.test_safety import events, in_order, run, same, spoil, teacher

__all__ = ["in_order", "teacher"]  # the fixtures

PLAN: dict[str, Any] = {"learning_rate": 1e-4, "save_steps": 3}


def trained(rank: int, variables: dict[str, str], folder: Path, model: Any) -> Any:
    os.environ.update(variables)
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")  # DeepSpeed's
        train(*run(folder / "without", model, [0, 1, 3, 4], max_steps=4, **PLAN))
        # The first row of the second rank's micro-batch.
        spoil(patch, {2}, "inf")
        return train(
            *run(folder / "guarded", model, list(range(5)), max_steps=5, **PLAN)
        )


@pytest.mark.parametrize("engine", few([*ENGINES, "copies"], 1))
def test_what_goes_wrong_on_the_second_rank_is_skipped_on_both(
    tmp_path: Path, teacher: Any, engine: str
) -> None:
    config = (
        ROOT
        / "configs"
        / ("cpu_2.yaml" if engine == "copies" else f"cpu_2_{engine}.yaml")
    )
    variables = environment(config) | {"DS_ACCELERATOR": "cpu"}
    results = run_ranks(trained, 2, variables, tmp_path, teacher)
    assert results[0] == results[1]
    assert {"steps": 5, "skipped_steps": 1}.items() <= results[0].items()
    (skipped,) = events(tmp_path / "guarded")
    assert (skipped["step"], skipped["steps"], skipped["ranks"]) == (3, 1, [1])
    assert same(tmp_path / "without", tmp_path / "guarded")
