"""Things in a checkpoint's folder that are not its files: links that lead out of it,
pipes, devices, others' code.
"""

import os
import re
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from fcsd.cli.main import main
from fcsd.model.config import ModelConfig
from fcsd.model.connectivity import (
    Connectivity,
    convert_checkpoint,
    load_model,
    unconvert_checkpoint,
)
from fcsd.model.connectivity.export import export_checkpoint
from fcsd.model.connectivity.modeling import modeling_source
from fcsd.model.families import FAMILIES
from fcsd.model.inspect.checkpoint import find_source
from fcsd.model.load import find_model, load_tokenizer
from fcsd.pipeline.tiny.models import tiny_tokenizer
from fcsd.report.publish.push import push
from fcsd.training.calibration.checkpoint import calibratable
from tests.reference.tiny import tiny_model
from tests.support import change_json, edited_json, user_error

ALL = Connectivity("all")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with `base`, and `far`, converted."""
    folder = tmp_path_factory.mktemp("links")
    tiny_model("deepseek_v2").save_pretrained(folder / "base")
    tiny_tokenizer(99).save_pretrained(folder / "base")
    (folder / "base" / "additional_chat_templates").mkdir()
    (folder / "base" / "additional_chat_templates" / "tools.jinja").write_text(
        "{{ messages }}"
    )
    convert_checkpoint(folder / "base", folder / "far", ALL)
    return folder


@pytest.fixture
def base(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made / "base", tmp_path / "base"))


@pytest.fixture
def far(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made / "far", tmp_path / "far"))


def replace_by_link(file: Path, target: Path | str) -> None:
    if file.is_dir():
        shutil.rmtree(file)
    file.unlink(missing_ok=True)
    file.symlink_to(target)


def calibrate(folder: Path, out: Path) -> None:
    calibratable(find_model(ModelConfig(path=str(folder))), ALL)


READERS: dict[str, tuple[str, Callable[[Path, Path], object]]] = {
    "convert": ("base", lambda folder, out: convert_checkpoint(folder, out, ALL)),
    "load": ("base", lambda folder, out: load_model(folder)),
    "tokenizer": ("base", lambda folder, out: load_tokenizer(folder)),
    "calibrate": ("base", calibrate),
    "unconvert": ("far", unconvert_checkpoint),
    "export": ("far", lambda folder, out: export_checkpoint(folder, out)),
    "push": ("far", lambda folder, out: push(folder, "me/x", dry_run=out)),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    "name",
    [
        "LICENSE", "tokenizer_x.json", "tokenizer.json", "config.json", "additional_chat_templates",
    ],
)  # fmt: skip
def test_a_link_out_of_a_checkpoint_is_refused_by_name_and_nothing_is_written(
    made: Path, tmp_path: Path, reader: str, name: str
) -> None:
    kind, read = READERS[reader]
    folder = Path(shutil.copytree(made / kind, tmp_path / "checkpoint"))
    secret = tmp_path / "elsewhere"
    if name == "additional_chat_templates":
        secret.mkdir()
        (secret / "x.jinja").write_text("a secret")
    else:
        secret.write_text(
            (folder / name).read_text() if (folder / name).is_file() else "a secret"
        )
    replace_by_link(folder / name, secret)
    with user_error(
        rf"checkpoint/{name}.*: is a link to .*elsewhere.*, which is not a file"
    ):
        read(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "name", ["NOTICE", "report.json", "loss.png", "README.md", "modeling_farskip.py"]
)
def test_what_a_push_sends_beside_a_checkpoint_is_no_link_either(
    far: Path, tmp_path: Path, name: str
) -> None:
    (tmp_path / "elsewhere").write_text("{}")
    replace_by_link(far / name, "../elsewhere")
    with user_error(rf"{name}: is a link to .*elsewhere"):
        push(far, "me/x", dry_run=tmp_path / "dry")
    assert not (tmp_path / "dry").exists()


def test_weights_and_sizes_are_not_read_through_a_link_either(
    base: Path, tmp_path: Path
) -> None:
    (base / "model.safetensors").rename(tmp_path / "weights")
    (base / "model.safetensors").symlink_to("../weights")
    for read in (
        find_source,
        load_model,
        lambda folder: convert_checkpoint(folder, tmp_path / "out", ALL),
    ):
        with user_error(r"model\.safetensors: is a link to .*weights"):
            read(base)


def test_a_link_to_nothing_is_refused(base: Path, tmp_path: Path) -> None:
    (base / "LICENSE").symlink_to("TERMS")
    with user_error(r"LICENSE: is a link to .*TERMS, which does not exist"):
        convert_checkpoint(base, tmp_path / "out", ALL)


def test_links_inside_a_checkpoint_and_to_the_folder_itself_are_followed(
    base: Path, tmp_path: Path
) -> None:
    (base / "texts").mkdir()
    (base / "texts" / "terms").write_text("Apache-2.0")
    (base / "LICENSE").symlink_to("texts/terms")
    (tmp_path / "link").symlink_to(base)
    convert_checkpoint(tmp_path / "link", tmp_path / "out", ALL)
    assert (tmp_path / "out" / "LICENSE").read_text() == "Apache-2.0"
    assert not (tmp_path / "out" / "LICENSE").is_symlink()


def as_snapshot(folder: Path, repository: Path) -> Path:
    """Arrange a checkpoint as the Hub's cache does: huggingface_hub 1.x,
    `snapshots/COMMIT/NAME -> …/blobs/HASH`.
    """
    snapshot, blobs = repository / "snapshots" / ("0" * 40), repository / "blobs"
    blobs.mkdir(parents=True)
    for number, file in enumerate(
        sorted(path for path in folder.rglob("*") if path.is_file())
    ):
        place = snapshot / file.relative_to(folder)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, blobs / f"{number:040x}")
        place.symlink_to(os.path.relpath(blobs / f"{number:040x}", place.parent))
    return snapshot


def test_a_snapshot_of_the_hubs_cache_is_read_through_its_own_links_alone(
    base: Path, tmp_path: Path
) -> None:
    snapshot = as_snapshot(base, tmp_path / "models--me--x")
    convert_checkpoint(snapshot, tmp_path / "out", ALL)
    assert (
        tmp_path / "out" / "additional_chat_templates" / "tools.jinja"
    ).read_text() == "{{ messages }}"
    assert len(load_tokenizer(snapshot)) == len(load_tokenizer(base))
    (tmp_path / "secret").write_text("a secret")
    # A blob that is a link itself, another repository's blob, and a file beside the
    # blobs.
    other = as_snapshot(base, tmp_path / "models--me--y")
    for target in (
        tmp_path / "secret",
        os.path.realpath(other / "config.json"),
        snapshot.parent / "refs",
    ):
        replace_by_link(snapshot.parent.parent / "blobs" / "link", target)
        replace_by_link(snapshot / "LICENSE", "../../blobs/link")
        with user_error("LICENSE: is a link to"):
            convert_checkpoint(snapshot, tmp_path / "out2", ALL)


def make_pipe(file: Path) -> None:
    os.mkfifo(file)


def make_socket(file: Path) -> None:
    here = os.getcwd()
    os.chdir(file.parent)  # the path of a socket is short
    try:
        socket.socket(socket.AF_UNIX).bind(file.name)
    finally:
        os.chdir(here)


@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors", "tokenizer.json", "LICENSE"]
)
@pytest.mark.parametrize(
    ("make", "said"), [(make_pipe, "a named pipe"), (make_socket, "a socket")]
)
def test_a_pipe_or_a_socket_is_refused_and_never_waited_for(
    base: Path, tmp_path: Path, name: str, make: Callable[[Path], None], said: str
) -> None:
    (base / name).unlink(missing_ok=True)
    make(base / name)
    readers: list[Callable[[Path], object]] = [
        lambda folder: convert_checkpoint(folder, tmp_path / "out", ALL)
    ]
    readers += [load_model] if name != "LICENSE" else []
    readers += [load_tokenizer] if name in ("config.json", "tokenizer.json") else []
    readers += [find_source] if name in ("config.json", "model.safetensors") else []
    for read in readers:
        with user_error(rf"{re.escape(name)}: is {said}, a regular file is needed"):
            read(base)


@pytest.mark.parametrize("words", [["run"], ["evaluate", "m", "--suite"]])
def test_a_recipe_that_never_ends_is_refused(
    tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.yaml").symlink_to("/dev/zero")
    assert main([*words, str(tmp_path / "x.yaml")]) == 2
    assert "x.yaml: is a device, a regular file is needed" in capsys.readouterr().err


def test_code_of_a_tokenizer_is_taken_from_its_folder_alone(
    base: Path, tmp_path: Path
) -> None:
    (tmp_path / "secret.py").write_text("SECRET = 1\n")
    change_json(
        base / "tokenizer_config.json",
        {"auto_map": {"AutoTokenizer": [None, "words.Words"]}},
    )
    wrong = {
        f"from .{tmp_path}/secret import x\n": (
            r"words\.py: imports \./.*, but fcsd copies only files in the same folder"
        ),
        "from .missing import x\n": r"missing\.py: no such file, which the code of .*words\.py needs",
        "from .link import x\n": r"link\.py: is a link to .*secret\.py",
        "from .modeling_farskip import x\n": "modeling_farskip.py: fcsd writes the connectivity's code under this name",
    }  # fmt: skip
    (base / "link.py").symlink_to("../secret.py")
    for text, message in wrong.items():
        (base / "words.py").write_text(text)
        with user_error(message):
            convert_checkpoint(base, tmp_path / "out", ALL)
        assert not (tmp_path / "out").exists()
    (base / "words.py").write_text("from .more import x\n")
    (base / "more.py").write_text("from .words import y\n")
    convert_checkpoint(base, tmp_path / "out", ALL)
    assert (tmp_path / "out" / "more.py").read_text() == "from .words import y\n"


def test_changed_code_is_not_published_but_what_fcsd_writes(
    far: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    right = modeling_source(FAMILIES["deepseek_v2"])
    push(far, "me/x", dry_run=tmp_path / "first")
    assert "is not what this fcsd writes" not in capsys.readouterr().err
    (far / "modeling_farskip.py").write_text(right + "\nimport os\n")
    push(far, "me/x", dry_run=tmp_path / "second")
    assert (
        "modeling_farskip.py: is not what this fcsd writes for deepseek_v2"
        in capsys.readouterr().err
    )
    assert (tmp_path / "second" / "modeling_farskip.py").read_text() == right
    with edited_json(far / "config.json") as config:
        config["auto_map"]["AutoModelForCausalLM"] = "evil.Model"
    (far / "evil.py").write_text("class Model: pass\n")
    with user_error(
        r"auto_map names evil\.py, modeling_farskip\.py; in a FarSkip checkpoint"
    ):
        push(far, "me/x", dry_run=tmp_path / "third")
    convert_checkpoint(far, tmp_path / "other", Connectivity("none"))
    assert (tmp_path / "other" / "modeling_farskip.py").read_text() == right
    assert not (tmp_path / "other" / "evil.py").exists()
