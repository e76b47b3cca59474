"""Schema of training data, held-out text, and test items that must not be in them."""

from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from fcsd.base.files import parse_yaml
from fcsd.base.strict import Rule, Strict, validate
from fcsd.data.columns import Column, check_meanings

_MESSAGES: dict[Column, str] = {"messages": "messages"}


class RowsConfig(Strict):
    """Keys of a recipe's `data` section; `fcsd.FCSDConfig` also has them."""

    max_length: int = Field(4096, description="tokens in one row of the text", gt=1)
    packing: bool = Field(
        True,
        description="several examples share a row; they do not attend to each other",
    )
    on_bad_row: Literal["error", "skip"] = Field(
        "error",
        description=(
            "for an example that cannot be tokenized: error ends the run, skip leaves it"
            " out, up to 1 %, and ten in any case"
        ),
    )
    loss_on: Literal["response", "all"] = Field(
        "response", description="tokens that the loss is computed on: response or all"
    )


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
    def _check_columns(self) -> Self:
        if self.columns is not None:
            check_meanings(self.columns)
        return self


class SourceConfig(TextConfig):
    """A data set in a mixture of several."""

    weight: float = Field(1.0, gt=0)  # share in the mixture
    max_examples: int | None = Field(None, gt=0)


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


class WrittenConfig(Strict):
    """The original continues the prompts of a source, once; its text takes the place of
    the source's answers.
    """

    max_new_tokens: int = Field(512, gt=0)
    temperature: float = Field(1.0, ge=0, allow_inf_nan=False)  # 0: the likeliest token
    # of a document: its beginning is the prompt
    prompt_tokens: int = Field(32, gt=0)
    batch_size: int = Field(32, gt=0)
    server: str | None = None  # the original's address; null: it is in memory


class TrainingSourceConfig(SourceConfig):
    """A source of a training, whose text may be the original's own."""

    written: WrittenConfig | None = None

    rules: ClassVar[tuple[Rule, ...]] = (
        (
            lambda source: source.written is not None and source.max_examples is None,
            "written: needs max_examples, the number of prompts that the original"
            " continues",
        ),
    )


class DecontaminateConfig(Strict):
    """Test items: training examples that share `ngram` words in a row with one are left
    out and listed.
    """

    suite: str  # name in eval/suites, or a path: the items of its tasks
    ngram: int = Field(13, ge=5)


class TrainingDataConfig(RowsConfig):
    """Training text."""

    train: list[TrainingSourceConfig] = Field(min_length=1)
    decontaminate: DecontaminateConfig | None = None


class DataConfig(TrainingDataConfig):
    """Training text, and held-out text on which KL to the original is reported."""

    heldout: TextConfig | None = None
    heldout_examples: int = Field(
        256, description="number of examples of the text", gt=0
    )
