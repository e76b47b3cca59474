"""Load a model where it will be computed, for evaluation or as the student or teacher of
a training: whole on this rank's device, sharded over the ranks of the launch, or spread
over the devices of one process.

Not covered: sharding itself (`fcsd.parallel.shard`).
"""

from typing import Any

import torch
from transformers import PreTrainedModel

from fcsd.base.artifact import check_checkpoint
from fcsd.base.errors import UserError, one_line
from fcsd.base.weights import weight_files
from fcsd.model.connectivity.checkpoint import read_config
from fcsd.model.connectivity.spec import Connectivity
from fcsd.model.families.overlap import refusal
from fcsd.model.load import ModelFolder, does_not_fit, load_checkpoint, to_device
from fcsd.parallel.engine import Engine
from fcsd.parallel.launch import Launch


def check_device_map(device_map: Any, launch: Launch) -> None:
    """Raise UserError if several processes would each spread the model over the same
    devices.
    """
    if device_map is not None and launch.ranks.size > 1:
        raise UserError(
            "--device-map: works with one process, which distributes the model over the"
            " devices; start it without a launcher, or leave the option out and launch"
            " configs/fsdp2_8.yaml"
        )


def check_overlap_of(model: ModelFolder, launch: Launch) -> None:
    """Raise UserError where the launch asks for an overlap that the model cannot have."""
    overlap = launch.engine.overlap
    if overlap not in ("full", "forward"):
        return
    checkpoint = read_config(model.folder, any_family=True)
    reason: str | None = "none of its layers is rewired"
    if checkpoint.family is not None and checkpoint.connectivity is not None:
        reason = refusal(checkpoint.family, model.load_config())
    if reason is not None:
        raise UserError(
            f"--overlap {overlap}: {model.config.path} does not support it:"
            f" {reason}; leave --overlap out"
        )


def load_for_evaluation(
    model: ModelFolder, launch: Launch, *, device_map: Any = None
) -> PreTrainedModel:
    """Load a checkpoint in eval mode, as this rank of the launch holds it; all ranks
    call this.

    Under FSDP2 and expert parallelism a rank holds shards of the weights (under FSDP2
    the head is whole on every rank), otherwise all of them. Families that fcsd cannot
    convert are accepted for comparison, for example dense ones. device_map: for one
    process, as in transformers; "auto" fills the devices one after another.

    Raises:
        UserError: `load_model` refuses the checkpoint; it is not what its stage or
            command left; the model cannot be sharded, or does not fit.
    """
    check_device_map(device_map, launch)
    engine = launch.engine
    if not engine.shards:
        _check_unchanged(model, launch)
    # transformers places the layers itself.
    if device_map is not None:
        try:
            return load_checkpoint(model, device_map=device_map, any_family=True)
        except ValueError as error:
            # transformers asks for a folder once devices and main memory are full.
            if "offload_folder" not in str(error):
                raise
            raise UserError(
                f"{model.folder}: does not fit on the devices and in main memory"
                " together; use more devices, or launch configs/fsdp2_2x8.yaml on"
                " several machines"
            ) from None
    # Copies: each rank holds the whole model.
    if not engine.shards:
        return _load_whole(model, launch.device)
    loaded = load_for_launch(model, launch, any_family=True)
    if engine.shards_when_placed:
        from fcsd.parallel.shard import shard_teacher

        shard_teacher(loaded, launch)
    return loaded


def _check_unchanged(model: ModelFolder, launch: Launch) -> None:
    # Weights with a known fingerprint are not hashed again. No collective: the
    # first rank alone may load a model; if it fails, the others end.
    if launch.first:
        check_checkpoint(model.folder)


def load_for_launch(
    model: ModelFolder,
    launch: Launch,
    connectivity: Connectivity | None = None,
    *,
    any_family: bool = False,
    bf16: bool = False,
) -> PreTrainedModel:
    """Load a checkpoint as this rank needs it: with its experts spread while they are
    read, or to be sharded later.

    any_family: as in `load_model`. bf16: spread weights take part in computation in
    bfloat16, and their gradients are reduced in float32.

    Raises:
        UserError: `load_model` refuses the checkpoint; it is not what its stage or
            command left; its experts cannot be spread.
    """
    spread = distributed_config(launch.engine, launch.ranks.size, bf16=bf16)
    _check_unchanged(model, launch)
    # transformers shards while it loads, by a plan that some families lack.
    if spread is not None:
        from fcsd.parallel.overlap import attach_loaded, with_plan

        spread = with_plan(spread, read_config(model.folder, any_family=True).family)
    try:
        loaded = load_checkpoint(
            model,
            connectivity,
            weights=launch.loads_weights,
            any_family=any_family,
            distributed_config=spread,
        )
    except ValueError as error:
        if spread is None:
            raise
        raise UserError(
            f"{model.config.path}: cannot be sharded with --expert-parallel"
            f" {spread.ep_size}: {one_line(error)} Launch FSDP2 instead"
            " (configs/fsdp2_8.yaml)"
        ) from None
    if spread is not None and launch.engine.overlap != "off":
        attach_loaded(loaded, launch.engine.overlap or "full")
    return loaded


def distributed_config(engine: Engine, world: int, *, bf16: bool = False) -> Any:
    """Return the configuration by which transformers shards a model while it loads it;
    None: it does not, `fcsd.parallel.shard` does.

    bf16: weights take part in computation in bfloat16, and their gradients are reduced
    in float32.
    """
    if not engine.spreads_experts:
        return None
    from transformers.distributed import DistributedConfig

    from fcsd.parallel.overlap import IMPLEMENTATION

    blocking = engine.overlap == "off"
    return DistributedConfig(
        fsdp_size=world,
        ep_size=engine.expert_parallel,
        ep_implementation="all_to_all" if blocking else IMPLEMENTATION,
        fsdp_mixed_precision=bf16,
    )


def _load_whole(model: ModelFolder, device: torch.device) -> PreTrainedModel:
    """Read a checkpoint straight to the device; otherwise each rank of a machine would
    have a copy in main memory.
    """
    try:
        # A map with a single entry makes transformers read weights onto the device.
        device_map = None if device.type == "cpu" else {"": device}
        loaded = load_checkpoint(model, device_map=device_map, any_family=True)
    except torch.OutOfMemoryError:
        size = sum(file.stat().st_size for file in weight_files(model.folder))
        raise does_not_fit(model.folder, size, device) from None
    return to_device(loaded, model.folder, device)
