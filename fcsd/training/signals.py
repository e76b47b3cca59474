"""End a training cleanly after a signal that asks for the end.

Not covered: what the training does before it ends (`fcsd.training.trainer`).
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

from fcsd.base.helper import obey_only_parent
from fcsd.base.memory import check_shared_memory

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_ECHO_S = 3.0


def shield_workers(loader: Any) -> Any:
    """Let a data loader's workers ignore a signal that was sent to all processes: the
    trainer needs them until it ends itself.
    """
    # accelerate's wrapper starts no workers; the loader inside it does.
    if loader.num_workers > 0:
        check_shared_memory()
        begin = partial(_begin_shielded, os.getpid(), loader.worker_init_fn)
        getattr(loader, "base_dataloader", loader).worker_init_fn = begin
    return loader


# Not a closure: a worker that is spawned gets it as a pickle.
def _begin_shielded(
    trainer: int, worker_init: Callable[[int], None] | None, worker: int
) -> None:
    obey_only_parent(trainer)
    if worker_init is not None:
        worker_init(worker)


class Signals:
    """Catch, within the block, the signals that ask for the end; `received` is the
    number of the first one, 0 when there was none.

    SIGTERM: the scheduler wants the machine back. SIGUSR1: its early warning, if
    requested (`sbatch --signal=USR1@300`), which ends accelerate's launcher
    immediately. SIGINT: Ctrl-C. A second signal ends the process immediately. A
    launcher forwards a signal that the terminal or the scheduler has sent to its
    processes as well, so a signal within `_ECHO_S` of the first is taken for its echo.
    Outside the main thread, where Python handles no signals, all keep their usual
    effect.
    """

    def __init__(self) -> None:
        self.received = 0
        self._at = 0.0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Signals":
        if threading.current_thread() is threading.main_thread():
            self._before = {
                number: signal.signal(number, self._handle) for number in _SIGNALS
            }
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self.received:
            self.received, self._at = number, time.monotonic()
            if os.environ.get("RANK", "0") == "0":
                # `print` is not reentrant, and the signal may have interrupted one.
                name = signal.Signals(number).name
                os.write(
                    2,
                    f"\n{name}: finishing this step; a second signal stops now\n".encode(),
                )
        elif time.monotonic() - self._at > _ECHO_S:
            # The second signal has the effect that it would have had without us.
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            signal.signal(number, signal.SIG_DFL)
            sys.stderr.flush()
            os.kill(os.getpid(), number)
