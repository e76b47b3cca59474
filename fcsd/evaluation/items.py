"""The texts of test items, for training data to be compared with; and the prompts of a
suite as tokens.
"""

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fcsd.base.errors import UserError
from fcsd.data.config import SourceConfig
from fcsd.data.decontaminate import Item, all_texts
from fcsd.data.sources import load_source
from fcsd.evaluation.code.generate import prompts
from fcsd.evaluation.code.problems import load_problems
from fcsd.evaluation.config import (
    CodeTaskConfig,
    LMEvalTaskConfig,
    SuiteConfig,
    items_limit,
)
from fcsd.evaluation.lm_eval.tasks import item_requests, load_task, num_items
from fcsd.evaluation.own_text.prompts import load_prompts
from fcsd.evaluation.suites import chat_text, dataset_location, hub_advice

_GENERATED = ("test",)


def suite_items(
    suite: SuiteConfig, data_root: Path | None, tokenizer: Any
) -> Iterator[Item]:
    """Collect the items of all tasks of a suite, with every text that their rows hold;
    code without generated tests.
    """
    for row in suite.tasks:
        # Prompts have no answers that a training could have seen.
        if row.kind == "own_text":
            continue
        yield from (
            _code_items(row, data_root)
            if row.kind == "code"
            else _lm_eval_items(row, suite, data_root, tokenizer)
        )


def _code_items(row: CodeTaskConfig, data_root: Path | None) -> Iterator[Item]:
    for index, problem in enumerate(_load(row, data_root)):
        # Generated inputs and outputs, megabytes of numbers; a reader sees the
        # other columns.
        visible_columns = {
            name: value for name, value in problem.items() if name not in _GENERATED
        }
        item = problem.get("task_id", index)
        yield Item(row.task, str(item), tuple(all_texts(visible_columns)))


def _lm_eval_items(
    row: LMEvalTaskConfig, suite: SuiteConfig, data_root: Path | None, tokenizer: Any
) -> Iterator[Item]:
    for name, task in load_task(row, suite, data_root, tokenizer).items():
        for index, document in enumerate(task.eval_docs):
            item = str(index) if name == row.task else f"{name}/{index}"
            yield Item(row.task, item, tuple(all_texts(document)))


def _load(row: CodeTaskConfig, data_root: Path | None) -> Any:
    """Read a split; the revision is one of the Hub, and holds for no folder."""
    location = dataset_location(row, data_root)
    options: dict[str, Any] = {
        "path": location,
        "name": row.dataset_name,
        "split": row.split,
        "revision": None if Path(location).exists() else row.revision,
        "columns": {},
    }
    # Not validated: a test set may have any columns, but a training source's columns
    # make an example.
    try:
        return load_source(SourceConfig.model_construct(**options))
    except UserError as error:
        advice = "" if Path(location).exists() else hub_advice(row, data_root)
        raise UserError(f"task {row.task}: {error}{advice}") from error


def suite_prompts(
    suite: SuiteConfig, data_root: Path | None, tokenizer: Any, limit: int | None
) -> list[list[int]]:
    """Tokenize the prompts of all tasks of a suite, one per item, in order; the first
    `limit` items of each, or fewer where a row has a limit of its own.
    """
    token_rows: list[list[int]] = []
    for row in suite.tasks:
        row_limit = items_limit(row, limit)
        if row.kind == "own_text":
            own_prompts = load_prompts(row, data_root, tokenizer)[:row_limit]
            token_rows += [list(prompt.tokens) for prompt in own_prompts]
            continue
        if row.kind == "code":
            texts = prompts(tokenizer, load_problems(row, data_root)[:row_limit], row)
        else:
            chat = functools.partial(chat_text, tokenizer, bool(row.thinking))
            texts = [
                str(requests[0].args[0])
                for task in load_task(row, suite, data_root, tokenizer).values()
                for requests in item_requests(
                    task, row, range(num_items({"": task}, row_limit)), chat
                )
            ]
        # As lm-eval does, without a first token of ours; a chat template writes its
        # own.
        special = row.kind == "code" and not row.chat_template
        token_rows += [
            tokenizer(text, add_special_tokens=special)["input_ids"] for text in texts
        ]
    return token_rows
