"""Prepare student, teacher and rows for a trainer, by the same steps for a recipe's run
and for `FCSDTrainer`.
"""

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments

from fcsd.base.errors import UserError
from fcsd.data.batches import Collator
from fcsd.model.dtypes import dtype_of, to_dtype
from fcsd.model.families.routers import find_routers
from fcsd.model.families.structure import has_adapters
from fcsd.model.quantised.methods import model_quantisation, why_not_trained
from fcsd.parallel.launch import Launch
from fcsd.parallel.shard import shard_student, shard_teacher
from fcsd.training.config import UpdateConfig
from fcsd.training.losses.balance import refuse_loss_of_the_model
from fcsd.training.losses.head import attach_loss_head
from fcsd.training.losses.objectives import ObjectiveConfig
from fcsd.training.teachers.base import LiveTeacher, ModelTeacher, Teacher


@dataclass(frozen=True)
class Ready:
    """The inputs of a training: models in memory, and packed rows.

    student: in the dtype that is saved. teacher: None where there is none. heldout:
    rows, or a dict of several.
    """

    student: PreTrainedModel
    teacher: PreTrainedModel | Teacher | None
    tokenizer: Any
    rows: Any
    heldout: Any = None


def place_teacher(
    teacher: PreTrainedModel | Teacher | None, launch: Launch
) -> Teacher | None:
    """Place a teacher's model on this rank's device, or in shards over the ranks."""
    if teacher is None or isinstance(teacher, Teacher):
        return teacher
    if launch.engine.shards:
        return ModelTeacher(teacher, shard_teacher(teacher, launch))
    return ModelTeacher(torch.nn.Module.to(teacher, launch.device))


def prepare_student(
    student: PreTrainedModel,
    objective: ObjectiveConfig,
    train: UpdateConfig,
    launch: Launch,
) -> None:
    """Cast a student to the dtype of the training, freeze the parts that the objective
    keeps, attach the loss head, and shard it if the engine does.

    UserError: its config asks for a loss that fcsd does not have, or its weights are
    quantised.
    """
    if reason := why_not_trained(model_quantisation(student)):
        raise UserError(f"{type(student).__name__}: {reason}")
    refuse_loss_of_the_model(student.config, train)
    # `shard_student` casts shards; adapters have their dtype already, and the weights
    # under them stay as they are.
    if not launch.engine.shards_when_placed and not has_adapters(student):
        to_dtype(student, dtype_of(train.dtype))
    student.config.use_cache = False
    if objective.freeze_embeddings_and_head:
        freeze_embeddings_and_head(student)
    if objective.freeze_routers:
        freeze_routers(student)
    # Before the model is wrapped: the engines' hooks have to surround the loss head.
    attach_loss_head(student, objective.vocab_size)
    if launch.engine.shards:
        shard_student(student, launch, train)


def compute_alike(
    teacher: Teacher | None, student: PreTrainedModel, *, under_autocast: bool
) -> None:
    """Make a teacher that is run compute in its student's precision, so that equal
    weights give equal numbers.
    """
    if under_autocast and isinstance(teacher, LiveTeacher):
        teacher.compute_as(student)


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
    try:
        routers = find_routers(model)
    except UserError as error:
        raise UserError(f"{error}; leave out objective.freeze_routers") from None
    for router in routers:
        router.module.requires_grad_(False)


def collator(arguments: TrainingArguments, teacher: Teacher | None) -> Collator:
    """Return the collator of rows; for a teacher that wants to see batches early it
    runs in a worker process, a step ahead.
    """
    ahead = teacher.ahead if teacher is not None else None
    if ahead is None:
        return Collator()
    arguments.dataloader_num_workers = 1
    arguments.dataloader_prefetch_factor = max(2, arguments.gradient_accumulation_steps)
    return Collator(ahead)


def check_vocabularies(
    student: PreTrainedModel,
    teacher: Teacher | None,
    tokenizer: PreTrainedTokenizerBase,
    objective: ObjectiveConfig,
) -> None:
    """Raise UserError where the vocabularies of student, teacher and tokenizer differ,
    unless the objective says how many tokens they share.
    """
    # The head may have more rows than the tokenizer has tokens (padding), never fewer.
    size, tokens = student.config.get_text_config().vocab_size, objective.vocab_size
    rows = cast(Tensor, teacher.head.weight).shape[0] if teacher is not None else size
    if tokens is None and rows != size:
        raise UserError(
            f"the vocabularies differ: {rows} tokens in the teacher, {size} in the"
            " student; distillation needs one vocabulary: use the original checkpoint"
            " as the teacher, or set objective.vocab_size if one vocabulary is padded"
            " differently"
        )
    if tokens is not None and not len(tokenizer) <= tokens <= size:
        raise UserError(
            f"objective.vocab_size {tokens}: must be between the {len(tokenizer)}"
            f" tokens of the tokenizer and the {size} rows of the head"
        )
    if len(tokenizer) > size:
        raise UserError(
            f"the tokenizer has {len(tokenizer)} tokens, the model's vocabulary only"
            f" {size}; use the tokenizer that belongs to the model"
        )
