"""Thoughts and answers with every family's markers, written by hand after the families'
own templates.
"""

from typing import Any

import pytest

from fcsd.data.thoughts import Thoughts, answer_in, thinking_options
from fcsd.pipeline.tiny.models import tiny_tokenizer
from tests.data.test_examples import stock

HARMONY = (
    "<|channel|>analysis<|message|>User greets.\n\nQuestion: what"
    " now?<|end|><|start|>assistant<|channel|>final<|message|>Hello!<|return|>"
)
SEED = (
    "{% set think_end_token = '</seed:think>' %}{{ messages[0].content }}<seed:think>"
)
MISTRAL = (
    "[SYSTEM_PROMPT]Think first: [THINK]draft[/THINK]answer[/SYSTEM_PROMPT]{{"
    " messages[0].content }}"
)
GEMMA = "{{ '<|channel>thought\n<channel|>' }}{{ messages[0].content }}"
HUNYUAN = "<think> </think> <answer> </answer>{{ messages[0].content }}"
COHERE = "<|START_THINKING|> <|END_THINKING|><|START_RESPONSE|> <|END_RESPONSE|>"
SPOKEN: dict[str, tuple[str, str, str]] = {
    # the template, what the model writes, and the part of it that is a thought without
    # an end
    "qwen3": ("qwen3", "<think>\nUser greets.\n\nA: no\n</think>\n\nHello!", "<think>\nUser greets."),
    "glm4moe": ("glm4moe", "<think>User greets.</think>\nHello!", "<think>User greets.\n\nHello!"),
    "gptoss": ("gptoss", HARMONY, "<|channel|>analysis<|message|>User greets. Hello!"),
    "gptoss without thoughts": (
        "gptoss", "<|channel|>final <|constrain|>text<|message|>Hello!<|return|>", "<|channel|>commentary",
    ),
    "gemma4": ("gemma4_v5", "<|channel>thought\nUser greets.<channel|>Hello!", "<|channel>thought\nUser"),
    "muse": (
        "muse_glimmer", " to=self<|message|>Greets.<|eom|><|start|>assistant to=user<|message|>Hello!<|eot|>",
        " to=self<|message|>User greets.",
    ),
    "seed": (SEED, "<seed:think>User greets.</seed:think>Hello!", "<seed:think>User greets."),
    "mistral": (MISTRAL, "[THINK]User greets.[/THINK]Hello!", "[THINK]User greets."),
    "gemma by hand": (GEMMA, "<|channel>thought\nGreets.<channel|>Hello!", "<|channel>thought\nGreets."),
    "hunyuan": (HUNYUAN, "<think>\nGreets.\n</think>\n<answer>\nHello!\n</answer>", "<think>\nGreets."),
    "cohere": (
        COHERE, "<|START_THINKING|>x<|END_THINKING|><|START_RESPONSE|>Hello!<|END_RESPONSE|>",
        "<|START_THINKING|>x",
    ),
    "kimi": ("◁think▷ ◁/think▷", "◁think▷Greets.◁/think▷Hello!", "◁think▷Greets."),
    "longcat": ("</longcat_think>", "<longcat_think>x</longcat_think>Hello!", "<longcat_think>x"),
    "no marker in the template": ("{{ messages[0].content }}", "<think>x</think>Hello!", "<think>x"),
}  # fmt: skip


def tokenizer_with(template: str, *special: str) -> Any:
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    tokenizer.chat_template = (
        template
        if "{" in template or "<" in template or "◁" in template
        else stock(template)
    )
    return tokenizer


@pytest.mark.parametrize("name", SPOKEN)
def test_the_answer_follows_the_familys_markers_and_thoughts_without_an_end_are_none(
    name: str,
) -> None:
    template, text, endless = SPOKEN[name]
    thoughts = Thoughts(tokenizer_with(template))
    assert thoughts.answer(text) == "Hello!"
    assert thoughts.answer(endless) == ""
    assert thoughts.answer(" Hello!\n") == " Hello!\n"  # no thoughts: to the letter
    assert answer_in(text) == "Hello!" and answer_in(endless) == ""


@pytest.mark.parametrize("name", SPOKEN)
def test_a_stream_shows_the_answer_alone_however_the_text_is_cut_into_pieces(
    name: str,
) -> None:
    template, text, endless = SPOKEN[name]
    thoughts = Thoughts(tokenizer_with(template))
    for size in (1, 3, 7, len(text)):
        pieces = [text[start : start + size] for start in range(0, len(text), size)]
        assert "".join(thoughts.streamed(pieces, "")).strip() == "Hello!"
    assert list(thoughts.streamed(list(endless), "")) == []


@pytest.mark.parametrize(
    ("template", "may_think"),
    [
        ("lfm2_2_5", True),
        ("deepseekv3", True),
        ("qwen3", False),  # it has a switch
        ("qwen2_5", False),  # it knows no thoughts
    ],
)
def test_a_model_whose_template_has_no_switch_may_think_unasked(
    template: str, may_think: bool
) -> None:
    thoughts = Thoughts(tokenizer_with(template))
    assert thoughts.are_in("prompt", asked=False) is may_think


def test_thoughts_may_quote_the_markers_of_other_families() -> None:
    for quoted in ("</reasoning>", "[THINK]", "<|channel|>", "<|END_THINKING|>"):
        assert answer_in(f"<think>\nTags: {quoted} is one.</think>\nHello!") == "Hello!"
        assert answer_in(f"<think>\nTags: {quoted} is one.") == ""
    assert answer_in("<Thinking>x</Thinking>Hello!") == "Hello!"


def test_an_answer_is_shown_while_it_is_written() -> None:
    thoughts = Thoughts(tokenizer_with("qwen3"))
    stream = thoughts.streamed(
        iter(["<think>a", "</thi", "nk>\n\nHel", "lo ", "you"]), ""
    )
    assert list(stream) == ["Hel", "lo", " you"]


def test_thoughts_that_the_prompt_has_opened_are_thoughts_without_a_marker_of_their_own():
    thoughts = Thoughts(tokenizer_with("deepseek_r1_distill"))
    prompt = "<｜User｜>Hi<｜Assistant｜><think>\n"
    assert thoughts.answer("User greets.\n\nSo: hello", prompt) == ""
    assert thoughts.answer("User greets.</think>\n\nHello!", prompt) == "Hello!"
    assert (
        thoughts.answer("Hello!", "<|im_start|>assistant\n<think>\n\n</think>\n\n")
        == "Hello!"
    )


def test_a_marker_inside_a_line_of_the_answer_opens_no_thoughts() -> None:
    thoughts = Thoughts(tokenizer_with("qwen3"))
    for text in ("    print('<think>')\n", "The tag <think> opens them."):
        assert thoughts.answer(text) == text
    assert thoughts.answer("<think>a</think>b\n<think>c") == ""


def test_markers_that_are_special_tokens_outlive_decoding_and_others_do_not() -> None:
    """Reference: the same text, encoded by a tokenizer in which none of the markers is
    special.
    """
    marks = ("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|return|>")
    tokenizer = tokenizer_with("gptoss", *marks, "<|other|>")
    thoughts = Thoughts(tokenizer)
    tokens = tokenizer(
        HARMONY.replace("Hello", "Hel<|other|>lo"), add_special_tokens=False
    )["input_ids"]
    assert tokenizer.decode(tokens, skip_special_tokens=True).endswith(
        "assistantfinalHello!"
    )
    assert thoughts.decode(tokens) == HARMONY
    assert thoughts.without_special(HARMONY + "<|other|>") == HARMONY
    plain = Thoughts(tokenizer_with("qwen3", "<|other|>"))
    assert (
        plain.decode(tokenizer.encode("a<|other|>b", add_special_tokens=False)) == "ab"
    )


def test_a_tokenizer_whose_template_names_no_marker_is_known_by_its_tokens() -> None:
    thoughts = Thoughts(
        tokenizer_with("{{ messages[0].content }}", "[THINK]", "[/THINK]")
    )
    assert thoughts.answer("[THINK]a[/THINK]b") == "b"


def test_harmony_without_its_tokens_is_cut_in_a_file_of_answers() -> None:
    assert answer_in("analysisUser greets.assistantfinalHello!") == "Hello!"
    assert answer_in("analysis of the data") == "analysis of the data"


SWITCHED: dict[str, tuple[str, str, str]] = {
    # the part of a template that decides, and what it writes with and without thoughts
    "qwen3": (
        "{% if enable_thinking is defined and enable_thinking is false %}off{% endif %}",
        "", "off",
    ),
    "deepseek v3.1": (
        "{%- if not thinking is defined %}{%- set thinking = false %}{%- endif %}"
        "{% if thinking %}<think>{% else %}</think>{% endif %}",
        "<think>", "</think>",
    ),
    "granite": ("{%- if thinking %}Think first.{%- endif %}", "Think first.", ""),
    "both names": (
        "{%- if not thinking is defined %}{%- if enable_thinking is defined %}{%- set thinking = enable_thinking %}"
        "{%- endif %}{%- endif %}{{ 'on' if thinking else 'off' }}",
        "on", "off",
    ),
    "ling": (
        "{% if thinking_option == 'on' %}<think>{% elif thinking_option == 'off' %}<think></think>{% endif %}",
        "<think>", "<think></think>",
    ),
    "minimax": (
        "{% if thinking_mode is defined %}{% if thinking_mode == 'enabled' %}must"
        "{% elif thinking_mode == 'disabled' %}do not{% endif %}{% endif %}",
        "must", "do not",
    ),
    "cohere": (
        '{%- set thinking = false if reasoning_effort is defined and reasoning_effort|lower == "none" else true -%}'
        "{{ thinking }}",
        "True", "False",
    ),
    "mistral": (
        "{% if reasoning_effort not in ['high', 'none'] %}{{ raise_exception('an effort') }}{% endif %}"
        "{{ reasoning_effort }}",
        "high", "none",
    ),
    "hunyuan 3": (
        "{% if reasoning_effort in ['high', 'no_think'] %}{{ reasoning_effort }}{% endif %}",
        "high", "no_think",
    ),
    "seed": (
        "{%- if not thinking_budget is defined %}{%- set thinking_budget = -1 -%}{%- endif %}"
        "{% if thinking_budget == 0 %}none{% elif not thinking_budget == -1 %}{{ thinking_budget }}{% endif %}",
        "", "none",
    ),
    "gpt-oss, which has efforts and no switch": (
        "{% if reasoning_effort is not defined %}{% set reasoning_effort = 'medium' %}{% endif %}"
        "{{ reasoning_effort }}",
        "medium", "medium",
    ),
    "thoughts of a message, and no switch": (
        "{% for m in messages %}{% if m.thinking %}{{ m.thinking }}{% endif %}{% endfor %}", "", "",
    ),
    "a tag that jinja2 alone does not know": (
        "{% generation %}{{ messages[0].content }}{% endgeneration %}{% if thinking %}on{% endif %}",
        "hion", "hi",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SWITCHED)
def test_thoughts_are_switched_by_the_variable_that_the_template_reads(
    name: str,
) -> None:
    template, thinking, quick = SWITCHED[name]
    tokenizer = tokenizer_with(template)
    several = tokenizer_with(template)
    several.chat_template = {"default": template, "tool_use": "x"}
    for model in (tokenizer, several):
        texts = [
            model.apply_chat_template(
                [{"role": "user", "content": "hi"}],
                tokenize=False,
                **thinking_options(model, asked),
            )
            for asked in (True, False)
        ]
        assert texts == [thinking, quick]


def test_a_template_without_a_switch_and_one_that_cannot_be_read_get_the_usual_one():
    for template in ("{{ messages[0].content }}", "{% if %}<", None):
        tokenizer = tiny_tokenizer()
        tokenizer.chat_template = template
        assert thinking_options(tokenizer, False) == {"enable_thinking": False}
