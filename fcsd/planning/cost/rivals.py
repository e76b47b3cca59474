"""What FarSkip is compared with: schedules that hide communication and change no
equation, and other architectures that are made to hide it.

Releases were read on 2026-11-28: vLLM 0.32.0, SGLang 0.5.23, Megatron-Core 0.19.2.

Not covered: a matmul that is fused with the collective behind it (asynchronous tensor
parallelism), and schedules of other engines.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Where = Literal["train", "dp", "tp"]
"""A training; a server whose ranks exchange tokens (`--dp`); one whose ranks all-reduce."""

SHARED = "shared expert beside exchanges"
HALVES = "two half batches in turn"
PAIRS = "two micro-batches in turn (1F1B)"
RECOMPUTED_PAIRS = "1F1B with recomputation"
MEGA = "MegaMoE"
SHORTCUT, LADDER, TRACKS = "ShortcutMoE", "Ladder Residual", "Parallel Track"

TRACK_LAYERS = 8
"""Layers between two sums of Parallel Track: the 16-fold reduction of its paper."""

MEGA_FAMILIES = frozenset((
    "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "mellum", "minimax_m3_vl_text", "qwen2_moe",
    "qwen3_5_moe_text", "qwen3_moe", "qwen3_next", "qwen3_vl_moe",
))  # fmt: skip
"""Families whose experts SGLang computes with MegaMoE."""

_BOTH = ("dispatch", "combine")


@dataclass(frozen=True)
class Rival:
    """A schedule or architecture. hides: what runs beside what, and its price. released:
    the releases that have it; None: none has. source: repository and number of a pull
    request, or a paper, with what was measured there. exact: it changes no equation.
    beside: exchanges of a layer, and the steps that run beside them; "core" is
    attention without its output projection ("output").
    """

    name: str
    where: Where
    hides: str
    released: str | None
    source: str
    exact: bool = True
    beside: Sequence[tuple[Sequence[str], Sequence[str]]] = ()


_TWICE = "weights are read twice, twice as many exchanges start"
_BESIDE_SHARED = ((_BOTH, ("shared expert",)),)
_BESIDE_ATTENTION = (
    (("dispatch",), ("attention a", "core")),
    (("combine",), ("output", "shared expert")),
)

RIVALS = (
    Rival(SHARED, "train", "dispatch and combine beside the shared expert",
          "Megatron-Core 0.19.2 --moe-shared-expert-overlap", "NVIDIA/Megatron-LM, transformer/moe/README.md",
          beside=_BESIDE_SHARED),
    Rival(HALVES, "train", f"the rows of a micro-batch in two halves; {_TWICE}",
          "OLMo-core 3.0.0, torchtitan 0.3.0 (experiments)", "allenai/OLMo-core 743"),
    Rival(PAIRS, "train", "the backward pass of one beside the forward pass of the next, without recomputation",
          "Megatron-Core 0.19.2 --overlap-moe-expert-parallel-comm",
          "NVIDIA-NeMo/Megatron-Bridge 3862 (Qwen3-30B-A3B: 1.32 times as fast); DualPipe"),
    Rival(RECOMPUTED_PAIRS, "train", f"{PAIRS}, with every layer recomputed", None,
          "Megatron-Core 0.19.2 refuses full recomputation with it"),
    Rival(SHORTCUT, "train", "the experts read what attention reads: dispatch beside attention, combine beside its"
          " output projection and the shared expert", None,
          "NVIDIA/Megatron-LM 6959 (merged, not in 0.19.2): 4.7 to 12.1 % faster, 82 to 95 % hidden", exact=False,
          beside=_BESIDE_ATTENTION),
    Rival(SHARED, "dp", "dispatch and combine beside the shared expert",
          "vLLM 0.32 (with DeepEP, or for up to 256 tokens of a rank), SGLang 0.5.23",
          "vllm-project/vllm 28406, sgl-project/sglang 34938", beside=_BESIDE_SHARED),
    Rival(HALVES, "dp", f"one half computes while the other exchanges; {_TWICE}",
          "vLLM 0.32 --enable-dbo (both model runners, decoding in full graphs), SGLang 0.5.23"
          " --enable-two-batch-overlap", "vllm-project/vllm 23693, 50945, 51700; sgl-project/sglang 4068"),
    Rival(MEGA, "dp", "one kernel dispatches, computes the experts and combines",
          "SGLang 0.5.23 --moe-a2a-backend megamoe (vLLM 0.32: DeepSeek-V4 on Blackwell)",
          "deepseek-ai/DeepGEMM 316 (Blackwell: the three 1.5 to 1.96 times as fast), 383 (H200: 1.1 to 1.6)",
          beside=((_BOTH, ("experts",)),)),
    Rival(SHORTCUT, "dp", "the experts read what attention reads: dispatch beside attention, combine beside its"
          " output projection and the shared expert", None, "arXiv 2404.05019", exact=False,
          beside=_BESIDE_ATTENTION),
    Rival(HALVES, "tp", f"one half computes while the other sums; {_TWICE}, without fused norms", None,
          "vllm-project/vllm 44677 (open): saved 25 % of the all-reduces' time in a prefill"),
    Rival(LADDER, "tp", "each half of a layer reads the stream without the sum of the half before it, which NCCL"
          " sends beside it", None, "arXiv 2501.06589: 29 % faster (dense, 70B, 8 ranks)", exact=False),
    Rival(TRACKS, "tp", f"ranks sum once in {TRACK_LAYERS} layers", None,
          "arXiv 2602.07306: 2 to 12 % less time between tokens, 15 to 30 % to the first (dense)", exact=False),
)  # fmt: skip


def rival(name: str, where: Where) -> Rival:
    """Return the row of a name."""
    (found,) = (row for row in RIVALS if (row.name, row.where) == (name, where))
    return found
