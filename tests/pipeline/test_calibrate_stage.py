"""A calibration that is killed at its end is finished by the next start, and never
contains a model other than the one recorded.
"""

import json
import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fcsd.base.files import read_json
from fcsd.base.weights import weights_fingerprint
from fcsd.base.writing import write_json
from fcsd.cli.main import main
from fcsd.data import sources
from fcsd.pipeline import run as _imported_before_forks  # noqa: F401
from tests.kills import Places, state_of
from tests.support import (
    Bench,
    assert_killed,
    change_json,
    command_words,
    few,
    in_a_fork,
    make_bench,
)

# the arguments of a command that writes everything to one folder
Command = Callable[[Path], list[str]]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.jsonl"
    lines = [
        f"Line {n} of {n * n % 97} says {n % 7} more, and then {n * 31 % 89}."
        for n in range(200)
    ]
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def commands(
    base_checkpoint: Path, text: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Command]:
    """Return the stage of a recipe, whose distillation has no step; and the command on
    a checkpoint.
    """
    bench: Bench = make_bench(base_checkpoint, tmp_path_factory.mktemp("recipe"))
    source = {"path": str(text), "columns": {"text": "text"}}
    recipe = bench.recipe(
        "r",
        calibration={"tokens": 1500},
        data={"train": [source], "max_length": 64},
        train={
            "max_steps": 0, "batch_size_tokens": 128, "per_device_train_batch_size": 2, "learning_rate": 1e-3,
            "warmup_steps": 0,
        },
    )  # fmt: skip
    return {
        "stage": lambda folder: ["distill", str(recipe), "--set", f"output_dir={folder}"],
        "command": lambda folder: [
            "calibrate", str(base_checkpoint), str(folder / "out"), "--layers", "all", "--text", json.dumps(source),
            "--tokens", "1500", "--max-length", "64",
        ],
    }  # fmt: skip


def model_of(folder: Path) -> Path:
    return next(
        path
        for path in (folder / "out", folder / "calibrate" / "fcsd" / "model")
        if path.is_dir()
    )


@pytest.fixture(scope="module")
def whole(
    commands: dict[str, Command], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[str, list[str]]]:
    """Return by name the output of a command that is not killed, and its moments."""
    known: dict[str, tuple[str, list[str]]] = {}

    def of(name: str) -> tuple[str, list[str]]:
        if name not in known:
            folder = tmp_path_factory.mktemp("whole") / "run"
            folder.mkdir()

            def run() -> int:
                Places(folder, record=folder.with_name("moments")).watch()
                return main(commands[name](folder))

            output = folder.with_name("output")
            assert in_a_fork(run, output) == 0, output.read_text()
            assert "farskip_calibration" in read_json(model_of(folder) / "config.json")
            known[name] = (
                state_of(folder),
                folder.with_name("moments").read_text().splitlines(),
            )
        return known[name]

    return of


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("stage", "the renames"),
        pytest.param("stage", "all", marks=pytest.mark.breadth),
        pytest.param("command", "the last", marks=pytest.mark.breadth),
        pytest.param("command", "all", marks=pytest.mark.breadth),
    ],
)
def test_wherever_a_calibration_is_killed_the_next_start_leaves_the_same_bytes(
    name: str,
    part: str,
    commands: dict[str, Command],
    whole: Callable[[str], tuple[str, list[str]]],
    tmp_path: Path,
) -> None:
    expected, moments = whole(name)
    if part == "the renames":
        here = "calibrate/fcsd"
        moments = [
            f"before rename to {here}/partial/result.json, 1",  # all weights are hashed
            f"after rename to {here}/partial/result.json, 1",
            f"after rename to {here}/model, 1",
            f"within removal of {here}/.partial.RANDOM.old, 1",
        ]
    elif part == "the last":
        moments = [
            "after rename to out, 1",
            "within removal of .out.partial.RANDOM.old, 1",
        ]
    for number, moment in enumerate(moments):
        folder = tmp_path / str(number)
        folder.mkdir()

        def killed(folder: Path = folder, moment: str = moment) -> int:
            Places(folder, kill=moment).watch()
            return main(commands[name](folder))

        status = in_a_fork(killed, tmp_path / "output")
        assert status == -signal.SIGKILL, (moment, (tmp_path / "output").read_text())
        status = in_a_fork(
            lambda folder=folder: main(commands[name](folder)), tmp_path / "output"
        )
        assert status == 0, (moment, (tmp_path / "output").read_text())
        assert state_of(folder) == expected, moment
        shutil.rmtree(folder)


def cut_off(command: list[str], folder: Path, moment: str, output: Path) -> None:
    def killed() -> int:
        Places(folder, kill=moment).watch()
        return main(command)

    assert_killed(killed, output)


@pytest.mark.parametrize(
    "lost", few(["partial/model before the end", "model", "partial/model"], 1)
)
def test_a_cut_off_calibration_whose_model_was_removed_begins_again(
    lost: str,
    commands: dict[str, Command],
    whole: Callable[[str], tuple[str, list[str]]],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A newly converted model is not calibrated, whatever the notes left by the
    previous one say.
    """
    folder, stage = tmp_path / "run", tmp_path / "run" / "calibrate" / "fcsd"
    folder.mkdir()
    moment = {
        "model": "after rename to calibrate/fcsd/model, 1",
        "partial/model": "after rename to calibrate/fcsd/partial/result.json, 1",
    }.get(lost, "before rename to calibrate/fcsd/partial/result.json, 1")
    cut_off(commands["stage"](folder), folder, moment, tmp_path / "output")
    shutil.rmtree(stage / lost.split()[0])
    assert main(commands["stage"](folder)) == 0
    assert state_of(folder) == whole("stage")[0]
    said = capfd.readouterr().err
    assert (
        "is missing; starting again with the first layer"
        if "before" in lost
        else "differs from the calibrated model"
    ) in said


def test_a_calibration_whose_note_has_another_digit_begins_again(
    commands: dict[str, Command],
    whole: Callable[[str], tuple[str, list[str]]],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    folder, note = tmp_path / "run", "calibrate/fcsd/partial/result.json"
    folder.mkdir()
    moment = f"after rename to {note}, 1"
    cut_off(commands["stage"](folder), folder, moment, tmp_path / "output")
    record = read_json(folder / note)
    record["results"]["tokens"] += 1
    write_json(folder / note, record)
    assert main(commands["stage"](folder)) == 0
    assert state_of(folder) == whole("stage")[0]
    assert "differs from the calibrated model" in capfd.readouterr().err


def test_a_calibration_that_is_found_finished_is_as_it_was_written(
    commands: dict[str, Command], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words: list[Any] = commands["command"](tmp_path)
    assert main(words) == 0
    file = tmp_path / "out" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    capfd.readouterr()
    assert main(words) == 2
    assert (
        f"{tmp_path / 'out'}: is not what `fcsd calibrate` wrote"
        in capfd.readouterr().err
    )


def test_a_finished_calibration_without_its_model_is_refused_with_what_to_do(
    commands: dict[str, Command], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder, stage = tmp_path / "run", tmp_path / "run" / "calibrate" / "fcsd"
    assert main(commands["stage"](folder)) == 0
    shutil.rmtree(stage / "model")
    shutil.rmtree(folder / "distill")
    capfd.readouterr()
    assert main(commands["stage"](folder)) == 2
    message = capfd.readouterr().err
    assert (
        f"{stage}/model: no such file, though manifest.json names it; restore it, or remove {stage}"
        in message
    )


def test_the_same_command_finds_its_calibration_finished_and_another_one_refuses_the_folder(
    commands: dict[str, Command], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words: list[Any] = commands["command"](tmp_path)
    assert main(words) == 0
    before = weights_fingerprint(tmp_path / "out"), os.stat(tmp_path / "out").st_ino
    capfd.readouterr()
    assert main(words) == 0
    assert (
        f"calibrate: finished before, in {tmp_path / 'out'}" in capfd.readouterr().err
    )
    assert before == (
        weights_fingerprint(tmp_path / "out"),
        os.stat(tmp_path / "out").st_ino,
    )
    assert main([*words[:-3], "1400", *words[-2:]]) == 2
    assert (
        "exists and is not empty; choose another destination" in capfd.readouterr().err
    )
    assert before == (
        weights_fingerprint(tmp_path / "out"),
        os.stat(tmp_path / "out").st_ino,
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--tokens", "100"],
            "calibration.tokens (--tokens): 100 are too few; give at least",
        ),
        (["--layers", "0", "--mlp", "full"], "change nothing: attention reads another"),
        (["--layers", "0", "--mlp", "1"], "mlp: layer 1 is not rewired"),
        (["--layers", "none"], "so there is nothing to calibrate"),
    ],
)
def test_what_cannot_be_calibrated_is_refused_before_the_text_is_read(
    base_checkpoint: Path,
    text: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
) -> None:
    command = command_words(
        "calibrate", base_checkpoint, tmp_path / "out", "--text", text
    )
    assert main([*command, *words]) == 2
    printed = capsys.readouterr().err
    assert message in printed.strip().splitlines()[-1]
    assert "examples" not in printed
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("kind", ["stage", "command"])
def test_a_stream_is_read_as_far_as_the_calibration_needs(
    commands: dict[str, Command],
    kind: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sources, "WHOLE_BYTES", 0)
    assert main(commands[kind](tmp_path)) == 0
    said = capsys.readouterr().err
    (tokens,) = re.findall(r"calibrate: ([\d,]+) tokens", said)
    assert 1500 <= int(tokens.replace(",", "")) < 1500 + 64


def test_tensors_that_do_not_fit_are_refused_before_the_text_is_read(
    base_checkpoint: Path,
    text: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(base_checkpoint, damaged)
    change_json(damaged / "config.json", {"moe_intermediate_size": 8})
    command = command_words("calibrate", damaged, tmp_path / "out", "--text", text)
    assert main(command) == 2
    printed = capsys.readouterr().err
    assert "has shape" in printed.strip().splitlines()[-1]
    assert "examples" not in printed
