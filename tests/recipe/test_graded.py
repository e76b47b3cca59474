"""A recipe that would train on the data that grades it is refused when it is read."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from fcsd.recipe.load_recipe import load_recipe
from tests.support import user_error


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a data root with GSM8K in hub layout."""
    folder = tmp_path / "hub" / "openai" / "gsm8k" / "main"
    folder.mkdir(parents=True)
    for split in ("train", "test"):
        (folder / f"{split}.jsonl").write_text('{"question": "?", "answer": "!"}\n')
    return tmp_path / "hub"


def load(tmp_path: Path, source: dict[str, Any], **sections: Any) -> None:
    train = [
        {"path": "fine.jsonl"},
        {"columns": {"prompt": "question", "response": "answer"}, **source},
    ]
    path = tmp_path / "x.yaml"
    recipe = {
        "name": "x", "output_dir": "o", "model": {"path": "m"}, "data": {"train": train}, **sections,
    }  # fmt: skip
    path.write_text(yaml.safe_dump(recipe))
    load_recipe(path)


GSM8K = {"path": "openai/gsm8k", "name": "main"}
PAPER = {"suite": "paper11"}


@pytest.mark.parametrize("split", ["test", "train+test", "test[:50%]", "all"])
def test_the_graded_split_of_a_suites_task_is_refused(
    tmp_path: Path, split: str
) -> None:
    message = (
        r"x.yaml: data.train.1: openai/gsm8k, split '.*', is the graded split of task"
        r" gsm8k of suite paper11; never train on a graded split"
    )
    with user_error(message):
        load(tmp_path, GSM8K | {"split": split}, evaluation=PAPER)


@pytest.mark.parametrize("split", ["train", "train[:10%]"])
def test_its_training_split_is_not(tmp_path: Path, split: str) -> None:
    load(tmp_path, GSM8K | {"split": split}, evaluation=PAPER)


def test_a_training_split_by_another_name_and_another_configuration_are_not(
    tmp_path: Path,
) -> None:
    load(
        tmp_path,
        {"path": "cais/mmlu", "name": "all", "split": "auxiliary_train"},
        evaluation=PAPER,
    )
    row = {"kind": "code", "task": "b", "dataset": "a/b", "dataset_name": "one"}
    suite = tmp_path / "kept_out.yaml"
    suite.write_text(yaml.safe_dump({"name": "kept_out", "tasks": [row]}))
    data = {
        "train": [{"path": "a/b", "name": "two", "split": "test"}],
        "decontaminate": {"suite": str(suite)},
    }
    load(tmp_path, {}, data=data)
    data["train"] = [{"path": "a/b", "name": "all", "split": "test"}]
    with user_error("is the graded split of task b of suite kept_out"):
        load(tmp_path, {}, data=data)


def test_a_local_copy_and_a_file_of_one_are_known(tmp_path: Path, root: Path) -> None:
    evaluation = PAPER | {"data_root": str(root)}
    folder = root / "openai" / "gsm8k"
    load(tmp_path, {"path": str(folder), "name": "main"}, evaluation=evaluation)
    load(
        tmp_path, {"path": str(folder / "main" / "train.jsonl")}, evaluation=evaluation
    )
    for source in (
        {"path": str(folder), "split": "test"},
        {"path": str(folder / "main" / "test.jsonl")},
    ):
        with user_error("never train on a graded split"):
            load(tmp_path, source, evaluation=evaluation)


def test_prompts_of_the_current_folder_are_known_beside_a_data_root(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("heldout", "train"):
        Path(f"{name}.jsonl").write_text("{}")
    row = {"kind": "own_text", "task": "own", "dataset": "heldout.jsonl"}
    Path("own.yaml").write_text(yaml.safe_dump({"name": "own", "tasks": [row]}))
    evaluation = {"suite": "./own.yaml", "data_root": str(root)}
    load(tmp_path, {"path": str(tmp_path / "train.jsonl")}, evaluation=evaluation)
    with user_error("is the graded split of task own of suite own"):
        load(tmp_path, {"path": str(tmp_path / "heldout.jsonl")}, evaluation=evaluation)


def test_the_stopping_task_variants_and_pretraining_are_looked_at_too(
    tmp_path: Path,
) -> None:
    task = {"kind": "code", "task": "mine", "dataset": "a/code", "split": "validation"}
    suite = tmp_path / "stopping.yaml"
    suite.write_text(yaml.safe_dump({"name": "stopping", "tasks": [task]}))
    stopping = {"early_stopping": {"suite": str(suite), "task": "mine"}}
    with user_error("is the graded split of early_stopping"):
        load(tmp_path, {"path": "a/code", "split": "validation"}, **stopping)
    load(tmp_path, {"path": "a/code", "split": "train"}, **stopping)
    variants = {"v": {"data.train.1.split": "validation"}}
    with user_error(r"variants.v: data.train.1: a/code"):
        load(
            tmp_path,
            {"path": "a/code", "split": "train"},
            variants=variants,
            **stopping,
        )
    pretrain = {
        "config": {"model_type": "qwen2_moe"},
        "tokenizer": "t",
        "data": {"train": [{"path": "a/code", "split": "validation"}]},
        "train": {},
    }
    with user_error(r"pretrain.data.train.0: a/code"):
        load(
            tmp_path,
            {},
            data={"train": [{"path": "d.jsonl"}]},
            model={},
            pretrain=pretrain,
            **stopping,
        )


def test_an_unknown_suite_is_an_error_of_the_recipe(tmp_path: Path) -> None:
    with user_error(
        r"x.yaml: evaluation.suite: suite 'papre11': no such suite; did you mean"
    ):
        load(tmp_path, {"path": "d.jsonl"}, evaluation={"suite": "papre11"})
