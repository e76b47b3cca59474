"""Find the config of a folder or Hub repository, and the sizes of its weight files if
there are any.
"""

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fcsd.base.errors import UserError, one_line
from fcsd.base.files import decoded_floats, read_checkpoint_json
from fcsd.base.strict import did_you_mean
from fcsd.base.weights import (
    INDEX,
    NAMED,
    WEIGHTS,
    find_weights,
    is_config_only,
    stale_index,
)
from fcsd.model.connectivity.aliases import INSTELLA_KEYS, in_our_names
from fcsd.model.connectivity.checkpoint import (
    CONFIG,
    check_carried,
    check_model_types,
    files_like,
    first_line,
    local_folder,
    pickle_advice,
)
from fcsd.model.families import FAMILIES, check_sizes, null_sizes, refused_config
from fcsd.model.inspect.memory import BYTES
from fcsd.model.inspect.shipped import shipped_config, shipped_ids, shipped_models
from fcsd.model.preserve import without_advice
from fcsd.model.quantised.methods import (
    MODELOPT,
    Quantisation,
    modelopt_quantisation,
    said_quantisation,
)


@dataclass(frozen=True)
class Source:
    """The facts in a checkpoint's small files."""

    config: dict[str, Any]
    where: str
    """Name of the config in errors."""
    file_sizes_bytes: dict[str, int]
    """Weight file -> size; empty if there are none, or if the Hub does not say."""
    missing_files: tuple[str, ...]
    """Weight files that the index names but that do not exist."""
    stale_index: str = ""
    """A sentence about an index that is passed over."""
    quantisation: Quantisation | None = None
    """According to the config, or to ModelOpt's file beside it."""
    folder: Path | None = None
    """Folder of the weights, for a local checkpoint with complete weights."""
    config_only: bool = False
    """The checkpoint was written by `fcsd convert --config-only`."""
    shipped: bool = False
    """The config is the one that ships with fcsd: the Hub did not give it."""
    pickle_advice: str = ""
    """What to do with weights that only pickles hold."""

    @property
    def own_config(self) -> dict[str, Any]:
        """The config with connectivity and family in fcsd's names; raises UserError as
        `in_our_names`.
        """
        return in_our_names(self.config, self.where)


def find_source(path: str | Path, revision: str | None = None) -> Source:
    """Read the config of a local folder, or fetch config and index, but no weights, of a
    Hub repository `owner/name`.

    Where the Hub does not give the config of a model in
    `fcsd/model/inspect/configs`, it is read there.

    Raises:
        UserError: there is no such folder and no such repository, the config is missing
            or damaged, or a revision is given for a local folder.
    """
    if (folder := local_folder(path, revision, CONFIG)) is not None:
        return _local(folder)
    return _remote(str(path), revision)


def _local(folder: Path) -> Source:
    files_like(folder, (CONFIG, "*.safetensors", "*.safetensors.index.json"))
    check_carried(folder)
    config = _config(folder / CONFIG, str(folder / CONFIG))
    weights = find_weights(folder, config)
    names = () if weights is None else weights.names
    sizes = {
        name: (folder / name).stat().st_size
        for name in names
        if (folder / name).is_file()
    }
    missing = tuple(name for name in names if name not in sizes)
    stale = stale_index(folder, weights.passed_over) if weights is not None else ""
    # Headers can be read only where all files are.
    complete = folder if sizes and not missing else None
    quantisation = said_quantisation(config, folder)
    return Source(
        config,
        str(folder / CONFIG),
        sizes,
        missing,
        stale,
        quantisation,
        complete,
        is_config_only(folder),
        pickle_advice="" if names else pickle_advice(os.listdir(folder)),
    )


def _config(file: Path, where: str) -> dict[str, Any]:
    config = read_checkpoint_json(file)
    check_model_types(config, where)
    return config


def _remote(name: str, revision: str | None) -> Source:
    from huggingface_hub import HfApi

    shipped = shipped_config(name) if revision is None else None
    try:
        file = _fetched(name, revision, once=shipped is not None)
    # Network, authorisation, offline mode: the Hub's own message tells the user.
    except Exception as error:
        if shipped is not None:
            config = read_checkpoint_json(shipped)
            where = f"{name}: {CONFIG} as shipped with fcsd"
            quantisation = said_quantisation(config)
            return Source(
                config, where, {}, (), quantisation=quantisation, shipped=True
            )
        ids = [
            repository
            for model in shipped_models().values()
            for repository in model["ids"]
        ]
        near = did_you_mean(name, ids)
        guess = near.removeprefix("; ") + " There is " if near.endswith("?") else ""
        raise UserError(
            f"{name}: {guess}no such folder, and the Hub did not give {CONFIG} of a repository"
            f" of this name: {first_line(error).rstrip('.')}; without the Hub, fcsd knows the configs of"
            f" {', '.join(shipped_ids())}"
        ) from None
    try:
        files = (
            HfApi().model_info(name, revision=revision, files_metadata=True).siblings
            or []
        )
    # The sizes are optional: offline, a cached config is enough.
    except Exception:
        files = []
    config = _config(file, f"{name}: {CONFIG}")
    sizes = {file.rfilename: file.size for file in files if file.size is not None}
    quantisation = said_quantisation(config)
    if quantisation is None and any(file.rfilename == MODELOPT for file in files):
        with suppress(Exception):  # optional, like the sizes
            quantisation = modelopt_quantisation(_read_remote(name, MODELOPT, revision))
    loaded = _loaded(name, revision, sizes, config)
    return Source(
        config,
        f"{name}: {CONFIG}",
        loaded,
        (),
        quantisation=quantisation,
        pickle_advice="" if loaded else pickle_advice(file.rfilename for file in files),
    )


def _fetched(name: str, revision: str | None, *, once: bool) -> Path:
    """Return the config of a repository, from the Hub or its cache. once: ask a Hub
    that does not answer once, instead of for half a minute.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url

    cached = False
    if once:
        try:
            get_hf_file_metadata(hf_hub_url(name, CONFIG))
        # Whatever keeps the Hub from answering, the cache may still have the config; if
        # not, the caller takes the one that ships with fcsd.
        except Exception:
            cached = True
    return Path(
        hf_hub_download(name, CONFIG, revision=revision, local_files_only=cached)
    )


def _read_remote(name: str, file: str, revision: str | None) -> dict[str, Any]:
    from huggingface_hub import hf_hub_download

    return read_checkpoint_json(Path(hf_hub_download(name, file, revision=revision)))


def _loaded(
    name: str, revision: str | None, sizes: Mapping[str, int], config: Mapping[str, Any]
) -> dict[str, int]:
    """Return the sizes of the weight files that transformers loads from a repository, in
    order.

    If there is no index, or it cannot be fetched, all safetensors files outside folders
    count.
    """
    # The order of precedence: a file that the config names, a single file, the index.
    first = str(config.get(NAMED) or (WEIGHTS if WEIGHTS in sizes else INDEX))
    names = {first}
    if first not in sizes or not first.endswith(".safetensors"):
        names = {
            file for file in sizes if file.endswith(".safetensors") and "/" not in file
        }
    if first in sizes and first.endswith(".json"):
        with suppress(Exception):  # the sizes are optional
            index = _read_remote(name, first, revision)
            names = {str(file) for file in index["weight_map"].values()}
    return {file: sizes[file] for file in sorted(names) if file in sizes}


def config_object(
    config_class: Any, raw: Mapping[str, Any], model_type: str, where: str
) -> Any:
    """Build transformers' config of the unconverted model from a `config.json`; errors
    name `where`. Sizes of a known family are checked (`check_sizes`).
    """
    # The base family's class does not know the keys of a conversion.
    added_keys = ("farskip", "auto_map", *INSTELLA_KEYS)
    values = {key: value for key, value in raw.items() if key not in added_keys} | {
        "model_type": model_type
    }
    try:
        with without_advice():
            config = config_class.from_dict(decoded_floats(values))
    # transformers' strict configs raise many kinds of errors for a wrong field.
    except Exception as error:
        raise refused_config(raw, error, where) from None
    if model_type in FAMILIES:
        check_sizes(config, where)
    return config


def build_regular(build: Callable[[Any], Any], config: Any, where: str) -> Any:
    """Build the model of a config object; raises UserError, which names `where`, if
    transformers cannot.
    """
    try:
        with without_advice():
            return build(config)
    # Code of every family, with values that no check knows.
    except Exception as error:
        raise UserError(
            f"{where}: transformers cannot build it{null_sizes(config)}:"
            f" {one_line(error)}"
        ) from None


def checkpoint_dtype(config: Mapping[str, Any]) -> str:
    """Return the dtype that a checkpoint's config names; bfloat16 if it names none of
    `BYTES`.
    """
    inner = config.get("text_config")
    for section in (config, inner if isinstance(inner, Mapping) else {}):
        if (dtype := section.get("dtype") or section.get("torch_dtype")) in BYTES:
            return str(dtype)
    return "bfloat16"
