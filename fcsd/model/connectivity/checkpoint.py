"""Reading a checkpoint folder without loading it: config, family, and every tensor's
shape from the file headers.
"""

import copy
import fnmatch
import functools
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fcsd.base.errors import UserError, one_line
from fcsd.base.files import (
    TOKENIZER_FILES,
    check_fetched,
    check_regular,
    decoded_floats,
    file_state,
    read_checkpoint_json,
    read_text,
    read_unmarked_json,
    safetensors_header,
)
from fcsd.base.weights import (
    CONFIG,
    INDEX,
    WEIGHTS,
    Stored,
    WeightFiles,
    check_contents,
    find_weights,
    is_config_only,
    stale_index,
    without_weights,
)
from fcsd.base.writing import is_empty
from fcsd.model.connectivity.aliases import in_our_names
from fcsd.model.connectivity.spec import Connectivity
from fcsd.model.families import (
    FAMILIES,
    PREFIX,
    UNAVAILABLE,
    Family,
    base_model_type,
    family_of,
)
from fcsd.model.families.refused import REFUSED
from fcsd.model.preserve import without_advice
from fcsd.model.quantised.methods import (
    Quantisation,
    said_quantisation,
    without_quantisation,
)
from fcsd.model.quantised.tensors import is_left_over

GENERATION = "generation_config.json"
CARRIED = (*TOKENIZER_FILES, GENERATION, "LICENSE*")
"""Patterns of what a checkpoint has beside config and weights. No pickles, and no code
except what a tokenizer or processor names as its own."""
_READ = (*CARRIED, CONFIG, "*.safetensors", "*.safetensors.index.json", "README.md")
_FETCHED = (
    *CARRIED, "*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken", "*.py", "README.md", WEIGHTS,
)  # fmt: skip
"""What is fetched from the Hub before the weight files that an index names. Code is
stored, and run only where `trust_remote_code` allows it."""
_FETCH_OR_REMOVE = "fetch it again, or remove it"
_NOT_FETCHED = ("original/*",)  # the same model in its authors' own format

Shapes = dict[str, tuple[int, ...]]  # of tensors by their names


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder with complete files; `read_without_weights` leaves out weight
    files, shapes and dtypes.
    """

    folder: Path
    config: dict[str, Any]
    family: Family | None
    """None only when the caller allowed unknown families."""
    connectivity: Connectivity | None
    """What a FarSkip checkpoint is converted with; None for a base checkpoint."""
    foreign: bool
    """The file calls connectivity or family otherwise; `config` has them in our keys and names."""
    weight_files: tuple[str, ...]
    """Names of the safetensors files that transformers loads, without the index."""
    index: str | None
    """Name of the index of these files; None where there is a single one."""
    shapes: Shapes
    dtypes: dict[str, str]
    """Dtypes of the tensors in the words of safetensors: "BF16", "F32", …"""
    quantisation: Quantisation | None = None
    """How its tensors are quantised; None for plain ones, whose `config` then says
    nothing of it, whatever the file.
    """
    leftover: bool = False
    """The file says that plain tensors are quantised."""


def find_folder(
    path: str | Path, revision: str | None = None, *, weights: bool = True
) -> Path:
    """Return the local folder of a checkpoint: `path` itself, or the snapshot of a Hub
    repository `owner/name`.

    weights: False fetches none from the Hub.

    Raises:
        UserError: no such folder and not found on the Hub, a file instead of a folder,
            a revision for a local folder, or the state of a training.
    """
    contents = f"{CONFIG} and {WEIGHTS}" if weights else CONFIG
    if (folder := local_folder(path, revision, contents)) is not None:
        return folder
    try:
        return _fetch(str(path), revision, weights)
    except UserError:
        raise
    # network, authorisation, offline mode: each is the user's to solve
    except Exception as error:
        raise UserError(
            f"{path}: no such folder, and the Hub did not give a repository of this"
            f" name: {first_line(error)}"
        ) from None


def first_line(error: Exception) -> str:
    """Return the first line of an error of the Hub, whose messages run over many lines,
    or the name of its class; some have no message at all.
    """
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _fetch(name: str, revision: str | None, with_weights: bool) -> Path:
    """Fetch a Hub repository: small files, code, and of the weights those that
    transformers loads, or none.
    """
    from huggingface_hub import snapshot_download

    # Config and index come first, because they say which weight files transformers
    # loads: a repository may hold the same weights in a second form, which need not be
    # fetched.
    ignored = [*_NOT_FETCHED, *(() if with_weights else ("*.safetensors",))]
    folder = Path(
        snapshot_download(
            name,
            revision=revision,
            allow_patterns=list(_FETCHED),
            ignore_patterns=ignored,
        )
    )
    if not with_weights:
        return folder
    config = {}
    if (folder / CONFIG).is_file():
        config = read_checkpoint_json(folder / CONFIG)
    weights = find_weights(folder, config)
    names = weights.names if weights else ()
    if missing := [file for file in names if not (folder / file).is_file()]:
        # The commit of the files that are here, and not the branch, which may have
        # moved between the two requests.
        commit = folder.name if folder.parent.name == "snapshots" else revision
        snapshot_download(name, revision=commit, allow_patterns=missing)
    return folder


def source_folder(config: Any) -> Path | None:
    """Return the folder that a model with this config was loaded from, where it is
    still on this machine.
    """
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    # transformers records what it loaded, and the commit if it came from the Hub. A
    # snapshot is only looked up: nothing is fetched for a model that is in memory
    # already.
    name = str(getattr(config, "_name_or_path", "") or "")
    if not name or (folder := Path(name)).is_dir():
        return folder if name and (folder / CONFIG).is_file() else None
    revision = getattr(config, "_commit_hash", None)
    try:
        file = try_to_load_from_cache(name, CONFIG, revision=revision)
    except HFValidationError:  # the path of a folder that is gone
        return None
    return Path(file).parent if isinstance(file, str) else None


def local_folder(path: str | Path, revision: str | None, contents: str) -> Path | None:
    """Return `path` where it is a folder; None where it can only be `owner/name` on the
    Hub.

    Raises:
        UserError: a file, a revision for a folder, or neither a folder nor a name;
            `contents` describes a checkpoint's folder in the message.
    """
    checkpoint = f"a checkpoint is a folder with {contents}"
    if path == "":
        raise UserError(f"'': is not a path; {checkpoint}, or owner/name on the Hub")
    folder = Path(os.path.expanduser(path))
    try:
        # Both raise for a name that is too long and in a folder that may not be
        # searched.
        is_folder, exists = folder.is_dir(), folder.exists()
    except OSError as error:
        raise UserError(f"{path}: cannot be a folder: {error.strerror}") from None
    if is_folder and revision is None:
        check_contents(folder)
        if os.access(folder, os.R_OK) and is_empty(folder):
            raise UserError(f"{path}: is an empty folder; {checkpoint}")
        return folder
    if is_folder:
        raise UserError(
            f"{path}: revision '{revision}' applies to a Hub repository, but this is a"
            " local folder"
        )
    if exists:
        raise UserError(f"{path}: is a file; {checkpoint}")
    if folder.is_symlink():
        raise UserError(
            f"{path}: is a link to {os.readlink(folder)}, which is no folder;"
            f" {checkpoint}"
        )
    # Only text can mean a repository on the Hub; whoever passes a Path means a folder.
    if isinstance(path, Path) or not re.fullmatch(
        r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", str(path)
    ):
        raise UserError(
            f"{path}: no such folder; {checkpoint}, or owner/name on the Hub"
        )
    return None


def has_tokenizer(folder: Path) -> bool:
    """Tell whether a tokenizer lies in a folder."""
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
    return any((folder / name).is_file() for name in names)


def files_like(folder: Path, patterns: Sequence[str]) -> list[Path]:
    """Return the files of a checkpoint that have these names, sorted; raises UserError
    as `check_file`.
    """
    subfolders = {pattern.rpartition("/")[0] for pattern in patterns}
    files: list[Path] = []
    for subfolder in sorted(name for name in subfolders if (folder / name).is_dir()):
        try:
            # not `glob`, which passes over links to nothing
            names = sorted(os.listdir(folder / subfolder))
        except OSError as error:
            raise UserError(
                f"{folder / subfolder}: cannot be read ({error.strerror})"
            ) from None
        entries = [Path(subfolder, name) for name in names]
        files += [
            folder / entry
            for entry in entries
            if any(
                fnmatch.fnmatchcase(entry.as_posix(), pattern) for pattern in patterns
            )
        ]
    for file in files:
        _check_link(file, folder)
        if file.suffix and file.is_dir():
            raise UserError(
                f"{file}: is a folder, a file is needed; {_FETCH_OR_REMOVE}"
            )
    for file in files:
        check_regular(file, _FETCH_OR_REMOVE)
    return sorted(file for file in files if file.is_file())


def all_files(folder: Path) -> list[Path]:
    """Return all files of a checkpoint and of folders in it; raises UserError as `check_file`."""
    entries = sorted(folder.rglob("*"))
    for entry in entries:
        check_file(entry, folder)
    return [entry for entry in entries if entry.is_file()]


def check_file(file: Path, folder: Path) -> None:
    """Refuse a file of a checkpoint that is read or published elsewhere than it seems
    to be.

    A link may lead to another file in the folder, and from a snapshot of the Hub's
    cache to a blob of its repository (`snapshots/REVISION/NAME -> ../../blobs/HASH`).

    Raises:
        UserError: it is a link to a file outside `folder` or to nothing, a pipe, a
            socket or a device.
    """
    _check_link(file, folder)
    check_regular(file, _FETCH_OR_REMOVE)


def _check_link(file: Path, folder: Path) -> None:
    """Refuse a link to nothing, or to a file that is none of its checkpoint's."""
    # Links above the folder are resolved on both sides: only those inside it count.
    root, target = Path(os.path.realpath(folder)), Path(os.path.realpath(file))
    is_snapshot = root.parent.name == "snapshots"
    is_blob = is_snapshot and target.parent == root.parent.parent / "blobs"
    if not (is_blob or target.is_relative_to(root)):
        raise UserError(
            f"{file}: is a link to {target}, which is not a file of this checkpoint;"
            " replace the link by a copy, or remove it"
        )
    # A link to itself leads nowhere, too.
    if os.path.lexists(file) and not target.exists():
        raise UserError(
            f"{file}: is a link to {target}, which does not exist; fetch the file again"
        )


def read_config(folder: Path, any_family: bool = False) -> Checkpoint:
    """Return the facts about a checkpoint in its folder's config.

    A connectivity in another project's keys (`fcsd.model.connectivity.aliases`) is
    rewritten in ours, and so is the model type where it is an alias.

    Raises:
        UserError: no or damaged config; unsupported or dense family (allowed with
            `any_family`); a FarSkip model type without `farskip` field, or the other
            way round.
    """
    # Before anything is opened: a link or a pipe is refused wherever it would be read.
    files_like(folder, _READ)
    written = config = read_checkpoint_json(folder / CONFIG)
    where = str(folder / CONFIG)
    check_model_types(config, where)
    if not str(config.get("model_type")).startswith(PREFIX):
        config = in_our_names(config, where)
    model_type = config.get("model_type") or ""
    is_farskip = model_type.startswith(PREFIX)
    if is_farskip != ("farskip" in config):
        raise UserError(
            f"{where}: model_type '{model_type}' contradicts the field farskip, which"
            f" is {'present' if 'farskip' in config else 'absent'}; convert the"
            " original checkpoint again with `fcsd convert`"
        )
    family = connectivity = None
    if not any_family or base_model_type(model_type) in {*FAMILIES, *UNAVAILABLE}:
        try:
            family = family_of(config)
        except UserError as error:
            hint = ""
            named = {*FAMILIES, *UNAVAILABLE, *REFUSED}
            if "auto_map" in config and base_model_type(model_type) not in named:
                hint = (
                    "; the checkpoint has its own code: trust_remote_code=True (in a"
                    " recipe: model.trust_remote_code: true) loads it, but fcsd cannot"
                    " convert it"
                )
            raise UserError(f"{folder}: {error}{hint}") from None
        if is_farskip:
            connectivity = Connectivity.from_field(config["farskip"], where)
    foreign = family is not None and config is not written
    return Checkpoint(folder, config, family, connectivity, foreign, (), None, {}, {})


def check_tokens(checkpoint: Checkpoint) -> None:
    """Raise UserError where the settings of generation are damaged."""
    check_generation(checkpoint.folder)
    # Without that file, transformers takes the end tokens from here.
    _check_types(checkpoint.config, checkpoint.folder / CONFIG, _TOKENS)


def check_model_types(config: Mapping[str, Any], where: str) -> None:
    """Raise UserError where a config or a section of it has a `model_type` that is not
    text, or where the section of the text model is none."""
    if not isinstance(text := config.get("text_config"), dict | None):
        raise UserError(
            f"{where}: text_config must be an object, got {str(text)[:80]}; fetch the"
            " config again"
        )
    # transformers builds a section (`text_config`) as its own type says.
    sections = [
        ("", config),
        *(
            (f"{name}.", value)
            for name, value in config.items()
            if isinstance(value, dict)
        ),
    ]
    for section, values in sections:
        if not isinstance(name := values.get("model_type"), str | None):
            raise UserError(
                f"{where}: {section}model_type must be a text such as 'qwen3_moe', got"
                f" {str(name)[:80]}; fetch the config again"
            )


_KNOWN: dict[Path, tuple[Any, Checkpoint]] = {}


def read_checkpoint(folder: Path, any_family: bool = False) -> Checkpoint:
    """Check a checkpoint folder and read its tensor shapes from the safetensors
    headers, once in a process unless one of its files changes.

    Raises:
        UserError: as `read_config` and `find_weights`, and: weights missing or not
            safetensors, a file that is truncated or damaged, a tensor that is not where
            the index says, or is in two shards.
    """
    key, state = folder.absolute(), _state(folder)
    known_state, checkpoint = _KNOWN.get(key, (None, None))
    # What is known of an unknown family was read for a caller who allows it.
    is_known = checkpoint is not None and (any_family or checkpoint.family is not None)
    if checkpoint is None or not is_known or state is None or state != known_state:
        checkpoint = _read_checkpoint(folder, any_family)
        _KNOWN[key] = state, checkpoint
    # Callers may change a config.
    config = copy.deepcopy(checkpoint.config)
    return replace(checkpoint, folder=folder, config=config)


def _state(folder: Path) -> Any:
    """Return the names and states of a folder's files and links, of which a checkpoint
    is made; None where it cannot be read.
    """
    try:
        with os.scandir(folder) as entries:
            files = [
                (entry.name, entry.stat(follow_symlinks=False), entry.stat())
                for entry in entries
            ]
    except OSError:
        return None
    return sorted(
        (name, *((s.st_ino, s.st_size, s.st_mtime_ns, s.st_mode) for s in states))
        for name, *states in files
    )


def _read_checkpoint(folder: Path, any_family: bool) -> Checkpoint:
    checkpoint = read_config(folder, any_family)
    check_tokens(checkpoint)
    weights = find_weights(folder, checkpoint.config)
    if weights is None:
        # The usual reasons for a folder without safetensors have separate messages:
        # none were written, or the weights are pickles, which can run code and are
        # never read.
        if is_config_only(folder):
            raise without_weights(folder)
        hint = pickle_advice(file.name for file in folder.iterdir())
        raise UserError(
            f"{folder}: no weights: neither {WEIGHTS} nor {INDEX} exists;"
            f" {hint or 'give a complete checkpoint'}"
        )
    weights.check_present(folder)
    if sentence := stale_index(folder, weights.passed_over):
        _tell_once(sentence)
    shapes: Shapes = {}
    dtypes: dict[str, str] = {}
    for name in weights.names:
        in_file = read_header(folder / name)
        _check_shard(folder / name, weights, in_file.keys(), shapes)
        shapes |= {key: tensor.shape for key, (tensor, _) in in_file.items()}
        dtypes |= {key: tensor.dtype for key, (tensor, _) in in_file.items()}
    return _with_quantisation(
        replace(
            checkpoint,
            weight_files=weights.names,
            index=weights.index,
            shapes=shapes,
            dtypes=dtypes,
        )
    )


# The Trainer's own state, which lies beside the weights.
_TRAINERS = ("training_args", "optimizer", "scheduler", "scaler", "rng_state")


def pickle_advice(names: Iterable[str]) -> str:
    """Return what to do with weights that only pickles hold, by the names of a
    checkpoint's files; "" where none is a pickle.
    """
    pickles = sorted(
        name
        for name in names
        if name.endswith((".bin", ".pt", ".pth")) and not name.startswith(_TRAINERS)
    )
    if not pickles:
        return ""
    return f"{pickles[0]} is a pickle, convert it to safetensors first"


def read_without_weights(folder: Path) -> Checkpoint:
    """Check the config of a checkpoint folder whose weights need not be there, or whole.

    Its quantisation fields count, unless weights in the folder show that they are left
    over.

    Raises:
        UserError: as `read_config`.
    """
    checkpoint = read_config(folder)
    check_tokens(checkpoint)
    try:
        weights = read_checkpoint(folder)
    except UserError:  # no weights, some of them, or Git LFS pointers
        quantisation = said_quantisation(checkpoint.config, folder)
        if quantisation is not None:
            _tell_once(
                f"{folder}: {quantisation.place} says {quantisation.words}; without"
                " weights fcsd cannot tell whether this is left over, and assumes that"
                " it applies: servers quantise dummy weights, too"
            )
        return replace(checkpoint, quantisation=quantisation)
    return replace(
        checkpoint,
        config=weights.config,
        quantisation=weights.quantisation,
        leftover=weights.leftover,
    )


def _with_quantisation(checkpoint: Checkpoint) -> Checkpoint:
    """Compare the files' quantisation fields with the tensors; left-over fields do not
    count.
    """
    quantisation = said_quantisation(checkpoint.config, checkpoint.folder)
    folder, plain = checkpoint.folder, without_quantisation(checkpoint.config)
    if quantisation is None:
        # An empty field says nothing, but transformers asks it for its method.
        return replace(checkpoint, config=plain, leftover=plain != checkpoint.config)
    if not is_left_over(quantisation, checkpoint.dtypes):
        return replace(checkpoint, quantisation=quantisation)
    # Whoever dequantises weights often leaves the fields; only the tensors can tell.
    dtypes = ", ".join(sorted(set(checkpoint.dtypes.values())))
    _tell_once(
        f"{folder}: {quantisation.place} says {quantisation.words}, but no tensor is"
        f" quantised ({dtypes}): it is left over, so fcsd ignores it"
    )
    return replace(checkpoint, config=plain, leftover=True)


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _are_tokens(value: Any) -> bool:
    return all(map(_is_token, value)) if isinstance(value, list) else _is_token(value)


_TOKENS = dict.fromkeys(
    ("eos_token_id", "pad_token_id", "bos_token_id"),
    (_are_tokens, "the number of a token, or a list of them"),
)
_SETTINGS = {
    **_TOKENS,
    **dict.fromkeys(
        (
            "max_length", "max_new_tokens", "min_length", "min_new_tokens", "num_beams", "temperature", "top_k",
            "top_p", "min_p", "repetition_penalty", "no_repeat_ngram_size",
        ),
        (lambda value: isinstance(value, int | float) and value is not True, "a number"),
    ),
    "do_sample": (lambda value: isinstance(value, bool), "true or false"),
}  # fmt: skip
"""Setting of a generation -> whether a value can be one, and what it must be."""


def check_generation(folder: Path) -> None:
    """Refuse a damaged file of generation settings: transformers (5.23) would take it
    for missing, and the model's own end tokens with it.

    Raises:
        UserError: it is there, and is no JSON object, a setting has another type, or
            transformers refuses it.
    """
    file = folder / GENERATION
    if not os.path.lexists(file):
        return
    state = file_state(file) if file.is_file() else None
    if state in _SOUND:
        return
    settings = decoded_floats(read_checkpoint_json(file))
    _check_types(settings, file, _SETTINGS)
    from transformers import GenerationConfig

    try:
        with without_advice():
            GenerationConfig.from_dict(settings)
    # A setting of any other type fails wherever it is used first.
    except Exception as error:
        raise UserError(
            f"{file}: transformers refuses its settings ({one_line(error)}); correct"
            " the file, or fetch it again"
        ) from None
    if state is not None:
        _SOUND.add(state)


def _check_types(
    settings: Mapping[str, Any],
    file: Path,
    types: Mapping[str, tuple[Callable[[Any], bool], str]],
) -> None:
    """Refuse a setting in a file that has another type than it must have."""
    for name, (fits, expected) in types.items():
        value = settings.get(name)
        if value is not None and not fits(value):
            raise UserError(
                f"{file}: {name} must be {expected}, got {value!r:.80}; fetch the file"
                " again"
            )


def check_carried(folder: Path) -> list[Path]:
    """Return the files of a checkpoint beside config and weights; refuse damaged ones,
    some of which transformers passes over.

    Raises:
        UserError: as `files_like` and `check_generation`; JSON without an object, a
            chat template that is empty or no text.
    """
    check_generation(folder)
    files = files_like(folder, CARRIED)
    for file in files:
        check_fetched(file)
        if file.suffix == ".json":
            # Vocabularies are large: each is parsed once in a process.
            if (state := file_state(file)) not in _SOUND:
                read_unmarked_json(file, "fetch the file again")
                _SOUND.add(state)
        elif file.suffix == ".jinja" and not read_text(file).strip():
            raise UserError(f"{file}: is empty; fetch the file again")
    return files


# States of JSON files beside config and weights, in which nothing was found wrong.
_SOUND: set[tuple[int, ...]] = set()


@functools.cache
def _tell_once(sentence: str) -> None:
    print(sentence, file=sys.stderr)


def _check_shard(
    file: Path, weights: WeightFiles, in_file: Collection[str], earlier: Collection[str]
) -> None:
    """Refuse a shard without a tensor that the index names there, or with one of an
    earlier shard.

    transformers loads everything in the shards, whatever the index says; of two tensors
    with one name it keeps the last.
    """
    named = weights.weight_map or {}
    absent = sorted(
        tensor
        for tensor, shard in named.items()
        if shard == file.name and tensor not in in_file
    )
    # Where the index names this later file, transformers and the index agree, and the
    # earlier tensor is merely unused.
    twice = [
        tensor
        for tensor in in_file
        if tensor in earlier and named.get(tensor) != file.name
    ]
    if absent:
        raise UserError(
            f"{file}: tensor '{absent[0]}' is not in this file, but {weights.index} says"
            " so; fetch both again"
        )
    if weights.weight_map is not None and twice:
        raise UserError(
            f"{file}: tensor '{twice[0]}' is in this file too, which transformers would"
            f" load, but {weights.index} names {named.get(twice[0]) or 'none'} for it;"
            " fetch the checkpoint again"
        )


def check_weights_path(path: Path) -> None:
    """Raise UserError for a path that is not UTF-8: safetensors writes and opens no such file."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise UserError(
            f"{str(path)!r}: safetensors requires UTF-8 paths; rename the folder"
        ) from None


def read_header(file: Path) -> dict[str, tuple[Stored, int]]:
    """Return the tensors of a safetensors file, each with where its bytes begin.

    Raises:
        UserError: it cannot be read, or safetensors itself finds that the offsets do
            not cover it to its last byte.
    """
    from safetensors import SafetensorError, safe_open

    check_weights_path(file)
    check_regular(file, "fetch it again")
    try:
        # safetensors does not tell a file that may not be opened from a damaged one.
        with file.open("rb"), safe_open(file, framework="pt"):
            pass
        header, data = safetensors_header(file)
    except OSError as error:
        reason = error.strerror or one_line(error)
        raise UserError(
            f"{file}: cannot be read: {reason}; check its permissions and the disk"
        ) from None
    except (SafetensorError, ValueError) as error:
        check_fetched(file)
        raise UserError(
            f"{file}: damaged or incomplete safetensors file ({file.stat().st_size}"
            f" bytes; {error}); fetch it again"
        ) from None
    tensors = {}
    for name, entry in header.items():
        # Offsets in a header count from its end.
        begin, end = entry["data_offsets"]
        stored = Stored(entry["dtype"], tuple(entry["shape"]), end - begin)
        tensors[name] = stored, data + begin
    return tensors
