"""Settings of a study: one model on text and on tasks."""

from collections.abc import Mapping
from typing import Any, Self

from pydantic import Field

from fcsd.base.strict import FolderPath, Strict, like
from fcsd.data.config import DataConfig, SourceConfig, source_option
from fcsd.evaluation.config import EvaluationConfig
from fcsd.model.config import ModelConfig


class ModelStudy(Strict):
    """A model on text, on tasks of a suite, or on both."""

    model: ModelConfig
    text: SourceConfig | None = None
    text_examples: int = like(DataConfig, "heldout_examples")
    max_length: int = like(DataConfig, "max_length")
    suite: str = like(EvaluationConfig, "suite")
    tasks: list[str] = Field(default_factory=list)
    data_root: FolderPath | None = like(EvaluationConfig, "data_root")
    limit: int | None = like(EvaluationConfig, "limit")

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
