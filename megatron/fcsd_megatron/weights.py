"""Load a checkpoint's weights into a Megatron model, and save them. Each rank reads and
writes its experts.
"""

import contextlib
import functools
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors import safe_open

from fcsd.base.errors import UserError
from fcsd.base.files import read_checkpoint_json, safetensors_header
from fcsd.base.writing import new_folder, write_json
from fcsd.model.connectivity.checkpoint import (
    CONFIG,
    INDEX,
    Checkpoint,
)
from fcsd.model.connectivity.export import carry_over, write_code
from fcsd.model.connectivity.modeling import MODELING_FILE
from fcsd.model.connectivity.spec import TRAINED
from fcsd.parallel.launch import ALONE, Ranks
from fcsd.training.calibration.shards import write_changed
from fcsd_megatron.names import is_expert, own_name
from fcsd_megatron.source import Source, read_source


@torch.no_grad()
def load_weights(model: Any, path: str | Path) -> None:
    """Copy a checkpoint's weights into its model, in the model's dtypes and on its
    devices.

    Args:
        model: from `build_model` or with the same spec, possibly inside DDP or
        Float16Module. path: the checkpoint that it was built from, or another with the
        same config.

    Raises:
        UserError: as in `read_source`; the model's tensors or connectivity differ from
            the checkpoint's.
    """
    source = read_source(path)
    tensors = _own_tensors(model, source)
    files = _files(source.checkpoint)
    with contextlib.ExitStack() as opened:
        handles = {
            file: opened.enter_context(
                safe_open(source.checkpoint.folder / file, framework="pt")
            )
            for file in source.checkpoint.weight_files
        }
        for name, tensor in tensors.items():
            piece = source.pieces[name]
            value = piece.join(
                [handles[files[each]].get_tensor(each) for each in piece.sources]
            )
            if value.shape != tensor.shape:
                raise UserError(
                    f"{path}: '{name}' has shape {list(value.shape)}, but"
                    f" {list(tensor.shape)} in the model"
                )
            tensor.copy_(value)


def save_weights(model: Any, folder: str | Path, like: str | Path) -> None:
    """Write a model in the format of its checkpoint, with that one's config, tokenizer,
    files and dtypes. All ranks call this.

    It copies the files of `like` and overwrites the tensors that differ, rank after
    rank, so all ranks must share the file system of `folder`. If any tensor differs,
    the config records that a FarSkip model was trained.

    Raises:
        UserError: as in `load_weights`; `folder` is not empty or cannot be written.
    """
    source = read_source(like)
    tensors = _own_tensors(model, source)
    checkpoint, files = source.checkpoint, _files(source.checkpoint)
    ranks = ALONE
    if dist.is_initialized():
        ranks = Ranks(dist.get_rank(), dist.get_world_size())
    with contextlib.ExitStack() as stack:
        place = Path(
            ranks.from_first(lambda: str(_copy(stack, checkpoint, Path(folder))))
        )
        changed = False
        for turn in range(ranks.size):
            own = _written(source, tensors, ranks) if turn == ranks.rank else {}
            write = functools.partial(
                write_changed, place, files, own, checkpoint.folder
            )
            changed |= any(ranks.share(write))
        if (
            changed
            and checkpoint.connectivity
            and checkpoint.config["farskip"]["layers"]
        ):
            ranks.from_first(
                lambda: write_json(
                    place / CONFIG,
                    read_checkpoint_json(place / CONFIG) | {TRAINED: True},
                )
            )
        ranks.from_first(stack.close)


def _own_tensors(model: Any, source: Source) -> dict[str, torch.Tensor]:
    """Return this rank's tensors by their names in the whole model, checked against the
    checkpoint.
    """
    while isinstance(getattr(model, "module", None), torch.nn.Module):
        model = model.module
    where = source.checkpoint.folder
    if [getattr(layer, "plan", None) for layer in model.decoder.layers] != source.plans:
        raise UserError(
            f"{where}: the model's connectivity differs from this checkpoint's; build"
            " the model from this checkpoint"
        )
    state = {
        name: value
        for name, value in model.state_dict().items()
        if isinstance(value, torch.Tensor)
    }
    count = (
        source.config.num_local_experts
        // parallel_state.get_expert_model_parallel_world_size()
    )
    first = count * parallel_state.get_expert_model_parallel_rank()
    names = {
        own: name
        for name in source.pieces
        if (own := own_name(name, first, count)) is not None
    }
    if wrong := sorted(names.keys() ^ state.keys()):
        side = "has, and the checkpoint has no place for,"
        if wrong[0] in names:
            side = "lacks"
        raise UserError(
            f"{where}: the model {side} '{wrong[0]}' ({len(wrong)} tensors differ);"
            " only local layers with one module per expert are supported, as"
            " build_model creates them"
        )
    return {names[own]: value for own, value in state.items()}


def _written(
    source: Source, tensors: dict[str, torch.Tensor], ranks: Ranks
) -> dict[str, torch.Tensor]:
    """Return the tensors that this rank writes, by checkpoint name: the first replica
    of its experts, and on rank 0 all others.
    """
    experts = parallel_state.get_expert_data_parallel_rank() == 0
    written: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if experts if is_expert(name) else ranks.first:
            piece = source.pieces[name]
            written |= dict(
                zip(piece.sources, piece.split(tensor.detach()), strict=True)
            )
    return written


def _copy(stack: contextlib.ExitStack, checkpoint: Checkpoint, folder: Path) -> Path:
    """Start a folder with copies of a checkpoint's files; it gets its name when the
    stack is closed.
    """
    place = stack.enter_context(new_folder(folder, replaces=False))
    if (checkpoint.folder / MODELING_FILE).exists():
        assert checkpoint.family is not None
        write_code(checkpoint.folder, checkpoint.family, place)
    names = (CONFIG, INDEX, *checkpoint.weight_files)
    for name in (name for name in names if (checkpoint.folder / name).exists()):
        shutil.copyfile(checkpoint.folder / name, place / name)
    carry_over(checkpoint.folder, place)
    return place


def _files(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the file of each tensor."""
    return {
        name: file
        for file in checkpoint.weight_files
        for name in safetensors_header(checkpoint.folder / file)[0]
    }
