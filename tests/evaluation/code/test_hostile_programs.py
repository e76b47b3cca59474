"""Programs that attack the sandbox: none succeeds, none survives, and the server
continues.
"""

import json
import os
import platform
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fcsd.base.errors import ScorerError
from fcsd.evaluation.code.problems import Problem
from fcsd.evaluation.code.scorer import LAYERS, CodeScorer
from tests.evaluation.code.attacks import ATTACKED, CONFIGURATIONS, PROBLEM, attack, run
from tests.support import few, user_error

MARK = 40417  # an unlikely argument, by which a test finds what a program left behind


def opened(configuration: str) -> CodeScorer:
    return CodeScorer(
        num_workers=1,
        timeout_s=1.0,
        memory_bytes=1 << 30,
        disable=CONFIGURATIONS[configuration],
        allow_weak_sandbox=configuration == "no seccomp",
    )


@pytest.fixture(scope="module", params=few(CONFIGURATIONS, 1))
def scorer(request: pytest.FixtureRequest) -> Iterator[CodeScorer]:
    with opened(request.param) as s:
        yield s


@pytest.fixture(scope="module", params=few(["all layers", "no namespaces"], 1))
def shielded(request: pytest.FixtureRequest) -> Iterator[CodeScorer]:
    """For attacks that only seccomp forbids."""
    with opened(request.param) as s:
        yield s


def children() -> set[int]:
    """Return all processes of the machine that descend from this one or were adopted by
    the first.
    """
    return {int(entry) for entry in os.listdir("/proc") if entry.isdigit()}


def command_lines() -> list[str]:
    lines = []
    for pid in children():
        try:
            lines.append(
                Path(f"/proc/{pid}/cmdline")
                .read_bytes()
                .replace(b"\0", b" ")
                .decode(errors="replace")
            )
        except OSError:
            continue
    return lines


def test_an_honest_attack_free_function_passes(scorer: CodeScorer) -> None:
    assert run(scorer, "def f():\n    return True\n", ATTACKED).passed


@pytest.mark.parametrize("kind", ["SOCK_STREAM", "SOCK_DGRAM"])
def test_no_socket_reaches_a_listening_server(scorer: CodeScorer, kind: str) -> None:
    with socket.socket(socket.AF_INET, getattr(socket, kind)) as server:
        server.bind(("127.0.0.1", 0))
        if kind == "SOCK_STREAM":
            server.listen()
        port = server.getsockname()[1]
        server.settimeout(0.2)
        run(
            scorer,
            f"""
def f():
    import socket
    s = socket.socket(socket.AF_INET, socket.{kind})
    s.settimeout(0.5)
    s.connect(("127.0.0.1", {port}))
    s.send(b"hello")
    return True
""",
            ATTACKED,
        )
        with pytest.raises(TimeoutError):
            if kind == "SOCK_STREAM":
                server.accept()
            else:
                server.recvfrom(10)


def test_an_abstract_unix_socket_cannot_be_reached(scorer: CodeScorer) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        name = f"\0fcsd-test-{os.getpid()}"
        server.bind(name)
        server.listen()
        attack(
            scorer, f"import socket\nsocket.socket(socket.AF_UNIX).connect({name!r})"
        )


def test_a_unix_socket_with_a_path_cannot_be_reached(
    shielded: CodeScorer, tmp_path: Path
) -> None:
    """A network namespace does not forbid it: without seccomp a container engine's
    socket would be in reach.
    """
    with socket.socket(socket.AF_UNIX) as server:
        path = str(tmp_path / "s")
        server.bind(path)
        server.listen()
        attack(
            shielded, f"import socket\nsocket.socket(socket.AF_UNIX).connect({path!r})"
        )


def test_secrets_outside_cannot_be_read(scorer: CodeScorer, tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("key")
    attack(scorer, f"open({str(secret)!r}).read()")
    attack(scorer, f"import os\nos.read(os.open({str(secret)!r}, os.O_RDONLY), 3)")
    attack(scorer, f"import os\nos.listdir({str(tmp_path)!r})")


@pytest.mark.parametrize(
    "path",
    ["/etc/passwd", "/proc/self/environ", "/proc/1/environ", "/proc/self/maps", "/proc/self/mem", "~/.ssh",
     *[f"/proc/{{caller}}/{name}" for name in ("environ", "cmdline", "mem")]],
)  # fmt: skip
def test_the_machine_s_own_files_cannot_be_read(scorer: CodeScorer, path: str) -> None:
    path = path.format(caller=os.getpid())
    attack(
        scorer, f"import os\np = os.path.expanduser({path!r})\nopen(p, 'rb').read(1)"
    )


def test_the_environment_of_the_parent_is_not_there(
    scorer: CodeScorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FCSD_TEST_SECRET", "key")
    with CodeScorer(
        num_workers=1,
        timeout_s=2.0,
        disable=scorer.disable,
        allow_weak_sandbox=scorer.allow_weak_sandbox,
    ) as fresh:
        attack(fresh, "import os\nassert 'FCSD_TEST_SECRET' in os.environ")


@pytest.mark.parametrize(
    "body",
    [
        "open({path!r}, 'w').write('x')", "open({path!r}, 'a').write('x')", "import os\nos.mkdir({path!r})",
        "import os\nos.rename({kept!r}, {path!r})", "import os\nos.unlink({kept!r})",
        "import os\nos.truncate({kept!r}, 0)", "import os\nos.link({kept!r}, 'here')\nopen('here', 'w').write('x')",
        "import os\nos.symlink({kept!r}, 'here')\nopen('here', 'w').write('x')",
    ],
)  # fmt: skip
def test_nothing_outside_the_job_s_folder_is_written(
    scorer: CodeScorer, tmp_path: Path, body: str
) -> None:
    kept, path = tmp_path / "kept", tmp_path / "new"
    kept.write_text("as it was")
    attack(scorer, body.format(path=str(path), kept=str(kept)))
    assert kept.read_text() == "as it was" and not path.exists()


def test_modes_and_times_of_files_outside_are_not_changed(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_text("as it was")
    before = kept.stat()
    with CodeScorer(num_workers=1, timeout_s=2.0) as scorer:
        attack(scorer, f"import os\nos.chmod({str(kept)!r}, 0o777)")
        attack(scorer, f"import os\nos.utime({str(kept)!r}, (1, 1))")
    assert (kept.stat().st_mode, kept.stat().st_mtime) == (
        before.st_mode,
        before.st_mtime,
    )


@pytest.mark.parametrize(
    "body",
    [
        "import subprocess\nsubprocess.run(['/bin/sleep', '{mark}'])",
        "import os\nos.posix_spawn('/bin/sleep', ['sleep', '{mark}'], {{}})\nimport time; time.sleep(1)",
        "import os\nos.execv('/bin/sleep', ['sleep', '{mark}'])",
        "import os\nassert os.system('sleep {mark} &') == 0",
    ],
)  # fmt: skip
def test_no_other_program_is_started(scorer: CodeScorer, body: str) -> None:
    outcome = run(
        scorer,
        "def f():\n    " + body.format(mark=MARK).replace("\n", "\n    "),
        ATTACKED,
    )
    assert not outcome.passed
    assert not [line for line in command_lines() if f"sleep {MARK}" in line]


def test_a_fork_bomb_leaves_nothing_behind(scorer: CodeScorer) -> None:
    outcome = run(
        scorer,
        """
import os
def f():
    n = 0
    while n < 200:
        try:
            os.fork()
        except OSError:
            pass
        n += 1
    while True:
        pass
""",
        ATTACKED,
    )
    assert outcome.outcome == "timeout"
    assert len(server_processes(scorer)) <= 2


def server_processes(scorer: CodeScorer) -> list[int]:
    """Return the supervisor and the server of the only worker, and whatever else runs
    the same command.
    """
    folder = scorer._servers[0].folder
    return [
        pid
        for pid in children()
        if folder
        in (
            Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
            if Path(f"/proc/{pid}").exists()
            else ""
        )
    ]


def test_a_daemon_does_not_outlive_its_job(scorer: CodeScorer) -> None:
    run(
        scorer,
        """
import os, time
def f():
    try:
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                time.sleep(600)
    except OSError:
        pass
    return True
""",
        ATTACKED,
    )
    assert len(server_processes(scorer)) <= 2


def test_a_memory_bomb_is_a_memory_outcome(scorer: CodeScorer) -> None:
    assert attack(scorer, "x = bytearray(8 << 30)").outcome == "memory"
    assert (
        attack(scorer, "x = []\nwhile True: x.append(bytes(64 << 20))").outcome
        == "memory"
    )
    assert attack(scorer, "return [0] * 10**8 + [[]]").outcome in ("memory", "timeout")


def test_a_disk_bomb_ends_at_the_limit(scorer: CodeScorer) -> None:
    attack(
        scorer,
        """
for n in range(100):
    with open(f"f{n}", "wb") as file:
        file.write(bytes(10 << 20))
""",
    )
    attack(scorer, "for n in range(10000): open(f'g{n}', 'w').close()")


def test_a_folder_that_resists_removal_does_not_reach_the_next_job(
    scorer: CodeScorer,
) -> None:
    run(
        scorer,
        """
import os
def f():
    try:
        for _ in range(400):
            os.mkdir("d"); os.chdir("d")
        os.mkdir("locked", 0)
    except OSError:
        pass
    return True
""",
        ATTACKED,
    )
    assert run(
        scorer, "import os\ndef f():\n    return os.listdir('.') == []\n", ATTACKED
    ).passed or (scorer.layers["scratch"] != "tmpfs")


@pytest.mark.parametrize(
    "target", ["os.getppid()", "1", "-1", "0", "os.getpid() - 1", "os.getpid() + 1"]
)
def test_other_processes_cannot_be_killed(scorer: CodeScorer, target: str) -> None:
    if target == "0":
        body = (
            "import os, signal\nsignal.signal(15, signal.SIG_IGN)\nos.kill(0,"
            " 15)\nraise ValueError"
        )
    else:
        body = f"import os\nos.kill({target}, 9)\nraise ValueError"
    attack(scorer, body)


def test_the_process_that_asked_survives_a_kill_by_ctypes(scorer: CodeScorer) -> None:
    attack(
        scorer,
        f"import ctypes\nctypes.CDLL(None).kill({os.getpid()}, 9)\nraise ValueError",
    )


@pytest.mark.parametrize(
    "target", ["os.getppid() or 1", "os.getpid() + 1", "os.getpid()", "{outside}"]
)
def test_the_kernel_kills_no_process_for_a_program(
    shielded: CodeScorer, target: str
) -> None:
    """When a descriptor is ready, its owner gets a signal that the program chose:
    kill() by another route.
    """
    victim = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        attack(
            shielded,
            f"""
import fcntl, os, time
r, w = os.pipe()
fcntl.fcntl(r, 10, 9)  # F_SETSIG
fcntl.fcntl(r, fcntl.F_SETOWN, {target.format(outside=victim.pid)})
fcntl.fcntl(r, fcntl.F_SETFL, os.O_ASYNC)
os.write(w, b"x")
time.sleep(0.2)
""",
        )
        assert victim.poll() is None
    finally:
        victim.kill()
        victim.wait()


@pytest.mark.parametrize(
    "call",
    ["os.setpriority(os.PRIO_PROCESS, os.getppid() or 1, 19)", "os.setpriority(os.PRIO_USER, os.getuid(), 19)",
     "os.sched_setaffinity(os.getppid() or 1, {0})",
     "resource.prlimit(os.getppid() or 1, resource.RLIMIT_NOFILE, (0, 0))"],
)  # fmt: skip
def test_other_processes_are_not_slowed_or_limited(
    shielded: CodeScorer, call: str
) -> None:
    attack(shielded, f"import os, resource\n{call}")
    assert run(
        shielded,
        "import os\ndef f():\n    os.sched_setaffinity(0, {0})\n    return True\n",
        ATTACKED,
    ).passed


@pytest.mark.parametrize(
    ("call", "machine"),
    [
        ("l.shmget(0, 4096, 0o1600)", ""),
        ("l.shmctl(0, 0, 0)", ""),  # IPC_RMID of another's segment
        ("l.inotify_init1(0)", ""),
        ("l.ptrace(16, os.getppid() or 1, 0, 0)", ""),
        ("l.syscall(472, 0, 0, 0, 0)", ""),  # newer than the table
        ("l.syscall(56, 17, 0, 0, 0, 0)", "x86_64"),  # clone of a process
        ("l.syscall(0x40000000 + 39)", "x86_64"),  # the x32 getpid
    ],
)
def test_system_calls_that_no_program_needs_are_refused(
    shielded: CodeScorer, call: str, machine: str
) -> None:
    if machine and platform.machine() != machine:
        pytest.skip(f"a number of {machine}")
    body = (
        f"import ctypes, os\nl = ctypes.CDLL(None, use_errno=True)\nif {call} == -1:"
        " return ctypes.get_errno()"
    )
    code = "def f():\n" + "".join(f"    {line}\n" for line in body.splitlines())
    refused = Problem("e", "", "", ("assert f() in (1, 38)\n",))  # EPERM, ENOSYS
    assert run(shielded, code, refused).passed


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the 32-bit calls of x86_64")
def test_the_calls_of_another_architecture_end_the_program(
    shielded: CodeScorer,
) -> None:
    """int 0x80 has other numbers: 20 is getpid there and writev here."""
    body = """
import ctypes, mmap
m = mmap.mmap(-1, 4096, prot=7)
m.write(bytes.fromhex("b814000000cd80c3"))
ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(m)))()
"""
    assert "signal 31" in attack(shielded, body).message


@pytest.mark.parametrize(
    "code",
    [
        "import os\nos._exit(0)", "import sys\nsys.exit(0)", "raise SystemExit(0)",
        "import os\ndef f(x):\n    os._exit(0)", "import sys\ndef f(x):\n    sys.exit(0)",
        "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)", "import ctypes\nctypes.string_at(0)",
    ],
)  # fmt: skip
def test_ending_early_is_an_error_and_no_success(scorer: CodeScorer, code: str) -> None:
    assert run(scorer, code).outcome == "error"


EVERYTHING = """
class Everything(BASE):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 42
    def __bool__(self): return True
    def __instancecheck__(self, other): return True
def f(x):
    return Everything()
"""
PATCHED = """
import builtins, sys
builtins.AssertionError = type("Never", (Exception,), {})
builtins.compile = builtins.exec = lambda *a, **k: None
sys.settrace(lambda *a: None)
def f(x):
    return None
"""
SWALLOWING = """
import signal
for number in range(1, 32):
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
def f(x):
    while True:
        try:
            while True: pass
        except BaseException:
            pass
"""


@pytest.mark.parametrize(
    ("code", "end"),
    [
        *(pytest.param(EVERYTHING.replace("BASE", base), "wrong", id=f"equals everything, of {base}")
          for base in ("object", "int", "str", "list", "dict", "tuple", "set", "float")),
        pytest.param(PATCHED, "wrong", id="patched builtins"),
        pytest.param("def f(x):\n    while True: print('x' * 1000)", "timeout", id="infinite output"),
        pytest.param(SWALLOWING, "timeout", id="swallows signals and exceptions"),
    ],
)  # fmt: skip
def test_a_program_that_deceives_or_does_not_end_is_wrong_or_timed_out(
    scorer: CodeScorer, code: str, end: str
) -> None:
    outcome = run(scorer, code)
    assert outcome.outcome == end and outcome.seconds < 10


SEARCH = """
import gc, re, sys
PATTERN = re.compile(chr(83) + "ECRET-[0-9a-f]{32}")
def strings(thing, depth):
    kind = type(thing)
    if kind is str:
        yield thing
    elif depth and kind is dict:
        for value in list(thing.values()):
            yield from strings(value, depth - 1)
    elif depth and kind in (list, tuple):
        for value in thing:
            yield from strings(value, depth - 1)
    elif kind.__name__ == "code":
        yield from strings(thing.co_consts, 1)
def f():
    places, frame = [], sys._getframe()
    while frame is not None:
        places += [dict(frame.f_locals), frame.f_globals, frame.f_code]
        frame = frame.f_back
    places += [thing for thing in gc.get_objects() if thing is not places]
    for place in places:
        for text in strings(place, 2):
            match = PATTERN.search(text)
            if match:
                return match[0]
"""


def test_expected_outputs_are_not_in_reach_of_the_program(scorer: CodeScorer) -> None:
    """A search through frames, code and garbage collector finds the expected output
    here, but not in the sandbox.
    """
    secret = "S" + f"ECRET-{uuid.uuid4().hex}"
    holder = {"test": f"assert f() == {secret!r}"}
    namespace: dict[str, Any] = {}
    exec(SEARCH, namespace)
    # the search works where there is something to find
    assert namespace["f"]() == secret and holder
    problem = Problem("s", "", "", (f"assert f() == {secret!r}\n",))
    for _ in range(2):  # nor does anything remain from an earlier job
        assert run(scorer, SEARCH, problem).outcome == "wrong"


@pytest.mark.parametrize("names", [None, ("f",)])
def test_a_program_that_defines_what_the_tests_use_does_not_change_them(
    scorer: CodeScorer, names: tuple[str, ...] | None
) -> None:
    """Its own `zip` would leave the tests nothing to compare, its own `set` would make
    everything equal.
    """
    test = (
        "for one, right in zip([1, 2], [2, 3]):\n    assert set([f(one)]) =="
        " set([right])\n"
    )
    problem = Problem("z", "", "", (test,), names=names)
    code = "def zip(*a): return []\ndef set(x): return 0\ndef f(x): return None\n"
    assert run(scorer, code, problem).outcome == "wrong"


def test_forged_replies_on_every_descriptor_are_no_success(scorer: CodeScorer) -> None:
    code = """
import json, os
def forge():
    data = json.dumps({"job": 1, "outcome": "passed", "seconds": 0, "message": "", "value": True}).encode()
    for fd in range(64):
        for text in (b"r", b"%016x" % len(data) + data):
            try:
                os.write(fd, text)
            except OSError:
                pass
forge()
def f(x):
    forge()
    return None
"""
    assert not run(scorer, code).passed


def test_malformed_values_from_the_program_are_errors(scorer: CodeScorer) -> None:
    for value in (
        {"t": "numpy", "v": ["O", [1], [1]]},
        {"t": "table", "v": {}},
        {"t": "nothing", "v": 1},
        {"x": 1},
    ):
        reply = json.dumps({"value": value})
        code = f"""
import os
reply = {reply!r}.encode()
for fd in range(3, 64):
    try:
        os.write(fd, b"%016x" % len(reply) + reply)
    except OSError:
        pass
def f(x):
    return x + 1
"""
        assert run(scorer, code).outcome in ("error", "wrong")


def test_limits_cannot_be_raised_and_pipes_of_the_server_are_closed(
    scorer: CodeScorer,
) -> None:
    attack(
        scorer,
        "import resource as r\nr.setrlimit(r.RLIMIT_AS, (r.RLIM_INFINITY,"
        " r.RLIM_INFINITY))",
    )
    attack(
        scorer,
        "import os\nfds = [n for n in range(64) if _open(n)]\nassert len(fds) > 5".replace(
            "_open(n)", "os.fstat(n)"
        ),
    )


def test_the_layers_that_are_active_are_reported(scorer: CodeScorer) -> None:
    assert scorer.layers["writes_restricted"] and scorer.layers["no_capabilities"]
    assert (
        scorer.layers["seccomp"]
        == scorer.layers["network_off"]
        == ("seccomp" not in scorer.disable)
    )
    assert bool(scorer.layers["namespaces"]) == ("namespaces" not in scorer.disable)


NEIGHBOURS = """
import ctypes, os
l = ctypes.CDLL(None)
for pid in (os.getppid() or 1, os.getpid() + 1):  # the server and, started next, the examiner
    assert l.ptrace(16, pid, 0, 0) == -1
    try:
        open(f"/proc/{pid}/mem", "r+b")
    except OSError:
        continue
    raise SystemExit
"""


def test_a_sandbox_below_the_floor_is_refused_unless_accepted() -> None:
    for disable, word in (
        (("seccomp",), "off the network"),
        (("landlock",), "from writing files"),
        (LAYERS, "off the network"),
    ):
        with (
            user_error(f"{word}.*--allow-weak-sandbox"),
            CodeScorer(num_workers=1, disable=disable),
        ):
            pass
        with CodeScorer(
            num_workers=1, disable=disable, allow_weak_sandbox=True
        ) as scorer:
            assert not (
                scorer.layers["network_off"] and scorer.layers["writes_restricted"]
            )
            assert scorer.self_check([PROBLEM])[0].passed
            assert run(scorer, "import os\nos._exit(0)").outcome == "error"
            # The program runs as the examiner's user and may see its PID, and still has
            # no access to its memory.
            assert run(scorer, NEIGHBOURS + PROBLEM.canonical).passed


def test_killing_the_server_is_a_scorer_error_and_the_next_call_starts_it_anew():
    with CodeScorer(num_workers=1, timeout_s=20.0) as scorer:
        pids = server_processes(scorer)
        assert len(pids) == 2
        killer = threading.Timer(0.5, lambda: os.kill(max(pids), signal.SIGKILL))
        killer.start()
        with pytest.raises(
            ScorerError, match=r"sandbox server has ended.*did not grade the programs"
        ):
            scorer.score([PROBLEM], {"p": "import time\ntime.sleep(15)"})
        killer.join()
        assert scorer.score([PROBLEM], {"p": PROBLEM.canonical})[0].passed


def test_everything_ends_and_is_removed_when_the_scoring_process_is_killed(
    tmp_path: Path,
) -> None:
    script = """
import os, sys
from fcsd.evaluation.code.scorer import CodeScorer
from fcsd.evaluation.code.problems import Problem
scorer = CodeScorer(num_workers=1, timeout_s=60.0).__enter__()
print(scorer._servers[0].folder, flush=True)
scorer.score([Problem("p", "", "", ("f(1)",))], {"p": "import time\\ndef f(x): time.sleep(50)"})
"""
    environment = {
        **os.environ,
        "TMPDIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert process.stdout is not None
    folder = process.stdout.readline().strip()
    time.sleep(0.5)
    assert Path(folder).is_dir() and any(folder in line for line in command_lines())
    process.kill()
    process.wait()
    process.stdout.close()
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and (
        Path(folder).exists() or any(folder in x for x in command_lines())
    ):
        time.sleep(0.05)
    assert not Path(folder).exists()
    assert not [line for line in command_lines() if folder in line]


def test_closing_leaves_no_process_and_no_folder() -> None:
    with CodeScorer(num_workers=2) as scorer:
        folders = [server.folder for server in scorer._servers]
        assert scorer.self_check([PROBLEM] * 4)[0].passed
    assert not any(Path(folder).exists() for folder in folders)
    assert not [
        line for line in command_lines() if any(folder in line for folder in folders)
    ]
