"""An estimate, for people."""

from collections.abc import Iterator, Mapping
from typing import Any

from fcsd.text import markdown, size


def estimate_table(facts: Mapping[str, Any]) -> str:
    """Format what `fcsd estimate` prints of `fcsd.cost.estimate`."""
    return "\n\n".join("\n".join(part) for part in _parts(facts))


def _parts(facts: Mapping[str, Any]) -> Iterator[list[str]]:
    yield _head(facts)
    memory = facts["memory"]
    rows = [[name, size(number)] for name, number in memory["parts"].items()]
    rows.append(["all", size(memory["total_bytes"])])
    yield [markdown(["memory of a rank", ""], rows)]
    yield [_fits(facts), *_activations(memory["activations"])]
    if facts["changes"]:
        rows = [
            [row["change"], size(row["total_bytes"]), _yes(row["fits"]), _yes(row["supported"])]
            for row in facts["changes"]
        ]
        yield [markdown(["change, on top of those above", "memory", "fits", "supported"], rows)]
    yield [_disk(facts["disk"])]
    flops = facts["flops"]
    rows = [[name, f"{number / 1e9:.2f}"] for name, number in flops["per_token"].items()]
    rows.append(["all", f"{sum(flops['per_token'].values()) / 1e9:.2f}"])
    yield [markdown(["10^9 operations a token", ""], rows)]
    yield _time(facts)
    rows = [
        [row["stage"], str(row["runs"]), f"{row['steps']:,}", f"{row['tokens']:.3g}", _range(row["hours"])]
        for row in facts["totals"]
    ]
    yield [markdown(["", "runs", "steps each", "tokens", "hours"], rows)]
    yield ["assumed:", *(f"- {text}" for text in facts["assumptions"])]


def _head(facts: Mapping[str, Any]) -> list[str]:
    hardware, settings, numbers = facts["hardware"], facts["settings"], facts["parameters"]
    notes = [
        name for name in ("gradient_checkpointing", "freeze_embeddings_and_head", "bf16") if settings[name]
    ]
    supported = "" if hardware["supported"] else " (not with lora)"
    rows = [
        ("run", f"{facts['recipe']}: {facts['run']}, objective {settings['objective']}"),
        ("model", f"{facts['model']}, {facts['model_type']}, {numbers['total']:,} parameters,"
         f" {numbers['trained']:,} trained"),
        ("hardware", f"{hardware['num_gpus']} x {hardware['name']}, sharding {hardware['sharding']}{supported}"),
        ("micro-batch", f"{settings['rows']} x {settings['max_length']} tokens a rank,"
         f" {settings['micro_batches']} a step"),
        ("training", ", ".join([settings["dtype"], *notes, *(["lora"] if settings["lora"] else [])])),
    ]  # fmt: skip
    if settings["teacher"]:
        rows.append(("teacher", settings["teacher"] + _cache(facts["cache"])))
    return [f"{name:<13} {text}" for name, text in rows]


def _cache(cache: Mapping[str, int] | None) -> str:
    if cache is None:
        return ""
    return (
        f": {size(cache['bytes_per_token'])} on disk a token with loss, {size(cache['at_most_bytes'])} for"
        f" {cache['at_most_tokens']:.3g} of them, should the training read no row twice"
    )


def _fits(facts: Mapping[str, Any]) -> str:
    memory = facts["memory"]
    room = f"{size(memory['total_bytes'])} of {size(memory['gpu_bytes'])}"
    if memory["fits"]:
        return f"fits          {room}"
    if not facts["changes"] or not facts["changes"][-1]["fits"]:
        return f"DOES NOT FIT  {room}; no change below is enough: a larger GPU or a smaller model is needed"
    return f"DOES NOT FIT  {room}; with the changes below it would"


def _activations(values: Mapping[str, int | None]) -> Iterator[str]:
    without, checkpointed = values["without_checkpointing_bytes"], values["with_checkpointing_bytes"]
    text = f"activations   {size(without or 0)} without activation checkpointing, "
    if checkpointed is None:
        yield text + "which this family does not support"
        return
    yield text + f"{size(checkpointed)} with it"
    inputs, second = values["layer_inputs_bytes"], values["second_inputs_bytes"]
    more = f", and {size(second)} for the second one of FarSkip layers" if second else ""
    yield f"              checkpointed inputs of the layers {size(inputs or 0)}{more}"


def _disk(disk: Mapping[str, int]) -> str:
    parts = [f"{disk['num_checkpoints']} checkpoints of {size(disk['checkpoint_bytes'])}"]
    if disk["best_bytes"]:
        parts.append(f"{size(disk['best_bytes'])} for the best weights and those being written beside them")
    parts.append(f"{size(disk['model_bytes'])} for the model")
    return f"disk          {size(disk['total_bytes'])}: {', '.join(parts)}"


def _time(facts: Mapping[str, Any]) -> list[str]:
    time, flops = facts["time"], facts["flops"]
    parts = {
        "compute": time["compute_s"],
        "reading and writing weights": time["memory_s"],
        "communication": time["communication_s"],
    }
    bound = max(parts, key=lambda name: parts[name])
    lines = [
        f"step          {flops['per_step'] / 1e15:.3g} x 10^15 operations, {_range(time['step_s'])} s,"
        f" {_range(time['tokens_per_second'])} tokens/s",
        f"at best       {', '.join(f'{name} {seconds:.2g} s' for name, seconds in parts.items())}: bound by {bound}",
    ]
    if flops["float32_share"] > 0:
        lines.append(f"float32       {flops['float32_share']:.0%} of the operations run in float32")
    tokens = facts["tokens"]
    few, one = (f"{seconds / 60:,.2g}" for seconds in tokens["seconds"])
    lines.append(
        f"tokens        {tokens['num_tokens']:,} once for all trainings: {size(tokens['bytes'])} on disk,"
        f" {few} min with {tokens['processes']} processes, {one} with one"
    )
    return lines


def _range(values: list[float]) -> str:
    low, high = (f"{value:,.0f}" if value >= 100 else f"{value:.2g}" for value in values)
    return low if low == high else f"{low} to {high}"


def _yes(value: bool) -> str:
    return "yes" if value else "no"
