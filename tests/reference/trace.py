"""Find, by running a layer once, which of its weights read the input of a branch, and
which write its output.

    roles = trace_layer(layer, family, run)       # run(): a forward pass of the rewired layer, on a few tokens
    roles.sides                                   # [Side("self_attn", readers), Side("mlp", readers)]
    roles.groups                                  # [Group("self_attn", writers, 1.0), Group("mlp", writers, 1.0)]

A weight whose path is not understood (`tests.reference.follow`) is not foldable, and is
listed with the operation in which the path ended.

Not covered: weights that the given tokens do not use (a module per expert; no family
has that).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fcsd.base.hooks import first_tensor, hidden_states
from fcsd.model.families import Family
from fcsd.training.calibration.roles import Experts, Group, Place, Roles, Side, separate
from tests.reference.follow import COORDINATE, REST, Follow, Mark, is_last, storage


def trace_layer(layer: nn.Module, family: Family, run: Callable[[], Any]) -> Roles:
    """Run a rewired layer and return what can be folded into which of its weights.

    run: calls the layer on a few tokens, without gradients, and returns its output.
    """
    separate(layer)
    follow = Follow(layer)
    holder: nn.Module = getattr(layer, family.norms) if family.norms else layer
    names = (
        family.in_norm,
        *(
            family.mlp_norm
            if isinstance(family.mlp_norm, tuple)
            else (family.mlp_norm,)
        ),
    )
    norms = [getattr(holder, name) for name in names if name]
    connections = [getattr(layer, name) for name in family.connections]
    normed: dict[int, None] = {}
    sides: dict[str, list[str]] = {}
    outputs: dict[str, Mark | None] = {}
    paths = {module: name for name, module in layer.named_modules()}
    branches = [
        child
        for parent in dict.fromkeys((layer, holder))
        for child in parent.children()
        if child not in (*norms, *connections)
        and child is not holder
        and any(p.ndim >= 2 for p in child.parameters())
    ]

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        hidden = hidden_states(args, kwargs)
        named = paths[module] in (family.attention, family.moe)
        if hidden is None or (
            storage(hidden) not in normed
            and not (named and family.layout != "pre_norm")
        ):
            return
        # A shared expert beside the block reads the block's input; elsewhere two
        # branches may be given one tensor, though they read different ones in the
        # original.
        side = family.moe if paths[module] == family.layer_shared else paths[module]
        sides.setdefault(side, []).append(paths[module])
        follow.inputs[storage(hidden)] = Mark(
            {1: COORDINATE}, hidden.size(-1), name=side
        )
        follow.inside.append(side)

    def leave(module: nn.Module, _: Any, out: Any) -> None:
        tensor = first_tensor(out)
        if any(paths[module] in modules for modules in sides.values()):
            follow.inside.pop()
        if module in norms and not isinstance(out, Tensor):
            # no norm, though it reads the stream as one does (gemma4's router)
            branches.append(module)
        elif module in norms and tensor is not None:
            normed[storage(tensor)] = None
            follow.inputs.pop(storage(tensor), None)
        if module in connections and not norms:
            # its norm is inside of it
            read = out[family.connection_returns.index("read")]
            normed[storage(read)] = None
            follow.inputs.pop(storage(read), None)
        mark = follow.sums.get(storage(tensor)) if tensor is not None else None
        outputs[paths[module]] = (
            mark if mark is not None and is_last(tensor, mark) else None
        )  # type: ignore[arg-type]

    hooks = [
        module.register_forward_hook(leave) for module in paths if module is not layer
    ]
    hooks += [
        child.register_forward_pre_hook(enter, with_kwargs=True) for child in branches
    ]
    try:
        with torch.no_grad(), follow:
            out = first_tensor(run())
    finally:
        for hook in hooks:
            hook.remove()
    final = follow.sums.get(storage(out)) if out is not None else None
    roles = Roles()
    _add_sides(roles, follow, sides, [paths[b] for b in branches])
    _add_groups(roles, follow, outputs, final, sides)
    _add_experts(roles, layer, outputs, final)
    return roles


def _add_sides(
    roles: Roles, follow: Follow, sides: dict[str, list[str]], branches: list[str]
) -> None:
    for side, modules in sides.items():
        readers = [
            place
            for place in follow.readers.get(side, {})
            if place not in follow.read_elsewhere
        ]
        if readers:
            roles.sides.append(Side(tuple(dict.fromkeys(modules)), tuple(readers)))
        else:
            roles.rest.append(f"input of {side}: no weight multiplies it alone")
        for use in sorted(follow.other_uses.get(side, ())):
            roles.rest.append(f"input of {side}: {use} reads it, too")
    read = {module for modules in sides.values() for module in modules}
    roles.rest += [
        f"input of {name}: not the output of a norm"
        for name in branches
        if name not in read
    ]


def _add_groups(
    roles: Roles,
    follow: Follow,
    outputs: dict[str, Mark | None],
    final: Mark | None,
    sides: dict[str, list[str]],
) -> None:
    reached = final.terms if final is not None else {}
    taken: set[Place] = set()
    groups: dict[tuple[str, float], list[tuple[str, list[Place]]]] = {}
    for module, mark in sorted(outputs.items(), key=lambda item: item[0].count(".")):
        if (
            mark is None
            or not mark.terms
            or REST in mark.terms
            or taken & mark.terms.keys()
        ):
            continue
        if any(
            p in follow.consumed or reached.get(p, (0.0, -1))[1] != n
            for p, (_, n) in mark.terms.items()
        ):
            continue
        factors = {
            reached[place][0] / factor for place, (factor, _) in mark.terms.items()
        }
        if len(factors) == 1:
            inside = [
                side
                for side, modules in sides.items()
                if any(_within(module, m) for m in modules)
            ]
            groups.setdefault(
                (inside[0] if inside else module, factors.pop()), []
            ).append((module, list(mark.terms)))
            taken |= mark.terms.keys()
    for (_, factor), parts in groups.items():
        places = [place for _, places in parts for place in places]
        roles.groups.append(
            Group(tuple(module for module, _ in parts), tuple(places), factor)
        )
    for side in sides:
        if side not in {name for name, _ in groups}:
            roles.rest.append(
                f"output of {side}: its last matmul does not reach the stream by sums"
                " alone"
            )


def _add_experts(
    roles: Roles, layer: nn.Module, outputs: dict[str, Mark | None], final: Mark | None
) -> None:
    written = {place for group in roles.groups for place in group.writers}
    for module, mark in outputs.items():
        terms = mark.terms if mark is not None else {}
        weights = [
            layer.get_parameter(name)
            for name, axis in terms
            if (name, axis) in written
            and name.rpartition(".")[0] == module
            and axis > 0
        ]
        if len(weights) < len(terms) or not any(weight.ndim == 3 for weight in weights):
            continue
        assert final is not None
        factors = {
            final.terms[place][0] / factor for place, (factor, _) in terms.items()
        }
        same = all(
            final.terms[place][1] == number for place, (_, number) in terms.items()
        )
        if same and len(factors) == 1 and len({len(weight) for weight in weights}) == 1:
            of_sides = [
                [
                    place
                    for place in side.readers
                    if place[0].rpartition(".")[0] == module
                ]
                for side in roles.sides
            ]
            readers, *more = [places for places in of_sides if places] or [[]]
            sliced = all(
                axis > 0 and len(layer.get_parameter(name)) == len(weights[0])
                for name, axis in readers
            )
            readers = readers if sliced and not more else []
            roles.experts = Experts(module, tuple(readers), tuple(terms), factors.pop())
            return


def _within(module: str, branch: str) -> bool:
    return module == branch or module.startswith(f"{branch}.")
