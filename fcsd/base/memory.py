"""The host memory that this process may still use or share, and the release of unused
memory.

Not covered: systems without /proc (macOS), where it is unknown and counts as 0.
"""

import gc
import multiprocessing
from pathlib import Path

from fcsd.base.errors import UserError

_CGROUPS, _GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def check_shared_memory() -> None:
    """Refuse a machine on which processes cannot share memory, before torch, `datasets`
    or a pool of processes fail to.

    Raises:
        UserError: nothing can be made in /dev/shm.
    """
    try:
        multiprocessing.get_context().Lock()
    except OSError as error:
        raise UserError(
            f"/dev/shm: cannot be written ({error.strerror}), and data sets and worker"
            " processes share memory there; make it writable (in a container: --ipc=host"
            " or --shm-size)"
        ) from None


def available_memory() -> int:
    """Return the bytes that this process may still use: the least of what the machine
    has left and what each limit of its job (cgroup) leaves.
    """
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        groups = _GROUPS.read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    free = [
        next(
            int(line.split()[1]) * 1024
            for line in lines
            if line.startswith("MemAvailable:")
        )
    ]
    for line in groups:
        _, kind, path = line.split(":", 2)
        if kind in ("", "memory"):  # of version 2, and of version 1
            root = _CGROUPS / kind
            cgroup = root / path.lstrip("/")
            # The limits of all parent cgroups also apply to this process.
            for folder in (cgroup, *cgroup.parents):
                room = _room(folder)
                if room is not None:
                    free.append(room)
    return max(0, min(free))


def _room(folder: Path) -> int | None:
    """Return the bytes that a cgroup's limit leaves; None where it has no limit.

    Cached pages of files count as free: the kernel drops them when memory is needed.
    """
    # Files of cgroup version 2, and of version 1.
    names = (
        ("memory.max", "memory.current", "file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "cache"),
    )
    for limit, used, pages in names:
        try:
            text = (folder / limit).read_text(encoding="ascii").strip()
            stat = (folder / "memory.stat").read_text(encoding="ascii").splitlines()
            held = int((folder / used).read_text(encoding="ascii"))
        except OSError:
            continue
        cached = next(
            (int(line.split()[1]) for line in stat if line.split()[0] == pages), 0
        )
        return None if text == "max" else int(text) - held + cached
    return None


def free_memory() -> None:
    """Release the memory of models that are no longer referenced."""
    import torch

    # The allocator releases only blocks whose tensors are gone, so collect cycles first.
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.memory.empty_cache()
