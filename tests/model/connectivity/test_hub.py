"""fcsd fetches from a Hub repository what transformers loads, and tokenizer code;
nothing else that is large.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.utils import filter_repo_objects

from fcsd.cli.main import main
from fcsd.model.connectivity import Connectivity, convert_checkpoint, load_model
from fcsd.model.connectivity.checkpoint import find_folder
from fcsd.model.inspect import inspect_model
from fcsd.model.load import load_tokenizer
from fcsd.pipeline.tiny.models import tiny_tokenizer
from tests.reference.tiny import tiny_model
from tests.support import change_json, user_error

COMMIT = "a" * 40
INDEX = "model.safetensors.index.json"
CODE = """
from transformers import PreTrainedTokenizerFast
from .helper_of_tokenizer import NAME


class CodeTokenizer(PreTrainedTokenizerFast):
    made_by = NAME
"""


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a repository like those of gpt-oss (`original/`) and Mistral
    (`consolidated`), with a tokenizer like Moonlight's.
    """
    folder = tmp_path_factory.mktemp("published")
    tiny_model("qwen3_moe").save_pretrained(folder, max_shard_size="30KB")
    tiny_tokenizer(99).save_pretrained(folder)
    change_json(
        folder / "tokenizer_config.json",
        {"auto_map": {"AutoTokenizer": ["code_tokenizer.CodeTokenizer", None]}},
    )
    (folder / "code_tokenizer.py").write_text(CODE)
    (folder / "helper_of_tokenizer.py").write_text('NAME = "code"\n')
    shard = next(folder.glob("model-*.safetensors"))
    for name in (
        "original/model.safetensors",
        "original/config.json",
        "metal/model.bin",
        "onnx/x.safetensors",
    ):
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(shard, folder / name)
    for name in (
        "consolidated.safetensors",
        "consolidated-00001-of-00002.safetensors",
        "pytorch_model.bin",
    ):
        shutil.copyfile(shard, folder / name)
    return folder


@pytest.fixture
def hub(
    published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., list[str | None]]:
    """Serve a copy of the repository, with files changed by `change`; yield the
    revisions that are requested.
    """

    def serve(
        change: Callable[[Path], object] = lambda folder: None,
    ) -> list[str | None]:
        repository = Path(shutil.copytree(published, tmp_path / "repository"))
        change(repository)
        asked: list[str | None] = []
        snapshot = tmp_path / "hub" / "models--owner--name" / "snapshots" / COMMIT
        names = [
            str(file.relative_to(repository))
            for file in repository.rglob("*")
            if file.is_file()
        ]

        def snapshot_download(
            name: str, revision: str | None = None, **patterns: Any
        ) -> str:
            assert name == "owner/name"
            asked.append(revision)
            for file in filter_repo_objects(names, **patterns):
                (snapshot / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(repository / file, snapshot / file)
            return str(snapshot)

        def hf_hub_download(
            name: str,
            file: str,
            revision: str | None = None,
            local_files_only: bool = False,
        ) -> str:
            return str(repository / file)

        def model_info(self: Any, name: str, **options: Any) -> Any:
            sizes = {file: (repository / file).stat().st_size for file in names}
            return SimpleNamespace(
                siblings=[
                    SimpleNamespace(rfilename=f, size=s) for f, s in sizes.items()
                ]
            )

        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
        monkeypatch.setattr(huggingface_hub, "hf_hub_download", hf_hub_download)
        monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
        return asked

    return serve


def weight_names(folder: Path) -> set[str]:
    files = [*folder.rglob("*.safetensors"), *folder.rglob("*.bin")]
    return {str(file.relative_to(folder)) for file in files}


def shards(folder: Path) -> set[str]:
    return set(json.loads((folder / INDEX).read_text())["weight_map"].values())


def test_of_the_weights_those_that_the_index_names_are_fetched_at_one_commit(
    hub: Callable[..., list[str | None]], published: Path
) -> None:
    asked = hub()
    folder = find_folder("owner/name", "main")
    assert weight_names(folder) == shards(published)
    assert not (folder / "original").exists()
    assert asked == ["main", COMMIT]  # the branch may have moved between the two
    find_folder("owner/name", "main")
    assert asked == ["main", COMMIT, "main"]
    load_model("owner/name")


def test_of_a_single_file_beside_a_stale_index_only_the_file_is_fetched(
    hub: Callable[..., list[str | None]], published: Path
) -> None:
    def add(folder: Path) -> None:
        shutil.copyfile(
            folder / "consolidated.safetensors", folder / "model.safetensors"
        )

    hub(add)
    assert weight_names(find_folder("owner/name")) == {"model.safetensors"}
    size = (published / "consolidated.safetensors").stat().st_size
    assert inspect_model("owner/name")["files"] == {
        "count": 1, "missing": [], "total_bytes": size, "largest_bytes": size,
    }  # fmt: skip


def test_inspect_counts_the_files_that_the_index_names(
    hub: Callable[..., list[str | None]], published: Path
) -> None:
    hub()
    files = inspect_model("owner/name")["files"]
    sizes = [os.path.getsize(published / name) for name in shards(published)]
    assert (files["count"], files["total_bytes"], files["largest_bytes"]) == (
        len(sizes), sum(sizes), max(sizes),
    )  # fmt: skip


def test_an_index_that_is_damaged_on_the_hub_is_one_line(
    hub: Callable[..., list[str | None]],
) -> None:
    hub(
        lambda folder: (folder / INDEX).write_text(
            '{"weight_map": {"x": "../x.safetensors"}}'
        )
    )
    with user_error(r"weight_map names '\.\./x\.safetensors'"):
        find_folder("owner/name")


def test_a_tokenizer_with_code_of_its_own_loads_where_code_is_allowed(
    hub: Callable[..., list[str | None]], tmp_path: Path
) -> None:
    hub()
    tokenizer = load_tokenizer("owner/name", trust_remote_code=True)
    assert type(tokenizer).made_by == "code"
    convert_checkpoint("owner/name", tmp_path / "far", Connectivity("all"))
    tokenizer = load_tokenizer(tmp_path / "far", trust_remote_code=True)
    assert type(tokenizer).made_by == "code"


def test_a_conversion_without_weights_fetches_none(
    hub: Callable[..., list[str | None]], tmp_path: Path
) -> None:
    asked = hub()
    out = tmp_path / "out"
    words = ["convert", "owner/name", str(out), "--revision", "main", "--config-only"]
    assert main(words) == 0
    assert asked == ["main"]
    snapshot = tmp_path / "hub" / "models--owner--name" / "snapshots" / COMMIT
    assert weight_names(snapshot) == weight_names(out) == set()
    record = json.loads((out / "manifest.json").read_text())
    assert record["settings"]["model"] == {"path": "owner/name", "revision": "main"}
    tokenizer = load_tokenizer(out, trust_remote_code=True)
    assert type(tokenizer).made_by == "code"
    # Files that were fetched first do not keep the weights from being fetched later.
    convert_checkpoint("owner/name", tmp_path / "far", Connectivity("all"))
    config = "config.json"
    assert (out / config).read_bytes() == (tmp_path / "far" / config).read_bytes()
