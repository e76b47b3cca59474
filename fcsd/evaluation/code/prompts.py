"""Build the prompts of code tasks, and the questions that put them to a model."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fcsd.base.errors import UserError
from fcsd.data.thoughts import END_OF_PROMPT
from fcsd.evaluation.answers import Question, Reader
from fcsd.evaluation.backend import Backend
from fcsd.evaluation.code.problems import Problem
from fcsd.evaluation.config import CodeTaskConfig
from fcsd.evaluation.template import chat_writer, require_chat_template
from fcsd.model.positions import num_positions
from fcsd.training.generation import SAMPLING_SEED, Decoding, Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def prompts(
    tokenizer: "PreTrainedTokenizerBase",
    problems: Sequence[Problem],
    task: CodeTaskConfig,
) -> list[str]:
    """Write the prompts: as one user turn through the chat template, or as plain text
    that ends with a line break.
    """
    template = task.prompt_template
    if not task.chat_template:
        return [problem.text(template).strip() + "\n" for problem in problems]
    if task.system_prompt:
        first = [{"role": "system", "content": task.system_prompt}]
    else:
        first = []
    turns: Any = [
        [*first, {"role": "user", "content": problem.text(template)}]
        for problem in problems
    ]
    require_chat_template(tokenizer, task)
    # Unless told otherwise, hybrids spend their tokens on thoughts.
    return [*map(chat_writer(tokenizer, bool(task.thinking)), turns)]


def prompt_tokens(
    config: Any,
    tokenizer: "PreTrainedTokenizerBase",
    texts: Sequence[str],
    task: CodeTaskConfig,
) -> list[list[int]]:
    """Tokenize prompts, and refuse one that leaves no room for its completion."""
    # A chat template writes its own special tokens.
    tokens = [
        tokenizer(text, add_special_tokens=not task.chat_template)["input_ids"]
        for text in texts
    ]
    longest = max(map(len, tokens), default=0)
    positions = num_positions(config)
    if positions is not None and longest + task.max_new_tokens > positions:
        raise UserError(
            f"task {task.task}: a prompt of {longest} tokens and max_new_tokens"
            f" {task.max_new_tokens} do not fit the model's {positions} positions;"
            " lower max_new_tokens"
        )
    return tokens


def questions_of(
    backend: Backend, texts: Sequence[str], task: CodeTaskConfig
) -> list[Question]:
    """Return `num_samples` questions for each prompt, in their order. Their answers
    are what follows the thoughts, up to the first stop string.

    Temperature 0 is greedy. The n-th sample of all is drawn with the n-th seed, so
    neither the batch size nor the number of ranks changes it.
    """
    decoding = Decoding(
        Sampling(task.temperature, task.top_p) if task.temperature else None
    )
    thoughts, asked = backend.thoughts, list[Question]()
    for prompt in prompt_tokens(backend.config, backend.tokenizer, texts, task):
        reader = Reader(
            thoughts,
            str(thoughts.tokenizer.decode(prompt[-END_OF_PROMPT:])),
            task.stop,
            task.max_new_tokens,
            backend.ends,
            task.chat_template,
            bool(task.thinking),
            clean_up=False,
        )
        for _ in range(task.num_samples):
            seed = SAMPLING_SEED + len(asked)
            asked.append(Question(prompt, reader, seed, decoding))
    return asked
