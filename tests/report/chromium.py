"""A headless Chromium that a test drives through its debugging pipe: a user's actions,
and what the browser then shows.

    with Chromium(folder) as browser:
        browser.open(page.as_uri())
        browser.value("document.title")

Messages are JSON, ended by a NUL, on file descriptors 3 and 4 (Chrome DevTools
Protocol); no port is opened.
"""

import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Self

PROGRAM = (
    shutil.which("chromium")
    or shutil.which("chromium-browser")
    or shutil.which("google-chrome")
)
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage",
    "--remote-debugging-pipe", "--window-size=1280,900",
)  # fmt: skip
# The browser's ends of the pipes become 3 and 4, whatever numbers they have here.
_START = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(number), fcntl.F_DUPFD, 10) for number in sys.argv[1:3]]
os.dup2(ends[0], 3)
os.dup2(ends[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
_KEYS = {"Tab": 9, "ArrowLeft": 37, "ArrowRight": 39, "ArrowDown": 40, "Enter": 13}


class Chromium:
    """One browser with one tab; `requests` and `errors` cover all pages since it was
    started.
    """

    def __init__(self, folder: Path, timeout_s: float = 60.0):
        assert PROGRAM is not None
        self.timeout_s, self.requests, self.errors = timeout_s, [], []
        self._number, self._rest, self._events = 0, b"", []
        read_there, self._write = os.pipe()
        self._read, write_there = os.pipe()
        ends = (read_there, write_there)
        command = [
            PROGRAM, *_FLAGS, f"--user-data-dir={folder / 'profile'}", "about:blank",
        ]  # fmt: skip
        self._process = subprocess.Popen(
            [sys.executable, "-ISc", _START, *map(str, ends), *command],
            pass_fds=ends, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(read_there)
        os.close(write_there)
        self._session: str | None = None

    def __enter__(self) -> Self:
        try:
            target = self.call("Target.createTarget", url="about:blank")["targetId"]
            self._session = self.call(
                "Target.attachToTarget", targetId=target, flatten=True
            )["sessionId"]
            for domain in ("Page", "Runtime", "Log", "Network"):
                self.call(f"{domain}.enable")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._read)
        os.close(self._write)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send one command; return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        text = json.dumps(message).encode() + b"\0"
        while text:
            text = text[os.write(self._write, text) :]
        while (answer := self._next()).get("id") != self._number:
            self._note(answer)
        if "error" in answer:
            raise AssertionError(f"{method}: {answer['error']}")
        return answer["result"]

    def open(self, address: str) -> None:
        """Load a page; return once it has loaded."""
        self._events.clear()
        # another fragment of the same page
        here = "loaderId" not in self.call("Page.navigate", url=address)
        while not here and "Page.loadEventFired" not in self._events:
            self._note(self._next())

    def value(self, expression: str) -> Any:
        """Return the value of an expression in the page; a promise is awaited."""
        answer = self.call(
            "Runtime.evaluate",
            expression=expression,
            awaitPromise=True,
            returnByValue=True,
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, expression: str) -> Any:
        """Return the value of an expression once it is true."""
        end = time.monotonic() + self.timeout_s
        while not (value := self.value(expression)):
            assert time.monotonic() < end, f"never true: {expression}; {self.errors}"
            time.sleep(0.02)
        return value

    def press(self, key: str) -> None:
        """Press one key of the keyboard, a letter or one of a few names."""
        code = {"windowsVirtualKeyCode": _KEYS[key]} if key in _KEYS else {"text": key}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **code)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, **code)

    def type(self, text: str) -> None:
        """Insert text at the focus, as an input method does."""
        self.call("Input.insertText", text=text)

    def _next(self) -> dict[str, Any]:
        end = time.monotonic() + self.timeout_s
        while b"\0" not in self._rest:
            ready, _, _ = select.select(
                [self._read], [], [], max(0.0, end - time.monotonic())
            )
            read = os.read(self._read, 1 << 20) if ready else b""
            assert read, (
                f"Chromium does not answer (exit status {self._process.poll()})"
            )
            self._rest += read
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def _note(self, event: dict[str, Any]) -> None:
        method, parameters = event.get("method", ""), event.get("params", {})
        self._events.append(method)
        if method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.errors.append(parameters["exceptionDetails"])
        elif method == "Log.entryAdded" and parameters["entry"]["level"] in (
            "error",
            "warning",
        ):
            self.errors.append(parameters["entry"])
        elif method == "Runtime.consoleAPICalled" and parameters["type"] in (
            "error",
            "warning",
            "assert",
        ):
            self.errors.append(parameters)
