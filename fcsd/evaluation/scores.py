"""Score arithmetic: means, standard errors, and the paired comparison of two models on
the same items. Pure functions.

A sample is a mapping with `doc_id`, `doc_hash`, `prompt_hash` and `score`
(`fcsd.evaluation.results`).

Not covered: several samples an item; tasks that share items (they count as independent
in the plain mean); the floor of metrics of shares of a likelihood (the second choice
set of TruthfulQA), which only their suite can say.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from fcsd.base.errors import UserError
from fcsd.base.stats import (
    ALPHA,
    clipped,
    holm,
    interval,
    mean_interval,
    plain_mean,
    standard_error,
)
from fcsd.base.strict import Rule, refuse
from fcsd.evaluation.config import KINDS
from fcsd.evaluation.own_text.text import figures_of

Sample = dict[str, Any]
"""An item of a task, with its answer and score: a line of `samples_<task>.jsonl`."""

Row = dict[str, Any]
"""The entry of a task in a result, or in a comparison."""

Rows = Mapping[str, Row]
"""Task -> its row."""

Result = dict[str, Any]
"""The content of `results.json`."""

Comparison = dict[str, Any]
"""What `compare` returns."""

Pairs = Sequence[tuple[float, float]]
"""The scores of original and converted model on the same items."""

# Keys on which two rows must agree: those of a task in the result, and those of its
# suite, where both results record them.
_SAME_ROW = ("metric", "num_fewshot", "chat_template", "original")
_SAME_SUITE_ROW = (
    "system_prompt", "thinking", "max_new_tokens", "stop", "num_samples", "temperature", "top_p", "timeout_s",
    "prompt_tokens", "seed",
)  # fmt: skip
# None of these is compared by itself: a change shows in the items or the prompts.
_RECORDED = (
    "limit", "revision", "chat_template_sha256", "template_date", "fewshot_seed", "split", "dataset_name",
    "prompt_template", "tests",
)  # fmt: skip


def paired(
    original: Sequence[Sample], converted: Sequence[Sample], task: str = "task"
) -> Row:
    """Compare two models on the same items of one task.

    delta       mean of the differences d = converted - original
    delta_stderr  sqrt(sum (d - delta)^2 / (n - 1) / n): paired, so what is hard for both cancels
    interval    95 % interval of the difference (`stats.interval`); None for one item with a fractional score
    gained, lost  numbers of items with d > 0 and with d < 0
    p_value     exact McNemar: two-sided sign test of gained against lost; 1.0 when no item changed (`_paired` has
                the rule for own text)
    retained_percent  100 * converted / original; None when the original scores 0

    Standard errors are None for one item.

    Raises:
        UserError: the two were not evaluated on the same items with the same prompts.
    """
    return _paired(_join(original, converted, task))


def _paired(pairs: Pairs, *, higher_is_better: bool = True) -> Row:
    """Compare as `paired`; where less is better (own text), gained are the items with a
    lower figure, p is that of Student's paired t-test, and no share is retained.
    """
    original_scores, converted_scores = zip(*pairs, strict=True)
    differences = [b - a for a, b in pairs]
    gained, lost = sum(d > 0 for d in differences), sum(d < 0 for d in differences)
    original_mean = math.fsum(original_scores) / len(pairs)
    converted_mean = math.fsum(converted_scores) / len(pairs)
    limits = clipped(interval(differences), shares=_shares(pairs))
    retained = _retained(original_mean, converted_mean)
    p_value = _mcnemar(gained, lost)
    if not higher_is_better:
        gained, lost, retained = lost, gained, None
        # Nats that are all 0 are not items that are all wrong, of which chance may
        # change some.
        limits = limits if any(differences) else [0.0, 0.0]
        p_value = _paired_t(differences)
    return {
        "num_items": len(pairs),
        "original": original_mean,
        "original_stderr": standard_error(original_scores),
        "converted": converted_mean,
        "converted_stderr": standard_error(converted_scores),
        "delta": math.fsum(differences) / len(pairs),
        "delta_stderr": standard_error(differences),
        "interval": limits,
        "gained": gained,
        "lost": lost,
        "p_value": p_value,
        "retained_percent": retained,
    }


def _mcnemar(gained: int, lost: int) -> float:
    """Return the exact p of gained against lost items. Items with equal scores do not
    show which model is better, so the test counts only the others.
    """
    from scipy.stats import binomtest

    changed = gained + lost
    return float(binomtest(gained, changed).pvalue) if changed else 1.0


def _paired_t(differences: Sequence[float]) -> float:
    """Return the two-sided p of a mean difference in nats, by Student's paired t-test:
    nearly every text changes, and by how much counts.
    """
    from scipy.stats import t

    error = standard_error(differences)
    mean = math.fsum(differences) / len(differences)
    if error is None or not mean:
        return 1.0
    if not error:
        return 0.0
    return float(2 * t.sf(abs(mean) / error, len(differences) - 1))


def _shares(pairs: Pairs) -> bool:
    return all(score in (0, 1) for pair in pairs for score in pair)


def _join(original: Sequence[Sample], converted: Sequence[Sample], task: str) -> Pairs:
    if not original or not converted:
        raise UserError(
            f"{task}: no samples to compare; evaluate both models on the same suite"
        )
    if len(original) != len(converted):
        raise UserError(
            f"{task}: {len(original)} items against {len(converted)}; evaluate both"
            " models with the same limit and the same data"
        )
    original_items = _by_item(original, task)
    converted_items = _by_item(converted, task)
    if original_items.keys() != converted_items.keys():
        unmatched_ids = sorted(
            str(key[0]) for key in original_items.keys() ^ converted_items.keys()
        )
        raise UserError(
            f"{task}: the items differ (item {unmatched_ids[0]}); evaluate both models on the"
            " same revision of the data"
        )
    # Another prompt would show up as a difference between the models.
    changed = [
        str(key[0])
        for key in original_items
        if original_items[key]["prompt_hash"] != converted_items[key]["prompt_hash"]
    ]
    if changed:
        raise UserError(
            f"{task}: the prompts differ in {len(changed)} of {len(original_items)} items (item"
            f" {changed[0]}); evaluate both models with the same shots, chat template"
            " and prompt"
        )
    return [
        (float(original_items[key]["score"]), float(converted_items[key]["score"]))
        for key in original_items
    ]


def _by_item(samples: Sequence[Sample], task: str) -> dict[tuple[Any, str], Sample]:
    items = {(sample["doc_id"], sample["doc_hash"]): sample for sample in samples}
    if len(items) != len(samples):
        raise UserError(f"{task}: an item is listed twice; the sample file is damaged")
    return items


def compare(
    original: Mapping[str, Any],
    converted: Mapping[str, Any],
    only: Sequence[str] | None = None,
) -> Comparison:
    """Compare all tasks of two evaluations, and the plain mean over the headline tasks;
    docs/results.md has the keys.

    original, converted: {"result": …, "samples": …} from `read_result`, of any two
    models (own text was measured against an original of its own, the same in both).
    only: tasks to compare, if the results have more. A task is "lost" or "gained" where its p after
    Holm's correction for the number of tasks is below 0.05 and the mean changed in the
    same direction as most changed items; the mean over tasks where its interval
    does not hold 0, of one task as that task. A task without such a difference is "at
    the floor" if a model is there (`floor_of`). Own text is a "distance" where the
    original's is 0, which chance cannot make.

    Raises:
        UserError: other tasks, metrics, shots, decoding or originals, or samples that
            do not match; a metric of lm-eval of which less is better.
    """
    original_result, converted_result = original["result"], converted["result"]
    results = {"original": original_result, "converted": converted_result}
    tasks: dict[str, Row] = {}
    scores: dict[str, Pairs] = {}
    for task in _common(original_result["tasks"], converted_result["tasks"], only):
        row = original_result["tasks"][task]
        refuse(*_same_rules(task, original_result, converted_result), where=f"{task}: ")
        original_samples = original["samples"][task]
        converted_samples = converted["samples"][task]
        try:
            pairs = scores[task] = _join(original_samples, converted_samples, task)
        except UserError as error:
            raise UserError(
                f"{error}{_recorded(task, original_result, converted_result)}"
            ) from None
        tasks[task] = {
            key: row[key] for key in ("metric", "num_fewshot", "kind", "headline")
        } | _paired(pairs, higher_is_better=not KINDS[row["kind"]].distance)
        if KINDS[row["kind"]].distance:
            tasks[task] |= _own_text(original_samples, converted_samples)
            tasks[task]["lower_bound"] = [
                side
                for side, result in results.items()
                if is_bound(result["tasks"][task])
            ]
        floor = tasks[task]["floor"] = floor_of(row, original_samples)
        tasks[task]["at_floor"] = [
            side
            for side in results
            if at_floor(tasks[task][side], tasks[task][f"{side}_stderr"], floor)
        ]
        # Answers that were cut, or have thoughts, may explain a lower score.
        for side, result in results.items():
            for kind in ("at_limit", "with_thoughts"):
                if count := result["tasks"][task].get(f"answers_{kind}"):
                    tasks[task][f"{side}_{kind}"] = count
        if members := by_member(original_samples, row["kind"]):
            converted_members = by_member(converted_samples, row["kind"])
            tasks[task]["members"] = {
                name: paired(items, converted_members[name], f"{task} {name}")
                for name, items in members.items()
            }
    _decide(tasks)
    # A limit on either side makes the comparison a quick look.
    limits = [result["settings"]["limit"] for result in results.values()]
    limits = [limit for limit in limits if limit is not None]
    return {
        "complete": not limits,
        "limit": min(limits, default=None),
        "tasks": tasks,
        "mean": _mean(tasks, scores),
        "kinds": {
            group: _mean(of_group, scores)
            for group, of_group in by_group(tasks).items()
        },
    }


def by_group(tasks: Rows) -> dict[str, dict[str, Row]]:
    """Sort tasks by what their scores have seen: "likelihood" of given answers, or
    "generation", what the model writes (answers, programs, own text).
    """
    groups: dict[str, dict[str, Row]] = {}
    for task, row in tasks.items():
        groups.setdefault(KINDS[row["kind"]].group, {})[task] = row
    return groups


def _own_text(original: Sequence[Sample], converted: Sequence[Sample]) -> Row:
    """Return both sides' figures of own text, paired by prompt."""
    items = {sample["doc_id"]: figures_of(sample) for sample in original}
    pairs = [(items[sample["doc_id"]], figures_of(sample)) for sample in converted]
    # A server gives some of the figures only.
    names = [name for name in pairs[0][0] if name in pairs[0][1]]
    keys = ("original", "converted", "delta", "delta_stderr")
    figures = {}
    for name in names:
        compared = _paired([(a[name], b[name]) for a, b in pairs])
        figures[name] = {key: compared[key] for key in keys}
    return {"metrics": figures}


def _decide(tasks: Rows) -> None:
    """Give each task its corrected p and its verdict."""
    # The original has no distance from itself: nothing is to be tested.
    rows = []
    for row in tasks.values():
        if KINDS[row["kind"]].distance and not row["original"]:
            row |= {"verdict": "distance", "p_value": None, "p_holm": None}
        else:
            rows.append(row)
    # With many tasks, one of them has a small p by chance: correct for their number.
    adjusted = holm([row["p_value"] for row in rows])
    for row, p_value in zip(rows, adjusted, strict=True):
        row["p_holm"] = p_value
        # With fractional scores many small gains may stand against few large losses.
        direction = row["gained"] - row["lost"]
        better = row["delta"]
        if KINDS[row["kind"]].distance:  # tested by its mean
            direction = better = -better
        if p_value >= ALPHA or better * direction <= 0:
            # At the floor there is nothing to lose.
            row["verdict"] = "at the floor" if row["at_floor"] else "within noise"
        elif direction > 0:
            row["verdict"] = "gained"
        else:
            row["verdict"] = "lost"


def _common(
    original_tasks: Rows, converted_tasks: Rows, only: Sequence[str] | None
) -> list[str]:
    common_tasks = [task for task in original_tasks if task in converted_tasks]
    if only is not None:
        if missing := [task for task in only if task not in common_tasks]:
            raise UserError(
                f"task {missing[0]}: not in both results; both have"
                f" {', '.join(common_tasks) or 'none in common'}"
            )
        return [task for task in common_tasks if task in only]
    # Different suites are refused rather than silently cut to their common tasks.
    if original_tasks.keys() != converted_tasks.keys():
        missing_text = ", ".join(sorted(original_tasks.keys() ^ converted_tasks.keys()))
        advice = "evaluate both on the same suite"
        if common_tasks:
            advice += (
                f", or compare what both have with `fcsd compare --tasks"
                f" {','.join(common_tasks)}` (in Python: tasks={common_tasks})"
            )
        raise UserError(
            f"the two results have different tasks ({missing_text} in one only);"
            f" {advice}"
        )
    return common_tasks


def _same_rules(
    task: str, original_result: Result, converted_result: Result
) -> Iterator[Rule]:
    """Yield what may not be of a task in two results that are compared."""
    scored = original_result["tasks"][task], converted_result["tasks"][task]
    yield (
        not KINDS[scored[0]["kind"]].distance
        and any(row.get("higher_is_better") is False for row in scored),
        f"lower is better in {scored[0]['metric']}; fcsd compares only metrics where"
        " higher is better; leave the task out with --tasks (in Python: tasks=[…])",
    )
    bounds = [is_bound(row) for row in scored]
    yield (
        any(bounds) and not all(bounds) and all(row["value"] for row in scored),
        "one of the two was measured behind a server, which tells only a lower bound of"
        " the divergence; evaluate both in memory, or both behind a server",
    )
    listed = _suite_row(original_result, task), _suite_row(converted_result, task)
    for original_row, converted_row, keys in (
        (*scored, _SAME_ROW),
        (*listed, _SAME_SUITE_ROW),
    ):
        for key in keys:
            original, converted = original_row.get(key), converted_row.get(key)
            words = f"{key} is {original} against {converted}"
            if key == "original":
                words = "the two were compared with different originals"
            # A setting that only one of the results records cannot be compared.
            yield (
                original != converted and None not in (original, converted),
                f"{words}; evaluate both the same way",
            )


def _suite_row(result: Result, task: str) -> Row:
    rows = result["settings"].get("suite", {}).get("tasks", [])
    row: Row = next((row for row in rows if row["task"] == task), {})
    # null and false both ask for no thoughts
    return row | {"thinking": bool(row["thinking"])} if "thinking" in row else row


def _recorded(task: str, original_result: Result, converted_result: Result) -> str:
    """Name the settings that would explain samples that do not match."""

    def recorded(result: Result) -> Row:
        revision = {"revision": result["tasks"][task].get("revision")}
        return _suite_row(result, task) | result["settings"] | revision

    original, converted = recorded(original_result), recorded(converted_result)
    changes = [
        f"{key} {original.get(key)} against {converted.get(key)}"
        for key in _RECORDED
        if original.get(key) != converted.get(key)
    ]
    return f" (recorded: {'; '.join(changes)})" if changes else ""


def _mean(tasks: Rows, scores: Mapping[str, Pairs]) -> Row | None:
    """Compare the plain means over the tasks that count; None where none does."""
    tasks = {task: row for task, row in tasks.items() if row["headline"]}
    if not tasks:
        return None
    mean: Row = {"num_tasks": len(tasks)}
    for key in ("original", "converted", "delta"):
        mean[key], mean[f"{key}_stderr"] = plain_mean(
            [(row[key], row[f"{key}_stderr"]) for row in tasks.values()]
        )
    # A task without an interval leaves the mean without one.
    limits = [
        limit
        for task in tasks
        if (limit := interval([b - a for a, b in scores[task]])) is not None
    ]
    deltas = [row["delta"] for row in tasks.values()]
    unclipped = mean_interval(deltas, limits) if len(limits) == len(deltas) else None
    mean["interval"] = clipped(
        unclipped, shares=all(_shares(scores[task]) for task in tasks)
    )
    # Without an interval both ends are 0, so no loss or gain is claimed.
    low, high = mean["interval"] or (0.0, 0.0)
    if len(tasks) == 1:
        # The mean of one task is that task, whose exact test has decided.
        mean["verdict"] = next(iter(tasks.values()))["verdict"]
    elif high < 0:
        mean["verdict"] = "lost"
    elif low > 0:
        mean["verdict"] = "gained"
    elif all(row["verdict"] == "at the floor" for row in tasks.values()):
        mean["verdict"] = "at the floor"
    else:
        mean["verdict"] = "within noise"
    mean["retained_percent"] = _retained(mean["original"], mean["converted"])
    return mean


def _retained(original: float, converted: float) -> float | None:
    return 100 * (converted / original) if original else None


def floor_of(row: Row, samples: Sequence[Sample]) -> float | None:
    """Return a task's floor, what a model of random answers gets: that of its suite or
    of its result, else one in the number of choices of each item, or 0 for what is
    written; None if unknown, and for own text.

    row: an entry of `tasks` in a result.
    """
    if row.get("floor") is not None:
        return float(row["floor"])
    if KINDS[row["kind"]].distance:
        return None
    if KINDS[row["kind"]].writes:
        return 0.0
    metric = row["metric"].partition(",")[0]
    counts = [len(sample.get("loglikelihoods", ())) for sample in samples]
    if metric == "acc_mutual_info":  # every choice also has a likelihood without prompt
        counts = [count // 2 for count in counts]
    right_or_wrong = all(sample["score"] in (0, 1) for sample in samples)
    if not (metric.startswith("acc") and right_or_wrong and counts and min(counts)):
        return None
    # A single answer is right if it is the likeliest of all texts.
    return fmean(1 / count if count > 1 else 0.0 for count in counts)


def is_bound(row: Row) -> bool:
    """Tell whether a task's figure is a lower bound, as behind a server; that of the
    original itself is 0 there, too.

    row: an entry of `tasks` in a result.
    """
    return bool(row.get("lower_bound") and row["value"])


def at_floor(value: float, stderr: float | None, floor: float | None) -> bool:
    """Tell whether a score is within two standard errors of its floor, or below it: it
    shows neither a loss nor that nothing was lost.
    """
    return floor is not None and value <= floor + 2 * (stderr or 0.0)


def by_member(samples: Sequence[Sample], kind: str) -> dict[str, list[Sample]]:
    """Split the samples of a group (`mmlu`) by its member tasks; {} for a task that is
    no group.

    Items of a group are named `member/number`; so are problems of code tasks
    (`Mbpp/2`), but groups are lm-eval's.
    """
    members: dict[str, list[Sample]] = {}
    for sample in samples:
        # Either all items of a task have a member in their names, or none has.
        member, slash, _ = str(sample["doc_id"]).rpartition("/")
        if not slash or not KINDS[kind].by_lm_eval:
            return {}
        members.setdefault(member, []).append(sample)
    return members
