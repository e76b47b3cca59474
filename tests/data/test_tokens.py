"""Tokens on disk: every source is read once, a kill costs one shard, and the order is
that of `datasets`.
"""

import errno
import itertools
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest

from fcsd.base.errors import UserError
from fcsd.cli.main import main
from fcsd.data import rendering, rows, sources, tokens, write_rows
from fcsd.data.config import SourceConfig
from fcsd.data.dataset import build_dataset, given_rows
from fcsd.data.decontaminate import Decontaminator, Item, ItemIndex
from fcsd.data.local import data_fingerprint
from fcsd.data.sources import open_source
from fcsd.data.write_rows import BadRows, in_order
from fcsd.model.load import load_tokenizer
from fcsd.parallel.launch import join_launch
from fcsd.pipeline.context import Run
from fcsd.pipeline.rows import _folder_names as folder_names
from fcsd.pipeline.rows import training_rows
from fcsd.recipe.load_recipe import load_recipe
from tests.data.test_data import make_tokenizer
from tests.kills import Places
from tests.reference.ranks import run_ranks
from tests.support import Bench, assert_killed, end_if_it_hangs, few, user_error

TOKENIZER = make_tokenizer()


@pytest.fixture(autouse=True)
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make pieces so small that a hundred examples fill several of them."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(write_rows, "PIECE_EXAMPLES", 6)
    monkeypatch.setattr(write_rows, "_BLOCK", 3)


def folder(path: Path, *lengths: int) -> str:
    """Return files with this many short texts, all different."""
    path.mkdir()
    for file, length in enumerate(lengths):
        lines = [
            json.dumps({"text": f"{path.name} {file} {row}"}) + "\n"
            for row in range(length)
        ]
        (path / f"{file:02}.jsonl").write_text("".join(lines))
    return str(path)


def source(path: str, **values: Any) -> SourceConfig:
    return SourceConfig(path=path, columns={"text": "text"}, **values)


def texts(built: Any) -> list[str]:
    """Return the texts of unpacked rows."""
    said = []
    for row in built:
        ids = np.asarray(row["input_ids"])
        said.append(TOKENIZER.decode(ids[: list(ids).index(TOKENIZER.eos_token_id)]))
    return said


def files(root: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("weights", [[1.0], [3.0, 1.0], [1.0, 2.0, 0.5]])
def test_the_order_is_that_in_which_datasets_shuffles_and_mixes(
    tmp_path: Path, weights: list[float], shuffle: bool
) -> None:
    parts = [
        source(folder(tmp_path / f"s{n}", 40 + n, 7), weight=each)
        for n, each in enumerate(weights)
    ]
    expected = []
    for part in parts:
        lines = [
            line
            for file in sorted(Path(part.path).iterdir())
            for line in file.read_text().splitlines()
        ]
        plain = datasets.Dataset.from_list([json.loads(line) for line in lines])
        expected.append(plain.shuffle(seed=5) if shuffle else plain)
    mixed = expected[0]
    if len(parts) > 1:
        shares = [each / sum(weights) for each in weights]
        mixed = datasets.interleave_datasets(
            expected, shares, seed=5, stopping_strategy="all_exhausted"
        )
    built = build_dataset(
        parts,
        TOKENIZER,
        max_length=32,
        packing=False,
        seed=5,
        shuffle=shuffle,
        num_proc=1,
    )
    assert texts(built) == mixed["text"]


@pytest.fixture
def mixed(tmp_path: Path) -> Iterator[Any]:
    """Makes a mixture in which test items and bad rows come up; its records are new every time."""
    path = tmp_path / "b"
    parts = [
        source(folder(tmp_path / "a", 41, 53, 12), weight=2.0),
        source(folder(path, 20)),
    ]
    lines: list[dict[str, Any]] = [{"text": f"b 0 {row}"} for row in range(20)]
    lines[3] = {"text": None}
    lines[8] = {"text": "one two three four five six seven eight"}
    (path / "00.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    index = ItemIndex(
        [Item("task", "1", ("One two three four five six seven eight.",))]
    )

    def make(
        place: Path | None = None, num_proc: int = 1, **layout: Any
    ) -> tuple[Any, Any]:
        decontaminator, bad = Decontaminator(index), BadRows("skip")
        options: dict[str, Any] = {
            "max_length": 32, "decontaminator": decontaminator, "bad_rows": bad, **layout,
        }  # fmt: skip
        if place is not None:
            options["place"] = (place, ["a", "b"])
        built = build_dataset(parts, TOKENIZER, num_proc=num_proc, **options)
        return built, (
            decontaminator.summary(),
            bad.summary(),
            bad.listed(),
            built.record,
        )

    yield make


def test_worker_processes_change_neither_files_nor_records_and_end(
    mixed: Any, tmp_path: Path
) -> None:
    alone, helped = (
        mixed(tmp_path / f"tokens{number}", number)[1] for number in (1, 3)
    )
    assert alone == helped
    assert alone[0]["num_left_out"] == 1
    assert alone[1] == {"num_examples": 125, "num_left_out": 1}
    assert files(tmp_path / "tokens1") == files(tmp_path / "tokens3")
    assert multiprocessing.active_children() == []


@pytest.mark.breadth
def test_kills_at_random_moments_leave_the_same_bytes(
    mixed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = tokens.write_tokens

    def slow(*arguments: Any) -> None:
        time.sleep(0.02)
        write(*arguments)

    monkeypatch.setattr(tokens, "write_tokens", slow)
    whole, record = mixed(tmp_path / "whole")
    chooser, kills, status = random.Random(0), 0, -1
    while status != 0:
        if (child := os.fork()) == 0:
            end_if_it_hangs()
            try:
                mixed(tmp_path / "killed", 2)
                os._exit(0)
            finally:
                os._exit(1)
        if kills < 20:
            time.sleep(chooser.uniform(0.02, 0.4))
            os.kill(child, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        kills += 1
        assert kills < 25
    built, again = mixed(tmp_path / "killed")
    assert texts(built) == texts(whole) and again[3] == record[3]
    assert files(tmp_path / "killed") == files(tmp_path / "whole")  # hidden ones, too


def test_a_killed_writer_of_tokens_leaves_one_file_which_the_next_one_removes(
    tmp_path: Path,
) -> None:
    file, arrays = (
        tmp_path / "tokens" / "0.safetensors",
        {"ids": np.arange(4, dtype=np.int32)},
    )
    file.parent.mkdir()

    def killed() -> int:
        Places(file.parent, kill="before rename to 0.safetensors, 1").watch()
        rows.write_arrays(file, arrays, {})
        return 0

    assert_killed(killed, tmp_path / "output")
    (left,) = file.parent.iterdir()
    assert left.name.startswith(".0.safetensors.")
    before = os.umask(0o027)
    try:
        rows.write_arrays(file, arrays, {"a": 1})
    finally:
        os.umask(before)
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    assert oct(file.stat().st_mode)[-3:] == "640"
    assert rows.Shard(file).record == {"a": 1}
    assert rows.Shard(file).array("ids").tolist() == [0, 1, 2, 3]


def test_what_was_written_before_a_kill_is_not_tokenized_again(
    mixed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, written = tokens.write_tokens, 0

    def counted(*arguments: Any) -> None:
        nonlocal written
        if written == 9:
            raise KeyboardInterrupt
        written += 1
        write(*arguments)

    monkeypatch.setattr(tokens, "write_tokens", counted)
    with pytest.raises(KeyboardInterrupt):
        mixed(tmp_path / "tokens")
    written = 100
    built, record = mixed(tmp_path / "tokens")
    in_all = len([*(tmp_path / "tokens").rglob("0*.safetensors")])
    assert written - 100 == in_all - 9 > 9
    monkeypatch.setattr(write_rows, "open_source", lambda *_: pytest.fail("read again"))
    assert texts(mixed(tmp_path / "tokens")[0]) == texts(built)
    for path in (tmp_path / "tokens").glob("rows-*"):
        path.unlink()  # another seed would make other rows of the same tokens
    assert mixed(tmp_path / "tokens")[1] == record


@pytest.mark.parametrize("damage", ["cut", "gone"])
@pytest.mark.parametrize("name", ["a/00003", "a/00000", "b/00001", "rows-", "a/0"])
@pytest.mark.parametrize("with_rows", few([True, False], 1))
def test_tokens_that_are_cut_or_gone_are_made_anew(
    mixed: Any,
    tmp_path: Path,
    damage: str,
    name: str,
    with_rows: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    place = tmp_path / "tokens"
    built, record = mixed(place)
    before = files(place)
    if not with_rows:
        next(place.glob("rows-*")).unlink()
    for file in place.glob(f"{name}*.safetensors"):
        file.unlink() if damage == "gone" else os.truncate(
            file, file.stat().st_size // 2
        )
    again, new_record = mixed(place)
    assert (
        files(place) == before and texts(again) == texts(built) and new_record == record
    )
    assert ("is damaged; fcsd writes it again" in capsys.readouterr().err) == (
        damage == "cut" and (with_rows or name != "rows-")
    )


def test_tokens_that_vanish_under_a_training_are_one_line(
    mixed: Any, tmp_path: Path
) -> None:
    built, _ = mixed(tmp_path / "tokens")
    shard = next((tmp_path / "tokens" / "a").glob("*.safetensors"))
    shard.unlink()
    with user_error(
        r"a/0.*\.safetensors: is damaged or gone .*run the same command again"
    ):
        texts(built)


def test_what_a_kill_in_the_middle_of_a_shard_leaves_is_swept_when_it_is_written_again(
    tmp_path: Path,
) -> None:
    path = tmp_path / "tokens" / "00000.safetensors"
    path.parent.mkdir()
    if (child := os.fork()) == 0:
        end_if_it_hangs()
        try:
            rows.write_arrays(path, {"ids": np.ones(1 << 25, np.int32)}, {})
        finally:
            os._exit(0)
    while not any(file.stat().st_size > 1 << 20 for file in path.parent.iterdir()):
        assert os.waitpid(child, os.WNOHANG)[0] == 0, (
            "was written before it could be killed"
        )
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert not path.exists()
    rows.write_arrays(path, {"ids": np.ones(3, np.int32)}, {})
    assert [file.name for file in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("place", ["file", "in a folder", "/dev/zero"])
def test_data_that_never_end_are_refused(tmp_path: Path, place: str) -> None:
    path = tmp_path / "a" / "0.jsonl"
    path.parent.mkdir()
    if place == "/dev/zero":
        path.symlink_to(place)
    else:
        os.mkfifo(path)
    given = path.parent if place == "in a folder" else path
    for read in (
        lambda path: build_dataset([source(path)], TOKENIZER, max_length=8),
        data_fingerprint,
    ):
        with user_error(
            r"0\.jsonl: is a (named pipe|device), a regular file is needed"
        ):
            read(str(given))


def _damage(path: Path, kind: str) -> None:
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little") + 8
    if kind == "an id":
        data = data[: size + 8] + bytes([data[size + 8] ^ 1]) + data[size + 9 :]
    elif kind == "the record":
        place = data.index(b"num_rows") + len(b'num_rows\\": ')
        data = data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("a/00002.safetensors", "an id"),
        ("rows-*.safetensors", "an id"),
        ("b/00000.safetensors", "the record"),
        ("a/00000.safetensors", "another shard"),
        ("b/00000.safetensors", "another source's"),
        ("rows-*.safetensors", "another run's"),
    ],
)
def test_damaged_tokens_and_rows_are_written_again_with_a_line_and_the_same_bytes(
    mixed: Any, tmp_path: Path, name: str, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "tokens"
    built, record = mixed(place)
    said, before = texts(built), files(place)
    (path,) = place.glob(name)
    others = {
        "another shard": "a/00001.safetensors",
        "another source's": "a/00000.safetensors",
    }
    if kind in others:
        shutil.copy(place / others[kind], path)
    elif kind == "another run's":
        mixed(tmp_path / "another", seed=1)
        shutil.copy(next((tmp_path / "another").glob(name)), path)
    else:
        _damage(path, kind)
    capsys.readouterr()
    again, after = mixed(place)
    assert f"{path}: is damaged; fcsd writes it again" in capsys.readouterr().err
    assert texts(again) == said and files(place) == before and after == record
    mixed(place)
    assert "damaged" not in capsys.readouterr().err


def test_a_wrong_number_of_shards_is_noticed(mixed: Any, tmp_path: Path) -> None:
    built, _ = mixed(tmp_path / "tokens")
    said, before = texts(built), files(tmp_path / "tokens")
    (tmp_path / "tokens/a/end.json").write_text('{"shards": 1}')
    for path in (tmp_path / "tokens").glob("rows-*"):
        path.unlink()
    assert texts(mixed(tmp_path / "tokens")[0]) == said
    assert files(tmp_path / "tokens") == before


def test_tokenizers_that_differ_in_anything_but_their_vocabulary_share_no_tokens(
    bench: Bench,
) -> None:
    from tokenizers import normalizers

    run = Run(load_recipe(bench.recipe("r")), join_launch())
    inputs = {"data.train.0": "x"}
    tokenizer = load_tokenizer(bench.base)
    before = folder_names(run.recipe.data, tokenizer, None, inputs)
    tokenizer("a", padding="max_length", truncation=True, max_length=7)
    assert folder_names(run.recipe.data, tokenizer, None, inputs) == before
    assert (
        folder_names(run.recipe.data, load_tokenizer(bench.base), None, inputs)
        == before
    )
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    assert folder_names(run.recipe.data, tokenizer, None, inputs) != before


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat no source as small enough to be tokenized whole."""
    monkeypatch.setattr(sources, "WHOLE_BYTES", 0)


@pytest.mark.usefixtures("large")
def test_of_a_large_source_as_much_is_written_as_a_training_needs(
    tmp_path: Path,
) -> None:
    parts = [
        source(folder(tmp_path / "a", 90, 90, 90), weight=3.0),
        source(folder(tmp_path / "b", 200)),
    ]
    place = tmp_path / "tokens", ["a", "b"]
    options: dict[str, Any] = {
        "max_length": 32, "packing": False, "place": place, "num_proc": 1,
    }  # fmt: skip
    built = build_dataset(parts, TOKENIZER, num_rows=40, **options)
    assert len(built) == 40
    said = texts(built)
    assert len({*said}) == 40 and 24 <= sum(text.startswith("a") for text in said) <= 36
    number = {name: len([*(place[0] / name).iterdir()]) for name in ("a", "b")}
    assert 5 <= number["a"] <= 9
    assert 2 <= number["b"] <= 4
    assert not [*place[0].rglob("end.json")]
    before = {
        path: path.stat().st_mtime_ns for path in place[0].rglob("0*.safetensors")
    }
    more = build_dataset(parts, TOKENIZER, num_rows=300, **options)
    assert len(more) == 300 and len({*texts(more)}) >= 280
    assert all(path.stat().st_mtime_ns == time for path, time in before.items())
    # More than the sources have: all of them are read, the shorter one repeatedly, as
    # when sources are tokenized whole.
    everything = build_dataset(parts, TOKENIZER, num_rows=10_000, **options)
    every = [f"a {file} {row}" for file in range(3) for row in range(90)]
    assert {*texts(everything)} == {*every, *(f"b 0 {row}" for row in range(200))}
    assert len([*place[0].rglob("end.json")]) == 2


def test_a_stream_without_an_end_is_read_as_far_as_it_is_needed() -> None:
    given = 0

    def forever() -> Iterator[dict[str, str]]:
        nonlocal given
        for given in itertools.count():
            yield {"text": f"row {given}"}

    stream = datasets.IterableDataset.from_generator(forever)
    built = given_rows(
        stream,
        TOKENIZER,
        name="train_dataset",
        max_length=16,
        packing=False,
        num_rows=50,
        num_proc=1,
    )
    assert len(built) == 50
    assert {*texts(built)} <= {f"row {number}" for number in range(54)}
    assert given < 70


def test_a_data_set_that_shuffles_by_itself_gives_all_its_rows() -> None:
    stream = datasets.Dataset.from_dict(
        {"text": [f"row {row}" for row in range(60)]}
    ).to_iterable_dataset()
    shuffled = stream.shuffle(seed=3, buffer_size=9)
    built = given_rows(
        shuffled, TOKENIZER, name="train_dataset", max_length=16, packing=False
    )
    assert sorted(texts(built)) == sorted(f"row {row}" for row in range(60))


def test_tokens_are_shared_by_what_the_trainings_of_a_recipe_differ_in(
    bench: Bench, capsys: Any
) -> None:
    variants = {
        "sft": {"objective.name": "sft"},
        "long": {"data.max_length": 64, "train.batch_size_tokens": 256},
        "seed": {"seed": 3},
        "all": {"data.loss_on": "all"},
    }
    command = [str(bench.recipe("r", variants=variants))]
    assert main(["run", *command, "--only", "tokenize"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[0] for line in lines] == [
        "data",
        *(f"variants.{name}" for name in ("all", "long", "seed")),
    ]
    tokens = bench.folder / "r" / "tokens"
    assert f"60 rows of 32 tokens, in {tokens}" in lines[0]
    # what is said, and all
    assert len([path for path in tokens.iterdir() if path.is_dir()]) == 2
    before = files(tokens)
    assert main(["distill", *command]) == 0
    assert main(["distill", *command, "--variant", "long"]) == 0
    assert files(tokens) == before
    bench.rows.write_text(
        bench.rows.read_text() + bench.rows.read_text().splitlines()[0] + "\n"
    )
    assert main(["run", *command, "--only", "tokenize"]) == 0
    assert len([path for path in tokens.iterdir() if path.is_dir()]) == 4


def _rows_of_a_rank(rank: int, path: str) -> list[list[int]]:
    from accelerate.state import AcceleratorState

    # the parent may have run alone before
    AcceleratorState._reset_state(reset_partial_state=True)
    return _rows_of(path)


def _rows_of(path: str) -> list[list[int]]:
    run = Run(load_recipe(Path(path)), join_launch())
    rows = training_rows(run.recipe.data, load_tokenizer(run.recipe.model.path), run)
    return [row["input_ids"].tolist() for row in rows]


def test_two_ranks_and_one_read_the_same_rows(bench: Bench) -> None:
    one, other = run_ranks(_rows_of_a_rank, 2, str(bench.recipe("two")))
    assert one == other == _rows_of(str(bench.recipe("one"))) and len(one) == 60


def test_tokens_that_a_run_writes_on_another_day_have_the_day_of_its_first(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def on_day(day: int, name: str, loss_on: str) -> str:
        monkeypatch.setattr(rendering, "BEGAN", datetime(2026, 11, day))
        data = {
            "train": [{"path": str(bench.rows)}],
            "max_length": 64,
            "loss_on": loss_on,
        }
        run = Run(load_recipe(bench.recipe(name, data=data)), join_launch())
        tokenizer = load_tokenizer(run.recipe.model.path)
        tokenizer.chat_template = "{{ strftime_now('%d') }}: " + tokenizer.chat_template
        rows = training_rows(run.recipe.data, tokenizer, run)
        return str(tokenizer.decode(rows[0]["input_ids"])).split(":")[0]

    assert on_day(24, "one", "response") == on_day(25, "one", "all") == "24"
    assert on_day(25, "another", "response") == "25"
    assert not (bench.folder / "r" / "tokens" / "date.json").exists()


def test_a_worker_that_is_killed_is_an_error_and_an_error_in_one_reaches_the_user():
    def work(piece: int) -> int:
        if piece == 3:
            os._exit(9)
        if piece == 7:
            raise UserError("piece 7: no chat template")
        return piece * piece

    assert [result for _, result in in_order(work, iter(range(3)), 2)] == [0, 1, 4]
    with user_error("a tokenizing process has ended"):
        list(in_order(work, iter(range(5)), 2))
    with user_error("piece 7: no chat template"):
        list(in_order(work, iter((6, 7)), 2))


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.ENOENT])
def test_a_machine_without_shared_memory_is_refused_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def no_place(*args: Any, **options: Any) -> Any:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("_multiprocessing.SemLock", no_place)
    file = tmp_path / "rows.jsonl"
    file.write_text('{"text": "a"}\n')
    for call in (
        lambda: list(in_order(str, iter(range(3)), 2)),
        lambda: open_source(SourceConfig(path=str(file))),
    ):
        with user_error(r"^/dev/shm: cannot be written \(.*make it writable"):
            call()
    assert list(in_order(str, iter(range(2)), 1)) == [(0, "0"), (1, "1")]


def _peak_mb(call: Callable[[], Any]) -> float:
    """Return the peak main memory in MB that a fork and its workers need for a call."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        end_if_it_hangs()
        try:
            call()
            most = [
                resource.getrusage(who).ru_maxrss
                for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
            ]
            os.write(writer, str(max(most)).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return int(text) / 1024


def test_memory_does_not_grow_with_the_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tenth of two million tokens, and all of them; in memory they would take 12
    bytes each, 22 MB more.
    """
    monkeypatch.setattr(write_rows, "PIECE_EXAMPLES", 256)
    monkeypatch.setattr(write_rows, "_BLOCK", 256)
    line = json.dumps({"text": "abcd efgh " * 20}) + "\n"
    for name, number in (("few", 1), ("many", 10)):
        (tmp_path / f"{name}-data").mkdir()
        for file in range(number):  # `datasets` reads 10 MB of a file at a time
            (tmp_path / f"{name}-data" / f"{file}.jsonl").write_text(line * 1000)

    def build(name: str) -> Callable[[], Any]:
        part, place = source(str(tmp_path / f"{name}-data")), (tmp_path / name, ["a"])
        return lambda: build_dataset(
            [part], TOKENIZER, max_length=512, num_proc=1, place=place
        )

    few, many = _peak_mb(build("few")), _peak_mb(build("many"))
    written = rows.PackedRows(next((tmp_path / "many").glob("rows-*")))
    assert sum(int((row["labels"] != -100).sum()) for row in written) > 1_900_000
    assert many < few + 12
