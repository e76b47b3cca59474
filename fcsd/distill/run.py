"""One training run in one folder: from models and rows to a checkpoint, through any number of restarts.

    folder/checkpoints/checkpoint-N   for an exact continuation; gone when the run has ended
    folder/best/step-N                the weights with the best early-stopping score; gone as well
    folder/tensorboard/               event files, when `report_to` asks for them
    folder/history.jsonl              what was logged: loss, kl, learning rate, tokens per second
    folder/events.jsonl               skipped steps, spikes and rewinds; not there when there were none
    folder/scores.json                early-stopping scores by step
    folder/adapter/                   the adapters of a LoRA student, in peft's format
    folder/model/                     what the run leaves; of a LoRA student with the adapters merged into the weights

A run may be continued by another number of processes, and by another engine (`fcsd.distill.state`).
"""

import importlib.util
import itertools
import json
import math
import shutil
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import IterableDataset, Subset
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)
from transformers.integrations import TensorBoardCallback

from fcsd.artifact import new_folder, read_json, replace_folder, write_json, write_text, writing
from fcsd.distill.adapters import leave_adapters
from fcsd.distill.checkpoints import checkpoints, newest_usable
from fcsd.distill.data import Collator
from fcsd.distill.early_stopping import EarlyStopper, Score
from fcsd.distill.engines import (
    Engine,
    check_precision,
    checkpoints_activations,
    engine_environment,
    finish_zero_settings,
    launched_engine,
)
from fcsd.distill.extra_terms import freeze_routers
from fcsd.distill.head import attach_loss_head, detach_loss_head
from fcsd.distill.heldout import HeldoutKL
from fcsd.distill.interrupt import Signals
from fcsd.distill.out_of_memory import explained
from fcsd.distill.safety import Guard
from fcsd.distill.spread import spread_student, spread_teacher, whole_model
from fcsd.distill.state import check_state, read_state, write_state
from fcsd.distill.teacher import ModelTeacher, Teacher
from fcsd.distill.trainer import (
    STOPPER_FILE,
    DistillTrainer,
    ScoreFailure,
    StopWhenScoreStalls,
    replace_output,
)
from fcsd.errors import Interrupted, ScorerError, UserError
from fcsd.evaluate.ranks import known_to_all
from fcsd.loading import to_dtype
from fcsd.processes import processes
from fcsd.recipe import Objective, Safety, Train

Scorer = Callable[[PreTrainedModel], Score]  # all ranks call it, and all get the score


@dataclass(frozen=True)
class TrainingRun:
    """What one run is made from.

    max_length: tokens in a row of `rows`; score: of a model, for early stopping; save_dtype: of the weights
    that are left (the checkpoint's own, whatever dtype they were trained in); adapters: the `PeftModel` around a LoRA
    student.
    """

    folder: Path
    description: str
    student: PreTrainedModel
    teacher: PreTrainedModel | Teacher | None
    tokenizer: PreTrainedTokenizerBase
    rows: Any
    max_length: int
    objective: Objective
    train: Train
    seed: int
    save_dtype: torch.dtype
    safety: Safety = field(default_factory=Safety)
    stopper: EarlyStopper | None = None
    score: Scorer | None = None
    save_model: bool = True
    adapters: Any = None


def accumulation_steps(train: Train, max_length: int, world_size: int) -> int:
    """Micro-batches in one optimiser step.

    Raises:
        UserError: the batch is not a whole number of micro-batches over all ranks.
    """
    micro_tokens = train.per_device_train_batch_size * max_length * world_size
    if train.batch_size_tokens % micro_tokens:
        raise UserError(
            f"train.batch_size_tokens: {train.batch_size_tokens} is not a multiple of {micro_tokens}"
            f" (per_device_train_batch_size {train.per_device_train_batch_size} x data.max_length {max_length}"
            f" x {world_size} processes); change one of them"
        )
    return train.batch_size_tokens // micro_tokens


def training_arguments(run: TrainingRun, world_size: int, engine: Engine) -> TrainingArguments:
    """The recipe's training section in the words of `transformers`; inside `engine_environment`."""
    train = run.train
    on_cpu = processes().device.type == "cpu"
    checkpointing = checkpoints_activations(train, run.student)
    schedule = {"min_lr_rate": train.min_lr_rate} if train.min_lr_rate is not None else {}
    return TrainingArguments(
        output_dir=str(run.folder / "checkpoints"),
        run_name=run.description,
        max_steps=train.max_steps,
        per_device_train_batch_size=train.per_device_train_batch_size,
        gradient_accumulation_steps=accumulation_steps(train, run.max_length, world_size),
        learning_rate=train.learning_rate,
        lr_scheduler_type=train.lr_scheduler_type,
        lr_scheduler_kwargs=schedule,
        warmup_steps=train.warmup_steps,
        weight_decay=train.weight_decay,
        adam_beta1=train.adam_beta1,
        adam_beta2=train.adam_beta2,
        adam_epsilon=train.adam_epsilon,
        max_grad_norm=train.max_grad_norm,
        bf16=train.bf16 and not engine.shards,  # there it is in the parameters, not in autocast
        use_cpu=on_cpu and engine.name != "zero3",  # accelerate knows DeepSpeed on devices only
        ddp_backend="gloo" if on_cpu and engine.name == "zero3" else None,
        # Otherwise FSDP2 would hold whole gradients between the micro-batches of a step.
        accelerator_config={
            "gradient_accumulation_kwargs": {"sync_each_batch": engine.name in ("fsdp2", "ep")}
        },
        activation_checkpointing=checkpointing,
        activation_checkpointing_kwargs={"use_reentrant": False} if checkpointing else None,
        logging_steps=train.logging_steps,
        logging_nan_inf_filter=False,  # a loss that is not finite stops the run, see DistillTrainer
        save_strategy="steps" if run.save_model else "no",
        save_steps=train.save_steps,
        save_total_limit=train.save_total_limit,
        report_to=[name for name in train.report_to if name != "tensorboard"],  # see `_tensorboard`
        seed=run.seed,
        data_seed=run.seed,
        remove_unused_columns=False,
        dataloader_drop_last=True,
        dataloader_pin_memory=torch.cuda.is_available(),
        ddp_find_unused_parameters=False,
        disable_tqdm=True,
    )


def freeze_embeddings_and_head(model: PreTrainedModel) -> None:
    """Keep the input embeddings and the LM head as they are (paper Table 2, `KL embed.`)."""
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        module.requires_grad_(False)


def train(run: TrainingRun) -> dict[str, Any]:
    """Train, or continue, and leave `folder/model`.

    Returns:
        The facts that a manifest keeps: steps, last losses, best step and score.

    Raises:
        UserError: batch that cannot be cut, too few rows, a loss that stays not finite, a disk that is full, too
            little memory.
        Interrupted: a signal came, and a checkpoint is written.
    """
    engine = launched_engine()
    check_precision(run.train, engine)
    if engine.shards:
        _refuse_what_cannot_be_spread(run, engine)
    with engine_environment(engine):
        return _train(run, engine)


def _refuse_what_cannot_be_spread(run: TrainingRun, engine: Engine) -> None:
    by_heldout_kl = run.stopper is not None and run.stopper.metric == "heldout_kl"
    wrong = {
        "train.optimizer: muon orthogonalises whole matrices, which no rank has under FSDP or DeepSpeed; launch data"
        " parallel copies": run.train.optimizer == "muon",
        "train.ema_decay: an average is kept of whole weights, which no rank has under FSDP or DeepSpeed; launch data"
        " parallel copies": run.train.ema_decay is not None,
        "train.layer_lr_ratio: does not work with --expert-parallel; launch FSDP2 (configs/fsdp2_8.yaml)": (
            engine.name == "ep" and run.train.layer_lr_ratio != 1
        ),
        # DeepSpeed 0.19.8: the ranks' gathers fall out of step after the first score; each alone works.
        "early_stopping.metric: heldout_kl beside l2 or router_kl does not work under ZeRO-3; use FSDP2, or pass@1": (
            engine.name == "zero3" and by_heldout_kl and run.objective.has_extra_terms
        ),
    }
    for message, asked in wrong.items():
        if asked:
            raise UserError(message)


def _train(run: TrainingRun, engine: Engine) -> dict[str, Any]:
    set_seed(run.seed)
    student = run.student
    student.config.use_cache = False
    teacher = _teacher(run, engine)
    _check_vocabulary(run, teacher)
    if isinstance(run.score, HeldoutKL):
        run.score.ask(teacher, sharded=engine.shards)
    if run.objective.freeze_embeddings_and_head:
        freeze_embeddings_and_head(student)
    if run.objective.freeze_routers:
        freeze_routers(student)
    _check_reporters(run.train)
    arguments = training_arguments(run, processes().num_processes, engine)
    if teacher is not None and teacher.ahead is not None:  # a process of its own looks one step ahead
        arguments.dataloader_num_workers = 1
        arguments.dataloader_prefetch_factor = max(2, arguments.gradient_accumulation_steps)
    attach_loss_head(student, run.objective.vocab_size)
    if engine.shards:
        spread_student(student, engine, run.train)
    if engine.name == "zero3":
        finish_zero_settings(arguments, run.train)
    bar, stops = None, None
    signals = Signals()
    try:
        trainer = DistillTrainer(
            student,
            arguments,
            objective=run.objective,
            teacher=teacher,
            engine=engine,
            settings=run.train,
            stopper=run.stopper,
            guard=Guard(run.safety),
            signals=signals,
            train_dataset=_whole_steps(run),
            data_collator=Collator(teacher.ahead if teacher is not None else None),
            callbacks=_tensorboard(run),
        )
        bar = replace_output(trainer, run.description)
        if run.stopper is not None and run.score is not None:
            trainer.add_callback(
                stops := StopWhenScoreStalls(
                    run.stopper,
                    _scored(run.stopper, run.score, trainer, engine),
                    keep_best=lambda step: _keep_best(trainer, run, step),
                    drop_others=lambda step: _drop_others(trainer, run, step),
                    say=trainer.say,
                    ending=lambda: trainer.ending,
                )
            )
        done = _on_first_rank(lambda: newest_usable(run.folder / "checkpoints"), trainer)
        if done is None or not trainer.restore_if_complete(done):
            device = processes().device
            with signals, explained(student, teacher, run.train, run.max_length, device):
                trainer.train(resume_from_checkpoint=str(done) if done else None)
    except ScoreFailure as failure:
        raise _not_scored(trainer, run, failure) from failure.__cause__
    finally:
        if bar is not None:
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
    if run.save_model:
        _leave_model(trainer, run, engine)
    if trainer.is_world_process_zero():
        shutil.rmtree(run.folder / "best", ignore_errors=True)
        shutil.rmtree(run.folder / "checkpoints", ignore_errors=True)
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.free_memory()
    if trainer.deepspeed is not None:
        trainer.deepspeed.destroy()
    return results


def _teacher(run: TrainingRun, engine: Engine) -> Teacher | None:
    if run.teacher is None or isinstance(run.teacher, Teacher):
        return run.teacher
    if engine.shards:
        return ModelTeacher(run.teacher, spread_teacher(run.teacher, engine))
    return ModelTeacher(torch.nn.Module.to(run.teacher, processes().device))


def _check_reporters(train: Train) -> None:
    for name in train.report_to:
        if importlib.util.find_spec(name) is None:
            raise UserError(
                f"train.report_to: {name} is not installed; pip install 'fcsd[{name}]', or leave it out"
            )


def _tensorboard(run: TrainingRun) -> list[TrainerCallback]:
    """The Trainer's own callback would write into the folder of checkpoints, which does not stay."""
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
    """What ends a run whose score failed: one line; of an error that nobody has foreseen the traceback before it."""
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
    student: PreTrainedModel | None = run.student
    first = trainer.is_world_process_zero()
    if trainer.average is not None:
        trainer.average.apply()
    if run.stopper is not None and run.stopper.best_step is not None and (first or engine.shards):
        best = _best_folder(run, run.stopper.best_step)
        read_state(best, run.student, trainer.optimizer, weights_only=True)
    if engine.shards:
        student = whole_model(run.student, run.save_dtype)
    if not first or student is None:
        return
    student.config.use_cache = True
    if run.adapters is not None:
        with new_folder(run.folder / "adapter") as folder:
            leave_adapters(run.adapters, folder)
    to_dtype(student, run.save_dtype)
    with new_folder(run.folder / "model") as folder:
        student.save_pretrained(folder)
        run.tokenizer.save_pretrained(folder)


def _best_folder(run: TrainingRun, step: int) -> Path:
    # One folder a step: a checkpoint that names an older best one must find it, should the run be cut off here.
    return run.folder / "best" / f"step-{step}"


def _keep_best(trainer: DistillTrainer, run: TrainingRun, step: int) -> None:
    """All ranks write their parts of the weights beside, then the first renames the folder."""
    best = _best_folder(run, step)
    beside = best.with_name(f".{best.name}.tmp")
    first = trainer.is_world_process_zero()
    if first:
        shutil.rmtree(beside, ignore_errors=True)
    trainer.accelerator.wait_for_everyone()
    with writing(best), _scored_weights(trainer):
        write_state(beside, trainer.plain_model, trainer.optimizer, weights_only=True)
    trainer.accelerator.wait_for_everyone()
    if first:
        check_state(beside)
        replace_folder(beside, best)
    trainer.accelerator.wait_for_everyone()


def _scored_weights(trainer: DistillTrainer) -> AbstractContextManager[None]:
    """The weights that are scored and kept: with train.ema_decay their average."""
    return trainer.average.applied() if trainer.average is not None else nullcontext()


def _drop_others(trainer: DistillTrainer, run: TrainingRun, step: int) -> None:
    """Keep the best weights of this step, and those that a checkpoint names: the run may go back to it."""
    if trainer.is_world_process_zero():
        kept = checkpoints(run.folder / "checkpoints")
        named = {read_json(checkpoint / STOPPER_FILE)["best_step"] for checkpoint in kept}
        wanted = {_best_folder(run, best) for best in {step, *named} if best is not None}
        for folder in set((run.folder / "best").iterdir()) - wanted:
            shutil.rmtree(folder)


def _scored(
    stopper: EarlyStopper, score: Scorer, trainer: DistillTrainer, engine: Engine
) -> Callable[[int], Score]:
    """Scores the weights of a step with all ranks; they learn the same score, or the same failure.

    Raises:
        ScoreFailure: no score, and all ranks know. What one rank alone knows, while the others wait for its part of a
            pass, is raised as it is.
    """

    def scored(step: int) -> Score:
        try:
            with stopper.time.scoring(), _scored_weights(trainer):
                own = score(trainer.plain_model)
            if not math.isfinite(own.value):
                raise UserError(f"the score is {own.value}: the model gives figures that are not finite")
        except Exception as error:
            if engine.shards and not known_to_all(error):
                raise
            raise ScoreFailure(str(error)) from error
        found: Score = _on_first_rank(lambda: own, trainer)
        trainer.listen()
        due = trainer.control.should_log  # logging clears it, and this step's loss is yet to be logged
        name = stopper.name
        errors = {f"{name}_stderr": found.stderr} if found.stderr is not None else {}
        trainer.log({name: found.value, **errors, "scoring_share": round(stopper.time.share, 6)})
        trainer.control.should_log = due
        return found

    return scored


def _on_first_rank(call: Callable[[], Any], trainer: DistillTrainer) -> Any:
    """What `call` returns on the first rank, on all ranks; what it raises there is raised on all ranks."""
    outcome: list[Any] = [None]
    if trainer.is_world_process_zero():
        try:
            outcome = [call()]
        except Exception as error:
            if not _distributed():
                raise
            outcome = [error]
    if _distributed():
        dist.broadcast_object_list(outcome, src=0)
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    return outcome[0]


def _whole_steps(run: TrainingRun) -> Any:
    """Rows such that every optimiser step has the same batch: without those behind the last whole step of an epoch."""
    needed = run.train.batch_size_tokens // run.max_length
    if not hasattr(run.rows, "__len__"):
        return EndlessRows(run.rows, needed, run)
    if len(run.rows) < needed:
        raise _too_little_data(run, len(run.rows), needed)
    return Subset(run.rows, range(len(run.rows) // needed * needed))


def _too_little_data(run: TrainingRun, found: int, needed: int) -> UserError:
    return UserError(
        f"data.train: gives {found} rows of {run.max_length} tokens, one batch of train.batch_size_tokens"
        f" {run.train.batch_size_tokens} needs {needed}; use more data or a smaller batch"
    )


class EndlessRows(IterableDataset):
    """A stream that begins again, in another order, where it ends.

    The Trainer would end an epoch there, with part of a step whose gradient would leak into the next one.
    """

    def __init__(self, rows: Any, needed: int, run: TrainingRun):
        self.rows, self.needed, self.run = rows, needed, run

    def __iter__(self) -> Iterator[Any]:
        """Rows without end.

        Raises:
            UserError: the whole stream is shorter than one batch.
        """
        for epoch in itertools.count():
            self.rows.set_epoch(epoch)
            found = 0
            for row in self.rows:
                found += 1
                yield row
            if found < self.needed:
                raise _too_little_data(self.run, found, self.needed)


def _check_vocabulary(run: TrainingRun, teacher: Teacher | None) -> None:
    size, tokens = _vocab_size(run.student), run.objective.vocab_size
    rows = cast(Tensor, teacher.head.weight).shape[0] if teacher is not None else size
    if tokens is None and rows != size:
        raise UserError(
            f"the vocabularies differ: {rows} tokens in the teacher, {size} in the student;"
            " distillation compares distributions over the same tokens, use the original checkpoint as the teacher, or"
            " set objective.vocab_size if one vocabulary is padded differently"
        )
    if tokens is not None and not len(run.tokenizer) <= tokens <= size:
        raise UserError(
            f"objective.vocab_size {tokens}: must be between the {len(run.tokenizer)} tokens of the tokenizer and the"
            f" {size} rows of the head"
        )
    if len(run.tokenizer) > size:
        raise UserError(
            f"the tokenizer has {len(run.tokenizer)} tokens, the model's vocabulary only {size};"
            " use the tokenizer that belongs to the model"
        )


def _vocab_size(model: PreTrainedModel) -> int:
    return model.config.get_text_config().vocab_size


def _distributed() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def mean_of_last(losses: list[float], count: int) -> float:
    """Mean of the last `count` losses; not a number when any of them is not, so that a diverged run never wins."""
    chosen = losses[-count:]
    return math.fsum(chosen) / len(chosen) if chosen else math.nan


def read_history(folder: Path) -> list[dict[str, float]]:
    """The logged points of a finished run, oldest first."""
    lines = (folder / "history.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def read_scores(folder: Path) -> dict[str, Any] | None:
    """`EarlyStopper.record` of a finished run with early stopping; None for any other run."""
    path = folder / "scores.json"
    found: dict[str, Any] | None = read_json(path) if path.is_file() else None
    return found
