"""Format the measurements of a run as a table."""

import statistics
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from fcsd.parallel.overlap.exchange import Record
from fcsd.parallel.overlap.measure import Measured, keys_of


def from_records(records: Iterable[Record]) -> dict[str, Measured]:
    """Measure how much communication was hidden, by the host's clock: total is the time
    from launch to arrival, exposed the time that the host has waited. On a GPU a wait
    does not block the host, so only a trace is right there. Keys: as `keys_of`.
    """
    measured: dict[str, Measured] = defaultdict(Measured)
    for record in records:
        # Counts are small, and the host always waits for them.
        if record.kind == "counts" or record.waiting is None or record.waited is None:
            continue
        arrived = record.waited
        if record.done is not None:
            # A transport may report an arrival later than the wait that it ended.
            arrived = min(record.done, record.waited)
        for key in keys_of(record.kind, record.backward):
            measured[key].total += max(arrived, record.waiting) - record.started
            measured[key].exposed += record.waited - record.waiting
    return dict(measured)


def flat(measured: dict[str, Any]) -> dict[str, float]:
    return {
        f"{what} of {key}": getattr(value, what)
        for key, value in measured.items()
        for what in ("total", "exposed")
    }


def summary(
    measurements: dict[str, list[dict[str, Any]]],
) -> dict[str, dict[str, float]]:
    """Return for each mode the seconds of a step, their ratio to those of the first
    mode, and how much of the communication was hidden.
    """
    first = next(iter(measurements))
    table = {}
    for mode, rounds in measurements.items():
        row = {
            "step": statistics.median(each["step"] for each in rounds),
            "ratio": statistics.median(
                base["step"] / each["step"]
                for base, each in zip(measurements[first], rounds, strict=True)
            ),
        }
        for key in ("all", "forward", "backward", "dispatch", "combine"):
            shares = [
                1 - each[f"exposed of {key}"] / each[f"total of {key}"]
                for each in rounds
                if each.get(f"total of {key}")
            ]
            if shares:
                row[f"hidden of {key}"] = statistics.median(shares)
        totals = [
            each["total of all"] / each["step"]
            for each in rounds
            if "total of all" in each
        ]
        if totals:
            row["communication / step"] = statistics.median(totals)
        table[mode] = row
    return table


def write_blocking_times(options: Any, rounds: list[dict[str, Any]]) -> None:
    """Write the input of `fcsd plan --measured`: times of the blocking mode, and the
    configuration of its model.
    """
    from benchmarks.overlap.models import config_of
    from fcsd.model.connectivity.spec import ConnectivityConfig
    from fcsd.parallel.overlap.measure import median_times
    from fcsd.planning.cost.measured import ExchangeTime, Times, write_times

    config = config_of(options)
    config.save_pretrained(options.times)
    times = Times(
        model_type=config.model_type,
        num_layers=options.layers,
        connectivity=ConnectivityConfig(),
        ranks=options.ranks,
        batch=options.rows,
        length=options.length,
        step_s=statistics.median(each["step"] for each in rounds),
        exchanges=[
            ExchangeTime(**each)
            for each in median_times([each["exchanges"] for each in rounds])
        ],
        # sleeps are not slowed by what runs beside them
        slowdown=0.0 if options.compute == "sleeps" else None,
    )
    write_times(options.times / "times.json", times)


def printed(table: dict[str, dict[str, float]]) -> str:
    keys = ("all", "forward", "backward", "dispatch", "combine")
    head = [
        "mode",
        "ms per step",
        "times as fast as the first",
        "communication / step",
        *(f"hidden, {k}" for k in keys),
    ]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for mode, row in table.items():
        shares = [
            f"{row[f'hidden of {key}']:.1%}" if f"hidden of {key}" in row else "-"
            for key in keys
        ]
        share = (
            f"{row['communication / step']:.0%}"
            if "communication / step" in row
            else "-"
        )
        lines.append(
            "| "
            + " | ".join(
                [
                    mode,
                    f"{row['step'] * 1e3:.0f}",
                    f"{row['ratio']:.2f}",
                    share,
                    *shares,
                ]
            )
            + " |"
        )
    return "\n".join(lines)
