"""lm-eval's tasks in an evaluation (`fcsd.evaluation.steps`): scored by likelihood, or
by the answer that the model writes.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fcsd.base.errors import errors_begin
from fcsd.base.text import Work
from fcsd.data.rendering import chat_writer
from fcsd.evaluation.backend import Backend
from fcsd.evaluation.config import KINDS, LMEvalTaskConfig, SuiteConfig
from fcsd.evaluation.lm_eval import tasks
from fcsd.evaluation.lm_eval.tasks import Tasks
from fcsd.evaluation.scores import Row
from fcsd.evaluation.steps import Answered, Context
from fcsd.model.load import num_positions

if TYPE_CHECKING:
    from fcsd.evaluation.served import ServedBackend


def prepare(
    row: LMEvalTaskConfig,
    suite: SuiteConfig,
    data_root: Path | None,
    tokenizer: Any,
    limit: int | None,
) -> tuple[Tasks, Row]:
    """Load lm-eval's task, or the members of its group."""
    items = tasks.load_task(row, suite, data_root, tokenizer)
    return items, {
        "num_items_total": tasks.num_items(items, None),
        "higher_is_better": tasks.higher_is_better(items, row),
        # of a group, as its first task
        "generation": tasks.generation(next(iter(items.values()))),
    }


def work(row: LMEvalTaskConfig, items: Tasks, context: Context) -> Work:
    """Count the characters that are read, or the tokens that may be written."""
    return tasks.work(row, items, context.limit(row))


def check_server(
    row: LMEvalTaskConfig, items: Tasks, served: "ServedBackend", context: Context
) -> None:
    """Refuse a server that gives no log-probabilities, or has too short a context."""
    served.server.refuse(
        (
            not (KINDS[row.kind].writes or served.server.prompt_logprobs),
            f"returns no prompt_logprobs, which task {row.task} needs because it is"
            " scored by likelihood; vLLM returns them",
        )
    )
    with errors_begin(f"task {row.task}: "):
        served.language_model.look(row, items, context.limit(row))


def check_positions(
    row: LMEvalTaskConfig, items: Tasks, config: Any, context: Context
) -> None:
    """Refuse answers that leave no room for a prompt; a longer prompt is cut."""
    positions = num_positions(config)
    if positions is None or not KINDS[row.kind].writes:
        return
    from fcsd.evaluation.lm_eval.model import check_room

    with errors_begin(f"task {row.task}: "):
        for task in items.values():
            check_room(tasks.generation(task)["max_new_tokens"], positions)


def run(
    row: LMEvalTaskConfig,
    items: Tasks,
    facts: Row,
    backend: Backend,
    context: Context,
) -> Answered:
    """Let lm-eval ask the model."""
    model = backend.language_model
    samples = tasks.run_task(model, row, items, context.limit(row))
    if not KINDS[row.kind].writes:
        return samples, {"thoughts_closed_by": model.closed} if model.closed else {}
    return samples, {
        "answers_at_limit": len(model.at_limit),
        "answers_with_thoughts": len(model.unasked),
    }


def texts(
    row: LMEvalTaskConfig, suite: SuiteConfig, data_root: Path | None, tokenizer: Any
) -> Iterator[tuple[str, Any]]:
    """Yield all documents."""
    for name, task in tasks.load_task(row, suite, data_root, tokenizer).items():
        for index, document in enumerate(task.eval_docs):
            yield str(index) if name == row.task else f"{name}/{index}", document


def prompts(
    row: LMEvalTaskConfig, items: Tasks, tokenizer: Any, limit: int | None
) -> list[list[int]]:
    """Tokenize the documents' prompts as lm-eval does, without a first token of ours."""
    chat = chat_writer(tokenizer, bool(row.thinking))
    return [
        tokenizer(str(requests[0].args[0]), add_special_tokens=False)["input_ids"]
        for task in items.values()
        for requests in tasks.item_requests(
            task, row, range(tasks.num_items({"": task}, limit)), chat
        )
    ]
