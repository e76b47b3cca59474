"""What a server's ranks say of their communication: the plugin's back end `timed`
writes a file a rank.

The variable `TIMES_VARIABLE` names a folder. Whenever a rank has been without a
collective for a tenth of a second, and has run some since the last time, it writes
`rank<N>.json` there, under another name first:

    {"schema_version": 1, "collectives": 96, "bytes": 25165824, "total_s": 0.31,
    "exposed_s": 0.04}

The figures count from the start of the server: `total_s` what its collectives took with
the emulated network, once all ranks had come to them, `exposed_s` the part of that in
which the computing thread waited; other figures are left alone.
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
"""File of a rank -> its figures."""


def settled_times(folder: Path) -> Times:
    """Return what the ranks have written, once they write no more."""
    begun, times = time.monotonic(), _read(folder)
    while time.monotonic() - begun < _LONGEST_S:
        time.sleep(_SETTLE_S)
        before, times = times, _read(folder)
        if times == before:
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


def communication_between(before: Times, after: Times) -> dict[str, Any] | None:
    """Return the sums over all ranks of what came between, with the overlap: hidden /
    total; None where nothing did.

    To wake a thread takes time, so that a blocking rank may have waited for more than
    the total: 0 then.
    """
    sums = {
        name: sum(
            figures[name] - before.get(rank, {}).get(name, 0.0)
            for rank, figures in after.items()
        )
        for name in _FIGURES
    }
    if not sums["total_s"] > 0:
        return None
    return {
        "ranks": len(after),
        **sums,
        "overlap": max(0.0, 1 - sums["exposed_s"] / sums["total_s"]),
    }
