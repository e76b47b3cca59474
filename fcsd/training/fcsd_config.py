"""`FCSDConfig`: the arguments of `FCSDTrainer`, named as in `transformers` and in a
recipe.
"""

# ruff: noqa: RUF009 - `_argument` gives a `field`, not one value that all share

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, make_dataclass, replace
from typing import Any, get_args, get_type_hints

import torch
from pydantic.fields import FieldInfo
from transformers import TrainingArguments

from fcsd.base.errors import UserError, kind_of, one_line
from fcsd.base.strict import Strict, check_kind, validate
from fcsd.data.config import RowsConfig
from fcsd.model.config import ModelConfig
from fcsd.model.connectivity.spec import (
    Connectivity,
    ConnectivityConfig,
    connectivity_of,
)
from fcsd.training.argument_rules import refuse_conflicts, refuse_meaningless
from fcsd.training.arguments import TrainerArguments
from fcsd.training.config import (
    ScheduleConfig,
    Sections,
    TrainConfig,
    UpdateConfig,
)
from fcsd.training.losses.objectives import OBJECTIVES, KLObjectiveConfig
from fcsd.training.python_words import python_words, with_known_names

LOSSES = ("loss", "kl", "ce")
"""The last words of the metrics of `FCSDTrainer.evaluate`: eval_kl, or eval_NAME_kl for
a dict of data sets.
"""
_SCORES = (
    "accuracy",
    "acc",
    "agreement",
    "precision",
    "recall",
    "f1",
    "exact_match",
    "em",
    "bleu",
    "rouge",
)


def _greater_is_better(metric: str) -> bool:
    """Tell from a metric's last word whether more is better; UserError if it is
    unknown.
    """
    if is_loss(metric):
        return False
    if any(f"_{metric}".endswith(f"_{word}") for word in _SCORES):
        return True
    raise UserError(
        f"FCSDConfig: metric_for_best_model: {metric!r} does not imply whether higher"
        " is better; set greater_is_better=True or False, or use eval_loss, eval_kl or"
        " eval_ce (for a dict of data sets, eval_NAME_kl and so on), where lower is"
        " better"
    )


def is_loss(metric: str) -> bool:
    """Tell whether a metric is one of fcsd's losses, where lower is better."""
    return any(f"_{metric}".endswith(f"_{word}") for word in LOSSES)


def _argument(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


def _key(section: type[Strict], name: str) -> Any:
    """Make a field with the default and the help of a recipe's key."""
    info = section.model_fields[name]
    return _argument(info.default, str(info.description))


_OBJECTIVE_KEYS = {
    key: info
    for kind in OBJECTIVES.values()
    for key, info in kind.model_fields.items()
    if key != "name"
}


def _objective_argument(key: str, info: FieldInfo) -> tuple[str, Any, Any]:
    """Make a field that is None (a bool: False) unless it is set, so that the
    objective's own default holds.
    """
    # The annotation may be a union with None or a Literal, whose arguments are no
    # types.
    kind: Any = next(
        (
            candidate
            for candidate in get_args(info.annotation)
            if isinstance(candidate, type)
        ),
        info.annotation,
    )
    if kind is bool:
        return key, bool, _argument(False, str(info.description))
    return key, kind | None, _argument(None, str(info.description))


# The keys that a recipe and the arguments share: defined, with default, check and help,
# in the recipe's records.
_SharedKeys: Any = make_dataclass(
    "_SharedKeys",
    [
        *(_objective_argument(key, info) for key, info in _OBJECTIVE_KEYS.items()),
        *(
            (key, info.annotation, _key(section, key))
            for section in (UpdateConfig, RowsConfig)
            for key, info in section.model_fields.items()
        ),
    ],
)


def _read_numbers(args: Any) -> None:
    """Convert numbers that are given as text ("10", as a file has them); UserError for
    text that is no number.
    """
    hints = get_type_hints(type(args))
    for argument in fields(args):
        value, hint = getattr(args, argument.name), hints[argument.name]
        kinds = {*(get_args(hint) or (hint,))}
        # Only a field that takes numbers and no text can be converted without a doubt.
        if not isinstance(value, str) or str in kinds or not kinds & {int, float}:
            continue
        try:
            setattr(args, argument.name, (float if float in kinds else int)(value))
        except ValueError:
            raise UserError(
                f"FCSDConfig: {argument.name}: a number is needed, got {value!r}"
            ) from None


def _check_arguments(args: Any) -> None:
    """Raise UserError unless `args` are `TrainingArguments`, without fields that only
    another trainer has.
    """
    if not isinstance(args, TrainingArguments):
        hint = "; write FCSDConfig(**args)" if isinstance(args, Mapping) else ""
        raise UserError(f"args: {kind_of(args)}; an FCSDConfig is needed{hint}")
    # Another library's arguments are a subclass, and its fields would be passed over.
    known_names = {argument.name for argument in fields(FCSDConfig)}
    if foreign := [
        argument.name for argument in fields(args) if argument.name not in known_names
    ]:
        raise UserError(
            f"args: {kind_of(args)}, with arguments that FCSDTrainer does not have"
            f" ({', '.join(foreign[:3])}{', …' if len(foreign) > 3 else ''}); give an"
            " FCSDConfig, or a TrainingArguments of transformers (docs/python.md has"
            " fcsd's names for TRL's arguments)"
        )


@with_known_names
@dataclass
class FCSDConfig(_SharedKeys, TrainerArguments):
    """`transformers.TrainingArguments` for distillation with FarSkip connectivity.

    All of transformers' arguments are available. fcsd adds these, named as in a recipe:

    Attributes:
        objective: "kl" (forward KL to the teacher), "reverse_kl", "jsd", "kl+l2", "sft"
            or "ce". Its settings are `temperature`, `jsd_beta`, `l2_coefficient`,
            `l2_relative`, `l2_until`, `vocab_size`, `freeze_embeddings_and_head` and
            `freeze_routers` (`fcsd.training.losses.objectives`); `own_text` is the
            share of rows that the student writes (`fcsd.training.own_text`), with
            `own_text_tokens`, `own_text_batch_size` and `own_text_sample_steps`.
        layers: the layers to rewire in a model that is not converted yet, for example
            "last:90%"; None: the model is converted already. `attention` and `mlp` are
            the sides (`fcsd.Connectivity`).
        max_length: tokens in a row.
        packing: several examples share a row; they do not attend to each other.
        loss_on: "response" (the assistant's turns) or "all".
        on_bad_row: the reaction to an example that cannot be tokenized: "error" ends
            the run, "skip" leaves it out, up to 1 % of the examples, and ten in any
            case.
        columns: the meaning of the data set's columns, as in a recipe:
            {"messages": NAME}, {"text": NAME} or {"prompt": NAME, "response": NAME},
            where the response is an assistant's turn, or {"prompt": NAME,
            "completion": NAME}, which are taken literally (TRL); None: inferred from
            their names.
        dataset_num_proc: processes that tokenize; by default one for each core, eight
            at most.
        batch_size_tokens: tokens per optimiser step, over all ranks; sets
            gradient_accumulation_steps, which must not be set to another value.
        dtype: of the weights during training, "float32" or "bfloat16". They are saved
            in the model's original dtype.
        lr_scheduler_type: any of transformers', or "step", whose `lr_scheduler_kwargs`
            are `milestones`, shares of the steps at which the rate is multiplied by
            `gamma`.
        ema_decay: evaluate and save the moving average of the weights.
        balance_loss_coefficient: of the loss that balances the experts' loads, over
            each "sequence" or the "batch" of all ranks and the micro-batches of the
            step so far (`balance_loss_over`); balance_bias_rate: balances by the
            routers' correction bias instead (`fcsd.training.losses.balance`).
        capacity_factor: drops (token, expert) pairs above a capacity; capacity_drop: by
            "order" or "weight" (`fcsd.model.families.capacity`).
        safety: the `safety` section of a recipe: the reaction to failing steps.
        model_init_kwargs: `dtype`, `revision`, `attn_implementation` and
            `experts_implementation` of a model given by its path; `trust_remote_code`
            is a separate argument.
        teacher_model_init_kwargs: the same for a teacher given by its path.

    Defaults that differ from transformers' are those of a recipe; remove_unused_columns
    is False.

    Raises:
        UserError: a value that a recipe would refuse, or an argument that has no effect
            in FCSDTrainer (`fcsd.training.argument_rules`).
    """

    _VALID_DICT_FIELDS = [  # noqa: RUF012
        *TrainingArguments._VALID_DICT_FIELDS,
        "columns", "safety", "model_init_kwargs", "teacher_model_init_kwargs",
    ]  # fmt: skip

    lr_scheduler_type: str = _key(ScheduleConfig, "lr_scheduler_type")
    logging_steps: float = _key(TrainConfig, "logging_steps")
    logging_nan_inf_filter: bool = _argument(False, "Skip failing steps.")
    remove_unused_columns: bool = _argument(False, "Rows have no other columns.")
    ddp_find_unused_parameters: bool | None = _argument(False, "See DDP.")

    objective: str = _argument(
        KLObjectiveConfig().name, f"One of {', '.join(OBJECTIVES)}."
    )

    layers: list[int] | str | dict | None = _argument(None, "Layers to rewire.")
    attention: str = _key(ConnectivityConfig, "attention")
    # None, which is refused, makes `HfArgumentParser` read text; without it, a list.
    mlp: list[int] | str | dict | None = _key(ConnectivityConfig, "mlp")

    columns: dict[str, str] | str | None = _argument(None, "Meaning of the columns.")
    dataset_num_proc: int | None = _argument(None, "Processes that tokenize.")
    safety: dict[str, Any] | str | None = _argument(None, "When a step goes wrong.")

    trust_remote_code: bool = _key(ModelConfig, "trust_remote_code")
    model_init_kwargs: dict[str, Any] | str | None = _argument(
        None, "For loading the model."
    )
    teacher_model_init_kwargs: dict[str, Any] | str | None = _argument(
        None, "For loading the teacher."
    )

    @classmethod
    def of(cls, args: TrainingArguments | None) -> "FCSDConfig":
        """Return `args` as an `FCSDConfig`, with defaults for what they lack.

        Raises:
            UserError: they are not `TrainingArguments`, or belong to another trainer;
                a value that was set later is refused.
        """
        if args is None:
            return cls()
        if isinstance(args, FCSDConfig):
            replace(args)  # checks values that were set after it was made
            return args
        _check_arguments(args)
        settings = {
            argument.name: getattr(args, argument.name)
            for argument in fields(args)
            if argument.init
        }
        # transformers has guessed the direction, wrongly for a name such as "kl":
        # decide again.
        if is_loss(args.metric_for_best_model or ""):
            settings["greater_is_better"] = None
        return cls(
            **settings
            | {
                "remove_unused_columns": False,
                "logging_nan_inf_filter": False,
            }
        )

    @python_words()
    def __post_init__(self) -> None:
        refuse_meaningless(self)
        if self.metric_for_best_model is not None and self.greater_is_better is None:
            # transformers takes every metric but "loss" for better when greater
            self.greater_is_better = _greater_is_better(self.metric_for_best_model)
        _read_numbers(self)
        try:
            super().__post_init__()
        except (ValueError, TypeError, OSError) as error:
            raise UserError(
                f"FCSDConfig: transformers refuses it: {one_line(error)}"
            ) from error
        for name in ("model_init_kwargs", "teacher_model_init_kwargs"):
            check_kind(
                f"FCSDConfig: {name}", getattr(self, name), Mapping | None, "a dict"
            )
        # From here on the values are checked by the rules of a recipe.
        self.sections()
        self._check_schedule()
        refuse_conflicts(self)
        self.connectivity()

    def _check_schedule(self) -> None:
        """Check the learning rate's way by the rules of a recipe, and complete the
        settings of schedules that have a record there.
        """
        # With epochs the number of steps depends on the data, which are not read yet.
        max_steps = max(self.max_steps, 0)
        raw: dict[str, Any] = {
            "max_steps": max_steps,
            "warmup_steps": self.get_warmup_steps(max_steps),
        }
        schedule = getattr(self.lr_scheduler_type, "value", self.lr_scheduler_type)
        if schedule in ("step", "warmup_stable_decay"):
            raw |= {
                "lr_scheduler_type": str(schedule),
                "lr_scheduler_kwargs": self.lr_scheduler_kwargs,
            }
        settings = validate(ScheduleConfig, raw, "FCSDConfig").lr_scheduler_kwargs
        if settings is not None:
            self.lr_scheduler_kwargs = settings

    def sections(self) -> Sections:
        """Return the arguments as the sections of a recipe that the trainer reads."""
        # An unset argument is None or False (`_objective_argument`). It is left out, so
        # that a key that the chosen objective does not have is only refused when set.
        terms = {
            key: value
            for key in _OBJECTIVE_KEYS
            if (value := getattr(self, key)) is not None and value is not False
        }
        raw = {
            "objective": {"name": self.objective, **terms},
            "safety": self.safety or {},
        }
        for name, section in (("train", UpdateConfig), ("data", RowsConfig)):
            raw[name] = {key: getattr(self, key) for key in section.model_fields}
        return validate(Sections, raw, "FCSDConfig")

    def connectivity(self) -> Connectivity | None:
        """Return the connectivity to give a model; None where `layers` is not set."""
        return connectivity_of(self.layers, self.attention, self.mlp)  # type: ignore[arg-type]

    def model_config(self, path: str, *, teacher: bool = False) -> ModelConfig:
        name = "teacher_model_init_kwargs" if teacher else "model_init_kwargs"
        values = {
            "path": path,
            "trust_remote_code": self.trust_remote_code,
            **(getattr(self, name) or {}),
        }
        # transformers takes torch.float32 as well as "float32"; a recipe has the name.
        if isinstance(dtype := values.get("dtype"), torch.dtype):
            values["dtype"] = str(dtype).removeprefix("torch.")
        return validate(ModelConfig, values, f"FCSDConfig: {name}")
