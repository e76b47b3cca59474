"""The loss of an optimiser step, micro-batch by micro-batch.

It is the sum over the kept tokens of all ranks and micro-batches, divided by their
number, so it does not depend on how a batch is cut.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fcsd.data.batches import (
    Batch,
    counted_tokens,
    next_token_targets,
    trim_padding,
)
from fcsd.model.families.structure import unwrapped
from fcsd.parallel.failure import in_step
from fcsd.training.config import UpdateConfig
from fcsd.training.losses.head import packing_of, refuse_packing
from fcsd.training.losses.objectives import KLWithL2ObjectiveConfig, ObjectiveConfig
from fcsd.training.meters import Meters
from fcsd.training.teachers.base import Teacher

if TYPE_CHECKING:
    from fcsd.model.families.capacity import Dropping
    from fcsd.training.losses.balance import Balance
    from fcsd.training.losses.hidden_terms import StreamDistance


class StepLoss:
    """The value of `objective` for a student and the teacher that it is compared with;
    `meters` collects its parts.
    """

    def __init__(
        self,
        objective: ObjectiveConfig,
        teacher: Teacher | None,
        accelerator: Any,
        balance: "Balance | None",
    ):
        self.objective: ObjectiveConfig = objective
        self.teacher, self.accelerator = teacher, accelerator
        self.balance = balance
        self.dropping: Dropping | None = None  # set within `capped`
        self.distance: StreamDistance | None = None
        if isinstance(objective, KLWithL2ObjectiveConfig):
            from fcsd.training.losses import hidden_terms

            self.distance = hidden_terms.StreamDistance(objective, 1)
        self.meters = Meters(accelerator, objective.logged)
        # whether packed examples would see each other; known once a step has begun
        self._may_leak: bool | None = None
        # of the distance between the streams in the step that is under way
        self._coefficient = 0.0

    @contextmanager
    def capped(self, student: nn.Module, train: UpdateConfig) -> Iterator[None]:
        """Limit the student's experts to their capacity, if one is set, in the training
        passes within the block.
        """
        if train.capacity_factor is None:
            yield
            return
        from fcsd.model.families.capacity import dropping

        drop = train.capacity_drop or "order"
        with dropping(
            student, train.capacity_factor, drop, training_only=True
        ) as self.dropping:
            try:
                yield
            finally:
                self.dropping = None

    def begin_step(
        self, model: nn.Module, batches: list[Batch], step: int, device: torch.device
    ) -> Tensor:
        """Begin an optimiser step: add its tokens to the meters and the balance, and set
        the coefficient of the distance. All ranks call this.

        Returns:
            The kept tokens of the step over all ranks.

        Raises:
            UserError: examples packed for a family in which they would see each other.
        """
        if self.distance is not None:
            self._coefficient = self.distance.coefficient(step)
        count = sum(
            next_token_targets(batch["labels"], batch["position_ids"])[0].sum()
            for batch in batches
        )
        tokens = sum(batch["input_ids"].numel() for batch in batches)
        routed = sum(int(counted_tokens(batch).sum()) for batch in batches)
        # one reduction for all three numbers
        counts = self.accelerator.reduce(
            torch.tensor([int(count), tokens, routed], device=device), "sum"
        )
        self.meters.num_tokens += int(counts[1])
        if self.balance is not None:
            self.balance.begin_step(int(counts[2]))
        if self._may_leak is None:
            self._may_leak = packing_of(unwrapped(model).config) == "leaks"
        for batch in batches if self._may_leak else ():
            refuse_packing(model, batch["labels"], batch["position_ids"])
        return counts[0]

    def ask_teacher(self, batches: list[Batch]) -> None:
        """Put the teacher's hidden states into all micro-batches of a step."""
        # The distance needs a teacher pass for each micro-batch anyway (`__call__`), which
        # also returns the hidden states.
        if self.teacher is not None and not self._coefficient:
            in_step()
            self.teacher.prepare(batches)

    def __call__(
        self, model: nn.Module, inputs: Batch, num_kept: Tensor | int
    ) -> tuple[Tensor, Any]:
        """Return this micro-batch's share of the step's mean loss, in nats per kept
        token, and the model's output.
        """
        inputs = trim_padding(inputs)
        keep, targets = next_token_targets(inputs["labels"], inputs["position_ids"])
        distance = self.distance if self._coefficient else None
        streams: list[Tensor] = []
        teacher_streams: list[Tensor] = []
        # A measure sees labels or a teacher, never both.
        target: dict[str, Any] = {"labels": targets}
        if self.teacher is not None:
            if distance is not None:
                # One micro-batch at a time: the block outputs of a whole step would not
                # fit into memory.
                hidden, teacher_streams = self.teacher.hidden_and_streams(inputs, keep)
            else:
                hidden = inputs["teacher_hidden"]
            target = {"teacher_hidden": hidden, "teacher_head": self.teacher.head}
        # Hooks record streams and routes of this one forward pass.
        with ExitStack() as stack:
            if distance is not None:
                from fcsd.training.losses.hidden_terms import captured_streams

                streams = stack.enter_context(captured_streams(model))
            routes = None
            if self.balance is not None:
                routes = stack.enter_context(self.balance.recorded(model))
            if self.dropping is not None:
                self.dropping.begin(counted_tokens(inputs))
            ids, positions = inputs["input_ids"], inputs["position_ids"]
            outputs = model(
                input_ids=ids,
                position_ids=positions,
                keep=keep,
                objective=self.objective,
                **target,
            )
        if self.dropping is not None:
            self.meters.add_pairs(self.dropping.take())
        # The engines average gradients over the ranks, but the loss is the mean over
        # the tokens of all ranks: the factor undoes that average. (The gradients of an
        # expert with a single owner are divided by transformers, distributed/fsdp.py.)
        scale = self.accelerator.num_processes / torch.clamp(
            torch.as_tensor(num_kept), min=1
        )
        loss = outputs["loss"] * scale
        if self.teacher is None:
            self.meters.add(self.objective.logged, loss)
        else:
            self.meters.add_statistics(outputs, scale)
        if distance is not None:
            value = distance.value(streams, teacher_streams, keep)
            self.meters.add("l2", value * scale)
            loss = loss + self._coefficient * value * scale
        if self.balance is not None and routes is not None:
            loss = loss + self.balance.share(routes.take(), inputs, self.meters)
        return loss, outputs

    def end_step(self) -> None:
        """Record the loads of a step that was taken, and move the routers' biases."""
        if self.balance is not None:
            self.meters.add_loads(self.balance.end_step())
