"""The patch for vLLM in `serving/upstream`, applied to a copy of the installed vLLM."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cases import BREADTH

from fcsd_vllm.sources import SOURCES

FOLDER = Path(__file__).parent.parent / "upstream"
PATCH = FOLDER / "all_reduce_start_wait.patch"
TEST = "tests/distributed/test_all_reduce_start_wait.py"
COMMUNICATOR = "vllm/distributed/device_communicators/base_device_communicator.py"
RUNNER = "vllm/model_executor/layers/fused_moe/runner/moe_runner.py"
FAULTS = {
    "no_wait": (COMMUNICATOR, "            work.wait()\n", "            pass\n"),
    "no_copy": (COMMUNICATOR, "output = input_.clone(", "output = input_.to("),
    "not_cut": (RUNNER, "_start(states[..., :trunc_size])", "_start(states)"),
}  # fmt: skip
"""File, text and its replacement in the patched copy."""


def changed_files() -> set[Path]:
    """Return the files of vLLM that the patch changes."""
    found = re.findall(r"^--- a/(\S+)$", PATCH.read_text(), re.MULTILINE)
    return {Path(name) for name in found}


def copy_changed(source: Path, target: Path, changed: set[Path]) -> None:
    """Copy the changed files of a folder, and link to everything else."""
    target.mkdir()
    for child in source.iterdir():
        below = {path.relative_to(child.name) for path in changed if path.parts[0] == child.name}  # fmt: skip
        if below and child.is_dir():
            copy_changed(child, target / child.name, below)
        elif below:
            shutil.copy(child, target / child.name)
        elif child.name != "__pycache__":
            (target / child.name).symlink_to(child)


@pytest.fixture
def patched(tmp_path: Path) -> Path:
    """A folder with the patched vLLM and the patch's test."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    changed = {path.relative_to("vllm") for path in changed_files()}
    copy_changed(Path(spec.origin).parent, tmp_path / "vllm", changed)
    applied = subprocess.run(
        ["patch", "-p1", "--batch", "--fuzz=0", "-i", str(PATCH)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert applied.returncode == 0, applied.stdout + applied.stderr
    assert "offset" not in applied.stdout
    return tmp_path


def run_its_test(folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the patch's own test with the patched vLLM, without plugins."""
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", TEST],
        cwd=folder,
        env={
            **os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(folder),
            "VLLM_CACHE_ROOT": str(folder / "cache"), "VLLM_PLUGINS": "",
        },
        capture_output=True,
        text=True,
    )  # fmt: skip


def test_a_patched_vllm_passes_the_test_that_the_patch_brings(patched: Path) -> None:
    ran = run_its_test(patched)
    assert ran.returncode == 0, ran.stdout[-4000:]
    assert "1 passed" in ran.stdout


@pytest.mark.parametrize("fault", list(FAULTS)[: None if BREADTH else 1])
def test_the_test_that_the_patch_brings_sees_a_fault(fault: str, patched: Path) -> None:
    name, text, replacement = FAULTS[fault]
    file = patched / name
    source = file.read_text()
    assert source.count(text) == 1
    file.write_text(source.replace(text, replacement))
    ran = run_its_test(patched)
    assert ran.returncode == 1 and "1 failed" in ran.stdout, ran.stdout[-4000:]
    assert re.search("Tensor-likes are not close|attribute 'shape'", ran.stdout)


def test_the_functions_that_the_patch_makes_needless_are_pinned_today() -> None:
    text = (FOLDER / "README.md").read_text()
    needless = re.findall(r"^- `([\w.]+)`$", text, re.MULTILINE)
    pinned = SOURCES["0.32.0"]
    for name in needless:
        assert any(each.endswith(f".{name}") for each in pinned), name
    assert f"identifies {len(pinned)} functions" in text
    assert f"with this patch, {len(pinned) - len(needless)}." in text


def test_the_patch_names_no_user_of_it() -> None:
    assert not re.search("fcsd|farskip", PATCH.read_text(), re.IGNORECASE)
