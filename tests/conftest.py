"""A small base checkpoint with its tokenizer and data; every test starts from the same
state, in any order.
"""

import functools
import gc
import itertools
import os
import random
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tests.environment  # noqa: F401  before torch
from tests.float64 import in_float64
from tests.slow import mark_slow
from tests.support import SHARED_DATA, Bench, make_bench


def own_lock_of_bars() -> None:
    """Replace the lock of progress bars: they share it with forks, and a killed fork
    may hold it forever.
    """
    if (bars := sys.modules.get("tqdm.std")) is not None:
        lock, kinds = threading.RLock(), [bars.tqdm]
        for kind in kinds:
            kind.set_lock(lock)
            kinds += kind.__subclasses__()


os.register_at_fork(after_in_child=own_lock_of_bars)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Send tests to the workers one by one, but those of a file with module fixtures
    together, and first.

    Each worker would make such a fixture for itself, and some take a minute. (`--dist
    loadgroup` is for this, but pytest-xdist 3.8 loses the groups under pytest 9.2,
    whose nodes keep their id elsewhere.)
    """
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return file if has_module_fixture(config.rootpath / file) else nodeid

    return Scheduling(config, log)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--shuffle",
        type=int,
        metavar="SEED",
        help="files, and tests in a file, in a random order",
    )


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses by marks
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Mark the slow tests. With `--shuffle`, shuffle the tests: none may depend on another one before it.
    Otherwise send long tests to the workers first, so that no worker is left with one
    at the end.
    """
    mark_slow(items)
    if (seed := config.getoption("--shuffle")) is not None:
        order = random.Random(seed)
        places = {
            file: order.random() for file in sorted({item.path for item in items})
        }
        order.shuffle(items)
        items.sort(key=lambda item: places[item.path])
    # without workers the fixtures of a module would be made twice
    elif hasattr(config, "workerinput"):
        items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    keep_old_objects_out_of_collections(len(sys.modules) // 100, next(TESTS) // 8)
    seed_everything()


TESTS = itertools.count()


@functools.lru_cache(maxsize=1)
def keep_old_objects_out_of_collections(hundreds_of_modules: int, tests: int) -> None:
    """Keep imported modules, and what earlier tests have left, out of garbage
    collections. A full collection visits millions of their objects for a second, and in
    a fork copies them; a loaded model, an epoch and the end of every training each ask
    for one.
    """
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call() -> None:
    seed_everything()


def seed_everything() -> None:
    """Seed the generators, so that a test draws the same numbers after any other test,
    and whether or not it is the first to need a fixture.
    """
    import numpy
    import torch

    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def same_environment() -> Iterator[None]:
    """Restore the environment: a command that a test runs in this process sets
    variables for its own libraries, which the next test must not see.
    """
    before = dict(os.environ)
    yield
    for name in (os.environ.keys() | before.keys()) - {"PYTEST_CURRENT_TEST"}:
        if name not in before:
            del os.environ[name]
        elif os.environ.get(name) != before[name]:
            os.environ[name] = before[name]


@functools.cache
def has_module_fixture(file: Path) -> bool:
    return 'scope="module"' in file.read_text(encoding="utf-8")


@pytest.fixture(scope="session")
def base_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random qwen2_moe of two layers with a tokenizer of 300 tokens."""
    from fcsd.pipeline.tiny.models import tiny_tokenizer
    from tests.reference.tiny import tiny_model

    folder = tmp_path_factory.mktemp("base") / "model"
    tiny_model(
        "qwen2_moe", num_hidden_layers=2, vocab_size=300, num_experts=4
    ).save_pretrained(folder)
    tiny_tokenizer(300).save_pretrained(folder)
    return folder


@pytest.fixture
def float64() -> Iterator[None]:
    """For `usefixtures`: make and call models entirely in float64."""
    with in_float64():
        yield


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Return the real data sets if the machine has them; if the user says that it has
    them, they must exist.
    """
    if not (SHARED_DATA / "hub").is_dir():
        missing = f"no real data sets at {SHARED_DATA}/hub (set FCSD_SHARED_DATA)"
        pytest.fail(missing) if "FCSD_SHARED_DATA" in os.environ else pytest.skip(
            missing
        )
    return SHARED_DATA


@pytest.fixture
def bench(
    base_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Bench:
    """A place for one test's runs."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return make_bench(base_checkpoint, tmp_path)
