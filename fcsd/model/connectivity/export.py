"""Conversion from folder to folder. Tensor names and values do not change, so weights
are never loaded; tokenizer, processor, generation defaults and licence are carried
over."""

import contextlib
import filecmp
import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from transformers.dynamic_module_utils import get_relative_imports

from fcsd.base.artifact import check_checkpoint, command_record
from fcsd.base.errors import UserError
from fcsd.base.files import read_checkpoint_json, read_json
from fcsd.base.weights import CONFIG_ONLY
from fcsd.base.writing import beside, new_folder, write_json, writing
from fcsd.model.connectivity.aliases import to_instella
from fcsd.model.connectivity.checkpoint import (
    CONFIG,
    Checkpoint,
    check_carried,
    check_file,
    check_weights_path,
    find_folder,
    read_checkpoint,
    read_without_weights,
)
from fcsd.model.connectivity.load import (
    build_on_meta,
    check_tensors,
    config_and_class,
    misread_here,
)
from fcsd.model.connectivity.modeling import MODELING_FILE, auto_map, modeling_source
from fcsd.model.connectivity.selection import selection_text
from fcsd.model.connectivity.spec import (
    Connectivity,
    changed_by,
    field_text,
    is_converted,
    outdated_layers,
)
from fcsd.model.families import PREFIX, Family, moe_mask, text_config

# no path in it leads out of the folder
_CLASS = re.compile(r"([\w.-]+/[\w.-]+--)?\w+(\.\w+)+")
_CODE = ("tokenizer_config.json", "processor_config.json", "preprocessor_config.json")


def convert_checkpoint(
    source: str | Path,
    destination: str | Path,
    connectivity: Connectivity | None = None,
    *,
    revision: str | None = None,
    config_only: bool = False,
    alone: bool = False,
) -> list[int]:
    """Write a FarSkip checkpoint with the weights of `source`, which may be a base or a
    FarSkip checkpoint.

    The weight files are hard-linked, with the source's permissions, or copied where the
    file system cannot link; the config is rewritten, `modeling_farskip.py` is added.
    The folder is written under a temporary name beside `destination` and renamed at the
    end. No values are read, so that one that is NaN is seen by the first stage
    (`check_finite`), not here.

    The result loads without fcsd with `trust_remote_code=True`, and is refused with
    False. Its tokenizer, whose files are those of `source`, is the base's with
    `trust_remote_code=True` or with fcsd (`load_tokenizer`); with False it is of the
    class that its file names. So is the processor. Without the argument, transformers
    asks on a terminal whether to run the code, and continues without it after 15
    seconds.

    Args:
        connectivity: None: as the source's keys of another project say (AMD's
            Instella); without such keys, all layers.
        config_only: `source` needs no weights, and none are written or fetched: for a
            server with dummy weights, which is timed. All else is the same; the
            `manifest.json` says that there are none.
        alone: no stage's folder is around `destination`. A `manifest.json` beside the
            weights says where they come from (`fcsd push` cannot see it from them), and
            a line on stderr how to keep first layers regular. A folder that this very
            conversion has left is found, not refused.

    Returns:
        The indices of the rewired layers.

    Raises:
        UserError: as `load_model`; `destination` exists and is not an empty folder, or
            cannot be written; `source` is already converted with this connectivity.
    """
    known = _checked(source, destination, revision, not config_only)
    checkpoint, family = known.checkpoint, known.family
    mask = moe_mask(known.config, family)
    current = checkpoint.connectivity
    if connectivity is None:
        # A checkpoint in another project's keys keeps the connectivity that they describe.
        connectivity = Connectivity()
        if checkpoint.foreign and current is not None:
            connectivity = current
    try:
        field = connectivity.new_field(mask, family.layout)
    except UserError as error:
        raise UserError(f"{source}: {error}") from None
    if current is not None and not checkpoint.foreign and current.field(mask) == field:
        raise UserError(
            f"{source}: is already converted with this connectivity (layers"
            f" {field['layers']})"
        )
    misread = misread_here(checkpoint)
    tell_changed(checkpoint, source)
    config = checkpoint.config | {
        "model_type": PREFIX + family.model_type,
        "architectures": [f"FarSkip{family.causal_lm}"],
        "farskip": field,
        "auto_map": auto_map(family),
    }
    record = None
    if alone or config_only:
        record = command_record(
            "convert",
            settings={"model": {"path": str(source), "revision": revision}},
            results={"layers": field["layers"]},
            **({CONFIG_ONLY: True} if config_only else {}),
        )
        if _is_recorded(Path(destination), record):
            # Without the weights, which may be large: they are compared where they are.
            with writing(Path(destination)), beside(Path(destination)) as folder:
                write_code(checkpoint.folder, family, folder)
                _write_beside_weights(source, checkpoint, folder, config)
                if _same_files(Path(destination), folder, checkpoint):
                    print(
                        f"convert: finished before, in {destination}", file=sys.stderr
                    )
                    return field["layers"]
    with new_folder(Path(destination), replaces=False) as folder:
        write_code(checkpoint.folder, family, folder)
        _write(source, checkpoint, folder, config)
        if record is not None:
            write_json(folder / "manifest.json", record)
    if misread is not None:
        print(
            f"{source}: {misread}; the same is true of {destination}", file=sys.stderr
        )
    if alone and not config_only:  # without weights, it is timed and never scored
        tell_first_layers(connectivity, mask, family, source)
        tell_drafts(known, field["layers"])
    return field["layers"]


def tell_first_layers(
    connectivity: Connectivity, mask: Sequence[bool], family: Family, model: Any
) -> None:
    """Warn in one line that layer 0 is about to be rewired, and say how to measure
    which layers to leave as they are and how to leave layer 0 out.

    Nothing is printed where layer 0 is not selected, is selected alone, or computes the
    same as a regular layer. model: the model argument for the suggested `fcsd layers`
    command.
    """
    field = connectivity.field(mask)
    layers = field["layers"]
    later_layers = [layer for layer in layers if layer]
    # With a regular MLP input, in a parallel layout or in one of blocks, layer 0 has
    # nothing before it that its inputs could miss: rewiring it changes nothing.
    regular = 0 not in outdated_layers(field) or family.layout in ("parallel", "blocks")
    if regular or len(later_layers) in (0, len(layers)):
        return
    print(
        "in the models that we measured, layer 0 costs the most. To find how many first"
        f" layers to keep regular, run `fcsd layers {shlex.quote(str(model))}`;"
        f" the selection {selection_text(later_layers, len(mask))} leaves out layer 0"
        " (docs/convert.md)",
        file=sys.stderr,
    )


def tell_changed(checkpoint: Checkpoint, source: Any) -> None:
    """Say in one line that weights which were calibrated or trained for one connectivity
    get another; nothing where they are the original's.
    """
    change = changed_by(checkpoint.config)
    if change and is_converted(checkpoint.config):
        print(
            f"{source}: its weights were {change} for its own connectivity"
            f" ({field_text(checkpoint.config['farskip'])}); with another one they give"
            " neither this model nor the original",
            file=sys.stderr,
        )


def tell_drafts(known: "_Checked", rewired: Sequence[int]) -> None:
    """Say in one line what becomes of the drafts of a checkpoint's layers for
    multi-token prediction; nothing where it has none, or no layer is rewired.
    """
    from fcsd.model.connectivity.extra_tensors import has_mtp, mtp_tensors

    extra, family = known.extra, known.family
    if not rewired or not has_mtp(extra, known.config):
        return
    config = text_config(known.config, family)
    way_out = "until `fcsd mtp` trains them"
    try:
        mtp_tensors(extra, config, "")
    except UserError:
        way_out = f"and `fcsd mtp` cannot train those of {family.model_type}"
    print(
        "the layers for multi-token prediction (MTP) were trained on the original's"
        " hidden states: a server will accept fewer of their drafts,"
        f" {way_out} (docs/convert.md)",
        file=sys.stderr,
    )


def unconvert_checkpoint(
    source: str | Path, destination: str | Path, *, revision: str | None = None
) -> None:
    """Write the base family's checkpoint with the weights of a FarSkip checkpoint:
    regular connectivity, and no code except classes that transformers lacks
    (`Family.like`).

    Raises:
        UserError: as `convert_checkpoint`; `source` is not a FarSkip checkpoint.
    """
    known = _checked(source, destination, revision)
    checkpoint, family = known.checkpoint, known.family
    if checkpoint.connectivity is None:
        raise UserError(
            f"{source}: is not a FarSkip checkpoint (model_type '{family.model_type}'),"
            " so there is nothing to undo"
        )
    tell_changed(checkpoint, source)
    config = checkpoint.config | {
        "model_type": family.model_type,
        "architectures": [family.causal_lm],
    }
    # The code named by these two is not written beside a regular checkpoint. A family
    # that transformers lacks brings the code of its regular classes.
    del config["farskip"]
    config.pop("auto_map", None)
    if family.like:
        config["auto_map"] = auto_map(family, farskip=False)
    with new_folder(Path(destination), replaces=False) as folder:
        if family.like:
            write_code(checkpoint.folder, family, folder)
        _write(source, checkpoint, folder, config)


def export_checkpoint(
    source: str | Path, destination: str | Path, *, revision: str | None = None
) -> None:
    """Write a checkpoint with AMD's keys for FarSkip, which AMD's own code reads: same
    weights, same names.

    transformers without that code loads the result as a regular model, without a word,
    as it does AMD's own.

    Raises:
        UserError: as in `convert_checkpoint`; a connectivity that the keys cannot
        express (`to_instella`).
    """
    known = _checked(source, destination, revision)
    checkpoint = known.checkpoint
    connectivity = checkpoint.connectivity or Connectivity("none")
    mask = moe_mask(known.config, known.family)
    config = to_instella(checkpoint.config, connectivity.field(mask), mask, str(source))
    # `to_instella` promises no MTP layers; here their tensors are in the weight files.
    if known.extra:
        from fcsd.model.connectivity.extra_tensors import promised_layers

        config["num_nextn_predict_layers"] = promised_layers(checkpoint.config)
    with new_folder(Path(destination), replaces=False) as folder:
        _write(source, checkpoint, folder, config)


class _Checked(NamedTuple):
    """A checkpoint with complete files, its family and its config object, and the names
    of tensors that no model loads.
    """

    checkpoint: Checkpoint
    family: Family
    config: Any
    extra: set[str]


def _checked(
    source: str | Path,
    destination: str | Path,
    revision: str | None,
    weights: bool = True,
) -> _Checked:
    """Check a checkpoint that is to be converted; weights that do not count are not."""
    check_weights_path(Path(destination))
    folder = find_folder(source, revision, weights=weights)
    if weights:
        check_checkpoint(folder)
        checkpoint = read_checkpoint(folder)
        config, cls = config_and_class(checkpoint)
        extra = check_tensors(checkpoint, config, cls)
    else:
        # Without tensors to compare, building the model checks the config.
        checkpoint, extra = read_without_weights(folder), set()
        config, cls = config_and_class(checkpoint)
        build_on_meta(checkpoint, config, cls)
    assert checkpoint.family is not None
    return _Checked(checkpoint, checkpoint.family, config, extra)


def _write(
    source: str | Path, checkpoint: Checkpoint, folder: Path, config: dict[str, Any]
) -> None:
    for name in checkpoint.weight_files:
        link_or_copy(checkpoint.folder / name, folder / name)
    _write_beside_weights(source, checkpoint, folder, config)


def _write_beside_weights(
    source: str | Path, checkpoint: Checkpoint, folder: Path, config: dict[str, Any]
) -> None:
    if checkpoint.index is not None:
        shutil.copyfile(checkpoint.folder / checkpoint.index, folder / checkpoint.index)
    carry_over(checkpoint.folder, folder, source)
    (folder / CONFIG).write_text(
        json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8"
    )


def _is_recorded(destination: Path, record: dict[str, Any]) -> bool:
    """Return whether the manifest in a folder says the same as a record, but for the
    versions of packages.
    """
    found: Any = None
    with contextlib.suppress(UserError, OSError):  # not a record of fcsd
        found = read_json(destination / "manifest.json", keys=())
    return isinstance(found, dict) and {**found, "versions": None} == {
        **record,
        "versions": None,
    }


def _same_files(destination: Path, folder: Path, checkpoint: Checkpoint) -> bool:
    """Return whether a folder holds the files of another one and the weights of a
    checkpoint, byte for byte.
    """
    files = [file for file in folder.rglob("*") if file.is_file()]
    pairs = [(file, destination / file.relative_to(folder)) for file in files]
    pairs += [
        (checkpoint.folder / name, destination / name)
        for name in checkpoint.weight_files
    ]
    return all(
        copy.is_file()
        and (copy.samefile(file) or filecmp.cmp(file, copy, shallow=False))
        for file, copy in pairs
    )


def write_code(source: Path, family: Family, folder: Path) -> None:
    """Write the code of a checkpoint of `source` into `folder`; a line on stderr says
    where its own is another.

    Code that is published is never taken from a file that somebody may have changed.
    """
    text, file = modeling_source(family), source / MODELING_FILE
    check_file(file, source)
    if file.is_file() and file.read_bytes() != text.encode():
        print(
            f"{file}: is not what this fcsd writes for {family.model_type} (it was"
            " changed, or written by another fcsd); fcsd replaces it",
            file=sys.stderr,
        )
    (folder / MODELING_FILE).write_text(text, encoding="utf-8")


def link_or_copy(source: Path, destination: Path) -> None:
    """Make a hard link to the file's bytes, or a copy where the file system cannot.

    Links are safe here because safetensors and `save_pretrained` replace weight files
    and do not write into them.
    """
    try:
        os.link(source.resolve(), destination)
    except OSError:
        shutil.copyfile(source, destination)


def carry_over(source: Path, folder: Path, name: str | Path | None = None) -> None:
    """Copy a checkpoint's files other than config and weights, so that tokenizer and
    processor load in `folder`.

    Their files stay as they are: `modeling_farskip.py` enters the model type in
    transformers' tables of both. Only code that they name and that does not lie beside
    them is then named in its repository, if the checkpoint's `name` is that of one.
    """
    is_on_hub = name is not None and not Path(os.path.expanduser(name)).is_dir()
    repository = str(name) if is_on_hub else None
    for file in check_carried(source):
        target = folder / file.relative_to(source)
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, target)
    for code in _CODE:
        if (source / code).is_file():
            _keep_code(source, folder, code, repository)


def code_files(folder: Path, module: str) -> list[Path]:
    """Return a code module of a tokenizer or processor, and the modules beside it that
    it imports.

    Raises:
        UserError: as `check_file`; one is missing, or called like the file that fcsd
            writes.
    """
    files: list[Path] = []
    waiting = [folder / module]
    while waiting:
        file = waiting.pop(0)
        if file in files:
            continue
        # `get_relative_imports` below opens the file, so what it is comes first.
        check_file(file, folder)
        if file.name == MODELING_FILE:
            raise UserError(
                f"{file}: fcsd writes the connectivity's code under this name; give the"
                " code of a tokenizer or processor another name"
            )
        if not file.is_file():
            raise UserError(
                f"{file}: no such file, which the code of {folder / module} needs;"
                " fetch it again"
            )
        files.append(file)
        for name in get_relative_imports(file):
            # `from ..x import y` gives the name `.x`, which would lead out of the
            # folder.
            if not re.fullmatch(r"\w+", name):
                raise UserError(
                    f"{file}: imports .{name}, but fcsd copies only files in the same"
                    " folder"
                )
            waiting.append(folder / f"{name}.py")
    return files


def _keep_code(source: Path, folder: Path, file: str, repository: str | None) -> None:
    """Keep the code that a tokenizer or processor brings with it: `module.Class` in its
    auto_map.
    """
    values = read_checkpoint_json(source / file)
    auto_map: dict[str, Any] = values.get("auto_map") or {}
    if isinstance(auto_map, list):  # an old form, which names the tokenizer only
        auto_map = {"AutoTokenizer": auto_map}
    changed = False
    # Anything else is refused below, where it has no Auto class.
    items = auto_map.items() if isinstance(auto_map, dict) else [("", auto_map)]
    for auto, classes in items:
        names = classes if isinstance(classes, list) else [classes]
        if not auto or not all(
            name is None or (isinstance(name, str) and _CLASS.fullmatch(name))
            for name in names
        ):
            raise UserError(
                f"{source / file}: auto_map: Auto class to module.Class is needed, got"
                f" {str(classes)[:80]!r}; fetch the file again"
            )
        for index, name in enumerate(names):
            if not name or "--" in name:
                continue
            module = f"{name.split('.')[0]}.py"
            if os.path.lexists(source / module):
                for code_file in code_files(source, module):
                    shutil.copyfile(code_file, folder / code_file.name)
            elif repository is not None:
                names[index], changed = f"{repository}--{name}", True
        auto_map[auto] = names if isinstance(classes, list) else names[0]
    if changed:
        write_json(folder / file, values | {"auto_map": auto_map})
