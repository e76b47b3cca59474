"""LoRA students, and the teacher that needs no second model: the same weights with
adapters and connectivity off.

peft adds its adapters to the rewired model in place, so that the student keeps its
class `FarSkip<Family>ForCausalLM`, which the loss head, generation and the Trainer rely
on.

Not covered: adapters on the head or the embeddings (the head computes the loss), other
methods of peft than LoRA.
"""

import contextlib
import copy
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fcsd.base.errors import UserError, one_line
from fcsd.base.strict import check_kind
from fcsd.data.batches import Batch
from fcsd.model.connectivity.rewire import regular
from fcsd.model.families.structure import has_adapters, is_adapter, output_head
from fcsd.training.losses.head import body_hidden
from fcsd.training.teachers.base import LiveTeacher
from fcsd.training.teachers.config import AdapterConfig

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "modules_to_save": (None, []),
    "trainable_token_indices": (None, []),
    "bias": ("none",),
    "init_lora_weights": (True, "gaussian"),
    "layer_replication": (None,),
    "monteclora_config": (None,),
}
"""Settings of peft's LoRA by which more than adapters would be trained, or by which
fresh adapters would have an effect, and their values here.
"""


def check_peft_config(config: Any) -> None:
    """Raise UserError unless `config` describes LoRA adapters that a model can be
    trained with and, without them, is its own teacher.
    """
    import_peft()
    import peft

    check_kind("peft_config", config, peft.LoraConfig, "a peft.LoraConfig")
    for name, allowed in _NEUTRAL.items():
        if (value := getattr(config, name, allowed[0])) not in allowed:
            raise UserError(
                f"peft_config: {name}: is {value!r}; only adapters are trained, which"
                f" begin without an effect: use {allowed[0]!r}"
            )


def import_peft() -> None:
    try:
        import peft  # noqa: F401
    except ImportError:
        raise UserError(
            "lora: peft is not installed; pip install 'fcsd[lora]', or leave the"
            " section out"
        ) from None


def add_adapters(
    model: PreTrainedModel, lora: Any, seed: int, dtype: torch.dtype
) -> Any:
    """Freeze `model` and add fresh adapters of `dtype` to it in place; they have no
    effect until they are trained.

    lora: an `AdapterConfig`, or peft's own that `check_peft_config` has accepted.

    Returns: the `PeftModel` around it, for `leave_adapters`.

    Raises:
        UserError: peft is not installed; names match nothing or cannot be adapted by
            peft; the head or the embeddings are among them.
    """
    import_peft()
    import peft
    from peft.tuners.tuners_utils import BaseTunerLayer

    # Adapters start from random numbers: all ranks and restarts need the same ones.
    if isinstance(lora, AdapterConfig):
        config = peft.LoraConfig(**lora.model_dump(), task_type="CAUSAL_LM")
    else:
        # peft writes into it; without a task it would not know how to generate
        config = copy.deepcopy(lora)
        config.task_type = config.task_type or "CAUSAL_LM"
    torch.manual_seed(seed)
    try:
        with warnings.catch_warnings():
            # peft also looks for unfused experts, by patterns that match nothing in a
            # family with fused experts.
            warnings.filterwarnings(
                "ignore", "The following (rank|alpha)_pattern keys did not match"
            )
            # peft 0.21 asks for the old name of transformers' activation checkpointing.
            warnings.filterwarnings(
                "ignore", "`is_gradient_checkpointing` is deprecated"
            )
            adapted: Any = peft.get_peft_model(model, config)
    except (ValueError, AttributeError, TypeError) as error:
        raise UserError(
            f"lora: peft cannot adapt {type(model).__name__}: {one_line(error)};"
            " check lora.target_modules and lora.target_parameters"
        ) from error
    # The loss head reads the weights of the head alone and would ignore an adapter on
    # it.
    for module, role in (
        (model.get_output_embeddings(), "head"),
        (model.get_input_embeddings(), "embeddings"),
    ):
        if isinstance(module, BaseTunerLayer):
            raise UserError(
                f"lora.target_modules: names the {role} of the model, which fcsd does"
                " not adapt (the head computes the loss); leave them out"
            )
    # With the path of the original in it, the adapters would silently be loaded on that
    # instead of the rewired model.
    adapted.peft_config["default"].base_model_name_or_path = None
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter(name))
        if is_adapter(name):
            parameter.data = parameter.data.to(dtype)
    return adapted


def try_adapters(model: PreTrainedModel, *options: Any) -> None:
    """Add adapters to a model without storage, and merge them; UserError where peft
    cannot, before anything is trained. options: as of `add_adapters`.
    """
    try:
        add_adapters(model, *options).merge_and_unload()
    except (NotImplementedError, RuntimeError) as error:
        raise UserError(
            "peft_config: peft cannot merge such adapters into the model, which is"
            f" saved so: {one_line(error)}; leave this setting out"
        ) from error


def leave_adapters(adapted: Any, folder: Path) -> None:
    """Write the adapters to `folder` in peft's format, and merge them into the model in
    place (in bfloat16 each weight is rounded once).
    """
    adapted.save_pretrained(folder)
    adapted.merge_and_unload()


def merged_copy(adapted: Any) -> PreTrainedModel:
    """Return a copy of a LoRA student with its adapters merged into the weights."""
    merged: PreTrainedModel = copy.deepcopy(adapted).merge_and_unload()
    return merged


class AdapterOffTeacher(LiveTeacher):
    """The original model inside its LoRA student: a pass with adapters, connectivity
    and dropout off.

    It gives the original's bits: a layer without its plan and a disabled adapter both
    run the family's own code on the same weights. The student's head may be a loss
    head.
    """

    def __init__(self, student: PreTrainedModel):
        if not has_adapters(student):
            raise ValueError(
                "the student has no adapters, so training changes the teacher's weights"
            )
        self.model = student
        self.head = output_head(student)

    def as_teacher(self) -> contextlib.AbstractContextManager[None]:
        return as_original(self.model)

    def hidden(self, batch: Batch, keep: Tensor) -> Tensor:
        """Compute it without the model's own forward, which the Trainer has wrapped."""
        return body_hidden(self.model, batch["input_ids"], batch["position_ids"], keep)


@contextlib.contextmanager
def as_original(student: nn.Module) -> Iterator[None]:
    """Turn a LoRA student into the original model in evaluation mode within the block.

    Afterwards the training flag of every module is restored, not set: a module may have
    been in evaluation mode on purpose.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    training = [module for module in student.modules() if module.training]
    adapters: list[Any] = [
        module for module in student.modules() if isinstance(module, BaseTunerLayer)
    ]
    try:
        student.eval()
        for adapter in adapters:
            # `enable_adapters` would also switch requires_grad, on which DDP and the
            # optimiser rely.
            adapter._disable_adapters = True
        with regular(student):
            yield
    finally:
        for module in training:
            module.training = True
        for adapter in adapters:
            adapter._disable_adapters = False
