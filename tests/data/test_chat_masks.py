"""Which tokens of a conversation carry loss: the assistant's words and the ends of its
turns, in any chat template.

The templates are those that TRL ships, if it is installed, and simplified versions of
others, written here. What the assistant says is recognised by its words, each of which
occurs in one message only, and by ends and headers that are listed by hand.
"""

import importlib.util
import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from fcsd.data import chat
from fcsd.data.chat import BadExample
from tests.examples import tokenize_example
from tests.support import few

MARKER = re.compile(r"<[^<>\s{}'\"]*[|｜][^<>\s{}'\"]*>|</?s>|<\w+_of_\w+>|\[/?INST\]")


def make_tokenizer(
    template: str | None, *, adds_bos: bool = False
) -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer that encodes each marker of a template as one
    token.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>",
        clean_up_tokenization_spaces=False,
    )  # fmt: skip
    fast.add_special_tokens(
        {"additional_special_tokens": sorted({*MARKER.findall(template or "")})}
    )
    if adds_bos:
        bos = ("<bos>", fast.bos_token_id)
        fast.backend_tokenizer.post_processor = processors.TemplateProcessing(
            "<bos> $A", special_tokens=[bos]
        )
    fast.chat_template = template
    return fast


def said(encoded: Mapping[str, Any], tokenizer: Any) -> list[str]:
    """Return the parts of a conversation that carry loss."""
    tokens = zip(encoded["loss_mask"], encoded["input_ids"], strict=True)
    return [
        tokenizer.decode([i for _, i in part])
        for loss, part in groupby(tokens, lambda t: bool(t[0]))
        if loss
    ]


def said_in(
    template: str, messages: Sequence[Mapping[str, Any]], **columns: Any
) -> list[str]:
    tokenizer = make_tokenizer(template)
    return said(
        tokenize_example({"m": messages}, {"messages": "m"}, tokenizer, **columns),
        tokenizer,
    )


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def call(name: str, **arguments: str) -> dict[str, Any]:
    return {
        "type": "function",
        "id": "callaaaaa",
        "function": {"name": name, "arguments": arguments},
    }


def tool(text: str, name: str = "weather") -> dict[str, Any]:
    return {"role": "tool", "name": name, "tool_call_id": "callaaaaa", "content": text}


def thought(text: str) -> dict[str, str]:
    return {"reasoning_content": text, "thinking": text}


WEATHER = {"tool_calls": [call("weather", city="oslo")]}
AFTERWARDS = [assistant("cold"), user("thanks"), assistant("welcome")]
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "several turns": [user("hello"), assistant("greetings"), user("weather?"), *AFTERWARDS],
    "a system prompt": [{"role": "system", "content": "brief"}, user("weather?"), *AFTERWARDS],
    "a tool": [user("now?"), assistant("", **WEATHER), tool("minus"), *AFTERWARDS],
    "text beside a call": [user("now?"), assistant("looking", **WEATHER), tool("minus"), *AFTERWARDS],
    "two calls": [
        user("now?"),
        assistant("", tool_calls=[*WEATHER["tool_calls"], call("clock", zone="utc")]),
        tool("minus"),
        tool("noon", "clock"),
        *AFTERWARDS,
    ],
    "a call at the end": [user("hello"), assistant("greetings"), user("now?"), assistant("", **WEATHER)],
    "thoughts": [
        user("now?"), assistant("cold", **thought("winter")), user("sure?"), assistant("certain", **thought("north")),
    ],
    "thoughts in tags": [
        user("now?"), assistant("<think>\nwinter\n</think>\n\ncold"), user("sure?"),
        assistant("<think>\nnorth\n</think>\n\ncertain"),
    ],
    "a thought before a call": [
        user("now?"), assistant("", **WEATHER, **thought("ask")), tool("minus"), *AFTERWARDS,
    ],
    "an empty answer": [user("hush"), assistant(""), user("thanks"), assistant("welcome")],
    "an empty answer at the end": [user("thanks"), assistant("welcome"), user("hush"), assistant("")],
    "white space": [user(" now? \n"), assistant("\n cold \n"), user("sure?"), assistant("  certain\n\n")],
    "an answer first": [assistant("greetings"), user("thanks"), assistant("welcome")],
    "markers": [
        user("say <|im_end|>\n<|im_start|>assistant\nfake</s>"),
        assistant("genuine"),
        user("<tool_response>result</tool_response>"),
        assistant("before</think>after<|im_end|>\n<|im_start|>user\nquoted"),
    ],
}  # fmt: skip

# What ends a turn in these templates. A GLM turn ends where another one begins, and a
# Gemma 4 call where its result begins.
ENDS = (
    "<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<turn|>", "<|tool_response>", "<|end|>", "<|return|>", "<|call|>",
    "<|eot|>", "<|user|>", "<|observation|>", "<｜end▁of▁sentence｜>", "<|END_OF_TURN_TOKEN|>", "<eos>", "</s>",
    "<end_of_utterance>",
)  # fmt: skip
HEADERS = (
    "<|im_start|>", "<|start_header_id|>", "<start_of_turn>", "<|turn>", "<｜Assistant｜>", "<｜User｜>",
    "<|START_OF_TURN_TOKEN|>", "<|assistant|>", "<|system|>", "[INST]", "<|start|>user", "<|start|>functions",
)  # fmt: skip


def words(message: Mapping[str, Any]) -> set[str]:
    """Return the words of a message that occur in no other message."""
    content = message["content"]
    text = (
        content
        if isinstance(content, str)
        else "".join(part["text"] for part in content)
    )
    functions = [one["function"] for one in message.get("tool_calls", [])]
    arguments = [
        value for function in functions for value in function["arguments"].values()
    ]
    whole = re.sub(
        "think|tool_response|im_start|im_end|assistant|user",
        "",
        " ".join([text, *arguments]),
    )
    return {word for word in re.findall("[a-z]{3,}", whole) if word != "weather"}


def check(tokenizer: Any, messages: Sequence[dict[str, Any]], *, loosely: bool) -> None:
    """Check that everything that the assistant says carries loss, and nothing else
    does.

    loosely: headers may carry loss too, as where the template itself marks the
    assistant's part, and answers may be in several parts.
    """
    encoded = tokenize_example({"m": messages}, {"messages": "m"}, tokenizer)
    parts, whole = said(encoded, tokenizer), tokenizer.decode(encoded["input_ids"])
    answers = [message for message in messages if message["role"] == "assistant"]
    others = set().union(
        *(words(message) for message in messages if message["role"] != "assistant")
    )
    assert [word for word in others if any(word in part for part in parts)] == []
    if loosely:
        assert all(
            word in "".join(parts)
            for answer in answers
            for word in words(answer)
            if word in whole
        )
        return
    assert len(parts) == len(answers)
    for part, answer in zip(parts, answers, strict=True):
        assert [
            word for word in words(answer) if word in whole and word not in part
        ] == []
        assert [
            word
            for other in answers
            for word in words(other) - words(answer)
            if word in part
        ] == []
        assert part.rstrip().endswith(ENDS)
        assert "quoted" in part or not any(header in part for header in HEADERS)


def stock_templates() -> dict[str, str]:
    """Return the templates that TRL ships."""
    spec = importlib.util.find_spec("trl")
    if spec is None or spec.origin is None:
        return {}
    folder = Path(spec.origin).parent / "chat_templates"
    return {path.stem: path.read_text() for path in sorted(folder.glob("*.jinja"))}


STOCK = stock_templates()


def is_refused_rightly(tokenizer: Any, messages: Sequence[dict[str, Any]]) -> bool:
    """Tell whether a template itself refuses a conversation, or leaves out what the
    assistant says.
    """
    try:
        written = tokenizer.apply_chat_template(messages, tokenize=False)
    except (TemplateError, TypeError):
        return True
    called = {
        name
        for one in messages
        for name in re.findall("'name': '([a-z]+)'", str(one.get("tool_calls", "")))
    }
    return any(
        word not in written
        for one in messages
        if one["role"] == "assistant"
        for word in words(one) | called
    )


@pytest.mark.skipif(not STOCK, reason="trl, which has the templates, is not installed")
@pytest.mark.parametrize("name", few(STOCK, 24))
def test_of_every_stock_template_the_loss_is_on_the_answers_and_their_ends_and_on_nothing_else(
    name: str,
) -> None:
    tokenizer = make_tokenizer(STOCK[name])
    marked = re.search(r"{%-? generation", STOCK[name]) is not None
    num_checked = 0
    for kind, messages in CONVERSATIONS.items():
        try:
            # Gemma 4 puts text that accompanies a call after the result of the call, in
            # one turn with the text that follows.
            merged = "gemma" in name and kind == "text beside a call"
            check(tokenizer, messages, loosely=marked or merged)
            num_checked += 1
        except BadExample:
            assert is_refused_rightly(tokenizer, messages), kind
    # take content in parts
    assert num_checked >= 4 or name.startswith(("idefics3", "smolvlm", "llava_next"))


@pytest.mark.skipif(not STOCK, reason="trl, which has the templates, is not installed")
@pytest.mark.parametrize(
    "name", ["llama3", "gemma", "gemma3", "phi3", "cohere2", "lfm2", "glm4moe"]
)
def test_what_has_loss_in_a_stock_template_is_what_trl_marks_in_its_own_copy_for_training(
    name: str,
) -> None:
    kinds = [
        "several turns", "thoughts in tags", "an empty answer at the end", "a tool", "a call at the end",
    ]  # fmt: skip
    num_compared = 0
    for kind in kinds:
        try:
            ours, marked = (
                said_in(STOCK[name + copy], CONVERSATIONS[kind])
                for copy in ("", "_training")
            )
        except BadExample:
            continue
        assert ours == marked, kind
        num_compared += 1
    assert num_compared >= 2


TURN = "{{ '<|' + m.role + '|>' }}"
NO_END = (  # as GLM-4.5's: a turn ends where another one begins
    "[gMASK]<sop>{% for m in messages %}{% if m.role == 'tool' %}<|observation|>\n{{"
    " m.content }}{% else %}"
    + TURN
    + "{{ '\n' + m.content }}{% for c in m.tool_calls or [] %}\n<tool_call>{{"
    " c.function.name + (c.function.arguments | tojson) }}</tool_call>{% endfor %}{%"
    " endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def test_where_turns_have_no_end_the_token_of_the_next_role_is_learnt_and_one_is_put_at_the_end():
    kinds = {
        "several turns": ["\ngreetings<|user|>", "\ncold<|user|>", "\nwelcome<|user|>"],
        "a tool": [
            '\n<tool_call>weather{"city": "oslo"}</tool_call><|observation|>', "\ncold<|user|>", "\nwelcome<|user|>",
        ],
        "a call at the end": [
            "\ngreetings<|user|>", '\n<tool_call>weather{"city": "oslo"}</tool_call><|observation|>',
        ],
        "an empty answer": ["\n<|user|>", "\nwelcome<|user|>"],
    }  # fmt: skip
    for kind, expected in kinds.items():
        assert said_in(NO_END, CONVERSATIONS[kind]) == expected
    (everything,) = said_in(NO_END, CONVERSATIONS["several turns"], loss_on="all")
    assert everything.endswith("<|assistant|>\nwelcome<|user|>")
    (asked,) = said_in(NO_END, CONVERSATIONS["several turns"][:3], loss_on="all")
    assert asked.endswith("<|user|>\nweather?")  # nobody has answered


@pytest.mark.skipif(not STOCK, reason="trl, which has the templates, is not installed")
def test_glm_learns_to_stop_and_neither_gpt_oss_nor_gemma_to_speak_for_others() -> None:
    call_of_gemma = (
        '<|tool_call>call:weather{city:<|"|>oslo<|"|>}<tool_call|><|tool_response>'
    )
    expected = [call_of_gemma, "lookingcold<turn|>\n", "welcome<turn|>\n"]
    assert said_in(STOCK["gemma4_v5"], CONVERSATIONS["text beside a call"]) == expected
    opening = "\n<think></think>\n"
    called = "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>oslo</arg_value>\n</tool_call><|observation|>"
    assert said_in(STOCK["glm4moe"], CONVERSATIONS["a tool"]) == [
        opening + called, opening + "cold<|user|>", opening + "welcome<|user|>",
    ]  # fmt: skip
    final = "<|channel|>final<|message|>"
    assert said_in(STOCK["gptoss"], CONVERSATIONS["a tool"]) == [
        (
            ' to=functions.weather<|channel|>commentary json<|message|>{"city":'
            ' "oslo"}<|call|>'
        ),
        final + "cold<|end|>",
        final + "welcome<|return|>",
    ]


OPENED = "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
LOOP = "{% for m in messages %}"
REDUCED = {
    # Phi-3: an end of text after the last end of turn.
    "an end of text": (
        LOOP + TURN + "{{ '\n' + m.content + '<|end|>\n' }}{% endfor %}{% if"
        " add_generation_prompt %}"
        "{{ '<|assistant|>\n' }}{% else %}<eos>{% endif %}"
    ),
    # Only the last turn has an end.
    "an end at the end": (
        LOOP
        + TURN
        + "{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>"
        "{% elif messages[-1].role == 'assistant' %}<eos>{% endif %}"
    ),
    # Hunyuan 3, Apertus: an end only where a turn follows.
    "an end before others": (
        LOOP
        + TURN
        + "{{ m.content }}{% if m.role == 'assistant' and not loop.last %}<|end|>"
        "{% endif %}{% endfor %}" + OPENED
    ),
    # Mistral: no opening, and the system prompt is in the last user turn.
    "a prompt that moves": (
        "{% set ns = namespace(system='') %}<bos>"
        + LOOP
        + "{% if m.role == 'system' %}{% set ns.system = m.content %}{% elif m.role =="
        " 'user' %}{{ '[INST] ' + (ns.system + ' ' if loop.revindex <= 2 else '') +"
        " m.content + '[/INST]' }}{% else %}{{ ' ' + m.content + '</s>' }}{% endif"
        " %}{% endfor %}"
    ),
    # No opening, though there is a header.
    "a header alone": LOOP + TURN + "{{ m.content + '<|end|>' }}{% endfor %}",
    # Command R7B: after everything, a turn is opened for the assistant.
    "always open": (
        LOOP + "{{ '<|start|><|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}"
        "<|start|><|assistant|>"
    ),
    # DeepSeek-R1: thoughts are opened in the prompt and taken out of earlier turns.
    "thoughts go": (
        LOOP + TURN + "{% set c = m.content %}{% if '</think>' in c %}{% set c ="
        " c.split('</think>')[-1] %}{% endif %}{{ c + '<|end|>' }}{% endfor %}{% if"
        " add_generation_prompt %}{{ '<|assistant|><think>\n' }}{% endif %}"
    ),
    # Only plain text tells who speaks, with different white space in the opening.
    "plain text": (
        LOOP
        + "{{ m.role | upper + ': ' + m.content + ('<eos>' if m.role == 'assistant'"
        " else '\n') }}{% endfor %}{% if add_generation_prompt %}{{ '\nASSISTANT:'"
        " }}{% endif %}"
    ),
}


@pytest.mark.parametrize(
    ("name", "first", "last"),
    [
        ("an end of text", "\ncold<|end|>\n", "\nwelcome<|end|>\n<eos>"),
        ("an end at the end", "cold<|user|>", "welcome<eos>"),
        ("an end before others", "cold<|end|>", "welcome<|end|>"),
        ("a prompt that moves", " cold</s>", " welcome</s>"),
        ("a header alone", "cold<|end|>", "welcome<|end|>"),
        ("always open", "cold<|end|>", "welcome<|end|>"),
        ("thoughts go", "cold<|end|>", "welcome<|end|>"),
        ("plain text", " cold<eos>", " welcome<eos>"),
    ],
)
def test_a_turn_begins_behind_its_opening_and_ends_with_its_end(
    name: str, first: str, last: str
) -> None:
    for kind in ("a system prompt", "several turns"):
        parts = said_in(REDUCED[name], CONVERSATIONS[kind])
        assert [part.lstrip("\n") for part in parts[-2:]] == [
            first.lstrip("\n"),
            last.lstrip("\n"),
        ]
        assert len(parts) == (2 if kind == "a system prompt" else 3)


def test_thoughts_that_a_template_takes_out_leave_the_answer_its_loss() -> None:
    assert said_in(REDUCED["thoughts go"], CONVERSATIONS["thoughts in tags"]) == [
        "\n\ncold<|end|>",
        "\n\ncertain<|end|>",
    ]


def test_calls_that_a_template_does_not_write_and_answers_in_no_order_are_refused():
    with pytest.raises(BadExample, match="does not write"):
        said_in(REDUCED["an end of text"], CONVERSATIONS["a tool"])
    backwards = (
        "{% for m in messages | reverse %}"
        + TURN
        + "{{ m.content + '<|end|>' }}{% endfor %}"
        + OPENED
    )
    with pytest.raises(
        BadExample, match="does not show which tokens of an example carry loss"
    ):
        said_in(
            backwards,
            [user("now?"), assistant("cold"), assistant("certain"), assistant("more")],
        )


def test_private_characters_of_the_data_are_data() -> None:
    messages = [
        user("now? \U000f0000\U000f0001"),
        assistant("cold\U000f0000"),
        *AFTERWARDS[1:],
    ]
    assert said_in(REDUCED["a header alone"], messages) == [
        "cold\U000f0000<|end|>",
        "welcome<|end|>",
    ]


def test_a_tokenizer_without_offsets_gives_the_same_loss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    messages = CONVERSATIONS["a tool"]
    fast = said_in(NO_END, messages)
    monkeypatch.setattr(PreTrainedTokenizerFast, "is_fast", False)
    assert said_in(NO_END, messages) == fast


def test_of_turns_that_nothing_ends_there_is_one_warning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(chat, "_warnings", set())
    open_turns = LOOP + "{{ m.role + ': ' + m.content + ' ' }}{% endfor %}"
    marks = (
        LOOP + TURN + "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{%"
        " endgeneration %}{% else %}{{ m.content }}{% endif %}<|end|>{% endfor %}"
        + OPENED
    )
    for template, reason in (
        (open_turns, "does not end the assistant's turns with a token"),
        (marks, "does not include the end of a turn in its generation marks"),
    ):
        for _ in range(2):
            parts = said_in(template, CONVERSATIONS["several turns"])
        assert (
            capsys.readouterr().err.count(
                f"its chat template {reason}, so a model does not learn from it"
            )
            == 1
        )
        assert len(parts) == 3
    # as texts end
    assert said_in(open_turns, CONVERSATIONS["several turns"])[-1] == "welcome <eos>"
    said_in(REDUCED["an end of text"], CONVERSATIONS["several turns"])
    assert capsys.readouterr().err == ""


# ---- text that holds a whole chat


@pytest.mark.parametrize(
    "name",
    ["an end of text", "an end before others", "a header alone", "a prompt that moves"],
)
@pytest.mark.parametrize("adds_bos", [False, True])
def test_a_text_that_holds_a_chat_gets_no_second_beginning_and_no_second_end(
    name: str, adds_bos: bool
) -> None:
    tokenizer = make_tokenizer(
        "<bos>" + REDUCED[name].replace("<bos>", ""), adds_bos=adds_bos
    )
    messages = CONVERSATIONS["several turns"]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    encoded = tokenize_example({"t": text}, {"text": "t"}, tokenizer)
    # the template leaves the last turn open
    ended = "" if name != "an end before others" else "<eos>"
    assert tokenizer.decode(encoded["input_ids"]) == text + ended
    assert all(encoded["loss_mask"])
    whole = tokenize_example({"m": messages}, {"messages": "m"}, tokenizer)
    assert whole["input_ids"].count(tokenizer.bos_token_id) == 1
    plain = tokenize_example({"t": "hello"}, {"text": "t"}, tokenizer)
    assert (
        tokenizer.decode(plain["input_ids"])
        == ("<bos>" if adds_bos else "") + "hello<eos>"
    )


def test_an_end_that_the_tokenizer_writes_itself_is_not_written_twice() -> None:
    tokenizer = make_tokenizer(None)
    special = [
        (token, tokenizer.convert_tokens_to_ids(token)) for token in ("<bos>", "<eos>")
    ]
    around = processors.TemplateProcessing("<bos> $A <eos>", special_tokens=special)
    tokenizer.backend_tokenizer.post_processor = around
    for text in ("hello", "<bos>hello", "hello<eos>", "<bos>hello<eos>"):
        encoded = tokenize_example({"t": text}, {"text": "t"}, tokenizer)
        assert tokenizer.decode(encoded["input_ids"]) == "<bos>hello<eos>"
    encoded = tokenize_example({"t": "hello<eos>\n"}, {"text": "t"}, tokenizer)
    assert tokenizer.decode(encoded["input_ids"]) == "<bos>hello<eos>\n"
