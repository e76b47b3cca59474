"""Kill commands with SIGKILL at random moments, run them again, and compare what they leave with a run left alone.

    python benchmarks/kills.py --kills 200 --output docs/kills.md

Commands: convert; sweep and distill, with early stopping by code, on one rank and on two (of which one or
both are killed), with checkpoints that the training waits for and with those that it does not; evaluate with a
multiple-choice and a code task; push to a Hub on this machine. After each kill it is
checked that
- the second run ends well, and what it leaves has the same bytes (weights, scores, results but for times and versions);
- a training goes on from the newest checkpoint that was there;
- no file is left over in the output folder, in the temporary folder, or beside them.
Everything is tiny: it is about the order of writes and renames, of which a large model has the same.
"""

import argparse
import atexit
import hashlib
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
for name, value in (("OMP_NUM_THREADS", "1"), ("TOKENIZERS_PARALLELISM", "false"), ("HF_HUB_OFFLINE", "1")):
    os.environ.setdefault(name, value)

import datasets  # noqa: E402
import torch  # noqa: E402
import yaml  # noqa: E402
from huggingface_hub import constants  # noqa: E402
from tqdm import tqdm  # noqa: E402
from turns import load_average  # noqa: E402

from fcsd.base.files import file_sha256, write_text  # noqa: E402
from fcsd.cli.main import main as fcsd  # noqa: E402
from fcsd.model.connectivity import Connectivity, convert_checkpoint  # noqa: E402
from fcsd.pipeline.tiny.models import tiny_model, tiny_tokenizer  # noqa: E402
from fcsd.training import checkpoint_writer  # noqa: E402
from tests.report.publish.hub_server import TOKEN, running_hub  # noqa: E402
from tests.support import Bench, forked_ranks, make_bench, status_of  # noqa: E402

VOLATILE = re.compile(
    r'"(finished|seconds|.*_s|share_of_time|scoring_share|tokens_per_second|versions|date)"'
)


@dataclass
class Job:
    """A command: `run(folder)` in a fork of each rank; `digest(folder)` is what must come out the same."""

    name: str
    num_ranks: int
    run: Callable[[Path], int]
    digest: Callable[[Path], dict[str, str]]
    rows: list[dict[str, Any]] = field(default_factory=list)


def attempt(
    job: Job, folder: Path, output: Path, draw: random.Random, kill_after_s: float | None = None
) -> tuple[list[int], str]:
    """(statuses, output) of the ranks of one run; with a time, SIGKILL goes to one of them, or to all."""

    def run(rank: int) -> int:
        atexit._clear()  # what the parent is to do at its end
        status = job.run(folder)
        atexit._run_exitfuncs()  # a fork ends without
        return status

    children = forked_ranks(run, job.num_ranks, output)
    if kill_after_s is not None:
        time.sleep(kill_after_s)
        for child, _ in children if draw.random() < 0.5 else [draw.choice(children)]:
            os.kill(
                child, signal.SIGKILL
            )  # nobody has waited for it yet, so that the number is still its own
    statuses = [status_of(child) for child, _ in children]
    return statuses, "".join(path.read_text(errors="replace") for _, path in children)


def newest_checkpoints(folder: Path) -> list[Path]:
    """The newest checkpoint of every training that is under way below `folder`."""
    newest = []
    for place in folder.rglob("checkpoints"):
        whole = [path for path in place.iterdir() if re.fullmatch(r"checkpoint-\d+", path.name)]
        finished = any((place.parent / name).is_file() for name in ("manifest.json", "result.json"))
        if whole and not finished:
            newest.append(max(whole, key=lambda path: int(path.name.split("-")[1])))
    return newest


def trial(
    job: Job, place: Path, expected: dict[str, str], duration_s: float, draw: random.Random
) -> dict[str, Any]:
    """Kill one run, run it again, and return what is wrong."""
    folder, output = place / "out", place / "output"
    temporary = Path(os.environ["TMPDIR"])
    folder.mkdir(parents=True)
    output.mkdir()
    moment = draw.uniform(0, duration_s)
    statuses, _ = attempt(job, folder, output, draw, moment)
    row: dict[str, Any] = {"after_s": round(moment, 3), "killed": -signal.SIGKILL in statuses, "faults": []}
    newest = newest_checkpoints(folder)
    again, text = attempt(job, folder, output, draw)
    if again != [0] * job.num_ranks:
        row["faults"].append(f"not recovered: statuses {again}: {text[-600:]}")
        return row
    for checkpoint in newest:
        if f"continuing from {checkpoint}" not in text:
            row["faults"].append(f"work lost: did not go on from {checkpoint}")
    hashes = job.digest(folder)
    if hashes != expected:
        differing = sorted(k for k in {*hashes, *expected} if hashes.get(k) != expected.get(k))
        row["faults"].append(f"differs: {differing[:6]}")
    deadline = time.monotonic() + 30  # sandbox servers of a killed process end on their own
    while (left := leftovers(temporary)) and time.monotonic() < deadline:
        time.sleep(0.2)
    if left:
        row["faults"].append(f"left in the temporary folder: {left[:5]}")
        for path in temporary.iterdir():
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
    return row


def leftovers(temporary: Path) -> list[str]:
    """What lies in the temporary folder; torch keeps its compiler's cache there."""
    return sorted(path.name for path in temporary.iterdir() if not path.name.startswith("torchinductor"))


# ---- what is compared


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def stable(path: Path, folder: Path) -> str:
    """A hash of a file; of a record without what two runs may differ in: where they ran, and lines with times."""
    if path.suffix not in (".json", ".jsonl", ".md", ".yaml", ".csv"):
        return file_sha256(path)
    lines = path.read_text(encoding="utf-8").replace(str(folder), "OUT").splitlines()
    return digest("\n".join(line for line in lines if not VOLATILE.search(line)).encode())


def tree(folder: Path) -> dict[str, str]:
    """Every file below `folder`, hidden ones too, and its hash; of records what is stable."""
    hashes = {}
    for path in sorted(folder.rglob("*")):
        name = re.sub(r"\d{4}-\d\d-\d\dT[\d.-]+", "TIME", str(path.relative_to(folder)))
        if path.is_file():
            # Their lines have times in them; the weights and results that these are about are compared.
            timed = (
                name.endswith(("history.jsonl", "manifest.json", "scores.json", "events.jsonl"))
                or "TIME" in name
            )
            hashes[name] = "there" if timed else stable(path, folder)
        elif not any(path.iterdir()):
            hashes[f"{name}/"] = "empty folder"
    return hashes


def scores(folder: Path) -> dict[str, str]:
    """The tree of an evaluation, with the figures of its results in place of their bytes."""
    hashes = tree(folder)
    values = json.loads((folder / "results" / "results.json").read_text())
    tasks = {
        name: [task[key] for key in ("metric", "value", "num_items")]
        for name, task in values["tasks"].items()
    }
    hashes["results/results.json"] = json.dumps({"tasks": tasks, "mean": values["mean"]}, sort_keys=True)
    return hashes


# ---- the commands


def jobs(bench: Bench, hub: Any) -> Iterator[Job]:
    """The commands, on a tiny base checkpoint."""

    def convert(folder: Path) -> int:
        if (folder / "model").exists():  # what has its name is whole, and is not written a second time
            return 0
        return fcsd(["convert", str(bench.base), str(folder / "model"), "--layers", "all"])

    yield Job("convert", 1, convert, tree)

    train = {
        "max_steps": 8, "batch_size_tokens": 128, "per_device_train_batch_size": 2, "learning_rate": 1e-3,
        "warmup_steps": 2, "logging_steps": 1, "save_steps": 2,
    }  # fmt: skip
    sweep = {
        "batch_size_tokens": [128],
        "learning_rate": [1e-3, 2e-3],
        "steps": 4,
        "warmup_steps": 0,
        "last_steps": 2,
    }
    data = {"train": [{"path": str(bench.rows)}], "max_length": 32}
    recipe = bench.recipe("kills", train=train, sweep=sweep, data=data, early_stopping=bench.early_stopping)

    def distill(folder: Path) -> int:
        settings = ["--set", f"output_dir={folder}"]
        return fcsd(["sweep", str(recipe), *settings]) or fcsd(["distill", str(recipe), *settings])

    yield Job("sweep, distill", 1, distill, tree)
    yield Job("sweep, distill", 2, distill, tree)

    def in_background(folder: Path) -> int:
        checkpoint_writer.BACKGROUND_FROM = 0  # in a fork of its own
        return distill(folder)

    yield Job("distill, checkpoints in the background", 1, in_background, tree)
    yield Job("distill, checkpoints in the background", 2, in_background, tree)

    model = bench.folder / "converted"
    convert_checkpoint(bench.base, model, Connectivity("all"))
    tasks = [bench.choice["task"], bench.early_stopping["task"]]
    suite = bench.folder / "suite.yaml"
    suite.write_text(yaml.safe_dump({"name": "kills", "tasks": tasks}))

    def evaluate(folder: Path) -> int:
        options = ["--suite", str(suite), "--output", str(folder / "results"), "--batch-size", "4"]
        return fcsd(["evaluate", str(model), *options])

    yield Job("evaluate", 1, evaluate, scores)

    def push(folder: Path) -> int:
        return fcsd(["push", str(model), f"owner/{folder.parent.name}"])

    def pushed(folder: Path) -> dict[str, str]:
        return {
            name: digest(data.replace(folder.parent.name.encode(), b"REPOSITORY"))
            for name, data in hub.repos[f"owner/{folder.parent.name}"].files.items()
        }

    yield Job("push", 1, push, pushed)


def report(rows: list[dict[str, Any]], duration_s: float) -> str:
    """The page of docs."""
    when = f"{time.strftime('%Y-%m-%d')}, load {load_average()}, {duration_s / 60:.0f} minutes"
    lines = [
        "# Kills",
        "",
        "Written by `python benchmarks/kills.py`, whose head says what is done and checked.",
        f"{when}, torch {torch.__version__}.",
        "",
        "| command | ranks | killed | had ended before | same bytes at the end, nothing lost, nothing left | faults |",
        "|---|---:|---:|---:|---:|---|",
    ]
    for key in dict.fromkeys((row["job"], row["ranks"]) for row in rows):
        of = [row for row in rows if (row["job"], row["ranks"]) == key]
        killed = sum(row["killed"] for row in of)
        good = sum(not row["faults"] for row in of)
        kinds = ", ".join(sorted({fault.split(":")[0] for row in of for fault in row["faults"]})) or "-"
        cells = [*key, killed, len(of) - killed, f"{good} of {len(of)}", kinds]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    faults = [
        f"- {row['job']}, {row['ranks']} ranks, after {row['after_s']} s: {fault}"
        for row in rows
        for fault in row["faults"]
    ]
    return "\n".join([*lines, *(["", "Faults:", "", *faults] if faults else [])]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=200, help="over all commands")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="commands whose name has this in it")
    parser.add_argument("--output", type=Path, help="a Markdown file; without it the table is printed")
    options = parser.parse_args()
    torch.set_num_threads(1)
    draw, begun, rows = random.Random(options.seed), time.monotonic(), []
    with tempfile.TemporaryDirectory(prefix="fcsd-kills-") as place, running_hub() as hub:
        folder = Path(place)
        (folder / "tmp").mkdir()
        os.environ["TMPDIR"] = tempfile.tempdir = str(folder / "tmp")
        datasets.config.HF_DATASETS_CACHE = folder / "cache"
        constants.ENDPOINT, constants.HF_HUB_OFFLINE, constants.HF_HUB_DISABLE_XET = hub.url, False, True
        constants.HUGGINGFACE_CO_URL_TEMPLATE = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        os.environ["HF_TOKEN"] = TOKEN
        tiny_model("qwen2_moe", num_hidden_layers=2, vocab_size=300, num_experts=4).save_pretrained(
            folder / "base"
        )
        tiny_tokenizer(300).save_pretrained(folder / "base")
        (folder / "bench").mkdir()
        chosen = [
            job
            for job in jobs(make_bench(folder / "base", folder / "bench"), hub)
            if not options.only or options.only in job.name
        ]
        for number, job in enumerate(chosen):
            whole = folder / f"whole-{number}"
            (whole / "out").mkdir(parents=True)
            (whole / "output").mkdir()
            started = time.monotonic()
            statuses, text = attempt(job, whole / "out", whole / "output", draw)
            duration_s = time.monotonic() - started
            if any(statuses):
                sys.exit(text[-3000:])
            expected = job.digest(whole / "out")
            share = range(options.kills * number // len(chosen), options.kills * (number + 1) // len(chosen))
            for index in tqdm(share, desc=f"{job.name}, {job.num_ranks}", unit="kill"):
                outcome = trial(job, folder / f"trial-{index}", expected, duration_s, draw)
                rows.append({"job": job.name, "ranks": job.num_ranks} | outcome)
                for fault in outcome["faults"]:
                    print(f"{job.name}, after {outcome['after_s']} s: {fault}", file=sys.stderr)
                shutil.rmtree(folder / f"trial-{index}")
    text = report(rows, time.monotonic() - begun)
    if options.output is None:
        print(text)
    else:
        write_text(options.output, text)


if __name__ == "__main__":
    main()
