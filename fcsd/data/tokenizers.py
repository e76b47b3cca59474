"""Name a tokenizer in an error, and tell a user why its chat template fails."""

import contextlib
from collections.abc import Iterator
from typing import Any

from fcsd.base.errors import UserError, one_line


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
