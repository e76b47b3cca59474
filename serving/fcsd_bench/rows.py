"""The servers that are compared, each with its flags.

SGLang has three of the rows: its plugin serves tensor-parallel ranks that share the
experts. The rivals compute the same as stock, and hide or fuse communication by other
means. Their requirements are those of vLLM 0.32. If vLLM continues without a requested
feature and only logs that, `signs` match the log lines.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from fcsd_bench.engines import ENGINES, Engine, EngineName


@dataclass(frozen=True)
class Row:
    """One server."""

    name: str
    title: str
    farskip: bool = False
    """Whether it serves the converted model."""
    exact: bool = False
    """Whether it is a rival: stock's results by other means. Some machines may lack it.
    """
    wide: bool = False
    """Whether attention is data-parallel and all ranks share the experts (wide expert
    parallelism). Some machines may lack it.
    """
    base: str = "stock"
    """Name of the row that is the baseline of its speed-ups."""
    flags: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    signs: tuple[str, ...] = ()
    """Patterns of the log lines in which vLLM says that it continues without a
    requested feature.
    """
    missing: str | None = None
    """Why it cannot run here, if that is known before a server is started."""


RowName = Literal[
    "stock",
    "dbo_prefill",
    "dbo_decode",
    "shared_stream",
    "fused_allreduce",
    "farskip_blocking",
    "farskip_overlapped",
    "wide_stock",
    "wide_blocking",
    "wide_overlapped",
]
ROWS_OF: dict[EngineName, tuple[RowName, ...]] = {
    "vllm": get_args(RowName),
    "sglang": ("stock", "farskip_blocking", "farskip_overlapped"),
}
_SHARED = (
    "n_shared_experts",
    "num_shared_experts",
    "shared_expert_intermediate_size",
    "num_shared_expert",
)
_NO_GPU = "vLLM supports it on GPUs only, and this machine has none"


def make_rows(
    engine: EngineName,
    names: Sequence[str],
    config: Mapping[str, Any],
    devices: tuple[str, ...],
    tensor_parallel: int,
    comm: Mapping[str, Any],
    all2all: str,
) -> list[Row]:
    """Return the rows of these names.

    Args:
        config: the model's `config.json`.
        devices: names of the GPUs.
        tensor_parallel: ranks of a server; wide rows have as many data-parallel ranks.
        comm: settings of the overlapped rows' communication.
        all2all: backend of the wide rows' exchanges.
    """
    of = ENGINES[engine]
    # Rows differ in as few flags as possible, so that a ratio shows one change.
    usual = of.ranks(tensor_parallel)
    wide = (*_data_parallel(tensor_parallel), "--all2all-backend", all2all)
    alone = "there is nothing to overlap on one rank" if tensor_parallel == 1 else None
    no_gpu = None if devices else _NO_GPU
    has_shared = _has_shared_experts(config)
    rows = [
        Row(
            "stock",
            "stock",
            flags=usual,
            environment={} if devices else of.stock_on_cpu,
        ),
        _dbo("prefill", "high_throughput", tensor_parallel, alone),
        _dbo("decode", "low_latency", tensor_parallel, alone),
        Row(
            "shared_stream",
            "stock, shared experts on a separate stream",
            exact=True,
            flags=usual,
            # vLLM does this by default up to 256 tokens; here at any size.
            environment={
                "VLLM_DISABLE_SHARED_EXPERTS_STREAM": "0",
                "VLLM_SHARED_EXPERTS_STREAM_TOKEN_THRESHOLD": "1000000",
            },
            missing=no_gpu if has_shared else "the model has no shared experts",
        ),
        Row(
            "fused_allreduce",
            "stock, all-reduce fused with the norm",
            exact=True,
            flags=(
                *usual,
                "--compilation-config",
                '{"pass_config": {"fuse_allreduce_rms": true}}',
            ),
            signs=(
                # vLLM serves without the fused pass, and only logs why.
                "AllReduce fusion pass is disabled",
                "skipping allreduce fusion",
                "allreduce fusion is not supported",
                "allreduce-norm fusion will be disabled",
                "only active during inductor compilation will be ignored",
            ),
            missing=alone or no_gpu,
        ),
        _farskip(of, "blocking", usual, blocking(comm), emulated(comm)),
        _farskip(of, "overlapped", usual, comm, emulated(comm)),
        Row(
            "wide_stock",
            "wide, stock",
            exact=True,
            wide=True,
            base="wide_stock",
            flags=wide,
            missing=alone,
        ),
        _wide(of, "blocking", wide, blocking(comm), emulated(comm), alone),
        _wide(of, "overlapped", wide, comm, emulated(comm), alone),
    ]
    # The order is that of the table, whatever the order of the names.
    return [row for row in rows if row.name in names]


def with_even_routing(
    rows: Sequence[Row],
    engine: EngineName,
    devices: tuple[str, ...],
    chosen: Mapping[str, str],
) -> list[Row]:
    """Return rows whose servers send tokens to random experts, whatever the routers
    choose.

    Dummy routers send all tokens to the same few experts if a bias corrects their
    scores (DeepSeek-V3): a dummy bias is far larger than dummy scores.

    chosen: environment of this process; a variable that is set there keeps its value.
    """
    of = ENGINES[engine]
    if not (devices or of.even_routing_on_cpu):
        return list(rows)
    even = {name: chosen.get(name, value) for name, value in of.even_routing.items()}
    return [replace(row, environment={**even, **row.environment}) for row in rows]


def blocking(comm: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with which nothing overlaps; the emulated network, if any, is
    kept.
    """
    # No message is as large as this threshold, so all of them block.
    if comm.get("comm") == "timed":
        return {**comm, "min_overlap_bytes": 2**62}
    return {"comm": "blocking"}


def _dbo(phase: str, kernels: str, ranks: int, alone: str | None) -> Row:
    """Return the row of dual batch overlap, which needs data parallelism with DeepEP
    and vLLM 0.32's first model runner.
    """
    return Row(
        f"dbo_{phase}",
        f"stock, dual batch overlap, DeepEP for {phase}",
        exact=True,
        wide=True,
        flags=(
            *_data_parallel(ranks),
            "--enable-dbo",
            "--all2all-backend",
            f"deepep_{kernels}",
        ),
        environment={"VLLM_USE_V2_MODEL_RUNNER": "0"},
        signs=("Dual-Batch Overlap is not supported",),
        missing=alone,
    )


def _farskip(
    engine: Engine,
    name: str,
    usual: tuple[str, ...],
    comm: Mapping[str, Any],
    emulates: bool,
) -> Row:
    flags, environment = engine.settings(comm)
    # Stock has no emulated network, so a row that has one can only be compared with
    # FarSkip.
    base = "farskip_blocking" if emulates else "stock"
    return Row(
        f"farskip_{name}",
        f"FarSkip, {name}",
        farskip=True,
        flags=(*usual, *flags),
        environment=environment,
        base=base,
    )


def _wide(
    engine: Engine,
    name: str,
    wide: tuple[str, ...],
    comm: Mapping[str, Any],
    emulates: bool,
    missing: str | None,
) -> Row:
    row = _farskip(engine, name, wide, comm, emulates)
    base = "wide_blocking" if emulates else "wide_stock"
    return replace(
        row,
        name=f"wide_{name}",
        title=f"wide, {row.title}",
        wide=True,
        base=base,
        missing=missing,
    )


def _data_parallel(ranks: int) -> tuple[str, ...]:
    # Wide expert parallelism: attention is replicated, only experts are sharded.
    return (
        "--tensor-parallel-size",
        "1",
        "--data-parallel-size",
        str(ranks),
        "--enable-expert-parallel",
    )


def node_flags(
    engine: EngineName, row: Row, ranks: int, nodes: Sequence[str], port: int
) -> list[list[str]]:
    """Return the flags that each machine of a server adds to its row's, the first
    machine's first; no flags for a single machine.

    Args:
        ranks: ranks of the whole server, in equal numbers on each machine.
        nodes: addresses of the machines.
        port: a free port of the first machine.
    """
    # One machine needs no rendezvous.
    if len(nodes) < 2:
        return [[]]
    ranks_per_node = ranks // len(nodes)
    # vLLM's other machines serve no requests themselves; SGLang's know it from their
    # rank.
    headless = ["--headless"]
    if engine == "sglang":
        common = ["--dist-init-addr", f"{nodes[0]}:{port}", "--nnodes", len(nodes)]
        rank_flags = [["--node-rank", index] for index in range(1, len(nodes))]
        headless = []
    elif row.wide:
        common = [
            "--data-parallel-size-local",
            ranks_per_node,
            "--data-parallel-address",
            nodes[0],
        ]
        common += ["--data-parallel-rpc-port", port]
        rank_flags = [
            ["--data-parallel-start-rank", ranks_per_node * index]
            for index in range(1, len(nodes))
        ]
    else:
        common = [
            "--nnodes",
            len(nodes),
            "--master-addr",
            nodes[0],
            "--master-port",
            port,
        ]
        rank_flags = [["--node-rank", index] for index in range(1, len(nodes))]
    flags = [common, *([*common, *headless, *extra] for extra in rank_flags)]
    return [[str(word) for word in words] for words in flags]


def emulated(comm: Mapping[str, Any]) -> bool:
    """Tell whether the FarSkip rows communicate over an emulated network, which stock
    rows never have.
    """
    return bool(comm.get("latency_ms") or comm.get("bandwidth_gb_per_s"))


def _has_shared_experts(config: Mapping[str, Any]) -> bool:
    text = config.get("text_config") or config
    return any(text.get(name) for name in _SHARED) or str(
        text.get("model_type")
    ).startswith("llama4")
