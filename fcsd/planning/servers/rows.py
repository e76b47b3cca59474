"""The servers that are set against each other, each by its flags: what is told about a row is what `vllm serve` gets.

The rivals compute what stock does and hide communication, or fuse it, by other means. What each of them needs is known
from vLLM 0.32; where vLLM itself goes on without it and only says so in its log, `signs` are the lines that say it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Row:
    """One server."""

    name: str
    title: str
    farskip: bool = False
    """It serves the converted model."""
    exact: bool = False
    """A rival: stock's results by other means. It may be missing on a machine."""
    flags: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    signs: tuple[str, ...] = ()
    """Patterns of the lines in which vLLM says that it goes on without what the flags ask for."""
    missing: str | None = None
    """Why it cannot be had here, where that is known before a server is started."""


RowName = Literal[
    "stock",
    "dbo_prefill",
    "dbo_decode",
    "shared_stream",
    "fused_allreduce",
    "farskip_blocking",
    "farskip_overlapped",
]
_SHARED = ("n_shared_experts", "num_shared_experts", "shared_expert_intermediate_size", "num_shared_expert")
_NO_GPU = "vLLM has it on GPUs only, and there is none here"


def make_rows(
    names: Sequence[str],
    config: Mapping[str, Any],
    devices: tuple[str, ...],
    tensor_parallel: int,
    comm: Mapping[str, Any],
) -> list[Row]:
    """Return the rows of these names.

    Args:
        config: of the model, as in its `config.json`.
        devices: names of the GPUs.
        comm: settings of the overlapped row's communication.
    """
    ranks = ("--tensor-parallel-size", str(tensor_parallel))
    experts = ("--enable-expert-parallel",) if tensor_parallel > 1 else ()
    usual = (*ranks, *experts)
    alone = "there is nothing to overlap on one rank" if tensor_parallel == 1 else None
    no_gpu = None if devices else _NO_GPU
    rows = [
        Row("stock", "stock", flags=usual),
        _dbo("prefill", "high_throughput", tensor_parallel, alone),
        _dbo("decode", "low_latency", tensor_parallel, alone),
        Row(
            "shared_stream",
            "stock, shared experts on a stream of their own",
            exact=True,
            flags=usual,
            # vLLM does so by itself up to 256 tokens; here at any size.
            environment={
                "VLLM_DISABLE_SHARED_EXPERTS_STREAM": "0",
                "VLLM_SHARED_EXPERTS_STREAM_TOKEN_THRESHOLD": "1000000",
            },
            missing=no_gpu if _has_shared_experts(config) else "the model has no shared experts",
        ),
        Row(
            "fused_allreduce",
            "stock, all-reduce fused with the norm",
            exact=True,
            flags=(*usual, "--compilation-config", '{"pass_config": {"fuse_allreduce_rms": true}}'),
            signs=(
                "AllReduce fusion pass is disabled",
                "skipping allreduce fusion",
                "allreduce fusion is not supported",
                "allreduce-norm fusion will be disabled",
                "only active during inductor compilation will be ignored",
            ),
            missing=alone or no_gpu,
        ),
        _farskip("blocking", usual, blocking(comm)),
        _farskip("overlapped", usual, comm),
    ]
    return [row for row in rows if row.name in names]


def blocking(comm: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings under which nothing overlaps: over an emulated network where the other row has one, too."""
    if comm.get("comm") == "timed":
        return {**comm, "min_overlap_bytes": 2**62}
    return {"comm": "blocking"}


def _dbo(phase: str, kernels: str, ranks: int, alone: str | None) -> Row:
    """Dual batch overlap needs data parallelism and DeepEP; vLLM 0.32 has it on the first model runner."""
    return Row(
        f"dbo_{phase}",
        f"stock, dual batch overlap, DeepEP for {phase}",
        exact=True,
        flags=(
            *("--tensor-parallel-size", "1", "--data-parallel-size", str(ranks)),
            *("--enable-expert-parallel", "--enable-dbo", "--all2all-backend", f"deepep_{kernels}"),
        ),
        environment={"VLLM_USE_V2_MODEL_RUNNER": "0"},
        signs=("Dual-Batch Overlap is not supported",),
        missing=alone,
    )


def _farskip(name: str, usual: tuple[str, ...], comm: Mapping[str, Any]) -> Row:
    flags = (*usual, "--additional-config", json.dumps({"fcsd": dict(comm)}))
    return Row(f"farskip_{name}", f"FarSkip, {name}", farskip=True, flags=flags)


def _has_shared_experts(config: Mapping[str, Any]) -> bool:
    text = config.get("text_config") or config
    return any(text.get(name) for name in _SHARED) or str(text.get("model_type")).startswith("llama4")
