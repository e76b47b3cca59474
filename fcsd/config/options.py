"""The options of a command as the records that they are called like."""

from collections.abc import Mapping
from typing import Any

from fcsd.config.model import ModelConfig
from fcsd.config.strict import Strict


def options_of(kind: type[Strict], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that are called like a field of `kind`."""
    return {name: options[name] for name in kind.model_fields if name in options}


def model_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a `ModelConfig` reads of the options; `model` is its path."""
    return options_of(ModelConfig, options) | {"path": options["model"]}
