"""Compare the gain that `fcsd plan --measured` computes from a server's times with the
measured gain.

    f = exposed / seconds     of a run of all requests: seconds of communication alone, and of the run
    v = hidden / total        of the communication in the overlapped row's run
    gain = f v / (1 - f v)    regular / overlapped time - 1

f is measured on the regular row: on stock by a trace, or on FarSkip blocking, whose
ranks report their communication (`--comm timed`; stock ranks do not, and have no
emulated network). Wide rows use the wide regular row. Prefill is the run with one token
each; decoding is the run of whole answers minus the prefill run, with which it begins.
Ranks also count the warm-up, which repeats the same work. Data-parallel ranks of vLLM
also count empty steps after the answers, until they check, every 16 steps, that all are
idle (`--dp-sync-interval`): with long answers these are few.

A file has the time to the first token, or between tokens, and the share f of it as
communication. The number of steps in which a server processes its requests does not
matter, as long as each step communicates the same share.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from fcsd.model.connectivity.spec import Connectivity
from fcsd.model.families import base_model_type
from fcsd_bench.rows import Row, emulated
from fcsd_bench.settings import shapes_of
from fcsd_bench.summary import FIGURES, Runs, spread

_FIGURES = {"prefill": "ttft_ms", "decode": "tbt_ms"}
_KINDS = {"farskip": "stock", "wide": "wide_stock"}
"""Prefix of the FarSkip rows' names -> the row without FarSkip."""

Traces = Mapping[str, Mapping[str, Any]]


class _Spent(NamedTuple):
    """Seconds of a run of all requests, and of a rank's communication in it."""

    seconds: float
    total_s: float
    exposed_s: float


def served_gains(
    settings: Mapping[str, Any], config: Mapping[str, Any], runs: Runs, traces: Traces
) -> list[dict[str, Any]]:
    """Return, by shape and phase, a regular row's times and the speed-up over it, as
    planned and as measured.

    Rows are returned only if the regular row's communication is known; `planned` is
    None if the overlapped row's is unknown. Wide rows whose ranks have different
    numbers of requests are left out, since no plan covers them.

    Args:
        settings: the benchmark's settings.
        config: of the converted model, as in its `config.json`.
        runs: a row's runs in the order of the rounds.
        traces: row -> the result of `fcsd_bench.trace.read_trace` for its prefill of
            the first shape.
    """
    gains = []
    for kind, stock in _KINDS.items():
        # In order of preference: stock is the true baseline, but not over another
        # network.
        regular = [*([] if emulated(settings["comm"]) else [stock]), f"{kind}_blocking"]
        rows = {
            name: runs[name]
            for name in (*regular, f"{kind}_overlapped")
            if name in runs
        }
        gains += _gains_of(
            rows, regular, _served(settings, config, kind), settings, traces
        )
    return gains


def _served(
    settings: Mapping[str, Any], config: Mapping[str, Any], kind: str
) -> dict[str, Any]:
    return {
        "model_type": base_model_type(str(config["model_type"])),
        "connectivity": asdict(Connectivity.from_field(config["farskip"])),
        "num_layers": (config.get("text_config") or config).get("num_hidden_layers"),
        "ranks": settings["tensor_parallel"],
        "data_parallel": kind == "wide",
    }


def _gains_of(
    runs: Runs,
    regular: Sequence[str],
    served: Mapping[str, Any],
    settings: Mapping[str, Any],
    traces: Traces,
) -> list[dict[str, Any]]:
    """Return the gains of rows with the same kind of ranks."""
    gains = []
    for index, shape in enumerate(shapes_of(settings)):
        # No plan covers ranks with different numbers of requests.
        if served["data_parallel"] and shape.requests % served["ranks"]:
            continue
        points = {
            name: [run["points"][index] for run in rounds]
            for name, rounds in runs.items()
        }
        # Mean length of the text while an answer is decoded.
        halfway = shape.prompt_tokens + settings["output_tokens"] // 2
        lengths = {"prefill": shape.prompt_tokens, "decode": halfway}
        for phase, length in lengths.items():
            # A trace covers the prefill of the first shape only.
            traced = traces if phase == "prefill" and index == 0 else {}
            spent = {
                name: _spent(rounds, phase, served["ranks"], traced.get(name))
                for name, rounds in points.items()
            }
            regular_rows = [
                name for name in regular if _share(spent.get(name, ())) is not None
            ]
            if regular_rows and served["num_layers"]:
                times = {
                    **served,
                    "batch": shape.requests,
                    "phase": phase,
                    "length": length,
                }
                gain = _gain(times, points, spent, regular_rows[0])
                if gain is not None:
                    file = _times_file(times, several=len(settings["requests"]) > 1)
                    gains.append(shape._asdict() | {"file": file} | gain)
    return gains


def _times_file(times: Mapping[str, Any], *, several: bool) -> str:
    """Name a file of times; with several numbers of requests, by its number, too."""
    wide = ["wide"] if times["data_parallel"] else []
    words = [
        *wide,
        times["phase"],
        times["length"],
        *([times["batch"]] if several else []),
    ]
    return f"times-{'-'.join(map(str, words))}.json"


def find_limits(
    settings: Mapping[str, Any], rows: Sequence[Row], runs: Runs, traces: Traces
) -> dict[str, list[dict[str, float]]]:
    """Return the largest possible speed-up of a FarSkip row, from hiding all
    communication, by shape and figure: 1 / (1 - f).

    f is measured on the row's baseline by a trace, or on FarSkip blocking. A throughput
    includes prompts and answers, and gets the larger of their limits. A figure with
    unknown communication has no limit.
    """
    by_row: dict[str, list[dict[str, float]]] = {}
    for row in rows:
        if not row.farskip or row.name not in runs:
            continue
        regular = [row.base, f"{row.name.partition('_')[0]}_blocking"]
        limits: list[dict[str, float]] = []
        for index in range(len(shapes_of(settings))):
            by_figure: dict[str, float] = {}
            for phase, figure in _FIGURES.items():
                traced = traces if (index, phase) == (0, "prefill") else {}
                points = {
                    name: [run["points"][index] for run in runs.get(name, ())]
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
                # Take the first that is known: the baseline's trace is preferred to
                # FarSkip blocking.
                if known_shares := [share for share in shares if share is not None]:
                    by_figure[figure] = 1 / (1 - known_shares[0])
            if len(by_figure) == 2:
                by_figure["output_tokens_per_s"] = max(by_figure.values())
            limits.append(by_figure)
        by_row[row.name] = limits
    return by_row


def _gain(
    served: dict[str, Any],
    points: Mapping[str, Sequence[Any]],
    spent: Mapping[str, list[_Spent]],
    regular: str,
) -> dict[str, Any] | None:
    """Return one row; None if, because of noise, more is hidden than the computation
    could hide.
    """
    # Imports torch, which nothing else in this module needs.
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
    # The checks of a times file apply here as well.
    try:
        times = Times(
            **served, step_s=step_s, communication_s=share * step_s, overlap=overlap
        )
    except ValueError:
        return None
    ratios = [a / b for a, b in zip(seconds, ours, strict=True)] if ours else []
    return {
        "phase": phase,
        "regular": regular,
        "times": times.model_dump(mode="json"),
        "planned": None if overlap is None else 1 + gain(share, overlap),
        "limit": 1 / (1 - share),
        "measured": spread(ratios) if ratios else None,
    }


def write_gains(gains: Sequence[Mapping[str, Any]], folder: Path) -> None:
    """Write the files that `fcsd plan --measured` reads."""
    if gains:
        from fcsd.planning.cost.measured import Times, write_times

        for gain in gains:
            write_times(folder / gain["file"], Times(**gain["times"]))


def _spent(
    points: Sequence[Mapping[str, Any]],
    phase: str,
    ranks: int,
    trace: Mapping[str, Any] | None,
) -> list[_Spent]:
    """Return the seconds of each round whose communication is known."""
    if trace is not None:  # one rank, without warm-up
        return [
            _Spent(point[phase]["duration"], trace["total_s"], trace["exposed_s"])
            for point in points
        ]
    rounds = []
    for point in points:
        full_run, first = (
            _communication(point[run_name], ranks) for run_name in (phase, "prefill")
        )
        # Decoding begins with the prefill of the same prompts, whose seconds are
        # subtracted.
        if full_run is not None and first is not None:
            without_prefill = _Spent(
                *(a - b for a, b in zip(full_run, first, strict=True))
            )
            rounds.append(full_run if phase == "prefill" else without_prefill)
    return rounds


def _communication(run: Mapping[str, Any], ranks: int) -> _Spent | None:
    sums = run.get("communication")
    # A rank that wrote nothing would make the sums too small.
    if sums is None or sums["ranks"] != ranks:
        return None
    counted = 2 * ranks  # with the warm-up
    return _Spent(
        run["duration"], sums["total_s"] / counted, sums["exposed_s"] / counted
    )


def _share(spent: Sequence[_Spent]) -> float | None:
    """Return the share of the time that is only communication; None if no round has it."""
    shares = [
        run.exposed_s / run.seconds for run in spent if 0 < run.exposed_s < run.seconds
    ]
    return statistics.median(shares) if shares else None


def _overlap(spent: Sequence[_Spent]) -> float | None:
    """Return the share of communication that is hidden; None if no round has it."""
    shares = [
        min(1.0, max(0.0, 1 - run.exposed_s / run.total_s))
        for run in spent
        if run.total_s > 0
    ]
    return statistics.median(shares) if shares else None
