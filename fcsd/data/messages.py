"""Read the messages of a conversation, in the forms of OpenAI, TRL, ShareGPT,
LLaMA-Factory and Axolotl.

Messages are returned in the form of transformers: standard roles, contents that are
text, calls of tools under `tool_calls`. A key that would set the loss or the content in
a way that is not supported makes the example a `BadExample`.

Not covered: the choice of keys by a chat template (`fcsd.data.template`); contents
other than text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from fcsd.base.errors import UserError

_CALL = "function_call"

# Role of a message -> role in transformers' chat templates; other roles are kept, for
# templates that support them.
ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system",
    "chatgpt": "assistant", "model": "assistant", "bot": "assistant", "developer": "developer",
    "tool": "tool", "function": "tool", "observation": "tool", "tool_response": "tool", "ipython": "tool",
    _CALL: _CALL, "tool_call": _CALL,  # JSON text of what the assistant calls
}  # fmt: skip

# Keys of a message that switch its loss on or off: OpenAI's, Axolotl's, ms-swift's and
# other plain words for it.
LOSS_KEYS = (
    "weight", "train", "training", "loss", "loss_scale", "trainable", "loss_mask",
)  # fmt: skip

_NOT_TEXT = "fcsd distils text only; take such examples out of the data"
# Keys of a message that would set its content or its loss, and why they cannot.
_REFUSED_KEYS = {
    **dict.fromkeys(
        ("image", "images", "video", "videos", "audio", "audios", "file", "files"),
        _NOT_TEXT,
    ),
    **dict.fromkeys(
        ("train_detail", "training_detail"),
        "loss applies to whole messages; write `train: true` or `train: false`",
    ),
    "mask": "it may mean with or without loss; write `train: true` or `train: false`",
    "refusal": "put the assistant's text under 'content'",
}
# Types of text parts in OpenAI's chat completions and in its responses.
_TEXT_PARTS = ("text", "input_text", "output_text")


class BadExample(UserError):
    """An example that cannot be tokenized, while others of its data set can."""


def messages_of(example: Mapping[str, Any], column: str) -> list[dict]:
    """Read the messages in a column."""
    messages = example[column]
    if not isinstance(messages, list) or not messages:
        raise BadExample(
            f"column {column!r}: needs a list of messages with 'role' and 'content', or"
            f" 'from' and 'value'; got {short(messages)}"
        )
    return [_message(message, column) for message in messages]


def _message(message: Any, column: str) -> dict:
    """Read one message: {"role", "content"}, or ShareGPT's {"from", "value"}."""
    fields = _present(message) if isinstance(message, Mapping) else {}
    is_sharegpt = "role" not in fields
    role = fields.pop("from" if is_sharegpt else "role", None)
    content = fields.pop("content" if "content" in fields else "value", None)
    # A message that only calls tools has no content in OpenAI's form.
    if content is None and (fields.get("tool_calls") or fields.get(_CALL)):
        content = ""
    if not isinstance(role, str) or not isinstance(content, str | list):
        raise BadExample(
            f"column {column!r}: a message needs 'role' and 'content', both text, or"
            f" 'from' and 'value'; got {short(message)}"
        )
    # Guessing wrongly would put loss on a tool's answer, or none on a call.
    if is_sharegpt and role.lower() == "function":
        raise BadExample(
            f"column {column!r}: a message from 'function' is ambiguous: in some data"
            f" it is a call, in others the answer to one; write {_CALL!r} or"
            " 'observation'"
        )
    _check_keys(fields, column)
    role, content = ROLES.get(role.lower(), role), _joined(content, column)
    calls = _calls([fields.pop(key, None) for key in ("tool_calls", _CALL)], column)
    # The content of such a message is the call itself, as JSON text.
    if role == _CALL:
        calls += _calls(decoded_json(content, column, "a call"), column)
        role, content = "assistant", ""
    return {
        "role": role,
        "content": content,
        **fields,
        **({"tool_calls": calls} if calls else {}),
    }


def _present(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a message or a call that are not null: null stands for an
    absent key there, as in OpenAI's API, but is a value in arguments and tools.
    """
    return {key: value for key, value in fields.items() if value is not None}


def _check_keys(message: Mapping[str, Any], column: str) -> None:
    """Refuse keys of a message that are not supported."""
    for key, reason in _REFUSED_KEYS.items():
        if message.get(key):
            raise BadExample(
                f"column {column!r}: a message with a key {key!r}: {reason}"
            )
    for key in LOSS_KEYS:
        if key in message and message[key] not in (0, 1):
            raise BadExample(
                f"column {column!r}: a message with {key}: {short(message[key])}; only"
                " 0 and 1, or false and true, are allowed"
            )


def _joined(content: str | list, column: str) -> str:
    """Join a content that is a list of parts, all of which must be text."""
    if isinstance(content, str):
        return content
    texts = []
    for part in content:
        kind = None
        if isinstance(part, Mapping):
            # Some data sets leave the type out where there is only text.
            kind = part.get("type", "text" if "text" in part else None)
        if kind not in _TEXT_PARTS or not isinstance(part.get("text"), str):
            # The type tells most; a part without one, or a text that is none, is shown.
            is_other_kind = kind is not None and kind not in _TEXT_PARTS
            description = short(kind) if is_other_kind else short(part)
            raise BadExample(
                f"column {column!r}: the content of a message has a part {description};"
                f" only parts of type {', '.join(map(repr, _TEXT_PARTS))} with a 'text'"
                f" are allowed: {_NOT_TEXT}"
            )
        texts.append(part["text"])
    return "".join(texts)


def _calls(raw_calls: Any, column: str) -> list[dict]:
    """Return calls of tools as {"type": "function", "function": {"name", "arguments"}}.

    Arguments that are the JSON text of an object stay text, for templates that expect
    it.
    """
    if isinstance(raw_calls, str):
        raw_calls = decoded_json(raw_calls, column, "the calls of a message")
    # A list may hold None for a key that the message does not have.
    if isinstance(raw_calls, list):
        return [
            call
            for entry in raw_calls
            if entry is not None
            for call in _calls(entry, column)
        ]
    function = None
    if isinstance(raw_calls, Mapping):
        function = raw_calls.get("function", raw_calls)
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise BadExample(
            f"column {column!r}: a tool call needs a function's 'name' and 'arguments';"
            f" got {short(raw_calls)}"
        )
    arguments = function.get("arguments") or {}
    decoded = arguments
    if isinstance(arguments, str):
        decoded = decoded_json(arguments, column, "arguments of a call")
    # The JSON text "null" stands for a call without arguments.
    if decoded is None:
        arguments = decoded = {}
    if not isinstance(decoded, Mapping):
        raise BadExample(
            f"column {column!r}: the arguments of a call of {function['name']!r} must"
            f" be an object, or JSON text of one, got {short(arguments)}"
        )
    call = _present(raw_calls)
    # The keys keep their order, in which a template may write them.
    if "function" not in call:
        call = {key: call[key] for key in call if key not in ("name", "arguments")}
    if "type" not in call:
        call = {"type": "function", **call}
    return [call | {"function": _present(function) | {"arguments": arguments}}]


def decoded_json(text: str, column: str, subject: str) -> Any:
    """Decode JSON text; subject: what the text is, for an error."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise BadExample(
            f"column {column!r}: {subject}: JSON text is needed, got {short(text)}"
        ) from None


def all_texts(value: Any) -> Iterator[str]:
    """Yield every text in a row of a data set, also inside its lists and mappings."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from all_texts(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from all_texts(inner)


def short(value: Any) -> str:
    """Return a value as it is shown in an error, at most 80 characters of it."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "…"
