"""Leave a trained model as a checkpoint folder that `from_pretrained` reads, without
changing the model.
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
from fcsd.base.files import make_folder, read_json, write_json, writing
from fcsd.base.memory import available_memory
from fcsd.base.temporary import beside
from fcsd.model.connectivity.checkpoint import CONFIG
from fcsd.model.connectivity.extra_tensors import keeping_extra_tensors
from fcsd.model.connectivity.load import load_model
from fcsd.model.dtypes import FileDtypes, loaded_dtypes, real_tensors
from fcsd.parallel.engine import without_deepspeed
from fcsd.parallel.launch import Launch
from fcsd.parallel.shard import whole_model


def write_model(
    model: PreTrainedModel,
    folder: Path,
    *,
    tokenizer: Any,
    dtype: torch.dtype,
    launch: Launch,
    dtypes: Mapping[str, torch.dtype] | None = None,
) -> None:
    """Write config, code, weights and tokenizer into `folder`. All ranks call this; the
    first one writes.

    Weights in shards are gathered on the first rank's CPU. What the checkpoint of the
    model holds beside the model (MTP layers) is added as it is there. What was written
    is loaded once, where there is room for it, and compared with the model.

    Args:
        dtype: what the config declares.
        dtypes: of single tensors, by their names in the model (`saved_dtypes`); the
            same on all ranks. None: those that the model has when it is loaded in
            `dtype`.

    Raises:
        UserError: what is loaded differs from the model.
    """
    if dtypes is None:
        dtypes = loaded_dtypes(model, dtype)
    whole = whole_model(model, dtypes, launch) if launch.engine.shards else model
    if not launch.first or whole is None:
        return
    config = whole.config
    use_cache, declared = config.use_cache, config.dtype
    config.use_cache = True
    try:
        with _in_host_memory(whole, dtypes):
            with keeping_extra_tensors(whole, folder):
                whole.save_pretrained(folder)
            _declare_dtype(folder, dtype)
            # safetensors 0.8 makes its files 0600, whatever the umask
            mode = (folder / CONFIG).stat().st_mode
            for file in folder.glob("*.safetensors"):
                file.chmod(mode & 0o777)
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)
                _keep_tokenizer_class(Path(str(tokenizer.name_or_path)), folder)
            _compare_with_saved(whole, folder)
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
    """Write a model beside a folder, which may hold other files, and move it there when
    it is whole.

    All ranks call this. tokenizer, dtypes, and what is raised: as of `write_model`.
    """
    launch.ranks.from_first(lambda: make_folder(folder))
    place = beside(folder) if launch.first else contextlib.nullcontext(folder)
    with writing(folder), place as written:
        write_model(
            model,
            written,
            tokenizer=tokenizer,
            dtype=dtypes.declared,
            dtypes=dtypes.tensors,
            launch=launch,
        )
        if launch.first:
            _move_model(written, folder)


def _move_model(written: Path, folder: Path) -> None:
    """Move all files of a folder into another one, from which weights of an earlier model go."""
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
    """Name the model's dtype in the config: transformers takes that of the first tensor for it."""
    config = read_json(folder / CONFIG)
    name = str(dtype).removeprefix("torch.")
    if config.get("dtype") != name:
        write_json(folder / CONFIG, config | {"dtype": name})


def _keep_tokenizer_class(source: Path, folder: Path) -> None:
    """Name the class that the tokenizer's own files name: that of transformers 5 is
    unknown to older versions.
    """
    files = [place / "tokenizer_config.json" for place in (source, folder)]
    if not all(file.is_file() for file in files):
        return
    before, after = map(read_json, files)
    if before.get("tokenizer_class") not in (None, after.get("tokenizer_class")):
        write_json(files[1], after | {"tokenizer_class": before["tokenizer_class"]})


@contextlib.contextmanager
def _in_host_memory(
    model: nn.Module, dtypes: Mapping[str, torch.dtype]
) -> Iterator[None]:
    """Give the model its weights and buffers in `dtypes` within the block, and behind
    it the very tensors that it had.

    The copies are in host memory: the device may have no room for both.
    """
    # Buffers that no checkpoint has are without storage in a model that was gathered
    # from shards.
    tensors = {
        id(tensor): (name, tensor)
        for name, tensor in real_tensors(model)
        if not tensor.is_meta
    }
    held = [(tensor, tensor.data) for _, tensor in tensors.values()]
    try:
        for name, tensor in tensors.values():
            if (dtype := dtypes.get(name, tensor.dtype)) != tensor.dtype:
                tensor.data = tensor.data.to("cpu", dtype)
        yield
    finally:
        for tensor, data in held:
            tensor.data = data


def _compare_with_saved(model: PreTrainedModel, folder: Path) -> None:
    """Load what was written, and compare each tensor with the model's.

    Raises:
        UserError: a tensor has other numbers, or is not there.
    """
    trained = model.state_dict()
    needed = sum(tensor.nbytes for tensor in trained.values())
    if (free := available_memory()) < needed * _ROOM_TO_LOAD:
        print(
            f"{folder.name}: was not loaded to compare it with the trained model, which"
            f" takes {needed / 1e9:.0f} GB of main memory ({free / 1e9:.0f} GB are"
            " free)",
            file=sys.stderr,
        )
        return
    with without_deepspeed():
        loaded = load_model(folder).state_dict()
    for name, tensor in trained.items():
        if name not in loaded or not _same_numbers(
            tensor.detach().to("cpu"), loaded[name]
        ):
            raise UserError(
                f"{folder}: '{name}' is not what was trained when the model is loaded"
                " again; nothing was left, the training goes on from its last"
                " checkpoint. Is the disk well? If so, this is a fault of fcsd: report"
                " it with the model's config.json"
            )


_ROOM_TO_LOAD = 1.2
"""Free main memory over the bytes of a model from which on it is loaded to be compared."""


def _same_numbers(trained: Tensor, loaded: Tensor) -> bool:
    """Compare bits, since a model whose training failed has NaN. Families round some
    tensors when they load them.
    """
    trained = trained.to(loaded.dtype).contiguous()
    return trained.shape == loaded.shape and torch.equal(
        trained.flatten().view(torch.uint8),
        loaded.contiguous().flatten().view(torch.uint8),
    )
