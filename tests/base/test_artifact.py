"""Stage folders: finished ones are found, changed ones are refused, and nothing
half-written has a final name.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from fcsd.base.artifact import ADAPTER, Stage, check_outputs, differences
from fcsd.base.errors import UserError
from fcsd.base.files import file_sha256, read_json, read_text, safetensors_header
from fcsd.base.weights import weights_fingerprint
from fcsd.base.writing import (
    check_file_place,
    check_folder_place,
    new_folder,
    write_json,
    writing,
)
from fcsd.data.rows import Shard
from fcsd.evaluation.suites import load_suite
from fcsd.model.connectivity.checkpoint import read_header
from fcsd.recipe.load_recipe import load_recipe
from fcsd.training.config import may_change
from fcsd.training.teachers.cache import read_shard
from tests.kills import Places
from tests.support import ROOT, assert_killed, user_error


def stage(folder: Path, **settings: object) -> Stage:
    return Stage(
        folder,
        "distill",
        {"train": {"learning_rate": 1e-3} | settings},
        {"original": "abc"},
    )


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
    assert manifest["results"] == {"steps": 3}
    assert manifest["versions"]["torch"]
    assert manifest["inputs"] == {"original": "abc"}


def test_adapters_that_changed_are_noticed(tmp_path: Path) -> None:
    one = stage(tmp_path / "s")
    (one.folder / ADAPTER).mkdir(parents=True)
    write_json(one.folder / ADAPTER / "adapter_config.json", {"r": 2})
    one.finish({})
    check_outputs(one.folder)
    write_json(one.folder / ADAPTER / "adapter_config.json", {"r": 4})
    with user_error(r"adapter/adapter_config\.json"):
        check_outputs(one.folder)


def test_an_identity_changes_with_what_a_stage_is_refused_for(tmp_path: Path) -> None:
    settings = {"train": {"learning_rate": 1e-3, "save_steps": 5}}

    def identity(folder: str = "s", may_change: str = "train.save_steps") -> str:
        return Stage(
            tmp_path / folder, "sweep", settings, {"data": "a"}, (may_change,)
        ).identity

    first = identity()
    # The result does not depend on these, and a later fcsd may add a key without a value.
    settings["train"] |= {"save_steps": 9, "added": None}
    assert identity() == identity("moved") == first
    assert identity(may_change="train.other") != first
    settings["train"]["learning_rate"] = 2e-3
    assert identity() != first


@pytest.mark.parametrize("finished", [False, True])
def test_a_changed_stage_is_refused_with_the_difference(
    tmp_path: Path, finished: bool
) -> None:
    one = stage(tmp_path / "s")
    one.start()
    (one.folder / "history.jsonl").touch()
    if finished:
        one.finish({})
    with user_error(
        r"other settings \(train\.learning_rate: 0\.001 -> 0\.002\); choose another"
        r" output folder"
    ):
        stage(tmp_path / "s", learning_rate=2e-3).state()
    with user_error(r'original: "abc" -> "def"'):
        Stage(one.folder, one.name, one.settings, {"original": "def"}).state()
    with user_error("holds stage 'distill', not 'sweep'"):
        Stage(one.folder, "sweep", {}, {}).state()


def test_a_stage_that_has_left_nothing_yet_may_begin_with_other_settings(
    tmp_path: Path,
) -> None:
    stage(tmp_path / "s").start()
    (tmp_path / "s" / "checkpoints").mkdir()
    other = stage(tmp_path / "s", learning_rate=2e-3)
    assert other.state() == "absent"
    other.start()
    (other.folder / "history.jsonl").touch()
    assert other.state() == "unfinished"


def test_a_folder_of_someone_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("mine")
    with user_error("was not made by stage 'distill'"):
        stage(tmp_path).state()


NOISE = [
    ".DS_Store", "._model.safetensors", ".nfs000000000012a4b100000001", ".fuse_hidden0000004500000002", "Thumbs.db",
    "desktop.ini", "lost+found/", ".Trash-1000/", "@eaDir/", ".snapshot/", ".Spotlight-V100/",
    ".stage.json.0a1b2c3d-17-0123abcd.tmp", ".model.0a1b2c3d-17-0123abcd.old/",
]  # fmt: skip


def add_noise(folder: Path, names: list[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        if name.endswith("/"):
            (folder / name).mkdir()
            (folder / name / "inside").write_text("x")
        else:
            (folder / name).write_text("x")


def test_what_systems_and_killed_processes_leave_in_a_folder_does_not_make_it_someone_elses(
    tmp_path: Path,
) -> None:
    for number, names in enumerate([[name] for name in NOISE] + [NOISE]):
        folder = tmp_path / str(number)
        add_noise(folder / "s", names)
        one = stage(folder / "s")
        assert one.state() == "absent", names
        one.start()
        assert stage(folder / "s", learning_rate=2e-3).state() == "absent"
        (one.folder / "history.jsonl").touch()
        assert one.state() == "unfinished"
        for kept in names:
            assert (folder / "s" / kept).exists()
        add_noise(folder / "report", names)
        with new_folder(folder / "report", "report.json", "report") as new:
            (new / "report.json").touch()
        add_noise(folder / "model", names)
        with new_folder(folder / "model", replaces=False) as new:
            (new / "config.json").touch()
        assert [path.name for path in (folder / "model").iterdir()] == ["config.json"]
    for name in (".env", "DS_Store", "nfs1", "notes.tmp", ".tmp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_text("mine")
        with user_error("was not made by stage 'distill'"):
            stage(tmp_path / name).state()


def test_a_kill_while_the_first_record_of_a_stage_is_written_does_not_keep_it_from_beginning(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "s"

    def killed() -> int:
        Places(folder, kill="before rename to stage.json, 1").watch()
        stage(folder).start()
        return 0

    assert_killed(killed, tmp_path / "output")
    (left,) = folder.iterdir()
    assert left.name.startswith(".stage.json.")
    # it has left nothing of either
    for other in (stage(folder), stage(folder, learning_rate=2e-3)):
        assert other.state() == "absent"
    stage(folder).start()
    assert [path.name for path in folder.iterdir()] == ["stage.json"]


def test_a_finished_stage_that_lacks_what_its_manifest_names_is_refused(
    tmp_path: Path,
) -> None:
    one = stage(tmp_path / "s")
    one.start()
    (one.folder / "model").mkdir()
    one.finish({}, {"model": "abc"})
    assert one.state() == "finished"
    (one.folder / "model").rmdir()
    message = (
        r"s/model: no such file, though manifest\.json names it; restore it, or remove"
        r" .*/s to run stage"
    )
    with user_error(message):
        one.state()


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


def test_an_existing_folder_is_replaced_only_when_the_new_one_is_whole(
    tmp_path: Path,
) -> None:
    with new_folder(tmp_path / "model") as folder:
        (folder / "old").write_text("x")
    with pytest.raises(ZeroDivisionError), new_folder(tmp_path / "model") as folder:
        1 / 0  # noqa: B018
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["old"]
    with new_folder(tmp_path / "model") as folder:
        (folder / "new").write_text("x")
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["new"]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_link_to_a_folder_stays_and_what_it_leads_to_is_replaced(
    tmp_path: Path,
) -> None:
    (tmp_path / "disk" / "publish").mkdir(parents=True)
    (tmp_path / "disk" / "publish" / "old").touch()
    (tmp_path / "publish").symlink_to("disk/publish")
    with new_folder(tmp_path / "publish") as new:
        assert new.parent == tmp_path / "disk", "on the disk of what is replaced"
        (new / "new").touch()
    assert (tmp_path / "publish").is_symlink()
    assert [file.name for file in (tmp_path / "disk" / "publish").iterdir()] == ["new"]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["disk", "publish"]
    (tmp_path / "gone").symlink_to("nowhere")
    with new_folder(tmp_path / "gone"):
        pass
    assert (tmp_path / "gone").is_symlink() and (tmp_path / "nowhere").is_dir()


def test_a_new_folder_takes_no_place_that_was_filled_in_the_meantime(
    tmp_path: Path,
) -> None:
    for make in (
        lambda place: (place.mkdir(), (place / "theirs").touch()),
        lambda place: place.touch(),
        lambda place: place.symlink_to(tmp_path),
    ):
        place = tmp_path / "new"
        with user_error("new: another process has created it"):  # noqa: SIM117
            with new_folder(place, replaces=False) as new:
                (new / "ours").touch()
                make(place)
        assert not (tmp_path / "ours").exists() and not (place / "ours").exists()
        (
            shutil.rmtree(place)
            if place.is_dir() and not place.is_symlink()
            else place.unlink()
        )
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("x" * 256, "has 256 bytes, but at most 200 are possible"),
        ("a/" + "é" * 101, "has 202 bytes, but at most 200 are possible"),
        ("x" * 256 + "/a", "has 256 bytes, but at most 255 are possible"),
        ("a\0b", "holds a NUL character"),
        ("a\ud800b", "holds an incomplete character"),
    ],
)
def test_a_path_that_no_file_can_have_is_refused_before_the_work(
    path: str, message: str, tmp_path: Path
) -> None:
    with user_error(message):
        check_folder_place(tmp_path / path)
    with user_error(message):
        check_file_place(tmp_path / path, read_json)
    check_folder_place(tmp_path / os.fsdecode(b"caf\xe9"))  # is a name, if not UTF-8


def test_a_text_with_half_a_character_is_written_as_json_can_have_it(
    tmp_path: Path,
) -> None:
    value = {"path": os.fsdecode(b"caf\xe9"), "text": "é\ud83d"}
    write_json(tmp_path / "x.json", value)
    assert read_json(tmp_path / "x.json") == value


@pytest.mark.parametrize("kind", ["pipe", "device", "link to a device"])
def test_only_regular_files_are_opened(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "x"
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "device":
        file = Path("/dev/zero")
    else:
        file.symlink_to("/dev/zero")
    for read in (
        read_text,
        read_json,
        file_sha256,
        safetensors_header,
        read_header,
        lambda shard: read_shard(shard, {}),
        lambda shard: Shard(shard).record,
    ):
        with user_error(r"is a (named pipe|device), a regular file is needed"):
            read(file)


def test_an_address_is_shown_without_what_may_be_secret() -> None:
    said = {
        "http://h:80/v1?api_key=SECRET&x=1 is it": "http://h:80/v1?… is it",
        "https://h/v1?key=a:SECRET: is it": "https://h/v1?…: is it",
        "'https://me:SECRET@h/v1' no": "'https://…@h/v1' no",
        "got 'me:SECRET@h:8000'": "got '…@h:8000'",
        "(https://SECRET@h/#SECRET)": "(https://…@h/#…)",
        "https://huggingface.co/me/x is it? a question: who@where": None,
        "runs/x: model.path: me/x@main; did you mean 'a'?": None,
    }
    for text, shown in said.items():
        assert str(UserError(text)) == (text if shown is None else shown)


def test_a_folder_that_does_not_have_the_mark_of_ours_is_not_replaced(
    tmp_path: Path,
) -> None:
    for text in ("old", "new"):
        with new_folder(tmp_path / "ours", "report.json", "report") as folder:
            (folder / "report.json").write_text(text)
    assert (tmp_path / "ours" / "report.json").read_text() == "new"
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "report.md").write_text("years")
    (tmp_path / "file").write_text("years")
    for name in ("thesis", "file"):
        with (
            user_error(f"{name}: exists and holds no report; choose another folder"),
            new_folder(tmp_path / name, "report.json", "report"),
        ):
            raise AssertionError
    assert (tmp_path / "thesis" / "report.md").read_text() == "years"


def test_a_full_disk_is_one_line_and_other_errors_pass(tmp_path: Path) -> None:
    with (
        user_error(r"model: could not be written \(No space left on device\)"),
        writing(tmp_path / "model"),
    ):
        raise OSError(28, "No space left on device")
    with pytest.raises(FileNotFoundError), writing(tmp_path / "model"):
        (tmp_path / "absent").read_text()


def test_a_damaged_manifest_says_what_to_do(tmp_path: Path) -> None:
    one = stage(tmp_path / "s")
    one.start()
    (one.folder / "manifest.json").write_text('{"stage": ')
    with user_error(r"manifest\.json: not valid JSON .*; remove the folder"):
        one.state()


def test_the_fingerprint_follows_the_bytes_of_the_weights(tmp_path: Path) -> None:
    with user_error(r"holds no \.safetensors file"):
        weights_fingerprint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"a")
    first = weights_fingerprint(tmp_path)
    write_json(tmp_path / "config.json", {})
    # what macOS leaves on foreign disks
    (tmp_path / "._model.safetensors").write_bytes(b"attributes")
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


# ---- folders that an fcsd with schema_version 1 wrote: manifests of one small run, and
# its recipe

SMALL = [
    "pretrain.train.max_steps=3", "pretrain.train.warmup_steps=1", "train.max_steps=3", "train.warmup_steps=1",
    "sweep=null", "evaluation.limit=2", "early_stopping.every_steps=2", "early_stopping.limit=2",
    "variants={sft: {objective.name: sft, early_stopping: null},"
    " kl: {early_stopping: {metric: heldout_kl, every_steps: 2}}}",
]  # fmt: skip


def former(name: str, folder: Path) -> tuple[Stage, dict[str, Any]]:
    """Return the stage as this fcsd would start it in `folder`, which holds the output
    of the earlier version, and the manifest of that version.
    """
    manifest = read_json(ROOT / "tests" / "files" / "schema_1" / f"{name}.json")
    assert manifest["schema_version"] == 1
    (folder / "history.jsonl").touch()
    for output in manifest["outputs"]:
        (folder / output).mkdir()
    write_json(folder / "manifest.json", manifest)
    recipe = load_recipe(ROOT / "tests" / "files" / "schema_1" / "recipe.yaml", SMALL)
    if name.startswith("variants-"):
        recipe = recipe.variant(name.removeprefix("variants-"))
    dump = recipe.dump()
    if manifest["stage"] == "pretrain":
        dump = dump["pretrain"] | {"seed": recipe.seed}
    suite = load_suite("tiny").model_dump(mode="json", exclude={"folder"})
    rule = recipe.early_stopping
    dump |= {"suite": suite, "early_stopping": rule.settings if rule else None}
    settings = {}
    for key, value in manifest["settings"].items():
        settings[key] = dump[key]
        # of which a stage records a part
        if key in ("data", "train", "evaluation", "model"):
            settings[key] = {
                part: each for part, each in dump[key].items() if part in value
            }
    free = {"evaluate": ("suite.description",), "distill": may_change(recipe.train)}
    return (
        Stage(folder, manifest["stage"], settings, manifest["inputs"], free.get(manifest["stage"], ())),
        manifest,
    )  # fmt: skip


@pytest.mark.parametrize(
    "name", ["pretrain", "convert", "variants-sft", "variants-kl", "evaluate-fcsd"]
)
def test_a_former_folder_is_read_where_its_settings_mean_the_same(
    name: str, tmp_path: Path
) -> None:
    stage, manifest = former(name, tmp_path)
    assert stage.state() == "finished"
    assert read_json(stage.folder / "manifest.json") == manifest


def test_a_former_folder_whose_settings_are_written_otherwise_is_refused_with_what_to_do(
    tmp_path: Path,
) -> None:
    stage, manifest = former("distill", tmp_path)
    assert manifest["settings"]["early_stopping"]["dataset"] == "fcsd/tiny-code"
    message = (
        r"was made by another fcsd \(schema_version 1, this one writes 8\) with other"
        r" settings, or with these written"
        r" differently \(early_stopping\.chat_template: true -> null; .*; and \d+"
        r" more\); choose another output folder,"
        r" remove this folder to run the stage again, or continue with the fcsd that"
        r" made it"
    )
    with user_error(message):
        stage.state()


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("0" * 64, "f" * 64, "data: other content"),
        ("0123456789abcdef", "fedcba9876543210", "data: other content"),
        # commits of the Hub, which can be looked up, and data that are gone
        ("0" * 40, "f" * 40, f'data: "{"0" * 40}" -> "{"f" * 40}"'),
        ("a/b@main", "f" * 8, 'data: "a/b@main" -> "ffffffff"'),
        ("deadbeef", None, 'data: "deadbeef" -> null'),
    ],
)
def test_of_two_hashes_a_difference_says_that_the_content_is_another(
    old: str, new: str | None, text: str
) -> None:
    assert differences({"data": old}, {"data": new}) == [text]


def test_a_former_folder_with_other_settings_is_refused(tmp_path: Path) -> None:
    stage, _ = former("variants-sft", tmp_path)
    changed = stage.settings | {
        "objective": stage.settings["objective"] | {"vocab_size": 7}
    }
    with user_error(r"objective\.vocab_size: null -> 7"):
        Stage(stage.folder, stage.name, changed, stage.inputs).state()
    with user_error(r"was made with other settings \(original: .* -> \"abc\"\)"):
        Stage(
            stage.folder, stage.name, stage.settings, stage.inputs | {"original": "abc"}
        ).state()
