"""The interface of teachers: final hidden states, from any source.

A divergence needs only the teacher's head and the final hidden states (after the final
norm) of the tokens with loss: D numbers a token instead of the vocabulary's. A step
requests the hidden states of all its micro-batches together, before the student's first
forward pass, so that a teacher with sharded weights gathers them while the student's
are not gathered.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fcsd.base.errors import UserError
from fcsd.data.batches import Batch, next_token_targets, trim_padding
from fcsd.model.autocast import UnderAutocast, computing_dtype
from fcsd.model.dtypes import has_plain_weights, to_dtype
from fcsd.model.families.structure import head_scaling, output_head
from fcsd.parallel.failure import further_in_step
from fcsd.training.losses.head import LossHead, final_hidden


def cast_teacher(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Cast a teacher in place, as a student of that dtype is cast, unless it is
    quantised.
    """
    if has_plain_weights(model):
        to_dtype(model, dtype)


class Teacher(ABC):
    """`head`: a module with the teacher's `weight` (V, D') and `bias`, whole on every
    rank and frozen.

    `ahead`: called with each micro-batch when it is collated, some steps before
    `prepare` and in another process; None if the teacher does not need that.
    """

    head: nn.Module
    ahead: Callable[[Batch], None] | None = None

    @abstractmethod
    def prepare(self, batches: list[Batch]) -> None:
        """Put `teacher_hidden` (N, D') of the kept positions into each micro-batch of a
        step.

        batches: input_ids, position_ids, labels, each (B, T), on the device of the
        training.
        """

    def hidden_and_streams(
        self, batch: Batch, keep: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        """Return (N, D') of the positions to keep, (B, T) bool, and the streams after
        every layer, for one micro-batch; UserError for a teacher without layers.
        """
        raise UserError(
            f"{type(self).__name__}: has final hidden states only; use teacher.backend:"
            " sharded"
        )


class LiveTeacher(Teacher):
    """A teacher whose `model` is run on the student's batches, within `as_teacher`.

    arithmetic: returns the context in which the model computes, so that a student with
    the teacher's weights has a KL of 0 to it.
    """

    model: Any
    arithmetic: Callable[[], AbstractContextManager[None]] = nullcontext

    def as_teacher(self) -> AbstractContextManager[None]:
        return nullcontext()

    def compute_as(self, student: PreTrainedModel, *, under_autocast: bool) -> None:
        """Compute from now on like a student on the same device, whose weights have the
        dtype of the training already; a quantised model computes as it is.
        """
        if self.model is not student:
            own = self.model.dtype
            dtype = computing_dtype(
                own, student.dtype, bf16=under_autocast, shards=False
            )
            cast_teacher(self.model, dtype)
        if under_autocast:
            self.arithmetic = UnderAutocast(
                self.model, student_dtype=student.dtype
            ).computing

    def hidden(self, batch: Batch, keep: Tensor) -> Tensor:
        """Compute (N, D') of the positions of a batch to keep, (B, T) bool, within
        `as_teacher`.
        """
        return final_hidden(self.model, batch["input_ids"], batch["position_ids"], keep)

    @torch.no_grad()
    def prepare(self, batches: list[Batch]) -> None:
        with self.as_teacher(), self.arithmetic():
            for batch in batches:
                further_in_step()  # a step may have many
                trimmed = trim_padding(batch)
                keep, _ = next_token_targets(trimmed["labels"], trimmed["position_ids"])
                batch["teacher_hidden"] = self.hidden(trimmed, keep)

    @torch.no_grad()
    def hidden_and_streams(
        self, batch: Batch, keep: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        from fcsd.training.losses.hidden_terms import captured_streams

        with (
            self.as_teacher(),
            self.arithmetic(),
            captured_streams(self.model) as streams,
        ):
            return self.hidden(batch, keep), streams


class ModelTeacher(LiveTeacher):
    """A separate frozen model, on the training's device or already sharded over the
    ranks; head: a gathered copy where the model's own is sharded.
    """

    def __init__(self, model: PreTrainedModel, head: nn.Module | None = None):
        self.model = model.eval().requires_grad_(False)
        self.head = output_head(model) if head is None else head
        # Without these attributes the loss would use the student's scaling.
        if not isinstance(self.head, LossHead):
            scaled: Any = self.head
            scaled.logit_scale, scaled.softcap = head_scaling(model.config)
