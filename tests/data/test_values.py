"""Values reach the chat template as they were written, whatever the data pass through:
the reference is the template of transformers on the raw example.
"""

import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from fcsd.data.config import SourceConfig
from fcsd.data.dataset import build_dataset, given_rows
from fcsd.data.sources import load_source
from tests.data.test_data import make_tokenizer
from tests.data.test_examples import stock
from tests.support import user_error

# Writes all that it is given.
ALL_TEMPLATE = (
    "<|opts|>{{ mode | default('unset') | tojson }}{% for tool in tools or [] %}"
    "<|tool|>{{ tool | tojson }}{% endfor %}{% for message in messages %}"
    "<|{{ message.role }}|>{{ message.content }}{% for call in message.tool_calls or []"
    " %}[{{ call | tojson }}]{% endfor %}<|eos|>{% endfor %}"
)
# Values that Arrow, pandas, or a reader of JSON that is not exact would change.
VALUES: list[Any] = [
    None, 0.6, 1.95, 0.12345678901234, 1, 1.0, -0.0, 1e-20, 2**62, 2**70, "2024-01-01",
    "2024-01-01T00:00:00Z", "5", "null", "", True, {}, [], [None, "a", 1], {"b": None, "a": 1}, [{"a": None}, {}],
]  # fmt: skip


def example_of(value: Any, number: int = 0) -> dict[str, Any]:
    """Make an example whose tools and calls have a value in all places."""
    # Pydantic writes an optional field so; the name makes each example's keys its own.
    field = {"default": value, "description": None, "enum": ["a", None, value]}
    tool = {
        "name": "look",
        "description": f"example {number}",
        "parameters": {
            "type": "object",
            "properties": {"shared": field | {"const": None}, f"city{number}": field},
            "required": [],
        },
    }
    call = {"name": "look", "arguments": {"shared": None, f"city{number}": value}}
    return {
        "messages": [
            {"role": "user", "content": f"question {number}"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"id": "abcdefghi", "type": "function", "function": call}],
            },
            {"role": "tool", "name": "look", "content": "dry", "tool_call_id": "abcdefghi"},
            {"role": "assistant", "content": f"answer {number}"},
        ],
        "tools": [{"type": "function", "function": tool}],
    }  # fmt: skip


EXAMPLES = [example_of(value, number) for number, value in enumerate(VALUES)]


def written(tokenizer: Any, data: Any) -> list[str]:
    """Return the texts of the rows of a recipe's file, or of data that are given."""
    options: dict[str, Any] = {"max_length": 4096, "packing": False, "shuffle": False}
    if isinstance(data, Path):
        rows = build_dataset([SourceConfig(path=str(data))], tokenizer, **options)
    else:
        rows = given_rows(data, tokenizer, name="train_dataset", **options)
    return [
        tokenizer.decode(ids.tolist())
        for index in range(len(rows))
        for ids, _ in rows.examples_of(index)
    ]


def reference(tokenizer: Any, example: dict[str, Any]) -> str:
    text: str = tokenizer.apply_chat_template(
        example["messages"],
        tools=example["tools"],
        tokenize=False,
        **example.get("chat_template_kwargs") or {},
    )
    return text


def json_lines(folder: Path, examples: list[Any]) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(example) + "\n" for example in examples))
    return path


def json_list(folder: Path, examples: list[Any]) -> Path:
    path = folder / "rows.json"
    path.write_text(json.dumps(examples, indent=1))
    return path


def hub_layout(folder: Path, examples: list[Any]) -> Path:
    (folder / "data").mkdir()
    json_lines(folder / "data", examples).rename(folder / "data" / "train.jsonl")
    return folder / "data"


def columns_of_text(folder: Path, examples: list[Any]) -> Path:
    return json_lines(
        folder, [example | {"tools": json.dumps(example["tools"])} for example in examples]
    )  # fmt: skip


def parquet_of_json(folder: Path, examples: list[Any]) -> Path:
    """Write a data set in which each tool and message is JSON."""
    kinds = {name: datasets.List(datasets.Json()) for name in examples[0]}
    data = datasets.Dataset.from_list(examples, features=datasets.Features(kinds))
    data.to_parquet(folder / "rows.parquet")
    return folder / "rows.parquet"


DOORS: dict[str, Any] = {
    "a .jsonl file": json_lines,
    "a .json file": json_list,
    "a folder": hub_layout,
    "tools as text": columns_of_text,
    "a list": lambda _, examples: examples,
    "a stream": lambda _, examples: datasets.IterableDataset.from_generator(
        lambda: iter(examples)
    ),
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("template", [ALL_TEMPLATE, "qwen3", "glm4moe", "llama3_1"])
def test_values_of_tools_and_calls_are_written_as_they_are_in_the_data(
    tmp_path: Path, door: str, template: str
) -> None:
    tokenizer = make_tokenizer(template if "{" in template else stock(template))
    texts = written(tokenizer, DOORS[door](tmp_path, EXAMPLES))
    assert len(texts) == len(EXAMPLES)
    for text, example in zip(texts, EXAMPLES, strict=True):
        assert text.startswith(reference(tokenizer, example))


def test_a_part_of_a_split_of_json_has_its_values_too(tmp_path: Path) -> None:
    path = json_lines(tmp_path, EXAMPLES)
    part = load_source(SourceConfig(path=str(path), split="train[1:3]"))
    assert [*part] == EXAMPLES[1:3]


def test_a_parquet_file_of_json_has_the_nulls_of_its_values(tmp_path: Path) -> None:
    # Numbers in such a file are as `datasets` wrote them.
    examples = [example_of(None, 0), example_of([{"a": None}, {}], 1)]
    tokenizer = make_tokenizer(ALL_TEMPLATE)
    texts = written(tokenizer, parquet_of_json(tmp_path, examples))
    assert texts == [reference(tokenizer, example) for example in examples]


def without(example: dict[str, Any]) -> Any:
    """Remove the nulls of mappings, at every depth."""
    if isinstance(example, dict):
        return {
            key: without(value) for key, value in example.items() if value is not None
        }
    return [without(value) for value in example] if isinstance(example, list) else example  # fmt: skip


@pytest.mark.parametrize("kind", ["a data set", "a stream", "a parquet file", "mapped"])
def test_nulls_that_arrow_adds_are_not_written(tmp_path: Path, kind: str) -> None:
    examples = [
        without(example_of(value, number)) for number, value in enumerate("abc")
    ]
    data: Any = datasets.Dataset.from_list(examples)
    assert data[0]["tools"] != examples[0]["tools"]
    if kind == "a parquet file":
        data.to_parquet(tmp_path / "rows.parquet")
        data = tmp_path / "rows.parquet"
    elif kind == "a stream":
        data = data.to_iterable_dataset()
    elif kind == "mapped":  # has lost its types
        data = data.to_iterable_dataset().map(lambda row: row)
    tokenizer = make_tokenizer(ALL_TEMPLATE)
    texts = written(tokenizer, data)
    assert texts == [reference(tokenizer, example) for example in examples]


@pytest.mark.parametrize("kind", ["a data set", "a stream", "a parquet file"])
def test_a_key_that_is_null_in_all_rows_of_arrow_is_null_in_the_data(
    tmp_path: Path, kind: str
) -> None:
    examples = [example_of(None, number) for number in (3, 3)]
    data: Any = datasets.Dataset.from_list(examples)
    if kind == "a parquet file":
        data.to_parquet(tmp_path / "rows.parquet")
        data = tmp_path / "rows.parquet"
    elif kind == "a stream":
        data = data.to_iterable_dataset()
    tokenizer = make_tokenizer(ALL_TEMPLATE)
    assert written(tokenizer, data) == [reference(tokenizer, row) for row in examples]


@pytest.mark.parametrize("door", [json_lines, json_list, "list", "text"])
def test_options_of_a_template_may_be_null(tmp_path: Path, door: Any) -> None:
    options: list[Any] = [{"mode": None}, {"mode": 0.6}, None, {"mode": {"a": None}}]
    examples = [EXAMPLES[0] | {"chat_template_kwargs": value} for value in options]
    tokenizer = make_tokenizer(ALL_TEMPLATE)
    data: Any = examples
    if callable(door):
        data = door(tmp_path, examples)
    elif door == "text":
        data = [
            row | {"chat_template_kwargs": json.dumps(row["chat_template_kwargs"])}
            for row in examples[:2]
        ]
        examples = examples[:2]
    assert written(tokenizer, data) == [reference(tokenizer, row) for row in examples]


def test_null_in_a_message_or_beside_a_function_stands_for_no_key() -> None:
    chat = json.loads(json.dumps(EXAMPLES[1]["messages"]))
    padded = json.loads(json.dumps(chat))
    for message in padded:
        message |= dict.fromkeys({"tool_calls", "reasoning_content", "weight"} - {*message})  # fmt: skip
    padded[1]["content"] = None
    padded[1]["tool_calls"][0] |= {"index": None}
    tokenizer = make_tokenizer(ALL_TEMPLATE)
    tools = EXAMPLES[1]["tools"]
    texts = written(tokenizer, [{"messages": padded, "tools": tools}])
    assert texts == [reference(tokenizer, {"messages": chat, "tools": tools})]


def test_keys_of_a_call_keep_their_order() -> None:
    example = json.loads(json.dumps(EXAMPLES[1]))
    call = example["messages"][1]["tool_calls"][0]
    function = {"arguments": call["function"]["arguments"], "name": "look"}
    example["messages"][1]["tool_calls"] = [
        {"function": function, "type": "function", "id": call["id"]}
    ]
    tokenizer = make_tokenizer(ALL_TEMPLATE)
    assert written(tokenizer, [example]) == [reference(tokenizer, example)]


def test_a_column_that_only_later_rows_have_is_read(tmp_path: Path) -> None:
    examples = [{"messages": EXAMPLES[0]["messages"]}, *EXAMPLES[:2]]
    tokenizer = make_tokenizer(ALL_TEMPLATE)
    expected = [reference(tokenizer, {"tools": None, **row}) for row in examples]
    for data in (
        json_lines(tmp_path, examples),
        json_list(tmp_path, examples),
        examples,
    ):
        assert written(tokenizer, data) == expected


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ('{"text": "a"}\r\n{"text": "b"}', ["a", "b"]),
        ('\ufeff{"text": "a"}\n', ["a"]),
        ('{"text":\n "a"}\n{"text": "b"\n}\n', ["a", "b"]),
        ('["a", "b"]', ["a", "b"]),
        ('\n[\n{"text": "a"}]\n', ["a"]),
        ('{"text": "a\u2028b"}\n', ["a\u2028b"]),
        ('{"text": "a"}\n\n{"text": "b"}\n\n', ["a", "b"]),
    ],
)
def test_forms_of_json_files_are_read(
    tmp_path: Path, text: str, rows: list[str]
) -> None:
    path = tmp_path / "rows.json"
    path.write_text(text, newline="")
    source = SourceConfig(path=str(path), columns={"text": "text"})
    assert [row["text"] for row in load_source(source)] == rows


@pytest.mark.parametrize(
    "example",
    [
        {"text": "a \ud83d b"},
        {"prompt": "a", "completion": "\ud83d"},
        {"prompt": "\ude00", "response": "b"},
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b\ud83d"}]},
    ],
)  # fmt: skip
def test_half_a_character_is_a_bad_row(tmp_path: Path, example: dict[str, Any]) -> None:
    path = json_lines(tmp_path, [example])
    source = SourceConfig(path=str(path), columns=None)
    with user_error(r"row 1: a text holds half a character, '\\ud"):
        build_dataset([source], make_tokenizer(ALL_TEMPLATE), max_length=64)
