"""Find the form in which a chat template accepts a conversation, and the parts of it
that the template would leave out.

Templates read different forms: arguments of a call as an object or as JSON text,
contents as text or as parts, a developer's message or none. They silently leave out
anything else, so each template is tried, with marks in place of all contents, once for
each kind of conversation.

Not covered: templates that decide by the words of a content; an assistant's text beside
a call, and thoughts, which some templates leave out on purpose.
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

from fcsd.data.examples import Conversation
from fcsd.data.messages import ROLES
from fcsd.data.rendering import TEMPLATE_DATE, dated

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
    """The form in which a chat template accepts messages.

    developer, tool: the roles of such messages. arguments: of a call, "object" or
    "text". parts: contents are lists of parts. wrapped: tools are {"type": "function",
    "function": …}, even if the data have only the function.
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
    """Return the form in which a template accepts a conversation, or the reason why
    there is none, as the predicate of "its chat template".

    template: the tokenizer's for such a conversation. If it refuses the conversation in
    every form, the first form is returned, and the template's own error will tell why.
    """
    messages, options = conversation.messages, conversation.options
    # Options come from the data: one that fcsd sets itself, or that the template does
    # not read, would change nothing.
    for name, value in options.items():
        # These are set by fcsd in each call, so a value from the data would conflict.
        parameters = {*inspect.signature(tokenizer.apply_chat_template).parameters}
        if name in parameters - {"documents", "kwargs"}:
            return f"is given {name!r} by fcsd; take it out of chat_template_kwargs"
        if value not in (None, "", [], {}) and not re.search(
            rf"\b{re.escape(name)}\b", template
        ):
            return f"reads no {name!r}; take it out of chat_template_kwargs"
    for message in messages:
        role = message["role"]
        if role not in ROLES and not _names(template, role):
            allowed = ", ".join(ROLES)
            return (
                f"does not know the role of a message from {role!r}; allowed:"
                f" {allowed}, and the roles that it names"
            )
    has_thoughts = any(message.get(key) for message in messages for key in _THOUGHTS)
    # transformers (5.23) fills one key from the others.
    if has_thoughts and not re.search(rf"""[.'"]({"|".join(_THOUGHTS)})\b""", template):
        _tell_once(
            "data: the chat template does not write the thoughts in the messages, so"
            " the model does not learn them"
        )
    # JSON text can be hashed, which the cache of tried templates needs.
    probe = json.dumps(_probe(messages), default=str)
    kinds = {_is_wrapped(tool) for tool in conversation.tools or ()}
    tools = json.dumps(
        [_TOOL if wrapped else _TOOL["function"] for wrapped in sorted(kinds)]
    )
    form = _find_form(
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
    """Replace contents, calls and ids by marks; conversations of one kind become equal."""
    # Equal ids stay equal, since a template may look up the call of an answer.
    ids: dict[str, str] = {}
    probe = []
    for index, message in enumerate(messages):
        marked = {
            key: "x" if isinstance(value, str) else value
            for key, value in message.items()
        }
        marked["role"] = message["role"]
        marked["content"] = f"Qcontent{index}Q" if message["content"] else ""
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
    # Empty ones stay empty, which a template may write in another way.
    probe_arguments = {f"Qkey{number}Q": f"Qvalue{number}Q"} if has_some else {}
    marked = {
        "type": call["type"],
        "function": {"name": f"Qname{number}Q", "arguments": probe_arguments},
    }
    if isinstance(call_id := call.get("id"), str):
        marked["id"] = ids.setdefault(call_id, f"call{len(ids):05}")
    return marked


@functools.lru_cache(maxsize=4096)
def _find_form(
    tokenizer: Any, template: str, probe: str, given_tools: str, options: str
) -> MessageForm | str | None:
    """Return the first form in which the template writes everything of the probe, else
    the parts that the best form leaves out; None: the template refuses all forms.

    The arguments are JSON text, so that the result can be cached.
    """
    from jinja2 import TemplateError

    messages, tools = json.loads(probe), json.loads(given_tools) or None
    assistant_contents = [
        message["content"] for message in messages if message["role"] == "assistant"
    ]
    best: tuple[Any, ...] | None = None
    # The first form that loses nothing is taken, since the data's own form comes first.
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
        # Text of the assistant may be left out on purpose: it only decides between
        # forms.
        rank = len(missing), sum(content not in text for content in assistant_contents)
        # The best form is kept for the error, which names the part that it leaves out.
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
    """Yield the forms to try, beginning with that of the data."""
    roles = {message["role"] for message in messages}
    tool_roles = [
        role
        for role in ROLES
        if ROLES[role] == "tool" and role != "tool" and _names(template, role)
    ]
    calls = any(message.get("tool_calls") for message in messages)
    # Only the choices that matter for these messages are varied.
    choices = itertools.product(
        ("developer", "system") if "developer" in roles else ("developer",),
        ("tool", *tool_roles) if "tool" in roles else ("tool",),
        ("object", "text") if calls else ("object",),
        (False, True),
        (False,) if all(map(_is_wrapped, tools)) else (False, True),
    )
    return (MessageForm(*choice) for choice in choices)


def _names(template: str, role: str) -> bool:
    return re.search(rf"""['"]{re.escape(role)}['"]""", template) is not None


def _missing(
    messages: Sequence[Mapping[str, Any]], text: str, form: MessageForm
) -> list[str]:
    """List the parts of a probe that its text lacks, or has in a wrong form."""
    missing = []
    for message in messages:
        content = message["content"]
        # A template may print the list of parts itself instead of reading it.
        is_printed = form.parts and (
            f"'text': '{content}" in text or f'"text": "{content}' in text
        )
        if message["role"] != "assistant" and (content not in text or is_printed):
            missing.append(
                f"does not write a message of role {message['role']!r} in its place"
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
