"""Write the turns of a prompt through the tokenizer's chat template."""

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


def chat_text(
    tokenizer: Any,
    thinking: bool,
    turns: list[dict[str, str]],
    add_generation_prompt: bool = True,
    **given: Any,
) -> str:
    """Render turns as text, as lm-eval's model in memory does; without a generation
    prompt the last turn is left open.

    thinking: asks a hybrid model for thoughts or for none; other templates ignore it.
    given: options of the template, and tools, that the data have.
    """
    options = {
        **dated_options(tokenizer),
        **thinking_options(tokenizer, thinking),
        "add_generation_prompt": add_generation_prompt,
        "continue_final_message": not add_generation_prompt,
        **given,
    }
    with template_errors(tokenizer_name(tokenizer), "a prompt"):
        return str(tokenizer.apply_chat_template(turns, tokenize=False, **options))
