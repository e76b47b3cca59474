"""Loads the model that is to be judged where it will be computed: on this rank's device whole, spread over the ranks of
the launch, or over the devices of one process.

Not covered: how weights are spread (`fcsd.distributed.shard`).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from fcsd.config.model import ModelConfig
from fcsd.distributed.engine import Engine, distributed_config, holds_weights, launched_engine
from fcsd.distributed.launch import processes
from fcsd.distributed.shard import spread_teacher
from fcsd.errors import UserError
from fcsd.models.load import does_not_fit, original_model, to_accelerator


def judging_engine() -> Engine:
    """The engine of the launch. Under ZeRO-3 FSDP2 holds what is judged: the scores are the same."""
    engine = launched_engine()
    return replace(engine, name="fsdp2", reshard=True) if engine.name == "zero3" else engine


def check_device_map(device_map: Any) -> None:
    """Raises UserError when several processes are asked to spread the model over the same devices."""
    if device_map is not None and processes().num_processes > 1:
        raise UserError(
            "--device-map: is for one process, which spreads the model over the devices by itself; start it without a"
            " launcher, or leave the option out and launch configs/fsdp2_8.yaml"
        )


def load_judged(model: ModelConfig, path: Path, *, device_map: Any = None) -> PreTrainedModel:
    """The checkpoint in the folder `path`, in eval mode, as this rank of the launch holds it; all ranks call this.

    FSDP2 and expert parallelism: parts of the weights (under FSDP2 the head whole on every rank). Otherwise all of them
    on the rank's device.

    Args:
        device_map: of one process, as transformers knows it; "auto" fills the devices one after another.

    Raises:
        UserError: what `load_model` refuses; a model that cannot be spread, or does not fit.
    """
    check_device_map(device_map)
    model = model.model_copy(update={"revision": None})
    engine = judging_engine()
    if device_map is not None:
        try:
            return original_model(model, path, device_map=device_map)
        except ValueError as error:
            if "offload_folder" not in str(error):
                raise
            raise UserError(
                f"{path}: does not fit on the devices and in main memory together; use more devices, or launch"
                " configs/fsdp2_2x8.yaml on several machines"
            ) from None
    if not engine.shards:
        return _whole(model, path, processes().device)
    loaded = original_model(
        model, path, weights=holds_weights(engine), distributed_config=distributed_config(engine)
    )
    if engine.name == "fsdp2":
        spread_teacher(loaded, engine)
    return loaded


def _whole(model: ModelConfig, path: Path, device: torch.device) -> PreTrainedModel:
    """Read straight to the device: the ranks of a machine would have a copy each in main memory otherwise."""
    try:
        loaded = original_model(model, path, device_map=None if device.type == "cpu" else {"": device})
    except torch.OutOfMemoryError:
        size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
        raise does_not_fit(path, size, device) from None
    return to_accelerator(loaded, path)
