"""A teacher that is not loaded: what identifies it, and its head, read from the checkpoint's files alone.

Not covered: model types that fcsd does not know, whose tensors could be called anything.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from fcsd.base.errors import UserError
from fcsd.model.config import ModelConfig
from fcsd.model.connectivity.checkpoint import Checkpoint, read_checkpoint
from fcsd.model.connectivity.load import config_and_class
from fcsd.model.families.structure import head_scaling, output_head
from fcsd.model.load import ModelFolder, dtype_of

# Fields of a configuration that change no hidden state.
_NOT_COMPUTED = {
    "_name_or_path", "architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", "use_cache",
    "output_hidden_states", "output_attentions", "return_dict", "id2label", "label2id", "chunk_size_feed_forward",
    "problem_type", "model_type", "bos_token_id", "eos_token_id", "pad_token_id",
}  # fmt: skip


@dataclass(frozen=True)
class Unloaded:
    """A checkpoint, and the model that it would give, without storage.

    dtype: in which the model would be loaded.
    """

    checkpoint: Checkpoint
    model: Any
    dtype: torch.dtype


def unloaded(source: ModelFolder) -> Unloaded:
    """Return the model of a checkpoint as a recipe's `model` section would load it, on the meta device.

    Raises: UserError as `fcsd.model.connectivity.load_model` before it reads weights.
    """
    model = source.config
    checkpoint = read_checkpoint(source.folder)
    config, cls = config_and_class(checkpoint, None, False)
    dtype = _dtype(checkpoint, config, model)
    options = model.model_dump(include={"attn_implementation", "experts_implementation"}, exclude_none=True)
    with torch.device("meta"):
        return Unloaded(checkpoint, cls._from_config(config, dtype=dtype, **options), dtype)


def _dtype(checkpoint: Checkpoint, config: Any, model: ModelConfig) -> torch.dtype:
    """Return what `from_pretrained` would choose."""
    if model.dtype != "auto":
        return dtype_of(model.dtype)
    if isinstance(config.dtype, torch.dtype):
        return config.dtype
    with safe_open(checkpoint.folder / checkpoint.weight_files[0], framework="pt") as file:
        for name in file.keys():  # noqa: SIM118
            tensor = file.get_slice(name)
            if (dtype := tensor[:0].dtype if tensor.get_shape() else None) and dtype.is_floating_point:
                return dtype
    return torch.float32


def identity(teacher: Unloaded, weights: str) -> dict[str, Any]:
    """Return what a teacher's hidden states depend on, besides the tokens.

    weights: fingerprint of the checkpoint's files.
    """
    config = teacher.model.config
    text = config.get_text_config()
    return {
        "weights": weights,
        "model_type": config.model_type,
        "config": _config_hash(config),
        "connectivity": getattr(config, "farskip", None),
        "dtype": str(teacher.dtype).removeprefix("torch."),
        "attn_implementation": text._attn_implementation,
        "experts_implementation": getattr(text, "_experts_implementation", None),
        "hidden_size": output_head(teacher.model).in_features,
    }


def _config_hash(config: Any) -> str:
    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {str(key): plain(item) for key, item in value.items() if key not in _NOT_COMPUTED}
        return [plain(item) for item in value] if isinstance(value, list | tuple) else value

    text = json.dumps(plain(config.to_dict()), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_head(teacher: Unloaded) -> nn.Linear:
    """Return the teacher's head, on the CPU: two tensors of the files, or the embeddings where they are tied.

    Carries `logit_scale` and `softcap` of its family for the loss head.
    """
    head = output_head(teacher.model)
    prefix = next(name for name, module in teacher.model.named_modules() if module is head)
    loaded: Any = nn.Linear(head.in_features, head.out_features, bias=head.bias is not None, device="meta")
    for name, parameter in head.named_parameters():
        value = _tensor(teacher, f"{prefix}.{name}", tuple(parameter.shape))
        setattr(loaded, name, nn.Parameter(value.to(teacher.dtype), requires_grad=False))
    loaded.logit_scale, loaded.softcap = head_scaling(teacher.model.config)
    return loaded


def _tensor(teacher: Unloaded, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    from transformers.core_model_loading import revert_weight_conversion

    tied = getattr(teacher.model, "all_tied_weights_keys", None) or {}
    state = teacher.model.state_dict()
    for one in (tied.get(name, name), name, *(other for other, target in tied.items() if target == name)):
        in_file = list(revert_weight_conversion(teacher.model, {one: state[one]}))
        for candidate in (*in_file, one):
            if teacher.checkpoint.shapes.get(candidate) == shape:
                return _read(teacher.checkpoint, candidate)
    raise UserError(f"{teacher.checkpoint.folder}: the head '{name}' is not among its tensors")


def _read(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    for file_name in checkpoint.weight_files:
        with safe_open(checkpoint.folder / file_name, framework="pt") as file:
            if name in file.keys():  # noqa: SIM118
                return file.get_tensor(name)
    raise UserError(f"{checkpoint.folder}: tensor '{name}' is in none of its files")
