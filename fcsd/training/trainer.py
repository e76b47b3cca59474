"""The training loop: `transformers.Trainer` with the objectives of the paper, and with
steps that a guard may skip.

`DistillTrainer.optimizer_step` is a step from its rows to its schedule, to be read from
top to bottom. The Trainer prepares model and optimiser, calls the backward pass, clips,
logs, evaluates, and ends a training; what fcsd overrides of its private methods, and
why, is `OVERRIDDEN`.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from transformers import PreTrainedModel, TrainingArguments
from transformers.optimization import GreedyLR
from transformers.trainer_utils import SaveStrategy, TrainOutput

from fcsd.base.errors import UserError
from fcsd.data.rows import EpochRows, data_lines
from fcsd.model.autocast import autocast_experts
from fcsd.model.connectivity.spec import changed_by
from fcsd.model.families.structure import checkpoints_reentrantly
from fcsd.parallel.failure import in_step
from fcsd.parallel.launch import Launch
from fcsd.parallel.parts import begin_in_float32
from fcsd.training.argument_rules import REENTRANT
from fcsd.training.checkpoint_writer import CheckpointWriter
from fcsd.training.checkpoints import checkpoints
from fcsd.training.config import Sections
from fcsd.training.optimizer import learning_rate_schedule, note_parts
from fcsd.training.record import TrainingRecord
from fcsd.training.resumable import ResumableTrainer
from fcsd.training.safety import Guard, GuardedSteps
from fcsd.training.signals import shield_workers
from fcsd.training.step_loss import StepLoss
from fcsd.training.teachers.base import Teacher

if TYPE_CHECKING:
    from fcsd.training.own_text import OwnText


OVERRIDDEN = {
    "_inner_training_loop": "training/trainer.py: the Trainer's loop cannot skip a"
    " step by its loss and norm, and loads a checkpoint in the format of one engine",
    "_save_checkpoint": "training/resumable.py: the Trainer's checkpoint has per-expert"
    " names, which it loads non-strictly, and a name before it is complete (in"
    " api/trainer.py also for pushing it)",
    "_move_model_to_device": "training/trainer.py: shards that are kept in host memory"
    " would be moved to the device",
    "_load_best_model": "api/trainer.py: the Trainer would look for a whole model in a"
    " checkpoint of shards",
}
"""The private methods of `transformers.Trainer` that fcsd overrides -> where it does, and
what breaks without it.
"""


class DistillTrainer(ResumableTrainer):
    """Minimise an `Objective` over packed rows, while a `Guard` decides on every step;
    the base class of `ReadyTrainer`, which prepares models and rows.

    In training the model must carry a loss head; `ReadyTrainer` attaches and detaches it.
    `teacher` is needed for the objectives that compare with one. `sections` hold the
    settings that `args` have no field for: the objective, the training and the reaction
    to a step that goes wrong. `record` is written into each checkpoint and states its
    settings and data. `fcsd.training.meters` lists the logged figures.

    row_order: the order of the rows in each epoch; None where there are none to train on.
    """

    # `StepLoss` divides by the number of kept tokens of the whole step, so the Trainer
    # must not divide by the number of micro-batches again.
    loss_is_scaled_for_ga = True
    row_order: EpochRows | None = None

    def __init__(
        self,
        model: PreTrainedModel,
        args: TrainingArguments,
        *,
        sections: Sections,
        teacher: Teacher | None,
        launch: Launch,
        record: TrainingRecord,
        **kwargs: Any,
    ):
        self.launch, self.engine, self.record = launch, launch.engine, record
        _use_one_device(args)
        # torch's autocast has no rule for the grouped matmuls of the experts.
        if args.bf16:
            autocast_experts()
        # The Trainer would refuse to write checkpoints of such a model; fcsd writes its
        # own, so the flag is set for the constructor alone.
        args.save_only_model = self.engine.spreads_experts
        super().__init__(model, args, **kwargs)
        args.save_only_model = False
        # With this flag, which the Trainer sets for a model that was loaded in shards,
        # accelerate wraps the optimiser only.
        self.is_distributed_loading_by_transformers = self.engine.has_dtensors
        # These engines reduce gradients in every backward pass.
        self._reduces_each = self.engine.has_dtensors or self.is_deepspeed_enabled
        self.settings, self.teacher = sections.train, teacher
        balance = None
        if sections.train.balances:
            from fcsd.training.losses.balance import Balance

            balance = Balance(sections.train, model, self.accelerator)
        self.step_loss = StepLoss(
            sections.objective, teacher, self.accelerator, balance
        )
        self.meters = self.step_loss.meters
        self.guard = Guard(sections.safety)
        self.guarded = GuardedSteps(
            self.guard, self.accelerator, Path(str(args.output_dir))
        )
        self.checkpoint_writer = CheckpointWriter(
            args, launch, record.owner, self.guarded.say
        )
        self.own_text: OwnText | None = None  # where the student writes, too
        if sections.train.ema_decay is not None:
            from fcsd.training.averaging import WeightAverage

            keeps_start = changed_by(self.plain_model.config) is not None
            self.average = WeightAverage(
                sections.train.ema_decay, launch.ranks, keeps_start=keeps_start
            )

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        if not self.engine.shards:  # shards are on their devices already
            super()._move_model_to_device(model, device)

    # ---- the loop

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        self.continued_from = None
        if resume_from_checkpoint:
            self.continued_from = Path(str(resume_from_checkpoint))
        try:
            # The Trainer would load a checkpoint at a time that depends on the engine,
            # in that engine's format; `_load_or_start` is the same for all engines.
            with self.step_loss.capped(self.plain_model, self.settings):
                return super().train(None, trial, ignore_keys_for_eval)
        # Also for signals: a thread may still be writing a checkpoint.
        except BaseException as error:
            self.checkpoint_writer.leave(error)
            raise
        finally:
            in_step(False)

    def _inner_training_loop(
        self,
        batch_size: int | None = None,
        args: TrainingArguments | None = None,
        resume_from_checkpoint: str | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Train epoch by epoch, from the beginning or from `continued_from`."""
        self.accelerator.free_memory()
        loader = self.get_train_dataloader()
        num_epochs, epoch_steps, _, num_rows, _, _, max_steps = (
            self.set_initial_training_values(self.args, loader)
        )
        self.start_or_load_state(max_steps, num_epochs)
        _refuse_reentrant_checkpointing(self.plain_model)
        self.note_training()
        model, loader = self._prepare_for_training(max_steps, loader, None)
        self._load_or_start(max_steps)
        start_time = time.time()
        # It evaluates, too. Nothing else saves checkpoints (best weights: `best.py`).
        log_and_save = partial(
            self._maybe_log_save_evaluate,
            model=model,
            trial=trial,
            ignore_keys_for_eval=ignore_keys_for_eval,
            start_time=start_time,
        )
        model.zero_grad()
        self._tell("on_train_begin")
        if self.args.eval_on_start:
            self._evaluate(trial, ignore_keys_for_eval, skip_scheduler=True)

        first_epoch, first_step = divmod(self.state.global_step, epoch_steps)
        if self.args.ignore_data_skip:
            first_step = 0
        resumes = self.continued_from is not None
        norm, rate = None, None
        for epoch in range(first_epoch, num_epochs):
            self._tell("on_epoch_begin")
            # The score before the first step may have ended the run.
            if self.control.should_training_stop:
                break
            batches = self.batches_of(loader, epoch, first_step, resumes=resumes)
            for step in range(first_step, epoch_steps):
                # Skipping batches has drawn random numbers, too.
                restores = resumes and step == first_step > 0
                taken = self.optimizer_step(model, batches, restores_random=restores)
                if taken is not None:
                    norm, rate = taken
                    self.state.global_step += 1
                    self.state.epoch = epoch + (step + 1) / epoch_steps
                    self._tell("on_step_end")
                    self._settle_control()
                    log_and_save(self._tr_loss, norm, epoch=epoch, learning_rate=rate)
                if self.control.should_epoch_stop or self.control.should_training_stop:
                    break
            first_step, resumes = 0, False
            self._tell("on_epoch_end")
            self._settle_control()
            log_and_save(self._tr_loss, norm, epoch=epoch, learning_rate=rate)
            if self.control.should_training_stop:
                break
        self.checkpoint_writer.close()
        return self._finalize_training(trial, num_rows, start_time)

    def optimizer_step(
        self,
        model: nn.Module,
        batches: Iterator[Any],
        *,
        restores_random: bool = False,
    ) -> tuple[float, float] | None:
        """Take one optimiser step on the next micro-batches. restores_random: the
        checkpoint's random generators are restored once they are fetched.

        Returns:
            Norm of the gradient and learning rate; None where a callback has ended the
            training within the step.
        """
        args, guarded, step = self.args, self.guarded, self.state.global_step
        step_loss, writer = self.step_loss, self.checkpoint_writer
        student: Any = self.model
        optimizer: Any = self.optimizer
        scheduler: Any = self.lr_scheduler

        # Fetch the micro-batches; the student may write some of their rows.
        micro_batches = list(islice(batches, args.gradient_accumulation_steps))
        if self.own_text is not None:
            self.own_text.write(self.plain_model, micro_batches, step)
        # Count the kept tokens of all ranks: the loss is their mean.
        num_kept = step_loss.begin_step(student, micro_batches, step, args.device)
        # Let the teacher see all of them first (`kl+l2`: one at a time, in `step_loss`).
        step_loss.ask_teacher(micro_batches)
        if restores_random:
            self._load_rng_state(str(self.continued_from))

        # Forward and backward, micro-batch by micro-batch.
        logged_loss, logged_meters = self._tr_loss.clone(), self.meters.kept()
        self._tell("on_step_begin")
        for number, inputs in enumerate(micro_batches, start=1):
            in_step()
            is_last = number == len(micro_batches)
            with self._reducing_gradients(model, is_last):
                # transformers': `compute_loss` below, then `accelerator.backward`.
                self._tr_loss += self.training_step(model, inputs, num_kept)
            self.current_flos += float(self.floating_point_ops(inputs))  # type: ignore[assignment]
            self._track_num_input_tokens(inputs)
            if not is_last:
                self._tell("on_substep_end")
                if self.control.should_epoch_stop or self.control.should_training_stop:
                    return None
        # The loader holds its last batch until it has given the next one.
        for inputs in micro_batches:
            inputs.pop("teacher_hidden", None)

        # Clip, as transformers' Trainer does, and decide with all ranks. DeepSpeed has
        # taken its step within the backward pass; it skips a step by itself if the norm
        # is not finite.
        clipped = self._clip_grad_norm(model) if args.max_grad_norm > 0 else None
        norm = float(self._get_grad_norm(model, clipped))
        verdict = guarded.decide(step + 1, norm, model, is_writing=writer.is_writing)
        if verdict == "stop":
            raise self._stopped(step + 1)
        goes = verdict == "go"

        # Step. A step that is skipped leaves no trace in weights, schedule and means.
        self._tell("on_pre_optimizer_step")
        takes = goes or self.is_deepspeed_enabled
        if takes:
            optimizer.step()
        self._tell("on_optimizer_step")
        rate = self._get_learning_rate()
        waits = isinstance(scheduler, ReduceLROnPlateau | GreedyLR)
        if takes and not waits and not self.accelerator.optimizer_step_was_skipped:
            scheduler.step()
        model.zero_grad()
        in_step(False)
        if goes:
            if step_loss.balance is not None:
                step_loss.end_step()
            if self.average is not None:
                self.average.update(step + 1, self.plain_model, optimizer)
        else:
            self._tr_loss.copy_(logged_loss)
            self.meters.go_back(logged_meters)
        # All ranks have learnt that no thread is writing any more, so all of them give
        # the checkpoint its name in the same step.
        if writer.name is not None and guarded.is_written:
            writer.finish()
        return norm, rate

    def _tell(self, event: str) -> None:
        """Call all callbacks."""
        call = getattr(self.callback_handler, event)
        self.control = call(self.args, self.state, self.control)

    def _reducing_gradients(
        self, model: nn.Module, is_last: bool
    ) -> AbstractContextManager[None]:
        """Reduce gradients over the ranks after the last micro-batch of a step alone,
        where the engine can wait so long.
        """
        self.accelerator.gradient_state._set_sync_gradients(is_last)
        if is_last or self._reduces_each:
            return nullcontext()
        waiting: AbstractContextManager[None] = self.accelerator.no_sync(model)
        return waiting

    def _settle_control(self) -> None:
        """Log the last step whatever `logging_steps` is, and end the training with a
        checkpoint where a signal asks for the end.
        """
        control, guarded = self.control, self.guarded
        control.should_log |= control.should_training_stop
        if guarded.received and not control.should_training_stop:
            guarded.interrupted_by = guarded.received
            control.should_training_stop = True
            control.should_save = self.args.save_strategy != SaveStrategy.NO

    def _stopped(self, step: int) -> UserError:
        # The message names the last checkpoint, which may still be in the making.
        self.checkpoint_writer.finish()
        saved_checkpoints = checkpoints(Path(str(self.args.output_dir)))
        last = saved_checkpoints[-1] if saved_checkpoints else None
        return self.guarded.stopped(step, last)

    def _load_or_start(self, max_steps: int) -> None:
        """Load the checkpoint, and start the sums, now that there is an optimiser."""
        if self.is_deepspeed_enabled:
            begin_in_float32(self.plain_model, self.optimizer, self.launch.ranks)
        if self.step_loss.distance is not None:
            self.step_loss.distance.steps = max_steps
        if self.continued_from is not None:
            self.restore(self.continued_from)
            self.checkpoint_writer.known.add(self.continued_from.name)
        if self.average is not None:
            self.average.start(self.plain_model, self.optimizer)
        if self.row_order is not None and self.is_world_process_zero():
            for line in data_lines(self.train_dataset, self.row_order, max_steps):
                self.guarded.say(f"data: {line}")
        self.meters.reset()
        self.guarded.reset(self.state.global_step)
        # The sums of the Trainer's log and of its report at the end.
        self._tr_loss = torch.tensor(0.0, device=self.args.device)
        self._total_loss_scalar = 0.0
        self._initial_num_input_tokens_seen = self.state.num_input_tokens_seen
        self._initial_global_step = self.state.global_step
        self._globalstep_last_logged = self.state.global_step

    # ---- loss and log

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Compute this micro-batch's share of the step's mean loss, in nats per kept
        token.
        """
        assert num_items_in_batch is not None
        loss, outputs = self.step_loss(model, inputs, num_items_in_batch)
        loss = self.guarded.watched(loss)
        return (loss, outputs) if return_outputs else loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the parts of the loss, the throughput and the guard's counts to the
        Trainer's figures.
        """
        step = self.state.global_step
        if "loss" in logs:
            logs.update(self.meters.means(self.guarded.leave_out_skipped(logs, step)))
            logs.update(self.meters.written())
            logs["tokens_per_second"] = self.meters.tokens_per_second()
            logs.update(self.guard.report())
            self.meters.reset()
            self.guarded.reset(step)
        super().log(logs, start_time)
        if "loss" in logs and self.own_text is not None:
            self._show_sample(self.own_text.due_sample(step))

    def _show_sample(self, sample: str | None) -> None:
        """Print a sample of own text, and put it into the history alone: reporters take
        numbers.
        """
        if sample is not None:
            shown = " ".join(sample.split())
            self.guarded.say(f"own text, step {self.state.global_step}: {shown}")
            entry: dict[str, Any] = self.state.log_history[-1]
            entry["own_text"] = sample

    # ---- data

    def get_train_dataloader(self) -> Any:
        """Return a loader of whole steps, with workers that outlive a signal which the
        scheduler or Ctrl-C sends to all processes.
        """
        rows: Any = self.train_dataset
        loader = self._get_dataloader(
            rows,
            "Training",
            self._train_batch_size,
            sampler_fn=self._ordered_rows,
            is_training=True,
        )
        return shield_workers(loader)

    def _ordered_rows(self, rows: Any) -> Any:
        if self.row_order is None:
            return self._get_train_sampler(rows)
        # The Trainer's sampler permutes the rows of epoch 0; `ordered_by` shifts its
        # numbers in later epochs.
        sampler = self._get_train_sampler(self.row_order.part(rows))
        return self.row_order.ordered_by(sampler, self.args.data_seed)

    def num_examples(self, dataloader: Any) -> int:
        """Count the rows of an epoch, or those of another data set."""
        if self.row_order is not None and dataloader.dataset is self.train_dataset:
            return len(self.row_order)
        return super().num_examples(dataloader)

    # ---- optimiser

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Make the Trainer's optimiser; with expert parallelism, note which of its
        groups decay.
        """
        optimizer = super().create_optimizer(model)
        # A checkpoint stores the two groups of one process; those of different meshes
        # note which of the two they belong to.
        if self.engine.spreads_experts:
            trained: Any = self.model if model is None else model
            note_parts(optimizer, trained, self.get_decay_parameter_names(trained))
        return optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        if self.lr_scheduler is None:
            steered: Any = optimizer or self.optimizer
            schedule = learning_rate_schedule(self.args, steered, num_training_steps)
            self.lr_scheduler, self._created_lr_scheduler = schedule, True
        return self.lr_scheduler


def _refuse_reentrant_checkpointing(model: nn.Module) -> None:
    # It may have been enabled on the model itself, of which the arguments know nothing.
    if any(checkpoints_reentrantly(module) for module in model.modules()):
        raise UserError(
            f"{type(model).__name__}: {REENTRANT}; call"
            " model.activation_checkpointing_enable({'use_reentrant': False})"
        )


def _use_one_device(args: TrainingArguments) -> None:
    """Train on one device per process; transformers would replicate the model on every
    visible device.
    """
    if args.n_gpu > 1:
        print(
            f"this process trains on only one of the {args.n_gpu} visible devices;"
            " start one process per device with `accelerate launch --num_processes"
            f" {args.n_gpu}` (docs/scale.md)",
            file=sys.stderr,
        )
        args._n_gpu = 1
