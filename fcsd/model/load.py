"""Load the inputs of the stages: checkpoints, their configs and tokenizers; refuse
values that are NaN or infinite, and rows longer than a model's positions.

Not covered: values in files (`fcsd.base.weights.check_finite`); integers of a
quantisation method.
"""

import copy
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fcsd.base.artifact import check_checkpoint
from fcsd.base.errors import UserError, one_line
from fcsd.base.files import checkpoint_files, read_checkpoint_json
from fcsd.base.strict import check_kind
from fcsd.base.weights import (
    check_finite,
    is_added_to_scores,
    not_finite,
    weights_fingerprint,
)
from fcsd.model.connectivity.checkpoint import (
    CONFIG,
    Checkpoint,
    check_carried,
    files_like,
    find_folder,
    has_tokenizer,
    read_checkpoint,
)
from fcsd.model.connectivity.load import check_config, load_config, load_folder
from fcsd.model.connectivity.modeling import register
from fcsd.model.connectivity.spec import Connectivity
from fcsd.model.families import FAMILIES, PREFIX, base_model_type

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from fcsd.model.config import ModelConfig


@dataclass(frozen=True)
class ModelFolder:
    """The folder of a checkpoint, and how a model is loaded from it.

    config: its `path` is the name in errors and records.
    """

    config: "ModelConfig"
    folder: Path

    @cached_property
    def weights(self) -> str:
        """The fingerprint of the weights, which are finite; it does not depend on the
        path.
        """
        return weights_fingerprint(self.folder, finite=True)

    def fingerprints(self, name: str) -> dict[str, Any]:
        """Return the fingerprints that identify it as an input of a stage: `name` for
        the weights, `name/FILE` for the files beside them that are read.

        Raises:
            UserError: it is the output of a stage or command and has changed since, or
                its weights are NaN or infinite.
        """
        check_checkpoint(self.folder)
        files = checkpoint_files(self.folder, code=self.config.trust_remote_code)
        return {name: self.weights} | {
            f"{name}/{file}": fingerprint for file, fingerprint in files.items()
        }

    @cached_property
    def checkpoint(self) -> Checkpoint:
        """The facts about its files, which are complete and of a family that can be
        converted.
        """
        known = self.any_checkpoint
        return known if known.family is not None else read_checkpoint(self.folder)

    @cached_property
    def any_checkpoint(self) -> Checkpoint:
        """The facts about its files, also of a family that cannot be converted."""
        return read_checkpoint(self.folder, any_family=True)

    @cached_property
    def vocab_size(self) -> int | None:
        """The number of rows of its embeddings; a tokenizer may use fewer; None
        if the config does not say.
        """
        config = self.any_checkpoint.config
        text = config.get("text_config")
        size = (text if isinstance(text, dict) else config).get("vocab_size")
        return size if isinstance(size, int) else None

    def load_tokenizer(self) -> "PreTrainedTokenizerBase":
        """Load the tokenizer in its folder; raises UserError as `load_tokenizer`."""
        return load_tokenizer(
            self.folder, trust_remote_code=self.config.trust_remote_code
        )

    def load_config(self, any_family: bool = False) -> Any:
        """Return its config object, with upstream's defaults filled in; for an unknown
        family, the one that transformers loads. Raises UserError as `read_checkpoint`
        and the loading of configs.
        """
        checkpoint = self.any_checkpoint if any_family else self.checkpoint
        if checkpoint.family is not None:
            # A copy, because whoever builds a model with it changes it.
            return copy.deepcopy(self._known_config)
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(
            self.folder, trust_remote_code=self.config.trust_remote_code
        )

    @cached_property
    def _known_config(self) -> Any:
        return load_config(self.checkpoint)

    def check_positions(self, max_length: int, **options: Any) -> None:
        """Compare the length of rows with its positions; options as `check_positions`."""
        checkpoint = self.any_checkpoint
        try:
            config = self.load_config(any_family=True)
        except (OSError, ValueError):  # loading the model reports why
            return
        check_positions(
            self.config.path,
            config,
            checkpoint.shapes.items(),
            max_length,
            **options,
        )


def find_model(config: "ModelConfig") -> ModelFolder:
    """Find the checkpoint that a `model` section names, or raise UserError. Missing
    files of a hub id are downloaded.
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
    """Load a checkpoint as its `model` section says, with its own connectivity or with
    another.

    weights: False returns the same model without storage, for a rank that receives its
    shard from another. any_family, options and errors: as in `load_folder`; values that
    are NaN or infinite are refused.
    """
    config = model.config
    # From the folder, not the id: the facts stay the same while a command runs, even if
    # the repository changes.
    loaded: PreTrainedModel = load_folder(
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
    if weights:
        check_values(loaded, model.folder)
    return loaded


def check_values(model: "PreTrainedModel", folder: Path) -> None:
    """Refuse a model, loaded from a folder, with values that are NaN or infinite.

    Raises:
        UserError: as `refuse_not_finite`.
    """
    # A device map may leave tensors in main memory or on the disk, out of sight.
    if any(tensor.is_meta for tensor in model.parameters()):
        check_finite(folder)
    refuse_not_finite(model, folder)


def to_device(
    model: "PreTrainedModel", name: str | Path, device: torch.device
) -> "PreTrainedModel":
    """Move a model from main memory, where `from_pretrained` leaves it, to the device of
    this rank, or raise UserError.
    """
    try:
        return torch.nn.Module.to(model, device)
    except torch.OutOfMemoryError:
        raise does_not_fit(
            name, sum(tensor.nbytes for tensor in model.parameters()), device
        ) from None


def does_not_fit(name: str | Path, num_bytes: int, device: torch.device) -> UserError:
    """Return the error for weights that exceed the free memory of a device."""
    return UserError(
        f"{name}: its weights ({num_bytes / 1e9:.0f} GB) do not fit into the free"
        f" memory of {device}; free the device, or shard the weights over several"
        " (docs/evaluate.md, docs/scale.md)"
    )


def tokenizer_of(
    tokenizer_or_path: Any, name: str, *, trust_remote_code: bool = False
) -> "PreTrainedTokenizerBase":
    """Return a tokenizer as it is, or load it from its folder.

    name: the argument's name in errors.
    """
    from transformers import PreTrainedTokenizerBase

    if isinstance(tokenizer_or_path, str | Path):
        return load_tokenizer(tokenizer_or_path, trust_remote_code=trust_remote_code)
    # A processor is not a tokenizer, but has one.
    hint = " (its `.tokenizer`)" if hasattr(tokenizer_or_path, "tokenizer") else ""
    check_kind(
        name,
        tokenizer_or_path,
        PreTrainedTokenizerBase,
        f"a tokenizer{hint} or its path",
    )
    tokenizer: PreTrainedTokenizerBase = tokenizer_or_path
    return tokenizer


def load_tokenizer(
    path: str | Path, *, trust_remote_code: bool = False
) -> "PreTrainedTokenizerBase":
    """Load the tokenizer in the folder of a checkpoint."""
    from transformers import AutoTokenizer

    folder = find_folder(path)
    files_like(folder, (CONFIG,))
    check_carried(folder)
    if not has_tokenizer(folder):
        if not (folder / CONFIG).is_file():
            raise UserError(
                f"{folder}: is not a checkpoint (it has neither {CONFIG} nor a"
                " tokenizer); give the folder of a model, or owner/name on the Hub"
            )
        raise UserError(
            f"{folder}: holds no tokenizer; copy tokenizer.json and"
            " tokenizer_config.json beside the weights"
        )
    if (folder / CONFIG).is_file():
        # Read here first: AutoTokenizer reads it, too, and would report its faults as
        # those of the tokenizer.
        model_type = str(read_checkpoint_json(folder / CONFIG).get("model_type"))
        row = FAMILIES.get(base_model_type(model_type))
        if row is not None and (row.like or model_type.startswith(PREFIX)):
            register(model_type)  # the tokenizer's class may follow from the model type
    try:
        return AutoTokenizer.from_pretrained(
            folder, trust_remote_code=trust_remote_code
        )
    # A tokenizer's own code and its files raise anything: an import that this version of
    # transformers has moved, for example.
    except Exception as error:
        # transformers reads the config, too, for a tokenizer.
        if (folder / CONFIG).exists():
            check_config(folder)
        hint = ""
        if not trust_remote_code and _brings_code(folder):
            hint = (
                "; the checkpoint brings code for it, which trust_remote_code=True runs"
                " (in a recipe: model.trust_remote_code: true)"
            )
        raise UserError(
            f"{folder}: the tokenizer cannot be read: {one_line(error)}{hint}"
        ) from error


def _brings_code(folder: Path) -> bool:
    """Tell whether the class of a tokenizer is in the checkpoint's own code."""
    file = folder / "tokenizer_config.json"
    return file.is_file() and "auto_map" in read_checkpoint_json(file)


_CHUNK_VALUES = 1 << 24


def refuse_not_finite(model: nn.Module, name: str | Path) -> None:
    """Raise UserError where a parameter or buffer of a model has values that are NaN or
    infinite, and name the first ones.

    It reads each tensor once, as fast as memory allows. A rank looks at its own shards;
    tensors without storage pass, and so does minus infinity in buffers (masks) and
    where `is_added_to_scores`.

    name: of the model in the error.
    """
    counts: dict[str, tuple[int, int]] = {}
    for tensor_name, tensor in (*model.named_parameters(), *model.named_buffers()):
        parts = [part for part in _parts(tensor.detach()) if not _is_finite(part)]
        if not parts:
            continue
        is_weight = isinstance(tensor, nn.Parameter) and not is_added_to_scores(
            tensor_name
        )
        if count := sum(_count(part, is_weight) for part in parts):
            counts[tensor_name] = count, tensor.numel()
    if counts:
        raise not_finite(name, counts)


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the plain tensors that hold the values of a tensor: shards, or the scales of
    a quantised one.
    """
    if is_traceable_wrapper_subclass(tensor):
        for attribute in tensor.__tensor_flatten__()[0]:
            part = getattr(tensor, attribute)
            if isinstance(part, Tensor):  # and not the mesh of its ranks
                yield from _parts(part)
    elif tensor.is_floating_point() and not tensor.is_meta and tensor.numel():
        yield tensor


def _is_finite(tensor: Tensor) -> bool:
    """Tell from the least and the largest value whether all are finite: many times
    faster than `isfinite`, which makes a tensor of its own. torch has neither for
    float8, which is left to `_count`.
    """
    return tensor.dtype.itemsize > 1 and all(
        bool(value.isfinite()) for value in torch.aminmax(tensor)
    )


def _count(tensor: Tensor, is_weight: bool) -> int:
    """Count the values that are NaN or infinite; outside of weights, without minus
    infinity.
    """
    if tensor.dtype.itemsize == 1:
        values = tensor.flatten().split(_CHUNK_VALUES)
        return sum(int((~chunk.float().isfinite()).sum()) for chunk in values)
    found = ~tensor.isfinite()
    return int((found if is_weight else found & ~tensor.isneginf()).sum())


# Names of learned position embeddings in transformers' text models; image encoders use
# the same ones.
_TABLES = ("wpe", "embed_positions", "position_embeddings")
_NOT_TEXT = ("vision", "visual", "image", "audio")


def num_positions(config: Any) -> int | None:
    """Return the longest sequence that a model's config allows; None if it does not
    say.
    """
    positions: int | None = getattr(
        config.get_text_config(), "max_position_embeddings", None
    )
    return positions


def check_positions(
    name: str,
    config: Any,
    tensors: Iterable[tuple[str, tuple[int, ...]]],
    max_length: int,
    *,
    key: str = "max_length",
    tell: bool = True,
) -> None:
    """Warn on stderr, if `tell`, when rows of `max_length` tokens are longer than a
    model's positions.

    name: of the model, in messages. tensors: their names and shapes; none for a model
    that is not built yet. key: the user's name for max_length.

    Raises:
        UserError: rows are longer, and the positions are a table (learned embeddings)
            with no rows beyond them.
    """
    positions = num_positions(config)
    if positions is None or max_length <= positions:
        return
    text = (
        f"{key} {max_length}: rows are longer than the {positions} positions of {name}"
    )
    # Rotary positions are computed for any length; a table ends.
    table = next(
        (tensor for tensor, shape in tensors if _is_table(tensor, shape, positions)),
        None,
    )
    if table is not None:
        raise UserError(
            f"{text}, which are a table of that length ({table}); set {key} to"
            f" {positions} or less"
        )
    if tell:
        print(
            f"{text}: the model was not trained on later positions; {positions} would"
            " fit",
            file=sys.stderr,
        )


def _is_table(tensor: str, shape: tuple[int, ...], positions: int) -> bool:
    parts = tensor.split(".")
    is_text = not any(word in part for part in parts for word in _NOT_TEXT)
    # OPT's table begins with two extra rows.
    return (
        is_text
        and any(part in _TABLES for part in parts)
        and len(shape) == 2
        and 0 <= shape[0] - positions <= 2
    )
