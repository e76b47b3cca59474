"""Examples in the forms in which data come: they are trained on as they are written, or
refused by name.
"""

import datetime
import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from fcsd.base.errors import UserError
from fcsd.data import template as template_module
from fcsd.data.batches import NO_LOSS
from fcsd.data.config import SourceConfig
from fcsd.data.dataset import build_dataset, given_rows
from fcsd.data.decontaminate import Decontaminator, Item, ItemIndex
from fcsd.data.messages import BadExample
from fcsd.data.write_rows import BadRows
from tests.data.test_data import (
    MARKED_TEMPLATE,
    PLAIN_TEMPLATE,
    REWRITING_TEMPLATE,
    THINKING_TEMPLATE,
    make_tokenizer,
    said,
    write_jsonl,
)
from tests.examples import tokenize_example
from tests.support import few, user_error

# Silently leaves out a role that it does not name, as the templates of Qwen and
# DeepSeek do.
NAMING_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] in ['system', 'user',"
    " 'assistant'] %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|eos|>'"
    " }}{% endif %}{% endfor %}"
)
CALLING_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{% for"
    " call in message.tool_calls or [] %}[{{ call.function.name }} {{"
    " call.function.arguments | tojson }}]{% endfor %}<|eos|>{% endfor %}"
)
# Concatenates texts, as DeepSeek's does.
TEXT_CALLING_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message.role + '|>' + message.content }}"
    "{% for call in message.tool_calls %}"
    "{{ '[' + call.function.name + ' ' + call.function.arguments + ']' }}"
    "{% endfor %}<|eos|>{% endfor %}"
)
PARTS_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{% for part in message.content"
    " %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}<|eos|>{%"
    " endfor %}"
)
CHAT = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "twice?"},
    {"role": "assistant", "content": "8"},
]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    template_module._tell_once.cache_clear()
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def stock(name: str) -> str:
    """Return a chat template that TRL ships: those of the models, unchanged."""
    spec = importlib.util.find_spec("trl")
    if spec is None or spec.origin is None:
        pytest.skip("trl, which has the templates, is not installed")
    return (Path(spec.origin).parent / "chat_templates" / f"{name}.jinja").read_text()


def stock_names() -> list[str]:
    spec = importlib.util.find_spec("trl")
    folder = (
        Path(spec.origin).parent / "chat_templates" if spec and spec.origin else None
    )
    return sorted(path.stem for path in folder.glob("*.jinja")) if folder else []


def tokens_of(messages: list[Any], template: str, **columns: Any) -> tuple[str, str]:
    """Return the tokens of a conversation, and the part that carries loss."""
    tokenizer = make_tokenizer(template)
    tokenizer.bos_token = "<|bos|>"
    meanings = {"messages": "m"} | {name: name for name in columns}
    encoded = tokenize_example({"m": messages, **columns}, meanings, tokenizer)
    return tokenizer.decode(encoded["input_ids"]), said(encoded, tokenizer)


def refusal(messages: list[Any], template: str = PLAIN_TEMPLATE, **columns: Any) -> str:
    with pytest.raises(BadExample) as caught:
        tokens_of(messages, template, **columns)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def parts(message: dict[str, Any], kind: str = "text") -> dict[str, Any]:
    """Cut a content into parts of one character, with a key without value as `datasets`
    writes them.
    """
    return message | {
        "content": [
            {"type": kind, "text": text, "image_url": None}
            for text in message["content"]
        ]
    }


# ---- contents


@pytest.mark.parametrize("kind", few(["text", "input_text", "output_text"], 1))
@pytest.mark.parametrize(
    "template",
    [
        PLAIN_TEMPLATE, MARKED_TEMPLATE, REWRITING_TEMPLATE, "qwen3", "gptoss", "llama3", "smolvlm",
    ],
)  # fmt: skip
def test_a_content_of_text_parts_is_their_text(template: str, kind: str) -> None:
    template = template if "{" in template else stock(template)
    plain = tokens_of(CHAT, template)
    assert tokens_of([parts(message, kind) for message in CHAT], template) == plain
    assert tokens_of([CHAT[0], parts(CHAT[1]), *CHAT[2:]], template) == plain
    assert all(message["content"] in plain[0] for message in CHAT)
    assert "'text'" not in plain[0] and '"text"' not in plain[0]


def test_a_template_that_reads_parts_alone_is_given_parts() -> None:
    text, learned = tokens_of(CHAT, PARTS_TEMPLATE)
    assert (
        text == "<|system|>be"
        " brief<|eos|><|user|>2+2?<|eos|><|assistant|>4<|eos|><|user|>twice?<|eos|><|assistant|>8<|eos|>"
    )
    assert "4" in learned and "8" in learned and "twice" not in learned


@pytest.mark.parametrize(
    ("part", "name"),
    [
        ({"type": "image"}, "'image'"),
        ({"type": "image_url", "image_url": {"url": "data:…"}}, "'image_url'"),
        ({"type": "input_audio", "input_audio": {}}, "'input_audio'"),
        ({"type": "video"}, "'video'"),
        ({"type": "file", "file": {"file_id": "1"}}, "'file'"),
        ({"type": "refusal", "refusal": "no"}, "'refusal'"),
        ({"type": "text"}, "{'type': 'text'}"),
        ("bare", "'bare'"),
    ],
)
def test_a_part_that_is_no_text_is_refused_by_its_kind(part: Any, name: str) -> None:
    message = {
        "role": "user",
        "content": [{"type": "text", "text": "what is this?"}, part],
    }
    error = refusal([message, CHAT[2]])
    assert (
        f"column 'm': the content of a message has a part {name}; only parts of type 'text'"
        in error
    )
    assert "fcsd distils text only" in error


@pytest.mark.parametrize("form", ["list", "rows.jsonl", "rows.json"])
def test_parts_beside_texts_are_read_from_every_kind_of_data_as_they_are_written(
    tmp_path: Path, form: str
) -> None:
    examples = [
        {"messages": [{"role": "user", "content": "5"}, {"role": "assistant", "content": '{"x": null}'}], "id": "a"},
        {"messages": [parts({"role": "user", "content": "7"}), {"role": "assistant", "content": "14"}], "id": 4},
    ]  # fmt: skip
    tokenizer, options = (
        make_tokenizer(PLAIN_TEMPLATE),
        {"max_length": 128, "shuffle": False},
    )
    if form == "list":
        (row,) = given_rows(examples, tokenizer, name="x", **options)
    else:
        lines = [json.dumps(example) for example in examples]
        text = "\n".join(lines) if form.endswith("l") else f"[{','.join(lines)}]"
        (tmp_path / form).write_text(text)
        (row,) = build_dataset(
            [SourceConfig(path=str(tmp_path / form))], tokenizer, **options
        )
    text = tokenizer.decode(row["input_ids"])
    assert text.startswith(
        '<|user|>5<|eos|><|assistant|>{"x":'
        " null}<|eos|><|user|>7<|eos|><|assistant|>14<|eos|>"
    )


def test_a_text_that_is_json_is_the_same_text_from_a_file(tmp_path: Path) -> None:
    answers = ["5", "true", '{"x": 1.0}', '"quoted"', "plain", "null"]
    path = write_jsonl(
        tmp_path / "rows.jsonl", [{"p": "?", "r": answer, "n": 1} for answer in answers]
    )
    source = SourceConfig(path=path, columns={"prompt": "p", "response": "r"})
    tokenizer = make_tokenizer(PLAIN_TEMPLATE)
    rows = build_dataset(
        [source], tokenizer, max_length=64, packing=False, shuffle=False
    )
    learned = [
        tokenizer.decode([token for token in row["labels"] if token != NO_LOSS])
        for row in rows
    ]
    assert learned == [f"{answer}<|eos|>" for answer in answers]


def test_metadata_of_a_message_are_not_read() -> None:
    noted = [
        message | {"time": datetime.datetime(2026, 1, 1), "id": index}
        for index, message in enumerate(CHAT)
    ]
    assert tokens_of(noted, PLAIN_TEMPLATE) == tokens_of(CHAT, PLAIN_TEMPLATE)


def test_a_key_that_not_every_example_of_a_list_has_is_read() -> None:
    examples = [{"messages": CHAT[1:3]}, {"messages": CHAT[1:3], "system": "be kind"}]
    tokenizer = make_tokenizer(PLAIN_TEMPLATE)
    (row,) = given_rows(examples, tokenizer, name="x", max_length=128, shuffle=False)
    assert tokenizer.decode(row["input_ids"]).count("be kind") == 1


# ---- calls of tools


def calling(arguments: Any, **call: Any) -> list[dict[str, Any]]:
    function = {"name": "look", "arguments": arguments}
    return [
        CHAT[1],
        {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function, **call}]},
    ]  # fmt: skip


TWO_CALLS = calling({})[1] | {"tool_calls": 2 * calling({})[1]["tool_calls"]}
ARGUMENTS = {"city": "Köln", "days": 2, "exact": None}


@pytest.mark.parametrize(
    "template",
    [
        CALLING_TEMPLATE, "qwen2_5", "qwen3", "qwen3_5_nothink", "gptoss", "glm4moe", "llama3_1", "gemma4",
    ],
)  # fmt: skip
def test_arguments_that_are_json_text_are_written_once(template: str) -> None:
    template = template if "{" in template else stock(template)
    tokenizer = make_tokenizer(template)
    tokenizer.bos_token = "<|bos|>"
    calls = [{"type": "function", "function": {"name": "look", "arguments": ARGUMENTS}}]
    reference = tokenizer.apply_chat_template(
        [CHAT[1], {"role": "assistant", "content": "", "tool_calls": calls}],
        tokenize=False,
    )
    text, learned = tokens_of(calling(json.dumps(ARGUMENTS)), template)
    assert text.startswith(reference) and "Köln" in text and '\\"' not in text
    assert "look" in learned


@pytest.mark.parametrize("template", [TEXT_CALLING_TEMPLATE, "deepseekv3"])
@pytest.mark.parametrize(
    "arguments", ['{"city":  "Bonn"}', {"city": "Bonn"}], ids=["text", "an object"]
)
def test_a_template_that_puts_texts_together_is_given_json_text(
    template: str, arguments: Any
) -> None:
    template = template if "{" in template else stock(template)
    written = arguments if isinstance(arguments, str) else '{"city": "Bonn"}'
    text, learned = tokens_of(calling(arguments), template)
    assert written in text and "look" in text
    assert written in learned


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("{city: Bonn}", "arguments of a call: JSON text is needed, got '{city: Bonn}'"),
        ('"Bonn"', "the arguments of a call of 'look' must be an object, or JSON text of one"),
        ("[1]", "the arguments of a call of 'look' must be an object"),
        (5, "the arguments of a call of 'look' must be an object"),
    ],
)  # fmt: skip
def test_arguments_that_are_no_object_are_refused(arguments: Any, reason: str) -> None:
    assert reason in refusal(calling(arguments), CALLING_TEMPLATE)


@pytest.mark.parametrize("arguments", ["", "{}", "null", None, {}])
def test_a_call_may_have_no_arguments(arguments: Any) -> None:
    assert tokens_of(calling(arguments), CALLING_TEMPLATE)[0].endswith(
        "<|assistant|>[look {}]<|eos|>"
    )


CALLED = '<|user|>2+2?<|eos|><|assistant|>[look {"x": 1}]<|eos|>'


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "function_call": {"name": "look", "arguments": '{"x": 1}'}},
        {"role": "assistant", "content": "", "tool_calls": [{"name": "look", "arguments": {"x": 1}}]},
        {"role": "assistant", "tool_calls": '[{"function": {"name": "look", "arguments": {"x": 1}}}]'},
        {"role": "tool_call", "content": '{"name": "look", "arguments": {"x": 1}}'},
        {"from": "function_call", "value": '[{"name": "look", "arguments": {"x": 1}}]'},
    ],
    ids=[
        "OpenAI's old form",
        "without a wrapper",
        "JSON text",
        "ms-swift",
        "LLaMA-Factory",
    ],
)  # fmt: skip
def test_calls_in_other_forms_are_calls(message: dict[str, Any]) -> None:
    text, learned = tokens_of([CHAT[1], message], CALLING_TEMPLATE)
    assert text == CALLED
    assert learned.endswith('[look {"x": 1}]<|eos|>')
    assert "2+2" not in learned


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"from": "function_call", "value": "look"}, "a call: JSON text is needed"),
        ({"from": "function_call", "value": "5"}, "a tool call needs a function's"),
    ],
)
def test_a_call_that_is_none_is_refused(message: dict[str, Any], reason: str) -> None:
    assert f"column 'm': {reason}" in refusal([CHAT[1], message], CALLING_TEMPLATE)


def test_parameters_of_a_tool_that_are_json_text_are_written_once() -> None:
    template = "{{ tools | tojson }}" + CALLING_TEMPLATE
    function = {"name": "look", "parameters": {"type": "object", "properties": {}}}
    tool = {"type": "function", "function": function}
    text = {
        "type": "function",
        "function": function | {"parameters": json.dumps(function["parameters"])},
    }
    assert tokens_of(CHAT, template, tools=[text]) == tokens_of(
        CHAT, template, tools=[tool]
    )


def test_tools_without_a_wrapper_are_given_one_where_the_template_would_not_write_them():
    function = {
        "name": "look",
        "description": "looks",
        "parameters": {"type": "object", "properties": {}},
    }
    wrapped = [{"type": "function", "function": function}]
    text = tokens_of(CHAT, stock("gptoss"), tools=wrapped)
    assert "look" in text[0]
    for bare in (
        [function],
        json.dumps([function]),
        [{"type": "function", **function}],
    ):
        assert tokens_of(CHAT, stock("gptoss"), tools=bare) == text
    assert (
        f"<tools>\n{json.dumps(function)}\n"
        in tokens_of(CHAT, stock("qwen3"), tools=[function])[0]
    )


@pytest.mark.parametrize(
    ("template", "messages", "reason"),
    [
        (PLAIN_TEMPLATE, calling({}), "does not write the call of a message"),
        ("deepseek_r1_distill", calling({}), "does not write the call of a message"),
        ("gptoss", [CHAT[1], TWO_CALLS], "does not write every call of a message"),
        (NAMING_TEMPLATE, [*CHAT, {"role": "tool", "content": "4"}], "a message of role 'tool' in its place"),
        ("qwen3_vl", [*CHAT, *CHAT], "a message of role 'system' in its place"),
    ],
)  # fmt: skip
def test_what_a_template_would_leave_out_is_refused(
    template: str, messages: list[Any], reason: str
) -> None:
    template = template if "{" in template else stock(template)
    error = refusal(messages, template)
    assert f"its chat template {reason}" in error or reason in error
    assert "take such examples out of the data, or use a template that does" in error


@pytest.mark.breadth
@pytest.mark.parametrize("name", stock_names())
def test_every_stock_template_writes_all_that_an_example_says_or_refuses_it(
    name: str,
) -> None:
    template = stock(name)
    result = {"role": "tool", "name": "look", "content": "it rains"}
    chats = [
        [{"role": "developer", "content": "be brief"}, *CHAT[1:]],
        [CHAT[0], parts(CHAT[1]), *CHAT[2:]],
        [*CHAT[1:4], *calling('{"city": "Bonn"}')[1:], result, CHAT[4]],
        [*CHAT[1:4], *calling({"city": "Bonn"})[1:], result, CHAT[4]],
        [CHAT[0], *CHAT[3:], CHAT[0] | {"content": "be long"}, *CHAT[1:3]],
        [parts(message) for message in CHAT[1:]],
    ]
    for chat in chats:
        says = [text for message in chat if isinstance(text := message["content"], str)]
        says += ["2+2?"] + ["Bonn"] * any("tool_calls" in message for message in chat)
        try:
            text, _ = tokens_of(chat, template)
        except BadExample:
            assert chat != chats[-1]
            continue
        assert [word for word in says if word not in text] == []
        assert [
            wrong
            for wrong in ("'city'", '\\"city', "'text'", '"text"')
            if wrong in text
        ] == []


# ---- roles


@pytest.mark.parametrize(
    ("role", "standard"),
    [
        ("human", "user"), ("User", "user"), ("gpt", "assistant"), ("model", "assistant"), ("bot", "assistant"),
        ("chatgpt", "assistant"), ("observation", "tool"), ("tool_response", "tool"), ("ipython", "tool"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("keys", [("role", "content"), ("from", "value")])
def test_a_role_of_other_data_is_the_standard_one(
    keys: tuple[str, str], role: str, standard: str
) -> None:
    def turns(name: str) -> list[dict[str, str]]:
        chat = [("user", "a"), ("assistant", "b"), (name, "c"), ("assistant", "d")]
        return [dict(zip(keys, turn, strict=True)) for turn in chat]

    assert tokens_of(turns(role), PLAIN_TEMPLATE) == tokens_of(
        turns(standard), PLAIN_TEMPLATE
    )


def test_a_message_of_a_function_is_its_result_in_openais_data_and_unclear_in_others():
    result = {"role": "function", "name": "look", "content": "4"}
    assert tokens_of([*CHAT[:3], result], PLAIN_TEMPLATE)[0].endswith(
        "<|tool|>4<|eos|>"
    )
    error = refusal(
        [{"from": "human", "value": "a"}, {"from": "function", "value": "4"}]
    )
    assert "write 'function_call' or 'observation'" in error


def test_a_result_of_a_tool_is_an_observation_where_the_template_knows_that_name_alone():
    template = NAMING_TEMPLATE.replace("'user',", "'user', 'observation',")
    for result in (
        {"role": "tool", "content": "4"},
        {"from": "observation", "value": "4"},
    ):
        assert tokens_of([*CHAT[:3], result], template)[0].endswith(
            "<|observation|>4<|eos|>"
        )


def test_an_unknown_role_is_refused_unless_the_template_names_it() -> None:
    messages = [*CHAT[:2], {"role": "critic", "content": "so?"}, *CHAT[2:]]
    assert (
        "does not know the role of a message from 'critic'; allowed: human, user"
        in refusal(messages)
    )
    naming = "{# of 'critic' #}" + PLAIN_TEMPLATE
    assert "<|critic|>so?<|eos|>" in tokens_of(messages, naming)[0]


@pytest.mark.parametrize(
    ("template", "written"),
    [
        (PLAIN_TEMPLATE, "<|developer|>be brief<|eos|>"),
        (NAMING_TEMPLATE, "<|system|>be brief<|eos|>"),
        ("gptoss", "<|start|>developer<|message|># Instructions\n\nbe brief"),
        ("qwen3", "<|im_start|>system\nbe brief<|im_end|>"),
        ("deepseekv3", "be brief<｜User｜>"),
        ("phi3", "<|system|>\nbe brief<|end|>"),
        ("gemma3", "<start_of_turn>user\nbe brief"),
    ],
)
def test_a_developers_message_is_written_as_one_of_the_system_where_the_template_knows_none(
    template: str, written: str
) -> None:
    template = template if "{" in template else stock(template)
    assert (
        written
        in tokens_of(
            [{"role": "developer", "content": "be brief"}, *CHAT[1:]], template
        )[0]
    )


# ---- where loss is


@pytest.mark.parametrize(
    "template", [PLAIN_TEMPLATE, MARKED_TEMPLATE, REWRITING_TEMPLATE, THINKING_TEMPLATE]
)
@pytest.mark.parametrize(
    ("off", "on"),
    [
        ({"weight": 0}, {"weight": 1}),
        ({"train": False}, {"train": True}),
        ({"loss": False}, {}),
        ({"trainable": False}, {"loss_mask": 1}),
    ],
)
def test_a_message_may_say_that_there_is_no_loss_on_it(
    template: str, off: dict[str, Any], on: dict[str, Any]
) -> None:
    plain, learned = tokens_of(CHAT, template)
    chat = [CHAT[0], CHAT[1] | off, CHAT[2] | off, CHAT[3], CHAT[4] | on]
    text, rest = tokens_of(chat, template)
    assert text == plain
    assert rest == learned.removeprefix("4<|eos|>")
    assert rest.endswith("8<|eos|>")
    assert tokens_of([*CHAT[:4], CHAT[4] | off], template)[1] == "4<|eos|>"
    assert (
        tokens_of([*CHAT[:2], CHAT[2] | off, CHAT[3], CHAT[4] | off], template)[1] == ""
    )


@pytest.mark.parametrize(
    ("index", "keys", "reason"),
    [
        (2, {"weight": 0.5}, "a message with weight: 0.5; only 0 and 1, or false and true, are allowed"),
        (2, {"train": "no"}, "a message with train: 'no'"),
        (2, {"weight": 0, "train": True}, "message 3: its keys weight, train, .* contradict each other"),
        (1, {"train": True}, ("message 2, of role 'user', is marked with loss, but `loss_on: response` puts")),
        (2, {"train_detail": [{"begin_offset": 0}]},
         "a message with a key 'train_detail': loss applies to whole messages"),
        (2, {"mask": 1}, "a message with a key 'mask': it may mean with or without"),
        (1, {"images": ["a.png"]}, "a message with a key 'images': fcsd distils text only"),
        (2, {"refusal": "I cannot"}, ("a message with a key 'refusal': put the assistant's text under 'content'")),
    ],
)  # fmt: skip
def test_a_key_that_cannot_be_followed_is_refused(
    index: int, keys: dict[str, Any], reason: str
) -> None:
    chat = [*CHAT[:index], CHAT[index] | keys, *CHAT[index + 1 :]]
    with pytest.raises(BadExample, match=reason):
        tokens_of(chat, PLAIN_TEMPLATE)


def test_no_loss_on_a_message_and_loss_on_all_tokens_contradict_each_other() -> None:
    tokenizer, columns = make_tokenizer(PLAIN_TEMPLATE), {"messages": "m"}
    with pytest.raises(
        BadExample,
        match="is marked without loss, but `loss_on: all` puts loss on all tokens",
    ):
        tokenize_example(
            {"m": [CHAT[1], CHAT[2] | {"weight": 0}]}, columns, tokenizer, "all"
        )
    example = {"m": [CHAT[1] | {"weight": 1}, CHAT[2] | {"weight": 1}]}
    assert all(tokenize_example(example, columns, tokenizer, "all")["loss_mask"])


IDS = {"input_ids": [5, 6, 7, 8, 9]}


@pytest.mark.parametrize("name", ["completion_mask", "assistant_masks", "loss_mask"])
@pytest.mark.parametrize("mask", [[0, 0, 1, 1, 0], [False, False, True, True, False]])
def test_a_mask_beside_tokens_says_where_loss_is(name: str, mask: list[Any]) -> None:
    (row,) = given_rows([IDS | {name: mask}], make_tokenizer(), name="x", max_length=5)
    assert row["labels"].tolist() == [-100, -100, 7, 8, -100]
    agreeing = IDS | {name: mask, "labels": [-100, -100, 7, 8, -100]}
    (row,) = given_rows([agreeing], make_tokenizer(), name="x", max_length=5)
    assert row["labels"].tolist() == [-100, -100, 7, 8, -100]


def test_of_several_masks_all_count_and_what_is_not_attended_to_is_left_out() -> None:
    masks = {
        "completion_mask": [0, 1, 1, 1, 1],
        "assistant_masks": [1, 1, 0, 1, 1],
        "attention_mask": [1, 1, 1, 1, 0],
    }
    (row,) = given_rows(
        [IDS | masks], make_tokenizer(pad=False), name="x", max_length=5
    )
    assert row["labels"].tolist() == [-100, 6, -100, 8, -100]


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (
            {"loss_mask": [0, 1]},
            "column 'loss_mask': 0 or 1 is needed for each of the 5 tokens, got 2",
        ),
        ({"loss_mask": [0, 1, 2, 0, 0]}, "column 'loss_mask': 0 or 1 is needed"),
        # the examples of a packed row, numbered, and a mask of two dimensions
        ({"attention_mask": [1, 1, 2, 2, 2]}, "column 'attention_mask': 0 or 1 is"),
        ({"attention_mask": [[1] * 5] * 5}, "column 'attention_mask': 0 or 1 is"),
        ({"attention_mask": [1, 1]}, "'attention_mask': .* of the 5 tokens, got 2"),
        *(
            (
                {name: [0, 0, 1, 1, 1]},
                f"a column '{name}' beside 'input_ids' is not read: masks of the loss",
            )
            for name in ("assistant_mask", "response_mask", "action_mask")
        ),
        (
            {"loss_mask": [0, 1, 0, 0, 0], "labels": [-100, 6, 7, -100, -100]},
            "columns 'labels' and 'loss_mask': they disagree about loss, first at token 3; remove one of them",
        ),
    ],
)  # fmt: skip
def test_a_mask_that_does_not_fit_is_refused(more: dict[str, Any], reason: str) -> None:
    with user_error(reason):
        given_rows([IDS | more], make_tokenizer(), name="x", max_length=5)


# ---- columns


def test_the_system_message_of_a_column_begins_the_conversation() -> None:
    text = tokens_of(CHAT, PLAIN_TEMPLATE)
    assert tokens_of(CHAT[1:], PLAIN_TEMPLATE, system="be brief") == text
    assert tokens_of(CHAT, PLAIN_TEMPLATE, system="be brief") == text
    assert (
        tokens_of(CHAT, PLAIN_TEMPLATE, system="")
        == tokens_of(CHAT, PLAIN_TEMPLATE, system=None)
        == text
    )
    assert "the conversation begins with another system message, 'be brief'" in refusal(
        CHAT, system="be long"
    )


def test_system_and_history_of_alpaca_come_before_the_prompt_and_earlier_answers_are_learned():
    row = {
        "instruction": "twice?", "input": "", "output": "8", "system": "be brief", "history": [["2+2?", "4"]],
    }  # fmt: skip
    bare = {
        "instruction": "2+2?", "input": "now", "output": "4", "system": None, "history": [],
    }  # fmt: skip
    tokenizer = make_tokenizer(PLAIN_TEMPLATE)
    rows = given_rows(
        [row, bare], tokenizer, name="x", max_length=128, packing=False, shuffle=False
    )
    texts = [tokenizer.decode(row["input_ids"]) for row in rows]
    assert texts[0].startswith(tokens_of(CHAT, PLAIN_TEMPLATE)[0])
    assert texts[1].startswith("<|user|>2+2?\n\nnow<|eos|><|assistant|>4<|eos|><|pad|>")
    learned = [
        tokenizer.decode([token for token in row["labels"] if token != NO_LOSS])
        for row in rows
    ]
    assert learned == ["4<|eos|>8<|eos|>", "4<|eos|>"]


def test_history_that_is_no_pairs_or_stands_beside_messages_is_refused() -> None:
    tokenizer, columns = (
        make_tokenizer(PLAIN_TEMPLATE),
        {"prompt": "p", "response": "r", "history": "h"},
    )
    with pytest.raises(
        BadExample,
        match="column 'h': a list of pairs of texts, prompt and response, is needed",
    ):
        tokenize_example({"p": "a", "r": "b", "h": ["a", "b"]}, columns, tokenizer)
    with pytest.raises(
        BadExample,
        match="column 'h': works with a text prompt, not with messages",
    ):
        tokenize_example(
            {"p": CHAT[:2], "r": "b", "h": [["a", "b"]]}, columns, tokenizer
        )


def test_options_of_an_example_reach_its_chat_template() -> None:
    tokenizer = make_tokenizer(stock("qwen3"))
    columns = {"prompt": "p", "response": "r", "chat_template_kwargs": "k"}
    chat = [CHAT[1], CHAT[2] | {"reasoning_content": "hm"}]
    template = tokenizer.chat_template
    tokenizer.chat_template = (
        template + "{% if enable_thinking is false %}/off{% endif %}"
    )
    for options in (
        {"enable_thinking": False},
        '{"enable_thinking": false}',
        {"enable_thinking": False, "x": None},
    ):
        encoded = tokenize_example(
            {"p": chat[:1], "r": chat[1:], "k": options}, columns, tokenizer
        )
        reference = tokenizer.apply_chat_template(
            chat, tokenize=False, enable_thinking=False
        )
        assert tokenizer.decode(encoded["input_ids"]) == reference
        assert reference.endswith("/off")
    plain = tokenize_example(
        {"p": chat[:1], "r": chat[1:], "k": None}, columns, tokenizer
    )
    assert not tokenizer.decode(plain["input_ids"]).endswith("/off")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"enable_thinking": False},
         "its chat template reads no 'enable_thinking'; take it out of chat_template_kwargs"),
        ({"tokenize": False}, "its chat template is given 'tokenize' by fcsd"),
        ({"chat_template": "x"}, "its chat template is given 'chat_template' by fcsd"),
        ([1], "needs names and values of options of the chat template"),
    ],
)  # fmt: skip
def test_options_that_a_template_does_not_read_are_refused(
    options: Any, reason: str
) -> None:
    assert reason in refusal(CHAT, chat_template_kwargs=options)


def test_thoughts_reach_the_template_under_any_key_and_a_template_without_them_says_so_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for key in ("reasoning_content", "thinking", "reasoning"):
        chat = [CHAT[1], CHAT[2] | {key: "let me see"}]
        assert "<think>\nlet me see\n</think>" in tokens_of(chat, stock("qwen3"))[1]
        assert "analysis<|message|>let me see" in tokens_of(chat, stock("gptoss"))[1]
        assert tokens_of(chat, PLAIN_TEMPLATE) == tokens_of(CHAT[1:3], PLAIN_TEMPLATE)
    sentence = "the chat template does not write the thoughts in the messages, so the model does not learn them"
    assert capsys.readouterr().err.count(sentence) == 1


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        *(
            (name, "fcsd distils text only")
            for name in ("image", "images", "videos", "audios")
        ),
        *(
            (name, "fcsd learns every answer and has no preferences")
            for name in ("rejected", "kto_tag")
        ),
        *(
            (name, "all tokens with loss count alike")
            for name in ("weight", "advantage")
        ),
        *(
            (name, "it masks tokens, and is only read together with 'input_ids'")
            for name in ("completion_mask", "labels")
        ),
        (
            "system_prompt",
            "it sets the prompt; say `system: system_prompt` under `columns`",
        ),
        ("functions", "it is an old form of 'tools'"),
    ],
)
@pytest.mark.parametrize(
    "kind", ["messages", "prompt and response", "prompt and completion", "recipe"]
)
def test_a_column_that_would_set_prompt_or_loss_and_is_not_read_is_refused_by_name(
    tmp_path: Path, kind: str, more: str, reason: str
) -> None:
    plain = (
        {"prompt": "a", kind.split()[-1]: "b"} if " " in kind else {"messages": CHAT}
    )
    with pytest.raises(UserError) as caught:
        if kind == "recipe":
            path = write_jsonl(tmp_path / "rows.jsonl", [plain | {more: [1]}])
            build_dataset(
                [SourceConfig(path=path)], make_tokenizer(PLAIN_TEMPLATE), max_length=64
            )
        else:
            given_rows(
                [plain | {more: [1]}],
                make_tokenizer(PLAIN_TEMPLATE),
                name="x",
                max_length=64,
            )
    error = str(caught.value)
    assert f": a column '{more}' beside " in error and f"is not read: {reason}" in error
    assert error.endswith("; remove the column to train without it")


def test_a_column_that_is_named_is_read_and_plain_metadata_are_not() -> None:
    tokenizer = make_tokenizer(PLAIN_TEMPLATE)
    more = {
        "id": 4, "source": "x", "category": "y", "score": 0.5, "label": {"ability": "math"}, "num_turns": 2,
    }  # fmt: skip
    example = {"messages": CHAT[1:], "system_prompt": "be brief"} | more
    columns = {"messages": "messages", "system": "system_prompt"}
    (row,) = given_rows([example], tokenizer, name="x", max_length=128, columns=columns)
    assert tokenizer.decode(row["input_ids"]).startswith(
        tokens_of(CHAT, PLAIN_TEMPLATE)[0]
    )
    pair = {"prompt": "a", "chosen": "b", "rejected": "c"}
    (row,) = given_rows(
        [pair],
        tokenizer,
        name="x",
        max_length=32,
        columns={"prompt": "prompt", "response": "chosen"},
    )
    assert tokenizer.decode(row["input_ids"]).startswith(
        "<|user|>a<|eos|><|assistant|>b<|eos|>"
    )


@pytest.mark.parametrize("more", ["position_ids", "seq_lengths"])
def test_tokens_that_are_packed_already_are_refused_where_they_would_see_each_other(
    more: str,
) -> None:
    with user_error(
        f"a column '{more}' beside 'input_ids' is not read: the rows are already packed"
    ):
        given_rows(
            [IDS | {more: [0, 1, 0, 1, 2]}], make_tokenizer(), name="x", max_length=5
        )


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ("loss_mask", "the labels of packed rows alone say where loss is"),
        ("response_mask", "masks of the loss are 'loss_mask', 'completion_mask' and"),
        ("weight", "all tokens with loss count alike"),
    ],
)
def test_a_mask_or_weight_beside_packed_rows_is_refused(more: str, reason: str) -> None:
    ids = IDS["input_ids"]
    row = {"input_ids": ids, "position_ids": [*range(5)], "labels": ids}
    with user_error(f"a column '{more}' beside .* is not read: {reason}"):
        given_rows([row | {more: [0] * 5}], make_tokenizer(), name="x", max_length=5)


# ---- prompts and completions as TRL reads them


@pytest.fixture(scope="module")
def by_trl() -> Any:
    """Tokenizes examples as TRL's SFTTrainer does: token ids and labels."""
    trl = pytest.importorskip("trl")
    values = {
        "dataset_num_proc": None,
        "dataset_text_field": "text",
        "assistant_only_loss": False,
    }
    values |= {
        "max_length": None,
        "truncation_mode": "keep_start",
        "shuffle_dataset": False,
    }

    def tokenized(
        examples: list[dict[str, Any]], tokenizer: Any
    ) -> list[tuple[list[int], list[int]]]:
        trainer = SimpleNamespace(
            _tokenizer=tokenizer, completion_only_loss=True, chat_template=None
        )
        prepared = trl.SFTTrainer._prepare_dataset(
            trainer,
            datasets.Dataset.from_list(examples),
            tokenizer,
            SimpleNamespace(**values),
            False,
            None,
            "train",
        )
        return [(row["input_ids"], row["labels"]) for row in prepared]

    return tokenized


def given(
    examples: list[dict[str, Any]], tokenizer: Any
) -> list[tuple[list[int], list[int]]]:
    rows = given_rows(
        examples, tokenizer, name="x", max_length=64, packing=False, shuffle=False
    )
    pairs = []
    for index in range(len(rows)):
        size = (
            int(np.flatnonzero(rows[index]["input_ids"] != tokenizer.pad_token_id)[-1])
            + 1
        )
        pairs.append(
            (
                rows[index]["input_ids"][:size].tolist(),
                rows[index]["labels"][:size].tolist(),
            )
        )
    return pairs


@pytest.mark.parametrize("template", [None, PLAIN_TEMPLATE, MARKED_TEMPLATE])
def test_prompts_and_completions_that_are_text_become_the_tokens_and_labels_of_trl(
    by_trl: Any, template: str
) -> None:
    examples = [
        {"prompt": "2+2=", "completion": "4"},
        {"prompt": "Say: ", "completion": "é, and\n"},
        {"prompt": "ends", "completion": " here<|eos|>"},
        {"prompt": "two<|eos|>", "completion": "texts"},
        {"prompt": "nothing", "completion": ""},
    ]
    tokenizer = make_tokenizer(template)
    assert given(examples, tokenizer) == by_trl(examples, tokenizer)
    assert tokenizer.decode(given(examples, tokenizer)[0][0]) == "2+2=4<|eos|>"


def test_a_token_across_the_end_of_the_prompt_is_the_completions_as_in_trl(
    by_trl: Any,
) -> None:
    alphabet = [
        *sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", "<|bos|>", "<|eos|>", "<|pad|>",
    ]  # fmt: skip
    backend = Tokenizer(
        models.BPE({token: index for index, token in enumerate(alphabet)}, [("a", "b")])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bos = alphabet.index("<|bos|>")
    backend.post_processor = processors.TemplateProcessing(
        "<|bos|> $A", special_tokens=[("<|bos|>", bos)]
    )
    special = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "pad_token": "<|pad|>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **special)
    examples = [
        {"prompt": "xa", "completion": "by"},
        {"prompt": "", "completion": "ab"},
    ]
    pairs = given(examples, tokenizer)
    assert pairs == by_trl(examples, tokenizer)
    assert tokenizer.convert_ids_to_tokens(pairs[0][0]) == [
        "<|bos|>", "x", "ab", "y", "<|eos|>",
    ]  # fmt: skip
    assert pairs[0][1][:2] == [NO_LOSS, NO_LOSS] and NO_LOSS not in pairs[0][1][2:]


def test_completions_that_are_conversations_become_the_tokens_and_labels_of_trl(
    by_trl: Any,
) -> None:
    tokenizer = make_tokenizer("{% if mood %}{{ mood }}{% endif %}" + PLAIN_TEMPLATE)
    examples = [
        {
            "prompt": CHAT[:4],
            "completion": CHAT[4:],
            "chat_template_kwargs": {"mood": "mild"},
        },
        {
            "prompt": CHAT[:2],
            "completion": CHAT[2:3],
            "chat_template_kwargs": {"mood": "wild"},
        },
    ]
    assert given(examples, tokenizer) == by_trl(examples, tokenizer)


def test_tokens_with_masks_get_the_labels_of_trl(by_trl: Any) -> None:
    examples = [
        IDS | {"completion_mask": [0, 0, 1, 1, 1], "assistant_masks": [0, 1, 1, 0, 1]}
    ]
    assert given(examples, make_tokenizer()) == by_trl(examples, make_tokenizer())


def test_a_response_goes_through_the_chat_template_and_a_completion_does_not(
    tmp_path: Path,
) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "2+2=", "completion": "4"}])
    tokenizer = make_tokenizer(PLAIN_TEMPLATE)
    texts = {}
    for columns in (
        {"prompt": "prompt", "completion": "completion"},
        {"prompt": "prompt", "response": "completion"},
        None,
    ):
        (row,) = build_dataset(
            [SourceConfig(path=path, columns=columns)], tokenizer, max_length=64
        )
        texts[[*columns][-1] if columns else None] = tokenizer.decode(
            row["input_ids"]
        ).replace("<|pad|>", "")
    assert texts == {
        "completion": "2+2=4<|eos|>",
        "response": "<|user|>2+2=<|eos|><|assistant|>4<|eos|>",
        None: "2+2=4<|eos|>",
    }


@pytest.mark.parametrize(
    ("example", "reason"),
    [
        ({"p": "a", "c": CHAT[2:3]}, "columns 'p' and 'c': both must be text or both lists of messages"),
        ({"p": CHAT[:2], "c": "a"}, "column 'c': needs a list of messages"),
        ({"p": "a", "c": "b", "system": "be brief"}, "column 'system': works with messages, not with a literal prompt"),
        ({"p": "a", "c": "b", "tools": [{"name": "x"}]}, "column 'tools': works with messages"),
    ],
)  # fmt: skip
def test_a_completion_that_only_a_template_could_write_is_refused(
    example: dict[str, Any], reason: str
) -> None:
    columns = {"prompt": "p", "completion": "c", "system": "system", "tools": "tools"}
    with pytest.raises(BadExample, match=reason):
        tokenize_example(example, columns, make_tokenizer(PLAIN_TEMPLATE))
    with user_error(
        r"a column 'history' beside .* is not read: it goes with 'prompt' and 'resp"
    ):
        given_rows(
            [{"prompt": "a", "completion": "b", "history": []}],
            make_tokenizer(),
            name="x",
            max_length=8,
        )


def test_test_items_are_looked_for_in_every_form_of_an_example() -> None:
    words = "one two three four five six seven eight"
    decontaminator = Decontaminator(ItemIndex([Item("task", "1", (words,))]))
    examples = [
        {"prompt": "say", "completion": words},
        {"messages": [parts({"role": "user", "content": words}), CHAT[2]]},
        {"instruction": "a", "output": "b", "history": [[words, "c"]]},
        {"messages": CHAT[1:3], "system": words},
    ]
    for example in examples:
        clean = json.loads(
            json.dumps(example).replace("three", "3").replace('"t"', '"u"')
        )
        record = BadRows()
        options: dict[str, Any] = {
            "max_length": 256,
            "decontaminator": decontaminator,
            "bad_rows": record,
        }
        rows = given_rows(
            [example, clean], make_tokenizer(PLAIN_TEMPLATE), name="x", **options
        )
        assert len(rows) == 1
        assert record.summary() == {"num_examples": 1, "num_left_out": 0}
