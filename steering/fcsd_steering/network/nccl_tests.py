"""Read links from the output of nccl-tests or rccl-tests: one latency and one rate for
all edges.

`alltoall_perf` times all edges at once: its rate is that of an edge while all others
are busy, so it holds for balanced traffic and overprices skewed traffic.
`sendrecv_perf` times a ring, in which every rank sends to the next: its rate is near
that of an edge alone, and does not show ports that edges share. Neither tells slow
edges from fast ones.
"""

import re
from pathlib import Path
from typing import Any

import numpy as np

from fcsd.base.errors import UserError
from fcsd.base.files import read_text
from fcsd.planning.network.links import Collective, LinkModel
from fcsd_steering.network.profile import fit_line

_TESTS: dict[str, Collective] = {
    "alltoall_perf": "all_to_all_single",
    "sendrecv_perf": "p2p",
}
_RANK = re.compile(r"#\s+Rank\s+(\d+)\s.*?\bon\s+(\S+)\s+device\b")
_ROW = re.compile(r"(?:^|:)\s*(\d+)\s+(\d+)\s+([a-z]\w*)\s+(.*\d.*)$")
_VERSION = re.compile(r"((?:nccl|rccl)-tests):? [Vv]ersion (\S+)")


def read_nccl_tests(path: Path) -> LinkModel:
    """Read the output of one run of alltoall_perf or sendrecv_perf, with three sizes or
    more, as a replacement for a profile.
    """
    text = read_text(path, "what a test has printed")
    names = set(re.findall(r"\b([a-z_]+_perf)(?:_mpi)?\b", text))
    supported = [name for name in _TESTS if name in names]
    if len(supported) != 1:
        contents = f"is of {', '.join(sorted(names))}" if names else "names no test"
        raise UserError(
            f"{path}: {contents}; give the output of one run of {' or '.join(_TESTS)},"
            " including the line with its command"
        )
    ranks = {int(rank): f"{host}:{rank}" for rank, host in _RANK.findall(text)}
    if len(ranks) < 2 or sorted(ranks) != list(range(len(ranks))):
        raise UserError(
            f"{path}: lists {len(ranks)} ranks ('#  Rank  0 … on HOST device 0'); at"
            " least two are needed"
        )
    num_bytes, seconds = _times(path, text)
    if supported == ["alltoall_perf"]:
        # its size is what a rank sends to all ranks, including itself
        num_bytes = num_bytes / len(ranks)
    return _same_everywhere(
        fit_line(num_bytes, seconds),
        [ranks[rank] for rank in sorted(ranks)],
        _TESTS[supported[0]],
        text,
    )


def _times(path: Path, text: str) -> tuple[Any, Any]:
    """Return the sizes in bytes and the out-of-place times in seconds."""
    # Keyed by size: if a size is printed twice, the last time counts.
    times: dict[int, float] = {}
    has_root = re.search(r"#\s+size\s+count.*\broot\b", text) is not None
    for number, line in enumerate(text.splitlines(), 1):
        if (row := _ROW.search(line)) is None:
            continue
        size, cells = int(row[1]), row[4].split()
        # The reduction; older versions leave it blank here.
        cells = cells[1:] if not _is_number(cells[0]) else cells
        cells = cells[1:] if has_root else cells
        if len(cells) < 3 or not all(_is_number(cell) for cell in cells[:2]):
            raise UserError(
                f"{path}, line {number}: not a row of nccl-tests: {line.strip()[:80]}"
            )
        microseconds, gb_s = float(cells[0]), float(cells[1])
        if size == 0 or microseconds == 0:
            continue
        # The printed rate is a checksum: it does not fit if a column is read wrongly.
        if abs(size / microseconds / 1e3 - gb_s) > 0.01 + 0.02 * gb_s:
            raise UserError(
                f"{path}, line {number}: {size} bytes in {microseconds:g} us are not"
                f" {gb_s:g} GB/s, as printed"
            )
        times[size] = microseconds * 1e-6
    if len(times) < 3:
        raise UserError(
            f"{path}: has {len(times)} sizes; at least three are needed; run it with"
            " -b 64K -e 64M -f 2"
        )
    return np.array(list(times), dtype=np.float64), np.array(list(times.values()))


def _is_number(word: str) -> bool:
    return re.fullmatch(r"-?\d+(\.\d+)?([eE][-+]?\d+)?", word) is not None


def _same_everywhere(
    line: Any, endpoints: list[str], collective: Collective, text: str
) -> LinkModel:
    size = len(endpoints)
    off = ~np.eye(size, dtype=bool)
    phase = {
        "alpha_s": np.where(off, line.alpha_s, 0.0).tolist(),
        "beta_s_per_byte": np.where(off, line.beta_s_per_byte, 0.0).tolist(),
        "r2": [[line.r2 if edge else None for edge in row] for row in off.tolist()],
        "refined": np.zeros((size, size), dtype=bool).tolist(),
        "repeats": 1,
    }
    ports = {"egress_s_per_byte": [None] * size, "ingress_s_per_byte": [None] * size}
    return LinkModel.model_validate(
        {
            "endpoints": endpoints,
            "collective": collective,
            "backend": "nccl",
            "world_size": size,
            "libraries": dict(_VERSION.findall(text)),
            **dict.fromkeys(("metadata", "dispatch", "combine"), phase),
            "ports": ports,
        }
    )
