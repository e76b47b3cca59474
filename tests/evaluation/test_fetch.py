"""`fcsd evaluate --fetch` fills a data root, continues an interrupted fetch, and never
leaves a data set half there.
"""

import json
import os
import re
import threading
import zlib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from fcsd.base.strict import validate
from fcsd.data.local import data_fingerprint
from fcsd.evaluation import datasets
from fcsd.evaluation.config import SuiteConfig, TaskConfig
from fcsd.evaluation.datasets import MARK, fetch_suite, fetched_revision, hub_advice
from fcsd.evaluation.lm_eval.tasks import load_task
from fcsd.evaluation.suites import load_suite
from fcsd.pipeline.tiny.models import tiny_tokenizer
from tests.evaluation.rows import rows_of, write_repository
from tests.support import command_words, start, user_error

COMMIT = "a" * 40


def row(task: str, dataset: str, **changes: Any) -> TaskConfig:
    base = {
        "task": task, "kind": "likelihood", "metric": "acc,none", "dataset": dataset, "revision": COMMIT,
    }  # fmt: skip
    return validate(TaskConfig, base | changes, "row")


SUITE = SuiteConfig(
    name="s", tasks=[row("piqa", "baber/piqa"), row("sciq", "allenai/sciq")]
)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stand in for the Hub with invented rows, and return the list of requested data
    sets. A name that is in the list twice fails.
    """
    asked: list[str] = []

    def download(dataset: str, revision: str | None, folder: Path) -> str:
        asked.append(dataset)
        (folder / "half").write_text("x")
        if os.environ.get("FAIL") == dataset:
            raise ConnectionError("no route to host")
        split = "validation" if dataset == "baber/piqa" else "test"
        write_repository(
            folder,
            {"default": {"train": rows_of(dataset, 3), split: rows_of(dataset, 3)}},
        )
        return COMMIT

    monkeypatch.setattr(datasets, "_download", download)
    return asked


def test_a_data_root_is_filled_and_what_is_there_is_not_fetched_again(
    hub: list[str], tmp_path: Path
) -> None:
    assert fetch_suite(SUITE, tmp_path) == ["baber/piqa", "allenai/sciq"] == hub
    assert fetch_suite(SUITE, tmp_path) == [] and len(hub) == 2
    assert sorted(os.listdir(tmp_path / "baber")) == ["piqa"]
    assert fetched_revision(SUITE.tasks[0], tmp_path) == COMMIT
    assert load_task(SUITE.tasks[0], SUITE, tmp_path, tiny_tokenizer())


def test_a_data_set_whose_id_leads_out_of_the_data_root_is_not_fetched(
    hub: list[str], tmp_path: Path
) -> None:
    with user_error(r"'\.\./\.\./x': leads out of the folder"):
        fetch_suite(
            SuiteConfig(name="s", tasks=[row("piqa", "../../x")]), tmp_path / "root"
        )
    assert hub == [] and not list(tmp_path.iterdir())


def test_a_data_set_that_several_tasks_read_is_fetched_once(
    hub: list[str], tmp_path: Path
) -> None:
    tasks = [row("a", "o/d"), row("b", "o/d")]
    write = SuiteConfig(
        name="s", tasks=[row("piqa", "baber/piqa"), row("other", "baber/piqa")]
    )
    fetch_suite(write, tmp_path)
    assert hub == ["baber/piqa"]
    with user_error("tasks a and b need two revisions of o/d"):
        fetch_suite(
            SuiteConfig(
                name="s",
                tasks=[tasks[0], tasks[1].model_copy(update={"revision": None})],
            ),
            tmp_path,
        )


def test_data_that_are_not_on_the_hub_come_with_the_command_that_makes_them(
    hub: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAIL", "fcsd/tiny-choice")
    tiny = row("tiny_choice", "fcsd/tiny-choice")
    advice = r"\); `fcsd tiny-data OUT` makes it; give OUT/data as --data-root$"
    with user_error(advice):
        fetch_suite(SuiteConfig(name="s", tasks=[tiny]), tmp_path)
    assert re.search(advice, f"){hub_advice(tiny, None)}")


def test_a_failure_names_the_task_and_keeps_what_was_fetched(
    hub: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAIL", "allenai/sciq")
    with user_error(
        f"task sciq: data set allenai/sciq@{COMMIT} cannot be fetched .no route to"
        " host.; check the network"
    ):
        fetch_suite(SUITE, tmp_path)
    assert not (tmp_path / "allenai/sciq").exists()
    assert (tmp_path / "baber/piqa" / MARK).is_file()
    # the next fetch continues it
    assert (tmp_path / "allenai/.sciq.fetch/half").is_file()
    monkeypatch.delenv("FAIL")
    assert fetch_suite(SUITE, tmp_path) == ["allenai/sciq"]


def test_another_revision_and_a_folder_of_unknown_origin_are_not_replaced(
    hub: list[str], tmp_path: Path
) -> None:
    fetch_suite(SUITE, tmp_path)
    other = SuiteConfig(name="s", tasks=[row("piqa", "baber/piqa", revision="b" * 40)])
    with user_error(
        f"task piqa: .*holds revision {COMMIT}, but the suite needs {'b' * 40}"
    ):
        fetch_suite(other, tmp_path)
    (tmp_path / "baber/piqa" / MARK).unlink()
    with user_error(r"task piqa: .*exists, but not from `fcsd evaluate --fetch`"):
        fetch_suite(SUITE, tmp_path)


def test_where_the_rows_came_from_does_not_change_their_identity(
    hub: list[str], tmp_path: Path
) -> None:
    fetch_suite(SUITE, tmp_path)
    before = data_fingerprint(str(tmp_path / "baber/piqa"))
    (tmp_path / "baber/piqa" / MARK).unlink()
    assert data_fingerprint(str(tmp_path / "baber/piqa")) == before


@pytest.mark.parametrize("name", ["mine.jsonl", "./mine", "~/mine", "/data/mine"])
def test_files_of_ones_own_are_not_asked_of_the_hub(
    hub: list[str], tmp_path: Path, name: str
) -> None:
    suite = SuiteConfig(name="s", tasks=[row("mine", name), row("piqa", "baber/piqa")])
    assert fetch_suite(suite, tmp_path) == hub == ["baber/piqa"]


def test_an_offline_process_says_so(tmp_path: Path) -> None:
    with user_error(r"task piqa: .*cannot be fetched .*HF_HUB_OFFLINE is set"):
        fetch_suite(SUITE, tmp_path)


class _Hub(BaseHTTPRequestHandler):
    """The few endpoints of the Hub that a snapshot of a data set needs; the first
    request for `fails` is refused.
    """

    files: dict[str, bytes]
    served: list[str]
    fails: list[str]
    # name -> set when half of the file has been sent, after which no more comes
    hangs: dict[str, threading.Event]

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        if path.startswith("/api/datasets/baber/piqa/revision/"):
            siblings = [{"rfilename": name} for name in self.files]
            return self._reply(
                json.dumps(
                    {"id": "baber/piqa", "sha": COMMIT, "siblings": siblings}
                ).encode()
            )
        if path.startswith("/api/datasets/baber/piqa/tree/"):
            tree = [
                {"type": "file", "path": name, "size": len(data), "oid": name}
                for name, data in self.files.items()
            ]
            return self._reply(json.dumps(tree).encode())
        name = path.removeprefix(f"/datasets/baber/piqa/resolve/{COMMIT}/")
        if name not in self.files:
            self.send_error(404)
            return None
        if self.command == "GET":
            if name in self.fails:
                self.fails.remove(name)
                self.send_error(403)
                return None
            self.served.append(name)
        return self._reply(
            self.files[name], etag=f'"{zlib.crc32(name.encode()):08x}"', name=name
        )

    def _reply(self, data: bytes, etag: str | None = None, name: str = "") -> None:
        begin = int(
            self.headers.get("Range", "bytes=0-")
            .removeprefix("bytes=")
            .partition("-")[0]
        )
        self.send_response(206 if begin else 200)
        if begin:
            self.send_header(
                "Content-Range", f"bytes {begin}-{len(data) - 1}/{len(data)}"
            )
        data = data[begin:]
        self.send_header("Content-Length", str(len(data)))
        self.send_header("X-Repo-Commit", COMMIT)
        if etag:
            self.send_header("ETag", etag)
        self.end_headers()
        if self.command == "GET" and name in self.hangs:
            self.wfile.write(data[: len(data) // 2])
            self.wfile.flush()
            self.hangs.pop(name).set()
            self.rfile.read(1)  # until the client has gone
        elif self.command == "GET":
            self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    write_repository(
        tmp_path / "source",
        {"default": {s: rows_of("baber/piqa", 3) for s in ("train", "validation")}},
    )
    source = tmp_path / "source"
    _Hub.files = {
        str(p.relative_to(source)): p.read_bytes()
        for p in sorted(source.rglob("*"))
        if p.is_file()
    }
    _Hub.files["piqa.py"] = b"raise SystemExit"
    _Hub.served, _Hub.fails, _Hub.hangs = [], [], {}
    with ThreadingHTTPServer(("127.0.0.1", 0), _Hub) as made:
        threading.Thread(target=made.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{made.server_port}"
        made.shutdown()


def fetch_command(server: str, tmp_path: Path) -> Any:
    """Return the command that fetches PIQA from the server, as a context manager; its
    suite is suite.yaml.
    """
    task = row("piqa", "baber/piqa").model_dump(exclude_none=True)
    (tmp_path / "suite.yaml").write_text(yaml.safe_dump({"name": "s", "tasks": [task]}))
    words = command_words(
        "-m fcsd evaluate --fetch",
        tmp_path / "root",
        "--suite",
        tmp_path / "suite.yaml",
    )
    environment = {
        "HF_ENDPOINT": server,
        "HF_HUB_OFFLINE": "0",
        "HF_HOME": str(tmp_path / "home"),
    }
    return start(*words, **environment)


def assert_fetched(tmp_path: Path) -> None:
    place = tmp_path / "root/baber/piqa"
    assert sorted(p.name for p in place.iterdir()) == sorted(
        ["README.md", "default", MARK]
    )
    assert all(
        (place / name).read_bytes() == data
        for name, data in _Hub.files.items()
        if name != "piqa.py"
    )
    assert sorted(p.name for p in place.parent.iterdir()) == ["piqa"]
    loaded = load_suite(tmp_path / "suite.yaml")
    assert load_task(loaded.tasks[0], loaded, tmp_path / "root", tiny_tokenizer())


def test_the_command_fetches_with_the_real_client_and_continues_after_a_failure(
    server: str, tmp_path: Path
) -> None:
    _Hub.fails = ["default/validation.jsonl"]
    results = []
    for _ in range(2):
        with fetch_command(server, tmp_path) as child:
            results.append((child.communicate(timeout=120)[1], child.returncode))
    assert results[0][1] == 2 and "task piqa: data set baber/piqa@" in results[0][0], (
        results[0]
    )
    assert results[1][1] == 0, results[1]
    assert sorted(_Hub.served) == [
        "README.md",
        "default/train.jsonl",
        "default/validation.jsonl",
    ]
    assert_fetched(tmp_path)


@pytest.mark.breadth
def test_a_fetch_that_was_killed_within_a_file_leaves_nothing_under_its_name_and_is_completed_by_the_next(
    server: str, tmp_path: Path
) -> None:
    half = threading.Event()
    _Hub.hangs = {"default/validation.jsonl": half}
    with fetch_command(server, tmp_path) as child:
        assert half.wait(120), child.poll()
        child.kill()
    assert not (tmp_path / "root/baber/piqa").exists()
    with fetch_command(server, tmp_path) as child:
        said = child.communicate(timeout=120)[1]
    assert child.returncode == 0, said
    assert_fetched(tmp_path)
