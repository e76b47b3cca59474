"""The checkpoints of a trainer, from which a training continues exactly, under any
engine and on any number of ranks.

This module writes the small files of a checkpoint. `fcsd.training.checkpoint_writer` has
the sequence in which all are written; `fcsd.training.checkpoints` lists them.
"""

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import skip_first_batches
from torch import nn
from transformers import EarlyStoppingCallback, Trainer, TrainerState
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import compare_trainer_and_checkpoint_args

from fcsd.base.files import read_json
from fcsd.base.writing import write_json
from fcsd.data.rows import EpochRows
from fcsd.model.connectivity.spec import TRAINED
from fcsd.parallel.launch import Launch
from fcsd.parallel.state import load_schedule, read_state
from fcsd.training.checkpoint_writer import SCHEDULE, CheckpointWriter, TrainingState
from fcsd.training.checkpoints import BALANCE_FILE, GUARD_FILE, STOPPER_FILE
from fcsd.training.config import UpdateConfig
from fcsd.training.optimizer import take_rate_of_schedule
from fcsd.training.record import RECORD_FILE, TrainingRecord
from fcsd.training.safety import Guard, GuardedSteps
from fcsd.training.step_loss import StepLoss

if TYPE_CHECKING:
    from fcsd.training.averaging import WeightAverage
    from fcsd.training.early_stopping import EarlyStopper

TRAINER_STATE = "trainer_state.json"


class ResumableTrainer(Trainer):
    """The part of a trainer that writes checkpoints and continues from them.

    continued_from: the checkpoint of the training that is under way; None: it began
    without one. average: the weights' average, with ema_decay. stopper: where a run
    stops by its scores.
    """

    launch: Launch
    record: TrainingRecord
    settings: UpdateConfig
    row_order: EpochRows | None
    step_loss: StepLoss
    guard: Guard
    guarded: GuardedSteps
    checkpoint_writer: CheckpointWriter
    continued_from: Path | None = None
    average: "WeightAverage | None" = None
    stopper: "EarlyStopper | None" = None

    @property
    def plain_model(self) -> Any:
        """The model without DDP's or DeepSpeed's wrapper."""
        return self.accelerator.unwrap_model(self.model)

    def scored_weights(self) -> AbstractContextManager[None]:
        """Give the model, within the block, the weights that are scored and saved: with
        ema_decay their average.
        """
        from fcsd.training.averaging import scored

        return scored(self.average, self.plain_model, self.optimizer)

    def note_training(self) -> None:
        """Mark the config of a rewired model: its weights are no longer the original's.

        A regular model needs no mark, for it is an original itself.
        """
        config = self.plain_model.config
        if (getattr(config, "farskip", None) or {}).get("layers"):
            setattr(config, TRAINED, True)

    # ---- write

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Begin to write the checkpoint under a temporary name. `CheckpointWriter.finish`
        names it, for a large one in a later step, and drops the oldest: a checkpoint
        that has its name is complete.
        """
        folder = (
            Path(str(self.args.output_dir)) / f"checkpoint-{self.state.global_step}"
        )
        if self.state.best_global_step == self.state.global_step:
            self.state.best_model_checkpoint = str(folder)
        average = self.average.average if self.average is not None else None
        self.checkpoint_writer.write(
            folder.name,
            TrainingState(self.plain_model, self.optimizer, self.lr_scheduler, average),
            self._write_small_files,
            best=self.state.best_model_checkpoint,
        )

    def _write_small_files(self, folder: Path) -> None:
        """Write the states of random generators, callbacks, guard, stopper and balance,
        and the settings of the training.
        """
        self.store_flos()
        self._save_rng_state(str(folder))
        if not self.args.should_save:
            return
        states: dict[str, Any] = {}
        for callback in (*self.callback_handler.callbacks, self.control):
            if isinstance(callback, ExportableState):
                states.setdefault(type(callback).__name__, []).append(callback.state())
        # A list where there are namesakes, as transformers reads it.
        self.state.stateful_callbacks = {  # type: ignore[assignment]
            name: saved if len(saved) > 1 else saved[0]
            for name, saved in states.items()
        }
        self.state.save_to_json(str(folder / TRAINER_STATE))
        self.record.write(folder)
        write_json(folder / GUARD_FILE, self.guard.state())
        if (balance := self.step_loss.balance) is not None:
            write_json(folder / BALANCE_FILE, balance.state())
        if self.stopper is not None:
            write_json(folder / STOPPER_FILE, self.stopper.state())

    # ---- continue

    def start_or_load_state(self, max_steps: int, num_epochs: int) -> None:
        """Start with a new state of the Trainer, or with that of the checkpoint."""
        self.state = TrainerState()
        self.state.train_batch_size = self._train_batch_size
        if self.continued_from is not None:
            path = self.continued_from / TRAINER_STATE
            self.state = TrainerState.load_from_json(str(path))
            best = self.state.best_model_checkpoint
            if best is not None and not Path(best).is_dir():
                self.state.best_model_checkpoint = None
                self.guarded.say(f"{best}: the best checkpoint does not exist anymore")
            compare_trainer_and_checkpoint_args(self.args, self.state)
            self.restore_callbacks(self.state)
        # A continued training has the checkpoint's, which transformers would keep.
        self.state.compute_steps(self.args, max_steps)
        self.state.init_training_references(self, max_steps, num_epochs, None)

    def batches_of(
        self, loader: Any, epoch: int, first_step: int, *, resumes: bool
    ) -> Iterator[Any]:
        """Return the micro-batches of an epoch from a step on."""
        if first_step > 0:
            done = first_step * self.args.gradient_accumulation_steps
            loader = skip_first_batches(loader, done)
        elif resumes:
            self._load_rng_state(str(self.continued_from))
        # accelerate (1.15) does not reach the sampler behind the batches that a rank of
        # several skips.
        if self.row_order is not None:
            self.row_order.set_epoch(epoch)
        if hasattr(loader, "set_epoch"):
            loader.set_epoch(epoch)
        return iter(loader)

    def restore(self, checkpoint: Path) -> None:
        """Load weights, optimiser and schedule of a checkpoint from any engine and
        number of ranks.
        """
        read_state(checkpoint, self.plain_model, self.optimizer, self.launch.ranks)
        schedule = torch.load(
            checkpoint / SCHEDULE, map_location="cpu", weights_only=True
        )
        load_schedule(self.lr_scheduler, self.optimizer, schedule)
        if self.record.longer_than(read_json(checkpoint / RECORD_FILE)):
            take_rate_of_schedule(self.lr_scheduler, self.optimizer)
        self._restore_beside(checkpoint)

    def restore_weights(self, checkpoint: Path, optimizer: Any) -> None:
        """Load the weights and their average; optimizer: None before there is one."""
        read_state(
            checkpoint,
            self.plain_model,
            optimizer,
            self.launch.ranks,
            weights_only=True,
        )
        self._restore_beside(checkpoint)

    def _restore_beside(self, checkpoint: Path) -> None:
        """Load the weights' average and the routers' balance."""
        if self.average is not None:
            self.average.load(checkpoint, self.plain_model, self.optimizer)
        if (balance := self.step_loss.balance) is not None:
            balance.load(read_json(checkpoint / BALANCE_FILE))

    def restore_callbacks(self, state: TrainerState) -> None:
        """Give the callbacks the attributes that they had when `state` was saved.

        transformers does this only on request, and with new objects at the end of the
        list, of which the caller knows nothing. The arguments of their constructors are
        those given now, unless `restore_callback_states_from_checkpoint` is set.
        """
        callbacks = self.callback_handler.callbacks
        all_saved: Any = state.stateful_callbacks
        for name, saved in all_saved.items():
            namesakes = [
                callback for callback in callbacks if type(callback).__name__ == name
            ]
            for callback, values in zip(
                namesakes, saved if isinstance(saved, list) else [saved], strict=False
            ):
                restored = dict(values.get("attributes", {}))
                if self.args.restore_callback_states_from_checkpoint:
                    restored |= values.get("args", {})
                for attribute, value in restored.items():
                    setattr(callback, attribute, value)

    def restore_if_complete(self, checkpoint: Path) -> bool:
        """Load a checkpoint's stopper, callbacks and guard; if no step remains after
        it, also load the weights, and return true.

        This is for a run that was killed between its last step and writing its model:
        `train` would do one step more.
        """
        state = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE))
        self.restore_callbacks(state)
        self.guard.load(read_json(checkpoint / GUARD_FILE))
        max_steps = self.args.max_steps
        if max_steps <= 0:
            assert self.row_order is not None
            epochs = self.args.num_train_epochs
            max_steps = math.ceil(epochs * self.row_order.steps_of_an_epoch)
        # Steps alone do not tell: early stopping may have ended the run before
        # max_steps, or the last step may still lack its score.
        done = state.global_step >= max_steps or self._has_stopped_early()
        if (stopper := self.stopper) is not None:
            saved = read_json(checkpoint / STOPPER_FILE)
            stopper.load(saved)
            stopper.time.resume(saved["time"])
            is_due = stopper.is_due(state.global_step, self.args.max_steps)
            done = (done or stopper.should_stop) and not is_due
        if not done:
            return False
        self.note_training()
        self.restore_weights(checkpoint, None)
        self.state = state
        return True

    def _has_stopped_early(self) -> bool:
        """Tell whether a callback of transformers has ended the training by its metric."""
        return any(
            isinstance(callback, EarlyStoppingCallback)
            and callback.early_stopping_patience_counter
            >= callback.early_stopping_patience
            for callback in self.callback_handler.callbacks
        )
