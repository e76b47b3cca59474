"""Turn an example into token ids and a mask of the tokens that the loss is computed on."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from typing import Any

import numpy as np

from fcsd.base.errors import UserError, one_line
from fcsd.data.dates import BEGAN, dated
from fcsd.data.examples import Completion, Conversation, read_example
from fcsd.data.marks import UnclearTurnError
from fcsd.data.messages import BadExample
from fcsd.data.template import message_form_of
from fcsd.data.texts import tokenized_texts
from fcsd.data.turns import TurnForm, WrittenChat, read_form


@contextlib.contextmanager
def template_errors(name: str, what: str) -> Iterator[None]:
    """Turn what a chat template raises, or jinja2 of it, into a UserError; what: what
    it was applied to.
    """
    from jinja2 import TemplateError

    # The others are of expressions in it.
    kinds = (
        TypeError,
        AttributeError,
        LookupError,
        ArithmeticError,
        ValueError,
        RecursionError,
    )
    try:
        yield
    except (TemplateError, *kinds) as error:
        raise UserError(
            f"{name}: its chat template refuses {what}: {one_line(error)}"
        ) from error


def tokenizer_name(tokenizer: Any) -> str:
    """Name a tokenizer in an error: by its folder, or by its class where it was made in memory."""
    return (
        "tokenizer"
        f" {getattr(tokenizer, 'name_or_path', '') or type(tokenizer).__name__}"
    )


def tokenize_examples(
    examples: Sequence[Mapping[str, Any]],
    columns: Mapping[Any, str],
    tokenizer: Any,
    loss_on: str = "response",
    date: datetime = BEGAN,
) -> list[dict[str, Any] | BadExample]:
    """Tokenize examples as {"input_ids": […], "loss_mask": […]}; the mask says which
    tokens are to be predicted.

    columns: {"messages": …} | {"prompt": …, "response": …} | {"prompt": …, "completion": …} | {"text": …} |
    {"input_ids": …}, names of columns, and what stands beside them (`fcsd.data.columns`). Messages, and prompt (with
    `input` in a paragraph of its own, after `history`) and response, go through the chat template, which is given tools
    and options, and loss is on what the assistant says, its end of turn included, or on all tokens for loss_on="all".
    Prompt and response may be lists of messages; the response's alone carry loss. Prompt and completion that are text
    are taken as they are written, as TRL does, and loss is on what the completion adds to the tokens, and on the
    end-of-sequence token. Text gets an end-of-sequence token, and loss is on all of it. Tokens are taken as they are,
    without those that the attention mask leaves out; loss is where labels and masks say so. The tokenizer is called as
    seldom as can be: each call has its price.

    date: what the template writes for today's.

    Returns: one entry an example; a BadExample where the template refuses it, leaves
        out a call or an answer or writes it where it cannot be told apart, or where a
        column holds something else.

    Raises: UserError when the tokenizer has no chat template where one is needed, or
    one that writes no tools where there are some.
    """
    read = [
        _or_bad(partial(_read, example, columns, tokenizer, loss_on, date))
        for example in examples
    ]
    texts = iter(
        _tokenized_texts([one for one in read if isinstance(one, str)], tokenizer)
    )
    completions = iter(
        _tokenized_completions(
            [one for one in read if isinstance(one, Completion)], tokenizer
        )
    )
    chats = iter(_masked([one for one in read if isinstance(one, _Chat)], loss_on))
    outputs: list[Any] = []
    for one in read:
        if isinstance(one, str):
            ids = next(texts)
            outputs.append({"input_ids": ids, "loss_mask": np.ones(len(ids), bool)})
        elif isinstance(one, Completion):
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
            outputs.append(next(chats) if isinstance(one, _Chat) else one)
    return outputs


def _or_bad(make: Callable[[], Any]) -> Any:
    """Return what is made, or why the example is bad."""
    try:
        return make()
    except BadExample as error:
        return error


def _read(
    example: Mapping[str, Any],
    columns: Mapping[Any, str],
    tokenizer: Any,
    loss_on: str,
    date: datetime,
) -> dict | str | Completion | _Chat:
    read = read_example(example, columns)
    if not isinstance(read, Conversation):
        return read
    if not tokenizer.chat_template:
        raise UserError(
            f"{tokenizer_name(tokenizer)}: no chat template, needed for prompts and"
            " messages; use the tokenizer of an instruct model, add a"
            " chat_template.jinja, or give plain text under `columns: {text: …}`"
        )
    chat = _Chat(
        tokenizer,
        read.tools,
        read.messages,
        read.answered,
        read.silent(loss_on),
        read.options,
        date,
    )
    form = message_form_of(tokenizer, chat.template, read)
    if isinstance(form, str):
        raise BadExample(f"{tokenizer_name(tokenizer)}: its chat template {form}")
    return replace(
        chat, messages=form.applied(read.messages), tools=form.tools(read.tools)
    )


def _tokenized_texts(texts: list[str], tokenizer: Any) -> list[list[int]]:
    if not texts:
        return []
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"{tokenizer_name(tokenizer)}: no end-of-sequence token, needed after each"
            " text"
        )
    form = (
        _Chat(tokenizer, None, [], 0).turn_form()
        if tokenizer.chat_template
        else TurnForm()
    )
    return tokenized_texts(texts, tokenizer, form.end)


def _tokenized_completions(
    texts: list[Completion], tokenizer: Any
) -> list[tuple[list[int], int]]:
    """Return token ids, and where the completion begins: where they differ from those
    of the prompt alone (TRL).
    """
    whole = _tokenized_texts(
        [text.prompt + text.completion for text in texts], tokenizer
    )
    prompts = _tokenized_texts([text.prompt for text in texts], tokenizer)
    end, begins = tokenizer.eos_token_id, []
    for text, ids, prompt in zip(texts, whole, prompts, strict=True):
        # Without the end that a text gets.
        own = (
            prompt
            if text.prompt.endswith(tokenizer.eos_token) or prompt[-1] != end
            else prompt[:-1]
        )
        begins.append(_common(own, ids))
    return list(zip(whole, begins, strict=True))


def _masked(chats: Sequence[_Chat], loss_on: str) -> list[dict[str, list] | BadExample]:
    """Tokenize conversations, with loss on what the assistant says or on all."""
    forms: dict[tuple[str, str], TurnForm] = {}
    written = [_or_bad(partial(_written, chat, loss_on, forms)) for chat in chats]
    texts = [one.text for one in written if isinstance(one, _Written)]
    if not texts:
        return written
    tokenizer = chats[0].tokenizer
    options = {"return_offsets_mapping": True} if tokenizer.is_fast else {}
    encoded = tokenizer(
        texts,
        add_special_tokens=False,
        return_attention_mask=False,
        return_token_type_ids=False,
        **options,
    )
    rows = iter(
        zip(
            *(
                encoded[name]
                for name in ("input_ids", "offset_mapping")
                if name in encoded
            ),
            strict=True,
        )
    )
    return [
        _row(one, tokenizer, *next(rows)) if isinstance(one, _Written) else one
        for one in written
    ]


def _row(
    written: _Written,
    tokenizer: Any,
    ids: list[int],
    offsets: list[tuple[int, int]] | None = None,
) -> dict:
    """Return the tokens of a conversation, and which of them its spans have."""
    mask = np.zeros(len(ids), bool)
    places = np.array(offsets).reshape(-1, 2) if offsets is not None else None
    for begin, end in written.spans:
        if places is not None:
            mask |= (places[:, 0] < end) & (places[:, 1] > begin)
            continue
        first, last = (
            tokenizer(written.text[:place], add_special_tokens=False)["input_ids"]
            for place in (begin, end)
        )
        if (
            not written.continues
            or first != ids[: len(first)]
            or last != ids[: len(last)]
        ):
            raise UserError(
                f"{tokenizer_name(tokenizer)}: its chat template does not write a"
                " conversation as a continuation of its beginning, and it is not a"
                " fast tokenizer, which could say where the response is; mark"
                " responses in the template with {% generation %} … {%"
                " endgeneration %}, or set loss_on: all"
            )
        mask[len(first) : len(last)] = True
    end_of_text = [] if written.stop is None else [written.stop]
    return {
        "input_ids": ids + end_of_text,
        "loss_mask": mask.tolist() + [True] * len(end_of_text),
    }


@dataclass(frozen=True)
class _Written:
    """What a template writes, and from where to where there is loss.

    continues: as of `WrittenChat`. stop: the token that is still to come, as the
    template ends the last turn with none.
    """

    text: str
    spans: Sequence[tuple[int, int]]
    continues: bool = True
    stop: int | None = None


def _written(
    chat: _Chat, loss_on: str, forms: dict[tuple[str, str], TurnForm]
) -> _Written:
    """Write a conversation; forms: of the turns of the templates that are known."""
    key = chat.template, json.dumps(chat.options, sort_keys=True, default=str)
    if key not in forms:
        forms[key] = chat.turn_form()
    form = forms[key]
    if loss_on == "response" and chat.is_marked:
        text, spans = chat.marked_text()
        if form.leaves_open(text, spans):
            _warn_of_no_stop(
                chat.tokenizer, "leaves out of its generation marks what ends a turn"
            )
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
            f"{tokenizer_name(chat.tokenizer)}: its chat template does not say where"
            f" the loss of an example belongs: {error}; change the example, use a"
            " template that writes all of it in order, or mark responses in the"
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
    text = (
        f"{tokenizer_name(tokenizer)}: its chat template {reason}: a model does not"
        " learn from it when to stop"
    )
    if text not in _warnings:
        _warnings.add(text)
        print(text, file=sys.stderr)


@dataclass(frozen=True)
class _Chat:
    """A conversation, and the tokenizer's chat template and the tools that write it,
    which raise UserError where it writes none.

    answered: the message from which on there is loss. silent: messages of the assistant
    without loss. options: of the template, beside ours. date: what it writes for
    today's.
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
                f"{tokenizer_name(self.tokenizer)}: its chat template writes no tools,"
                " and the data have a column of them; use a template that does, or"
                " remove the column 'tools' from the data"
            )

    @property
    def template(self) -> str:
        """The template of conversations with these tools; a tokenizer may have another
        one for those without.
        """
        return str(self.tokenizer.get_chat_template(tools=self.tools))

    @property
    def is_marked(self) -> bool:
        """Whether the template says which tokens are the assistant's, and loss is on
        all of them.
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
        """The messages that loss is on, when the template does not say where they are."""
        roles = enumerate(message["role"] for message in self.messages)
        return [
            i
            for i, role in roles
            if role == "assistant" and i >= self.answered and i not in self.silent
        ]

    def turn_form(self) -> TurnForm:
        """Read how the template writes turns."""
        return read_form(
            self.text,
            [str(token) for token in self.tokenizer.added_tokens_decoder.values()],
        )

    def text(self, messages: Sequence[dict], opened: bool = False) -> str:
        """Write messages, opened for the assistant's next turn if so wanted."""
        apply = self.tokenizer.apply_chat_template
        options = {
            "chat_template": dated(self.template, self.date),
            "add_generation_prompt": opened,
        }
        return str(self._tried(apply, messages, tokenize=False, **options))

    def marked_text(self) -> tuple[str, list[tuple[int, int]]]:
        """Write the conversation, and say where in it the template's marks are."""
        from transformers.utils.chat_template_utils import render_jinja_template

        options = {
            "chat_template": dated(self.template, self.date),
            "return_assistant_tokens_mask": True,
        }
        special = self.tokenizer.special_tokens_map
        (text,), (spans,) = self._tried(
            render_jinja_template, [self.messages], **options, **special
        )
        return text, spans

    def _tried(
        self, write: Callable[..., Any], messages: Sequence[Any], **options: Any
    ) -> Any:
        try:
            with template_errors(tokenizer_name(self.tokenizer), "an example"):
                return write(messages, tools=self.tools, **options, **self.options)
        except UserError as error:
            raise BadExample(str(error)) from error


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Count the tokens with which both begin."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(one), len(other)))
