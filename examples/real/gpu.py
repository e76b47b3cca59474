"""Measure on one GPU what a real network needs to recover: many distillations of
gpu.yaml, several at once, each with its KL on four kinds of text and its benchmarks.

    python examples/real/gpu.py runs/gpu --model FOLDER_OR_HUB_ID

    runs/gpu/models      what prepare.py makes
    runs/gpu/moe         the MoE after moe.yaml: the original of all trainings
    runs/gpu/own.jsonl   text that the dense model writes (own.yaml)
    runs/gpu/results     one file per training, and its benchmarks

One network of this size cannot fill a GPU: a step waits for the CPU that starts its
kernels. So `--workers` processes train at once, each the next training in the list. After
`--minutes` (status 75) the same command continues.
"""

import argparse
import fcntl
import gc
import hashlib
import json
import multiprocessing
import os
import queue
import shutil
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prepare import source_arguments

from fcsd.base.errors import one_line
from fcsd.base.files import read_json, write_json, write_text
from fcsd.base.text import progress_bar

HERE = Path(__file__).parent
KL_TEXTS, KL_TOKENS = 256, 256
SAVING_S = 40  # of the time: for the checkpoints of trainings that are ended


@dataclass
class Training:
    """Values of gpu.yaml that one training changes, and whether it is graded."""

    name: str
    changes: dict[str, Any] = field(default_factory=dict)
    graded: bool = True


def trainings(small: bool) -> list[Training]:
    """Return all trainings, the longest first, then those that matter most.

    Names: weights, rewired layers, tokens of the training, learning rate, seed.
    """
    copied = {"calibration.starts_training": False}
    untrained = {"train.max_steps": 0, "train.warmup_steps": 0}
    every = {"connectivity.layers": "all"}
    last_half = {"connectivity.layers": "last:50%"}
    # Attention ahead in all layers, MoE blocks in the 14 that cost least (docs/real.md).
    cheap_14 = {"connectivity.layers": "all", "connectivity.mlp": "4-12,22,24-27"}
    given = {"data.train.0.weight": 1e-6}  # hardly any text of the model's own
    upcycled = {"model.path": "{state}/models/upcycled"}

    def tokens(count: int) -> dict[str, Any]:
        return {"calibration.tokens": count}

    def quarter(rate: float, seed: int = 0) -> dict[str, Any]:
        return {"train.learning_rate": rate, "seed": seed}

    def million(rate: float, seed: int = 0) -> dict[str, Any]:
        return quarter(rate, seed) | {
            "train.max_steps": 256,
            "train.warmup_steps": 16,
            "early_stopping.every_steps": 64,
        }

    def five_million(rate: float) -> dict[str, Any]:
        return million(rate) | {
            "train.max_steps": 320,
            "train.batch_size_tokens": 16384,
            "train.per_device_train_batch_size": 64,
            "early_stopping.every_steps": 80,
        }

    found = [
        Training("calibrated-28-5m-2e-4", five_million(2e-4)),
        Training("copied-28-5m-3e-4", copied | five_million(3e-4)),
        Training("calibrated-28-1m-1e-4-s0", million(1e-4)),
        Training("copied-28-1m-1.5e-4-s0", copied | million(1.5e-4)),
        Training("copied-28-1m-3e-4-s0", copied | million(3e-4)),
        Training("copied-28-1m-6e-4-s0", copied | million(6e-4)),
        Training("calibrated-15-1m-1e-4", last_half | million(1e-4)),
        Training("calibrated-cheap14-1m-1e-4", cheap_14 | million(1e-4)),
        Training("upcycled-calibrated-28-1m-1e-4", upcycled | million(1e-4)),
        Training("calibrated-28-24576", untrained | tokens(24576)),
        Training("calibrated-28-524288", untrained | tokens(524288)),
        Training("calibrated-28-24576-given", untrained | given | tokens(24576)),
        Training("calibrated-28-131072", untrained),
        Training("calibrated-28-quarter-1e-4-s0", quarter(1e-4)),
        Training("calibrated-28-quarter-3e-4-s0", quarter(3e-4)),
        Training("calibrated-28-1m-3e-4-s0", million(3e-4)),
        Training("copied-28-1m-3e-4-given", copied | given | million(3e-4)),
        Training("calibrated-28-1m-1e-4-given", given | million(1e-4)),
        Training("copied-28-1m-3e-4-s1", copied | million(3e-4, 1)),
        Training("calibrated-28-quarter-1e-4-s1", quarter(1e-4, 1)),
        Training("calibrated-28-quarter-3e-4-s1", quarter(3e-4, 1)),
        Training("calibrated-28-1m-1e-4-s1", million(1e-4, 1)),
        Training("copied-28-1m-3e-4-s2", copied | million(3e-4, 2)),
        Training("calibrated-28-quarter-1e-4-s2", quarter(1e-4, 2)),
        Training("calibrated-28-quarter-3e-4-s2", quarter(3e-4, 2)),
        Training("calibrated-28-1m-1e-4-s2", million(1e-4, 2)),
        Training("calibrated-cheap14-131072", untrained | cheap_14),
        Training("copied-cheap14", untrained | cheap_14 | copied),
        Training("calibrated-15-131072", untrained | last_half),
        Training("upcycled-calibrated-28-131072", untrained | upcycled),
        Training("upcycled-copied-28-1m-3e-4", upcycled | copied | million(3e-4)),
        Training("copied-all-1m-3e-4", copied | every | million(3e-4)),
        Training("calibrated-all-1m-1e-4", every | million(1e-4)),
    ]
    if small:
        for each in found:
            each.changes |= {
                "train.max_steps": min(2, each.changes.get("train.max_steps", 2)),
                "train.warmup_steps": 0,
                "early_stopping.every_steps": 1,
                "calibration.tokens": 4096,
                "train.batch_size_tokens": 512,
                "train.per_device_train_batch_size": 2,
                "data.heldout_examples": 2,
                "connectivity.layers": {"last": 1},
                "connectivity.mlp": "outdated",
                "model.experts_implementation": "eager",
            }
    return found


# ---- what all trainings read


def prepare(state: Path, options: argparse.Namespace) -> None:
    """Make models, texts and the MoE. What exists is not made again."""
    models = state / "models"
    data = ["--data", options.data] if options.data else []
    layers = ["--layers", "2", "--tokens", "2048"] if options.small else []
    python = [sys.executable]
    # float32, in which the trainings keep their weights
    source = ["--model", options.model, "--dtype", "float32", *data]
    call(state, "prepare", *python, HERE / "prepare.py", models, *source, *layers)
    writing = {
        name: start(state, name, *python, "-m", "fcsd", *own_text(state, name, options))
        for name in ("own", "own-heldout")
        if not (state / f"{name}.jsonl").is_file()
    }
    if not (state / "moe").is_dir():
        settings = {
            "output_dir": state / "heal",
            "model.path": models / "partitioned",
            "teacher.path": models / "dense",
            "data.train.0.path": models / "data/train.jsonl",
            "data.train.1.path": models / "data/text.jsonl",
            "data.heldout.path": models / "data/heldout.jsonl",
            **(
                {"train.max_steps": 1, "train.warmup_steps": 0}
                if options.small
                else {
                    "model.experts_implementation": None,
                    "train.max_steps": 150,
                    "train.batch_size_tokens": 8192,
                    "train.per_device_train_batch_size": 32,
                    "train.learning_rate": 3e-4,
                    "train.warmup_steps": 10,
                    "train.save_steps": 100000,
                    "train.bf16": True,
                    "train.gradient_checkpointing": False,
                }
            ),
        }
        words = [f"--set={key}={json_text(value)}" for key, value in settings.items()]
        fcsd = [*python, "-m", "fcsd"]
        call(state, "heal", *fcsd, "distill", HERE / "moe.yaml", *words)
        call(state, "unconvert", *fcsd, "unconvert", state / "heal/distill/model", state / "moe")  # fmt: skip
    for name, process in writing.items():
        if process.wait():
            sys.exit(f"writing {name} failed: {state}/logs/{name}")
        files = sorted((state / "run" / name / "written").glob("*/text.jsonl"))
        write_text(
            state / f"{name}.jsonl", "".join(file.read_text("utf-8") for file in files)
        )


def own_text(state: Path, name: str, options: argparse.Namespace) -> list[str]:
    """Return the command with which the dense model writes the text of own.yaml, or
    answers the held-out conversations.
    """
    data, heldout = state / "models/data", name == "own-heldout"
    settings: dict[str, Any] = {
        "output_dir": state / "run" / name,
        "model.path": state / "models/dense",
        "model.dtype": "bfloat16" if torch_has_gpu() else "float32",
        "seed": int(heldout),
    }
    if heldout:
        source = {"path": str(data / "heldout.jsonl"), "max_examples": KL_TEXTS}
        written = {"max_new_tokens": 192, "batch_size": 256}
        settings["data.train"] = [source | {"written": written}]
    else:
        settings["data.train.0.path"] = data / "train.jsonl"
        settings["data.train.1.path"] = data / "text.jsonl"
    for index in range(1 if heldout else 2) if options.small else ():
        settings[f"data.train.{index}.max_examples"] = 4
        settings[f"data.train.{index}.written.max_new_tokens"] = 64
    words = [f"--set={key}={json_text(value)}" for key, value in settings.items()]
    return ["run", str(HERE / "own.yaml"), "--only", "write", *words]


def start(state: Path, name: str, *words: Any) -> subprocess.Popen[bytes]:
    with (state / "logs" / name).open("wb") as log:
        return subprocess.Popen(list(map(str, words)), stdout=log, stderr=log)


def call(state: Path, name: str, *words: Any) -> None:
    begin = time.monotonic()
    if start(state, name, *words).wait():
        lines = (state / "logs" / name).read_text(errors="replace").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "")
        sys.exit(f"{name} failed: {last.strip()[-300:]} ({state}/logs/{name})")
    print(f"{name}: {time.monotonic() - begin:.0f} s", flush=True)


def json_text(value: Any) -> str:
    return json.dumps(str(value) if isinstance(value, Path) else value)


# ---- one worker


def work(
    number: int, jobs: Any, stop: Any, state: Path, options: argparse.Namespace
) -> None:
    """Run trainings until none is left, or until `stop` is set."""
    log_to(state / "logs" / f"worker-{number}")
    texts = None
    while not stop.is_set():
        try:
            training = jobs.get(timeout=5)
        except queue.Empty:
            return
        result: dict[str, Any] = {"changes": training.changes, "seconds": {}}
        begin = time.monotonic()

        # What is known is written at once: a later part may not be reached.
        def note(part: str, value: Any, *, finished: bool = False) -> None:
            result["seconds"][part] = round(time.monotonic() - begin, 1)  # noqa: B023
            result.update({part: value, "finished": finished})  # noqa: B023
            write_json(result_file(state, training), result)  # noqa: B023

        try:
            model = train(training, state, options)
            note("curve", curve(state, training))
            if texts is None:
                texts = Texts(state, options)
            kl = texts.kl(model, training.changes.get("model.path"))
            note("kl", kl, finished=not training.graded)
            if training.graded:
                note(
                    "scores", grade(model, state, training.name, options), finished=True
                )
            release(model)
        # One failure does not take the others along; the result has its reason.
        except Exception as error:
            traceback.print_exc()
            if not stop.is_set():
                note("error", one_line(error))
        free()


def log_to(file: Path) -> None:
    """Write what this process prints to a file."""
    warnings.simplefilter("ignore")
    with file.open("a") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)


def result_file(state: Path, training: Training) -> Path:
    return state / "results" / f"{training.name}.json"


def result_of(state: Path, training: Training) -> dict[str, Any]:
    file = result_file(state, training)
    return read_json(file) if file.is_file() else {}


def is_finished(state: Path, training: Training) -> bool:
    return bool(result_of(state, training).get("finished"))


def train(training: Training, state: Path, options: argparse.Namespace) -> Path:
    from fcsd.cli.main import main

    models, output = state / "models", state / "run" / training.name
    settings = {
        "output_dir": output,
        "model.path": state / "moe",
        "data.train.0.path": state / "own.jsonl",
        "data.train.1.path": models / "data/train.jsonl",
        "data.train.2.path": models / "data/text.jsonl",
        "data.heldout.path": models / "data/heldout.jsonl",
    } | {
        key: value.format(state=state) if isinstance(value, str) else value
        for key, value in training.changes.items()
    }
    if not torch_has_gpu():
        settings["train.bf16"] = False
    words = [f"--set={key}={json_text(value)}" for key, value in settings.items()]

    def run(*command: str) -> None:
        ended = main([command[0], str(HERE / "gpu.yaml"), *command[1:], *words])
        if ended:
            raise RuntimeError(f"{training.name}: {command} ended with {ended}")

    calibrated = settings.get("calibration.starts_training") is not False
    if calibrated:
        calibrate(state, settings, output / "calibrate/fcsd", run)
    if settings.get("train.max_steps") != 0:
        run("distill")
        return output / "distill/model"
    if calibrated:
        return output / "calibrate/fcsd/model"
    run("run", "--only", "convert")
    return output / "convert/model"


def calibrate(state: Path, settings: dict[str, Any], folder: Path, run: Any) -> None:
    """Put calibrated weights into a folder: those of an earlier training whose settings
    were the same, or new ones.
    """
    ours = {
        key: str(value)
        for key, value in settings.items()
        if key.startswith(("model", "connectivity", "calibration", "data", "seed"))
    } | {"seed": settings.get("seed", 0)}
    key = hashlib.sha256(json.dumps(ours, sort_keys=True).encode()).hexdigest()[:12]
    known = state / "calibrations" / key
    known.parent.mkdir(exist_ok=True)
    with known.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not known.exists():
            if not folder.exists():
                run("run", "--only", "calibrate")
            link_tree(folder, known)
    if not folder.exists():
        link_tree(known, folder)


def link_tree(source: Path, target: Path) -> None:
    temporary = target.with_name(f".{target.name}.new")
    shutil.rmtree(temporary, ignore_errors=True)
    shutil.copytree(source, temporary, copy_function=os.link)
    temporary.rename(target)


def curve(state: Path, training: Training) -> Any:
    """Return the held-out KL by step, as early stopping recorded it."""
    file = state / "run" / training.name / "distill/scores.json"
    return json.loads(file.read_text()) if file.is_file() else None


def grade(
    model: Path, state: Path, name: str, options: argparse.Namespace
) -> dict[str, float]:
    """Return the score of each benchmark; `fcsd compare` reads the folder of the items."""
    from fcsd.cli.main import main

    words = ["--suite", str(HERE / "suite.yaml"), "--tasks", "hellaswag,piqa,arc_easy"]
    words += ["--batch-size", "128"]
    words += ["--limit", "4" if options.small else "1000"]
    words += ["--data-root", str(Path(options.data) / "hub")] if options.data else []
    output = state / "scores" / name
    if main(["evaluate", str(model), "--output", str(output), *words]):
        raise RuntimeError(f"the evaluation of {name} failed")
    tasks = json.loads((output / "results.json").read_text())["tasks"]
    return {task: result["value"] for task, result in tasks.items()}


class Texts:
    """Tokens of four kinds of text that no training reads, and the originals' KL."""

    def __init__(self, state: Path, options: argparse.Namespace) -> None:
        self.state = state
        self.rows: dict[str, Any] = {}
        self.originals: dict[str, Any] = {}
        import fcsd

        _, tokenizer = fcsd.load(state / "moe")
        number = 8 if options.small else KL_TEXTS
        for kind, texts in texts_of(state, options.data, tokenizer).items():
            ids = [
                tokenizer(text, add_special_tokens=False).input_ids[:KL_TOKENS]
                for _, text in zip(range(number), texts, strict=False)
            ]
            self.rows[kind] = sorted(ids, key=len)

    def kl(self, model: Path, original: str | None) -> dict[str, list[float]]:
        """Return for each kind the mean KL(original || model) per token in nats after
        the eighth token, and its standard error over texts.
        """
        import fcsd

        name = (original or "{state}/moe").format(state=self.state)
        device = "cuda" if torch_has_gpu() else "cpu"
        if name not in self.originals:
            self.originals[name] = fcsd.load(name)[0].to(device)
        student = fcsd.load(model)[0].to(device)
        return {
            kind: mean_kl(self.originals[name], student, rows, device)
            for kind, rows in self.rows.items()
        }


def mean_kl(original: Any, student: Any, rows: Any, device: str) -> list[float]:
    import torch
    from torch.nn.utils.rnn import pad_sequence

    sums, counts = [], []
    for first in range(0, len(rows), 16):
        part = rows[first : first + 16]
        ids = pad_sequence([torch.tensor(row) for row in part], batch_first=True)
        lengths = torch.tensor([len(row) for row in part])
        mask = torch.arange(ids.shape[1])[None] < lengths[:, None]
        ids, mask = ids.to(device), mask.to(device)
        with torch.no_grad():
            p, q = (
                model(input_ids=ids, attention_mask=mask.long()).logits.float()
                .log_softmax(-1)
                for model in (original, student)
            )  # fmt: skip
            kl = (p.exp() * (p - q)).sum(-1) * mask
        sums += kl[:, 8:].sum(1).tolist()
        counts += mask[:, 8:].sum(1).tolist()
    mean = sum(sums) / sum(counts)
    squares = sum((s - mean * c) ** 2 for s, c in zip(sums, counts, strict=True))
    return [mean, squares**0.5 / sum(counts)]


def texts_of(state: Path, data: str | None, tokenizer: Any) -> dict[str, Iterable[str]]:
    from datasets import load_dataset

    def lines(file: Path) -> Iterator[dict[str, Any]]:
        with file.open(encoding="utf-8") as rows:
            yield from map(json.loads, rows)

    def hub(name: str) -> Any:
        folder = name if data is None else str(Path(data) / "hub" / name)
        return load_dataset(folder, split="validation", streaming=True)

    return {
        "conversations": (
            tokenizer.apply_chat_template(row["messages"], tokenize=False)
            for row in lines(state / "models/data/heldout.jsonl")
        ),
        "own": (row["text"] for row in lines(state / "own-heldout.jsonl")),
        "hellaswag": (
            f"{row['ctx']} {row['endings'][int(row['label'])]}"
            for row in hub("Rowan/hellaswag")
        ),
        "piqa": (
            f"{row['goal']} {row['sol' + str(int(row['label']) + 1)]}"
            for row in hub("baber/piqa")
        ),
    }


def torch_has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def release(model: Path) -> None:
    """Delete weights that are not needed any more: a run leaves a gigabyte."""
    for file in model.parent.parent.rglob("*.safetensors"):
        file.unlink()


def free() -> None:
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# ---- all


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("state", type=Path, help="folder of models, texts and results")
    source_arguments(parser)
    parser.add_argument("--workers", type=int, default=8, help="trainings at once")
    parser.add_argument(
        "--minutes", type=float, default=60, help="time after which all is ended"
    )
    parser.add_argument("--only", default="", help="part of the trainings' names")
    parser.add_argument(
        "--small", action="store_true", help="rehearse with two layers and few tokens"
    )
    options = parser.parse_args()
    chosen = [each for each in trainings(options.small) if options.only in each.name]
    if not chosen:
        names = ", ".join(each.name for each in trainings(options.small))
        parser.error(f"--only {options.only}: is in no name; there are {names}")
    if options.workers < 1:
        parser.error(f"--workers {options.workers}: at least 1")
    end = time.monotonic() + 60 * options.minutes
    state = options.state.resolve()
    for name in ("logs", "results", "scores"):
        (state / name).mkdir(parents=True, exist_ok=True)
    prepare(state, options)
    run_all(chosen, state, options, end)
    finished = [each for each in chosen if is_finished(state, each)]
    print(f"{len(finished)} of {len(chosen)} trainings: {state}/results")
    if failed := [each.name for each in chosen if "error" in result_of(state, each)]:
        sys.exit(f"failed: {', '.join(failed)}; see `error` there, and {state}/logs")
    if len(finished) < len(chosen):
        sys.exit(75)


def run_all(
    chosen: list[Training], state: Path, options: argparse.Namespace, end: float
) -> None:
    context = multiprocessing.get_context("spawn")
    jobs, stop = context.Queue(), context.Event()
    for each in chosen:
        if not is_finished(state, each):
            jobs.put(each)
    processes = [
        context.Process(target=work, args=(number, jobs, stop, state, options))
        for number in range(options.workers)
    ]
    processes.append(context.Process(target=grade_originals, args=(state, options)))
    for process in processes:
        process.start()
    with progress_bar(total=len(chosen), desc="trainings", unit="training") as bar:
        while time.monotonic() < end - SAVING_S:
            bar.update(sum(is_finished(state, each) for each in chosen) - bar.n)
            if not any(process.is_alive() for process in processes):
                break
            time.sleep(1)
    # fcsd ends a training at SIGTERM after its step, and writes a checkpoint.
    stop.set()
    for process in processes:
        process.terminate()
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))
        process.kill()
    jobs.cancel_join_thread()


def grade_originals(state: Path, options: argparse.Namespace) -> None:
    log_to(state / "logs" / "originals")
    for name, path in (("original", "moe"), ("dense", "models/dense")):
        grade(state / path, state, name, options)


if __name__ == "__main__":
    main()
