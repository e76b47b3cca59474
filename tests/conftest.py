"""A small base checkpoint with its tokenizer and data; the environment that tests need, however pytest is started."""

import os

# Before torch and transformers are imported, and inherited by child processes. One thread: a backward pass in a forked
# rank does not work once the parent has computed gradients with several, and the workers share the cores.
for _name, _value in {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}.items():
    os.environ.setdefault(_name, _value)

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.float64 import in_float64
from tests.support import Bench, make_bench


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests go to the workers one by one, but those of a file with fixtures for the module together, first.

    Each worker would make such a fixture for itself, and some take a minute. (`--dist loadgroup` is for this, but
    pytest-xdist 3.8 loses the groups under pytest 9.2, whose nodes keep their id elsewhere.)
    """
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return file if has_module_fixture(config.rootpath / file) else nodeid

    return Scheduling(config, log)


@functools.cache
def has_module_fixture(file: Path) -> bool:
    return 'scope="module"' in file.read_text(encoding="utf-8")


@pytest.fixture(scope="session")
def base_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random qwen2_moe of two layers with a tokenizer of 300 tokens."""
    from fcsd.tiny.models import tiny_model, tiny_tokenizer

    folder = tmp_path_factory.mktemp("base") / "model"
    tiny_model("qwen2_moe", num_hidden_layers=2, vocab_size=300, num_experts=4).save_pretrained(folder)
    tiny_tokenizer(300).save_pretrained(folder)
    return folder


@pytest.fixture
def float64() -> Iterator[None]:
    """For `usefixtures`: models are made and called in float64 throughout."""
    with in_float64():
        yield


@pytest.fixture
def bench(base_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """A place for one test's runs."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return make_bench(base_checkpoint, tmp_path)
