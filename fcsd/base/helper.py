"""A process that only helps another: it is needed until that one ends, whatever a
scheduler or a terminal sends to all.

Not covered: machines without `sigtimedwait` (macOS), where it has the signals of any
process.
"""

import os
import signal
import threading

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_PARENT_CHECK_S = 1.0


def obey_only_parent(parent: int) -> None:
    """End this process when the process `parent` has ended or asks for it; a signal of
    any other sender is ignored.

    To ignore all of them would hang the parent: multiprocessing ends what is left of
    its processes with SIGTERM, and waits for them without limit.
    """
    if hasattr(signal, "sigtimedwait"):
        # for threads that begin later, too
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        threading.Thread(target=_obey, args=(parent,), daemon=True).start()


def _obey(parent: int) -> None:
    while os.getppid() == parent:
        received = signal.sigtimedwait(_SIGNALS, _PARENT_CHECK_S)
        if received is not None and received.si_pid == parent:
            break
    os._exit(1)
