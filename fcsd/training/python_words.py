"""Translate for users of the Python API: keys of a recipe in errors to arguments."""

import contextlib
import re
from collections.abc import Iterator, Sequence

from fcsd.base.errors import UserError
from fcsd.base.strict import Strict
from fcsd.data.config import DataConfig
from fcsd.model.config import ConnectivityConfig
from fcsd.training.config import TrainConfig
from fcsd.training.losses.objectives import OBJECTIVES

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
    "set loss_on: all": "set loss_on='all'",
    "Input should be": "must be",  # pydantic's
}


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
