"""Checkpoints that are written while the training continues: they belong to the step in
their name, or do not exist.
"""

import errno
import os
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fcsd.base import memory
from fcsd.base.artifact import Stage
from fcsd.base.files import read_json
from fcsd.base.memory import available_memory
from fcsd.cli.main import main
from fcsd.parallel.launch import ALONE
from fcsd.parallel.state import StateFile
from fcsd.training import checkpoint_writer as writer_module
from fcsd.training.checkpoint_writer import CheckpointWriter
from fcsd.training.checkpoints import checkpoints, damage
from fcsd.training.config import MAY_CHANGE
from fcsd.training.trainer import DistillTrainer
from tests.reference.ranks import run_ranks
from tests.support import (
    Bench,
    assert_killed,
    command_words,
    few,
    in_forked_ranks,
    trained_weights,
)


@pytest.fixture
def background(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "BACKGROUND_FROM", 0)


def stopped_at(
    monkeypatch: pytest.MonkeyPatch,
    step: int,
    then: Callable[[Any], None] | None = None,
) -> None:
    """Send Ctrl-C in the step after `step`, once `then` has run."""
    compute = DistillTrainer.compute_loss

    def stopped(self: Any, *args: Any, **kwargs: Any) -> Any:
        if then is not None:
            then(self)
        if self.state.global_step == step:
            raise KeyboardInterrupt
        return compute(self, *args, **kwargs)

    monkeypatch.setattr(DistillTrainer, "compute_loss", stopped)


def stored(bench: Bench, name: str) -> dict[str, bytes]:
    """Return the content of checkpoint-4 without times; safetensors writes the metadata
    of a header in any order.
    """
    folder = bench.folder / name / "distill" / "checkpoints" / "checkpoint-4"
    content = {
        file: (folder / file).read_bytes()
        for file in read_json(folder / "files.json").keys() - {"sha256"}
    }
    tensors = load_file(folder / "state-00001-of-00001.safetensors")
    for other in ("trainer_state.json", "state-00001-of-00001.safetensors"):
        del content[other]
    return content | {key: tensor.numpy().tobytes() for key, tensor in tensors.items()}


def test_a_checkpoint_has_the_state_of_its_step_however_much_later_it_is_written(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        stopped_at(patch, 7)
        assert main(["distill", str(bench.recipe("waiting"))]) == 130
    monkeypatch.setattr(writer_module, "BACKGROUND_FROM", 0)
    opened, write = threading.Event(), StateFile.write
    # at the beginning of a step: whether the writer is at work, and which files exist
    seen: dict[int, tuple[bool, list[str]]] = {}

    def late(self: StateFile, folder: Path) -> dict[str, Any]:
        assert opened.wait(60)
        return write(self, folder)

    def look(trainer: Any) -> None:
        step, writer = trainer.state.global_step, trainer.checkpoint_writer
        names = [path.name for path in checkpoints(Path(trainer.args.output_dir))]
        seen.setdefault(step, (writer.is_writing, names))
        if step == 6:
            opened.set()
            writer._thread.join()

    with monkeypatch.context() as patch:
        patch.setattr(StateFile, "write", late)
        stopped_at(patch, 7, look)
        assert main(["distill", str(bench.recipe("going-on"))]) == 130
    assert seen[3] == (False, []) and seen[4] == seen[5] == seen[6] == (True, [])
    assert seen[7] == (False, ["checkpoint-4"])  # in the step in which all are done
    assert stored(bench, "going-on") == stored(bench, "waiting")
    folder = bench.folder / "going-on" / "distill"
    record = read_json(folder / "stage.json")
    owner = Stage(
        folder, "distill", record["settings"], record["inputs"], MAY_CHANGE
    ).identity
    assert damage(folder / "checkpoints" / "checkpoint-4", ALONE, owner) is None
    for name in ("going-on", "waiting"):
        assert main(["distill", str(bench.recipe(name))]) == 0
    assert trained_weights(bench, "going-on") == trained_weights(bench, "waiting")


@pytest.mark.usefixtures("background")
def test_the_next_checkpoint_and_the_end_wait_for_the_one_before(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits, write, finish = threading.Event(), StateFile.write, CheckpointWriter.finish
    seen: list[int | str] = []

    def late(self: StateFile, folder: Path) -> dict[str, Any]:
        assert waits.wait(60)
        waits.clear()
        seen.append(folder.name)
        return write(self, folder)

    def waiting(self: CheckpointWriter) -> None:
        if self.is_writing:
            waits.set()
        finish(self)

    def look(trainer: Any, model: Any, trial: Any) -> None:
        seen.append(trainer.state.global_step)
        save(trainer, model, trial)

    save = DistillTrainer._save_checkpoint
    monkeypatch.setattr(DistillTrainer, "_save_checkpoint", look)
    monkeypatch.setattr(StateFile, "write", late)
    monkeypatch.setattr(CheckpointWriter, "finish", waiting)
    assert main(["distill", str(bench.recipe("r"))]) == 0
    assert seen == [4, 8, "checkpoint-4", 12, "checkpoint-8", "checkpoint-12"]


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name_and_its_name_before_others_go(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[tuple[str, str]] = []
    fsync, replace, remove = os.fsync, os.replace, writer_module.retire
    folder = bench.folder / "r" / "distill"

    def relative(path: Any) -> str:
        return os.path.relpath(path, folder)

    def flushed(descriptor: int) -> None:
        events.append(("flush", relative(os.readlink(f"/proc/self/fd/{descriptor}"))))
        fsync(descriptor)

    def renamed(source: Any, destination: Any) -> None:
        events.append(("rename", relative(destination)))
        replace(source, destination)

    def retired(checkpoint: Path) -> Path:
        if checkpoint.name == "checkpoint-8":
            shutil.copytree(checkpoint, folder.parent / "kept")
        events.append(("retire", relative(checkpoint)))
        return remove(checkpoint)

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(os, "replace", renamed)
    monkeypatch.setattr(writer_module, "retire", retired)
    settings = ("--set", "train.save_total_limit=1")
    assert main(["distill", str(bench.recipe("r")), *settings]) == 0

    partial = "checkpoints/checkpoint-being-written/checkpoint-8"
    begin = events.index(("rename", "checkpoints/checkpoint-4"))
    named = events.index(("rename", "checkpoints/checkpoint-8"))
    before, after = events[begin:named], events[named + 1 :]
    written = {path for kind, path in before if kind == "flush"}
    files = {path.name for path in (folder.parent / "kept").iterdir()}
    assert "files.json" in files and len(files) > 5
    assert {f"{partial}/{name}" for name in files} <= written
    # the record before the folder, in which it gets its name
    record = before.index(("rename", f"{partial}/files.json"))
    assert before[record:] == [
        ("rename", f"{partial}/files.json"),
        ("flush", f"{partial}/files.json"),
        ("flush", partial),
    ]
    assert after[0] == ("flush", "checkpoints")
    assert ("retire", "checkpoints/checkpoint-4") in after
    # the model and its record before the last checkpoint goes
    last = {path for kind, path in after if kind == "flush"}
    assert {"model/model.safetensors", "model", "manifest.json", "."} <= last


def full(self: StateFile, folder: Path) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.usefixtures("background")
def test_what_cannot_be_written_ends_the_training_with_one_line_and_leaves_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["distill", str(bench.recipe("r"))]
    with monkeypatch.context() as patch:
        patch.setattr(StateFile, "write", full)
        assert main(command) == 2
    error = capsys.readouterr().err
    folder = bench.folder / "r" / "distill" / "checkpoints"
    line = (
        f"fcsd distill: error: {folder}/checkpoint-4: could not be written (No space"
        " left on device);"
    )
    assert error.count(line) == 1 and "Traceback" not in error
    assert not any(folder.iterdir())
    assert main(command) == 0


@pytest.mark.usefixtures("background")
def test_a_rank_that_cannot_write_ends_both_in_the_same_step(
    bench: Bench, tmp_path: Path
) -> None:
    command = ["distill", str(bench.recipe("r"))]
    late = CheckpointWriter._start

    def one(rank: int) -> int:
        if rank == 0:  # of copies, the rank that writes
            StateFile.write = full  # type: ignore[method-assign]
        CheckpointWriter._start = lambda *args: (late(*args), args[0]._thread.join())[0]  # type: ignore[method-assign]
        return main(command)

    outcomes = in_forked_ranks(one, 2, tmp_path)
    text = "".join(output for _, output in outcomes)
    assert [status for status, _ in outcomes] == [2, 2], text
    assert (
        text.count("checkpoint-4: could not be written (No space left on device)") == 1
    )
    assert "Traceback" not in text
    assert not any((bench.folder / "r" / "distill" / "checkpoints").iterdir())


@pytest.mark.breadth
@pytest.mark.usefixtures("background")
@pytest.mark.parametrize(
    "moment",
    few(
        [
            "after a file", "when all are written", "before a file", "while old ones are removed",
        ],
        1,
    ),
)  # fmt: skip
def test_a_run_that_is_killed_while_it_writes_continues_to_the_same_weights(
    bench: Bench, tmp_path: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["distill", str(bench.recipe("whole"))]) == 0
    command = command_words(
        "distill", bench.recipe("killed"), "--set train.save_total_limit=1"
    )
    write, remove = StateFile.write, writer_module._remove

    def die(*args: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def killed() -> int:
        if moment == "when all are written":
            monkeypatch.setattr(writer_module, "note_files", die)
        elif moment == "while old ones are removed":
            monkeypatch.setattr(
                writer_module, "_remove", lambda old: die() if old else remove(old)
            )
        else:
            after = moment == "after a file"
            monkeypatch.setattr(
                StateFile, "write", lambda *args: (after and write(*args), die())
            )
        return main(command)

    assert_killed(killed, tmp_path / "output")
    folder = bench.folder / "killed" / "distill"
    kept = [path.name for path in checkpoints(folder / "checkpoints")]
    assert kept == (["checkpoint-8"] if moment == "while old ones are removed" else [])
    assert main(command) == 0
    assert not (folder / "checkpoints").exists()
    assert trained_weights(bench, "whole") == trained_weights(bench, "killed")


@pytest.mark.usefixtures("background")
def test_without_room_for_a_copy_the_training_waits_and_says_so(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(writer_module, "available_memory", lambda: 1000)
    monkeypatch.setattr(
        DistillTrainer,
        "_maybe_log_save_evaluate",
        checked(DistillTrainer._maybe_log_save_evaluate),
    )
    assert main(["distill", str(bench.recipe("r"))]) == 0
    error = capsys.readouterr().err
    assert (
        error.count(
            "of this machine's memory, but only 1000 B are free; the training waits"
        )
        == 1
    )


def checked(method: Any) -> Any:
    def called(self: Any, *args: Any, **kwargs: Any) -> None:
        method(self, *args, **kwargs)
        assert not self.checkpoint_writer.is_writing

    return called


def test_a_jobs_limit_counts_where_it_is_less_than_what_the_machine_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = available_memory()
    assert 1 << 20 < free < 1 << 50
    for kind, names in (
        ("", ("memory.max", "memory.current", "file")),
        ("memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "cache")),
    ):
        folder = tmp_path / (kind or "two") / kind / "job" / "step"
        folder.mkdir(parents=True)
        for name, text in zip(
            (*names[:2], "memory.stat"),
            ("5000", "3000", f"anon 1\n{names[2]} 1500"),
            strict=True,
        ):
            (folder.parent / name).write_text(text)
        monkeypatch.setattr(memory, "_CGROUPS", tmp_path / (kind or "two"))
        monkeypatch.setattr(memory, "_GROUPS", tmp_path / "cgroup")
        (tmp_path / "cgroup").write_text(f"0:{kind}:/job/step\n")
        assert available_memory() == 5000 - 3000 + 1500
        (folder.parent / names[0]).write_text("max" if not kind else str(1 << 62))
        assert available_memory() == pytest.approx(free, rel=0.5)


def writing_rank(rank: int) -> list[str]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from fcsd.parallel.launch import Ranks
    from fcsd.parallel.state import state_files

    model = torch.nn.Linear(6, 6)
    fully_shard(
        model,
        mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")),
    )
    optimizer = torch.optim.AdamW(model.parameters())
    return [
        file.name
        for file in state_files(model, optimizer, Ranks(rank, 4, lockstep=True))
    ]


def test_of_replicas_one_writes() -> None:
    names = [f"state-0000{part}-of-00002.safetensors" for part in (1, 2)]
    assert run_ranks(writing_rank, 4) == [[names[0]], [names[1]], [], []]
