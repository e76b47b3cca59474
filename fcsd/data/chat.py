"""Turn an example into token ids and a mask of the tokens that the loss is computed on."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from fcsd.base.errors import UserError, one_line
from fcsd.data.examples import Completion, Conversation, read_example
from fcsd.data.messages import BadExample
from fcsd.data.template import message_form_of

_OPEN, _MASK = "add_generation_prompt", "return_assistant_tokens_mask"  # options of a chat template


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

    columns: {"messages": …} | {"prompt": …, "response": …} | {"prompt": …, "completion": …} | {"text": …} |
    {"input_ids": …}, names of columns, and what stands beside them (`fcsd.data.columns`). Messages, and prompt (with
    `input` in a paragraph of its own, after `history`) and response, go through the chat template, which is given tools
    and options, and loss is on what the assistant says, its end of turn included, or on all tokens for loss_on="all".
    Prompt and response may be lists of messages; the response's alone carry loss. Prompt and completion that are text
    are taken as they are written, as TRL does, and loss is on what the completion adds to the tokens, and on the
    end-of-sequence token. Text gets an end-of-sequence token, and loss is on all of it. Tokens are taken as they are,
    without those that the attention mask leaves out; loss is where labels and masks say so. The tokenizer is called as
    seldom as can be: each call has its price.

    Returns: one entry an example; a BadExample where the template refuses it or a column holds something else.

    Raises: UserError when the tokenizer has no chat template where one is needed, or one that writes no tools where
    there are some.
    """
    read = [_or_bad(partial(_read, example, columns, tokenizer, loss_on)) for example in examples]
    texts = iter(_tokenized_texts([one for one in read if isinstance(one, str)], tokenizer))
    completions = iter(
        _tokenized_completions([one for one in read if isinstance(one, Completion)], tokenizer)
    )
    _encode_ahead([one for one in read if isinstance(one, _Chat)], loss_on)
    outputs: list[Any] = []
    for one in read:
        if isinstance(one, str):
            ids = next(texts)
            outputs.append({"input_ids": ids, "loss_mask": np.ones(len(ids), bool)})
        elif isinstance(one, Completion):
            ids, begin = next(completions)
            outputs.append(
                {"input_ids": ids, "loss_mask": np.arange(len(ids)) >= (0 if loss_on == "all" else begin)}
            )
        else:
            outputs.append(_or_bad(partial(_masked, one, loss_on)) if isinstance(one, _Chat) else one)
    return outputs


def _or_bad(make: Callable[[], Any]) -> Any:
    """Return what is made, or why the example is bad."""
    try:
        return make()
    except BadExample as error:
        return error


def _read(
    example: Mapping[str, Any], columns: Mapping[Any, str], tokenizer: Any, loss_on: str
) -> dict | str | Completion | _Chat:
    read = read_example(example, columns)
    if not isinstance(read, Conversation):
        return read
    if not tokenizer.chat_template:
        raise UserError(
            f"{tokenizer_name(tokenizer)}: no chat template, needed for prompts and messages; use the "
            "tokenizer of an instruct model, add a chat_template.jinja, or give plain text under "
            "`columns: {text: …}`"
        )
    chat = _Chat(tokenizer, read.tools, read.messages, read.answered, read.silent(loss_on), read.options)
    form = message_form_of(tokenizer, chat.template, read)
    if isinstance(form, str):
        raise BadExample(f"{tokenizer_name(tokenizer)}: its chat template {form}")
    return replace(chat, messages=form.applied(read.messages), tools=form.tools(read.tools))


def _encode_ahead(chats: Sequence[_Chat], loss_on: str) -> None:
    """Encode what the masks of conversations without tools will ask for; what a template refuses is left to them."""
    wanted: dict[str, list[tuple[_Chat, int]]] = {}
    for chat in chats:
        if chat.tools is None and not chat.options:
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


def _tokenized_completions(texts: list[Completion], tokenizer: Any) -> list[tuple[list[int], int]]:
    """Return token ids, and where the completion begins: where they differ from those of the prompt alone (TRL)."""
    whole = _tokenized_texts([text.prompt + text.completion for text in texts], tokenizer)
    prompts = _tokenized_texts([text.prompt for text in texts], tokenizer)
    end, begins = tokenizer.eos_token_id, []
    for text, ids, prompt in zip(texts, whole, prompts, strict=True):
        # Without the end that a text gets.
        own = prompt if text.prompt.endswith(tokenizer.eos_token) or prompt[-1] != end else prompt[:-1]
        begins.append(_common(own, ids))
    return list(zip(whole, begins, strict=True))


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

    answered: the message from which on there is loss. silent: messages of the assistant without loss. options: of the
    template, beside ours. ahead: what was encoded before it is asked for, by option and number of messages.
    """

    tokenizer: Any
    tools: list[Any] | None
    messages: list[dict]
    answered: int
    silent: frozenset[int] = frozenset()
    options: Mapping[str, Any] = field(default_factory=dict)
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
        return (
            not earlier
            and not self.silent
            and re.search(r"\{%-?\s*generation\s*-?%\}", self.template) is not None
        )

    @property
    def answers(self) -> list[int]:
        """The messages that loss is on, when the template does not say where they are."""
        roles = enumerate(message["role"] for message in self.messages)
        return [i for i, role in roles if role == "assistant" and i >= self.answered and i not in self.silent]

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
        from jinja2 import TemplateError

        try:
            return self.tokenizer.apply_chat_template(messages, tools=self.tools, **self.options, **options)
        except (TemplateError, TypeError, AttributeError, LookupError) as error:  # of expressions
            raise BadExample(
                f"{tokenizer_name(self.tokenizer)}: its chat template refuses an example: {one_line(error)}"
            ) from error


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


def _common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Count the characters, or tokens, with which both begin."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(one), len(other)))
