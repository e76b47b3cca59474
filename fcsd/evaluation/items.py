"""The texts of test items, for training data to be compared with; and the prompts of a
suite as tokens.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fcsd.data.decontaminate import Item
from fcsd.data.messages import all_texts
from fcsd.evaluation.config import SuiteConfig, items_limit
from fcsd.evaluation.runner import STEPS


def suite_items(
    suite: SuiteConfig, data_root: Path | None, tokenizer: Any
) -> Iterator[Item]:
    """Collect the items of all tasks of a suite, with every text that their rows hold;
    code without generated tests.
    """
    for row in suite.tasks:
        steps = STEPS[row.kind]
        for item, columns in steps.texts(row, suite, data_root, tokenizer):
            yield Item(row.task, item, tuple(all_texts(columns)))


def suite_prompts(
    suite: SuiteConfig, data_root: Path | None, tokenizer: Any, limit: int | None
) -> list[list[int]]:
    """Tokenize the prompts of all tasks of a suite, one per item, in order; the first
    `limit` items of each, or fewer where a row has a limit of its own.
    """
    prompts = []
    for row in suite.tasks:
        steps, row_limit = STEPS[row.kind], items_limit(row, limit)
        items, _ = steps.prepare(row, suite, data_root, tokenizer, row_limit)
        prompts += steps.prompts(row, items, tokenizer, row_limit)
    return prompts
