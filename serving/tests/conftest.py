"""Tests of the plugin in a real engine on a CPU: `make test-serving` makes the
environment and the checkpoints.
"""

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def models() -> Path:
    """The folder that `make_models.py` filled with fcsd's own environment."""
    folder = Path(os.environ.get("FCSD_SERVING_MODELS", ""))
    if not (folder / "qwen3_moe-all" / "reference.npz").is_file():
        pytest.fail(
            "FCSD_SERVING_MODELS names no folder of make_models.py; run `make test-serving`"
        )
    return folder
