"""One training run in one folder: from models and rows to a checkpoint that can be loaded, through any number of restarts.

    folder/checkpoints/checkpoint-N   for an exact continuation
    folder/best/                      the weights with the best early-stopping score, and that score
    folder/history.jsonl              what was logged: loss, kl, learning rate, tokens per second
    folder/scores.json                early-stopping scores by step
    folder/model/                     what the run leaves
"""

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_model, save_model
from torch.utils.data import Subset
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments, set_seed

from fcsd.artifact import new_folder, read_json, write_json, write_text
from fcsd.distill.data import Collator
from fcsd.distill.early_stopping import EarlyStopper
from fcsd.distill.head import attach_loss_head, detach_loss_head
from fcsd.distill.trainer import DistillTrainer, StopWhenScoreStalls, checkpoints, prepare_callbacks
from fcsd.errors import UserError
from fcsd.recipe import Objective, Train

Scorer = Callable[[PreTrainedModel], float]


@dataclass(frozen=True)
class TrainingRun:
    """What one run is made from.

    max_length: tokens in a row of `rows`; score: pass@1 of a model, for early stopping; save_dtype: of the weights
    that are left (the checkpoint's own, whatever dtype they were trained in).
    """

    folder: Path
    description: str
    student: PreTrainedModel
    teacher: PreTrainedModel | None
    tokenizer: PreTrainedTokenizerBase
    rows: Any
    max_length: int
    objective: Objective
    train: Train
    seed: int
    save_dtype: torch.dtype
    stopper: EarlyStopper | None = None
    score: Scorer | None = None
    save_model: bool = True


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


def training_arguments(run: TrainingRun, world_size: int) -> TrainingArguments:
    """The recipe's training section in the words of `transformers`."""
    train = run.train
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
        bf16=train.bf16,
        activation_checkpointing=train.gradient_checkpointing,
        activation_checkpointing_kwargs={"use_reentrant": False} if train.gradient_checkpointing else None,
        logging_steps=train.logging_steps,
        logging_nan_inf_filter=False,  # a loss that is not finite stops the run, see DistillTrainer
        save_strategy="steps" if run.save_model else "no",
        save_steps=train.save_steps,
        save_total_limit=train.save_total_limit,
        report_to=list(train.report_to),
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
        UserError: batch that cannot be cut, too few rows, a loss that is not finite, a disk that is full.
    """
    set_seed(run.seed)
    student = run.student
    student.config.use_cache = False
    if run.teacher is not None:
        _check_same_vocabulary(run.teacher, student)
        run.teacher.eval().requires_grad_(False)
    if run.objective.freeze_embeddings_and_head:
        freeze_embeddings_and_head(student)
    arguments = training_arguments(run, _world_size())
    attach_loss_head(student)
    try:
        trainer = DistillTrainer(
            student,
            arguments,
            objective=run.objective,
            teacher=run.teacher,
            stopper=run.stopper,
            train_dataset=_whole_steps(run.rows, arguments, run),
            data_collator=Collator(),
        )
        prepare_callbacks(trainer, run.description)
        if run.stopper is not None and run.score is not None:
            _refuse_sharded_scoring(trainer)
            score = _score_on_first_rank(run.score, trainer)
            trainer.add_callback(StopWhenScoreStalls(run.stopper, score, lambda step: _keep_best(trainer, run, step)))
        done = checkpoints(run.folder / "checkpoints")
        if not (done and trainer.restore_if_complete(done[-1])):
            trainer.train(resume_from_checkpoint=str(done[-1]) if done else None)
    finally:
        detach_loss_head(student)
    results = _results(trainer, run)
    if trainer.is_world_process_zero():
        history = [entry for entry in trainer.state.log_history if "loss" in entry]
        write_text(run.folder / "history.jsonl", "".join(json.dumps(entry) + "\n" for entry in history))
        if run.stopper is not None:
            write_json(run.folder / "scores.json", run.stopper.state())
        if run.save_model:
            _leave_model(run)
            shutil.rmtree(run.folder / "checkpoints", ignore_errors=True)
            shutil.rmtree(run.folder / "best", ignore_errors=True)
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.free_memory()
    return results


def _results(trainer: DistillTrainer, run: TrainingRun) -> dict[str, Any]:
    last = [entry for entry in trainer.state.log_history if "loss" in entry][-1:]
    results: dict[str, Any] = {"steps": trainer.state.global_step}
    if last:
        results["last_loss"] = last[0]["loss"]
    if run.stopper is not None:
        results |= {"best_step": run.stopper.best_step, "best_score": run.stopper.best_score}
        results["stopped_early"] = run.stopper.should_stop
    return results


def _leave_model(run: TrainingRun) -> None:
    """Write `folder/model`: the best weights if there was a score, else the last."""
    student = run.student
    best = run.folder / "best" / "model.safetensors"
    if run.stopper is not None and best.is_file():
        load_model(student, str(best), strict=True)
    student.config.use_cache = True
    student.to(run.save_dtype)
    with new_folder(run.folder / "model") as folder:
        student.save_pretrained(folder)
        run.tokenizer.save_pretrained(folder)


def _keep_best(trainer: DistillTrainer, run: TrainingRun, step: int) -> None:
    if not trainer.is_world_process_zero():
        return
    assert run.stopper is not None
    with new_folder(run.folder / "best") as folder:
        save_model(trainer.accelerator.unwrap_model(trainer.model), str(folder / "model.safetensors"))
        write_json(folder / "best.json", {"step": step, "score": run.stopper.best_score})


def _score_on_first_rank(score: Scorer, trainer: DistillTrainer) -> Callable[[int], float]:
    """The first rank scores, all ranks learn the score; a failure there is raised on every rank."""

    def scored(step: int) -> float:
        outcome: list[Any] = [None]
        if trainer.is_world_process_zero():
            try:
                outcome = [score(trainer.accelerator.unwrap_model(trainer.model))]
            except Exception as error:
                if not _distributed():
                    raise
                outcome = [error]
        if _distributed():
            dist.broadcast_object_list(outcome, src=0)
        if isinstance(outcome[0], Exception):
            raise outcome[0]
        trainer.log({"pass@1": outcome[0]})
        return float(outcome[0])

    return scored


def _refuse_sharded_scoring(trainer: DistillTrainer) -> None:
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        raise UserError(
            "early_stopping: the model is sharded (FSDP or DeepSpeed), and generation for the score needs it whole;"
            " set early_stopping to null or train with plain data parallelism"
        )


def _whole_steps(rows: Any, arguments: TrainingArguments, run: TrainingRun) -> Any:
    """Leave out the rows behind the last whole optimiser step, so that every step of every epoch has the same batch."""
    if not hasattr(rows, "__len__"):
        return rows  # streamed
    needed = run.train.batch_size_tokens // run.max_length
    if len(rows) < needed:
        raise UserError(
            f"data.train: gives {len(rows)} rows of {run.max_length} tokens, one batch of train.batch_size_tokens"
            f" {run.train.batch_size_tokens} needs {needed}; use more data or a smaller batch"
        )
    return Subset(rows, range(len(rows) // needed * needed))


def _check_same_vocabulary(teacher: PreTrainedModel, student: PreTrainedModel) -> None:
    mine, theirs = student.config.vocab_size, teacher.config.vocab_size
    if mine != theirs:
        raise UserError(
            f"the vocabularies differ: {theirs} tokens in the teacher, {mine} in the student; "
            "distillation compares distributions over the same tokens, use the original checkpoint as the teacher"
        )


def _distributed() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _world_size() -> int:
    from accelerate import PartialState

    return PartialState().num_processes


def mean_of_last(losses: list[float], count: int) -> float:
    """Mean of the last `count` losses; not a number when any of them is not, so that a diverged run never wins."""
    chosen = losses[-count:]
    return math.fsum(chosen) / len(chosen) if chosen else math.nan


def read_history(folder: Path) -> list[dict[str, float]]:
    """The logged points of a finished run, oldest first."""
    lines = (folder / "history.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def read_scores(folder: Path) -> list[tuple[int, float]]:
    """(step, pass@1) of a finished run with early stopping; [] for one without."""
    path = folder / "scores.json"
    return [(step, score) for step, score in read_json(path)["history"]] if path.is_file() else []
