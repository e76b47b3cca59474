"""Stand-ins on a CPU for `torch.cuda.CUDAGraph` and for a stream whose collectives are
as late as they may be, and FarSkip layers that run in both engines' breakable graphs.

A graph records the operators that run between `capture_begin` and `capture_end`.
`replay` runs them again on the memory of the capture, whatever tensors the program has
by then. A graph's memory pool reuses what nobody holds any more while the rest is
captured: `replay` writes NaN there.
"""

import weakref
from collections.abc import Callable
from typing import Any

import orders
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from fcsd_vllm.communication import BetweenGraphs, Communication, Overlapped
from fcsd_vllm.field import Field
from fcsd_vllm.schedule import Schedule, pair, place

WIDTH, LAYERS = 8, (0, 1, 2, 3)


class Pool:
    """Memory that graphs have made: how many tensors of the program are in it."""

    def __init__(self) -> None:
        self.holders: dict[int, int] = {}
        self.aliases: dict[int, torch.Tensor] = {}
        self.freed: list[torch.Tensor] = []
        self.captures = False

    def has(self, tensor: torch.Tensor) -> bool:
        """Return whether a graph has made this memory."""
        return tensor.untyped_storage()._cdata in self.holders

    def hold(self, tensor: torch.Tensor) -> None:
        """Count a tensor until the program lets go of it."""
        key = tensor.untyped_storage()._cdata
        self.holders[key] = self.holders.get(key, 0) + 1
        self.aliases.setdefault(key, alias(tensor))
        weakref.finalize(tensor, self._release, key)

    def _release(self, key: int) -> None:
        self.holders[key] -= 1
        if not self.holders[key]:
            self.freed.append(self.aliases[key])


POOL = Pool()


def alias(tensor: Any) -> Any:
    """Return a tensor in the same memory that does not count as the program's."""
    if not isinstance(tensor, torch.Tensor):
        return tensor
    with _disable_current_modes():
        return tensor.detach()


class Graph(TorchDispatchMode):
    """A stand-in for `torch.cuda.CUDAGraph`."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Callable[[], Any]] = []

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "") -> None:
        """Record from here on."""
        POOL.captures = True
        self.__enter__()

    def capture_end(self) -> None:
        """End the recording."""
        self.__exit__(None, None, None)
        POOL.captures = False

    def replay(self) -> None:
        """Run what was recorded."""
        for step in self.steps:
            step()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        freed, POOL.freed = POOL.freed, []
        self.steps += [lambda memory=memory: memory.fill_(torch.nan) for memory in freed]  # type: ignore[misc]  # fmt: skip
        kwargs = kwargs or {}
        outputs = func(*args, **kwargs)
        given = {
            leaf.untyped_storage()._cdata
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, torch.Tensor)
        }
        targets = []
        for output in tree_leaves(outputs):
            is_new = output.untyped_storage()._cdata not in given
            targets.append(alias(output) if is_new else None)
            if is_new or POOL.has(output):
                POOL.hold(output)
        inputs = tree_map_only(torch.Tensor, alias, (args, kwargs))

        def again() -> None:
            results = tree_leaves(func(*inputs[0], **inputs[1]))
            for target, result in zip(targets, results, strict=True):
                if target is not None:
                    target.copy_(result)

        self.steps.append(again)
        return outputs


class LateSum(Overlapped):
    """Sums of two equal ranks, written when they are waited for. As on a stream, a sum
    may neither begin nor end within a capture.
    """

    def __init__(self) -> None:
        self.running: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self.log: list[str] = []

    def start_into(self, x: torch.Tensor, summed: torch.Tensor, tag: str) -> None:
        """Write nothing yet."""
        assert not POOL.captures, f"{tag} begins within a graph"
        summed.fill_(torch.nan)
        self.running[tag] = (alias(x), alias(summed))  # a stream holds nothing
        self.log.append(f"start {tag}")

    def finish(self, tag: str) -> None:
        """Write the sum."""
        assert not POOL.captures, f"{tag} ends within a graph"
        x, summed = self.running.pop(tag)
        summed.copy_(2 * x)
        self.log.append(f"wait {tag}")


class Doubled:
    """The same sums, complete at once."""

    def start(self, x: torch.Tensor, tag: str) -> torch.Tensor:
        """Return the sum."""
        return 2 * x

    def wait(self, x: torch.Tensor, tag: str) -> torch.Tensor:
        """Return `x`."""
        return x


class Expert(nn.Module):
    """A matrix with a nonlinearity."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (tokens, WIDTH) to the same."""
        return torch.tanh(x @ self.weight)


class Stack(nn.Module):
    """Layers of one kind: each has attention, which runs outside the graphs as that of
    an engine, experts, and perhaps shared experts.
    """

    def __init__(self, field: Field, has_shared: bool) -> None:
        super().__init__()
        number = len(LAYERS)
        self.attention = nn.ModuleList(Expert() for _ in range(number))
        self.experts = nn.ModuleList(Expert() for _ in range(number))
        self.shared = nn.ModuleList(Expert() for _ in range(number))
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2 * number))
        self.has_shared, self.field = has_shared, field

    def forward(
        self,
        x: torch.Tensor,
        communication: Communication,
        outside: Callable[[Any], Any] = lambda function: function,
    ) -> torch.Tensor:
        """Return the stream (tokens, WIDTH) after all layers."""
        everywhere = [True] * len(LAYERS)
        hidden: torch.Tensor = x
        residual: Any = None
        for k in LAYERS:
            schedule = Schedule(
                **place(self.field, k, everywhere, everywhere),
                layer=None,
                attention=self.attention[k],
                norms=(self.norms[2 * k], self.norms[2 * k + 1]),
                factor=1.0,
                block=self.experts[k],
                shared=self.shared[k] if self.has_shared else None,
                communication=communication,
            )
            routed = None
            if schedule.receives:
                stream, flight = residual
                routed = hidden
                base, read = schedule.attention_input(stream, flight)
            else:
                base = hidden if residual is None else residual + hidden
                read = self.norms[2 * k](base)
            out = torch.empty_like(read)

            @outside
            def attend(read: torch.Tensor, out: torch.Tensor, k: int) -> None:
                out.copy_(self.attention[k](read))

            attend(read, out, k)
            hidden, residual = pair(schedule, schedule.after_attention(out, base, routed))  # fmt: skip
        total: torch.Tensor = hidden + residual
        return total


class Forgetful(BetweenGraphs):
    """A fault: memory that a sum reads is not held."""

    def start(self, x: torch.Tensor, tag: str) -> torch.Tensor:
        """Forget the input."""
        summed = super().start(x, tag)
        self._inputs.clear()
        return summed


class Fresh(BetweenGraphs):
    """A fault: each replay writes a sum into memory that is new."""

    def __init__(self, overlapped: Overlapped, outside: Callable[[Any], Any]) -> None:
        super().__init__(overlapped, outside)
        self.start = outside(overlapped.start)  # type: ignore[method-assign]


class Within:
    """A fault: sums begin and end within graphs."""

    def __init__(self, overlapped: Overlapped, outside: Callable[[Any], Any]) -> None:
        self.start, self.wait = overlapped.start, overlapped.wait


FAULTS = {
    "memory is reused": (Forgetful, "Greatest absolute difference: nan"),
    "memory is new": (Fresh, "Mismatched elements: 40 / 40"),
    "within graphs": (Within, "attention.0 begins within a graph"),
}
"""Fault -> backend, and what says so."""
EVERY = frozenset(LAYERS)
CASES = {
    "all": (Field(LAYERS, True, EVERY), False, orders.PLAIN),
    "all, shared experts": (Field(LAYERS, True, EVERY), True, orders.SHARED),
    "mlp: full": (Field(LAYERS, True, frozenset()), True, orders.MLP_FULL),
    "attention: full": (Field(LAYERS, False, EVERY), True, orders.ATTENTION_FULL),
}
"""Connectivity, whether there are shared experts, and the order of a step."""


def check(
    case: str,
    outside: Callable[[Any], Any],
    capture: Callable[[Callable[[], torch.Tensor]], tuple[torch.Tensor, Any]],
    backend: type = BetweenGraphs,
) -> None:
    """Compare what a graph's replays write, captured with another input, with the same
    layers without graphs and without overlap, and the order of the sums with the one
    written by hand.
    """
    field, has_shared, order = CASES[case]
    sums = [each for each in orders.events(order, 1) if each[:5] in ("start", "wait ")]
    torch.manual_seed(0)
    stack = Stack(field, has_shared)
    late = LateSum()
    communication = backend(late, outside)
    x = torch.randn(5, WIDTH)
    output, replay = capture(lambda: stack(x, communication, outside))
    for _ in range(2):
        x.copy_(torch.randn(5, WIDTH))
        late.log.clear()
        replay()
        torch.testing.assert_close(output, stack(x, Doubled()), rtol=1e-6, atol=1e-6)
        assert late.log == sums
