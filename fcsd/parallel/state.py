"""Store weights and optimiser for an exact continuation, in one layout for all engines
and numbers of ranks.

    state-00001-of-00008.safetensors   of each rank that writes; beyond 4 GB in
    …00008.1.safetensors and so on
        NAME                  (n,) the rank's part of a trained parameter, flat, as the optimiser has it (float32)
        NAME|exp_avg, …       (n,) the same part of each state of the optimiser
        NAME|average          (n,) the same part of the moving average of the weights, float32
        metadata: `starts`    NAME -> where the part begins in the flattened parameter; `sizes` NAME -> its whole size
    optimizer.json            the settings of each parameter group, and what the optimiser counts (`step`)

Under every engine a rank's part is a contiguous range of the flattened parameter: all of
it (copies; the first rank writes), the rows of FSDP2, the partition of ZeRO-3, or the
rank's own experts. So any engine and number of ranks can read a checkpoint of any other:
each rank reads the ranges that it needs. Values are stored unchanged, so the same ranks
continue bit for bit.

Frozen parameters are not stored, because they have not changed since the run began.
These files are no pickles. Of the others (`fcsd.training.checkpoints` lists them) the
schedule and the random generators are, in `scheduler.pt` and `rng_state*.pth`; they are
read with `weights_only`, which runs no code.

Not covered: nodes without a shared file system; optimisers whose state of a parameter
is neither a number nor of the parameter's shape; ZeRO-3 with its optimiser on a disk
(nvme).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import _TYPES
from torch import Tensor, nn

from fcsd.base.errors import UserError
from fcsd.base.files import read_json, safetensors_head
from fcsd.base.writing import write_json
from fcsd.parallel.launch import Ranks
from fcsd.parallel.parts import (
    Part,
    compute_with,
    inner_optimizer,
    parts_of,
    writers_of,
)

OPTIMIZER = "optimizer.json"
AVERAGE = "average"  # no optimiser has a state of this name
PART_OF = "part_of"  # in a parameter group of the optimiser: see `_groups`
FILE_BYTES = 1 << 32  # largest file, unless a single tensor is larger
_FILE = re.compile(r"state-(\d{5})-of-(\d{5})\.safetensors")


@dataclass(frozen=True)
class StateFile:
    """A file of a rank's part: name -> (n,) numbers, and the metadata of its header."""

    name: str
    tensors: dict[str, Tensor]
    metadata: dict[str, str]

    def copied(self, into: dict[str, Tensor]) -> StateFile:
        """Return the file with a copy of its numbers in host memory: in the tensors of
        `into`, which are allocated if missing.
        """
        for key, tensor in self.tensors.items():
            if key not in into:
                into[key] = torch.empty_like(tensor, device="cpu")
            into[key].copy_(tensor)
        return replace(self, tensors={key: into[key] for key in self.tensors})

    def write(self, folder: Path) -> dict[str, Any]:
        """Write the file; return the `bytes` and the `sha256` of the written content.

        safetensors' own writer returns no hash (reading the file again would take as
        long once more), and writes the header's metadata in any order.
        """
        # Wide dtypes first, so that every tensor is aligned.
        tensors = dict(
            sorted(self.tensors.items(), key=lambda item: -item[1].element_size())
        )
        entries = (
            (name, _DTYPES[tensor.dtype], tensor.shape, tensor.nbytes)
            for name, tensor in tensors.items()
        )
        head = safetensors_head(entries, self.metadata)
        # Hashed piece by piece while it is written, so the file is not read again.
        digest, number = hashlib.sha256(), 0
        parts = [memoryview(head), *map(_bytes_of, tensors.values())]
        with (folder / self.name).open("wb") as file:
            for data in parts:
                for start in range(0, len(data), _PIECE):
                    piece = data[start : start + _PIECE]
                    number += file.write(piece)
                    digest.update(piece)
            # A checkpoint counts only once its bytes are on the disk.
            file.flush()
            os.fsync(file.fileno())
        return {"bytes": number, "sha256": digest.hexdigest()}


_DTYPES = {dtype: name for name, dtype in _TYPES.items()}
_PIECE = 1 << 24


def _bytes_of(tensor: Tensor) -> memoryview:
    array: Any = tensor.view(torch.uint8).numpy()
    return memoryview(array)


def state_files(
    model: nn.Module,
    optimizer: Any,
    ranks: Ranks,
    *,
    weights_only: bool = False,
    average: Mapping[str, Tensor] | None = None,
) -> list[StateFile]:
    """Return the files of this rank's part; their numbers are views of the tensors in
    training. All ranks call this.

    model: in training, without the wrapper of DDP or DeepSpeed. optimizer:
    accelerate's, of that model. weights_only: leave the optimiser's states out.
    average: this rank's part of the average of each trained parameter, flat.
    """
    parts = parts_of(model, optimizer, ranks)
    writers, index = writers_of(model, ranks)
    # This rank holds a copy of a part that another one writes.
    if index is None:
        return []
    path = Path(f"state-{index + 1:05}-of-{writers:05}.safetensors")
    files = _cut(
        parts, {} if weights_only else inner_optimizer(optimizer).state, average or {}
    )
    return [
        StateFile(
            _numbered(path, number).name,
            {key: tensor for key, _, tensor in entries},
            {
                "files": str(len(files)),
                "starts": json.dumps({part.name: part.start for _, part, _ in entries}),
                "sizes": json.dumps({part.name: part.size for _, part, _ in entries}),
            },
        )
        for number, entries in enumerate(files)
    ]


def write_weights(folder: Path, model: nn.Module, optimizer: Any, ranks: Ranks) -> None:
    """Write this rank's part of the weights below `folder`, a file at a time. All ranks
    call this; `check_state` tells whether all have."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in state_files(model, optimizer, ranks, weights_only=True):
        file.copied({}).write(folder)


def write_optimizer_settings(
    folder: Path, model: nn.Module, optimizer: Any, ranks: Ranks
) -> None:
    """Write, on the first rank, the optimiser's settings and counts; all ranks call
    this.
    """
    parts, inner = parts_of(model, optimizer, ranks), inner_optimizer(optimizer)
    if not ranks.first:
        return
    counted = {
        part.name: {
            key: float(value)
            for key, value in inner.state.get(part.slot, {}).items()
            if _is_number(value)
        }
        for part in parts
    }
    groups = {
        index: {k: v for k, v in group.items() if k not in ("params", PART_OF)}
        for index, group in _groups(inner)
    }
    write_json(
        folder / OPTIMIZER, {"groups": list(groups.values()), "counted": counted}
    )


def _groups(inner: torch.optim.Optimizer) -> list[tuple[int, dict[str, Any]]]:
    """Return (number of the group in one process, group) for each group: where meshes
    differ, one group is split into several.
    """
    return [
        (group.get(PART_OF, i), group) for i, group in enumerate(inner.param_groups)
    ]


def schedule_state(scheduler: Any, optimizer: Any) -> dict[str, Any]:
    """Return a learning-rate schedule's state, its lists with one entry for each
    parameter group of one process.
    """
    # Schedules have a value per group; only one of each split group is stored.
    indices = [index for index, _ in _groups(inner_optimizer(optimizer))]
    state: dict[str, Any] = scheduler.state_dict()
    lists = {
        key: dict(zip(indices, value, strict=True))
        for key, value in state.items()
        if isinstance(value, list)
    }
    return state | {key: list(value.values()) for key, value in lists.items()}


def load_schedule(scheduler: Any, optimizer: Any, state: dict[str, Any]) -> None:
    """Continue from `schedule_state` of any engine."""
    indices = [index for index, _ in _groups(inner_optimizer(optimizer))]
    # Every rank may have other groups than the writer, so values go by their number.
    lists = {
        key: [value[i] for i in indices]
        for key, value in state.items()
        if isinstance(value, list)
    }
    scheduler.load_state_dict(state | lists)


def _cut(
    parts: list[Part], states: Any, average: Mapping[str, Tensor]
) -> list[list[tuple[str, Part, Tensor]]]:
    """Return (name in the file, part, its numbers) of each stored tensor, by file."""
    files: list[list[tuple[str, Part, Tensor]]] = [[]]
    size = 0
    for part in parts:
        tensors = {
            f"{part.name}|{key}": part.of(value)
            for key, value in states.get(part.slot, {}).items()
            if not _is_number(value)
        }
        if part.name in average:
            tensors[f"{part.name}|{AVERAGE}"] = average[part.name]
        for key, tensor in {part.name: part.of(part.slot), **tensors}.items():
            # A tensor is never split between files.
            if files[-1] and size + tensor.nbytes > FILE_BYTES:
                files.append([])
                size = 0
            files[-1].append((key, part, tensor))
            size += tensor.nbytes
    return files


def _numbered(path: Path, number: int) -> Path:
    """Return the path of a rank's file: state-….safetensors, state-….1.safetensors, …"""
    return path.with_suffix(f".{number}{path.suffix}") if number else path


def read_state(
    folder: Path,
    model: nn.Module,
    optimizer: Any | None,
    ranks: Ranks,
    *,
    weights_only: bool = False,
) -> None:
    """Continue from a checkpoint's files, written by any engine and number of ranks.
    All ranks call this.

    optimizer: None if there is none yet; then only weights are read.

    Raises:
        UserError: a file is missing or damaged, or the checkpoint has other trainable
            parameters.
    """
    parts = parts_of(model, optimizer, ranks)
    with ExitStack() as stack, torch.no_grad():
        stored = _Stored(folder, stack)
        for part in parts:
            stored.read(part.name, part, part.of(part.slot))
        if optimizer is not None and not weights_only:
            _read_optimizer(folder, stored, parts, inner_optimizer(optimizer))
    compute_with(parts, optimizer)


def read_average(
    folder: Path, model: nn.Module, optimizer: Any | None, ranks: Ranks
) -> dict[str, Tensor]:
    """Return this rank's part of the average that a checkpoint holds; raises as `read_state`."""
    average = {}
    with ExitStack() as stack:
        stored = _Stored(folder, stack)
        for part in parts_of(model, optimizer, ranks):
            numbers = torch.empty(
                part.stop - part.start, dtype=torch.float32, device=part.slot.device
            )
            stored.read(f"{part.name}|{AVERAGE}", part, numbers)
            average[part.name] = numbers
    return average


def check_state(folder: Path) -> None:
    """Raise UserError unless all files of a checkpoint exist, and none is cut off."""
    with ExitStack() as stack:
        _Stored(folder, stack)


def _read_optimizer(
    folder: Path, stored: _Stored, parts: list[Part], inner: torch.optim.Optimizer
) -> None:
    record = read_json(folder / OPTIMIZER)
    groups, inner_groups = record["groups"], _groups(inner)
    if len(groups) != (number := len({index for index, _ in inner_groups})):
        raise UserError(
            f"{folder}: was written by an optimiser of {len(groups)} parameter groups,"
            f" but this one has {number}; remove the checkpoints to start again"
        )
    steps_on_device = False
    for index, group in inner_groups:
        for key, value in groups[index].items():
            group[key] = tuple(value) if isinstance(group.get(key), tuple) else value
        steps_on_device |= bool(group.get("fused") or group.get("capturable"))
    for part in parts:
        counted = record["counted"].get(part.name, {})
        states = inner.state[part.slot]
        # A new optimiser has no states before its first step.
        for key in stored.states(part.name):
            if key not in states:
                states[key] = torch.zeros_like(
                    part.slot, memory_format=torch.preserve_format
                ).detach()
            stored.read(f"{part.name}|{key}", part, part.of(states[key]))
        for key, value in counted.items():
            # torch's optimisers keep `step` on the CPU unless they are fused.
            device = part.slot.device if steps_on_device else torch.device("cpu")
            states[key] = torch.tensor(value, dtype=torch.float32, device=device)


class _Stored:
    """The files of a checkpoint, opened."""

    def __init__(self, folder: Path, stack: ExitStack):
        self.folder = folder
        # name -> the stored ranges of the flat tensor: begin, end, file
        self.ranges: dict[str, list[tuple[int, int, Any]]] = {}
        self.sizes: dict[str, int] = {}
        files = {
            match[1]: match[2]
            for path in folder.glob("*")
            if (match := _FILE.fullmatch(path.name))
        }
        # Each name tells how many ranks wrote, so missing files are noticed.
        writers = int(next(iter(files.values()), 0))
        if not files or len(files) != writers:
            raise UserError(
                f"{folder}: {len(files)} of {writers or 'at least 1'} state files"
                f" exist; {_ADVICE}"
            )
        # The first file of each writer tells how many it has written.
        for index in range(writers):
            path = folder / f"state-{index + 1:05}-of-{writers:05}.safetensors"
            for number in range(1, self._open(path, stack)):
                self._open(_numbered(path, number), stack)

    def _open(self, path: Path, stack: ExitStack) -> int:
        """Index the tensors of a file; return how many files its rank has written."""
        try:
            file = stack.enter_context(safe_open(path, framework="pt"))
        except (SafetensorError, OSError) as error:
            raise UserError(
                f"{path}: cannot be read ({' '.join(str(error).split())}); {_ADVICE}"
            ) from None
        metadata = file.metadata() or {}
        starts = json.loads(metadata.get("starts", "{}"))
        self.sizes |= json.loads(metadata.get("sizes", "{}"))
        for name in file.keys():  # noqa: SIM118  a file, not a mapping
            start = starts[name.split("|")[0]]
            length = file.get_slice(name).get_shape()[0]
            self.ranges.setdefault(name, []).append((start, start + length, file))
        return int(metadata.get("files", "1"))

    def states(self, name: str) -> list[str]:
        """Return names of the optimiser's states of a parameter."""
        keys = [key.split("|")[1] for key in self.ranges if key.startswith(f"{name}|")]
        return [key for key in keys if key != AVERAGE]

    def read(self, name: str, part: Part, into: Tensor) -> None:
        """Copy the range of `part` of a stored tensor into the flat `into`."""
        # A missing tensor is reported like one of another size.
        held = self.sizes[part.name] if name in self.ranges else "no"
        if held != part.size:
            raise UserError(
                f"{self.folder}: holds {held} numbers of '{name}' instead of"
                f" {part.size}; it belongs to another model, or to other trainable"
                " parameters"
            )
        # The stored ranges do not overlap, so counting the copied numbers shows gaps.
        missing = part.stop - part.start
        for start, stop, file in self.ranges[name]:
            begin, end = max(start, part.start), min(stop, part.stop)
            if begin < end:
                piece = file.get_slice(name)[begin - start : end - start]
                into[begin - part.start : end - part.start].copy_(piece)
                missing -= end - begin
        if missing:
            raise UserError(
                f"{self.folder}: {missing} numbers of '{name}' are missing; {_ADVICE}"
            )


_ADVICE = (
    "the checkpoint is damaged: remove it, and the run continues from the previous one"
)


def _is_number(value: Any) -> bool:
    return not isinstance(value, Tensor) or value.ndim == 0
