"""Published times of all-reduces within a node, by size of the reduced tensor: those
that an engine runs in line, and NCCL's or RCCL's, which price those on a side stream.

SGLang's plugin runs NCCL or RCCL there, as vLLM's does with `comm: nccl`. By default the
latter runs the engine's own kernels there; nobody has published how long these take
beside computation, so that a plan prices NCCL and names the gain with them beside it.

Each was captured in a CUDA or HIP graph unless its source says otherwise; nothing here
was fitted to a gain or to the trace of a whole step. The times hardly depend on the
size below 512 KiB, which is why one constant per byte would not do.

Not covered: groups that span nodes (`fcsd.planning.cost.roofline`), GPUs without a
published table.
"""

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from fcsd.planning.cost.hardware import Gpu

Way = Literal["engine", "side"]
"""Who sends: the engine's own kernel, in line; or a side stream, priced as NCCL or RCCL."""

Microseconds = tuple[float, float, float]
"""Least, typical and most microseconds."""


@dataclass(frozen=True)
class Table:
    """Times by KiB. source: repository and number of the thread or pull request."""

    source: str
    rows: tuple[tuple[float, float, float, float], ...]

    def at(self, num_bytes: float, beyond: Callable[[float], float]) -> Microseconds:
        """Return the times of a size: between two rows, along a straight line over the
        logarithm of the size; below the first row, its times; behind the last, those
        plus the time of the other bytes.

        beyond: bytes -> microseconds at the rate of the links.
        """
        kib = num_bytes / 1024
        sizes = [row[0] for row in self.rows]
        index = bisect_left(sizes, kib)
        if index == 0:
            return self.rows[0][1:]
        if index == len(sizes):
            more = beyond(num_bytes - sizes[-1] * 1024)
            low, typical, high = self.rows[-1][1:]
            return low + more, typical + more, high + more
        (first, *before), (second, *behind) = self.rows[index - 1 : index + 1]
        share = math.log(kib / first) / math.log(second / first)
        low, typical, high = (
            a + share * (b - a) for a, b in zip(before, behind, strict=True)
        )
        return low, typical, high


# The smaller sizes of the engines' kernels are of a machine that their page does not
# name, with NCCL as on 8 H100; 512 KiB and more are of 8 H100.
_HOPPER_8 = Table(
    "vllm-project/vllm 42324 (512 KiB and more, 8 H100); yifuwang/symm-mem-recipes 3;"
    " least: sgl-project/sglang 30959, vllm 24111",
    (
        (8, 8.3, 11, 16.4), (64, 8.3, 11.6, 16.4), (128, 10, 11.7, 18.2), (256, 10, 12.5, 18.7),
        (512, 10, 11, 15), (1024, 14, 14, 17), (2048, 18, 18, 22), (4096, 27, 27, 37), (8192, 46, 46, 65),
        (16384, 87, 87, 125), (32768, 165, 165, 242), (65536, 320, 320, 468),
    ),
)  # fmt: skip
_HOPPER_8_NCCL = Table(
    "ByteDance-Seed/Triton-distributed 57, vllm-project/vllm 42324 (8 H100);"
    " yifuwang/symm-mem-recipes 3; most: NVIDIA/nccl 2094, without a"
    " graph, Triton-distributed 57, stas00/ml-engineering (8 H200), between them by bytes",
    (
        (8, 20.7, 22, 33), (16, 20.7, 22, 33), (32, 22.7, 23, 34), (64, 23, 23.7, 34), (128, 23.7, 24, 34),
        (256, 24.4, 24.6, 34), (512, 24, 24.6, 34), (1024, 25, 27, 34), (2048, 37, 37, 42.5), (4096, 50, 50, 59.4),
        (8192, 76, 76, 84.9), (16384, 121, 121, 136), (32768, 195, 195, 204), (65536, 316, 316, 339),
    ),
)  # fmt: skip
_HOPPER_4 = Table(
    "vllm-project/vllm 24111, 24532 (512 KiB and more; smaller ones as at 512 KiB);"
    " least: sgl-project/sglang 30959",
    ((512, 8.3, 10, 17), (1024, 14, 14.5, 18), (2048, 21, 22, 27), (4096, 28, 33, 43)),
)
_HOPPER_4_NCCL = Table(
    "waynehacking8/nccl-collectives-bench 38c093e (4 of 8 H100, CUDA graph)",
    (
        (8, 12.3, 14, 18.6), (64, 13.6, 15.2, 16.8), (256, 14.2, 15.8, 17.5), (512, 17, 19, 21),
        (1024, 19, 22, 24), (2048, 25, 30.6, 34.6), (4096, 34.8, 43.3, 47.8), (16384, 84, 102, 106),
    ),
)  # fmt: skip
_HOPPER_2 = Table(
    "flagos-ai/FlagGems-vllm 773 (74 KiB, with the norm), vllm-project/vllm 24111"
    " (512 KiB), 22086 (1 and 2 MiB, with the norm)",
    ((74, 6.1, 6.5, 7), (512, 7, 7, 10), (1024, 10, 12, 16), (2048, 13, 17, 30)),
)
_BLACKWELL_8 = Table(
    "vllm-project/vllm 37756 (6 B300); least: flashinfer-ai/flashinfer 5178; most:"
    " sgl-project/sglang 7621 (8 B200)",
    (
        (8, 4.8, 8, 13.5), (64, 5.2, 8, 13.5), (128, 6, 8, 15), (256, 7.6, 9, 15), (512, 8.3, 11, 17),
        (1024, 9.9, 17, 18), (2048, 12.2, 22, 26), (4096, 18.4, 29, 45), (16384, 72, 72, 136), (65536, 271, 271, 488),
    ),
)  # fmt: skip
_BLACKWELL_8_NCCL = Table(
    "vllm-project/vllm 37756 (6 B300); least and most: sgl-project/sglang 32461",
    (
        (8, 23, 26, 33), (64, 23, 25, 33), (256, 23, 27, 33), (1024, 23, 27, 33), (2048, 32, 32, 35),
        (4096, 46, 46, 50), (16384, 83, 83, 90), (65536, 219, 219, 241),
    ),
)  # fmt: skip
_BLACKWELL_2_NCCL = Table(
    "vllm-project/vllm 42324 (2 B200; smaller ones as at 512 KiB)",
    ((512, 13, 13, 33), (1024, 17, 17, 33)),
)
_MI355X_8 = Table(
    "vllm-project/vllm 39080 (8 MI355X; least: its tuned kernels; most: those of twice the"
    " size, the last assumed)",
    (
        (24, 6.3, 6.3, 6.7), (48, 6.7, 6.7, 7.6), (96, 6.8, 7.6, 10), (192, 7, 10, 13.1), (384, 7.5, 13.1, 16),
        (768, 9.6, 16, 24.2), (1536, 12.9, 24.2, 28),
    ),
)  # fmt: skip
_MI300X_8 = Table(
    "between pytorch/FBGEMM 4072 (2 to 6 KiB and 2.6 MB, 8 ranks) and vllm-project/vllm"
    " 19744 (16 KiB to 8 MiB, 4 ranks)",
    (
        (8, 7.3, 10.5, 12.8), (16, 7.3, 11.8, 16.1), (64, 8.7, 12.3, 16.6), (128, 10.5, 13, 17.5),
        (256, 14.3, 14.4, 19.2), (512, 14.7, 17, 21), (1024, 22.4, 22.9, 26.3), (2539, 38.4, 38.4, 60.6),
        (4297, 52.7, 52.7, 78.7),
    ),
)  # fmt: skip
# Nobody published RCCL's times between 6 KiB and 2.6 MB: these rows join both ends.
_AMD_8_RCCL = Table(
    "pytorch/FBGEMM 4072 (6 KiB and 2.6 MB; the rest between them; most, and"
    " least of the largest: assumed)",
    (
        (6, 26.3, 26.7, 37), (64, 26.3, 27.6, 38), (256, 26.3, 30.7, 43), (512, 26.3, 34.8, 49),
        (1024, 26.3, 43.1, 67.6), (2539, 60, 67.6, 80), (4297, 75, 81.5, 95),
    ),
)  # fmt: skip

TABLES: dict[Way, dict[str, dict[int, Table]]] = {
    "engine": {
        "NVIDIA H": {2: _HOPPER_2, 4: _HOPPER_4, 8: _HOPPER_8},
        "NVIDIA B": {8: _BLACKWELL_8},
        "AMD Instinct MI300X": {8: _MI300X_8},
        "AMD Instinct MI325X": {8: _MI300X_8},
        "AMD Instinct MI355X": {8: _MI355X_8},
    },
    "side": {
        "NVIDIA H": {4: _HOPPER_4_NCCL, 8: _HOPPER_8_NCCL},
        "NVIDIA B": {2: _BLACKWELL_2_NCCL, 8: _BLACKWELL_8_NCCL},
        "AMD Instinct MI3": {8: _AMD_8_RCCL},
    },
}
"""Tables by way, by the beginning of the GPU's name, and by number of ranks. A group is
timed by the next larger one that was published.
"""


def published(way: Way, gpu: Gpu, ranks: int) -> Table | None:
    """Return the table of a group within a node; None where nobody published one."""
    for name, by_ranks in TABLES[way].items():
        if gpu.name.startswith(name):
            larger = [size for size in sorted(by_ranks) if size >= ranks]
            return by_ranks[larger[0]] if larger else None
    return None


FUSED_BELOW_KIB: dict[str, dict[int, int]] = {
    "NVIDIA H": {2: 512, 4: 2048, 8: 256},
    "NVIDIA B": {2: 65536, 4: 32768, 8: 1024},
}
"""Size, by GPU and ranks, below which an engine fuses an all-reduce with the norm behind
it and is faster so: vLLM 0.32 (`FI_ALLREDUCE_FUSION_MAX_SIZE_MB`, on by default), less
where that was measured to be slower (two H100: vllm-project/vllm 22086; eight H200:
44079). AMD's fused kernel was faster for some numbers of requests and slower for others
(vllm-project/vllm 37646, SemiAnalysisAI/InferenceX 1527).
"""


def fused_below(gpu: Gpu, ranks: int) -> int:
    """Return the bytes below which an all-reduce is fused with the norm behind it."""
    for name, by_ranks in FUSED_BELOW_KIB.items():
        if gpu.name.startswith(name):
            return 1024 * by_ranks.get(ranks, 0)
    return 0
