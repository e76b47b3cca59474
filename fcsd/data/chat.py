"""Turn an example into token ids and a mask of the tokens that the loss is computed on."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from fcsd.data.batches import NO_LOSS
from fcsd.errors import UserError, one_line

_SHAREGPT_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system",
}  # fmt: skip


class BadExample(UserError):
    """An example that cannot be tokenized, while others of its data set can."""


def tokenizer_name(tokenizer: Any) -> str:
    """Name a tokenizer in an error: by its folder, or by its class where it was made in memory."""
    return f"tokenizer {tokenizer.name_or_path or type(tokenizer).__name__}"


def tokenize_example(
    example: Mapping[str, Any], columns: Mapping[Any, str], tokenizer: Any, loss_on: str = "response"
) -> dict[str, list]:
    """Tokenize one example as {"input_ids": […], "loss_mask": […]}; the mask says which tokens are to be predicted.

    columns: {"messages": …} | {"prompt": …, "response": …, "input": … (optional)} | {"text": …} | {"input_ids": …,
    "labels": … (optional), "attention_mask": … (optional)}, names of columns. Messages, and prompt (with `input` in a
    paragraph of its own) and response, go through the chat template, and loss is on what the assistant says, its end of
    turn included, or on all tokens for loss_on="all". A message is {"role", "content"} or {"from", "value"} (ShareGPT).
    Text gets an end-of-sequence token, and loss is on all of it. Tokens are taken as they are, without those that the
    attention mask leaves out; loss is on those whose label is not -100.

    Raises: UserError when the tokenizer has no chat template where one is needed; BadExample when the template refuses
    the example, or a column does not hold what it should.
    """
    if "input_ids" in columns:
        return _tokenized(example, columns)
    if "text" in columns:
        if tokenizer.eos_token_id is None:
            raise UserError(f"{tokenizer_name(tokenizer)}: no end-of-sequence token, needed after each text")
        ids = tokenizer(_string(example, columns["text"]))["input_ids"]
        if not ids or ids[-1] != tokenizer.eos_token_id:
            ids = [*ids, tokenizer.eos_token_id]
        return {"input_ids": ids, "loss_mask": [True] * len(ids)}
    if not tokenizer.chat_template:
        raise UserError(
            f"{tokenizer_name(tokenizer)}: no chat template, needed for prompts and messages; use the "
            "tokenizer of an instruct model, add a chat_template.jinja, or give plain text under "
            "`columns: {text: …}`"
        )
    messages = _messages(example, columns)
    if loss_on == "all":
        ids = _template(tokenizer, messages)["input_ids"]
        return {"input_ids": ids, "loss_mask": [True] * len(ids)}
    if re.search(r"\{%-?\s*generation\s*-?%\}", tokenizer.chat_template):
        encoded = _template(tokenizer, messages, return_assistant_tokens_mask=True)
        return {"input_ids": encoded["input_ids"], "loss_mask": [bool(m) for m in encoded["assistant_masks"]]}
    return _mask_by_prefix(tokenizer, messages)


def _tokenized(example: Mapping[str, Any], columns: Mapping[Any, str]) -> dict[str, list]:
    """Take an example that is tokens already."""
    ids = _list(example, columns["input_ids"])
    labels = _list(example, columns["labels"]) if "labels" in columns else ids
    seen = _list(example, columns["attention_mask"]) if "attention_mask" in columns else [1] * len(ids)
    if not len(ids) == len(labels) == len(seen) or any(
        label not in (token, NO_LOSS) for token, label in zip(ids, labels, strict=True)
    ):
        raise BadExample(
            f"column {columns.get('labels', columns['input_ids'])!r}: each label must be the token of its own position,"
            f" or {NO_LOSS} where there is no loss (they are shifted later), found {_short(labels)} for {_short(ids)}"
        )
    kept = [(token, label != NO_LOSS) for token, label, here in zip(ids, labels, seen, strict=True) if here]
    return {"input_ids": [token for token, _ in kept], "loss_mask": [mask for _, mask in kept]}


def _mask_by_prefix(tokenizer: Any, messages: list[dict]) -> dict[str, list]:
    """Mask by prefixes: the assistant says what a conversation has more than the one before it, opened for it."""
    ids = _template(tokenizer, messages)["input_ids"]
    mask = [False] * len(ids)
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        if i == 0:  # a template writes nothing without a message
            return _mask_by_text(tokenizer, messages)
        prompt = _template(tokenizer, messages[:i], add_generation_prompt=True)["input_ids"]
        whole = ids if i == len(messages) - 1 else _template(tokenizer, messages[: i + 1])["input_ids"]
        if whole[: len(prompt)] != prompt or ids[: len(whole)] != whole:
            return _mask_by_text(tokenizer, messages)
        mask[len(prompt) : len(whole)] = [True] * (len(whole) - len(prompt))
    return {"input_ids": ids, "loss_mask": mask}


def _mask_by_text(tokenizer: Any, messages: list[dict]) -> dict[str, list]:
    """Do the same for templates that write a turn otherwise when others follow it (Qwen3 takes thoughts out of all
    turns but the last), and for conversations that begin with the assistant: it says what changes with the content of
    its message, and its end of turn.

    The end of turn is what stands behind the content both here and where the conversation ends with this turn.
    """
    if not tokenizer.is_fast:
        raise UserError(
            f"{tokenizer_name(tokenizer)}: its chat template does not write a conversation as a "
            "continuation of its beginning, and it is not a fast tokenizer, which could say where the response "
            "is; mark responses in the template with {% generation %} … {% endgeneration %}, or set loss_on: all"
        )
    text = _template_text(tokenizer, messages)
    spans = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        begin, end = _content_span(tokenizer, messages, i, text)
        prompt = _template_text(tokenizer, messages[:i], add_generation_prompt=True) if i else ""
        if prompt and text.startswith(prompt) and len(prompt) <= begin:
            begin = len(prompt)
        whole = _template_text(tokenizer, messages[: i + 1])
        end_of_turn = whole[_content_span(tokenizer, messages[: i + 1], i, whole)[1] :]
        spans.append((begin, end + _common(end_of_turn, text[end:])))
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    mask = [any(a < end and b > begin for begin, end in spans) for a, b in encoded["offset_mapping"]]
    return {"input_ids": encoded["input_ids"], "loss_mask": mask}


def _content_span(tokenizer: Any, messages: list[dict], index: int, text: str) -> tuple[int, int]:
    """Begin and end, in the conversation's `text`, of what changes when one message says something else."""
    other = [*messages[:index], messages[index] | {"content": "\ue000"}, *messages[index + 1 :]]
    changed = _template_text(tokenizer, other)
    begin = _common(text, changed)
    return begin, max(begin, len(text) - _common(text[::-1], changed[::-1]))


def _common(one: str, other: str) -> int:
    """Count the characters with which both texts begin."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(one), len(other)))


def _template_text(tokenizer: Any, messages: list[dict], **options: Any) -> str:
    return str(_template(tokenizer, messages, tokenize=False, **options))


def _template(tokenizer: Any, messages: list[dict], *, tokenize: bool = True, **options: Any) -> Any:
    """Apply the chat template: token ids and what goes with them; with tokenize=False the text."""
    from jinja2 import TemplateError

    try:
        return tokenizer.apply_chat_template(messages, tokenize=tokenize, return_dict=tokenize, **options)
    except (
        TemplateError,
        TypeError,
        AttributeError,
        LookupError,
    ) as error:  # what a template's expressions raise
        raise BadExample(
            f"{tokenizer_name(tokenizer)}: its chat template refuses an example: {one_line(error)}"
        ) from error


def _messages(example: Mapping[str, Any], columns: Mapping[Any, str]) -> list[dict]:
    if "messages" not in columns:
        prompt = _string(example, columns["prompt"])
        extra = example.get(columns["input"]) if "input" in columns else None
        return [
            {"role": "user", "content": f"{prompt}\n\n{extra}" if extra else prompt},
            {"role": "assistant", "content": _string(example, columns["response"])},
        ]
    column = columns["messages"]
    messages = example[column]
    if not isinstance(messages, list) or not messages:
        raise BadExample(
            f"column {column!r}: a list of messages with 'role' and 'content', or 'from' and 'value', is needed, found"
            f" {_short(messages)}"
        )
    return [_message(message, column) for message in messages]


def _message(message: Any, column: str) -> dict:
    """Read one turn, as {"role", "content"} or in the words of ShareGPT, {"from", "value"}."""
    if isinstance(message, Mapping):
        if isinstance(message.get("role"), str) and message.get("content") is not None:
            return dict(message)
        if isinstance(message.get("from"), str) and isinstance(message.get("value"), str):
            if message["from"] not in _SHAREGPT_ROLES:
                raise BadExample(
                    f"column {column!r}: a message from {message['from']!r}; allowed: {', '.join(_SHAREGPT_ROLES)}"
                )
            return {"role": _SHAREGPT_ROLES[message["from"]], "content": message["value"]}
    raise BadExample(
        f"column {column!r}: a message with 'role' and 'content', or 'from' and 'value', is needed, found"
        f" {_short(message)}"
    )


def example_texts(example: Mapping[str, Any], columns: Mapping[Any, str]) -> list[str]:
    """Return what an example says, one text a message or column.

    Raises: BadExample when a column does not hold what it should.
    """
    if "text" in columns:
        return [_string(example, columns["text"])]
    return [
        message["content"] for message in _messages(example, columns) if isinstance(message["content"], str)
    ]


def _string(example: Mapping[str, Any], column: str) -> str:
    value = example[column]
    if not isinstance(value, str):
        raise BadExample(f"column {column!r}: text is needed, found {_short(value)}")
    return value


def _list(example: Mapping[str, Any], column: str) -> list:
    value = example[column]
    if not hasattr(value, "__iter__") or isinstance(value, str | Mapping):
        raise BadExample(f"column {column!r}: a list of token ids is needed, found {_short(value)}")
    return list(value)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "…"
