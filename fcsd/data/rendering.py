"""Write messages through a chat template: fix the date that it writes (`strftime_now`:
gpt-oss, Llama 3.2 and others), and name the tokenizer in its errors.

An evaluation writes `TEMPLATE_DATE`; otherwise the prompts for the same model would
change every day, and at midnight within one run. Results record the date. Held-out rows
have the same date. Rows of training have the day on which the training began, also where
it continues on another day: a run records it beside its tokens, `FCSDTrainer` in its
checkpoints.

Not covered: a date that a template takes from another variable (`date_string`), which
data may set.
"""

import contextlib
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from fcsd.base.errors import UserError, one_line
from fcsd.base.files import check_seal, read_json, write_sealed
from fcsd.data.thoughts import thinking_options

TEMPLATE_DATE = datetime(2025, 1, 1)
BEGAN = datetime.now()
NOTED = "template_date"
"""Key of the date of a training, in the file that has it; written only where the
template writes a date.
"""
_DIRECTIVES = [f"%-{letter}" for letter in "dmHIMSj"] + [
    f"%{letter}" for letter in "aAwdbBmyYHIpMSfzZjUWGuVcxXDFTRe"
]


def writes_date(template: Any) -> bool:
    """Return whether a chat template, or any of several named ones, writes today's
    date.
    """
    return "strftime_now" in str(template or "")


def dated(template: str, date: datetime) -> str:
    """Return a chat template that writes this date instead of today's; the same
    template if it writes none.

    transformers (5.23) gives templates no functions but its own, so a macro replaces
    its clock.
    """
    if not writes_date(template):
        return template
    # A doubled per cent sign must not become the start of a directive.
    directives = [
        ("%%", "\0"),
        *((name, date.strftime(name)) for name in _DIRECTIVES),
        ("\0", "%"),
    ]
    filters = "".join(f"|replace({name!r},{value!r})" for name, value in directives)
    # transformers strips the line break after a block, so the template begins at the
    # start of a line, as it does without the macro.
    return (
        f"{{% macro strftime_now(format) %}}{{{{ format{filters} }}}}{{% endmacro"
        f" %}}\n{template}"
    )


def dated_options(tokenizer: Any, date: datetime = TEMPLATE_DATE) -> dict[str, str]:
    """Return options for `apply_chat_template` that make the template write this date."""
    if not writes_date(getattr(tokenizer, "chat_template", None)):
        return {}
    return {"chat_template": dated(tokenizer.get_chat_template(), date)}


def noted_date(file: Path | None) -> datetime:
    """Return the date that a training has noted in a file; where there is none, that of
    this process.
    """
    date = None
    if file is not None and file.is_file():
        record = read_json(file, keys=())
        check_seal(file, record, f"remove {file.parent} to tokenize again")
        date = record.get(NOTED)
    return BEGAN if date is None else datetime.fromisoformat(date)


def note_date(file: Path) -> datetime:
    """Return the date noted in a file, which is written where it is not there."""
    date = noted_date(file)
    if not file.is_file():
        write_sealed(file, {NOTED: date.isoformat()})
    return date


@contextlib.contextmanager
def template_errors(name: str, subject: str) -> Iterator[None]:
    """Turn errors of a chat template, or of jinja2 about it, into a UserError.

    subject: names the input that the template was applied to.
    """
    from jinja2 import TemplateError

    # Expressions in a template raise Python's own errors.
    expression_errors = (
        TypeError,
        AttributeError,
        LookupError,
        ArithmeticError,
        ValueError,
        RecursionError,
    )
    try:
        yield
    except (TemplateError, *expression_errors) as error:
        raise UserError(
            f"{name}: its chat template refuses {subject}: {one_line(error)}"
        ) from error


def tokenizer_name(tokenizer: Any) -> str:
    """Name a tokenizer in an error: by its folder, or by its class if it has none."""
    return (
        "tokenizer"
        f" {getattr(tokenizer, 'name_or_path', '') or type(tokenizer).__name__}"
    )


def require_chat_template(tokenizer: Any, row: Any) -> None:
    """Refuse a task, a suite's row, that wants a chat template where the tokenizer has
    none.
    """
    if row.chat_template and not getattr(tokenizer, "chat_template", None):
        raise UserError(
            f"task {row.task}: chat_template: true, but the tokenizer has no chat"
            " template; for a base model give --suite own_text_base in place of"
            " own_text, paper11 in place of paper11_chat, or a suite file of your own"
            " without chat_template; for a chat model add its template to the tokenizer"
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
