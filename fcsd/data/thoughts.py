"""Separate a model's thoughts from its answer, and ask a hybrid model for thoughts; only
this module knows how the families mark and switch them.

A family's markers are found in its chat template, or else among the tokens of its
tokenizer. Markers can be special tokens (gpt-oss, Mistral), which decoding removes by
default: `Thoughts.decode` keeps them.

Not covered: tool calls, which are not answers; models that think without any marker.
"""

import functools
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

END_OF_PROMPT = 32  # tokens; a template may open the thoughts in the last of them


@dataclass(frozen=True)
class Markers:
    """The markers of a family's thoughts.

    begin: the text that opens them. end: a regular expression; the answer follows its
    last match. stop: a regular expression for the end of the answer. tokens: further
    markers, which decoding must keep. wrapper: the texts around the answer. always: the
    template cannot ask for answers without markers. answer: the text that opens the
    answer, where nothing else closes the thoughts.
    """

    begin: str
    end: str
    stop: str = r"\Z"
    tokens: tuple[str, ...] = ()
    wrapper: tuple[str, str] | None = None
    always: bool = False
    answer: str = ""

    @property
    def literal(self) -> str:
        """All markers as text."""
        return " ".join(
            [
                self.begin,
                _literal(self.end),
                *self.tokens,
                *(self.wrapper or ()),
            ]
        )


def _literal(pattern: str) -> str:
    """Return the text that a pattern without operators matches."""
    return pattern.replace("\\", "")


def _pair(begin: str, end: str) -> Markers:
    return Markers(begin, re.escape(end))


_THINK = _pair("<think>", "</think>")
# OpenAI's harmony: "<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…<|return|>".
_HARMONY = Markers(
    "<|channel|>",
    r"<\|channel\|>\s*final\b(?:(?!<\|message\|>).)*<\|message\|>",
    r"<\|(?:end|return|call|start|channel)\|>",
    (
        "<|channel|>",
        "<|message|>",
        "<|start|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|constrain|>",
    ),
    always=True,
    answer="<|channel|>final<|message|>",
)
# Muse: "to=self<|message|>…<|eom|><|start|>assistant to=user<|message|>…<|eot|>".
_RECIPIENTS = Markers(
    "to=self<|message|>",
    r"to=user<\|message\|>",
    r"<\|(?:eot|eom|start)\|>",
    ("<|message|>", "<|start|>", "<|eom|>", "<|eot|>"),
    always=True,
    answer=" to=user<|message|>",
)
# Harmony without its special tokens, as some programs return it.
_BARE_HARMONY = Markers("\0", r"\Aanalysis.*?assistantfinal")
_FAMILIES = (
    _HARMONY,
    _RECIPIENTS,
    _pair("<|channel>thought", "<channel|>"),  # Gemma 4
    _pair("[THINK]", "[/THINK]"),  # Mistral
    _pair("<|START_THINKING|>", "<|END_THINKING|>"),  # Cohere
    _pair("<|inner_prefix|>", "<|inner_suffix|>"),  # Apertus
    _pair("<|begin_of_thought|>", "<|end_of_thought|>"),
    _pair("◁think▷", "◁/think▷"),  # Kimi-VL
)
# Also <seed:think>, <longcat_think>.
_NAME = r"((?:\w+[:_])?(?:think|thinking|thoughts?|reasoning))"
_OPENING, _CLOSING = (
    re.compile(rf"<{slash}{_NAME}>", re.IGNORECASE) for slash in ("", "/")
)
_WRAPPERS = (
    ("<answer>", "</answer>"),  # Hunyuan
    ("<response>", "</response>"),  # Granite, ERNIE
    ("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ("<|begin_of_solution|>", "<|end_of_solution|>"),
)

_SWITCHES: tuple[tuple[str, Any, Any], ...] = (
    ("enable_thinking", True, False),  # Qwen, GLM, Hunyuan, ERNIE, SmolLM
    ("thinking", True, False),  # DeepSeek-V3.1, Granite, Kimi-K2.5
    ("thinking_option", "on", "off"),  # Ling
    ("thinking_mode", "enabled", "disabled"),  # MiniMax
    ("reasoning_effort", "high", "none"),  # Mistral, Cohere; gpt-oss cannot do without
    ("reasoning_effort", "high", "no_think"),  # Hunyuan
    ("thinking_budget", -1, 0),  # Seed: tokens; -1 sets no limit
)
"""Variable of a chat template, its values with thoughts and without. Where these are
words, a template has the switch if it names the one without thoughts, and the other is
given only if it names that, too.
"""


def thinking_options(tokenizer: Any, thinking: bool) -> dict[str, Any]:
    """Return the arguments of `apply_chat_template` with which a hybrid thinks, or does
    not.

    The switch is the first of `_SWITCHES` that the template reads; one without any is
    given the first of all, and passes over it.
    """
    name, on, off = _SWITCHES[0]
    switch = _switch_in(_template_of(tokenizer)) or ({name: on}, {name: off})
    return dict(switch[0 if thinking else 1])


def _template_of(tokenizer: Any) -> str:
    """Return the template of prompts; "" for none."""
    template = getattr(tokenizer, "chat_template", None)
    if template is not None and not isinstance(template, str):  # several, by name
        template = tokenizer.get_chat_template()
    return template or ""


@functools.lru_cache
def _switch_in(template: str) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Return a template's arguments with thoughts, and without; None where it has no
    switch.
    """
    from jinja2 import TemplateError, meta, nodes
    from transformers.utils.chat_template_utils import _compile_jinja_template

    try:
        tree = _compile_jinja_template(template).environment.parse(template)
    except TemplateError:  # who writes a conversation with it says so
        return None
    variables = meta.find_undeclared_variables(tree)
    words = {
        word
        for node in tree.find_all(nodes.Const)  # a list of constants is one of them
        for word in (node.value if isinstance(node.value, list) else [node.value])
        if isinstance(word, str)
    }
    for name, on, off in _SWITCHES:
        if name in variables and (not isinstance(off, str) or off in words):
            has_on = not isinstance(on, str) or on in words
            return ({name: on} if has_on else {}), {name: off}
    return None


def markers_in(text: str) -> Markers | None:
    """Return the markers in a chat template or an answer; None: no known ones."""
    # Those at the beginning of an answer count first: its thoughts may quote others.
    start = text.lstrip()
    tag = _OPENING.match(start)
    begun = (family for family in _FAMILIES if start.startswith(family.begin))
    found = (
        family
        for family in _FAMILIES
        if family.begin in text or re.search(family.end, text)
    )
    markers = None if tag else next(itertools.chain(begun, found), None)
    # Unlisted families often use XML-like tags, whose name is taken as it occurs.
    if markers is None and (
        tag := tag or _CLOSING.search(text) or _OPENING.search(text)
    ):
        markers = _pair(f"<{tag[1]}>", f"</{tag[1]}>")
    if markers is None or markers.always:
        return markers
    return replace(
        markers, wrapper=next((pair for pair in _WRAPPERS if pair[0] in text), None)
    )


def answer_in(text: str) -> str:
    """Cut the thoughts off an answer of an unknown model, by the markers in it."""
    bare = re.match(_BARE_HARMONY.end, text, re.DOTALL) is not None
    return answer_after(text, _BARE_HARMONY if bare else markers_in(text) or _THINK)


def answer_after(text: str, markers: Markers, opened: bool = False) -> str:
    """Return the text after the thoughts: "" if they never end, all of it if there are
    none.

    opened: the prompt has begun the thoughts.
    """
    ends = list(re.finditer(markers.end, text, re.DOTALL))
    if not ends:
        return "" if opened or _opens_thoughts(text, markers) else text
    answer = text[ends[-1].end() :].lstrip()
    # Harmony and its like: further channels may follow the answer.
    if markers.stop != r"\Z":
        return re.split(markers.stop, answer, maxsplit=1)[0].rstrip()
    if _opens_thoughts(answer, markers):
        return ""
    if markers.wrapper is not None and answer.startswith(markers.wrapper[0]):
        opening, closing = markers.wrapper
        answer = answer.removeprefix(opening)
        # In an answer that was cut off the wrapper is open: then all of it counts.
        return (answer.rpartition(closing)[0] or answer).strip()
    return answer


def _opens_thoughts(text: str, markers: Markers) -> bool:
    """Return whether a text opens thoughts at the beginning of a line; elsewhere, prose
    and programs may quote a marker.
    """
    if markers.always:
        return markers.begin in text
    return re.search(rf"^\s*{re.escape(markers.begin)}", text, re.MULTILINE) is not None


class Thoughts:
    """Finds the thoughts in texts of the model that a tokenizer belongs to."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        added = {
            int(token_id): token
            for token_id, token in tokenizer.added_tokens_decoder.items()
        }
        self.markers = markers_of(tokenizer, map(str, added.values()))
        # A template that knows thoughts and has no switch cannot ask for none: its
        # model thinks unasked (LFM2.5), or never does.
        template = _template_of(tokenizer)
        self.unasked = bool(markers_in(template)) and _switch_in(template) is None
        special = {
            token_id: str(token)
            for token_id, token in added.items()
            if getattr(token, "special", True)
        }
        special |= dict(
            zip(
                tokenizer.all_special_ids,
                map(str, tokenizer.all_special_tokens),
                strict=True,
            )
        )
        self.special = frozenset(special.values())
        # Decoding must not drop the special tokens that mark thoughts; `answer` looks
        # for them.
        literal = self.markers.literal
        self.marks = {token_id for token_id, text in special.items() if text in literal}
        self.hidden = special.keys() - self.marks

    def opened_by(self, prompt: str) -> bool:
        """Return whether a prompt ends with the beginning of thoughts."""
        return prompt.rstrip().endswith(self.markers.begin)

    def are_in(self, prompt: str, asked: bool) -> bool:
        """Return whether the answer to a prompt may have thoughts: they are asked for,
        or the template cannot leave them out.
        """
        return asked or self.markers.always or self.unasked or self.opened_by(prompt)

    def ends_of_text(self, stop: Iterable[str]) -> list[str]:
        """Return the stop strings at which the generation of an answer with thoughts
        may end: those with special tokens, which do not occur in thoughts.
        """
        ends = [token for token in self.special if token not in self.markers.literal]
        return [word for word in stop if any(token in word for token in ends)]

    def decode(self, tokens: Sequence[int], **options: Any) -> str:
        """Decode without special tokens, but with those that mark thoughts."""
        if not self.marks:
            return str(
                self.tokenizer.decode(tokens, skip_special_tokens=True, **options)
            )
        # Decoding cannot skip only some special tokens, so these are removed before it.
        visible = [token for token in tokens if token not in self.hidden]
        return str(self.tokenizer.decode(visible, skip_special_tokens=False, **options))

    def without_special(self, text: str, *, marks: bool = False) -> str:
        """Remove the special tokens from a text that was decoded with them; those that
        mark thoughts only if `marks`.
        """
        for token in self.special:
            if marks or token not in self.markers.literal:
                text = text.replace(token, "")
        return text

    def opens(self, text: str) -> bool:
        """Return whether a text begins with thoughts, whoever's marks it has."""
        start = text.lstrip()
        begins = (self.markers.begin, *(family.begin for family in _FAMILIES))
        return start.startswith(begins) or _OPENING.match(start) is not None

    def marked(self, text: str) -> bool:
        """Return whether a text has thoughts that nobody asked for: it opens them, or
        ends them at the beginning of a line, or at the end of one without an opening;
        elsewhere, prose may quote a marker.
        """
        begin, end = re.escape(self.markers.begin), self.markers.end
        ended = rf"^\s*(?:{end})|\A(?:(?!{begin}).)*(?:{end})[ \t]*$"
        return self.opens(text) or re.search(ended, text, re.M | re.S) is not None

    def markers_for(self, text: str) -> Markers:
        """Return the markers of an answer: the family's, unless it begins with others."""
        if text.lstrip().startswith(self.markers.begin) or not self.opens(text):
            return self.markers
        return markers_in(text) or self.markers

    def written(self, text: str, opened: bool) -> bool:
        """Return whether the thoughts in an answer are more than empty; opened: by the
        prompt.
        """
        markers = self.markers_for(text)
        ends = list(re.finditer(markers.end, text, re.DOTALL))
        if ends:
            before = text[: ends[-1].start()]
        else:
            before = text if opened or _opens_thoughts(text, markers) else ""
        return bool(before.strip().removeprefix(markers.begin).strip())

    def closing(self, prompt: str) -> str:
        """Return the text after a prompt that leads to the answer without thoughts: an
        empty thought, as the template writes one, or the head of the answer; "" where
        the answer follows anyway.
        """
        wrapper = re.escape(self.markers.wrapper[0]) if self.markers.wrapper else ""
        ended = rf"(?:{self.markers.end})\s*(?:{wrapper})?\s*\Z"
        if not self.are_in(prompt, asked=False) or re.search(ended, prompt, re.S):
            return ""
        if self.markers.answer:
            return self.markers.answer
        begin, end = self.markers.begin, self.markers.end
        empty = re.search(
            re.escape(begin) + r"((?:\\n|\n)*)" + end + r"((?:\\n)*)",
            _template_of(self.tokenizer),
        )
        usual = "" if begin in self.special else "\n\n"
        inside, behind = empty.groups() if empty else (usual, usual)
        thought = f"{begin}{inside}{_literal(end)}{behind}".replace("\\n", "\n")
        if self.markers.wrapper is not None:
            thought += f"{self.markers.wrapper[0]}\n"
        written = prompt[prompt.rindex(begin) :] if self.opened_by(prompt) else ""
        # Of what the prompt has written of it, white space may differ.
        return thought.removeprefix(written if thought.startswith(written) else begin)

    def answer(self, text: str, prompt: str = "") -> str:
        """Return the text after the thoughts in the answer to a prompt, as
        `answer_after`.
        """
        return answer_after(text, self.markers, self.opened_by(prompt))

    def streamed(self, pieces: Iterable[str], prompt: str) -> Iterator[str]:
        """Yield the answer from a text that arrives in pieces; each part as soon as it
        certainly belongs to the answer.
        """
        # Text that could still turn out to be a marker is held back.
        text, length = "", 0
        for piece in pieces:
            text += piece
            answer = self.answer(text, prompt)
            certain = answer[: len(answer) - self._uncertain(answer, answer == text)]
            if len(certain) > length:
                yield certain[length:]
                length = len(certain)
        answer = self.answer(text, prompt)
        if len(answer) > length:
            yield answer[length:]

    def _uncertain(self, answer: str, is_all_text: bool) -> int:
        """Count the characters at the end that may become a marker, or white space that
        may be stripped.

        is_all_text: the answer is all text so far, so thoughts may still begin.
        """
        # A reply is short enough to be searched again with every piece.
        begin = self.markers.begin
        if is_all_text and self.markers.always:
            return len(answer)
        if is_all_text and begin.startswith(answer.strip()):
            return len(answer)
        words = [
            begin,
            begin.replace("<", "</", 1).replace("[", "[/", 1),
            *self.markers.tokens,
        ]
        words += self.markers.wrapper or ()
        begun = (
            length
            for word in words
            for length in range(1, len(word))
            if answer.endswith(word[:length])
        )
        return max(begun, default=len(answer) - len(answer.rstrip()))


def markers_of(tokenizer: Any, added: Iterable[str]) -> Markers:
    """Return the markers of a family: those in its chat template, or else among its
    tokens, or else `</think>`.
    """
    template = getattr(tokenizer, "chat_template", None) or ""
    if isinstance(template, str):
        text = template
    else:
        text = "\n".join(map(str, template.values()))
    return markers_in(text) or markers_in("\n".join(added)) or _THINK
