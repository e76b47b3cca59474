"""Own text in an evaluation (`fcsd.evaluation.steps`). What reads prompts and measures
texts is imported where it is used: evaluations of other tasks need none of it.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fcsd.base.text import Work
from fcsd.evaluation.backend import Backend, InMemoryBackend
from fcsd.evaluation.config import OwnTextTaskConfig, SuiteConfig
from fcsd.evaluation.own_text.text import facts_of
from fcsd.evaluation.scores import Row
from fcsd.evaluation.steps import Answered, Context

if TYPE_CHECKING:
    from fcsd.evaluation.own_text.prompts import Prompt
    from fcsd.evaluation.served import ServedBackend


def prepare(
    row: OwnTextTaskConfig,
    suite: SuiteConfig,
    data_root: Path | None,
    tokenizer: Any,
    limit: int | None,
) -> tuple[list["Prompt"], Row]:
    """Read the prompts."""
    from fcsd.evaluation.own_text.prompts import load_prompts

    found = load_prompts(row, data_root, tokenizer)
    return found[:limit], {"num_items_total": len(found), "higher_is_better": False}


def work(row: OwnTextTaskConfig, items: Sequence["Prompt"], context: Context) -> Work:
    """Count the tokens that the texts may have: a sample and a greedy text of each
    prompt, and as many of an original whose texts are not known.
    """
    num_texts = (2 if row.temperature else 1) * len(items)
    original = context.original
    if original is not None and not (original.itself or original.known):
        num_texts *= 2
    return Work(len(items), "tokens", num_texts * row.max_new_tokens)


def check_server(
    row: OwnTextTaskConfig,
    items: Sequence["Prompt"],
    served: "ServedBackend",
    context: Context,
) -> None:
    """Refuse a server that gives no token ids or log-probabilities, or has too short a
    context.
    """
    server = served.server
    needed = row.max_new_tokens + max(len(item.tokens) for item in items)
    server.refuse(
        *(
            (
                not getattr(server, name),
                f"returns no {name}, which task {row.task} needs; vLLM returns them",
            )
            for name in ("token_ids", "prompt_logprobs")
        ),
        # One more, because a request for log-probabilities also writes a token.
        server.context_rule(row.task, needed + 1, "text"),
    )


def check_positions(
    row: OwnTextTaskConfig, items: Sequence["Prompt"], config: Any, context: Context
) -> None:
    """Refuse prompts whose texts do not fit."""
    from fcsd.evaluation.own_text.measure import check_positions

    check_positions(row, items, config)


def run(
    row: OwnTextTaskConfig,
    items: Sequence["Prompt"],
    facts: Row,
    backend: Backend,
    context: Context,
) -> Answered:
    """Let the model write, and compare it with its original along its samples."""
    from fcsd.evaluation.own_text.measure import own_text

    assert context.original is not None
    samples = own_text(backend, row, items, context.original, facts, context.in_memory)
    return samples, facts_of(samples, served=not isinstance(backend, InMemoryBackend))


def texts(
    row: OwnTextTaskConfig, suite: SuiteConfig, data_root: Path | None, tokenizer: Any
) -> Iterator[tuple[str, Any]]:
    """Yield nothing: prompts have no answers that a training could have seen."""
    yield from ()


def prompts(
    row: OwnTextTaskConfig,
    items: Sequence["Prompt"],
    tokenizer: Any,
    limit: int | None,
) -> list[list[int]]:
    """Return the prompts' tokens."""
    return [list(prompt.tokens) for prompt in items]
