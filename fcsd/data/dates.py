"""Fix the date that chat templates write (`strftime_now`: gpt-oss, Llama 3.2 and
others).

An evaluation writes `TEMPLATE_DATE`; otherwise the prompts for the same model would
change every day, and at midnight within one run. Results record the date. Held-out rows
have the same date. Rows of training have the day on which the training began, also where
it continues on another day: a run records it beside its tokens, `FCSDTrainer` in its
checkpoints.

Not covered: a date that a template takes from another variable (`date_string`), which
data may set.
"""

from datetime import datetime
from pathlib import Path
from typing import Any

from fcsd.base.files import check_seal, read_json, write_sealed

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
