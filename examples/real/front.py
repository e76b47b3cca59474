"""Measure the front of a real network: what a model loses, by what it writes, by choice
tasks and on given text, against the halves of layers that run ahead, with copied,
calibrated and trained weights.

    python examples/real/front.py runs/front --model FOLDER_OR_HUB_ID

    runs/front/models    what prepare.py makes
    runs/front/moe       the MoE with a shared expert after moe.yaml; models/upcycled has none
    runs/front/layers    prices of each network's MoE blocks, alone and in pairs
    runs/front/own.jsonl text that the dense model writes (own.yaml; only with a GPU)
    runs/front/results   a JSON file for each point; `scores` has its benchmarks' items
    runs/front/front.md  all of it as a table, with paired changes, and front.png

One network of this size cannot fill a GPU: a step waits for the CPU that starts its
kernels. So `--workers` processes take one point after another. What matters most comes
first; after `--minutes` (status 75) the same command continues.
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
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import yaml
from prepare import source_arguments

from fcsd.base.errors import one_line
from fcsd.base.files import read_json
from fcsd.base.text import markdown, progress_bar
from fcsd.base.weights import weights_fingerprint
from fcsd.base.writing import write_json, write_text

HERE = Path(__file__).parent
KL_TEXTS, KL_TOKENS = 64, 256
SAVING_S = 40  # of the time: for the checkpoints of trainings that are ended
RECIPE = yaml.safe_load((HERE / "front.yaml").read_text("utf-8"))
STEP_TOKENS: int = RECIPE["train"]["batch_size_tokens"]
NETWORKS = {"shared": "moe", "upcycled": "models/upcycled", "dense": "models/dense"}
CHOICE = ("hellaswag", "piqa", "arc_easy")


@dataclass(frozen=True)
class Point:
    """A network with some halves ahead, after a training of `tokens` from copied or
    calibrated weights. rewired: `attention` ahead in all layers; `attention-24`: in 24
    at most, those that cost least; `14`: in all layers, and so the 14 MoE blocks that
    cost least; `last-28`: both halves of these layers; `none`: the original.
    """

    network: str
    rewired: str
    weights: str = "copied"
    tokens: int = 0
    seed: int = 0

    @property
    def name(self) -> str:
        start = [self.weights] if self.rewired != "none" else []
        trained = [f"{self.tokens}"] if self.tokens else []
        seed = [f"s{self.seed}"] if self.seed else []
        return "-".join([self.network, self.rewired, *start, *trained, *seed])

    @property
    def original(self) -> str:
        return NETWORKS[self.network]

    def changes(self, state: Path, tokens_of_calibration: int) -> dict[str, Any]:
        """Return the values of front.yaml that this point changes."""
        copied = self.weights == "copied"
        steps = self.tokens // STEP_TOKENS
        return {
            "seed": self.seed,
            "model.path": str(state / self.original),
            **{f"connectivity.{k}": v for k, v in self.connectivity(state).items()},
            "calibration.starts_training": not copied,
            "calibration.tokens": tokens_of_calibration,
            "train.max_steps": steps,
            "train.warmup_steps": min(16, steps // 8),
            # The best of three rates from copied weights; calibrated ones need a lower
            # rate (docs/real.md).
            "train.learning_rate": 3e-4 if copied else 6e-5,
        }

    def connectivity(self, state: Path) -> dict[str, Any]:
        if self.rewired == "attention":
            return {"layers": "all", "mlp": "full"}
        if self.rewired.isdigit():
            return {"layers": "all", "mlp": cheapest(state, self)}
        kind, _, count = self.rewired.partition("-")
        if kind == "attention":
            return {"layers": with_cheap_attention(state, self), "mlp": "full"}
        layers = {kind: min(int(count), num_layers(state, self))} if count else kind
        return {"layers": layers, "mlp": "outdated"}


def cheapest(state: Path, point: Point) -> list[int]:
    """Return the MoE blocks that cost least together, by the prices of a layer study."""
    from fcsd.planning.layers.proposal import plan_layers

    count = min(int(point.rewired), num_layers(state, point))
    study = study_of(state, point)
    blocks: list[int] = plan_layers(study, str(count))["layers"]
    return blocks


def with_cheap_attention(state: Path, point: Point) -> list[int] | str:
    """Return layers to rewire so that attention is ahead in as many of them as a point
    names, or fewer, by the prices of a layer study.
    """
    from fcsd.planning.layers.front import front
    from fcsd.planning.layers.points import moe_mask

    count = int(point.rewired.removeprefix("attention-"))
    study = read_json(study_of(state, point, attention=True) / "layers.json")
    mask = moe_mask(study)

    def waiting(spec: Any) -> float:
        """Count the layers that wait, instead of seconds."""
        return len(mask) - len(spec.attention_layers(mask))

    found = front(study, "kl", False, waiting)
    rows = [
        row
        for row in found["rows"][: found["steps"]]
        if row["step_s"] >= len(mask) - count
    ]
    layers: list[int] | str = rows[-1]["connectivity"]["layers"]
    return layers


def num_layers(state: Path, point: Point) -> int:
    number: int = read_json(state / point.original / "config.json")["num_hidden_layers"]
    return number


def study_of(state: Path, point: Point, attention: bool = False) -> Path:
    """Return the layer study of a point's network, of MoE blocks or of attention. The
    first worker that needs it makes it; a killed one continues.
    """
    if attention:
        name = f"{point.network}-attention"
        sides = ["--mlp", "full", "--sides", "last,attention", "--every", "8"]
    else:
        name = point.network
        sides = ["--mlp", "selected", "--sides", "single"]
    study = state / "layers" / name
    study.parent.mkdir(exist_ok=True)
    with study.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (study / "manifest.json").is_file():
            call(state, f"layers-{name}", sys.executable, "-m", "fcsd",
                 "layers", state / point.original, *sides, "--text", state / "models/data/heldout.jsonl",
                 "--loss-on", "all", "--text-examples", "24", "--max-length", "256",
                 "--output", study)  # fmt: skip
    return study


def points(tokens: int) -> list[Point]:
    """Return all points, in the order of what README and docs/front.md need most."""
    starts = [("copied", 0), ("calibrated", 0), ("calibrated", tokens)]
    first = ("attention", "10", "14", "last-28")
    found = [Point(network, "none") for network in ("shared", "upcycled", "dense")]
    found += [Point("shared", rewired, *start) for rewired in first for start in starts]
    found += [
        Point("upcycled", rewired, *start)
        for rewired in (
            *(f"attention{fewer}" for fewer in ("", "-24", "-16", "-8")),
            "last-28",
            "10",
        )
        for start in starts
    ]
    # Ten times as long: what looks best, and the paper's selection.
    found += [Point("shared", rewired, "calibrated", 10 * tokens) for rewired in first]
    found += [
        Point("upcycled", "attention", "calibrated", 10 * tokens),
        Point("shared", "last-28", "copied", 10 * tokens),
    ]
    found += [
        Point(network, rewired, *start)
        for network, others in (
            ("shared", ("5", "20", "last-15", "all")),
            ("upcycled", ("5", "14", "20", "last-15", "all")),
        )
        for rewired in others
        for start in starts
    ]
    found += [
        Point(network, rewired, "calibrated", trained, seed)
        for seed in (1, 2)
        for network, rewired, trained in (
            ("shared", "last-28", 0),
            ("upcycled", "attention", 0),
            ("upcycled", "attention-8", 0),
            ("shared", "10", tokens),
            ("shared", "14", tokens),
            ("shared", "last-28", tokens),
            ("upcycled", "attention", tokens),
        )
    ]
    return found


# ---- what all points read


def prepare(state: Path, options: argparse.Namespace) -> None:
    """Make models, texts and the MoE. What exists is not made again."""
    models, gpu = state / "models", torch_has_gpu()
    data = ["--data", options.data] if options.data else []
    layers = ["--layers", "2", "--tokens", "2048"] if options.small else []
    python = [sys.executable]
    # On a GPU float32, in which the trainings keep their weights.
    dtype = ["--dtype", "float32"] if gpu else []
    source = ["--model", options.model, *dtype, *data]
    call(state, "prepare", *python, HERE / "prepare.py", models, *source, *layers)
    writing = {}
    if (own := own_text_file(state, options)) and not own.is_file():
        writing["own"] = start(
            state, "own", *python, "-m", "fcsd", *own_text(state, options)
        )
    if not (state / "moe").is_dir():
        settings = {
            "output_dir": state / "heal",
            "model.path": models / "partitioned",
            "teacher.path": models / "dense",
            "data.train.0.path": models / "data/train.jsonl",
            "data.train.1.path": models / "data/text.jsonl",
            "data.heldout.path": models / "data/heldout.jsonl",
            "train.bf16": uses_bf16(state),
        }
        if options.small:
            settings |= {"train.max_steps": 1, "train.warmup_steps": 0}
        elif gpu:
            settings |= {
                "model.experts_implementation": None,
                "train.max_steps": 150,
                "train.batch_size_tokens": 8192,
                "train.per_device_train_batch_size": 32,
                "train.learning_rate": 3e-4,
                "train.warmup_steps": 10,
                "train.save_steps": 100000,
                "train.gradient_checkpointing": False,
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
    write_suite(state, options)


def uses_bf16(state: Path) -> bool:
    """Return whether trainings multiply in bfloat16: on a GPU, and on a CPU for which
    prepare.py chose it.
    """
    dtype = read_json(state / "models/dense/config.json").get("dtype")
    return torch_has_gpu() or dtype == "bfloat16"


def write_suite(state: Path, options: argparse.Namespace) -> None:
    """Write prepare.py's suite with the numbers of items and prompts asked for."""
    suite = yaml.safe_load((state / "models/suite.yaml").read_text("utf-8"))
    for row in suite["tasks"]:
        if row["task"] == "own_text":
            row["num_prompts"] = options.prompts
        elif row["task"] == "ifeval":
            row["limit"] = options.ifeval or 1
        else:
            row["limit"] = options.items
    suite["tasks"] = [
        row for row in suite["tasks"] if options.ifeval or row["task"] != "ifeval"
    ]
    write_text(state / "suite.yaml", yaml.safe_dump(suite, sort_keys=False))


def own_text_file(state: Path, options: argparse.Namespace) -> Path | None:
    """Return the file of the dense model's text, which takes hours on a CPU."""
    return state / "own.jsonl" if torch_has_gpu() or options.small else None


def own_text(state: Path, options: argparse.Namespace) -> list[str]:
    """Return the command with which the dense model writes the text of own.yaml."""
    data = state / "models/data"
    settings: dict[str, Any] = {
        "output_dir": state / "run/own",
        "model.path": state / "models/dense",
        "model.dtype": "bfloat16" if torch_has_gpu() else "float32",
        "data.train.0.path": data / "train.jsonl",
        "data.train.1.path": data / "text.jsonl",
    }
    for index in range(2) if options.small else ():
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
    """Take points until none is left, or until `stop` is set."""
    log_to(state / "logs" / f"worker-{number}")
    threading.Thread(target=end_with, args=(os.getppid(), stop), daemon=True).start()
    texts = None
    while not stop.is_set():
        try:
            point = jobs.get(timeout=5)
        except queue.Empty:
            return
        texts = texts or Texts(state, options)
        try:
            measure(point, texts, state, options)
        # One failure does not take the others along; the result has its reason.
        except Exception as error:
            traceback.print_exc()
            if not stop.is_set():
                note(state, point, "error", one_line(error))
        free()


def end_with(parent: int, stop: Any) -> None:
    """End this worker when its parent has ended, however that ended: as at the end of
    the time, a training writes its checkpoint first.
    """
    while os.getppid() == parent:
        time.sleep(1)
    stop.set()
    os.kill(os.getpid(), signal.SIGTERM)


def measure(
    point: Point, texts: "Texts", state: Path, options: argparse.Namespace
) -> None:
    """Make a point's weights and write what they score. What is known is written at once:
    a later part may not be reached.
    """
    note(state, point, "original", weights_fingerprint(state / point.original))
    if point.rewired == "none":
        model = state / point.original
    else:
        model = make(point, state, options)
        note(state, point, "connectivity", read_json(model / "config.json")["farskip"])
        note(state, point, "kl", texts.kl(model, state / point.original))
    note(state, point, "scores", grade(model, point.name, state / point.original, state, options))  # fmt: skip
    note(state, point, "finished", True)
    if point.rewired != "none":
        release(model)


def note(state: Path, point: Point, part: str, value: Any) -> None:
    """Add a part to a point's result, with the seconds since the part before it."""
    result = result_of(state, point)
    result.pop("error", None)
    now = time.time()
    begin = result.get("written", now)
    result.setdefault("seconds", {})[part] = round(now - begin, 1)
    result |= {"point": vars(point), part: value, "written": now}
    write_json(result_file(state, point), result)


def log_to(file: Path) -> None:
    """Write what this process prints to a file."""
    warnings.simplefilter("ignore")
    with file.open("a") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)


def result_file(state: Path, point: Point) -> Path:
    return state / "results" / f"{point.name}.json"


def result_of(state: Path, point: Point) -> dict[str, Any]:
    file = result_file(state, point)
    return read_json(file) if file.is_file() else {}


def is_finished(state: Path, point: Point) -> bool:
    return bool(result_of(state, point).get("finished"))


def make(point: Point, state: Path, options: argparse.Namespace) -> Path:
    """Return the folder of a point's weights."""
    from fcsd.cli.main import main

    models, output = state / "models", state / "run" / point.name
    changes = point.changes(state, 4096 if options.small else options.calibration)
    settings = {
        "output_dir": output,
        "data.heldout.path": models / "data/heldout.jsonl",
        "data.train": sources(state, options),
        "train.bf16": uses_bf16(state),
    }
    if not torch_has_gpu():
        settings["model.experts_implementation"] = "eager"
    settings |= changes
    if options.small:
        settings |= {
            "train.max_steps": min(2, changes["train.max_steps"]),
            "train.warmup_steps": 0,
            "train.batch_size_tokens": 512,
            "train.per_device_train_batch_size": 2,
            "data.heldout_examples": 2,
        }
    words = [f"--set={key}={json_text(value)}" for key, value in settings.items()]

    def run(*command: str) -> None:
        ended = main([command[0], str(HERE / "front.yaml"), *command[1:], *words])
        if ended:
            raise RuntimeError(f"{point.name}: {command} ended with {ended}")

    calibrated = point.weights == "calibrated"
    if calibrated:
        calibrate(state, settings, output / "calibrate/fcsd", run)
    if settings["train.max_steps"]:
        run("distill")
        return output / "distill/model"
    if calibrated:
        return output / "calibrate/fcsd/model"
    run("run", "--only", "convert")
    return output / "convert/model"


def sources(state: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return front.yaml's `data.train` with the files of this study, and, where the dense
    model has written, half of it text of its own.
    """
    found = [
        source | {"path": str(state / "models/data" / Path(source["path"]).name)}
        for source in RECIPE["data"]["train"]
    ]
    if own := own_text_file(state, options):
        found.insert(0, {"path": str(own), "columns": None, "weight": 1.0})
    return found


def calibrate(state: Path, settings: Mapping[str, Any], folder: Path, run: Any) -> None:
    """Put calibrated weights into a folder: those of an earlier point whose settings
    were the same, or new ones.
    """
    ours = {
        key: str(value)
        for key, value in settings.items()
        if key.startswith(("model", "connectivity", "calibration", "data", "seed"))
    }
    key = hashlib.sha256(json.dumps(ours, sort_keys=True).encode()).hexdigest()[:12]
    known = state / "calibrations" / key
    known.parent.mkdir(exist_ok=True)
    with known.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not known.exists():
            run("run", "--only", "calibrate")
            link_tree(folder, known)
    if not folder.exists():
        link_tree(known, folder)


def link_tree(source: Path, target: Path) -> None:
    temporary = target.with_name(f".{target.name}.new")
    shutil.rmtree(temporary, ignore_errors=True)
    shutil.copytree(source, temporary, copy_function=os.link)
    temporary.rename(target)


def grade(
    model: Path, name: str, original: Path, state: Path, options: argparse.Namespace
) -> dict[str, Any]:
    """Return value and error of each task, and what own text has beside it."""
    from fcsd.cli.main import main

    words = ["--suite", str(state / "suite.yaml"), "--batch-size", str(options.batch)]
    words += ["--original", str(original), "--cache", str(state / "cache")]
    words += ["--data-root", str(Path(options.data) / "hub")] if options.data else []
    output = state / "scores" / name
    if main(["evaluate", str(model), "--output", str(output), *words]):
        raise RuntimeError(f"the evaluation of {name} failed")
    tasks: dict[str, Any] = read_json(output / "results.json")["tasks"]
    return tasks


class Texts:
    """Tokens of four kinds of text that no training reads, and the originals' KL."""

    def __init__(self, state: Path, options: argparse.Namespace) -> None:
        self.rows: dict[str, Any] = {}
        self.originals: dict[Path, Any] = {}
        import fcsd

        _, tokenizer = fcsd.load(state / "moe")
        number = 8 if options.small else KL_TEXTS
        for kind, texts in texts_of(state, options.data, tokenizer).items():
            ids = [
                tokenizer(text, add_special_tokens=False).input_ids[:KL_TOKENS]
                for _, text in zip(range(number), texts, strict=False)
            ]
            self.rows[kind] = sorted(ids, key=len)

    def kl(self, model: Path, original: Path) -> dict[str, list[float]]:
        """Return for each kind the mean KL(original || model) per token in nats after
        the eighth token, and its standard error over texts.
        """
        import fcsd

        device = "cuda" if torch_has_gpu() else "cpu"
        if original not in self.originals:
            self.originals[original] = fcsd.load(original)[0].to(device)
        student = fcsd.load(model)[0].to(device)
        return {
            kind: mean_kl(self.originals[original], student, rows, device)
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

    def wikipedia() -> Iterator[str]:  # prepare.py trains on the other part
        if data is None:
            name = "wikitext-2-raw-v1"
            rows = load_dataset("Salesforce/wikitext", name, split="test")
            paragraphs = [row["text"] for row in rows]
        else:
            file = Path(data) / "corpora" / "wikitext2_test.txt"
            paragraphs = file.read_text("utf-8").splitlines()
        yield from (text.strip() for text in paragraphs if len(text) > 400)

    return {
        "conversations": (
            tokenizer.apply_chat_template(row["messages"], tokenize=False)
            for row in lines(state / "models/data/heldout.jsonl")
        ),
        "Wikipedia": wikipedia(),
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
    parser.add_argument("--workers", type=int, default=8, help="points at once")
    parser.add_argument(
        "--minutes", type=float, default=60, help="time after which all is ended"
    )
    parser.add_argument(
        "--only", default="*", help="points, in this order: `shared-none,upcycled-*`"
    )
    parser.add_argument(
        "--tokens", type=int, default=98304, help="of a training; of long ones 10 times"
    )
    parser.add_argument(
        "--calibration", type=int, default=24576, help="tokens of a calibration"
    )
    parser.add_argument("--items", type=int, default=1000, help="per choice task")
    parser.add_argument("--prompts", type=int, default=256, help="for own text")
    parser.add_argument("--ifeval", type=int, default=541, help="prompts; 0: none")
    parser.add_argument("--batch", type=int, default=128, help="sequences at once")
    parser.add_argument(
        "--small", action="store_true", help="rehearse with two layers and few tokens"
    )
    options = parser.parse_args()
    every = points(options.tokens)
    chosen = [
        each
        for pattern in options.only.split(",")
        for each in every
        if fnmatch(each.name, pattern)
    ]
    if not chosen:
        names = ", ".join(each.name for each in every)
        parser.error(f"--only {options.only}: matches none of {names}")
    if options.workers < 1:
        parser.error(f"--workers {options.workers}: at least 1")
    if options.tokens < STEP_TOKENS:
        parser.error(f"--tokens {options.tokens}: a step has {STEP_TOKENS}")
    end = time.monotonic() + 60 * options.minutes
    state = options.state.resolve()
    for name in ("logs", "results", "scores"):
        (state / name).mkdir(parents=True, exist_ok=True)
    prepare(state, options)
    check_originals(every, state)
    run_all(chosen, state, options, end)
    write_front([each for each in every if is_finished(state, each)], state)
    finished = [each for each in chosen if is_finished(state, each)]
    print(f"{len(finished)} of {len(chosen)} points: {state}/front.md")
    if failed := [each.name for each in chosen if "error" in result_of(state, each)]:
        sys.exit(f"failed: {', '.join(failed)}; see `error` there, and {state}/logs")
    if len(finished) < len(chosen):
        sys.exit(75)


def check_originals(every: list[Point], state: Path) -> None:
    """Refuse results of other originals than those that are there now: a build does not
    give the same weights everywhere, and changes are paired with the original's scores.
    """
    for point in every:
        measured = result_of(state, point).get("original")
        if measured and measured != weights_fingerprint(state / point.original):
            sys.exit(
                f"{result_file(state, point)} was measured with another build of"
                f" {state / point.original}: choose another folder than {state}, or"
                " remove `results`, `scores` and `run` there"
            )


def run_all(
    chosen: list[Point], state: Path, options: argparse.Namespace, end: float
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
    for process in processes:
        process.start()
    with progress_bar(total=len(chosen), desc="points", unit="point") as bar:
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


# ---- table and figure


def write_front(finished: list[Point], state: Path) -> None:
    """Write front.json, front.md and front.png from the results of all finished points
    whose original is finished, too.
    """
    originals = {each.network for each in finished if each.rewired == "none"}
    rows = [
        row_of(each, state)
        for each in finished
        if each.rewired != "none" and each.network in originals
    ]
    write_json(state / "front.json", rows)
    header = [
        "network", "ahead", "weights", "overlapped",
        "own-text KL", "KL", "PIQA's KL", "choice", "IFEval",
    ]  # fmt: skip
    write_text(
        state / "front.md", markdown(header, [cells(row) for row in rows], 3) + "\n"
    )
    if rows:
        plot_front(rows, state / "front.png")


def row_of(point: Point, state: Path) -> dict[str, Any]:
    """Return a point's figures and their paired changes."""
    import fcsd
    from fcsd.planning.layers.points import overlapped_collectives

    result = result_of(state, point)
    farskip = result["connectivity"]
    overlapped, total = overlapped_collectives(
        farskip["layers"],
        range(num_layers(state, point)),
        farskip["attention"],
        farskip["mlp"],
    )
    original = state / "scores" / Point(point.network, "none").name
    scores = state / "scores" / point.name

    def change(*tasks: str) -> list[float] | None:
        if any(task not in result["scores"] for task in tasks):
            return None
        mean = fcsd.compare(original, scores, tasks=list(tasks))["mean"]
        return [100 * mean["delta"], 100 * mean["delta_stderr"]]

    own = result["scores"]["own_text"]
    return vars(point) | {
        "name": point.name,
        "connectivity": farskip,
        "overlapped": overlapped,
        "collectives": total,
        "own_text_kl": [own["value"], own["stderr"]],
        "kl": result["kl"],
        "choice": change(*CHOICE),
        "tasks": {task: change(task) for task in CHOICE},
        "ifeval": change("ifeval"),
    }


def cells(row: Mapping[str, Any]) -> list[str]:
    def error(value: Any, digits: int) -> str:
        return "" if value is None else f"{value[0]:.{digits}f} ± {value[1]:.{digits}f}"

    trained = f", {row['tokens']:,} tokens" if row["tokens"] else ""
    return [
        row["network"],
        row["rewired"],
        row["weights"] + trained + (f", seed {row['seed']}" if row["seed"] else ""),
        f"{row['overlapped']} of {row['collectives']}",
        error(row["own_text_kl"], 3),
        error(row["kl"]["conversations"], 3),
        error(row["kl"]["piqa"], 3),
        error(row["choice"], 1),
        error(row["ifeval"], 1),
    ]


def plot_front(rows: list[dict[str, Any]], file: Path) -> None:
    """Draw own-text KL and the change of the choice tasks against the share of
    collectives that computation hides, a line for each network and start.
    """
    from matplotlib import pyplot as plt

    from fcsd.report.figure import SIZE, legend_beside, save_figure, set_title

    lines: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if not row["seed"]:
            trained = (
                f" and trained on {row['tokens']:,} tokens" if row["tokens"] else ""
            )
            name = {"shared": "shared expert", "upcycled": "no shared expert"}[row["network"]]  # fmt: skip
            lines.setdefault(f"{name}, {row['weights']}{trained}", []).append(row)
    figure, axes = plt.subplots(1, 2, figsize=(2 * SIZE[0], SIZE[1]))
    for axis, key, title in zip(
        axes,
        ("own_text_kl", "choice"),
        ("own-text KL, nats per token", "choice tasks, change of the mean in points"),
        strict=True,
    ):
        for name, points_ in lines.items():
            points_ = sorted(
                (row for row in points_ if row[key]), key=lambda row: row["overlapped"]
            )
            axis.errorbar(
                [100 * row["overlapped"] / row["collectives"] for row in points_],
                [row[key][0] for row in points_],
                [row[key][1] for row in points_],
                marker="o",
                capsize=2,
                linestyle="-" if name.startswith("shared") else "--",
                label=name,
            )
        axis.set(xlabel="overlapped collectives, %")
        set_title(axis, title)
    axes[0].set_yscale("log")
    legend_beside(axes[1])
    save_figure(figure, file)


if __name__ == "__main__":
    main()
