"""Data that a caller holds gives the rows of a recipe's file; what its columns mean is seen from their names."""

import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest

from fcsd.base.errors import UserError
from fcsd.data.config import SourceConfig
from fcsd.data.dataset import build_dataset, given_rows
from fcsd.pipeline.tiny.models import tiny_tokenizer

TOKENIZER = tiny_tokenizer(300)
CHATS = [
    [{"role": "user", "content": f"{n} + 1"}, {"role": "assistant", "content": f"{n + 1} it is"}]
    for n in range(30)
]
TEXTS = [f"{n} and {n + 1}" for n in range(30)]


def rows_of(data: Any) -> list[dict[str, list[int]]]:
    return [
        {name: list(map(int, row[name])) for name in ("input_ids", "position_ids", "labels")} for row in data
    ]


def listed(rows: Any) -> list[Any]:
    return [rows[index] for index in range(len(rows))] if hasattr(rows, "__len__") else list(rows)


def given(data: Any, **options: Any) -> list[dict[str, list[int]]]:
    settings = {"name": "train_dataset", "max_length": 40, "seed": 3, **options}
    return rows_of(listed(given_rows(data, TOKENIZER, **settings)))


@pytest.mark.parametrize(
    ("examples", "columns"),
    [
        ([{"messages": chat, "text": "not read"} for chat in CHATS], {"messages": "messages"}),
        (
            [
                {"conversations": [{"from": "human", "value": text}, {"from": "gpt", "value": text}]}
                for text in TEXTS
            ],
            {"messages": "conversations"},
        ),
        (
            [{"prompt": text, "response": text} for text in TEXTS],
            {"prompt": "prompt", "response": "response"},
        ),
        (
            [{"prompt": text, "input": "more", "completion": text} for text in TEXTS],
            {"prompt": "prompt", "input": "input", "response": "completion"},
        ),
        (
            [{"instruction": text, "input": "more", "output": text, "text": "all of it"} for text in TEXTS],
            {"prompt": "instruction", "input": "input", "response": "output"},
        ),
        (
            [{"prompt": chat[:1], "completion": chat[1:]} for chat in CHATS],
            {"prompt": "prompt", "response": "completion"},
        ),
        ([{"text": text, "url": "-"} for text in TEXTS], {"text": "text"}),
    ],
    ids=[
        "messages",
        "conversations",
        "prompt and response",
        "prompt, input and completion",
        "Alpaca",
        "conversations as prompt and completion",
        "text",
    ],
)
def test_rows_are_those_of_a_recipe_of_the_same_examples(
    tmp_path: Path, examples: list[dict[str, Any]], columns: dict[Any, str]
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(example) + "\n" for example in examples))
    source = SourceConfig(path=str(file), columns=columns)
    expected = rows_of(listed(build_dataset([source], TOKENIZER, max_length=40, seed=3)))
    data = datasets.Dataset.from_list(examples)
    assert given(data) == given(data.to_iterable_dataset()) == expected
    assert given(examples) == expected
    assert given(data.with_format("torch")) == expected
    renamed = data.rename_columns({name: f"my_{name}" for name in columns.values()})
    assert given(renamed, columns={key: f"my_{name}" for key, name in columns.items()}) == expected


def test_tokens_are_packed_as_they_are_with_loss_where_labels_say_so() -> None:
    tokens = [
        {"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 7, 8]},
        {"input_ids": [9, 10], "labels": [9, 10]},
    ]
    (row,) = given(tokens, max_length=8, shuffle=False)
    pad = TOKENIZER.pad_token_id
    assert row["input_ids"] == [5, 6, 7, 8, 9, 10, pad, pad]
    assert row["position_ids"] == [0, 1, 2, 3, 0, 1, 0, 1]
    assert row["labels"] == [-100, -100, 7, 8, -100, 10, -100, -100]
    padded = [{"input_ids": [5, 6, 0, 0], "attention_mask": [1, 1, 0, 0]}]
    (row,) = given(padded, max_length=4)
    assert row["input_ids"] == [5, 6, pad, pad] and row["labels"] == [-100, 6, -100, -100]


def test_rows_that_are_packed_come_back_as_they_are() -> None:
    rows = given_rows(TEXTS_ROWS, TOKENIZER, name="x", max_length=16)
    assert given_rows(rows, TOKENIZER, name="x", max_length=16) is rows
    stored = datasets.Dataset.from_list(
        [{k: np.asarray(v) for k, v in rows[i].items()} for i in range(len(rows))]
    )
    assert given_rows(stored, TOKENIZER, name="x", max_length=16) is stored
    streamed = given_rows(stored.to_iterable_dataset(), TOKENIZER, name="x", max_length=16, num_rows=2)
    assert rows_of(streamed) == rows_of(stored)[:2]
    with pytest.raises(
        UserError, match="its rows are packed already, with 16 tokens, and max_length is 32; set"
    ):
        given_rows(stored, TOKENIZER, name="x", max_length=32)


TEXTS_ROWS = [{"text": text} for text in TEXTS]


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        ([{"a": 1, "b": 2}], {}, "no column 'messages', 'text', 'prompt' with 'response', .*; it has 'a', 'b'"),
        ([{"a": "x"}], {"columns": {"words": "a"}}, "columns must name 'messages', or 'text', .*, got words"),
        ([{"text": 5}], {}, "column 'text': text is needed, got 5"),
        ([{"messages": "hello"}], {}, "column 'messages': a list of messages"),
        ([{"input_ids": [5, 6], "labels": [6, 7]}], {}, "each label must be the token of its own position, or -100"),
        (datasets.DatasetDict(train=datasets.Dataset.from_list(TEXTS_ROWS)), {}, "holds several \\('train'\\)"),
        (5, {}, "data set train_dataset: 5"),
        ("a/name", {}, "data set train_dataset: a str; a datasets.Dataset"),
    ],
)  # fmt: skip
def test_what_is_no_data_is_refused(data: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        given(data, **options)
