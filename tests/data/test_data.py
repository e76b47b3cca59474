"""Instruction data becomes packed rows: with small tokenizers made here, and with real
data if the machine has it.
"""

import importlib.util
import json
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from fcsd.data.batches import NO_LOSS, Collator, next_token_targets, trim_padding
from fcsd.data.config import SourceConfig
from fcsd.data.dataset import build_dataset
from fcsd.data.rows import PackedRows
from fcsd.data.sources import check_source, load_source, open_source
from tests.examples import pack, tokenize_example
from tests.support import user_error

TURN = "{{ '<|' + message['role'] + '|>' }}"
PLAIN_TEMPLATE = (
    "{% for message in messages %}"
    + TURN
    + "{{ message['content'] + '<|eos|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
MARKED_TEMPLATE = (
    "{% for message in messages %}" + TURN + "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|eos|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|eos|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
# Numbers a conversation by its length, so that no conversation begins like a shorter
# one.
REWRITING_TEMPLATE = "{{ messages | length }}" + PLAIN_TEMPLATE
# Writes thoughts in the last turn only, as Qwen3's template does.
THINKING_TEMPLATE = (
    "{% for message in messages %}"
    + TURN
    + "{% if message['role'] == 'assistant' and loop.last %}<think></think>{% endif"
    " %}{{ message['content'] + '<|eos|>' }}{% endfor %}{% if add_generation_prompt"
    " %}{{ '<|assistant|>' }}{% endif %}"
)
REFUSING_TEMPLATE = (
    "{% if messages[0]['role'] != 'user' %}{{ raise_exception('a user speaks first')"
    " }}{% endif %}" + PLAIN_TEMPLATE
)


def make_tokenizer(template=None, pad=True):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|eos|>",
        pad_token="<|pad|>" if pad else None,
    )
    fast.add_special_tokens(
        {"additional_special_tokens": ["<|user|>", "<|assistant|>", "<|system|>"]}
    )
    fast.chat_template = template
    return fast


def Source(path, **values):
    return SourceConfig(path=path, **{"columns": {"text": "text"}} | values)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def write_texts(path, lengths, letter="a"):
    return write_jsonl(
        path, [{"text": chr(ord(letter) + i % 26) * n} for i, n in enumerate(lengths)]
    )


def said(encoded, tokenizer):
    """Return the text that carries loss."""
    return tokenizer.decode(
        [
            i
            for i, m in zip(encoded["input_ids"], encoded["loss_mask"], strict=True)
            if m
        ]
    )


CONVERSATION = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "twice?"},
    {"role": "assistant", "content": "8, é"},
]


# ---- tokens


@pytest.mark.parametrize(
    "template", [PLAIN_TEMPLATE, MARKED_TEMPLATE], ids=["prefix", "generation marks"]
)
def test_loss_is_on_every_token_that_the_assistant_says_and_its_end_of_turn(template):
    tokenizer = make_tokenizer(template)
    encoded = tokenize_example({"m": CONVERSATION}, {"messages": "m"}, tokenizer)
    assert (
        tokenizer.decode(encoded["input_ids"])
        == "<|system|>be brief<|eos|><|user|>2+2?<|eos|><|assistant|>4<|eos|>"
        "<|user|>twice?<|eos|><|assistant|>8, é<|eos|>"
    )
    assert said(encoded, tokenizer) == "4<|eos|>8, é<|eos|>"


@pytest.mark.parametrize(
    "template", [PLAIN_TEMPLATE, MARKED_TEMPLATE], ids=["prefix", "generation marks"]
)
def test_prompt_input_and_response_become_one_exchange(template):
    tokenizer = make_tokenizer(template)
    columns = {"prompt": "p", "input": "i", "response": "r"}
    encoded = tokenize_example({"p": "Add", "i": "1 2", "r": "3"}, columns, tokenizer)
    assert (
        tokenizer.decode(encoded["input_ids"])
        == "<|user|>Add\n\n1 2<|eos|><|assistant|>3<|eos|>"
    )
    assert said(encoded, tokenizer) == "3<|eos|>"
    encoded = tokenize_example({"p": "Add", "i": "", "r": "3"}, columns, tokenizer)
    assert (
        tokenizer.decode(encoded["input_ids"])
        == "<|user|>Add<|eos|><|assistant|>3<|eos|>"
    )


SHAREGPT = [
    {
        "from": {"user": "human", "assistant": "gpt"}.get(turn["role"], turn["role"]),
        "value": turn["content"],
    }
    for turn in CONVERSATION
]


def test_a_conversation_in_the_words_of_sharegpt_is_the_same_conversation():
    tokenizer = make_tokenizer(PLAIN_TEMPLATE)
    one, other = (
        tokenize_example({"m": each}, {"messages": "m"}, tokenizer)
        for each in (CONVERSATION, SHAREGPT)
    )
    assert one == other


# Lists the tools before the conversation, as the templates of Qwen3 and Llama do.
TOOL_TEMPLATE = (
    "{% if tools %}{% for tool in tools %}<{{ tool.function.name }}>{% endfor %}{%"
    " endif %}"
    + (
        "{% for message in messages %}"
        + TURN
        + "{{ message['content'] }}{% if 'tool_calls' in message %}[{{"
        " message.tool_calls[0].function.name }}]{% endif %}<|eos|>{% endfor %}{% if"
        " add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
    )
)
TOOLS = [
    {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}},
    {"type": "function", "function": {"name": "add", "parameters": None}},
]  # fmt: skip
CALL = [
    {"role": "user", "content": "time?", "tool_calls": None},
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "clock", "arguments": {}}}]},
]  # fmt: skip


@pytest.mark.parametrize(
    "tools", [TOOLS, json.dumps(TOOLS)], ids=["a list", "as JSON text"]
)
@pytest.mark.parametrize(
    "columns",
    [{"messages": "m", "tools": "t"}, {"prompt": "p", "response": "r", "tools": "t"}],
)
def test_the_chat_template_writes_the_tools_of_an_example_and_loss_is_on_the_call(
    tools, columns
):
    tokenizer = make_tokenizer(TOOL_TEMPLATE)
    example = {"m": CALL, "p": CALL[:1], "r": CALL[1:], "t": tools}
    encoded = tokenize_example(example, columns, tokenizer)
    by_transformers = tokenizer.apply_chat_template(
        [{"role": "user", "content": "time?"}, CALL[1] | {"content": ""}],
        tools=TOOLS,
        tokenize=False,
    )
    assert tokenizer.decode(encoded["input_ids"]) == by_transformers
    assert (
        by_transformers == "<clock><add><|user|>time?<|eos|><|assistant|>[clock]<|eos|>"
    )
    assert said(encoded, tokenizer) == "[clock]<|eos|>"
    none = tokenize_example(example | {"t": None}, columns, tokenizer)
    assert tokenizer.decode(none["input_ids"]).startswith("<|user|>time?")


def test_tools_that_a_template_would_leave_out_are_refused(tmp_path):
    tokenizer = make_tokenizer(PLAIN_TEMPLATE)
    for wrong in ("clock", 5, ["clock"], '"clock"'):
        with user_error(
            "column 't': a list of tools, or JSON text of one, is needed, got"
        ):
            tokenize_example(
                {"m": CONVERSATION, "t": wrong},
                {"messages": "m", "tools": "t"},
                tokenizer,
            )
    message = (
        "its chat template does not write tools, but the data have a column 'tools';"
        " use a template that writes tools"
    )
    # A column of this name is read whether the recipe names it or not.
    path = write_jsonl(
        tmp_path / "tools.jsonl", [{"messages": CONVERSATION, "tools": TOOLS}]
    )
    source = Source(path, columns={"messages": "messages"})
    with user_error(message):
        build_dataset([source], tokenizer, max_length=64)
    (row,) = build_dataset([source], make_tokenizer(TOOL_TEMPLATE), max_length=128)
    assert (
        make_tokenizer()
        .decode(row["input_ids"])
        .startswith("<clock><add><|system|>be brief")
    )


@pytest.mark.parametrize(
    "template", [PLAIN_TEMPLATE, MARKED_TEMPLATE, THINKING_TEMPLATE, REWRITING_TEMPLATE]
)
def test_of_prompts_and_completions_that_are_conversations_the_loss_is_on_the_completion_alone(
    template,
):
    tokenizer = make_tokenizer(template)
    columns = {"prompt": "p", "response": "r"}
    whole = tokenize_example({"m": CONVERSATION}, {"messages": "m"}, tokenizer)
    encoded = tokenize_example(
        {"p": CONVERSATION[:4], "r": CONVERSATION[4:]}, columns, tokenizer
    )
    assert encoded["input_ids"] == whole["input_ids"]
    assert said(encoded, tokenizer).removeprefix("<think></think>") == "8, é<|eos|>"
    first = tokenize_example(
        {"p": CONVERSATION[:2], "r": CONVERSATION[2:]}, columns, tokenizer
    )
    assert first == whole
    mixed = tokenize_example({"p": CONVERSATION[:2], "r": "4"}, columns, tokenizer)
    assert mixed == tokenize_example(
        {"m": CONVERSATION[:3]}, {"messages": "m"}, tokenizer
    )


def test_in_a_template_that_rewrites_earlier_turns_the_response_is_what_its_message_changes():
    tokenizer = make_tokenizer(REWRITING_TEMPLATE)
    encoded = tokenize_example({"m": CONVERSATION}, {"messages": "m"}, tokenizer)
    assert tokenizer.decode(encoded["input_ids"]).startswith(
        "5<|system|>be brief<|eos|>"
    )
    assert said(encoded, tokenizer) == "4<|eos|>8, é<|eos|>"
    # With thoughts in the last turn only, which the model writes too.
    tokenizer = make_tokenizer(THINKING_TEMPLATE)
    encoded = tokenize_example({"m": CONVERSATION}, {"messages": "m"}, tokenizer)
    assert (
        tokenizer.decode(encoded["input_ids"])
        == "<|system|>be brief<|eos|><|user|>2+2?<|eos|><|assistant|>4<|eos|>"
        "<|user|>twice?<|eos|><|assistant|><think></think>8, é<|eos|>"
    )
    assert said(encoded, tokenizer) == "4<|eos|><think></think>8, é<|eos|>"


def test_qwen3s_own_template_gives_every_turn_its_response():
    spec = importlib.util.find_spec("trl")
    if spec is None:
        pytest.skip("trl, which has the template of Qwen3, is not installed")
    path = Path(spec.origin).parent / "chat_templates" / "qwen3.jinja"
    tokenizer = make_tokenizer(path.read_text())
    encoded = tokenize_example({"m": SHAREGPT}, {"messages": "m"}, tokenizer)
    assert (
        said(encoded, tokenizer)
        == "4<|im_end|>\n<think>\n\n</think>\n\n8, é<|im_end|>\n"
    )


def test_a_template_that_rewrites_needs_a_fast_tokenizer(monkeypatch):
    tokenizer = make_tokenizer(THINKING_TEMPLATE)
    monkeypatch.setattr(type(tokenizer), "is_fast", False)
    with user_error(
        r"the tokenizer is not a fast one.*mark responses in the template with"
    ):
        tokenize_example({"m": CONVERSATION}, {"messages": "m"}, tokenizer)


def test_loss_on_all_takes_the_prompt_too():
    tokenizer = make_tokenizer(MARKED_TEMPLATE)
    encoded = tokenize_example(
        {"m": CONVERSATION}, {"messages": "m"}, tokenizer, loss_on="all"
    )
    assert all(encoded["loss_mask"])
    assert len(encoded["loss_mask"]) == len(encoded["input_ids"])


def test_plain_text_needs_no_template_and_ends_with_one_end_of_sequence():
    tokenizer = make_tokenizer()
    for text in ("hello", "hello<|eos|>"):
        encoded = tokenize_example({"text": text}, {"text": "text"}, tokenizer)
        assert tokenizer.decode(encoded["input_ids"]) == "hello<|eos|>"
        assert list(encoded["loss_mask"]) == [True] * 6


@pytest.mark.parametrize(
    ("template", "example", "columns", "message"),
    [
        (None, {"m": CONVERSATION}, {"messages": "m"}, "no chat template, needed for prompts and messages"),
        (REFUSING_TEMPLATE, {"m": CONVERSATION}, {"messages": "m"}, "refuses an example: a user speaks first"),
        (PLAIN_TEMPLATE, {"m": "hello"}, {"messages": "m"}, "column 'm': needs a list of messages .* got 'hello'"),
        (PLAIN_TEMPLATE, {"m": [{"from": "x"}]}, {"messages": "m"}, "or 'from' and 'value'; got"),
        (PLAIN_TEMPLATE, {"m": [{"from": "bing", "value": "x"}]}, {"messages": "m"},
         "a message from 'bing'; allowed: human, user, gpt, assistant, system"),
        (PLAIN_TEMPLATE, {"p": 3, "r": ""}, {"prompt": "p", "response": "r"}, "column 'p': text is needed, got 3"),
        (None, {"t": None}, {"text": "t"}, "column 't': text is needed, got None"),
        (PLAIN_TEMPLATE, {"m": [{"role": "user", "content": 5}]}, {"messages": "m"},
         "'content', both text, .* got {'role': 'user', 'content': 5}"),
        (PLAIN_TEMPLATE, {"p": "a", "i": 5, "r": "b"}, {"prompt": "p", "input": "i", "response": "r"},
         "column 'i': text is needed, got 5"),
    ],
)  # fmt: skip
def test_an_example_that_cannot_be_read_is_refused_with_the_reason(
    template, example, columns, message
):
    with user_error(message) as caught:
        tokenize_example(example, columns, make_tokenizer(template))
    assert "\n" not in str(caught.value)


def test_text_without_an_end_of_sequence_token_is_refused():
    tokenizer = make_tokenizer()
    tokenizer.eos_token = None
    with user_error("no end-of-sequence token"):
        tokenize_example({"t": "x"}, {"text": "t"}, tokenizer)


# ---- rows


def numbered(lengths, masked=0):
    """Return examples whose tokens are all different, so that they can be found again;
    the first `masked` tokens have no loss.
    """
    start, examples = 1, []
    for n in lengths:
        examples.append(
            {
                "input_ids": list(range(start, start + n)),
                "loss_mask": [False] * masked + [True] * (n - masked),
            }
        )
        start += n
    return examples


LENGTHS = np.random.default_rng(0).integers(2, 17, 200).tolist()


@pytest.mark.parametrize("num_open_rows", [1, 4, 1000])
def test_every_token_of_every_example_is_in_exactly_one_row_and_in_one_piece(
    num_open_rows,
):
    examples = numbered(LENGTHS)
    rows = list(pack(examples, 32, pad_token_id=0, num_open_rows=num_open_rows))
    assert all(len(row[name]) == 32 for row in rows for name in row)
    assert sorted(t for row in rows for t in row["input_ids"] if t) == list(
        range(1, sum(LENGTHS) + 1)
    )
    whole = []
    for row in rows:
        starts = [*np.flatnonzero(row["position_ids"] == 0), 32]
        pieces = [row["input_ids"][a:b].tolist() for a, b in pairwise(starts)]
        assert [t for piece in pieces for t in piece] == row["input_ids"].tolist()
        whole += [piece for piece in pieces if piece[0] != 0]
    assert sorted(whole) == [example["input_ids"] for example in examples]
    assert (
        sum(int((row["labels"] != NO_LOSS).sum()) for row in rows) == sum(LENGTHS) - 200
    )


def test_packing_fills_rows_and_no_packing_gives_each_example_its_own():
    rows = list(pack(numbered(LENGTHS), 32, pad_token_id=0))
    assert len(rows) <= 1.05 * sum(LENGTHS) / 32
    assert len(list(pack(numbered(LENGTHS), 32, pad_token_id=0, packing=False))) == 200


def test_a_row_is_what_one_writes_by_hand():
    examples = numbered([3, 2, 4], masked=1)
    first, second = pack(examples, 7, pad_token_id=0)
    assert first["input_ids"].tolist() == [1, 2, 3, 4, 5, 0, 0]
    assert first["position_ids"].tolist() == [0, 1, 2, 0, 1, 0, 1]
    assert first["labels"].tolist() == [-100, 2, 3, -100, 5, -100, -100]
    assert second["input_ids"].tolist() == [6, 7, 8, 9, 0, 0, 0]
    keep, targets = next_token_targets(
        *(torch.tensor(first[name])[None] for name in ("labels", "position_ids"))
    )
    assert keep.tolist() == [[True, True, False, True, False, False, False]]
    assert targets.tolist() == [2, 3, 5]


def test_an_example_longer_than_a_row_is_cut_and_one_without_loss_left_is_left_out():
    examples = [
        *numbered([9]),
        {"input_ids": [1] * 9, "loss_mask": [False] * 8 + [True]},
    ]
    rows = list(pack(examples, 8, pad_token_id=0))
    assert [row["input_ids"].tolist() for row in rows] == [[1, 2, 3, 4, 5, 6, 7, 8]]


def test_no_position_predicts_the_first_token_of_another_example():
    # as a data set with loss on every token would have it
    labels = torch.tensor([[5, 6, 7, 8]])
    keep, targets = next_token_targets(labels, torch.tensor([[0, 1, 0, 1]]))
    assert keep.tolist() == [[True, False, True, False]] and targets.tolist() == [6, 8]


def test_collated_rows_are_integer_batches_without_a_mask():
    rows = list(pack(numbered(LENGTHS), 32, pad_token_id=0))[:3]
    batch = Collator()(rows)
    assert list(batch) == ["input_ids", "position_ids", "labels"]
    assert all(
        tensor.shape == (3, 32) and tensor.dtype == torch.int64
        for tensor in batch.values()
    )
    assert batch["labels"][1].tolist() == rows[1]["labels"].tolist()


# ---- sources


def rows_of(dataset):
    return [{name: np.asarray(row[name]).tolist() for name in row} for row in dataset]


def test_the_same_seed_gives_the_same_rows_and_another_seed_others(tmp_path):
    source = Source(write_texts(tmp_path / "a.jsonl", LENGTHS))

    def build(seed):
        return rows_of(
            build_dataset([source], make_tokenizer(), max_length=32, seed=seed)
        )

    assert build(0) == build(0)
    assert build(0) != build(1)


def test_jsonl_json_parquet_and_a_folder_in_hub_layout_give_the_same_rows(tmp_path):
    rows = [{"text": "a" * n} for n in LENGTHS[:20]]
    folder = tmp_path / "hub" / "owner" / "name"
    (folder / "main").mkdir(parents=True)
    Dataset.from_list(rows).to_parquet(folder / "main" / "train.parquet")
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: main\n  data_files:\n"
        "  - split: train\n    path: main/train.parquet\n---\n"
    )
    (tmp_path / "a.json").write_text(json.dumps(rows))
    sources = [
        Source(write_jsonl(tmp_path / "a.jsonl", rows)),
        Source(str(tmp_path / "a.json")),
        Source(str(folder / "main" / "train.parquet")),
        Source(str(folder), name="main"),
    ]
    built = [
        rows_of(build_dataset([source], make_tokenizer(), max_length=32))
        for source in sources
    ]
    assert built[0] == built[1] == built[2] == built[3]


def test_max_examples_takes_the_first_ones(tmp_path):
    path = write_texts(tmp_path / "a.jsonl", LENGTHS)
    texts = [e["text"] for e in load_source(Source(path, max_examples=3))]
    assert texts == ["a" * LENGTHS[0], "b" * LENGTHS[1], "c" * LENGTHS[2]]


def test_sources_are_mixed_by_weight(tmp_path):
    sources = [
        Source(write_texts(tmp_path / "a.jsonl", [4] * 400, "a"), weight=3.0),
        Source(write_texts(tmp_path / "b.jsonl", [4] * 400, "A"), weight=1.0),
    ]
    tokenizer = make_tokenizer()
    dataset = build_dataset(sources, tokenizer, max_length=5)
    texts = [tokenizer.decode(row["input_ids"][:4]) for row in islice(dataset, 400)]
    assert 0.68 < sum(text.islower() for text in texts) / 400 < 0.82
    assert len({*texts[:20]}) > 10  # shuffled


def test_a_short_source_is_read_again_until_the_longest_one_has_ended(tmp_path):
    sources = [
        Source(write_texts(tmp_path / "long.jsonl", [4] * 300)),
        Source(write_texts(tmp_path / "short.jsonl", [4] * 7, "A")),
    ]
    tokenizer = make_tokenizer()
    rows = [
        tokenizer.decode(row["input_ids"][:4])
        for row in build_dataset(sources, tokenizer, max_length=5)
    ]
    assert sum(text.islower() for text in rows) >= 300  # every example of the long one
    # as often as its weight says
    assert 0.4 < sum(text.isupper() for text in rows) / len(rows) < 0.6


def test_sources_of_different_columns_are_mixed(tmp_path):
    """Chat templates are applied one after another, because all threads share the state
    that marks responses.
    """
    rows = [
        [
            {"role": "user", "content": f"{n}"},
            {"role": "assistant", "content": f"say {n}"},
        ]
        for n in range(300)
    ]
    write_jsonl(tmp_path / "a.jsonl", [{"m": row} for row in rows])
    write_jsonl(
        tmp_path / "b.jsonl",
        [
            {
                "id": n,
                "c": [{"from": "human", "value": "x"}, {"from": "gpt", "value": "say b"}],
            }
            for n in range(300)
        ],
    )  # fmt: skip
    write_jsonl(tmp_path / "c.jsonl", [{"p": "y", "r": "say c"} for _ in range(300)])
    sources = [
        Source(str(tmp_path / "a.jsonl"), columns={"messages": "m"}),
        Source(str(tmp_path / "b.jsonl"), columns={"messages": "c"}),
        Source(str(tmp_path / "c.jsonl"), columns={"prompt": "p", "response": "r"}),
    ]  # fmt: skip
    tokenizer = make_tokenizer(MARKED_TEMPLATE)
    answers = []
    for row in build_dataset(sources, tokenizer, max_length=40, packing=False):
        answers.append(
            tokenizer.decode([token for token in row["labels"] if token != NO_LOSS])
        )
    assert all(
        answer.startswith("say ") and answer.endswith("<|eos|>") for answer in answers
    )
    assert {answer[4] for answer in answers} >= {"b", "c", "1"} and len(answers) >= 900


def test_unpacked_rows_hold_one_example_each(tmp_path):
    source = Source(write_texts(tmp_path / "a.jsonl", [3, 4, 5]))
    dataset = build_dataset([source], make_tokenizer(), max_length=8, packing=False)
    assert isinstance(dataset, PackedRows) and len(dataset) == 3
    assert sorted(int((row["labels"] != NO_LOSS).sum()) for row in dataset) == [3, 4, 5]


def test_the_tokenizers_end_of_sequence_pads_where_it_has_no_padding_token(tmp_path):
    tokenizer = make_tokenizer(pad=False)
    row = build_dataset(
        [Source(write_texts(tmp_path / "a.jsonl", [3]))], tokenizer, max_length=8
    )[0]
    assert row["input_ids"][4:].tolist() == [tokenizer.eos_token_id] * 4
    assert row["labels"][4:].tolist() == [NO_LOSS] * 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"path": "missing.jsonl"}, "missing.jsonl: no such file"),
        ({"path": "./nowhere/at/all"}, "no such folder"),
        ({"split": "test"}, "no split 'test'"),
        ({"columns": {"prompt": "q", "response": "text"}}, "no column 'q'; it has 'text'"),
    ],
)  # fmt: skip
def test_a_source_that_is_not_what_the_recipe_says_is_refused(
    tmp_path, change, message
):
    options = {
        "path": write_texts(tmp_path / "a.jsonl", [3]),
    } | change
    with user_error(message):
        load_source(Source(**options))


@pytest.mark.parametrize(
    ("name", "split", "message"),
    [
        ("other", "train", "other.*(?i:available|main)"),
        ("main", "validation", "validation.*train"),
        (None, "test", "test.*train"),
    ],
)
def test_a_missing_configuration_or_split_of_a_folder_is_refused_with_what_there_is(
    tmp_path, name, split, message
):
    folder = tmp_path / "data"
    folder.mkdir()
    write_jsonl(folder / "train.jsonl", [{"text": "a"}])
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: main\n  data_files:\n  - split: train\n    path:"
        " train.jsonl\n---\n"
    )
    with user_error(message) as caught:
        load_source(Source(str(folder), name=name, split=split))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", ["", "not json\n", "folder"])
def test_an_empty_or_unreadable_source_is_refused_in_one_line(tmp_path, content):
    path = tmp_path / ("empty" if content == "folder" else "a.jsonl")
    path.mkdir() if content == "folder" else path.write_text(content)
    with user_error(path.name) as caught:
        load_source(Source(str(path)))
    assert "\n" not in str(caught.value)


# ---- real data, through the same keys


@pytest.mark.real_data
@pytest.mark.parametrize(
    ("path", "name", "columns"),
    [
        ("hub/openai/gsm8k", "main", {"prompt": "question", "response": "answer"}),
        (
            "corpora/rasbt_instruction-data.json",
            None,
            {"prompt": "instruction", "input": "input", "response": "output"},
        ),
    ],
)
def test_real_instruction_data_is_packed_with_loss_on_its_responses(
    shared_data, path, name, columns
):
    source = Source(
        str(shared_data / path), name=name, columns=columns, max_examples=50
    )
    tokenizer = make_tokenizer(MARKED_TEMPLATE)
    first = next(iter(load_source(source)))
    encoded = tokenize_example(first, columns, tokenizer)
    assert said(encoded, tokenizer) == first[columns["response"]] + "<|eos|>"
    rows = rows_of(build_dataset([source], tokenizer, max_length=2048))
    assert 0 < len(rows) < 50
    assert any(label != NO_LOSS for row in rows for label in row["labels"])


def test_trim_padding_cuts_behind_the_last_loss_of_any_row_and_keeps_the_targets():
    labels = torch.full((3, 200), NO_LOSS)
    labels[0, 5:40] = 7
    labels[1, 90] = 8
    batch = {
        "input_ids": torch.arange(600).view(3, 200),
        "labels": labels,
        "position_ids": torch.arange(200).expand(3, -1),
        "teacher_hidden": torch.zeros(36, 4),
    }
    cut = trim_padding(batch)
    assert cut["input_ids"].shape == cut["labels"].shape == (3, 128)
    assert cut["input_ids"].equal(batch["input_ids"][:, :128])
    assert cut["teacher_hidden"].shape == (36, 4)
    whole, short = (
        next_token_targets(b["labels"], b["position_ids"]) for b in (batch, cut)
    )
    assert whole[0][:, :128].equal(short[0])
    assert whole[0].sum() == short[0].sum()
    assert whole[1].equal(short[1])
    assert trim_padding(batch | {"labels": torch.full((3, 200), NO_LOSS)})[
        "labels"
    ].shape == (3, 64)
    short = {
        name: value[:, :30] for name, value in batch.items() if name != "teacher_hidden"
    }
    assert trim_padding(short)["labels"].shape == (3, 30)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("rows.csv", (r"load_dataset\('csv', data_files=PATH, split='train'\)\.to_json\('rows\.jsonl'\) writes one")),
        ("rows.tsv", (r"load_dataset\('csv', data_files=PATH, sep='\\t', split='train'\)\.to_json")),
        ("rows.txt", r"load_dataset\('text', data_files=PATH"),
        ("rows.arrow", r"load_dataset\('arrow', data_files=PATH"),
        ("rows.jsonl.gz", "unpack it first"),
        ("rows", "a .jsonl file has one JSON object per line"),
    ],
)  # fmt: skip
def test_a_file_of_another_kind_is_not_looked_for_on_the_hub(
    name: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text("a,b")
    read = r"\.jsonl, \.json, \.parquet files and folders in hub layout are allowed; "
    for path in (name, str(tmp_path / name)):
        with user_error(
            f"{name}: fcsd does not read files of this kind; {read}.*{hint}"
        ):
            check_source(SourceConfig(path=path))
    if "." in name:
        with user_error(
            f"missing{name}: no such file, and fcsd does not read files of this"
            f" kind; {read}.*{hint}"
        ):
            check_source(SourceConfig(path=f"missing{name}"))


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('{"text": "a"}\n{"text" "b"}\n', 2),
        ('{"text": "a"}\n' * 300 + '{"text": "b\n', 301),
        ('[{"text": "a"},\n{"text" 3}]', 2),
        ('{"text": "a"}\n7\n', 2),
        ("text\n", 1),
    ],
)
def test_broken_json_is_refused_with_the_number_of_its_line(tmp_path, text, line):
    path = tmp_path / "a.jsonl"
    path.write_text(text)
    with user_error(rf"a\.jsonl, line {line}: not .*JSON.*a \.jso"):
        len(list(open_source(Source(str(path))).examples))
