"""Kill commands with SIGKILL, or damage their files, run them again, and compare with
an undisturbed run.

    python benchmarks/kills.py --placed              # before and after every rename, removal and manifest
    python benchmarks/kills.py --kills 200           # at random moments
    python benchmarks/kills.py --damage              # flip a bit in each kind of file, and truncate it
    python benchmarks/kills.py --damage --harms empty,remove,swap    # and other harms; swap: that of another run
    python benchmarks/kills.py --placed --only calibrate

Commands: every stage of a recipe, and those that write a folder. On two ranks, one or
both are killed. After each kill it checks that
- the second run succeeds, and its output has the same bytes (weights, scores, results
  except times and versions);
- a training continues from the newest checkpoint that existed;
- no file is left over in the output folder, in the temporary folder, or beside them.
After each damage it checks that the next run reports it, rewrites the file, or does not
read it. Everything is tiny: what matters is the order of writes and renames, which is
the same for a large model. The tables are printed in Markdown; docs/kills.md has them.
"""

import argparse
import atexit
import contextlib
import hashlib
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "steering")]
for name, value in (
    ("OMP_NUM_THREADS", "1"),
    ("TOKENIZERS_PARALLELISM", "false"),
    ("HF_HUB_OFFLINE", "1"),
):
    os.environ.setdefault(name, value)

import datasets  # noqa: E402
import torch  # noqa: E402
import yaml  # noqa: E402
from huggingface_hub import constants  # noqa: E402
from tqdm import tqdm  # noqa: E402
from turns import load_average  # noqa: E402

from fcsd.base.files import file_sha256  # noqa: E402
from fcsd.cli.main import main as fcsd  # noqa: E402
from fcsd.model.connectivity import Connectivity, convert_checkpoint  # noqa: E402
from fcsd.pipeline import run as _imported_before_forks  # noqa: E402, F401
from fcsd.pipeline.tiny.models import tiny_model, tiny_tokenizer  # noqa: E402
from fcsd.planning.network.links import write_links  # noqa: E402
from fcsd.report.publish.card import CARD, RESULTS  # noqa: E402
from fcsd.training import checkpoint_writer  # noqa: E402
from fcsd.training.calibration import state as calibration  # noqa: E402
from fcsd_steering.cli import main as steer  # noqa: E402
from tests.kills import Places  # noqa: E402
from tests.planning.cost.plans import even_links  # noqa: E402
from tests.report.publish.hub_server import TOKEN, running_hub  # noqa: E402
from tests.support import (  # noqa: E402
    Bench,
    forked_ranks,
    in_a_fork,
    make_bench,
    status_of,
)

VOLATILE = re.compile(
    r'"(finished|seconds|.*_s|share_of_time|scoring_share|tokens_per_second|versions|date|sha256|[\w.-]+\.jsonl?)"'
)


@dataclass
class Job:
    """A command: `run(folder)` runs in a fork of each rank; `digest(folder)` is what
    must be the same.
    """

    name: str
    num_ranks: int
    run: Callable[[Path], int]
    digest: Callable[[Path], dict[str, str]]
    prepare: Callable[[Path], None] = lambda folder: None
    """Writes to the folder what exists before the command."""


@dataclass(frozen=True)
class Kill:
    """When ranks are killed: after a time, or one of them (`rank`) at a moment of
    `Places`; all: the others, too.
    """

    all: bool
    after_s: float | None = None
    rank: int = 0
    moment: str = ""

    def __str__(self) -> str:
        return self.moment if self.after_s is None else f"after {self.after_s:.3f} s"


def attempt(
    job: Job,
    folder: Path,
    output: Path,
    kill: Kill | None = None,
    records: Path | None = None,
) -> tuple[list[int], str]:
    """Return (statuses, output) of the ranks of one run. records: a folder for the
    moments of each rank.
    """

    def run(rank: int) -> int:
        atexit._clear()  # what the parent has to do at its end
        # Forks share tqdm's own lock: one that is killed may hold it forever.
        tqdm.set_lock(threading.RLock())
        if records is not None:
            Places(folder, record=records / str(rank)).watch()
        elif kill is not None and kill.after_s is None and kill.rank == rank:
            Places(folder, kill=kill.moment).watch()
        status = job.run(folder)
        atexit._run_exitfuncs()  # a fork ends without
        return status

    children = forked_ranks(run, job.num_ranks, output)
    order = list(range(job.num_ranks))
    if kill is not None:
        order.sort(key=lambda rank: rank != kill.rank)
        if kill.after_s is not None:
            time.sleep(kill.after_s)
            # nobody has waited for it, so the PID is still its own
            os.kill(children[kill.rank][0], signal.SIGKILL)
    statuses = [0] * job.num_ranks
    for place, rank in enumerate(order):
        if (
            place
            and kill is not None
            and kill.all
            and statuses[kill.rank] == -signal.SIGKILL
        ):
            os.kill(children[rank][0], signal.SIGKILL)
        statuses[rank] = status_of(children[rank][0])
    # A rank that was killed at once has no output.
    files = [path for _, path in children if path.exists()]
    return statuses, "".join(path.read_text(errors="replace") for path in files)


def newest_checkpoints(folder: Path) -> list[Path]:
    """Return the newest checkpoint of every unfinished training below `folder`."""
    newest = []
    for place in folder.rglob("checkpoints"):
        whole = [
            path
            for path in place.iterdir()
            if re.fullmatch(r"checkpoint-\d+", path.name)
        ]
        finished = any(
            (place.parent / name).is_file() for name in ("manifest.json", "result.json")
        )
        if whole and not finished:
            newest.append(max(whole, key=lambda path: int(path.name.split("-")[1])))
    return newest


def trial(
    job: Job, place: Path, expected: dict[str, str], kill: Kill
) -> dict[str, Any]:
    """Kill one run, run it again, and return the faults."""
    folder, output = place / "out", place / "output"
    temporary = Path(os.environ["TMPDIR"])
    folder.mkdir(parents=True)
    output.mkdir()
    job.prepare(folder)
    statuses, _ = attempt(job, folder, output, kill)
    row: dict[str, Any] = {
        "kill": str(kill),
        "killed": -signal.SIGKILL in statuses,
        "faults": [],
    }
    newest = newest_checkpoints(folder)
    again, text = attempt(job, folder, output)
    if again != [0] * job.num_ranks:
        row["faults"].append(f"not recovered: statuses {again}: {text[-600:]}")
        return row
    for checkpoint in newest:
        if f"continuing from {checkpoint}" not in text:
            row["faults"].append(f"work lost: did not go on from {checkpoint}")
    hashes = job.digest(folder)
    if hashes != expected:
        differing = sorted(
            k for k in {*hashes, *expected} if hashes.get(k) != expected.get(k)
        )
        row["faults"].append(f"differs: {differing[:6]}")
    # sandbox servers of a killed process end on their own
    deadline = time.monotonic() + 30
    while (left := leftovers(temporary)) and time.monotonic() < deadline:
        time.sleep(0.2)
    if left:
        row["faults"].append(f"left in the temporary folder: {left[:5]}")
        for path in temporary.iterdir():
            (
                shutil.rmtree(path, ignore_errors=True)
                if path.is_dir()
                else path.unlink(missing_ok=True)
            )
    return row


def leftovers(temporary: Path) -> list[str]:
    """Return what is left in the temporary folder, in which torch keeps its compiler's
    cache.
    """
    return sorted(
        path.name
        for path in temporary.iterdir()
        if not path.name.startswith("torchinductor")
    )


# ---- what is compared


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def stable(path: Path, folder: Path) -> str:
    """Return a hash of a file; for a record, without the parts in which two runs may
    differ: where they ran, and lines with times.
    """
    if path.suffix not in (".json", ".jsonl", ".md", ".html", ".yaml", ".csv"):
        return file_sha256(path)
    lines = path.read_text(encoding="utf-8").replace(str(folder), "OUT").splitlines()
    return digest(
        "\n".join(line for line in lines if not VOLATILE.search(line)).encode()
    )


def without_time(name: str) -> str:
    return re.sub(r"\d{4}-\d\d-\d\dT[\d.-]+", "TIME", name)


def tree(folder: Path) -> dict[str, str]:
    """Return every file below `folder`, including hidden ones, and its hash; for
    records, the hash of their stable part.
    """
    hashes = {}
    for path in sorted(folder.rglob("*")):
        name = without_time(str(path.relative_to(folder)))
        if path.is_file():
            # Their lines contain times; the weights and results that they describe are
            # compared.
            timed = (
                name.endswith(
                    ("history.jsonl", "manifest.json", "scores.json", "events.jsonl")
                )
                or "TIME" in name
            )
            hashes[name] = "there" if timed else stable(path, folder)
        elif not any(path.iterdir()):
            hashes[f"{name}/"] = "empty folder"
    return hashes


def scores(folder: Path) -> dict[str, str]:
    """Return the tree of an evaluation, with the figures of its results in place of
    their bytes.
    """
    hashes = tree(folder)
    values = json.loads((folder / "results" / "results.json").read_text())
    tasks = {
        name: [task[key] for key in ("metric", "value", "num_items")]
        for name, task in values["tasks"].items()
    }
    hashes["results/results.json"] = json.dumps(
        {"tasks": tasks, "mean": values["mean"]}, sort_keys=True
    )
    return hashes


# ---- the commands


class Commands:
    """The commands on a tiny base checkpoint; each is a job for one rank and, where
    possible, for two.
    """

    def __init__(self, bench: Bench, hub: Any, word: str = "Line"):
        self.bench, self.hub = bench, hub
        self.text = bench.folder / "text.jsonl"
        lines = [
            f"{word} {n} of {n * n % 97} says {n % 7} more, and then {n * 31 % 89}."
            for n in range(200)
        ]
        self.text.write_text(
            "".join(json.dumps({"text": line}) + "\n" for line in lines)
        )
        self.train = {
            "max_steps": 6, "batch_size_tokens": 128, "per_device_train_batch_size": 2, "learning_rate": 1e-3,
            "warmup_steps": 2, "logging_steps": 1, "save_steps": 2, "save_total_limit": 1,
        }  # fmt: skip
        self.rows = {"train": [{"path": str(bench.rows)}], "max_length": 32}
        self.source = {"path": str(self.text), "columns": {"text": "text"}}
        self.suite = bench.folder / "suite.yaml"
        self.choice = bench.folder / "choice.yaml"
        tasks = [bench.choice["task"], bench.early_stopping["task"]]
        self.suite.write_text(yaml.safe_dump({"name": "kills", "tasks": tasks}))
        self.choice.write_text(yaml.safe_dump({"name": "choice", "tasks": tasks[:1]}))
        self.model = bench.folder / "converted"
        convert_checkpoint(bench.base, self.model, Connectivity("all"))

    def recipe(self, name: str, **changes: Any) -> Path:
        return self.bench.recipe(
            name, **{"train": self.train, "data": self.rows, **changes}
        )

    def stage(
        self, recipe: Path, command: str, *settings: str
    ) -> Callable[[Path], int]:
        """Return a command on a recipe; `{}` in a setting is its folder."""

        def run(folder: Path) -> int:
            changes = (
                f"--set={setting.format(folder)}"
                for setting in ("output_dir={}", *settings)
            )
            return fcsd([*command.split(), str(recipe), *changes])

        return run

    def __iter__(self) -> Iterator[Job]:
        yield Job("convert", 1, self.convert, tree)
        for ranks in (1, 2):
            yield Job("calibrate", ranks, self.calibrate, tree)
        untrained = {"max_steps": 0, "warmup_steps": 0}
        calibrated = self.recipe(
            "calibrated",
            train=self.train | untrained,
            calibration={"tokens": 1500},
            data={"train": [self.source], "max_length": 64},
        )
        yield Job("calibrate in a recipe", 1, self.stage(calibrated, "distill"), tree)
        pretraining = {
            "tokenizer": str(self.bench.base),
            "config": small_config(self.bench.base),
            "data": self.rows | {"loss_on": "all"},
            "train": self.train,
        }
        yield Job(
            "pretrain",
            1,
            self.stage(
                self.recipe("pretrain", pretrain=pretraining, model=None), "pretrain"
            ),
            tree,
        )
        yield Job(
            "tokenize",
            1,
            self.stage(self.recipe("tokens"), "run --only=tokenize"),
            tree,
        )
        cached = self.recipe("cached", teacher={"backend": "cache", "cache": "cache"})
        sweep = {
            "batch_size_tokens": [128],
            "learning_rate": [1e-3, 2e-3],
            "steps": 4,
            "warmup_steps": 0,
            "last_steps": 2,
        }
        swept = self.recipe("swept", sweep=sweep)
        distilled = self.recipe(
            "distilled",
            data=self.rows
            | {
                "heldout": {"path": str(self.bench.rows)},
                "heldout_examples": 8,
            },
            early_stopping={"metric": "heldout_kl", "every_steps": 2, "patience": 50},
        )
        for ranks in (1, 2):
            yield Job(
                "cache-teacher",
                ranks,
                self.stage(
                    cached, "run --only=cache-teacher", "teacher.cache={}/cache"
                ),
                tree,
            )
            yield Job("sweep", ranks, self.stage(swept, "sweep"), tree)
            distill = self.stage(distilled, "distill")
            yield Job("distill", ranks, distill, tree)
            yield Job(
                "distill, checkpoints in the background",
                ranks,
                in_background(distill),
                tree,
            )
            yield Job("evaluate", ranks, self.evaluate, scores)
        yield Job("layers", 1, self.layers, tree)
        run = self.stage(self.whole_recipe(), "run")
        yield Job(
            "report and publication of a run", 1, run, tree, self.before_the_report(run)
        )
        yield Job("push", 1, self.push, self.pushed)

    def whole_recipe(self) -> Path:
        """Return a recipe in which `fcsd run` has all stages."""
        few = {"max_steps": 2, "warmup_steps": 0, "save_steps": 1}
        return self.recipe(
            "whole",
            train=self.train | few,
            calibration={"tokens": 1500, "starts_training": False},
            sweep={
                "batch_size_tokens": [128],
                "learning_rate": [1e-3],
                "steps": 2,
                "warmup_steps": 0,
                "last_steps": 2,
            },
            early_stopping={"metric": "heldout_kl", "every_steps": 2},
            data={
                "train": [self.source],
                "heldout": self.source,
                "heldout_examples": 8,
                "max_length": 64,
            },
            evaluation={"suite": str(self.choice), "batch_size": 4},
            publication={"license": "apache-2.0"},
        )

    def before_the_report(self, run: Callable[[Path], int]) -> Callable[[Path], None]:
        """Return a function that writes the stages of a run to a folder, without report
        and publication.
        """
        ready = self.bench.folder / "ready"

        def prepare(folder: Path) -> None:
            if not ready.exists():
                assert in_a_fork(lambda: run(ready), self.bench.folder / "output") == 0
                for name in ("report", "publish"):
                    shutil.rmtree(ready / name)
            shutil.copytree(ready, folder, dirs_exist_ok=True)

        return prepare

    def convert(self, folder: Path) -> int:
        # a file with its final name is complete, and is not written a second time
        if (folder / "model").exists():
            return 0
        return fcsd(
            ["convert", str(self.bench.base), str(folder / "model"), "--layers", "all"]
        )

    def calibrate(self, folder: Path) -> int:
        options = [
            "--layers",
            "all",
            "--tokens",
            "1500",
            "--max-length",
            "64",
            "--text",
            json.dumps(self.source),
        ]
        return fcsd(["calibrate", str(self.bench.base), str(folder / "out"), *options])

    def evaluate(self, folder: Path) -> int:
        options = [
            "--suite",
            str(self.suite),
            "--output",
            str(folder / "results"),
            "--batch-size",
            "4",
        ]
        return fcsd(["evaluate", str(self.model), *options])

    def layers(self, folder: Path) -> int:
        text = [
            "--text",
            json.dumps(self.source),
            "--text-examples",
            "8",
            "--max-length",
            "64",
            "--loss-on",
            "all",
        ]
        return fcsd(
            ["layers", str(self.bench.base), "--output", str(folder / "study"), *text]
        )

    def quantize(self, folder: Path) -> int:
        if (folder / "fp8").exists():
            return 0
        wide = self.bench.folder / "wide"
        if not wide.exists():
            size = {"hidden_size": 128, "moe_intermediate_size": 128}
            size |= {"intermediate_size": 128, "shared_expert_intermediate_size": 128}
            tiny_model(
                "qwen2_moe", num_hidden_layers=2, vocab_size=300, num_experts=4, **size
            ).save_pretrained(wide)
            tiny_tokenizer(300).save_pretrained(wide)
        return fcsd(["quantize", str(wide), str(folder / "fp8")])

    def leave_all(self, folder: Path) -> int:
        """Run the commands whose files other commands read."""
        write_links(folder / "links.json", even_links(2, 1e-9))
        base, choice = str(self.bench.base), str(self.choice)
        text = ["--text", json.dumps(self.source), "--text-examples", "32"]
        evaluations = [
            ["evaluate", model, "--suite", choice, "--output", f"{{}}/results/{name}"]
            for model, name in ((base, "original"), ("{}/calibrated", "calibrated"))
        ]
        links = ["--links", "{}/links.json"]
        commands = [
            self.readers()["calibrate again"][1],
            *evaluations,
            [*self.readers()["routing again"][1]],
            ["plan", base, "--ep", "2", "--windows", "{}/windows.json", *links],
            [
                "steer",
                "bias",
                base,
                "{}/bias.safetensors",
                *text,
                *links,
                "--strength",
                "1",
            ],
        ]
        for words in commands:
            if status := printed(words)(folder):
                return status
        return self.layers(folder) or self.quantize(folder)

    def readers(self) -> dict[str, tuple[str, list[str]]]:
        """Return name -> (what it reads of `leave_all`, the command)."""
        base, choice = str(self.bench.base), str(self.choice)
        suite = ["--suite", choice]
        source = json.dumps(self.source)
        text = ["--text", source, "--text-examples", "32"]
        links = ["--links", "{}/links.json"]
        plan = ["plan", base, "--ep", "2", "--json"]
        return {
            "calibrate again": (
                "calibrated",
                [
                    *("calibrate", base, "{}/calibrated", "--layers", "all"),
                    *("--tokens", "1500", "--max-length", "64", "--text", source),
                ],
            ),
            "routing again": (
                "routing/",
                [
                    "steer",
                    "routing",
                    base,
                    *text,
                    *links,
                    "--output",
                    "{}/routing",
                    "--json",
                ],
            ),
            "evaluate a calibration": (
                "calibrated",
                ["evaluate", "{}/calibrated", *suite, "--output", "{}/again"],
            ),
            "compare": (
                "results",
                [
                    *("compare", "{}/results/original", "{}/results/calibrated"),
                    *("--output", "{}/comparison"),
                ],
            ),
            "plan-layers": (
                "study",
                ["plan-layers", "{}/study", "--budget", "50%", "--json"],
            ),
            "plan --routing": ("routing/", [*plan, "--routing", "{}/routing"]),
            "plan --study": ("study", [*plan, "--study", "{}/study"]),
            "plan --links": ("links", [*plan, *links]),
            "bias --windows": (
                "windows",
                [
                    *("steer", "bias", base, "{}/other.safetensors", *text, *links),
                    *("--kind", "windows", "--windows", "{}/windows.json"),
                ],
            ),
            "evaluate a copy": (
                "fp8",
                ["evaluate", "{}/fp8", *suite, "--output", "{}/again"],
            ),
            "evaluate with a bias": (
                "bias",
                [
                    *("steer", "evaluate", base, "{}/bias.safetensors", *suite),
                    *("--output", "{}/steered"),
                ],
            ),
        }

    def readers_of_a_run(self) -> dict[str, tuple[str, list[str]]]:
        """Return name -> (what it reads of a finished run, the command)."""
        report = ["run", str(self.whole_recipe()), "--set=output_dir={}"]
        return {
            "report alone": ("distill/", [*report, "--only=report"]),
            "publish alone": ("distill/", [*report, "--only=publish"]),
            "unconvert": (
                "distill/model/",
                ["unconvert", "{}/distill/model", "{}/again"],
            ),
            "push a publication": (
                "publish/",
                ["push", "{}/publish", "owner/name", "--dry-run", "{}/again"],
            ),
            "evaluate a publication": (
                "publish/",
                [
                    *("evaluate", "{}/publish", "--suite", str(self.choice)),
                    *("--output", "{}/again"),
                ],
            ),
        }

    def push(self, folder: Path) -> int:
        return fcsd(["push", str(self.model), f"owner/{folder.parent.name}"])

    def pushed(self, folder: Path) -> dict[str, str]:
        return {
            name: digest(data.replace(folder.parent.name.encode(), b"REPOSITORY"))
            for name, data in self.hub.repos[
                f"owner/{folder.parent.name}"
            ].files.items()
        }


def in_background(run: Callable[[Path], int]) -> Callable[[Path], int]:
    def with_threads(folder: Path) -> int:
        checkpoint_writer.BACKGROUND_FROM = 0  # in a fork of its own
        return run(folder)

    return with_threads


def small_config(base: Path) -> dict[str, Any]:
    """Return the base checkpoint's config, without what the tokenizer decides about a new model."""
    config = json.loads((base / "config.json").read_text())
    unwanted = (
        "architectures",
        "dtype",
        "transformers_version",
        "vocab_size",
        "router_aux_loss_coef",
    )
    return {
        key: value
        for key, value in config.items()
        if key not in unwanted and not key.endswith("_token_id") and value is not None
    }


# ---- the kills


def whole_run(
    job: Job, place: Path, records: Path | None = None
) -> tuple[dict[str, str], float]:
    """Run a command undisturbed; return its output, and how long it took."""
    (place / "out").mkdir(parents=True)
    (place / "output").mkdir()
    job.prepare(place / "out")
    started = time.monotonic()
    statuses, text = attempt(job, place / "out", place / "output", records=records)
    duration_s = time.monotonic() - started
    if any(statuses):
        sys.exit(f"{job.name}: {text[-3000:]}")
    return job.digest(place / "out"), duration_s


def random_kills(
    job: Job, place: Path, number: int, draw: random.Random
) -> tuple[dict[str, str], list[Kill]]:
    expected, duration_s = whole_run(job, place / "whole")
    return expected, [
        Kill(
            draw.random() < 0.5,
            draw.uniform(0, duration_s),
            draw.randrange(job.num_ranks),
        )
        for _ in range(number)
    ]


def placed_kills(
    job: Job, place: Path, *, thin: bool = False
) -> tuple[dict[str, str], list[Kill]]:
    """Return the output of a command, and a kill for each of its moments; all kills
    except every eighth take all ranks.

    thin: of moments that differ only in numbers (of a step, of a layer), take only the
    last.
    """
    records = place / "records"
    records.mkdir(parents=True)
    expected, _ = whole_run(job, place / "whole", records)
    kills = []
    for rank in range(job.num_ranks):
        moments = (
            (records / str(rank)).read_text().splitlines()
            if (records / str(rank)).exists()
            else []
        )
        if thin:
            moments = list(
                {re.sub(r"\d+", "N", moment): moment for moment in moments}.values()
            )
        kills += [
            Kill(index % 8 > 0, None, rank, moment)
            for index, moment in enumerate(moments)
        ]
    return expected, kills


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        (
            "| command | ranks | killed | had ended before | same bytes, nothing lost,"
            " nothing left | faults |"
        ),
        "|---|---:|---:|---:|---:|---|",
    ]
    for key in dict.fromkeys((row["job"], row["ranks"]) for row in rows):
        of = [row for row in rows if (row["job"], row["ranks"]) == key]
        killed = sum(row["killed"] for row in of)
        good = sum(not row["faults"] for row in of)
        kinds = (
            ", ".join(
                sorted({fault.split(":")[0] for row in of for fault in row["faults"]})
            )
            or "-"
        )
        cells = [*key, killed, len(of) - killed, f"{good} of {len(of)}", kinds]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    faults = [
        f"- {row['job']}, {row['ranks']} ranks, {row['kill']}: {fault}"
        for row in rows
        for fault in row["faults"]
    ]
    return "\n".join([*lines, *(["", "Faults:", "", *faults] if faults else [])]) + "\n"


def kill_all(commands: Commands, place: Path, options: argparse.Namespace) -> str:
    chosen = [job for job in commands if not options.only or options.only in job.name]
    if options.placed:
        # it leaves nothing in a folder
        chosen = [job for job in chosen if job.name != "push"]
    draw, rows = random.Random(options.seed), []
    for number, job in enumerate(chosen):
        here = place / f"job-{number}"
        share = options.kills * (number + 1) // len(
            chosen
        ) - options.kills * number // len(chosen)
        expected, kills = (
            placed_kills(job, here, thin=options.thin)
            if options.placed
            else random_kills(job, here, share, draw)
        )
        for index, kill in enumerate(
            tqdm(kills, desc=f"{job.name}, {job.num_ranks}", unit="kill")
        ):
            outcome = trial(job, here / f"trial-{number}-{index}", expected, kill)
            rows.append({"job": job.name, "ranks": job.num_ranks} | outcome)
            for fault in outcome["faults"]:
                print(
                    f"{job.name}, {job.num_ranks} ranks, {kill}: {fault}",
                    file=sys.stderr,
                )
            shutil.rmtree(here / f"trial-{number}-{index}")
    return table(rows)


# ---- damage

# what is rewritten from a stage's files; the report and everything after it always is
_LATER = {
    "tokens": ["calibrate", "sweep", "distill", "evaluate"],
    "convert": ["evaluate/converted"],
    "calibrate": ["evaluate/calibrated"],
    "sweep": ["distill", "evaluate/fcsd"],
    "distill": ["evaluate/fcsd"],
}
_BEHIND = ["report", "publish", "pushed"]


def flip(file: Path, draw: random.Random) -> None:
    """Change a digit in text, which stays valid, or a bit after the header in anything
    else.
    """
    data = bytearray(file.read_bytes())
    digits = [place for place, byte in enumerate(data) if chr(byte) in "123456789"]
    if file.suffix in (".json", ".jsonl", ".yaml", ".md", ".txt") and digits:
        place = draw.choice(digits)
        data[place] = ord("1") + (data[place] - ord("0")) % 9
    else:
        data[draw.randrange(len(data) * 3 // 4, len(data))] ^= 1 << draw.randrange(8)
    replace_bytes(file, bytes(data))


def cut(file: Path, draw: random.Random) -> None:
    replace_bytes(file, file.read_bytes()[: file.stat().st_size // 2])


def empty(file: Path, draw: random.Random) -> None:
    replace_bytes(file, b"")


def remove(file: Path, draw: random.Random) -> None:
    file.unlink()


def swap(other: Path) -> Callable[[Path, random.Random], None]:
    """Return a harm that puts another run's file of the same kind in the place of one."""
    return lambda file, draw: replace_bytes(file, other.read_bytes())


HARMS = {"flip": flip, "cut": cut, "empty": empty, "remove": remove}


def harm_names(text: str) -> list[str]:
    """Read the names of harms, with commas between them."""
    names, allowed = text.split(","), [*HARMS, "swap"]
    if unknown := [name for name in names if name not in allowed]:
        raise argparse.ArgumentTypeError(
            f"no harm {unknown[0]!r}; allowed: {', '.join(allowed)}"
        )
    return names


def replace_bytes(file: Path, data: bytes) -> None:
    file.unlink()  # it may be a link to the original's
    file.write_bytes(data)


def kinds(folder: Path) -> dict[str, Path]:
    """Return one file of each kind below a folder, by its path without numbers: of
    several, the last, which is in the newest checkpoint. Of a model's files other than
    weights and config, those of the first model.
    """
    files: dict[str, Path] = {}
    beside: set[str] = set()
    for path in sorted(folder.rglob("*")):
        name = re.sub(
            r"\d{4}-\d\d-\d\dT[\d.-]+|[0-9a-f]{12,}|\d+",
            "N",
            str(path.relative_to(folder)),
        )
        unread = path.suffix in (".png", ".html") or "lm_eval" in path.parts
        if not path.is_file() or unread:
            continue
        if name not in files and (
            path.parent.name in ("model", "publish")
            and path.suffix != ".safetensors"
            and path.name != "config.json"
        ):
            if path.name in beside:
                continue
            beside.add(path.name)
        files[name] = path
    return files


class State:
    """The output of a command that has ended, or that was killed at the first moment
    that contains a text (`cut`).

    later: what is removed before the command runs again, by the first part of the
    damaged file's path. reader: another command that reads `part` of the output, and
    runs instead.
    """

    def __init__(
        self,
        job: Job,
        place: Path,
        cut: str = "",
        later: Callable[[str], list[str]] = lambda part: [],
        reader: Job | None = None,
        part: str = "",
    ):
        self.job, self.place, self.cut, self.later = job, place, cut, later
        self.reader, self.part = reader or job, part
        # always the same, because records contain it
        self.folder = place / "work" / "out"

    def ready(self) -> Path:
        """Return the folder of the state, which is made where it is not there."""
        ready = self.place / "ready"
        if ready.exists():
            return ready
        kill = None
        if self.cut:
            _, kills = placed_kills(self.job, self.place)
            kill = next(kill for kill in kills if self.cut in kill.moment)
        self.folder.mkdir(parents=True)
        self.job.prepare(self.folder)
        statuses, text = attempt(self.job, self.folder, self.folder.parent, kill)
        assert statuses[0] == (-signal.SIGKILL if kill else 0), text
        shutil.copytree(self.folder, ready, symlinks=True)
        return ready

    def make(self) -> dict[str, str]:
        """Make the state; return the final output of the command."""
        self.ready()
        ends = []
        # trained in the same way again: files that contain times differ
        for part in ("stage.json", "tokens"):
            self.restore()
            self.forget(part)
            statuses, text = attempt(self.reader, self.folder, self.folder.parent)
            assert not any(statuses), text
            ends.append(self.reader.digest(self.folder))
        return {
            name: value if ends[1].get(name) == value else "there"
            for name, value in ends[0].items()
        }

    def restore(self) -> Path:
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.copytree(self.place / "ready", self.folder, symlinks=True)
        return self.folder

    def forget(self, name: str) -> None:
        for part in self.later(name.split("/")[0]):
            shutil.rmtree(self.folder / part, ignore_errors=True)


def damaged_run(
    state: State,
    expected: dict[str, str],
    name: str,
    harm: Callable[[Path, random.Random], None],
    draw: random.Random,
) -> str:
    """Return the outcome of a damaged file: said, mended, not read; or one of the
    faults unseen, traceback, hangs.
    """
    folder = state.restore()
    harm(folder / name, draw)
    state.forget(name)
    before = content(folder / name)
    statuses, text = attempt(state.reader, folder, folder.parent)
    if "Traceback (most recent call last)" in text or 99 in statuses:
        return f"traceback ({text.strip().splitlines()[-1][:160]})"
    if -signal.SIGALRM in statuses:
        return "hangs"
    if any(statuses):
        return "said"
    hashes = {
        key: "there" if expected.get(key) == "there" else value
        for key, value in state.reader.digest(folder).items()
    }
    own = without_time(name)
    differing = sorted(
        key
        for key in {*hashes, *expected}
        if hashes.get(key) != expected.get(key) and key != own
    )
    if differing:
        return f"unseen ({', '.join(differing[:3])})"
    return "not read" if content(folder / name) == before else "mended"


def content(file: Path) -> bytes | None:
    return file.read_bytes() if file.exists() else None


def states(commands: Commands, place: Path) -> Iterator[State]:
    by_name = {(job.name, job.num_ranks): job for job in commands}
    run = commands.stage(commands.whole_recipe(), "run")

    def run_and_push(folder: Path) -> int:
        return run(folder) or fcsd(
            ["push", str(folder), "owner/name", "--dry-run", str(folder / "pushed")]
        )

    def later(part: str) -> list[str]:
        return [
            *_LATER.get(part, []),
            *_BEHIND[_BEHIND.index(part) + 1 if part in _BEHIND else 0 :],
        ]

    partial = "after rename to out.partial/calibrate/fcsd/partial/state.json"
    checkpoint = "checkpoints/checkpoint-4"
    candidate = "sweep/batch_size_tokens=128,learning_rate=0.001"
    cuts = [
        ("calibrate", 1, partial),
        ("calibrate", 2, partial),
        (
            "calibrate in a recipe",
            1,
            "after rename to calibrate/fcsd/partial/result.json",
        ),
        ("pretrain", 1, f"after rename to pretrain/{checkpoint}"),
        ("distill", 1, f"after rename to distill/{checkpoint}"),
        ("distill", 2, f"after rename to distill/{checkpoint}"),
        ("sweep", 1, f"after rename to {candidate}/result.json"),
        ("cache-teacher", 1, "before rename to cache/cache.json"),
        ("evaluate", 1, "before rename to results/results.json"),
        ("layers", 1, "after rename to study/layers.json"),
        ("tokenize", 1, "before rename to tokens/rows-"),
    ]
    whole = Job("run, then push", 1, run_and_push, tree)
    yield State(whole, place / "ended", later=later)
    for name, (part, words) in commands.readers_of_a_run().items():
        reader = Job(name, 1, printed(words), tree)
        yield State(whole, place / "ended", reader=reader, part=part)
    for number, (name, ranks, moment) in enumerate(cuts):
        yield State(by_name[name, ranks], place / f"cut-{number}", moment)
    copy = Job("quantize", 1, commands.quantize, tree)
    yield State(
        copy, place / "quantize", "after rename to fp8.partial/model/config.json"
    )
    left = Job("commands by themselves", 1, commands.leave_all, tree)
    for name, (part, words) in commands.readers().items():
        reader = Job(name, 1, printed(words), tree)
        yield State(left, place / "left", reader=reader, part=part)


def printed(words: list[str]) -> Callable[[Path], int]:
    """Return a command of fcsd or fcsd-steer whose output stays in its folder; `{}` in
    a word stands for the folder.
    """
    program = fcsd
    if words[0] == "steer":
        program, words = steer, words[1:]

    def run(folder: Path) -> int:
        with (
            (folder / "printed.txt").open("w") as file,
            contextlib.redirect_stdout(file),
        ):
            return program([word.replace("{}", str(folder)) for word in words])

    return run


def damage_all(
    commands: Commands, other: Commands, place: Path, options: argparse.Namespace
) -> str:
    """Do every harm to one file of each kind, after finished and after killed commands;
    run the command again.

    other: the same commands on another model and other text, whose files are swapped in.
    """
    outcomes: dict[str, Counter[str]] = {}
    faults = []
    pairs = (
        states(each, place / name) for each, name in ((commands, "a"), (other, "b"))
    )
    for state, twin in zip(*pairs, strict=True):
        if options.only and options.only not in (state.job.name, state.reader.name):
            continue
        expected = state.make()
        ranks = ", 2 ranks" if state.reader.num_ranks > 1 else ""
        title = f"{state.reader.name}{ranks}, {'cut off' if state.cut else 'ended'}"
        counts = outcomes.setdefault(title, Counter())
        files = {
            kind: name
            for kind, file in kinds(state.place / "ready").items()
            if (name := str(file.relative_to(state.place / "ready"))).startswith(
                state.part
            )
            # the card of a publication is the user's to edit
            and not (state.part and (file.name == CARD or RESULTS in file.parts))
        }
        swapped = kinds(twin.ready()) if "swap" in options.harms else {}
        for kind, name in tqdm(files.items(), desc=title, unit="file"):
            harms = {each: HARMS[each] for each in options.harms if each in HARMS}
            same = content(state.place / "ready" / name)
            if kind in swapped and content(swapped[kind]) != same:
                harms["swap"] = swap(swapped[kind])
            for harm_name, harm in harms.items():
                draw = random.Random(f"{options.seed} {title} {kind}")
                outcome = damaged_run(state, expected, name, harm, draw)
                counts[outcome.split(" (")[0]] += 1
                if outcome not in ("said", "mended", "not read"):
                    faults.append(f"- {title}: {kind}, {harm_name}: {outcome}")
                    print(faults[-1], file=sys.stderr)
    columns = ("said", "mended", "not read", "unseen", "traceback", "hangs")
    lines = [
        f"| what was damaged | {' | '.join(columns)} |",
        f"|---|{'---:|' * len(columns)}",
    ]
    for title, counts in outcomes.items():
        lines.append(
            f"| {title} | {' | '.join(str(counts[column]) for column in columns)} |"
        )
    return "\n".join([*lines, *(["", "Faults:", "", *faults] if faults else [])]) + "\n"


def small_bench(folder: Path, seed: int = 0) -> Bench:
    """Return a bench in a folder, on a base checkpoint of two layers."""
    tiny_model(
        "qwen2_moe", seed=seed, num_hidden_layers=2, vocab_size=300, num_experts=4
    ).save_pretrained(folder / "base")
    tiny_tokenizer(300).save_pretrained(folder / "base")
    (folder / "bench").mkdir()
    return make_bench(folder / "base", folder / "bench")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument(
        "--placed", action="store_true", help="kill at every rename and removal"
    )
    mode.add_argument(
        "--kills",
        type=int,
        default=0,
        help="number of kills at random moments, over all commands",
    )
    mode.add_argument(
        "--damage",
        action="store_true",
        help="flip a bit in each kind of file, and truncate it",
    )
    parser.add_argument(
        "--thin",
        action="store_true",
        help="with --placed: only the last moment of each kind",
    )
    parser.add_argument(
        "--harms",
        type=harm_names,
        default=["flip", "cut"],
        help=f"with --damage: of {', '.join(HARMS)}, swap",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="only commands whose name contains this")
    options = parser.parse_args()
    torch.set_num_threads(1)
    calibration.BATCH_TOKENS = 512  # so that two ranks share little text
    begun = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="fcsd-kills-") as place,
        running_hub() as hub,
    ):
        folder = Path(place)
        (folder / "tmp").mkdir()
        os.environ["TMPDIR"] = tempfile.tempdir = str(folder / "tmp")
        datasets.config.HF_DATASETS_CACHE = folder / "cache"
        constants.ENDPOINT, constants.HF_HUB_OFFLINE, constants.HF_HUB_DISABLE_XET = (
            hub.url,
            False,
            True,
        )
        constants.HUGGINGFACE_CO_URL_TEMPLATE = (
            hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        os.environ["HF_TOKEN"] = TOKEN
        commands = Commands(small_bench(folder), hub)
        if options.damage:
            (folder / "other").mkdir()
            other = Commands(small_bench(folder / "other", seed=1), hub, "Another line")
            text = damage_all(commands, other, folder, options)
        else:
            text = kill_all(commands, folder, options)
    took = (time.monotonic() - begun) / 60
    print(
        f"{time.strftime('%Y-%m-%d')}, load {load_average()}, {took:.0f} minutes, torch"
        f" {torch.__version__}.\n"
    )
    print(text)


if __name__ == "__main__":
    main()
