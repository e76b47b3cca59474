"""Signals while a model is trained: the step is finished, a checkpoint written, and the run ended in good order.

    SIGTERM   the scheduler wants the machine back (SLURM sends it before it kills, `kill` sends it)
    SIGUSR1   the scheduler's early warning, if it is asked for one (`sbatch --signal=USR1@300`); it ends accelerate's
              launcher at once, which passes only the two others on
    SIGINT    Ctrl-C

A second one ends the process at once. A launcher passes on what a terminal or a scheduler has sent to its processes as
well, so what comes within `_ECHO_S` of the first is the first again.
"""

import os
import signal
import sys
import threading
import time
from types import FrameType
from typing import Any

from fcsd.base.helper import obey_only_parent

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_ECHO_S = 3.0


def shield_workers(loader: Any) -> Any:
    """Let a data loader's processes, which are needed until the one that they help has ended, ignore a signal that the
    scheduler
    or Ctrl-C has sent to all.
    """
    begin, trainer = loader.worker_init_fn, os.getpid()

    def begin_shielded(worker: int) -> None:
        obey_only_parent(trainer)
        if begin is not None:
            begin(worker)

    if loader.num_workers > 0:  # what accelerate puts around a loader begins no process itself
        getattr(loader, "base_dataloader", loader).worker_init_fn = begin_shielded
    return loader


class Signals:
    """While the block runs, `received` is the number of the signal that asked for the end; 0 when none has.

    Outside the main thread, where Python handles no signals, they do what they always do.
    """

    def __init__(self) -> None:
        self.received = 0
        self._at = 0.0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Signals":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self.received:
            self.received, self._at = number, time.monotonic()
            if os.environ.get("RANK", "0") == "0":
                # `print` may not be entered twice, and the signal may have come in the middle of one.
                name = signal.Signals(number).name
                os.write(2, f"\n{name}: this step is the last one; once more ends at once\n".encode())
        elif time.monotonic() - self._at > _ECHO_S:
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            signal.signal(number, signal.SIG_DFL)
            sys.stderr.flush()
            os.kill(os.getpid(), number)
