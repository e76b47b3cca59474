"""Find the config of a folder or Hub repository, and the sizes of its weight files,
where there are any.
"""

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fcsd.base.errors import UserError, one_line
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
    check_model_types,
    files_like,
    local_folder,
    read_checkpoint_json,
)
from fcsd.model.inspect.memory import BYTES
from fcsd.model.quantised.methods import (
    MODELOPT,
    Quantisation,
    modelopt_quantisation,
    said_quantisation,
)

_SHIPPED = Path(__file__).with_name("configs")


@dataclass(frozen=True)
class Source:
    """The facts in a checkpoint's small files."""

    config: dict[str, Any]
    where: str
    """What an error about the config names."""
    file_sizes_bytes: dict[str, int]
    """Weight file -> size; empty where there are none, or where the Hub does not tell."""
    missing_files: tuple[str, ...]
    """Weight files that the index names and that are not there."""
    stale_index: str = ""
    """The sentence on an index that does not count."""
    quantisation: Quantisation | None = None
    """What config, or ModelOpt's file beside it, says."""
    folder: Path | None = None
    """Where the weights lie, of a local checkpoint that has any, and all."""
    config_only: bool = False
    """It was written by `fcsd convert --config-only`."""

    @property
    def own_config(self) -> dict[str, Any]:
        """The config with connectivity and family in our names; raises UserError as
        `in_our_names`.
        """
        return in_our_names(self.config, self.where)


def find_source(path: str | Path, revision: str | None = None) -> Source:
    """Read the config of a local folder, or fetch it and the index of a Hub repository
    `owner/name`, no weights.

    The configs of the shipped recipes' models are in `fcsd/model/inspect/configs`, for
    where the Hub cannot be reached.

    Raises:
        UserError: no such folder and not found on the Hub, no config, a damaged config,
            a revision for a local folder.
    """
    if (folder := local_folder(path, revision, CONFIG)) is not None:
        return _local(folder)
    return _remote(str(path), revision)


def _local(folder: Path) -> Source:
    files_like(folder, (CONFIG, "*.safetensors", "*.safetensors.index.json"))
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
    whole = folder if sizes and not missing else None
    said = said_quantisation(config, folder)
    where, without = str(folder / CONFIG), is_config_only(folder)
    return Source(config, where, sizes, missing, stale, said, whole, without)


def _config(file: Path, where: str) -> dict[str, Any]:
    config = read_checkpoint_json(file)
    check_model_types(config, where)
    return config


def _remote(name: str, revision: str | None) -> Source:
    from huggingface_hub import HfApi, hf_hub_download

    try:
        file = Path(hf_hub_download(name, CONFIG, revision=revision))
    # network, authorisation, offline mode: each is the user's to solve
    except Exception as error:
        shipped = _SHIPPED / f"{name.replace('/', '--')}.json"
        if revision is None and shipped.is_file():
            config = read_checkpoint_json(shipped)
            where = f"{name}: {CONFIG} as shipped with fcsd"
            return Source(config, where, {}, (), quantisation=said_quantisation(config))
        reason = (
            str(error).strip().splitlines()[0]
            if str(error).strip()
            else type(error).__name__
        )
        raise UserError(
            f"{name}: no such folder, and the Hub did not give {CONFIG} of a repository"
            f" of this name: {reason}"
        ) from None
    try:
        files = (
            HfApi().model_info(name, revision=revision, files_metadata=True).siblings
            or []
        )
    except Exception:  # the sizes are an extra: a cached config is enough
        files = []
    config = _config(file, f"{name}: {CONFIG}")
    sizes = {file.rfilename: file.size for file in files if file.size is not None}
    said = said_quantisation(config)
    if said is None and any(file.rfilename == MODELOPT for file in files):
        with suppress(Exception):  # as the sizes
            written = read_checkpoint_json(
                Path(hf_hub_download(name, MODELOPT, revision=revision))
            )
            said = modelopt_quantisation(written)
    loaded = _loaded(name, revision, sizes, config)
    return Source(config, f"{name}: {CONFIG}", loaded, (), quantisation=said)


def _loaded(
    name: str, revision: str | None, sizes: Mapping[str, int], config: Mapping[str, Any]
) -> dict[str, int]:
    """Leave the sizes of the weight files that transformers loads from a repository, in
    order.

    Without an index, or where it cannot be had, those of all safetensors files that are
    not in a folder.
    """
    first = str(config.get(NAMED) or (WEIGHTS if WEIGHTS in sizes else INDEX))
    names = {first}
    if first not in sizes or not first.endswith(".safetensors"):
        names = {
            file for file in sizes if file.endswith(".safetensors") and "/" not in file
        }
    if first in sizes and first.endswith(".json"):
        from huggingface_hub import hf_hub_download

        with suppress(Exception):  # the sizes are an extra
            index = read_checkpoint_json(
                Path(hf_hub_download(name, first, revision=revision))
            )
            names = {str(file) for file in index["weight_map"].values()}
    return {file: sizes[file] for file in sorted(names) if file in sizes}


def config_object(
    config_class: Any, raw: Mapping[str, Any], model_type: str, where: str
) -> Any:
    """Build transformers' config of the unconverted model from a `config.json`; a
    UserError names `where`.
    """
    own = ("farskip", "auto_map", *INSTELLA_KEYS)
    values = {key: value for key, value in raw.items() if key not in own} | {
        "model_type": model_type
    }
    try:
        with without_advice():
            return config_class.from_dict(
                json.loads(json.dumps(values), object_hook=_special_float)
            )
    # transformers' strict configs raise many kinds for a wrong field
    except Exception as error:
        raise UserError(
            f"{where}: transformers refuses it: {one_line(error)}"
        ) from None


def checkpoint_dtype(config: Mapping[str, Any]) -> str:
    """Return the dtype that a checkpoint's config names; bfloat16 where it names none
    of `BYTES`.
    """
    inner = config.get("text_config")
    for place in (config, inner if isinstance(inner, Mapping) else {}):
        if (dtype := place.get("dtype") or place.get("torch_dtype")) in BYTES:
            return str(dtype)
    return "bfloat16"


def _special_float(value: dict[str, Any]) -> Any:
    """Read transformers' {"__float__": "Infinity"} as the infinite number that it stands for."""
    return float(value["__float__"]) if value.keys() == {"__float__"} else value


@contextmanager
def without_advice() -> Iterator[None]:
    """Keep transformers' advice on a config to itself: it is for those who run the model."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
