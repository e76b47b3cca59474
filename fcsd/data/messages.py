"""Read the messages of a conversation, in the forms of OpenAI, TRL, ShareGPT,
LLaMA-Factory and Axolotl.

They leave in that of transformers: standard roles, contents that are text, calls of
tools under `tool_calls`. What would set the loss or the content and cannot be followed
is a `BadExample`.

Not covered: what a chat template reads of them (`fcsd.data.template`); contents that
are no text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fcsd.base.errors import UserError

_CALL = "function_call"

# A role of a message -> that of transformers' chat templates; others are kept, for
# templates that know them.
ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system",
    "chatgpt": "assistant", "model": "assistant", "bot": "assistant", "developer": "developer",
    "tool": "tool", "function": "tool", "observation": "tool", "tool_response": "tool", "ipython": "tool",
    _CALL: _CALL, "tool_call": _CALL,  # JSON text of what the assistant calls
}  # fmt: skip

# Keys of a message that say whether there is loss on it: OpenAI's, Axolotl's and
# ms-swift's.
LOSS_KEYS = ("weight", "train", "training", "loss", "loss_scale")

_NOT_TEXT = "fcsd distils text only; take such examples out of the data"
# Keys of a message that would set its content or its loss, and why they cannot.
_REFUSED_KEYS = {
    **dict.fromkeys(
        ("image", "images", "video", "videos", "audio", "audios", "file", "files"),
        _NOT_TEXT,
    ),
    **dict.fromkeys(
        ("train_detail", "training_detail"),
        "loss is on whole messages; say `train: true` or `train: false`",
    ),
    "refusal": "what the assistant says goes under 'content'",
}
# of OpenAI's chats and of its Responses
_TEXT_PARTS = ("text", "input_text", "output_text")


class BadExample(UserError):
    """An example that cannot be tokenized, while others of its data set can."""


def messages_of(example: Mapping[str, Any], column: str) -> list[dict]:
    """Read the messages in a column."""
    messages = example[column]
    if not isinstance(messages, list) or not messages:
        raise BadExample(
            f"column {column!r}: a list of messages with 'role' and 'content', or"
            f" 'from' and 'value', is needed, got {short(messages)}"
        )
    return [_message(message, column) for message in messages]


def _message(message: Any, column: str) -> dict:
    """Read one turn, as {"role", "content"} or in the words of ShareGPT, {"from", "value"}."""
    rest = without_none(message) if isinstance(message, Mapping) else {}
    is_sharegpt = "role" not in rest
    role = rest.pop("from" if is_sharegpt else "role", None)
    content = rest.pop("content" if "content" in rest else "value", None)
    if content is None and (rest.get("tool_calls") or rest.get(_CALL)):
        content = ""
    if not isinstance(role, str) or not isinstance(content, str | list):
        raise BadExample(
            f"column {column!r}: a message with 'role' and 'content', both text, or"
            f" 'from' and 'value', is needed, got {short(message)}"
        )
    if is_sharegpt and role.lower() == "function":
        raise BadExample(
            f"column {column!r}: a message from 'function', which is a call in some"
            f" data and the answer to one in others; write {_CALL!r} or 'observation'"
        )
    _check_keys(rest, column)
    role, content = ROLES.get(role.lower(), role), _joined(content, column)
    calls = _calls([rest.pop(key, None) for key in ("tool_calls", _CALL)], column)
    if role == _CALL:
        calls += _calls(decoded_json(content, column, "a call"), column)
        role, content = "assistant", ""
    return {
        "role": role,
        "content": content,
        **rest,
        **({"tool_calls": calls} if calls else {}),
    }


def _check_keys(message: Mapping[str, Any], column: str) -> None:
    """Refuse keys of a message that cannot be followed."""
    for key, reason in _REFUSED_KEYS.items():
        if message.get(key):
            raise BadExample(
                f"column {column!r}: a message with a key {key!r}: {reason}"
            )
    for key in LOSS_KEYS:
        if key in message and message[key] not in (0, 1):
            raise BadExample(
                f"column {column!r}: a message with {key}: {short(message[key])}; 0 and"
                " 1, or false and true, are allowed: loss is on a message or not"
            )


def _joined(content: str | list, column: str) -> str:
    """Join a content that is a list of parts, of text alone."""
    if isinstance(content, str):
        return content
    texts = []
    for part in content:
        kind = (
            part.get("type", "text" if "text" in part else None)
            if isinstance(part, Mapping)
            else None
        )
        if kind not in _TEXT_PARTS or not isinstance(part.get("text"), str):
            named = (
                short(kind)
                if kind is not None and kind not in _TEXT_PARTS
                else short(part)
            )
            raise BadExample(
                f"column {column!r}: a content with a part {named}; parts of type"
                f" {', '.join(map(repr, _TEXT_PARTS))} with a 'text' are allowed:"
                f" {_NOT_TEXT}"
            )
        texts.append(part["text"])
    return "".join(texts)


def _calls(given: Any, column: str) -> list[dict]:
    """Return calls of tools as {"type": "function", "function": {"name", "arguments"}}.

    Arguments that are JSON text of an object are left as they are, for templates that
    want text.
    """
    if isinstance(given, str):
        given = decoded_json(given, column, "the calls of a message")
    if isinstance(given, list):
        return [
            call for item in given if item is not None for call in _calls(item, column)
        ]
    function = given.get("function", given) if isinstance(given, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise BadExample(
            f"column {column!r}: a call of a tool with a function's 'name' and"
            f" 'arguments' is needed, got {short(given)}"
        )
    arguments = function.get("arguments") or {}
    decoded = (
        decoded_json(arguments, column, "arguments of a call")
        if isinstance(arguments, str)
        else arguments
    )
    if decoded is None:
        arguments = decoded = {}
    if not isinstance(decoded, Mapping):
        raise BadExample(
            f"column {column!r}: the arguments of a call of {function['name']!r} must"
            f" be an object, or JSON text of one, got {short(arguments)}"
        )
    others = {
        key: value for key, value in given.items() if key not in ("name", "arguments")
    }
    return [
        {"type": "function", **others, "function": {**function, "arguments": arguments}}
    ]


def decoded_json(text: str, column: str, place: str) -> Any:
    """Decode JSON text that stands at a place in a column."""
    try:
        return json.loads(text)
    except ValueError:
        raise BadExample(
            f"column {column!r}: {place}: JSON text is needed, got {short(text)}"
        ) from None


def without_none(value: Any) -> Any:
    """Take out the keys without a value, with which `datasets` fills up mappings of
    different keys.
    """
    if isinstance(value, Mapping):
        return {
            key: without_none(item) for key, item in value.items() if item is not None
        }
    return [without_none(item) for item in value] if isinstance(value, list) else value


def short(value: Any) -> str:
    """Write a value into an error."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "…"
