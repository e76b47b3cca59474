"""Run one decoder layer of a model on a given stream, from within the model's own loop
over layers.

The loop prepares the arguments of a layer (masks, rotary embeddings, positions, edits
of the stream), so the loop itself is run. Layers before the target return their input
unchanged, the target receives the given stream, and the pass ends after it. Skipped
layers need no weights.

Not covered: layers that are wrapped (FSDP, DDP); models on several devices.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from fcsd.data.batches import Batch
from fcsd.model.connectivity.layer import with_side_value
from fcsd.model.connectivity.stack import decoder_layers
from fcsd.model.families import Family
from fcsd.training.losses.head import body_hidden

Stream = dict[str, Tensor]
"""Output of a layer: o, the stream; partial, the stream without the routed output that
is in flight, if any; side, the second value that layers of some families pass on;
sources, where layers read them, the streams of earlier blocks (B, T, S, D)."""


class _Reached(BaseException):
    """End a pass after the target layer, and carry its stream out."""

    def __init__(self, value: Any) -> None:
        self.value = value


@functools.cache
def _redirected(cls: type) -> type:
    """Return a subclass of the same name whose instances are called by their
    `_kept_call`: `Module.__call__` is looked up on the class.
    """

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._kept_call(*args, **kwargs)

    return type(
        cls.__name__, (cls,), {"__call__": __call__, "__module__": cls.__module__}
    )


def _stream(out: Any, side_output: str | None) -> Stream:
    """Name the values that a layer returned: o, (o, partial), (o, side) or
    (o, (partial, side)).
    """
    if isinstance(out, Tensor):
        return {"o": out}
    o, second = out[0], out[1] if len(out) > 1 else None
    if not side_output:
        return {"o": o, "partial": second} if isinstance(second, Tensor) else {"o": o}
    stream = {"o": o}
    if isinstance(second, tuple):
        stream["partial"], second = second
    return stream | ({"side": second} if second is not None else {})


class Steps:
    """The layers of one model, one at a time."""

    def __init__(self, model: Any, family: Family) -> None:
        self.model, self.family = model, family
        self.layers: Any = decoder_layers(model, family)

    @torch.no_grad()
    def step(self, index: int, batch: Batch, stream: Stream | None) -> Stream:
        """Return the stream after layer `index` when its input is `stream`; without a
        stream, return the layer's input in a pass of the model.
        """
        layer, family = self.layers[index], self.family
        base_call: Any = type(layer).__call__

        def call(hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
            # Without a stream, only the layer's input is wanted: the layer does not
            # run.
            if stream is None:
                raise _Reached({"o": hidden_states})
            states: Any = stream["o"]
            # Rewired layers take `partial` as they return it; see `_stream`.
            if family.side_output:
                side: Any = stream.get("side")
                if "partial" in stream:
                    side = (stream["partial"], side)
                args, kwargs = with_side_value(family.side_output, args, kwargs, side)
            elif "partial" in stream:
                states = (stream["o"], stream["partial"])
            out = base_call(layer, states, *args, **kwargs)
            after = _stream(out, family.side_output)
            if family.block_begins:
                sources = args[0]
                if getattr(layer, family.block_begins):
                    sources = torch.cat([sources, stream["o"].unsqueeze(-2)], dim=-2)
                after["sources"] = sources
            raise _Reached(after)

        with self._only(index, stream, call):
            # The pass ends in `call`: layers after the target never run.
            try:
                body_hidden(self.model, batch["input_ids"], batch["position_ids"], None)
            except _Reached as reached:
                output: Stream = reached.value
                return output
        raise AssertionError(
            f"{type(self.model).__name__}: its forward did not call layer {index}"
        )

    @torch.no_grad()
    def end(self, batch: Batch, stream: Stream) -> Tensor:
        """Return the hidden states (B, T, D) after the final norm, where `stream` is
        the last layer's output.
        """

        def call(*args: Any, **kwargs: Any) -> Any:
            if self.family.side_output:
                return stream["o"], stream.get("side")
            return stream["o"]

        with self._only(len(self.layers) - 1, stream, call):
            hidden = body_hidden(
                self.model, batch["input_ids"], batch["position_ids"], None
            )
        return hidden.unflatten(0, batch["input_ids"].shape)

    @contextlib.contextmanager
    def _only(
        self, index: int, stream: Stream | None, call: Callable[..., Any]
    ) -> Iterator[None]:
        """Skip the layers before `index` within the block, and replace the call of that
        one.
        """
        ends = dict(self._block_ends(index, stream))

        def skipping(k: int) -> Callable[..., Any]:
            def skip(hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
                output = ends.get(k, hidden_states)
                return (output, None) if self.family.side_output else output

            return skip

        # Hooks and weights stay where they are.
        calls = [*map(skipping, range(index)), call]
        classes: list[Any] = [type(layer) for layer in self.layers[: index + 1]]
        for layer, replacement, cls in zip(self.layers, calls, classes, strict=False):
            layer.__class__ = _redirected(cls)
            layer.__dict__["_kept_call"] = replacement
        try:
            yield
        finally:
            for layer, cls in zip(self.layers, classes, strict=False):
                layer.__class__ = cls
                del layer.__dict__["_kept_call"]

    def _block_ends(
        self, index: int, stream: Stream | None
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield the layers before `index` that end a block, with their outputs: the
        model's loop keeps these for all later layers.
        """
        begins = self.family.block_begins
        if begins is None or stream is None or "sources" not in stream:
            return
        firsts = [k for k, layer in enumerate(self.layers) if getattr(layer, begins)]
        sources = stream["sources"].unbind(-2)
        for first, output in zip(firsts[1:], sources[1:], strict=False):
            if first <= index:
                yield first - 1, output
