"""A recipe that extends another is that one with some keys replaced, and complete when
it is loaded.
"""

from pathlib import Path
from typing import Any

import pytest
import yaml

from fcsd.cli.main import main
from fcsd.recipe.load_recipe import load_recipe
from tests.support import user_error

BASE = {
    "name": "base",
    "output_dir": "runs/base",
    "model": {"path": "m"},
    "data": {"train": [{"path": "a.jsonl"}, {"path": "b.jsonl"}], "max_length": 64},
    "connectivity": {"layers": {"last": "50%"}},
    "objective": {"name": "kl", "temperature": 2.0},
    "train": {"max_steps": 7, "learning_rate": 1e-4, "warmup_steps": 0},
    "variants": {"sft": {"objective.name": "sft"}, "v": {"train.max_steps": 3}},
}


def write(place: Path, value: Any) -> Path:
    place.parent.mkdir(exist_ok=True)
    place.write_text(yaml.safe_dump(value))
    return place


def extending(folder: Path, changes: dict[str, Any]) -> Path:
    write(folder / "base.yaml", BASE)
    return write(folder / "new.yaml", {"extends": "base.yaml", **changes})


def test_one_line_is_a_recipe_and_its_record_has_all_keys(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = extending(tmp_path, {})
    whole = load_recipe(tmp_path / "base.yaml")
    assert load_recipe(path) == whole
    assert main(["run", str(path), "--show"]) == 0
    assert yaml.safe_load(capsys.readouterr().out) == whole.dump()
    assert "extends" not in whole.dump()


def test_sections_are_merged_key_by_key_and_lists_and_values_are_replaced(
    tmp_path: Path,
) -> None:
    changes = {
        "name": "new",
        "data": {"train": [{"path": "c.jsonl"}]},
        "connectivity": {"layers": {"first": 1}},
        "train": {"learning_rate": 2e-4},
        "variants": {"v": {"seed": 1}, "w": {"train.max_steps": 5}},
    }
    recipe = load_recipe(extending(tmp_path, changes), ["train.warmup_steps=2"])
    assert (recipe.name, recipe.output_dir) == ("new", "runs/base")
    assert [source.path for source in recipe.data.train] == ["c.jsonl"]
    assert recipe.data.max_length == 64
    assert recipe.dump()["connectivity"]["layers"] == {"first": 1}
    train = recipe.train
    assert (train.max_steps, train.learning_rate, train.warmup_steps) == (7, 2e-4, 2)
    assert recipe.variants == {
        "sft": {"objective.name": "sft"},
        "v": {"train.max_steps": 3, "seed": 1},
        "w": {"train.max_steps": 5},
    }
    assert load_recipe(tmp_path / "base.yaml").variants["v"] == {"train.max_steps": 3}


def test_null_switches_a_section_off_and_another_choice_leaves_its_keys_behind(
    tmp_path: Path,
) -> None:
    changes = {"variants": {}, "train": None, "objective": {"name": "sft"}}
    with user_error(r"new\.yaml: train: a mapping"):
        load_recipe(extending(tmp_path, changes))
    recipe = load_recipe(extending(tmp_path, {"objective": {"name": "sft"}}))
    assert recipe.objective.name == "sft" and recipe.teacher is None
    base = BASE | {"sweep": {"steps": 5}, "teacher": {"backend": "sharded"}}
    write(tmp_path / "base.yaml", base)
    write(
        tmp_path / "new.yaml",
        {"extends": "base.yaml", "sweep": None, "objective": {"name": "ce"}},
    )
    recipe = load_recipe(tmp_path / "new.yaml")
    assert recipe.sweep is None and recipe.teacher is None


def test_a_null_leaves_a_variant_out(tmp_path: Path) -> None:
    recipe = load_recipe(extending(tmp_path, {"variants": {"sft": None}}))
    assert recipe.variants == {"v": {"train.max_steps": 3}}
    assert not load_recipe(extending(tmp_path, {"variants": None})).variants


@pytest.mark.parametrize("variant", [False, True])
def test_keys_of_a_task_stop_by_it_in_place_of_a_kl(
    tmp_path: Path, variant: bool
) -> None:
    data = BASE["data"] | {"heldout": {"path": "h.jsonl"}}
    kl = {"metric": "heldout_kl", "patience": 3, "every_steps": 2}
    write(tmp_path / "base.yaml", BASE | {"data": data, "early_stopping": kl})
    task = {"task": "mbpp_plus", "suite": "paper11"}
    changes: dict[str, Any] = {"early_stopping": task}
    if variant:
        dotted = {f"early_stopping.{key}": value for key, value in task.items()}
        changes = {"variants": {"v": dotted}}
    path = write(tmp_path / "new.yaml", {"extends": "base.yaml", **changes})
    stopping: Any = load_recipe(path).chosen("v" if variant else None).early_stopping
    assert (stopping.task, stopping.every_steps) == ("mbpp_plus", 2)


def test_a_path_is_relative_to_its_file_and_a_shipped_recipe_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "base.yaml", BASE | {"name": "wrong"})
    write(tmp_path / "a" / "base.yaml", BASE)
    write(tmp_path / "a" / "middle.yaml", {"extends": "base.yaml", "seed": 4})
    last = write(tmp_path / "b" / "last.yaml", {"extends": "../a/middle.yaml"})
    recipe = load_recipe(last)
    assert (recipe.name, recipe.seed) == ("base", 4)
    shipped = write(tmp_path / "mine.yaml", {"extends": "tiny/demo", "name": "mine"})
    assert load_recipe(shipped) == load_recipe("tiny/demo", ["name=mine"])


def test_a_suite_lies_beside_the_file_that_names_it(tmp_path: Path) -> None:
    write(tmp_path / "a" / "base.yaml", BASE | {"evaluation": {"suite": "mine.yaml"}})
    row = {
        "task": "piqa", "kind": "likelihood", "metric": "acc,none", "dataset": "baber/piqa", "split": "validation",
    }  # fmt: skip
    write(tmp_path / "a" / "mine.yaml", {"name": "mine", "tasks": [row]})
    path = write(tmp_path / "new.yaml", {"extends": "a/base.yaml"})
    suite = load_recipe(path).evaluation.suite
    assert suite == str(tmp_path / "a" / "mine.yaml")
    write(tmp_path / "a" / "base.yaml", BASE)
    of_base = load_recipe(tmp_path / "a" / "base.yaml", ["evaluation.suite=mine.yaml"])
    assert of_base.evaluation.suite == suite


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"new": {"extends": "new.yaml"}}, r"new\.yaml: extends: a recipe extends itself: .*new\.yaml -> "),
        (
            {"new": {"extends": "a.yaml"}, "a": {"extends": "./new.yaml"}},
            r"a\.yaml: extends: a recipe extends itself: .*new\.yaml -> .*a\.yaml -> .*new\.yaml",
        ),
        ({"new": {"extends": "gone.yaml"}}, r"new\.yaml: extends: .*gone\.yaml: no such file"),
        ({"new": {"extends": "tiny/dmo"}}, r"no such file, .*; did you mean 'tiny/demo'\?"),
        ({"new": {"extends": ["a.yaml"]}}, r"new\.yaml: extends: the path of a recipe, relative .*got \['a"),
        ({"new": {"extends": "x" * 300}}, r"new\.yaml: extends: .*: no such file"),
        ({"new": {"extends": "https://me:secret@h/a.yaml"}}, r"new\.yaml: extends: [^/]*$"),
        ({"new": {"extends": "a.yaml"}, "a": [1]}, r"a\.yaml: a recipe is a mapping of keys"),
        (
            {"new": {"extends": "a.yaml"}, "a": BASE | {"train": {"learning_rat": 1}}},
            r"/a\.yaml: train\.learning_rat: unknown key",
        ),
        (
            {"new": {"extends": "a.yaml", "train": {"max_steps": -1}}, "a": BASE},
            r"/new\.yaml: train\.max_steps: .*greater than or equal to 0",
        ),
        (
            {"new": {"extends": "a.yaml"}, "a": BASE | {"objective": {"name": "kl", "temprature": 1}}},
            r"/a\.yaml: objective\.temprature: unknown key; did you mean 'temperature'",
        ),
        (
            {"new": {"extends": "a.yaml", "seed": 1}, "a": BASE | {"data": {"train": [{"pth": "x"}]}}},
            r"/a\.yaml: data\.train\.0\.pth: unknown key",
        ),
        ({"new": {"extends": "a.yaml"}, "a": {"name": "x"}}, r"/new\.yaml: output_dir: is required"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_that_names_the_file_in_which_it_stands(
    tmp_path: Path, files: dict[str, Any], message: str
) -> None:
    for name, value in files.items():
        write(tmp_path / f"{name}.yaml", value)
    with user_error(message) as caught:
        load_recipe(tmp_path / "new.yaml")
    assert "\n" not in str(caught.value) and "secret" not in str(caught.value)


def test_a_mapping_of_keys_extends_nothing(tmp_path: Path) -> None:
    from fcsd import run_stage

    with user_error("extends: only the file of a recipe can"):
        run_stage("report", {"extends": "tiny/demo"})
