"""A helper process lives exactly as long as its parent, whatever signals a scheduler or
a terminal sends to the whole group.

Not covered: machines without `sigtimedwait` (macOS), where a helper obeys signals like
any process.
"""

import os
import signal
import threading

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_PARENT_CHECK_S = 1.0


def obey_only_parent(parent: int) -> None:
    """End this process when the process `parent` has ended or asks for it; signals of
    other senders are ignored.

    Ignoring the parent's, too, would hang it: multiprocessing ends its remaining
    processes with SIGTERM, and waits for them without limit.
    """
    if hasattr(signal, "sigtimedwait"):
        # Threads that start later inherit the mask.
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        # A helper that multiprocessing's fork server started is the server's child, and
        # the server ends with `parent`.
        keeper = os.getppid() if _is_alive(parent) else parent
        threading.Thread(
            target=_wait_for_parent, args=(parent, keeper), daemon=True
        ).start()


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def _wait_for_parent(parent: int, keeper: int) -> None:
    while os.getppid() == keeper:
        received = signal.sigtimedwait(_SIGNALS, _PARENT_CHECK_S)
        if received is not None and received.si_pid == parent:
            break
    # Not sys.exit, which would end only this thread.
    os._exit(1)
