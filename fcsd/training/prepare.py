"""Prepare student and teacher for a trainer, and collate its rows, by the same steps for
a recipe's run and for `FCSDTrainer`.

A trainer calls `place_teacher`, `check_student`, `prepare_student` and `collator`, in
this order. The checks before a run call `check_student` early, on a model without
storage.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments

from fcsd.base.errors import UserError
from fcsd.base.strict import Rule, refuse
from fcsd.data.batches import Collator
from fcsd.model.dtypes import dtype_of, to_dtype
from fcsd.model.families.structure import has_adapters, head_and_body
from fcsd.model.quantised.methods import model_quantisation, why_not_trained
from fcsd.parallel.launch import Launch
from fcsd.parallel.shard import shard_student, shard_teacher
from fcsd.training.config import Sections, UpdateConfig
from fcsd.training.losses.head import attach_loss_head
from fcsd.training.losses.objectives import ObjectiveConfig
from fcsd.training.teachers.base import ModelTeacher, Teacher, cast_teacher

if TYPE_CHECKING:
    from fcsd.model.families.routers import Router


@dataclass(frozen=True)
class TrainingInputs:
    """The inputs of a training: models in memory, and packed rows.

    student: in the dtype that is saved, whatever dtype it is trained in. teacher: None
    where there is none. heldout: rows, or a dict of several. adapters: the `PeftModel`
    around a LoRA student.
    """

    student: PreTrainedModel
    teacher: PreTrainedModel | Teacher | None
    tokenizer: Any
    rows: Any
    heldout: Any = None
    adapters: Any = None


def place_teacher(
    teacher: PreTrainedModel | Teacher | None,
    launch: Launch,
    dtype: torch.dtype | None,
) -> Teacher | None:
    """Place a teacher's model on this rank's device, or in shards over the ranks; dtype:
    of its weights, None: as they are.
    """
    if teacher is None or isinstance(teacher, Teacher):
        return teacher
    if dtype is not None:
        cast_teacher(teacher, dtype)
    if launch.engine.shards:
        return ModelTeacher(teacher, shard_teacher(teacher, launch))
    return ModelTeacher(torch.nn.Module.to(teacher, launch.device))


def check_student(
    student: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sections: Sections,
    *,
    teacher_rows: int | None,
    checkpointing: bool | None,
) -> None:
    """Raise UserError where a student cannot be trained as the settings say. It is not
    changed, and may be without storage.

    teacher_rows: of the teacher's head; None: there is none, or it is not known yet.
    checkpointing: whether activation checkpointing is asked for.
    """
    objective, train, name = sections.objective, sections.train, type(student).__name__
    if reason := why_not_trained(model_quantisation(student)):
        raise UserError(f"{name}: {reason}")
    head_and_body(student)
    refuse_loss_of_the_model(student.config, train)
    if checkpointing and not student.supports_gradient_checkpointing:
        raise UserError(
            f"train.gradient_checkpointing: {name} does not support it; leave it out"
        )
    if objective.freeze_routers:
        routers_to_freeze(student)
    if train.balances:
        from fcsd.training.losses.balance import Balance

        Balance(train, student, None)
    if train.capacity_factor is not None:
        from fcsd.model.families.capacity import dropping

        drop = train.capacity_drop or "order"
        with dropping(student, train.capacity_factor, drop, training_only=True):
            pass
    refuse(*_vocabulary_rules(student, teacher_rows, tokenizer, objective))


def refuse_loss_of_the_model(config: Any, train: UpdateConfig) -> None:
    """Raise UserError if a model's config requests transformers' router loss, which
    fcsd does not compute, and `train` sets no other loss.
    """
    asked = any(
        getattr(model_config, "output_router_logits", False) is True
        for model_config in (config, config.get_text_config())
    )
    if asked and train.balance_loss_coefficient is None:
        raise UserError(
            "output_router_logits: true in the model's config has no effect here; set"
            " train.balance_loss_coefficient to balance the experts, or"
            " output_router_logits to false in the config"
        )


def prepare_student(
    student: PreTrainedModel,
    objective: ObjectiveConfig,
    train: UpdateConfig,
    launch: Launch,
) -> None:
    """Cast a student to the dtype of the training, freeze the parts that the objective
    keeps, and, if the engine shards, attach the loss head and shard it; `check_student`
    has found that this is possible.
    """
    # `shard_student` casts shards; adapters have their dtype already, and the weights
    # under them stay as they are.
    if not launch.engine.shards_when_placed and not has_adapters(student):
        to_dtype(student, dtype_of(train.dtype))
    student.config.use_cache = False
    if objective.freeze_embeddings_and_head:
        freeze_embeddings_and_head(student)
    if objective.freeze_routers:
        freeze_routers(student)
    if launch.engine.shards:
        # Before the model is wrapped: the engine's hooks have to surround the loss
        # head. Any other model has it only while it trains and is evaluated
        # (`ReadyTrainer.with_loss_head`), because outside it is the user's.
        attach_loss_head(student, objective.vocab_size)
        shard_student(student, launch, train)


def freeze_embeddings_and_head(model: PreTrainedModel) -> None:
    """Keep the input embeddings and the LM head as they are (paper Table 2, `KL
    embed.`).
    """
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        module.requires_grad_(False)


def freeze_routers(model: PreTrainedModel) -> None:
    """Keep the routers' weights as they are; UserError unless there is one for each MoE
    layer.
    """
    for router in routers_to_freeze(model):
        router.module.requires_grad_(False)


def routers_to_freeze(model: PreTrainedModel) -> "list[Router]":
    """Find the routers; UserError unless there is one for each MoE layer."""
    from fcsd.model.families.routers import find_routers

    try:
        return find_routers(model)
    except UserError as error:
        raise UserError(f"{error}; leave out objective.freeze_routers") from None


def collator(arguments: TrainingArguments, teacher: Teacher | None) -> Collator:
    """Return the collator of rows. For a teacher that wants to see batches early it runs
    in a worker process, a step ahead: `arguments` get that worker.
    """
    ahead = teacher.ahead if teacher is not None else None
    if ahead is None:
        return Collator()
    arguments.dataloader_num_workers = 1
    arguments.dataloader_prefetch_factor = max(2, arguments.gradient_accumulation_steps)
    return Collator(ahead)


def _vocabulary_rules(
    student: PreTrainedModel,
    teacher_rows: int | None,
    tokenizer: PreTrainedTokenizerBase,
    objective: ObjectiveConfig,
) -> list[Rule]:
    """Return how the vocabularies of student, teacher and tokenizer may not differ,
    unless the objective says how many tokens they share.
    """
    # The head may have more rows than the tokenizer has tokens (padding), never fewer.
    size, tokens = student.config.get_text_config().vocab_size, objective.vocab_size
    rows = size if teacher_rows is None else teacher_rows
    shared = min(size, rows)
    return [
        (
            tokens is None and rows != size,
            f"the vocabularies differ: {rows} tokens in the teacher, {size} in the"
            " student; distillation needs one vocabulary: use the original checkpoint"
            " as the teacher, or set objective.vocab_size if one vocabulary is padded"
            " differently",
        ),
        (
            tokens is not None and not len(tokenizer) <= tokens <= shared,
            f"objective.vocab_size {tokens}: must be between the {len(tokenizer)}"
            f" tokens of the tokenizer and the {shared} rows of the head",
        ),
        (
            len(tokenizer) > size,
            f"the tokenizer has {len(tokenizer)} tokens, the model's vocabulary only"
            f" {size}; use the tokenizer that belongs to the model",
        ),
    ]
