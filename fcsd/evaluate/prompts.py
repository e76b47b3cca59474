"""The prompts of a suite's tasks as tokens, one an item: text that a model really is asked.

Not covered: the choices and answers behind them.
"""

import functools
from pathlib import Path
from typing import Any

from fcsd.config.suite import SuiteConfig
from fcsd.evaluate.code.generate import prompts
from fcsd.evaluate.code.problems import load_problems
from fcsd.evaluate.lm_eval.tasks import item_requests, load_task, num_items


def suite_prompts(
    suite: SuiteConfig, data_root: Path | None, tokenizer: Any, limit: int | None
) -> list[list[int]]:
    """Tokenize the prompts of all tasks of a suite, in order; the first `limit` items of each.

    Raises:
        UserError: a task, data set or chat template that does not exist.
    """
    found: list[list[int]] = []
    for row in suite.tasks:
        if row.kind == "code":
            texts = prompts(tokenizer, load_problems(row, data_root)[:limit], row)
        else:
            chat = functools.partial(_chat, tokenizer, bool(row.thinking))
            texts = [
                str(requests[0].args[0])
                for task in load_task(row, suite, data_root, tokenizer).values()
                for requests in item_requests(task, row, range(num_items({"": task}, limit)), chat)
            ]
        # As lm-eval does, without a first token of ours; a chat template writes its own.
        special = row.kind == "code" and not row.chat_template
        found += [tokenizer(text, add_special_tokens=special)["input_ids"] for text in texts]
    return found


def _chat(
    tokenizer: Any, thinking: bool, turns: list[dict[str, str]], add_generation_prompt: bool = True
) -> str:
    """Write turns as lm-eval's own model in memory does; without a generation prompt the last turn is begun only."""
    options = {
        "add_generation_prompt": add_generation_prompt,
        "continue_final_message": not add_generation_prompt,
    }
    return str(tokenizer.apply_chat_template(turns, tokenize=False, enable_thinking=thinking, **options))
