"""`FCSDConfig`: the arguments of `FCSDTrainer`, under the names of `transformers` and of a recipe.

Not covered: what a recipe says about a whole run (evaluation, sweep, variants); `fcsd.load_recipe` reads one.
"""

# ruff: noqa: RUF009 - `_argument` gives a `field`, not one value that all share

import sys
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import TrainingArguments

from fcsd.config.model import ModelConfig
from fcsd.config.strict import Strict, validate
from fcsd.config.training import ObjectiveConfig, SafetyConfig, TrainConfig
from fcsd.connectivity import Connectivity
from fcsd.distill.python_words import with_known_names
from fcsd.distill.schedule import ScheduledArguments
from fcsd.errors import UserError

# Keys of a recipe's `objective` section, which are arguments of their own here.
_OBJECTIVE_KEYS = (
    "temperature", "jsd_beta", "clip", "l2_coefficient", "l2_relative", "l2_points", "l2_until",
    "router_kl_coefficient", "vocab_size", "freeze_embeddings_and_head", "freeze_routers",
)  # fmt: skip

# What would change nothing, or something else than it says: argument -> (its neutral values, what to do instead).
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "fp16": ((False,), "use bf16=True"),
    "label_smoothing_factor": ((0, 0.0), "use temperature, or the objective jsd, for a softer target"),
    "auto_find_batch_size": ((False,), "set per_device_train_batch_size; the batch of a step stays what it is"),
    "save_only_model": ((False,), "a checkpoint is for an exact continuation; save_model() leaves the model alone"),
    "use_liger_kernel": ((False,), "head and loss are fused already"),
    "bf16_full_eval": ((False,), "bf16=True holds for the evaluation too"),
    "fp16_full_eval": ((False,), "bf16=True holds for the evaluation too"),
    "fsdp": ((None, "", [], False), "launch with accelerate and configs/fsdp2_8.yaml"),
    "deepspeed": ((None,), "launch with accelerate and configs/fsdp2_8.yaml"),
}  # fmt: skip


LOSSES = ("loss", "kl", "ce")
"""The last words of the metrics that `FCSDTrainer.evaluate` gives: eval_kl, or eval_NAME_kl of a dict of data sets."""
_SCORES = ("accuracy", "acc", "agreement", "precision", "recall", "f1", "exact_match", "em", "bleu", "rouge")


def _greater_is_better(metric: str) -> bool:
    """Return the direction of a metric whose last word says it.

    Raises:
        UserError: it does not.
    """
    if is_loss(metric):
        return False
    if any(f"_{metric}".endswith(f"_{word}") for word in _SCORES):
        return True
    raise UserError(
        f"FCSDConfig: metric_for_best_model: {metric!r} does not say whether more of it is better; set"
        " greater_is_better=True or False, or use eval_loss, eval_kl or eval_ce (of a dict of data sets"
        " eval_NAME_kl and so on), of which less is better"
    )


def is_loss(metric: str) -> bool:
    """Tell whether a metric is, by its last word, one of ours, of which less is better."""
    return any(f"_{metric}".endswith(f"_{word}") for word in LOSSES)


def _argument(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


class Sections(Strict):
    """The sections of a recipe that the arguments fill, checked as those of a recipe are."""

    objective: ObjectiveConfig
    train: TrainConfig
    safety: SafetyConfig


@with_known_names
@dataclass
class FCSDConfig(ScheduledArguments):
    """`transformers.TrainingArguments` for distillation with FarSkip connectivity.

    All of transformers' arguments are there. These are fcsd's own, named as in a recipe:

    Args:
        objective: "kl" (forward KL to the teacher), "reverse_kl", "jsd", "kl+l2", "sft" or "ce". Its settings are
            `temperature`, `jsd_beta`, `clip`, `l2_coefficient`, `l2_relative`, `l2_points`, `l2_until`,
            `router_kl_coefficient`, `vocab_size`, `freeze_embeddings_and_head` and `freeze_routers`
            (`fcsd.config.training.ObjectiveConfig`).
        layers: selection of the layers to rewire in a model that is not converted yet, for example "last:90%";
            None: the model is converted already. `attention` and `mlp` are the sides (`fcsd.Connectivity`).
        max_length: tokens in a row.
        packing: several examples share a row; they do not see each other.
        loss_on: "response" (what the assistant says) or "all".
        on_bad_row: what an example that cannot be tokenized does: "error" ends the run, "skip" leaves it out, up to 1 %
            of the examples, and ten in any case.
        columns: what the data set's columns mean, as in a recipe: {"messages": NAME}, {"text": NAME} or
            {"prompt": NAME, "response": NAME}; None: seen from their names.
        dataset_num_proc: processes that tokenize; by default one for each core, eight at most.
        batch_size_tokens: of one optimiser step, over all ranks; sets gradient_accumulation_steps.
        dtype: of the trained weights, "float32" or "bfloat16". They are saved in the dtype that the model came in.
        optimizer: "adamw", or "muon" for the matrices of the layers.
        lr_scheduler_type: any of transformers', and "step", whose `lr_scheduler_kwargs` are `milestones`, shares of the
            steps at which the rate is multiplied by `gamma`.
        layer_lr_ratio: the last layer's learning rate over the first one's.
        ema_decay: the moving average of the weights is what is evaluated and saved.
        safety: the `safety` section of a recipe: what happens when a step goes wrong.
        model_init_kwargs: `dtype`, `revision`, `attn_implementation`, `experts_implementation` of a model given by its
            path; `trust_remote_code` stands by itself.
        teacher_model_init_kwargs: the same of a teacher given by its path.

    Defaults that differ from transformers' are a recipe's: learning_rate 2e-5, cosine schedule, adam_beta2 0.95,
    per_device_train_batch_size 1, logging_steps 10; remove_unused_columns is False.

    Raises:
        UserError: a value that a recipe would refuse, or an argument that FCSDTrainer has no use for.
    """

    _VALID_DICT_FIELDS = [  # noqa: RUF012
        *TrainingArguments._VALID_DICT_FIELDS,
        "columns", "safety", "model_init_kwargs", "teacher_model_init_kwargs",
    ]  # fmt: skip

    per_device_train_batch_size: int = _argument(1, "Rows of one forward pass.")
    learning_rate: float = _argument(2e-5, "The initial learning rate.")
    lr_scheduler_type: str = _argument("cosine", "The learning-rate schedule.")
    adam_beta2: float = _argument(0.95, "AdamW's beta2.")
    logging_steps: float = _argument(10, "Steps between two logs.")
    logging_nan_inf_filter: bool = _argument(False, "Steps that go wrong are skipped.")
    remove_unused_columns: bool = _argument(False, "Rows have no other columns.")
    ddp_find_unused_parameters: bool | None = _argument(False, "See DDP.")

    objective: str = _argument("kl", "kl, reverse_kl, jsd, kl+l2, sft or ce.")
    temperature: float | None = _argument(None, "Of both softmaxes; 1.")
    jsd_beta: float | None = _argument(None, "Share of the teacher in jsd's mixture; 0.5.")
    clip: float | None = _argument(None, "Nats above which a token has no gradient.")
    l2_coefficient: float | None = _argument(None, "Of the hidden-state distance, for kl+l2.")
    l2_relative: bool | None = _argument(None, "Distance over the teacher's square.")
    l2_points: str | None = _argument(None, "blocks, merges or sublayers.")
    l2_until: float | None = _argument(None, "Share of the steps after which l2 is 0.")
    router_kl_coefficient: float | None = _argument(None, "Of the routers' KL.")
    vocab_size: int | None = _argument(None, "Rows of the head that are tokens.")
    freeze_embeddings_and_head: bool = _argument(False, "Keep them as they are.")
    freeze_routers: bool = _argument(False, "Keep them as they are.")

    layers: list[int] | str | dict | None = _argument(None, "Layers to rewire.")
    attention: str = _argument("partial", "partial or full.")
    mlp: str = _argument("outdated", "outdated or full.")

    max_length: int = _argument(4096, "Tokens in a row.")
    packing: bool = _argument(True, "Several examples share a row.")
    loss_on: str = _argument("response", "response or all.")
    on_bad_row: str = _argument("error", "error, or skip: leave out up to 1 %.")
    columns: dict[str, str] | str | None = _argument(None, "Meaning of the columns.")
    dataset_num_proc: int | None = _argument(None, "Processes that tokenize.")
    batch_size_tokens: int | None = _argument(None, "Tokens of one optimiser step.")

    dtype: str = _argument("float32", "Of the trained weights.")
    optimizer: str = _argument("adamw", "adamw or muon.")
    layer_lr_ratio: float = _argument(1.0, "Last layer's learning rate over the first's.")
    ema_decay: float | None = _argument(None, "Of the weights' moving average.")
    safety: dict[str, Any] | str | None = _argument(None, "When a step goes wrong.")

    trust_remote_code: bool = _argument(False, "Of a tokenizer given by its path.")
    model_init_kwargs: dict[str, Any] | str | None = _argument(None, "Of the model.")
    teacher_model_init_kwargs: dict[str, Any] | str | None = _argument(None, "Of the teacher.")

    def __post_init__(self) -> None:
        if not torch.accelerator.is_available():
            self.use_cpu, self.dataloader_pin_memory = True, False
        if self.metric_for_best_model is not None and self.greater_is_better is None:
            # transformers would take all but "loss" for better when greater
            self.greater_is_better = _greater_is_better(self.metric_for_best_model)
        super().__post_init__()
        for name, (neutral, instead) in _REFUSED.items():
            if getattr(self, name) not in neutral:
                raise UserError(f"FCSDConfig: {name}: has no meaning here; {instead}")
        if self.loss_on not in ("response", "all"):
            raise UserError(f"FCSDConfig: loss_on: must be 'response' or 'all', got {self.loss_on!r}")
        if self.on_bad_row not in ("error", "skip"):
            raise UserError(f"FCSDConfig: on_bad_row: must be 'error' or 'skip', got {self.on_bad_row!r}")
        if self.max_length < 2:
            raise UserError(f"FCSDConfig: max_length: must be at least 2, got {self.max_length}")
        if (schedule := self.sections().train.lr_scheduler_kwargs) is not None:
            self.lr_scheduler_kwargs = schedule  # with its defaults
        self.connectivity()

    def sections(self) -> Sections:
        """Return what a recipe's sections would say; of `train` only what transformers' arguments do not."""
        given = {key: value for key in _OBJECTIVE_KEYS if (value := getattr(self, key)) not in (None, False)}
        max_steps = self.max_steps if self.max_steps > 0 else sys.maxsize  # epochs: known when the data are
        train: dict[str, Any] = {
            "max_steps": max_steps,
            "warmup_steps": 0,
            "batch_size_tokens": self.batch_size_tokens or 1,
            "per_device_train_batch_size": self.per_device_train_batch_size,
            "gradient_checkpointing": bool(self.activation_checkpointing),
        }
        if self.lr_scheduler_type in ("step", "warmup_stable_decay"):
            train |= {
                "lr_scheduler_type": str(getattr(self.lr_scheduler_type, "value", self.lr_scheduler_type)),
                "lr_scheduler_kwargs": self.lr_scheduler_kwargs,
                "warmup_steps": self.get_warmup_steps(max_steps),
            }
        same = ("learning_rate", "weight_decay", "optimizer", "layer_lr_ratio", "ema_decay", "dtype", "bf16")
        raw = {
            "objective": {"name": self.objective, **given},
            "train": train | {name: getattr(self, name) for name in same},
            "safety": self.safety or {},
        }
        return validate(Sections, raw, "FCSDConfig")

    def connectivity(self) -> Connectivity | None:
        """Return what is rewired in a model that is not converted yet; None: nothing is said."""
        if self.layers is None:
            if (self.attention, self.mlp) != ("partial", "outdated"):
                raise UserError(
                    "FCSDConfig: attention and mlp are sides of the layers to rewire; give layers, too"
                )
            return None
        return Connectivity(self.layers, self.attention, self.mlp)  # type: ignore[arg-type]

    def model_config(self, path: str, *, teacher: bool = False) -> ModelConfig:
        """Return how a model given by its path is loaded."""
        name = "teacher_model_init_kwargs" if teacher else "model_init_kwargs"
        values = {"path": path, "trust_remote_code": self.trust_remote_code, **(getattr(self, name) or {})}
        if isinstance(dtype := values.get("dtype"), torch.dtype):
            values["dtype"] = str(dtype).removeprefix("torch.")
        return validate(ModelConfig, values, f"FCSDConfig: {name}")
