"""What the tasks of an evaluation are run with, beside the model that answers."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fcsd.evaluation.backend import Batches, InMemoryBackend
from fcsd.evaluation.code.scorer import CodeScorer
from fcsd.evaluation.config import EvaluationConfig
from fcsd.parallel.ranks import Ranks

if TYPE_CHECKING:
    from fcsd.evaluation.own_text.measure import Original

Answered = tuple[list[dict[str, Any]], dict[str, Any]]
"""The samples of a task, and facts about its answers."""


@dataclass(frozen=True)
class Context:
    """What the tasks of an evaluation are run with.

    ranks: those that share the work. scorer: of code tasks, on the first rank alone.
    original: the model that tasks of own text compare with.
    """

    tokenizer: PreTrainedTokenizerBase
    config: EvaluationConfig
    ranks: Ranks
    progress: bool
    scorer: CodeScorer | None = None
    original: "Original | None" = None

    def in_memory(
        self, model: PreTrainedModel, batches: Batches | None = None
    ) -> InMemoryBackend:
        """Return the backend of a model in memory."""
        return InMemoryBackend(
            model,
            self.tokenizer,
            self.config.batch_size,
            self.ranks,
            batches,
            progress=self.progress,
        )
