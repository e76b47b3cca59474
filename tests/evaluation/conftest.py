"""Keep data sets from being cached outside the test's own folders."""

import functools
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    import datasets

    before = datasets.config.HF_DATASETS_CACHE
    datasets.config.HF_DATASETS_CACHE = tmp_path_factory.mktemp("datasets")
    yield
    datasets.config.HF_DATASETS_CACHE = before


@pytest.fixture(autouse=True, scope="session")
def _one_look_at_the_machine() -> Iterator[None]:
    """Inspect the machine only once: lm-eval records pip's list, compilers and drivers
    with every evaluation, which takes a second and a half each time.
    """
    from torch.utils import collect_env

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            collect_env,
            "get_pretty_env_info",
            functools.cache(collect_env.get_pretty_env_info),
        )
        yield


@pytest.fixture(scope="session")
def shared_hub(shared_data: Path) -> Path:
    """Real data sets in hub layout."""
    return shared_data / "hub"
