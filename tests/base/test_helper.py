"""Helper processes ignore signals from others, and never keep the process that they
help from ending.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fcsd.base.helper import obey_only_parent
from tests.support import ROOT, assert_killed

pytestmark = pytest.mark.skipif(
    not hasattr(signal, "sigtimedwait"), reason="no sigtimedwait on this machine"
)

ENDED = 1  # the exit status of a helper that has obeyed


def helper() -> int:
    """Fork a helper of this process, and return it once it has started."""
    parent, (reader, writer) = os.getpid(), os.pipe()
    if (child := os.fork()) == 0:
        obey_only_parent(parent)
        os.write(writer, b"!")
        while True:
            time.sleep(1)
    assert os.read(reader, 1) == b"!"
    os.close(reader)
    os.close(writer)
    return child


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_of_another_process_is_ignored_and_one_of_the_parent_is_not(
    number: signal.Signals,
) -> None:
    child = helper()
    subprocess.run(["kill", f"-{int(number)}", str(child)], check=True)
    while number in pending(child):
        time.sleep(0.01)
    assert os.waitpid(child, os.WNOHANG) == (0, 0)
    os.kill(child, number)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == ENDED


def pending(process: int) -> set[signal.Signals]:
    """Return the signals that were sent to a process and are still pending."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    bits = int(next(line.split()[1] for line in lines if line.startswith("ShdPnd")), 16)
    return {number for number in signal.Signals if bits >> (int(number) - 1) & 1}


def test_a_helper_ends_with_its_parent(tmp_path: Path) -> None:
    def parent() -> int:
        (tmp_path / "pid").write_text(str(helper()))
        os.kill(os.getpid(), signal.SIGKILL)
        return 0

    assert_killed(parent, tmp_path / "output")
    state = Path("/proc", (tmp_path / "pid").read_text(), "status")
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        # a container may have no process that reaps orphans
        while "State:\tZ" not in state.read_text():
            time.sleep(0.05)


ALIVE_AT_EXIT = """
import os
from torch.utils.data import DataLoader
from fcsd.base.helper import obey_only_parent

trainer = os.getpid()
batches = iter(DataLoader(range(1000), num_workers=1, worker_init_fn=lambda worker: obey_only_parent(trainer)))
next(batches)
"""


def test_a_loader_that_is_not_used_up_does_not_keep_its_process_from_ending() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", ALIVE_AT_EXIT], cwd=ROOT, timeout=300, check=False
    )
    assert ended.returncode == 0
