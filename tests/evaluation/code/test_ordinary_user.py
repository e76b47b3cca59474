"""The sandbox of a user who is not root: the same layers, and the same attacks fail."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from fcsd.evaluation.code import sandbox
from tests.evaluation.code.attacks import job_bytes, raw_server

pytestmark = pytest.mark.skipif(
    os.getuid() != 0,
    reason="only root can become another user; for any other the whole suite is that of a user",
)
NOBODY = 65534


@pytest.fixture
def home() -> Iterator[Path]:
    # pytest's folders are closed to other users
    folder = Path(tempfile.mkdtemp(prefix="fcsd-test-"))
    folder.chmod(0o755)
    for file in Path(sandbox.__file__).parent.glob("*.*"):
        shutil.copy(file, folder)
    for name in ("scratch", "own"):
        (folder / name).mkdir()
        os.chown(folder / name, NOBODY, NOBODY)
    (folder / "own" / "file").write_text("as it was")
    os.chown(folder / "own" / "file", NOBODY, NOBODY)
    yield folder
    shutil.rmtree(folder)


def interpreter() -> str:
    """Return a Python that an ordinary user can run; skip the test where there is none."""
    python = shutil.which("python3", path="/usr/bin:/bin")
    check = "import sys; assert sys.version_info >= (3, 11)"
    if (
        python is None
        or subprocess.run([python, "-c", check], stderr=subprocess.DEVNULL).returncode
    ):
        pytest.skip(
            "no python3 of 3.11 or newer in /usr/bin or /bin, where an ordinary user can run it"
        )
    return python


def _readable(path: Path) -> bool:
    try:
        path.read_bytes()
    except OSError:  # it has ended
        return False
    return True


ATTACKS = {
    "socket": "import socket\nsocket.socket()", "read": "open('/etc/passwd').read()",
    "parent's environment": "import os\nopen(f'/proc/{os.getppid() or 1}/environ').read()",
    "parent's memory": "import os\nopen(f'/proc/{os.getppid() or 1}/mem', 'r+b')",
    "write": "open('OWN/new', 'w').write('x')", "change": "open('OWN/file', 'a').write('x')",
    "mode": "import os\nos.chmod('OWN/file', 0o777)", "remove": "import os\nos.unlink('OWN/file')",
    "spawn": "import os\nos.posix_spawn('/bin/true', ['true'], {})", "fork": "import os\nos.fork() or os.pause()",
    "memory": "bytearray(2 << 30)", "above": "open('../fcsd_left', 'w')", "list above": "import os\nos.listdir('..')",
    "its folder's place": "import os\nos.rename(os.getcwd(), '../moved')",
    "lock": "import fcntl, os\nfcntl.flock(os.open('/usr/lib', 0), 2)",
    "core": "import ctypes\nassert ctypes.CDLL(None).prctl(4, 1, 0, 0, 0) == 0",
    "mount": "import ctypes\nassert ctypes.CDLL(None).mount(b'none', b'.', b'tmpfs', 0, b'') == 0",
    "unmount": "import ctypes, os\nassert ctypes.CDLL(None).umount2(os.getcwd().encode(), 2) == 0",
    "disk": "for n in range(20): open(f'f{n}', 'wb').write(bytes(10 << 20))",
    "kill the parent": "import os\nos.kill(os.getppid() or 1, 9)", "kill the user's": "import os\nos.kill(VICTIM, 9)",
    "kill by the kernel": "import fcntl, os\nfcntl.fcntl(os.pipe()[0], fcntl.F_SETOWN, VICTIM)",
    "kill all": "import os\nos.kill(-1, 9)",
    "slow the user's": "import os\nos.setpriority(os.PRIO_USER, os.getuid(), 19)", "exit": "import os\nos._exit(0)",
    "loop": "while True: pass",
}  # fmt: skip


@pytest.mark.parametrize(
    "disable",
    [(), pytest.param(("namespaces",), marks=pytest.mark.breadth)],
    ids=["all layers", "no namespaces"],
)
def test_hostile_programs_fail_for_an_ordinary_user_too(
    home: Path, disable: tuple[str, ...]
) -> None:
    python, user = interpreter(), {"user": NOBODY, "group": NOBODY, "extra_groups": []}
    victim = subprocess.Popen(["/bin/sleep", "60"], **user)
    outcomes = {}
    try:
        with raw_server(home / "scratch", python, home, disable, **user) as (
            send,
            receive,
        ):
            layers = receive()["layers"]
            for number, (name, body) in enumerate(
                [("none", "pass"), *ATTACKS.items(), ("none again", "pass")]
            ):
                lines = body.replace("OWN", str(home / "own")).replace(
                    "VICTIM", str(victim.pid)
                )
                lines = lines.replace("\n", "\n    ")
                code = f"def f():\n    {lines}\n    return True\n"
                send(
                    job_bytes(
                        number,
                        code,
                        ["assert f() is True\n"],
                        2000 if name == "loop" else 20000,
                    )
                )
                outcomes[name] = receive()["outcome"]
                assert receive()["clean"], name
        assert victim.poll() is None
        commands = [
            path.read_bytes()
            for path in Path("/proc").glob("[0-9]*/cmdline")
            if _readable(path)
        ]
        assert not [line for line in commands if os.fsencode(home) in line]
    finally:
        victim.kill()
        victim.wait()
    assert (
        layers["network_off"]
        and layers["writes_restricted"]
        and layers["no_capabilities"]
    ), layers
    assert outcomes.pop("none") == outcomes.pop("none again") == "passed"
    assert outcomes.pop("memory") == "memory" and outcomes.pop("loop") == "timeout"
    assert set(outcomes.values()) == {"error"}, outcomes
    assert (home / "own" / "file").read_text() == "as it was"
    assert not (home / "own" / "new").exists()
    assert not list((home / "scratch").iterdir())


@pytest.mark.parametrize(
    "disable", [(), ("namespaces",)], ids=["all layers", "no namespaces"]
)
def test_threads_that_the_user_has_elsewhere_take_none_from_a_program(
    home: Path, disable: tuple[str, ...]
) -> None:
    """Without a user namespace the kernel counts all of them together."""
    python, user = interpreter(), {"user": NOBODY, "group": NOBODY, "extra_groups": []}
    others = """
import threading, time
for _ in range(300):
    threading.Thread(target=time.sleep, args=[60], daemon=True).start()
print(flush=True)
time.sleep(60)
"""
    code = """
import threading
def f():
    for _ in range(20):
        thread = threading.Thread(target=int)
        thread.start()
        thread.join()
    return True
"""
    busy = subprocess.Popen([python, "-c", others], stdout=subprocess.PIPE, **user)
    try:
        assert busy.stdout is not None and busy.stdout.readline()
        with raw_server(home / "scratch", python, home, disable, **user) as (
            send,
            receive,
        ):
            receive()
            send(job_bytes(0, code, ["assert f() is True\n"], 20000))
            assert receive()["outcome"] == "passed"
            assert receive()["clean"]
    finally:
        busy.kill()
        busy.wait()
        if busy.stdout is not None:
            busy.stdout.close()
