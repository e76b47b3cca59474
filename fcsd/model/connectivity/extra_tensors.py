"""Tensors of a checkpoint that its model does not load, layers for multi-token
prediction (MTP) above all: which they are, and how a model that is written from memory
keeps them.

transformers leaves them out of the model and keeps their number in the config. An
engine that finds the number and no tensors drafts from random ones, so that both are
written, or neither.

Not covered: `save_pretrained` of transformers, called by a user; it writes what is in
memory.
"""

import contextlib
import json
import math
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO, NamedTuple

from fcsd.base.errors import UserError
from fcsd.base.files import read_json
from fcsd.base.weights import Stored, copy_bytes, shard_names, write_safetensors
from fcsd.base.writing import write_json
from fcsd.model.connectivity.checkpoint import (
    CONFIG,
    INDEX,
    WEIGHTS,
    Checkpoint,
    read_checkpoint,
    read_header,
    source_folder,
)
from fcsd.model.families import Family, base_model_type, family_of
from fcsd.model.families.family import text_config
from fcsd.model.quantised.methods import FIELD, said_quantisation

_PROMISE = re.compile(r"num_(nextn|mtp)_\w+|mtp_num_\w*layers|(use|enable)_mtp")
"""Keys of a config that say how many MTP layers a checkpoint has:
`num_nextn_predict_layers`, `num_mtp_modules`, …
"""
_NAMED = re.compile(r"(^|\.)(mtp|nextn)\w*\.")
_LAYER = re.compile(r"(?P<stack>(?:.*\.)?layers)\.(?P<index>\d+)\.(?P<rest>.+)")
_OF_MTP_ONLY = ("eh_proj.", "enorm.", "hnorm.")
INDEXED = "indexed_attention"

MTP_KINDS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {},
    "deepseek_v32": {"mtp_layer_types": [INDEXED], "mtp_mlp_layer_types": ["sparse"]},
    "glm4_moe": {},
    "glm4_moe_lite": {"mtp_mlp_layer_types": ["sparse"]},
    "glm_moe_dsa": {
        "mtp_layer_types": [INDEXED],
        "mtp_mlp_layer_types": ["sparse"],
        "indexer_types": ["full"],
    },
    "qwen3_next": {
        "mtp_layer_types": ["full_attention"],
        "mlp_only_layers": [],
        "decoder_sparse_step": 1,
    },
    "qwen3_5_moe_text": {"mtp_layer_types": ["full_attention"]},
}
"""Family whose MTP layers `fcsd mtp` trains, as transformers runs them -> what their config
says where that of the decoder layers does not fit: a list has an entry for each layer,
here for one.
"""
_BUFFERS = re.compile(
    r"rotary_emb\.inv_freq$|(^|\.)position_ids$"
)  # computed by the model, once kept in files


def promised_layers(config: Mapping[str, Any]) -> int:
    """Return how many MTP layers a config says that its checkpoint has; 0: none, or it
    does not say.
    """
    counts = (section[key] for section, key in _promises(config))
    return max((int(count) for count in counts), default=0)


def has_mtp(extra: Collection[str], config: Any) -> bool:
    """Return whether tensors that no model loads are of MTP layers: by their names, or
    by what the config promises.
    """
    named = any(_NAMED.search(name) for name in extra)
    return named or (bool(extra) and promised_layers(config.to_dict()) > 0)


class MtpTensors(NamedTuple):
    """The names of the tensors of a checkpoint's MTP layers.

    layers: how many they are. begin: the number of the first; None: they have names
    of their own (`mtp.`), as in Qwen3-Next.
    """

    names: list[str]
    layers: int
    begin: int | None


def mtp_tensors(names: Collection[str], config: Any, where: object) -> MtpTensors:
    """Find the MTP layers that `fcsd mtp` trains.

    names: of all tensors in a checkpoint. config: its text config. where: begins errors.

    Raises:
        UserError: there are none, or none of which the form is known.
    """
    begin: int = config.num_hidden_layers
    promised = promised_layers(config.to_dict())
    own = [name for name in names if name.startswith("mtp.")]
    family = base_model_type(config.model_type)
    if not (promised or own):
        raise UserError(f"{where}: has no MTP layers; there is nothing to train")
    if family not in MTP_KINDS:
        raise UserError(
            f"{where}: MTP layers of {family} cannot be trained, only those of"
            f" {', '.join(MTP_KINDS)}"
        )
    numbers = range(begin, begin + promised)
    behind = [
        name
        for name in names
        if (match := _LAYER.fullmatch(name)) and int(match["index"]) in numbers
    ]
    if behind:
        return MtpTensors(behind, promised, begin)
    count = len({name.split(".")[2] for name in own if name.startswith("mtp.layers.")})
    if not count:
        raise UserError(
            f"{where}: its config promises {promised} MTP layers, but no tensor is named"
            f" layers.{begin}.… or mtp.layers.0.…; fcsd knows no others"
        )
    if count > 1:
        raise UserError(
            f"{where}: {count} MTP layers share 'mtp.fc.weight'; fcsd trains one such"
            " layer"
        )
    return MtpTensors(own, 1, None)


def _promises(config: Any) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield each key that promises MTP layers, and the part of the config that it is in."""
    for key, value in list(config.items()):
        if isinstance(value, dict):
            yield from _promises(value)
        elif _PROMISE.fullmatch(str(key)) and isinstance(value, int) and value:
            yield config, key


def not_loaded(
    model: Any, names: Collection[str], family: Family, where: Path
) -> set[str]:
    """Return those of `names` that the family's model skips when it is loaded; none of
    them names a parameter.

    MTP layers are known by their names, and after the decoder layers by their place,
    wherever transformers' patterns of the family expect them: these are the places of
    the released sizes.

    Raises:
        UserError: an MTP layer in a place where the config promises none.
    """
    # transformers' rule for tensors that a load may skip; the method reads the two sets
    # of a report and changes them in place.
    report = SimpleNamespace(missing_keys=set(), unexpected_keys=set(names))
    model._adjust_missing_and_unexpected_keys(report)
    unknown: set[str] = {
        name for name in report.unexpected_keys if not _NAMED.search(name)
    }
    num_layers = text_config(model.config, family).num_hidden_layers
    promised = promised_layers(model.config.to_dict())
    mtp: set[tuple[str, int]] = set()
    for name in sorted(unknown):
        match = _LAYER.fullmatch(name)
        # An MTP layer holds a decoder layer, so most of its tensors have the names of
        # one. Those that only it has tell which layers are meant; the rest of their
        # tensors follow below.
        if match is None or not match["rest"].startswith(_OF_MTP_ONLY):
            continue
        index = int(match["index"])
        if not num_layers <= index < num_layers + promised:
            says = f"{promised} MTP layers" if promised else "no MTP layer"
            raise UserError(
                f"{where}: '{name}' belongs to an MTP layer with index {index}, but"
                f" {where / CONFIG} says num_hidden_layers {num_layers} and {says};"
                " correct the config (for example num_nextn_predict_layers), or remove"
                " the layer's tensors"
            )
        mtp.add((match["stack"], index))
    of_mtp = {
        name
        for name in unknown
        if (match := _LAYER.fullmatch(name))
        and (match["stack"], int(match["index"])) in mtp
    }
    return {*names} - unknown | of_mtp


class _Piece(NamedTuple):
    """A tensor in an open file, whose bytes begin at `begin`."""

    stream: BinaryIO
    stored: Stored
    begin: int


@contextlib.contextmanager
def keeping_extra_tensors(model: Any, folder: Path) -> Iterator[None]:
    """After the block has written `model` into `folder`, add the other tensors of the
    checkpoint from which it was loaded.

    Tensors keep their names, dtypes and bytes, in a shard for each file that they come
    from. They are opened before the block, which may write over the very checkpoint.
    Where that is not here, or is of another model by now, the written config promises
    no MTP layers, and a line on stderr says so.
    """
    with contextlib.ExitStack() as opened:
        try:
            shards, reason = _pieces(model, opened), ""
        except UserError as error:
            shards, reason = [], str(error)
        yield
        written = set(_weight_map(folder)) | set(model.state_dict())
        extra_shards = []
        for shard in shards:
            # The block may have written a tensor of this name itself.
            pieces = {
                name: piece for name, piece in shard.items() if name not in written
            }
            if pieces:
                extra_shards.append(pieces)
        if extra_shards:
            _append(folder, extra_shards)
        elif (folder / WEIGHTS).is_file():
            # of an earlier model, which had more files
            (folder / INDEX).unlink(missing_ok=True)
    if reason:
        _remove_promises(folder, reason)


def _pieces(model: Any, opened: contextlib.ExitStack) -> list[dict[str, _Piece]]:
    """Open the tensors of the model's checkpoint that the model does not load: for each
    file, its tensors by name.

    Raises:
        UserError: there is no such checkpoint, or it is not this model's.
    """
    checkpoint = _source(model)
    family = checkpoint.family
    assert family is not None
    model_tensors = model.state_dict().keys()
    names = {
        name
        for name in checkpoint.shapes
        if name not in model_tensors and not _BUFFERS.search(name)
    }
    extra = not_loaded(model, names, family, checkpoint.folder)
    shards = []
    for file in checkpoint.weight_files if extra else ():
        tensors = read_header(checkpoint.folder / file)
        if held := extra & tensors.keys():
            stream = opened.enter_context((checkpoint.folder / file).open("rb"))
            shards.append({name: _Piece(stream, *tensors[name]) for name in held})
    return shards


def _source(model: Any) -> Checkpoint:
    """Return the checkpoint from which a model was loaded: a folder, or the cached part
    of a Hub repository.

    Raises:
        UserError: there is none, or another model's.
    """
    config = model.config
    folder = source_folder(config)
    if folder is None:
        path = config._name_or_path
        gone = f"the checkpoint that the model was loaded from is gone: {path}"
        raise UserError(gone if path else "the model was not loaded from a checkpoint")
    checkpoint = read_checkpoint(folder)
    # Another model may have been written to the folder since. Sizes and type are
    # compared, not values: a training has changed those.
    original_config = checkpoint.config.get("text_config") or checkpoint.config
    converted_config = config.get_text_config()
    differing = [
        key
        for key in ("num_hidden_layers", "hidden_size", "vocab_size")
        if key in original_config
        and original_config[key] != getattr(converted_config, key, None)
    ]
    if (
        checkpoint.family is None
        or checkpoint.family.model_type != family_of(config).model_type
    ):
        differing = ["model_type"]
    elif (
        checkpoint.quantisation is not None
        and said_quantisation(config.to_dict()) is None
    ):
        # The model was dequantised while it was loaded; packed tensors would look like
        # ones that it does not load.
        differing = [FIELD]
    if differing:
        raise UserError(f"{folder} now holds another model ({differing[0]} differs)")
    return checkpoint


def _weight_map(folder: Path) -> dict[str, str]:
    """Return the file of each tensor of a checkpoint that was just written."""
    if not (folder / WEIGHTS).is_file():
        weight_map: dict[str, str] = read_json(folder / INDEX)["weight_map"]
        return weight_map
    return dict.fromkeys(read_header(folder / WEIGHTS), WEIGHTS)


def _append(folder: Path, shards: list[dict[str, _Piece]]) -> None:
    """Add shards to a checkpoint and renumber its files:
    model-00002-of-00003.safetensors.
    """
    weight_map = _weight_map(folder)
    files = sorted(set(weight_map.values()))
    # Each name contains the number of files, so the existing files are also renamed.
    names = shard_names(len(files) + len(shards))
    renamed = dict(zip(files, names, strict=False))
    for file, name in renamed.items():
        (folder / file).rename(folder / name)
    weight_map = {tensor: renamed[file] for tensor, file in weight_map.items()}
    for name, shard in zip(names[len(files) :], shards, strict=True):
        _write_shard(folder / name, shard)
        weight_map |= dict.fromkeys(shard, name)
    sizes = {"total_size": 0, "total_parameters": 0}
    for file in names:
        for stored, _ in read_header(folder / file).values():
            sizes["total_size"] += stored.num_bytes
            sizes["total_parameters"] += math.prod(stored.shape)
    write_json(
        folder / INDEX,
        {"metadata": sizes, "weight_map": dict(sorted(weight_map.items()))},
    )


def _write_shard(path: Path, shard: Mapping[str, _Piece]) -> None:
    """Write a safetensors file of pieces of others, byte for byte, without reading a
    tensor into memory.
    """

    def write(name: str, target: BinaryIO) -> None:
        stream, stored, begin = shard[name]
        copy_bytes(stream, begin, stored.num_bytes, target)

    write_safetensors(path, {name: shard[name].stored for name in shard}, write)


def _remove_promises(folder: Path, reason: str) -> None:
    generation = folder / "generation_config.json"
    settings = read_json(generation) if generation.is_file() else {}
    # transformers' generate would look for the layers
    if settings.pop("use_mtp", False):
        write_json(generation, settings)
    config = read_json(folder / CONFIG)
    promises = [*_promises(config)]
    if not promises:
        return
    for section, key in promises:
        section[key] = type(section[key])(0)
    write_json(folder / CONFIG, config)
    keys = ", ".join(
        dict.fromkeys(f"{key}: {json.dumps(section[key])}" for section, key in promises)
    )
    print(
        f"{folder}: has no MTP layers, {reason}; its {CONFIG} says {keys}",
        file=sys.stderr,
    )
