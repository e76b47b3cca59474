"""Invent rows with the columns of real data sets, for a rehearsal to read instead;
write data sets in the layout of a hub repository, for `datasets.load_dataset(folder)`.

Columns and types are those of the hub repositories; suites have those of benchmarks.
The content is invented, and contains nothing of the real data. A data set that is
unknown here gets the columns that its recipe names.
"""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from fcsd.base.writing import inside
from fcsd.evaluation.config import Column

Row = dict[str, Any]
Rows = Sequence[Mapping[str, Any]]

_ROLES = {"user": "human", "assistant": "gpt", "system": "system"}  # ShareGPT's words
_WORDS = [
    "green", "seven", "bread", "table", "small", "rain", "over", "count", "red", "old", "house", "both", "ran",
]  # fmt: skip
_LETTERS = ["A", "B", "C", "D", "E"]


def conversation(index: int) -> list[dict[str, str]]:
    """Make one or two exchanges of a few words; every fourth begins with a system message."""
    # Roles and numbers of turns vary, so that templates are tried with all of them.
    system = [{"role": "system", "content": "be brief"}] if index % 4 == 3 else []
    first = [
        {"role": "user", "content": f"{index} + {index % 7}?"},
        {
            "role": "assistant",
            "content": f"it is {index + index % 7}, {_chatter(index)}",
        },
    ]
    second = [
        {"role": "user", "content": "sure?"},
        {"role": "assistant", "content": "yes"},
    ]
    return system + first + (second if index % 3 == 2 else [])


def _chatter(index: int) -> str:
    """Make words that differ from row to row, because calibration refuses text that is
    always the same.
    """
    return " ".join(random.Random(index).choices(_WORDS, k=12))


def _genqa(index: int) -> Row:
    return {
        "text": [
            message for message in conversation(index) if message["role"] != "system"
        ],
        "prompt": "Write a question and its answer.",
        "template": "{question} {answer}",
        "idx": index,
        "category": "arithmetic",
    }


def _infinity_instruct(index: int) -> Row:
    turns = [
        {"from": _ROLES[turn["role"]], "value": turn["content"]}
        for turn in conversation(index)
    ]
    return {
        "id": index,
        "conversations": turns,
        "label": "{}",
        "langdetect": "en",
        "source": "rehearsal",
    }


def _question(index: int) -> str:
    """Make a question that is long enough (more than 13 words) to be checked for
    overlap.
    """
    return (
        f"A baker has {index + 3} trays with {index + 2} small loaves on each of them."
        " How many loaves has the baker on all trays together?"
    )


def _choices(index: int, count: int) -> list[str]:
    right = (index + 3) * (index + 2)
    return [f"{right + offset} loaves of bread" for offset in range(count)]


def benchmark_row(columns: Mapping[str, Column], index: int) -> Row:
    """Make a row of a benchmark: the first text is a question; a column with listed
    values takes them in turn.
    """
    values: dict[str, Any] = {
        "text with _": (
            f"The loaves did not fit on the {index + 2} trays of the small shop as the"
            " _ were too large."
        ),
        "4 texts": _choices(index, 4),
        "labelled": {"text": _choices(index, 5), "label": _LETTERS},
    }
    row = {}
    # The first text column is the question, and further ones are fillers.
    texts = iter([_question(index)])
    for column, kind in columns.items():
        if isinstance(kind, list):
            row[column] = kind[index % len(kind)]
        else:
            row[column] = (
                values[kind]
                if kind in values
                else next(texts, f"{index + 2} of the {column}")
            )
    return row | ({"answerKey": "A"} if "answerKey" in columns else {})


def _humaneval_plus(index: int) -> Row:
    description = (
        f"Return the sum of both numbers and {index}, also where one of them is below"
        " zero."
    )
    return {
        "task_id": f"HumanEval/{index}",
        "prompt": f'def add_{index}(a, b):\n    """ {description} """\n',
        "canonical_solution": f"    return a + b + {index}\n",
        "entry_point": f"add_{index}",
        "test": f"def check(candidate):\n    assert candidate(1, 1) == {2 + index}\n",
    }


def _mbpp_plus(index: int) -> Row:
    name = f"times_{index}"
    return {
        "task_id": 1000 + index,
        "code": f"def {name}(a, b):\n    return a * b + {index}\n",
        "prompt": (
            f"Write a function {name} that multiplies two numbers and adds {index} to"
            " what comes out of it."
        ),
        "source_file": "rehearsal",
        "test_imports": [],
        "test_list": [
            f"assert {name}(1, 2) == {2 + index}",
            f"assert {name}(3, 3) == {9 + index}",
        ],
        "test": f"assert {name}(-1, 5) == {index - 5}\n",
    }


CODE: dict[str, Callable[[int], Row]] = {
    "evalplus/humanevalplus": _humaneval_plus,
    "evalplus/mbppplus": _mbpp_plus,
}
"""Problems with correct solutions, by hub id."""

_TRAINING: dict[str, Callable[[int], Row]] = {
    "tomg-group-umd/GenQA": _genqa,
    "BAAI/Infinity-Instruct": _infinity_instruct,
}


def training_row(path: str, columns: Mapping[Any, str], index: int) -> Row:
    """Make a row of the data set `path`; if it is unknown here, with the `columns` that
    the recipe names.
    """
    # Known data sets have columns that a recipe does not name.
    if path in _TRAINING:
        return _TRAINING[path](index)
    question, answer = f"{index} + {index % 7}?", f"it is {index + index % 7}"
    values = {
        "messages": conversation(index),
        "prompt": question,
        "input": "",
        "tools": [],
        "system": "",
        "history": [],
        "chat_template_kwargs": {},
        "response": answer,
        "completion": answer,
        "text": f"{question} {answer}, and so on to the end of the line.",
    }
    return {name: values[kind] for kind, name in columns.items()}


def write_rows(path: Path, rows: Rows) -> None:
    """Write rows to a new file in the format of its name: .parquet, .json, else one
    line per row.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        import datasets

        datasets.Dataset.from_list(list(rows)).to_parquet(path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows, ensure_ascii=False), encoding="utf-8")
    else:
        path.write_text(
            "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows),
            encoding="utf-8",
        )


def write_data_set(
    folder: Path, files: Mapping[tuple[str, str], Rows], note: str = ""
) -> None:
    """Write a file for each configuration and split, and a README that lists them and
    ends with a note.
    """
    configs: dict[str, list[dict[str, str]]] = {}
    for (config, split), rows in files.items():
        path = f"{split}.jsonl" if config == "default" else f"{config}/{split}.jsonl"
        write_rows(inside(folder, path), rows)
        configs.setdefault(config, []).append({"split": split, "path": path})
    # The README maps configurations and splits to files, as on the Hub.
    listed = [
        {"config_name": name, "data_files": splits} for name, splits in configs.items()
    ]
    card = f"---\n{yaml.safe_dump({'configs': listed}, sort_keys=False)}---\n{note}"
    (folder / "README.md").write_text(card, encoding="utf-8")
