"""Find the routers of a model by the classes that transformers names in
`_can_record_outputs`, without a list for each family.
"""

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from fcsd.base.errors import UserError
from fcsd.model.families import (
    FAMILIES,
    Family,
    base_model_type,
    expert_counts,
    moe_mask,
)
from fcsd.model.families.structure import unwrapped


@dataclass(frozen=True)
class Router:
    """The router of one MoE layer.

    layer: index of the decoder layer. name: the module's name in the model.
    logits_index: index of the logits [tokens, num_experts] in the module's output, if
    that is a tuple.
    """

    layer: int
    name: str
    module: nn.Module
    num_experts: int
    top_k: int
    logits_index: int

    @property
    def experts_name(self) -> str:
        """The name of the experts beside the router, if the family has them there."""
        return f"{self.name.rpartition('.')[0]}.experts"

    @property
    def by_token(self) -> bool:
        """Whether a table over the vocabulary chooses the experts and the logits only
        weigh them, as in the first layers of DeepSeek-V4.
        """
        return any(
            not table.is_floating_point() and table.ndim == 2
            for table in self.module.buffers()
        )


def find_routers(model: nn.Module) -> list[Router]:
    """Return the routers of a model, converted or not, in the order of its layers.

    They are the modules whose `router_logits` transformers records, with three special
    cases: if it records a whole MoE block (ERNIE 4.5 VL), the router is the first one
    beside experts in it, that of text; if attention has experts as well (JetMoE), the
    router is that of the MoE block; if it records nothing of an MoE layer (DeepSeek-V4,
    whose first layers choose by token id), the router is the one beside its experts.

    Raises:
        UserError: there is no router, or not one for each MoE layer.
    """
    owner = unwrapped(model)
    config = owner.config
    family = FAMILIES.get(base_model_type(config.model_type))
    by_layer = defaultdict(list)
    for name, index in _recorded(owner):
        if (number := re.search(r"\.(\d+)\.", name)) is not None:
            by_layer[int(number[1])].append((name, index))
    if by_layer and family is not None:
        for layer, name in _unrecorded(owner, family, set(by_layer)):
            by_layer[layer].append((name, 0))
    if not by_layer:
        raise UserError(
            f"{type(owner).__name__} (model type '{config.model_type}'): no router"
            " found; transformers records no router logits of this model, so there is"
            " no routing to count, to compare or to steer"
        )
    num_experts, top_k = expert_counts(
        config.get_text_config() if family is None or family.multimodal else config
    )
    if num_experts is None or top_k is None:
        raise UserError(
            f"model type '{config.model_type}': its config does not say how many"
            " experts a layer has and a token uses"
        )
    routers = []
    for layer, candidates in sorted(by_layer.items()):
        # Attention may have a router as well: that of the MoE block is preferred.
        inside = [
            candidate
            for candidate in candidates
            if family is not None and f".{family.moe}." in candidate[0]
        ]
        (name, index), *surplus = inside or candidates
        if surplus:
            names = ", ".join(candidate[0] for candidate in [(name, index), *surplus])
            raise UserError(
                f"model type '{config.model_type}': layer {layer} has several routers:"
                f" {names}"
            )
        routers.append(
            Router(layer, name, owner.get_submodule(name), num_experts, top_k, index)
        )
    layers = [router.layer for router in routers]
    if family is None:
        return routers
    moe_layers = [k for k, is_moe in enumerate(moe_mask(config, family)) if is_moe]
    if layers != moe_layers:
        raise UserError(
            f"model type '{config.model_type}': routers found in layers {layers}, but"
            f" MoE layers are {moe_layers}"
        )
    return routers


def _recorded(model: nn.Module) -> Iterator[tuple[str, int]]:
    """Yield the name and the index of the logits for each module whose `router_logits`
    transformers records.
    """
    yielded: set[nn.Module] = set()
    entries = [entry for module in model.modules() for entry in _entries(module)]
    for name, module in model.named_modules():
        for target, index, part in entries:
            if (
                isinstance(module, target)
                and f".{part or ''}" in f".{name}"
                and module not in yielded
            ):
                yielded.add(module)
                # A module with experts is a whole MoE block: its router is inside.
                inner = _beside_experts(module)
                yield (f"{name}.{inner}", 0) if inner else (name, index)


def _unrecorded(
    model: nn.Module, family: Family, recorded: set[int]
) -> Iterator[tuple[int, str]]:
    """Yield layer and name of the routers beside experts in layers of which transformers
    records none.
    """
    for name, module in model.named_modules():
        block = re.search(r"\.(\d+)\.(\w+)$", name)
        if block is None or block[2] != family.moe or int(block[1]) in recorded:
            continue
        if (router := _beside_experts(module)) is not None:
            yield int(block[1]), f"{name}.{router}"


def _entries(module: nn.Module) -> Iterator[tuple[type[nn.Module], int, str | None]]:
    entries: Any = (getattr(module, "_can_record_outputs", None) or {}).get(
        "router_logits", []
    )
    # An entry is a class, or an `OutputRecorder` with a class and an index.
    for entry in entries if isinstance(entries, list | tuple) else [entries]:
        if isinstance(target := getattr(entry, "target_class", entry), type):
            yield target, getattr(entry, "index", 1), getattr(entry, "layer_name", None)


def _beside_experts(block: nn.Module) -> str | None:
    """Return the name of the first router beside experts in a module; None if it holds
    none.
    """
    children = dict(block.named_modules())
    for name in children:
        owner, _, last = name.rpartition(".")
        if (
            last in ("gate", "router")
            and f"{owner}.experts".removeprefix(".") in children
        ):
            return name
    return None
