"""Compare the results of one model with those of others: tables, figures, a page of all
answers, and lm-eval's files.

The results may have different dates, and come from `fcsd evaluate` or plain lm-eval;
items, prompts, shots and metrics must be the same.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fcsd.base.artifact import read_manifest, versions
from fcsd.base.errors import UserError
from fcsd.base.text import fold, markdown, metric_words
from fcsd.base.writing import check_folder_place, new_folder, write_json, write_text
from fcsd.evaluation.config import KINDS
from fcsd.evaluation.lm_eval.write import write_lm_eval
from fcsd.evaluation.read import read_any_result
from fcsd.evaluation.scores import Comparison, Result, compare, floor_of, is_bound
from fcsd.report.items import write_items
from fcsd.report.page import write_page
from fcsd.report.table import paired_table
from fcsd.report.training import training_figures
from fcsd.report.verdict import (
    LEGEND,
    OWN_TEXT_LEGEND,
    is_distance,
    members_line,
    quick_look,
    verdict_lines,
)

SCHEMA_VERSION = 1
_LINE = 200  # characters of a text that are shown
LONG_TABLE = 12  # lines; a longer table is folded
ITEMS_LINK = (
    "**[Every answer side by side](items.html)**: question, answers and scores of all"
    " models, item by item.\n\n"
)
Evaluated = Mapping[str, Mapping[str, Any]]
Comparisons = dict[str, Comparison]


def read_evaluated(
    original: Path, converted: Sequence[Path]
) -> dict[str, dict[str, Any]]:
    """Read name -> {"result": …, "samples": …, "training": …}, the original first.

    A name is the shortest end of the folder's path that is unique; training is
    `training_of` the folder. Raises as `read_any_result`.
    """
    folders = [original, *converted]
    resolved = [folder.resolve() for folder in folders]
    if twice := [
        str(folder) for folder in folders if resolved.count(folder.resolve()) > 1
    ]:
        raise UserError(f"{twice[0]}: is given twice")
    # Plain lm-eval may have several metrics for a task: a result of fcsd decides which.
    fcsds = [folder for folder in folders if (folder / "results.json").is_file()]
    like = read_any_result(fcsds[0])[0] if fcsds else None
    evaluated = {}
    for folder, name in zip(folders, _names(resolved), strict=True):
        result, samples = read_any_result(folder, like)
        like = like or result
        evaluated[name] = {
            "result": result,
            "samples": samples,
            "training": training_of(folder, result),
        }
    return evaluated


def _names(folders: Sequence[Path]) -> list[str]:
    length = 1
    while len(names := ["/".join(folder.parts[-length:]) for folder in folders]) != len(
        set(names)
    ):
        length += 1
    return names


def compare_all(evaluated: Evaluated, only: Sequence[str] | None = None) -> Comparisons:
    """Compare the first model with every other: name -> `scores.compare`, which raises
    UserError where items or settings do not match.
    """
    original, *names = evaluated
    comparisons = {}
    for name in names:
        try:
            comparisons[name] = compare(evaluated[original], evaluated[name], only)
        except UserError as error:
            raise UserError(f"{original} against {name}: {error}") from None
    return comparisons


def comparison_text(comparisons: Comparisons, evaluated: Evaluated) -> str:
    """Format the output of `fcsd compare`: paired table and verdict of every model,
    with the mark of a quick look.
    """
    original = next(iter(evaluated))
    evaluated = _compared(evaluated, comparisons)
    parts = []
    for name, comparison in comparisons.items():
        parts += [
            f"{name} (model) against {original} (original)",
            paired_table(comparison),
            *(line.replace("**", "") for line in verdict_lines(name, comparison)),
        ]
        if look := quick_look(comparison["limit"]):
            parts.append(look)
    parts += written_lines(evaluated)
    if differ := differing_settings(evaluated):
        parts.append(f"Settings that differ: {differ}.")
    return "\n\n".join(parts)


def _compared(evaluated: Evaluated, comparisons: Comparisons) -> Evaluated:
    """Return the evaluations with the tasks alone that were compared."""
    tasks = next(iter(comparisons.values()))["tasks"]
    return {
        name: {
            **of,
            "result": of["result"]
            | {"tasks": {task: of["result"]["tasks"][task] for task in tasks}},
            "samples": {task: of["samples"][task] for task in tasks},
        }
        for name, of in evaluated.items()
    }


def written_lines(evaluated: Evaluated) -> list[str]:
    """Show, for each task of own text, the first prompt's end and the first line that
    each model writes after it, greedily; as lists of Markdown.
    """
    if not evaluated:
        return []
    first, parts = next(iter(evaluated.values())), list[str]()
    for task, row in first["result"]["tasks"].items():
        if not is_distance(row):
            continue
        lines = {
            name: _first_line(evaluation["samples"][task][0]["greedy"])
            for name, evaluation in evaluated.items()
        }
        prompt = _last_words(first["samples"][task][0]["prompt"])
        parts += [
            f"{task}, first prompt, greedy: {_code(prompt)}",
            "\n".join(f"- {name}: {_code(line)}" for name, line in lines.items()),
        ]
    return parts


def _first_line(text: str) -> str:
    line = next(iter(text.strip().splitlines()), "")
    return line if len(line) <= _LINE else f"{line[:_LINE]}…"


def _last_words(text: str) -> str:
    """Return the text in one line, from a whole word on where it is long."""
    line = " ".join(text.split())
    if len(line) <= _LINE:
        return line
    return f"… {line[-_LINE:].partition(' ')[2] or line[-_LINE:]}"


def _code(text: str) -> str:
    """Quote a model's text, which may look like Markdown."""
    return f"`{text.replace('`', chr(39))}`" if text else "(nothing)"


def chance_levels(evaluated: Evaluated) -> dict[str, float]:
    """Return task -> the score of guessing, for tasks with answers to choose from."""
    first = next(iter(evaluated.values()))
    levels = {
        task: floor_of(row, first["samples"][task])
        for task, row in first["result"]["tasks"].items()
    }
    return {task: level for task, level in levels.items() if level}


def write_details(
    evaluated: Evaluated,
    comparisons: Comparisons,
    training: Mapping[str, Path],
    folder: Path,
    colours: Mapping[str, str],
) -> dict[str, str]:
    """Write figures of differences and trainings, `items.html` and `lm_eval/` to
    `folder` and return figure -> caption.

    training: model -> the folder of its training. colours: model -> its colour in all
    figures.
    """
    from fcsd.report.plots import plot_deltas, plot_members

    for name, evaluation in evaluated.items():
        write_lm_eval(
            evaluation["result"] | {"model": name},
            evaluation["samples"],
            folder / "lm_eval",
        )
    # A run without an evaluated original has nothing to compare, and shows only its
    # trainings.
    if not comparisons:
        return training_figures(training, folder, colours)
    write_items(evaluated, comparisons, folder / "items.html")
    look = quick_look(*(comparison["limit"] for comparison in comparisons.values()))
    chance = chance_levels(evaluated)
    mark = f" {look}" if look else ""
    dotted = " Dotted: score of random guessing." if chance else ""
    figures = _own_text_figures(evaluated, folder, colours, look)
    if scores := of_scores(comparisons):
        plot_deltas(scores, folder / "deltas.png", colours, look, chance)
        caption = "Difference to the original, with 95 % intervals (paired)."
        figures = {"deltas.png": f"{caption}{dotted}{mark}"} | figures
    for task, row in next(iter(comparisons.values()))["tasks"].items():
        if "members" in row:
            file, counts = f"{task}_members.png", ""
            rows = {name: of["tasks"][task] for name, of in comparisons.items()}
            plot_members(task, rows, folder / file, colours, look)
            for name, of_model in rows.items():
                counts += f" {name}: {members_line(of_model)}"
            figures[file] = (
                f"{task}: difference to the original by member (number of items)."
                f"{counts}{mark}"
            )
    return figures | training_figures(training, folder, colours)


def of_scores(comparisons: Comparisons) -> Comparisons:
    """Return comparisons of the tasks with scores alone, without divergences, which
    have another unit; {} where there is none.
    """
    scores = {}
    for name, comparison in comparisons.items():
        rows = comparison["tasks"].items()
        if tasks := {task: row for task, row in rows if not is_distance(row)}:
            scores[name] = comparison | {"tasks": tasks}
    return scores


def _own_text_figures(
    evaluated: Evaluated, folder: Path, colours: Mapping[str, str], look: str
) -> dict[str, str]:
    """Draw, for each task of own text, the divergence by the length of the text."""
    from fcsd.report.plots import plot_own_text

    figures = {}
    results = {name: value["result"]["tasks"] for name, value in evaluated.items()}
    for task, row in next(iter(results.values())).items():
        # The original's divergence is 0, which a logarithmic axis cannot show.
        models = {
            name: rows[task]
            for name, rows in results.items()
            if is_distance(row) and task in rows and rows[task]["value"]
        }
        if models:
            plot_own_text(task, models, folder / f"{task}.png", colours, look)
            bounds = ", ".join(name for name, row in models.items() if is_bound(row))
            of_bounds = f" Lower bounds: {bounds}." if bounds else ""
            figures[f"{task}.png"] = (
                f"{task}: divergence from the original along the model's own samples,"
                " for their first tokens; growth shows errors that feed on themselves."
                f"{of_bounds}"
            )
    return figures


def write_comparison(
    evaluated: Evaluated, comparisons: Comparisons, folder: Path
) -> None:
    """Write `comparison.md`, the same as `comparison.html`, `comparison.json`
    (schema_version 1, docs/results.md), and the files of `write_details`.

    comparisons: from `compare_all`. Raises UserError where `folder` is not empty and
    not a comparison.
    """
    check_folder_place(folder, "comparison.json", "comparison")
    from fcsd.report.figure import model_colours

    whole, evaluated = evaluated, _compared(evaluated, comparisons)
    with new_folder(folder) as new:
        colours = model_colours(list(evaluated), next(iter(evaluated)))
        training = {name: of["training"] for name, of in evaluated.items()}
        training = {name: path for name, path in training.items() if path}
        figures = write_details(evaluated, comparisons, training, new, colours)
        content = {
            "schema_version": SCHEMA_VERSION,
            "original": next(iter(evaluated)),
            "complete": all(of["complete"] for of in comparisons.values()),
            "models": {name: of["result"] for name, of in whole.items()},
            "comparisons": comparisons,
            "settings_that_differ": _differing(evaluated),
            "versions": versions(),
        }
        write_json(new / "comparison.json", content)
        parts = [
            f"# {', '.join(comparisons)} against {next(iter(evaluated))}",
            ITEMS_LINK.strip(),
            *verdicts(comparisons),
            *tables(comparisons),
            *written_lines(evaluated),
            *figure_parts(figures),
            "## Settings",
            *settings_tables(evaluated),
        ]
        text = "\n\n".join(parts) + "\n"
        write_text(new / "comparison.md", text)
        write_page(text, new / "comparison.html")


def all_verdicts(comparisons: Comparisons) -> list[str]:
    """Return the verdicts of all models, in lines."""
    return [
        line
        for name, comparison in comparisons.items()
        for line in verdict_lines(name, comparison)
    ]


def verdicts(comparisons: Comparisons, more: Sequence[str] = ()) -> list[str]:
    """Return the summary for an impatient reader, as parts of a Markdown page: the mark
    of a quick look, one line for each model and kind of tasks, and more lines.
    """
    look = quick_look(*(comparison["limit"] for comparison in comparisons.values()))
    listed = "\n".join(f"- {line}" for line in [*all_verdicts(comparisons), *more])
    return [f"**{look}**", listed] if look else [listed]


def tables(comparisons: Comparisons) -> list[str]:
    """Return a table for every model and their legend, as parts of a Markdown page."""
    parts = []
    for name, comparison in comparisons.items():
        table = paired_table(comparison)
        if table.count("\n") > LONG_TABLE:
            table = fold(
                f"{name}, task by task ({len(comparison['tasks'])} tasks)", table
            )
        parts += [*([f"### {name}"] if len(comparisons) > 1 else []), table]
    kinds = {
        is_distance(row)
        for comparison in comparisons.values()
        for row in comparison["tasks"].values()
    }
    legends = {False: LEGEND, True: OWN_TEXT_LEGEND}
    return [*parts, *(legends[kind] for kind in sorted(kinds))]


def figure_parts(figures: Mapping[str, str]) -> list[str]:
    """Return figures (file -> caption) with captions, as parts of a Markdown page."""
    # The alternative text is the first sentence, which "Fig. 3" does not end.
    return [
        f"![{re.split(r'(?<!Fig)[.](?: |$)', caption)[0]}]({file})\n\n{caption}"
        for file, caption in figures.items()
    ]


def training_of(folder: Path, result: Result) -> Path | None:
    """Find the folder of the training that produced the model evaluated in `folder`;
    None where no candidate wrote exactly these weights.
    """
    weights = read_manifest(folder).get("inputs", {}).get("model")
    if weights is None:
        return None
    run = folder.resolve().parent.parent  # of RUN/evaluate/NAME
    candidates = [
        Path(str(result["model"])).parent,
        run / "distill",
        run / "pretrain",
        run / "variants" / folder.name,
    ]
    for candidate in candidates:
        if (candidate / "history.jsonl").is_file():
            outputs = read_manifest(candidate).get("outputs", {})
            if outputs.get("model") == weights:
                return candidate
    return None


def settings_tables(evaluated: Evaluated) -> list[str]:
    """Format the settings of evaluations as two tables: how each task was asked, and all
    else. Where models differ, a cell says which had what.
    """
    results = {name: value["result"] for name, value in evaluated.items()}
    first = next(iter(results.values()))
    tasks = [
        [
            task,
            metric_words(row["metric"]),
            KINDS[row["kind"]].scored_by,
            str(row["num_fewshot"]),
            "chat template" if row.get("chat_template") else "plain text",
            str(row["num_items"]),
        ]
        for task, row in first["tasks"].items()
    ]
    facts: dict[str, dict[str, str]] = {}
    for name, result in results.items():
        for key, value in _settings(result).items():
            facts.setdefault(key, {})[name] = value
    rows = [[key, _by_value(values, len(results))] for key, values in facts.items()]
    return [
        markdown(
            ["task", "metric", "scored by", "shots", "prompt", "items"], tasks, left=6
        ),
        markdown(["setting", "value"], rows, left=2),
    ]


def _settings(result: Result) -> dict[str, str]:
    """Return the settings of one evaluation, as text, beside those of its tasks."""
    settings, tasks = result["settings"], result["tasks"]
    cut = {task: row["prompts_cut"] for task, row in tasks.items() if row.get("prompts_cut")}  # fmt: skip
    limit, device = settings.get("limit"), settings.get("device")
    share = f"{100 * limit:g} %" if limit and limit < 1 else limit
    facts = {
        "items": f"the first {share} of every task" if limit else "all",
        "precision": settings.get("dtype"),
        "computed on": engine_of(settings) if settings.get("server") else device,
        "decoding": settings.get("decoding"),
        "prompts cut on the left": ", ".join(f"{task} {n}" for task, n in cut.items()),
        "date in the template": settings.get("template_date"),
        "router bias": settings.get("router_bias"),
        "capacity factor": _capacity(settings),
        "software": versions_text(settings),
        "sandbox": sandbox_text(result["sandbox"]) if result.get("sandbox") else None,
    }
    return {key: str(value) for key, value in facts.items() if value}


def _by_value(values: Mapping[str, str], num_models: int) -> str:
    """Format a setting of all models: the value, or each value with the models that
    have it.
    """
    models: dict[str, list[str]] = {}
    for name, value in values.items():
        models.setdefault(value, []).append(name)
    if len(values) == num_models and len(models) == 1:
        return next(iter(models))
    return "; ".join(f"{value} ({', '.join(names)})" for value, names in models.items())


def sandbox_text(sandbox: Mapping[str, Any]) -> str:
    """Format the layers of a sandbox: `namespaces user pid net, landlock_abi 7,
    seccomp, without rlimits`.
    """
    words = []
    for name, value in sandbox.items():
        if isinstance(value, bool):
            words.append(name if value else f"without {name}")
        else:
            values = value if isinstance(value, list) else [value]
            words.append(" ".join([name, *map(str, values)]))
    return ", ".join(words) or "its layers are not recorded"


def differing_settings(evaluated: Evaluated) -> str:
    """Name the settings that differ between results of the same items and prompts; ""
    if none do.
    """
    return "; ".join(
        f"{key}: {', '.join(f'{value} ({name})' for name, value in values.items())}"
        for key, values in _differing(evaluated).items()
    )


def _differing(evaluated: Evaluated) -> dict[str, dict[str, Any]]:
    by_key: dict[str, dict[str, Any]] = {}
    for name, evaluation in evaluated.items():
        settings = evaluation["result"]["settings"]
        compared = {
            key: settings.get(key)
            for key in ("limit", "dtype", "device", "scorer", "template_date")
        }
        compared["engine"] = engine_of(settings)
        compared["router bias"] = settings.get("router_bias", "none")
        compared["capacity factor"] = _capacity(settings) or "none"
        compared |= settings.get("versions", {}) | {
            f"sandbox {layer}": state
            for layer, state in (evaluation["result"].get("sandbox") or {}).items()
        }
        for key, value in compared.items():
            # Results of plain lm-eval lack most settings, and an unknown setting is not
            # a difference. A missing limit, however, means all items.
            if value is not None or key == "limit":
                by_key.setdefault(key, {})[name] = value
    return {
        key: values
        for key, values in by_key.items()
        if len(set(map(str, values.values()))) > 1
    }


def _capacity(settings: Mapping[str, Any]) -> str:
    factor = settings.get("capacity_factor")
    return f"{factor:g} by {settings['capacity_drop']}" if factor else ""


def engine_of(settings: Mapping[str, Any]) -> str | None:
    """Name what computed the answers: a server or this process; None if unknown."""
    if server := settings.get("server"):
        words = [server["engine"], server["version"], server["parallelism"]]
        return (
            f"{' '.join(filter(None, words))}, by"
            f" HTTP{'' if server['check'] else ', not checked'}"
        )
    return "in memory" if settings.get("device") else None


def settings_line(result: Result) -> str:
    """Format shots, chat template and cut prompts of each task, dtype, decoding and
    versions in one line.
    """
    settings = result["settings"]
    tasks = []
    for task, row in result["tasks"].items():
        text = f"{task} {row['num_fewshot']}-shot"
        if row.get("chat_template"):
            text += ", chat template"
        if cut := row.get("prompts_cut"):
            text += (
                f", {cut} of {row['num_items']} prompts cut on the left to fit the"
                " model's positions"
            )
        if count := row.get("answers_at_limit"):
            text += f", {count} of {row['num_items']} answers at the token limit"
        if count := row.get("answers_with_thoughts"):
            text += f", {count} of {row['num_items']} answers with unasked thoughts"
        if closing := row.get("thoughts_closed_by"):
            text += f", {closing!r} added to prompts"
        tasks.append(text)
    computation = [str(settings["dtype"])] if settings.get("dtype") else []
    if settings.get("server"):
        computation.append(f"answers of {engine_of(settings)}")
    if settings.get("decoding"):
        computation.append(f"decoding {settings['decoding']}")
    words = ["; ".join(tasks), ", ".join(computation), versions_text(settings)]
    return "; ".join(filter(None, words))


def versions_text(settings: Mapping[str, Any]) -> str:
    """Format the versions in a record: `fcsd 0.1.0, lm-eval 0.4.13`."""
    versions = settings.get("versions", {})
    return ", ".join(f"{name} {version}" for name, version in versions.items())
