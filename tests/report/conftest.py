"""A browser for the pages of a report."""

from collections.abc import Iterator

import pytest

from tests.report.chromium import PROGRAM, Chromium


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    if PROGRAM is None:
        pytest.skip(
            "no Chromium on this machine (Debian: apt-get install"
            " --no-install-recommends chromium)"
        )
    with Chromium(tmp_path_factory.mktemp("chromium")) as browser:
        yield browser


@pytest.fixture
def browser(chromium: Chromium) -> Iterator[Chromium]:
    """Yield the browser; a page that logs an error or requests anything but itself
    fails.
    """
    chromium.requests.clear()
    chromium.errors.clear()
    yield chromium
    assert chromium.errors == []
    pages = {request.partition("#")[0] for request in chromium.requests}
    assert len(pages) == 1 and pages.pop().startswith("file:"), chromium.requests
