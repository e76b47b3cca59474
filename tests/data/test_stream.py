"""Streams: the order is that of `datasets`, and any place in one is found again without reading what lies before."""

import json
import multiprocessing
import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest

from fcsd.config.data import SourceConfig
from fcsd.data import dataset as dataset_module
from fcsd.data import reading, stream
from fcsd.data.bad_rows import BadRows
from fcsd.data.dataset import build_dataset
from fcsd.data.decontaminate import Decontaminator, Item, ItemIndex
from fcsd.data.given import given_rows
from fcsd.data.sources import load_source
from fcsd.data.stream_file import read_position, write_position
from fcsd.data.workers import in_order
from fcsd.distill.endless_rows import EndlessRows
from fcsd.errors import UserError
from tests.data.test_data import make_tokenizer

TOKENIZER = make_tokenizer()


@pytest.fixture(autouse=True)
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers and packs that a hundred examples fill several times."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(reading, "BUFFER", 20)
    monkeypatch.setattr(stream, "_PIECE", 7)
    monkeypatch.setattr(stream, "_PACK", 5)


def folder(path: Path, *lengths: int, kind: str = "jsonl") -> str:
    """Files of so many short texts, each different."""
    path.mkdir()
    for file, length in enumerate(lengths):
        rows = [{"text": f"{path.name} {file} {row}"} for row in range(length)]
        text = json.dumps(rows) if kind == "json" else "".join(json.dumps(row) + "\n" for row in rows)
        (path / f"{file:02}.{kind}").write_text(text)
    return str(path)


def source(path: str, **values: Any) -> SourceConfig:
    return SourceConfig(path=path, columns={"text": "text"}, streaming=True, **values)


def texts(rows: Any) -> list[str]:
    """What unpacked rows say."""
    said = []
    for row in rows:
        ids = np.asarray(row["input_ids"])
        said.append(TOKENIZER.decode(ids[: list(ids).index(TOKENIZER.eos_token_id)]))
    return said


def as_datasets_orders_them(sources: list[SourceConfig], seed: int, epoch: int) -> list[str]:
    """The texts as `datasets` shuffles and mixes them."""
    parts = [
        load_source(each).shuffle(seed=seed, buffer_size=20).select_columns("text").map(dict)
        for each in sources
    ]
    total = sum(each.weight for each in sources)
    shares = [each.weight / total for each in sources]
    mixed = parts[0]
    if len(parts) > 1:
        mixed = datasets.interleave_datasets(parts, shares, seed=seed, stopping_strategy="all_exhausted")
    mixed.set_epoch(epoch)
    return [row["text"] for row in mixed]


@pytest.mark.parametrize("epoch", [0, 2])
@pytest.mark.parametrize("case", ["one file", "many files", "without features", "first examples", "mixture"])
def test_a_stream_has_the_order_in_which_datasets_shuffles_and_mixes(
    tmp_path: Path, case: str, epoch: int
) -> None:
    many = folder(tmp_path / "many", *range(9, 22))
    sources = {
        "one file": [source(folder(tmp_path / "one", 90))],
        "many files": [source(many)],
        "without features": [source(folder(tmp_path / "json", 15, 14, kind="json"))],
        "first examples": [source(many, max_examples=50)],
        "mixture": [source(many, weight=3.0), source(folder(tmp_path / "short", 4, 2))],
    }[case]
    built = build_dataset(sources, TOKENIZER, max_length=32, packing=False, seed=5, num_proc=0)
    built.set_epoch(epoch)
    found = texts(built)
    assert found == as_datasets_orders_them(sources, 5, epoch)
    assert len(found) >= 29


@pytest.fixture
def mixed(tmp_path: Path) -> Iterator[Any]:
    """Makes a mixture in which test items and bad rows come up; its records are new every time."""
    path = tmp_path / "b"
    parts = [source(folder(tmp_path / "a", 11, 13, 12), weight=2.0), source(folder(path, 20))]
    rows: list[dict[str, Any]] = [{"text": f"b 0 {row}"} for row in range(20)]
    rows[3] = {"text": None}
    rows[8] = {"text": "one two three four five six seven eight"}
    (path / "00.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    index = ItemIndex([Item("task", "1", ("One two three four five six seven eight.",))])

    def make(num_proc: int = 0) -> Any:
        return build_dataset(
            parts,
            TOKENIZER,
            max_length=32,
            packing=False,
            num_proc=num_proc,
            decontaminator=Decontaminator(index),
            bad_rows=BadRows("skip"),
        )

    yield make


def records(rows: Any) -> tuple[Any, ...]:
    return rows.decontaminator.summary(), rows.bad_rows.summary(), rows.bad_rows.listed()


def test_from_every_place_that_was_written_the_same_rows_and_records_follow(
    mixed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenized = 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal tokenized
        tokenized += 1
        return original(*args, **kwargs)

    original = dataset_module.tokenize_example
    monkeypatch.setattr(dataset_module, "tokenize_example", counted)
    first = EndlessRows(mixed(), 4, 32, "rows")
    rows = iter(first)
    expected = texts(islice(rows, 200))  # three epochs and a half
    at_the_end = records(first.rows)
    assert at_the_end[0]["num_left_out"] == 1 and at_the_end[1]["num_left_out"] == 1
    places = {}
    writer = EndlessRows(mixed(), 4, 32, "rows")
    for number, _ in enumerate(islice(writer, 190), 1):
        if number % 13 == 0:
            places[number] = tmp_path / str(number)
            places[number].mkdir()
            writer.save(places[number], number)
    for number, place in places.items():
        again = EndlessRows(mixed(), 4, 32, "rows")
        tokenized = 0
        assert again.seek(number, place) is None
        following = iter(again)
        assert texts(islice(following, 10)) == expected[number : number + 10]
        assert (
            tokenized <= 10 + 5 + 2 * 7
        )  # to the end of a pack, and pieces that begin before and end behind it
        if number == 13:
            list(islice(following, 200 - number - 10))
            assert records(again.rows) == at_the_end
    passed_over = EndlessRows(mixed(), 4, 32, "rows")  # as after a rewind, whose batches are not read again
    assert passed_over.seek(57, places[26]) is None
    assert texts(islice(passed_over, 5)) == expected[57:62]


def test_a_teacher_that_reads_ahead_is_shown_the_rows_of_the_next_batch(mixed: Any) -> None:
    rows = EndlessRows(mixed(), 4, 32, "rows")
    plain = texts(islice(rows, 6))
    shown: list[Any] = []
    rows.ahead = shown.append
    assert texts(islice(rows, 6)) == plain
    assert len(shown) >= 6 + 4 and texts(shown[:6]) == plain


def test_a_place_in_other_data_or_none_at_all_is_said_and_reached_by_reading(
    mixed: Any, tmp_path: Path
) -> None:
    rows = EndlessRows(mixed(), 4, 32, "rows")
    expected = texts(islice(rows, 60))
    other = build_dataset([source(folder(tmp_path / "c", 40))], TOKENIZER, max_length=32, num_proc=0)
    stranger = EndlessRows(other, 4, 32, "rows")
    list(islice(stranger, 5))
    stranger.save(tmp_path, 4)
    line = rows.seek(50, tmp_path)
    assert line is not None and "in a stream of other data" in line and "to row 50" in line
    assert texts(islice(rows, 10)) == expected[50:]
    (tmp_path / "stream.json").unlink()
    line = rows.seek(50, tmp_path)
    assert line is not None and "holds no place in the stream" in line
    assert texts(islice(rows, 10)) == expected[50:]


def test_another_version_of_datasets_finds_the_same_rows(mixed: Any, tmp_path: Path) -> None:
    rows = EndlessRows(mixed(), 4, 32, "rows")
    expected = texts(islice(rows, 50))
    rows.save(tmp_path, 40)
    position = read_position(tmp_path)
    for part in position["state"]["mixture"]["sources"]:
        for group in part["rows"]["files"]:
            group["datasets"] = "5.1.0"
    write_position(tmp_path, position)
    again = EndlessRows(mixed(), 4, 32, "rows")
    assert again.seek(40, tmp_path) is None
    assert texts(islice(again, 10)) == expected[40:]


def test_worker_processes_change_neither_rows_nor_records_and_end_with_the_rows(mixed: Any) -> None:
    alone, helped = mixed(0), mixed(3)
    assert texts(alone) == texts(helped)
    assert records(alone) == records(helped)
    rows = EndlessRows(helped, 4, 32, "rows")
    assert len(list(islice(rows, 5))) == 5
    begun = iter(rows)
    next(begun)
    assert len(multiprocessing.active_children()) == 3
    rows.close()
    assert multiprocessing.active_children() == []


def test_a_data_set_that_shuffles_by_itself_goes_on_in_its_own_order(tmp_path: Path) -> None:
    given = datasets.Dataset.from_dict({"text": [f"row {row}" for row in range(60)]}).to_iterable_dataset()
    given = given.shuffle(seed=3, buffer_size=9)

    def make() -> EndlessRows:
        rows = given_rows(given, TOKENIZER, name="train_dataset", max_length=16, packing=False, num_proc=0)
        return EndlessRows(rows, 4, 16, "rows")

    first = make()
    expected = texts(islice(first, 90))
    assert len({*expected[:60]}) == 60 and expected[:30] != expected[60:]
    first.save(tmp_path, 84)
    again = make()
    assert again.seek(84, tmp_path) is None
    assert texts(islice(again, 6)) == expected[84:]


def test_a_worker_that_is_killed_is_an_error_and_an_error_in_one_reaches_the_user() -> None:
    def work(piece: int) -> int:
        if piece == 3:
            os._exit(9)
        if piece == 7:
            raise UserError("piece 7: no chat template")
        return piece * piece

    pieces = ((None, piece) for piece in range(3))
    assert [result for _, _, result in in_order(work, pieces, 2)] == [0, 1, 4]
    with pytest.raises(UserError, match="a process that tokenizes has ended"):
        list(in_order(work, ((None, piece) for piece in range(5)), 2))
    with pytest.raises(UserError, match="piece 7: no chat template"):
        list(in_order(work, ((None, piece) for piece in (6, 7)), 2))
