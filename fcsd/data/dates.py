"""The date that chat templates write (`strftime_now`: gpt-oss, Llama 3.2 and others),
which stands still.

An evaluation writes `TEMPLATE_DATE`, or the same model would be asked other prompts
every day, and over midnight both; results record it. Rows of training have the day on
which the process began.

Not covered: a date that a template has from another variable (`date_string`), which
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
    """Tell whether a chat template, or one of several by name, writes today's date."""
    return "strftime_now" in str(template or "")


def dated(template: str, date: datetime) -> str:
    """Return a chat template that writes this date for today's; the same template where
    it writes none.

    transformers (5.23) gives templates no function but its own, so a macro takes the
    place of its clock.
    """
    if not writes_date(template):
        return template
    directives = [
        ("%%", "\0"),
        *((name, date.strftime(name)) for name in _DIRECTIVES),
        ("\0", "%"),
    ]
    filters = "".join(f"|replace({name!r},{value!r})" for name, value in directives)
    # transformers takes off the line break, so the template begins at the beginning of
    # a line, as without the macro.
    return (
        f"{{% macro strftime_now(format) %}}{{{{ format{filters} }}}}{{% endmacro"
        f" %}}\n{template}"
    )


def dated_options(tokenizer: Any, date: datetime = TEMPLATE_DATE) -> dict[str, str]:
    """Return what `apply_chat_template` is given beside the conversation so that it
    writes this date.
    """
    if not writes_date(getattr(tokenizer, "chat_template", None)):
        return {}
    return {"chat_template": dated(tokenizer.get_chat_template(), date)}
