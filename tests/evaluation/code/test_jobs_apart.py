"""Programs that try to change the outcome of the programs after and beside them; and
machines that fail.

Each row runs between right and wrong programs, whose outcomes stay the same as without
it. Its body may do anything, raise, or never end; the program's result is wrong.
"""

import contextlib
import os
import resource
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from fcsd.base.errors import ScorerError
from fcsd.evaluation.code import sandbox
from fcsd.evaluation.code import scorer as scorer_module
from fcsd.evaluation.code.problems import Problem
from fcsd.evaluation.code.scorer import CodeScorer
from tests.evaluation.code.attacks import (
    CONFIGURATIONS,
    PROBLEM,
    job_bytes,
    raw_server,
    run,
)
from tests.support import few

HEAD = """
import contextlib, ctypes, fcntl, mmap, os, signal, socket, stat, struct, sys, threading, time
l = ctypes.CDLL(None, use_errno=True)
here = os.getcwd()
up = os.path.dirname(here)
places = [".", "..", here, up, "/tmp", "/var/tmp", "/dev/shm", sys.prefix, os.path.expanduser("~"), "/usr/lib", "/"]

def tried(call, *arguments, **named):
    try:
        return call(*arguments, **named)
    except OSError:
        return None

def all_of(count, call):
    for number in range(count):
        try:
            call(number)
        except OSError:
            return

def write(path, data=b"x"):
    with open(path, "wb") as file:
        file.write(data)

def replace(path, make):
    for name in (path, "../" + os.path.basename(here)):
        tried(os.rename, name, name + ".old")
        tried(os.rmdir, name)
        tried(make, name)
"""

INODES = {
    "here": "all_of(5000, lambda n: write(f'f{n}'))",
    "above": "all_of(5000, lambda n: write(f'../f{n}'))",
    "far above": "all_of(5000, lambda n: write(f'../../f{n}'))",
    "everywhere": "for place in places: all_of(900, lambda n: write(f'{place}/f{n}'))",
    "folders": "all_of(5000, lambda n: os.mkdir(f'd{n}'))",
    "nested folders": "all_of(5000, lambda n: (os.mkdir('d'), os.chdir('d')))",
    "nested closed folders": "all_of(5000, lambda n: (os.mkdir('d', 0o300), os.chdir('d')))",
    "hard links": "write('f'); all_of(5000, lambda n: os.link('f', f'g{n}'))",
    "hard links above": "write('f'); all_of(5000, lambda n: os.link('f', f'../g{n}'))",
    "links": "all_of(5000, lambda n: os.symlink('x' * 4000, f'l{n}'))",
    "unlinked and open": "all_of(5000, lambda n: (os.open(f'f{n}', os.O_CREAT | os.O_RDWR), os.unlink(f'f{n}')))",
    "unlinked and mapped": (
        """
def hold(n):
    with open(f"f{n}", "w+b") as file:
        file.truncate(4096)
        maps.append(mmap.mmap(file.fileno(), 4096))
    os.unlink(f"f{n}")
maps = []
all_of(5000, hold)
time.sleep(0.1)
"""
    ),
    "control characters": "all_of(5000, lambda n: write(b'\\n\\x1b[2J\\xff' + bytes([1 + n % 9]) * (1 + n // 9)))",
    "long names": "all_of(5000, lambda n: write(f'{n:0250}'))",
    "no names": "all_of(5000, lambda n: os.open('.', os.O_TMPFILE | os.O_RDWR))",
}  # fmt: skip
LINKS = {
    "dangling in the folder's place": "replace(here, lambda name: os.symlink('/nowhere', name))",
    "to the folder above in its place": "replace(here, lambda name: os.symlink('..', name))",
    "to the root in its place": "replace(here, lambda name: os.symlink('/', name))",
    "to itself in its place": "replace(here, lambda name: os.symlink(os.path.basename(here), name))",
    "a file in its place": "replace(here, write)",
    "no folder in its place": "replace(here, lambda name: None)",
    "the folder above": "replace(up, lambda name: os.symlink('/nowhere', name))",
    "the previous job": "replace('../job', lambda name: os.symlink('/nowhere', name))",
    "up": "os.symlink('..', 'up'); write('up/fcsd_left')",
    "out": "os.symlink('/tmp', 'out'); write('out/fcsd_left')",
    "through proc": "os.symlink('/proc/self/cwd', 'c'); os.symlink('/proc/1/root', 'r'); write('c/../fcsd_left')",
    "names of another": "for name in ('answer.txt', 'numpy', 'math.py', 'job'): os.symlink('/dev/zero', name)",
    "to Python": "os.symlink(sys.prefix, 'lib'); os.link(os.__file__, 'os.py'); write('os.py')",
    "a circle": "os.symlink('a', 'b'); os.symlink('b', 'a'); os.mkdir('d'); os.symlink('..', 'd/d')",
    "renamed while in it": "os.rename('.', '../moved'); os.rename(here, here + 'x'); os.chdir('..'); os.rmdir(here)",
    "exchanged": "os.mkdir('d'); l.renameat2(-100, here.encode(), -100, b'd', 2)",
}  # fmt: skip
FIFOS = {
    "here": "all_of(100, lambda n: os.mkfifo(f'f{n}'))",
    "above": "all_of(100, lambda n: os.mkfifo(f'../f{n}'))",
    "in the folder's place": "replace(here, os.mkfifo)",
    "in place of the previous job": "replace('../job', os.mkfifo)",
    "in place of the folder above": "replace(up, os.mkfifo)",
    "everywhere": "for place in places: tried(os.mkfifo, f'{place}/fcsd_left')",
    "names of another": "for name in ('answer.txt', 'job', 'numpy.py', 'tests.py'): os.mkfifo(name)",
    "without a right": "os.mkfifo('f', 0); os.mkfifo('../f', 0)",
    "waits for a reader": "os.mkfifo('f'); open('f', 'w')",
    "full": "os.mkfifo('f'); f = os.open('f', os.O_RDWR | 2048); all_of(99, lambda n: os.write(f, bytes(65536)))",
    "waits in threads": "os.mkfifo('f'); all_of(50, lambda n: threading.Thread(target=open, args=['f']).start())",
    "devices": "os.mknod('d', stat.S_IFBLK | 0o600, os.makedev(254, 0)); open('d', 'wb')",
    "more devices": "os.mknod('n', stat.S_IFCHR | 0o600, os.makedev(1, 1)); open('n', 'r+b')",
    "sockets": "os.mknod('s', stat.S_IFSOCK | 0o600); socket.socket(socket.AF_UNIX).bind('answer.txt')",
    "abstract sockets": "socket.socket(socket.AF_UNIX).bind('\\0fcsd_left')",
}  # fmt: skip
MOUNTS = {
    "over the folder": "l.mount(b'none', here.encode(), b'tmpfs', 0, b'size=4k')",
    "over the folder above": "l.mount(b'none', up.encode(), b'tmpfs', 0, b'')",
    "over Python": "l.mount(b'none', sys.prefix.encode(), b'tmpfs', 0, b'')",
    "bound": "os.mkdir('d'); l.mount(b'/', b'd', None, 4096 | 16384, None)",
    "read-only": "l.mount(None, here.encode(), None, 32 | 1, None)",
    "of no size": "l.mount(None, here.encode(), b'tmpfs', 32, b'size=4k,nr_inodes=1')",
    "shared": "l.mount(None, b'/', None, (1 << 20) | 16384, None)",
    "gone": "for flags in (0, 1, 2, 8): l.umount2(here.encode(), flags); l.umount2(b'/usr', flags)",
    "its own": "l.unshare(0x20000); l.umount2(here.encode(), 2)",
    "its own user's": "l.unshare(0x10020000); l.mount(b'none', here.encode(), b'tmpfs', 0, b'')",
    "another process's": "[l.setns(os.open(f'/proc/{n}/ns/mnt', 0), 0) for n in (1, os.getppid())]",
    "another root": "os.mkdir('r'); l.pivot_root(b'.', b'r'); os.chroot('.')",
    "of the new calls": "f = l.syscall(430, b'tmpfs', 0); l.syscall(431, f, 6, 0, 0, 0); l.syscall(432, f, 0, 0)",
    "moved": "t = l.syscall(428, -100, here.encode(), 1); l.syscall(429, t, b'', -100, up.encode(), 4)",
    "its attributes": "l.syscall(442, -100, b'.', 0, struct.pack('4Q', 1, 0, 0, 0), 32)",
    "held": "os.open('.', os.O_PATH); os.open('.', os.O_RDONLY); os.mkdir('d'); os.chdir('d'); time.sleep(0.1)",
}  # fmt: skip
LEFT = {
    "modules": "for name in ('math', 'numpy', 'json', 'sitecustomize', 'fcsd_left'): write(name + '.py', b'boom')",
    "an answer": "write('answer.txt', b'41')",
    "everywhere": "for place in places: tried(write, f'{place}/fcsd_left')",
    "folders everywhere": "for place in places: tried(os.makedirs, f'{place}/fcsd_left/a/b')",
    "closed folders": "os.mkdir('d', 0); os.mkdir('e', 0o300); write('e/f'); os.mkdir('../d', 0)",
    "files without a right": "os.close(os.open('f', os.O_CREAT | os.O_WRONLY, 0)); os.umask(0o777); write('g')",
    "a deep folder": "all_of(400, lambda n: (os.mkdir('d'), os.chdir('d'))); os.mkdir('locked', 0)",
    "a wide one": "all_of(500, lambda n: os.mkdir(f'd{n}', 0o100))",
    "times": "os.utime('.', (1, 1)); os.utime('..', (1, 1)); os.utime(os.__file__, (1, 1))",
    "modes": "os.chmod('.', 0); os.chmod('..', 0); os.chmod(os.__file__, 0)",
    "attributes": "os.setxattr('.', 'user.fcsd_left', b'x'); os.setxattr('..', 'user.fcsd_left', b'x')",
    "that cannot change": "write('f'); fcntl.ioctl(os.open('f', 0), 0x40086602, struct.pack('l', 0x10))",
    "sparse": "f = open('f', 'wb'); f.truncate(16 << 20); os.posix_fallocate(f.fileno(), 0, 16 << 20)",
    "the environment": "os.environ.update(PATH='/', HOME='/nowhere', TMPDIR='..', fcsd_left='x'); os.chdir('/')",
    "open files": "all_of(99, lambda n: os.open('.', 0)); os.dup2(0, 63)",
    "threads": "threading.Thread(target=lambda: [tried(write, f'../{n}') for n in range(9**9)], daemon=True).start()",
    "processes": "os.fork() or [tried(write, f'../{n}') for n in range(9**9)]",
    "shared memory": "l.shmget(77, 4096, 0o1666); l.shm_open(b'/fcsd_left', 0o102, 0o600); l.memfd_create(b'x', 0)",
    "messages": "l.msgget(77, 0o1666); l.mq_open(b'/fcsd_left', 0o102, 0o600, 0); l.semget(77, 1, 0o1666)",
    "keys": "[l.syscall(248, b'user', b'fcsd_left', b'x', 1, ring) for ring in (-1, -2, -3, -4, -5)]",
}  # fmt: skip
LOCKS = {
    "the folder": "f = os.open('.', 0); fcntl.flock(f, 2); time.sleep(0.1)",
    "the folder above": "f = os.open('..', 0); fcntl.flock(f, 2); time.sleep(0.1)",
    "Python": "f = open(os.__file__); fcntl.flock(f, 2); time.sleep(0.1)",
    "the interpreter": "f = open(os.path.realpath(sys.executable), 'rb'); fcntl.flock(f, 2); time.sleep(0.1)",
    "the system": "f = os.open('/usr/lib', 0); fcntl.flock(f, 2); time.sleep(0.1)",
    "devices": "f = [open(n) for n in ('/dev/null', '/dev/zero', '/dev/urandom')]; [fcntl.flock(n, 2) for n in f]",
    "by parts": "f = open('/dev/null', 'wb'); fcntl.lockf(f, 2); time.sleep(0.1)",
    "read by parts": "f = open(os.__file__); fcntl.lockf(f, 1); time.sleep(0.1)",
    "of an open file": "f = open('f', 'wb'); fcntl.fcntl(f, 37, struct.pack('hhqqi4x', 1, 0, 0, 0, 0))",
    "held for ever": "f = open('f', 'wb'); fcntl.lockf(f, 2); time.sleep(99)",
    "of one another": "f = open('f', 'wb'); g = open('f', 'wb'); fcntl.flock(f, 2); fcntl.flock(g, 2)",
    "leases": "f = open(os.__file__); fcntl.fcntl(f, 1024, 0); fcntl.fcntl(f, 1026, 31)",
    "standard input": "fcntl.flock(0, 2); fcntl.lockf(1, 2); time.sleep(0.1)",
    "pipes": "[tried(fcntl.flock, f, 2) for f in range(64)]; time.sleep(0.1)",
    "every file of Python": (
        "f = [tried(os.open, n.path, 0) for n in"
        " os.scandir(os.path.dirname(os.__file__))]; [tried(fcntl.flock, n, 2) for n in"
        " f if n]; time.sleep(0.1)"
    ),
}  # fmt: skip
QUOTAS = {
    "the disk": "all_of(100, lambda n: write(f'f{n}', bytes(10 << 20)))",
    "the disk above": "all_of(100, lambda n: write(f'../f{n}', bytes(10 << 20)))",
    "the disk, held open": (
        """
files = []
def fill(n):
    files.append(open(f"f{n}", "wb"))
    os.unlink(f"f{n}")
    files[-1].write(bytes(8 << 20))
all_of(100, fill)
time.sleep(0.1)
"""
    ),
    "the disk, mapped": "f = open('f', 'w+b'); f.truncate(9 << 20); mmap.mmap(f.fileno(), 0)[:] = bytes(9 << 20)",
    "one byte a file": "all_of(5000, lambda n: write(f'f{n}', b'x'))",
    "memory": "blocks = []\nwhile True: blocks.append(bytes(32 << 20))",
    "memory that is locked": "l.mlockall(7); blocks = [bytes(1 << 20) for n in range(99)]",
    "threads": "threading.stack_size(32 << 10)\nwhile True: threading.Thread(target=time.sleep, args=[9]).start()",
    "numbers of processes": "for n in range(40000): l.syscall(56, 0x10f00, 0, 0, 0, 0)",
    "signals": "t = ctypes.c_void_p()\nfor n in range(99999): l.timer_create(1, 0, ctypes.byref(t))",
    "pipes": "for n in range(30): [tried(fcntl.fcntl, f, 1031, 1 << 20) for f in os.pipe()]",
    "descriptors": "all_of(9999, lambda n: os.open('/dev/null', 0))",
    "watches": "f = l.inotify_init1(0); l.inotify_add_watch(f, b'.', 4095); l.epoll_create1(0)",
    "processor": "while True: pass",
    "processor, by threads": "for n in range(50): threading.Thread(target=exec, args=['while True: pass']).start()",
    "its own limits": "import resource\nfor n in range(16): tried(resource.setrlimit, n, (0, 0))",
    "a core": "l.prctl(4, 1); ctypes.string_at(0)",
    "a kill of its own": "os.kill(os.getpid(), 9)",
    "a kill by a timer": (
        """
t, event = ctypes.c_void_p(), ctypes.create_string_buffer(struct.pack("qii", 0, 9, 0), 64)
l.timer_create(1, event, ctypes.byref(t))
l.timer_settime(t, 0, struct.pack("4q", 0, 0, 0, 1), 0)
time.sleep(9)
"""
    ),
    "the strictest filter": "l.prctl(22, 1, 0, 0, 0)",
}  # fmt: skip
KINDS = {
    "inodes": INODES, "links": LINKS, "fifos": FIFOS, "mounts": MOUNTS, "left files": LEFT, "locks": LOCKS,
    "quotas": QUOTAS,
}  # fmt: skip
ROWS = [
    pytest.param(
        body, id=f"{kind}: {name}", marks=[] if number < 2 else [pytest.mark.breadth]
    )
    for kind, bodies in KINDS.items()
    for number, (name, body) in enumerate(bodies.items())
]

# A right program may rely on a folder that nobody used before, on all of its space, and
# on threads.
CHECKS = """
import os, threading
def look():
    started = [threading.Thread(target=int) for _ in range(20)]
    for thread in started:
        thread.start()
        thread.join()
    for place in (".", "..", os.environ["HOME"], os.environ["TMPDIR"], "/tmp", "/dev/shm", "../..", "/var/tmp"):
        try:
            assert "fcsd_left" not in os.listdir(place)
        except OSError:
            pass
    assert "fcsd_left" not in os.environ and os.environ["HOME"] == os.getcwd()
look()
def f(x): return x + 1
"""
ROOM = CHECKS.replace(
    "look()\n",
    """look()
def use():
    assert os.listdir(".") == []
    room = os.statvfs(".")
    assert room.f_bfree == room.f_blocks and room.f_ffree == room.f_files - 1, room
    for n in range(300):
        open(f"{n}", "x").close()
    with open("answer.txt", "xb") as file:
        file.write(bytes(12 << 20))
    assert os.path.getsize("answer.txt") == 12 << 20
use()
""",
)


def hostile(body: str) -> str:
    """Return a wrong program that runs `body` when it is loaded and again when it is called."""
    inside = textwrap.indent(body.strip("\n"), "    ")
    return (
        f"{HEAD}\ndef attack():\n{inside}\n\ntry:\n    attack()\nexcept"
        " BaseException:\n    pass\ndef f(x):\n    try:\n        attack()\n    except"
        " BaseException:\n        pass\n    return None\n"
    )


def opened(configuration: str, **options: Any) -> CodeScorer:
    weak = configuration == "no seccomp"
    settings: dict[str, Any] = {
        "num_workers": 1,
        "timeout_s": 1.0,
        "memory_bytes": 1 << 30,
    } | options
    return CodeScorer(
        disable=CONFIGURATIONS[configuration], allow_weak_sandbox=weak, **settings
    )


@pytest.fixture(scope="module", params=few(CONFIGURATIONS, 1))
def scorer(request: pytest.FixtureRequest) -> Iterator[CodeScorer]:
    with opened(request.param) as s:
        yield s


def checking(scorer: CodeScorer) -> str:
    """Return a right program that checks its surroundings as far as this machine promises them."""
    return ROOM if scorer.layers["scratch"] == "tmpfs" else CHECKS


def outcomes(scorer: CodeScorer, programs: Sequence[str]) -> list[str]:
    """Return the outcomes of programs that are scored in this order. Where a right one
    is not done in time, all are scored again with more time: on a busy machine a second
    may be too short, and a program that delays others delays them each time.
    """
    found: list[str] = []
    for seconds in (scorer.timeout_s, 5.0, 20.0):
        (results,) = scorer.score_samples([PROBLEM], {"p": programs}, timeout_s=seconds)
        found = [result.outcome for result in results]
        if not any(
            outcome == "timeout" and program in (PROBLEM.canonical, CHECKS, ROOM)
            for outcome, program in zip(found, programs, strict=True)
        ):
            break
    return found


WRONG = "def f(x): return x\n"


@pytest.mark.parametrize("body", few(ROWS, 7))
def test_a_hostile_program_changes_no_other_outcome(
    scorer: CodeScorer, body: str
) -> None:
    server, attack, check = scorer._servers[0].folder, hostile(body), checking(scorer)
    right = PROBLEM.canonical
    results = outcomes(scorer, [right, attack, check, attack, right, WRONG, check])
    assert [results[n] for n in (0, 2, 4, 5, 6)] == [
        "passed", "passed", "passed", "wrong", "passed",
    ], results  # fmt: skip
    assert {results[n] for n in (1, 3)} <= {"wrong", "error", "timeout", "memory"}
    assert scorer._servers[0].folder == server  # which has not been replaced


@pytest.mark.parametrize("kind", few(KINDS, 2))
def test_a_share_of_right_programs_is_what_it_is_without_hostile_ones(
    kind: str,
) -> None:
    """12 samples, of which 11 are right: 91.7 %, whatever the twelfth does, on two
    workers at once.
    """
    bodies = list(KINDS[kind].values())
    with opened("all layers", num_workers=2) as scorer:
        for first in range(0, len(bodies), 4):
            mixed = [PROBLEM.canonical, checking(scorer), PROBLEM.canonical] * 4
            for place, body in zip(
                (2, 4, 7, 9), bodies[first : first + 4], strict=False
            ):
                mixed[place] = hostile(body)
            num_hostile = len(bodies[first : first + 4])
            results = outcomes(scorer, mixed)
            assert results.count("passed") == 12 - num_hostile, results


def test_eleven_of_twelve_programs_stay_right_beside_one_that_leaves_no_inode() -> None:
    problems = [
        Problem(str(n), "", PROBLEM.canonical, PROBLEM.tests) for n in range(12)
    ]
    programs = {problem.task_id: ROOM for problem in problems}
    programs["3"] = hostile(INODES["above"])
    with opened("all layers", timeout_s=20.0) as scorer:
        if scorer.layers["scratch"] != "tmpfs":
            pytest.skip("this machine lets nobody mount a folder for a program")
        results = scorer.score(problems, programs)
    assert [result.passed for result in results] == [n != 3 for n in range(12)]


def test_a_program_reads_nothing_that_another_left() -> None:
    """Tests programs one after another, and at the same time: where one may write, no
    other can read.
    """
    leave = """
import os, time
def f(x):
    for place in (".", "..", "../..", os.environ["HOME"], os.environ["TMPDIR"]):
        try:
            open(place + "/fcsd_left", "w").write("42")
        except OSError:
            pass
    time.sleep(0.3)
"""
    with opened("all layers", num_workers=2) as scorer:
        assert (
            outcomes(scorer, [leave, checking(scorer)] * 4) == ["wrong", "passed"] * 4
        )


def test_the_folder_above_is_neither_read_nor_written(scorer: CodeScorer) -> None:
    body = """
import os
def f(x):
    up = [lambda: os.listdir(".."), lambda: open("../x", "w"), lambda: os.mkdir("../x"), lambda: os.rename(".", "../x"),
          lambda: os.symlink("x", "../x"), lambda: os.mkfifo("../x"), lambda: os.rmdir(os.getcwd()),
          lambda: os.rename(os.getcwd(), os.getcwd() + "x"), lambda: os.listdir(os.path.dirname(os.getcwd()))]
    done = []
    for number, call in enumerate(up):
        try:
            call()
            done.append(number)
        except OSError:
            pass
    assert not done, done
    return x + 1
"""
    assert run(scorer, body).passed
    # what is mounted on it is not seen here
    assert os.listdir(scorer._servers[0].folder) == []


def test_a_program_that_ends_itself_by_the_signal_of_a_full_machine_is_an_error(
    scorer: CodeScorer,
) -> None:
    if (
        not Path("/proc/vmstat").exists()
        or "oom_kill " not in Path("/proc/vmstat").read_text()
    ):
        pytest.skip("this kernel does not say whether it ran out of memory")
    ended = run(scorer, "import os\ndef f(x): os.kill(os.getpid(), 9)\n")
    assert (ended.outcome, ended.message) == (
        "error",
        "the program ended itself (signal 9)",
    )


def test_a_program_has_few_numbers_of_processes(scorer: CodeScorer) -> None:
    """root has no limit on processes, and on a machine without a free PID nobody can
    start a process.
    """
    kernel = tuple(int(part) for part in os.uname().release.split(".")[:2])
    if kernel < (6, 14) or "pid" not in scorer.layers["namespaces"]:
        pytest.skip(
            "a limit of its own needs a process namespace of Linux 6.14 or newer"
        )
    before = Path("/proc/sys/kernel/pid_max").read_text()
    code = """
import _thread, time
_thread.stack_size(32 << 10)
count = 0
try:
    for count in range(3000):
        _thread.start_new_thread(time.sleep, (9,))
except RuntimeError:
    pass
assert 200 < count < 600, count
def f(x): return x + 1
"""
    assert run(scorer, code).passed
    # that of the machine is as it was
    assert Path("/proc/sys/kernel/pid_max").read_text() == before


# ---- a machine that fails is an error of the evaluation, never the outcome of a
# program


def changed(tmp_path: Path, before: str, after: str, name: str = "server.py") -> Path:
    """Copy the sandbox's scripts, with `before` replaced by `after` in one of them."""
    scripts = shutil.copytree(Path(sandbox.__file__).parent, tmp_path / "scripts")
    text = (scripts / name).read_text()
    assert text.count(before) == 1
    (scripts / name).write_text(text.replace(before, after))
    (tmp_path / "work").mkdir()
    return scripts


def test_a_process_that_cannot_be_confined_is_a_failure(tmp_path: Path) -> None:
    before = "        held = cell.enter(cpu_s)\n"
    scripts = changed(
        tmp_path,
        before,
        before + "        if done in keep: raise OSError(28, 'full')\n",
    )
    with raw_server(tmp_path / "work", scripts=scripts) as (send, receive):
        receive()
        send(job_bytes(0, PROBLEM.canonical, PROBLEM.tests, 1000))
        reply = receive()
        assert (reply["outcome"], reply["message"]) == (
            "failure",
            "OSError: [Errno 28] full",
        )


@pytest.mark.parametrize(
    "process", ["done in keep", "done not in keep"], ids=["examiner", "program"]
)
@pytest.mark.parametrize("step", ["os.setsid()", "held = cell.enter(cpu_s)"])
def test_a_process_that_cannot_begin_is_no_error_of_the_program(
    tmp_path: Path, process: str, step: str
) -> None:
    scripts = changed(
        tmp_path,
        f"        {step}\n",
        f"        if {process}: raise MemoryError\n        {step}\n",
    )
    with raw_server(tmp_path / "work", scripts=scripts) as (send, receive):
        receive()
        send(job_bytes(0, PROBLEM.canonical, PROBLEM.tests, 1000))
        assert receive()["outcome"] == "failure"


def test_a_program_that_the_kernel_ended_for_the_machine_s_memory_is_a_failure(
    tmp_path: Path,
) -> None:
    events = tmp_path / "vmstat"
    events.write_text("nr_free_pages 1\noom_kill 3\n")
    scripts = changed(tmp_path, "/proc/vmstat", str(events), "cell.py")
    code = (
        "import os, time\ndef f(x):\n    time.sleep(0.3)\n    os.kill(os.getpid(), 9)\n"
    )
    with raw_server(tmp_path / "work", scripts=scripts) as (send, receive):
        receive()
        for number, outcome in enumerate(["error", "failure"]):
            send(job_bytes(number, code, PROBLEM.tests, 2000))
            if number:
                events.write_text("nr_free_pages 1\noom_kill 4\n")
            reply = receive()
            assert reply["outcome"] == outcome, reply
            assert number or receive()["clean"]  # a failure ends the server
        assert "ran out of memory" in reply["message"]


@pytest.mark.parametrize("num_free", [0, 1, 2, 5])
def test_a_server_without_descriptors_is_a_scorer_error_and_the_next_call_starts_it_anew(
    num_free: int,
) -> None:
    """The system itself refuses at each step: it has no descriptor for a pipe, or for
    the folder of the next program.
    """
    with opened("all layers") as scorer:
        assert run(scorer, PROBLEM.canonical).passed
        folder = scorer._servers[0].folder
        pids = []
        for entry in filter(str.isdigit, os.listdir("/proc")):
            # Any other process may end in between.
            with contextlib.suppress(OSError):
                if folder in (Path("/proc") / entry / "cmdline").read_text():
                    pids.append(int(entry))
        server = max(pids)
        in_use = max(int(fd) for fd in os.listdir(f"/proc/{server}/fd")) + 1
        resource.prlimit(
            server, resource.RLIMIT_NOFILE, (in_use + num_free, in_use + num_free)
        )
        with pytest.raises(
            ScorerError, match=r"did not grade the programs|programs were not graded"
        ):
            outcomes(scorer, [PROBLEM.canonical] * 3)
        assert outcomes(scorer, [PROBLEM.canonical, WRONG]) == ["passed", "wrong"]


def test_a_folder_that_cannot_be_made_ends_the_server_with_the_reason(
    tmp_path: Path,
) -> None:
    scripts = changed(
        tmp_path, "size={SCRATCH_BYTES},", "size={_sizes.pop()},", "layers.py"
    )
    with (scripts / "layers.py").open("a") as file:
        # at the start, for the first job, for the second
        file.write("\n_sizes = ['none', '64m', '64m']\n")
    with (
        (tmp_path / "log").open("wb") as log,
        pytest.raises((EOFError, AssertionError)),
        raw_server(tmp_path / "work", scripts=scripts, stderr=log) as (send, receive),
    ):
        if receive()["layers"]["scratch"] != "tmpfs":
            pytest.skip("this machine lets nobody mount a folder for a program")
        send(job_bytes(0, PROBLEM.canonical, PROBLEM.tests, 1000))
        assert receive()["outcome"] == "passed"
        assert receive()["clean"]
        receive()
    assert (
        "cannot make the folder of a program: Invalid argument"
        in (tmp_path / "log").read_text()
    )


def test_a_full_disk_is_a_scorer_error_before_any_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(scorer_module, "scratch_folder", full)
    message = r"cannot start a sandbox server.*No space left.*call again"
    with pytest.raises(ScorerError, match=message), opened("all layers"):
        pass
