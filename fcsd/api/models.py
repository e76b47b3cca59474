"""Convert and calibrate a model in memory, convert a checkpoint, and load either with
its tokenizer.

Not covered: models that are already wrapped (PEFT, FSDP, DDP): convert them first.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from torch import nn

from fcsd.base.errors import UserError, kind_of, one_line
from fcsd.base.strict import check_kind
from fcsd.model.connectivity import Connectivity, Selection
from fcsd.model.connectivity.convert import convert_model, unconvert_model
from fcsd.model.connectivity.export import convert_checkpoint as convert_folder
from fcsd.model.connectivity.export import export_checkpoint
from fcsd.model.connectivity.load import load_model
from fcsd.model.connectivity.selection import MlpInput
from fcsd.model.connectivity.spec import chosen_connectivity, connectivity_of
from fcsd.model.families import family_of, moe_mask
from fcsd.model.load import check_values, find_model, load_tokenizer, tokenizer_of
from fcsd.training.config import CalibrationConfig

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

Model = TypeVar("Model")
Attention = Literal["partial", "full"]


def convert(
    model: Model,
    layers: Selection | Connectivity = "all",
    *,
    attention: Attention = "partial",
    mlp: MlpInput = "outdated",
) -> Model:
    """Rewire a loaded transformers model in place, and return it.

    Weights, their names and the tokenizer do not change; the model then saves FarSkip
    checkpoints. A model with another FarSkip connectivity is converted again.

    Args:
        layers: "all", "moe", "none", "first:8", "last:90%", "0,2,5", [0, 2, 5],
            {"last": "90%"}, or a `Connectivity`.
        attention: "partial" reads the stream without the routed output that is in
            flight, "full" waits for it.
        mlp: "outdated" reads the input of the layer, "full" the regular input; a
            selection of layers: outdated in these, full in the other rewired ones.

    Raises:
        UserError: the family or class is not supported, the model is dense, lacks the
            selected layers, or already has this connectivity.
    """
    if isinstance(model, str | Path):
        raise UserError(
            f"model: {str(model)!r} is a path; fcsd.convert rewires a model in memory:"
            " use fcsd.convert_checkpoint(model, out) to convert a folder, or"
            " fcsd.load(model, layers=…) for a converted model and its tokenizer"
        )
    check_kind(
        "model",
        model,
        nn.Module,
        "a model in memory (fcsd.load gives one and its tokenizer)",
    )
    if layers is None:
        raise UserError(
            "layers: None; leave it out for all of them, or give 'none' for no layer"
        )
    connectivity: Any = connectivity_of(layers, attention, mlp)
    current_field = getattr(getattr(model, "config", None), "farskip", None)
    # Converting again is allowed, but with the same connectivity it is probably a
    # mistake.
    if current_field is not None:
        config: Any = model.config  # type: ignore[attr-defined]
        if connectivity.field(moe_mask(config, family_of(config))) == current_field:
            raise UserError(
                f"{type(model).__name__}: is already converted with this connectivity"
                f" (layers {current_field['layers']})"
            )
    convert_model(model, connectivity)
    return model


def unconvert(model: Model) -> Model:
    """Restore the original class, config and connectivity of a converted model in
    place, and return it.

    Raises:
        UserError: the model is not converted.
    """
    check_kind(
        "model",
        model,
        nn.Module,
        "a model in memory (for a folder, use `fcsd unconvert`)",
    )
    if getattr(getattr(model, "config", None), "farskip", None) is None:
        raise UserError(
            f"{type(model).__name__}: is not converted, so there is nothing to undo"
        )
    unconvert_model(model)
    return model


def calibrate(
    student: Model,
    teacher: Any,
    rows: "Sequence[Any] | torch.Tensor",
    *,
    ridge: float = CalibrationConfig().ridge,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    max_length: int = 1024,
) -> list[dict[str, Any]]:
    """Bring a converted model closer to its original, in place, by folding closed-form
    linear maps into its weights.

        model, tokenizer = fcsd.load(path, layers="all")
        original, _ = fcsd.load(path)
        fcsd.calibrate(model, original, rows)

    Calibration uses no gradients and adds no parameters: layer by layer, linear maps
    bring the inputs and outputs of each rewired layer as close to the original's as
    possible (docs/convert.md). For a model larger than memory, use `fcsd calibrate`,
    which loads one layer at a time.

    Args:
        student: a converted model that is not sharded, with the original's weights.
        teacher: the original.
        rows: token ids (N, T) without padding; packed rows (input_ids, position_ids,
            labels); or a data set as `FCSDTrainer` takes it. At least 4 x hidden size
            tokens; 128 x are better.
        ridge: regularisation of the maps towards the identity, relative to the mean
            diagonal of the Gram matrix.
        tokenizer: the tokenizer for a data set.
        max_length: tokens in each row that a data set is packed into.

    Returns:
        The solution, layer by layer: squared residuals before and after, the same on
        held-out text (`held_out`), and the maps that could not be folded. If the
        residuals show that there was too little text, a line on stderr also says so.

    Raises:
        UserError: the student is not converted, or already calibrated; the models do
            not belong together; there is too little text, or text of another tokenizer;
            a data set has no tokenizer or cannot be tokenized; sums are singular or not
            finite.
    """
    from fcsd.training.calibration.model import calibrate_model, complaint

    rows = _token_rows(rows, tokenizer, max_length)
    CalibrationConfig.from_plain({"ridge": ridge}, "calibrate")
    results = calibrate_model(student, teacher, rows, ridge=ridge)
    # Reported and not raised, even if the result is useless: the maps have already been
    # folded in. `fcsd calibrate` refuses before it writes.
    if (warning := complaint(results)) is not None:
        print(warning[1], file=sys.stderr)
    return results


def _token_rows(rows: Any, tokenizer: Any, max_length: int) -> Any:
    import torch

    from fcsd.data.batches import ROW_FEATURES
    from fcsd.data.counts import tell_examples
    from fcsd.data.dataset import given_rows
    from fcsd.data.write_rows import BadRows

    is_iterable = hasattr(rows, "__iter__") or hasattr(rows, "__getitem__")
    first = None
    if is_iterable and getattr(rows, "ndim", None) != 0:
        first = next(iter(rows), None)
    # Token ids: a tensor (N, T), or a list of tensors of one length.
    if isinstance(first, torch.Tensor) and all(
        row.shape == first.shape and row.dim() == 1 for row in rows
    ):
        if first.is_floating_point() or first.dtype == torch.bool:
            raise UserError(
                f"rows: a tensor of {first.dtype}; token ids are whole numbers"
            )
        return rows if isinstance(rows, torch.Tensor) else torch.stack(list(rows))
    if not isinstance(first, Mapping):
        first_kind = "" if first is None else f" of {type(first).__name__}"
        raise UserError(
            f"rows: {kind_of(rows)}{first_kind}; give token ids (N, T), tensors (T,) of"
            f" one length, packed rows with {', '.join(ROW_FEATURES)}, or a data set"
            " with its tokenizer"
        )
    # Rows that are already packed pass unchanged; any other mapping is an example of a
    # data set.
    if set(ROW_FEATURES) <= set(first):
        return rows
    if tokenizer is None:
        raise UserError(
            f"rows: a data set with {', '.join(map(repr, first))}; give the model's"
            " tokenizer, too: fcsd.calibrate(student, teacher, rows,"
            " tokenizer=tokenizer)"
        )
    tokenizer = tokenizer_of(tokenizer, "tokenizer")
    check_kind("max_length", max_length, int, "a whole number")
    options: dict[str, Any] = {
        "shuffle": False,
        "loss_on": "all",
        "bad_rows": BadRows(setting=None),
    }
    packed = given_rows(rows, tokenizer, name="rows", max_length=max_length, **options)
    tell_examples(packed, "rows", always=False)
    return packed


def convert_checkpoint(
    model: str | Path,
    out: str | Path,
    *,
    layers: Selection | Connectivity | None = None,
    attention: Attention = "partial",
    mlp: MlpInput = "outdated",
    revision: str | None = None,
    config_only: bool = False,
    format: Literal["amd"] | None = None,
) -> Path:
    """Write a FarSkip checkpoint with the weights of another checkpoint, as `fcsd
    convert` does; the weights are linked or copied, never loaded.

    The result loads without fcsd with `trust_remote_code=True`.

    Args:
        model: a folder, or `owner/name` on the Hub.
        out: a new folder.
        layers: as for `convert`; None: the layers that the checkpoint names in another
            project's keys, otherwise all.
        config_only: write no weights, and need none, for servers with dummy weights.
        format: "amd" writes the connectivity that the model has with AMD's keys.

    Returns:
        The new folder.

    Raises:
        UserError: as `fcsd convert`.
    """
    check_kind(
        "model",
        model,
        str | Path,
        "the path of a checkpoint (fcsd.convert takes a model in memory)",
    )
    check_kind("out", out, str | Path, "the path of a new folder")
    if format not in (None, "amd"):
        raise UserError(f"format: {format!r:.80}; allowed: None, 'amd'")
    connectivity = chosen_connectivity(layers, attention, mlp)
    if format is None:
        convert_folder(
            model,
            out,
            connectivity,
            revision=revision,
            config_only=config_only,
            alone=True,
        )
    elif connectivity is not None or config_only:
        raise UserError(
            f"--format {format} (format={format!r}): writes the model's own"
            " connectivity and weights; leave layers, attention, mlp and config-only"
            " out, and convert the model first"
        )
    else:
        export_checkpoint(model, out, revision=revision)
    return Path(out)


# Options that would have no effect, or that have another name here. Those of
# `from_pretrained`: the files are local by then.
_NOT_OPTIONS = {
    "connectivity": "give it as layers=… (an fcsd.Connectivity has layers and sides)",
    "torch_dtype": "use dtype=… instead, for example dtype='bfloat16'",
    "token": "set HF_TOKEN, or log in with `hf auth login`",
    "cache_dir": "set HF_HUB_CACHE",
    "local_files_only": "set HF_HUB_OFFLINE=1",
    "force_download": "delete the repository from the cache with `hf cache` first",
    "proxies": "set HTTPS_PROXY",
    "subfolder": "give the path of the folder itself",
    "config": "change the config.json of the checkpoint",
    "output_loading_info": "a checkpoint that does not load completely is an error",
}


def load(
    path: str | Path,
    *,
    layers: Selection | Connectivity | None = None,
    attention: Attention = "partial",
    mlp: MlpInput = "outdated",
    original: bool = False,
    revision: str | None = None,
    trust_remote_code: bool = False,
    **options: Any,
) -> "tuple[Any, PreTrainedTokenizerBase]":
    """Load a checkpoint, original or FarSkip, and its tokenizer: (model in eval mode,
    tokenizer).

    Args:
        path: a folder, or `owner/name` on the Hub.
        layers: convert an original checkpoint during loading, like `convert`; None:
            load the checkpoint's own connectivity.
        original: load a FarSkip checkpoint's weights with regular connectivity.
        options: `dtype`, `attn_implementation`, `experts_implementation`, `device_map`,
            … of `from_pretrained`.

    Raises:
        UserError: something is missing, damaged or does not fit
            (`fcsd.model.connectivity.load_model`); values are NaN or infinite.
    """
    from fcsd.model.config import ModelConfig

    check_kind(
        "path", path, str | Path, "the path of a checkpoint, or owner/name on the Hub,"
    )
    for name, instead in _NOT_OPTIONS.items():
        if options.get(name):
            raise UserError(f"fcsd.load: {name}: {instead}")
    source = {"path": str(path), "revision": revision}
    checkpoint = find_model(ModelConfig.from_plain(source, "fcsd.load"))
    tokenizer = load_tokenizer(checkpoint.folder, trust_remote_code=trust_remote_code)
    connectivity = connectivity_of(layers, attention, mlp)
    try:
        model = load_model(
            checkpoint.folder,
            connectivity=connectivity,
            original=original,
            trust_remote_code=trust_remote_code,
            **options,
        )
    # transformers raises these for an option that it does not know, or that asks for a
    # package that is missing.
    except (ValueError, TypeError, ImportError) as error:
        if not options:
            raise
        arguments = " ".join(
            ", ".join(f"{name}={value!r}" for name, value in options.items()).split()
        )
        raise UserError(
            f"fcsd.load: transformers refuses {arguments}: {one_line(error)}"
        ) from error
    check_values(model, checkpoint.folder)
    return model, tokenizer
