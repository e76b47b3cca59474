"""Time one tensor-parallel rank's share of a decoding step on one GPU: random weights,
no engine, no other rank.

    python -m benchmarks.decode_step [--json OUT] [--times FOLDER]
    python -m benchmarks.decode_step --batch 16 64 --all-reduce 8:9,64:10,512:15 24 --sms 8 24

Attention over a paged cache, routed experts (torch's grouped matmuls), norms, router
and head run in one captured CUDA graph, with the shapes of a published configuration.
Where an all-reduce would run, a stand-in occupies as many multiprocessors as the real
one for as long (`benchmarks/decode_kernels.py`):

    in line       regular layers, which wait for each all-reduce
    side stream   FarSkip's order, that of serving/fcsd_vllm/schedule.py: the sum of attention's outputs runs beside
                  the experts, that of the experts' outputs beside the next layer's attention
    absent        regular layers without any

Printed are the figures on which a planned gain hangs:

    gaps       time in which no kernel runs. It is there in either order; the small kernels here make more of it than
               an engine's fused ones would
    hidden     share of the all-reduces' time in which another kernel runs
    slowdown   seconds of computation lost per hidden second, against the step without all-reduces
    saved      share of what the all-reduces cost in line that the side stream saves, after that slowdown

--times writes, for each setting, a file for `fcsd plan FOLDER --phase decode
--measured`. A time is the median over rounds, in which the captured graphs take turns
in a random order; the profiler has a run of its own, which gives the durations of the
kernels. On a CPU, a simulated clock takes the place of graph and stand-in: a rehearsal.

Not covered: sampling; the host's work between steps; the memory traffic of a real
all-reduce, and its wait for slower ranks.
"""

import argparse
import importlib.util
import json
import math
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.decode_devices import ALL_REDUCE, TRACED, Gpu, Rehearsal
from benchmarks.decode_rank import ATTENTION, Rank, shape_of
from fcsd.model.connectivity.spec import ConnectivityConfig
from fcsd.model.inspect.shipped import CONFIGS
from fcsd.parallel.overlap.measure import from_trace
from fcsd.planning.cost.measured import Times, write_times

MODES = ("absent", "in line", "side stream")


# ---- the two orders


def regular(rank: Rank, start: Callable, wait: Callable) -> torch.Tensor:
    stream, addend = rank.embedded, None
    for layer in rank.layers:
        stream, read = rank.add_and_norm(stream, addend, layer.attention_norm)
        attention = wait(start(rank.attend(layer, read)))
        stream, read = rank.add_and_norm(stream, attention, layer.experts_norm)
        addend = wait(start(rank.experts(layer, read)))
    return F.linear(rank.add_and_norm(stream, addend, rank.norm)[1], rank.head)


def farskip(rank: Rank, start: Callable, wait: Callable) -> torch.Tensor:
    """Attention reads the partial stream, without the previous layer's routed output;
    the experts read the outdated one, without this layer's attention.
    """
    stream, attention, routed = rank.embedded, None, None
    for layer in rank.layers:
        arrived = None if attention is None else wait(attention)
        stream, read = rank.add_and_norm(stream, arrived, layer.attention_norm)
        attention = start(rank.attend(layer, read))
        arrived = None if routed is None else wait(routed)
        stream, read = rank.add_and_norm(stream, arrived, layer.experts_norm)
        routed = start(rank.experts(layer, read))
    assert attention is not None and routed is not None
    stream = stream + wait(attention)
    return F.linear(rank.add_and_norm(stream, wait(routed), rank.norm)[1], rank.head)


# ---- measurements


class Setting(NamedTuple):
    """An all-reduce: microseconds at some sizes in KiB, multiprocessors."""

    table: tuple[tuple[float, float], ...]
    sms: int

    def us(self, kib: float) -> float:
        """Return the microseconds, interpolated over the logarithms of the sizes."""
        sizes, times = zip(*self.table, strict=True)
        if len(sizes) > 1 and not sizes[0] <= kib <= sizes[-1]:
            raise SystemExit(f"--all-reduce: no size in the table reaches {kib:g} KiB")
        return float(
            np.interp(math.log(kib), [math.log(size) for size in sizes], times)
        )


def microseconds(text: str) -> tuple[tuple[float, float], ...]:
    """Parse 15, or 8:9,64:10,512:15."""
    if ":" not in text:
        return ((1.0, float(text)),)
    points = (point.split(":") for point in text.split(","))
    return tuple(sorted((float(size), float(us)) for size, us in points))


def counted(events: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the kernels of a step and their seconds; None if the trace has none."""
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    kernels = [event for event in events if event.get("cat") in kinds]
    if not kernels:
        return None
    names: Counter[str] = Counter()
    for event in kernels:
        names[event["name"]] += float(event["dur"]) / 1e6 / TRACED
    reduced = from_trace(kernels, ALL_REDUCE).get("all")
    return {
        "kernels": len(kernels) / TRACED,
        "computed_s": sum(s for name, s in names.items() if ALL_REDUCE not in name),
        "all_reduce_s": reduced.total / TRACED if reduced else 0.0,
        "exposed_s": reduced.exposed / TRACED if reduced else 0.0,
        "names_s": dict(names.most_common()),
    }


def compared(
    seconds: dict[str, float], traced: dict[str, dict[str, Any] | None]
) -> dict[str, Any]:
    """Return the figures of a setting from the seconds and kernels of its three modes."""
    cost = seconds["in line"] - seconds["absent"]
    figures: dict[str, Any] = {
        "communication_s": cost,
        "saved": (seconds["in line"] - seconds["side stream"]) / cost,
        "times_as_fast": seconds["in line"] / seconds["side stream"],
        "gaps_s": None,
        "hidden": None,
        "slowdown": None,
    }
    parts = {mode: part for mode, part in traced.items() if part is not None}
    if len(parts) == len(seconds):
        side = parts["side stream"]
        hidden = side["all_reduce_s"] - side["exposed_s"]
        lost = side["computed_s"] - parts["absent"]["computed_s"]
        figures |= {
            "gaps_s": {
                mode: seconds[mode] - part["computed_s"] - part["exposed_s"]
                for mode, part in parts.items()
            },
            "hidden": hidden / side["all_reduce_s"],
            "slowdown": lost / hidden if hidden else None,
        }
    return figures


def measure(
    rank: Rank, device: Any, settings: list[Setting], rounds: int, until: float
) -> list[dict[str, Any]]:
    """Return the measurements of each setting; of those that were begun in time."""
    kib = rank.embedded.numel() * rank.embedded.element_size() / 1024

    def step(order: Callable, start: Callable, *facts: float) -> Callable[[], Any]:
        return lambda: order(rank, lambda x: start(x, *facts), device.wait)

    runs = {"absent": device.captured(step(regular, device.absent, 0.0, 0))}
    expected = step(farskip, device.absent, 0.0, 0)().double()
    rows: list[dict[str, Any]] = []
    for setting in settings:
        facts = (setting.us(kib), setting.sms)
        if time.monotonic() > until:
            print(f"left out, as the time is over: {facts[0]:g} us, {facts[1]} SMs")
            continue
        side = step(farskip, device.beside, *facts)
        names = {"in line": f"in line {len(rows)}", "side stream": f"side {len(rows)}"}
        runs[names["in line"]] = device.captured(step(regular, device.in_line, *facts))
        runs[names["side stream"]] = device.captured(side)
        difference = float((side().double() - expected).norm() / expected.norm())
        rows.append(
            {"batch": rank.batch, "length": rank.length, "kib": kib}
            | {"all_reduce_us": facts[0], "sms": facts[1], "difference": difference}
            | {"runs": {"absent": "absent"} | names}
        )
    times: dict[str, list[float]] = {name: [] for name in runs}
    order = random.Random(0)
    for number in range(rounds + 1):
        for name in order.sample(list(runs), len(runs)):
            seconds = device.seconds(runs[name])
            if number:  # the first round warms up
                times[name].append(seconds)
    device.trace(runs["absent"])  # the profiler's first run starts it
    traced = {name: counted(device.trace(run)) for name, run in runs.items()}
    for row in rows:
        modes = row.pop("runs")
        median = {mode: statistics.median(times[name]) for mode, name in modes.items()}
        parts = {mode: traced[name] for mode, name in modes.items()}
        row |= {"step_s": median, "traced": parts} | compared(median, parts)
        row["rounds_s"] = {mode: times[name] for mode, name in modes.items()}
    return rows


# ---- results


def table(rows: Sequence[dict[str, Any]], layers: int) -> str:
    """Format the measurements of one batch."""

    def share(value: float | None) -> str:
        return "-" if value is None else f"{value:.0%}"

    lines = []
    if (part := rows[0]["traced"]["absent"]) and rows[0]["gaps_s"]:
        step, gaps = rows[0]["step_s"]["absent"], rows[0]["gaps_s"]["absent"]
        lines = [
            f"absent: {part['kernels']:.0f} kernels, {part['kernels'] / layers:.0f} per"
            f" layer; gaps {gaps * 1e3:.2f} of {step * 1e3:.2f} ms; longest:",
            *(
                f"    {s * 1e3:7.3f} ms  {name[:90]}"
                for name, s in list(part["names_s"].items())[:8]
            ),
        ]
    header = (
        "| requests | all-reduce, us | SMs | absent, ms | in line, ms | side stream, ms"
        " | times as fast | as the fastest in line | saved | hidden | slowdown |"
    )
    lines += [header, "|---" * 11 + "|"]
    fastest = min(row["step_s"]["in line"] for row in rows)
    for row in rows:
        steps = " | ".join(f"{row['step_s'][mode] * 1e3:.3f}" for mode in MODES)
        lines.append(
            f"| {row['batch']} | {row['all_reduce_us']:g} | {row['sms']} | {steps} |"
            f" {row['times_as_fast']:.3f} |"
            f" {fastest / row['step_s']['side stream']:.3f} | {share(row['saved'])} |"
            f" {share(row['hidden'])} | {share(row['slowdown'])} |"
        )
    return "\n".join(lines)


def write_all_times(
    folder: Path, config: dict[str, Any], ranks: int, rows: Sequence[dict[str, Any]]
) -> None:
    """Write the configuration, and a file for `fcsd plan --measured` for each setting."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")

    def within(value: float | None) -> float | None:
        # Noise may take a share beyond its range, which a file of times is refused for.
        return None if value is None else min(1.0, max(0.0, value))

    for row in rows:
        times = Times(
            phase="decode",
            model_type=config["model_type"],
            num_layers=config["num_hidden_layers"],
            connectivity=ConnectivityConfig(),
            ranks=ranks,
            batch=row["batch"],
            length=row["length"],
            step_s=row["step_s"]["in line"],
            communication_s=row["communication_s"],
            overlap=within(row["saved"]),
            slowdown=within(row["slowdown"]),
        )
        name = f"{row['batch']}-{row['all_reduce_us']:g}us-{row['sms']}sms.json"
        write_times(folder / name, times)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--config", type=Path, default=CONFIGS / "Qwen3-30B-A3B.json")
    made.add_argument("--layers", type=int, help="the first N only (default: all)")
    made.add_argument("--ranks", type=int, default=8, help="tensor-parallel ranks")
    made.add_argument("--batch", type=int, nargs="+", default=[64], help="requests")
    made.add_argument("--length", type=int, default=4096, help="tokens of each so far")
    made.add_argument(
        "--all-reduce",
        type=microseconds,
        nargs="+",
        default=[((1.0, us),) for us in (11.0, 15.0, 24.0)],
        metavar="US",
        help="microseconds, or KIB:US,KIB:US,... by size",
    )
    made.add_argument(
        "--sms",
        type=int,
        nargs="+",
        default=[24],
        help=(
            "multiprocessors that it takes; NCCL takes one for each channel, vLLM's own"
            " kernels at most 36"
        ),
    )
    made.add_argument(
        "--attention",
        choices=ATTENTION,
        help="default: the first that is installed; on a CPU gathered",
    )
    made.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    made.add_argument("--rounds", type=int, default=15, help="timings, after one more")
    made.add_argument("--minutes", type=float, default=8, help="begin no setting after")
    made.add_argument("--json", type=Path, help="write all measurements here")
    made.add_argument("--times", type=Path, metavar="FOLDER")
    return made


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    until = time.monotonic() + 60 * options.minutes
    config = json.loads(options.config.read_text())
    if options.layers is not None:
        config["num_hidden_layers"] = options.layers
    shape = shape_of(config, options.ranks)
    cuda = options.device == "cuda"
    if cuda and not torch.cuda.is_available():
        raise SystemExit("torch sees no GPU of CUDA; --device cpu rehearses the steps")
    made = {
        "device": options.device,
        "dtype": torch.bfloat16 if cuda else torch.float32,
    }
    device = Gpu() if cuda else Rehearsal()
    attention = options.attention or (
        next(name for name in ATTENTION if importlib.util.find_spec(name) is not None)
        if cuda
        else "gathered"
    )
    report: dict[str, Any] = {
        "config": options.config.name,
        "shape": vars(shape),
        "ranks": options.ranks,
        "device": device.name,
        "torch": torch.__version__,
        "attention": attention,
        "rows": [],
    }
    print(
        f"{options.config.stem}, {shape.layers} layers, one of {options.ranks} ranks,"
        f" {options.length} tokens, attention with {attention}; {device.name}, torch"
        f" {torch.__version__}",
        flush=True,
    )
    settings = [
        Setting(table, sms) for sms in options.sms for table in options.all_reduce
    ]
    for batch in options.batch:
        with torch.no_grad():
            rank = Rank(shape, batch, options.length, attention, made)
            rows = measure(rank, device, settings, options.rounds, until)
        del rank  # before the next one
        report["rows"] += rows
        if rows:
            print("\n" + table(rows, shape.layers), flush=True)
        if options.json:
            options.json.write_text(json.dumps(report, indent=2) + "\n")
    if options.times:
        write_all_times(options.times, config, options.ranks, report["rows"])
    faults = []
    if any(row["hidden"] is None for row in report["rows"]):
        faults.append("the profiler saw no kernels, so only whole steps were measured")
    if any(not row["difference"] < 1e-2 for row in report["rows"]):
        faults.append("the side stream changed the result: a sum was read too early")
    for fault in faults:
        print(fault, file=sys.stderr)
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
