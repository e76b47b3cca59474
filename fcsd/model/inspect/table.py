"""Format the facts about a checkpoint as text."""

from collections.abc import Iterator, Mapping
from typing import Any

from fcsd.base.repository import plugin_install
from fcsd.base.text import markdown, named, size
from fcsd.model.connectivity.selection import ranges

PARTS = {
    "embeddings": "embeddings",
    "lm_head": "LM head",
    "attention": "attention",
    "dense_mlp": "dense MLPs",
    "shared_experts": "shared experts",
    "routed_experts": "routed experts",
    "router": "routers",
    "connections": "mixes of streams",
    "norms": "norms",
    "other": "other (vision, projector)",
}
"""Parts of a model -> words. `attention` is every sequence mixer of the decoder layers;
`other` is outside them.
"""


def report_table(facts: Mapping[str, Any]) -> str:
    """Format the facts of `fcsd.model.inspect.inspect_model` as `fcsd inspect` prints
    them.
    """
    head = [named(*row) for row in _head(facts)]
    return "\n\n".join("\n".join(part) for part in (head, *_tables(facts)))


def _head(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield names and texts of the facts that take a line each."""
    revision = f" @ {facts['revision']}" if facts["revision"] else ""
    yield "model", facts["model"] + revision
    if facts["shipped_config"]:
        yield "config", "config.json as shipped with fcsd; the Hub did not give it"
    architecture = facts["architecture"] or "architecture not named"
    yield "family", f"{_family(facts)}, {architecture}"
    yield "conversion", _conversion(facts)
    yield "layers", _layers(facts["layers"])
    yield "experts", _experts(facts["experts"])
    yield (
        "connectivity",
        _connectivity(facts["connectivity"], facts["layers"]["total"]),
    )
    if facts["needs"]:
        yield "to run it", facts["needs"]
    if facts["serve_command"]:
        yield (
            "serving",
            f"{facts['serve_command']}   (vLLM with fcsd-serving: {plugin_install()})",
        )
    if facts["quantization"]:
        yield (
            "quantised",
            f"{facts['quantization']}; memory below is that of the model without it",
        )
        if facts["loading_problem"]:
            yield "to load it", f"not on this machine: {facts['loading_problem']}"
        if facts["training_problem"]:
            yield "to train it", f"not possible: {facts['training_problem']}"
    # Never together with the rows above: left-over fields do not count as quantised.
    if facts["leftover_quantization"]:
        yield (
            "quantised",
            f"no: the fields of {facts['leftover_quantization']} are left over, and"
            " `fcsd convert` leaves them out",
        )
    if (files := facts["files"]) is not None:
        text = (
            f"{files['count']} safetensors, {size(files['total_bytes'])}, largest"
            f" {size(files['largest_bytes'])}"
        )
        if files["missing"]:
            text += (
                f"; {len(files['missing'])} MISSING, the first is {files['missing'][0]}"
            )
        yield "weights", text
        if facts["stale_index"]:
            yield "STALE INDEX", facts["stale_index"]
    elif facts["config_only"]:
        yield (
            "weights",
            "none: written by `fcsd convert --config-only`, for servers with dummy"
            " weights, which `fcsd-bench serve` times",
        )


def _family(facts: Mapping[str, Any]) -> str:
    """Return the family, and the model type if the config has another name for it (AMD's
    Instella-MoE).
    """
    model_type, family = facts["model_type"], facts["family"]
    if family is None or model_type.endswith(family):
        return model_type
    return f"{family} (written as {model_type})"


def _conversion(facts: Mapping[str, Any]) -> str:
    if not facts["can_be_converted"]:
        return f"not possible: {facts['reason']}"
    if facts["connectivity_keys"] == "instella":
        return "is already FarSkip, with AMD's keys; `fcsd convert` writes fcsd's keys"
    if facts["connectivity"] is not None:
        option = " --config-only" if facts["config_only"] else ""
        return f"is already FarSkip; `fcsd convert{option}` can choose other layers"
    return "can be converted"


def _layers(layers: Mapping[str, Any]) -> str:
    if layers["total"] is None:
        return "unknown"
    if layers["moe"] is None:
        return f"{layers['total']}"
    dense = ""
    if layers["dense"]:
        dense = f", {len(layers['dense'])} dense ({ranges(layers['dense'])})"
    return (
        f"{layers['total']}: {len(layers['moe'])} MoE ({ranges(layers['moe'])}){dense}"
    )


def _experts(experts: Mapping[str, Any]) -> str:
    if not experts["routed"]:
        return "none"
    shared = {
        True: "with shared experts",
        False: "no shared expert",
        None: "shared experts unknown",
    }
    return (
        f"{experts['routed']} routed, {experts['per_token'] or '?'} per token,"
        f" {shared[experts['shared']]}"
    )


def _connectivity(field: Mapping[str, Any] | None, total: int) -> str:
    if field is None:
        return "regular"
    layers = f"{len(field['layers'])} of {total} layers ({ranges(field['layers'])})"
    return f"FarSkip in {layers}, attention {field['attention']}, mlp {field['mlp']}"


def _tables(facts: Mapping[str, Any]) -> Iterator[list[str]]:
    if facts["selections"]:
        rows = [
            [
                name,
                str(len(chosen["layers"])),
                str(chosen["moe"]),
                ranges(chosen["layers"]),
            ]
            for name, chosen in facts["selections"].items()
        ]
        yield [markdown(["--layers", "rewired", "of them MoE", "which"], rows)]
    parameters = facts["parameters"]
    # transformers cannot build its model, so its memory is unknown too.
    if parameters is None:
        text = (
            "unknown: transformers has no class for this model type, and no remote code"
            " is run"
        )
        yield [named("parameters", text)]
        return
    rows = [
        [PARTS[part], f"{row['total']:,}", _number(row["active"])]
        for part, row in parameters["parts"].items()
    ]
    rows.append(["all", f"{parameters['total']:,}", _number(parameters["active"])])
    yield [markdown(["parameters", "total", "one text token uses"], rows)]
    yield _memory(facts["memory"])


def _memory(memory: Mapping[str, Any]) -> list[str]:
    convert, serve = memory["convert"], memory["serve"]
    lines = [
        "memory, 1 GiB = 2^30 bytes; run `fcsd estimate RECIPE` for the memory of a"
        " training"
    ]
    if convert is not None:
        # Both are unknown where the Hub did not tell the sizes of files.
        shard, copies = convert["at_most_bytes"], convert["disk_without_links_bytes"]
        text = (
            f"below one weight file{f' ({size(shard)})' if shard else ''}, whose bytes"
            f" are linked; {size(copies) if copies else 'their size'} of disk where the"
            " file system cannot link"
        )
        lines.append(named("convert", text, 16))
    text = (
        f"{size(serve['weights_bytes'])} of weights in bfloat16,"
        f" {_cache(serve['cache'])}"
    )
    return [*lines, named("serve", text, 16)]


def _cache(cache: Mapping[str, Any] | None) -> str:
    if cache is None:
        return "cache size unknown"
    text = (
        f"cache {size(cache['first_bytes'])} for {cache['tokens']} tokens of a sequence"
    )
    if cache["further_bytes"] != cache["first_bytes"]:
        text += (
            f", {size(cache['further_bytes'])} for as many more of a long one (windows)"
        )
    if cache["latent"]:
        text += " (latents of MLA)"
    return text


def _number(value: int | None) -> str:
    return "?" if value is None else f"{value:,}"
