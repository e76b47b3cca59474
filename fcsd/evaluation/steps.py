"""What an evaluation does with a task, by its kind: one table of modules with the same
functions (`fcsd.evaluation.kinds` has what holds of a kind without a model).
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from fcsd.evaluation.backend import Backend, Served
from fcsd.evaluation.code import steps as code
from fcsd.evaluation.config import SuiteConfig
from fcsd.evaluation.context import Answered, Context
from fcsd.evaluation.lm_eval import steps as lm_eval
from fcsd.evaluation.own_text import steps as own_text
from fcsd.evaluation.progress import Work


class Steps(Protocol):
    """The steps of a task. row: one of the suite's. items: as `prepare` returns them.

    limit: the number of first items that are evaluated; None: all.
    """

    def prepare(
        self,
        row: Any,
        suite: SuiteConfig,
        data_root: Path | None,
        tokenizer: Any,
        limit: int | None,
    ) -> tuple[Any, dict[str, Any]]:
        """Read the items and check them, before a model is loaded; also return the
        facts of the result that are known then: `num_items_total`, `higher_is_better`.
        """

    def work(self, row: Any, items: Any, limit: int | None, context: Context) -> Work:
        """Estimate the work that the task asks of the model."""

    def check_server(
        self, row: Any, items: Any, limit: int | None, served: Served
    ) -> None:
        """Refuse a task that a server cannot answer; the server is not asked."""

    def run(
        self,
        row: Any,
        items: Any,
        facts: Mapping[str, Any],
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
        self,
        row: Any,
        suite: SuiteConfig,
        data_root: Path | None,
        tokenizer: Any,
        limit: int | None,
    ) -> list[list[int]]:
        """Return the items' prompts as tokens."""


STEPS: dict[str, Steps] = {
    "likelihood": lm_eval,
    "generation": lm_eval,
    "code": code,
    "own_text": own_text,
}
