"""Measure the loss on held-out text as the score of a model in training, on the same
rows and tokens every time.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fcsd.base.errors import UserError
from fcsd.data.batches import Batch, next_token_targets
from fcsd.model.preserve import preserved
from fcsd.parallel.launch import Launch
from fcsd.training.early_stopping import Score
from fcsd.training.losses.heldout_kl import read_rows, sums_by_row
from fcsd.training.losses.objectives import (
    CrossEntropyObjectiveConfig,
    KLObjectiveConfig,
)
from fcsd.training.teachers.base import LiveTeacher, ModelTeacher, Teacher


class HeldoutCE:
    """The cross-entropy in nats per kept token on `rows` (of
    `fcsd.data.dataset.build_dataset`) of a student in training, with its loss head. In
    a launch of several processes each has its share of the rows, and all of them call
    it.
    """

    def __init__(self, rows: Sequence[Any], launch: Launch):
        self.rows, self.launch = rows, launch
        # this rank's share, prepared by the first call and reused by later ones
        self.batches: list[Batch] | None = None

    def _prepare(self, student: PreTrainedModel) -> list[Batch]:
        return self._read(student, lambda batch: None)  # labels are in it already

    def _read(
        self, student: PreTrainedModel, add_target: Callable[[Batch], None]
    ) -> list[Batch]:
        return read_rows(
            self.rows,
            add_target,
            model=student,
            device=self.launch.device,
            ranks=self.launch.ranks,
            trim=True,
        )

    @torch.no_grad()
    def __call__(self, student: PreTrainedModel) -> Score:
        """Compute the present loss of `student`; its training mode and the random state
        are restored.

        Raises UserError: no row has a token to predict, or rows are packed for a family
        that would mix their examples.
        """
        with preserved(student):
            student.eval()
            if self.batches is None:
                self.batches = self._prepare(student)
            sums, counts = sums_by_row(
                self.batches,
                len(self.rows),
                lambda batch: self._sum(student, batch),
                device=self.launch.device,
                ranks=self.launch.ranks,
            )
        if not sum(counts):
            raise UserError(
                "data.heldout: no row has a token to predict; use other text, or rows"
                " with other labels"
            )
        return Score(sums, counts, higher_is_better=False)

    def _sum(self, student: Any, batch: Batch) -> Tensor:
        """Compute the summed loss inside the student's forward pass, where every engine
        has gathered the head.
        """
        keep, targets = next_token_targets(batch["labels"], batch["position_ids"])
        ids, positions = batch["input_ids"], batch["position_ids"]
        target = self._target(batch, targets)
        return student(input_ids=ids, position_ids=positions, keep=keep, **target)[
            "loss"
        ]

    def _target(self, batch: Batch, targets: Tensor) -> dict[str, Any]:
        return {"objective": CrossEntropyObjectiveConfig(name="ce"), "labels": targets}


class ComparingScore:
    """A score that compares the student in training with its teacher.

    original: loads the model to compare with, for runs whose teacher cannot be run on
    other rows (a cache), or that have none (sft). named: the score, in errors.
    """

    named = "metric: heldout_kl"

    def __init__(self, original: Callable[[], PreTrainedModel], launch: Launch):
        self.original, self.of_launch = original, launch
        self.teacher: LiveTeacher | None = None
        self.under_autocast = False

    def set_teacher(
        self, teacher: Teacher | None, *, under_autocast: bool = False
    ) -> None:
        """Use the teacher of the run if it is a model that can be run.

        UserError: it is not, and the weights of another copy would have to be sharded
        over the ranks. under_autocast: the student is trained under autocast, and a
        copy that is loaded has to compute likewise.
        """
        self.under_autocast = under_autocast
        if isinstance(teacher, LiveTeacher):
            self.teacher = teacher
        elif self.of_launch.engine.shards:
            raise UserError(
                f"early_stopping.{self.named} needs a loaded teacher: under FSDP or"
                " DeepSpeed, use teacher.backend: sharded, with an objective that has a"
                " teacher"
            )

    def compared_with(self, student: PreTrainedModel) -> LiveTeacher:
        """Return the run's teacher, or a copy of the original that computes like the
        student.
        """
        if self.teacher is not None:
            return self.teacher
        copy = ModelTeacher(nn.Module.to(self.original(), self.of_launch.device))
        # Otherwise the KL would begin with the rounding in which the two differ, not at
        # 0.
        copy.compute_as(student, under_autocast=self.under_autocast)
        return copy


class HeldoutKL(ComparingScore, HeldoutCE):
    """KL(teacher || student) in nats per kept token on `rows`, for a student in
    training with its loss head.

    The teacher's head and its (kept tokens, D) final hidden states of the rows are
    kept, the latter in main memory.
    """

    def __init__(
        self,
        rows: Sequence[Any],
        original: Callable[[], PreTrainedModel],
        launch: Launch,
    ):
        HeldoutCE.__init__(self, rows, launch)
        ComparingScore.__init__(self, original, launch)
        self.head: nn.Module | None = None

    def _prepare(self, student: PreTrainedModel) -> list[Batch]:
        # A copy that was loaded for this pass is dropped; only its head is needed
        # again.
        teacher = self.compared_with(student)
        self.head = teacher.head
        return self._read(student, lambda batch: teacher.prepare([batch]))

    def _target(self, batch: Batch, targets: Tensor) -> dict[str, Any]:
        # The plain KL, whatever the training minimises, so that scores of different
        # objectives can be compared.
        hidden = batch["teacher_hidden"]
        return {
            "objective": KLObjectiveConfig(),
            "teacher_hidden": hidden,
            "teacher_head": self.head,
        }


class HeldoutLosses:
    """The held-out losses of a model in training: the KL to its teacher, and the
    cross-entropy where the objective has no teacher.

    teacher: None where there is none. of_teacher: whether the objective compares with
    it.
    """

    def __init__(self, teacher: Teacher | None, launch: Launch, *, of_teacher: bool):
        self.teacher, self.launch, self.of_teacher = teacher, launch, of_teacher
        self._kept: dict[int, list[HeldoutCE]] = {}

    def __call__(
        self,
        student: PreTrainedModel,
        rows: Sequence[Any],
        prefix: str,
        *,
        eval_dataset: Any,
    ) -> dict[str, float]:
        """Measure `rows`; eval_dataset: the trainer's rows, or a dict of them, for
        which the teacher runs only once.

        Returns: PREFIX_kl, PREFIX_ce, their standard errors, and PREFIX_loss, the one
        of the objective.
        """
        measures = self._kept.get(id(rows)) or self._measures(rows)
        datasets = [eval_dataset]
        if isinstance(eval_dataset, Mapping):
            datasets = list(eval_dataset.values())
        # Rows of a single call are not remembered: their id may be reused by other rows
        # once they are gone. The trainer's own rows live as long as it does.
        if any(rows is dataset for dataset in datasets):
            self._kept[id(rows)] = measures
        metrics: dict[str, float] = {}
        for measure in measures:
            score = measure(student)
            name = f"{prefix}_{'kl' if isinstance(measure, HeldoutKL) else 'ce'}"
            metrics[name] = score.value
            if score.stderr is not None:
                metrics[f"{name}_stderr"] = score.stderr
        return {
            f"{prefix}_loss": metrics[f"{prefix}_{'kl' if self.of_teacher else 'ce'}"],
            **metrics,
        }

    def _measures(self, rows: Sequence[Any]) -> list[HeldoutCE]:
        measures = [] if self.of_teacher else [HeldoutCE(rows, self.launch)]
        if self.teacher is not None:
            heldout_kl = HeldoutKL(rows, _no_original, self.launch)
            heldout_kl.set_teacher(self.teacher)
            measures.append(heldout_kl)
        return measures


def _no_original() -> PreTrainedModel:
    raise UserError(
        "eval_dataset: eval_kl needs a loaded teacher; a cache has no hidden states for"
        " these rows"
    )
