"""The options of plans and estimates. Without torch, so that `--help` is quick."""

from typing import Any, Literal

from pydantic import Field, field_validator

from fcsd.base.strict import Strict, like
from fcsd.model.connectivity.spec import Connectivity
from fcsd.planning.cost.machine import Cluster

Phase = Literal["train", "prefill", "decode"]
Dtype = Literal["auto", "bfloat16", "fp8"]


class PlanSettings(Cluster):
    """The planned phase, batch and layout, and the machine.

    connectivity: None: that of a converted checkpoint; all layers of any other model.
    sharding: fsdp2: as fcsd trains; optimizer: as Megatron does, to compare with its
    runs: a rank keeps its weights whole, they are sent once per step, and no memory is
    planned. rows_once: in training, a token sends one row to each rank that has any of
    its experts; False: one row to each expert, for the same comparison.
    """

    model: str
    revision: str | None = None
    phase: Phase = Field("train", description="phase to time")
    expert_parallel: int | None = Field(
        None,
        description="ranks that share the experts (default: all GPUs; for a server, --tp)",
        json_schema_extra={"metavar": "N", "flag": "--ep"},
    )
    tensor_parallel: int | None = Field(
        None,
        description=(
            "tensor-parallel ranks of a server (default: all GPUs), or of a Megatron"
            " training, which fcsd does not run (default: 1)"
        ),
        json_schema_extra={"metavar": "N", "flag": "--tp"},
    )
    pipeline_parallel: int = Field(
        1,
        description="stages of a Megatron training, which fcsd does not run",
        json_schema_extra={"metavar": "N", "flag": "--pp"},
        ge=1,
    )
    data_parallel: int | None = Field(
        None,
        description=(
            "data-parallel ranks of a server, each with its own attention and requests,"
            " that share the experts and exchange tokens (wide expert parallelism);"
            " replaces --tp"
        ),
        json_schema_extra={"metavar": "N", "flag": "--dp"},
        ge=2,
    )
    all2all: Literal[
        "allgather_reducescatter", "deepep_high_throughput", "deepep_low_latency"
    ] = Field(
        "allgather_reducescatter",
        description=(
            "vLLM's all-to-all backend between the --dp ranks: all ranks gather all tokens"
            " (its default), one row to each node and rank with one of a token's experts,"
            " or one row to each expert"
        ),
    )
    batch: int = Field(
        1,
        description="rows per micro-batch and rank; for a server, concurrent requests",
        json_schema_extra={"metavar": "N"},
        ge=1,
    )
    global_batch: int | None = Field(
        None,
        description="rows per optimiser step (default: one micro-batch per rank)",
        json_schema_extra={"metavar": "N"},
    )
    length: int = Field(
        4096,
        description="tokens per row, per prompt, or in the text so far",
        json_schema_extra={"metavar": "N"},
        ge=1,
    )
    dtype: Dtype = Field(
        "auto",
        description=(
            "dtype of weights and matmuls in projections and experts; auto: for a server,"
            " the checkpoint's quantisation, otherwise bfloat16"
        ),
    )
    keep_activations: bool = Field(
        False,
        description=(
            "train without activation checkpointing: keep activations for the backward pass"
            " instead of recomputing each layer"
        ),
    )
    without_aiter: bool = Field(
        False,
        description=(
            "time a prefill in FP8 on AMD GPUs with vLLM's own kernels, its default, instead"
            " of AITER's (VLLM_ROCM_USE_AITER=1): dense matmuls take 2, experts 3 and"
            " attention 14 times as long"
        ),
    )
    connectivity: Connectivity | None = None
    # Attention with its scores in memory instead of one fused kernel.
    unfused_attention: bool = False
    sharding: Literal["fsdp2", "optimizer"] = "fsdp2"
    rows_once: bool = True


class Hardware(Strict):
    """The machine for which a run is estimated."""

    gpu: str = like(Cluster, "gpu")
    num_gpus: int = Field(
        1,
        description="number of GPUs, one rank each",
        json_schema_extra={"flag": "--gpus"},
        ge=1,
    )
    sharding: Literal["none", "fsdp2", "hsdp", "zero3"] = Field(
        "none",
        description=(
            "none: a whole copy on every rank, as with `accelerate launch --multi_gpu`; the"
            " others as with configs/fsdp2_8.yaml, fsdp2_2x8.yaml (one copy per node) and"
            " zero3_8.yaml"
        ),
    )
    expert_parallel: int = Field(
        1,
        description=(
            "with --sharding fsdp2: ranks that share the experts; all other weights are"
            " sharded over all ranks"
        ),
        json_schema_extra={"metavar": "N"},
        ge=1,
    )
    mfu: tuple[float, float] | None = Field(
        None,
        description=(
            "share of the published peak that every matmul reaches, a number or a range"
            " (default: an assumed range for each kind of matmul; docs/plan.md)"
        ),
    )
    network_gb_s: float | None = like(Cluster, "network_gb_s")

    @field_validator("mfu", mode="before")
    @classmethod
    def _parse_range(cls, value: Any) -> Any:
        """Read `0.1-0.25` or `0.2`."""
        if not isinstance(value, str):
            return value
        try:
            low, *high = map(float, value.split("-"))
            if len(high) > 1:
                raise ValueError
        except ValueError:
            raise ValueError("a range such as 0.1-0.25, or one number") from None
        return low, *(high or [low])

    @field_validator("mfu")
    @classmethod
    def _check_range(
        cls, value: tuple[float, float] | None
    ) -> tuple[float, float] | None:
        if value is not None and not 0 < value[0] <= value[1] <= 1:
            raise ValueError(
                f"{value[0]:g}-{value[1]:g}: a range such as 0.1-0.25, within 0 and 1"
            )
        return value
