"""Find the form in which a chat template takes a conversation, and what of it the
template would leave out.

Templates differ in what they read: arguments of a call as an object or as JSON text,
contents as text or as parts, a developer's message or none. What a template does not
read it leaves out without a word, so it is tried, with marks in place of all contents,
once for each kind of conversation.

Not covered: contents on whose words a template decides; text that an assistant says
beside a call, and thoughts, which some templates leave out on purpose.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fcsd.data.dates import TEMPLATE_DATE, dated
from fcsd.data.examples import Conversation
from fcsd.data.messages import ROLES

_THOUGHTS = ("reasoning_content", "thinking", "reasoning")
_TOOL = {
    "type": "function",
    "function": {
        "name": "Qtool",
        "description": "looks",
        "parameters": {
            "type": "object",
            "properties": {"at": {"type": "string", "description": "what"}},
            "required": ["at"],
        },
    },
}


@dataclass(frozen=True)
class MessageForm:
    """How a chat template takes messages.

    developer, tool: the roles that such messages have. arguments: of a call, "object"
    or "text". parts: contents are lists of parts. wrapped: tools are {"type":
    "function", "function": …}, also where the data have the latter alone.
    """

    developer: str = "developer"
    tool: str = "tool"
    arguments: str = "object"
    parts: bool = False
    wrapped: bool = False

    def tools(self, tools: list[Any] | None) -> list[Any] | None:
        """Return tools in this form."""
        if tools is None or not self.wrapped:
            return tools
        return [tool if _is_wrapped(tool) else _wrapped(tool) for tool in tools]

    def applied(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return messages in this form."""
        return [self._message(message) for message in messages]

    def _message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        message = dict(message)
        if message["role"] in ("developer", "tool"):
            message["role"] = getattr(self, message["role"])
        if calls := message.get("tool_calls"):
            message["tool_calls"] = [self._call(call) for call in calls]
        if self.parts and isinstance(message["content"], str):
            message["content"] = [{"type": "text", "text": message["content"]}]
        return message

    def _call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        arguments = call["function"]["arguments"]
        if self.arguments == "object" and isinstance(arguments, str):
            arguments = json.loads(arguments)
        elif self.arguments == "text" and not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        return {**call, "function": {**call["function"], "arguments": arguments}}


def _is_wrapped(tool: Mapping[str, Any]) -> bool:
    return isinstance(tool.get("function"), Mapping)


def _wrapped(tool: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {
            key: value
            for key, value in tool.items()
            if (key, value) != ("type", "function")
        },
    }


def message_form_of(
    tokenizer: Any, template: str, conversation: Conversation
) -> MessageForm | str:
    """Return the form in which a template takes a conversation, or, after "its chat
    template", why there is none.

    template: the tokenizer's for such a conversation. Where the template refuses the
    conversation in every form, the first one: its own error says why.
    """
    messages, options = conversation.messages, conversation.options
    for name, value in options.items():
        if name in {*inspect.signature(tokenizer.apply_chat_template).parameters} - {
            "documents",
            "kwargs",
        }:
            return f"is given {name!r} by fcsd; take it out of chat_template_kwargs"
        if value not in ("", [], {}) and not re.search(
            rf"\b{re.escape(name)}\b", template
        ):
            return f"reads no {name!r}; take it out of chat_template_kwargs"
    for message in messages:
        role = message["role"]
        if role not in ROLES and not _names(template, role):
            allowed = ", ".join(ROLES)
            return (
                f"knows no role like that of a message from {role!r}; allowed:"
                f" {allowed}, and what it names itself"
            )
    has_thoughts = any(message.get(key) for message in messages for key in _THOUGHTS)
    # transformers (5.23) fills one key from the others.
    if has_thoughts and not re.search(rf"""[.'"]({"|".join(_THOUGHTS)})\b""", template):
        _tell_once(
            "data: the chat template writes no thoughts, which messages of the data"
            " have: they are not learned"
        )
    probe = json.dumps(_probe(messages), default=str)
    kinds = {_is_wrapped(tool) for tool in conversation.tools or ()}
    tools = json.dumps(
        [_TOOL if wrapped else _TOOL["function"] for wrapped in sorted(kinds)]
    )
    form = _tried(
        tokenizer,
        template,
        probe,
        tools,
        json.dumps(options, sort_keys=True, default=str),
    )
    return form or MessageForm()


@functools.cache
def _tell_once(text: str) -> None:
    print(text, file=sys.stderr)


def _probe(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Put marks in place of contents, calls, and ids: what is the same for
    conversations of one kind.
    """
    ids: dict[str, str] = {}
    probe = []
    for index, message in enumerate(messages):
        marked = {
            key: "x" if isinstance(value, str) else value
            for key, value in message.items()
        }
        marked["role"], marked["content"] = (
            message["role"],
            f"Qcontent{index}Q" if message["content"] else "",
        )
        if isinstance(call_id := message.get("tool_call_id"), str):
            marked["tool_call_id"] = ids.setdefault(call_id, f"call{len(ids):05}")
        if "tool_calls" in message:
            marked["tool_calls"] = [
                _marked_call(call, f"{index}x{number}", ids)
                for number, call in enumerate(message["tool_calls"])
            ]
        probe.append(marked)
    return probe


def _marked_call(
    call: Mapping[str, Any], number: str, ids: dict[str, str]
) -> dict[str, Any]:
    arguments = call["function"]["arguments"]
    has_some = bool(json.loads(arguments) if isinstance(arguments, str) else arguments)
    given = {f"Qkey{number}Q": f"Qvalue{number}Q"} if has_some else {}
    marked = {
        "type": call["type"],
        "function": {"name": f"Qname{number}Q", "arguments": given},
    }
    if isinstance(call_id := call.get("id"), str):
        marked["id"] = ids.setdefault(call_id, f"call{len(ids):05}")
    return marked


@functools.lru_cache(maxsize=4096)
def _tried(
    tokenizer: Any, template: str, probe: str, given_tools: str, options: str
) -> MessageForm | str | None:
    """Return the first form in which everything of the probe is written, else what is
    missing in the best one; None where the template refuses all of them.
    """
    from jinja2 import TemplateError

    messages, tools = json.loads(probe), json.loads(given_tools) or None
    said = [
        message["content"] for message in messages if message["role"] == "assistant"
    ]
    best: tuple[Any, ...] | None = None
    for form in _candidates(template, messages, tools or ()):
        try:
            text = tokenizer.apply_chat_template(
                form.applied(messages),
                tools=form.tools(tools),
                chat_template=dated(template, TEMPLATE_DATE),
                tokenize=False,
                **json.loads(options),
            )
        except (TemplateError, TypeError, AttributeError, LookupError, ValueError):
            continue
        missing = _missing(messages, text, form)
        if tools and text.count("Qtool") < len(tools):
            missing.append("does not write every tool")
        rank = len(missing), sum(content not in text for content in said)
        if best is None or rank < best[0]:
            best = rank, form, missing
        if rank == (0, 0):
            break
    if best is None:
        return None
    _, form, missing = best
    if missing:
        return (
            f"{missing[0]}; take such examples out of the data, or use a template that"
            " does"
        )
    return form


def _candidates(
    template: str, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any]
) -> Iterator[MessageForm]:
    """Yield the forms to try, that of the data first."""
    roles = {message["role"] for message in messages}
    others = [
        role
        for role in ROLES
        if ROLES[role] == "tool" and role != "tool" and _names(template, role)
    ]
    choices = itertools.product(
        ("developer", "system") if "developer" in roles else ("developer",),
        ("tool", *others) if "tool" in roles else ("tool",),
        (
            ("object", "text")
            if any(message.get("tool_calls") for message in messages)
            else ("object",)
        ),
        (False, True),
        (False,) if all(map(_is_wrapped, tools)) else (False, True),
    )
    return (MessageForm(*choice) for choice in choices)


def _names(template: str, role: str) -> bool:
    return re.search(rf"""['"]{re.escape(role)}['"]""", template) is not None


def _missing(
    messages: Sequence[Mapping[str, Any]], text: str, form: MessageForm
) -> list[str]:
    """List what the text of a probe does not have, or has in the wrong way."""
    missing = []
    for message in messages:
        content = message["content"]
        is_printed = form.parts and (
            f"'text': '{content}" in text or f'"text": "{content}' in text
        )
        if message["role"] != "assistant" and (content not in text or is_printed):
            missing.append(
                f"does not write what a message of role {message['role']!r} says at its"
                " place"
            )
        for call in message.get("tool_calls", ()):
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            if name not in text:
                number = "every call" if len(message["tool_calls"]) > 1 else "the call"
                missing.append(f"does not write {number} of a message")
            for key, value in arguments.items():
                if (
                    key not in text
                    or value not in text
                    or f"'{key}'" in text
                    or f'\\"{key}' in text
                ):
                    missing.append(
                        "writes the arguments of a call neither from an object nor from"
                        " JSON text"
                    )
    return missing
