"""Measure the time of a whole optimiser step, ours and TRL's, as ratios in one run.

    python benchmarks/step.py [--lengths equal mixed] [--rounds 5] [--json OUT] [--dim
    384 --layers 10 …]

The benchmark times the optimiser steps of real training loops over the same batch:
fetching, teacher, student, loss, backward pass, clipping, AdamW, logging. The model is
a Qwen3-MoE with random weights, its student rewired in all layers. The head's share of
the matmuls of an SFT step is printed; in Qwen3-30B-A3B it is a tenth.

    sft         `FCSDTrainer` with objective sft: cross-entropy, no teacher
    control     the same once more: the noise of this run
    kl          a distillation step: the teacher's forward pass is part of it
    kl cached   the teacher's hidden states are read from a cache on disk, and only its head is in memory
    gkd         TRL's experimental GKDTrainer, off-policy forward KL (lmbda 0, beta 0, seq_kd off), its own collator,
                the same weights, dtype, examples, optimiser and attention; no
                activation checkpointing in either; padded to the longest example of a
                micro-batch
    gkd sorted  the same with the examples sorted by length first, which is the least that padding can cost

    --lengths equal   every example fills a row: no padding, packing gains nothing
    --lengths mixed   lengths are log-normal (sigma 0.9), an eighth of a row in the mean. fcsd packs them into rows, its
                      default; GKDTrainer cannot pack

    --own-text        the student writes everything behind the prompts itself: `kl` with own_text 1, `gkd` with lmbda 1,
                      at temperature 1, without a token that would end a text; equal lengths only. Both cut the batch
                      into --micro-batches; GKDTrainer writes in each of them, fcsd once for all

A quarter of every example is its prompt and carries no loss. Each variant is a separate
process; all of them stay alive and take turns, in an order that changes every round. A
ratio is the median over rounds of (time here / time of sft in the same round); seconds
are those of the fastest round; tokens are those of the examples, without padding. On a
CPU, time is processor time of one thread, and memory is the peak of resident memory
over that before the models were made. The losses of `kl` and `gkd` at every step are
compared before anything is printed; those of own text are of other samples.
"""

import argparse
import importlib.util
import json
import math
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [
    str(Path(__file__).resolve().parents[1]),
    str(Path(__file__).resolve().parent),
]

from turns import load_average, reset_peak, resident, take_turns  # noqa: E402

VARIANTS = ("sft", "control", "kl", "kl cached", "gkd", "gkd sorted")
TARGETS = {"kl / sft": 1.40, "kl cached / sft": 1.08, "tokens/s, kl / gkd": 1.30}
LARGEST_DIFFERENCE = {"float32": 1e-3, "bfloat16": 0.1}
"""Largest relative difference between the losses of `kl` and `gkd`."""
LEARNING_RATE = 1e-4
NO_LOSS = -100


# ---- the batch


def example_lengths(options: argparse.Namespace, lengths: str) -> list[int]:
    """Return the number of tokens of each example of the batch; log-normal lengths are
    at equidistant quantiles, in a mixed order.
    """
    if lengths == "equal":
        return [options.length] * options.rows
    count, mean, sigma = 8 * options.rows, options.length / 8, 0.9
    normal = statistics.NormalDist(math.log(mean) - sigma**2 / 2, sigma)
    values = [math.exp(normal.inv_cdf((k + 0.5) / count)) for k in range(count)]
    clipped = [max(8, min(options.length, round(value))) for value in values]
    return [clipped[k * 5 % count] for k in range(count)] if count % 5 else clipped


def prompt_tokens(length: int) -> int:
    return max(1, length // 4)


def examples(options: argparse.Namespace, lengths: str) -> list[dict[str, list]]:
    """Return {"input_ids", "loss_mask"} of each example, as `fcsd.data.rows.pack` takes
    them.
    """
    import torch

    generator = torch.Generator().manual_seed(0)
    made = []
    for length in example_lengths(options, lengths):
        ids = torch.randint(6, options.vocab, (length,), generator=generator).tolist()
        prompt = prompt_tokens(length)
        made.append(
            {
                "input_ids": ids,
                "loss_mask": [False] * prompt + [True] * (length - prompt),
            }
        )
    return made


def packed_rows(
    options: argparse.Namespace, batch: list[dict[str, list]]
) -> list[dict[str, Any]]:
    from tests.examples import pack

    return list(pack(batch, options.length, pad_token_id=0))


class Repeated:
    """The same batch, `times` times."""

    def __init__(self, batch: list[Any], times: int):
        self.batch, self.times = batch, times

    def __len__(self) -> int:
        return len(self.batch) * self.times

    def __getitem__(self, index: int) -> Any:
        return self.batch[index % len(self.batch)]


# ---- the trainers


def make_model(options: argparse.Namespace, rewired: bool) -> Any:
    """Return a model with the same weights at every call."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from fcsd.model.connectivity import Connectivity, convert_model

    torch.manual_seed(0)
    dim = options.dim
    config = AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=options.vocab,
        hidden_size=dim,
        intermediate_size=2 * dim,
        moe_intermediate_size=dim * 3 // 4,
        num_hidden_layers=options.layers,
        num_attention_heads=max(2, dim // 64),
        num_key_value_heads=max(1, dim // 256),
        head_dim=128,
        num_experts=8,
        num_experts_per_tok=4,
        tie_word_embeddings=False,
        initializer_range=0.05,
        use_cache=False,
    )
    with torch.device(options.device):
        model = AutoModelForCausalLM.from_config(
            config, attn_implementation="sdpa", dtype=getattr(torch, options.dtype)
        )
    if rewired:
        convert_model(model, Connectivity("all"))
    return model


def head_share(model: Any) -> float:
    """Return the head's share of the matmuls of an SFT step, without attention's
    scores.

    It is head / (head + the part of the layers that a token uses).
    """
    config = model.config
    head = model.lm_head.weight.numel()
    experts = {
        name: p
        for name, p in model.model.layers.named_parameters()
        if ".experts." in name
    }
    matrices = sum(p.numel() for p in model.model.layers.parameters() if p.ndim == 2)
    used = (
        sum(p.numel() for p in experts.values())
        * config.num_experts_per_tok
        / config.num_experts
    )
    return head / (head + used + matrices)


def train_with_fcsd(
    variant: str,
    options: argparse.Namespace,
    batch: list,
    folder: str,
    num_steps: int,
    watcher: Any,
) -> None:
    from unittest import mock

    from fcsd.data.config import RowsConfig
    from fcsd.pipeline.tiny.models import tiny_tokenizer
    from fcsd.training import run as product
    from fcsd.training.arguments import Job
    from fcsd.training.config import Sections, TrainConfig
    from fcsd.training.losses.objectives import (
        CrossEntropyObjectiveConfig,
        KLObjectiveConfig,
    )
    from fcsd.training.prepare import TrainingInputs
    from fcsd.training.teachers.base import ModelTeacher

    rows = packed_rows(options, batch)
    student = make_model(options, rewired=True)
    has_teacher = variant.startswith("kl")
    teacher: Any = make_model(options, rewired=False) if has_teacher else None
    if variant == "kl cached":
        teacher = cached_teacher(ModelTeacher(teacher), rows, Path(folder) / "cache")

    class Watched(product.ReadyTrainer):
        def __init__(self, model: Any, args: Any, **others: Any):
            args.train_sampling_strategy = "sequential"
            super().__init__(model, args, **others)
            self.add_callback(watcher)

    from fcsd.parallel.launch import join_launch

    tokenizer = tiny_tokenizer(512)
    if options.own_text:
        tokenizer.eos_token = None
    inputs = TrainingInputs(student, teacher, tokenizer, Repeated(rows, num_steps))
    sections = Sections(
        objective=(
            KLObjectiveConfig(own_text=1.0 if options.own_text else None)
            if has_teacher
            else CrossEntropyObjectiveConfig(name="sft")
        ),
        train=TrainConfig(
            max_steps=num_steps,
            batch_size_tokens=len(rows) * options.length,
            per_device_train_batch_size=len(rows)
            // (options.micro_batches if options.own_text else 1),
            learning_rate=LEARNING_RATE,
            warmup_steps=0,
            lr_scheduler_type="constant_with_warmup",
            logging_steps=1,
            gradient_checkpointing=False,
            dtype=options.dtype,
        ),
        data=RowsConfig(max_length=options.length),
    )
    job = Job(Path(folder), variant, 0, save_model=False)
    del student, teacher
    with mock.patch.object(product, "ReadyTrainer", Watched):
        product.train(inputs, sections, job, join_launch())


def cached_teacher(teacher: Any, rows: list[dict[str, Any]], folder: Path) -> Any:
    """Return a cache of these rows on disk, filled by the teacher; only the teacher's
    head stays in memory.
    """
    import copy

    from fcsd.parallel.launch import join_launch
    from fcsd.training.teachers.cache import CachedTeacher, HiddenCache
    from fcsd.training.teachers.cache_fill import fill_cache

    weight = teacher.head.weight
    identity = {
        "hidden_size": weight.shape[1],
        "dtype": str(weight.dtype).removeprefix("torch."),
    }
    fill_cache(
        folder,
        identity,
        rows,
        join_launch(),
        batch_size=len(rows),
        load_teacher=lambda: teacher,
    )
    return CachedTeacher(HiddenCache(folder, identity), copy.deepcopy(teacher.head))


def train_with_gkd(
    variant: str,
    options: argparse.Namespace,
    batch: list,
    folder: str,
    num_steps: int,
    watcher: Any,
) -> None:
    import datasets
    from transformers.trainer_callback import PrinterCallback
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    from fcsd.pipeline.tiny.models import tiny_tokenizer

    tokenizer = tiny_tokenizer(512)
    if options.own_text:
        tokenizer.eos_token = None
    if variant == "gkd sorted":
        batch = sorted(batch, key=lambda example: len(example["input_ids"]))
    # A single micro-batch of padded examples of mixed lengths would be several times as
    # large as the packed rows.
    micro_batches = options.micro_batches
    if len(batch) == options.rows and not options.own_text:
        micro_batches = 1
    records = [
        {
            "prompt": "p",  # its length comes from the mask
            "input_ids": example["input_ids"],
            "completion_mask": [int(loss) for loss in example["loss_mask"]],
        }
        for example in batch
    ]
    arguments = GKDConfig(
        output_dir=folder,
        max_steps=num_steps,
        per_device_train_batch_size=len(records) // micro_batches,
        gradient_accumulation_steps=micro_batches,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=0,
        weight_decay=0.0,
        adam_beta1=0.9,
        adam_beta2=0.95,
        adam_epsilon=1e-8,
        max_grad_norm=1.0,
        bf16=False,
        use_cpu=options.device == "cpu",
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        train_sampling_strategy="sequential",
        remove_unused_columns=False,
        disable_tqdm=True,
        max_length=options.length,
        lmbda=1.0 if options.own_text else 0.0,
        max_new_tokens=options.length - prompt_tokens(options.length),
        beta=0.0,
        seq_kd=False,
        temperature=1.0,
        dataloader_pin_memory=options.device != "cpu",
    )
    teacher = make_model(options, rewired=False).to(options.device)
    trainer = GKDTrainer(
        make_model(options, rewired=True),
        teacher_model=teacher.eval().requires_grad_(False),
        args=arguments,
        train_dataset=datasets.Dataset.from_list(records * num_steps),
        processing_class=tokenizer,
    )
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(watcher)
    trainer.train()


def train_variant(
    variant: str,
    options: argparse.Namespace,
    lengths: str,
    folder: str,
    num_steps: int,
    watcher: Any,
) -> None:
    """Train for some steps with `watcher`, a callback of transformers' Trainer."""
    train = train_with_gkd if variant.startswith("gkd") else train_with_fcsd
    train(variant, options, examples(options, lengths), folder, num_steps, watcher)


# ---- one variant, in its own process


def worker(options: argparse.Namespace) -> None:
    """Answer each line on stdin with the measurement of one optimiser step as JSON."""
    import torch
    from transformers import TrainerCallback

    # the output of libraries is not an answer
    answers, sys.stdout = sys.stdout, sys.stderr
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    cuda = options.device == "cuda"
    clock = time.perf_counter if cuda else time.process_time
    if options.worker.startswith("gkd"):
        import trl.experimental.gkd  # noqa: F401, resident before the models are
    before = resident("VmRSS")
    losses: list[float] = []

    class Turns(TrainerCallback):
        begun = 0.0

        def wait(self) -> None:
            if not sys.stdin.readline():
                raise SystemExit(0)
            if cuda:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            else:
                reset_peak()
            self.begun = clock()

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.wait()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            if cuda:
                torch.cuda.synchronize()
            seconds = clock() - self.begun
            peak = (
                torch.cuda.max_memory_allocated()
                if cuda
                else resident("VmHWM") - before
            )
            answer = {"seconds": seconds, "peak_bytes": peak, "losses": losses}
            print(json.dumps(answer), file=answers, flush=True)
            self.wait()

        def on_log(
            self, *_: Any, logs: dict[str, Any] | None = None, **__: Any
        ) -> None:
            if logs and "loss" in logs:
                losses.append(float(logs["loss"]))

    with tempfile.TemporaryDirectory() as folder:
        steps = options.rounds + 2
        train_variant(
            options.worker, options, options.lengths[0], folder, steps, Turns()
        )


# ---- all of them


def run(options: argparse.Namespace, lengths: str) -> dict[str, Any]:
    batch = examples(options, lengths)
    rows = packed_rows(options, batch)
    names = list(VARIANTS)
    if lengths == "equal":
        names.remove("gkd sorted")  # there is nothing to sort
    if options.own_text:
        names.remove("kl cached")  # it knows no text that the student writes
    if importlib.util.find_spec("trl") is None:
        names = [name for name in names if not name.startswith("gkd")]
    # Only the last --lengths counts.
    arguments = [*options.arguments, "--lengths", lengths]
    loads = [load_average()]
    measured = take_turns(names, options.rounds, __file__, arguments)
    loads.append(load_average())
    num_tokens = sum(len(example["input_ids"]) for example in batch)
    results = {}
    for name in names:
        times = [m["seconds"] for m in measured[name][1:]]
        base = [m["seconds"] for m in measured["sft"][1:]]
        results[name] = {
            "time_ratio": statistics.median(
                t / b for t, b in zip(times, base, strict=True)
            ),
            "seconds": times,
            "tokens_per_second": num_tokens / min(times),
            "peak_bytes": measured[name][-1]["peak_bytes"],
            "losses": measured[name][-1]["losses"],
        }
    return {
        "lengths": lengths,
        "examples": len(batch),
        "rows": len(rows),
        "tokens": num_tokens,
        "load": loads,
        "results": results,
        "ratios": ratios(results),
        "largest_loss_difference": (
            {} if options.own_text else largest_difference(results)
        ),
    }


def ratios(results: dict[str, Any]) -> dict[str, float]:
    """Yield the figures that have targets; for tokens per second, the median over
    rounds.
    """
    figures = {
        f"{name} / sft": results[name]["time_ratio"]
        for name in ("kl", "kl cached")
        if name in results
    }
    for name, result in results.items():
        if name.startswith("gkd"):
            pairs = zip(result["seconds"], results["kl"]["seconds"], strict=True)
            figures[f"tokens/s, kl / {name}"] = statistics.median(
                theirs / ours for theirs, ours in pairs
            )
    return figures


def largest_difference(results: dict[str, Any]) -> dict[str, float]:
    """Return the relative difference of the losses at the same step, the largest over
    steps, of `kl` against each of the others.
    """
    ours = results["kl"]["losses"]
    return {
        name: max(
            abs(a - b) / abs(a) for a, b in zip(ours, result["losses"], strict=True)
        )
        for name, result in results.items()
        if name.startswith(("gkd", "kl "))
    }


def verdict(name: str, value: float) -> str:
    if name not in TARGETS:
        return ""
    faster = name.startswith("tokens/s")
    met = value >= TARGETS[name] if faster else value <= TARGETS[name]
    limit = f"{'at least' if faster else 'at most'} {TARGETS[name]:.2f}"
    return f"   target {limit}: {'met' if met else 'MISSED'}"


def table(report: dict[str, Any], part: dict[str, Any]) -> str:
    s = report["settings"]
    lines = [
        (
            f"{part['lengths']} lengths: {part['examples']} examples, {part['tokens']}"
            f" tokens, in {part['rows']} rows of {s['length']}; {s['dtype']},"
            f" {s['device']}, load {part['load'][0]:.1f} to {part['load'][1]:.1f}"
        ),
        "",
        (
            f"{'variant':12} {'s/step':>9} {'time / sft':>11} {'tokens/s':>9}"
            f" {'peak MiB':>9}"
        ),
    ]
    for name, r in part["results"].items():
        lines.append(
            f"{name:12} {min(r['seconds']):9.2f} {r['time_ratio']:11.2f}"
            f" {r['tokens_per_second']:9.0f} {r['peak_bytes'] / 2**20:9.0f}"
        )
    lines.append("")
    own = s["own_text"]
    for name, value in part["ratios"].items():
        # An SFT step writes nothing.
        note = "" if own and name == "kl / sft" else verdict(name, value)
        lines.append(f"{name:28} {value:.2f}{note}")
    if differences := part["largest_loss_difference"]:
        lines.append(
            "losses at every step against kl: "
            + ", ".join(
                f"{name} within {value:.1e}" for name, value in differences.items()
            )
        )
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument(
        "--lengths", nargs="+", choices=["equal", "mixed"], default=["equal", "mixed"]
    )
    made.add_argument(
        "--rows", type=int, default=2, help="rows of the batch, one micro-batch"
    )
    made.add_argument("--length", type=int, default=512, help="tokens per row")
    made.add_argument("--layers", type=int, default=10)
    made.add_argument(
        "--dim", type=int, default=384, help="hidden size, a multiple of 64"
    )
    made.add_argument("--vocab", type=int, default=6144)
    made.add_argument(
        "--micro-batches",
        type=int,
        default=4,
        help="of gkd with mixed lengths, of all with --own-text",
    )
    made.add_argument("--dtype", choices=LARGEST_DIFFERENCE, default="float32")
    made.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    made.add_argument("--own-text", action="store_true", help="see above")
    made.add_argument(
        "--rounds", type=int, default=5, help="timed rounds, after one that is not"
    )
    made.add_argument("--json", type=Path, help="write all measurements here")
    made.add_argument("--worker", choices=VARIANTS, help=argparse.SUPPRESS)
    return made


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    options.arguments = list(sys.argv[1:] if arguments is None else arguments)
    if options.worker:
        worker(options)
        return 0
    if options.own_text:
        options.lengths = ["equal"]
        if options.rows % options.micro_batches:
            parser().error("--own-text: --rows must be a multiple of --micro-batches")
    share = head_share(make_model(options, rewired=False))
    settings = {
        k: v
        for k, v in vars(options).items()
        if k not in ("json", "worker", "arguments", "lengths")
    }
    report: dict[str, Any] = {"settings": settings, "head_share": share, "parts": []}
    print(
        f"Qwen3-MoE, {options.layers} layers, D={options.dim}, V={options.vocab}: the"
        f" head is {share:.0%} of an SFT step's products"
    )
    wrong = False
    for lengths in options.lengths:
        part = run(options, lengths)
        report["parts"].append(part)
        print("\n" + table(report, part), flush=True)
        wrong |= (
            max(part["largest_loss_difference"].values(), default=0.0)
            > LARGEST_DIFFERENCE[options.dtype]
        )
    if importlib.util.find_spec("trl") is None:
        print("gkd: not installed (trl)")
    if wrong:
        print("the losses disagree: the trainers did not do the same", file=sys.stderr)
    if options.json:
        options.json.write_text(json.dumps(report, indent=2, default=str) + "\n")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
