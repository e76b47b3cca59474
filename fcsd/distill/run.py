"""One training run in one folder: from models and rows to a checkpoint, through any number of restarts.

    folder/checkpoints/checkpoint-N   for an exact continuation; until `remove_checkpoints`
    folder/best/step-N                the weights with the best early-stopping score; likewise
    folder/tensorboard/               event files, when `report_to` asks for them
    folder/history.jsonl              what was logged: loss, kl, learning rate, tokens per second
    folder/events.jsonl               skipped steps, spikes and rewinds; not there when there were none
    folder/scores.json                early-stopping scores by step
    folder/adapter/                   the adapters of a LoRA student, in peft's format
    folder/model/                     what the run leaves; of a LoRA student with the adapters merged into the weights

A run may be continued by another number of processes, and by another engine (`fcsd.distributed.state`).
"""

import json
import shutil
import signal
import traceback
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerState, set_seed
from transformers.integrations import TensorBoardCallback

from fcsd.distill.arguments import (
    TrainingRun,
    check_reporters,
    refuse_what_cannot_be_sharded,
    training_arguments,
)
from fcsd.distill.best import ScoreFailure, StopWhenScoreStalls, best_folder
from fcsd.distill.callbacks import NoCheckpointAtTheEnd, ProgressBar, replace_output
from fcsd.distill.checkpoints import checkpoints, newest_usable
from fcsd.distill.disk import check_disk, count_parameters, disk_need
from fcsd.distill.export import write_model
from fcsd.distill.heldout import HeldoutKL
from fcsd.distill.interrupt import Signals
from fcsd.distill.out_of_memory import explain_oom
from fcsd.distill.prepare import check_vocabulary, collator, place_teacher, prepare_student, whole_steps
from fcsd.distill.safety import Guard
from fcsd.distill.teachers.lora import leave_adapters
from fcsd.distill.trainer import DistillTrainer
from fcsd.distributed.engine import Engine, check_precision, engine_environment, finish_zero_settings
from fcsd.distributed.launch import Launch
from fcsd.distributed.state import read_state
from fcsd.errors import Interrupted, ScorerError, UserError
from fcsd.files import new_folder, write_json, write_text
from fcsd.losses.head import detach_loss_head
from fcsd.models.load import to_dtype


def train(run: TrainingRun) -> dict[str, Any]:
    """Train, or continue, and leave `folder/model`.

    Returns:
        The facts that a manifest keeps: steps, last losses, best step and score.

    Raises:
        UserError: batch that cannot be cut, too few rows, a loss that stays not finite, a disk that is full, too
            little memory.
        Interrupted: a signal came, and a checkpoint is written.
    """
    engine = run.launch.engine
    check_precision(run.train, engine)
    if engine.shards:
        by_heldout_kl = run.stopper is not None and run.stopper.metric == "heldout_kl"
        refuse_what_cannot_be_sharded(run.train, run.objective, engine, by_heldout_kl=by_heldout_kl)
    with engine_environment(engine, run.launch.device):
        return _train(run, engine)


def _train(run: TrainingRun, engine: Engine) -> dict[str, Any]:
    set_seed(run.seed)
    student = run.student
    teacher = place_teacher(run.teacher, run.launch)
    check_vocabulary(student, teacher, run.tokenizer, run.objective)
    if isinstance(run.score, HeldoutKL):
        run.score.set_teacher(teacher, sharded=engine.shards)
    check_reporters(run.train)
    arguments = training_arguments(run)
    rows = whole_steps(run.rows, run.train.batch_size_tokens // run.max_length, run.max_length)
    collate = collator(arguments, teacher)
    prepare_student(student, run.objective, run.train, run.launch)
    run.launch.ranks.from_first(lambda: _check_disk(run))
    if engine.uses_deepspeed:
        finish_zero_settings(arguments, run.train)
    stops = None
    signals, bar = Signals(), ProgressBar(run.description, run.left)
    try:
        trainer = DistillTrainer(
            student,
            arguments,
            objective=run.objective,
            teacher=teacher,
            launch=run.launch,
            settings=run.train,
            stopper=run.stopper,
            guard=Guard(run.safety),
            signals=signals,
            train_dataset=rows,
            data_collator=collate,
            callbacks=[*_tensorboard(run), *([] if run.save_model else [NoCheckpointAtTheEnd()])],
        )
        replace_output(trainer, bar)
        if run.stopper is not None and run.score is not None:
            stops = StopWhenScoreStalls(trainer, run, run.stopper, run.score)
            trainer.add_callback(stops)
        done = newest_usable(run.folder / "checkpoints", run.launch.ranks)
        if done is not None:
            trainer.say(f"{run.description}: continuing from {done}{_other_rows(done, run)}")
        if done is None or not trainer.restore_if_complete(done):
            with signals, explain_oom(student, teacher, run.train, run.max_length, run.launch.device):
                trainer.train(resume_from_checkpoint=str(done) if done else None)
    except ScoreFailure as failure:
        raise _not_scored(trainer, run, failure) from failure.__cause__
    finally:
        bar.close()
        if not engine.shards:
            detach_loss_head(student)
    if stops is not None and stops.failure is not None:
        raise _not_scored(trainer, run, stops.failure) from stops.failure.__cause__
    if trainer.interrupted_by:
        raise _interrupted(trainer, run)
    results = _results(trainer, run)
    if trainer.is_world_process_zero():
        history = [entry for entry in trainer.state.log_history if "loss" in entry]
        lines = [json.dumps(entry, allow_nan=False) + "\n" for entry in history]
        write_text(run.folder / "history.jsonl", "".join(lines))
        if run.stopper is not None:
            write_json(run.folder / "scores.json", run.stopper.record())
            trainer.say(run.stopper.summary())
            if (warning := run.stopper.no_gain()) is not None:
                trainer.say(warning)
    if run.save_model:
        _leave_model(trainer, run, engine)
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.free_memory()
    if trainer.deepspeed is not None:
        trainer.deepspeed.destroy()
    return results


def _check_disk(run: TrainingRun) -> None:
    num_trained, num_parameters = count_parameters(run.student)
    need = disk_need(
        run.train,
        num_trained=num_trained,
        num_parameters=num_parameters,
        model_itemsize=run.save_dtype.itemsize if run.save_model else 0,
        keeps_best=run.stopper is not None,
    )
    check_disk(run.folder, need, run.train)


def _other_rows(checkpoint: Path, run: TrainingRun) -> str:
    before = TrainerState.load_from_json(str(checkpoint / "trainer_state.json")).train_batch_size
    now = run.train.per_device_train_batch_size
    if before in (None, now):
        return ""
    return f", with {now} instead of {before} rows in a forward pass, which changes the order of float sums"


def remove_checkpoints(folder: Path, launch: Launch) -> None:
    """Remove what only a continuation needs. All ranks call this, when the run is noted as finished: a run that is
    killed before that goes on from its checkpoints, and one that is killed here has nothing left to do."""
    if launch.first:
        shutil.rmtree(folder / "best", ignore_errors=True)
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    launch.wait()


def _tensorboard(run: TrainingRun) -> list[TrainerCallback]:
    """Write event files beside the checkpoints, whose folder the Trainer's own callback would use and does not stay."""
    if "tensorboard" not in run.train.report_to:
        return []
    callback = TensorBoardCallback()
    callback.logging_dir = str(run.folder / "tensorboard")
    return [callback]


def _results(trainer: DistillTrainer, run: TrainingRun) -> dict[str, Any]:
    last = [entry for entry in trainer.state.log_history if "loss" in entry][-1:]
    results: dict[str, Any] = {"steps": trainer.state.global_step}
    if last:
        results["last_loss"] = last[0]["loss"]
    if run.stopper is not None:
        results |= {"best_step": run.stopper.best_step, "best_score": run.stopper.best_score}
        results["stopped_early"] = run.stopper.should_stop
        results["early_stopping"] = run.stopper.results()
    return results | trainer.guard.report()


def _not_scored(trainer: DistillTrainer, run: TrainingRun, failure: ScoreFailure) -> BaseException:
    """Return what ends a run whose score failed, in one line; print the traceback of an error nobody has foreseen."""
    step, cause = trainer.state.global_step, failure.__cause__
    assert cause is not None
    if step == 0:
        return cause
    if not isinstance(cause, UserError | ScorerError) and trainer.is_world_process_zero():
        traceback.print_exception(cause)
    kept = checkpoints(run.folder / "checkpoints")
    return UserError(
        f"early stopping: no score at step {step}: {cause}; the training is not lost: run the same command again, and"
        f" it goes on with this score from {kept[-1] if kept else 'the beginning, no checkpoint was written'}"
    )


def _interrupted(trainer: DistillTrainer, run: TrainingRun) -> Interrupted:
    kept = checkpoints(run.folder / "checkpoints")
    return Interrupted(
        f"ended by {signal.Signals(trainer.interrupted_by).name} after step {trainer.state.global_step} of"
        f" {trainer.state.max_steps}; run the same command again to go on from"
        f" {kept[-1] if kept else 'the beginning, no checkpoint was written'}",
        trainer.interrupted_by,
    )


def _leave_model(trainer: DistillTrainer, run: TrainingRun, engine: Engine) -> None:
    """Write `folder/model`: the best weights if there was a score, else the last (or their average).

    All ranks call this.
    """
    first = trainer.is_world_process_zero()
    if trainer.average is not None:
        trainer.average.apply()
    if run.stopper is not None and run.stopper.best_step is not None and (first or engine.shards):
        best = best_folder(run, run.stopper.best_step)
        read_state(best, run.student, trainer.optimizer, run.launch.ranks, weights_only=True)
    if first and run.adapters is not None:
        with new_folder(run.folder / "adapter") as folder:
            leave_adapters(run.adapters, folder)
    if not engine.shards:
        to_dtype(run.student, run.save_dtype)  # in place, for a device that has no room for both
    with new_folder(run.folder / "model") if first else nullcontext(run.folder) as folder:
        write_model(run.student, folder, tokenizer=run.tokenizer, dtype=run.save_dtype, launch=run.launch)
