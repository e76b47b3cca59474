"""The training of models and rows that are ready: the same steps for a recipe's run and
for `fcsd.FCSDTrainer`.

Its bases: `DistillTrainer` (`fcsd.training.trainer`) has the loop, `ResumableTrainer`
(`fcsd.training.resumable`) writes checkpoints and continues from them. The loss is
`fcsd.training.step_loss`; `fcsd.training.safety` handles failing steps. An
out-of-memory error is explained here (`explain_oom`): the largest terms, and settings
to change; memory that is held throughout is counted from the models, the rest is the
difference from the peak.

Not covered: loading models, tokenizing data, and saving the trained model
(`fcsd.training.run` for a recipe, `fcsd.api.trainer` for a script).
"""

import contextlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainingArguments, set_seed
from transformers.trainer_utils import TrainOutput

from fcsd.base.errors import UserError, is_out_of_memory
from fcsd.base.text import size
from fcsd.data.rows import EpochRows, step_rows
from fcsd.model.autocast import computing_dtype, float32_routers
from fcsd.model.dtypes import dtype_of
from fcsd.parallel.engine import finish_zero_settings
from fcsd.parallel.launch import Launch
from fcsd.parallel.shard import own_part
from fcsd.training.config import Sections, UpdateConfig, micro_batches
from fcsd.training.losses.head import loss_head
from fcsd.training.prepare import (
    TrainingInputs,
    check_student,
    collator,
    place_teacher,
    prepare_student,
)
from fcsd.training.record import TrainingRecord
from fcsd.training.teachers.base import LiveTeacher, ModelTeacher, Teacher
from fcsd.training.trainer import DistillTrainer


def seed_and_record(
    args: TrainingArguments, sections: Sections, launch: Launch, *, owner: Any = None
) -> TrainingRecord:
    """Seed the random generators, record the given arguments, and only then fit them to
    the launch; return the record. owner: as of `TrainingRecord`.
    """
    set_seed(args.seed)
    record = TrainingRecord(args, sections, launch, owner=owner)
    fit_to_engine(args, sections, launch)
    return record


def fit_to_engine(args: TrainingArguments, sections: Sections, launch: Launch) -> None:
    """Set the arguments that depend on the engine and on the batch of a step."""
    # The batch is given in tokens: rows and micro-batches follow from it.
    if sections.train.batch_size_tokens is not None:
        args.per_device_train_batch_size, args.gradient_accumulation_steps = (
            micro_batches(sections.train, sections.data.max_length, launch.ranks.size)
        )
    if launch.engine.shards:
        # A sharded model is computed in bfloat16 by its parameters, not by autocast.
        args.bf16, args.mixed_precision = False, "no"
    # Without this FSDP2 would keep unsharded gradients between the micro-batches of a
    # step.
    accumulation = {"sync_each_batch": launch.engine.has_dtensors}
    args.accelerator_config.gradient_accumulation_kwargs = accumulation  # type: ignore[union-attr]
    # Without the key torch takes the re-entrant variant, which is refused.
    if args.activation_checkpointing:
        args.activation_checkpointing_kwargs = {
            "use_reentrant": False,
            **(args.activation_checkpointing_kwargs or {}),  # type: ignore[dict-item]
        }


class ReadyTrainer(DistillTrainer):
    """A trainer of models in memory on packed rows, within `engine_environment`.

    ready: models and rows. args, record: from `seed_and_record`. sections: a recipe's
    own, or those of an `FCSDConfig`. placed_teacher: the teacher, in place on this
    launch, also where the objective has none.
    """

    def __init__(
        self,
        ready: TrainingInputs,
        args: TrainingArguments,
        *,
        sections: Sections,
        record: TrainingRecord,
        launch: Launch,
        **kwargs: Any,
    ):
        objective, train = sections.objective, sections.train
        student, shards = ready.student, launch.engine.shards
        if (
            objective.own_text is not None
            and getattr(ready.teacher, "ahead", None) is not None
        ):
            raise UserError(
                f"own_text: {type(ready.teacher).__name__} knows only the rows of the"
                " data set, and cannot score what the student writes; give a model as"
                " the teacher"
            )
        # A teacher in shards is cast before it is sharded, any other one like the
        # student on its device.
        dtype = None
        if shards:
            own = dtype_of(train.dtype)
            dtype = computing_dtype(own, own, bf16=train.bf16, shards=True)
        self.placed_teacher = place_teacher(ready.teacher, launch, dtype)
        head: Any = None if self.placed_teacher is None else self.placed_teacher.head
        check_student(
            student,
            ready.tokenizer,
            sections,
            teacher_rows=None if head is None else head.weight.shape[0],
            checkpointing=args.activation_checkpointing,
        )
        prepare_student(student, objective, train, launch)
        # Equal weights give equal numbers: without a rewired layer the KL is 0.
        if isinstance(self.placed_teacher, LiveTeacher) and not shards:
            self.placed_teacher.compute_as(student, under_autocast=args.bf16)
        self.max_length = sections.data.max_length
        self.row_order = EpochRows.of(
            ready.rows, step_rows(args, launch.ranks.size), self.max_length
        )
        finish_zero_settings(args, train, launch.engine)
        super().__init__(
            student,
            args,
            sections=sections,
            teacher=self.placed_teacher if objective.has_teacher else None,
            launch=launch,
            record=record,
            train_dataset=ready.rows,
            eval_dataset=ready.heldout,
            data_collator=collator(args, self.placed_teacher),
            **kwargs,
        )
        if objective.own_text is not None:
            from fcsd.training.own_text import OwnText

            self.own_text = OwnText(
                objective, ready.tokenizer, launch.ranks, args.seed, self.meters
            )

    def working_context(self) -> contextlib.AbstractContextManager[None]:
        """Return the context that training and evaluation run in."""
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def with_loss_head(self) -> Iterator[None]:
        """Give the model its loss head within the block."""
        model = self.plain_model
        routers = float32_routers(model) if self.args.bf16 else contextlib.nullcontext()
        with (
            self.working_context(),
            loss_head(model, self.step_loss.objective.vocab_size),
            routers,
        ):
            yield

    def train_from(self, checkpoint: Path | None, *args: Any) -> TrainOutput:
        """Train from a checkpoint that is known to be intact; None: from the beginning."""
        if checkpoint is not None:
            self.record.refuse_another(checkpoint)
        explained = explain_oom(
            self.plain_model,
            self.teacher,
            self.settings,
            self.max_length,
            self.launch.device,
        )
        with self.with_loss_head(), explained:
            # A run that was killed after its last step has nothing left to train.
            if checkpoint is not None and self.restore_if_complete(checkpoint):
                output = TrainOutput(self.state.global_step, 0.0, {})
                if (
                    self.args.load_best_model_at_end
                    and self.state.best_model_checkpoint
                ):
                    self._load_best_model()
            else:
                self.checkpoint_writer.known.clear()
                output = super().train(
                    str(checkpoint) if checkpoint is not None else None, *args
                )
        # The model that the user holds afterwards has the weights that are saved.
        if self.average is not None:
            self.average.apply(self.plain_model, self.optimizer)
        return output


REST = "activations, loss and buffers"


@contextmanager
def explain_oom(
    student: nn.Module,
    teacher: Teacher | None,
    train: UpdateConfig,
    max_length: int,
    device: torch.device,
) -> Iterator[None]:
    """Turn an out-of-memory error in the block into a `UserError` with this rank's
    largest terms and advice.
    """
    try:
        yield
    except (RuntimeError, MemoryError, OSError) as error:
        # Devices, the host's allocator and system calls raise different classes.
        if not is_out_of_memory(error):
            raise
        terms = held(student, teacher)
        peak = peak_bytes(device)
        # What the peak has beyond the counted terms is attributed to activations.
        if peak is not None:
            terms[REST] = max(0, peak - sum(terms.values()))
        sizes = [(number, name) for name, number in terms.items() if number]
        largest = sorted(sizes, reverse=True)
        requested = re.search(
            r"tried to allocate ([\d.]+ ?[A-Za-z]+)", str(error), re.IGNORECASE
        )
        shortfall = f", and {requested[1]} more were requested" if requested else ""
        numbers = ", ".join(f"{name} {size(number)}" for number, name in largest)
        changes = "; ".join(
            advice([name for _, name in largest], student, teacher, train, max_length)
        )
        raise UserError(
            f"out of memory on {device}: a rank needs about"
            f" {numbers}{shortfall}. To need less: {changes}; `fcsd"
            " estimate RECIPE` shows the effect of each"
        ) from error


def held(student: nn.Module, teacher: Teacher | None) -> dict[str, int]:
    """Count the bytes that this rank holds from step to step; those of its own shards
    where the models are sharded.
    """
    # A teacher may share parameters with the student: these count once.
    trained = [p for p in student.parameters() if p.requires_grad]
    student_ids = {id(p) for p in student.parameters()}
    if isinstance(teacher, ModelTeacher):
        module = teacher.model
    else:
        module = getattr(teacher, "head", None)
    in_teacher = module.parameters() if isinstance(module, nn.Module) else ()
    gradients = sum(map(_local_bytes, trained))
    return {
        "student weights": sum(map(_local_bytes, student.parameters())),
        "gradients": gradients,
        "optimizer states": 2 * gradients,  # AdamW's two moments
        "teacher weights": sum(
            _local_bytes(p) for p in in_teacher if id(p) not in student_ids
        ),
    }


def _local_bytes(parameter: Any) -> int:
    local = own_part(parameter)
    return local.nbytes if isinstance(local, Tensor) else 0


def peak_bytes(device: torch.device) -> int | None:
    """Return the peak of the device, or of this process on a CPU; None if it is
    unknown.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if device.type != "cpu" or not status.is_file():
        return None
    # VmHWM is the high-water mark of the resident memory, in KiB.
    lines = [
        line for line in status.read_text().splitlines() if line.startswith("VmHWM:")
    ]
    return int(lines[0].split()[1]) * 1024 if lines else None


def advice(
    largest: list[str],
    student: nn.Module,
    teacher: Teacher | None,
    train: UpdateConfig,
    max_length: int,
) -> list[str]:
    """List changes of the recipe or the launch, beginning with those that reduce the
    largest terms.
    """
    sharded = any(
        hasattr(p, "ds_tensor") or hasattr(p, "device_mesh")
        for p in student.parameters()
    )
    all_trained = all(p.requires_grad for p in student.parameters())
    fewer_activations = []
    if not getattr(student, "is_activation_checkpointing", False):
        fewer_activations.append("train.gradient_checkpointing: true")
    if train.per_device_train_batch_size > 1:
        fewer_activations.append(
            "train.per_device_train_batch_size below"
            f" {train.per_device_train_batch_size} (the step's batch does not change)"
        )
    else:
        fewer_activations.append(f"data.max_length below {max_length}")
    fewer_weights = []
    if not sharded:
        fewer_weights.append(
            "weights in shards over several GPUs (configs/fsdp2_8.yaml,"
            " configs/zero3_8.yaml)"
        )
    elif int(os.environ.get("WORLD_SIZE", "1")) > 1:
        fewer_weights.append(
            "more GPUs, or states in the host's memory (configs/zero3_offload_8.yaml)"
        )
    if all_trained:
        fewer_weights.append(
            "a lora section with teacher.backend: adapter_off (one copy of the weights)"
        )
    if isinstance(teacher, ModelTeacher):
        of_the_teacher = ["teacher.backend: cache"]
    else:
        of_the_teacher = []
    # Optimiser states and gradients shrink with the weights, so those share their
    # advice.
    by_term = {
        REST: fewer_activations,
        "teacher weights": of_the_teacher + fewer_weights,
    }
    changes = [
        change for term in largest for change in by_term.get(term, fewer_weights)
    ]
    return list(dict.fromkeys(changes))
