"""How much host memory there is to use.

Not covered: systems without /proc (macOS), where it is not known and counts as none.
"""

from pathlib import Path

_CGROUPS, _GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def available_memory() -> int:
    """Return the bytes that this process may still use: what the machine has, and what
    its job (cgroup) may have.
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
            place = root / path.lstrip("/")
            free += [
                room
                for folder in (place, *place.parents)
                if (room := _room(folder)) is not None
            ]
    return max(0, min(free))


def _room(folder: Path) -> int | None:
    """Return the bytes that a cgroup's limit leaves, pages of its files not counted;
    None where it has no limit.
    """
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
