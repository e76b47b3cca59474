"""The original model, tokenizers, dtypes and the identity of data: what the stages load."""

import gc
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fcsd.connectivity.checkpoint import CONFIG, find_folder, read_json
from fcsd.distributed.launch import processes
from fcsd.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from fcsd.config.model import ModelConfig
    from fcsd.connectivity import Connectivity


_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def dtype_of(name: str) -> torch.dtype:
    """The torch dtype of a recipe's word."""
    return _DTYPES[name]


def to_dtype(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """All parameters and buffers of real numbers in `dtype`, in place.

    `Module.to` would take the imaginary part out of complex buffers (the rotary embedding of Llama 4's images).
    """
    model._apply(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


def original_model(
    model: "ModelConfig",
    path: str | Path,
    connectivity: "Connectivity | None" = None,
    *,
    weights: bool = True,
    distributed_config: Any = None,
    device_map: Any = None,
) -> "PreTrainedModel":
    """The original checkpoint at `path` as a recipe's `model` section says, regular or with the connectivity given.

    weights: False gives the same model without storage, for a rank that will be sent its part.
    distributed_config: transformers' `DistributedConfig`, for weights that are spread over ranks while they are loaded.
    device_map: transformers' own, for a model that this process spreads over several devices.

    Raises:
        UserError: what `load_model` refuses; a model that cannot be spread as the configuration says.
    """
    from fcsd.connectivity import load_model

    given = {"distributed_config": distributed_config, "device_map": device_map}
    options = {name: value for name, value in given.items() if value is not None}
    try:
        loaded: PreTrainedModel = load_model(
            path,
            connectivity=connectivity,
            dtype=model.dtype,
            attn_implementation=model.attn_implementation,
            experts_implementation=model.experts_implementation,
            revision=model.revision,
            trust_remote_code=model.trust_remote_code,
            weights=weights,
            **options,
        )
    except ValueError as error:
        if distributed_config is None:
            raise
        raise UserError(
            f"{path}: cannot be spread with --expert-parallel {distributed_config.ep_size}:"
            f" {' '.join(str(error).split())} Launch FSDP2 instead (configs/fsdp2_8.yaml)"
        ) from None
    return loaded


def to_accelerator(model: "PreTrainedModel", name: str | Path) -> "PreTrainedModel":
    """Move a model to the accelerator of this process, if there is one; `from_pretrained` leaves it in main memory.

    Raises:
        UserError: it does not fit.
    """
    device = processes().device
    try:
        return torch.nn.Module.to(model, device)
    except torch.OutOfMemoryError:
        raise does_not_fit(name, sum(tensor.nbytes for tensor in model.parameters()), device) from None


def does_not_fit(name: str | Path, num_bytes: int, device: torch.device) -> UserError:
    """The error of weights that are larger than what is left of a device."""
    return UserError(
        f"{name}: its weights ({num_bytes / 1e9:.0f} GB) do not fit on {device} beside what is there;"
        " free the device, or spread the weights over several (docs/evaluation.md, docs/training.md)"
    )


def free_memory() -> None:
    """Give the memory of a model that is not needed any more back to the device."""
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.memory.empty_cache()


def load_tokenizer(
    path: str | Path, model: "ModelConfig | None" = None, *, trust_remote_code: bool = False
) -> "PreTrainedTokenizerBase":
    """The tokenizer that lies beside a checkpoint; revision and trust in its code are those of `model`, if given."""
    from transformers import AutoTokenizer

    folder = find_folder(path, model.revision if model is not None else None)
    if not any(
        (folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
    ):
        raise UserError(
            f"{folder}: holds no tokenizer; copy tokenizer.json and tokenizer_config.json beside the weights"
        )
    if (folder / CONFIG).is_file():
        read_json(folder / CONFIG)  # AutoTokenizer reads it too, and would blame the tokenizer for its faults
    try:
        return AutoTokenizer.from_pretrained(
            folder, trust_remote_code=trust_remote_code or (model is not None and model.trust_remote_code)
        )
    except (OSError, ValueError) as error:
        raise UserError(f"{folder}: the tokenizer cannot be read: {str(error).splitlines()[0]}") from None
