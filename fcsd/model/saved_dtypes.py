"""Determine the dtype of each tensor in files, as the checkpoint stores it, so that a
model is saved in the dtypes that it was loaded from.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fcsd.base.errors import UserError
from fcsd.model.connectivity.checkpoint import (
    Checkpoint,
    read_checkpoint,
    source_folder,
)
from fcsd.model.dtypes import PLAIN, without_storage

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ADAPTED = ".base_layer"  # peft inserts it into the names of adapted tensors


@dataclass(frozen=True)
class FileDtypes:
    """The dtypes in which a model is saved: the dtype that its config declares, and
    each tensor's by name.
    """

    declared: torch.dtype
    tensors: Mapping[str, torch.dtype]


def saved_dtypes(model: "PreTrainedModel") -> FileDtypes:
    """Return the dtypes in which to save a model.

    A tensor has the dtype of the files of the checkpoint that the model was loaded
    from. It has its dtype in memory if there is no checkpoint, if it is quantised, or
    if the model was loaded in another dtype than the checkpoint declares.

    model: as loaded, before a training casts it; it may have adapters.
    """
    state = {
        name.replace(_ADAPTED, ""): tensor
        for name, tensor in model.state_dict().items()
    }
    dtypes = {
        name: tensor.dtype
        for name, tensor in state.items()
        if tensor.is_floating_point()
    }
    checkpoint, source = None, source_folder(model.config)
    if source is not None:
        with suppress(UserError):  # the folder has changed since the model was loaded
            checkpoint = read_checkpoint(source, any_family=True)
    if checkpoint is None or declared_dtype(checkpoint) != model.dtype:
        return FileDtypes(model.dtype, dtypes)
    in_files = {
        name: PLAIN[dtype]
        for name, dtype in checkpoint.dtypes.items()
        if dtype in PLAIN
    }
    for name, names in names_in_files(model).items():
        # One tensor in memory may be several in files (one for each expert): the widest
        # dtype holds them all.
        file_dtypes = [in_files[key] for key in (*names, name) if key in in_files]
        if name in dtypes and file_dtypes:
            dtypes[name] = max(file_dtypes, key=lambda dtype: dtype.itemsize)
    return FileDtypes(model.dtype, dtypes)


def declared_dtype(checkpoint: Checkpoint) -> torch.dtype | None:
    """Return the dtype that `from_pretrained(dtype="auto")` chooses; None if the
    checkpoint declares none and has no floating-point tensors.
    """
    declared = checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype")
    if declared is not None:
        return getattr(torch, str(declared).removeprefix("torch."), None)
    first = (PLAIN[dtype] for dtype in checkpoint.dtypes.values() if dtype in PLAIN)
    return next(first, None)


def names_in_files(model: "PreTrainedModel") -> dict[str, list[str]]:
    """Return, for each tensor of a model's state dict, its names in checkpoint files
    according to transformers' conversions.
    """
    from transformers.core_model_loading import revert_weight_conversion

    fresh = without_storage(model)
    names: dict[str, list[str]] = {}
    # Some conversions need several tensors at once. Those are converted together, and
    # each gets the names of all.
    together = {}
    for name, tensor in fresh.state_dict().items():
        try:
            names[name] = list(revert_weight_conversion(fresh, {name: tensor}))
        except ValueError:
            together[name] = tensor
    joint_names = list(revert_weight_conversion(fresh, together)) if together else []
    return names | dict.fromkeys(together, joint_names)
