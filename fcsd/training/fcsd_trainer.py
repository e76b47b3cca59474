"""The training of models and rows that are ready: the same steps for a recipe's run and
for `fcsd.FCSDTrainer`.

`fcsd.training.trainer` has the loss, the content of a checkpoint and the handling of
failing steps.

Not covered: loading models, tokenizing data, and saving the trained model
(`fcsd.training.run` for a recipe, `fcsd.api.trainer` for a script).
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import set_seed
from transformers.trainer_utils import TrainOutput

from fcsd.model.autocast import float32_routers
from fcsd.parallel.engine import finish_zero_settings
from fcsd.parallel.launch import Launch
from fcsd.training.checkpoints import restore_if_complete
from fcsd.training.config import Sections, UpdateConfig
from fcsd.training.fcsd_config import FCSDConfig
from fcsd.training.losses.head import detach_loss_head, loss_head
from fcsd.training.out_of_memory import explain_oom
from fcsd.training.prepare import (
    Ready,
    check_vocabularies,
    collator,
    compute_alike,
    place_teacher,
    prepare_student,
)
from fcsd.training.record import TrainingRecord
from fcsd.training.row_order import EpochRows, ReadsWholeSteps
from fcsd.training.trainer import DistillTrainer


def begin(
    args: FCSDConfig, train: UpdateConfig, launch: Launch, *, of_recipe: bool
) -> TrainingRecord:
    """Seed the random generators, and fit the arguments to the launch; return the
    record of those that were given.
    """
    set_seed(args.seed)
    record = TrainingRecord(args, train, launch, of_recipe=of_recipe)
    args.fit_to_engine(train, launch)
    return record


class ReadyTrainer(ReadsWholeSteps, DistillTrainer):
    """A trainer of models in memory on packed rows, within `engine_environment`.

    ready: models and rows. sections: a recipe's own, or those of `args`. record: from
    `begin`. compared: the teacher, also where the objective has none.
    """

    args: FCSDConfig

    def __init__(
        self,
        ready: Ready,
        args: FCSDConfig,
        *,
        sections: Sections,
        record: TrainingRecord,
        launch: Launch,
        **kwargs: Any,
    ):
        objective, train = sections.objective, sections.train
        student, self.compared = ready.student, place_teacher(ready.teacher, launch)
        check_vocabularies(student, self.compared, ready.tokenizer, objective)
        prepare_student(student, objective, train, launch)
        compute_alike(
            self.compared,
            student,
            under_autocast=args.bf16 and not launch.engine.shards,
        )
        self.row_order = EpochRows.of(
            ready.rows, args.rows_of_a_step(launch), args.max_length
        )
        finish_zero_settings(args, train, launch.engine)
        super().__init__(
            student,
            args,
            sections=sections,
            teacher=self.compared if objective.has_teacher else None,
            launch=launch,
            record=record,
            train_dataset=ready.rows,
            eval_dataset=ready.heldout,
            data_collator=collator(args, self.compared),
            **kwargs,
        )
        if not launch.engine.shards:
            # outside training and evaluation the model is the user's
            detach_loss_head(student)

    def at_work(self) -> contextlib.AbstractContextManager[None]:
        """Return the context that training and evaluation run in."""
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def with_loss_head(self) -> Iterator[None]:
        """Give the model its loss head within the block."""
        model = self.plain_model
        routers = float32_routers(model) if self.args.bf16 else contextlib.nullcontext()
        with (
            self.at_work(),
            loss_head(model, self.step_loss.objective.vocab_size),
            routers,
        ):
            yield

    def train_from(self, checkpoint: Path | None, *args: Any) -> TrainOutput:
        """Train from a checkpoint that is known to be intact; None: from the beginning."""
        if checkpoint is not None:
            self.record.refuse_another(checkpoint)
        length, device = self.args.max_length, self.launch.device
        explained = explain_oom(
            self.plain_model, self.teacher, self.settings, length, device
        )
        with self.with_loss_head(), explained:
            # A run that was killed after its last step has nothing left to train.
            if checkpoint is not None and restore_if_complete(self, checkpoint):
                output = TrainOutput(self.state.global_step, 0.0, {})
            else:
                self.checkpoint_writer.known.clear()
                output = super().train(
                    str(checkpoint) if checkpoint is not None else None, *args
                )
        # The model that the user holds afterwards has the weights that are saved.
        if self.average is not None:
            self.average.apply()
        return output
