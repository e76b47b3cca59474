"""A training continues only from checkpoints that it wrote itself, and every file of
them counts.
"""

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fcsd.api.trainer import FCSDTrainer
from fcsd.base.errors import UserError
from fcsd.base.files import read_json, write_sealed
from fcsd.base.writing import write_json
from fcsd.cli.main import main
from fcsd.parallel.launch import ALONE
from fcsd.pipeline.tiny.models import tiny_tokenizer
from fcsd.training.checkpoints import damage, newest_usable, note_files
from fcsd.training.fcsd_config import FCSDConfig
from tests.reference.tiny import tiny_model
from tests.support import (
    Bench,
    few,
    interrupt_at,
    same_tensors,
    trained_weights,
    user_error,
)

FOREIGN = "files.json is missing or damaged, or of another training"


LORA = {"lora": {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}}


@pytest.mark.parametrize(
    ("changes", "other"),
    few(
        [
            ({}, {"seed": 1}),
            ({}, {"objective": {"name": "kl", "temperature": 2.0}}),
            (LORA, LORA | {"seed": 1}),
        ],
        2,
    ),
    ids=["seed", "objective", "lora"],
)
def test_a_run_does_not_continue_from_a_checkpoint_of_another(
    bench: Bench,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, Any],
    other: dict[str, Any],
) -> None:
    assert main(["distill", str(bench.recipe("undisturbed", **changes))]) == 0
    command = ["distill", str(bench.recipe("mine", **changes))]
    with monkeypatch.context() as patch:
        interrupt_at(9, patch)
        assert main(command) == 130
        assert main(["distill", str(bench.recipe("theirs", **other))]) == 130
    mine, theirs = (
        bench.folder / name / "distill" / "checkpoints" for name in ("mine", "theirs")
    )
    shutil.rmtree(mine / "checkpoint-8")
    shutil.copytree(theirs / "checkpoint-8", mine / "checkpoint-8")
    capsys.readouterr()
    assert main(command) == 0
    said = capsys.readouterr().err
    assert (
        f"{mine}/checkpoint-8: is damaged ({FOREIGN}); continuing from"
        f" {mine}/checkpoint-4" in said
    )
    models = [trained_weights(bench, name) for name in ("undisturbed", "mine")]
    assert models[0] == models[1]


def test_a_run_that_finds_only_checkpoints_of_another_ends_with_one_line(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["distill", str(bench.recipe("mine"))]
    with monkeypatch.context() as patch:
        interrupt_at(5, patch)
        assert main(command) == 130
        assert main(["distill", str(bench.recipe("theirs", seed=1))]) == 130
    mine, theirs = (
        bench.folder / name / "distill" / "checkpoints" for name in ("mine", "theirs")
    )
    shutil.rmtree(mine)
    shutil.copytree(theirs, mine)
    capsys.readouterr()
    assert main(command) == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert f"checkpoint-4: is damaged ({FOREIGN})" in line
    assert f"remove {mine} to start again" in line


def test_the_candidates_of_a_sweep_do_not_share_checkpoints(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    owners: list[str] = []

    def diverges(inputs: Any, sections: Any, job: Any, launch: Any) -> None:
        owners.append(json.dumps(job.owner))
        raise UserError("the loss is not finite")

    monkeypatch.setattr("fcsd.pipeline.sweep.train", diverges)
    for name, seed in (("one", 0), ("two", 1)):
        sweep = {"batch_size_tokens": [64, 128], "learning_rate": [1e-3], "steps": 2}
        assert main(["sweep", str(bench.recipe(name, seed=seed, sweep=sweep))]) == 2
    assert len(owners) == len(set(owners)) == 4


def test_a_moved_run_continues(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        interrupt_at(5, patch)
        assert main(["distill", str(bench.recipe("old"))]) == 130
    (bench.folder / "old").rename(bench.folder / "new")
    capsys.readouterr()
    assert main(["distill", str(bench.recipe("new"))]) == 0
    assert "continuing from" in capsys.readouterr().err


FILES = (
    "trainer_state.json", "rng_state.pth", "scheduler.pt", "optimizer.json", "record.json", "safety.json",
    "state-00001-of-00002.safetensors", "rng_state_1.pth", "deep/er/x.bin",
)  # fmt: skip


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint-4"
    for name in FILES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(name.encode())
    note_files(folder, ALONE, owner="mine")
    assert damage(folder, ALONE, "mine") is None
    return folder


def _nothing(record: dict[str, Any], name: str) -> dict[str, Any]:
    return {}


def _without(record: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key != name}


def _without_seal(record: dict[str, Any], name: str) -> dict[str, Any]:
    return _without(_without(record, name), "sha256")


def _a_list(record: dict[str, Any], name: str) -> Any:
    return [record]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("harm", [_nothing, _without, _without_seal, _a_list])
def test_a_record_of_files_that_leaves_one_out_is_damaged(
    checkpoint: Path, harm: Callable[..., Any], name: str
) -> None:
    (checkpoint / name).write_bytes(b"flipped")
    write_json(
        checkpoint / "files.json", harm(read_json(checkpoint / "files.json"), name)
    )
    assert damage(checkpoint, ALONE, "mine") == FOREIGN
    assert damage(checkpoint) == "files.json is missing or damaged"
    with user_error("and all other checkpoints are damaged"):
        newest_usable(checkpoint.parent, ALONE, "mine")


@pytest.mark.parametrize("owner", [None, "theirs", ["mine", 4]])
def test_a_checkpoint_of_another_owner_is_not_taken(
    checkpoint: Path, owner: Any
) -> None:
    note_files(checkpoint, ALONE, owner=owner)
    assert damage(checkpoint, ALONE, owner) is None
    assert damage(checkpoint, ALONE, "mine") == FOREIGN
    record = read_json(checkpoint / "files.json")
    write_sealed(checkpoint / "files.json", _without(record, "sha256"))
    assert damage(checkpoint, ALONE, "mine") == FOREIGN


# ---- in a script


SETTINGS: dict[str, Any] = {
    "objective": "ce", "layers": "all", "max_length": 16, "max_steps": 4, "save_steps": 1, "learning_rate": 1e-3,
    "per_device_train_batch_size": 2, "loss_on": "all", "disable_tqdm": True,
}  # fmt: skip


@pytest.fixture
def script(tmp_path: Path) -> Callable[..., FCSDTrainer]:
    """Return a function that makes a trainer; keywords are other settings."""
    model = tiny_model("qwen3_moe", num_hidden_layers=1, vocab_size=300, num_experts=4)

    def make(name: str, **changes: Any) -> FCSDTrainer:
        texts = [{"text": f"{n} + 1 is {n + 1}"} for n in range(40)]
        return FCSDTrainer(
            copy.deepcopy(model),
            FCSDConfig(str(tmp_path / name), **SETTINGS | changes),
            train_dataset=texts,
            eval_dataset=texts[:4],
            processing_class=tiny_tokenizer(300),
        )

    return make


def flip(checkpoint: Path) -> None:
    """Flip a bit of the weights, and take their file out of the record."""
    (file,) = checkpoint.glob("state-*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    record = read_json(checkpoint / "files.json")
    (checkpoint / "files.json").write_text(json.dumps(_without(record, file.name)))


def test_a_script_does_not_continue_from_a_flipped_weight_that_no_record_names(
    script: Callable[..., FCSDTrainer],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    whole = script("run")
    whole.train()
    flip(tmp_path / "run" / "checkpoint-3")
    with user_error(
        r"checkpoint-3: cannot be resumed \(files.json is missing or damaged\)"
    ):
        script("run").train(
            resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3")
        )
    shutil.rmtree(tmp_path / "run" / "checkpoint-4")
    again = script("run")
    again.train(resume_from_checkpoint=True)
    assert "checkpoint-3: is damaged (files.json" in capsys.readouterr().err
    assert same_tensors(again.model.state_dict(), whole.model.state_dict())


def test_a_script_continues_in_a_moved_folder_and_in_another_one_from_a_named_checkpoint(
    script: Callable[..., FCSDTrainer], tmp_path: Path
) -> None:
    best = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 1}
    whole = script("old", save_total_limit=2, **best)
    whole.train()
    shutil.copytree(tmp_path / "old", tmp_path / "kept")
    shutil.rmtree(tmp_path / "old" / "checkpoint-4")
    (tmp_path / "old").rename(tmp_path / "new")
    for name, source in (
        ("new", True),
        ("elsewhere", str(tmp_path / "kept" / "checkpoint-3")),
    ):
        again = script(name, save_total_limit=2, **best)
        again.train(resume_from_checkpoint=source)
        assert same_tensors(again.model.state_dict(), whole.model.state_dict())


def test_damaged_best_weights_of_a_script_are_not_loaded_in_silence(
    script: Callable[..., FCSDTrainer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = script(
        "run", load_best_model_at_end=True, eval_strategy="steps", eval_steps=1
    )
    load = FCSDTrainer._load_best_model

    def damaged(self: FCSDTrainer) -> None:
        flip(Path(str(self.state.best_model_checkpoint)))
        load(self)

    monkeypatch.setattr(FCSDTrainer, "_load_best_model", damaged)
    with user_error(r"checkpoint-\d: the best weights cannot be loaded \(files.jso"):
        trainer.train()
