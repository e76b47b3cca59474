"""Translate for users of the Python API: names of other libraries to fcsd's arguments,
and keys of a recipe in errors to arguments.
"""

import contextlib
import functools
import inspect
import re
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from fcsd.base.errors import UserError
from fcsd.base.strict import GUESSED_NAMES, Strict, did_you_mean
from fcsd.data.config import DataConfig
from fcsd.model.connectivity.spec import ConnectivityConfig
from fcsd.training.config import TrainConfig
from fcsd.training.losses.objectives import OBJECTIVES

_RESPONSE = "`FCSDConfig(loss_on='response')`, the default"

OTHER_NAMES = {
    # TRL: SFTConfig, GKDConfig and their trainers
    "assistant_only_loss": _RESPONSE,
    "completion_only_loss": _RESPONSE,
    "dataset_text_field": "`FCSDConfig(columns={'text': NAME})`",
    "max_seq_length": "`FCSDConfig(max_length=…)`",
    "formatting_func": "not supported: map the data set",
    "data_collator": "not supported: fcsd packs and collates rows itself",
    "tokenizer": "`FCSDTrainer(processing_class=…)`",
    "teacher_model": "`FCSDTrainer(teacher=…)`, a model or path",
    "beta": "`FCSDConfig(objective='jsd', jsd_beta=…)`",
    "lmbda": "`FCSDConfig(own_text=…)`, the share of rows",
    "seq_kd": "not supported: give text of the teacher as `train_dataset`",
    "max_new_tokens": "`FCSDConfig(own_text_tokens=…)`",
    # transformers
    "logging_dir": "the environment variable `TENSORBOARD_LOGGING_DIR`",
    "no_cuda": "`FCSDConfig(use_cpu=True)`",
    "overwrite_output_dir": "not supported: give a new `output_dir`",
    "save_safetensors": "not supported: weights are always saved as safetensors",
    "group_by_length": "not supported: all rows have the same length",
    # axolotl
    "base_model": "`FCSDTrainer(model=…)`, a model or path",
    "sequence_len": "`FCSDConfig(max_length=…)`",
    "micro_batch_size": "`FCSDConfig(per_device_train_batch_size=…)`",
}
"""The arguments of TRL, transformers and axolotl that people type most and that have
another name here: name -> its counterpart, as in the table of docs/python.md.
"""

_SECTIONS: dict[str, list[type[Strict]]] = {
    "train": [TrainConfig],
    "data": [DataConfig],
    "connectivity": [ConnectivityConfig],
    "objective": list(OBJECTIVES.values()),
}


def _keys_of(records: Sequence[type[Strict]]) -> str:
    """Return a pattern of the keys of some records, each once."""
    keys = dict.fromkeys(key for record in records for key in record.model_fields)
    return "|".join(keys)


_KEYS = "|".join(
    rf"{name}\.(?:{_keys_of(records)})" for name, records in _SECTIONS.items()
)
# Keys of a recipe whose argument is named differently.
_ARGUMENTS = {
    "objective.name": "objective",
    "data.train": "train_dataset",
    "data.heldout": "eval_dataset",
    "train.gradient_checkpointing": "activation_checkpointing",
}
_PHRASES = {
    "early_stopping.metric: heldout_kl": "eval_dataset: eval_kl",
    "`columns: {text: …}`": "columns={'text': …}",
    "check lora.target_modules and lora.target_parameters": "check its target_modules",
    "lora.target_modules: ": "peft_config: target_modules: ",
    "lora: peft": "peft_config: peft",
    ", or leave the section out": ", or leave it out",
    "set loss_on: all": "set loss_on='all'",
    "set on_bad_row: skip": "set on_bad_row='skip'",
    "Input should be": "must be",  # pydantic's
}

Class = TypeVar("Class", bound=type)


@contextlib.contextmanager
def python_words() -> Iterator[None]:
    """Replace keys of a recipe in the text of an error by the names of arguments of
    `FCSDConfig` and `FCSDTrainer`.
    """
    try:
        yield
    except UserError as error:
        # A longer path (a key below this one, or a file name) is no argument: left
        # alone.
        text = re.sub(rf"\b({_KEYS})\b(: true|: false)?(?![./])", _argument, str(error))
        for phrase, replacement in _PHRASES.items():
            text = text.replace(phrase, replacement)
        error.args = (text,)
        raise


def _argument(match: re.Match[str]) -> str:
    value = (match[2] or "").replace(": ", "=").title()
    return _ARGUMENTS.get(match[1], match[1].partition(".")[2]) + value


# Class -> the arguments of its constructor, of each class that `with_known_names` saw.
_PARAMETERS: dict[str, list[str]] = {}


def with_known_names(cls: Class) -> Class:
    """Make the constructor of a class name an unknown argument in one line, with its
    counterpart here.
    """
    construct: Any = cls.__init__  # type: ignore[misc]
    parameters = list(inspect.signature(construct).parameters)
    _PARAMETERS[cls.__name__] = parameters

    @functools.wraps(construct)
    def construct_or_say(self: Any, *args: Any, **arguments: Any) -> None:
        for name in arguments:
            if name not in parameters and name in OTHER_NAMES:
                counterpart = OTHER_NAMES[name]
                if not counterpart.startswith("not supported"):
                    counterpart = f"use {counterpart}"
                raise UserError(f"{cls.__name__}: {name}: {counterpart}")
            if name not in parameters:
                raise UserError(
                    f"{cls.__name__}: {name}: no such argument{_advice(name, parameters)}"
                )
        try:
            inspect.signature(construct).bind(self, *args, **arguments)
        # a required argument is missing, or there are too many positional ones
        except TypeError as error:
            raise UserError(
                f"{cls.__name__}: {error}; pass arguments by name"
            ) from None
        construct(self, *args, **arguments)

    cls.__init__ = construct_or_say  # type: ignore[misc]
    return cls


def _advice(name: str, parameters: list[str]) -> str:
    """Return what to write for an unknown argument, where that can be told."""
    argument = GUESSED_NAMES.get(name, name)
    for other, known in _PARAMETERS.items():
        if argument in known and argument not in parameters:
            return f"; give `{other}({argument}=…)`"
    near = did_you_mean(argument, parameters)
    return near if "mean" in near else ""
