"""Stage folders: finished ones are found, changed ones refused, nothing half-written under a final name."""

import json
from pathlib import Path
from typing import Any

import pytest

from fcsd.base.artifact import Stage, differences
from fcsd.base.errors import UserError
from fcsd.base.files import new_folder, read_json, weights_fingerprint, write_json, writing
from fcsd.evaluation.config import load_suite
from fcsd.pipeline.scoring import score_settings
from fcsd.recipe.load_recipe import load_recipe
from tests.support import ROOT


def stage(folder: Path, **settings: object) -> Stage:
    return Stage(folder, "distill", {"train": {"learning_rate": 1e-3} | settings}, {"original": "abc"})


def test_a_stage_goes_from_absent_over_unfinished_to_finished(tmp_path: Path) -> None:
    one = stage(tmp_path / "s")
    assert one.state() == "absent"
    one.start()
    assert one.state() == "absent"
    (one.folder / "history.jsonl").touch()
    assert one.state() == "unfinished"
    one.finish({"steps": 3})
    assert one.state() == "finished"
    manifest = read_json(one.folder / "manifest.json")
    assert (
        manifest["results"] == {"steps": 3}
        and manifest["versions"]["torch"]
        and manifest["inputs"] == {"original": "abc"}
    )


@pytest.mark.parametrize("finished", [False, True])
def test_a_changed_stage_is_refused_with_the_difference(tmp_path: Path, finished: bool) -> None:
    one = stage(tmp_path / "s")
    one.start()
    (one.folder / "history.jsonl").touch()
    if finished:
        one.finish({})
    with pytest.raises(
        UserError,
        match=r"other settings \(train\.learning_rate: 0\.001 -> 0\.002\); choose another output folder",
    ):
        stage(tmp_path / "s", learning_rate=2e-3).state()
    with pytest.raises(UserError, match=r'original: "abc" -> "def"'):
        Stage(one.folder, one.name, one.settings, {"original": "def"}).state()
    with pytest.raises(UserError, match="holds stage 'distill', not 'sweep'"):
        Stage(one.folder, "sweep", {}, {}).state()


def test_a_stage_that_has_left_nothing_yet_may_begin_with_other_settings(tmp_path: Path) -> None:
    stage(tmp_path / "s").start()
    (tmp_path / "s" / "checkpoints").mkdir()
    other = stage(tmp_path / "s", learning_rate=2e-3)
    assert other.state() == "absent"
    other.start()
    (other.folder / "history.jsonl").touch()
    assert other.state() == "unfinished"


def test_a_folder_of_someone_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("mine")
    with pytest.raises(UserError, match="was not made by stage 'distill'"):
        stage(tmp_path).state()


def test_differences_name_added_and_removed_keys() -> None:
    assert differences({"a": 1, "b": {"c": 2}}, {"a": 1, "b": {"d": 3}}) == [
        "b.c: 2 -> null",
        "b.d: null -> 3",
    ]


def test_a_folder_whose_writing_fails_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), new_folder(tmp_path / "model") as folder:
        (folder / "half").write_text("x")
        1 / 0  # noqa: B018
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_replaced_only_when_the_new_one_is_whole(tmp_path: Path) -> None:
    with new_folder(tmp_path / "model") as folder:
        (folder / "old").write_text("x")
    with pytest.raises(ZeroDivisionError), new_folder(tmp_path / "model") as folder:
        1 / 0  # noqa: B018
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["old"]
    with new_folder(tmp_path / "model") as folder:
        (folder / "new").write_text("x")
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["new"]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_folder_that_does_not_have_the_mark_of_ours_is_not_replaced(tmp_path: Path) -> None:
    for text in ("old", "new"):
        with new_folder(tmp_path / "ours", "report.json", "report") as folder:
            (folder / "report.json").write_text(text)
    assert (tmp_path / "ours" / "report.json").read_text() == "new"
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "report.md").write_text("years")
    (tmp_path / "file").write_text("years")
    for name in ("thesis", "file"):
        with (
            pytest.raises(UserError, match=f"{name}: exists and is no report; choose another folder"),
            new_folder(tmp_path / name, "report.json", "report"),
        ):
            raise AssertionError
    assert (tmp_path / "thesis" / "report.md").read_text() == "years"


def test_a_full_disk_is_one_line_and_other_errors_pass(tmp_path: Path) -> None:
    with (
        pytest.raises(UserError, match=r"model: could not be written \(No space left on device\)"),
        writing(tmp_path / "model"),
    ):
        raise OSError(28, "No space left on device")
    with pytest.raises(FileNotFoundError), writing(tmp_path / "model"):
        (tmp_path / "absent").read_text()


def test_a_damaged_manifest_says_what_to_do(tmp_path: Path) -> None:
    one = stage(tmp_path / "s")
    one.start()
    (one.folder / "manifest.json").write_text('{"stage": ')
    with pytest.raises(UserError, match=r"manifest\.json: not valid JSON .*; remove the folder"):
        one.state()


def test_the_fingerprint_follows_the_bytes_of_the_weights(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no \.safetensors file"):
        weights_fingerprint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"a")
    first = weights_fingerprint(tmp_path)
    write_json(tmp_path / "config.json", {})
    assert weights_fingerprint(tmp_path) == first
    (tmp_path / "model.safetensors").write_bytes(b"b")
    assert weights_fingerprint(tmp_path) != first


def test_json_is_written_whole(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"é": 1})
    assert json.loads((tmp_path / "a.json").read_text()) == {"é": 1}
    with pytest.raises(TypeError):
        write_json(tmp_path / "a.json", {"x": object()})
    assert json.loads((tmp_path / "a.json").read_text()) == {"é": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


# ---- folders that an fcsd of schema_version 1 left: manifests of one small run, and its recipe

SMALL = [
    "pretrain.train.max_steps=3", "pretrain.train.warmup_steps=1", "train.max_steps=3", "train.warmup_steps=1",
    "sweep=null", "evaluation.limit=2", "early_stopping.every_steps=2", "early_stopping.limit=2",
    "variants={sft: {objective.name: sft, early_stopping: null},"
    " kl: {early_stopping: {metric: heldout_kl, every_steps: 2}}}",
]  # fmt: skip


def former(name: str, folder: Path) -> tuple[Stage, dict[str, Any]]:
    """Return the stage as this fcsd would begin it in `folder`, which holds what the former one left; its manifest."""
    manifest = read_json(ROOT / "tests" / "files" / "schema_1" / f"{name}.json")
    assert manifest["schema_version"] == 1
    (folder / "history.jsonl").touch()
    write_json(folder / "manifest.json", manifest)
    recipe = load_recipe(ROOT / "tests" / "files" / "schema_1" / "recipe.yaml", SMALL)
    if name.startswith("variants-"):
        recipe = recipe.variant(name.removeprefix("variants-"))
    dump = recipe.dump()
    if manifest["stage"] == "pretrain":
        dump = dump["pretrain"] | {"seed": recipe.seed}
    suite = load_suite("tiny").model_dump(mode="json", exclude={"folder"})
    dump |= {"suite": suite, "early_stopping": score_settings(recipe.early_stopping)}
    settings = {}
    for key, value in manifest["settings"].items():
        settings[key] = dump[key]
        if key in ("data", "train", "evaluation", "model"):  # of which a stage records a part
            settings[key] = {part: each for part, each in dump[key].items() if part in value}
    return Stage(folder, manifest["stage"], settings, manifest["inputs"]), manifest


@pytest.mark.parametrize("name", ["pretrain", "convert", "variants-sft", "variants-kl", "evaluate-fcsd"])
def test_a_former_folder_is_read_where_its_settings_mean_the_same(name: str, tmp_path: Path) -> None:
    stage, manifest = former(name, tmp_path)
    assert stage.state() == "finished" and read_json(stage.folder / "manifest.json") == manifest


def test_a_former_folder_whose_settings_are_written_otherwise_is_refused_with_what_to_do(
    tmp_path: Path,
) -> None:
    stage, manifest = former("distill", tmp_path)
    assert manifest["settings"]["early_stopping"]["dataset"] == "fcsd/tiny-code"
    message = (
        r"was made by another fcsd \(schema_version 1, this one writes 5\) with other settings, or with these written"
        r" differently \(early_stopping\.chat_template: true -> null; .*; and \d+ more\); choose another output folder,"
        r" remove this folder to run the stage again, or continue with the fcsd that made it"
    )
    with pytest.raises(UserError, match=message):
        stage.state()


def test_a_former_folder_with_other_settings_is_refused(tmp_path: Path) -> None:
    stage, _ = former("variants-sft", tmp_path)
    changed = stage.settings | {"objective": stage.settings["objective"] | {"vocab_size": 7}}
    with pytest.raises(UserError, match=r"objective\.vocab_size: null -> 7"):
        Stage(stage.folder, stage.name, changed, stage.inputs).state()
    with pytest.raises(UserError, match=r"was made with other settings \(original: .* -> \"abc\"\)"):
        Stage(stage.folder, stage.name, stage.settings, stage.inputs | {"original": "abc"}).state()
