"""What a kind of task has to do in an evaluation, and what it is given beside the model
that answers (`KINDS` in `fcsd.evaluation.config` has what holds of it without a model).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fcsd.base.text import Work
from fcsd.evaluation.backend import Backend, Batches, InMemoryBackend
from fcsd.evaluation.code.scorer import CodeScorer
from fcsd.evaluation.config import (
    EvaluationConfig,
    SuiteConfig,
    TaskBase,
    items_limit,
)
from fcsd.evaluation.scores import Row, Sample
from fcsd.parallel.launch import Ranks

if TYPE_CHECKING:
    from fcsd.evaluation.own_text.measure import Original
    from fcsd.evaluation.served import ServedBackend


Answered = tuple[list[Sample], Row]
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

    def limit(self, row: TaskBase) -> int | None:
        """Return the number of first items of a task that are evaluated; None: all."""
        return items_limit(row, self.config.limit)

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


class Steps(Protocol):
    """The steps of a task. row: one of the suite's. items: as `prepare` returns them.

    limit: as `Context.limit`.
    """

    def prepare(
        self,
        row: Any,
        suite: SuiteConfig,
        data_root: Path | None,
        tokenizer: Any,
        limit: int | None,
    ) -> tuple[Any, Row]:
        """Read the items and check them, before a model is loaded; also return the
        facts of the result that are known then: `num_items_total`, `higher_is_better`.
        """

    def work(self, row: Any, items: Any, context: Context) -> Work:
        """Estimate the work that the task asks of the model."""

    def check_server(
        self, row: Any, items: Any, served: "ServedBackend", context: Context
    ) -> None:
        """Refuse a task that a server cannot answer; the server is not asked."""

    def check_positions(
        self, row: Any, items: Any, config: Any, context: Context
    ) -> None:
        """Refuse prompts and answers that do not fit the positions of a model with this
        config.
        """

    def run(
        self,
        row: Any,
        items: Any,
        facts: Row,
        backend: Backend,
        context: Context,
    ) -> Answered:
        """Return the samples, and facts about the answers, on all ranks. facts: those
        that are known before.
        """

    def texts(
        self, row: Any, suite: SuiteConfig, data_root: Path | None, tokenizer: Any
    ) -> Iterator[tuple[str, Any]]:
        """Yield the ids of all items, and what of each a training must not have seen."""

    def prompts(
        self, row: Any, items: Any, tokenizer: Any, limit: int | None
    ) -> list[list[int]]:
        """Return the items' prompts as tokens."""
