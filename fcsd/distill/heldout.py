"""KL to the teacher on held-out text, as a score for early stopping: the same rows and tokens every time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fcsd.data.batches import Collator, next_token_targets, without_tail
from fcsd.distill.early_stopping import Score
from fcsd.distill.teachers.base import Batch, ModelTeacher, Teacher
from fcsd.distill.teachers.lora import AdapterOffTeacher
from fcsd.distributed.launch import Launch
from fcsd.errors import UserError
from fcsd.losses.head import refuse_packing
from fcsd.models.preserve import preserved


class HeldoutCE:
    """Cross-entropy in nats per kept token on `rows`, of a student in training, with its loss head.

    In a launch of several processes each has its share of the rows, and all of them call it.

    Args: rows of `fcsd.data.dataset.build_dataset`.
    """

    def __init__(self, rows: Sequence[Any], launch: Launch):
        self.rows, self.launch = rows, launch
        self.batches: list[Batch] | None = (
            None  # of this rank's rows, and of those it goes through in lockstep
        )

    def _prepare(self, student: nn.Module) -> list[Batch]:
        ranks, device = self.launch.ranks, self.launch.device
        own = ranks.deal(range(len(self.rows)))
        batches = []
        for number in [*own, *[0] * ranks.idle_passes(len(self.rows))]:
            row = self.rows[number]
            batch = without_tail({name: value.to(device) for name, value in Collator()([row]).items()})
            refuse_packing(student, batch["labels"], batch["position_ids"])
            self._add_target(batch)
            batches.append({name: value.cpu() for name, value in batch.items()})
        return batches

    @torch.no_grad()
    def __call__(self, student: PreTrainedModel) -> Score:
        """The loss of `student` as it is now, row by row; its training mode and the random state stay what they were.

        Raises:
            UserError: no row has a token to predict, or rows are packed for a family that would mix their examples.
        """
        ranks = self.launch.ranks

        def own_share() -> list[tuple[float, int]]:
            if self.batches is None:
                self.batches = self._prepare(student)
            found = [self._sum(student, batch) for batch in self.batches]
            sums = torch.stack([total for total, _ in found]).tolist() if found else []
            own = len(ranks.deal(range(len(self.rows))))
            return [(total, count) for total, (_, count) in zip(sums, found, strict=True)][:own]

        with preserved(student):
            student.eval()
            by_rank = ranks.share(own_share)
        found = [by_rank[number % ranks.size][number // ranks.size] for number in range(len(self.rows))]
        sums, counts = [total for total, _ in found], [count for _, count in found]
        if not sum(counts):
            raise UserError(
                "data.heldout: no row has a token to predict; use other text or a larger max_length"
            )
        return Score(sums, counts, higher_is_better=False)

    def _sum(self, student: Any, batch: Batch) -> tuple[Tensor, int]:
        """The sum of the loss over the kept tokens of a batch, and their number."""
        given = {name: value.to(self.launch.device) for name, value in batch.items()}
        keep, targets = next_token_targets(given["labels"], given["position_ids"])
        ids, positions = given["input_ids"], given["position_ids"]
        target = self._target(given, targets)
        return student(input_ids=ids, position_ids=positions, keep=keep, **target)["loss"], len(targets)

    def _add_target(self, batch: Batch) -> None:
        """Put what the student is compared with into a batch; of the data it is there."""

    def _target(self, given: Batch, targets: Tensor) -> dict[str, Any]:
        return {"objective": "ce", "labels": targets}


class HeldoutKL(HeldoutCE):
    """KL(teacher || student) in nats per kept token on `rows`, of a student in training, with its loss head.

    Of the teacher are kept its head and the (kept tokens, D) final hidden states of the rows, these in main memory.

    Args: as above; `original` loads the model that the student is compared with, for runs whose own teacher cannot be
    asked about other rows (a cache), or that have none (sft).
    """

    def __init__(self, rows: Sequence[Any], original: Callable[[], PreTrainedModel], launch: Launch):
        super().__init__(rows, launch)
        self.original = original
        self.teacher: Teacher | None = None
        self.head: nn.Module | None = None

    def ask(self, teacher: Teacher | None, *, sharded: bool) -> None:
        """Use the teacher of the run, where it can be run.

        Raises:
            UserError: it cannot, and the weights of another copy would have to be spread over the ranks.
        """
        if isinstance(teacher, ModelTeacher | AdapterOffTeacher):
            self.teacher = teacher
        elif sharded:
            raise UserError(
                "early_stopping.metric: heldout_kl needs a teacher that is run: under FSDP or DeepSpeed that is"
                " teacher.backend: sharded, with an objective that has a teacher"
            )

    def _prepare(self, student: nn.Module) -> list[Batch]:
        own = self.teacher
        if own is None:
            self.teacher = ModelTeacher(nn.Module.to(self.original(), self.launch.device))
        batches = super()._prepare(student)
        assert self.teacher is not None
        self.head, self.teacher = self.teacher.head, own  # one that was loaded for this does not stay
        return batches

    def _add_target(self, batch: Batch) -> None:
        assert self.teacher is not None
        self.teacher.prepare([batch])

    def _target(self, given: Batch, targets: Tensor) -> dict[str, Any]:
        return {"objective": "kl", "teacher_hidden": given["teacher_hidden"], "teacher_head": self.head}
