"""Loading: one function for base and FarSkip checkpoints, which checks everything it
can before it reads weights."""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from fcsd.base.errors import UserError, one_line
from fcsd.base.files import decoded_floats, read_checkpoint_json
from fcsd.model.connectivity.checkpoint import (
    CONFIG,
    Checkpoint,
    Shapes,
    check_tokens,
    find_folder,
    read_checkpoint,
    read_config,
)
from fcsd.model.connectivity.modeling import (
    FamilyClasses,
    classes_of,
    modeling_module,
    register_families,
    with_farskip,
    without_farskip,
)
from fcsd.model.connectivity.spec import Connectivity, field_text
from fcsd.model.dtypes import PLAIN
from fcsd.model.families import (
    Family,
    check_sizes,
    family_of,
    moe_mask,
    null_sizes,
    refused_config,
)
from fcsd.model.quantised.methods import (
    dequantise_advice,
    is_dequantised_here,
    why_not_loaded,
    without_quantisation_fields,
)
from fcsd.model.quantised.tensors import (
    missing_tensors,
    quantised_tensors,
    quantised_without_word,
)

_IMPLEMENTATIONS = ("attn_implementation", "experts_implementation")


def load_model(
    path: str | Path,
    *,
    connectivity: Connectivity | None = None,
    original: bool = False,
    dtype: Any = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
    any_family: bool = False,
    weights: bool = True,
    **options: Any,
) -> Any:
    """Load a CausalLM in eval mode.

    | checkpoint | connectivity | original | gives |
    |---|---|---|---|
    | base    | None  |       | the original model |
    | base    | given |       | `FarSkip<Family>ForCausalLM`, rewired |
    | FarSkip | None, or equal to its own | | `FarSkip<Family>ForCausalLM`, as the checkpoint says |
    | FarSkip | None  | True  | the base family's model: the same weights with regular connectivity |

    Args:
        path: local folder, or `owner/name` of a Hub repository.
        dtype: a torch dtype or its name; "auto" takes the checkpoint's. revision: of a
            Hub repository.
        trust_remote_code: not needed for the supported families (transformers' own
            classes and fcsd's are used); with connectivity None it allows one that fcsd
            does not know, with the code in its repository.
        any_family: with connectivity None, a dense model or another that fcsd cannot
            convert is loaded by transformers.
        weights: False gives the model on the meta device, without reading tensors (its
            dtypes may differ).
        options: passed on to `from_pretrained` (`attn_implementation`,
            `experts_implementation`, `device_map`, `distributed_config`,
            `quantization_config`, …); None: transformers' default.

    Raises:
        UserError: folder, config or weights missing, damaged, truncated or of other
            shapes than the config says; family not supported or dense; a connectivity
            that the model cannot have, or that differs from the checkpoint's; a
            pipeline with a stage that begins where an output is in flight; tensors
            missing or unexpected. Weights are never left at random values, pickles are
            never read.
    """
    return load_folder(
        find_folder(path, revision),
        connectivity=connectivity,
        original=original,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
        any_family=any_family,
        weights=weights,
        **options,
    )


def load_folder(
    folder: Path,
    *,
    connectivity: Connectivity | None = None,
    original: bool = False,
    dtype: Any = "auto",
    trust_remote_code: bool = False,
    any_family: bool = False,
    weights: bool = True,
    **options: Any,
) -> Any:
    """Load the model in a folder that `find_folder` has returned; as `load_model`."""
    checkpoint = read_checkpoint(
        folder, (any_family or trust_remote_code) and connectivity is None
    )
    if problem := misread_here(checkpoint, options.get("quantization_config")):
        raise UserError(f"{folder}: {problem}")
    options = {name: value for name, value in options.items() if value is not None}
    chosen = {name: options[name] for name in _IMPLEMENTATIONS if name in options}
    options |= {"dtype": dtype, "use_safetensors": True, "output_loading_info": True}
    if checkpoint.family is None:
        loaded = _load_unknown(
            checkpoint, weights, options | {"trust_remote_code": trust_remote_code}
        )
    else:
        _check_sharded_loading(
            checkpoint.family, folder, options.get("distributed_config")
        )
        config, cls = config_and_class(
            checkpoint, connectivity, original, chosen.get("experts_implementation")
        )
        check_tensors(checkpoint, config, cls)
        if not weights:
            with torch.device("meta"), implementations(folder, chosen):
                return cls._from_config(config, **chosen).eval()
        try:
            with implementations(folder, chosen), _loading(checkpoint):
                loaded = cls.from_pretrained(folder, config=config, **options)
        # each family's file has its own
        except modeling_module(checkpoint.family).StageError as error:
            raise UserError(f"{folder}: {error}") from None
    model, info = loaded
    if problem := _loading_problem(checkpoint, model, info):
        raise UserError(f"{folder}: {problem}")
    if checkpoint.family is not None and checkpoint.family.overwritten is not None:
        _read_again(checkpoint, model, checkpoint.family.overwritten)
    return model.eval()


@torch.no_grad()
def _read_again(checkpoint: Checkpoint, model: Any, end: str) -> None:
    """Copy the buffers whose names end so from the checkpoint into the model."""
    buffers = {name: b for name, b in model.named_buffers() if name.endswith(end)}
    for file_name in checkpoint.weight_files:
        with safe_open(checkpoint.folder / file_name, framework="pt") as file:
            for name in buffers.keys() & {*file.keys()}:
                buffers[name].copy_(file.get_tensor(name))


def _check_loadable(checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint that no transformers of this version loads."""
    folder, index = checkpoint.folder, checkpoint.index
    if index is not None and not isinstance(
        read_checkpoint_json(folder / index).get("metadata"), dict
    ):
        raise UserError(
            f"{folder / index}: has no object metadata, which transformers needs; add"
            ' "metadata": {} to it, or fetch it again'
        )
    # Quantised by a method that it does not know, or would take for plain weights.
    if checkpoint.quantisation is not None and (
        reason := why_not_loaded(checkpoint.quantisation)
    ):
        raise UserError(f"{folder / CONFIG}: {reason}")


def misread_here(checkpoint: Checkpoint, requested: Any = None) -> str | None:
    """Return why transformers would compute other weights on this machine than a
    checkpoint has; None: it does not.

    requested: the `quantization_config` that it is called with.
    """
    quantisation = checkpoint.quantisation
    if quantisation is None or not is_dequantised_here(checkpoint.config, requested):
        return None
    from fcsd.model.quantised.stored import why_misread

    reason = why_misread(checkpoint)
    return reason and f"{reason}; {dequantise_advice(quantisation)}"


@contextlib.contextmanager
def implementations(folder: Path, chosen: dict[str, Any]) -> Iterator[None]:
    """Turn the error of a model that is built with an implementation of attention or
    experts that does not exist, or whose package is missing, into one line.

    chosen: `attn_implementation` and `experts_implementation`, where they are set.
    """
    try:
        yield
    # Before weights are read, transformers raises either of these.
    except (ValueError, ImportError) as error:
        name = next((name for name in chosen if name in str(error)), None)
        # The message about a missing package names the package alone.
        if isinstance(error, ImportError) and "attn_implementation" in chosen:
            name = "attn_implementation"
        if name is None:
            raise
        raise UserError(
            f"{folder}: transformers refuses {name}={chosen[name]!r}: {one_line(error)}"
        ) from None


@contextlib.contextmanager
def _loading(checkpoint: Checkpoint) -> Iterator[None]:
    """Turn a quantisation method's error about weights that it cannot load into one
    line.
    """
    try:
        yield
    except (UserError, torch.OutOfMemoryError):
        raise
    except (
        Exception
        # a package or GPU that is missing, shapes that do not fit: each has its own
        # kinds
    ) as error:
        if checkpoint.quantisation is None:
            raise
        raise UserError(
            f"{checkpoint.folder}: its weights, quantised by"
            f" {checkpoint.quantisation.words}, cannot be loaded here:"
            f" {one_line(error)}{_advice(checkpoint)}"
        ) from error


def _advice(checkpoint: Checkpoint) -> str:
    """Return the end of an error about weights that may be quantised."""
    if checkpoint.quantisation is None:
        return ""
    advice = dequantise_advice(checkpoint.quantisation)
    return advice and f"; {advice}"


def _load_unknown(
    checkpoint: Checkpoint, weights: bool, options: dict[str, Any]
) -> Any:
    """Load a model that fcsd does not know, as transformers does: the model, and its report."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder, code = checkpoint.folder, options["trust_remote_code"]
    _check_loadable(checkpoint)
    if not weights:
        raise UserError(
            f"{folder}: model type '{checkpoint.config.get('model_type')}' cannot be"
            " sharded"
        )
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=code)
        if checkpoint.leftover:
            options["config"] = without_quantisation_fields(config)
        # The `model` section of a recipe sets it for the student; a dense teacher has none.
        if not _has_experts(config):
            options.pop("experts_implementation", None)
        # Sizes that do not match are in the report, and refused.
        chosen = {name: options[name] for name in _IMPLEMENTATIONS if name in options}
        with implementations(folder, chosen), _loading(checkpoint):
            return AutoModelForCausalLM.from_pretrained(
                folder, ignore_mismatched_sizes=True, **options
            )
    # no such model type, or one whose code is in its repository
    except ValueError as error:
        raise UserError(
            f"{folder}: transformers cannot load it: {one_line(error)}"
        ) from None


def _has_experts(config: Any) -> bool:
    """Tell whether transformers can choose how a model's experts are computed; true for
    code in the model's own repository.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    cls: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    return cls is None or bool(cls._can_set_experts_implementation())


def _check_sharded_loading(
    family: Family, folder: Path, distributed_config: Any
) -> None:
    """Refuse to let transformers shard tensors while loading if it would assemble them
    wrongly.
    """
    if distributed_config is not None and family.fuses_rows is not None:
        raise UserError(
            f"{folder}: transformers loads {family.fuses_rows} of {family.model_type}"
            " wrongly when it shards weights while it loads them (expert, tensor"
            " parallelism, its FSDP); launch FSDP2 or ZeRO-3 through accelerate"
            " (configs/fsdp2_8.yaml), which load it whole first, or one process"
        )


def config_and_class(
    checkpoint: Checkpoint,
    connectivity: Connectivity | None = None,
    original: bool = False,
    experts_implementation: Any = None,
) -> tuple[Any, Any]:
    """Return the config object and model class that a checkpoint of a known family is
    to be loaded with.

    experts_implementation: the one to load it with, which is checked.
    """
    family = checkpoint.family
    assert family is not None
    register_families(family)
    classes = classes_of(family)
    _check_classes(checkpoint, classes, experts_implementation)
    config = load_config(checkpoint)
    mask = moe_mask(config, family)
    if original and connectivity is not None:
        raise UserError(
            f"{checkpoint.folder}: original=True loads the regular connectivity; give"
            " no connectivity with it"
        )
    if checkpoint.connectivity is None:
        if connectivity is None:
            return config, classes.model
        field = connectivity.new_field(mask, family.layout)
        return with_farskip(config, family, field), classes.farskip_model
    # also refuses indices that the model does not have
    own_field = checkpoint.connectivity.field(mask)
    if original:
        return without_farskip(config, family), classes.model
    if (
        connectivity is not None
        and (wanted_field := connectivity.field(mask)) != own_field
    ):
        raise UserError(
            f"{checkpoint.folder}: this checkpoint is already converted with"
            f" {field_text(own_field)}, but {field_text(wanted_field)} was requested;"
            " leave the connectivity out to load it as it is, or convert the original"
            " checkpoint"
        )
    return config, classes.farskip_model


@functools.cache
def _types_by_class() -> dict[str, set[str]]:
    """Return the model types for which transformers knows a class, by its name."""
    from transformers.models.auto import modeling_auto

    types: dict[str, set[str]] = {}
    # A table for each Auto class: model type -> the name of a class, or several.
    for attribute, mapping in vars(modeling_auto).items():
        if attribute.endswith("_MAPPING_NAMES"):
            for model_type, classes in mapping.items():
                for name in (classes,) if isinstance(classes, str) else classes:
                    types.setdefault(name, set()).add(model_type)
    return types


def _check_classes(
    checkpoint: Checkpoint, classes: FamilyClasses, experts_implementation: Any
) -> None:
    """Refuse a config whose `architectures` are of other model types, and an
    implementation of the experts that the model's class does not have.
    """
    where, family = checkpoint.folder / CONFIG, checkpoint.family
    assert family is not None
    architectures = checkpoint.config.get("architectures") or []
    if not isinstance(architectures, list):
        raise UserError(
            f"{where}: architectures must be a list of class names, got"
            f" {architectures!r}"
        )
    model_type = checkpoint.config["model_type"]
    is_rewired = checkpoint.connectivity is not None
    if other := _other_class(architectures, family, is_rewired):
        raise UserError(
            f"{where}: architectures names {other}, but model_type is '{model_type}';"
            " one of them is wrong, fetch the config again"
        )
    is_chosen = experts_implementation not in (None, "eager")
    if is_chosen and not classes.model._can_set_experts_implementation():
        raise UserError(
            f"{checkpoint.folder}: transformers refuses"
            f" experts_implementation={experts_implementation!r}: it computes the experts"
            f" of {model_type} in one way; leave it out"
        )


def _other_class(
    architectures: Sequence[Any], family: Family, rewired: bool
) -> str | None:
    """Return the class among a config's `architectures` that transformers knows, but
    for other model types.
    """
    types = _types_by_class()
    for name in architectures:
        # A name that transformers does not know belongs to code in a repository: it
        # passes, as one of this family.
        model_types = types.get(str(name).removeprefix("FarSkip"), {family.model_type})
        is_farskip = str(name).startswith("FarSkip")
        if family.model_type not in model_types or is_farskip != rewired:
            return str(name)
    return None


def load_config(checkpoint: Checkpoint) -> Any:
    """Return the config object of a checkpoint of a known family, with upstream's
    defaults filled in.
    """
    assert checkpoint.family is not None
    classes = classes_of(checkpoint.family)
    config_class = classes.config
    if checkpoint.connectivity is not None:
        config_class = classes.farskip_config
    try:
        if checkpoint.foreign or checkpoint.leftover:
            # A copy, because it writes into rope_scaling.
            config = config_class.from_dict(decoded_floats(checkpoint.config))
        else:
            config = config_class.from_pretrained(checkpoint.folder)
    # transformers' strict configs raise many kinds for a wrong field
    except Exception as error:
        where = str(checkpoint.folder / CONFIG)
        raise refused_config(checkpoint.config, error, where) from None
    dtype = getattr(config, "dtype", None)
    if not isinstance(dtype, torch.dtype | str | dict | None):
        raise UserError(
            f"{checkpoint.folder / CONFIG}: dtype must be the name of a torch dtype such"
            f" as 'bfloat16', got {dtype!r:.80}; fetch the config again"
        )
    check_sizes(config, str(checkpoint.folder / CONFIG))
    try:
        family_of(config)
    except UserError as error:
        raise UserError(f"{checkpoint.folder}: {error}") from None
    return config


def check_config(folder: Path) -> None:
    """Refuse a folder's config that is damaged or, of a known family, that transformers
    refuses; nothing else is read.

    Raises:
        UserError: as `read_config` and `load_config`.
    """
    checkpoint = read_config(folder, any_family=True)
    check_tokens(checkpoint)
    if checkpoint.family is not None:
        load_config(checkpoint)


def build_on_meta(checkpoint: Checkpoint, config: Any, cls: Any) -> Any:
    """Return the model of a checkpoint's config without storage.

    Raises:
        UserError: no such model can be built; transformers does not load such weights or
            their index.
    """
    _check_loadable(checkpoint)
    try:
        with torch.device("meta"):
            return cls(config)
    except Exception as error:  # a number that no model can have: 0 heads, say
        where = checkpoint.folder / CONFIG
        raise UserError(
            f"{where}: no {cls.__name__} can be built from it{null_sizes(config)}:"
            f" {one_line(error)}"
        ) from None


def check_tensors(checkpoint: Checkpoint, config: Any, cls: Any) -> set[str]:
    """Compare the checkpoint's tensor names and shapes with what the config needs,
    without reading weights.

    The model is built without storage, and its tensors are taken back to the names and
    shapes of checkpoint files by transformers' own conversions. Checkpoints in the
    in-memory layout (fused experts) are accepted too.

    Returns:
        The names of tensors that the model leaves out: MTP layers, say.

    Raises:
        UserError: a tensor has another shape than the config says, is missing, or is
            none of the model's.
    """
    model = build_on_meta(checkpoint, config, cls)
    state = model.state_dict()
    in_memory = {name: tuple(tensor.shape) for name, tensor in state.items()}
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    layouts = shapes_in_files(model, state), in_memory, tied
    _check_layouts(checkpoint, cls, *layouts)
    if checkpoint.quantisation is not None:
        return set()
    unexpected = {*checkpoint.shapes}.difference(*layouts)
    if not unexpected:
        return set()
    from fcsd.model.connectivity.extra_tensors import not_loaded

    assert checkpoint.family is not None
    left_out = not_loaded(model, unexpected, checkpoint.family, checkpoint.folder)
    if unknown := sorted(unexpected - left_out):
        quantised = quantised_tensors(checkpoint.dtypes)
        raise _quantised_or(
            checkpoint,
            not {*quantised}.isdisjoint(unknown),
            f"{checkpoint.folder}: {len(unknown)} tensors belong to no parameter, the"
            f" first is '{unknown[0]}'; weights and {CONFIG} belong to different models,"
            f" or the model was changed after {CONFIG} was written",
        )
    return left_out


def _check_layouts(
    checkpoint: Checkpoint,
    cls: Any,
    in_files: Shapes,
    in_memory: Shapes,
    tied: set[str],
) -> None:
    """Refuse weights of other shapes than a model's, the body alone, and weights without
    some tensors.
    """
    have, dtypes = checkpoint.shapes, checkpoint.dtypes
    is_plain = checkpoint.quantisation is None
    # A packed tensor has the shape of its packing. A name may be in both layouts with
    # two shapes, of which either is right.
    expected = {
        name: {shapes[name] for shapes in (in_files, in_memory) if name in shapes}
        for name in have
        if is_plain or dtypes[name] in PLAIN
    }
    others = [n for n, shapes in expected.items() if shapes and have[n] not in shapes]
    if others:
        raise _quantised_or(
            checkpoint,
            others[0] in quantised_tensors(dtypes),
            _other_shape(checkpoint, others[0], min(expected[others[0]])),
        )
    # The body alone, saved without its head, has all names without the prefix. That is
    # worth a sentence of its own; otherwise every tensor would be reported missing.
    prefix = cls.base_model_prefix + "."
    if any(name.startswith(prefix) for name in in_files) and not any(
        name.startswith(prefix) for name in have
    ):
        raise UserError(
            f"{checkpoint.folder}: no tensor name starts with '{prefix}'; this is not a"
            f" checkpoint of {cls.__name__}"
        )
    lacking = [
        [name for name in names if name not in have and name not in tied]
        if is_plain
        else missing_tensors(names, dtypes, tied)
        for names in (in_files, in_memory)
    ]
    # The files are in the layout of which they have more names: experts have their own
    # in each.
    is_in_memory = len(in_memory) - len(lacking[1]) > len(in_files) - len(lacking[0])
    missing = lacking[is_in_memory]
    if missing:
        # If a packed tensor could replace a missing one, the cause is different: the
        # weights are quantised, and the config does not say so.
        names = in_memory if is_in_memory else in_files
        packed = missing_tensors(names, dtypes, tied)
        raise _quantised_or(
            checkpoint,
            len(packed) < len(missing),
            f"{checkpoint.folder}: {len(missing)} tensors are missing, the first is"
            f" '{missing[0]}'; the checkpoint is incomplete or of another model",
        )


def _quantised_or(
    checkpoint: Checkpoint, has_quantised: bool, message: str
) -> UserError:
    """Return the error, with this message, for weights that do not fit a plain model;
    another one if they are quantised in a way that no file states.
    """
    is_plain = checkpoint.quantisation is None
    if is_plain and has_quantised and (names := quantised_tensors(checkpoint.dtypes)):
        dtype = checkpoint.dtypes[names[0]]
        message = quantised_without_word(checkpoint.folder, names[0], dtype)
    return UserError(message)


def _other_shape(checkpoint: Checkpoint, name: str, expected: Sequence[int]) -> str:
    shape = checkpoint.shapes[name]
    return (
        f"{checkpoint.folder}: tensor '{name}' has shape {list(shape)}, but"
        f" {CONFIG} says {list(expected)}; weights and config belong to"
        " different models"
    )


def shapes_in_files(model: Any, state: dict[str, Tensor]) -> Shapes:
    """Return names and shapes in checkpoint files of tensors in a model's state dict."""
    from transformers.core_model_loading import revert_weight_conversion

    reverted = revert_weight_conversion(model, state)
    return {name: tuple(tensor.shape) for name, tensor in reverted.items()}


_PROBLEMS = {
    "missing_keys": "tensors are missing",
    "unexpected_keys": "tensors belong to no parameter",
    "mismatched_keys": "tensors have another shape than the config says",
    "error_msgs": "tensors could not be loaded",
}
"""What each list of transformers' loading report means."""


def _loading_problem(
    checkpoint: Checkpoint, model: Any, info: dict[str, Any]
) -> str | None:
    """Return the first thing that transformers' loading report finds wrong, or None."""
    unexpected = {*info["unexpected_keys"]}
    if unexpected and checkpoint.family is not None:
        from fcsd.model.connectivity.extra_tensors import not_loaded

        # By the names that transformers has given them, of experts that it has put
        # together, say.
        left_out = not_loaded(model, unexpected, checkpoint.family, checkpoint.folder)
        info = info | {"unexpected_keys": unexpected - left_out}
    for key, text in _PROBLEMS.items():
        if values := sorted(str(value) for value in info.get(key) or ()):
            first = " ".join(values[0].split())[:200]
            return (
                f"{len(values)} {text}, the first is '{first}'; the checkpoint is"
                f" incomplete or of another model{_advice(checkpoint)}"
            )
    return None
