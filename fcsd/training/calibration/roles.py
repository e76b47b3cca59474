"""Look up which weights of a layer read the input of a branch and which write its output
(`fcsd.model.families.family`), and fold maps into them. With its map folded in, a
weight reads x A instead of x, or writes u B instead of u.

    roles = roles_of(layer, family)               # of a rewired layer
    roles.sides                                   # [Side("self_attn", readers), Side("mlp", readers)]
    roles.groups                                  # [Group("self_attn", writers, 1.0), Group("mlp", writers, 1.0)]

Not covered: routed experts that are separate modules (no family has them).
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fcsd.model.connectivity.stack import is_one_of
from fcsd.model.families import Family
from fcsd.model.families.family import READS, WRITES, Folding

Place = tuple[str, int]
"""The name of a parameter in its layer, and the axis that a map is folded into."""


@dataclass(frozen=True)
class Side:
    """The input of one branch: the modules that are called with it, and the weights that
    a map of it is folded into.
    """

    modules: tuple[str, ...]
    readers: tuple[Place, ...]


@dataclass(frozen=True)
class Group:
    """The output of one branch: `factor` times the summed outputs of its modules, linear
    in the weights that a map is folded into.
    """

    modules: tuple[str, ...]
    writers: tuple[Place, ...]
    factor: float


@dataclass(frozen=True)
class Experts:
    """A module whose routed experts are slices of its weights, so that each can have its
    own maps.

    readers: weights that multiply the input of the branch, and nothing else. writers,
    factor: as in `Group`.
    """

    module: str
    readers: tuple[Place, ...]
    writers: tuple[Place, ...]
    factor: float


@dataclass
class Roles:
    """The weights of one layer that maps can be folded into. rest: inputs and outputs
    without such weights, and why.
    """

    sides: list[Side] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)
    experts: Experts | None = None
    rest: list[str] = field(default_factory=list)


def roles_of(layer: Any, family: Family) -> Roles:
    """Return the roles of the weights of a rewired layer."""
    separate(layer)
    # With `mlp: full` the MLP reads the outputs of the other branches: a map of these
    # would change its input as well as the stream.
    mlp_reads_the_rest = not layer.farskip_plan.outdated and family.layout != "parallel"
    folding, roles, closed = family.folding, Roles(), []
    for modules in _branches(layer, family):
        name = modules[0]
        # Parts that cannot be folded are named in the result, never silently skipped.
        if readers := _places(layer, modules, folding, reads=True):
            roles.sides.append(Side(modules, readers))
        else:
            roles.rest.append(f"input of {name}: no weight multiplies it alone")
        for module, operation in folding.other_uses:
            if module in dict(layer.named_modules()) and _within(module, name):
                roles.rest.append(f"input of {name}: {operation} reads it, too")
        is_moe = is_one_of(layer.get_submodule(name), family.moe_block)
        read_inside = mlp_reads_the_rest and name != family.moe
        # Hyper-connections spread an output over the streams.
        spread = family.layout == "streams" or (is_moe and not family.additive)
        if name in folding.closed or spread or read_inside:
            closed.append(
                f"output of {name}: its last matmul does not reach the stream by sums"
                " alone"
            )
            continue
        writers = _places(layer, modules, folding, reads=False)
        roles.groups.append(Group(modules, writers, _factor(layer, family, name)))
        if is_moe and family.scaled_experts is None:
            roles.experts = _experts(layer, family, readers, roles.groups[-1])
    roles.groups.sort(key=lambda group: group.modules[0].count("."))
    roles.rest += [
        f"input of {name}: not the output of a norm"
        for name in folding.unread
        if getattr(layer, name) is not None
    ]
    roles.rest += closed
    return roles


def separate(layer: nn.Module) -> None:
    """Give each weight separate contiguous storage; some conversions leave several
    weights as views of one tensor.
    """
    for parameter in layer.parameters():
        if (
            parameter.untyped_storage().nbytes() != parameter.nbytes
            or not parameter.is_contiguous()
        ):
            parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)


def _branches(layer: nn.Module, family: Family) -> list[tuple[str, ...]]:
    """List the modules that read the stream. The MLP or MoE block comes last, together
    with a shared expert that is outside it.
    """
    mlp_norms: tuple[str | None, ...]
    if isinstance(family.mlp_norm, tuple):
        mlp_norms = family.mlp_norm
    else:
        mlp_norms = (family.mlp_norm,)
    not_branches = {
        *(family.norms, family.in_norm, *mlp_norms),
        *family.connections,
        *family.folding.unread,
    }
    # A branch has matrices. Children without any (norms, residual gates) are skipped;
    # in dbrx, attention is inside the module that holds the norms.
    names = [
        f"{parent}.{name}" if parent else name
        for parent in dict.fromkeys(("", family.norms or ""))
        for name, child in layer.get_submodule(parent).named_children()
        if name not in not_branches
        and any(parameter.ndim >= 2 for parameter in child.parameters())
    ]
    mlp = tuple(name for name in (family.moe, family.layer_shared) if name in names)
    return [*((name,) for name in names if name not in mlp), mlp]


def _places(
    layer: nn.Module, modules: tuple[str, ...], folding: Folding, *, reads: bool
) -> tuple[Place, ...]:
    ends = (*READS, *folding.reads) if reads else (*WRITES, *folding.writes)
    left_out = [*folding.left_out]
    for name, apart in folding.apart:
        left_out += apart if type(layer).__name__ == name else ()
    latent = dict(layer.named_modules()).get(folding.latent or "-")
    if latent is not None and next(latent.parameters(), None) is not None:
        left_out.append(f"{str(folding.latent).rpartition('.')[0]}.experts")
    weight_axes = []
    for name, parameter in layer.named_parameters():
        weight = name.removesuffix(".weight").removesuffix(".bias")
        if (
            any(_within(name, module) for module in modules)
            and not any(_within(name, module) for module in left_out)
            and any(f".{weight}".endswith(f".{end}") for end in ends)
            # A bias is added to a branch's output, but multiplies no input.
            and (parameter.ndim > 1 or not reads)
        ):
            transposed = name.rpartition(".")[2] in folding.transposed
            # Usually the last axis is the inputs' and the one before it the outputs';
            # transposed weights have them the other way round.
            last = parameter.ndim - 1
            axis = last if reads != transposed else max(last - 1, 0)
            weight_axes.append((name, axis))
    return tuple(weight_axes)


def _factor(layer: nn.Module, family: Family, branch: str) -> float:
    name = family.residual_multiplier
    if branch == family.moe and family.folding.mlp_factor:
        name = family.folding.mlp_factor
    return float(getattr(layer, name)) if name else 1.0


def _experts(
    layer: nn.Module, family: Family, readers: tuple[Place, ...], group: Group
) -> Experts | None:
    """Return the routed experts of an MoE block if they are slices of its weights."""
    block: Any = layer.get_submodule(family.moe)
    # The module's output reaches the stream times this factor.
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

    def inside(weights: tuple[Place, ...], module: str) -> tuple[Place, ...]:
        return tuple(
            (name, axis) for name, axis in weights if name.rpartition(".")[0] == module
        )

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
    weights: Iterable[Place],
    matrix: Tensor,
    use: Literal["reads", "writes"],
    expert: int | None = None,
) -> None:
    """Fold a map into weights of a layer, in place and in each weight's dtype.

    weights: names of parameters in the layer, and the axis of each that the map
    multiplies. matrix: A or B (D, D), which maps rows: x A, u B. expert: change only
    this slice of the parameters, along their first axis, the experts.
    """
    for name, axis in weights:
        weight = layer.get_parameter(name)
        # Multiply in float32 at least; only the product is rounded to the weight's
        # dtype. A weight that reads x A computes x A Wᵀ = x (W Aᵀ)ᵀ, hence the
        # transpose.
        factor = (matrix.T if use == "reads" else matrix).to(
            weight.device, torch.promote_types(weight.dtype, torch.float32)
        )
        if expert is not None:
            _fold(weight[expert], axis - 1, factor)
        # One expert at a time: a float32 copy of all of them is large.
        elif weight.ndim == 3 and axis:
            for expert_weight in weight:
                _fold(expert_weight, axis - 1, factor)
        else:
            _fold(weight, axis, factor)


def _fold(weight: Tensor, axis: int, matrix: Tensor) -> None:
    moved = weight.movedim(axis, -1)
    moved.copy_((moved.to(matrix.dtype) @ matrix).to(weight.dtype))
