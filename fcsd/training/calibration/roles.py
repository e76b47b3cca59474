"""Look up which weights of a layer read what a branch is given, and which write what it
adds: `fcsd.model.families.folding`; and fold a map into them: they then read x A in the
place of x, or write u B in the place of u.

    roles = roles_of(layer, family)               # of a rewired layer
    roles.sides                                   # [Side("self_attn", readers), Side("mlp", readers)]
    roles.groups                                  # [Group("self_attn", writers, 1.0), Group("mlp", writers, 1.0)]

Not covered: routed experts that are modules of their own (no family has them).
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fcsd.model.connectivity.rewire import is_one_of
from fcsd.model.families import Family
from fcsd.model.families.folding import READS, WRITES, Folding

Place = tuple[str, int]
"""A parameter's name in its layer, and the axis of it that a map is folded into."""


@dataclass(frozen=True)
class Side:
    """What one branch reads: module that is called with it, and the weights that a map
    of it goes into.
    """

    modules: tuple[str, ...]
    readers: tuple[Place, ...]


@dataclass(frozen=True)
class Group:
    """What one branch adds: `factor` times the outputs of modules, linear in the
    weights that a map goes into.
    """

    modules: tuple[str, ...]
    writers: tuple[Place, ...]
    factor: float


@dataclass(frozen=True)
class Experts:
    """A module of routed experts that are slices of its weights, so that each can have
    maps of its own.

    readers: weights that multiply what the branch reads, and nothing else. writers,
    factor: as of a `Group`.
    """

    module: str
    readers: tuple[Place, ...]
    writers: tuple[Place, ...]
    factor: float


@dataclass
class Roles:
    """What can be folded in one layer. rest: what cannot be, and why."""

    sides: list[Side] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)
    experts: Experts | None = None
    rest: list[str] = field(default_factory=list)


def roles_of(layer: Any, family: Family) -> Roles:
    """Return what can be folded into which weights of a rewired layer."""
    separate(layer)
    mlp_reads_the_rest = not layer.farskip_plan.outdated and family.layout != "parallel"
    folding, roles, closed = family.folding, Roles(), []
    for modules in _branches(layer, family):
        name = modules[0]
        if readers := _places(layer, modules, folding, reads=True):
            roles.sides.append(Side(modules, readers))
        else:
            roles.rest.append(
                f"what {name} reads: no weight of it multiplies that alone"
            )
        for module, operation in folding.other_uses:
            if module in dict(layer.named_modules()) and _within(module, name):
                roles.rest.append(f"what {name} reads, where {operation} takes it")
        is_moe = is_one_of(layer.get_submodule(name), family.moe_block)
        read_inside = mlp_reads_the_rest and name != family.moe
        if name in folding.closed or (is_moe and not family.additive) or read_inside:
            closed.append(
                f"what {name} adds: its last product does not reach the stream by sums"
                " alone"
            )
            continue
        writers = _places(layer, modules, folding, reads=False)
        roles.groups.append(Group(modules, writers, _factor(layer, family, name)))
        if is_moe and family.scaled_experts is None:
            roles.experts = _experts(layer, family, readers, roles.groups[-1])
    roles.groups.sort(key=lambda group: group.modules[0].count("."))
    roles.rest += [
        f"what {name} reads: it is not given the output of a norm"
        for name in folding.unread
    ]
    roles.rest += closed
    return roles


def separate(layer: nn.Module) -> None:
    """Give weights that are views of one tensor, as some conversions leave them,
    storages of their own.
    """
    for parameter in layer.parameters():
        if (
            parameter.untyped_storage().nbytes() != parameter.nbytes
            or not parameter.is_contiguous()
        ):
            parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)


def _branches(layer: nn.Module, family: Family) -> list[tuple[str, ...]]:
    """List the modules that read the stream, the MLP or MoE block last, with the shared
    expert beside it.
    """
    mlp_norms = (
        family.mlp_norm if isinstance(family.mlp_norm, tuple) else (family.mlp_norm,)
    )
    others = {family.norms, family.in_norm, *mlp_norms, *family.folding.unread}
    names = [
        f"{parent}.{name}" if parent else name
        for parent in dict.fromkeys(("", family.norms or ""))
        for name, child in layer.get_submodule(parent).named_children()
        if name not in others
        and any(parameter.ndim >= 2 for parameter in child.parameters())
    ]
    mlp = tuple(name for name in (family.moe, family.layer_shared) if name in names)
    return [*((name,) for name in names if name not in mlp), mlp]


def _places(
    layer: nn.Module, modules: tuple[str, ...], folding: Folding, *, reads: bool
) -> tuple[Place, ...]:
    ends = (*READS, *folding.reads) if reads else (*WRITES, *folding.writes)
    places = []
    for name, parameter in layer.named_parameters():
        weight = name.removesuffix(".weight").removesuffix(".bias")
        if (
            any(_within(name, module) for module in modules)
            and not any(_within(name, module) for module in folding.left_out)
            and any(f".{weight}".endswith(f".{end}") for end in ends)
            and (parameter.ndim > 1 or not reads)
        ):
            transposed = name.rpartition(".")[2] in folding.transposed
            inputs = parameter.ndim - 1
            places.append((name, inputs if reads != transposed else max(inputs - 1, 0)))
    return tuple(places)


def _factor(layer: nn.Module, family: Family, branch: str) -> float:
    name = family.residual_multiplier
    if branch == family.moe and family.folding.mlp_factor:
        name = family.folding.mlp_factor
    return float(getattr(layer, name)) if name else 1.0


def _experts(
    layer: nn.Module, family: Family, readers: tuple[Place, ...], group: Group
) -> Experts | None:
    """Return the routed experts of a MoE block whose weights are slices of one tensor each."""
    block: Any = layer.get_submodule(family.moe)
    factor = group.factor
    if family.folding.routed_factor:
        factor *= getattr(block, family.folding.routed_factor)
    has_shared = (
        family.block_shared and getattr(block, family.block_shared, None) is not None
    )
    if (
        has_shared
        and family.shared_average
        and getattr(block, family.shared_average) == "average"
    ):
        factor /= 2

    def inside(places: tuple[Place, ...], module: str) -> tuple[Place, ...]:
        return tuple(place for place in places if place[0].rpartition(".")[0] == module)

    for name, _ in group.writers:
        module = name.rpartition(".")[0]
        if module.endswith("experts") and layer.get_parameter(name).ndim == 3:
            return Experts(
                module, inside(readers, module), inside(group.writers, module), factor
            )
    return None


def _within(module: str, branch: str) -> bool:
    return module == branch or module.startswith(f"{branch}.")


@torch.no_grad()
def fold_map(
    layer: nn.Module,
    places: Iterable[Place],
    matrix: Tensor,
    use: Literal["reads", "writes"],
    expert: int | None = None,
) -> None:
    """Change the weights of a layer in place, each in its own dtype.

    places: names of parameters in the layer, and the axis of each that the map is
    multiplied with. matrix: (D, D), rows are what is mapped: x A, u B. expert: change
    this slice of the parameters only, whose first axis is the experts.
    """
    for name, axis in places:
        weight = layer.get_parameter(name)
        # In float32 at least: what is rounded is the product, to the weight's dtype.
        factor = (matrix.T if use == "reads" else matrix).to(
            weight.device, torch.promote_types(weight.dtype, torch.float32)
        )
        if expert is not None:
            _fold(weight[expert], axis - 1, factor)
        # an expert at a time: copies of all of them are large
        elif weight.ndim == 3 and axis:
            for part in weight:
                _fold(part, axis - 1, factor)
        else:
            _fold(weight, axis, factor)


def _fold(weight: Tensor, axis: int, matrix: Tensor) -> None:
    moved = weight.movedim(axis, -1)
    moved.copy_((moved.to(matrix.dtype) @ matrix).to(weight.dtype))
