"""Finding checkpoints and data: hub ids and local folders alike, with errors that a user can act on."""

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from fcsd.artifact import file_sha256
from fcsd.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from fcsd.recipe import Model, Source

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_DATA_FILES = (".jsonl", ".json", ".parquet", ".csv", ".arrow", ".gz", ".zst")


def dtype_of(name: str) -> torch.dtype:
    """The torch dtype of a recipe's word."""
    return _DTYPES[name]


def local_checkpoint(path: str | Path, revision: str | None = None) -> Path:
    """The folder of a checkpoint: `path` itself, or the Hub's snapshot (weights as safetensors only, never pickle)."""
    folder = Path(path)
    if folder.is_dir():
        return folder
    text = str(path)
    if text.startswith((".", "/", "~")) or text.count("/") != 1 or folder.suffix:
        raise UserError(f"{text}: no such folder (and not a hub id of the form owner/name)")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        allowed = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.py"]
        return Path(snapshot_download(text, revision=revision, allow_patterns=allowed))
    except (HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError) as error:
        raise UserError(
            f"{text}: no such local folder, and the Hub gave no checkpoint of this id ({type(error).__name__}:"
            f" {str(error).splitlines()[0]}); give a local folder, or check the id and the connection"
        ) from None


def load_tokenizer(path: str | Path, model: "Model | None" = None) -> "PreTrainedTokenizerBase":
    """The tokenizer that lies beside a checkpoint."""
    from transformers import AutoTokenizer

    folder = local_checkpoint(path, model.revision if model is not None else None)
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        raise UserError(f"{folder}: holds no tokenizer; copy tokenizer.json and tokenizer_config.json beside the weights")
    try:
        return AutoTokenizer.from_pretrained(
            folder, trust_remote_code=bool(model is not None and model.trust_remote_code)
        )
    except (OSError, ValueError) as error:
        raise UserError(f"{folder}: the tokenizer cannot be read: {str(error).splitlines()[0]}") from None


def data_fingerprint(source: "Source") -> str:
    """What identifies the bytes of a data source: a hash for local files, id and revision for the Hub."""
    path = Path(source.path)
    if path.is_file():
        return file_sha256(path)
    if path.is_dir():
        digest = hashlib.sha256()
        for file in sorted(path.rglob("*")):
            if file.is_file() and file.suffix in _DATA_FILES:
                digest.update(str(file.relative_to(path)).encode() + b"\0" + file_sha256(file).encode())
        return digest.hexdigest()
    return f"{source.path}@{source.revision or 'main'}"


