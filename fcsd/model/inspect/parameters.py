"""Count the parameters of a model on the meta device, by part."""

from collections.abc import Iterator
from typing import Any

from fcsd.model.connectivity.stack import decoder_layers, is_one_of
from fcsd.model.families import Family
from fcsd.model.inspect.table import PARTS


def count_parameters(
    model: Any, family: Family, num_experts: int | None, experts_per_token: int | None
) -> dict[str, Any]:
    """Count the parameters of a regular model exactly: {"total", "active", "parts":
    part -> {"total", "active"}}.

    Tied matrices count once. Active parameters are those that one text token uses: all
    except routed experts that are not chosen for it and the towers of a multimodal
    model; None if unknown. Router biases that are buffers do not count.

    num_experts: experts of a layer; None takes the first dimension of the experts'
    tensors. experts_per_token: None if the config does not say.
    """
    total, unused = dict.fromkeys(PARTS, 0), dict.fromkeys(PARTS, 0)
    counted: set[int] = set()
    for part, parameter, routed in _parameters(model, family):
        if id(parameter) in counted:
            continue
        counted.add(id(parameter))
        total[part] += parameter.numel()
        if routed and experts_per_token is not None:
            # Some families stack the rows of all experts in the first dimension.
            divisible = num_experts and parameter.shape[0] % num_experts == 0
            count = num_experts if divisible else parameter.shape[0]
            used = parameter.numel() // count * experts_per_token
            unused[part] += parameter.numel() - used
    active: dict[str, int | None] = {part: total[part] - unused[part] for part in PARTS}
    # Text does not pass through the towers of a multimodal model.
    if family.multimodal:
        active["other"] = 0
    if experts_per_token is None:
        active["routed_experts"] = None
    return {
        "total": sum(total.values()),
        "active": None if experts_per_token is None else sum(active.values()),
        "parts": {
            part: {"total": total[part], "active": active[part]}
            for part in PARTS
            if total[part]
        },
    }


def _parameters(model: Any, family: Family) -> Iterator[tuple[str, Any, bool]]:
    """Yield parts, parameters and whether a parameter belongs to routed experts.

    A parameter may come several times, and counts the first time: specific parts are
    yielded before general ones.
    """
    # A tied head is the same parameter, which then counts as embeddings.
    yield from _whole_module("embeddings", model.get_input_embeddings())
    yield from _whole_module("lm_head", model.get_output_embeddings())
    stack = decoder_layers(model, family)
    for layer in stack:
        for connection in family.connections:
            yield from _whole_module("connections", getattr(layer, connection))
        block = getattr(layer, family.moe)
        if is_one_of(block, family.moe_block):
            yield from _of_block(block, family)
        elif family.mlp_block and not is_one_of(block, family.mlp_block):
            yield from _whole_module("attention", block)
        yield from _whole_module("dense_mlp", block)
        yield from _whole_module(
            "shared_experts", getattr(layer, family.layer_shared or "", None)
        )
        for name, child in layer.named_children():
            scales = family.residual == "scale" and name in family.residual_names
            for inner, parameter in child.named_parameters():
                is_norm = "norm" in name or scales
                if is_norm and all(p.ndim <= 1 for p in child.parameters()):
                    yield "norms", parameter, False
                elif name == "router":
                    yield "router", parameter, False
                elif name in ("mlp", "feed_forward"):
                    yield "dense_mlp", parameter, False
                else:
                    # Attention may be routed to experts as well (JetMoE).
                    routed = "experts" in inner.split(".") and parameter.ndim == 3
                    yield "attention", parameter, routed
    if family.connections:
        mixes = type(getattr(stack[-1], family.connections[-1]))
        yield from _before_the_head(model, stack, mixes)
    for parameter in model.parameters():
        # Beside layers, embeddings and head, a text model has a norm, or a scale.
        is_norm = parameter.ndim == 1 and not family.multimodal
        yield "norms" if is_norm else "other", parameter, False


def _before_the_head(
    model: Any, stack: Any, mixes: type
) -> Iterator[tuple[str, Any, bool]]:
    """Yield what mixes the streams for the head: it is beside the layers. mixes: class
    of what does so in a layer.
    """
    owner = next(m for m in model.modules() if getattr(m, "layers", None) is stack)
    for child in owner.children():
        matrices = any(p.ndim > 1 for p in child.parameters())
        if child is not stack and (matrices or isinstance(child, mixes)):
            yield from _whole_module("connections", child)


def _of_block(block: Any, family: Family) -> Iterator[tuple[str, Any, bool]]:
    for name in (family.block_shared, family.block_gate):
        yield from _whole_module("shared_experts", getattr(block, name or "", None))
    for name, parameter in block.named_parameters():
        # A norm of the experts' summed output is not one expert's.
        is_norm = parameter.ndim == 1 and "norm" in name
        routed = not is_norm and ("experts" in name.split(".") or parameter.ndim == 3)
        yield "routed_experts" if routed else "router", parameter, routed


def _whole_module(part: str, module: Any) -> Iterator[tuple[str, Any, bool]]:
    yield from (
        (part, parameter, False)
        for parameter in (module.parameters() if module is not None else ())
    )
