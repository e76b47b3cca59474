"""Find the weight files of a checkpoint folder as transformers does, read their
headers, hash and write them; tell what else a folder holds: a run, the state of a
training, an adapter, GGUF files.

Not covered: pickles, which are never read; files of other tools
(`consolidated.safetensors`, `original/`).
"""

import contextlib
import hashlib
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from fcsd.base.errors import UserError
from fcsd.base.files import (
    check_regular,
    file_state,
    read_json,
    read_unmarked_json,
    safetensors_head,
    safetensors_header,
)
from fcsd.base.writing import is_noise

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG_ONLY = "config_only"
"""Key of a conversion's `manifest.json`: whether it was written without weights."""
NAMED = "transformers_weights"
"""Field of a config that names the weight file or index, in place of the two names
above.
"""
_BLOCK_BYTES = 1 << 22
_SHOWN = 3
_NOT_FINITE = {
    "BF16": ("<u2", 0x7F80), "F16": ("<u2", 0x7C00), "F32": ("<u4", 0x7F80_0000), "F64": ("<u8", 0x7FF0 << 48),
    "F8_E5M2": ("u1", 0x7C), "F8_E4M3": ("u1", 0x7F), "F8_E8M0": ("u1", 0xFF),
}  # fmt: skip
"""Dtype in the words of safetensors -> integers of its width, and the bits that are all
set in NaN and infinity.
"""
_ADDED_TO_SCORES = re.compile(r"mask\w*|alibi\w*|\w*correction_bias|expert_bias")


@dataclass(frozen=True)
class WeightFiles:
    """The safetensors files that transformers loads from a folder."""

    names: tuple[str, ...]
    index: str | None
    """The file that names them; None where there is a single one."""
    weight_map: dict[str, str] | None
    """Tensor -> file, as the index says."""
    passed_over: tuple[str, ...] = ()
    """Other weight files, in an index that does not count because `model.safetensors`
    lies beside it.
    """

    def check_present(self, folder: Path) -> None:
        """Raise UserError where a file is missing."""
        if missing := [name for name in self.names if not (folder / name).is_file()]:
            raise UserError(
                f"{folder / missing[0]}: no such file, but"
                f" {self.index or f'{NAMED} in {CONFIG}'} names it ({len(missing)} of"
                f" {len(self.names)} shards are missing); fetch the checkpoint again"
            )


def find_weights(folder: Path, config: Mapping[str, Any]) -> WeightFiles | None:
    """Return the weight files that `from_pretrained` of transformers loads; None where
    there are none.

    Its rule: the file or index that `transformers_weights` in the config names, else
    `model.safetensors`, else the files in `model.safetensors.index.json`. Files of
    other names do not count. Whether the files exist is not checked.

    Raises:
        UserError: an index is missing, damaged or names files outside the folder.
    """
    # The field of the config comes first, as in transformers, even beside
    # model.safetensors.
    name = config.get(NAMED)
    if name is None:
        if (folder / WEIGHTS).exists():
            return WeightFiles((WEIGHTS,), None, None, _ignored_files(folder))
        return _files_of_index(folder, INDEX) if (folder / INDEX).exists() else None
    is_index = str(name).endswith(".safetensors.index.json")
    if not (is_index and Path(name).name == name) and not _is_shard_name(name):
        raise UserError(
            f"{folder / CONFIG}: {NAMED} names {str(name)[:80]!r}; the name of a"
            " .safetensors file or of a .safetensors.index.json in this folder is"
            " needed"
        )
    return (
        _files_of_index(folder, name) if is_index else WeightFiles((name,), None, None)
    )


def is_config_only(folder: Path) -> bool:
    """Tell whether `fcsd convert --config-only` wrote a folder, which has no weights."""
    record: Any = None
    with contextlib.suppress(UserError):
        record = read_json(folder / "manifest.json", keys=())
    # Weights that were added since count.
    return bool(record and record.get(CONFIG_ONLY)) and not any(
        folder.glob("*.safetensors")
    )


def without_weights(folder: Path) -> UserError:
    """Return the error for reading weights from a folder of `is_config_only`."""
    return UserError(
        f"{folder}: was written by `fcsd convert --config-only` and has no weights;"
        " `fcsd convert` of the original writes them; without weights it can only be"
        " timed, in a server with --load-format dummy (`fcsd-bench serve`)"
    )


def _files_of_index(folder: Path, index: str) -> WeightFiles:
    """Return the shards that an index names."""
    hint = "fetch the file again"
    weight_map = read_unmarked_json(folder / index, hint).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{folder / index}: weight_map is missing or empty; {hint}")
    if wrong := [name for name in weight_map.values() if not _is_shard_name(name)]:
        raise UserError(
            f"{folder / index}: weight_map names {str(wrong[0])[:80]!r}; the name of a"
            f" .safetensors file in this folder is needed, {hint}"
        )
    names = sorted(set(weight_map.values()))
    return WeightFiles(tuple(names), index, weight_map)


def _ignored_files(folder: Path) -> tuple[str, ...]:
    """Return the weight files in an index beside `model.safetensors`, without that
    file.
    """
    if not (folder / INDEX).is_file():
        return ()
    try:
        weight_map = read_json(folder / INDEX, keys=())["weight_map"]
        return tuple(sorted(set(map(str, weight_map.values())) - {WEIGHTS}))
    except (UserError, KeyError, TypeError, AttributeError):
        # A damaged index does no harm here: transformers does not read it either.
        return ()


def stale_index(folder: Path, passed_over: tuple[str, ...]) -> str:
    """Return a warning about an index that transformers ignores; "" where there is
    none.
    """
    if not passed_over:
        return ""
    return (
        f"{folder / INDEX}: is not read, and neither are the {len(passed_over)} weight"
        f" files that it names ({passed_over[0]}): transformers loads {WEIGHTS} in the"
        f" same folder instead; if the indexed files are the model, remove {WEIGHTS},"
        " otherwise remove the index and those files"
    )


def _is_shard_name(name: Any) -> bool:
    """Tell whether a name is that of a safetensors file in the folder itself, and not a
    path that leads out of it.
    """
    if not isinstance(name, str) or len(name.encode(errors="replace")) > 255:
        return False
    return (
        Path(name).name == name and name.endswith(".safetensors") and "\0" not in name
    )


def weight_files(folder: Path) -> list[Path]:
    """Return the weight files that `find_weights` finds in a folder; if there are none,
    all of its safetensors files.
    """
    config: Any = None
    with contextlib.suppress(UserError):
        config = read_json(folder / CONFIG, keys=())
    weights = find_weights(folder, config if isinstance(config, dict) else {})
    if weights is not None:
        weights.check_present(folder)
        return [folder / name for name in weights.names]
    return sorted(
        file for file in folder.glob("*.safetensors") if not is_noise(file.name)
    )


class Stored(NamedTuple):
    """A tensor of a safetensors file: its dtype as safetensors spells it, its shape,
    and the number of its bytes.
    """

    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


def shard_names(number: int) -> list[str]:
    """Return the names of the weight files of a checkpoint that has several."""
    return [f"model-{k:05}-of-{number:05}.safetensors" for k in range(1, number + 1)]


def write_safetensors(
    file: Path, tensors: Mapping[str, Stored], write: Callable[[str, BinaryIO], None]
) -> None:
    """Write a safetensors file tensor by tensor, without holding them all in memory,
    and sync it to the disk.

    write: writes the bytes of the named tensor to the open file.
    """

    def element_bytes(name: str) -> float:
        return tensors[name].num_bytes / max(1, math.prod(tensors[name].shape))

    # Largest elements first, so that each tensor is aligned to its element size.
    names = sorted(tensors, key=lambda name: (-element_bytes(name), name))
    rows = (
        (name, tensors[name].dtype, tensors[name].shape, tensors[name].num_bytes)
        for name in names
    )
    with file.open("wb") as target:
        target.write(safetensors_head(rows, {"format": "pt"}))
        for name in names:
            write(name, target)
        target.flush()
        os.fsync(target.fileno())


def copy_bytes(source: BinaryIO, begin: int, num_bytes: int, target: BinaryIO) -> None:
    """Copy bytes, in blocks, from an offset of an open file to another's position."""
    source.seek(begin)
    while num_bytes:
        block = source.read(min(num_bytes, _BLOCK_BYTES))
        if not block:
            raise AssertionError("a file ends before its header says so")
        target.write(block)
        num_bytes -= len(block)


def weights_fingerprint(folder: Path, *, finite: bool = False) -> str:
    """Hash names and bytes of the weight files of a checkpoint folder: the identity of
    its weights.

    A file is read once in a process unless its size, time or inode changes, because
    every stage asks for the fingerprint of the original. finite: refuse weights that
    are NaN or infinite, as `check_finite` does.
    """
    files = weight_files(folder)
    if not files:
        if is_config_only(folder):
            raise without_weights(folder)
        raise UserError(f"{folder}: holds no .safetensors file")
    if finite:
        _refuse_not_finite(folder, files)
    return fingerprint_of({file.name: _scan(file).sha256 for file in files})


def fingerprint_of(hashes: Mapping[str, str]) -> str:
    """Return the `weights_fingerprint` of files, from the SHA-256 of each by its name."""
    digest = hashlib.sha256()
    for name, sha256 in hashes.items():
        digest.update(f"{name}\0{sha256}".encode())
    return digest.hexdigest()


def check_finite(folder: Path) -> None:
    """Refuse weights with values that are NaN or infinite; they are counted while the
    files are hashed.

    Raises:
        UserError: as `find_weights`; some tensors have such values, and the first are
            named.
    """
    _refuse_not_finite(folder, weight_files(folder))


def _refuse_not_finite(folder: Path, files: list[Path]) -> None:
    counts = {
        name: count for file in files for name, count in _scan(file).not_finite.items()
    }
    if counts:
        raise not_finite(folder, counts)


def not_finite(name: str | Path, counts: Mapping[str, tuple[int, int]]) -> UserError:
    """Return the error for weights with values that are NaN or infinite.

    counts: tensor -> (number of these values, number of values).
    """
    examples = [
        f"'{name}' ({count} of {size})"
        for name, (count, size) in sorted(counts.items())[:_SHOWN]
    ]
    remainder = f" and {len(counts) - _SHOWN} more" if len(counts) > _SHOWN else ""
    return UserError(
        f"{name}: weights are NaN or infinite in {len(counts)} tensors:"
        f" {', '.join(examples)}{remainder}; fetch the checkpoint again, or use an"
        " earlier one"
    )


class _Scan(NamedTuple):
    sha256: str
    not_finite: dict[str, tuple[int, int]]
    """Tensor -> (number of values that are NaN or infinite, number of values); tensors
    without such values are absent.
    """


_KNOWN_FILES: dict[tuple[int, ...], _Scan] = {}


def _scan(file: Path) -> _Scan:
    """Hash a safetensors file with SHA-256 and count its non-finite values in one pass,
    once in a process.
    """
    check_regular(file)
    state = file_state(file)
    if state not in _KNOWN_FILES:
        _KNOWN_FILES[state] = _scan_file(file)
    return _KNOWN_FILES[state]


def _scan_file(file: Path) -> _Scan:
    digest = hashlib.sha256()
    not_finite: dict[str, tuple[int, int]] = {}
    try:
        header, begin = safetensors_header(file)
        tensors = sorted(
            (*tensor["data_offsets"], name, tensor["dtype"])
            for name, tensor in header.items()
        )
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        MemoryError,
        OverflowError,
    ):
        # A damaged file is hashed whole; loading it gives the error.
        tensors, begin = [], 0
    with file.open("rb") as stream:
        digest.update(stream.read(begin))
        for start, end, name, dtype in tensors:
            remaining, count = end - start, 0
            while remaining > 0:
                block = stream.read(min(remaining, _BLOCK_BYTES))
                if not block:
                    break
                digest.update(block)
                count += _count_not_finite(block, dtype, is_added_to_scores(name))
                remaining -= len(block)
            if count:
                width = int(_NOT_FINITE[dtype][0][-1])
                not_finite[name] = count, (end - start) // width
        # Bytes after the last tensor, or all bytes of a damaged file, belong to the
        # hash.
        while block := stream.read(_BLOCK_BYTES):
            digest.update(block)
    return _Scan(digest.hexdigest(), not_finite)


def is_added_to_scores(name: str) -> bool:
    """Tell whether a tensor is a mask or a bias of scores, in which minus infinity means
    "never": a key that is not looked at, an expert that is not chosen.
    """
    return bool(_ADDED_TO_SCORES.fullmatch(name.rpartition(".")[2]))


def _count_not_finite(block: bytes, dtype: str, may_be_minus_infinite: bool) -> int:
    """Count the values of a block that are NaN or infinite; 0 for integers and for
    dtypes without such values.
    """
    if dtype not in _NOT_FINITE:
        return 0
    import numpy as np

    # Compared as integers: numpy has no bfloat16 or float8.
    integers, bits = _NOT_FINITE[dtype]
    width = int(integers[-1])
    values = np.frombuffer(block, integers, len(block) // width)
    found = (values & np.array(bits, integers)) == bits
    if may_be_minus_infinite:
        found &= values != np.array(bits | 1 << (8 * width - 1), integers)
    return int(np.count_nonzero(found))


def _models_inside(folder: Path) -> list[Path]:
    """Return the folders of models in the folder of a run or of a training; the one to
    publish comes first.
    """
    return [
        file.parent
        for pattern in ("model", "publish", "*/model")
        for file in sorted(folder.glob(f"{pattern}/{CONFIG}"))
    ]


def _first_inside(folder: Path) -> str:
    first, *others = map(str, _models_inside(folder))
    return f"{first} (or {', '.join(others[:3])})" if others else first


def _state_of_training(folder: Path) -> str | None:
    """Return what a folder holds of a training's states."""
    if below := sorted(folder.glob("checkpoint-*/trainer_state.json")):
        return f"holds states of a training ({below[-1].parent.name})"
    is_state = (folder / "trainer_state.json").is_file()
    return "is the state of a training" if is_state else None


def _base_of_adapter(folder: Path) -> str:
    adapter = read_json(folder / "adapter_config.json", keys=())
    base = adapter.get("base_model_name_or_path")
    return f" of {base}" if base else ""


def check_contents(folder: Path) -> None:
    """Raise UserError where a folder holds something else than a checkpoint."""
    has_config = (folder / CONFIG).is_file()
    # transformers' Trainer saves its state beside a model: any readable file counts.
    if not has_config and not (folder / "tokenizer.json").is_file():
        if _models_inside(folder):
            raise UserError(
                f"{folder}: is not a checkpoint, but contains one; give"
                f" {_first_inside(folder)}"
            )
        if state := _state_of_training(folder):
            raise UserError(
                f"{folder}: {state}, not a model;"
                " FCSDTrainer.train(resume_from_checkpoint=…), or the command that"
                " started it, continues the training; save_model, or the end of a"
                " recipe's stage, writes a model"
            )
    if not has_config and any(folder.glob("*.gguf")):
        raise UserError(
            f"{folder}: holds GGUF files ({min(folder.glob('*.gguf')).name}), not a"
            " checkpoint of transformers; give the checkpoint that they were made from"
        )
    if not has_config and (folder / "adapter_config.json").is_file():
        raise UserError(
            f"{folder}: is a LoRA adapter{_base_of_adapter(folder)}, not a checkpoint;"
            " merge it into its model (peft: merge_and_unload, then save_pretrained) and"
            " give that folder"
        )
