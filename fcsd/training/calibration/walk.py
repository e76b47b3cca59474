"""Go through the decoder layers in order: solve and fold one, then hand both streams on to the next.

    for result in walk(models, state, text, layers=[...], ridge=1e-3): ...

The same tokens go through teacher and student. A rewired layer is calibrated (`fcsd.training.calibration.layer`) when
all layers before it are.

Not covered: where weights and streams come from and go to, between the layers; that is `Models` and the caller.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from fcsd.data.batches import Batch, real_tokens
from fcsd.parallel.ranks import ALONE, Ranks
from fcsd.training.calibration.layer import calibrate_layer
from fcsd.training.calibration.state import Models, State, Text, Work, to


def walk(
    models: Models,
    state: State,
    text: Text,
    *,
    layers: Sequence[int],
    ridge: float,
    ranks: Ranks = ALONE,
) -> Iterator[dict[str, Any] | None]:
    """Take `state` behind each next layer, up to the last of `layers`; yield its result, None if it has none.

    While a result is looked at, the layer is still loaded.

    All ranks call this, each with its share of the text, at least one batch.

    Raises:
        UserError: as `LeastSquares.solve`.
    """
    masks = [real_tokens(batch).flatten() for batch in text.batches]
    for index in range(state.next_layer, max(layers) + 1):
        result = None
        with models.layer(index):
            if index in layers:
                if state.student is None:
                    state.student = list(state.teacher)
                work = Work(models, index, text, masks, state.teacher, state.student, ranks)
                result = calibrate_layer(work, ridge)
                state.results.append(result)
            else:
                _hand_on(models, state, text.batches, index)
            state.next_layer = index + 1
            yield result


def _hand_on(models: Models, state: State, batches: Sequence[Batch], index: int) -> None:
    for number, batch in enumerate(batches):
        batch = to(batch, models.device)
        if state.student is not None:
            stream = to(state.student[number], models.device)
            state.student[number] = to(models.student.step(index, batch, stream), "cpu")
        stream = to(state.teacher[number], models.device)
        state.teacher[number] = to(models.teacher_step(index, batch, stream), "cpu")
