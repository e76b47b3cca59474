"""Data in memory gives the same rows as the file of a recipe; the names of its columns
tell what they mean.
"""

import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest

from fcsd.data.config import SourceConfig
from fcsd.data.dataset import build_dataset, given_rows
from fcsd.data.write_rows import BadRows
from fcsd.pipeline.tiny.models import tiny_tokenizer
from tests.support import user_error

TOKENIZER = tiny_tokenizer(300)
CHATS = [
    [
        {"role": "user", "content": f"{n} + 1"},
        {"role": "assistant", "content": f"{n + 1} it is"},
    ]
    for n in range(30)
]
TEXTS = [f"{n} and {n + 1}" for n in range(30)]


def rows_of(data: Any) -> list[dict[str, list[int]]]:
    return [
        {
            name: list(map(int, row[name]))
            for name in ("input_ids", "position_ids", "labels")
        }
        for row in data
    ]


def listed(rows: Any) -> list[Any]:
    return (
        [rows[index] for index in range(len(rows))]
        if hasattr(rows, "__len__")
        else list(rows)
    )


def given(data: Any, **options: Any) -> list[dict[str, list[int]]]:
    settings = {"name": "train_dataset", "max_length": 40, "seed": 3, **options}
    return rows_of(listed(given_rows(data, TOKENIZER, **settings)))


@pytest.mark.parametrize(
    ("examples", "columns"),
    [
        (
            [{"messages": chat, "text": "not read"} for chat in CHATS],
            {"messages": "messages"},
        ),
        (
            [
                {
                    "conversations": [
                        {"from": "human", "value": text},
                        {"from": "gpt", "value": text},
                    ]
                }
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
            [
                {
                    "instruction": text,
                    "input": "more",
                    "output": text,
                    "text": "all of it",
                }
                for text in TEXTS
            ],
            {"prompt": "instruction", "input": "input", "response": "output"},
        ),
        (
            [{"prompt": chat[:1], "completion": chat[1:]} for chat in CHATS],
            {"prompt": "prompt", "response": "completion"},
        ),
        ([{"text": text, "url": "-"} for text in TEXTS], {"text": "text"}),
    ],
    ids=[
        "messages", "conversations", "prompt and response", "prompt, input and completion", "Alpaca",
        "conversations as prompt and completion", "text",
    ],
)  # fmt: skip
def test_rows_are_those_of_a_recipe_of_the_same_examples(
    tmp_path: Path, examples: list[dict[str, Any]], columns: dict[Any, str]
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(example) + "\n" for example in examples))
    source = SourceConfig(path=str(file), columns=columns)
    expected = rows_of(
        listed(build_dataset([source], TOKENIZER, max_length=40, seed=3))
    )
    data = datasets.Dataset.from_list(examples)
    assert given(data) == given(data.to_iterable_dataset()) == expected
    assert given(examples) == expected
    assert given(data.with_format("torch")) == expected
    renamed = data.rename_columns({name: f"my_{name}" for name in columns.values()})
    assert (
        given(renamed, columns={key: f"my_{name}" for key, name in columns.items()})
        == expected
    )


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
    assert row["input_ids"] == [5, 6, pad, pad]
    assert row["labels"] == [-100, 6, -100, -100]


def test_rows_that_are_packed_come_back_as_they_are() -> None:
    rows = given_rows(TEXTS_ROWS, TOKENIZER, name="x", max_length=16)
    assert given_rows(rows, TOKENIZER, name="x", max_length=16) is rows
    stored = datasets.Dataset.from_list(
        [{k: np.asarray(v) for k, v in rows[i].items()} for i in range(len(rows))]
    )
    assert given_rows(stored, TOKENIZER, name="x", max_length=16) is stored
    streamed = given_rows(
        stored.to_iterable_dataset(), TOKENIZER, name="x", max_length=16, num_rows=2
    )
    assert rows_of(streamed) == rows_of(stored)[:2]
    with user_error(
        "its rows are packed already, with 16 tokens, and max_length is 32; set"
    ):
        given_rows(stored, TOKENIZER, name="x", max_length=32)
    for column in ("input_ids", "labels", "position_ids"):
        shorter = [dict(row) for row in stored]
        shorter[1][column] = shorter[1][column][:-1]
        with user_error(f"row 2: has .*15 {column}.*; packed rows have 16 of each"):
            given_rows(
                datasets.Dataset.from_list(shorter), TOKENIZER, name="x", max_length=16
            )


TEXTS_ROWS = [{"text": text} for text in TEXTS]


def test_columns_that_a_format_hides_are_not_read_and_a_transform_is_refused() -> None:
    """`Dataset.column_names` also lists the columns that a format hides."""
    data = datasets.Dataset.from_list([{"input_ids": [5, 6, 7], "text": "a"}] * 2)
    data = data.add_column("labels", [[-100, -100, 7]] * 2)
    data.set_format("torch", columns=["input_ids"])
    (row,) = given(data, max_length=8)
    assert row["labels"][:6] == [-100, 6, 7, -100, 6, 7]

    texts = datasets.Dataset.from_list(TEXTS_ROWS)
    upper = texts.with_transform(
        lambda batch: {"text": [*map(str.upper, batch["text"])]}
    )
    with user_error("data set train_dataset: has a transform"):
        given(upper)


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        ([{"a": 1, "b": 2}], {}, "no column 'messages', 'text', 'prompt' with 'response', .*; it has 'a', 'b'"),
        ([{"a": "x"}], {"columns": {"words": "a"}}, "columns must name 'messages', or 'text', .*, got words"),
        ([{"text": 5}], {}, "column 'text': text is needed, got 5"),
        ([{"messages": "hello"}], {}, "column 'messages': needs a list of messages"),
        ([{"input_ids": [5, 6], "labels": [6, 7]}], {}, "each label must be the token of its own position, or -100"),
        (datasets.DatasetDict(train=datasets.Dataset.from_list(TEXTS_ROWS)), {}, "holds several \\('train'\\)"),
        (5, {}, "data set train_dataset: an int; a datasets.Dataset"),
        ("a/name", {}, "data set train_dataset: a str; a datasets.Dataset.*; datasets.load_dataset reads files"),
        (Path("rows.jsonl"), {}, "data set train_dataset: a PosixPath; .*; datasets.load_dataset reads files"),
        (["a b"], {}, "data set train_dataset, row 1: a str; an example is a mapping of columns to values"),
        ([{"text": "a"}, ["b"]], {}, "data set train_dataset, row 2: a list; an example is a mapping"),
        ([None], {}, "data set train_dataset, row 1: None; an example is a mapping"),
        ({"text": ["a", "b"]}, {}, "columns 'text' in a dict; convert it with datasets.Dataset.from_dict"),
        ([{"text": "a"}, {"text": 3}], {}, "row 2: column 'text': text is needed, got 3"),
        (TEXTS_ROWS, {"columns": "body"}, r"columns: a str, 'body'; .*, for example columns=\{'text': 'body'\}"),
        (TEXTS_ROWS, {"columns": ["body"]}, r"columns: a list, \['body'\]; give a mapping from meanings"),
        (TEXTS_ROWS, {"columns": 3}, "columns: an int, 3; give a mapping from meanings"),
    ],
)  # fmt: skip
def test_what_is_no_data_is_refused(
    data: Any, options: dict[str, Any], message: str
) -> None:
    with user_error(message):
        given(data, **options)


def test_a_column_that_only_later_examples_have_is_not_left_out() -> None:
    with user_error("row 1: column 'labels': a list of token ids is needed, got None"):
        given(
            [{"input_ids": [5, 6]}, {"input_ids": [5, 6], "labels": [-100, 6]}],
            max_length=4,
        )


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([5, 300, 6], "token id 300 at position 1 is not in the model's vocabulary, which has 300 tokens; use the"),
        ([5, -3, 6], "token id -3 at position 1 is not in the model's vocabulary"),
        ([5, 1 << 40], f"token id {1 << 40} at position 1 is not in the model's vocabulary"),
        ([1.5, 2.0], "token ids: a list of whole numbers is needed, got"),
        ([True, False], "token ids: a list of whole numbers is needed, got"),
        (["a", "b"], "token ids: a list of whole numbers is needed, got"),
        ([5, None], "token ids: a list of whole numbers is needed, got"),
        ([[5, 6], [7]], "token ids: a list of whole numbers is needed, got"),
    ],
)  # fmt: skip
def test_ids_that_the_model_does_not_know_are_named_with_their_example(
    ids: list[Any], message: str
) -> None:
    good = {"input_ids": [5, 299]}
    with user_error(f"data set train_dataset, row 1: {message}"):
        given([{"input_ids": ids}], vocab_size=300)
    if all(type(number) is int for number in ids):
        examples = [good] * 20 + [{"input_ids": ids}]
        record = BadRows("skip")
        rows = given(examples, vocab_size=300, bad_rows=record, packing=False)
        assert len(rows) == 20
        assert record.listed()[0]["where"] == "data set train_dataset, row 21"


def test_ids_of_rows_that_are_packed_are_checked_as_well() -> None:
    rows = [
        {"input_ids": [token] * 4, "position_ids": [0, 1, 2, 3], "labels": [token] * 4}
        for token in (299, 300)
    ]
    with user_error(
        "data set train_dataset, row 2: token id 300 at position 0 is not in"
    ):
        given(rows, max_length=4, vocab_size=300)
    assert len(given(rows, max_length=4, vocab_size=301)) == 2
