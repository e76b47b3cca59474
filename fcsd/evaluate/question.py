"""Show what a reader of single answers needs to see of what the model was asked."""

from collections.abc import Sequence
from typing import Any

_LONGEST = 2000  # characters; the whole prompt is identified by its hash


def shown_question(asked: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Return the end of the prompt, and the choices: {"prompt": …, "choices": […]}.

    Args:
        asked: (context, continuation) of every request about one item; one request: no choices. Where contexts
            differ (WinoGrande), the prompt is what they share, and a choice is the rest of its context too.

    Returns:
        {} for no request.
    """
    if not asked:
        return {}
    first, last = min(context for context, _ in asked), max(context for context, _ in asked)
    same = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    if same < len(last):  # they differ, and may do so in the middle of a word
        same = max(first.rfind(space, 0, same) for space in " \n") + 1
    prompt = first[:same]  # what the first and the last in the order of text share, all share
    shown: dict[str, Any] = {"prompt": end_of(prompt)}
    if len(asked) > 1:
        shown["choices"] = [context[len(prompt) :] + continuation for context, continuation in asked]
    return shown


def end_of(prompt: str) -> str:
    """Return the last 2,000 characters, which have the question; examples stand before it."""
    return prompt if len(prompt) <= _LONGEST else f"…{prompt[-_LONGEST:]}"
