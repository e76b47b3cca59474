"""The model card of a checkpoint: its nature, its making and how to load it, in one
text for all commands that write a card.

Not covered: measurements; `fcsd.report.publish.card` passes them as text.
"""

import importlib.metadata
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from fcsd.base.repository import plugin_install
from fcsd.base.text import (
    calibration_kl_text,
    items_text,
    plus_minus,
    scored_row,
    stopping_text,
)
from fcsd.model.connectivity.extra_tensors import promised_layers
from fcsd.model.connectivity.modeling import supported_transformers
from fcsd.model.connectivity.spec import CALIBRATED, changed_by
from fcsd.model.families import FAMILIES, base_model_type, serve_command
from fcsd.training.card.facts import Facts, hub_id
from fcsd.training.losses.objectives import OBJECTIVES

_TEMPLATE = Path(__file__).with_name("card.md")


def card_of(
    facts: Facts,
    result: Mapping[str, str] | None = None,
    index: list[EvalResult] | None = None,
) -> ModelCard:
    """Write the card: what FarSkip is, which layers, results with their settings,
    recipe, limits, how to load.

    result: the measurements as text, under the names of the template. index: the same
    as metadata.
    """
    # A multimodal model has another auto class, and is loaded with a processor.
    heads = [
        name
        for name in facts.config.get("auto_map", {})
        if name.startswith("AutoModelFor")
    ]
    auto = "AutoModelForCausalLM"
    if heads and "AutoModelForCausalLM" not in heads:
        auto = heads[0]
    text_only = auto == "AutoModelForCausalLM"
    if text_only:
        reader, pipeline = "tokenizer", "text-generation"
    else:
        reader, pipeline = "processor", "image-text-to-text"
    data = ModelCardData(
        language=list(facts.language) or None,
        license=facts.licence.get("license"),
        license_name=facts.licence.get("license_name"),
        license_link=facts.licence.get("license_link"),
        base_model=facts.base,
        base_model_relation="finetune" if facts.base else None,
        datasets=[
            path
            for path in _paths((facts.training or {}).get("settings", {}))
            if hub_id(path)
        ]
        or None,
        library_name="transformers",
        pipeline_tag=pipeline,
        tags=_tags(facts),
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
        plugin=plugin_install(published=True),
        result=result,
        training=_training(facts),
        mtp_layers=promised_layers(facts.config),
    )


def _tags(facts: Facts) -> list[str]:
    distilled = ["self-distillation"] if _distilled(facts.training) else []
    return list(dict.fromkeys(["farskip", "moe", *distilled, *facts.tags]))


def _untrained(facts: Facts) -> bool:
    training = facts.training
    # A stage has written the weights, has taken no step and has folded no maps.
    copied = (
        training is not None
        and not _has_steps(training)
        and CALIBRATED not in facts.config
    )
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
    training, calibrated = facts.training, _calibrated(facts)
    # The cases without a recorded training come first.
    if training is None and changed_by(facts.config) == "trained":
        return f"Rewired and trained with fcsd; how is not recorded. {calibrated}"
    if calibrated and (training is None or not _has_steps(training)):
        sources = measured = ""
        if training is not None:
            sources = _sources(training["settings"])
            measured = calibration_kl_text(training.get("results", {}).get("kl"))
        return f"Rewired with fcsd, not trained. {calibrated}{sources}" + (
            f" {measured}." if measured else ""
        )
    if _untrained(facts):
        return "Rewired with fcsd, not trained: the weights are the original's."
    if training is None:
        return (
            "It is not recorded whether and how the weights were trained after the"
            " conversion."
        )
    settings, results = training["settings"], training["results"]
    train = settings.get("train", {})
    inputs, lora = training.get("inputs", {}), settings.get("lora")
    # A stage without a teacher was compared with the original.
    teacher_is_original = inputs.get("teacher", inputs.get("original")) == inputs.get(
        "original"
    )
    teacher = training.get(
        "teacher",
        "the original checkpoint"
        if teacher_is_original
        else "another checkpoint than the original",
    )
    # Without a teacher the objective has its own opening sentence.
    objective = _objective(training)
    fcsd = f"Self-distillation (FCSD): teacher is {teacher}, objective `{objective}`"
    opening = OBJECTIVES[objective].trained.get(objective, fcsd)
    if own_text := training["settings"].get("objective", {}).get("own_text"):
        opening += f", {own_text:.0%} of the rows with text of its own"
    # Cross-entropy may also be the objective of a distillation stage.
    if training["stage"] != "pretrain":
        opening = opening.replace(" from scratch", "")
    lines = [
        f"{opening}, {results.get('steps', 0)} steps of"
        f" {train.get('batch_size_tokens')} tokens, learning rate"
        f" {train.get('learning_rate', 0):g}"
        + (f", LoRA of rank {lora['r']} merged into the weights." if lora else ".")
    ]
    if results.get("best_step") is not None:
        stopping = dict(scored_row(settings.get("early_stopping") or {}))
        outcome = results.get("early_stopping") or {}
        if stopping.get("dataset"):
            stopping |= {"dataset": public_name(stopping["dataset"])}
        lines.append(
            f"The checkpoint of step {results['best_step']} was chosen by"
            f" {stopping_text(stopping)}"
        )
        if outcome:
            score = plus_minus(results["best_score"], outcome["best_stderr"])
            items = items_text(
                stopping["metric"], outcome["num_items"], outcome["num_items_total"]
            )
            lines[-1] += f" ({score} on {items})"
        lines[-1] += "."
    if calibrated:
        lines.append(f"Before the training: {calibrated}")
    if sources := _sources(settings).strip():
        lines.append(sources)
    lines.extend(training.get("notes", []))
    if overlapping := (results.get("decontamination") or {}).get("num_left_out"):
        lines.append(
            f"{overlapping} examples that overlap with test items were left out."
        )
    if bad := (results.get("bad_rows") or {}).get("num_left_out"):
        lines.append(f"{bad} examples that could not be tokenized were left out.")
    if facts.report:
        lines.append(
            "The whole recipe, versions and per-item comparisons are in `report.md`."
        )
    return " ".join(lines)


def _calibrated(facts: Facts) -> str:
    """Describe how a calibration changed the weights; "" where there was none."""
    entry = facts.config.get(CALIBRATED)
    if entry is None:
        return ""
    return (
        f"Calibrated with fcsd: closed-form maps, fitted on {entry['tokens']:,} tokens"
        f" against the original, are folded into the weights of {len(entry['layers'])}"
        " layers, which are therefore not the original's."
    )


def _paths(settings: Mapping[str, Any]) -> list[str]:
    """List the data sets that a model was trained on, each once."""
    return list(
        dict.fromkeys(
            str(source["path"]) for source in settings.get("data", {}).get("train", [])
        )
    )


def _sources(settings: Mapping[str, Any]) -> str:
    sources = dict.fromkeys(map(public_name, _paths(settings)))
    if sources:
        text = f" Data: {', '.join(f'`{source}`' for source in sources)}."
        written = [
            f"`{public_name(source['path'])}`"
            for source in settings.get("data", {}).get("train", [])
            if source.get("written")
        ]
        if written:
            text += f" The original wrote the answers to {', '.join(written)}."
        return text
    return ""


def public_name(location: str) -> str:
    """Return the Hub id of a data set or model, or the last part of a local path, so
    that a card shows no directories.
    """
    return location if hub_id(location) else Path(location).name
