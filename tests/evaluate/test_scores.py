import math
import random
import statistics
from typing import Any

import pytest

from fcsd.errors import UserError
from fcsd.evaluate.scores import binomial, compare, paired, plain_mean, standard_error


def samples(scores: list[float], prompt: str = "p") -> list[dict[str, Any]]:
    return [
        {"doc_id": i, "doc_hash": f"h{i}", "prompt_hash": prompt, "score": score}
        for i, score in enumerate(scores)
    ]


def result(scores: dict[str, list[float]], **row: Any) -> dict[str, Any]:
    base = {"metric": "acc,none", "num_fewshot": 0, "kind": "likelihood", "headline": True} | row
    return {
        "result": {"tasks": dict.fromkeys(scores, base)},
        "samples": {task: samples(values) for task, values in scores.items()},
    }


def test_standard_errors_are_those_of_the_statistics_module() -> None:
    scores = [random.Random(0).random() for _ in range(50)]
    assert standard_error(scores) == pytest.approx(statistics.stdev(scores) / math.sqrt(50))
    assert standard_error([1.0]) == 0.0


def test_binomial_agrees_with_the_standard_error_of_zeros_and_ones() -> None:
    share, error = binomial(7, 20)
    assert share == 0.35
    assert error == pytest.approx(standard_error([1.0] * 7 + [0.0] * 13))
    with pytest.raises(ValueError, match="not a share"):
        binomial(3, 2)


def test_plain_mean_propagates_errors_by_hand() -> None:
    assert plain_mean([(0.2, 0.03), (0.4, 0.04)]) == pytest.approx((0.3, 0.025))


def test_a_paired_comparison_by_hand() -> None:
    # 10 items: 5 right in both, 1 gained, 3 lost, 1 wrong in both
    row = paired(samples([1] * 5 + [0] + [1] * 3 + [0]), samples([1] * 5 + [1] + [0] * 3 + [0]))
    differences = [0] * 5 + [1] + [-1] * 3 + [0]
    assert (row["gained"], row["lost"], row["num_items"]) == (1, 3, 10)
    assert row["delta"] == pytest.approx(-0.2)
    assert row["delta_stderr"] == pytest.approx(statistics.stdev(differences) / math.sqrt(10))
    # exact McNemar: 2 * P(at most 1 of 4 fair coins)
    assert row["p_value"] == pytest.approx(2 * (1 + 4) / 16)
    assert row["retained_percent"] == pytest.approx(75.0)


def test_the_paired_error_ignores_what_is_hard_for_both() -> None:
    scores = [float(i % 2) for i in range(100)]
    row = paired(samples(scores), samples(scores))
    assert (row["delta"], row["delta_stderr"], row["p_value"], row["retained_percent"]) == (
        0.0,
        0.0,
        1.0,
        100.0,
    )
    assert row["original_stderr"] > 0


def test_the_order_of_the_samples_does_not_matter() -> None:
    a, b = samples([1, 0, 1, 1]), samples([0, 0, 1, 0])
    assert paired(a, b) == paired(a, b[::-1])


def test_nothing_is_retained_of_a_score_of_zero() -> None:
    assert paired(samples([0, 0]), samples([1, 0]))["retained_percent"] is None


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (samples([1, 0, 1], prompt="q"), "the prompts differ in 3 of 3 items"),
        (samples([1, 0]), "3 items against 2; evaluate both models with the same limit"),
        ([{**s, "doc_hash": "x"} for s in samples([1, 0, 1])], "the items differ .*same revision"),
        ([samples([1])[0]] * 3, "an item is listed twice"),
        ([], "no samples to compare"),
    ],
)
def test_samples_that_do_not_match_are_refused(other: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(UserError, match=f"^piqa: {message}"):
        paired(samples([1, 0, 1]), other, "piqa")


def test_a_comparison_averages_the_headline_tasks_only() -> None:
    a, b = result({"x": [1, 1], "y": [1, 0]}), result({"x": [1, 0], "y": [1, 0]})
    made = compare(a, b)
    assert made["mean"]["original"] == 0.75 and made["mean"]["converted"] == 0.5
    assert made["mean"]["delta"] == -0.25 and made["mean"]["retained_percent"] == pytest.approx(200 / 3)
    errors = [made["tasks"][task]["delta_stderr"] for task in ("x", "y")]
    assert made["mean"]["delta_stderr"] == pytest.approx(math.hypot(*errors) / 2)


def test_results_with_other_tasks_or_shots_are_refused() -> None:
    with pytest.raises(UserError, match=r"different tasks \(y\)"):
        compare(result({"x": [1]}), result({"x": [1], "y": [1]}))
    with pytest.raises(UserError, match="x: num_fewshot is 0 against 5"):
        compare(result({"x": [1]}), result({"x": [1]}, num_fewshot=5))
