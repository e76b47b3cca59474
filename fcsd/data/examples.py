"""Read an example: its conversation, its text or its tokens, as its columns say."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fcsd.base.errors import UserError
from fcsd.data.batches import NO_LOSS

_SHAREGPT_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system",
}  # fmt: skip


class BadExample(UserError):
    """An example that cannot be tokenized, while others of its data set can."""


def given_tokens(example: Mapping[str, Any], columns: Mapping[Any, str]) -> dict[str, list]:
    ids = _list(example, columns["input_ids"])
    labels = _list(example, columns["labels"]) if "labels" in columns else ids
    seen = _list(example, columns["attention_mask"]) if "attention_mask" in columns else [1] * len(ids)
    if not len(ids) == len(labels) == len(seen) or any(
        label not in (token, NO_LOSS) for token, label in zip(ids, labels, strict=True)
    ):
        raise BadExample(
            f"column {columns.get('labels', columns['input_ids'])!r}: each label must be the token of its own position,"
            f" or {NO_LOSS} where there is no loss (they are shifted later), got {_short(labels)} for {_short(ids)}"
        )
    kept = [(token, label != NO_LOSS) for token, label, here in zip(ids, labels, seen, strict=True) if here]
    return {"input_ids": [token for token, _ in kept], "loss_mask": [mask for _, mask in kept]}


def conversation_of(example: Mapping[str, Any], columns: Mapping[Any, str]) -> tuple[list[dict], int]:
    """Return the conversation, and the number of its first message that the loss may be on."""
    if "messages" in columns:
        return _turns(example, columns["messages"]), 0
    prompt, response = (
        _turns(example, columns[name]) if isinstance(example[columns[name]], list) else None
        for name in ("prompt", "response")
    )
    extra = example.get(columns["input"]) if "input" in columns else None
    if prompt is None:
        question = text_of(example, columns["prompt"])
        more = f"\n\n{text_of(example, columns['input'])}" if extra else ""
        prompt = [{"role": "user", "content": question + more}]
    elif extra:
        raise BadExample(f"column {columns['input']!r}: goes with a prompt that is text, not with messages")
    if response is None:
        response = [{"role": "assistant", "content": text_of(example, columns["response"])}]
    return [*prompt, *response], len(prompt)


def _turns(example: Mapping[str, Any], column: str) -> list[dict]:
    messages = example[column]
    if not isinstance(messages, list) or not messages:
        raise BadExample(
            f"column {column!r}: a list of messages with 'role' and 'content', or 'from' and 'value', is needed, got"
            f" {_short(messages)}"
        )
    return [_message(message, column) for message in messages]


def _message(message: Any, column: str) -> dict:
    """Read one turn, as {"role", "content"} or in the words of ShareGPT, {"from", "value"}."""
    if isinstance(message, Mapping):
        message = _without_none(message)
        content = message.get("content", "" if message.get("tool_calls") else None)
        if isinstance(message.get("role"), str) and isinstance(content, str | list):
            return message | {"content": content}
        if isinstance(message.get("from"), str) and isinstance(message.get("value"), str):
            if message["from"] not in _SHAREGPT_ROLES:
                raise BadExample(
                    f"column {column!r}: a message from {message['from']!r}; allowed: {', '.join(_SHAREGPT_ROLES)}"
                )
            return {"role": _SHAREGPT_ROLES[message["from"]], "content": message["value"]}
    raise BadExample(
        f"column {column!r}: a message with 'role' and 'content', both text, or 'from' and 'value', is needed, got"
        f" {_short(message)}"
    )


def tools_of(example: Mapping[str, Any], columns: Mapping[Any, str]) -> list[Any] | None:
    """Return the tools of an example, for its chat template; None where it has none."""
    value = tools = example.get(columns["tools"]) if "tools" in columns else None
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools else None
        except ValueError:
            tools = value
    if tools is not None and not (isinstance(tools, list) and all(isinstance(one, dict) for one in tools)):
        raise BadExample(
            f"column {columns['tools']!r}: a list of tools, or JSON text of one, is needed, got {_short(value)}"
        )
    return _without_none(tools) or None


def _without_none(value: Any) -> Any:
    """Take out the keys without a value, with which `datasets` fills up mappings of different keys."""
    if isinstance(value, Mapping):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, list) else value


def example_texts(example: Mapping[str, Any], columns: Mapping[Any, str]) -> list[str]:
    """Return what an example says, one text a message or column.

    Raises: BadExample when a column does not hold what it should.
    """
    if "text" in columns:
        return [text_of(example, columns["text"])]
    messages, _ = conversation_of(example, columns)
    return [message["content"] for message in messages if isinstance(message["content"], str)]


def text_of(example: Mapping[str, Any], column: str) -> str:
    value = example.get(column)
    if not isinstance(value, str):
        raise BadExample(f"column {column!r}: text is needed, got {_short(value)}")
    return value


def _list(example: Mapping[str, Any], column: str) -> list:
    value = example[column]
    if not hasattr(value, "__iter__") or isinstance(value, str | Mapping):
        raise BadExample(f"column {column!r}: a list of token ids is needed, got {_short(value)}")
    return list(value)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "…"
