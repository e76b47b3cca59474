"""Temporary folders: who owns them, and what happens to those whose owner was
killed.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from fcsd.base import writing
from fcsd.base.artifact import Stage
from fcsd.base.errors import ScorerError
from fcsd.base.files import read_json
from fcsd.base.writing import (
    beside,
    file_beside,
    new_folder,
    scratch_folder,
    write_text,
)
from fcsd.cli.main import main
from fcsd.evaluation.code import scorer
from fcsd.model.connectivity import Connectivity, convert_checkpoint
from tests.kills import Places
from tests.reference.tiny import tiny_model
from tests.support import ROOT, command_words, in_a_fork


def killed_in(work: Callable[[], object], place: Path) -> None:
    """Run `work` in a fork that is killed where it calls `die`."""
    assert in_a_fork(lambda: work() or 0, place / "output") == -signal.SIGKILL, (
        place / "output"
    ).read_text()
    (place / "output").unlink()


def die(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_what_a_killed_writer_left_is_removed_by_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half() -> None:
        with new_folder(tmp_path / "model") as folder:
            (folder / "half").write_text("x")
            die()

    def half_file() -> None:
        monkeypatch.setattr(os, "replace", die)
        write_text(tmp_path / "file.json", "new")

    killed_in(half, tmp_path)
    killed_in(half_file, tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
    with new_folder(tmp_path / "model"):
        pass
    write_text(tmp_path / "file.json", "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file.json", "model"]


def test_a_writer_killed_when_its_file_has_its_name_leaves_nothing_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A finished stage does not write its manifest again, so no later writer would
    clean up.
    """
    rename = os.replace

    def finished() -> None:
        monkeypatch.setattr(os, "replace", lambda *names: (rename(*names), die()))
        Stage(tmp_path, "convert", {}, {}).finish({})

    killed_in(finished, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]
    assert Stage(tmp_path, "convert", {}, {}).state() == "finished"
    old = os.umask(0o027)
    write_text(tmp_path / "for the group", "x")
    os.umask(old)
    assert oct((tmp_path / "for the group").stat().st_mode)[-3:] == "640"


def test_a_living_writers_file_is_not_swept_and_a_dead_ones_folder_of_before_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half() -> None:
        with beside(tmp_path / "a.json"):  # how files were written in the past
            die()

    killed_in(half, tmp_path)
    assert len(list(tmp_path.iterdir())) == 1
    with file_beside(tmp_path / "a.json") as mine:
        write_text(tmp_path / "a.json", "theirs")
        assert mine.is_file() and len(list(tmp_path.iterdir())) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_a_killed_conversion_leaves_nothing_once_it_is_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_model("mixtral").save_pretrained(tmp_path / "base")

    def convert() -> None:
        convert_checkpoint(tmp_path / "base", tmp_path / "far", Connectivity("all"))

    with monkeypatch.context() as patched:
        patched.setattr("fcsd.model.connectivity.export.carry_over", die)
        killed_in(convert, tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
    convert()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "far"]


def test_a_conversion_that_has_its_name_says_what_it_was_made_from(
    tmp_path: Path,
) -> None:
    tiny_model("mixtral").save_pretrained(tmp_path / "base")
    words = command_words(
        "convert", tmp_path / "base", tmp_path / "far", "--layers all"
    )

    def convert() -> int:
        Places(tmp_path, kill="after rename to far, 1").watch()
        return main(words)

    killed_in(convert, tmp_path)
    manifest = read_json(tmp_path / "far" / "manifest.json")
    assert manifest["stage"] == "convert"
    assert manifest["results"]["layers"] == [0, 1, 2, 3]
    assert manifest["settings"]["model"]["path"] == words[1]


def test_a_living_owner_keeps_its_folder_whatever_its_process_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In two containers that share a disk, both processes may have PID 1."""
    monkeypatch.setattr(os, "getpid", lambda: 1)
    with new_folder(tmp_path / "model") as first:
        (first / "mine").write_text("x")
        with pytest.raises(ZeroDivisionError), new_folder(tmp_path / "model") as second:
            assert second != first
            1 / 0  # noqa: B018
        assert (first / "mine").read_text() == "x"
        with new_folder(tmp_path / "model") as third:
            (third / "theirs").write_text("x")
    # the last to end
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["mine"]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_folder_taken_for_a_dead_ones_before_its_lock_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, taken = os.open, []

    def swept(path: Path, *arguments: int, **options: int) -> int:
        if not taken:
            taken.append(path)
            shutil.rmtree(path)
        return opened(path, *arguments, **options)

    monkeypatch.setattr(writing.os, "open", swept)
    with beside(tmp_path / "model") as folder:
        assert folder.is_dir() and taken != [folder]


def test_what_another_host_left_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its owner may still run: a lock held on another machine is not visible here."""

    def half() -> None:
        with beside(tmp_path / "model"):
            die()

    with monkeypatch.context() as patched:
        patched.setattr(writing.socket, "gethostname", lambda: "elsewhere")
        killed_in(half, tmp_path)
    with new_folder(tmp_path / "model"):
        pass
    assert len(list(tmp_path.iterdir())) == 2


def test_the_cache_of_a_killed_process_goes_with_the_next_process(
    tmp_path: Path,
) -> None:
    code = (
        "import sys, time\nfrom fcsd.data.local import fresh_cache\n"
        + "with fresh_cache(sys.argv[1]):\n    print('in', flush=True)\n   "
        " time.sleep(float(sys.argv[2]))\n"
    )

    def reader(seconds: int) -> subprocess.Popen[str]:
        environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", code, str(ROOT / "recipes"), str(seconds)]
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None and process.stdout.readline() == "in\n"
        process.stdout.close()
        return process

    killed, living = reader(600), reader(600)
    assert len(list(tmp_path.glob("fcsd-data*"))) == 2
    killed.kill()
    killed.wait()
    third = reader(0)
    assert third.wait() == 0
    (left,) = tmp_path.glob("fcsd-data*")  # of the one that lives
    assert str(living.pid) in left.name and oct(left.stat().st_mode)[-3:] == "700"
    living.kill()
    living.wait()


def test_a_command_that_needs_no_folder_removes_those_of_killed_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example after an evaluation that was killed when everything was written: the
    next one finds it finished.
    """
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def work() -> None:
        with scratch_folder("fcsd-data"), scratch_folder("fcsd-task"):
            die()

    killed_in(work, tmp_path)
    (tmp_path / "fcsd-own-notes").mkdir()
    with scratch_folder("fcsd-push") as living:
        assert len(list(tmp_path.iterdir())) == 4
        assert main(["families"]) == 0
        assert sorted(tmp_path.iterdir()) == sorted(
            [tmp_path / "fcsd-own-notes", living]
        )


def test_a_sandbox_that_cannot_start_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def refused(*arguments: object, **options: object) -> None:
        raise OSError("no more processes")

    monkeypatch.setattr(subprocess, "Popen", refused)
    with (
        pytest.raises(ScorerError, match="no more processes"),
        scorer.CodeScorer(num_workers=1),
    ):
        pass
    assert list(tmp_path.iterdir()) == []
