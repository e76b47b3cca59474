import math
import random
import statistics
from typing import Any

import numpy
import pytest
from scipy import stats

from fcsd.base.stats import holm, plain_mean, pooled_standard_error, standard_error
from fcsd.evaluation.scores import compare, paired
from fcsd.report.verdict import task_verdict
from tests.support import user_error


def samples(scores: list[float], prompt: str = "p") -> list[dict[str, Any]]:
    return [
        {"doc_id": i, "doc_hash": f"h{i}", "prompt_hash": prompt, "score": score}
        for i, score in enumerate(scores)
    ]


def result(scores: dict[str, list[float]], **row: Any) -> dict[str, Any]:
    base = {
        "metric": "acc,none", "num_fewshot": 0, "kind": "likelihood", "headline": True,
    } | row  # fmt: skip
    return {
        "result": {"tasks": dict.fromkeys(scores, base), "settings": {"limit": None}},
        "samples": {task: samples(values) for task, values in scores.items()},
    }


def test_standard_errors_are_those_of_the_statistics_module() -> None:
    scores = [random.Random(0).random() for _ in range(50)]
    assert standard_error(scores) == pytest.approx(
        statistics.stdev(scores) / math.sqrt(50)
    )
    assert standard_error([1.0]) is None


def test_the_standard_error_of_a_group_is_lm_evals() -> None:
    from lm_eval.api.metrics import pooled_sample_stderr

    rng = random.Random(1)
    groups = [
        [float(rng.random() < share) for _ in range(n)]
        for share, n in ((0.2, 7), (0.9, 40), (0.5, 2))
    ]
    expected = pooled_sample_stderr(
        [standard_error(group) or 0.0 for group in groups], [7, 40, 2]
    )
    assert pooled_standard_error(groups) == pytest.approx(float(expected))
    assert pooled_standard_error([[1.0, 0.0], [1.0]]) is None, (
        "one item has no variance within"
    )


def test_holm_multiplies_the_smallest_p_by_their_number_and_never_falls() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.7]) == [1.0, 1.0] and holm([]) == [] and holm([0.2]) == [0.2]


def test_plain_mean_propagates_errors_by_hand() -> None:
    assert plain_mean([(0.2, 0.03), (0.4, 0.04)]) == pytest.approx((0.3, 0.025))
    assert plain_mean([(0.2, 0.03), (0.4, None)])[1] is None, (
        "one item says nothing about its error"
    )


def test_a_paired_comparison_by_hand() -> None:
    # 10 items: 5 right in both, 1 gained, 3 lost, 1 wrong in both
    row = paired(
        samples([1] * 5 + [0] + [1] * 3 + [0]), samples([1] * 5 + [1] + [0] * 3 + [0])
    )
    differences = [0] * 5 + [1] + [-1] * 3 + [0]
    assert (row["gained"], row["lost"], row["num_items"]) == (1, 3, 10)
    assert row["delta"] == pytest.approx(-0.2)
    assert row["delta_stderr"] == pytest.approx(
        statistics.stdev(differences) / math.sqrt(10)
    )
    # exact McNemar: 2 * P(at most 1 of 4 fair coins)
    assert row["p_value"] == pytest.approx(2 * (1 + 4) / 16)
    # Bonett and Price: one item more gained and one lost, so 2 and 4 of 12; 2.179 is
    # Student's t of 12 at 97.5 %
    half = 2.1788 * math.sqrt(2 + 4 - 2.0**2 / 12) / 12
    assert row["interval"] == pytest.approx([-2 / 12 - half, -2 / 12 + half], rel=1e-4)
    assert row["retained_percent"] == pytest.approx(75.0)


def test_the_paired_error_ignores_what_is_hard_for_both() -> None:
    scores = [float(i % 2) for i in range(100)]
    row = paired(samples(scores), samples(scores))
    assert (
        row["delta"], row["delta_stderr"], row["p_value"], row["retained_percent"],
    ) == (
        0.0, 0.0, 1.0, 100.0,
    )  # fmt: skip
    assert row["original_stderr"] > 0


def test_interval_and_errors_agree_with_a_bootstrap_over_items() -> None:
    rng = numpy.random.default_rng(0)
    tasks = {}
    for task, count in (("x", 400), ("y", 900)):
        before = rng.random(count) < 0.7
        after = numpy.where(rng.random(count) < 0.15, rng.random(count) < 0.4, before)
        tasks[task] = (before.astype(float), after.astype(float))
    sides = [
        result({task: list(map(float, both[side])) for task, both in tasks.items()})
        for side in (0, 1)
    ]
    made = compare(sides[0], sides[1])
    drawn = {}
    for task, (before, after) in tasks.items():
        picks = rng.integers(0, len(before), size=(4000, len(before)))
        drawn[task] = (after - before)[picks].mean(axis=1)
    for row, values in (
        (made["tasks"]["x"], drawn["x"]),
        (made["tasks"]["y"], drawn["y"]),
        (made["mean"], (drawn["x"] + drawn["y"]) / 2),
    ):
        assert row["delta_stderr"] == pytest.approx(values.std(), rel=0.05)
        assert row["interval"] == pytest.approx(
            list(numpy.quantile(values, [0.025, 0.975])), abs=0.004
        )
    unpaired = (
        math.hypot(*(made["tasks"][task]["original_stderr"] for task in tasks)) / 2
    )
    assert made["mean"]["delta_stderr"] < unpaired, (
        "what both find hard cancels in the mean, too"
    )


def test_fractional_scores_get_students_interval_and_a_sign_test() -> None:
    rng = random.Random(3)
    before = [rng.randrange(11) / 10 for _ in range(12)]  # pass@k of ten samples
    after = [min(1.0, score + rng.choice((0.0, 0.1, 0.3))) for score in before]
    row = paired(samples(before), samples(after))
    reference = stats.ttest_rel(after, before).confidence_interval(0.95)
    assert row["interval"] == pytest.approx([reference.low, reference.high])
    assert row["p_value"] == pytest.approx(2 * 0.5 ** row["gained"])
    assert row["lost"] == 0


def test_two_models_own_texts_are_compared_by_a_paired_t_test() -> None:
    """Nearly all texts change, and half of them for the better: the sizes tell."""
    rng = random.Random(0)
    before = [rng.uniform(0.2, 0.6) for _ in range(40)]
    after = [b + (-0.2 if n % 2 else 0.05) * rng.random() for n, b in enumerate(before)]
    rows = []
    for values in (before, after):
        of_side = result({"own": values}, kind="own_text", headline=False)
        for sample in of_side["samples"]["own"]:
            sample |= {
                "by_length": {}, "nats": 2.0, "original_nats": 2.0, "repeated_4grams": 0.0, "ended": True,
                "greedy_repeated_4grams": 0.0, "tokens": [1], "greedy_equal": 1, "greedy_longest": 1,
            }  # fmt: skip
        rows.append(of_side)
    row = compare(*rows)["tasks"]["own"]
    expected = stats.ttest_rel(after, before).pvalue
    assert row["p_value"] == pytest.approx(expected) and expected < 0.05
    assert (row["gained"], row["lost"], row["verdict"]) == (20, 20, "gained")
    assert compare(*rows[::-1])["tasks"]["own"]["verdict"] == "lost"


def test_a_mean_that_fell_is_no_gain_however_many_items_gained() -> None:
    """35 of 40 items gain a hundredth and 5 lose a half: p is below 0.001, and the mean
    falls by 5.4 points.
    """
    a = result({"x": [0.5] * 40})
    b = result({"x": [0.51] * 35 + [0.0] * 5})
    row = compare(a, b)["tasks"]["x"]
    assert row["p_holm"] < 0.001 and row["delta"] == pytest.approx(-2.15 / 40)
    assert row["verdict"] == "within noise"
    assert (
        task_verdict(row)
        == "within noise, because most changed items moved against the mean"
    )
    assert compare(b, a)["tasks"]["x"]["verdict"] == "within noise"


def test_one_item_and_no_change_do_not_pass_for_certainty() -> None:
    one = paired(samples([1.0]), samples([1.0]))
    assert (one["delta"], one["delta_stderr"], one["p_value"]) == (0.0, None, 1.0)
    assert one["interval"][0] < -0.6 and one["interval"][1] > 0.6
    assert paired(samples([0.5]), samples([0.3]))["interval"] is None
    same = paired(samples([1.0, 0.0] * 50), samples([1.0, 0.0] * 50))
    # about 3 of 100 items
    assert same["interval"] == pytest.approx([-0.0275, 0.0275], abs=1e-4)
    made = compare(result({"x": [0.5]}), result({"x": [0.3]}))
    assert made["mean"]["interval"] is None
    assert made["mean"]["verdict"] == "within noise"
    assert made["mean"]["delta_stderr"] is None


def test_three_tasks_all_lost_have_a_mean_whose_interval_reaches_all() -> None:
    made = compare(
        *(result({task: [share] * 20 for task in "xyz"}) for share in (1.0, 0.0))
    )["mean"]
    assert made["delta"] == made["interval"][0] == -1.0
    assert -0.9 < made["interval"][1] < -0.8


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
)  # fmt: skip
def test_samples_that_do_not_match_are_refused(
    other: list[dict[str, Any]], message: str
) -> None:
    with user_error(f"^piqa: {message}"):
        paired(samples([1, 0, 1]), other, "piqa")


def test_a_comparison_averages_the_headline_tasks_only() -> None:
    a, b = result({"x": [1, 1], "y": [1, 0]}), result({"x": [1, 0], "y": [1, 0]})
    made = compare(a, b)
    assert made["mean"]["original"] == 0.75 and made["mean"]["converted"] == 0.5
    assert made["mean"]["delta"] == -0.25
    assert made["mean"]["retained_percent"] == pytest.approx(200 / 3)
    errors = [made["tasks"][task]["delta_stderr"] for task in ("x", "y")]
    assert made["mean"]["delta_stderr"] == pytest.approx(math.hypot(*errors) / 2)


def test_the_verdict_is_for_all_tasks_together() -> None:
    kept = {f"t{i}": [1.0, 0.0] * 5 for i in range(9)}
    a = result(
        kept | {"worse": [1.0] * 10, "much_worse": [1.0] * 12, "better": [0.0] * 20}
    )
    b = result(
        kept
        | {
            "worse": [0.0] * 7 + [1.0] * 3,
            "much_worse": [0.0] * 12,
            "better": [1.0] * 20,
        }
    )
    rows = compare(a, b)["tasks"]
    assert rows["worse"]["p_value"] < 0.05 < rows["worse"]["p_holm"], (
        "one of twelve so small is no surprise"
    )
    assert rows["much_worse"]["p_holm"] == pytest.approx(11 * 2 / 2**12)
    assert {
        task: row["verdict"]
        for task, row in rows.items()
        if row["verdict"] != "within noise"
    } == {"much_worse": "lost", "better": "gained"}


def test_results_with_other_tasks_are_refused_and_compared_where_they_agree() -> None:
    a, b = (
        result({"x": [1, 0], "z": [1, 1]}),
        result({"z": [1, 0], "y": [1, 1], "x": [1, 1]}),
    )
    with user_error(
        r"different tasks \(y in one only\); .* or compare .* `fcsd compare --tasks"
        r" x,z` \(in Python: tasks=\['x', 'z'\]\)"
    ):
        compare(a, b)
    with user_error(r"^task y: not in both results; both have x, z$"):
        compare(a, b, ["y"])
    made = compare(a, b, ["z", "x"])
    assert list(made["tasks"]) == ["x", "z"] and made["mean"]["num_tasks"] == 2


def test_the_mean_of_one_task_has_the_verdict_of_the_task() -> None:
    made = compare(
        result({"x": [1.0] * 11 + [0.0] * 3}), result({"x": [0.0] * 11 + [1.0] * 3})
    )
    assert made["tasks"]["x"]["p_value"] == pytest.approx(2 * 470 / 2**14)
    assert made["mean"]["interval"][1] < 0
    assert made["mean"]["verdict"] == made["tasks"]["x"]["verdict"] == "within noise"


def test_what_is_no_headline_has_no_mean() -> None:
    a = result({"x": [1, 0]}, headline=False)
    assert compare(a, a)["mean"] is None


@pytest.mark.parametrize(
    ("row", "settings", "suite_row", "message"),
    [
        ({"num_fewshot": 5}, {}, {}, "^x: num_fewshot is 0 against 5; evaluate both the same way$"),
        ({"metric": "acc_norm,none"}, {}, {}, "^x: metric is acc,none against acc_norm,none"),
        ({"chat_template": True}, {}, {}, "^x: chat_template is False against True"),
        ({}, {}, {"max_new_tokens": 512}, "^x: max_new_tokens is 256 against 512"),
        ({}, {}, {"temperature": 0.8}, "^x: temperature is 0.0 against 0.8"),
        ({}, {}, {"thinking": True}, "^x: thinking is False against True"),
    ],
)  # fmt: skip
def test_a_task_that_was_asked_or_answered_otherwise_is_refused(
    row: dict[str, Any],
    settings: dict[str, Any],
    suite_row: dict[str, Any],
    message: str,
) -> None:
    own = {
        "task": "x", "max_new_tokens": 256, "temperature": 0.0, "stop": None, "thinking": None,
    }  # fmt: skip
    a, b = (result({"x": [1, 0]}, chat_template=False) for _ in range(2))
    a["result"]["settings"]["suite"] = {"tasks": [own]}
    b["result"]["settings"] |= {"suite": {"tasks": [own | suite_row]}} | settings
    b["result"]["tasks"]["x"] = b["result"]["tasks"]["x"] | row
    with user_error(message):
        compare(a, b)


@pytest.mark.parametrize(
    ("change", "settings", "row", "message"),
    [
        ("drop", {"limit": 1}, {}, r"^x: 2 items against 1; .* \(recorded: limit None against 1\)$"),
        ("items", {}, {"revision": "b"}, r"^x: the items differ .* \(recorded: revision a against b\)$"),
        (
            "prompts", {"chat_template_sha256": "q"}, {},
            r"^x: the prompts differ in 2 of 2 items .* \(recorded: chat_template_sha256 p against q\)$",
        ),
        ("prompts", {"fewshot_seed": 7}, {}, r"\(recorded: fewshot_seed 1234 against 7\)$"),
    ],
)  # fmt: skip
def test_samples_that_do_not_match_are_refused_with_the_setting_that_explains_it(
    change: str, settings: dict[str, Any], row: dict[str, Any], message: str
) -> None:
    a, b = (result({"x": [1, 0]}, revision="a") for _ in range(2))
    for each in (a, b):
        each["result"]["settings"] |= {
            "chat_template_sha256": "p",
            "fewshot_seed": 1234,
        }
    b["result"]["settings"] |= settings
    b["result"]["tasks"]["x"] = b["result"]["tasks"]["x"] | row
    if change == "drop":
        b["samples"]["x"].pop()
    for sample in b["samples"]["x"]:
        sample["doc_hash"] += "b" if change == "items" else ""
        sample["prompt_hash"] += "b" if change == "prompts" else ""
    with user_error(message):
        compare(a, b)


def test_a_metric_of_which_less_is_better_is_not_compared_as_if_more_were() -> None:
    row = {"metric": "brier_score,none", "higher_is_better": False}
    with user_error(
        r"a: lower is better in brier_score,none; .*leave the task out with --tasks"
    ):
        compare(result({"a": [0.1, 0.2]}, **row), result({"a": [0.4, 0.5]}, **row))


def test_another_revision_with_the_same_items_is_no_reason_to_refuse() -> None:
    a, b = result({"x": [1, 0]}, revision="a"), result({"x": [1, 0]}, revision="b")
    assert compare(a, b)["tasks"]["x"]["num_items"] == 2
