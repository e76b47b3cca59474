"""What `fcsd plan --measured` makes of a server's times, beside the gain that was
measured.

    f = exposed / seconds     of a run of all requests: what a rank only communicates in, and what the run takes
    v = hidden / total        of what is communicated in the overlapped row's run
    gain = f v / (1 - f v)    regular / overlapped time - 1

f is the regular row's: stock by a trace, or FarSkip blocking, whose ranks say what they
communicate (`--comm timed`; those of stock do not, and an emulated network is not
theirs); for the wide rows the wide one's. Prefill is the run of one token each,
decoding the run of whole answers less that one, which it begins with. Ranks count the
warm-up too, which is the same work once more. Data-parallel ranks of vLLM also count
the empty steps that they run behind the answers, until every sixteenth says that all
are idle (`--dp-sync-interval`): beside long answers these are few.

A file has the time to the first token, or between tokens, and f of that as
communication. So it does not matter in how many steps a server takes its requests, as
long as each step communicates the same share.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from fcsd.model.connectivity.spec import Connectivity
from fcsd.model.families import base_model_type
from fcsd.planning.servers.rows import Row, emulated
from fcsd.planning.servers.summary import FIGURES, Runs, spread

_FIGURES = {"prefill": "ttft_ms", "decode": "tbt_ms"}
_KINDS = {"farskip": "stock", "wide": "wide_stock"}
"""What the FarSkip rows' names begin with -> the row without FarSkip."""

Traces = Mapping[str, Mapping[str, Any]]


class _Spent(NamedTuple):
    """Seconds of a run of all requests, and of a rank's communication in it."""

    seconds: float
    total_s: float
    exposed_s: float


def served_gains(
    settings: Mapping[str, Any], config: Mapping[str, Any], runs: Runs, traces: Traces
) -> list[dict[str, Any]]:
    """Return by length and phase a regular row's times, and regular / overlapped as
    planned and as measured.

    Only where that row's communication is known; `planned` is None where the overlapped
    row's is not. Nothing of wide rows whose ranks have different numbers of requests,
    which no plan has.

    Args:
        settings: of the benchmark.
        config: of the converted model, as in its `config.json`.
        runs: a row's runs in the order of the rounds.
        traces: what `fcsd.planning.servers.trace.read_trace` says of a row's prefill of
            the first length.
    """
    gains = []
    for kind, stock in _KINDS.items():
        wide = kind == "wide"
        if wide and settings["requests"] % settings["tensor_parallel"]:
            continue
        regular = [*([] if emulated(settings["comm"]) else [stock]), f"{kind}_blocking"]
        rows = {
            name: runs[name]
            for name in (*regular, f"{kind}_overlapped")
            if name in runs
        }
        gains += _gains_of(
            rows, regular, _served(settings, config, wide=wide), settings, traces
        )
    return gains


def _served(
    settings: Mapping[str, Any], config: Mapping[str, Any], *, wide: bool
) -> dict[str, Any]:
    return {
        "model_type": base_model_type(str(config["model_type"])),
        "connectivity": asdict(Connectivity.from_field(config["farskip"])),
        "num_layers": (config.get("text_config") or config).get("num_hidden_layers"),
        "ranks": settings["tensor_parallel"],
        "data_parallel": wide,
        "batch": settings["requests"],
    }


def _gains_of(
    runs: Runs,
    regular: Sequence[str],
    served: Mapping[str, Any],
    settings: Mapping[str, Any],
    traces: Traces,
) -> list[dict[str, Any]]:
    """Return the gains of rows whose ranks are alike."""
    gains = []
    for place, prompt in enumerate(settings["prompt_tokens"]):
        points = {
            name: [run["points"][place] for run in each] for name, each in runs.items()
        }
        # the text, with half of its answer
        halfway = prompt + settings["output_tokens"] // 2
        for phase, length, traced in (
            ("prefill", prompt, {} if place else traces),
            ("decode", halfway, {}),
        ):
            spent = {
                name: _spent(each, phase, served["ranks"], traced.get(name))
                for name, each in points.items()
            }
            known = [
                name for name in regular if _share(spent.get(name, ())) is not None
            ]
            if known and served["num_layers"]:
                times = {**served, "phase": phase, "length": length}
                gain = _gain(times, points, spent, known[0])
                gains += [] if gain is None else [{"prompt_tokens": prompt} | gain]
    return gains


def find_limits(
    settings: Mapping[str, Any], rows: Sequence[Row], runs: Runs, traces: Traces
) -> dict[str, list[dict[str, float]]]:
    """Return what hiding all communication could give a FarSkip row, by length of
    prompt and figure: 1 / (1 - f).

    f is that of the row that it is set against, by a trace, or of FarSkip blocking. A
    throughput has prompts and answers in it, and the larger of both limits. A figure
    whose communication is not known has none.
    """
    by_row: dict[str, list[dict[str, float]]] = {}
    for row in rows:
        if not row.farskip or row.name not in runs:
            continue
        regular = [row.base, f"{row.name.partition('_')[0]}_blocking"]
        limits: list[dict[str, float]] = []
        for place in range(len(settings["prompt_tokens"])):
            at: dict[str, float] = {}
            for phase, figure in _FIGURES.items():
                traced = traces if (place, phase) == (0, "prefill") else {}
                points = {
                    name: [run["points"][place] for run in runs.get(name, ())]
                    for name in regular
                }
                shares = [
                    _share(
                        _spent(
                            points[name],
                            phase,
                            settings["tensor_parallel"],
                            traced.get(name),
                        )
                    )
                    for name in regular
                ]
                if known := [share for share in shares if share is not None]:
                    at[figure] = 1 / (1 - known[0])
            limits.append(
                at | ({"output_tokens_per_s": max(at.values())} if len(at) == 2 else {})
            )
        by_row[row.name] = limits
    return by_row


def _gain(
    served: dict[str, Any],
    points: Mapping[str, Sequence[Any]],
    spent: Mapping[str, list[_Spent]],
    regular: str,
) -> dict[str, Any] | None:
    """Return one row; None where noise makes more hidden than the computation beside it
    could hide.
    """
    # brings torch, which nothing else here needs
    from fcsd.planning.cost.measured import Times
    from fcsd.planning.cost.times import gain

    phase, name, _ = FIGURES[_FIGURES[served["phase"]]]
    overlapped = "wide_overlapped" if served["data_parallel"] else "farskip_overlapped"
    seconds, ours = (
        [point[phase][name] / 1000 for point in points.get(row, ())]
        for row in (regular, overlapped)
    )
    share, overlap = _share(spent[regular]), _overlap(spent.get(overlapped, ()))
    assert share is not None
    step_s = statistics.median(seconds)
    try:
        times = Times(
            **served, step_s=step_s, communication_s=share * step_s, overlap=overlap
        )
    except ValueError:
        return None
    return {
        "phase": phase,
        "regular": regular,
        "file": (
            f"times-{'wide-' if times.data_parallel else ''}{phase}-{times.length}.json"
        ),
        "times": times.model_dump(mode="json"),
        "planned": None if overlap is None else 1 + gain(share, overlap),
        "limit": 1 / (1 - share),
        "measured": (
            spread([a / b for a, b in zip(seconds, ours, strict=True)])
            if ours
            else None
        ),
    }


def write_gains(gains: Sequence[Mapping[str, Any]], folder: Path) -> None:
    """Write the files that `fcsd plan --measured` reads."""
    if gains:
        from fcsd.planning.cost.measured import Times, write_times

        for each in gains:
            write_times(folder / each["file"], Times(**each["times"]))


def _spent(
    points: Sequence[Mapping[str, Any]],
    phase: str,
    ranks: int,
    trace: Mapping[str, Any] | None,
) -> list[_Spent]:
    """Return what was spent in those rounds of which it is known."""
    if trace is not None:  # without warm-up, of one rank
        return [
            _Spent(point[phase]["duration"], trace["total_s"], trace["exposed_s"])
            for point in points
        ]
    rounds = []
    for point in points:
        whole, first = (
            _communication(point[each], ranks) for each in (phase, "prefill")
        )
        if whole is not None and first is not None:
            rest = _Spent(*(a - b for a, b in zip(whole, first, strict=True)))
            rounds.append(whole if phase == "prefill" else rest)
    return rounds


def _communication(run: Mapping[str, Any], ranks: int) -> _Spent | None:
    sums = run.get("communication")
    if sums is None or sums["ranks"] != ranks:
        return None
    counted = 2 * ranks  # with the warm-up
    return _Spent(
        run["duration"], sums["total_s"] / counted, sums["exposed_s"] / counted
    )


def _share(spent: Sequence[_Spent]) -> float | None:
    """Return the share of the time that is only communication; None where no round knows one."""
    shares = [
        each.exposed_s / each.seconds
        for each in spent
        if 0 < each.exposed_s < each.seconds
    ]
    return statistics.median(shares) if shares else None


def _overlap(spent: Sequence[_Spent]) -> float | None:
    """Return the share of communication that is hidden; None where no round knows one."""
    shares = [
        min(1.0, max(0.0, 1 - each.exposed_s / each.total_s))
        for each in spent
        if each.total_s > 0
    ]
    return statistics.median(shares) if shares else None
