"""Conversion of a model in memory."""

from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from fcsd.base.errors import UserError
from fcsd.model.connectivity import rewire
from fcsd.model.connectivity.modeling import classes_of, with_farskip, without_farskip
from fcsd.model.connectivity.spec import Connectivity
from fcsd.model.connectivity.stack import decoder_layers, is_one_of
from fcsd.model.families import Family, family_of, moe_mask


def convert_model(
    model: Any, connectivity: Connectivity, *, regular_ok: bool = False
) -> list[int]:
    """Rewire a CausalLM, or a multimodal wrapper's text stack, in place; an earlier
    conversion is undone first.

    The model becomes a `FarSkip<Family>ForCausalLM` (or `…ForConditionalGeneration`)
    with a new config, so that its saved checkpoints can never be loaded silently as the
    regular model. Parameters, buffers and their names stay. With no layer selected
    nothing is rewired, and outputs are bit-identical.

    Args:
        regular_ok: accept rewired layers that compute the same as regular ones; a study
            of single layers may need it.

    Returns:
        The indices of the rewired layers.

    Raises:
        UserError: unsupported family or class, a dense model, a selection that the
            model does not have or that changes nothing (`Connectivity.new_field`), or
            hooks that have set `forward` on a layer (device_map, accelerate).
    """
    family = _family(model)
    mask = moe_mask(model.config, family)
    if regular_ok:
        field = connectivity.field(mask)
    else:
        field = connectivity.new_field(mask, family.layout)
    try:
        # Both check before they change anything, and run before class and config are
        # exchanged: a refusal leaves the model unchanged.
        _check_blocks(model, family, mask)
        layers = rewire.rewire(model, family, field)
    except ValueError as error:
        raise UserError(f"{type(model).__name__}: {error}") from None
    model.__class__ = classes_of(family).farskip_model
    _replace_config(model, with_farskip(model.config, family, field))
    return layers


def unconvert_model(model: Any) -> None:
    """Give a converted model its original class, config and connectivity back; outputs
    are bit-identical to the original's.

    A model that is not converted stays unchanged.

    Raises:
        UserError: hooks that have set `forward` on a rewired layer (device_map,
            accelerate).
    """
    family = _family(model)
    try:
        rewire.unrewire(model)
    except ValueError as error:
        raise UserError(f"{type(model).__name__}: {error}") from None
    base = classes_of(family).model
    if isinstance(model, classes_of(family).farskip_model):
        model.__class__ = base
        _replace_config(model, without_farskip(model.config, family))


def farskip_layers(model: nn.Module) -> list[int]:
    """Return the indices of the layers that are rewired now, read from the layers
    themselves; [] for a regular model."""
    return list(rewire.rewired_layers(decoder_layers(model, family_of(model.config))))


def pipeline_cuts(model: nn.Module) -> list[int]:
    """Return the layers before which nothing is in flight, so that a pipeline may be
    cut there and hand on one tensor.

    Before any other layer the stream is the pair (o, o - routed): two tensors of the
    same shape.
    """
    return rewire.pipeline_cuts(decoder_layers(model, family_of(model.config)))


def _family(model: Any) -> Family:
    config = getattr(model, "config", None)
    if not isinstance(config, PreTrainedConfig):
        raise UserError(
            f"{type(model).__name__}: not a transformers model (it has no config of"
            " transformers)"
        )
    family = family_of(config)
    names = (family.causal_lm, f"FarSkip{family.causal_lm}")
    # FSDP2 makes a subclass of each module's class, which `isinstance` would accept.
    if (
        not isinstance(model, classes_of(family).model)
        or type(model).__name__ not in names
    ):
        raise UserError(
            f"{type(model).__name__}: only {family.causal_lm} of transformers'"
            f" {family.upstream} can be converted; convert before wrapping the model"
            " (PEFT, FSDP, DDP); a PEFT model's `get_base_model()` can be"
            " converted, too"
        )
    return family


def _check_blocks(model: Any, family: Family, mask: list[bool]) -> None:
    """Raise ValueError if another module has replaced an MoE block: its output would
    not stay in flight.
    """
    layers = zip(decoder_layers(model, family), mask, strict=True)
    for k, (layer, moe) in enumerate(layers):
        block: Any = getattr(layer, family.moe)
        if moe and not is_one_of(block, family.moe_block):
            raise ValueError(
                f"layer {k}: `{family.moe}` is a {type(block).__name__}, not"
                f" {family.moe_block}; convert the model before it is wrapped or"
                " replaced"
            )


def _replace_config(model: Any, new: Any) -> None:
    """Put `new`, and its parts (text, vision), in place of the model's config in
    every module that holds them.

    The old objects do not change: another model (the teacher) may share them. All
    modules of this model still share one object, from which the attention
    implementation is read at run time.
    """
    replaced = {id(old): part for old, part in _parts(model.config, new)}
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if id(value) in replaced:
                setattr(module, name, replaced[id(value)])


def _parts(old: Any, new: Any) -> Iterator[tuple[Any, Any]]:
    """Yield (old, new) and the same for the configs inside it, at any depth."""
    yield old, new
    for name, value in vars(old).items():
        if isinstance(value, PreTrainedConfig):
            yield from _parts(value, getattr(new, name))
