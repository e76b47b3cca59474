"""Format results as tables for people, in Markdown."""

from collections.abc import Mapping, Sequence
from typing import Any

from fcsd.base.text import markdown, metric_words, nats
from fcsd.evaluation.scores import Comparison, Result, Row, at_floor, is_bound
from fcsd.report.verdict import (
    BOUND,
    FLOOR,
    NATS,
    PER_CENT,
    SIDES,
    Unit,
    is_distance,
    mark,
    mean_verdict,
    p_text,
    quick_look,
    scored_by,
    task_verdict,
    unit_of,
)

FLOOR_NOTE = f"{FLOOR}: not above the score of random answers by two standard errors."
_BOUND_NOTE = (
    "{}: a lower bound, because the server tells only the probabilities of the likeliest"
    " tokens."
)
# of scores
percent, with_error = PER_CENT.value, PER_CENT.with_error


def figure_text(row: Row) -> str:
    """Format a task's figure with its error, and its unit if it is no score."""
    unit = unit_of(row)
    text = unit.with_error(unit.value(row["value"]), row["stderr"])
    if at_floor(row["value"], row["stderr"], row.get("floor")):
        return f"{text} {FLOOR}"
    text = f"{text} nats" if unit is NATS else text
    return f"{text} {BOUND}" if is_bound(row) else text


def models_table(
    models: Mapping[str, Mapping[str, Any]], columns: int | None = None
) -> str:
    """Format one row for each model: rewired layers, training, scores of all tasks,
    mean, KL to the original; or one column for each where tasks are many and models
    few.

    models: name -> {"layers": text, "training": text, "result": of `fcsd evaluate`}.
    columns: if the terminal is narrower, leave out the tasks, then the training.
    """
    tasks = next(iter(models.values()))["result"]["tasks"]
    scored = [f"{task} {row['metric'].split(',')[0]}" for task, row in tasks.items()]
    header = ["model", "rewired", "training", *scored, "mean", "KL to original"]
    rows = []
    for name, model in models.items():
        result = model["result"]
        kl = (result.get("kl_to_original") or {}).get("kl")
        scores = [figure_text(row) for row in result["tasks"].values()]
        ends = [percent(result["mean"]), "-" if kl is None else nats(kl)]
        rows.append([name, model["layers"], model["training"], *scores, *ends])
    if len(tasks) > max(5, len(models)):
        # Transposed: a table that grows downwards stays readable.
        header, *rows = [list(line) for line in zip(header, *rows, strict=True)]
    elif columns:
        for place in (slice(3, 3 + len(tasks)), slice(2, 3)):
            if len(markdown(header, rows).partition("\n")[0]) > columns:
                for line in (header, *rows):
                    del line[place]
    notes = [
        note
        for name, model in models.items()
        for task, row in model["result"]["tasks"].items()
        for note in _notes_of_task(f"{name}, {task}", row)
    ]
    written = _written_tables({n: m["result"] for n, m in models.items()})
    if any(f" {FLOOR}" in cell for line in rows for cell in line):
        notes.append(FLOOR_NOTE)
    return _with_notes(markdown(header, rows), [*written, *notes])


def _metric(row: Row) -> str:
    """Name a task's metric; where it is no score, with its unit and direction."""
    return row["metric"] + (" (nats, less is better)" if is_distance(row) else "")


def _answer_notes(
    name: str, num_items: int, at_limit: int | None, thoughts: int | None
) -> list[str]:
    """Say how many answers the token limit ended, and how many have thoughts that
    nobody asked for.
    """
    notes = []
    if at_limit:
        notes.append(
            f"{name}: {at_limit} of {num_items} answers hit the token limit"
            " (max_new_tokens)."
        )
    if thoughts:
        notes.append(
            f"{name}: {thoughts} of {num_items} answers have thoughts, though thinking"
            " is off; fcsd removed them."
        )
    return notes


def _notes_of_task(name: str, row: Row) -> list[str]:
    notes = _answer_notes(
        name,
        row["num_items"],
        # of own text, the table of what models write tells it
        None if is_distance(row) else row.get("answers_at_limit"),
        row.get("answers_with_thoughts"),
    )
    if is_bound(row):
        notes.append(_BOUND_NOTE.format(name))
    if text := row.get("thoughts_closed_by"):
        notes.append(
            f"{name}: the model thinks unasked; fcsd added {text!r} to its prompts, so"
            " that the likelihoods are those of answers."
        )
    return notes


# Columns of what models write: name of a figure -> head of its column, and its unit.
_OWN_TEXT: dict[str, tuple[str, Unit]] = {
    "own_text_kl_16": ("KL, first 16", NATS),
    "own_text_kl_64": ("first 64", NATS),
    "own_text_kl_256": ("first 256", NATS),
    "forward_kl": ("KL of original", NATS),
    "nats_above": ("nats above original", NATS),
    "repeated_4grams": ("repeated 4-grams %", PER_CENT),
    "greedy_repeated_4grams": ("greedy %", PER_CENT),
    "ended": ("ended %", PER_CENT),
    "num_tokens": ("tokens", Unit(1.0, 1, "tokens")),
    "greedy_equal": ("greedy as original %", PER_CENT),
}


def _own_text_table(task: str, models: Mapping[str, Mapping[str, Any]]) -> str:
    """Format what models write beside their divergence, one row each; models: name ->
    figure -> mean.
    """
    given = {name for figures in models.values() for name in figures}
    shown = [name for name in _OWN_TEXT if name in given]
    header = [task, *(_OWN_TEXT[name][0] for name in shown)]
    rows = [
        [model, *(_OWN_TEXT[name][1].value(figures.get(name)) for name in shown)]
        for model, figures in models.items()
    ]
    return markdown(header, rows)


def _written_tables(results: Mapping[str, Result]) -> list[str]:
    """Format a table for each task of own text; results: name of a model -> result."""
    first = next(iter(results.values()))["tasks"]
    return [
        _own_text_table(
            task,
            {
                name: {
                    figure: mean["value"]
                    for figure, mean in result["tasks"][task]["metrics"].items()
                }
                for name, result in results.items()
            },
        )
        for task, row in first.items()
        if is_distance(row)
    ]


def _compared_notes(comparison: Comparison) -> list[str]:
    written = [
        _own_text_table(
            task,
            {
                name: {
                    figure: row["metrics"][figure][side] for figure in row["metrics"]
                }
                for name, side in (("original", "original"), ("model", "converted"))
            },
        )
        for task, row in comparison["tasks"].items()
        if is_distance(row)
    ]
    bounds = [
        _BOUND_NOTE.format(f"{task}, {name}")
        for task, row in comparison["tasks"].items()
        for name, side in zip(("original", "model"), SIDES, strict=True)
        if side in row.get("lower_bound", ())
    ]
    return [*written, *bounds] + [
        note
        for task, row in comparison["tasks"].items()
        if not is_distance(row)
        for name, key in (("original", "original"), ("model", "converted"))
        for note in _answer_notes(
            f"{task}, {name}",
            row["num_items"],
            row.get(f"{key}_at_limit"),
            row.get(f"{key}_with_thoughts"),
        )
    ]


def _with_notes(table: str, notes: Sequence[str]) -> str:
    return "\n\n".join([table, *filter(None, notes)])


def paired_table(comparison: Comparison) -> str:
    """Format one row for each task: both scores, paired delta with its interval, items
    gained and lost, McNemar's p, verdict.

    comparison: a result of `scores.compare`.
    """
    header = [
        "task", "metric", "shots", "n", "original", "model", "delta", "95 % interval", "gained", "lost", "p",
        "retained %", "verdict",
    ]  # fmt: skip
    rows = [
        [
            task if row["headline"] else f"{task} (not in the mean)",
            _metric(row).removesuffix(",none"),
            str(row["num_fewshot"]),
            str(row["num_items"]),
            *_scores(row),
            str(row["gained"]),
            str(row["lost"]),
            p_text(row["p_value"]),
            _retained(row),
            task_verdict(row),
        ]
        for task, row in comparison["tasks"].items()
    ]
    if mean := comparison["mean"]:
        rows.append(
            [
                "mean",
                "",
                "",
                "",
                *_scores(mean),
                "",
                "",
                "",
                _retained(mean),
                mean_verdict(comparison),
            ]
        )
    return _with_notes(markdown(header, rows), _compared_notes(comparison))


def narrow_table(comparison: Comparison) -> str:
    """Format the comparison in six columns, as many as fit on a page of the Hub."""
    rows = [
        [
            task,
            f"{metric_words(row['metric'])}, {row['num_fewshot']}-shot",
            *_narrow(row),
            task_verdict(row),
        ]
        for task, row in comparison["tasks"].items()
    ]
    if mean := comparison["mean"]:
        rows.append(["mean", "", *_narrow(mean), mean_verdict(comparison)])
    header = [
        "task",
        "metric",
        "original",
        "this model",
        "difference (95 % interval)",
        "verdict",
    ]
    return _with_notes(markdown(header, rows, left=2), _compared_notes(comparison))


def _narrow(row: Row) -> list[str]:
    unit = unit_of(row)
    delta = f"{unit.signed(row['delta'])} ({unit.interval(row['interval'])})"
    scores = (f"{unit.value(row[side])}{mark(row, side)}" for side in SIDES)
    return [*scores, delta]


def _scores(row: Row) -> list[str]:
    unit = unit_of(row)
    return [
        *(
            unit.with_error(unit.value(row[side]), row[f"{side}_stderr"])
            + mark(row, side)
            for side in SIDES
        ),
        unit.with_error(unit.signed(row["delta"]), row["delta_stderr"]),
        unit.interval(row["interval"]),
    ]


def _retained(row: Row) -> str:
    share = row["retained_percent"]
    # A share of what random answers get has not been retained.
    nothing = share is None or row["verdict"] == "at the floor"
    return "-" if nothing else f"{share:.1f}"


def result_table(result: Result) -> str:
    """Format the result of one model."""
    table = score_table(result)
    if result["mean"] is None:
        return table
    mean = f"mean {with_error(percent(result['mean']), result['mean_stderr'])}"
    head, _, note = table.partition("\n\n")
    return f"{head}\n{mean}" + (f"\n{note}" if note else "")


def score_table(result: Result) -> str:
    """Format one row for each task: metric, shots, items, score; also its other
    metrics, and for code tasks the base score and the outcomes of the programs.
    """
    rows = []
    for task, row in result["tasks"].items():
        total = row.get("num_items_total", row["num_items"])
        items = str(row["num_items"])
        if total != row["num_items"]:
            items = f"{items} of {total}"
        score = figure_text(row)
        rows.append([task, _metric(row), str(row["num_fewshot"]), items, score])
        if "base" in row:
            base = with_error(percent(row["base"]["value"]), row["base"]["stderr"])
            rows.append(
                [
                    f"{task} (base tests)",
                    row["metric"],
                    str(row["num_fewshot"]),
                    items,
                    base,
                ]
            )
        # What a model writes has a table of its own.
        others = {} if is_distance(row) else row.get("metrics", {})
        for metric, other in others.items():
            score = with_error(percent(other["value"]), other["stderr"])
            rows.append([task, metric, str(row["num_fewshot"]), items, score])
        for k, value in row.get("pass_at_k", {}).items():
            # The headline metric has its row already.
            if row["metric"] != f"pass@{k}":
                rows.append(
                    [task, f"pass@{k}", str(row["num_fewshot"]), items, percent(value)]
                )
    table = markdown(["task", "metric", "shots", "n", "score"], rows)
    notes = [
        f"{task}:"
        f" {', '.join(f'{count} {name}' for name, count in row['outcomes'].items())}"
        for task, row in result["tasks"].items()
        if "outcomes" in row
    ]
    notes += [
        f"{task}: {row['prompts_cut']} prompts exceed the model's positions and were"
        " truncated on the left."
        for task, row in result["tasks"].items()
        if row.get("prompts_cut")
    ]
    for task, row in result["tasks"].items():
        notes += _notes_of_task(task, row)
    if any(f" {FLOOR}" in cell for line in rows for cell in line):
        notes.append(FLOOR_NOTE)
    notes = [*_written_tables({"model": result}), scored_by(result["tasks"]), *notes]
    limit = result["settings"]["limit"]
    # A file of ready samples may hold any of the problems, not just the first.
    if limit and "scorer" in result["settings"]:
        notes.append(
            f"Only the {limit} problems that have samples: a quick look, not a result."
        )
    elif limit:
        notes.append(quick_look(limit))
    return "\n\n".join([table, *notes])
