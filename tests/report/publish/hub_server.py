"""A Hub on this machine: the few endpoints that `huggingface_hub` uses to create a
model repository, to commit to it and to download from it.

Written after the client's own requests (huggingface_hub 2.4). Large files come through
LFS or, if the client has hf_xet switched on, go into a folder in hf_xet's own format;
only their sha256 is known here.
"""

import base64
import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

TOKEN = "hf_" + "Secret0" * 5
COMMIT = "0" * 40


@dataclass
class Repo:
    """Files of the one branch, by path."""

    private: bool
    files: dict[str, bytes] = field(default_factory=dict)
    commits: list[str] = field(default_factory=list)

    def write(self, folder: Path) -> Path:
        """Write the files that a download would leave."""
        for name, content in self.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
        return folder


class Hub(ThreadingHTTPServer):
    """Repositories, uploaded objects, every request, and the faults to simulate."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repos: dict[str, Repo] = {}
        self.objects: dict[str, bytes] = {}
        # sha256 of every object that was sent, again if it was sent again
        self.received: list[str] = []
        self.requests: list[tuple[str, str]] = []
        self.may_write = True
        self.xet: Path | None = None  # where hf_xet is to put what it sends
        self.breaks: Callable[[bytes], bool] = lambda content: False
        # what it finds wrong with the metadata of a card
        self.metadata_errors: list[str] = []
        self.commit_answer: tuple[int, str] | None = None  # instead of a commit

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@contextmanager
def running_hub() -> Iterator[Hub]:
    """Yield a Hub that answers for the duration of the block."""
    with Hub() as hub:
        thread = threading.Thread(target=hub.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """Yield a Hub, and a client that has a token, no cache, and sends large files
    through LFS.
    """
    with running_hub() as server:
        for name, value in (
            ("HUGGINGFACE_CO_URL_TEMPLATE", server.url + "/{repo_id}/resolve/{revision}/{filename}"),
            ("ENDPOINT", server.url), ("HF_HUB_OFFLINE", False), ("HF_HUB_DISABLE_XET", True),
            ("HF_TOKEN_PATH", str(tmp_path / "no-token")), ("HF_HUB_CACHE", str(tmp_path / "cache")),
        ):  # fmt: skip
            monkeypatch.setattr(constants, name, value)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        # made once, with the place of that time
        monkeypatch.setattr("transformers.utils.hub._hf_api", None)
        yield server


def large_oid(content: bytes) -> str:
    """Return the sha256 of a large file."""
    xet = content.startswith(b"xet:")
    return content[4:].decode() if xet else hashlib.sha256(content).hexdigest()


def git_blob(content: bytes) -> str:
    """Return git's name of a file's bytes."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *words: Any) -> None:
        pass

    def _answer(self, status: int, value: Any = None, **headers: str) -> None:
        body = b"" if value is None else json.dumps(value).encode()
        self.send_response(status)
        for name, text in headers.items():
            self.send_header(name.replace("_", "-"), text)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _allowed(self) -> bool:
        if self.headers.get("Authorization") == f"Bearer {TOKEN}":
            return True
        self._answer(401, {"error": "Invalid username or password."})
        return False

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        self.server.requests.append((self.command, path))
        owner, name, *rest = [
            *path.removeprefix("/api/models").strip("/").split("/"),
            "",
        ]
        repo = self.server.repos.get(f"{owner}/{name}")
        if not self._allowed():
            return
        if repo is None:
            self._answer(
                404, {"error": "Repository not found"}, X_Error_Code="RepoNotFound"
            )
        elif rest[0] == "resolve":
            self._file(repo, "/".join(rest[2:]).rstrip("/"))
        elif rest[0] == "xet-write-token":
            until = int(time.time()) + 3600
            self._answer(
                200,
                {
                    "accessToken": "x",
                    "exp": until,
                    "casUrl": f"local://{self.server.xet}",
                },
            )
        elif rest[0] == "tree":
            self._answer(200, [
                {"type": "file", "path": path, "size": len(content), "oid": git_blob(content)}
                for path, content in repo.files.items()
            ])  # fmt: skip
        else:
            config = json.loads(repo.files.get("config.json", b"{}"))
            self._answer(200, {
                "id": f"{owner}/{name}", "private": repo.private, "sha": COMMIT, "config": config,
                "siblings": [{"rfilename": path} for path in repo.files],
            })  # fmt: skip

    def _file(self, repo: Repo, path: str) -> None:
        """Answer a download of one file, or of its headers; the revision is ignored."""
        if path not in repo.files:
            return self._answer(
                404,
                {"error": "Entry not found"},
                X_Error_Code="EntryNotFound",
                X_Repo_Commit=COMMIT,
            )
        content = repo.files[path]
        self.send_response(200)
        for name, text in (
            ("ETag", f'"{git_blob(content)}"'), ("X-Repo-Commit", COMMIT), ("Content-Length", str(len(content))),
        ):  # fmt: skip
            self.send_header(name, text)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def do_PUT(self) -> None:
        content = self._body()
        self.server.requests.append(("PUT", self.path))
        if self.server.breaks(content):
            return self._answer(400, {"error": "the connection broke"})
        oid = hashlib.sha256(content).hexdigest()
        assert self.path == f"/upload/{oid}"
        self.server.objects[oid] = content
        self.server.received.append(oid)
        self._answer(200)

    def do_POST(self) -> None:
        path = self.path.split("?")[0]
        body = self._body()
        self.server.requests.append(("POST", path))
        if not self._allowed():
            return
        if path == "/api/validate-yaml":
            errors = [{"message": text} for text in self.server.metadata_errors]
            self._answer(400 if errors else 200, {"errors": errors, "warnings": []})
        elif path == "/api/repos/create":
            self._create(json.loads(body))
        elif path.endswith("/info/lfs/objects/batch"):
            self._batch(json.loads(body))
        elif "/preupload/" in path:
            self._preupload(path, json.loads(body))
        elif "/commit/" in path:
            self._commit(path, [json.loads(line) for line in body.splitlines()])
        else:
            self._answer(404, {"error": path})

    def _create(self, wanted: dict[str, Any]) -> None:
        name = f"{wanted['organization']}/{wanted['name']}"
        url = {"url": f"{self.server.url}/{name}"}
        if not self.server.may_write:
            self._answer(
                403,
                {
                    "error": "You don't have the rights to create a model under this namespace",
                },
            )  # fmt: skip
        elif name in self.server.repos:
            self._answer(409, url | {"error": "You already created this model repo"})
        else:
            private = wanted.get("visibility") == "private" or bool(
                wanted.get("private")
            )
            self.server.repos[name] = Repo(private)
            self._answer(200, url)

    def _repo(self, path: str) -> Repo:
        return self.server.repos[
            "/".join(path.removeprefix("/api/models/").split("/")[:2])
        ]

    def _preupload(self, path: str, wanted: dict[str, Any]) -> None:
        files = self._repo(path).files
        answer = []
        for file in wanted["files"]:
            name = file["path"]
            large = name.endswith((".safetensors", ".png"))
            row = {
                "path": name,
                "uploadMode": "lfs" if large else "regular",
                "shouldIgnore": False,
            }
            if name in files:
                row["oid"] = large_oid(files[name]) if large else git_blob(files[name])
            answer.append(row)
        self._answer(200, {"files": answer})

    def _batch(self, wanted: dict[str, Any]) -> None:
        def row(item: dict[str, Any]) -> dict[str, Any]:
            here = item["oid"] in self.server.objects
            upload = {
                "actions": {
                    "upload": {"href": f"{self.server.url}/upload/{item['oid']}"}
                }
            }
            return {
                "oid": item["oid"],
                "size": item["size"],
                **({} if here else upload),
            }

        self._answer(
            200,
            {"transfer": "basic", "objects": [row(item) for item in wanted["objects"]]},
        )

    def _commit(self, path: str, lines: list[dict[str, Any]]) -> None:
        if self.server.commit_answer is not None:
            status, text = self.server.commit_answer
            return self._answer(status, {"error": text}, X_Error_Message=text)
        repo = self._repo(path)
        for line in lines:
            value = line["value"]
            match line["key"]:
                case "header":
                    repo.commits.append(value["summary"])
                case "file":
                    repo.files[value["path"]] = base64.b64decode(value["content"])
                case "lfsFile":
                    sent = self.server.objects.get(value["oid"])
                    assert sent is not None or self.server.xet is not None
                    repo.files[value["path"]] = sent or b"xet:" + value["oid"].encode()
                case "deletedFile":
                    del repo.files[value["path"]]
                case other:
                    raise AssertionError(other)
        name = "/".join(path.removeprefix("/api/models/").split("/")[:2])
        url = f"{self.server.url}/{name}/commit/{COMMIT}"
        self._answer(200, {"commitUrl": url, "commitOid": COMMIT})
