"""The original model, tokenizers, dtypes and the identity of data: what the stages load."""

import gc
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fcsd.base.artifact import check_outputs
from fcsd.base.errors import UserError, check_kind
from fcsd.base.fingerprints import checkpoint_files
from fcsd.base.weights import check_finite, weights_fingerprint
from fcsd.model.connectivity.checkpoint import (
    CARRIED,
    CONFIG,
    Checkpoint,
    files_like,
    find_folder,
    has_tokenizer,
    read_checkpoint,
    read_checkpoint_json,
)
from fcsd.model.connectivity.load import load_config, load_model
from fcsd.model.connectivity.modeling import register
from fcsd.model.connectivity.spec import Connectivity
from fcsd.model.families import FAMILIES, PREFIX, base_model_type

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from fcsd.model.config import ModelConfig


@dataclass(frozen=True)
class ModelFolder:
    """The folder of a checkpoint, and how a model is loaded from it.

    config: `path` is what errors and records call it.
    """

    config: "ModelConfig"
    folder: Path

    @cached_property
    def weights(self) -> str:
        """The fingerprint of its weights, never of its path."""
        return weights_fingerprint(self.folder)

    def fingerprints(self, name: str) -> dict[str, Any]:
        """Return what identifies it as an input of a stage: `name`, its weights;
        `name/FILE`, what is read of the files beside them.

        Raises:
            UserError: a stage left it, and it is not what the stage left; weights that
                are NaN or infinite.
        """
        if self.folder.name == "model":
            check_outputs(self.folder.parent)
        check_finite(self.folder)
        files = checkpoint_files(self.folder, code=self.config.trust_remote_code)
        return {name: self.weights} | {
            f"{name}/{file}": known for file, known in files.items()
        }

    @cached_property
    def checkpoint(self) -> Checkpoint:
        """Its files, which are complete, of a family that can be converted."""
        return read_checkpoint(self.folder)

    @cached_property
    def vocab_size(self) -> int | None:
        """The number of tokens that its embeddings have a row for, a tokenizer may have
        fewer; None: not said.
        """
        config = read_checkpoint_json(self.folder / CONFIG)
        text = config.get("text_config")
        size = (text if isinstance(text, dict) else config).get("vocab_size")
        return size if isinstance(size, int) else None

    def load_config(self, any_family: bool = False) -> Any:
        """Return its config object, with upstream's defaults filled in; that of a
        family that is not known is transformers' own. Raises UserError as
        `read_checkpoint` and the loading of configs.
        """
        checkpoint = (
            read_checkpoint(self.folder, any_family=True)
            if any_family
            else self.checkpoint
        )
        if checkpoint.family is not None:
            return load_config(checkpoint)
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(
            self.folder, trust_remote_code=self.config.trust_remote_code
        )


def find_model(config: "ModelConfig") -> ModelFolder:
    """Find the checkpoint that a `model` section names, or raise UserError; of a hub id
    what is missing is fetched.
    """
    return ModelFolder(config, find_folder(config.path, config.revision))


def load_checkpoint(
    model: ModelFolder,
    connectivity: Connectivity | None = None,
    *,
    weights: bool = True,
    any_family: bool = False,
    **options: Any,
) -> "PreTrainedModel":
    """Load a checkpoint as its `model` section says, as it is or with the connectivity
    given.

    weights: False gives the same model without storage, for a rank that will be sent
    its shard. any_family, options, and what is raised: as `load_model`.
    """
    config = model.config
    loaded: PreTrainedModel = load_model(
        model.folder,
        connectivity=connectivity,
        dtype=config.dtype,
        attn_implementation=config.attn_implementation,
        experts_implementation=config.experts_implementation,
        trust_remote_code=config.trust_remote_code,
        any_family=any_family,
        weights=weights,
        **options,
    )
    return loaded


def to_device(
    model: "PreTrainedModel", name: str | Path, device: torch.device
) -> "PreTrainedModel":
    """Move a model to the device of this rank, or raise UserError; `from_pretrained`
    leaves it in main memory.
    """
    try:
        return torch.nn.Module.to(model, device)
    except torch.OutOfMemoryError:
        raise does_not_fit(
            name, sum(tensor.nbytes for tensor in model.parameters()), device
        ) from None


def does_not_fit(name: str | Path, num_bytes: int, device: torch.device) -> UserError:
    """Return the error of weights that are larger than what is left of a device."""
    return UserError(
        f"{name}: its weights ({num_bytes / 1e9:.0f} GB) do not fit on {device} beside"
        " what is there; free the device, or shard the weights over several"
        " (docs/evaluate.md, docs/scale.md)"
    )


def free_memory() -> None:
    """Give the memory of a model that is not needed any more back to the device."""
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.memory.empty_cache()


def tokenizer_of(
    given: Any, name: str, *, trust_remote_code: bool = False
) -> "PreTrainedTokenizerBase":
    """Return the tokenizer that an argument of this name is, or that lies in the folder
    that it names.
    """
    from transformers import PreTrainedTokenizerBase

    if isinstance(given, str | Path):
        return load_tokenizer(given, trust_remote_code=trust_remote_code)
    hint = " (its `.tokenizer`)" if hasattr(given, "tokenizer") else ""
    check_kind(name, given, PreTrainedTokenizerBase, f"a tokenizer{hint} or its path")
    tokenizer: PreTrainedTokenizerBase = given
    return tokenizer


def load_tokenizer(
    path: str | Path, *, trust_remote_code: bool = False
) -> "PreTrainedTokenizerBase":
    """Load the tokenizer that lies beside a checkpoint."""
    from transformers import AutoTokenizer

    folder = find_folder(path)
    files_like(folder, (*CARRIED, CONFIG))
    if not has_tokenizer(folder):
        raise UserError(
            f"{folder}: holds no tokenizer; copy tokenizer.json and"
            " tokenizer_config.json beside the weights"
        )
    if (folder / CONFIG).is_file():
        # AutoTokenizer reads it too, and would blame the tokenizer for its faults.
        model_type = str(read_checkpoint_json(folder / CONFIG).get("model_type"))
        row = FAMILIES.get(base_model_type(model_type))
        if row is not None and (row.like or model_type.startswith(PREFIX)):
            register(model_type)  # the tokenizer's class may follow from the model type
    try:
        return AutoTokenizer.from_pretrained(
            folder, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise UserError(
            f"{folder}: the tokenizer cannot be read: {str(error).splitlines()[0]}"
        ) from None
