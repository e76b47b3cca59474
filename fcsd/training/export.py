"""Leave a trained model as a checkpoint folder that `from_pretrained` reads, without changing the model."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from fcsd.base.files import read_json, write_json
from fcsd.model.connectivity.checkpoint import CONFIG
from fcsd.model.connectivity.extra_tensors import keeping_extra_tensors
from fcsd.parallel.launch import Launch
from fcsd.parallel.shard import whole_model


def write_model(
    model: PreTrainedModel, folder: Path, *, tokenizer: Any, dtype: torch.dtype, launch: Launch
) -> None:
    """Write config, code, weights in `dtype` and tokenizer into `folder`. All ranks call this; the first one writes.

    Weights in shards are gathered on the first rank's CPU. What the checkpoint of the model holds beside the model (MTP
    layers) is added as it is there.
    """
    whole = whole_model(model, dtype, launch) if launch.engine.shards else model
    if not launch.first or whole is None:
        return
    use_cache = whole.config.use_cache
    whole.config.use_cache = True
    try:
        with _in_host_memory(whole, dtype):
            with keeping_extra_tensors(whole, folder):
                whole.save_pretrained(folder)
            # safetensors 0.8 makes its files 0600, whatever the umask
            mode = (folder / CONFIG).stat().st_mode
            for file in folder.glob("*.safetensors"):
                file.chmod(mode & 0o777)
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)
                _keep_tokenizer_class(Path(str(tokenizer.name_or_path)), folder)
    finally:
        whole.config.use_cache = use_cache


def _keep_tokenizer_class(source: Path, folder: Path) -> None:
    """Name the class that the tokenizer's own files name: that of transformers 5 is unknown to older versions."""
    files = [place / "tokenizer_config.json" for place in (source, folder)]
    if not all(file.is_file() for file in files):
        return
    before, after = map(read_json, files)
    if before.get("tokenizer_class") not in (None, after.get("tokenizer_class")):
        write_json(files[1], after | {"tokenizer_class": before["tokenizer_class"]})


@contextlib.contextmanager
def _in_host_memory(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Give the model its weights and buffers in `dtype` within the block, and behind it the very tensors that it had.
    The copies are in host memory: the device may have no room for both.
    """
    tensors = [
        t
        for t in (*model.parameters(), *model.buffers())
        # One that was gathered from shards is in `dtype`; buffers that no checkpoint has are without storage there.
        if t.is_floating_point() and t.dtype != dtype and not t.is_meta
    ]
    held = [tensor.data for tensor in tensors]
    try:
        for tensor in tensors:
            tensor.data = tensor.data.to("cpu", dtype)
        yield
    finally:
        for tensor, data in zip(tensors, held, strict=True):
            tensor.data = data
