"""Save a trained model as a checkpoint folder for `from_pretrained`, without changing
the model.
"""

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fcsd.base.errors import UserError
from fcsd.base.files import read_json
from fcsd.base.memory import available_memory
from fcsd.base.writing import beside, make_folder, write_json, writing
from fcsd.model.connectivity.checkpoint import CONFIG
from fcsd.model.connectivity.load import load_model
from fcsd.model.dtypes import real_tensors
from fcsd.model.saved_dtypes import FileDtypes
from fcsd.parallel.engine import without_deepspeed
from fcsd.parallel.launch import Launch
from fcsd.parallel.shard import whole_model


def write_model(
    model: PreTrainedModel,
    folder: Path,
    *,
    tokenizer: Any,
    dtypes: FileDtypes,
    launch: Launch,
) -> None:
    """Write config, code, weights and tokenizer into `folder`. All ranks call this; the
    first one writes.

    Sharded weights are gathered on the first rank's CPU. Tensors of the original
    checkpoint that are not part of the model (MTP layers) are copied unchanged. The
    result is loaded once, if main memory suffices, and compared with the model.

    dtypes: of the files, the same on all ranks.

    Raises:
        UserError: the loaded model differs from the one in memory.
    """
    full_model: Any = model
    if launch.engine.shards:
        full_model = whole_model(model, dtypes.tensors, launch)
    if not launch.first or full_model is None:
        return
    from fcsd.model.connectivity.extra_tensors import keeping_extra_tensors

    # A training switches use_cache off; the saved model has to generate with a cache.
    config = full_model.config
    use_cache, declared = config.use_cache, config.dtype
    config.use_cache = True
    try:
        with _in_host_memory(full_model, dtypes.tensors):
            with keeping_extra_tensors(full_model, folder):
                full_model.save_pretrained(folder)
            _declare_dtype(folder, dtypes.declared)
            # safetensors 0.8 creates files with mode 0600, ignoring the umask: give
            # them the config's mode.
            mode = (folder / CONFIG).stat().st_mode
            for file in folder.glob("*.safetensors"):
                file.chmod(mode & 0o777)
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)
                _keep_tokenizer_class(Path(str(tokenizer.name_or_path)), folder)
            _compare_with_saved(full_model, folder)
    finally:
        config.use_cache, config.dtype = use_cache, declared


def replace_model(
    model: PreTrainedModel,
    folder: Path,
    *,
    tokenizer: Any,
    dtypes: FileDtypes,
    launch: Launch,
) -> None:
    """Write a model to a temporary folder, and move it into `folder`, which may hold
    other files, when it is complete.

    All ranks call this. tokenizer, dtypes and errors: as for `write_model`.
    """
    launch.ranks.from_first(lambda: make_folder(folder))
    destination = beside(folder) if launch.first else contextlib.nullcontext(folder)
    # The other ranks take part in gathering the weights; they write nothing.
    with writing(folder), destination as written:
        write_model(model, written, tokenizer=tokenizer, dtypes=dtypes, launch=launch)
        if launch.first:
            _move_model(written, folder)


def _move_model(written: Path, folder: Path) -> None:
    """Move all files of a folder into another one, and remove an earlier model's
    weights there.
    """
    # Old weight files that no new file replaces are removed last.
    files = [file.relative_to(written) for file in written.rglob("*") if file.is_file()]
    earlier = [
        file
        for file in folder.glob("model*.safetensors*")
        if file.relative_to(folder) not in files
    ]
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        os.replace(written / file, folder / file)
    for file in earlier:
        file.unlink()


def _declare_dtype(folder: Path, dtype: torch.dtype) -> None:
    """Write the model's dtype to the config: transformers writes the first tensor's."""
    config = read_json(folder / CONFIG)
    name = str(dtype).removeprefix("torch.")
    if config.get("dtype") != name:
        write_json(folder / CONFIG, config | {"dtype": name})


def _keep_tokenizer_class(source: Path, folder: Path) -> None:
    """Restore the class name from the tokenizer's files: older versions do not know
    transformers 5's.
    """
    files = [directory / "tokenizer_config.json" for directory in (source, folder)]
    if not all(file.is_file() for file in files):
        return
    source_config, saved_config = map(read_json, files)
    if source_config.get("tokenizer_class") not in (
        None,
        saved_config.get("tokenizer_class"),
    ):
        write_json(
            files[1],
            saved_config | {"tokenizer_class": source_config["tokenizer_class"]},
        )


@contextlib.contextmanager
def _in_host_memory(
    model: nn.Module, dtypes: Mapping[str, torch.dtype]
) -> Iterator[None]:
    """Give the model its weights and buffers in `dtypes` within the block, and the
    original tensors again afterwards.

    The copies are in host memory, because the device may not hold both.
    """
    # In a model that was gathered from shards, buffers that no checkpoint has are on
    # the meta device. A tensor that is tied is converted once, under one of its names.
    tensors = {
        id(tensor): (name, tensor)
        for name, tensor in real_tensors(model)
        if not tensor.is_meta
    }
    original_data = [(tensor, tensor.data) for _, tensor in tensors.values()]
    try:
        for name, tensor in tensors.values():
            if (dtype := dtypes.get(name, tensor.dtype)) != tensor.dtype:
                tensor.data = tensor.data.to("cpu", dtype)
        yield
    finally:
        for tensor, data in original_data:
            tensor.data = data


def _compare_with_saved(model: PreTrainedModel, folder: Path) -> None:
    """Load the saved model, and compare each tensor with the trained one.

    Raises:
        UserError: a tensor differs, or is missing.
    """
    trained = model.state_dict()
    needed_bytes = sum(tensor.nbytes for tensor in trained.values())
    if (free_bytes := available_memory()) < needed_bytes * _ROOM_TO_LOAD:
        print(
            f"{folder.name}: was not compared with the trained model, because loading"
            f" it takes {needed_bytes / 1e9:.0f} GB of main memory"
            f" ({free_bytes / 1e9:.0f} GB are free)",
            file=sys.stderr,
        )
        return
    # Under ZeRO-3 `from_pretrained` would shard the model that it loads.
    with without_deepspeed():
        loaded = load_model(folder).state_dict()
    for name, tensor in trained.items():
        if name not in loaded or not _same_numbers(
            tensor.detach().to("cpu"), loaded[name]
        ):
            raise UserError(
                f"{folder}: '{name}' differs from the trained tensor when the model is"
                " loaded again; the model was not saved, and the training continues"
                " from its last checkpoint. Check the disk; if it is sound, this is a"
                " bug of fcsd: report it with the model's config.json"
            )


_ROOM_TO_LOAD = 1.2
"""The free main memory, in multiples of the model, that the comparison needs."""


def _same_numbers(trained: Tensor, loaded: Tensor) -> bool:
    """Compare bits, because NaN, which a failed training leaves, does not equal itself.

    The trained tensor is rounded like the loaded one: some families round when they
    load.
    """
    trained = trained.to(loaded.dtype).contiguous()
    return trained.shape == loaded.shape and torch.equal(
        trained.flatten().view(torch.uint8),
        loaded.contiguous().flatten().view(torch.uint8),
    )
