"""Find, by running a layer once, which of its weights read what a branch is given, and which write what it adds.

    roles = trace_layer(layer, family, run)       # run(): a forward pass of the rewired layer, on a few tokens
    roles.sides                                   # [Side("self_attn", readers), Side("mlp", readers)]
    roles.groups                                  # [Group("self_attn", writers, 1.0), Group("mlp", writers, 1.0)]

A map of what a branch reads can go into a weight if the weight is multiplied with it along one axis, and nothing but
copies, choices of rows and factors a token lie between the two. A map of what a branch adds can go into a weight if the
same is true between its product and the layer's output, where further sums may lie. So tensors are followed by their
storage through the operations that torch dispatches, and a dimension by its stride: views need no rules of their own.
What is not understood is not foldable, and is listed with the operation that it ended in.

Not covered: weights that are not touched by the tokens that were run (a module an expert; no family has that).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fcsd.families import Family

aten = torch.ops.aten

Place = tuple[str, int]
"""A parameter's name in its layer, and the axis of it that a map is folded into."""

_COORDINATE = -1  # the axis of a followed tensor that a map would act on
_REST = ("", 0)  # stands for what is added beside the products of weights

_SAME = {aten._to_copy, aten.clone, aten.detach, aten.alias, aten.contiguous, aten.lift_fresh}
_NO_VALUES = {
    aten.zeros_like, aten.empty_like, aten.ones_like, aten.full_like, aten.new_zeros, aten.new_empty, aten.new_ones,
    aten.new_full, aten.zeros, aten.empty, aten.sym_size, aten.sym_stride, aten.is_same_size,
}  # fmt: skip
_ZERO = {aten.zeros_like, aten.new_zeros, aten.zeros}
_ROWS = {aten.index, aten.index_select, aten.repeat, aten.cat, aten.stack, aten.index_put, aten.slice_scatter}
_INTO = {aten.index_add, aten.index_add_, aten.index_put_, aten.scatter_add, aten.scatter_add_, aten.copy_}


@dataclass(frozen=True)
class Side:
    """What one branch reads: module that is called with it, and the weights that a map of it goes into."""

    modules: tuple[str, ...]
    readers: tuple[Place, ...]


@dataclass(frozen=True)
class Group:
    """What one branch adds: `factor` times the outputs of modules, linear in the weights that a map goes into."""

    modules: tuple[str, ...]
    writers: tuple[Place, ...]
    factor: float


@dataclass
class Roles:
    """What can be folded in one layer.

    experts: modules of routed experts that are slices of their weights, which can have maps of their own. left: what
        cannot be folded, and why.
    """

    sides: list[Side] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)
    experts: list[Group] = field(default_factory=list)
    left: list[str] = field(default_factory=list)


@dataclass
class _Mark:
    """What is known of a storage. axes: stride -> axis; terms: writer -> (scalar factor, operations a token)."""

    axes: dict[int, int]
    size: int  # of the coordinate
    terms: dict[Place, tuple[float, int]] = field(default_factory=dict)
    name: str = ""  # of the parameter, or of the side


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _axis(mark: _Mark, tensor: Tensor, dim: int) -> int | None:
    return mark.axes.get(tensor.stride(dim)) if tensor.size(dim) > 1 else None


def _last(tensor: Tensor, mark: _Mark) -> bool:
    """Whether the last dimension of a tensor is all of a mark's coordinate."""
    return tensor.ndim > 0 and tensor.size(-1) == mark.size and _axis(mark, tensor, -1) == _COORDINATE


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _tensors(value)
    elif isinstance(values, dict):
        yield from _tensors(list(values.values()))


class _Follow(TorchDispatchMode):
    """Follow parameters, what branches are given, and products of parameters through a forward pass."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.alive: list[Any] = []  # a storage that is freed would give its address to another
        self.parameters: dict[int, _Mark] = {}
        self.inputs: dict[int, _Mark] = {}
        self.sums: dict[int, _Mark] = {}
        self.readers: dict[str, dict[Place, None]] = {}
        self.other_uses: dict[str, set[str]] = {}
        self.read_elsewhere: set[Place] = set()
        self.consumed: dict[Place, str] = {}
        self.inside: list[str] = []  # sides whose modules are being called
        for name, parameter in layer.named_parameters():
            axes = {parameter.stride(d): d for d in reversed(range(parameter.ndim)) if parameter.size(d) > 1}
            self.parameters[_key(parameter)] = _Mark(axes, 0, name=name)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self.alive += [args, kwargs, out]
        self._follow(func.overloadpacket, func, args, kwargs, out)
        return out

    # ---- one operation

    def _follow(self, op: Any, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        outs = list(_tensors(out))
        if op in _ZERO or (op in (aten.full, aten.full_like, aten.new_full) and args[-1] == 0):
            for tensor in outs:
                self.sums[_key(tensor)] = _Mark({1: _COORDINATE}, tensor.shape[-1] if tensor.ndim else 0)
            return
        if op in _NO_VALUES:
            return
        ins = list(_tensors([args, kwargs]))
        if (
            outs
            and op not in _INTO
            and all(_key(o) in {_key(i) for i in ins} for o in outs)
            and not _writes(func)
        ):
            return  # a view: its strides say what it shows
        if op in (aten.mm, aten.bmm, aten._grouped_mm):
            return self._product(op, args[0], args[1], None, outs[0])
        if op in (aten.addmm, aten.baddbmm):
            return self._product(op, args[1], args[2], args[0], outs[0])
        if (
            str(op) == "transformers.grouped_mm_fallback"
        ):  # there only once transformers has been asked for it
            return self._product(op, args[0], args[1], None, outs[0])
        self._follow_parameters(op, args, outs)
        self._follow_inputs(op, args, ins, outs)
        self._follow_sums(op, args, kwargs, ins, outs)

    def _product(self, op: Any, a: Tensor, b: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """out[..., n, m] = sum over k of a[..., n, k] b[..., k, m], plus a bias."""
        terms: dict[Place, tuple[float, int]] | None = None
        for one, k, other, other_k, kept, place in (
            (a, a.ndim - 1, b, b.ndim - 2, a.ndim - 2, out.ndim - 2),
            (b, b.ndim - 2, a, a.ndim - 1, b.ndim - 1, out.ndim - 1),
        ):
            parameter, given = self.parameters.get(_key(one)), self.inputs.get(_key(other))
            if parameter is not None:
                read = _axis(parameter, one, k)
                whole = given is not None and other.size(other_k) == given.size
                if read is None:
                    pass
                elif whole and _axis(given, other, other_k) == _COORDINATE:  # type: ignore[arg-type]
                    self.readers.setdefault(given.name, {})[parameter.name, read] = None  # type: ignore[union-attr]
                else:
                    self.read_elsewhere.add((parameter.name, read))
                written = _axis(parameter, one, kept)
                if written is not None and written != read:
                    terms = {(parameter.name, written): (1.0, 0)}
                    axis = place
            elif (mixed := self.inputs.get(_key(one))) is not None:
                # Rows are mixed: the coordinate stays, unless it is what is summed over.
                if one.size(kept) == mixed.size and _axis(mixed, one, kept) == _COORDINATE:
                    self.inputs[_key(out)] = _Mark(
                        {out.stride(place): _COORDINATE}, mixed.size, name=mixed.name
                    )
                elif _key(other) not in self.parameters:
                    self._other_use(mixed, op)
            if (summed := self.sums.get(_key(one))) is not None and summed.terms:
                if (
                    parameter is None
                    and one.size(kept) == summed.size
                    and _axis(summed, one, kept) == _COORDINATE
                ):
                    terms = {p: (c, n + 1) for p, (c, n) in summed.terms.items()}
                    axis = place
                else:
                    self._consume(summed, op)
        if terms is None:
            return
        mark = _Mark({out.stride(axis): _COORDINATE}, out.size(axis), terms)
        if bias is not None:
            mark.terms = {**terms, **self._added(bias, mark)}
        self.sums[_key(out)] = mark

    def _added(self, other: Tensor, mark: _Mark) -> dict[Place, tuple[float, int]]:
        """Terms of what is added to a sum: another sum, a bias, or the rest."""
        found = self.sums.get(_key(other))
        if found is not None and (not found.terms or _last(other, found)):
            return found.terms
        parameter = self.parameters.get(_key(other))
        if parameter is not None and other.size(-1) == mark.size:
            written = _axis(parameter, other, other.ndim - 1)
            if written is not None:
                return {(parameter.name, written): (1.0, 0)}
        if found is not None:
            self._consume(found, "add")
        return {_REST: (1.0, 0)}

    def _follow_parameters(self, op: Any, args: Any, outs: list[Tensor]) -> None:
        source = args[0] if args and isinstance(args[0], Tensor) else None
        mark = self.parameters.get(_key(source)) if source is not None else None
        if source is None or mark is None or not outs:
            return
        out = outs[0]
        if op in _SAME and out.shape == source.shape:
            pairs = [(d, d) for d in range(out.ndim)]
        elif op in (aten.index, aten.index_select) and _first_dim_only(op, args):
            pairs = [(out.ndim - d, source.ndim - d) for d in range(1, source.ndim)]
        else:
            return
        axes = {out.stride(o): axis for o, s in pairs if (axis := _axis(mark, source, s)) is not None}
        self.parameters[_key(out)] = _Mark(axes, 0, name=mark.name)

    def _follow_inputs(self, op: Any, args: Any, ins: list[Tensor], outs: list[Tensor]) -> None:
        for tensor in ins:
            mark = self.inputs.get(_key(tensor))
            if mark is None:
                continue
            if (
                len(outs) == 1
                and _last(tensor, mark)
                and self._keeps_coordinate(op, args, tensor, outs[0], mark)
            ):
                self.inputs[_key(outs[0])] = _Mark({1: _COORDINATE}, mark.size, name=mark.name)
            else:
                self._other_use(mark, op)

    def _follow_sums(self, op: Any, args: Any, kwargs: Any, ins: list[Tensor], outs: list[Tensor]) -> None:
        marks = [(tensor, self.sums[_key(tensor)]) for tensor in ins if _key(tensor) in self.sums]
        if not outs or not marks:
            return
        out = outs[0]
        mark: _Mark | None = None
        adds = op in (aten.add, aten.add_) and kwargs.get("alpha", 1) == 1 and len(ins) == 2
        if (adds or op in _INTO) and any(mark.terms for _, mark in marks):
            tensor, first = next((t, m) for t, m in marks if m.terms)
            values = ins if adds else [args[0], ins[-1]]
            if _last(tensor, first) and out.size(-1) == first.size and out.stride(-1) == 1:
                mark = _Mark({1: _COORDINATE}, first.size)
                for value in values:
                    for place, term in self._added(value, first).items():
                        mark.terms[place] = _merged(mark.terms.get(place), term)
        elif len(outs) == 1 and all(self._passes(op, args, t, out, m) for t, m in marks):
            factor, per_token = _factor(op, args)
            terms = [(p, (c * factor, n + per_token)) for _, m in marks for p, (c, n) in m.terms.items()]
            mark = _Mark({1: _COORDINATE}, marks[0][1].size, dict(terms))
        if mark is None:
            for _, one in marks:
                self._consume(one, op)
            if _key(out) in self.sums:
                del self.sums[_key(out)]  # written in place with something else
            return
        self.sums[_key(out)] = mark

    def _passes(self, op: Any, args: Any, tensor: Tensor, out: Tensor, mark: _Mark) -> bool:
        return not mark.terms or (_last(tensor, mark) and self._keeps_coordinate(op, args, tensor, out, mark))

    def _keeps_coordinate(self, op: Any, args: Any, tensor: Tensor, out: Tensor, mark: _Mark) -> bool:
        """Whether `out` has, in its last dimension, the coordinate of `tensor`, row by row up to factors."""
        if out.ndim == 0 or out.size(-1) != mark.size or out.stride(-1) != 1:
            return False
        if op in _SAME:
            return out.shape == tensor.shape
        if op in (aten.mul, aten.mul_, aten.div, aten.div_):
            other = args[1] if args[0] is tensor else args[0]
            if op in (aten.div, aten.div_) and args[0] is not tensor:
                return False
            return not isinstance(other, Tensor) or other.ndim == 0 or other.size(-1) == 1
        if op in (aten.masked_fill, aten.masked_fill_):
            return args[2] == 0 and (args[1].ndim == 0 or args[1].size(-1) == 1)
        if op in (aten.sum, aten.mean):
            dims: Any = args[1] if len(args) > 1 else ()
            return bool(dims) and all(d % tensor.ndim != tensor.ndim - 1 for d in dims)
        if op in (aten.index, aten.index_select, aten.repeat, aten.cat, aten.stack):
            if op is aten.index:
                return len(args[1]) < tensor.ndim or args[1][-1] is None
            if op is aten.repeat:
                return args[1][-1] == 1
            dim = args[1] if len(args) > 1 else 0
            if op is aten.cat and not all(_key(t) in self.inputs or _key(t) in self.sums for t in args[0]):
                return False
            return dim % out.ndim != out.ndim - 1
        return False

    def _other_use(self, mark: _Mark, op: Any) -> None:
        if mark.name in self.inside:  # outside of its branch it is the stream, or what another branch reads
            self.other_uses.setdefault(mark.name, set()).add(str(op))

    def _consume(self, mark: _Mark, op: Any) -> None:
        for place in mark.terms:
            self.consumed.setdefault(place, str(op))


def _writes(func: Any) -> bool:
    return any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments)


def _first_dim_only(op: Any, args: Any) -> bool:
    if op is aten.index_select:
        return args[1] == 0
    return len(args[1]) == 1 and args[1][0] is not None and args[1][0].dtype != torch.bool


def _factor(op: Any, args: Any) -> tuple[float, int]:
    """Return what an operation multiplies with: a number, and how many factors a token."""
    if op in (aten.mul, aten.mul_, aten.div, aten.div_):
        numbers = [a for a in args[:2] if not isinstance(a, Tensor)]
        numbers += [a.item() for a in args[:2] if isinstance(a, Tensor) and a.ndim == 0]
        if numbers:
            value = float(numbers[0])
            return (1 / value if op in (aten.div, aten.div_) else value), 0
        return 1.0, 1
    return 1.0, 0 if op in _SAME else 1


def _merged(one: tuple[float, int] | None, other: tuple[float, int]) -> tuple[float, int]:
    return other if one is None or one[1] < other[1] else one


def _separate(layer: nn.Module) -> None:
    """Give weights that are views of one tensor, as some conversions leave them, storages of their own."""
    for parameter in layer.parameters():
        if parameter.untyped_storage().nbytes() != parameter.nbytes or not parameter.is_contiguous():
            parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)


def first_tensor(values: Any) -> Tensor | None:
    """Return the first tensor of a value, at any depth; None where it has none."""
    return next(_tensors(values), None)


def trace_layer(layer: nn.Module, family: Family, run: Callable[[], Any]) -> Roles:
    """Run a rewired layer and return what can be folded into which of its weights.

    run: calls the layer on a few tokens, without gradients; returns what it gives.
    """
    _separate(layer)
    follow = _Follow(layer)
    holder: nn.Module = getattr(layer, family.norms) if family.norms else layer
    names = (family.in_norm, *(family.mlp_norm if isinstance(family.mlp_norm, tuple) else (family.mlp_norm,)))
    norms = [getattr(holder, name) for name in names if name]
    normed: dict[int, None] = {}
    sides: dict[str, list[str]] = {}
    outputs: dict[str, _Mark | None] = {}
    paths = {module: name for name, module in layer.named_modules()}
    branches = [
        child
        for parent in dict.fromkeys((layer, holder))
        for child in parent.children()
        if child not in norms and child is not holder and any(p.ndim >= 2 for p in child.parameters())
    ]

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        given = kwargs.get("hidden_states", first_tensor(args))
        named = paths[module] in (family.attention, family.moe)
        if given is None or (_key(given) not in normed and not (named and family.layout != "pre_norm")):
            return
        # A shared expert beside the block reads what the block does; elsewhere one tensor may be given to two branches,
        # which read different ones in the original.
        side = family.moe if paths[module] == family.layer_shared else paths[module]
        sides.setdefault(side, []).append(paths[module])
        follow.inputs[_key(given)] = _Mark({1: _COORDINATE}, given.size(-1), name=side)
        follow.inside.append(side)

    def leave(module: nn.Module, _: Any, out: Any) -> None:
        tensor = first_tensor(out)
        if any(paths[module] in modules for modules in sides.values()):
            follow.inside.pop()
        if module in norms and not isinstance(out, Tensor):
            branches.append(module)  # no norm, though it reads the stream as one does (gemma4's router)
        elif module in norms and tensor is not None:
            normed[_key(tensor)] = None
            follow.inputs.pop(_key(tensor), None)
        mark = follow.sums.get(_key(tensor)) if tensor is not None else None
        outputs[paths[module]] = mark if mark is not None and _last(tensor, mark) else None  # type: ignore[arg-type]

    hooks = [module.register_forward_hook(leave) for module in paths if module is not layer]
    hooks += [child.register_forward_pre_hook(enter, with_kwargs=True) for child in branches]
    try:
        with torch.no_grad(), follow:
            out = first_tensor(run())
    finally:
        for hook in hooks:
            hook.remove()
    final = follow.sums.get(_key(out)) if out is not None else None
    roles = Roles()
    _add_sides(roles, follow, sides, [paths[b] for b in branches])
    _add_groups(roles, follow, outputs, final, sides)
    _add_experts(roles, layer, outputs, final)
    return roles


def _add_sides(roles: Roles, follow: _Follow, sides: dict[str, list[str]], branches: list[str]) -> None:
    for side, modules in sides.items():
        readers = [place for place in follow.readers.get(side, {}) if place not in follow.read_elsewhere]
        if readers:
            roles.sides.append(Side(tuple(dict.fromkeys(modules)), tuple(readers)))
        else:
            roles.left.append(f"what {side} reads: no weight of it multiplies that alone")
        for use in sorted(follow.other_uses.get(side, ())):
            roles.left.append(f"what {side} reads, where {use} takes it")
    read = {module for modules in sides.values() for module in modules}
    roles.left += [
        f"what {name} reads: it is not given the output of a norm" for name in branches if name not in read
    ]


def _add_groups(
    roles: Roles,
    follow: _Follow,
    outputs: dict[str, _Mark | None],
    final: _Mark | None,
    sides: dict[str, list[str]],
) -> None:
    reached = final.terms if final is not None else {}
    taken: set[Place] = set()
    found: dict[tuple[str, float], list[tuple[str, list[Place]]]] = {}
    for module, mark in sorted(outputs.items(), key=lambda item: item[0].count(".")):
        if mark is None or not mark.terms or _REST in mark.terms or taken & mark.terms.keys():
            continue
        if any(p in follow.consumed or reached.get(p, (0.0, -1))[1] != n for p, (_, n) in mark.terms.items()):
            continue
        factors = {reached[place][0] / factor for place, (factor, _) in mark.terms.items()}
        if len(factors) == 1:
            inside = [side for side, modules in sides.items() if any(_within(module, m) for m in modules)]
            found.setdefault((inside[0] if inside else module, factors.pop()), []).append(
                (module, list(mark.terms))
            )
            taken |= mark.terms.keys()
    for (_, factor), parts in found.items():
        places = [place for _, places in parts for place in places]
        roles.groups.append(Group(tuple(module for module, _ in parts), tuple(places), factor))
    for side in sides:
        if side not in {name for name, _ in found}:
            roles.left.append(f"what {side} adds: its last product does not reach the stream by sums alone")


def _add_experts(
    roles: Roles, layer: nn.Module, outputs: dict[str, _Mark | None], final: _Mark | None
) -> None:
    written = {place for group in roles.groups for place in group.writers}
    for module, mark in outputs.items():
        terms = mark.terms if mark is not None else {}
        weights = [
            layer.get_parameter(name)
            for name, axis in terms
            if (name, axis) in written and name.rpartition(".")[0] == module and axis > 0
        ]
        if len(weights) < len(terms) or not any(weight.ndim == 3 for weight in weights):
            continue
        assert final is not None
        factors = {final.terms[place][0] / factor for place, (factor, _) in terms.items()}
        same = all(final.terms[place][1] == number for place, (_, number) in terms.items())
        if same and len(factors) == 1 and len({len(weight) for weight in weights}) == 1:
            roles.experts.append(Group((module,), tuple(terms), factors.pop()))


def _within(module: str, branch: str) -> bool:
    return module == branch or module.startswith(f"{branch}.")
