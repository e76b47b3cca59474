"""Choose the engine of a launch: one process, data parallel copies, or weights sharded
by FSDP2 or DeepSpeed ZeRO-3.

accelerate's configuration (`configs/`) names the engine; the recipe has everything that
a result depends on, including the precision. Settings that contradict each other are
refused before anything is loaded. Expert parallelism, for which accelerate has no
setting, is requested by `fcsd distill --expert-parallel N`; transformers then shards
the weights while it loads them.

Not covered: sharding itself (`fcsd.parallel.shard`); tensor and context parallel
meshes; ZeRO stages 1 and 2.
"""

import contextlib
import importlib
import importlib.util
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Protocol

import torch
from accelerate.utils import parse_flag_from_env
from torch import nn

from fcsd.base.errors import UserError
from fcsd.base.strict import Rule, refuse

Overlap = Literal["full", "forward", "off"]


class Precision(Protocol):
    """The settings of a training that concern an engine, from a recipe's `train`."""

    @property
    def bf16(self) -> bool: ...
    @property
    def dtype(self) -> Literal["float32", "bfloat16"]: ...


# From this size on activation checkpointing is on unless the recipe says otherwise.
CHECKPOINTING_FROM = 1_000_000_000


@dataclass(frozen=True)
class Engine:
    """The engine that shards the weights of a launch, and the ranks that it shards
    over.

    replicas: number of groups of ranks, each of which holds the whole model (hybrid
    sharding); FSDP2 only. reshard: FSDP2 frees a layer's weights after its forward
    pass, and gathers them again in the backward pass. offload: FSDP2 keeps its shards
    in host memory. layer_classes: the classes that accelerate's configuration names for
    wrapping, which are only checked. expert_parallel: number of ranks that share an MoE
    layer's experts, each with some whole ones; ep only. overlap: how much of their
    exchanges runs beside computation; None: all, where the model can.
    """

    name: Literal["one", "ddp", "fsdp2", "zero3", "ep"]
    replicas: int = 1
    reshard: bool = True
    offload: bool = False
    layer_classes: tuple[str, ...] = ()
    expert_parallel: int = 1
    overlap: Overlap | None = None

    @cached_property
    def shards(self) -> bool:
        """Whether no rank holds the whole model."""
        return self.name in ("fsdp2", "zero3", "ep")

    @cached_property
    def shards_when_placed(self) -> bool:
        """Whether the first rank loads a model whole, and `fcsd.parallel.shard` gives
        each rank its shard.
        """
        return self.name in ("fsdp2", "zero3")

    @cached_property
    def spreads_experts(self) -> bool:
        """Whether transformers gives each rank its shard while it loads a checkpoint:
        some whole experts, and FSDP2 for the rest.
        """
        return self.name == "ep"

    @cached_property
    def has_dtensors(self) -> bool:
        """Whether a rank's shard of a parameter is a DTensor."""
        return self.name in ("fsdp2", "ep")

    @cached_property
    def uses_deepspeed(self) -> bool:
        """Whether DeepSpeed manages optimiser and gradients."""
        return self.name == "zero3"


def requested_engine(
    world: int,
    device: torch.device,
    expert_parallel: int = 1,
    overlap: Overlap | None = None,
) -> Engine:
    """Return the engine that accelerate's configuration, `--expert-parallel` and
    `--overlap` ask for.

    world: number of processes. device: of this one.

    Raises:
        UserError: the configuration is not supported, or would shard nothing.
    """
    refuse(*_launch_rules(world, expert_parallel, overlap))
    # accelerate passes its configuration on in environment variables.
    if parse_flag_from_env("ACCELERATE_USE_DEEPSPEED"):
        return _zero3(device)
    replicas = _replicas(world)
    if parse_flag_from_env("ACCELERATE_USE_FSDP"):
        return _fsdp2(replicas)
    if expert_parallel != 1:
        return Engine("ep", expert_parallel=expert_parallel, overlap=overlap)
    if replicas > 1:
        raise UserError(
            "accelerate's configuration: parallelism_config needs distributed_type:"
            " FSDP"
        )
    return Engine("ddp" if world > 1 else "one")


def _launch_rules(world: int, size: int, overlap: Overlap | None) -> list[Rule]:
    """Return what contradicts --expert-parallel `size` or --overlap, and what accelerate
    knows and fcsd does not support.
    """
    spread = size != 1
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    compiler = os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no").lower()
    return [
        (
            spread and (size < 1 or world % size),
            f"--expert-parallel {size}: does not divide the number of processes, {world};"
            " change one of them",
        ),
        (
            spread
            and any(
                parse_flag_from_env(f"ACCELERATE_USE_{name}")
                for name in ("DEEPSPEED", "FSDP", "PARALLELISM_CONFIG")
            ),
            f"--expert-parallel {size}: shards all other weights as well; launch with"
            " distributed_type: MULTI_GPU and no parallelism_config (see"
            " configs/ep_8.yaml)",
        ),
        (
            overlap is not None and not spread,
            f"--overlap {overlap}: applies only to --expert-parallel N; add that option,"
            " or leave --overlap out",
        ),
        (
            parse_flag_from_env("ACCELERATE_USE_MEGATRON_LM"),
            "accelerate's configuration: Megatron-LM is not supported; use FSDP2 or"
            " DeepSpeed",
        ),
        (
            precision in ("fp16", "fp8"),
            f"accelerate's configuration: mixed_precision {precision} is not supported;"
            " set mixed_precision: 'no' there and train.bf16: true in the recipe",
        ),
        (
            spread and compiler != "no" and overlap != "off",
            f"accelerate's configuration: dynamo_backend {compiler} compiles whole"
            " layers, whose exchanges then cannot run beside their computation; set"
            " dynamo_backend: 'no' there, or use --overlap off",
        ),
    ]


def _replicas(world: int) -> int:
    """Return dp_replicate_size of accelerate's `parallelism_config`; 1 without one."""
    if not parse_flag_from_env("ACCELERATE_USE_PARALLELISM_CONFIG"):
        return 1
    # `accelerate launch` passes each size on as PARALLELISM_CONFIG_NAME.
    names = ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size")
    sizes = {
        name: int(os.environ.get(f"PARALLELISM_CONFIG_{name.upper()}", "1") or 1)
        for name in names
    }
    copies, shards = sizes["dp_replicate_size"], sizes["dp_shard_size"]
    refuse(
        *(
            (
                sizes[name] > 1,
                f"_{name} {sizes[name]} is not supported; data parallel sizes only",
            )
            for name in ("tp_size", "cp_size", "sp_size")
        ),
        (
            copies * shards != world,
            f": dp_replicate_size {copies} x dp_shard_size {shards} is not the number of"
            f" processes, {world}; change one of them",
        ),
        where="accelerate's configuration: parallelism_config",
    )
    return copies


def _fsdp2(replicas: int) -> Engine:
    policy = os.environ.get("FSDP_AUTO_WRAP_POLICY", "NO_WRAP").upper()
    refuse(
        (
            os.environ.get("FSDP_VERSION", "1") != "2",
            "FSDP version 1 is not supported; set fsdp_version: 2 (see"
            " configs/fsdp2_8.yaml)",
        ),
        # Only this policy names units; fcsd then makes every decoder layer one.
        (
            policy != "TRANSFORMER_BASED_WRAP",
            f"fsdp_auto_wrap_policy {policy} would gather the whole model at once; set"
            " TRANSFORMER_BASED_WRAP, which makes every decoder layer a unit",
        ),
        (
            parse_flag_from_env("FSDP_ACTIVATION_CHECKPOINTING"),
            "fsdp_activation_checkpointing: leave it out, the recipe's"
            " train.gradient_checkpointing decides",
        ),
        where="accelerate's configuration: ",
    )
    names = os.environ.get("FSDP_TRANSFORMER_CLS_TO_WRAP") or ""
    return Engine(
        "fsdp2",
        replicas=replicas,
        reshard=parse_flag_from_env("FSDP_RESHARD_AFTER_FORWARD", default=True),
        offload=parse_flag_from_env("FSDP_OFFLOAD_PARAMS"),
        layer_classes=tuple(
            name for name in names.split(",") if name not in ("", "None")
        ),
    )


def _zero3(device: torch.device) -> Engine:
    if importlib.util.find_spec("deepspeed") is None:
        raise UserError("DeepSpeed is not installed; pip install 'fcsd[deepspeed]'")
    if device.type == "cpu":
        # This keeps DeepSpeed from compiling an extension for reductions between CPU
        # processes, which takes a minute. An import statement would return torch
        # itself, which deepspeed.comm has under this name.
        communication: Any = importlib.import_module("deepspeed.comm.torch")
        communication.build_shm_op = lambda: None
    from accelerate.utils import DeepSpeedPlugin

    stage = DeepSpeedPlugin().deepspeed_config["zero_optimization"]["stage"]
    if int(stage) != 3:
        raise UserError(
            f"accelerate's configuration: DeepSpeed zero_stage {stage} is not"
            " supported; set zero_stage: 3 (see configs/zero3_8.yaml)"
        )
    return Engine("zero3")


def precision_rules(train: Precision, engine: Engine) -> list[Rule]:
    """Return which precision the engine does not support, or accelerate's configuration
    contradicts.
    """
    return [
        (
            os.environ.get("ACCELERATE_MIXED_PRECISION") == "bf16" and not train.bf16,
            "accelerate's configuration says mixed_precision bf16, the recipe train.bf16"
            " false; the recipe decides the precision: set mixed_precision: 'no' in the"
            " configuration, or train.bf16: true",
        ),
        (
            engine.uses_deepspeed and train.dtype == "bfloat16",
            "train.dtype bfloat16: ZeRO-3 keeps float32 weights beside the bfloat16 ones;"
            " set train.dtype: float32 and train.bf16: true",
        ),
    ]


@contextlib.contextmanager
def engine_environment(engine: Engine, device: torch.device) -> Iterator[None]:
    """Set accelerate's variables while a Trainer lives, so that it leaves the sharding
    to fcsd.

    Under FSDP2, accelerate sees plain data parallelism and a model that is sharded
    already. Under ZeRO-3, it starts DeepSpeed on a model that is partitioned already,
    also on a CPU.
    """
    changes: dict[str, str | None] = {}
    if engine.name == "fsdp2":
        changes = {
            "ACCELERATE_USE_FSDP": None,
            "ACCELERATE_USE_PARALLELISM_CONFIG": None,
        }
    # The precision is set by the recipe, and applied while sharding.
    if engine.shards:
        changes["ACCELERATE_MIXED_PRECISION"] = "no"
    if engine.uses_deepspeed and device.type == "cpu":
        changes["ACCELERATE_USE_CPU"] = None
    earlier_values = {name: os.environ.get(name) for name in changes}
    _set_environment(changes)
    try:
        yield
    finally:
        _set_environment(earlier_values)
        if engine.uses_deepspeed:
            # transformers would partition the next model while it loads it.
            from transformers.integrations.deepspeed import unset_hf_deepspeed_config

            unset_hf_deepspeed_config()


@contextlib.contextmanager
def without_deepspeed() -> Iterator[None]:
    """Keep transformers from partitioning a model that one rank alone loads in the
    block.
    """
    from transformers.integrations import deepspeed

    # transformers partitions models as long as this reference is set.
    config = deepspeed._hf_deepspeed_config_weak_ref
    deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        deepspeed._hf_deepspeed_config_weak_ref = config


def _set_environment(values: dict[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def finish_zero_settings(arguments: Any, train: Precision, engine: Engine) -> None:
    """If DeepSpeed is used, overwrite its settings in accelerate's configuration with
    the recipe's and fcsd's.
    """
    if not engine.uses_deepspeed:
        return
    config = arguments.deepspeed_plugin.deepspeed_config
    config["bf16"] = {"enabled": train.bf16}
    # Not earlier: without a GPU the constructor of the arguments refuses bf16, which
    # DeepSpeed supports.
    arguments.bf16 = train.bf16
    config["gradient_clipping"] = arguments.max_grad_norm
    # Gradients are summed over ranks and micro-batches in float32, even where weights
    # are bfloat16.
    config["communication_data_type"] = "fp32"
    config["data_types"] = {"grad_accum_dtype": "fp32"}


def checkpoints_activations(setting: bool | None, model: nn.Module) -> bool:
    """Return `train.gradient_checkpointing`; where it is null, whether the model has at
    least `CHECKPOINTING_FROM` parameters and supports it.
    """
    if setting is not None:
        return setting
    supported = getattr(model, "supports_gradient_checkpointing", False)
    return (
        supported
        and sum(parameter.numel() for parameter in model.parameters())
        >= CHECKPOINTING_FROM
    )
