"""Turn an example into token ids and a mask of the tokens that the loss is computed on."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from fcsd.base.errors import UserError, one_line
from fcsd.data.batches import NO_LOSS

_SHAREGPT_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system",
}  # fmt: skip


_OPEN, _MASK = "add_generation_prompt", "return_assistant_tokens_mask"  # options of a chat template


class BadExample(UserError):
    """An example that cannot be tokenized, while others of its data set can."""


@contextlib.contextmanager
def template_errors(name: str, what: str) -> Iterator[None]:
    """Turn what a chat template raises, or jinja2 of it, into a UserError; what: what it was applied to."""
    from jinja2 import TemplateError

    # The others are of expressions in it.
    kinds = (TypeError, AttributeError, LookupError, ArithmeticError, ValueError, RecursionError)
    try:
        yield
    except (TemplateError, *kinds) as error:
        raise UserError(f"{name}: its chat template refuses {what}: {one_line(error)}") from error


def tokenizer_name(tokenizer: Any) -> str:
    """Name a tokenizer in an error: by its folder, or by its class where it was made in memory."""
    return f"tokenizer {getattr(tokenizer, 'name_or_path', '') or type(tokenizer).__name__}"


def tokenize_examples(
    examples: Sequence[Mapping[str, Any]],
    columns: Mapping[Any, str],
    tokenizer: Any,
    loss_on: str = "response",
) -> list[dict[str, Any] | BadExample]:
    """Tokenize examples as {"input_ids": […], "loss_mask": […]}; the mask says which tokens are to be predicted.

    columns: {"messages": …} | {"prompt": …, "response": …, "input": … (optional)} | {"text": …} | {"input_ids": …,
    "labels": … (optional), "attention_mask": … (optional)}, names of columns; "tools": … may stand beside messages and
    prompts. Messages, and prompt (with `input` in a paragraph of its own) and response, go through the chat template,
    which is given the tools (a list, or JSON text of one), and loss is on what the assistant says, its end of turn
    included, or on all tokens for loss_on="all". A message is {"role", "content"} or {"from", "value"} (ShareGPT).
    Prompt and response may be lists of messages; the response's alone carry loss. Text gets an end-of-sequence token,
    and loss is on all of it. Tokens are taken as they are, without those that the attention mask leaves out; loss is on
    those whose label is not -100. The tokenizer is called as seldom as can be: each call has its price.

    Returns: one entry an example; a BadExample where the template refuses it or a column holds something else.

    Raises: UserError when the tokenizer has no chat template where one is needed, or one that writes no tools where
    there are some.
    """
    read = [_or_bad(partial(_read, example, columns, tokenizer)) for example in examples]
    texts = iter(_tokenized_texts([one for one in read if isinstance(one, str)], tokenizer))
    _encode_ahead([one for one in read if isinstance(one, _Chat)], loss_on)
    outputs: list[Any] = []
    for one in read:
        if isinstance(one, str):
            ids = next(texts)
            outputs.append({"input_ids": ids, "loss_mask": np.ones(len(ids), bool)})
        else:
            outputs.append(_or_bad(partial(_masked, one, loss_on)) if isinstance(one, _Chat) else one)
    return outputs


def _or_bad(make: Callable[[], Any]) -> Any:
    """Return what is made, or why the example is bad."""
    try:
        return make()
    except BadExample as error:
        return error


def _read(example: Mapping[str, Any], columns: Mapping[Any, str], tokenizer: Any) -> dict | str | _Chat:
    if "input_ids" in columns:
        return _tokenized(example, columns)
    if "text" in columns:
        return _string(example, columns["text"])
    if not tokenizer.chat_template:
        raise UserError(
            f"{tokenizer_name(tokenizer)}: no chat template, needed for prompts and messages; use the "
            "tokenizer of an instruct model, add a chat_template.jinja, or give plain text under "
            "`columns: {text: …}`"
        )
    messages, answered = _messages(example, columns)
    return _Chat(tokenizer, _tools(example, columns), messages, answered)


def _encode_ahead(chats: Sequence[_Chat], loss_on: str) -> None:
    """Encode what the masks of conversations without tools will ask for; what a template refuses is left to them."""
    wanted: dict[str, list[tuple[_Chat, int]]] = {}
    for chat in chats:
        if chat.tools is None:
            for option, number in chat.requests(loss_on):
                wanted.setdefault(option, []).append((chat, number))
    for option, each in wanted.items():
        conversations = [chat.messages[:number] for chat, number in each]
        try:
            encoded = each[0][0].encoded(conversations, option)
        except BadExample:
            continue
        for index, (chat, number) in enumerate(each):
            chat.ahead[option, number] = {name: values[index] for name, values in encoded.items()}


def _tokenized_texts(texts: list[str], tokenizer: Any) -> list[list[int]]:
    if not texts:
        return []
    end = tokenizer.eos_token_id
    if end is None:
        raise UserError(f"{tokenizer_name(tokenizer)}: no end-of-sequence token, needed after each text")
    encoded = tokenizer(texts, return_attention_mask=False, return_token_type_ids=False)["input_ids"]
    return [ids if ids and ids[-1] == end else [*ids, end] for ids in encoded]


def _masked(chat: _Chat, loss_on: str) -> dict[str, list]:
    if loss_on == "all":
        ids = chat.prefix(len(chat.messages))["input_ids"]
        return {"input_ids": ids, "loss_mask": [True] * len(ids)}
    if chat.is_marked:
        encoded = chat.prefix(len(chat.messages), _MASK)
        return {"input_ids": encoded["input_ids"], "loss_mask": [bool(m) for m in encoded["assistant_masks"]]}
    return _mask_by_prefix(chat)


@dataclass(frozen=True)
class _Chat:
    """A conversation, and the tokenizer's chat template and the tools that write it, which raise UserError where it
    writes none.

    answered: the message from which on there is loss. ahead: what was encoded before it is asked for, by option and
    number of messages.
    """

    tokenizer: Any
    tools: list[Any] | None
    messages: list[dict]
    answered: int
    ahead: dict[tuple[str, int], Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.tools and "tools" not in self.template:
            raise UserError(
                f"{tokenizer_name(self.tokenizer)}: its chat template writes no tools, and the data have a"
                " column of them; use a template that does, or remove the column 'tools' from the data"
            )

    @property
    def template(self) -> str:
        """The template of conversations with these tools; a tokenizer may have another one for those without."""
        return str(self.tokenizer.get_chat_template(tools=self.tools))

    def text(self, messages: list[dict], **options: Any) -> str:
        return str(self._applied(messages, tokenize=False, **options))

    @property
    def is_marked(self) -> bool:
        """Whether the template says which tokens are the assistant's, and loss is on all of them."""
        earlier = any(message["role"] == "assistant" for message in self.messages[: self.answered])
        return not earlier and re.search(r"\{%-?\s*generation\s*-?%\}", self.template) is not None

    @property
    def answers(self) -> list[int]:
        """The messages that loss is on, when the template does not say where they are."""
        roles = enumerate(message["role"] for message in self.messages)
        return [i for i, role in roles if role == "assistant" and i >= self.answered]

    def requests(self, loss_on: str) -> list[tuple[str, int]]:
        """Return the options and numbers of messages of the prefixes that `_masked` asks for."""
        number = len(self.messages)
        if loss_on == "all" or self.is_marked:
            return [("" if loss_on == "all" else _MASK, number)]
        answers = [i for i in self.answers if i > 0]
        return [*((_OPEN, i) for i in answers), *(("", i) for i in {number, *(i + 1 for i in answers)})]

    def prefix(self, number: int, option: str = "") -> Any:
        """Return the token ids of the first messages, and what goes with them."""
        known = self.ahead.get((option, number))
        return self.encoded(self.messages[:number], option) if known is None else known

    def encoded(self, messages: list[Any], option: str) -> Any:
        """Return the token ids of a conversation, or of several, and what goes with them."""
        return self._applied(messages, tokenize=True, return_dict=True, **({option: True} if option else {}))

    def _applied(self, messages: list[Any], **options: Any) -> Any:
        try:
            with template_errors(tokenizer_name(self.tokenizer), "an example"):
                return self.tokenizer.apply_chat_template(messages, tools=self.tools, **options)
        except UserError as error:
            raise BadExample(str(error)) from error


def _tokenized(example: Mapping[str, Any], columns: Mapping[Any, str]) -> dict[str, list]:
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


def _mask_by_prefix(chat: _Chat) -> dict[str, list]:
    """Mask by prefixes: the assistant says what a conversation has more than the one before it, opened for it."""
    ids = chat.prefix(len(chat.messages))["input_ids"]
    mask = [False] * len(ids)
    for i in chat.answers:
        if i == 0:  # a template writes nothing without a message
            return _mask_by_text(chat)
        prompt, whole = chat.prefix(i, _OPEN)["input_ids"], chat.prefix(i + 1)["input_ids"]
        if whole[: len(prompt)] != prompt or ids[: len(whole)] != whole:
            return _mask_by_text(chat)
        mask[len(prompt) : len(whole)] = [True] * (len(whole) - len(prompt))
    return {"input_ids": ids, "loss_mask": mask}


def _mask_by_text(chat: _Chat) -> dict[str, list]:
    """Do the same for templates that write a turn otherwise when others follow it (Qwen3 takes thoughts out of all
    turns but the last), and for conversations that begin with the assistant: it says what changes with the content of
    its message, and its end of turn.

    The end of turn is what stands behind the content both here and where the conversation ends with this turn.
    """
    tokenizer = chat.tokenizer
    if not tokenizer.is_fast:
        raise UserError(
            f"{tokenizer_name(tokenizer)}: its chat template does not write a conversation as a "
            "continuation of its beginning, and it is not a fast tokenizer, which could say where the response "
            "is; mark responses in the template with {% generation %} … {% endgeneration %}, or set loss_on: all"
        )
    messages = chat.messages
    text = chat.text(messages)
    spans = []
    for i in chat.answers:
        begin, end = _content_span(chat, messages, i, text)
        prompt = chat.text(messages[:i], add_generation_prompt=True) if i else ""
        if prompt and text.startswith(prompt) and len(prompt) <= begin:
            begin = len(prompt)
        whole = chat.text(messages[: i + 1])
        end_of_turn = whole[_content_span(chat, messages[: i + 1], i, whole)[1] :]
        spans.append((begin, end + _common(end_of_turn, text[end:])))
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    mask = [any(a < end and b > begin for begin, end in spans) for a, b in encoded["offset_mapping"]]
    return {"input_ids": encoded["input_ids"], "loss_mask": mask}


def _content_span(chat: _Chat, messages: list[dict], index: int, text: str) -> tuple[int, int]:
    """Return where, in the conversation's `text`, the content of one message begins and ends."""
    other = [*messages[:index], messages[index] | {"content": "\ue000"}, *messages[index + 1 :]]
    changed = chat.text(other)
    begin = _common(text, changed)
    return begin, max(begin, len(text) - _common(text[::-1], changed[::-1]))


def _common(one: str, other: str) -> int:
    """Count the characters with which both texts begin."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(one), len(other)))


def _messages(example: Mapping[str, Any], columns: Mapping[Any, str]) -> tuple[list[dict], int]:
    """Return the conversation, and the number of its first message that the loss may be on."""
    if "messages" in columns:
        return _turns(example, columns["messages"]), 0
    prompt, response = (
        _turns(example, columns[name]) if isinstance(example[columns[name]], list) else None
        for name in ("prompt", "response")
    )
    extra = example.get(columns["input"]) if "input" in columns else None
    if prompt is None:
        question = _string(example, columns["prompt"])
        more = f"\n\n{_string(example, columns['input'])}" if extra else ""
        prompt = [{"role": "user", "content": question + more}]
    elif extra:
        raise BadExample(f"column {columns['input']!r}: goes with a prompt that is text, not with messages")
    if response is None:
        response = [{"role": "assistant", "content": _string(example, columns["response"])}]
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


def _tools(example: Mapping[str, Any], columns: Mapping[Any, str]) -> list[Any] | None:
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
        return [_string(example, columns["text"])]
    messages, _ = _messages(example, columns)
    return [message["content"] for message in messages if isinstance(message["content"], str)]


def _string(example: Mapping[str, Any], column: str) -> str:
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
