"""Mix several sources by weight, from any position.

The order is that of `datasets` 5.2 (`interleave_datasets` with probabilities and `all_exhausted`), which reads each
source in a thread and keeps no exact position of sources that shuffle.

Not covered: what is done with the examples (`fcsd.data.stream`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fcsd.data.reading import BUFFER, Item, Order, Reader, StreamSource

_DRAWN = 1000  # random numbers at a time


class Mixture:
    """The examples of all sources in the order of one epoch.

    One source: all its examples once. Several: each next example comes from a source drawn with probability
    proportional to its weight, until each has been read to its end; those that end early start again.

    Args: state: where to go on, as `state` gave it.
    """

    def __init__(
        self,
        sources: Sequence[StreamSource],
        *,
        seed: int,
        epoch: int,
        shuffle: bool,
        buffer_size: int = BUFFER,
        state: Mapping[str, Any] | None = None,
    ):
        limited = any(source.limit is not None for source in sources)
        self.sources = sources
        self.order = Order(seed, epoch, shuffle, limited, buffer_size)
        states = state["sources"] if state else [None] * len(sources)
        self.readers = [self._reader(index, at) for index, at in enumerate(states)]
        total = sum(source.settings.weight for source in sources)
        self._shares = [source.settings.weight / total for source in sources]
        self._generator = self.order.generator(epoch if epoch and not limited else seed)
        self._exhausted = [False] * len(sources)
        self._at = 0
        if state is not None:
            self._generator.bit_generator.state = state["random"]
            self._exhausted, self._at = [*state["exhausted"]], state["drawn"]
        self._draw()

    def _reader(self, index: int, state: Mapping[str, Any] | None = None) -> Reader:
        return Reader(self.sources[index], index, self.order, state)

    def _draw(self) -> None:
        self._random = self._generator.bit_generator.state
        self._drawn = self._generator.choice(len(self.readers), size=_DRAWN, p=self._shares)

    def state(self) -> dict[str, Any]:
        """Return the position, which nothing changes later."""
        return {
            "random": self._random,
            "drawn": self._at,
            "exhausted": [*self._exhausted],
            "sources": [reader.state() for reader in self.readers],
        }

    def next(self) -> Item | None:
        """Return the next example; None at the end of the epoch."""
        if len(self.readers) == 1:
            return self.readers[0].next()
        while not all(self._exhausted):
            if self._at == len(self._drawn):
                self._draw()
                self._at = 0
            index = int(self._drawn[self._at])
            self._at += 1
            item = self.readers[index].next()
            if self.readers[index].ended:
                self._exhausted[index] = True
                self.readers[index] = self._reader(index)
            if item is not None:
                return item
        return None
