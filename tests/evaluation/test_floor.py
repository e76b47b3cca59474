"""A score that random answers would get is "at the floor", and never "no loss"."""

import json
from pathlib import Path
from typing import Any

import pytest

from fcsd.base.strict import validate
from fcsd.evaluation.config import SuiteConfig
from fcsd.evaluation.results import task_result
from fcsd.evaluation.scores import at_floor, compare, floor_of
from fcsd.evaluation.suites import load_suite, suite_names
from fcsd.report.publish.card import model_index
from fcsd.report.table import models_table, narrow_table, paired_table, score_table
from fcsd.report.verdict import outcome, verdict_lines
from tests.support import ROOT, user_error


def item(number: int, score: float, choices: int = 0) -> dict[str, Any]:
    sample = {
        "doc_id": number, "doc_hash": f"d{number}", "prompt_hash": f"p{number}", "score": score,
    }  # fmt: skip
    return sample | ({"loglikelihoods": [-1.0] * choices} if choices else {})


def evaluated(**tasks: tuple[str, list[float], int]) -> dict[str, Any]:
    """Return a result and its samples. tasks: kind, scores, choices of each item."""
    rows, samples = {}, {}
    for task, (kind, scores, choices) in tasks.items():
        metric = {"likelihood": "acc,none", "code": "pass@1"}.get(kind, "exact_match,x")
        (row,) = validate(
            SuiteConfig,
            {
                "name": "own",
                "tasks": [
                    {"task": task, "kind": kind, "metric": metric, "dataset": "owner/d"}
                ],
            },
            "suite",
        ).tasks
        samples[task] = [item(n, score, choices) for n, score in enumerate(scores)]
        if row.kind == "code":
            samples[task] = [s | {"outcome": "passed"} for s in samples[task]]
        rows[task] = task_result(row, samples[task], len(scores), None)
    settings = {"limit": None}
    result = {"tasks": rows, "settings": settings, "mean": 0.5, "mean_stderr": 0.1}
    return {"result": result, "samples": samples}


def right(count: int, of: int) -> list[float]:
    return [1.0] * count + [0.0] * (of - count)


def test_the_floor_of_a_choice_is_one_in_its_number_of_answers_averaged_over_items():
    row = {"kind": "likelihood", "metric": "acc_norm,none"}
    mixed = [item(0, 1.0, 4), item(1, 0.0, 4), item(2, 0.0, 5), item(3, 1.0, 2)]
    assert floor_of(row, mixed) == pytest.approx((1 / 4 + 1 / 4 + 1 / 5 + 1 / 2) / 4)
    # Each choice has a second likelihood, without the prompt.
    mutual = row | {"metric": "acc_mutual_info,none"}
    assert floor_of(mutual, [item(0, 1.0, 8)]) == 0.25
    # One given answer is right if it is the likeliest of all texts.
    assert floor_of(row, [item(0, 1.0, 1)]) == 0
    # A share of the likelihood: what random answers get is not known.
    assert floor_of(row, [item(0, 0.4, 4), item(1, 0.5, 4)]) is None
    # A result of plain lm-eval may have no likelihoods.
    assert floor_of(row, [item(0, 1.0)]) is None


def test_what_is_written_has_the_floor_0_unless_its_suite_says_more() -> None:
    for kind in ("generation", "code"):
        row = {"kind": kind, "metric": "exact_match,x"}
        assert floor_of(row, [item(0, 1.0)]) == 0
        assert floor_of(row | {"floor": 0.25}, [item(0, 1.0)]) == 0.25
    assert (
        floor_of({"kind": "own_text", "metric": "own_text_kl"}, [item(0, 1.0)]) is None
    )
    row = {"task": "t", "kind": "generation", "metric": "exact_match,x", "dataset": "d"}
    for wrong in (1.0, -0.1, "0.25"):
        with user_error("floor"):
            validate(
                SuiteConfig,
                {"name": "own", "tasks": [row | {"floor": wrong}]},
                "own.yaml",
            )


@pytest.mark.parametrize(
    ("changes", "floor"),
    [
        ({}, 0.14),
        ({"metric": "inst_level_strict_acc,none"}, 0.0),
        ({"floor": 0.0}, 0.0),
        ({"task": "mmlu_pro", "metric": "exact_match,custom-extract"}, 0.11),
        ({"task": "mine"}, 0.0),
    ],
)
def test_a_task_that_is_named_alone_has_the_floor_of_the_shipped_suites(
    changes: dict[str, Any], floor: float
) -> None:
    """Chance's 14 % of IFEval is no score, whoever names the task."""
    row = {
        "task": "ifeval", "kind": "generation", "metric": "prompt_level_strict_acc,none", "dataset": "o/d",
    }  # fmt: skip
    suite = {"name": "mine", "tasks": [row | changes]}
    (config,) = validate(SuiteConfig, suite, "mine.yaml").tasks
    samples = [item(n, score) for n, score in enumerate(right(14, 100))]
    found = task_result(config, samples, 100, None)
    assert found["floor"] == floor
    assert at_floor(found["value"], found["stderr"], found["floor"]) == (floor > 0.08)


def test_two_standard_errors_separate_a_score_from_its_floor() -> None:
    assert at_floor(0.30, 0.03, 0.25) and not at_floor(0.32, 0.03, 0.25)
    assert at_floor(0.10, 0.03, 0.25)  # worse than random answers
    assert at_floor(0.0, 0.0, 0.0) and not at_floor(0.01, 0.0, 0.0)
    assert at_floor(0.0, None, 0.0) and not at_floor(1.0, None, 0.0)
    assert not at_floor(0.0, 0.0, None)


# Two models that both guess: 26 and 24 of 100 with four choices; and none written.
GUESSED = evaluated(
    choice=("likelihood", right(26, 100), 4), math=("generation", right(0, 50), 0)
)
GUESSED_AGAIN = evaluated(
    choice=("likelihood", [*reversed(right(24, 100))], 4),
    math=("generation", right(0, 50), 0),
)


def test_two_models_that_guess_are_at_the_floor_and_not_within_noise() -> None:
    comparison = compare(GUESSED, GUESSED_AGAIN)
    for task, floor in (("choice", 0.25), ("math", 0.0)):
        row = comparison["tasks"][task]
        assert (row["verdict"], row["floor"]) == ("at the floor", floor)
        assert row["at_floor"] == ["original", "converted"]
    assert comparison["mean"]["verdict"] == "at the floor"
    text = "\n".join(
        [
            outcome("m", comparison),
            *verdict_lines("m", comparison),
            paired_table(comparison),
            narrow_table(comparison),
        ]
    )
    assert "cannot be compared with the original" in outcome("m", comparison)
    assert (
        "At the floor, where no loss can show: choice (original 26.0, model 24.0, random"
        " answers 25.0)." in text
    )
    assert "26.0 ± 4.4 (floor)" in text and "0.0 ± 0.0 (floor)" in text
    assert "at the floor, 25.0 by random answers" in text
    assert text.count("Lost beyond noise: cannot be told, because every task is") == 1
    assert "no task" not in text
    for word in ("Within noise", "within noise", "not measurably", "92.3"):
        assert word not in text, word  # 92.3 % "retained"


def test_a_model_against_itself_at_the_floor_is_not_said_to_have_lost_nothing() -> None:
    comparison = compare(GUESSED, GUESSED)
    said = outcome("m", comparison)
    assert "cannot be compared" in said and "scores as the original does" not in said
    for line in verdict_lines("m", comparison):
        assert "At the floor, where no loss can show" in line


def test_a_loss_to_the_floor_stays_a_loss_and_says_where_it_ends() -> None:
    good = evaluated(choice=("likelihood", right(80, 100), 4))
    guessed = evaluated(choice=("likelihood", right(26, 100), 4))
    comparison = compare(good, guessed)
    assert comparison["tasks"]["choice"]["verdict"] == "lost"
    assert comparison["tasks"]["choice"]["at_floor"] == ["converted"]
    assert "lost, down to the floor" in paired_table(comparison)
    assert verdict_lines("m", comparison)[0].startswith(
        "**m**, by likelihood of given answers: the one task that counts changed by"
    )
    assert "a loss beyond noise, down to the floor" in verdict_lines("m", comparison)[0]
    assert outcome("m", comparison).startswith("**`m` is worse than the original:**")


def test_each_kind_of_task_has_its_own_mean_and_its_own_line() -> None:
    """Choice tasks that lost nothing do not hide programs and answers that did."""
    original = evaluated(
        a=("likelihood", right(80, 100), 4),
        b=("likelihood", right(70, 100), 2),
        math=("generation", right(60, 100), 0),
        code=("code", right(50, 100), 0),
    )
    converted = evaluated(
        a=("likelihood", right(80, 100), 4),
        b=("likelihood", right(69, 100), 2),
        math=("generation", right(20, 100), 0),
        code=("code", right(30, 100), 0),
    )
    comparison = compare(original, converted)
    kinds = comparison["kinds"]
    assert {kind: mean["num_tasks"] for kind, mean in kinds.items()} == {
        "likelihood": 2,
        "generation": 2,
    }
    assert kinds["likelihood"]["delta"] == pytest.approx((0 - 0.01) / 2)
    assert kinds["generation"]["delta"] == pytest.approx((-0.4 - 0.2) / 2)
    likelihood, generation = verdict_lines("m", comparison)
    assert likelihood.startswith(
        "**m**, by likelihood of given answers: the mean over 2 tasks changed by -0.5"
    )
    assert "within noise" in likelihood and "math" not in likelihood
    assert generation.startswith(
        "**m**, by what it writes: the mean over 2 tasks changed by -30.0 points"
    )
    assert "Lost beyond noise: math -40.0 (p <0.001), code -20.0" in generation


def test_choice_tasks_alone_have_not_seen_the_model_write() -> None:
    good = evaluated(choice=("likelihood", right(80, 100), 4))
    worse = evaluated(choice=("likelihood", right(78, 100), 4))
    comparison = compare(good, worse)
    unseen = "Choice tasks alone have not seen the model write"
    assert unseen in outcome("m", comparison)
    assert unseen in verdict_lines("m", comparison)[1]
    assert unseen in score_table(good["result"])
    written = evaluated(
        choice=("likelihood", right(80, 100), 4), math=("generation", right(9, 10), 0)
    )
    comparison = compare(written, written)
    for text in (
        outcome("m", comparison),
        *verdict_lines("m", comparison),
        score_table(written["result"]),
    ):
        assert unseen not in text
    assert (
        "Scored by likelihood of given answers: choice; by what it writes: math."
        in score_table(written["result"])
    )


def test_tables_of_models_and_of_one_result_mark_the_floor() -> None:
    models = {
        name: {"layers": "0", "training": "-", "result": value["result"]}
        for name, value in (("original", GUESSED), ("m", GUESSED_AGAIN))
    }
    for text in (models_table(models), score_table(GUESSED["result"])):
        assert "26.0 ± 4.4 (floor)" in text
        assert "(floor): not above the score of random answers" in text
    good = evaluated(choice=("likelihood", right(80, 100), 4))
    assert "(floor)" not in score_table(good["result"])


def test_every_shipped_suite_says_how_its_tasks_are_scored() -> None:
    of_examples = [
        path
        for path in (ROOT / "examples").rglob("*.yaml")
        if "tasks:" in path.read_text().splitlines()
    ]
    assert len(of_examples) == 1
    for name in [*suite_names(), *of_examples]:
        suite = load_suite(name)
        kinds = {row.kind for row in suite.tasks}
        words, written = " ".join(suite.description.split()), kinds - {"likelihood"}
        assert ("likelihood" in kinds) == ("by likelihood" in words), name
        assert bool(written) == ("what the model writes" in words), name
        # Guessing one of the given letters is no floor of 0.
        for row in suite.tasks:
            if row.task.startswith(("mmlu_pro", "gpqa", "bbh", "ifeval")):
                assert row.floor, row.task


def test_results_without_floors_are_still_read(tmp_path: Path) -> None:
    """Those of an earlier fcsd: the floor follows from the samples."""
    old = json.loads(json.dumps(GUESSED))
    for row in old["result"]["tasks"].values():
        del row["floor"]
    assert compare(old, old)["tasks"]["choice"]["floor"] == 0.25
    assert "26.0 ± 4.4 |" in score_table(old["result"])


def test_the_first_items_of_a_benchmark_are_not_published_as_the_benchmark() -> None:
    result = evaluated(math=("generation", right(60, 100), 0))["result"]
    result["settings"]["suite"] = {"tasks": [{"task": "math", "dataset": "a/math"}]}
    (entry,) = model_index(result) or []
    assert entry.metric_value == 60
    result["tasks"]["math"]["num_items_total"] = 541
    assert not model_index(result)
