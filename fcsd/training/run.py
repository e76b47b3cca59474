"""One training run in one folder: from models and rows to a trained model, across any
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
(`fcsd.parallel.state`). `train` makes the trainer, finds the checkpoint to continue
from, trains, and writes the results; the steps are `fcsd.training.trainer`'s.

Not covered: loading models and rows, and the manifest of the stage
(`fcsd.pipeline.distill`, `fcsd.pipeline.pretrain`, `fcsd.pipeline.sweep`).
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
from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers.integrations import TensorBoardCallback
from transformers.trainer_callback import PrinterCallback

from fcsd.base.artifact import ADAPTER
from fcsd.base.errors import Interrupted, ScorerError, UserError
from fcsd.base.text import STEPS_BAR, nats, progress_bar
from fcsd.base.writing import flush_all, new_folder, write_json, write_text, writing
from fcsd.model.dtypes import cast
from fcsd.model.saved_dtypes import FileDtypes, saved_dtypes
from fcsd.parallel.engine import engine_environment
from fcsd.parallel.launch import Launch
from fcsd.parallel.state import read_state
from fcsd.training.arguments import (
    Job,
    RecipeArguments,
    ScoreFailure,
    Scorer,
)
from fcsd.training.checkpoint_writer import check_disk, disk_need, trained_and_all
from fcsd.training.checkpoints import checkpoints, newest_usable
from fcsd.training.config import Sections, TrainConfig, micro_batches
from fcsd.training.losses.objectives import MEASURES
from fcsd.training.prepare import TrainingInputs
from fcsd.training.ready_trainer import ReadyTrainer, seed_and_record
from fcsd.training.save_model import write_model


def train(
    inputs: TrainingInputs, sections: Sections, job: Job, launch: Launch
) -> dict[str, Any]:
    """Train, or continue, and write `folder/model`. `fcsd.pipeline.checks` has found that
    the settings suit the launch.

    Returns:
        The facts for a manifest: steps, last losses, best step and score.

    Raises:
        UserError: a batch that cannot be cut, too few rows, a loss that stays not
            finite, a full disk, or out of memory.
        Interrupted: a signal came, and a checkpoint is written.
    """
    with engine_environment(launch.engine, launch.device):
        return _train(inputs, sections, job, launch)


def _train(
    inputs: TrainingInputs, sections: Sections, job: Job, launch: Launch
) -> dict[str, Any]:
    settings: Any = sections.train
    # The callback that scores; its decisions are in `job.stopper`.
    scoring: Any = None
    bar = ProgressBar(job.description, job.remaining)
    try:
        args = RecipeArguments.of(sections, job, launch, inputs.student)
        record = seed_and_record(args, sections, launch, owner=job.owner)
        # Read before the student is cast to the dtype of the training.
        dtypes = launch.ranks.from_first(partial(saved_dtypes, inputs.student))
        trainer = ReadyTrainer(
            inputs,
            args,
            sections=sections,
            record=record,
            callbacks=[
                *_tensorboard(settings, job.folder),
                *([] if job.save_model else [NoCheckpointAtTheEnd()]),
                bar,
            ],
            launch=launch,
        )
        # Events and scores belong to the run, not to its checkpoints, which are
        # removed.
        trainer.guarded.events_folder, trainer.stopper = job.folder, job.stopper
        if job.score is not None:
            _give_teacher(trainer, job.score)
        launch.ranks.from_first(
            lambda: _check_disk(job, settings, inputs.student, dtypes.declared)
        )
        # The bar takes the place of the dicts that the Trainer prints.
        trainer.remove_callback(PrinterCallback)
        if job.stopper is not None and job.score is not None:
            from fcsd.training.best import StopWhenScoreStalls

            scoring = StopWhenScoreStalls(job, trainer)
            trainer.add_callback(scoring)
        checkpoint = newest_usable(job.folder / "checkpoints", launch.ranks, job.owner)
        if checkpoint is not None:
            trainer.guarded.say(
                f"{job.description}: continuing from {checkpoint}"
                f"{_other_rows(checkpoint, sections, launch)}"
            )
        with trainer.guarded.signals:
            trainer.train_from(checkpoint)
    # Raised by the score that begins a run; a later failure ends the training with a
    # checkpoint first, and is raised below.
    except ScoreFailure as failure:
        raise _not_scored(trainer, job, failure) from failure.__cause__
    finally:
        bar.close()
    if scoring is not None and scoring.failure is not None:
        raise _not_scored(trainer, job, scoring.failure) from scoring.failure.__cause__
    if trainer.guarded.interrupted_by:
        raise _interrupted(trainer, job)
    if job.stopper is not None:
        from fcsd.training.best import settle_best

        # Damage is found before results name a best step. The last weights are in
        # memory.
        settle_best(
            job, launch.ranks, trainer.guarded.say, last_step=trainer.state.global_step
        )
    results = _results(trainer, job)
    if trainer.is_world_process_zero():
        history = [entry for entry in trainer.state.log_history if "loss" in entry]
        lines = [json.dumps(entry, allow_nan=False) + "\n" for entry in history]
        write_text(job.folder / "history.jsonl", "".join(lines))
        if job.stopper is not None:
            write_json(job.folder / "scores.json", job.stopper.record())
            trainer.guarded.say(job.stopper.summary())
            if (warning := job.stopper.no_gain()) is not None:
                trainer.guarded.say(warning)
    # Last, because it casts the student to the dtype that is saved.
    if job.save_model:
        _leave_model(trainer, inputs, job, dtypes)
    # The next stage runs in the same process: release the device.
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.free_memory()
    if trainer.deepspeed is not None:
        trainer.deepspeed.destroy()
    return results


def _give_teacher(trainer: ReadyTrainer, score: Scorer) -> None:
    """Let a score that compares the student use the training's own teacher."""
    from fcsd.training.heldout import ComparingScore

    if isinstance(score, ComparingScore):
        score.set_teacher(trainer.teacher, under_autocast=trainer.args.bf16)


def _check_disk(job: Job, train: TrainConfig, student: Any, dtype: torch.dtype) -> None:
    """Raise UserError where checkpoints and model do not fit on the disk; dtype: that
    the model is saved in.
    """
    num_trained, num_parameters = trained_and_all(student)
    need = disk_need(
        train,
        num_trained=num_trained,
        num_parameters=num_parameters,
        model_itemsize=dtype.itemsize if job.save_model else 0,
        keeps_best=job.keeps_best,
    )
    check_disk(job.folder, need, train)


def _other_rows(checkpoint: Path, sections: Sections, launch: Launch) -> str:
    """Say that the rows of a forward pass are not as many as before the checkpoint; ""
    where they are.
    """
    earlier_rows = TrainerState.load_from_json(
        str(checkpoint / "trainer_state.json")
    ).train_batch_size
    current_rows, _ = micro_batches(
        sections.train, sections.data.max_length, launch.ranks.size
    )
    if earlier_rows in (None, current_rows):
        return ""
    return (
        f", with {current_rows} instead of {earlier_rows} rows per forward pass, which"
        " changes the order of float sums"
    )


_LEFTOVERS = ("best", "checkpoints")


def remove_checkpoints(folder: Path, launch: Launch) -> None:
    """Remove the files that only a continuation needs.

    All ranks call this once the run is recorded as finished. A run that is killed
    before that continues from its checkpoints, and one that is killed here has nothing
    left to do.
    """
    leftovers = [path for path in map(folder.joinpath, _LEFTOVERS) if path.is_dir()]
    if launch.first and leftovers:
        # The result must be on the disk before the only other copy of it is removed.
        with writing(folder):
            flush_all(folder)
        for path in leftovers:
            shutil.rmtree(path, ignore_errors=True)
    launch.wait()


def _tensorboard(train: TrainConfig, folder: Path) -> list[TrainerCallback]:
    """Return the callback that writes event files to the folder of a job.

    The Trainer's own would write them to that of the checkpoints, which is removed.
    """
    if "tensorboard" not in train.report_to:
        return []
    callback = TensorBoardCallback()
    callback.logging_dir = str(folder / "tensorboard")
    return [callback]


def _results(trainer: ReadyTrainer, job: Job) -> dict[str, Any]:
    """Return the facts for the stage's manifest."""
    last = [entry for entry in trainer.state.log_history if "loss" in entry][-1:]
    results: dict[str, Any] = {
        "steps": trainer.state.global_step,
        "hardware": trainer.launch.hardware(),
    }
    if last:
        results["last_loss"] = last[0]["loss"]
    if job.stopper is not None:
        results |= {
            "best_step": job.stopper.best_step,
            "best_score": job.stopper.best_score,
        }
        results["stopped_early"] = job.stopper.should_stop
        results["early_stopping"] = job.stopper.results()
    return results | trainer.guard.report()


def _not_scored(
    trainer: ReadyTrainer, job: Job, failure: ScoreFailure
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
        f" {_last_kept(job)}"
    )


def _interrupted(trainer: ReadyTrainer, job: Job) -> Interrupted:
    return Interrupted(
        f"ended by {signal.Signals(trainer.guarded.interrupted_by).name} after step"
        f" {trainer.state.global_step} of {trainer.state.max_steps}; run the same"
        f" command again to continue from {_last_kept(job)}",
        trainer.guarded.interrupted_by,
    )


def _last_kept(job: Job) -> str:
    saved_checkpoints = checkpoints(job.folder / "checkpoints")
    if saved_checkpoints:
        return str(saved_checkpoints[-1])
    return "the beginning (there is no checkpoint)"


def _leave_model(
    trainer: ReadyTrainer, inputs: TrainingInputs, job: Job, dtypes: FileDtypes
) -> None:
    """Write `folder/model`: the best weights if there was a score, else the last ones
    (or their average). All ranks call this.
    """
    # Without shards the first rank alone needs the weights, for it writes them.
    first, launch = trainer.is_world_process_zero(), trainer.launch
    if (
        job.stopper is not None
        and job.stopper.best_step is not None
        and (first or launch.engine.shards)
    ):
        from fcsd.training.best import best_folder

        best = best_folder(job, job.stopper.best_step)
        # Without the folder the best weights are the last step's, which the model has.
        if best.is_dir():
            read_state(
                best,
                inputs.student,
                trainer.optimizer,
                launch.ranks,
                weights_only=True,
            )
    if first and inputs.adapters is not None:
        from fcsd.training.teachers.lora import leave_adapters

        with new_folder(job.folder / ADAPTER) as folder:
            leave_adapters(inputs.adapters, folder)
    if not launch.engine.shards:
        # in place, because the device may not hold both copies
        cast(inputs.student, dtypes.tensors)
    with (
        new_folder(job.folder / "model") if first else nullcontext(job.folder)
    ) as folder:
        write_model(
            inputs.student,
            folder,
            tokenizer=inputs.tokenizer,
            dtypes=dtypes,
            launch=launch,
        )


_SHOWN = (*MEASURES, "l2", "top1_agreement")
"""The figures of the log of which the progress bar shows the first that is there."""


class ProgressBar(TrainerCallback):
    """One line of at most 80 columns on the first rank: step, time left, loss, and
    the time that the whole run still takes, or else tokens per second.

    remaining: as in `Job`.
    """

    def __init__(self, description: str, remaining: Callable[[float], str] | None):
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
