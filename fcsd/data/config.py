"""Schema of training data, held-out text, and test items that must not be in them."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import Field, model_validator

from fcsd.base.strict import Strict, like, option, parse_yaml, validate
from fcsd.data.columns import Column, check_meanings
from fcsd.data.rows_config import RowsConfig
from fcsd.model.config import ModelConfig

_MESSAGES: dict[Column, str] = {"messages": "messages"}


class TextConfig(Strict):
    """One data set: a hub id, a local folder in hub layout, or a .jsonl, .json or .parquet file."""

    path: str
    name: str | None = None  # configuration of the data set
    split: str = "train"
    revision: str | None = None
    columns: dict[Column, str] | None = Field(_MESSAGES)  # null: inferred

    elsewhere: ClassVar[dict[str, str]] = {
        "streaming": (
            "fcsd tokenizes every source once, as far as the longest training needs;"
            " leave the key out"
        ),
    }

    @model_validator(mode="after")
    def _columns_make_an_example(self) -> Self:
        if self.columns is not None:
            check_meanings(self.columns)
        return self


class SourceConfig(TextConfig):
    """A data set in a mixture of several."""

    weight: float = Field(1.0, gt=0)  # share in the mixture
    max_examples: int | None = Field(None, gt=0)


def making_of(*locations: str | None) -> str:
    """Return a hint at the command that makes the data of recipes/tiny, if the first of
    `locations` is one of them; "" for other data.

    locations: the path or the id of a data set, and folders that may hold it.
    """
    folders = [
        part[0]
        for location in locations
        if (part := re.match(r".*?tiny-data(?=/|$)", location or ""))
    ]
    # A data set of another name may be looked for in that folder, too; the command does
    # not make it.
    data_set = locations[0] or ""
    if not (data_set.startswith("fcsd/tiny-") or "tiny-data" in Path(data_set).parts):
        return ""
    return f"; `fcsd tiny-data {folders[0] if folders else 'OUT'}` makes it"


def source_option(text: str | None, option: str) -> dict[str, Any] | None:
    """Read an option that names a text: a path, a hub id, or YAML of the form of a
    recipe's `data.heldout`.

    Without `columns`, their meaning is inferred from their names.
    """
    if text is None:
        return None
    source = (
        # A brace begins YAML; anything else is a path or a hub id.
        parse_yaml(text, option) if text.lstrip().startswith("{") else {"path": text}
    )
    return validate(SourceConfig, {"columns": None} | source, option).model_dump()


class DecontaminateConfig(Strict):
    """Test items: training examples that share `ngram` words in a row with one are left
    out and listed.
    """

    suite: str  # name in eval/suites, or a path: the items of its tasks
    ngram: int = Field(13, ge=5)


class TrainingDataConfig(RowsConfig):
    """Training text."""

    train: list[SourceConfig] = Field(min_length=1)
    decontaminate: DecontaminateConfig | None = None


class DataConfig(TrainingDataConfig):
    """Training text, and held-out text on which KL to the original is reported."""

    heldout: TextConfig | None = None
    heldout_examples: int = option(256, "number of examples of the text", gt=0)


class ModelStudy(Strict):
    """A model on text, on tasks of a suite, or on both."""

    model: ModelConfig
    text: SourceConfig | None = None
    text_examples: int = like(DataConfig, "heldout_examples")
    max_length: int = like(DataConfig, "max_length")
    suite: str = option(
        "tiny", "name of a shipped suite (eval/suites), or a path to a suite file"
    )
    tasks: list[str] = Field(default_factory=list)
    data_root: str | None = option(
        None, "folder in hub layout (owner/name/…) (default: the Hub)"
    )
    limit: int | None = option(
        None,
        "evaluate only the first items of every task, for a quick look; every table"
        " marks it",
        gt=0,
    )

    @classmethod
    def from_options(cls, options: Mapping[str, Any], **extra_fields: Any) -> Self:
        """Build a study from the options of a command: MODEL, --text, --task, and those
        with the names of its fields.
        """
        model = ModelConfig.from_options(options, path=options["model"])
        text = source_option(options["text"], "--text")
        return super().from_options(
            options, model=model, text=text, tasks=options["task"], **extra_fields
        )
