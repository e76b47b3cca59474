"""Measure the effect of a calibration on text that no map is solved on: the KL to the
original, with calibrated and with copied weights.

Three streams of that text go through the layers, each layer while its weights are in
memory for the calibration:

    original    regular connectivity, the source's weights
    copied      FarSkip connectivity, the source's weights: before anything is folded into a layer
    calibrated  FarSkip connectivity, the calibrated weights

This costs three forward passes over an eighth of the calibration's tokens, in addition
to six over all of them.

Not covered: counting only the tokens with loss; every token of text counts.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fcsd.base.stats import ratio
from fcsd.data.batches import NO_LOSS, Batch, next_token_targets, real_tokens
from fcsd.parallel.launch import Ranks
from fcsd.training.calibration.state import (
    Models,
    batches_of,
    first_stream,
    move_past,
    to,
)
from fcsd.training.calibration.steps import Stream
from fcsd.training.losses.heldout_kl import kl_sum

NAMES = ORIGINAL, COPIED, CALIBRATED = "original", "copied", "calibrated"


class LeftOut:
    """A rank's share of the rows that no map is solved on, and their streams before the
    next layer.

    streams: for each of `NAMES`, one stream a batch. num_batches: of all ranks.
    """

    def __init__(self, rows: Sequence[Any], ranks: Ranks) -> None:
        self.ranks = ranks
        batches = batches_of(rows)
        self.num_batches = len(batches)
        self.batches: list[Batch] = ranks.deal(batches)
        self.streams: dict[str, list[Stream]] = {}

    def begin(self, models: Models) -> None:
        """Compute the streams before the first layer, which are the same for all three."""
        first_streams = [
            first_stream(models.student, batch, models.device) for batch in self.batches
        ]
        self.streams = {name: list(first_streams) for name in NAMES}

    def before_folding(self, models: Models, index: int) -> None:
        """Move the two streams of the source's weights past a layer that is loaded,
        before a map is folded into it.
        """
        move_past(models.teacher_step, index, self.batches, self.streams[ORIGINAL])
        move_past(models.student_step, index, self.batches, self.streams[COPIED])

    def behind_folding(self, models: Models, index: int) -> None:
        """Move the stream of the calibrated weights past a layer."""
        # The layer's weights have their maps folded in by now.
        move_past(models.student_step, index, self.batches, self.streams[CALIBRATED])

    @torch.no_grad()
    def kl(self, models: Models, head: nn.Linear) -> dict[str, Any]:
        """Return `num_tokens` and, for calibrated and for copied weights, `kl` in nats
        per token and its `stderr` with rows as units (None for a single row). All ranks
        call this, after the last layer.
        """
        config = models.student.model.config
        # In the order of the batches, the sums do not depend on the number of ranks.
        with self.ranks.sharing(range(self.num_batches), lambda: None) as share:
            for number, batch in enumerate(self.batches):
                hidden = {
                    name: models.student.end(
                        to(batch, models.device), to(streams[number], models.device)
                    )
                    for name, streams in self.streams.items()
                }
                # One sum for each row: rows are the units of the standard error.
                share.results.append(
                    [
                        _row(hidden, numbered, head, config)
                        for numbered in enumerate(_predicting(batch))
                    ]
                )
        rows = [row for batch_rows in share.results for row in batch_rows]
        counts = [count for count, _ in rows]
        measured = {
            name: ratio([sums[name] for _, sums in rows], counts)
            for name in (CALIBRATED, COPIED)
        }
        return {"num_tokens": sum(counts)} | {
            name: {"kl": kl.value, "stderr": kl.stderr} for name, kl in measured.items()
        }


def _predicting(batch: Batch) -> Tensor:
    """Return the positions (B, T) whose next token is text."""
    labels = batch["input_ids"].masked_fill(~real_tokens(batch), NO_LOSS)
    return next_token_targets(labels, batch["position_ids"])[0]


def _row(
    hidden: dict[str, Tensor], row: tuple[int, Tensor], head: nn.Linear, config: Any
) -> tuple[int, dict[str, float]]:
    """Count the predicting positions of a row, and sum the KL of copied and calibrated
    weights over them.

    hidden: (B, T, D) by name. row: its number in the batch, and its positions to keep.
    """
    number, keep = row
    predicting = {
        name: states[number][keep.to(states.device)] for name, states in hidden.items()
    }
    sums = {
        name: float(
            kl_sum(
                (predicting[ORIGINAL], head, config), (predicting[name], head, config)
            )
        )
        for name in (COPIED, CALIBRATED)
    }
    return int(keep.sum()), sums
