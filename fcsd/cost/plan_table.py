"""A plan, for people."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fcsd.text import markdown, nats, size


def plan_table(facts: Mapping[str, Any]) -> str:
    """Format what `fcsd plan` prints of `fcsd.cost.plan`."""
    return "\n\n".join("\n".join(part) for part in _parts(facts))


def _parts(facts: Mapping[str, Any]) -> Iterator[list[str]]:
    yield _head(facts)
    yield [_result(facts["times"], facts["settings"]["phase"]), *_notes(facts)]
    yield [_windows(facts["times"])]
    if facts.get("study"):
        yield [_study(facts["study"])]
    if facts["memory"] is not None:
        memory = facts["memory"]
        rows = [[name, size(number)] for name, number in memory["parts"].items()]
        rows.append(["all", f"{size(memory['total_bytes'])} of {size(memory['gpu_bytes'])}"])
        yield [markdown(["memory of a rank", ""], rows)]
    if facts["sensitivity"]:
        yield [_sensitivity(facts["sensitivity"])]


def _head(facts: Mapping[str, Any]) -> list[str]:
    machine, settings = facts["machine"], facts["settings"]
    gpu = machine["gpu"]
    rewired = f"{len(settings['layers'])} of {settings['num_layers']} layers rewired"
    batch = f"{settings['batch']} x {settings['length']} tokens"
    if settings["phase"] == "train":
        ranks = f"expert parallel {settings['expert_parallel']}"
        batch += f" a rank, micro-batches of a step: {settings['micro_batches']}"
    else:
        ranks = (
            f"tensor parallel {settings['tensor_parallel']}, expert parallel {settings['expert_parallel']}"
        )
    network = "measured links" if facts["links"] else f"{machine['nic_gb_s']:g} GB/s a GPU between nodes"
    rows = [
        ("model", f"{facts['model']}, {facts['model_type']}, {rewired}"),
        ("machine", f"{machine['num_nodes']} x {machine['gpus_per_node']} x {gpu['name']}, {network}"),
        ("phase", f"{settings['phase']}, {ranks}, {batch}"),
    ]
    return [f"{name:<10} {text}" for name, text in rows]


def _result(times: Mapping[str, Any], phase: str) -> str:
    what = {"train": "step", "prefill": "time to first token", "decode": "time between tokens"}[phase]
    columns = [f"{what}, ms", "communication", "exposed", "times as fast"]
    share = times["communication_share"]
    rows = [
        ["regular", _ms(times["regular_s"]), f"{share:.1%}", f"{share:.1%}", "1.000"],
        [
            "overlapped",
            _ms(times["overlapped_s"]),
            f"{times['overlapped_communication_s'] / times['overlapped_s']:.1%}",
            f"{times['exposed_s'] / times['overlapped_s']:.1%}",
            f"{times['speed_up']:.3f}",
        ],
    ]
    return markdown(["", *columns], rows)


def _notes(facts: Mapping[str, Any]) -> Iterator[str]:
    times = facts["times"]
    yield "hidden: " + ", ".join(f"{name} {share:.1%}" for name, share in times["overlap"].items())
    if facts["upper_bound"]:
        least, most = facts["over_prediction"]
        gain = times["speed_up"] - 1
        yield (
            f"UPPER BOUND: measured gains in the time to the first token were {least:g} to {most:g} times smaller,"
            f" which makes {gain:.1%} {gain / most:.1%} to {gain / least:.1%}: a server takes longer than its"
            " roofline, and hides the same communication; measured times (--measured) give the gain f v / (1 - f v)"
        )
    elif facts["imbalance"] == 1 and "measured" not in facts:
        yield (
            "EVEN ROUTING is assumed (imbalance 1); fine-tuning on 16 H100 had 2.6 to 5.1: `fcsd routing` measures"
            " yours, --routing reads it"
        )
    if any(sharding := times.get("sharding_s", ())):
        yield (
            "FSDP2 gathers weights (forward, backward) and reduces gradients in every micro-batch; exposed of that:"
            f" {_ms(sharding[0])} ms of the regular step, {_ms(sharding[1])} ms of the overlapped one"
        )
    if (ratio := times.get("equation_9")) is not None:
        holds = "holds: necessary, not sufficient" if ratio <= 1 else "does not hold: something stays exposed"
        yield f"equation 9: (dispatch + combine) / (layer - experts - router) = {ratio:.2f}, {holds}"


def _windows(times: Mapping[str, Any]) -> str:
    """Format the windows of layers, equal neighbours as one row."""
    exchange, groups = times["exchange_s"], _groups(times["windows"])
    kinds = [name for name in times["windows"][0] if name != "layer"]
    rows = []
    for first, last, row in groups:
        layers = f"{first}" if first == last else f"{first}-{last}"
        cells = []
        for kind in kinds:
            name = kind.removesuffix("_s")
            cells += [_ms(exchange.get(name, exchange.get("all_reduce", 0.0))), _ms(row[kind])]
        rows.append([layers, *cells])
    names = {"attention_s": "attention's all-reduce", "routed_s": "routed all-reduce"}
    header = ["MoE layers"]
    for kind in kinds:
        name = names.get(kind, kind.removesuffix("_s"))
        header += [f"{name}, ms", "its window, ms"]
    return markdown(header, rows)


def _groups(rows: Sequence[Mapping[str, Any]]) -> list[tuple[int, int, Mapping[str, Any]]]:
    found: list[tuple[int, int, Mapping[str, Any]]] = []
    for row in rows:
        alike = found and all(row[key] == found[-1][2][key] for key in row if key != "layer")
        if alike and found[-1][1] == row["layer"] - 1:
            found[-1] = (found[-1][0], row["layer"], found[-1][2])
        else:
            found.append((row["layer"], row["layer"], row))
    return found


def _study(rows: Sequence[Mapping[str, Any]]) -> str:
    cells = [
        [
            row["selection"],
            row["weights"],
            str(row["num_layers"]),
            f"{row['speed_up']:.3f}",
            nats(row["loss"]),
        ]
        for row in rows
    ]
    return markdown(["--layers", "weights", "rewired", "times as fast", rows[0]["metric"]], cells, left=2)


def _sensitivity(rows: Sequence[Mapping[str, Any]]) -> str:
    def reach(row: Mapping[str, Any]) -> float:
        return float(abs(row["speed_up"][1] - row["speed_up"][0]))

    ordered = sorted((row for row in rows if reach(row) >= 5e-4), key=lambda row: -reach(row))
    without = ", ".join(row["name"] for row in rows if reach(row) < 5e-4)
    cells = [
        [
            row["name"],
            f"{row['value']:g}",
            f"{row['range'][0]:g} to {row['range'][1]:g}",
            f"{row['speed_up'][0]:.3f} to {row['speed_up'][1]:.3f}",
        ]
        for row in ordered
    ]
    table = markdown(["assumption", "value", "range", "times as fast"], cells)
    return "\n".join(
        [
            table,
            *([f"no effect on it: {without}"] if without else []),
            "what each assumption is, and its source: --json, or fcsd/cost/assumptions.py",
        ]
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f}" if seconds >= 0.1 else f"{seconds * 1e3:.3g}"
