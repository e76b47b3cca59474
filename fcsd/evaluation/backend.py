"""What answers the questions of an evaluation: a model in memory, or one behind a server (`fcsd.evaluation.served`).

Not covered: which questions there are, and what an answer is worth.
"""

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from fcsd.evaluation.batch import BatchSize, BatchSizer
from fcsd.evaluation.code.generate import generate_completions
from fcsd.evaluation.code.problems import Problem
from fcsd.evaluation.config import CodeTaskConfig
from fcsd.evaluation.store import Journal
from fcsd.model.preserve import preserved, quiet
from fcsd.parallel.ranks import Ranks, input_device

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class Backend(Protocol):
    """A model that can be asked, wherever it is computed."""

    def asking(self) -> contextlib.AbstractContextManager[None]:
        """Give the block in which all questions are asked; afterwards the model is as it was before."""

    def begin(self, journal: Journal) -> None:
        """Start a task, whose single answers may be kept in `journal`."""

    @property
    def language_model(self) -> Any:
        """The model that lm-eval asks, one for all tasks, with `think` and `cut`."""

    def complete(self, problems: Sequence[Problem], row: CodeTaskConfig) -> dict[str, list[str]]:
        """Return `row.num_samples` completions of every problem: task_id -> texts up to the first stop string."""

    def settings(self) -> dict[str, Any]:
        """Return what a result says of it."""


@dataclass(frozen=True)
class Batches:
    """What is done before a batch is asked, given its number in the task; and what a result says of that."""

    begin: Callable[[int], None] | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)


class InMemoryBackend:
    """A model in memory, whole on every rank or sharded over them."""

    def __init__(
        self,
        model: "PreTrainedModel",
        tokenizer: "PreTrainedTokenizerBase",
        batch: BatchSize,
        ranks: Ranks,
        batches: Batches | None = None,
        *,
        progress: bool = True,
    ):
        self.model, self.tokenizer, self.ranks, self.progress = model, tokenizer, ranks, progress
        self.batch, self.batches = BatchSizer(batch, model), batches or Batches()

    @contextlib.contextmanager
    def asking(self) -> Any:
        """Keep the model's mode, settings and the random generators."""
        with preserved(self.model, self.tokenizer):
            self.model.eval()
            yield

    def begin(self, journal: Journal) -> None:
        """Do nothing: batches are answered together."""

    @functools.cached_property
    def language_model(self) -> Any:
        """lm-eval's model."""
        with quiet():
            from fcsd.evaluation.lm_eval.model import InMemory

            return InMemory(self)

    def complete(self, problems: Sequence[Problem], row: CodeTaskConfig) -> dict[str, list[str]]:
        """Generate on all ranks."""
        return generate_completions(
            self.model,
            self.tokenizer,
            problems,
            task=row,
            batch_size=self.batch,
            progress=self.progress,
            ranks=self.ranks,
            begin_batch=self.batches.begin,
        )

    def settings(self) -> dict[str, Any]:
        """Return precision and device."""
        return {
            **self.batches.facts,
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "device": input_device(self.model).type,
        }
