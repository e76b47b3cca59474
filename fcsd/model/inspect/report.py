"""Collect the facts about one checkpoint as plain data."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fcsd.base.errors import UserError
from fcsd.model.connectivity.aliases import has_instella_keys, instella_type
from fcsd.model.connectivity.selection import resolve_layers
from fcsd.model.connectivity.spec import Connectivity
from fcsd.model.families import (
    FAMILIES,
    PREFIX,
    Family,
    base_model_type,
    expert_counts,
    family_of,
    moe_mask,
    serve_command,
    text_config,
)
from fcsd.model.inspect.checkpoint import (
    Source,
    build_regular,
    checkpoint_dtype,
    config_object,
    find_source,
)
from fcsd.model.inspect.memory import BYTES, CACHE_TOKENS, cache_bytes
from fcsd.model.preserve import without_advice
from fcsd.model.quantised.methods import why_not_trained

SELECTIONS = (
    "all",
    "moe",
    "first:50%",
    "first:75%",
    "first:90%",
    "last:50%",
    "last:75%",
    "last:90%",
)


def inspect_model(path: str | Path, revision: str | None = None) -> dict[str, Any]:
    """Return the facts about a checkpoint that follow from its config, as JSON data;
    unknown values are None.

    Nothing is loaded and no code of the checkpoint runs. A family that cannot be
    converted is not an error: `can_be_converted` is false, `reason` says why, and the
    parameters are still counted if transformers can build the model.

    Raises:
        UserError: there is no such checkpoint, its config is damaged, or transformers
            refuses the config.
    """
    source = find_source(path, revision)
    raw = source.config
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise UserError(
            f"{source.where}: model_type is missing; a Hugging Face checkpoint names"
            " its family there"
        )
    if model_type.startswith(PREFIX) and "farskip" not in raw:
        raise UserError(
            f"{source.where}: model_type '{model_type}' without the field farskip;"
            " convert the original again"
        )
    names = raw.get("architectures")
    architecture = names[0] if isinstance(names, list) and names else None
    facts: dict[str, Any] = {
        "model": str(path),
        "revision": revision,
        "shipped_config": source.shipped,
        "model_type": model_type,
        "architecture": architecture,
        "quantization": (
            source.quantisation.words if source.quantisation is not None else None
        ),
        "leftover_quantization": None,
        "loading_problem": None,
        "training_problem": why_not_trained(source.quantisation),
        "serve_command": serve_command(
            model_type, str(path), weights=not source.config_only
        ),
    }
    # By the config's meaning: AMD's keys may differ from `model_type`.
    family = FAMILIES.get(base_model_type(instella_type(raw)))
    if family is None:
        facts |= _of_another_family(raw, source)
    else:
        facts |= _of_a_family(raw, family, source)
    facts |= {
        "files": _files(source),
        "config_only": source.config_only,
        "stale_index": source.stale_index or None,
    }
    # Only where nothing worse is known: one reason is enough, and the first counts.
    if source.missing_files and facts["can_be_converted"]:
        facts["can_be_converted"] = False
        facts["reason"] = (
            f"{len(source.missing_files)} weight files that the index names are"
            f" missing, the first is {source.missing_files[0]}; fetch the checkpoint"
            " again"
        )
    if source.pickle_advice and facts["can_be_converted"]:
        facts["can_be_converted"] = False
        facts["reason"] = f"no weights in safetensors; {source.pickle_advice}"
    # Last, because it reads the others' results: headers are read only for checkpoints
    # that can be converted.
    facts |= _of_weights(source, facts)
    facts["memory"] = _memory(facts, facts.pop("cache"), raw)
    return facts


def _of_weights(source: Source, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts that only the weights can tell, from the headers of local files,
    which are checked as `fcsd convert` and loading would.
    """
    from fcsd.model.connectivity.checkpoint import read_checkpoint
    from fcsd.model.connectivity.load import (
        check_tensors,
        config_and_class,
        misread_here,
    )
    from fcsd.model.quantised.methods import why_not_here, why_not_loaded

    quantisation = source.quantisation
    try:
        if source.folder is not None and facts["can_be_converted"]:
            checkpoint = read_checkpoint(source.folder)
            with without_advice():
                check_tensors(checkpoint, *config_and_class(checkpoint))
            # Fields of a quantisation that the tensors do not have any more.
            if checkpoint.leftover and quantisation is not None:
                return {
                    "quantization": None,
                    "leftover_quantization": quantisation.words,
                    "training_problem": None,
                }
        reason = why_not_loaded(quantisation) if quantisation is not None else None
        if reason is not None:
            raise UserError(f"{source.where}: {reason}")
    except UserError as error:
        return {"can_be_converted": False, "reason": facts["reason"] or str(error)}
    if quantisation is None:
        return {}
    with without_advice():
        problem = why_not_here(source.config)
        if problem is None and source.folder is not None:
            problem = misread_here(read_checkpoint(source.folder, any_family=True))
    return {"loading_problem": problem}


def _of_a_family(
    raw: Mapping[str, Any], family: Family, source: Source
) -> dict[str, Any]:
    """Return the facts about a checkpoint of a listed family."""
    import torch

    from fcsd.model.connectivity.modeling import classes_of
    from fcsd.model.inspect.parameters import count_parameters

    classes = classes_of(family)
    config = config_object(classes.config, raw, family.model_type, source.where)
    mask = moe_mask(config, family)
    text = text_config(config, family)
    experts, per_token = expert_counts(text)
    with torch.device("meta"):
        model = build_regular(classes.model._from_config, config, source.where)
    parameters = count_parameters(model, family, experts, per_token)
    # The family is listed, but this model of it may be dense, or have a part that is
    # not supported.
    reason = None
    try:
        family_of(config)
    except UserError as error:
        reason = _reason(error)
    connectivity, problem = _connectivity(mask, source)
    keys = "instella" if has_instella_keys(raw) else "fcsd"
    shared = bool(parameters["parts"].get("shared_experts"))
    return {
        "family": family.model_type,
        "can_be_converted": reason is None and problem is None,
        "reason": reason or problem,
        "connectivity": connectivity,
        "connectivity_keys": None if connectivity is None else keys,
        "needs": _needed_to_run(raw, family),
        "layers": {
            "total": len(mask),
            "moe": [index for index, is_moe in enumerate(mask) if is_moe],
            "dense": [index for index, is_moe in enumerate(mask) if not is_moe],
        },
        "experts": {"routed": experts, "per_token": per_token, "shared": shared},
        "selections": dict(_selections(mask)) if any(mask) else {},
        "parameters": parameters,
        "cache": _cache(text),
    }


def _of_another_family(raw: Mapping[str, Any], source: Source) -> dict[str, Any]:
    """Return the facts about an unlisted family, as far as transformers' own classes
    know it; no remote code runs.
    """
    from transformers import CONFIG_MAPPING

    model_type = str(raw["model_type"])
    try:
        # No row has this type, so this refuses, and tells how it fits in.
        family_of(raw)
        reason = None
    except UserError as error:
        reason = _reason(error)
    is_known = model_type in CONFIG_MAPPING
    config = None
    if is_known:
        config = config_object(
            CONFIG_MAPPING[model_type], raw, model_type, source.where
        )
    text = config.get_text_config() if config is not None else SimpleNamespace(**raw)
    total = _count_largest(config) if config is not None else None
    num_layers = getattr(text, "num_hidden_layers", None)
    experts, per_token = expert_counts(text)
    return {
        "family": None,
        "can_be_converted": False,
        "reason": reason,
        "connectivity": None,
        "connectivity_keys": None,
        "needs": None,
        "layers": {"total": num_layers, "moe": None, "dense": None},
        "experts": {"routed": experts, "per_token": per_token, "shared": None},
        "selections": {},
        "parameters": (
            None if total is None else {"total": total, "active": None, "parts": {}}
        ),
        "cache": _cache(text) if config is not None else None,
    }


def _reason(error: UserError) -> str:
    """Return the error's reason without its long list of the families that can be
    converted.
    """
    list_begin = r"; (?:the nearest|choose an MoE model|`fcsd families`)"
    text = re.split(list_begin, str(error))[0]
    return f"{text} (`fcsd families` lists what can)" if text != str(error) else text


def _count_largest(config: Any) -> int | None:
    """Count the parameters of the largest model class that transformers has for a
    config; None if it has none.
    """
    import torch
    from transformers import (
        AutoModel,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
    )

    # From the largest to the smallest: a wrapper with towers, a model with head, a body.
    for auto in (AutoModelForImageTextToText, AutoModelForCausalLM, AutoModel):
        try:
            with without_advice(), torch.device("meta"):
                return sum(
                    parameter.numel()
                    for parameter in auto.from_config(config).parameters()
                )
        # No such class for this config, or it cannot be built: try the next.
        except Exception:
            continue
    return None


def _connectivity(
    mask: list[bool], source: Source
) -> tuple[dict[str, Any] | None, str | None]:
    """Return the checkpoint's `farskip` field, translated from AMD's keys if it has
    those, and an error in it.
    """
    try:
        written = source.own_config.get("farskip")
        if written is None:
            return None, None
        field = Connectivity.from_field(written, source.where).field(mask)
    except UserError as error:
        return None, str(error)
    return (field if field["layers"] else None), None


def _needed_to_run(raw: Mapping[str, Any], family: Family) -> str | None:
    """Return what is needed to run a model whose classes transformers lacks; None for
    all others.
    """
    from fcsd.model.connectivity.modeling import supported_transformers

    if family.like is None:
        return None
    flag = f"transformers {supported_transformers(family)} and trust_remote_code=True"
    if instella_type(raw) == raw["model_type"]:
        return f"fcsd, or {flag}"
    return (
        f"fcsd, as it is; without it what `fcsd convert` writes, {flag}; transformers"
        " alone drops the gate"
    )


def _selections(mask: list[bool]) -> Iterator[tuple[str, dict[str, Any]]]:
    for selection in SELECTIONS:
        try:
            layers = resolve_layers(selection, mask)
        except UserError:  # a percentage that amounts to no layer
            layers = []
        yield selection, {"layers": layers, "moe": sum(mask[index] for index in layers)}


def _cache(text: Any) -> dict[str, Any] | None:
    # Past all windows, each further block of tokens takes the same number of bytes; the
    # 65th is assumed to be such.
    try:
        bytes_64, bytes_65 = (
            cache_bytes(text, count * CACHE_TOKENS) for count in (64, 65)
        )
        first_bytes = cache_bytes(text)
    # The config names attention differently, or a value depends on the layer.
    except Exception:
        return None
    if first_bytes is None or bytes_64 is None or bytes_65 is None:
        return None
    return {
        "tokens": CACHE_TOKENS,
        "first_bytes": first_bytes,
        "further_bytes": bytes_65 - bytes_64,
        "latent": bool(getattr(text, "kv_lora_rank", None)),
    }


def _files(source: Source) -> dict[str, Any] | None:
    sizes = source.file_sizes_bytes
    if not sizes and not source.missing_files:
        return None
    return {
        "count": len(sizes) + len(source.missing_files),
        "missing": list(source.missing_files),
        "total_bytes": sum(sizes.values()),
        "largest_bytes": max(sizes.values(), default=0),
    }


def _memory(
    facts: Mapping[str, Any], cache: dict[str, Any] | None, raw: Mapping[str, Any]
) -> dict[str, Any]:
    parameters = facts["parameters"]
    if parameters is None:
        return {"convert": None, "serve": None}
    number = parameters["total"]
    serve = {"weights_bytes": number * BYTES["bfloat16"], "cache": cache}
    if facts["family"] is None or facts["config_only"]:
        return {"convert": None, "serve": serve}
    # For a repository without file sizes; for quantised weights the number of bytes
    # does not follow from the number of parameters.
    copies = None if facts["quantization"] else number * BYTES[checkpoint_dtype(raw)]
    files = facts["files"]
    convert = {
        "at_most_bytes": files["largest_bytes"] if files else None,
        "disk_without_links_bytes": files["total_bytes"] if files else copies,
    }
    return {"convert": convert, "serve": serve}
