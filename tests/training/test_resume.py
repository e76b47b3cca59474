"""A run that is killed, or runs out of disk space, continues to exactly the weights of
an undisturbed run.
"""

import json
import os
import re
import resource
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fcsd.base import artifact
from fcsd.base.files import read_json
from fcsd.base.weights import weights_fingerprint
from fcsd.base.writing import hold_folder, new_folder, write_json
from fcsd.cli.main import main
from fcsd.data import rows as rows_module
from fcsd.data import sources as sources_module
from fcsd.model import load
from fcsd.parallel import launch as launch_module
from fcsd.training import best as best_module
from fcsd.training import checkpoint_writer as writer_module
from fcsd.training import resumable as resumable_module
from fcsd.training import run as run_module
from fcsd.training import trainer as trainer_module
from fcsd.training.history import read_history
from tests.support import (
    Bench,
    assert_killed,
    command_words,
    few,
    forked,
    history,
    in_a_fork,
    in_forked_ranks,
    interrupt_at,
    make_bench,
    status_of,
    trained_weights,
)


def recipe(bench: Bench, name: str) -> Path:
    return bench.recipe(name, early_stopping=bench.early_stopping)


def weights(bench: Bench, name: str) -> tuple[str, Any]:
    """Return the fingerprint of the run's model, and the scores that selected it."""
    folder = bench.folder / name / "distill"
    return weights_fingerprint(folder / "model"), read_json(folder / "scores.json")


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


FINISHED = {"stage.json", "manifest.json", "history.jsonl", "scores.json", "model"}


@pytest.fixture(scope="module")
def never_killed(
    base_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Bench:
    """Return two undisturbed runs: `whole`, with early stopping, and `alone`,
    without.
    """
    folder = tmp_path_factory.mktemp("never-killed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("datasets.config.HF_DATASETS_CACHE", folder / "cache")
        bench = make_bench(base_checkpoint, folder)
        assert main(["distill", str(recipe(bench, "whole"))]) == 0
        assert main(["distill", str(bench.recipe("alone"))]) == 0
    assert files(bench.folder / "whole" / "distill") == FINISHED
    return bench


@pytest.fixture
def whole(never_killed: Bench) -> tuple[str, Any]:
    return weights(never_killed, "whole")


@pytest.mark.parametrize(
    "moment", few(["while a checkpoint is written", "after a checkpoint"], 1)
)
def test_a_run_killed_with_sigkill_ends_with_the_weights_of_one_that_was_not(
    bench: Bench, whole: tuple[str, Any], tmp_path: Path, moment: str
) -> None:
    path = recipe(bench, "killed")
    checkpoints = bench.folder / "killed" / "distill" / "checkpoints"
    awaited = (
        "checkpoint-4" if moment == "after a checkpoint" else "checkpoint-being-written"
    )
    child, output = (
        forked(lambda: main(["distill", str(path)]), tmp_path / "output"),
        tmp_path / "output",
    )
    while not (checkpoints / awaited).exists():
        assert os.waitpid(child, os.WNOHANG) == (0, 0), output.read_text()
        time.sleep(0.001)
    os.kill(child, signal.SIGKILL)
    assert status_of(child) == -signal.SIGKILL, output.read_text()
    assert not (bench.folder / "killed" / "distill" / "model").exists()
    assert main(["distill", str(path)]) == 0
    assert files(bench.folder / "killed" / "distill") == FINISHED
    assert weights(bench, "killed") == whole


def die(*args: Any, **kwargs: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("module", "place"),
    few(
        [
            (writer_module, "replace_folder"),  # a whole checkpoint, not yet renamed
            (best_module.StopWhenScoreStalls, "on_save"),
            (run_module, "_leave_model"),  # after the last step
            # weights and optimiser written, the stopper's state not
            (resumable_module, "write_json"),
            (trainer_module.DistillTrainer, "_save_rng_state"),
            (run_module, "write_text"),
        ],
        3,
    ),
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wherever_a_run_is_killed_it_continues_to_the_same_weights(
    bench: Bench,
    whole: tuple[str, Any],
    tmp_path: Path,
    module: Any,
    place: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = recipe(bench, "killed")
    command = ["distill", str(path)]

    def killed() -> int:
        monkeypatch.setattr(module, place, die)
        return main(command)

    assert_killed(killed, tmp_path / "output")
    assert not (bench.folder / "killed" / "distill" / "model").exists()
    assert main(command) == 0
    assert files(bench.folder / "killed" / "distill") == FINISHED
    assert weights(bench, "killed") == whole


@pytest.mark.breadth
@pytest.mark.parametrize(
    ("module", "place"),
    few(
        [(run_module, "_leave_model"), (best_module.StopWhenScoreStalls, "on_save")], 1
    ),
)
def test_a_run_that_was_killed_stops_early_at_the_step_at_which_it_would_have(
    bench: Bench,
    tmp_path: Path,
    module: Any,
    place: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # no score is better than the one before training, 0
    early = bench.early_stopping | {"patience": 4}
    assert main(["distill", str(bench.recipe("whole", early_stopping=early))]) == 0
    command = ["distill", str(bench.recipe("killed", early_stopping=early))]

    def killed() -> int:
        monkeypatch.setattr(module, place, die)
        return main(command)

    assert_killed(killed, tmp_path / "output")
    assert main(command) == 0
    assert weights(bench, "killed") == weights(bench, "whole")
    results = [
        read_json(bench.folder / name / "distill" / "manifest.json")["results"]
        for name in ("whole", "killed")
    ]
    times = [result.pop("early_stopping") for result in results]
    assert [cost["num_scores"] for cost in times] == [5, 5]
    assert results[0]["steps"] == 8
    assert results[0]["stopped_early"]
    assert results[0] == results[1]


def on_two_ranks(
    command: list[str], folder: Path, rank: int | None = None, place: str = ""
) -> list[tuple[int, str]]:
    """Return how a run of two ranks ends when `rank` (-1: both) is killed, or asked to
    end, at `place`.
    """

    def one(mine: int) -> int:
        holder: Any = trainer_module.DistillTrainer
        if place == "_old_checkpoints":
            holder = writer_module.CheckpointWriter
        original = getattr(holder, place or "compute_loss")

        def signalled(self: Any, *args: Any, **kwargs: Any) -> Any:
            if self.state.global_step == 5:
                os.kill(os.getpid(), signal.SIGTERM)
            return original(self, *args, **kwargs)

        if rank in (mine, -1):
            setattr(holder, place, signalled if place == "compute_loss" else die)
        return main(command)

    return in_forked_ranks(one, 2, folder)


@pytest.mark.breadth
def test_two_ranks_of_which_one_or_both_were_killed_continue_to_the_same_weights(
    bench: Bench, tmp_path: Path
) -> None:
    assert [
        status
        for status, _ in on_two_ranks(["distill", str(bench.recipe("whole"))], tmp_path)
    ] == [0, 0]
    one = trained_weights(bench, "whole")
    for name, rank, place, statuses in (
        # while a checkpoint is written
        ("both", -1, "_save_rng_state", [-signal.SIGKILL, -signal.SIGKILL]),
        ("first", 0, "_save_rng_state", [-signal.SIGKILL, 1]),
        ("asked", 1, "compute_loss", [128 + signal.SIGTERM] * 2),
    ):
        command = ["distill", str(bench.recipe(name))]
        outcomes = on_two_ranks(command, tmp_path, rank, place)
        output = "".join(text for _, text in outcomes)
        assert [status for status, _ in outcomes] == statuses, output
        checkpoints = {
            path.name
            for path in (bench.folder / name / "distill" / "checkpoints").glob(
                "checkpoint-?"
            )
        }
        if name == "asked":
            assert checkpoints == {"checkpoint-4", "checkpoint-6"}
            assert (
                output.count(
                    "fcsd distill: ended by SIGTERM after step 6 of 12; run the same"
                    " command again"
                )
                == 1
            )
        else:
            assert checkpoints == set()
            assert output.count(f"rank {rank} of 2 ended without an error") == (
                rank >= 0
            )
        assert [status for status, _ in on_two_ranks(command, tmp_path)] == [0, 0]
        assert files(bench.folder / name / "distill") == FINISHED - {"scores.json"}
        assert trained_weights(bench, name) == one


def curve(bench: Bench, name: str) -> list[dict[str, Any]]:
    entries = history(bench, name)
    for entry in entries:
        entry.pop("tokens_per_second", None)
    return entries


@pytest.mark.parametrize("case", few(["a mixture", "a large source", "one source"], 1))
def test_a_run_continues_at_its_row_and_reads_nothing_before_it(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    read: list[int] = []
    get = rows_module.PackedRows.__getitems__

    def counted(self: Any, indices: list[int]) -> Any:
        read.extend(indices)
        return get(self, indices)

    monkeypatch.setattr(rows_module.PackedRows, "__getitems__", counted)
    sources: list[dict[str, Any]] = [{"path": str(bench.rows)}]
    if case == "a mixture":
        short = tmp_path / "short.jsonl"
        short.write_text("".join(bench.rows.read_text().splitlines(keepends=True)[:5]))
        sources.append({"path": str(short), "weight": 2.0})
    if case == "a large source":
        monkeypatch.setattr(sources_module, "WHOLE_BYTES", 0)
    data = {"train": sources, "max_length": 32}
    assert main(["distill", str(bench.recipe("whole", data=data))]) == 0
    in_order, read[:] = [*read], []
    assert 12 * 4 <= len(in_order) <= 12 * 4 + 2  # one micro-batch is fetched ahead
    command = ["distill", str(bench.recipe("killed", data=data))]
    replace = writer_module.replace_folder

    def killed() -> int:
        monkeypatch.setattr(
            writer_module, "replace_folder", lambda *args: (replace(*args), die())
        )
        return main(command)

    assert_killed(killed, tmp_path / "output")
    assert files(bench.folder / "killed" / "distill" / "checkpoints") >= {
        "checkpoint-4"
    }
    assert main(command) == 0
    assert read == in_order[4 * 4 :]
    assert curve(bench, "killed") == curve(bench, "whole")
    assert trained_weights(bench, "whole") == trained_weights(bench, "killed")


@pytest.mark.breadth
def test_a_run_is_gone_on_with_by_another_number_of_ranks(
    bench: Bench, tmp_path: Path
) -> None:
    assert main(["distill", str(bench.recipe("whole"))]) == 0
    command = ["distill", str(bench.recipe("killed"))]
    statuses = [
        status for status, _ in on_two_ranks(command, tmp_path, -1, "_old_checkpoints")
    ]
    assert -signal.SIGKILL in statuses
    assert (
        bench.folder / "killed" / "distill" / "checkpoints" / "checkpoint-4"
    ).is_dir()
    assert main(command) == 0
    for one, other in zip(curve(bench, "whole"), curve(bench, "killed"), strict=True):
        assert one["epoch"] == other["epoch"]
        assert one["kl"] == pytest.approx(other["kl"], rel=1e-3)


def test_the_steps_before_a_checkpoint_are_not_trained_again(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["distill", str(recipe(bench, "killed"))]
    steps: list[int] = []
    compute = trainer_module.DistillTrainer.compute_loss

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        steps.append(self.state.global_step)
        if len(steps) == 13:  # two micro-batches per step: in the seventh step
            raise KeyboardInterrupt
        return compute(self, *args, **kwargs)

    monkeypatch.setattr(trainer_module.DistillTrainer, "compute_loss", counted)
    assert main(command) == 130
    assert main(command) == 0
    assert steps[13:] == [step for step in range(4, 12) for _ in range(2)]


def test_a_finished_stage_is_not_run_again_and_a_changed_one_refused(
    bench: Bench, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["distill", str(recipe(bench, "r"))]
    assert main(command) == 0
    capsys.readouterr()
    monkeypatch.setattr(
        "fcsd.pipeline.distill.train", lambda *_: pytest.fail("trained again")
    )
    assert main(command) == 0
    assert "finished before" in capsys.readouterr().err
    assert main([*command, "--set", "train.logging_steps=7"]) == 0
    capsys.readouterr()
    assert main([*command, "--set", "train.learning_rate=0.002"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "train.learning_rate: 0.001 -> 0.002" in error


def test_a_run_says_where_it_continues_and_may_have_other_rows_in_a_forward_pass(
    bench: Bench,
    never_killed: Bench,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same batches in another cut: the same training up to the order of
    floating-point sums.
    """
    command = ["distill", str(bench.recipe("r"))]
    with monkeypatch.context() as patch:
        interrupt_at(6, patch)
        assert main(command) == 130
    capsys.readouterr()
    command += command_words(
        "--set train.per_device_train_batch_size=4 --set train.gradient_checkpointing=true"
    )
    assert main(command) == 0
    folder = bench.folder / "r" / "distill"
    assert (
        f"distil fcsd: continuing from {folder}/checkpoints/checkpoint-4, with 4"
        " instead of 2 rows per forward pass, which changes the order of float sums"
        in capsys.readouterr().err
    )
    assert (
        read_json(folder / "manifest.json")["settings"]["train"][
            "per_device_train_batch_size"
        ]
        == 4
    )
    curves = [
        read_history(f / "distill")
        for f in (never_killed.folder / "alone", bench.folder / "r")
    ]
    for one, other in zip(*curves, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4)


def test_a_folder_in_which_another_process_works_is_refused_until_that_has_ended(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = bench.folder / "r" / "distill"
    folder.mkdir(parents=True)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:  # as a run in another terminal
        hold_folder(folder)
        os.write(writing, b"held")
        signal.pause()
    try:
        assert os.read(reading, 4) == b"held"
        command = ["distill", str(bench.recipe("r"))]
        assert main(command) == 2
        assert (
            f"{folder}: another process is using this folder; wait for it"
            in capsys.readouterr().err
        )
        assert files(folder) == set()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert main(command) == 0


def test_two_ranks_hash_the_original_once(bench: Bench, tmp_path: Path) -> None:
    hashed, path = tmp_path / "hashed", str(bench.recipe("r"))

    def one(rank: int) -> int:
        def fingerprint(folder: Path, **options: bool) -> str:
            with hashed.open("a") as file:
                file.write(f"{rank} {folder}\n")
            return weights_fingerprint(folder, **options)

        load.weights_fingerprint = fingerprint
        return main(["distill", path])

    assert [status for status, _ in in_forked_ranks(one, 2, tmp_path)] == [0, 0]
    assert hashed.read_text() == f"0 {bench.base}\n"


def test_a_changed_data_file_is_refused(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["distill", str(bench.recipe("r"))]
    assert main(command) == 0
    bench.rows.write_text(bench.rows.read_text() + bench.rows.read_text())
    assert main(command) == 2
    assert "data.train.0" in capsys.readouterr().err


def test_a_run_whose_original_or_text_has_changed_since_it_was_killed_is_refused_with_the_file(
    bench: Bench,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    base, text = tmp_path / "base", tmp_path / "text"
    shutil.copytree(bench.base, base)
    text.mkdir()
    (text / "a.txt").write_text("".join(f"{n} and {n % 7} is it\n" for n in range(300)))
    data = {
        "train": [{"path": str(text), "columns": {"text": "text"}}],
        "max_length": 32,
    }
    command = ["distill", str(bench.recipe("r", model={"path": str(base)}, data=data))]
    assert main(["run", *command[1:], "--only", "tokenize"]) == 0

    def killed() -> int:
        monkeypatch.setattr(run_module, "_leave_model", die)
        return main(command)

    assert_killed(killed, tmp_path / "output")

    def line() -> str:
        capsys.readouterr()
        assert main(command) == 2
        return capsys.readouterr().err.splitlines()[-1]

    config = (base / "config.json").read_text()
    experts = json.loads(config)["num_experts_per_tok"]
    write_json(
        base / "config.json", json.loads(config) | {"num_experts_per_tok": experts - 1}
    )
    said = line()
    assert (
        f"original/config.json.num_experts_per_tok: {experts} -> {experts - 1}" in said
    )
    assert "remove this folder" in said
    write_json(
        base / "config.json", json.loads(config) | {"transformers_version": "5.0.0"}
    )
    (base / "additional_chat_templates").mkdir()
    (base / "additional_chat_templates" / "tool_use.jinja").write_text("{{ messages }}")
    assert "original/additional_chat_templates/tool_use.jinja: " in line()
    shutil.rmtree(base / "additional_chat_templates")
    kept = (text / "a.txt").read_text()
    (text / "a.txt").write_text(kept.replace("7", "8"))
    assert "data.train.0: " in line()
    (text / "a.txt").write_text(kept)
    base.rename(tmp_path / "moved")
    base.symlink_to(tmp_path / "moved")
    assert main(command) == 0


def limited(call: Callable[[], int], size: int) -> int:
    """Call a function with files limited to `size` bytes, as on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    return call()


@pytest.mark.parametrize(
    "size", few([20_000, 150_000], 1), ids=["in the weights", "in the optimiser"]
)
def test_a_disk_that_is_full_while_a_checkpoint_is_written_is_one_line_and_the_run_continues_later(
    bench: Bench,
    never_killed: Bench,
    tmp_path: Path,
    size: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    command = ["distill", str(bench.recipe("r"))]
    output = tmp_path / "output"
    assert in_a_fork(lambda: limited(lambda: main(command), size), output) == 2, (
        output.read_text()
    )
    text = output.read_text()
    assert re.search(
        r"\nfcsd distill: error: \S*/checkpoints/checkpoint-4: could not be written"
        r" \(.*\); .*\n$",
        text,
    )
    assert "Traceback" not in text
    folder = bench.folder / "r" / "distill"
    assert files(folder / "checkpoints") == set() and not (folder / "model").exists()
    assert main(command) == 0
    one, other = (
        weights_fingerprint(f / "distill" / "model")
        for f in (bench.folder / "r", never_killed.folder / "alone")
    )
    assert one == other


def test_a_disk_that_is_full_while_the_model_is_written_is_one_line_and_the_run_continues_later(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["distill", str(bench.recipe("r"))]
    leave = run_module._leave_model

    def full() -> int:
        monkeypatch.setattr(
            run_module,
            "_leave_model",
            lambda *args: limited(lambda: leave(*args), 20_000),
        )
        return main(command)

    output = tmp_path / "output"
    assert in_a_fork(full, output) == 2, output.read_text()
    folder = bench.folder / "r" / "distill"
    assert re.search(
        r"\nfcsd distill: error: \S*/distill/model: could not be written \(.*\);",
        output.read_text(),
    )
    assert files(folder) == {"stage.json", "history.jsonl", "checkpoints"}
    monkeypatch.setattr(
        trainer_module.DistillTrainer,
        "compute_loss",
        lambda *args, **kwargs: pytest.fail("trained again"),
    )
    assert main(command) == 0
    assert (folder / "model" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    "moment",
    few(
        [
            "the model is hashed", "checkpoints are", "the manifest is written", "best is removed",
        ],
        2,
    ),
)  # fmt: skip
def test_a_run_that_is_killed_when_its_model_is_written_has_nothing_left_to_train(
    bench: Bench,
    whole: tuple[str, Any],
    tmp_path: Path,
    moment: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    command = ["distill", str(recipe(bench, "killed"))]
    rmtree, write = shutil.rmtree, artifact.write_json

    def killed() -> int:
        if moment == "the model is hashed":
            monkeypatch.setattr(launch_module, "model_outputs", die)
        elif moment == "the manifest is written":
            monkeypatch.setattr(
                artifact,
                "write_json",
                lambda path, *args: (die if path.name == "manifest.json" else write)(
                    path, *args
                ),
            )
        else:
            last = "best" if moment == "best is removed" else "checkpoints"

            def removed(path: Any, *args: Any, **kwargs: Any) -> None:
                if Path(path).name == last:
                    next(Path(path).rglob("state-*")).unlink()
                    die()
                rmtree(path, *args, **kwargs)

            monkeypatch.setattr(run_module.shutil, "rmtree", removed)
        return main(command)

    assert_killed(killed, tmp_path / "output")
    monkeypatch.setattr(
        trainer_module.DistillTrainer,
        "compute_loss",
        lambda *args, **kwargs: pytest.fail("trained again"),
    )
    assert main(command) == 0
    assert files(bench.folder / "killed" / "distill") == FINISHED
    assert weights(bench, "killed") == whole


def test_what_a_killed_process_left_half_written_is_removed(
    bench: Bench, tmp_path: Path
) -> None:
    folder = bench.folder / "r" / "distill"
    assert main(["distill", str(bench.recipe("r"))]) == 0
    shutil.rmtree(folder / "model")
    (folder / "manifest.json").unlink()

    def half() -> int:
        with new_folder(folder / "model") as place:
            (place / "model.safetensors").write_bytes(b"half")
            die()
        return 0

    assert_killed(half, tmp_path / "output")
    (leftover,) = folder.glob(".model*")
    assert main(["distill", str(bench.recipe("r"))]) == 0
    assert not leftover.exists()
    assert (folder / "model" / "model.safetensors").stat().st_size > 1000
