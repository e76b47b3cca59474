"""Write the model card of a checkpoint (`README.md`), its results as data (`.eval_results/`), and a run's folder for
the Hub.
"""

import dataclasses
import importlib.metadata
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, EvalResultEntry, ModelCard, ModelCardData, eval_result_entries_to_yaml

from fcsd.base.artifact import read_manifest
from fcsd.base.files import new_folder, read_json, write_text
from fcsd.base.fingerprints import write_sealed
from fcsd.base.text import items_text, metric_words, nats, plus_minus, scored_row, stopping_text
from fcsd.model.connectivity.export import link_or_copy
from fcsd.model.connectivity.modeling import supported_transformers
from fcsd.model.connectivity.spec import CALIBRATED
from fcsd.model.families import FAMILIES, base_model_type, serve_command
from fcsd.recipe.recipe import Recipe
from fcsd.report.comparison import ITEMS_LINK, settings_line
from fcsd.report.publish.facts import CARD, Facts, facts_of_run, hub_id
from fcsd.report.publish.public import public_text, without_places
from fcsd.report.table import narrow_table, score_table
from fcsd.report.verdict import quick_look, verdict
from fcsd.training.losses.objectives import OBJECTIVES

_TEMPLATE = Path(__file__).with_name("card.md")
RESULTS = ".eval_results"
LEFT = "files.json"  # in a publication: what identifies the model that it was made of
# Data set -> id of the task in its `eval.yaml`, by which the Hub finds a result of a Benchmark. The one of our suites'
# data sets that https://huggingface.co/docs/hub/eval-results names as a Benchmark.
_BENCHMARK_TASKS = {"openai/gsm8k": "gsm8k"}


def write_card(facts: Facts, folder: Path) -> None:
    """Write `README.md`, and a file a task in `.eval_results/` for what was measured on data sets of the Hub."""
    facts = dataclasses.replace(facts, licence=_linked(facts, folder))
    write_text(folder / CARD, str(model_card(facts)))
    for name, entry in result_entries(facts.result).items():
        (folder / RESULTS).mkdir(exist_ok=True)
        text = yaml.safe_dump(eval_result_entries_to_yaml([entry]), sort_keys=False, allow_unicode=True)
        write_text(folder / RESULTS / f"{name}.yaml", text)


def _linked(facts: Facts, folder: Path) -> dict[str, Any]:
    """Return the licence with a link that leads to the file beside the original's card, unless that is here."""
    link = str(facts.licence.get("license_link") or "")
    if not link or "://" in link or (folder / link).is_file():
        return dict(facts.licence)
    there = f"https://huggingface.co/{facts.base}/blob/main/{link}" if facts.base else None
    return {**facts.licence, "license_link": there}


def model_card(facts: Facts) -> ModelCard:
    """Write the card: what FarSkip is, which layers, results with their settings, recipe, limits, how to load."""
    heads = [name for name in facts.config.get("auto_map", {}) if name.startswith("AutoModelFor")]
    auto = heads[0] if heads and "AutoModelForCausalLM" not in heads else "AutoModelForCausalLM"
    text_only = auto == "AutoModelForCausalLM"
    reader, pipeline = ("tokenizer", "text-generation") if text_only else ("processor", "image-text-to-text")
    index = model_index(facts.result)
    data = ModelCardData(
        language=list(facts.language) or None,
        license=facts.licence.get("license"),
        license_name=facts.licence.get("license_name"),
        license_link=facts.licence.get("license_link"),
        base_model=facts.base,
        base_model_relation="finetune" if facts.base else None,
        datasets=[path for path in _paths((facts.training or {}).get("settings", {})) if hub_id(path)]
        or None,
        library_name="transformers",
        pipeline_tag=pipeline,
        tags=["farskip", "moe", *(["self-distillation"] if _distilled(facts.training) else [])],
        model_name=facts.name if index else None,
        eval_results=index,
    )
    text_config = facts.config.get("text_config") or facts.config
    model_type = str(facts.config.get("model_type"))
    family = FAMILIES.get(base_model_type(model_type))
    return ModelCard.from_template(
        data,
        str(_TEMPLATE),
        facts=facts,
        farskip=facts.config["farskip"],
        num_layers=text_config["num_hidden_layers"],
        untrained=_untrained(facts),
        auto=auto,
        reader=reader,
        supported=supported_transformers(family) if family else ">=5.23,<6",
        transformers=importlib.metadata.version("transformers"),
        serve=serve_command(model_type, facts.where),
        result=_result(facts),
        training=_training(facts),
    )


def _result(facts: Facts) -> dict[str, str] | None:
    result, comparison = facts.result, facts.comparison
    if result is None:
        return None
    kl = (result.get("kl_to_original") or {}).get("kl")
    is_code = any(row["kind"] == "code" for row in result["tasks"].values())
    return {
        "look": quick_look(result["settings"]["limit"]),
        "verdict": verdict(facts.name.split("/")[-1], comparison) if comparison else "",
        "table": narrow_table(comparison) if comparison else score_table(result).partition("\n\n")[0],
        "settings": settings_line(result),
        "sandbox": _layers(result.get("sandbox") or {}) if is_code else "",
        "kl": "" if kl is None else nats(kl),
    }


def _layers(sandbox: Mapping[str, Any]) -> str:
    """Describe `namespaces user pid net, landlock_abi 7, seccomp, without rlimits`."""
    words = []
    for name, value in sandbox.items():
        if isinstance(value, bool):
            words.append(name if value else f"without {name}")
        else:
            words.append(f"{name} {' '.join(map(str, value)) if isinstance(value, list) else value}")
    return ", ".join(words) or "its layers are not recorded"


def _untrained(facts: Facts) -> bool:
    training = facts.training
    copied = training is not None and not _has_steps(training) and CALIBRATED not in facts.config
    return facts.untrained or copied


def _has_steps(training: Mapping[str, Any]) -> bool:
    untrained = training["stage"] in ("convert", "calibrate")
    return not untrained and training.get("results", {}).get("steps") != 0


def _distilled(training: Mapping[str, Any] | None) -> bool:
    return (
        training is not None
        and training["stage"] == "distill"
        and _has_steps(training)
        and OBJECTIVES[_objective(training)].has_teacher
    )


def _objective(training: Mapping[str, Any]) -> str:
    return str(training["settings"].get("objective", {}).get("name", "ce"))


def _training(facts: Facts) -> str:
    training = facts.training
    if (calibrated := _calibrated(facts)) and (training is None or not _has_steps(training)):
        sources = _sources(training["settings"]) if training is not None else ""
        return f"Rewired with fcsd, not trained. {calibrated}{sources}"
    if _untrained(facts):
        return "Rewired with fcsd, not trained: the weights are those of the original."
    if training is None:
        return "How the weights were trained after the conversion, if they were, is not recorded."
    settings, results = training["settings"], training["results"]
    train = settings.get("train", {})
    inputs, lora = training.get("inputs", {}), settings.get("lora")
    own = inputs.get("teacher", inputs.get("original")) == inputs.get("original")
    teacher = "the original checkpoint" if own else "another checkpoint than the original"
    objective = _objective(training)
    fcsd = f"Self-distillation (FCSD): teacher is {teacher}, objective `{objective}`"
    lines = [
        f"{OBJECTIVES[objective].trained.get(objective, fcsd)}, {results.get('steps', 0)} steps of"
        f" {train.get('batch_size_tokens')} tokens, learning rate {train.get('learning_rate', 0):g}"
        + (f", LoRA of rank {lora['r']} merged into the weights." if lora else ".")
    ]
    if results.get("best_step") is not None:
        stopping = dict(scored_row(settings.get("early_stopping") or {}))
        outcome = results.get("early_stopping") or {}
        if stopping.get("dataset"):
            stopping |= {"dataset": _public(stopping["dataset"])}
        lines.append(f"The checkpoint of step {results['best_step']} was chosen by {stopping_text(stopping)}")
        if outcome:
            score = plus_minus(results["best_score"], outcome["best_stderr"])
            items = items_text(stopping["metric"], outcome["num_items"], outcome["num_items_total"])
            lines[-1] += f" ({score} on {items})"
        lines[-1] += "."
    if calibrated:
        lines.append(f"Before the training: {calibrated}")
    if sources := _sources(settings).strip():
        lines.append(sources)
    if overlapping := (results.get("decontamination") or {}).get("num_left_out"):
        lines.append(f"{overlapping} examples that overlap with test items were left out.")
    if bad := (results.get("bad_rows") or {}).get("num_left_out"):
        lines.append(f"{bad} examples that could not be tokenized were left out.")
    if facts.report:
        lines.append("The whole recipe, versions and per-item comparisons are in `report.md`.")
    return " ".join(lines)


def _calibrated(facts: Facts) -> str:
    """Say how a calibration changed the weights; "" where there was none."""
    entry = facts.config.get(CALIBRATED)
    if entry is None:
        return ""
    return (
        f"Calibrated with fcsd: closed-form maps, solved on {entry['tokens']:,} tokens against the original, are folded"
        f" into the weights of {len(entry['layers'])} layers, which are therefore not the original's."
    )


def _paths(settings: Mapping[str, Any]) -> list[str]:
    """List the data sets that a model was trained on; one may give several splits."""
    return list(dict.fromkeys(str(source["path"]) for source in settings.get("data", {}).get("train", [])))


def _sources(settings: Mapping[str, Any]) -> str:
    sources = dict.fromkeys(map(_public, _paths(settings)))
    return f" Data: {', '.join(f'`{source}`' for source in sources)}." if sources else ""


def _public(location: str) -> str:
    """Return a data set's hub id, or the last name of a local path: a card names no place of a machine."""
    return location if hub_id(location) else Path(location).name


def _tasks(result: Mapping[str, Any] | None) -> list[tuple[str, Mapping[str, Any], Mapping[str, Any]]]:
    """Yield (task, measured row, suite row) of every task on a data set of the Hub; nothing of a quick look."""
    if result is None or result["settings"]["limit"]:
        return []
    # The suite's data set id, not the folder it was read from.
    suite = {row["task"]: row for row in result["settings"].get("suite", {}).get("tasks", [])}
    return [
        (task, row, suite[task])
        for task, row in result["tasks"].items()
        if task in suite and hub_id(str(suite[task]["dataset"]))
    ]


def model_index(result: Mapping[str, Any] | None) -> list[EvalResult] | None:
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


def result_entries(result: Mapping[str, Any] | None) -> dict[str, EvalResultEntry]:
    """Return task -> entry of `.eval_results/TASK.yaml`: per cent, with the setting in the notes."""
    versions = (result or {}).get("settings", {}).get("versions", {})
    entries = {}
    for task, row, suite in _tasks(result):
        error = "–" if row["stderr"] is None else f"{100 * row['stderr']:.2f}"
        entries[task] = EvalResultEntry(
            dataset_id=suite["dataset"],
            task_id=_BENCHMARK_TASKS.get(suite["dataset"]) or suite.get("dataset_name") or "default",
            dataset_revision=row.get("revision"),
            value=round(100 * row["value"], 2),
            notes=(
                f"{task}: {row['metric']} in per cent ± {error}, {row['num_fewshot']}-shot,"
                f" n = {row['num_items']}"
                + (", chat template" if row.get("chat_template") else "")
                + "".join(f", {name} {versions[name]}" for name in ("fcsd", "lm-eval") if name in versions)
            ),
        )
    return entries


def write_publication(
    recipe: Recipe, original: Path | None, model: Path, report_folder: Path, folder: Path
) -> None:
    """Assemble the folder from the distilled model and the report; weights are hard-linked where the disk allows.

    original: folder of the original checkpoint, whose licence is inherited.
    """
    report = read_json(report_folder / "report.json")
    with new_folder(folder, "report.json", "publication") as new:
        for file in sorted(model.iterdir()):
            place(file, new / file.name)
        for file in sorted(report_folder.iterdir()):
            if file.suffix == ".json":
                write_text(new / file.name, public_text(file.name, file.read_text(encoding="utf-8")))
            elif file.suffix == ".png":
                shutil.copyfile(file, new / file.name)
        # The page of all answers holds the benchmarks' questions, which are not to spread: it stays here.
        text = (report_folder / "report.md").read_text(encoding="utf-8")
        write_text(new / "report.md", without_places(text.replace(ITEMS_LINK, "")))
        for file in sorted(original.glob("LICENSE*")) if original is not None else ():
            if file.is_file() and not (new / file.name).exists():
                shutil.copyfile(file, new / file.name)
        write_card(facts_of_run(recipe, report, read_json(model / "config.json"), original, new), new)
        outputs = read_manifest(model.parent).get("outputs", {})
        write_sealed(new / LEFT, {name: known for name, known in outputs.items() if _is_of_model(name)})


def _is_of_model(output: str) -> bool:
    return output.split("/")[0] == "model"


def place(file: Path, to: Path) -> None:
    """Link weights where the disk allows; copy what a reader may edit there."""
    (link_or_copy if file.suffix == ".safetensors" else shutil.copyfile)(file, to)
