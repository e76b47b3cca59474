"""Turn an example into token ids and a mask of the tokens that carry loss."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from typing import Any

import numpy as np

from fcsd.base.errors import UserError
from fcsd.data.examples import Completion, Conversation, read_example
from fcsd.data.marks import UnclearTurnError
from fcsd.data.messages import BadExample
from fcsd.data.rendering import BEGAN, dated, template_errors, tokenizer_name
from fcsd.data.template import message_form_of
from fcsd.data.texts import tokenized_texts
from fcsd.data.turns import TurnForm, WrittenChat, read_form


def tokenize_examples(
    examples: Sequence[Mapping[str, Any]],
    columns: Mapping[Any, str],
    tokenizer: Any,
    loss_on: str = "response",
    date: datetime = BEGAN,
) -> list[dict[str, Any] | BadExample]:
    """Tokenize examples as {"input_ids": […], "loss_mask": […]}; the mask marks the
    tokens to be predicted.

    columns: {"messages": …} | {"prompt": …, "response": …} | {"prompt": …, "completion": …} | {"text": …} |
    {"input_ids": …}, names of columns, and any that accompany them
    (`fcsd.data.columns`).

    - Messages, and prompt (after `history`, with `input` in a paragraph of its own) and
      response, go through the chat template, with tools and options. Loss is on the
      assistant's text, its end of turn included, or on all tokens for loss_on="all".
      Prompt and response may be lists of messages; only those of the response carry
      loss.
    - Prompt and completion that are text are taken verbatim, as TRL does. Loss is on
      the tokens that the completion adds, and on the end-of-sequence token.
    - Text gets an end-of-sequence token, and loss is on all of it.
    - Tokens are taken as they are, without those that the attention mask leaves out;
      loss is where labels and masks agree.

    date: the day that the template writes as today's.

    Returns: one entry for each example; a BadExample if the template refuses it, leaves
        out a call or an answer or writes it where it cannot be told apart, or if a
        column has a value of another form.

    Raises: UserError if the tokenizer has no chat template where one is needed, or one
    that writes no tools where there are some.
    """
    # Examples are tokenized together by form, because each call of a tokenizer is
    # costly.
    read = [
        _result_or_bad_example(
            partial(_read_row, example, columns, tokenizer, loss_on, date)
        )
        for example in examples
    ]
    texts = iter(
        _tokenized_texts([item for item in read if isinstance(item, str)], tokenizer)
    )
    completions = iter(
        _tokenized_completions(
            [item for item in read if isinstance(item, Completion)], tokenizer
        )
    )
    chats = iter(
        _tokenize_chats([item for item in read if isinstance(item, _Chat)], loss_on)
    )
    outputs: list[Any] = []
    for item in read:
        if isinstance(item, str):
            ids = next(texts)
            outputs.append({"input_ids": ids, "loss_mask": np.ones(len(ids), bool)})
        elif isinstance(item, Completion):
            ids, begin = next(completions)
            outputs.append(
                {
                    "input_ids": ids,
                    "loss_mask": (
                        np.arange(len(ids)) >= (0 if loss_on == "all" else begin)
                    ),
                }
            )
        else:
            outputs.append(next(chats) if isinstance(item, _Chat) else item)
    return outputs


def _result_or_bad_example(make: Callable[[], Any]) -> Any:
    """Return the result of a call, or the error of a bad example."""
    try:
        return make()
    except BadExample as error:
        return error


def _read_row(
    example: Mapping[str, Any],
    columns: Mapping[Any, str],
    tokenizer: Any,
    loss_on: str,
    date: datetime,
) -> dict | str | Completion | _Chat:
    read = read_example(example, columns)
    if isinstance(read, str):
        return check_text(read)
    if isinstance(read, Completion):
        check_text(read.prompt + read.completion)
    if not isinstance(read, Conversation):
        return read
    check_has_template(tokenizer)
    chat = _Chat(
        tokenizer,
        read.tools,
        read.messages,
        read.answered,
        read.silent(loss_on),
        read.options,
        date,
    )
    # The form in which this template accepts the conversation, or the reason it refuses
    # it.
    form = message_form_of(tokenizer, chat.template, read)
    if isinstance(form, str):
        raise BadExample(f"{tokenizer_name(tokenizer)}: its chat template {form}")
    return replace(
        chat, messages=form.applied(read.messages), tools=form.tools(read.tools)
    )


def check_has_template(tokenizer: Any) -> None:
    """Raise UserError where a tokenizer has no chat template for conversations."""
    if not tokenizer.chat_template:
        raise UserError(
            f"{tokenizer_name(tokenizer)}: no chat template, needed for prompts and"
            " messages; use the tokenizer of an instruct model, add a"
            " chat_template.jinja, or give plain text under `columns: {text: …}`"
        )


def check_text(text: str) -> str:
    """Return a text; BadExample if a tokenizer cannot read it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadExample(
            f"a text holds half a character, {text[error.start]!a}, as JSON has it where"
            " an emoji was cut"
        ) from None
    return text


def _tokenized_texts(texts: list[str], tokenizer: Any) -> list[list[int]]:
    if not texts:
        return []
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"{tokenizer_name(tokenizer)}: no end-of-sequence token, needed after each"
            " text"
        )
    # A text that was written with this template may end with the end of a turn, and
    # then needs no other.
    if tokenizer.chat_template:
        form = _Chat(tokenizer, None, [], 0).turn_form()
    else:
        form = TurnForm()
    return tokenized_texts(texts, tokenizer, form.end)


def _tokenized_completions(
    texts: list[Completion], tokenizer: Any
) -> list[tuple[list[int], int]]:
    """Return token ids, and the index of the completion's first token: the first one
    that differs from the tokens of the prompt alone (TRL).
    """
    tokenized = _tokenized_texts(
        [text.prompt + text.completion for text in texts], tokenizer
    )
    prompts = _tokenized_texts([text.prompt for text in texts], tokenizer)
    end, begins = tokenizer.eos_token_id, []
    for text, ids, prompt in zip(texts, tokenized, prompts, strict=True):
        # Tokenized alone, the prompt got an end-of-sequence token, which is dropped.
        if text.prompt.endswith(tokenizer.eos_token) or prompt[-1] != end:
            prompt_ids = prompt
        else:
            prompt_ids = prompt[:-1]
        begins.append(_num_common(prompt_ids, ids))
    return list(zip(tokenized, begins, strict=True))


def _tokenize_chats(
    chats: Sequence[_Chat], loss_on: str
) -> list[dict[str, list] | BadExample]:
    """Tokenize conversations, with loss on the assistant's text or on all of it."""
    forms: dict[tuple[str, str], TurnForm] = {}
    written = [
        _result_or_bad_example(partial(_write_chat, chat, loss_on, forms))
        for chat in chats
    ]
    # All conversations are tokenized in a single call; bad ones are passed through.
    texts = [
        chat_text.text for chat_text in written if isinstance(chat_text, _WrittenText)
    ]
    if not texts:
        return written
    tokenizer = chats[0].tokenizer
    # Only fast tokenizers tell which characters a token covers.
    options = {"return_offsets_mapping": True} if tokenizer.is_fast else {}
    encoded = tokenizer(
        texts,
        add_special_tokens=False,
        return_attention_mask=False,
        return_token_type_ids=False,
        **options,
    )
    columns = [
        encoded[name] for name in ("input_ids", "offset_mapping") if name in encoded
    ]
    encoded_rows = zip(*columns, strict=True)
    rows: list[dict[str, list] | BadExample] = []
    for chat_text in written:
        # Bad ones have no text, and stay in their places.
        if isinstance(chat_text, _WrittenText):
            rows.append(_row(chat_text, tokenizer, *next(encoded_rows)))
        else:
            rows.append(chat_text)
    return rows


def _row(
    written: _WrittenText,
    tokenizer: Any,
    ids: list[int],
    offsets: list[tuple[int, int]] | None = None,
) -> dict:
    """Return the tokens of a conversation, and the mask of those in its spans."""
    mask = np.zeros(len(ids), bool)
    token_spans = np.array(offsets).reshape(-1, 2) if offsets is not None else None
    # With offsets, a token that a span touches only in part carries loss, too.
    for begin, end in written.spans:
        if token_spans is not None:
            mask |= (token_spans[:, 0] < end) & (token_spans[:, 1] > begin)
            continue
        # Without offsets, a beginning of the text is tokenized alone, and its number of
        # tokens tells the position; that holds only where these tokens come first.
        first, last = (
            tokenizer(written.text[:position], add_special_tokens=False)["input_ids"]
            for position in (begin, end)
        )
        if (
            not written.continues
            or first != ids[: len(first)]
            or last != ids[: len(last)]
        ):
            raise UserError(
                f"{tokenizer_name(tokenizer)}: its chat template does not extend a"
                " conversation by appending to it, and the tokenizer is not a fast one,"
                " which could locate the response; mark responses in the template with"
                " {% generation %} … {% endgeneration %}, or set loss_on: all"
            )
        mask[len(first) : len(last)] = True
    end_of_text = [] if written.stop is None else [written.stop]
    return {
        "input_ids": ids + end_of_text,
        "loss_mask": mask.tolist() + [True] * len(end_of_text),
    }


@dataclass(frozen=True)
class _WrittenText:
    """The text that a template writes, and the spans of it that carry loss.

    continues: as in `WrittenChat`. stop: the token to be appended where the template
    ends the last turn with none.
    """

    text: str
    spans: Sequence[tuple[int, int]]
    continues: bool = True
    stop: int | None = None


def _write_chat(
    chat: _Chat, loss_on: str, forms: dict[tuple[str, str], TurnForm]
) -> _WrittenText:
    """Write a conversation. forms: a cache of the form of turns, by template and
    options.
    """
    key = chat.template, json.dumps(chat.options, sort_keys=True, default=str)
    if key not in forms:
        forms[key] = chat.turn_form()
    form = forms[key]
    # A template's own marks of the assistant's text are exact, so they are preferred.
    if loss_on == "response" and chat.is_marked:
        text, spans = chat.marked_text()
        check_text(text)
        if form.leaves_open(text, spans):
            _warn_of_no_stop(
                chat.tokenizer,
                "does not include the end of a turn in its generation marks",
            )
        return _WrittenText(text, spans)
    # With loss on all tokens, only the end of the last turn must be known.
    answers = chat.answers
    if loss_on == "all":
        last = len(chat.messages) - 1
        answers = [] if form.ends else [i for i in answers if i == last]
        # Without an answer to close, all of the text is taken as it is.
        if not answers:
            text = check_text(chat.text(chat.messages))
            return _WrittenText(text, [(0, len(text))])
    try:
        turns = WrittenChat(chat.text, chat.messages, answers, form)
    except UnclearTurnError as error:
        raise BadExample(
            f"{tokenizer_name(chat.tokenizer)}: its chat template does not show which"
            f" tokens of an example carry loss: {error}; change the example, use a"
            " template that writes all of it in order, or mark responses in the"
            " template with {% generation %} … {% endgeneration %}"
        ) from error
    check_text(turns.text)
    # An empty stop stands for the end of text, which only the tokenizer has as a token.
    stop = chat.tokenizer.eos_token_id if turns.stop == "" else None
    if turns.unstopped or (turns.stop == "" and stop is None):
        _warn_of_no_stop(
            chat.tokenizer, "does not end the assistant's turns with a token"
        )
    spans = turns.spans if loss_on == "response" else [(0, len(turns.text))]
    return _WrittenText(turns.text, spans, turns.continues, stop)


_warnings: set[str] = set()  # that this process has printed


def _warn_of_no_stop(tokenizer: Any, reason: str) -> None:
    """Warn once on stderr that a model will not learn to stop."""
    text = (
        f"{tokenizer_name(tokenizer)}: its chat template {reason}, so a model does not"
        " learn from it when to stop"
    )
    if text not in _warnings:
        _warnings.add(text)
        print(text, file=sys.stderr)


@dataclass(frozen=True)
class _Chat:
    """A conversation with the tokenizer whose chat template writes it; UserError where
    there are tools and the template writes none.

    answered: index of the first message that loss may be on. silent: messages of the
    assistant without loss. options: of the template, from the data. date: the day that
    the template writes as today's.
    """

    tokenizer: Any
    tools: list[Any] | None
    messages: list[dict]
    answered: int
    silent: frozenset[int] = frozenset()
    options: Mapping[str, Any] = field(default_factory=dict)
    date: datetime = BEGAN

    def __post_init__(self) -> None:
        if self.tools and "tools" not in self.template:
            raise UserError(
                f"{tokenizer_name(self.tokenizer)}: its chat template does not write"
                " tools, but the data have a column 'tools'; use a template that writes"
                " tools, or remove the column"
            )

    @property
    def template(self) -> str:
        """The template for conversations with these tools; a tokenizer may have a
        separate one for conversations without.
        """
        return str(self.tokenizer.get_chat_template(tools=self.tools))

    @property
    def is_marked(self) -> bool:
        """Whether the template marks the assistant's tokens, and loss is on all of
        them.
        """
        earlier = any(
            message["role"] == "assistant" for message in self.messages[: self.answered]
        )
        return (
            not earlier
            and not self.silent
            and re.search(r"\{%-?\s*generation\s*-?%\}", self.template) is not None
        )

    @property
    def answers(self) -> list[int]:
        """The messages that carry loss, for a template that does not mark them."""
        roles = enumerate(message["role"] for message in self.messages)
        return [
            i
            for i, role in roles
            if role == "assistant" and i >= self.answered and i not in self.silent
        ]

    def turn_form(self) -> TurnForm:
        """Find out how the template writes turns."""
        return read_form(
            self.text,
            [str(token) for token in self.tokenizer.added_tokens_decoder.values()],
        )

    def text(self, messages: Sequence[dict], opened: bool = False) -> str:
        """Write messages; opened: with the opening of the assistant's next turn."""
        apply = self.tokenizer.apply_chat_template
        options = {
            "chat_template": dated(self.template, self.date),
            "add_generation_prompt": opened,
        }
        return str(self._call_template(apply, messages, tokenize=False, **options))

    def marked_text(self) -> tuple[str, list[tuple[int, int]]]:
        """Write the conversation; return it with the spans that the template marks."""
        from transformers.utils.chat_template_utils import render_jinja_template

        options = {
            "chat_template": dated(self.template, self.date),
            "return_assistant_tokens_mask": True,
        }
        special = self.tokenizer.special_tokens_map
        (text,), (spans,) = self._call_template(
            render_jinja_template, [self.messages], **options, **special
        )
        return text, spans

    def _call_template(
        self, write: Callable[..., Any], messages: Sequence[Any], **options: Any
    ) -> Any:
        try:
            with template_errors(tokenizer_name(self.tokenizer), "an example"):
                return write(messages, tools=self.tools, **options, **self.options)
        except UserError as error:
            raise BadExample(str(error)) from error


def _num_common(first: Sequence[int], second: Sequence[int]) -> int:
    """Count the tokens that both have in common at the beginning."""
    pairs = enumerate(zip(first, second, strict=False))
    return next(
        (index for index, (a, b) in pairs if a != b), min(len(first), len(second))
    )
