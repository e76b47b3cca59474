"""The numbers in the sandbox's filter against the kernel's own tables, and the filter's
verdict on each call.
"""

import re
import struct
from pathlib import Path
from typing import Any

import pytest

from fcsd.evaluation.code.sandbox import layers

FILTERED = {**layers._SYSTEM, **layers._JOB, **layers._CHECKED}
COLUMNS = {"x86_64": 0, "aarch64": 1}


def kernel_table() -> dict[str, tuple[int | None, int | None]]:
    lines = (
        (Path(__file__).parent / "system_calls.txt")
        .read_text(encoding="ascii")
        .splitlines()
    )
    rows = [line.split() for line in lines if not line.startswith("#")]
    return {
        name: (*(None if n == "-" else int(n) for n in numbers),)
        for name, *numbers in rows
    }  # type: ignore[misc]


def test_every_number_is_that_of_linux_7_2_on_both_architectures() -> None:
    table = kernel_table()
    assert len(table) > 380
    assert {name: table[name] for name in FILTERED} == FILTERED


@pytest.mark.parametrize(
    ("column", "headers"),
    [(0, ("/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "/usr/include/asm/unistd_64.h")),
     (1, ("/usr/include/asm-generic/unistd.h",))],
    ids=COLUMNS,
)  # fmt: skip
def test_the_table_is_that_of_this_machine_s_headers(
    column: int, headers: tuple[str, ...]
) -> None:
    header = next((Path(name) for name in headers if Path(name).is_file()), None)
    if header is None:
        pytest.skip(
            f"no kernel headers at {headers[0]} (Debian: apt-get install linux-libc-dev)"
        )
    definitions = re.findall(
        r"#define __NR(?:3264)?_(\w+)\s+(\d+)\b", header.read_text(encoding="utf-8")
    )
    table = kernel_table()
    # The generic header also has calls that aarch64 left out.
    known = {
        name: int(number)
        for name, number in definitions
        if table.get(name, (None, None))[column] is not None
    }
    assert len(known) > 250 and {name: table[name][column] for name in known} == known


def test_what_is_newer_than_the_table_is_refused() -> None:
    assert (
        max(n for numbers in kernel_table().values() for n in numbers if n is not None)
        == layers._NEWEST
    )


def test_a_python_in_the_root_folder_does_not_open_all_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(layers.sys, "prefix", "/")
    assert "/" not in layers.readable_paths(None)
    assert "/usr" in layers.readable_paths(None)


# ---- the filter itself, interpreted: its verdict on a call, on either architecture

ALLOW, EPERM, ENOSYS, KILL = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000
OWN = 4321


def verdict(
    program: bytes, machine: str, number: int, *arguments: int, audit: int | None = None
) -> int:
    """The return value of a classic BPF program for a system call: linux/filter.h, the
    instructions that it uses.
    """
    data = struct.pack(
        "=iIQ6Q",
        number,
        audit or layers._ARCH[machine][1],
        0,
        *arguments,
        *[0] * (6 - len(arguments)),
    )
    code = list(struct.iter_unpack("=HBBI", program))
    place = accumulator = 0
    while True:
        operation, true, false, k = code[place]
        place += 1
        if operation == 0x20:
            (accumulator,) = struct.unpack_from("=I", data, k)
        elif operation == 0x06:
            return k
        else:
            test = {
                0x15: accumulator == k,
                0x35: accumulator >= k,
                0x45: bool(accumulator & k),
            }[operation]
            place += true if test else false


@pytest.fixture(params=COLUMNS)
def filters(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """verdict of (system filter, job filter) of one architecture for a call by name."""
    machine = request.param
    monkeypatch.setattr(layers.os, "getpid", lambda: OWN)
    programs = [layers.filter_program(machine, job=job) for job in (False, True)]

    def ask(name: str | int, *arguments: int, audit: int | None = None) -> int:
        number = (
            kernel_table()[name][COLUMNS[machine]] if isinstance(name, str) else name
        )
        if number is None:
            pytest.skip(f"{machine} has no {name}")
        verdicts = [
            verdict(program, machine, number, *arguments, audit=audit)
            for program in programs
        ]
        return min(
            verdicts, key=lambda value: (ALLOW, EPERM, ENOSYS, KILL)[::-1].index(value)
        )

    return ask


def test_the_filter_refuses_every_listed_call_and_lets_ordinary_ones_through(
    filters: Any,
) -> None:
    for name, numbers in {**layers._SYSTEM, **layers._JOB}.items():
        if all(number is not None for number in numbers):
            assert filters(name) == EPERM, name
    for name in (
        "read",
        "write",
        "openat",
        "mmap",
        "brk",
        "futex",
        "exit_group",
        "getrandom",
        "newfstatat",
        "rseq",
    ):
        assert filters(name) == ALLOW, name
    assert filters(layers._NEWEST) == ALLOW and filters(layers._NEWEST + 1) == ENOSYS
    assert filters("read", audit=0x40000003) == KILL  # the 32-bit calls of x86


def test_the_filter_looks_at_arguments(filters: Any) -> None:
    assert filters("clone", 0x10000 | 0x100) == ALLOW and filters("clone", 17) == EPERM
    assert filters("clone3") == ENOSYS
    for name in ("kill", "tgkill"):
        assert filters(name, OWN, 9) == ALLOW
        assert {filters(name, other, 9) for other in (0, 1, OWN + 1, 2**32 - 1)} == {
            EPERM
        }
        # a pid has 32 bits: this is our own
        assert filters(name, OWN + 2**32, 9) == ALLOW
    assert filters("prlimit64", 0) == ALLOW and filters("prlimit64", OWN + 1) == EPERM
    assert filters("sched_setaffinity", 0) == filters("sched_setaffinity", OWN) == ALLOW
    assert filters("sched_setaffinity", 1) == EPERM
    assert filters("prctl", 1, 0) == filters("prctl", 4, 1) == EPERM
    assert filters("prctl", 15) == ALLOW
    assert {
        filters("fcntl", 3, command) for command in (8, 10, 15, 1024, 1026, 1031)
    } == {EPERM}
    assert {
        filters("fcntl", 3, command) for command in (0, 1, 2, 3, 4, 6, 1030, 1032)
    } == {ALLOW}
