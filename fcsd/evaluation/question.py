"""Show what a reader of single answers needs to see of what the model was asked."""

from collections.abc import Mapping, Sequence
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


def lm_eval_sample(
    row: Mapping[str, Any], score: float, member: str | None, asked: Sequence[Sequence[Any]]
) -> dict[str, Any]:
    """Build a sample of ours from one that lm-eval logs.

    Args:
        member: the task that the item is of, in a group.
        asked: the arguments of every request about the item, which begin with context and continuation.
    """
    doc_id = int(row["doc_id"])
    sample: dict[str, Any] = {
        "doc_id": doc_id if member is None else f"{member}/{doc_id}",
        "doc_hash": row["doc_hash"],
        "prompt_hash": row["prompt_hash"],
        "score": score,
        "target": str(row.get("target", "")),
    }
    requests = [(str(context), str(more[0]) if more else "") for context, *more in asked]
    response = (row.get("resps") or [[""]])[0][0]
    if isinstance(response, list | tuple):  # log-likelihood, and whether it is the greedy answer
        sample["loglikelihoods"] = [float(choice[0][0]) for choice in row["resps"]]
    else:
        sample["completion"] = str(response)
        requests = [(context, "") for context, _ in requests[:1]]
    return sample | shown_question(requests)
