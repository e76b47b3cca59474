"""Measure time and peak memory of head and loss, ours and those of peers, as ratios to
full logits.

    python benchmarks/loss.py [--json OUT] [--tokens 2048 --dim 512 --vocab 32000]
    [--frozen-head] …

The benchmark computes forward KL(teacher || student) from (N, D) hidden states and (V,
D) heads of both, forward and backward, with gradients for the student's hidden states
and head.

    naive      full logits of both models, log_softmax, kl_div
    naive float32  with bfloat16 inputs: the same of widened inputs. The gradient of `naive` is then wrong by a tenth
               and more (see the errors), so compare an exact loss with this
    trl        TRL's chunked divergence with its own tile sizes, and with tiles of 256 tokens x 8192 entries
    liger      Liger's fused linear JSD loss at beta = 0, not compiled, with its own chunk, and with 256 tokens
    fcsd       `fused_linear_loss` with its own chunk, and with 256 tokens; `stats`: with the tokens'
               statistics, as in training

Each variant runs in its own process; all of them stay alive and take turns, so that a
busy machine affects all. A ratio is the median over rounds of (time here / time of
naive in the same round). On a CPU, time is processor time, and memory is the peak of
resident memory over that before, both gradients included; the memory of the first call
counts. Losses and gradients are compared with a float64 reference before anything is
printed. TRL's Triton kernel is for GPUs: on a CPU its PyTorch fallback is measured.
"""

import argparse
import importlib.util
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [
    str(Path(__file__).resolve().parents[1]),
    str(Path(__file__).resolve().parent),
]

from turns import load_average, reset_peak, resident, take_turns  # noqa: E402

NAIVE = "naive"
TIME, MEMORY = 0.85, 0.12
"""Targets for fcsd against naive; it must also not be slower than the fastest peer."""
LARGEST_ERROR = {"float32": 1e-3, "bfloat16": 2e-2}


# ---- variants: (hidden, weight, teacher_hidden, teacher_weight) -> loss sum


def naive(h: Any, w: Any, th: Any, tw: Any) -> Any:
    import torch
    import torch.nn.functional as F

    with torch.no_grad():
        teacher = F.log_softmax(th @ tw.T, -1)
    return F.kl_div(
        F.log_softmax(h @ w.T, -1), teacher, reduction="sum", log_target=True
    )


def widened(h: Any, w: Any, th: Any, tw: Any) -> Any:
    return naive(*(x.float() for x in (h, w, th, tw)))


def trl(
    h: Any,
    w: Any,
    th: Any,
    tw: Any,
    *,
    tokens: int | None = None,
    vocab: int | None = None,
) -> Any:
    import torch
    import trl.kernels.chunked_divergence as kernel
    from trl.trainer.distillation_trainer import _chunked_divergence_loss

    kernel.TOKEN_CHUNK_SIZE = tokens or kernel.TOKEN_CHUNK_SIZE
    kernel.VOCAB_CHUNK_SIZE = vocab or kernel.VOCAB_CHUNK_SIZE
    mask = torch.ones(1, len(h), dtype=torch.long, device=h.device)
    return _chunked_divergence_loss(
        h[None], th[None], w, tw, mask, beta=0.0, num_items_in_batch=1
    )[0]


def liger(h: Any, w: Any, th: Any, tw: Any, *, tokens: int = 1024) -> Any:
    import torch
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

    loss = LigerFusedLinearJSDLoss(
        weight_hard_loss=0.0,
        weight_soft_loss=1.0,
        beta=0.0,
        compiled=False,
        chunk_size=tokens,
    )
    return loss(
        h, w, th, tw, torch.zeros(len(h), dtype=torch.long, device=h.device)
    ) * len(h)


def fcsd(
    h: Any, w: Any, th: Any, tw: Any, *, tokens: int | None = None, statistics: int = 0
) -> Any:
    from fcsd.training.losses.fused import Head, fused_linear_loss
    from fcsd.training.losses.objectives import KLObjectiveConfig

    # three float32 tiles
    chunk_bytes = None if tokens is None else tokens * len(w) * 3 * 4
    student, teacher = Head(h, w), Head(th, tw)
    options: dict[str, Any] = {
        "statistics": bool(statistics),
        "chunk_bytes": chunk_bytes,
    }
    return fused_linear_loss(student, teacher, KLObjectiveConfig(), **options)[0]


VARIANTS: dict[str, tuple[str, Callable[..., Any], dict[str, int]]] = {
    NAIVE: ("torch", naive, {}),
    "naive float32": ("torch", widened, {}),
    "trl": ("trl", trl, {}),
    "trl 256 x 8192": ("trl", trl, {"tokens": 256, "vocab": 8192}),
    "liger": ("liger_kernel", liger, {}),
    "liger 256": ("liger_kernel", liger, {"tokens": 256}),
    "fcsd": ("torch", fcsd, {}),
    "fcsd 256": ("torch", fcsd, {"tokens": 256}),
    "fcsd stats": ("torch", fcsd, {"statistics": 1}),
}


# ---- one variant, in its own process


def make_inputs(options: argparse.Namespace, tokens: int, vocab: int) -> list[Any]:
    """Make a student near its teacher: logits with standard deviation 3, a KL of a few
    hundredths of a nat per token.
    """
    import torch

    generator = torch.Generator().manual_seed(0)
    scale = 3.0 / options.dim**0.5

    def normal(*shape: int) -> Any:
        return torch.randn(*shape, generator=generator)

    tw = normal(vocab, options.dim) * scale
    w = tw + 0.02 * scale * normal(vocab, options.dim)
    th = normal(tokens, options.dim)
    h = th + 0.1 * normal(tokens, options.dim)
    dtype = getattr(torch, options.dtype)
    h, w, th, tw = (x.to(options.device, dtype) for x in (h, w, th, tw))
    return [h.requires_grad_(), w.requires_grad_(not options.frozen_head), th, tw]


def reference(inputs: list[Any]) -> list[Any]:
    """Return [loss, dL/dh, dL/dw] by autograd in float64, 64 tokens at a time."""
    import torch
    import torch.nn.functional as F

    h, w, th, tw = (x.detach().double() for x in inputs)
    h.requires_grad_(), w.requires_grad_()
    loss = 0.0
    for i in range(0, len(h), 64):
        s, t = (
            (h[i : i + 64] @ w.T).log_softmax(-1),
            (th[i : i + 64] @ tw.T).log_softmax(-1),
        )
        part = F.kl_div(s, t, log_target=True, reduction="sum")
        part.backward()
        loss += part.item()
    return [torch.tensor(loss), h.grad.float().cpu(), w.grad.float().cpu()]


def measure(run: Callable[[], Any], device: str) -> tuple[Any, float, int]:
    """Return (loss, seconds, peak bytes) of one forward and backward pass."""
    import torch

    cuda = device.startswith("cuda")
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    else:
        reset_peak()
        before = resident("VmRSS")
    clock = time.perf_counter if cuda else time.process_time
    begin = clock()
    loss = run()
    loss.backward()
    if cuda:
        torch.cuda.synchronize()
    seconds = clock() - begin
    return (
        loss,
        seconds,
        (torch.cuda.max_memory_allocated() if cuda else resident("VmHWM")) - before,
    )


def worker(options: argparse.Namespace) -> None:
    """Answer each line on stdin with one measurement as JSON; the first answer also has
    the errors.
    """
    import torch

    # the output of libraries is not an answer
    answers, sys.stdout = sys.stdout, sys.stderr
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    _, function, arguments = VARIANTS[options.worker]
    warm_up = make_inputs(options, 8, 128)
    function(*warm_up, **arguments).backward()
    inputs = make_inputs(options, options.tokens, options.vocab)
    if options.worker == NAIVE:
        torch.save(reference(inputs), options.reference)
    errors = None
    for _ in sys.stdin:
        for x in inputs[:2]:
            x.grad = None
        loss, seconds, peak = measure(
            lambda: function(*inputs, **arguments), options.device
        )
        if errors is None:
            computed = [
                loss.detach().cpu(),
                *(None if x.grad is None else x.grad.cpu() for x in inputs[:2]),
            ]
            exact = torch.load(options.reference)
            errors = [
                (
                    None
                    if f is None
                    else ((f.double() - e.double()).norm() / e.double().norm()).item()
                )
                for f, e in zip(computed, exact, strict=True)
            ]
            del computed, exact
        print(
            json.dumps({"seconds": seconds, "peak_bytes": peak, "errors": errors}),
            file=answers,
            flush=True,
        )
        del loss


# ---- all of them


def run(options: argparse.Namespace) -> dict[str, Any]:
    absent = {
        n: m for n, (m, *_) in VARIANTS.items() if importlib.util.find_spec(m) is None
    }
    names = [name for name in VARIANTS if name not in absent]
    if options.dtype == "float32":
        names.remove("naive float32")
    loads = [load_average()]
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["--reference", f"{folder}/reference.pt", *sys.argv[1:]]
        measured = take_turns(names, options.rounds, __file__, arguments)
    loads.append(load_average())
    results = {}
    for name in names:
        times = [m["seconds"] for m in measured[name][1:]]
        base = [m["seconds"] for m in measured[NAIVE][1:]]
        peak, base_peak = (measured[n][0]["peak_bytes"] for n in (name, NAIVE))
        results[name] = {
            "time_ratio": statistics.median(
                t / b for t, b in zip(times, base, strict=True)
            ),
            "peak_ratio": peak / base_peak,
            "seconds": times,
            "peak_bytes": peak,
            "errors": dict(
                zip(
                    ("loss", "hidden", "weight"),
                    measured[name][0]["errors"],
                    strict=True,
                )
            ),
        }
    settings = {
        k: v
        for k, v in vars(options).items()
        if k not in ("json", "worker", "reference")
    }
    return {
        "settings": settings,
        "not_installed": absent,
        "load": loads,
        "results": results,
    }


def targets(report: dict[str, Any]) -> list[str]:
    """Yield the targets for fcsd with its statistics, as in training; with bfloat16
    also against the exact naive loss.
    """
    results = report["results"]
    ours = results["fcsd stats"]
    peers = {
        name: r for name, r in results.items() if name.startswith(("trl", "liger"))
    }
    fastest = min(peers, key=lambda name: peers[name]["time_ratio"], default=None)
    rows = [
        ("time / naive", ours["time_ratio"], TIME),
        ("memory / naive", ours["peak_ratio"], MEMORY),
    ]
    if exact := results.get("naive float32"):
        rows.append(
            ("time / naive float32", ours["time_ratio"] / exact["time_ratio"], TIME)
        )
        rows.append(
            ("memory / naive float32", ours["peak_ratio"] / exact["peak_ratio"], MEMORY)
        )
    if fastest is not None:
        rows.append(
            (
                f"time / {fastest}",
                ours["time_ratio"] / peers[fastest]["time_ratio"],
                1.0,
            )
        )
    return [
        f"fcsd stats, {what:24} {value:.2f}   target at most {limit:.2f}:"
        f" {'met' if value <= limit else 'MISSED'}"
        for what, value, limit in rows
    ]


def table(report: dict[str, Any]) -> str:
    s = report["settings"]
    lines = [
        (
            f"forward KL, N={s['tokens']} D={s['dim']} V={s['vocab']} {s['dtype']}"
            f" {s['device']}{', frozen head' if s['frozen_head'] else ''}; ratios to"
            f" naive, errors relative to float64; load {report['load'][0]:.1f} to"
            f" {report['load'][1]:.1f}"
        ),
        "",
        (
            f"{'variant':16} {'time':>6} {'peak memory':>12} {'loss err':>10}"
            f" {'dH err':>10} {'dW err':>10}"
        ),
    ]
    for name, r in report["results"].items():
        errors = " ".join(
            f"{'-' if e is None else format(e, '.1e'):>10}"
            for e in r["errors"].values()
        )
        lines.append(
            f"{name:16} {r['time_ratio']:6.2f} {r['peak_ratio']:12.2f} {errors}"
        )
    base = report["results"][NAIVE]
    lines += ["", *targets(report)]
    lines += [
        "",
        f"naive: {min(base['seconds']):.2f} s, {base['peak_bytes'] / 2**20:.0f} MiB",
    ]
    lines += [
        f"{name}: not installed ({module})"
        for name, module in report["not_installed"].items()
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--dtype", choices=LARGEST_ERROR, default="float32")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument(
        "--frozen-head", action="store_true", help="no gradient for the student's head"
    )
    parser.add_argument(
        "--rounds", type=int, default=3, help="timed rounds, after one for memory"
    )
    parser.add_argument("--json", type=Path, help="write all measurements here")
    parser.add_argument("--worker", choices=VARIANTS, help=argparse.SUPPRESS)
    parser.add_argument("--reference", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options)
        return 0
    report = run(options)
    wrong = {
        name: result["errors"]
        for name, result in report["results"].items()
        if not all(
            e is None or e < LARGEST_ERROR[options.dtype]
            for e in result["errors"].values()
        )
    }
    print(table(report))
    for name, errors in wrong.items():
        print(f"{name}: disagrees with the float64 reference: {errors}")
    if options.json:
        options.json.write_text(json.dumps(report, indent=2, default=str) + "\n")
    return 1 if any(name.startswith("fcsd") for name in wrong) else 0


if __name__ == "__main__":
    sys.exit(main())
