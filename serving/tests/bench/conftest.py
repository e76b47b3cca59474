"""Tests beside those of fcsd, with their hooks: `make test-bench` runs them in fcsd's environment."""

from tests.conftest import (  # noqa: F401  hooks that pytest finds by name
    pytest_runtest_setup,
    pytest_xdist_make_scheduler,
)
