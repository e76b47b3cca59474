"""The cost of a checkpoint to a training: written while the training waits, and in the
background.

    python benchmarks/checkpoints.py [--experts 56] [--checkpoints 6] [--every 16]
                                     [--json OUT]
    python benchmarks/checkpoints.py --kills 20

One process trains a Qwen3-MoE with random weights by `fcsd.training.run.train`
(cross-entropy, AdamW, float32; a token uses one expert, so that steps are cheap for the
size of the checkpoint: 2.0 GiB with 56 experts). Every second checkpoint is written
while the training waits, the others in the background, so that a busy machine affects
both.

    blocked    time that the training's thread spends on the checkpoint
    slowed     additional time of the steps that run beside a thread that writes or
               removes, over the median of all others; summed
    delay      the sum of both; separately for the first checkpoint in the background,
               which maps the memory that later ones reuse

The share is the median delay in the background over the median blocked time of the
other kind. Times are processor time of the training's thread, which a busy machine does
not change. They exclude waiting for the disk, which only a waiting training has to do,
so that the share is too large. The wall time of the blocking part is printed beside it.

--kills: the training is killed with SIGKILL at a random moment between the start of its
first checkpoint and its end, and run again; its weights are compared with those of an
undisturbed one. All checkpoints are written in the background.

glibc keeps the memory that the steps free: otherwise each step would map its gradients
anew, which no GPU does.
"""

import argparse
import hashlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [
    str(Path(__file__).resolve().parents[1]),
    str(Path(__file__).resolve().parent),
]
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM, TrainerCallback  # noqa: E402
from turns import load_average  # noqa: E402

from fcsd.base.text import size  # noqa: E402
from fcsd.data.config import RowsConfig  # noqa: E402
from fcsd.parallel.launch import join_launch  # noqa: E402
from fcsd.pipeline.tiny.models import tiny_tokenizer  # noqa: E402
from fcsd.training import checkpoint_writer  # noqa: E402
from fcsd.training import run as product  # noqa: E402
from fcsd.training.arguments import Job  # noqa: E402
from fcsd.training.checkpoint_writer import CheckpointWriter  # noqa: E402
from fcsd.training.config import Sections, TrainConfig  # noqa: E402
from fcsd.training.losses.objectives import CrossEntropyObjectiveConfig  # noqa: E402
from fcsd.training.prepare import TrainingInputs  # noqa: E402

ROW = 32
KEPT = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}


class Rows:
    """Random tokens, the same at every start."""

    def __init__(self, number: int):
        self.ids = torch.randint(
            6, 500, (number, ROW), generator=torch.Generator().manual_seed(0)
        )

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = self.ids[index]
        return {"input_ids": row, "labels": row, "position_ids": torch.arange(ROW)}


def make_model(num_experts: int) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=512,
        hidden_size=512,
        moe_intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        num_experts=num_experts,
        num_experts_per_tok=1,
        use_cache=False,
    )
    return AutoModelForCausalLM.from_config(
        config, attn_implementation="sdpa", dtype=torch.float32
    )


def train(folder: Path, num_experts: int, steps: int, every: int) -> Any:
    """Return the trained model; an interrupted training continues."""
    model = make_model(num_experts)
    inputs = TrainingInputs(model, None, tiny_tokenizer(512), Rows(2 * steps))
    sections = Sections(
        objective=CrossEntropyObjectiveConfig(name="sft"),
        train=TrainConfig(
            max_steps=steps,
            batch_size_tokens=2 * ROW,
            per_device_train_batch_size=2,
            learning_rate=1e-4,
            warmup_steps=0,
            save_steps=every,
            save_total_limit=1,
            logging_steps=1,
            gradient_checkpointing=False,
        ),
        data=RowsConfig(max_length=ROW),
    )
    job = Job(folder, "checkpoints", 0, save_model=False)
    product.train(inputs, sections, job, join_launch())
    return model


class Watch(TrainerCallback):
    """Records for each step its seconds and whether a thread was at work, and for each
    checkpoint how long it blocked the training.
    """

    def __init__(self, options: argparse.Namespace):
        self.every = options.every
        self.writer: Any = None
        self.blocked_s = (0.0, 0.0)  # of the processor, of the wall
        # of which checkpoint, seconds, beside a thread
        self.steps: list[tuple[int, float, bool]] = []
        self.checkpoints: dict[int, dict[str, Any]] = {}
        self.number, self.began, self.beside = 0, 0.0, False
        for name in ("write", "finish"):
            self._time(name)

    def _time(self, name: str) -> None:
        does, inside = getattr(CheckpointWriter, name), self

        def timed(writer: Any, *args: Any) -> None:
            inside.writer = writer
            nested, began = inside.blocked_s, (time.thread_time(), time.perf_counter())
            if name == "write":
                inside.next_checkpoint()
            does(writer, *args)
            spent = (time.thread_time() - began[0], time.perf_counter() - began[1])
            # `write` calls `finish`
            inside.blocked_s = (nested[0] + spent[0], nested[1] + spent[1])

        setattr(CheckpointWriter, name, timed)

    def next_checkpoint(self) -> None:
        self.settle()
        self.number += 1
        in_background = self.number % 2 == 0
        checkpoint_writer.BACKGROUND_FROM = 0 if in_background else 10**12
        self.checkpoints[self.number] = {
            "background": in_background,
            "before_s": self.blocked_s,
        }

    def settle(self) -> None:
        """Record the blocked time since the last checkpoint began."""
        if self.number:
            row = self.checkpoints[self.number]
            spent = [
                b - a for a, b in zip(row.pop("before_s"), self.blocked_s, strict=True)
            ]
            row["blocked_s"], row["blocked_wall_s"] = spent

    def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        thread = self.writer._thread if self.writer is not None else None
        self.beside = thread is not None and thread.is_alive()
        self.began = time.thread_time()

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.steps.append((self.number, time.thread_time() - self.began, self.beside))

    def rows(self) -> list[dict[str, Any]]:
        self.settle()
        quiet = statistics.median(
            seconds for number, seconds, beside in self.steps if not beside and number
        )
        for number, row in self.checkpoints.items():
            slow = [
                seconds - quiet
                for of, seconds, beside in self.steps
                if of == number and beside
            ]
            row |= {"steps_beside": len(slow), "slowed_s": sum(slow), "step_s": quiet}
            row["delay_s"] = row["blocked_s"] + row["slowed_s"]
        return list(self.checkpoints.values())


def measure(options: argparse.Namespace) -> dict[str, Any]:
    watch = Watch(options)
    make = product.ReadyTrainer

    def watched(*args: Any, **more: Any) -> Any:
        trainer = make(*args, **more)
        trainer.add_callback(watch)
        return trainer

    product.ReadyTrainer = watched  # type: ignore[misc,assignment]
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        model = train(
            Path(folder),
            options.experts,
            options.checkpoints * options.every + options.every - 1,
            options.every,
        )
    rows = watch.rows()
    waiting = [row["delay_s"] for row in rows if not row["background"]]
    first, *others = (row for row in rows if row["background"])
    blocking = statistics.median(waiting)
    return {
        "checkpoint_bytes": 12 * sum(p.numel() for p in model.parameters()),
        "load": load_average(),
        "rows": rows,
        "blocking_s": blocking,
        "first_share": first["delay_s"] / blocking,
        "share": (
            statistics.median(row["delay_s"] for row in others) / blocking
            if others
            else None
        ),
        "blocked_share": (
            statistics.median(row["blocked_s"] for row in others) / blocking
            if others
            else None
        ),
    }


def report(measured: dict[str, Any]) -> None:
    print(
        f"a checkpoint of {size(measured['checkpoint_bytes'])}, load"
        f" {measured['load']:.1f}"
    )
    for row in measured["rows"]:
        kind = "background" if row["background"] else "waiting"
        print(
            f"{kind:10}  blocked {row['blocked_s']:6.2f} s ({row['blocked_wall_s']:.2f}"
            f" s of wall time), {row['steps_beside']:2} steps beside slowed by"
            f" {row['slowed_s']:6.2f} s (of {row['step_s']:.2f} s each)"
        )
    print(
        f"blocking {measured['blocking_s']:.2f} s; in the background"
        f" {100 * measured['first_share']:.1f} % (the first)"
    )
    if measured["share"] is not None:
        print(
            f"later ones {100 * measured['share']:.1f} %, of it blocked"
            f" {100 * measured['blocked_share']:.1f} %"
        )


# ---- kills


def worker(options: argparse.Namespace) -> None:
    """Train, with all checkpoints in the background, and print a hash of the weights."""
    checkpoint_writer.BACKGROUND_FROM = 0
    write = CheckpointWriter.write

    def announce_and_write(self: Any, *args: Any) -> None:
        print("writing", flush=True)
        write(self, *args)

    CheckpointWriter.write = announce_and_write  # type: ignore[method-assign]
    model = train(Path(options.worker), options.experts, 7, 2)
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    print(digest.hexdigest(), flush=True)


def begin(options: argparse.Namespace, folder: Path) -> subprocess.Popen:
    command = [
        sys.executable,
        __file__,
        "--worker",
        str(folder),
        "--experts",
        str(options.experts),
    ]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def ended(process: subprocess.Popen) -> str:
    """Return the last hash that it printed."""
    output, errors = process.communicate()
    if process.returncode:
        sys.exit(errors[-3000:])
    return output.split()[-1]


def kills(options: argparse.Namespace) -> None:
    draw, num_killed, num_same = random.Random(options.seed), 0, 0
    with tempfile.TemporaryDirectory(dir=options.folder) as place:
        process = begin(options, Path(place) / "whole")
        assert process.stdout is not None
        process.stdout.readline()
        began = time.monotonic()
        wanted = ended(process)
        duration_s = time.monotonic() - began
        for number in range(options.kills):
            folder = Path(place) / f"killed-{number}"
            process = begin(options, folder)
            assert process.stdout is not None
            process.stdout.readline()
            moment = draw.uniform(0, duration_s)
            time.sleep(moment)
            process.send_signal(signal.SIGKILL)
            killed = process.wait() == -signal.SIGKILL
            there = sorted(path.name for path in (folder / "checkpoints").iterdir())
            same = ended(begin(options, folder)) == wanted
            num_killed += killed
            num_same += same
            print(
                f"after {moment:5.1f} of {duration_s:.1f} s, killed {killed}: {there},"
                f" same weights {same}",
                flush=True,
            )
            subprocess.run(["rm", "-rf", str(folder)], check=True)
    print(
        f"{num_same} of {options.kills} ended with the same weights, {num_killed}"
        f" killed, load {load_average():.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--experts", type=int, default=56)
    parser.add_argument("--checkpoints", type=int, default=6)
    parser.add_argument(
        "--every", type=int, default=16, help="steps between checkpoints"
    )
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--folder",
        type=Path,
        help="of the temporary folder, on the disk that is measured",
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not KEPT.items() <= os.environ.items():
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **KEPT})
    torch.set_num_threads(1)
    if options.worker:
        worker(options)
    elif options.kills:
        kills(options)
    else:
        measured = measure(options)
        report(measured)
        if options.json is not None:
            options.json.write_text(json.dumps(measured, indent=2) + "\n")


if __name__ == "__main__":
    main()
