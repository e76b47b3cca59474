"""Compute medians, spreads and speed-ups of servers from their runs, and format their
table.

A figure is the median over the rounds, with the lowest and the highest; within a round
it is the engine's median over the requests (for the throughput, the total). A speed-up
is the median of the ratios to stock within a round; above 1 is better. Over an emulated
network, which stock does not have, the ratio is to FarSkip blocking.
"""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from fcsd.base.text import markdown
from fcsd_bench.engines import ENGINES
from fcsd_bench.rows import Row, emulated
from fcsd_bench.settings import Shape, shapes_of

SCHEMA_VERSION = 2
# Name -> the phase it is measured in, vLLM's name of it, whether less is better.
FIGURES = {
    "ttft_ms": ("prefill", "median_ttft_ms", True),
    "tbt_ms": ("decode", "median_tpot_ms", True),
    "output_tokens_per_s": ("decode", "output_throughput", False),
}
Runs = Mapping[str, Sequence[Mapping[str, Any]]]
Limits = Mapping[str, Sequence[Mapping[str, float]]]
"""Row -> for each shape: figure -> the largest speed-up that can be real."""
DUMMIES = (
    "**Weights were dummies (`--load-format dummy`): these are times of the"
    " architecture. The answers mean nothing; do not score them.**"
)
FEW = 3
"""With fewer rounds the page has a warning."""
_FEW_ROUNDS = f"**Fewer than {FEW} rounds: a gain cannot be told from noise.**"


def summarise(
    facts: Mapping[str, Any],
    rows: Sequence[Row],
    runs: Runs,
    missing: Mapping[str, str],
    traces: Mapping[str, Mapping[str, Any]],
    limits: Limits,
) -> dict[str, Any]:
    """Return the result in the format of `serving.json`.

    Args:
        facts: settings, versions, and whether weights are dummies, copied into the
            result.
        runs: a row's runs in the order of the rounds.
        missing: reasons why rows are missing.
        traces: results of `fcsd_bench.trace.read_trace` by row.
        limits: largest speed-ups from hiding all communication, where known.
    """

    def points(row: Row) -> list[dict[str, Any]]:
        if row.name not in runs:
            return []  # it is missing
        return _points(runs[row.name], runs.get(row.base, ()), limits.get(row.name, ()))

    return {
        "schema_version": SCHEMA_VERSION,
        **facts,
        "rounds": _rounds(runs),
        "rows": [
            {
                "name": row.name,
                "title": row.title,
                "exact": row.exact,
                "wide": row.wide,
                "serves": "MODEL" if row.farskip else "ORIGINAL",
                "flags": list(row.flags),
                "environment": dict(row.environment),
                "missing": missing.get(row.name),
                "trace": traces.get(row.name),
                "base": row.base,
                "points": points(row),
            }
            for row in rows
        ],
    }


def _rounds(runs: Runs) -> list[dict[str, Any]]:
    """Return each round's begin and end, and the machine's load before its servers
    started.
    """
    rounds = []
    for round_runs in zip(*runs.values(), strict=True):
        loads = [run["load"] for run in round_runs]
        rounds.append(
            {
                "begin": min(run["begin"] for run in round_runs),
                "end": max(run["end"] for run in round_runs),
                "load": {"lowest": min(loads), "highest": max(loads)},
            }
        )
    return rounds


def _points(
    runs: Sequence[Mapping[str, Any]],
    base: Sequence[Mapping[str, Any]],
    limits: Sequence[Mapping[str, float]],
) -> list[dict[str, Any]]:
    points = []
    for index, first in enumerate(runs[0]["points"]):
        point: dict[str, Any] = {name: first[name] for name in Shape._fields}
        for figure, (phase, name, less) in FIGURES.items():
            mine = [run["points"][index][phase][name] for run in runs]
            theirs = [run["points"][index][phase][name] for run in base]
            point[figure] = spread(mine)
            # Ratios within a round: a slow hour affects both servers and cancels. Above
            # 1 is better.
            above, below = (theirs, mine) if less else (mine, theirs)
            ratios = []
            if base:
                ratios = [a / b for a, b in zip(above, below, strict=True)]
            point[figure]["speedup"] = spread(ratios) if base else None
            point[figure]["limit"] = limits[index].get(figure) if limits else None
        for phase in ("prefill", "decode"):
            communication = [
                run["points"][index][phase].get("communication") for run in runs
            ]
            overlaps = [
                record["overlap"] for record in communication if record is not None
            ]
            point[f"overlap_{phase}"] = spread(overlaps) if overlaps else None
        points.append(point)
    return points


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Return the median, the lowest and the highest of a figure's rounds."""
    return {
        "median": statistics.median(values),
        "lowest": min(values),
        "highest": max(values),
        "rounds": list(values),
    }


def table(result: Mapping[str, Any]) -> str:
    """Format a result as Markdown."""
    settings, versions = result["settings"], result["versions"]
    devices, engine = versions["devices"], settings["engine"]
    where = f"{len(devices)} x {devices[0]}" if devices else "CPU"
    rounds = settings["rounds"]
    measured = _measured(result)
    parts = [
        f"# Served: {settings['model']} against {settings['against']}",
        (
            f"{ENGINES[engine].title} {versions[engine]}, fcsd-serving"
            f" {versions['fcsd-serving']}, {where}, {_layout(result)};"
            f" {settings['output_tokens']} tokens for each request for the time between"
            f" tokens. Median of {rounds}"
            f" {'round' if rounds == 1 else 'rounds'} in turns (lowest to highest),"
            " without warm-up; x is the speed-up over stock in the same round."
        ),
        _conditions(result),
        *([DUMMIES] if result.get("dummy_weights") else []),
        *([f"**{result['warning']}.**"] if result.get("warning") else []),
        *([_FEW_ROUNDS] if rounds < FEW else []),
        measured,
    ]
    # The word needs an explanation only if it is in the table.
    if "noise" in measured:
        parts.append(
            "noise: the median exceeds the gain from hiding all communication (`limit`"
            " in serving.json). Measure again in more rounds, on an idle machine."
        )
    if emulated(settings["comm"]):
        parts.append(
            "The FarSkip rows run over an emulated network, but stock does not, so"
            " compare FarSkip rows only with each other. Their x is the speed-up over"
            " FarSkip, blocking (for wide rows, the wide one)."
        )
    sections = (
        _against_best(result),
        _traced(result),
        _planned(result),
        _missing(result),
    )
    parts += [text for text in sections if text]
    return "\n\n".join(parts)


def _layout(result: Mapping[str, Any]) -> str:
    settings = result["settings"]
    ranks, nodes = settings["tensor_parallel"], settings["nodes"]
    where = f" on {len(nodes)} machines" if nodes else ""
    wide = any(row["wide"] and row["points"] for row in result["rows"])
    wide_text = ""
    if wide:
        parallel = f"data parallel {ranks}, {settings['all2all']}"
        wide_text = f" (wide: {parallel}, x over wide stock)"
    return f"tensor parallel {ranks}{where}{wide_text}"


def _conditions(result: Mapping[str, Any]) -> str:
    """State the period of the measurement and the machine's load."""
    rounds = result["rounds"]
    if not rounds:
        return "Nothing was measured."
    lowest = min(measured_round["load"]["lowest"] for measured_round in rounds)
    highest = max(measured_round["load"]["highest"] for measured_round in rounds)
    cores = result["versions"]["cores"]
    return (
        f"Measured from {rounds[0]['begin']} to {rounds[-1]['end']}; load of this"
        f" machine ({cores} cores) before its servers started {lowest:.1f} to"
        f" {highest:.1f}."
    )


def _measured(result: Mapping[str, Any]) -> str:
    header = [
        "server",
        "prompt",
        "requests",
        "TTFT ms",
        "TTFT x",
        "TBT ms",
        "TBT x",
        "tokens/s",
        "tokens/s x",
        "overlap, prefill",
        "overlap, decode",
    ]
    lines = []
    for row in result["rows"]:
        for point in row["points"]:
            # One line for each row and shape; each figure is followed by its speed-up.
            cells = [row["title"], *(f"{point[name]}" for name in Shape._fields)]
            for figure in FIGURES:
                cells += [
                    _figure(point[figure]),
                    _times(point[figure]["speedup"], point[figure]["limit"]),
                ]
            cells += [
                _percent(point[f"overlap_{phase}"]) for phase in ("prefill", "decode")
            ]
            lines.append(cells)
    return markdown(header, lines)


def _figure(value: Mapping[str, Any]) -> str:
    median, lowest, highest = (
        _number(value[name]) for name in ("median", "lowest", "highest")
    )
    return median if len(value["rounds"]) == 1 else f"{median} ({lowest} to {highest})"


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _times(value: Mapping[str, Any] | None, limit: float | None = None) -> str:
    """Return a speed-up, or `noise` if it exceeds the gain from hiding everything."""
    if value is None:
        return ""
    if limit is not None and value["median"] > limit:
        return "noise"
    return f"{value['median']:.2f}"


def _percent(value: Mapping[str, Any] | None) -> str:
    return "" if value is None else _share(value["median"])


def _share(value: float) -> str:
    return f"{100 * value:.1f} %"


def _against_best(result: Mapping[str, Any]) -> str:
    """Compare FarSkip with the fastest row that has stock's results, at each shape."""
    # Over an emulated network FarSkip is not comparable with rows that have none.
    rivals = [
        row for row in result["rows"] if row["serves"] == "ORIGINAL" and row["points"]
    ]
    if not rivals or emulated(result["settings"]["comm"]):
        return ""
    lines = []
    for ours in result["rows"]:
        if not ours["name"].endswith("_overlapped"):
            continue
        for index, point in enumerate(ours["points"]):
            comparisons = []
            for figure, unit in (("ttft_ms", "TTFT"), ("tbt_ms", "TBT")):
                best = min(
                    rivals, key=lambda row: row["points"][index][figure]["median"]
                )
                ratio = (
                    best["points"][index][figure]["median"] / point[figure]["median"]
                )
                over = f"x {ratio:.2f} ({best['title']})"
                noise = (
                    _times(point[figure]["speedup"], point[figure]["limit"]) == "noise"
                )
                comparisons.append(f"{unit} {'noise' if noise else over}")
            lines.append(f"- {ours['title']}, {_sent(point)}: {', '.join(comparisons)}")
    head = "Against the fastest server with stock's results:\n"
    return "\n".join([head, *lines]) if lines else ""


def _sent(point: Mapping[str, Any]) -> str:
    """Say what a measurement sent."""
    requests = point["requests"]
    return (
        f"{point['prompt_tokens']} tokens, {requests}"
        f" {'request' if requests == 1 else 'requests'}"
    )


def _traced(result: Mapping[str, Any]) -> str:
    lines = [
        f"- {row['title']}: {100 * trace['overlap']:.1f} % of"
        f" {1000 * trace['total_s']:.1f} ms"
        for row in result["rows"]
        if (trace := row["trace"]) is not None
    ]
    of = _sent(shapes_of(result["settings"])[0]._asdict())
    head = f"All-reduces that ran beside computation, by a trace of {of}:\n"
    return "\n".join([head, *lines]) if lines else ""


def _planned(result: Mapping[str, Any]) -> str:
    """Compare the gain that `fcsd plan` computes from the regular server's times with
    the measured one.
    """
    gains = result.get("gains")
    if not gains:
        return ""
    titles = {row["name"]: row["title"] for row in result["rows"]}
    columns = (
        "phase, prompt, requests, regular, ms, communicates, hidden, planned x,"
        " measured x, times"
    )
    # `planned x` is arithmetic on the measured share and overlap, `measured x` the
    # ratio of times.
    lines = []
    for gain in gains:
        times, planned = gain["times"], gain["planned"]
        step_s, overlap = times["step_s"], times["overlap"]
        cells = [
            gain["phase"],
            *(f"{gain[name]}" for name in Shape._fields),
            titles[gain["regular"]],
            _number(1000 * step_s),
        ]
        cells += [
            _share(times["communication_s"] / step_s),
            "" if overlap is None else _share(overlap),
        ]
        cells += [
            "" if planned is None else f"{planned:.2f}",
            _times(gain["measured"], gain["limit"]),
            gain["file"],
        ]
        lines.append(cells)
    return "\n\n".join(
        [
            (
                "The speed-up of FarSkip, overlapped, over the regular server: planned"
                " by `fcsd plan` from the regular server's times, and measured. The"
                " regular server only communicates in a share of its time, and FarSkip"
                " hides a share of that; without warm-up, and decoding without the"
                " prompts."
            ),
            markdown(columns.split(", "), lines),
            (
                f"    fcsd plan {result['settings']['model']} --phase {times['phase']}"
                f" {'--dp' if times['data_parallel'] else '--tp'} {times['ranks']}"
                f" --batch {times['batch']} --length {times['length']} --measured"
                f" {gain['file']}"
            ),
        ]
    )


def _missing(result: Mapping[str, Any]) -> str:
    lines = [
        f"- {row['title']}: {row['missing']}"
        for row in result["rows"]
        if row["missing"] is not None
    ]
    return "\n".join(["Not available here:\n", *lines]) if lines else ""
