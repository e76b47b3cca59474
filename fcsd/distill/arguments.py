"""Describe a training run, and translate its settings to `transformers.TrainingArguments`."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments

from fcsd.config.training import ObjectiveConfig, SafetyConfig, TrainConfig
from fcsd.distill.early_stopping import EarlyStopper, Score
from fcsd.distill.schedule import ScheduledArguments
from fcsd.distill.teachers.base import Teacher
from fcsd.distributed.engine import Engine, checkpoints_activations
from fcsd.distributed.launch import Launch
from fcsd.errors import UserError

# Keys of the `train` section that have the name and the meaning of an argument of transformers.
_SAME = {
    "max_steps", "per_device_train_batch_size", "learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs",
    "warmup_steps", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "logging_steps",
    "save_steps", "save_total_limit",
}  # fmt: skip
Scorer = Callable[[PreTrainedModel], Score]  # all ranks call it, and all get the score


@dataclass(frozen=True)
class TrainingRun:
    """What one run is made from.

    max_length: tokens in a row of `rows`; score: of a model, for early stopping; save_dtype: of the weights
    that are left (the checkpoint's own, whatever dtype they were trained in); adapters: the `PeftModel` around a LoRA
    student; left: with the share of the steps that are done, the time that the whole run of stages still takes, or "".
    """

    launch: Launch
    folder: Path
    description: str
    student: PreTrainedModel
    teacher: PreTrainedModel | Teacher | None
    tokenizer: PreTrainedTokenizerBase
    rows: Any
    max_length: int
    objective: ObjectiveConfig
    train: TrainConfig
    seed: int
    save_dtype: torch.dtype
    safety: SafetyConfig = field(default_factory=SafetyConfig)
    stopper: EarlyStopper | None = None
    score: Scorer | None = None
    save_model: bool = True
    adapters: Any = None
    left: Callable[[float], str] | None = None


def accumulation_steps(train: TrainConfig, max_length: int, world_size: int) -> int:
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


def training_arguments(run: TrainingRun) -> TrainingArguments:
    """Say the recipe's training section in the words of `transformers`; inside `engine_environment`."""
    train, engine = run.train, run.launch.engine
    on_cpu = run.launch.device.type == "cpu"
    checkpointing = checkpoints_activations(train, run.student)
    return ScheduledArguments(
        output_dir=str(run.folder / "checkpoints"),
        run_name=run.description,
        **train.model_dump(include=_SAME),
        gradient_accumulation_steps=accumulation_steps(train, run.max_length, run.launch.ranks.size),
        bf16=train.bf16 and not engine.shards,  # there it is in the parameters, not in autocast
        use_cpu=on_cpu and not engine.uses_deepspeed,  # accelerate knows DeepSpeed on devices only
        ddp_backend="gloo" if on_cpu and engine.uses_deepspeed else None,
        # Otherwise FSDP2 would hold whole gradients between the micro-batches of a step.
        accelerator_config={"gradient_accumulation_kwargs": {"sync_each_batch": engine.has_dtensors}},
        activation_checkpointing=checkpointing,
        activation_checkpointing_kwargs={"use_reentrant": False} if checkpointing else None,
        logging_nan_inf_filter=False,  # a loss that is not finite stops the run, see DistillTrainer
        save_strategy="steps",
        report_to=[name for name in train.report_to if name != "tensorboard"],  # see `_tensorboard`
        seed=run.seed,
        data_seed=run.seed,
        remove_unused_columns=False,
        dataloader_drop_last=True,
        dataloader_pin_memory=torch.cuda.is_available(),
        ddp_find_unused_parameters=False,
        disable_tqdm=True,
    )


def refuse_what_cannot_be_sharded(
    train: TrainConfig, objective: ObjectiveConfig, engine: Engine, *, by_heldout_kl: bool
) -> None:
    """Raise UserError for settings that need whole weights; by_heldout_kl: the training stops by that score."""
    wrong = {
        "train.optimizer: muon orthogonalises whole matrices, which no rank has under FSDP or DeepSpeed; launch data"
        " parallel copies": train.optimizer == "muon",
        "train.ema_decay: an average is kept of whole weights, which no rank has under FSDP or DeepSpeed; launch data"
        " parallel copies": train.ema_decay is not None,
        "train.layer_lr_ratio: does not work with --expert-parallel; launch FSDP2 (configs/fsdp2_8.yaml)": (
            engine.spreads_experts and train.layer_lr_ratio != 1
        ),
        # DeepSpeed 0.19.8: the ranks' gathers fall out of step after the first score; each alone works.
        "early_stopping.metric: heldout_kl beside l2 or router_kl does not work under ZeRO-3; use FSDP2, or pass@1": (
            engine.uses_deepspeed and by_heldout_kl and objective.has_hidden_terms
        ),
    }
    for message, asked in wrong.items():
        if asked:
            raise UserError(message)


def check_reporters(train: TrainConfig) -> None:
    for name in train.report_to:
        if importlib.util.find_spec(name) is None:
            raise UserError(
                f"train.report_to: {name} is not installed; pip install 'fcsd[{name}]', or leave it out"
            )
