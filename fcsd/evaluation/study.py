"""Settings of a study: one model on text and on tasks."""

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from pydantic import Field

from fcsd.base.errors import UserError
from fcsd.base.strict import FolderPath, Strict, flag_of, like
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

    # Fields that matter only with another option -> that option.
    needed: ClassVar[dict[str, str]] = {
        "text_examples": "text",
        "suite": "task",
        "data_root": "task",
        "limit": "task",
    }

    @classmethod
    def from_options(cls, options: Mapping[str, Any], **extra_fields: Any) -> Self:
        """Build a study from the options of a command: MODEL, --text, --task, and those
        with the names of its fields. Raises UserError for one that has no effect.
        """
        for name, other in cls.needed.items():
            default = cls.model_fields[name].default
            if not options[other] and options[name] not in (None, default):
                raise UserError(
                    f"{flag_of(cls, name)} has no meaning without --{other}; add that"
                    " option, or leave it out"
                )
        model = ModelConfig.from_options(options, path=options["model"])
        text = source_option(options["text"], "--text")
        return super().from_options(
            options, model=model, text=text, tasks=options["task"], **extra_fields
        )
