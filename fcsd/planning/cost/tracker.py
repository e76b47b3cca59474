"""Count the bytes of live storages and the FLOPs of operations, without allocating
storage.

Nothing is patched: inside its `with`, and only in this thread, a mode replaces the
operations that a CPU runs differently from a GPU.
"""

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import transformers.integrations.moe  # noqa: F401, registers the grouped matmuls
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import (
    flop_registry,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

from fcsd.base.errors import UserError, one_line
from fcsd.model.preserve import without_advice
from fcsd.planning.cost.fake import FakeTensors
from fcsd.planning.cost.stand_ins import stand_in

PERSISTENT = ("student", "teacher", "gradients", "optimizer")
"""Kinds of bytes that live from one micro-batch to the next."""


@dataclass
class _Live:
    reference: Any
    kind: str
    num_bytes: int


class Tracker:
    """Counts the matmuls, and the bytes of live storages by the kind under which they
    were allocated.
    """

    def __init__(self) -> None:
        self.kind = "other"
        self.live: dict[int, _Live] = {}
        self.now: Counter[str] = Counter()
        self.peak: dict[str, int] = {}
        self.transient: dict[str, int] = {}
        self.flops: dict[str, Counter[str]] = {}

    @contextlib.contextmanager
    def making(self, kind: str) -> Iterator[None]:
        """Count allocations and computation inside as `kind`."""
        outer_kind, self.kind = self.kind, kind
        try:
            yield
        finally:
            self.kind = outer_kind

    def counts_as(self, module: nn.Module, kind: str) -> None:
        """Count a module's forward pass as `kind`, except for inner modules with
        another kind.
        """
        # A stack, so that a module may run again within its own forward pass.
        outer_kinds: list[str] = []

        def enter(*_: Any) -> None:
            outer_kinds.append(self.kind)
            self.kind = kind

        def leave(*_: Any) -> None:
            self.kind = outer_kinds.pop()

        module.register_forward_pre_hook(enter, prepend=True)
        module.register_forward_hook(leave)

    def becomes(self, tensor: Tensor, kind: str) -> None:
        """Count a live tensor's storage as `kind` from now on."""
        entry = self.live.get(id(tensor.untyped_storage()))
        if entry is not None:
            self.now[entry.kind] -= entry.num_bytes
            self.now[kind] += entry.num_bytes
            entry.kind = kind

    def add_flops(self, dtype: torch.dtype, number: int) -> None:
        """Count operations of the current kind."""
        flops_by_dtype = self.flops.setdefault(self.kind, Counter())
        flops_by_dtype[str(dtype).removeprefix("torch.")] += number

    def add_attention(
        self, q: Tensor, k: Tensor, v: Tensor, gradient: Tensor | None = None
    ) -> None:
        """Count one fused attention, or its backward pass; k and v may have fewer heads
        than q.
        """
        # Grouped queries: every query head computes with keys and values, so shared
        # heads count as often as they are used.
        k_shape, v_shape = ((*t.shape[:1], q.shape[1], *t.shape[2:]) for t in (k, v))
        if gradient is None:
            number = int(sdpa_flop_count(q.shape, k_shape, v_shape))
        else:
            number = int(
                sdpa_backward_flop_count(gradient.shape, q.shape, k_shape, v_shape)
            )
        self.add_flops(q.dtype, number)

    def saw(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Count the tensors that an operation made, and its FLOPs."""
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._track(tensor.untyped_storage())
        count = _FLOPS.get(func._overloadpacket)
        if count is not None:
            dtype = next(
                leaf.dtype for leaf in tree_leaves(args) if isinstance(leaf, Tensor)
            )
            self.add_flops(dtype, int(count(*args, **kwargs, out_val=out)))

    def _track(self, storage: Any) -> None:
        # Views share a storage, which counts once, from its first tensor until it is
        # freed.
        key = id(storage)
        if key in self.live:
            return
        entry = _Live(None, self.kind, storage.nbytes())

        def gone(_: Any) -> None:
            del self.live[key]
            self.now[entry.kind] -= entry.num_bytes

        entry.reference = weakref.ref(storage, gone)
        self.live[key] = entry
        self.now[entry.kind] += entry.num_bytes
        if sum(self.now.values()) > sum(self.peak.values()):
            self.peak = dict(self.now)
        # Sharded layouts divide the persistent kinds, so their peak may be at another
        # moment.
        transient = {k: n for k, n in self.now.items() if k not in PERSISTENT}
        if sum(transient.values()) > sum(self.transient.values()):
            self.transient = transient


class Interposed(TorchFunctionMode):
    """Hands attention to a function, and grouped matmuls to transformers' fallback,
    which has a shape function for every dtype.

    attention: has the signature of torch's, which it may call. A layer that is
    recomputed in a backward pass must enter the mode again (`torch.utils.checkpoint`,
    context_fn).
    """

    def __init__(self, attention: Callable[..., Any]) -> None:
        super().__init__()
        self.attention = attention

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is functional.scaled_dot_product_attention:
            return self.attention(*args, **kwargs)
        if func is torch._grouped_mm:
            return torch.ops.transformers.grouped_mm_fallback(*args[:2], kwargs["offs"])
        if func is Tensor.data_ptr:
            # transformers checks whether weights are aligned before it calls the matmul
            return 0
        if func is Tensor.__getitem__:
            # A mask keeps every row.
            args = (args[0], _without_masks(args[1]))
        return func(*args, **kwargs)


def _without_masks(index: Any) -> Any:
    """Replace masks over one dimension in an index by whole slices."""
    if isinstance(index, tuple):
        return tuple(map(_without_masks, index))
    if isinstance(index, Tensor) and index.dtype == torch.bool and index.ndim == 1:
        return slice(None)
    return index


@contextlib.contextmanager
def counting(tracker: Tracker, interposed: Interposed, subject: str) -> Iterator[None]:
    """Run the block on tensors without storage and count it; raise a UserError if
    `subject` needs data.
    """
    try:
        with without_advice(), FakeTensors(tracker.saw), interposed:
            yield
    except UserError:
        raise
    except Exception as error:  # any part of a family's code may raise
        raise UserError(
            f"{subject} cannot be followed without data: {type(error).__name__}:"
            f" {one_line(error)[:200]}; run `fcsd inspect` for the memory of its"
            " weights"
        ) from error


def give_fake_storage(model: nn.Module) -> None:
    """Replace every meta tensor by a fake one, and forward passes that need data
    (`fcsd.planning.cost.stand_ins`); must run inside `FakeTensors`.
    """
    stand_in(model)
    fake_parameters: dict[int, Tensor] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                # Tied weights stay one parameter.
                if id(parameter) not in fake_parameters:
                    fake = torch.empty(parameter.shape, dtype=parameter.dtype)
                    fake_parameters[id(parameter)] = nn.Parameter(
                        fake, parameter.requires_grad
                    )
                module._parameters[name] = fake_parameters[id(parameter)]  # type: ignore[assignment]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)


def _grouped(input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> int:
    return 2 * input.shape[0] * weight.shape[1] * weight.shape[2]


_ATEN, _OWN = torch.ops.aten, torch.ops.transformers
# torch's FLOP formulas, and those for matmuls that it does not know.
_FLOPS: dict[Any, Callable[..., Any]] = dict(flop_registry) | {
    _OWN.grouped_mm_fallback: _grouped,
    _OWN.grouped_mm_fallback_backward: lambda *args, **_: 2 * _grouped(*args),
    _ATEN._scaled_dot_product_flash_attention_for_cpu: (
        lambda q, k, v, *_, **__: sdpa_flop_count(q.shape, k.shape, v.shape)
    ),
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: (
        lambda grad, q, k, v, *_, **__: sdpa_backward_flop_count(
            grad.shape, q.shape, k.shape, v.shape
        )
    ),
}
