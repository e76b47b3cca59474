"""The layers by which the kernel confines generated programs. Standard library only.

    namespaces    own user, process, network, IPC and host-name space: no network except the sockets that lie
                  in folders and those to a hypervisor, no process outside, few process numbers
    scratch       a small tmpfs for each job as the only writable folder (needs the user namespace); else no
                  file can be written
    landlock      files: read the Python installation and /usr, write only the folder of the job
    seccomp       no system calls that no benchmark program needs: sockets, exec, ptrace, keys, …; in a job
                  also no mount, no fork, no signals to others, no chmod, no locks of whole files, no foreign
                  limits or priorities; and nothing that is newer than the kernel whose table was read
    rlimits       address space, CPU time, file size, open files, processes, pending signals
    capabilities  none left; no_new_privs

A function that applies a layer does so to the calling process, permanently, and returns
whether it holds. Structures and numbers: linux/landlock.h, linux/seccomp.h,
linux/filter.h, and the system call tables of x86_64 and of asm-generic (aarch64) of
Linux 7.2.
"""

import contextlib
import ctypes
import functools
import json
import os
import platform
import re
import resource
import struct
import sys
from typing import Any

NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = (
    0x00020000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000,
)  # fmt: skip
EPERM, ENOSYS = 1, 38
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP = 1, 4, 22, 24
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 36, 38
SCRATCH_BYTES, SCRATCH_FILES = 64 << 20, 512
MAX_THREADS = 256  # of one job
CAP_SYS_ADMIN = 1 << 21  # mount and unmount

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def _calls() -> list[dict[str, Any]]:
    """Read the calls that the filters know (`system_calls.json`), by rule: name ->
    (x86_64, aarch64), None where the machine has no such call.
    """
    folder = os.path.dirname(os.path.abspath(__file__))
    with open(os.path.join(folder, "system_calls.json"), encoding="ascii") as file:
        rules = json.load(file)
    return [
        {name: tuple(numbers) for name, numbers in rules[rule].items()}
        for rule in ("system", "job", "checked")
    ]


# Denied to everything in the sandbox; to the two processes of a job; and to these for
# some arguments. The server mounts a job's folder. Landlock does not know file modes,
# owners, times and attributes, and lets whoever may read a file take a lock of it
# (`flock`) for which other jobs wait.
_SYSTEM, _JOB, _CHECKED = _calls()
# The last call in the tables of Linux 7.2: calls of later kernels are refused until
# someone has looked at them.
_NEWEST = 471
# Set who gets which signal when a descriptor is ready (F_SETOWN, F_SETSIG, F_SETOWN_EX,
# F_SETLEASE, F_NOTIFY): the kernel would send SIGKILL to another process for a program
# that may not. And F_SETPIPE_SZ: the pages of all pipes of a user count together.
_FCNTL = (8, 10, 15, 1024, 1026, 1031)
# Set the signal that is sent when the parent ends, and whether the kernel writes a
# core: a core handler would store it on disk, whatever the size limit.
_PRCTL = (PR_SET_PDEATHSIG, PR_SET_DUMPABLE)
# column above, AUDIT_ARCH
_ARCH = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_THIS_PROCESS = 0x7FEDCBA9  # the number of no process


def unshare_namespaces() -> list[str]:
    """Enter new namespaces, with a user namespace or (as root where those are
    forbidden) without; [] if neither works.

    The process namespace holds for children: fork afterwards.
    """
    uid, gid = os.getuid(), os.getgid()
    namespaces = NEWPID | NEWNET | NEWIPC | NEWUTS
    if _libc.unshare(NEWUSER | namespaces) == 0:
        # Inside, the caller is `nobody`; outside, it remains the same user.
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"65534 {uid} 1"),
            ("gid_map", f"65534 {gid} 1"),
        ):
            with contextlib.suppress(OSError), open(f"/proc/self/{name}", "w") as file:
                file.write(text)
        return ["user", "pid", "net", "ipc", "uts"]
    if _libc.unshare(namespaces) == 0:
        return ["pid", "net", "ipc", "uts"]
    return []


def limit_processes() -> None:
    """Bound the process numbers of this process namespace, from its first process: the
    limit of processes does not hold for root, and a machine without a free number
    starts no process for anybody.

    A kernel before 6.14 has one bound for the whole machine, which stays as it is.
    """
    release = re.match(r"(\d+)\.(\d+)", os.uname().release)
    if release and (int(release[1]), int(release[2])) >= (6, 14):
        # The kernel does not give numbers below this a second time. They are also
        # skipped the first time, so that all jobs have equally many.
        reserved = 300
        for name, value in (
            ("pid_max", reserved + MAX_THREADS),
            ("ns_last_pid", reserved),
        ):
            with (
                contextlib.suppress(OSError),
                open(f"/proc/sys/kernel/{name}", "w") as file,
            ):
                file.write(str(value))


def enter_mounts(folder: str) -> bool:
    """Enter a mount namespace whose mounts nobody else sees; False where no folder can
    be mounted in it.
    """
    if _libc.unshare(NEWNS) != 0:
        return False
    private, recursive = 1 << 18, 1 << 14
    _libc.mount(None, b"/", None, ctypes.c_ulong(private | recursive), None)
    try:
        mount_scratch(folder)
        unmount_scratch(folder)
    except OSError:
        return False
    return True


def mount_scratch(folder: str) -> None:
    """Put an empty tmpfs of limited size and number of files over `folder`; OSError
    where that fails.
    """
    options = f"size={SCRATCH_BYTES},nr_inodes={SCRATCH_FILES},mode=700".encode()
    nosuid_nodev_noexec = 2 | 4 | 8
    flags = ctypes.c_ulong(nosuid_nodev_noexec)
    if _libc.mount(b"none", folder.encode(), b"tmpfs", flags, options) != 0:
        raise _os_error("cannot make the folder of a program")


def unmount_scratch(folder: str) -> None:
    """End the tmpfs over `folder` with all that it holds; OSError where that fails."""
    detach = 2  # out of everybody's sight, though something still holds it
    # Argument offsets in the filter are for little-endian 64-bit machines.
    if (
        _libc.umount2(folder.encode(), 0) != 0
        and _libc.umount2(folder.encode(), detach) != 0
    ):
        raise _os_error("cannot remove the folder of a program")


def _os_error(text: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{text}: {os.strerror(number)}")


def forbid_privileges() -> bool:
    """Close every way to new capabilities."""
    held = _libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    for number in range(64):
        _libc.prctl(PR_CAPBSET_DROP, number, 0, 0, 0)
    return bool(held)


def hold_capabilities(mask: int) -> bool:
    """Give up every capability except those in `mask`, including those of a user
    namespace.
    """
    header = ctypes.create_string_buffer(struct.pack("=Ii", 0x20080522, 0), 8)
    sets = ctypes.create_string_buffer(struct.pack("=6I", mask, mask, 0, 0, 0, 0), 24)
    return bool(_libc.capset(header, sets) == 0)


def readable_paths(modules: str | None) -> list[str]:
    """List the paths that programs may read. A prefix that is the root folder does not
    count: such a Python lies in /usr and /lib.
    """
    paths = {
        sys.prefix,
        sys.base_prefix,
        "/usr",
        "/lib",
        "/lib64",
        "/etc/ld.so.cache",
        "/etc/localtime",
    }
    paths |= {modules} if modules else set()
    paths |= {os.path.realpath(path) for path in paths} | {"/dev/urandom", "/dev/zero"}
    return sorted(paths - {"/"})


class FileRules:
    """The file rules of a job, by Landlock: read the Python installation, system
    libraries and `modules`, and write below a folder of its own. abi: of the kernel's
    Landlock, 0 where it has none."""

    _CREATE, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446

    def __init__(self, modules: str | None = None):
        self.abi = abi = max(
            0, int(_libc.syscall(self._CREATE, None, ctypes.c_size_t(0), 1))
        )
        execute, write_file, read_file, read_dir = 1, 2, 4, 8
        refer, truncate, ioctl, resolve_unix = 1 << 13, 1 << 14, 1 << 15, 1 << 16
        handled = (
            (1 << 13) - 1
            | (refer if abi >= 2 else 0)
            | (truncate if abi >= 3 else 0)
            | (ioctl if abi >= 5 else 0)
            | (resolve_unix if abi >= 9 else 0)
        )
        # bind and connect of TCP, of UDP
        net = (3 if abi >= 4 else 0) | (12 if abi >= 10 else 0)
        scoped = 3 if abi >= 6 else 0  # abstract sockets and signals stay inside
        self._attributes = ctypes.create_string_buffer(
            struct.pack("=QQQ", handled, net, scoped), 24
        )
        # As long as the structure that this kernel knows: versions 4 and 6 added a field.
        known_fields = 1 + (abi >= 4) + (abi >= 6)
        self._size = ctypes.c_size_t(8 * known_fields)
        # In its own folder a program makes no programs, devices and sockets.
        self._whole = handled & ~(execute | 1 << 6 | 1 << 9 | 1 << 11 | resolve_unix)
        self._shared = []
        for path in readable_paths(modules) if abi else ():
            with contextlib.suppress(OSError):
                descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
                rights = read_file | (read_dir if os.path.isdir(path) else 0)
                self._shared.append(self._rule(descriptor, rights))
        if abi:
            null = os.open("/dev/null", os.O_PATH | os.O_CLOEXEC)
            self._shared.append(self._rule(null, read_file | write_file))

    @staticmethod
    def _rule(descriptor: int, rights: int) -> Any:
        return ctypes.create_string_buffer(struct.pack("=Qi", rights, descriptor), 12)

    def ruleset(self, folder: str | None) -> int:
        """Return a descriptor of the rules of one job, which writes below `folder`;
        OSError where they cannot be.
        """
        ruleset = int(_libc.syscall(self._CREATE, self._attributes, self._size, 0))
        if ruleset < 0:
            raise _os_error("cannot make the file rules of a program")
        for rule in self._shared:
            _libc.syscall(self._ADD_RULE, ruleset, 1, rule, 0)
        if folder is not None:
            descriptor = os.open(folder, os.O_PATH | os.O_CLOEXEC)
            try:
                rule = self._rule(descriptor, self._whole)
                if _libc.syscall(self._ADD_RULE, ruleset, 1, rule, 0) != 0:
                    raise _os_error("cannot open its folder to a program")
            finally:
                os.close(descriptor)
        return ruleset

    def restrict(self, ruleset: int) -> bool:
        """Apply the rules of one job."""
        return bool(_libc.syscall(self._RESTRICT_SELF, ruleset, 0) == 0)


def filter_program(machine: str, *, job: bool) -> bytes:
    """Return the seccomp filter of the sandbox, or (`job=True`, on top of it) of one
    job's process, this one.
    """
    return _filter(machine, job).replace(
        struct.pack("=I", _THIS_PROCESS), struct.pack("=I", os.getpid())
    )


@functools.cache
def _filter(machine: str, job: bool) -> bytes:
    """Build a filter in which `_THIS_PROCESS` represents the process id."""
    column, audit = _ARCH[machine]
    kill_process = (0x06, 0, 0, 0x80000000)
    refuse = 0x00050000
    allow = (0x06, 0, 0, 0x7FFF0000)
    load, equal, at_least, any_bit = 0x20, 0x15, 0x35, 0x45
    number, architecture, first_argument, second_argument = 0, 4, 16, 24
    # An instruction is (code, steps to skip if it holds, steps to skip if not,
    # constant); loads and returns skip none.
    program: list[tuple[int, int, int, int]] = [
        (load, 0, 0, architecture), (equal, 1, 0, audit), kill_process, (load, 0, 0, number),
    ]  # fmt: skip
    # The x32 calls of x86_64 also have high numbers.
    program += [(at_least, 0, 1, _NEWEST + 1), (0x06, 0, 0, refuse | ENOSYS)]

    def when(call: str, *then: tuple[int, int, int, int]) -> None:
        program.extend([(equal, 0, len(then), _CHECKED[call][column]), *then])

    stop, argument = (0x06, 0, 0, refuse | EPERM), (load, 0, 0, first_argument)
    for numbers in (_JOB if job else _SYSTEM).values():
        if numbers[column] is not None:
            program += [(equal, 0, 1, int(numbers[column] or 0)), stop]
    if job:
        # threads, not processes
        when("clone", argument, (any_bit, 0, 1, 0x10000), allow, stop)
        # its flags lie in memory; glibc then uses clone
        when("clone3", (0x06, 0, 0, refuse | ENOSYS))
        when("kill", argument, (equal, 0, 1, _THIS_PROCESS), allow, stop)
        when("tgkill", argument, (equal, 0, 1, _THIS_PROCESS), allow, stop)
        when("prlimit64", argument, (equal, 0, 1, 0), allow, stop)
        when(
            "sched_setaffinity",
            argument,
            (equal, 1, 0, 0),
            (equal, 0, 1, _THIS_PROCESS),
            allow,
            stop,
        )
        options = [step for option in _PRCTL for step in ((equal, 0, 1, option), stop)]
        when("prctl", argument, *options, allow)
        commands = [
            step for command in _FCNTL for step in ((equal, 0, 1, command), stop)
        ]
        when("fcntl", (load, 0, 0, second_argument), *commands, allow)
    program.append(allow)
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


def forbid_system_calls(*, job: bool) -> bool:
    """Apply `filter_program` of seccomp, where this machine has one."""
    if (
        platform.machine() not in _ARCH
        or struct.calcsize("P") != 8
        or sys.byteorder != "little"
    ):
        return False
    code = filter_program(platform.machine(), job=job)
    buffer = ctypes.create_string_buffer(code, len(code))
    header = struct.pack("=HxxxxxxQ", len(code) // 8, ctypes.addressof(buffer))
    return bool(
        _libc.prctl(PR_SET_SECCOMP, 2, ctypes.create_string_buffer(header, 16), 0, 0)
        == 0
    )


if platform.machine() in _ARCH:
    filter_program(platform.machine(), job=True)  # built once, before the first job


def count_threads() -> int:
    """Count the threads of this user on the machine, as far as they are seen; 0 for
    root, who has no limit of them.
    """
    user, count = os.getuid(), 0
    for process in os.scandir("/proc") if user else ():
        with contextlib.suppress(OSError):
            if process.name.isdigit() and process.stat().st_uid == user:
                count += len(os.listdir(f"{process.path}/task"))
    return count


def limit_resources(
    memory_bytes: int, cpu_s: int, num_threads: int = MAX_THREADS
) -> bool:
    """Set hard limits of one job's process: address space, CPU seconds, file size, open
    files, processes, pending signals, no core."""
    held = True
    for name, value in (
        (resource.RLIMIT_AS, memory_bytes), (resource.RLIMIT_CPU, cpu_s), (resource.RLIMIT_FSIZE, 16 << 20),
        (resource.RLIMIT_NOFILE, 64), (resource.RLIMIT_NPROC, num_threads), (resource.RLIMIT_SIGPENDING, 256),
        (resource.RLIMIT_CORE, 0),
    ):  # fmt: skip
        try:
            hard = resource.getrlimit(name)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(name, (value, value))
        except (ValueError, OSError):
            held = False
    return held


def prctl(option: int, value: int) -> Any:
    """Call one of the simple process controls."""
    return _libc.prctl(option, value, 0, 0, 0)
