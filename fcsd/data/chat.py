"""Turn an example into token ids and a mask of the tokens that the loss is computed on."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from fcsd.base.errors import UserError, one_line
from fcsd.data.batches import NO_LOSS
from fcsd.data.marks import UnclearTurnError
from fcsd.data.texts import tokenized_texts
from fcsd.data.turns import TurnForm, WrittenChat, read_form

_SHAREGPT_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system",
}  # fmt: skip


class BadExample(UserError):
    """An example that cannot be tokenized, while others of its data set can."""


def tokenizer_name(tokenizer: Any) -> str:
    """Name a tokenizer in an error: by its folder, or by its class where it was made in memory."""
    return f"tokenizer {tokenizer.name_or_path or type(tokenizer).__name__}"


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
    included, or on all tokens for loss_on="all". Where turns have no end, the token with which the next role begins is
    one, also behind the last turn. Thoughts and tool calls are said, too, as far as they are written. A message is
    {"role", "content"} or {"from", "value"} (ShareGPT). Prompt and response may be lists of messages; the response's
    alone carry loss. Text gets the tokenizer's beginning and an end-of-sequence token where it has none, and loss is on
    all of it. Tokens are taken as they are, without those that the attention mask leaves out; loss is on those whose
    label is not -100. The tokenizer is called as seldom as can be: each call has its price.

    Returns: one entry an example; a BadExample where the template refuses it, leaves out a call or an answer or writes
        it where it cannot be told apart, or where a column holds something else.

    Raises: UserError when the tokenizer has no chat template where one is needed, or one that writes no tools where
    there are some.
    """
    read = [_or_bad(partial(_read, example, columns, tokenizer)) for example in examples]
    texts = iter(_tokenized_texts([one for one in read if isinstance(one, str)], tokenizer))
    chats = iter(_masked([one for one in read if isinstance(one, _Chat)], loss_on))
    outputs: list[Any] = []
    for one in read:
        if isinstance(one, str):
            ids = next(texts)
            outputs.append({"input_ids": ids, "loss_mask": np.ones(len(ids), bool)})
        else:
            outputs.append(next(chats) if isinstance(one, _Chat) else one)
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


def _tokenized_texts(texts: list[str], tokenizer: Any) -> list[list[int]]:
    if not texts:
        return []
    if tokenizer.eos_token_id is None:
        raise UserError(f"{tokenizer_name(tokenizer)}: no end-of-sequence token, needed after each text")
    form = _Chat(tokenizer, None, [], 0).turn_form() if tokenizer.chat_template else TurnForm()
    return tokenized_texts(texts, tokenizer, form.end)


def _masked(chats: Sequence[_Chat], loss_on: str) -> list[dict[str, list] | BadExample]:
    """Tokenize conversations, with loss on what the assistant says or on all."""
    forms: dict[str, TurnForm] = {}
    written = [_or_bad(partial(_written, chat, loss_on, forms)) for chat in chats]
    texts = [one.text for one in written if isinstance(one, _Written)]
    if not texts:
        return written
    tokenizer = chats[0].tokenizer
    options = {"return_offsets_mapping": True} if tokenizer.is_fast else {}
    encoded = tokenizer(
        texts, add_special_tokens=False, return_attention_mask=False, return_token_type_ids=False, **options
    )
    rows = iter(
        zip(*(encoded[name] for name in ("input_ids", "offset_mapping") if name in encoded), strict=True)
    )
    return [_row(one, tokenizer, *next(rows)) if isinstance(one, _Written) else one for one in written]


def _row(
    written: _Written, tokenizer: Any, ids: list[int], offsets: list[tuple[int, int]] | None = None
) -> dict:
    """Return the tokens of a conversation, and which of them its spans have."""
    mask = np.zeros(len(ids), bool)
    places = np.array(offsets).reshape(-1, 2) if offsets is not None else None
    for begin, end in written.spans:
        if places is not None:
            mask |= (places[:, 0] < end) & (places[:, 1] > begin)
            continue
        first, last = (
            tokenizer(written.text[:place], add_special_tokens=False)["input_ids"] for place in (begin, end)
        )
        if not written.continues or first != ids[: len(first)] or last != ids[: len(last)]:
            raise UserError(
                f"{tokenizer_name(tokenizer)}: its chat template does not write a conversation as a "
                "continuation of its beginning, and it is not a fast tokenizer, which could say where the response "
                "is; mark responses in the template with {% generation %} … {% endgeneration %}, or set loss_on: all"
            )
        mask[len(first) : len(last)] = True
    end_of_text = [] if written.stop is None else [written.stop]
    return {"input_ids": ids + end_of_text, "loss_mask": mask.tolist() + [True] * len(end_of_text)}


@dataclass(frozen=True)
class _Written:
    """What a template writes, and from where to where there is loss.

    continues: as of `WrittenChat`. stop: the token that is still to come, as the template ends the last turn with none.
    """

    text: str
    spans: Sequence[tuple[int, int]]
    continues: bool = True
    stop: int | None = None


def _written(chat: _Chat, loss_on: str, forms: dict[str, TurnForm]) -> _Written:
    """Write a conversation; forms: of the turns of the templates that are known."""
    template = chat.template
    if template not in forms:
        forms[template] = chat.turn_form()
    form = forms[template]
    if loss_on == "response" and chat.is_marked:
        text, spans = chat.marked_text()
        if form.leaves_open(text, spans):
            _warn_of_no_stop(chat.tokenizer, "leaves out of its generation marks what ends a turn")
        return _Written(text, spans)
    answers = chat.answers
    if loss_on == "all":
        last = len(chat.messages) - 1
        answers = [] if form.ends else [i for i in answers if i == last]
        if not answers:
            text = chat.text(chat.messages)
            return _Written(text, [(0, len(text))])
    try:
        turns = WrittenChat(chat.text, chat.messages, answers, form)
    except UnclearTurnError as error:
        raise BadExample(
            f"{tokenizer_name(chat.tokenizer)}: its chat template does not say where the loss of an example belongs:"
            f" {error}; change the example, use a template that writes all of it in order, or mark responses in the"
            " template with {% generation %} … {% endgeneration %}"
        ) from error
    stop = chat.tokenizer.eos_token_id if turns.stop == "" else None
    if turns.unstopped or (turns.stop == "" and stop is None):
        _warn_of_no_stop(chat.tokenizer, "ends turns of the assistant with no token")
    spans = turns.spans if loss_on == "response" else [(0, len(turns.text))]
    return _Written(turns.text, spans, turns.continues, stop)


_warnings: set[str] = set()  # that this process has printed


def _warn_of_no_stop(tokenizer: Any, reason: str) -> None:
    """Say once on stderr that a model will not learn to stop."""
    text = f"{tokenizer_name(tokenizer)}: its chat template {reason}: a model does not learn from it when to stop"
    if text not in _warnings:
        _warnings.add(text)
        print(text, file=sys.stderr)


@dataclass(frozen=True)
class _Chat:
    """A conversation, and the tokenizer's chat template and the tools that write it, which raise UserError where it
    writes none.

    answered: the message from which on there is loss.
    """

    tokenizer: Any
    tools: list[Any] | None
    messages: list[dict]
    answered: int

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

    def turn_form(self) -> TurnForm:
        """Read how the template writes turns."""
        return read_form(self.text, [str(token) for token in self.tokenizer.added_tokens_decoder.values()])

    def text(self, messages: Sequence[dict], opened: bool = False) -> str:
        """Write messages, opened for the assistant's next turn if so wanted."""
        apply = self.tokenizer.apply_chat_template
        return str(self._tried(apply, messages, tokenize=False, add_generation_prompt=opened))

    def marked_text(self) -> tuple[str, list[tuple[int, int]]]:
        """Write the conversation, and say where in it the template's marks are."""
        from transformers.utils.chat_template_utils import render_jinja_template

        options = {"chat_template": self.template, "return_assistant_tokens_mask": True}
        special = self.tokenizer.special_tokens_map
        (text,), (spans,) = self._tried(render_jinja_template, [self.messages], **options, **special)
        return text, spans

    def _tried(self, write: Callable[..., Any], messages: Sequence[Any], **options: Any) -> Any:
        from jinja2 import TemplateError

        try:
            return write(messages, tools=self.tools, **options)
        except (TemplateError, TypeError, AttributeError, LookupError) as error:  # of expressions
            raise BadExample(
                f"{tokenizer_name(self.tokenizer)}: its chat template refuses an example: {one_line(error)}"
            ) from error


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
