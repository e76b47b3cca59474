"""Follow weights, inputs of branches, and products of weights through the operations of
a forward pass.

A map of the input of a branch can be folded into a weight if the weight is multiplied
with the input along one axis, with nothing but copies, choices of rows and factors per
token between the two. A map of the output of a branch can be folded into a weight if
the same is true between its product and the layer's output, where sums may also come
between. Tensors are therefore followed by their storage through the operations that
torch dispatches, and a dimension by its stride, so that views need no rules of their
own.

Not covered: operations that are not listed here; their inputs are marked as used
otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fcsd.training.calibration.roles import Place

aten = torch.ops.aten

COORDINATE = -1  # the axis of a followed tensor on which a map would act
REST = ("", 0)  # stands for what is added beside the products of weights

_SAME = {
    aten._to_copy, aten.clone, aten.detach, aten.alias, aten.contiguous, aten.lift_fresh,
}  # fmt: skip
_NO_VALUES = {
    aten.zeros_like, aten.empty_like, aten.ones_like, aten.full_like, aten.new_zeros, aten.new_empty, aten.new_ones,
    aten.new_full, aten.zeros, aten.empty, aten.sym_size, aten.sym_stride, aten.is_same_size,
}  # fmt: skip
_ZERO = {aten.zeros_like, aten.new_zeros, aten.zeros}
_ROWS = {
    aten.index, aten.index_select, aten.repeat, aten.cat, aten.stack, aten.index_put, aten.slice_scatter,
}  # fmt: skip
_INTO = {
    aten.index_add, aten.index_add_, aten.index_put_, aten.scatter_add, aten.scatter_add_, aten.copy_,
}  # fmt: skip


@dataclass
class Mark:
    """What is known about a storage. axes: stride -> axis; terms: writer -> (scalar
    factor, operations per token).
    """

    axes: dict[int, int]
    size: int  # of the coordinate
    terms: dict[Place, tuple[float, int]] = field(default_factory=dict)
    name: str = ""  # of the parameter, or of the side


def storage(tensor: Tensor) -> int:
    """Return the address of the storage that a tensor shares with its views."""
    return tensor.untyped_storage().data_ptr()


def _axis(mark: Mark, tensor: Tensor, dim: int) -> int | None:
    return mark.axes.get(tensor.stride(dim)) if tensor.size(dim) > 1 else None


def is_last(tensor: Tensor, mark: Mark) -> bool:
    """Tell whether the last dimension of a tensor is all of a mark's coordinate."""
    return (
        tensor.ndim > 0
        and tensor.size(-1) == mark.size
        and _axis(mark, tensor, -1) == COORDINATE
    )


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _tensors(value)
    elif isinstance(values, dict):
        yield from _tensors(list(values.values()))


class Follow(TorchDispatchMode):
    """Follow parameters, inputs of branches, and products of parameters through a
    forward pass.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        # a freed storage would give its address to another
        self.alive: list[Any] = []
        self.parameters: dict[int, Mark] = {}
        self.inputs: dict[int, Mark] = {}
        self.sums: dict[int, Mark] = {}
        self.readers: dict[str, dict[Place, None]] = {}
        self.other_uses: dict[str, set[str]] = {}
        self.read_elsewhere: set[Place] = set()
        self.consumed: dict[Place, str] = {}
        self.inside: list[str] = []  # sides whose modules are being called
        for name, parameter in layer.named_parameters():
            axes = {
                parameter.stride(d): d
                for d in reversed(range(parameter.ndim))
                if parameter.size(d) > 1
            }
            self.parameters[storage(parameter)] = Mark(axes, 0, name=name)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self.alive += [args, kwargs, out]
        self._follow(func.overloadpacket, func, args, kwargs, out)
        return out

    # ---- one operation

    def _follow(self, op: Any, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        outs = list(_tensors(out))
        if op in _ZERO or (
            op in (aten.full, aten.full_like, aten.new_full) and args[-1] == 0
        ):
            for tensor in outs:
                self.sums[storage(tensor)] = Mark(
                    {1: COORDINATE}, tensor.shape[-1] if tensor.ndim else 0
                )
            return
        if op in _NO_VALUES:
            return
        ins = list(_tensors([args, kwargs]))
        if (
            outs
            and op not in _INTO
            and all(storage(o) in {storage(i) for i in ins} for o in outs)
            and not _writes(func)
        ):
            return  # a view: its strides say what it shows
        if op in (aten.mm, aten.bmm, aten._grouped_mm):
            return self._product(op, args[0], args[1], None, outs[0])
        if op in (aten.addmm, aten.baddbmm):
            return self._product(op, args[1], args[2], args[0], outs[0])
        if (
            str(op) == "transformers.grouped_mm_fallback"
        ):  # exists only once transformers has been asked for it
            return self._product(op, args[0], args[1], None, outs[0])
        self._follow_parameters(op, args, outs)
        self._follow_inputs(op, args, ins, outs)
        self._follow_sums(op, args, kwargs, ins, outs)

    def _product(
        self, op: Any, a: Tensor, b: Tensor, bias: Tensor | None, out: Tensor
    ) -> None:
        """out[..., n, m] = sum over k of a[..., n, k] b[..., k, m], plus a bias."""
        terms: dict[Place, tuple[float, int]] | None = None
        for one, k, other, other_k, kept, place in (
            (a, a.ndim - 1, b, b.ndim - 2, a.ndim - 2, out.ndim - 2),
            (b, b.ndim - 2, a, a.ndim - 1, b.ndim - 1, out.ndim - 1),
        ):
            parameter, source = (
                self.parameters.get(storage(one)),
                self.inputs.get(storage(other)),
            )
            if parameter is not None:
                read = _axis(parameter, one, k)
                whole = source is not None and other.size(other_k) == source.size
                if read is None:
                    pass
                elif whole and _axis(source, other, other_k) == COORDINATE:  # type: ignore[arg-type]
                    self.readers.setdefault(source.name, {})[parameter.name, read] = (
                        None  # type: ignore[union-attr]
                    )
                # A map of zeros is zeros (zaya's state before the first token).
                elif not other.numel() or other.any():
                    self.read_elsewhere.add((parameter.name, read))
                written = _axis(parameter, one, kept)
                if written is not None and written != read:
                    terms = {(parameter.name, written): (1.0, 0)}
                    axis = place
            elif (mixed := self.inputs.get(storage(one))) is not None:
                # Rows are mixed: the coordinate stays, unless the sum is over it.
                if (
                    one.size(kept) == mixed.size
                    and _axis(mixed, one, kept) == COORDINATE
                ):
                    self.inputs[storage(out)] = Mark(
                        {out.stride(place): COORDINATE}, mixed.size, name=mixed.name
                    )
                elif storage(other) not in self.parameters:
                    self._other_use(mixed, op)
            if (summed := self.sums.get(storage(one))) is not None and summed.terms:
                if (
                    parameter is None
                    and one.size(kept) == summed.size
                    and _axis(summed, one, kept) == COORDINATE
                ):
                    terms = {p: (c, n + 1) for p, (c, n) in summed.terms.items()}
                    axis = place
                else:
                    self._consume(summed, op)
        if terms is None:
            return
        mark = Mark({out.stride(axis): COORDINATE}, out.size(axis), terms)
        if bias is not None:
            mark.terms = {**terms, **self._added(bias, mark)}
        self.sums[storage(out)] = mark

    def _added(self, other: Tensor, mark: Mark) -> dict[Place, tuple[float, int]]:
        """Return the terms that are added to a sum: another sum, a bias, or the
        rest.
        """
        total = self.sums.get(storage(other))
        if total is not None and (not total.terms or is_last(other, total)):
            return total.terms
        parameter = self.parameters.get(storage(other))
        if parameter is not None and other.size(-1) == mark.size:
            written = _axis(parameter, other, other.ndim - 1)
            if written is not None:
                return {(parameter.name, written): (1.0, 0)}
        if total is not None:
            self._consume(total, "add")
        return {REST: (1.0, 0)}

    def _follow_parameters(self, op: Any, args: Any, outs: list[Tensor]) -> None:
        source = args[0] if args and isinstance(args[0], Tensor) else None
        mark = self.parameters.get(storage(source)) if source is not None else None
        if source is None or mark is None or not outs:
            return
        out = outs[0]
        if op in _SAME and out.shape == source.shape:
            pairs = [(d, d) for d in range(out.ndim)]
        elif op in (aten.index, aten.index_select) and _first_dim_only(op, args):
            pairs = [(out.ndim - d, source.ndim - d) for d in range(1, source.ndim)]
        else:
            return
        axes = {
            out.stride(o): axis
            for o, s in pairs
            if (axis := _axis(mark, source, s)) is not None
        }
        self.parameters[storage(out)] = Mark(axes, 0, name=mark.name)

    def _follow_inputs(
        self, op: Any, args: Any, ins: list[Tensor], outs: list[Tensor]
    ) -> None:
        for tensor in ins:
            mark = self.inputs.get(storage(tensor))
            if mark is None:
                continue
            if (
                len(outs) == 1
                and is_last(tensor, mark)
                and self._keeps_coordinate(op, args, tensor, outs[0], mark)
            ):
                self.inputs[storage(outs[0])] = Mark(
                    {1: COORDINATE}, mark.size, name=mark.name
                )
            else:
                self._other_use(mark, op)

    def _follow_sums(
        self, op: Any, args: Any, kwargs: Any, ins: list[Tensor], outs: list[Tensor]
    ) -> None:
        marks = [
            (tensor, self.sums[storage(tensor)])
            for tensor in ins
            if storage(tensor) in self.sums
        ]
        if not outs or not marks:
            return
        out = outs[0]
        mark: Mark | None = None
        adds = (
            op in (aten.add, aten.add_)
            and kwargs.get("alpha", 1) == 1
            and len(ins) == 2
        )
        if (adds or op in _INTO) and any(mark.terms for _, mark in marks):
            tensor, first = next((t, m) for t, m in marks if m.terms)
            values = ins if adds else [args[0], ins[-1]]
            if (
                is_last(tensor, first)
                and out.size(-1) == first.size
                and out.stride(-1) == 1
            ):
                mark = Mark({1: COORDINATE}, first.size)
                for value in values:
                    for place, term in self._added(value, first).items():
                        mark.terms[place] = _merged(mark.terms.get(place), term)
        elif len(outs) == 1 and all(
            self._passes(op, args, t, out, m) for t, m in marks
        ):
            factor, per_token = _factor(op, args)
            terms = [
                (p, (c * factor, n + per_token))
                for _, m in marks
                for p, (c, n) in m.terms.items()
            ]
            mark = Mark({1: COORDINATE}, marks[0][1].size, dict(terms))
        if mark is None:
            for _, one in marks:
                self._consume(one, op)
            if storage(out) in self.sums:
                del self.sums[storage(out)]  # written in place with something else
            return
        self.sums[storage(out)] = mark

    def _passes(
        self, op: Any, args: Any, tensor: Tensor, out: Tensor, mark: Mark
    ) -> bool:
        return not mark.terms or (
            is_last(tensor, mark)
            and self._keeps_coordinate(op, args, tensor, out, mark)
        )

    def _keeps_coordinate(
        self, op: Any, args: Any, tensor: Tensor, out: Tensor, mark: Mark
    ) -> bool:
        """Tell whether `out` has, in its last dimension, the coordinate of `tensor`,
        row by row up to factors.
        """
        if out.ndim == 0 or out.size(-1) != mark.size or out.stride(-1) != 1:
            return False
        if op in _SAME:
            return out.shape == tensor.shape
        if op in (aten.mul, aten.mul_, aten.div, aten.div_):
            other = args[1] if args[0] is tensor else args[0]
            if op in (aten.div, aten.div_) and args[0] is not tensor:
                return False
            return (
                not isinstance(other, Tensor) or other.ndim == 0 or other.size(-1) == 1
            )
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
            if op is aten.cat and not all(
                storage(t) in self.inputs or storage(t) in self.sums for t in args[0]
            ):
                return False
            return dim % out.ndim != out.ndim - 1
        return False

    def _other_use(self, mark: Mark, op: Any) -> None:
        # outside of its branch it is the stream, or the input of another branch
        if mark.name in self.inside:
            self.other_uses.setdefault(mark.name, set()).add(str(op))

    def _consume(self, mark: Mark, op: Any) -> None:
        for place in mark.terms:
            self.consumed.setdefault(place, str(op))


def _writes(func: Any) -> bool:
    return any(
        a.alias_info is not None and a.alias_info.is_write
        for a in func._schema.arguments
    )


def _first_dim_only(op: Any, args: Any) -> bool:
    if op is aten.index_select:
        return args[1] == 0
    return (
        len(args[1]) == 1 and args[1][0] is not None and args[1][0].dtype != torch.bool
    )


def _factor(op: Any, args: Any) -> tuple[float, int]:
    """Return the multipliers of an operation: a number, and how many factors per
    token.
    """
    if op in (aten.mul, aten.mul_, aten.div, aten.div_):
        numbers = [a for a in args[:2] if not isinstance(a, Tensor)]
        numbers += [a.item() for a in args[:2] if isinstance(a, Tensor) and a.ndim == 0]
        if numbers:
            value = float(numbers[0])
            return (1 / value if op in (aten.div, aten.div_) else value), 0
        return 1.0, 1
    return 1.0, 0 if op in _SAME else 1


def _merged(
    one: tuple[float, int] | None, other: tuple[float, int]
) -> tuple[float, int]:
    return other if one is None or one[1] < other[1] else one
