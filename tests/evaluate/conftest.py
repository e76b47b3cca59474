"""Offline from the start, and no data set cached outside the test's own folders."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    import datasets

    before = datasets.config.HF_DATASETS_CACHE
    datasets.config.HF_DATASETS_CACHE = tmp_path_factory.mktemp("datasets")
    yield
    datasets.config.HF_DATASETS_CACHE = before


@pytest.fixture(scope="session")
def shared_hub() -> Path:
    """Real data sets in hub layout, where the machine has them."""
    root = Path(os.environ.get("FCSD_SHARED_DATA") or Path(__file__).parents[3] / "shared" / "data")
    if not (root / "hub").is_dir():
        pytest.skip(f"no real data sets at {root}/hub (set FCSD_SHARED_DATA)")
    return root / "hub"
