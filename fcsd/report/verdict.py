"""Put figures and comparisons into words: scores in per cent, and their differences in
points; divergences in nats; losses, noise, and the loss that the noise may hide.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fcsd.base.stats import ALPHA
from fcsd.evaluation.config import GROUPS, KINDS
from fcsd.evaluation.scores import Comparison, Row, Rows, by_group


@dataclass(frozen=True)
class Unit:
    """How the figures of a task are written. amount: the unit of a difference."""

    scale: float
    decimals: int
    amount: str

    def value(self, value: float | None) -> str:
        """Format `97.5`; `-` for none."""
        if value is None or not math.isfinite(value):
            return "-"
        text = f"{self.scale * value:.{self.decimals}f}"
        return text if float(text) else text.removeprefix("-")

    def with_error(self, value: str, stderr: float | None) -> str:
        """Format `97.5 ± 1.1`; `97.5 ± –` for one item."""
        error = "–" if stderr is None else self.value(stderr)
        return f"{value} ± {error}"

    def signed(self, value: float) -> str:
        """Format a difference with its sign: `-3.1`, `+0.4`, `0.0`."""
        text = f"{self.scale * value:+.{self.decimals}f}"
        # A value that rounds to 0 is shown without a sign.
        return text if float(text) else text[1:]

    def interval(self, interval: Sequence[float] | None) -> str:
        """Format `-5.5 to -0.7`; `-` where there is none."""
        if interval is None:
            return "-"
        return f"{self.signed(interval[0])} to {self.signed(interval[1])}"


PER_CENT = Unit(100.0, 1, "points")

NATS = Unit(1.0, 3, "nats")


def is_distance(row: Row) -> bool:
    """Tell whether a task's figure is a divergence from the original (own text); that
    of the mean over tasks is none.
    """
    return "kind" in row and KINDS[row["kind"]].distance


def unit_of(row: Row) -> Unit:
    """Return the unit of a task's row; the mean's is that of scores."""
    return NATS if is_distance(row) else PER_CENT


SIDES = ("original", "converted")
"""The two results of a comparison."""

FLOOR = "(floor)"
"""Marks scores at the floor."""

BOUND = "(lower bound)"
"""Marks divergences that a server has told."""


def mark(row: Row, side: str) -> str:
    """Mark the figure of a side that is at the floor, or a lower bound; the mean is
    neither.
    """
    if side in row.get("at_floor", ()):
        return f" {FLOOR}"
    return f" {BOUND}" if side in row.get("lower_bound", ()) else ""


LEGEND = (
    "Per cent ± one standard error; the delta's is paired (same items and prompts for"
    " both), and so is its 95 % interval. Gained and lost: items that only the model,"
    " or only the original, got right. p: exact McNemar, the probability that chance"
    " alone splits the changed items this unevenly. Verdict: p below 0.05 after Holm's"
    " correction for the number of tasks; of the mean: whether its interval excludes 0."
    " Within noise does not mean that nothing was lost: the interval shows how much may"
    " have been lost. At the floor: a score is not two standard errors above that of"
    " random answers, so that no loss can show."
)


OWN_TEXT_LEGEND = (
    "own_text_kl: KL(model || original) in nats a token, along the model's own samples;"
    " less is better, and the original's is 0, so that what a model has is its distance"
    " from it and not the outcome of a test. The error is one standard error over"
    " prompts; gained and lost: prompts where the model diverges less, or more. Two"
    " models are compared by Student's paired t-test (docs/evaluate.md)."
)


def quick_look(*limits: float | None) -> str:
    """Return the mark of evaluations that were cut short, with the smallest of their
    limits; "" where none was.
    """
    limit = min(filter(None, limits), default=None)
    if limit is None:
        return ""
    part = f"{100 * limit:g} % of the" if limit < 1 else f"{limit:g}"
    return f"Only the first {part} items of every task: a quick look, not a result."


_UNSEEN = "Choice tasks alone have not seen the model write"


def scored_by(tasks: Rows) -> str:
    """Say which tasks are scored by likelihood and which by what the model writes."""
    groups = by_group(tasks)
    words = [
        f"{text.removeprefix('by ')}: {', '.join(groups[group])}"
        for group, text in GROUPS.items()
        if group in groups
    ]
    unseen = "" if "generation" in groups else f" {_UNSEEN}."
    return f"Scored by {'; by '.join(words)}.{unseen}"


def outcome(name: str, comparison: Comparison) -> str:
    """Say in a plain sentence how a model compares with the original."""
    tasks, mean = scored(comparison["tasks"]), comparison["mean"]
    look = "In a quick look: " if comparison["limit"] else ""
    unseen = "" if "generation" in by_group(comparison["tasks"]) else f" {_UNSEEN}."
    floors = [task for task, row in tasks.items() if row["verdict"] == "at the floor"]
    if tasks and len(floors) == len(tasks):
        return (
            f"**{look}`{name}` cannot be compared with the original:** on every task"
            f" one of them scores as random answers do.{unseen}"
        )
    apart = f"; {', '.join(floors)} cannot show a loss (floor)" if floors else ""
    if tasks and not any(row["gained"] + row["lost"] for row in tasks.values()):
        return (
            f"**{look}`{name}` scores as the original does, on every item"
            f"{apart}.**{unseen}"
        )
    if not mean:
        return ""
    word = mean_verdict(comparison).partition(",")[0]
    heads = {
        "lost": "is worse than the original",
        "gained": "is better than the original",
        "within noise": "is not measurably worse than the original",
        "at the floor": "cannot be compared with the original",
    }
    over = f"over {mean['num_tasks']} tasks" if mean["num_tasks"] > 1 else "on one task"
    text = (
        f"**{look}`{name}` {heads[word]}:** it scores {100 * mean['converted']:.1f} per"
        f" cent {over}, the original {100 * mean['original']:.1f}"
    )
    low = mean["interval"][0] if mean["interval"] else 0.0
    if word == "within noise" and low < 0:
        text += f"; a loss of up to {-100 * low:.1f} points is not excluded"
    lost = [task for task, row in tasks.items() if row["verdict"] == "lost"]
    if lost and word != "lost":
        text += f"; but worse, beyond noise, on {', '.join(lost)}"
    return f"{text}{apart}.{unseen}"


def verdict_lines(name: str, comparison: Comparison) -> list[str]:
    """Write a line of a few sentences on one model for each kind of tasks: those scored
    by likelihood, and those scored by what it writes.
    """
    groups = by_group(comparison["tasks"])
    lines = [
        f"**{name}**, {words}: {_sentences(groups[group], comparison['kinds'][group])}"
        for group, words in GROUPS.items()
        if group in groups
    ]
    if "generation" not in groups:
        lines.append(
            f"**{name}**, {GROUPS['generation']}: not measured. {_UNSEEN}"
            " (docs/evaluate.md)."
        )
    return lines


def trained_line(name: str, start: str, tasks: Rows) -> str:
    """Say whether a training has brought what a model writes closer to the original.

    start: the untrained model that the training began with. tasks: own text of the
    trained model, compared with the start.
    """
    outcomes = {
        "gained": "closer to the original, beyond noise",
        "lost": "farther from the original, beyond noise",
    }
    changes = [
        f"{task} {NATS.with_error(NATS.signed(row['delta']), row['delta_stderr'])} nats a"
        f" token (p {p_text(row['p_value'])}):"
        f" {outcomes.get(row['verdict'], row['verdict'])}"
        for task, row in tasks.items()
    ]
    return (
        f"**{name}**, along its own samples, against `{start}`, with which its training"
        f" began: {'; '.join(changes)}."
    )


def _sentences(tasks: Rows, mean: Row | None) -> str:
    """Write two to five sentences on tasks of one kind: the mean, tasks lost and gained
    beyond noise, the loss that noise may hide, tasks at the floor, and the distance of
    what the model writes.
    """
    written = _written(tasks)
    tested = scored(tasks)
    if not tested:
        return f"along {written}"
    changed = sum(row["gained"] + row["lost"] for row in tested.values())
    count = sum(row["num_items"] for row in tested.values())
    floors = _floors(tested)
    sentences = []
    if not changed:
        sentences.append(f"all {count} items have the original's score.")
    elif mean:
        sentences.append(_mean(mean, _mean_verdict(tasks, mean)))
    else:
        sentences.append("no task counts in the mean.")
    for word in ("lost", "gained") if changed else ():
        names = [task for task, row in tested.items() if row["verdict"] == word]
        # Many small changes may be noise in each task and yet show in the mean.
        adds_up = mean is not None and mean["verdict"] == word
        # Losses are always mentioned, even to say that there is none; gains only where
        # there are some.
        if names or adds_up or word == "lost":
            none = "no task"
            if all(row["verdict"] == "at the floor" for row in tested.values()):
                none = "cannot be told, because every task is at the floor"
            elif adds_up:
                none = "no single task shows it, but together they do"
            sentences.append(
                f"{word.capitalize()} beyond noise: {_named(tested, names) or none}."
            )
    noise = [task for task, row in tested.items() if row["verdict"] == "within noise"]
    if changed and noise:
        named = ", ".join(noise)
        if len(noise) == len(tested) > 3:
            named = f"all {len(tested)} tasks"
        sentences.append(f"Within noise: {named}{_hidden(tested, noise)}.")
    along = f"Along {written}" if written else ""
    return " ".join([*sentences, *filter(None, [floors, along])])


def _floors(tasks: Rows) -> str:
    """Name the tasks in which a model at the floor hides what may have been lost."""
    words = [
        f"{task} (original {PER_CENT.value(row['original'])}, model"
        f" {PER_CENT.value(row['converted'])}, random answers"
        f" {PER_CENT.value(row['floor'])})"
        for task, row in tasks.items()
        if row["verdict"] == "at the floor"
    ]
    return f"At the floor, where no loss can show: {', '.join(words)}." if words else ""


def scored(tasks: Rows) -> Rows:
    """Return the tasks of a comparison that are tested, without the distances from the
    original.
    """
    return {task: row for task, row in tasks.items() if row["verdict"] != "distance"}


def _written(tasks: Rows) -> str:
    """Say how far what the model writes is from the original, after "along"."""
    distances = [
        f"{'at least ' if row.get('lower_bound') else ''}"
        f"{NATS.with_error(NATS.value(row['delta']), row['delta_stderr'])} nats a token"
        f" ({task})"
        for task, row in tasks.items()
        if row["verdict"] == "distance"
    ]
    if not distances:
        return ""
    return (
        f"its own samples it diverges from the original by {' and '.join(distances)}."
    )


def members_line(row: Row) -> str:
    """Say how many members of a group differ, and how many would differ by chance."""
    intervals = [
        member["interval"] for member in row["members"].values() if member["interval"]
    ]
    below = sum(high < 0 for _, high in intervals)
    above = sum(low > 0 for low, _ in intervals)
    return (
        f"of {len(intervals)} intervals {below} lie below 0 and {above} above; chance"
        f" alone would give at most about {0.025 * len(intervals):.1f} of each."
    )


def p_text(value: float | None) -> str:
    """Format `0.012`, `<0.001`; `-` where nothing was tested."""
    if value is None:
        return "-"
    return "<0.001" if value < 0.001 else f"{value:.3f}"


def task_verdict(row: Row) -> str:
    """Return a task's verdict; with the reason where its interval excludes 0 or its p is
    small, and yet the verdict is noise.
    """
    if row["verdict"] == "distance":
        bound = ", a lower bound" if row.get("lower_bound") else ""
        return f"distance from the original{bound}"
    if row["verdict"] == "at the floor":
        return f"at the floor, {PER_CENT.value(row['floor'])} by random answers"
    if row["verdict"] == "lost" and "converted" in row["at_floor"]:
        return "lost, down to the floor"
    if row["verdict"] == "within noise" and row["p_holm"] < ALPHA:
        return "within noise, because most changed items moved against the mean"
    low, high = row["interval"] or (0.0, 0.0)
    if row["verdict"] != "within noise" or low <= 0 <= high:
        return str(row["verdict"])
    # The exact test is stricter than the interval, and knows no sizes of changes.
    if row["p_value"] >= ALPHA:
        return f"within noise, because p is not below {ALPHA:g}"
    return "within noise, after correction for several tasks"


def mean_verdict(comparison: Comparison) -> str:
    """Return the verdict of the mean; of a single task, that of the task."""
    return _mean_verdict(comparison["tasks"], comparison["mean"])


def _mean_verdict(tasks: Rows, mean: Row) -> str:
    rows = [row for row in tasks.values() if row["headline"]]
    return task_verdict(rows[0]) if len(rows) == 1 else str(mean["verdict"])


def _mean(mean: Row, verdict: str) -> str:
    over = "the one task that counts"
    if mean["num_tasks"] > 1:
        over = f"the mean over {mean['num_tasks']} tasks"
    text = (
        f"{over} changed by {PER_CENT.signed(mean['delta'])} points (95 % interval"
        f" {PER_CENT.interval(mean['interval'])})"
    )
    words = {"lost": "a loss beyond noise", "gained": "a gain beyond noise"}
    head, comma, reason = verdict.partition(",")
    return f"{text}: {words.get(head, head)}{comma}{reason}."


def _named(tasks: Rows, names: Sequence[str]) -> str:
    words = []
    for task in sorted(names, key=lambda task: -abs(tasks[task]["delta"])):
        row, unit = tasks[task], unit_of(tasks[task])
        amount = f" {unit.amount}" if unit is NATS else ""
        words.append(
            f"{task} {unit.signed(row['delta'])}{amount} (p {p_text(row['p_value'])})"
        )
    return ", ".join(words)


def _hidden(tasks: Rows, names: Sequence[str]) -> str:
    lows = {
        task: tasks[task]["interval"][0]
        for task in names
        # nats are no points
        if tasks[task]["interval"] and not is_distance(tasks[task])
    }
    worst = min(lows, key=lows.__getitem__, default=None)
    if worst is None or lows[worst] >= 0:
        return ""
    most = f"{-100 * lows[worst]:.1f} points"
    if len(names) == 1:
        return f"; its interval does not exclude a loss of up to {most}"
    return f"; their intervals do not exclude losses of up to {most} ({worst})"
