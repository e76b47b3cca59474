"""Run one decoder layer of a model on a stream of its own, called by the model's own
loop.

The loop makes what a layer is called with (masks, rotary embeddings, positions, edits
of the stream). So it is the loop that is run: the layers before the one that is wanted
hand on what they are given, that one gets the stream that is kept, and behind it the
pass ends. Layers that are skipped need no weights.

Not covered: layers that are wrapped (FSDP, DDP); models on several devices.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fcsd.data.batches import Batch
from fcsd.model.connectivity.rewire import decoder_layers
from fcsd.model.families import Family
from fcsd.training.losses.head import body_hidden

Stream = dict[str, Tensor]
"""What a layer hands on: o, the stream; partial, where its routed output is in flight;
side, what some families' layers give the next one beside it."""


class _Reached(BaseException):
    """Ends a pass behind the layer that was wanted."""

    def __init__(self, value: Any) -> None:
        self.value = value


@functools.cache
def _skipping(cls: type, side: str | None) -> type:
    def __call__(self: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        return (hidden_states, None) if side else hidden_states

    return type(
        cls.__name__, (cls,), {"__call__": __call__, "__module__": cls.__module__}
    )


@functools.cache
def _giving(cls: type, side: str | None) -> type:
    def __call__(self: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        kept: Stream = self._kept_stream
        return (kept["o"], kept.get("side")) if side else kept["o"]

    return type(
        cls.__name__, (cls,), {"__call__": __call__, "__module__": cls.__module__}
    )


@functools.cache
def _reached(cls: type, side: str | None) -> type:
    base_call: Any = cls.__call__

    def __call__(self: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        kept: Stream | None = self._kept_stream
        if kept is None:
            raise _Reached({"o": hidden_states})
        states: Any = kept["o"]
        if side:
            kwargs[side] = kept.get("side")
        if "partial" in kept:
            if side:
                kwargs[side] = (kept["partial"], kept.get("side"))
            else:
                states = (kept["o"], kept["partial"])
        out = base_call(self, states, *args, **kwargs)
        raise _Reached(_stream(out, side))

    return type(
        cls.__name__, (cls,), {"__call__": __call__, "__module__": cls.__module__}
    )


def _stream(out: Any, side: str | None) -> Stream:
    """Sort what a layer returned: o, (o, partial), (o, side), (o, (partial, side))."""
    if isinstance(out, Tensor):
        return {"o": out}
    o, second = out[0], out[1] if len(out) > 1 else None
    if not side:
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
        """Return the stream behind layer `index`, whose input is `stream`; of None the
        one before it.
        """
        with self._only(index, stream, _reached):
            try:
                body_hidden(
                    self.model, batch["input_ids"], batch["position_ids"], None, None
                )
            except _Reached as reached:
                output: Stream = reached.value
                return output
        raise AssertionError(
            f"{type(self.model).__name__}: its forward did not call layer {index}"
        )

    @torch.no_grad()
    def end(self, batch: Batch, stream: Stream) -> Tensor:
        """Return the hidden states (B, T, D) after the final norm, of the stream behind
        the last layer.
        """
        with self._only(len(self.layers) - 1, stream, _giving):
            hidden = body_hidden(
                self.model, batch["input_ids"], batch["position_ids"], None, None
            )
        return hidden.unflatten(0, batch["input_ids"].shape)

    @contextlib.contextmanager
    def _only(
        self,
        index: int,
        stream: Stream | None,
        kind: Callable[[type, str | None], type],
    ) -> Iterator[None]:
        side = self.family.side_output
        classes: list[Any] = [type(layer) for layer in self.layers]
        wanted: nn.Module = self.layers[index]
        for k, layer in enumerate(self.layers[:index]):
            layer.__class__ = _skipping(classes[k], side)
        wanted.__class__ = kind(classes[index], side)
        wanted.__dict__["_kept_stream"] = stream
        try:
            yield
        finally:
            del wanted.__dict__["_kept_stream"]
            for layer, cls in zip(self.layers, classes, strict=True):
                layer.__class__ = cls
