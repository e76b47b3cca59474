"""Write the turns of a prompt through the tokenizer's chat template."""

from collections.abc import Callable
from typing import Any

from fcsd.base.errors import UserError
from fcsd.data.dates import dated_options
from fcsd.data.thoughts import thinking_options
from fcsd.data.tokenizers import template_errors, tokenizer_name
from fcsd.evaluation.config import TaskBase


def require_chat_template(tokenizer: Any, row: TaskBase) -> None:
    """Refuse a task that wants a chat template where the tokenizer has none."""
    if row.chat_template and not getattr(tokenizer, "chat_template", None):
        raise UserError(
            f"task {row.task}: chat_template: true, but the tokenizer has no chat"
            " template; set chat_template: false for this task or add a chat template"
            " to the tokenizer"
        )


def chat_writer(tokenizer: Any, thinking: bool) -> Callable[..., str]:
    """Return what renders turns as text, as lm-eval's model in memory does: it takes
    them, whether a generation prompt follows (without, the last turn is left open), and
    options of the template, and tools, that the data have.

    thinking: asks a hybrid model for thoughts or for none; other templates ignore it.
    """
    name = tokenizer_name(tokenizer)
    options = {**dated_options(tokenizer), **thinking_options(tokenizer, thinking)}

    def write(
        turns: list[dict[str, str]], add_generation_prompt: bool = True, **given: Any
    ) -> str:
        ending = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": not add_generation_prompt,
        }
        with template_errors(name, "a prompt"):
            return str(
                tokenizer.apply_chat_template(
                    turns, tokenize=False, **options | ending | given
                )
            )

    return write
