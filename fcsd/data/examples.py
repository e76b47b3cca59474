"""Read an example: its conversation, its text or its tokens, by the meaning of its
columns.

An example whose columns ask for something unsupported is a `BadExample`.

Not covered: the content of messages (`fcsd.data.messages`); the forms that a chat
template accepts (`fcsd.data.template`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fcsd.base.errors import UserError
from fcsd.data.batches import NO_LOSS
from fcsd.data.messages import (
    LOSS_KEYS,
    BadExample,
    all_texts,
    decoded_json,
    messages_of,
    short,
)

MASKS = ("completion_mask", "assistant_masks", "loss_mask")
"""Columns beside tokens that mark those with loss."""


@dataclass(frozen=True)
class Conversation:
    """Messages for a chat template, and its tools and options.

    answered: index of the first message that loss may be on, if the assistant wrote it.
    loss_keys: messages with keys of their own that switch their loss on or off.
    """

    messages: list[dict]
    answered: int = 0
    tools: list[Any] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    loss_keys: dict[int, bool] = field(default_factory=dict)

    def silent(self, loss_on: str) -> frozenset[int]:
        """Return the messages of the assistant that carry no loss.

        Raises: BadExample where a message's key contradicts `loss_on`.
        """
        silent = set()
        # A key may exempt an answer from the loss; otherwise it must agree with
        # `loss_on`.
        for index, learned in self.loss_keys.items():
            role = self.messages[index]["role"]
            is_answer = role == "assistant" and index >= self.answered
            on_all = loss_on == "all"
            without_all = on_all and not learned
            beside_answers = not on_all and not is_answer and learned
            if without_all or beside_answers:
                having = "with" if learned else "without"
                tokens = "all tokens" if on_all else "what the assistant says in answer"
                raise BadExample(
                    f"message {index + 1}, of role {role!r}, is marked {having} loss,"
                    f" but `loss_on: {loss_on}` puts loss on {tokens}; remove its key"
                    f" ({', '.join(LOSS_KEYS)}), or change loss_on"
                )
            if not learned and is_answer:
                silent.add(index)
        return frozenset(silent)


@dataclass(frozen=True)
class Completion:
    """A prompt and the text that follows it, both verbatim."""

    prompt: str
    completion: str


def read_example(
    example: Mapping[str, Any], columns: Mapping[Any, str]
) -> dict[str, list] | str | Completion | Conversation:
    """Return tokens with their loss mask, a text, a completion or a conversation.

    Raises: BadExample if a column has a value of the wrong form.
    """
    if "input_ids" in columns:
        return _tokens(example, columns)
    if "text" in columns:
        return _text(example, columns["text"])
    if "completion" in columns and isinstance(example[columns["prompt"]], str):
        return _completion(example, columns)
    messages, answered = _conversation(example, columns)
    system = _system(example, columns, messages)
    messages = [*system, *messages]
    loss_keys: dict[int, bool] = {}
    # The keys are removed from the messages, since templates do not expect them.
    for index, message in enumerate(messages):
        switches = {bool(message.pop(key)) for key in LOSS_KEYS if key in message}
        if len(switches) > 1:
            raise BadExample(
                f"message {index + 1}: its keys {', '.join(LOSS_KEYS)} contradict"
                " each other"
            )
        loss_keys |= dict.fromkeys([index] if switches else [], True in switches)
    options = _options(example, columns)
    return Conversation(
        messages,
        # The added system message moves the first answer by one.
        answered + len(system) if answered else 0,
        _tools(example, columns),
        options,
        loss_keys,
    )


def example_texts(example: Mapping[str, Any], columns: Mapping[Any, str]) -> list[str]:
    """Return the texts of an example: those in each message, or of each column.

    Raises: BadExample if a column has a value of the wrong form; UserError for token
    ids, which have no text.
    """
    # All texts count, not only those with loss: a prompt may hold a test item, too.
    if "text" in columns:
        return [_text(example, columns["text"])]
    read = read_example(example, columns)
    if isinstance(read, Completion):
        return [read.prompt, read.completion]
    if isinstance(read, Conversation):
        # A template may write all of a message: thoughts and calls, too.
        return [
            text
            for message in read.messages
            for key, value in message.items()
            if key != "role"
            for text in all_texts(value)
        ]
    raise UserError(
        "token ids cannot be compared with test items; give messages or text, or their"
        " text in a column `text` beside them, or set decontaminate: null"
    )


# ---- tokens


def _tokens(example: Mapping[str, Any], columns: Mapping[Any, str]) -> dict[str, list]:
    """Return the tokens that are attended to; loss is where labels and all masks agree."""
    ids = _list(example, columns["input_ids"])
    if "attention_mask" in columns:
        attended = _list(example, columns["attention_mask"])
    else:
        attended = [1] * len(ids)
    # Several masks may be given; a token carries loss only if all allow it.
    masks = {
        columns[name]: _list(example, columns[name])
        for name in MASKS
        if name in columns and example[columns[name]] is not None
    }
    # An attention mask that numbers packed examples, or has two dimensions, is refused,
    # too.
    for name, mask in (masks | {columns.get("attention_mask", ""): attended}).items():
        if len(mask) != len(ids) or any(value not in (0, 1) for value in mask):
            raise BadExample(
                f"column {name!r}: 0 or 1 is needed for each of the {len(ids)} tokens,"
                f" got {len(mask)}: {short(mask)}"
            )
    if masks:
        has_loss = [all(values) for values in zip(*masks.values(), strict=True)]
    else:
        has_loss = [True] * len(ids)
    labels = _list(example, columns["labels"]) if "labels" in columns else ids
    if not len(ids) == len(labels) == len(attended) or any(
        label not in (token, NO_LOSS) for token, label in zip(ids, labels, strict=True)
    ):
        raise BadExample(
            f"column {columns.get('labels', columns['input_ids'])!r}: each label must"
            f" be the token of its own position, or {NO_LOSS} where there is no loss"
            f" (they are shifted later), got {short(labels)} for {short(ids)}"
        )
    # Labels and masks may both be given, but must not contradict each other.
    labelled = [label != NO_LOSS for label in labels]
    differ = []
    if masks and "labels" in columns:
        differ = [
            position
            for position, is_attended in enumerate(attended)
            if is_attended and labelled[position] != has_loss[position]
        ]
    if differ:
        raise BadExample(
            f"columns {columns['labels']!r} and {', '.join(map(repr, masks))}: they"
            f" disagree about loss, first at token {differ[0] + 1}; remove one of"
            " them"
        )
    loss = [label and mask for label, mask in zip(labelled, has_loss, strict=True)]
    positions = [
        position for position, is_attended in enumerate(attended) if is_attended
    ]
    return {
        "input_ids": [ids[position] for position in positions],
        "loss_mask": [loss[position] for position in positions],
    }


# ---- prompts and answers


def _completion(example: Mapping[str, Any], columns: Mapping[Any, str]) -> Completion:
    """Read a prompt and a completion that are text; columns that need a chat template
    are refused.
    """
    prompt, completion = (example[columns[name]] for name in ("prompt", "completion"))
    if not isinstance(completion, str):
        raise BadExample(
            f"columns {columns['prompt']!r} and {columns['completion']!r}: both must be"
            f" text or both lists of messages, got {short(completion)}; as `response`"
            " such a list is the answer to a prompt that is text"
        )
    # No template is applied to these two texts, so nothing would read the columns.
    for name in ("tools", "system", "chat_template_kwargs"):
        if name in columns and example.get(columns[name]):
            raise BadExample(
                f"column {columns[name]!r}: works with messages, not with a literal"
                " prompt and completion; write `response` instead of `completion` under"
                " `columns`, or give messages"
            )
    return Completion(prompt, completion)


def _conversation(
    example: Mapping[str, Any], columns: Mapping[Any, str]
) -> tuple[list[dict], int]:
    """Return the conversation, and the index of the first message that loss may be on."""
    if "messages" in columns:
        return messages_of(example, columns["messages"]), 0
    if "completion" in columns:
        prompt = messages_of(example, columns["prompt"])
        return [*prompt, *messages_of(example, columns["completion"])], len(prompt)
    prompt_messages = response = None
    if isinstance(example[columns["prompt"]], list):
        prompt_messages = messages_of(example, columns["prompt"])
    if isinstance(example[columns["response"]], list):
        response = messages_of(example, columns["response"])
    extra = example.get(columns["input"]) if "input" in columns else None
    history = _history(example, columns["history"]) if "history" in columns else []
    if prompt_messages is not None:
        # Messages have roles already, so texts cannot be merged into them.
        if extra or history:
            name = columns["input" if extra else "history"]
            raise BadExample(
                f"column {name!r}: works with a text prompt, not with messages"
            )
        prompt, answered = prompt_messages, len(prompt_messages)
    else:
        # An Alpaca example has its input below the instruction. Answers in the history
        # are learned, too.
        question = _text(example, columns["prompt"])
        paragraph = f"\n\n{_text(example, columns['input'])}" if extra else ""
        prompt = [{"role": "user", "content": question + paragraph}]
        answered = 0 if history else 1
    if response is None:
        response = [
            {"role": "assistant", "content": _text(example, columns["response"])}
        ]
    return [*history, *prompt, *response], answered


def _history(example: Mapping[str, Any], column: str) -> list[dict]:
    """Read the earlier turns of a prompt: pairs of prompt and response, whose responses
    are learned, too (LLaMA-Factory).
    """
    turns = example.get(column) or []
    if not isinstance(turns, list) or not all(map(_is_turn, turns)):
        raise BadExample(
            f"column {column!r}: a list of pairs of texts, prompt and response, is"
            f" needed, got {short(turns)}"
        )
    messages = []
    for prompt, response in turns:
        messages.append({"role": "user", "content": prompt})
        messages.append({"role": "assistant", "content": response})
    return messages


def _is_turn(turn: Any) -> bool:
    """Tell whether a value is a pair of texts."""
    return (
        isinstance(turn, list | tuple)
        and len(turn) == 2
        and all(isinstance(text, str) for text in turn)
    )


def _system(
    example: Mapping[str, Any], columns: Mapping[Any, str], messages: list[dict]
) -> list[dict]:
    """Return the system message of a separate column, unless the conversation begins
    with the same one.
    """
    if "system" not in columns or not example.get(columns["system"]):
        return []
    text = _text(example, columns["system"])
    first = messages[0]
    # A conversation with its own system message needs none, if the two agree.
    if first["role"] not in ("system", "developer"):
        return [{"role": "system", "content": text}]
    if first["content"] != text:
        raise BadExample(
            f"column {columns['system']!r}: the conversation begins with another system"
            f" message, {short(first['content'])}; remove one of them"
        )
    return []


# ---- columns that accompany messages


def _tools(example: Mapping[str, Any], columns: Mapping[Any, str]) -> list[Any] | None:
    """Return the tools of an example, for its chat template; None where it has none."""
    value = tools = example.get(columns["tools"]) if "tools" in columns else None
    # Tools are often stored as JSON text, because their schemas have no common type.
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools else None
        except (ValueError, RecursionError):
            tools = value
    if tools is not None and not (
        isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)
    ):
        raise BadExample(
            f"column {columns['tools']!r}: a list of tools, or JSON text of one, is"
            f" needed, got {short(value)}"
        )
    if tools:
        return [_tool(tool, columns["tools"]) for tool in tools]
    return None


def _tool(tool: dict[str, Any], column: str) -> dict[str, Any]:
    """Decode a tool's parameters if they are JSON text, which a template would encode
    twice.
    """
    function = tool.get("function")
    if isinstance(function, dict) and isinstance(function.get("parameters"), str):
        parameters = decoded_json(
            function["parameters"], column, "the parameters of a tool"
        )
        return tool | {"function": function | {"parameters": parameters}}
    return tool


def _options(example: Mapping[str, Any], columns: Mapping[Any, str]) -> dict[str, Any]:
    """Return the options that an example gives its chat template."""
    if "chat_template_kwargs" not in columns or not (
        value := example.get(columns["chat_template_kwargs"])
    ):
        return {}
    column = columns["chat_template_kwargs"]
    options = value
    if isinstance(value, str):
        options = decoded_json(value, column, "options of the chat template")
    if not isinstance(options, Mapping):
        raise BadExample(
            f"column {column!r}: needs names and values of options of the chat"
            f" template; got {short(value)}"
        )
    return dict(options)


def _text(example: Mapping[str, Any], column: str) -> str:
    value = example.get(column)
    if not isinstance(value, str):
        raise BadExample(f"column {column!r}: text is needed, got {short(value)}")
    return value


def _list(example: Mapping[str, Any], column: str) -> list:
    value = example[column]
    if not hasattr(value, "__iter__") or isinstance(value, str | Mapping):
        raise BadExample(
            f"column {column!r}: a list of token ids is needed, got {short(value)}"
        )
    return list(value)
