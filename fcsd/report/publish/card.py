"""Write the results of a checkpoint to its model card (`README.md`) and as data
(`.eval_results/`), and assemble a run's folder for the Hub.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import (
    EvalResult,
    EvalResultEntry,
    ModelCard,
    eval_result_entries_to_yaml,
)

from fcsd.base.artifact import LEFT, check_outputs, model_outputs, read_manifest
from fcsd.base.errors import UserError
from fcsd.base.files import (
    file_fingerprint,
    read_checkpoint_json,
    read_json,
    write_sealed,
)
from fcsd.base.text import metric_words, nats
from fcsd.base.writing import is_noise, new_folder, write_text
from fcsd.evaluation.scores import Result, Row
from fcsd.model.connectivity.checkpoint import (
    CONFIG,
    all_files,
    files_like,
)
from fcsd.model.connectivity.export import link_or_copy, write_code
from fcsd.model.connectivity.modeling import MODELING_FILE
from fcsd.model.families import family_of
from fcsd.recipe.recipe import Recipe
from fcsd.report.comparison import ITEMS_LINK, sandbox_text, settings_line
from fcsd.report.publish.public import public_text, without_places
from fcsd.report.table import narrow_table, score_table
from fcsd.report.verdict import is_distance, quick_look, verdict_lines
from fcsd.training.card.card import card_of
from fcsd.training.card.facts import (
    CARD,
    HERE,
    Facts,
    has_chat_template,
    hub_id,
    inherited_from,
    licence_of,
    with_linked_licence,
)

RESULTS = ".eval_results"
# Data set -> id of the task in its `eval.yaml`, by which the Hub finds a result of a
# Benchmark. Among our suites' data sets, https://huggingface.co/docs/hub/eval-results
# names only this one as a Benchmark.
_BENCHMARK_TASKS = {"openai/gsm8k": "gsm8k"}


def write_card(facts: Facts, folder: Path) -> None:
    """Write `README.md`, and one file in `.eval_results/` for each task that was
    measured on a data set of the Hub.
    """
    write_text(folder / CARD, str(model_card(with_linked_licence(facts, folder))))
    for name, entry in result_entries(facts.result).items():
        (folder / RESULTS).mkdir(exist_ok=True)
        text = yaml.safe_dump(
            eval_result_entries_to_yaml([entry]), sort_keys=False, allow_unicode=True
        )
        write_text(folder / RESULTS / f"{name}.yaml", text)


def model_card(facts: Facts) -> ModelCard:
    """Build the card of `fcsd.training.card` with the measured results."""
    return card_of(facts, _result(facts), model_index(facts.result))


def _result(facts: Facts) -> dict[str, str] | None:
    result, comparison = facts.result, facts.comparison
    if result is None:
        return None
    kl = (result.get("kl_to_original") or {}).get("kl")
    is_code = any(row["kind"] == "code" for row in result["tasks"].values())
    return {
        "look": quick_look(result["settings"]["limit"]),
        "verdict": "\n\n".join(
            verdict_lines(facts.name.split("/")[-1], comparison) if comparison else []
        ),
        "table": (
            narrow_table(comparison)
            if comparison
            else score_table(result).partition("\n\n")[0]
        ),
        "settings": settings_line(result),
        "sandbox": sandbox_text(result.get("sandbox") or {}) if is_code else "",
        "kl": "" if kl is None else nats(kl),
    }


def _tasks(
    result: Result | None,
) -> list[tuple[str, Row, Row]]:
    """Return (task, measured row, suite row) of every task on a data set of the Hub; []
    for a quick look, which must not be taken for a result.
    """
    if result is None or result["settings"]["limit"]:
        return []
    # The suite's data set id, not the folder it was read from.
    suite = {
        row["task"]: row for row in result["settings"].get("suite", {}).get("tasks", [])
    }
    return [
        (task, row, suite[task])
        for task, row in result["tasks"].items()
        # A divergence from the original is no benchmark's result.
        if not is_distance(row)
        # Nor is one of its first items.
        and row["num_items"] == row.get("num_items_total", row["num_items"])
        and task in suite
        and hub_id(str(suite[task]["dataset"]))
    ]


def model_index(result: Result | None) -> list[EvalResult] | None:
    results = [
        EvalResult(
            task_type="text-generation",
            dataset_type=suite["dataset"],
            dataset_name=task,
            dataset_config=suite.get("dataset_name"),
            dataset_split=suite.get("split"),
            dataset_revision=row.get("revision"),
            dataset_args={"num_few_shot": row["num_fewshot"]},
            metric_type=row["metric"].partition(",")[0],
            metric_name=f"{metric_words(row['metric'])}, per cent",
            metric_value=round(100 * row["value"], 2),
        )
        for task, row, suite in _tasks(result)
    ]
    return results or None


def result_entries(result: Result | None) -> dict[str, EvalResultEntry]:
    """Return task -> entry of `.eval_results/TASK.yaml`, in per cent, with metric,
    shots and versions in the notes.
    """
    versions = (result or {}).get("settings", {}).get("versions", {})
    entries = {}
    for task, row, suite in _tasks(result):
        error = "–" if row["stderr"] is None else f"{100 * row['stderr']:.2f}"
        entries[task] = EvalResultEntry(
            dataset_id=suite["dataset"],
            task_id=_BENCHMARK_TASKS.get(suite["dataset"])
            or suite.get("dataset_name")
            or "default",
            dataset_revision=row.get("revision"),
            value=round(100 * row["value"], 2),
            notes=(
                f"{task}: {row['metric']} in per cent ± {error},"
                f" {row['num_fewshot']}-shot, n = {row['num_items']}"
                + (", chat template" if row.get("chat_template") else "")
                + "".join(
                    f", {name} {versions[name]}"
                    for name in ("fcsd", "lm-eval")
                    if name in versions
                )
            ),
        )
    return entries


def write_publication(
    recipe: Recipe,
    original: Path | None,
    model: Path,
    report_folder: Path,
    folder: Path,
) -> None:
    """Assemble the folder for the Hub from the distilled model and the report.

    Weights are hard-linked where the file system allows. original: folder of the
    original checkpoint, whose licence files are copied.
    """
    report = read_json(report_folder / "report.json")
    if not (model / CONFIG).is_file():
        if not (model.parent / "manifest.json").is_file():
            raise UserError(
                f"{model}: no such model yet; distil it first (`fcsd run RECIPE --only"
                " distill`)"
            )
        raise UserError(
            f"{model}: holds no model, although its stage has finished; remove"
            f" {model.parent} to run the stage again"
        )
    check_outputs(model.parent)
    config = read_checkpoint_json(model / CONFIG)
    with new_folder(folder, "report.json", "publication") as new:
        for file in all_files(model):
            if file.name != MODELING_FILE and not is_noise(file.name):
                (new / file.relative_to(model)).parent.mkdir(exist_ok=True)
                place(file, new / file.relative_to(model))
        # The code is written anew and not copied, because an old checkpoint may hold
        # older code.
        if "auto_map" in config:
            write_code(model, family_of(config), new)
        reported = [
            file
            for file in sorted(report_folder.iterdir())
            if file.suffix in (".json", ".png")
        ]
        for file in reported:
            if file.suffix == ".json":
                write_text(
                    new / file.name,
                    public_text(file.name, file.read_text(encoding="utf-8")),
                )
            else:
                shutil.copyfile(file, new / file.name)
        # The page of all answers stays local: it holds the benchmarks' questions, which
        # should not spread.
        text = (report_folder / "report.md").read_text(encoding="utf-8")
        write_text(new / "report.md", without_places(text.replace(ITEMS_LINK, "")))
        for file in files_like(original, ["LICENSE*"]) if original is not None else ():
            if not (new / file.name).exists():
                shutil.copyfile(file, new / file.name)
        write_card(facts_of_run(recipe, report, config, original, new), new)
        # Whoever reads the folder compares it with these: all that it was made with,
        # except the card, which is the user's to edit.
        weights = read_manifest(model.parent).get("outputs", {}).get("model", "")
        left = model_outputs(new, weights)
        names = ["report.md", *(file.name for file in reported)]
        left |= {name: file_fingerprint(new / name) for name in names}
        if not weights:  # the record of a former fcsd does not name them
            del left["model"]
        write_sealed(new / LEFT, left)


def facts_of_run(
    recipe: Recipe,
    report: Mapping[str, Any],
    config: Mapping[str, Any],
    original: Path | None,
    folder: Path,
) -> Facts:
    """Collect the facts that a run records about its main model.

    folder: the publish folder, of whose figures the card shows those that exist.
    """
    publication = recipe.publication
    base = publication.base_model or recipe.model.path or None
    inherited = inherited_from(original) if original is not None else {}
    # The figures that the card shows; a run may have drawn only some of them.
    captions = {
        "deltas.png": "Difference to the original.",
        "loss.png": "Training loss.",
    }
    main = report["models"].get("fcsd")
    return Facts(
        name=publication.repo_id or f"{recipe.name}-farskip",
        where=publication.repo_id or HERE,
        config=config,
        base=hub_id(base) if base is not None else None,
        licence=licence_of(inherited, publication.license),
        language=tuple(publication.language or inherited.get("language", [])),
        training=report["training"].get("fcsd"),
        chat=has_chat_template(folder),
        result=main["result"] if main is not None else None,
        comparison=report["comparisons"].get("fcsd"),
        report=True,
        figures={
            file: caption
            for file, caption in captions.items()
            if (folder / file).is_file()
        },
    )


def place(file: Path, to: Path) -> None:
    """Link weights where the file system allows; copy files that a reader may edit."""
    (link_or_copy if file.suffix == ".safetensors" else shutil.copyfile)(file, to)
