"""Read a server's communication times: the plugin's backend `timed` writes one file
for each rank.

The environment variable `TIMES_VARIABLE` names a folder. A rank that has run
collectives since its last file, but none for a tenth of a second, writes `rank<N>.json`
there, first under a temporary name:

    {"schema_version": 1, "collectives": 96, "bytes": 25165824, "total_s": 0.31,
    "exposed_s": 0.04}

The figures count from the start of the server: `total_s` is the time of its collectives
with the emulated network, from the moment at which all ranks had reached them;
`exposed_s` is the part of that in which the computing thread waited. Other figures are
ignored.
"""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TIMES_VARIABLE = "FCSD_SERVING_TIMES"
_FIGURES = ("collectives", "bytes", "total_s", "exposed_s")
_SETTLE_S, _LONGEST_S = 0.5, 10.0

Times = Mapping[str, Mapping[str, float]]
"""A rank's file -> its figures."""


def settled_times(folder: Path) -> Times:
    """Return the figures of all ranks once they stop changing."""
    # Ranks write with a delay, so a single reading may miss the last collectives.
    begun, times = time.monotonic(), _read(folder)
    while time.monotonic() - begun < _LONGEST_S:
        time.sleep(_SETTLE_S)
        previous, times = times, _read(folder)
        if times == previous:
            break
    return times


def _read(folder: Path) -> Times:
    return {
        file.name: {
            name: float(json.loads(file.read_text(encoding="utf-8"))[name])
            for name in _FIGURES
        }
        for file in sorted(folder.glob("rank*.json"))
    }


def communication_between(earlier: Times, later: Times) -> dict[str, Any] | None:
    """Return the sums over all ranks between two readings, and the overlap: hidden /
    total; None without communication.

    Waking a thread takes time, so a blocking rank may have waited longer than the
    total; the overlap is then 0.
    """
    sums = {
        name: sum(
            figures[name] - earlier.get(rank, {}).get(name, 0.0)
            for rank, figures in later.items()
        )
        for name in _FIGURES
    }
    if not sums["total_s"] > 0:
        return None
    return {
        "ranks": len(later),
        **sums,
        "overlap": max(0.0, 1 - sums["exposed_s"] / sums["total_s"]),
    }
