"""The report of a run: the scores of every model, its losses against the original,
whether they are noise, and how it was trained.

Reads only the files that the stages left; writes `report.md`, the same as
`report.html` with its figures in it, `report.json`, figures,
`items.html` (all answers side by side) and `lm_eval/` (the results in lm-eval's files).
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fcsd.base.artifact import check_outputs, read_manifest, versions
from fcsd.base.errors import UserError
from fcsd.base.files import read_json
from fcsd.base.text import calibration_kl_text, fit, fold, stopping_text
from fcsd.base.writing import is_empty, new_folder, write_json, write_text
from fcsd.evaluation.config import CodeTaskConfig
from fcsd.evaluation.results import read_result
from fcsd.evaluation.scores import Row, compare, is_bound
from fcsd.planning.layers.first import special_layers, special_text
from fcsd.planning.layers.settings import KL, read_study
from fcsd.recipe.layout import MAIN, RunLayout
from fcsd.recipe.recipe import (
    EarlyStoppingConfig,
    HeldoutKLStoppingConfig,
    Recipe,
    to_yaml,
)
from fcsd.report.comparison import (
    ITEMS_LINK,
    LONG_TABLE,
    Evaluated,
    all_verdicts,
    chance_levels,
    compare_all,
    figure_parts,
    settings_tables,
    tables,
    verdicts,
    versions_text,
    write_details,
    written_lines,
)
from fcsd.report.figure import model_colours
from fcsd.report.page import write_page
from fcsd.report.plots import plot_models, plot_sweep
from fcsd.report.study_plots import plot_layers, studied_sides
from fcsd.report.table import models_table
from fcsd.report.training import (
    stopping_table,
    training_facts,
    training_text,
    trainings_table,
)
from fcsd.report.verdict import (
    is_distance,
    outcome,
    quick_look,
    trained_line,
)
from fcsd.training.sweep import choice_text, edges

SCHEMA_VERSION = 1
Report = dict[str, Any]  # the content of report.json
_FEW_TASKS = 5


def write_report(
    recipe: Recipe, names: Sequence[str], folder: Path, columns: int | None = None
) -> str:
    """Write the report of those models in `names` that have been evaluated; return the
    table of models and the verdicts, for a terminal of `columns` if given.

    Raises:
        UserError: the results were not measured on the same items, or on weights that
            no longer exist.
    """
    layout = RunLayout(Path(recipe.output_dir))
    evaluated = {
        name: _evaluated(layout, name)
        for name in sorted(names, key=lambda name: name != "original")
        if _is_finished(layout.evaluate / name)
    }
    training = {name: layout.stage(name) for name in names}
    training = {name: path for name, path in training.items() if _has_trained(path)}
    calibrated = _calibrated(
        [name for name in evaluated if name not in training], layout
    )
    comparisons = compare_all(evaluated) if "original" in evaluated else {}
    # The distilled model, the purpose of the run, comes before the untrained one.
    comparisons = {
        name: comparisons[name]
        for name in sorted(comparisons, key=lambda name: name != MAIN)
    }
    trained = {name: _training(path) for name, path in training.items()} | {
        name: _calibration(manifest) for name, manifest in calibrated.items()
    }
    models = {
        name: {
            "layers": _layers(layout, name),
            "training": trained.get(name, "-"),
            "result": evaluation["result"],
        }
        for name, evaluation in evaluated.items()
    }
    table = models_table(models) if models else "no model has been evaluated yet"
    written = written_lines(evaluated)
    look = quick_look(
        *(model["result"]["settings"]["limit"] for model in models.values())
    )
    if look:
        table += f"\n\n{look}"
    report: Report = {
        "schema_version": SCHEMA_VERSION,
        "recipe": recipe.dump(),
        "models": models,
        "comparisons": comparisons,
        "calibrations": _calibrations(calibrated),
        "training": {name: read_manifest(path) for name, path in training.items()},
        "trained": _trained(recipe, evaluated, training, layout),
        "sweep": (
            read_manifest(layout.sweep)["results"]
            if _is_finished(layout.sweep)
            else None
        ),
        "layers": read_study(layout.layers) if _is_finished(layout.layers) else None,
        "versions": versions(),
    }
    # Written aside and renamed, so that a report is never half of two runs.
    with new_folder(folder, "report.json", "report") as new:
        colours = model_colours(list(names))
        figures = write_details(evaluated, comparisons, training, new, colours)
        figures |= _figures(report, evaluated, look, colours, new)
        write_json(new / "report.json", report)
        sweep = layout.sweep if report["sweep"] is not None else None
        trainings = trainings_table(training, calibrated, sweep)
        opening = _opening(report, training)
        text = _markdown(recipe, report, table, written, figures, opening, trainings)
        write_text(new / "report.md", text)
        write_page(text, new / "report.html")
    lines = [*all_verdicts(comparisons), *_trained_lines(report)]
    if models and columns is not None:
        table = "\n\n".join(filter(None, [models_table(models, columns), look]))
    parts = [table, "\n".join(lines).replace("**", ""), *written]
    return fit("\n\n".join(parts).rstrip(), columns)


def _is_finished(folder: Path) -> bool:
    """Tell whether a stage has finished; a line says that an unfinished one is left out."""
    if read_manifest(folder):
        return True
    if folder.is_dir() and not is_empty(folder):
        print(
            f"report: {folder}: is not finished (no manifest.json), so the report leaves"
            " it out",
            file=sys.stderr,
        )
    return False


def _has_trained(stage: Path) -> bool:
    manifest, file = read_manifest(stage), "history.jsonl"
    # Where the manifest names a file that is gone, reading it is an error.
    return bool(manifest) and (
        file in manifest.get("outputs", {}) or (stage / file).is_file()
    )


def _evaluated(layout: RunLayout, name: str) -> Row:
    """Read result and samples of one model; refuse results of weights that the run no
    longer has.
    """
    stage, scores = layout.stage(name), layout.evaluate / name
    if stage.is_dir() and not is_empty(stage) and not read_manifest(stage):
        raise UserError(
            f"{stage / 'manifest.json'}: no such file, although {name} has been"
            " evaluated; `fcsd run` finishes the stage again"
        )
    current = read_manifest(stage).get("outputs", {}).get("model")
    measured = read_manifest(scores).get("inputs", {}).get("model")
    if current is not None and measured is not None and current != measured:
        raise UserError(
            f"{scores}: was measured on other weights than those in {stage}; remove it,"
            " and run `fcsd run` to evaluate again"
        )
    result, samples = read_result(scores)
    return {"result": result, "samples": samples}


def _layers(layout: RunLayout, name: str) -> str:
    """Count the rewired layers in the config of the evaluated checkpoint."""
    if name == "original":
        return "0"
    model = layout.model(name)
    check_outputs(model.parent, "model/config.json")
    config = read_json(model / "config.json")
    farskip = config.get("farskip") or {"layers": []}
    rewired = {"attention": "partial", "mlp": "outdated"}
    branches = [
        name for name, setting in rewired.items() if farskip.get(name) == setting
    ]
    only = f" ({branches[0]} only)" if len(branches) == 1 else ""
    if isinstance(farskip.get("mlp"), list):
        only = f" (mlp of {len(farskip['mlp'])})"
    # In a multimodal model only the text stack is rewired.
    text = config.get("text_config", config)
    return f"{len(farskip['layers'])}/{text['num_hidden_layers']}{only}"


def _calibrations(calibrated: Mapping[str, Any]) -> Report:
    """Return the KL that the calibrations measured, as far as they held out text."""
    measured = {name: of["results"].get("kl") for name, of in calibrated.items()}
    return {name: kl for name, kl in measured.items() if kl}


def _calibration(manifest: Report) -> str:
    return f"none; calibrated on {manifest['results']['tokens']:,} tokens"


def _calibrated(untrained: Iterable[str], layout: RunLayout) -> Report:
    """Return the manifests of the untrained models that are calibrated."""
    manifests = {name: read_manifest(layout.stage(name)) for name in untrained}
    return {
        name: manifest
        for name, manifest in manifests.items()
        if "tokens" in manifest.get("results", {})
    }


def _trained(
    recipe: Recipe,
    evaluated: Evaluated,
    training: Mapping[str, Path],
    layout: RunLayout,
) -> Row:
    """Compare what trained models write with what the untrained models write that their
    trainings began with, where the run has evaluated those: did the training help?
    """
    compared = {}
    for name, path in training.items():
        start, settings = "converted", read_manifest(path)["settings"]
        if calibration := settings.get("calibration"):
            # A variant may begin with weights that are calibrated in another way.
            ours = recipe.calibration and recipe.calibration.model_dump(mode="json")
            start = "calibrated" if calibration == ours else ""
        if not {start, name} <= evaluated.keys():
            continue
        rows = [evaluated[model]["result"]["tasks"] for model in (start, name)]
        tasks = [
            task
            for task in rows[0]
            if is_distance(rows[0][task])
            and rows[0][task]["value"]
            and is_bound(rows[0][task]) == is_bound(rows[1][task])
        ]
        if tasks and _rewired(layout, start) == _rewired(layout, name):
            comparison = compare(evaluated[start], evaluated[name], tasks)
            compared[name] = {"start": start, "tasks": comparison["tasks"]}
    return compared


def _rewired(layout: RunLayout, name: str) -> Any:
    return read_json(layout.model(name) / "config.json").get("farskip")


def _trained_lines(report: Report) -> list[str]:
    return [trained_line(name, **facts) for name, facts in report["trained"].items()]


def _training(path: Path) -> str:
    manifest = read_manifest(path)
    settings = manifest["settings"].get("objective", {"name": "ce"})
    words, results = [settings["name"]], manifest["results"]
    if own_text := settings.get("own_text"):
        words.append(f"{own_text:.0%} own text")
    words.append(_number(results["steps"], "step"))
    if results.get("best_step") is not None:
        words.append(f"best at {results['best_step']}")
    if skipped := results.get("skipped_steps"):
        words.append(_number(skipped, "skipped step"))
    if bad := (results.get("bad_rows") or {}).get("num_left_out"):
        words.append(f"{_number(bad, 'bad row')} left out")
    return ", ".join(words)


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _figures(
    report: Report,
    evaluated: Evaluated,
    look: str,
    colours: Mapping[str, str],
    folder: Path,
) -> dict[str, str]:
    """Draw models side by side, layer study and sweep, as far as the run has them, and
    return file name -> caption.
    """
    figures: dict[str, str] = {}
    models = report["models"]
    first = next(iter(models.values()))["result"]["tasks"] if models else {}
    tasks = [task for task, row in first.items() if not is_distance(row)]
    if len(tasks) > _FEW_TASKS:  # a few tasks are easier to read in the table
        scores = {
            name: {
                task: (row["value"], row["stderr"] or 0.0)
                for task, row in model["result"]["tasks"].items()
                if task in tasks
            }
            for name, model in models.items()
        }
        chance = chance_levels(evaluated)
        plot_models(tasks, scores, folder / "models.png", colours, look, chance)
        dotted = "; dotted: score of random guessing" if chance else ""
        figures["models.png"] = (
            f"Scores of every model; bars are one standard error{dotted}."
        )
    if report["layers"] is not None:
        plot_layers(report["layers"], folder / "layers.png")
        alone = any(point["side"] == "single" for point in report["layers"]["points"])
        caption = (
            "KL to the original, untrained, against the rewired layers"
            f"{studied_sides(report['layers'])}: from either end (paper Fig. 3)"
            f"{', and alone' if alone else ''}."
        )
        facts = {
            "metric": report["layers"]["metrics"][0],
            "special_layers": special_layers(report["layers"], KL),
        }
        notes = filter(None, special_text(facts))
        figures["layers.png"] = " ".join([caption, *notes])
    if report["sweep"] is not None:
        plot_sweep(report["sweep"], folder)
        figures["sweep.png"] = "The sweep: batch size first, then learning rate."
    return figures


def _opening(report: Report, training: Mapping[str, Path]) -> list[str]:
    """Say at the top of the page how the run ended: the outcome of its main model, when
    and how that was trained, and the way to all answers.
    """
    parts, comparisons = [], report["comparisons"]
    main = MAIN if MAIN in comparisons else next(iter(comparisons), "")
    if main:
        parts.append(outcome(main, comparisons[main]))
    if main in training:
        facts = training_facts(training[main])
        day = f"Finished on {facts['finished'][:10]}; " if facts["finished"] else ""
        parts.append(f"{day}`{main}` was {training_text(facts)}")
    if comparisons:
        parts.append(ITEMS_LINK.strip())
    return parts


def _markdown(
    recipe: Recipe,
    report: Report,
    table: str,
    written: list[str],
    figures: dict[str, str],
    opening: list[str],
    trainings: str,
) -> str:
    stopping = recipe.early_stopping
    parts = [f"# Report of `{recipe.name}`", *opening]
    if report["comparisons"]:
        lines = _trained_lines(report)
        parts += ["## Verdict", *verdicts(report["comparisons"], lines)]
    parts += [
        "## Models",
        "Scores are percentages ± one standard error; KL is KL(original || model) in"
        f" nats per token{_heldout(recipe, report['models'])}."
        f" {_legend(recipe, report['models'])}",
        (
            fold("Every task of every model", table)
            if table.count("\n") > LONG_TABLE
            else table
        ),
        *written,
        *(
            f"The calibration of `{name}` measured another KL, on its own text, which"
            f" is not the held-out text of the table: {calibration_kl_text(kl)}."
            for name, kl in report["calibrations"].items()
        ),
    ]
    if trainings:
        parts += [
            "## Trainings",
            trainings,
            "Time and tokens per second: of the steps alone, without scores and"
            " checkpoints.",
        ]
    if stopping is not None:
        parts.append(
            "Early stopping and choice of checkpoint:"
            f" {stopping_text(stopping.settings)}, every {stopping.every_steps}"
            f" steps, patience {stopping.patience}, min_delta"
            f" {stopping.min_delta}.{_also_reported(stopping, report['models'])}"
        )
        parts += [stopping_table(report["training"])]
    if report["comparisons"]:
        parts += [
            "## Against the original, item by item",
            *tables(report["comparisons"]),
        ]
    if report["sweep"] is not None:
        sweep = report["sweep"]
        parts += [
            "## Sweep",
            f"{choice_text(sweep).capitalize()} (see `sweep/sweep.md`).",
            *(warning.capitalize() for warning in edges(sweep)),
        ]
    if figures:
        parts += ["## Figures", *figure_parts(figures)]
    # The recipe makes the report complete in itself, but few readers open it.
    folded_recipe = fold(
        "The whole recipe, with every default", f"```yaml\n{to_yaml(recipe.dump())}```"
    )
    parts += ["## Settings"]
    if report["models"]:
        parts += ["How the models were evaluated:", *settings_tables(report["models"])]
    software = f"Software of the report: {versions_text(report)}."
    parts += [software, "## Recipe", folded_recipe]
    return "\n\n".join(part for part in parts if part) + "\n"


def _heldout(recipe: Recipe, models: Report) -> str:
    """Name the text on which the KL of the models was measured."""
    measured = [model["result"].get("kl_to_original") for model in models.values()]
    counts = {kl["num_tokens"] for kl in measured if kl}
    if not counts or recipe.data is None or recipe.data.heldout is None:
        return " on held-out text"
    return f" on held-out text (`{recipe.data.heldout.path}`, {max(counts):,} tokens)"


def _legend(recipe: Recipe, models: Report) -> str:
    """Describe the models that every run has."""
    if recipe.only_pretrains:
        return (
            "`original` is the recipe's own pre-training; the other models are its"
            " variants."
        )
    text = (
        "`original` is the teacher, `converted` has the same weights, rewired and"
        " untrained"
    )
    if "calibrated" in models:
        text += ", `calibrated` has closed-form maps folded into these weights"
    return f"{text}."


def _also_reported(stopping: EarlyStoppingConfig, models: Report) -> str:
    """Warn where the checkpoint was chosen by the very items that it is evaluated on,
    which makes its score too good.
    """
    if isinstance(stopping, HeldoutKLStoppingConfig):
        return ""
    same = (stopping.row.dataset, stopping.row.dataset_name, stopping.row.split)
    # of rows that name no split
    default = {"code": CodeTaskConfig.model_fields["split"].default}
    graded = {
        row["task"]
        for model in models.values()
        for row in model["result"]["settings"]["suite"]["tasks"]
        if (
            row["dataset"],
            row.get("dataset_name"),
            row.get("split") or default.get(row["kind"]),
        )
        == same
    }
    if not graded:
        return ""
    return (
        f" **The same items are graded in {', '.join(sorted(graded))}: they are not an"
        " independent test of this choice.**"
    )
