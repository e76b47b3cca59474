"""Examples that cannot be tokenized are named with file and row, or left out and
counted, before a model is loaded.
"""

import json
from pathlib import Path
from typing import Any

import pytest

import fcsd
from fcsd.base.errors import UserError
from fcsd.base.files import read_json
from fcsd.cli.main import main
from fcsd.data import write_rows
from fcsd.data.batches import NO_LOSS
from fcsd.data.config import SourceConfig
from fcsd.data.dataset import build_dataset, given_rows
from fcsd.data.messages import BadExample, decoded_json
from fcsd.data.sources import broken_line
from fcsd.data.write_rows import BadRows
from tests.data.test_data import (
    MARKED_TEMPLATE,
    PLAIN_TEMPLATE,
    REFUSING_TEMPLATE,
    make_tokenizer,
    said,
)
from tests.examples import tokenize_example
from tests.support import Bench, user_error

BAD = {"text": None}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def folder(path: Path, *files: list[Any]) -> str:
    path.mkdir()
    for number, rows in enumerate(files):
        (path / f"train-{number}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows)
        )
    return str(path)


def good(number: int, letter: str = "a") -> list[Any]:
    return [{"text": letter * (row + 1)} for row in range(number)]


def build(path: str, **options: Any) -> Any:
    source = SourceConfig(path=path, columns={"text": "text"})
    return build_dataset(
        [source], make_tokenizer(), max_length=8, packing=False, **options
    )


def texts(rows: Any) -> list[str]:
    return sorted(make_tokenizer().decode(row["input_ids"]) for row in rows)


@pytest.mark.parametrize("row", [3, 140], ids=["in the sample", "behind it"])
def test_the_error_names_the_file_and_the_row(tmp_path: Path, row: int) -> None:
    second = good(150)
    second[row - 1] = BAD
    path = folder(tmp_path / "data", good(5), second, good(4))
    with pytest.raises(UserError) as caught:
        list(build(path))
    assert (
        str(caught.value)
        == f"data set {path}, file train-1.jsonl, row {row}: column 'text': text is"
        " needed, got None; correct it, or set data.on_bad_row: skip to leave out"
        " such rows"
    )


def test_a_row_of_examples_that_a_caller_gave_is_named_by_its_number() -> None:
    with user_error(
        r"data set train_dataset, row 4: column 'text'.* \(1 more row cannot"
    ):
        given_rows(
            [*good(3), BAD, *good(2), BAD],
            make_tokenizer(),
            name="train_dataset",
            max_length=8,
        )


def test_bad_rows_are_left_out_and_counted_and_the_others_stay(tmp_path: Path) -> None:
    record = BadRows("skip")
    path = folder(
        tmp_path / "bad", [*good(4), BAD, *good(3, "b")], [BAD, *good(5, "c")]
    )
    plain = folder(tmp_path / "plain", [*good(4), *good(3, "b")], good(5, "c"))
    rows = build(path, bad_rows=record)
    assert texts(rows) == texts(build(plain))
    assert record.summary() == {"num_examples": 14, "num_left_out": 2}
    places = [
        each["where"].removeprefix(f"data set {path}, ") for each in record.listed()
    ]
    assert sorted(places) == ["file train-0.jsonl, row 5", "file train-1.jsonl, row 1"]


def test_too_many_bad_rows_are_an_error_whatever_the_recipe_says(
    tmp_path: Path,
) -> None:
    path = folder(tmp_path / "data", [*good(105), *[BAD] * 11, *good(30)])
    with user_error(
        r"11 of 1\d\d examples cannot be tokenized, .*skip leaves out at most 1%"
    ):
        list(build(path, bad_rows=BadRows("skip"), shuffle=False))


def test_a_number_far_into_a_file_is_a_bad_row_and_the_texts_beside_it_stay_as_they_are(
    tmp_path: Path,
) -> None:
    def chat(answer: Any) -> dict[str, Any]:
        turns = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": answer},
        ]
        return {"messages": turns, "other": "x" * 2_000_000}

    # `datasets` infers the types from the first 10 MB that it reads.
    rows = [*map(chat, "abcdef"), chat(5), chat("h")]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = SourceConfig(path=str(file))
    options: dict[str, Any] = {"max_length": 64, "shuffle": False}
    with user_error(r"row 7: column 'messages': .* got .*'content': 5"):
        list(build_dataset([source], make_tokenizer(PLAIN_TEMPLATE), **options))
    record = BadRows("skip")
    (row,) = build_dataset(
        [source], make_tokenizer(PLAIN_TEMPLATE), **options, bad_rows=record
    )
    text = make_tokenizer().decode(
        [token for token in row["labels"] if token != NO_LOSS]
    )
    assert record.num_bad == 1
    assert text == "".join(f"{letter}<|eos|>" for letter in "abcdefh")


def test_a_file_that_cannot_be_read_to_its_end_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder(tmp_path / "data", good(5), good(5))
    (tmp_path / "data" / "train-1.jsonl").write_text(
        '{"text": "a"}\n' * 3 + '{"text": "brok'
    )
    with user_error(r"file train-1\.jsonl, line 4: not valid JSON"):
        list(build(path))


CONVERSATION = [
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
]


@pytest.mark.parametrize(
    "template", [PLAIN_TEMPLATE, MARKED_TEMPLATE], ids=["prefix", "generation marks"]
)
def test_a_conversation_may_begin_with_the_assistant(template: str) -> None:
    tokenizer = make_tokenizer(template)
    encoded = tokenize_example({"m": CONVERSATION}, {"messages": "m"}, tokenizer)
    assert said(encoded, tokenizer) == "hello<|eos|>4<|eos|>"


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        (CONVERSATION, "a user speaks first"),
        (
            [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4", "name": 4}],
            "concatenate|can only",
        ),
    ],
)  # fmt: skip
def test_a_conversation_that_the_template_cannot_write_is_a_bad_row(
    messages: Any, reason: str
) -> None:
    tokenizer = make_tokenizer(
        "{{ 'of ' + messages[1].get('name', '') }}" + REFUSING_TEMPLATE
    )
    with user_error(f"row 1: .*its chat template refuses an example: .*({reason})"):
        given_rows(
            [{"messages": messages}], tokenizer, name="train_dataset", max_length=8
        )


def spoil(bench: Bench, row: int) -> None:
    lines = bench.rows.read_text().splitlines()
    lines[row - 1] = json.dumps({"messages": [{"role": "user"}]})
    bench.rows.write_text("\n".join(lines) + "\n")


def test_a_bad_row_is_refused_before_a_model_is_loaded(
    bench: Bench, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(bench, 7)
    monkeypatch.setattr(
        "fcsd.pipeline.distill.load_teacher",
        lambda *args, **kwargs: pytest.fail("loaded"),
    )
    data = {"train": [{"path": str(bench.rows)}], "max_length": 32}
    assert main(["distill", str(bench.recipe("r", data=data))]) == 2
    assert f"data set {bench.rows}, row 7: column 'messages'" in capsys.readouterr().err


def test_a_run_that_met_a_bad_row_continues_without_it_and_says_so_in_its_report(
    bench: Bench, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write_rows, "PIECE_EXAMPLES", 8)
    monkeypatch.setattr(write_rows, "_BLOCK", 8)
    spoil(bench, 50)
    command = ["distill", str(bench.recipe("r"))]
    assert main(command) == 2
    assert "row 50: column 'messages'" in capsys.readouterr().err
    folder = bench.folder / "r" / "distill"
    shards = {
        path: path.stat().st_mtime_ns
        for path in (bench.folder / "r" / "tokens").rglob("0*.safetensors")
    }
    assert len(shards) >= 7
    assert main([*command, "--set", "data.on_bad_row=skip"]) == 0
    assert all(path.stat().st_mtime_ns == time for path, time in shards.items())
    assert "1 of " in capsys.readouterr().err
    counts = read_json(folder / "manifest.json")["results"]["bad_rows"]
    assert counts == {"num_examples": 60, "num_left_out": 1}
    (listed,) = read_json(folder / "bad_rows.json")["left_out"]
    assert listed["where"] == f"data set {bench.rows}, row 50"
    from fcsd.report.report import _training

    assert _training(folder) == "kl, 12 steps, 1 bad row left out"


@pytest.mark.parametrize("stage", ["calibrate", "distill", "tokenize"])
def test_a_recipe_names_the_row_whose_token_the_model_does_not_know(
    bench: Bench, stage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"input_ids": [5, 6, 7, 8]}] * 40 + [{"input_ids": [5, 300]}]
    file = bench.folder / "tokens.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"train": [{"path": str(file), "columns": None}], "max_length": 32}
    recipe = bench.recipe(
        "ids", data=data, calibration={"tokens": 512} if stage == "calibrate" else None
    )
    if stage == "calibrate":
        with pytest.raises(UserError) as caught:
            fcsd.run_stage(stage, recipe)
        error = str(caught.value)
    else:
        assert main(["run", str(recipe), "--only", stage]) == 2
        error = capsys.readouterr().err.strip().splitlines()[-1]
    said = (
        f"data set {file}, row 41: token id 300 at position 1 is not in the model's"
        " vocabulary, which has 300"
    )
    assert said in error


def test_a_number_that_is_too_long_is_named_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "long.jsonl"
    file.write_text('{"a": 1}\n{"a": ' + "9" * 5000 + "}\n")
    assert broken_line(file).startswith(", line 2: not valid JSON (Exceeds the limit")


def test_json_text_that_is_too_deep_is_a_bad_example() -> None:
    with pytest.raises(BadExample, match="JSON text is needed"):
        decoded_json("[" * 100_000, "m", "arguments")
