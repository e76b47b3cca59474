"""A capacity in an evaluation: one sequence per pass, recorded in the settings, the
same scores on two ranks.
"""

import os
from pathlib import Path
from typing import Any

import pytest

from fcsd.base.strict import validate
from fcsd.cli.main import main
from fcsd.evaluation.config import EvaluationConfig
from fcsd.evaluation.runner import prepare_evaluation
from fcsd.evaluation.suites import load_suite
from fcsd.model.config import ModelConfig
from fcsd.model.load import ModelFolder
from fcsd.parallel.launch import join_launch
from fcsd.parallel.place import load_for_evaluation
from fcsd.pipeline.tiny.models import tiny_tokenizer
from fcsd.report.comparison import differing_settings
from tests.evaluation.test_ranks import place
from tests.reference.ranks import run_ranks
from tests.support import command_words, user_error

__all__ = ["place"]  # the fixture


def evaluated(rank: int, folder: Path, factor: float | None) -> Any:
    """Return result and samples of the suite beside the model."""
    os.environ.setdefault("RANK", str(rank))
    launch = join_launch().for_evaluation()
    model = load_for_evaluation(
        ModelFolder(ModelConfig(path=str(folder / "model")), folder / "model"), launch
    )
    config = EvaluationConfig(
        data_root=str(folder / "data"), batch_size=1, capacity_factor=factor
    )
    suite = load_suite(folder / "suite.yaml")
    # likelihoods and answers
    suite = suite.model_copy(update={"tasks": suite.tasks[:2]})
    with prepare_evaluation(
        tiny_tokenizer(), suite, config, progress=False, ranks=launch.ranks
    ) as evaluate:
        return evaluate(model, "model")


@pytest.mark.breadth
def test_two_ranks_have_the_scores_and_the_share_of_one_process(place: Path) -> None:
    ((result, samples),) = run_ranks(evaluated, 1, place, 0.5)
    ((_, without),) = run_ranks(evaluated, 1, place, None)
    assert samples != without
    assert (
        result["settings"]["capacity_factor"],
        result["settings"]["capacity_drop"],
    ) == (0.5, "order")
    assert 0.2 < result["settings"]["dropped_share"] < 0.8
    for other, others in run_ranks(evaluated, 2, place, 0.5):
        assert others == samples
        assert other["settings"]["dropped_share"] == result["settings"]["dropped_share"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--capacity-factor", "1.5"], "capacity_factor: needs batch_size 1, not 16"),
        (["--capacity-factor", "-1", "--batch-size", "1"], "--capacity-factor: Input should be greater than 0, got -1"),
        (["--capacity-drop", "weight"], "capacity_drop: 'weight' has no meaning without capacity_factor"),
    ],
)  # fmt: skip
def test_a_capacity_that_has_no_meaning_is_one_line(
    place: Path,
    tmp_path: Path,
    options: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = command_words(
        "evaluate",
        place / "model",
        "--suite",
        place / "suite.yaml",
        "--output",
        tmp_path,
    )
    assert main([*command, "--data-root", str(place / "data"), *options]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert message in error and not (tmp_path / "results.json").exists()


def test_a_recipe_is_refused_where_its_sections_do_not_go_together() -> None:
    values = {"capacity_factor": 1.0, "batch_size": 1}
    assert validate(EvaluationConfig, values, "r").capacity == {
        "capacity_factor": 1.0,
        "capacity_drop": "order",
    }
    for more in (
        {"server": {"url": "http://localhost:8000"}},
        {"layer_study": {"tasks": ["a"]}},
        {"batch_size": 2},
    ):
        with user_error(r"^r: evaluation: capacity_factor: |^r: .*capacity_factor: "):
            validate(EvaluationConfig, values | more, "r")


def test_a_comparison_names_the_capacity_that_one_side_has() -> None:
    settings = {"limit": None, "versions": {}}
    other = settings | {"capacity_factor": 1.25, "capacity_drop": "weight"}
    evaluated = {
        "a": {"result": {"settings": settings}},
        "b": {"result": {"settings": other}},
    }
    assert "capacity factor: none (a), 1.25 by weight (b)" in differing_settings(
        evaluated
    )
