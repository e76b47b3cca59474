"""One training run in one folder: from models and rows to a checkpoint, across any
number of restarts.

    folder/checkpoints/checkpoint-N   for an exact continuation; until `remove_checkpoints`
    folder/best/step-N                the weights with the best early-stopping score; likewise
    folder/tensorboard/               event files, when `report_to` asks for them
    folder/history.jsonl              the log: loss, kl, learning rate, tokens per second
    folder/events.jsonl               skipped steps, if there were any
    folder/scores.json                early-stopping scores by step
    folder/adapter/                   the adapters of a LoRA student, in peft's format
    folder/model/                     the result; for a LoRA student with the adapters merged into the weights

A run may be continued by another number of processes, and by another engine
(`fcsd.parallel.state`).
"""

import json
import shutil
import signal
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState
from transformers.integrations import TensorBoardCallback
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from fcsd.base.artifact import ADAPTER
from fcsd.base.errors import Interrupted, ScorerError, UserError
from fcsd.base.files import new_folder, write_json, write_text
from fcsd.base.text import STEPS_BAR, nats, progress_bar
from fcsd.data.rows_config import RowsConfig
from fcsd.model.dtypes import cast
from fcsd.model.saved_dtypes import FileDtypes, saved_dtypes
from fcsd.parallel.engine import checkpoints_activations, engine_environment
from fcsd.parallel.launch import Launch
from fcsd.parallel.state import read_state
from fcsd.training.arguments import (
    TrainingRun,
    check_reporters,
    refuse_what_cannot_be_sharded,
)
from fcsd.training.best import (
    ScoreFailure,
    StopWhenScoreStalls,
    best_folder,
    settle_best,
)
from fcsd.training.checkpoints import checkpoints, newest_usable
from fcsd.training.config import micro_batches
from fcsd.training.disk import check_disk, disk_need, trained_and_all
from fcsd.training.export import write_model
from fcsd.training.fcsd_config import FCSDConfig
from fcsd.training.fcsd_trainer import ReadyTrainer, begin
from fcsd.training.heldout import ComparingScore
from fcsd.training.losses.objectives import MEASURES
from fcsd.training.prepare import Ready
from fcsd.training.teachers.lora import leave_adapters


def train(run: TrainingRun) -> dict[str, Any]:
    """Train, or continue, and write `folder/model`.

    Returns:
        The facts for a manifest: steps, last losses, best step and score.

    Raises:
        UserError: a batch that cannot be cut, too few rows, a loss that stays not
            finite, a full disk, or out of memory.
        Interrupted: a signal came, and a checkpoint is written.
    """
    engine = run.launch.engine
    by_heldout_kl = run.stopper is not None and run.stopper.metric == "heldout_kl"
    refuse_what_cannot_be_sharded(run.objective, engine, by_heldout_kl=by_heldout_kl)
    with engine_environment(engine, run.launch.device):
        return _train(run)


def _train(run: TrainingRun) -> dict[str, Any]:
    stopping, bar = None, ProgressBar(run.description, run.remaining)
    try:
        args = _arguments(run)
        record = begin(args, run.sections, run.launch, owner=run.owner)
        # Read before the student is cast to the dtype of the training.
        dtypes = run.launch.ranks.from_first(partial(saved_dtypes, run.student))
        trainer = ReadyTrainer(
            Ready(run.student, run.teacher, run.tokenizer, run.rows),
            args,
            sections=run.sections,
            record=record,
            callbacks=[
                *_tensorboard(run),
                *([] if run.save_model else [NoCheckpointAtTheEnd()]),
            ],
            launch=run.launch,
        )
        # Events and scores belong to the run, not to its checkpoints, which are
        # removed.
        trainer.guarded.events_folder, trainer.stopper = run.folder, run.stopper
        if isinstance(run.score, ComparingScore):
            sharded = run.launch.engine.shards
            under_autocast = trainer.args.bf16 and not sharded
            run.score.set_teacher(
                trainer.teacher, sharded=sharded, under_autocast=under_autocast
            )
        run.launch.ranks.from_first(lambda: _check_disk(run, dtypes.declared))
        replace_output(trainer, bar)
        if run.stopper is not None and run.score is not None:
            stopping = StopWhenScoreStalls(trainer, run, run.stopper, run.score)
            trainer.add_callback(stopping)
        checkpoint = newest_usable(
            run.folder / "checkpoints", run.launch.ranks, run.owner
        )
        if checkpoint is not None:
            trainer.guarded.say(
                f"{run.description}: continuing from {checkpoint}"
                f"{_other_rows(checkpoint, run)}"
            )
        with trainer.guarded.signals:
            trainer.train_from(checkpoint)
    # Raised by the score that begins a run; a later failure ends the training with a
    # checkpoint first, and is raised below.
    except ScoreFailure as failure:
        raise _not_scored(trainer, run, failure) from failure.__cause__
    finally:
        bar.close()
    if stopping is not None and stopping.failure is not None:
        raise _not_scored(
            trainer, run, stopping.failure
        ) from stopping.failure.__cause__
    if trainer.guarded.interrupted_by:
        raise _interrupted(trainer, run)
    # Damage is found before results name a best step. The last weights are in memory.
    settle_best(trainer, run, last_step=trainer.state.global_step)
    results = _results(trainer, run)
    if trainer.is_world_process_zero():
        history = [entry for entry in trainer.state.log_history if "loss" in entry]
        lines = [json.dumps(entry, allow_nan=False) + "\n" for entry in history]
        write_text(run.folder / "history.jsonl", "".join(lines))
        if run.stopper is not None:
            write_json(run.folder / "scores.json", run.stopper.record())
            trainer.guarded.say(run.stopper.summary())
            if (warning := run.stopper.no_gain()) is not None:
                trainer.guarded.say(warning)
    # Last, because it casts the student to the dtype that is saved.
    if run.save_model:
        _leave_model(trainer, run, dtypes)
    # The next stage runs in the same process: release the device.
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.free_memory()
    if trainer.deepspeed is not None:
        trainer.deepspeed.destroy()
    return results


def _arguments(run: TrainingRun) -> FCSDConfig:
    """Return arguments with the recipe's keys: transformers acts on its own, and
    trackers (wandb, TensorBoard) show them all. fcsd's trainer reads `run.sections`.
    """
    check_reporters(run.train.report_to)
    by_deepspeed = run.launch.engine.uses_deepspeed
    on_cpu = run.launch.device.type == "cpu"
    return FCSDConfig(
        objective=run.objective.name,
        **run.objective.model_dump(exclude={"name"}),
        **run.train.model_dump(exclude={"gradient_checkpointing", "report_to"}),
        **run.data.model_dump(include=set(RowsConfig.model_fields)),
        safety=run.safety.model_dump(),
        output_dir=str(run.folder / "checkpoints"),
        run_name=run.description,
        # accelerate cannot combine DeepSpeed with use_cpu
        use_cpu=on_cpu and not by_deepspeed,
        ddp_backend="gloo" if on_cpu and by_deepspeed else None,
        activation_checkpointing=checkpoints_activations(
            run.train.gradient_checkpointing, run.student
        ),
        # see `_tensorboard`
        report_to=[name for name in run.train.report_to if name != "tensorboard"],
        seed=run.seed,
        dataloader_pin_memory=torch.cuda.is_available(),
        disable_tqdm=True,
    )


def _check_disk(run: TrainingRun, save_dtype: torch.dtype) -> None:
    num_trained, num_parameters = trained_and_all(run.student)
    need = disk_need(
        run.train,
        num_trained=num_trained,
        num_parameters=num_parameters,
        model_itemsize=save_dtype.itemsize if run.save_model else 0,
        keeps_best=run.keeps_best,
    )
    check_disk(run.folder, need, run.train)


def _other_rows(checkpoint: Path, run: TrainingRun) -> str:
    earlier_rows = TrainerState.load_from_json(
        str(checkpoint / "trainer_state.json")
    ).train_batch_size
    current_rows, _ = micro_batches(
        run.train, run.data.max_length, run.launch.ranks.size
    )
    if earlier_rows in (None, current_rows):
        return ""
    return (
        f", with {current_rows} instead of {earlier_rows} rows per forward pass, which"
        " changes the order of float sums"
    )


def remove_checkpoints(folder: Path, launch: Launch) -> None:
    """Remove the files that only a continuation needs.

    All ranks call this once the run is recorded as finished. A run that is killed
    before that continues from its checkpoints, and one that is killed here has nothing
    left to do.
    """
    if launch.first:
        shutil.rmtree(folder / "best", ignore_errors=True)
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    launch.wait()


def _tensorboard(run: TrainingRun) -> list[TrainerCallback]:
    """Return the callback that writes event files to the run's folder.

    The Trainer's own would write them to that of the checkpoints, which is removed.
    """
    if "tensorboard" not in run.train.report_to:
        return []
    callback = TensorBoardCallback()
    callback.logging_dir = str(run.folder / "tensorboard")
    return [callback]


def _results(trainer: ReadyTrainer, run: TrainingRun) -> dict[str, Any]:
    last = [entry for entry in trainer.state.log_history if "loss" in entry][-1:]
    results: dict[str, Any] = {
        "steps": trainer.state.global_step,
        "hardware": run.launch.hardware(),
    }
    if last:
        results["last_loss"] = last[0]["loss"]
    if run.stopper is not None:
        results |= {
            "best_step": run.stopper.best_step,
            "best_score": run.stopper.best_score,
        }
        results["stopped_early"] = run.stopper.should_stop
        results["early_stopping"] = run.stopper.results()
    return results | trainer.guard.report()


def _not_scored(
    trainer: ReadyTrainer, run: TrainingRun, failure: ScoreFailure
) -> BaseException:
    """Return the error that ends a run whose score failed; print the traceback of an
    unexpected error.
    """
    step, cause = trainer.state.global_step, failure.__cause__
    assert cause is not None
    # Before the first step there is no training to save, so the error stands alone.
    if step == 0:
        return cause
    if (
        not isinstance(cause, UserError | ScorerError)
        and trainer.is_world_process_zero()
    ):
        traceback.print_exception(cause)
    return UserError(
        f"early stopping: no score at step {step}: {cause}; the training is not lost:"
        " run the same command again to continue with this score from"
        f" {_last_kept(run)}"
    )


def _interrupted(trainer: ReadyTrainer, run: TrainingRun) -> Interrupted:
    return Interrupted(
        f"ended by {signal.Signals(trainer.guarded.interrupted_by).name} after step"
        f" {trainer.state.global_step} of {trainer.state.max_steps}; run the same"
        f" command again to continue from {_last_kept(run)}",
        trainer.guarded.interrupted_by,
    )


def _last_kept(run: TrainingRun) -> str:
    saved_checkpoints = checkpoints(run.folder / "checkpoints")
    if saved_checkpoints:
        return str(saved_checkpoints[-1])
    return "the beginning (there is no checkpoint)"


def _leave_model(trainer: ReadyTrainer, run: TrainingRun, dtypes: FileDtypes) -> None:
    """Write `folder/model`: the best weights if there was a score, else the last ones
    (or their average). All ranks call this.
    """
    # Without shards the first rank alone needs the weights, for it writes them.
    first, engine = trainer.is_world_process_zero(), run.launch.engine
    if (
        run.stopper is not None
        and run.stopper.best_step is not None
        and (first or engine.shards)
    ):
        best = best_folder(run, run.stopper.best_step)
        # Without the folder the best weights are the last step's, which the model has.
        if best.is_dir():
            read_state(
                best,
                run.student,
                trainer.optimizer,
                run.launch.ranks,
                weights_only=True,
            )
    if first and run.adapters is not None:
        with new_folder(run.folder / ADAPTER) as folder:
            leave_adapters(run.adapters, folder)
    if not engine.shards:
        # in place, because the device may not hold both copies
        cast(run.student, dtypes.tensors)
    with (
        new_folder(run.folder / "model") if first else nullcontext(run.folder)
    ) as folder:
        write_model(
            run.student,
            folder,
            tokenizer=run.tokenizer,
            dtype=dtypes.declared,
            dtypes=dtypes.tensors,
            launch=run.launch,
        )


_SHOWN = (*MEASURES, "l2", "top1_agreement")


class ProgressBar(TrainerCallback):
    """One line of at most 80 columns on the first rank: step, time left, loss, and
    the time that the whole run still takes, or else tokens per second.

    remaining: as in `TrainingRun`.
    """

    def __init__(
        self, description: str, remaining: Callable[[float], str] | None = None
    ):
        self.description, self.remaining = description, remaining
        self.bar: Any = None
        self._first_step = 0

    def on_train_begin(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.is_world_process_zero:
            self._first_step = state.global_step
            self.bar = progress_bar(
                total=state.max_steps,
                initial=state.global_step,
                desc=self.description,
                bar_format=STEPS_BAR,
            )

    def on_step_end(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.bar is not None:
            self.bar.update(state.global_step - self.bar.n)

    def on_log(
        self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any
    ) -> None:
        if self.bar is not None and "tokens_per_second" in logs:
            # The first measure is the loss; the others are in history.jsonl.
            loss = next((name for name in _SHOWN if name in logs), None)
            parts = [] if loss is None else [f"{loss} {nats(logs[loss])}"]
            done_share = (state.global_step - self._first_step) / max(
                1, state.max_steps - self._first_step
            )
            if self.remaining is not None and (time := self.remaining(done_share)):
                parts.append(f"run: {time.removeprefix('about ')}")
            else:
                parts.append(f"{logs['tokens_per_second']:.0f} tok/s")
            self.bar.set_postfix_str(", ".join(parts), refresh=False)

    def close(self) -> None:
        """End the line, also after an error, so that the next text starts a new one."""
        if self.bar is not None:
            self.bar.close()


class NoCheckpointAtTheEnd(TrainerCallback):
    """Skip the checkpoint of the last step, for a training whose loss curve is its only
    result.
    """

    def on_step_end(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.global_step >= state.max_steps:
            control.should_save = False


def replace_output(trainer: Trainer, bar: ProgressBar) -> None:
    # One line of fcsd's own replaces the Trainer's bar and its printed dicts.
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(bar)
