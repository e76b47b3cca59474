"""Fix the date that chat templates write (`strftime_now`: gpt-oss, Llama 3.2 and
others).

An evaluation writes `TEMPLATE_DATE`; otherwise the prompts for the same model would
change every day, and at midnight within one run. Results record the date. Rows of
training have the day on which the process began.

Not covered: a date that a template takes from another variable (`date_string`), which
data may set; a training that continues on another day.
"""

from datetime import datetime
from typing import Any

TEMPLATE_DATE = datetime(2025, 1, 1)
BEGAN = datetime.now()
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
