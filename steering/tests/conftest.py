"""Tests beside those of fcsd, with their fixtures: `make test-steering`."""

from tests.conftest import (  # noqa: F401  fixtures, and hooks that pytest finds by name
    base_checkpoint,
    bench,
    pytest_runtest_setup,
    pytest_xdist_make_scheduler,
)
