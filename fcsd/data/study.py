"""Schema of what the studies of one model share: the model, and the text and the tasks that it is run on."""

from collections.abc import Mapping
from typing import Any, Self

from pydantic import Field

from fcsd.base.strict import Strict, like, option
from fcsd.data.config import DataConfig, SourceConfig, source_option
from fcsd.model.config import ModelConfig


class ModelStudy(Strict):
    """A model on text, on tasks of a suite, or on both."""

    model: ModelConfig
    text: SourceConfig | None = None
    text_examples: int = like(DataConfig, "heldout_examples")
    max_length: int = like(DataConfig, "max_length")
    suite: str = option("tiny", "name in eval/suites, or a path to a suite file")
    tasks: list[str] = Field(default_factory=list)
    data_root: str | None = option(None, "folder in hub layout (owner/name/…); without it the Hub is used")
    limit: int | None = option(
        None, "the first items of every task only, for a quick look; every table says so", gt=0
    )

    @classmethod
    def from_options(cls, options: Mapping[str, Any], **own: Any) -> Self:
        """Build a study from the options of a command: MODEL, --text, --task, and those called like its fields."""
        model = ModelConfig.from_options(options, path=options["model"])
        text = source_option(options["text"], "--text")
        return super().from_options(options, model=model, text=text, tasks=options["task"], **own)
