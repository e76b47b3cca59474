"""What a training reports to wandb (offline) and trackio, read back from their files on
disk.
"""

import json
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fcsd.training.history import read_history
from tests.support import ROOT

pytestmark = pytest.mark.extras

# In a separate process: both start threads and processes, and end them when Python
# ends.
TRAINING = """
import sys
from collections.abc import Iterator
from pathlib import Path
from fcsd.training.run import train
from tests.reference.tiny import tiny_model
from tests.training.test_trainer import make
teacher = tiny_model("qwen2_moe", num_hidden_layers=2, experts_implementation="eager").requires_grad_(False)
train(*make(Path(sys.argv[1]), teacher, max_steps=3, logging_steps=1, report_to=[sys.argv[2]]))
"""


def trained(
    folder: Path, reporter: str, monkeypatch: pytest.MonkeyPatch
) -> list[float]:
    """Train three steps and return the KL of each."""
    pytest.importorskip(
        reporter, reason=f"{reporter} is not installed; `make test-extras` installs it"
    )
    for name in ("HOME", "WANDB_DIR", "TRACKIO_DIR", "HF_HOME"):
        monkeypatch.setenv(name, str(folder / "home"))
    monkeypatch.setenv("WANDB_MODE", "offline")
    (folder / "home").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", TRAINING, str(folder / "run"), reporter],
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    points = [point["kl"] for point in read_history(folder / "run")]
    assert len(points) == 3
    return points


def records(data: bytes) -> Iterator[bytes]:
    """Yield the records in a file of wandb: after 7 bytes comes LevelDB's log, with
    blocks of 32 KiB that have checksum, length and kind (whole, first, middle, last)
    before each piece.
    """
    place, parts = 7, b""
    while place + 7 <= len(data):
        if (room := 32768 - place % 32768) < 7:
            place += room
            continue
        length, kind = struct.unpack_from("<HB", data, place + 4)
        parts += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            yield parts
            parts = b""


def test_wandb_offline_has_every_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = trained(tmp_path, "wandb", monkeypatch)
    (file,) = (tmp_path / "home").rglob("run-*.wandb")
    from wandb.proto import wandb_internal_pb2

    values = []
    for data in records(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        items = {
            item.key or item.nested_key[0]: item.value_json
            for item in record.history.item
        }
        if "train/kl" in items:
            values.append(json.loads(items["train/kl"]))
    assert values == expected


def test_trackio_has_every_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = trained(tmp_path, "trackio", monkeypatch)
    (file,) = (tmp_path / "home").rglob("*.db")
    with sqlite3.connect(file) as database:
        rows = database.execute("SELECT metrics FROM metrics ORDER BY step").fetchall()
    logged = [json.loads(text) for (text,) in rows]
    assert [
        metrics["train/kl"] for metrics in logged if "train/kl" in metrics
    ] == expected
