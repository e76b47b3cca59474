"""Measure the time of a rewired model's forward pass as a ratio to the original's.

    python benchmarks/forward.py [--family qwen3_moe …] [--layers 4 --dim 512] \\
        [--rounds 60] [--limit 1.02]
    python benchmarks/forward.py --device cuda --dtype bfloat16 --layers 16 \\
        --tokens 4096 --config fcsd/model/inspect/configs/Qwen3-30B-A3B.json

The benchmark times forward passes without gradients of two models with the same
weights, on one device and without any communication: the cost of the rewiring itself.
It does not measure overlap.

    control    a second copy of the original, the noise of this run
    farskip    all layers rewired

    prefill    a batch of --tokens tokens
    decode     one token after a cache of at least --tokens tokens; launching operators dominates here on
               small models

The models share their weights in memory, so that the location of a copy plays no role.
They take turns in a random order, so that a busy machine affects all, and no model
always runs after the same other one. A ratio is the median over rounds of (time here /
time of the original in the same round), with its 95 % interval (from the order of the
rounds' ratios); the second ratio is that of the minima. On a CPU time is processor time
of this process. With --limit the exit status is 1 when a prefill ratio of farskip is
above the limit while the control is not.
"""

import argparse
import copy
import gc
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

VOCABULARY = 1024
"""Small, so that the head, which is the same in both models, does not dilute the
ratio.
"""


def tiny(family: str, layers: int, dim: int) -> Any:
    """Return a model of the family's tiny shape, widened to `dim`, with `layers`
    layers.
    """
    from tests.reference.tiny import TINY, tiny_model

    overrides = {
        name: value * dim // 32
        for name, value in TINY[family].items()
        if name
        in (
            "moe_intermediate_size",
            "shared_expert_intermediate_size",
            "shared_intermediate_size",
        )
    }
    return tiny_model(
        family,
        hidden_size=dim,
        num_hidden_layers=layers,
        intermediate_size=dim,
        vocab_size=VOCABULARY,
        max_position_embeddings=8192,
        **overrides,
    )


def published(config: Path, layers: int, device: str, dtype: str) -> Any:
    """Return the first `layers` layers of a published configuration with a small
    vocabulary, freshly initialised.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = json.loads(config.read_text())
    total = fields["num_hidden_layers"]
    fields = {
        k: v[:layers] if isinstance(v, list) and len(v) == total else v
        for k, v in fields.items()
    }
    fields |= {"num_hidden_layers": layers, "vocab_size": VOCABULARY}
    fields |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    for name in ("auto_map", "quantization_config"):
        fields.pop(name, None)
    shape = AutoConfig.for_model(fields.pop("model_type"), **fields)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(
            shape, dtype=getattr(torch, dtype)
        ).eval()


def build(family: str, options: argparse.Namespace) -> Any:
    """Return the original.

    Attention and MoE blocks end in zero matrices: the work is the same, and both models
    route every token alike. With other weights the loads of their experts would differ,
    and so would the time.
    """
    import torch

    if options.config:
        model = published(options.config, options.layers, options.device, options.dtype)
    else:
        model = tiny(family, options.layers, options.dim)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in ("o_proj", "down_proj", "output_linear")):
                parameter.zero_()
    return model.to(device=options.device, dtype=getattr(torch, options.dtype))


def twin(model: Any) -> Any:
    """Return a copy with the same parameters in memory."""
    return copy.deepcopy(
        model, {id(parameter): parameter for parameter in model.parameters()}
    )


def prefill(model: Any, ids: Any, repeats: int) -> Callable[[], None]:
    def run() -> None:
        for _ in range(repeats):
            model(ids, use_cache=False)

    return run


def decode(model: Any, ids: Any, repeats: int) -> Callable[[], None]:
    out = model(ids, use_cache=True)
    name = "cache" if "cache" in out else "past_key_values"  # before transformers 5.24
    cache = {name: out[name]}  # it grows, equally for all models

    def run() -> None:
        for _ in range(repeats):
            model(ids[:, -1:], use_cache=True, **cache)

    return run


def seconds(run: Callable[[], None], device: str) -> float:
    """Return the processor time on a CPU, or the wall time up to the last kernel on a
    GPU.
    """
    import torch

    if device == "cpu":
        started = time.process_time()
        run()
        return time.process_time() - started
    torch.cuda.synchronize()
    started = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def interleaved(
    runs: dict[str, Callable[[], None]], rounds: int, device: str
) -> dict[str, list[float]]:
    """Return the times of every run, one per round; the order is drawn anew in every
    round.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    for run in runs.values():
        run()
    order = random.Random(0)
    gc.collect()
    gc.disable()  # a collection would fall into one model's turn
    try:
        for _ in range(rounds):
            order.shuffle(names)
            for name in names:
                times[name].append(seconds(runs[name], device))
    finally:
        gc.enable()
    return times


def median_interval(values: list[float]) -> tuple[float, float]:
    """Return the 95 % interval of the median: the widest pair of order statistics
    x_(k+1), x_(n-k) whose ranks leave at most 2.5 % of Binomial(n, 1/2) on either side;
    the extremes where n is below 6.
    """
    ordered, n = sorted(values), len(values)
    k, tail = 0, 0.5**n
    while k < n // 2 and tail + math.comb(n, k + 1) * 0.5**n <= 0.025:
        k += 1
        tail += math.comb(n, k) * 0.5**n
    return ordered[k], ordered[n - 1 - k]


def measure(family: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return one row per phase and variant."""
    import torch

    from fcsd.model.connectivity import Connectivity, convert_model

    original = build(family, options)
    farskip = twin(original)
    convert_model(farskip, Connectivity("all"))
    models = {"original": original, "control": twin(original), "farskip": farskip}
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(
        3, VOCABULARY, (options.batch, options.tokens), generator=generator
    ).to(options.device)
    rows = []
    with torch.no_grad():
        if not torch.equal(original(ids).logits, farskip(ids).logits):
            raise AssertionError(
                f"{family}: the two models should compute the same here"
            )
        for phase, make, repeats in (
            ("prefill", prefill, 1),
            ("decode", decode, options.decode_steps),
        ):
            runs = {name: make(model, ids, repeats) for name, model in models.items()}
            times = interleaved(runs, options.rounds, options.device)
            base = times["original"]
            for name in ("control", "farskip"):
                ratios = [a / b for a, b in zip(times[name], base, strict=True)]
                rows.append(
                    {
                        "family": family,
                        "phase": phase,
                        "variant": name,
                        "original_ms": 1e3 * statistics.median(base) / repeats,
                        "median_ratio": statistics.median(ratios),
                        "interval": median_interval(ratios),
                        "minimum_ratio": min(times[name]) / min(base),
                    }
                )
    return rows


def main(arguments: list[str] | None = None) -> int:
    from fcsd.model.families import FAMILIES

    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        prog="benchmarks/forward.py",
    )
    parser.add_argument(
        "--family",
        metavar="FAMILY",
        nargs="+",
        choices=sorted(FAMILIES),
        default=["qwen3_moe", "deepseek_v2"],
    )
    parser.add_argument(
        "--config",
        type=Path,
        help=(
            "a published config.json: real widths in place of --family and --dim; the"
            " vocabulary is cut too"
        ),
    )
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument(
        "--dim", type=int, default=512, help="hidden size, a multiple of 32"
    )
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument(
        "--decode-steps", type=int, default=4, help="decoded tokens in one timing"
    )
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--limit", type=float, help="largest prefill ratio, 1.02 for two per cent"
    )
    parser.add_argument("--json", type=Path, help="write the rows here too")
    options = parser.parse_args(arguments)
    import torch

    if options.config:
        options.family = [json.loads(options.config.read_text()).get("model_type")]
        if options.family[0] not in FAMILIES or FAMILIES[options.family[0]].multimodal:
            parser.error(
                f"--config: {options.config}: no text family has model_type"
                f" '{options.family[0]}'"
            )
    torch.set_num_threads(options.threads)
    rows = [row for family in options.family for row in measure(family, options)]
    header = f"{'family':18} {'phase':8} {'variant':8}"
    print(
        f"{header} {'original ms':>12} {'median ratio':>13} {'95 % interval':>15}"
        f" {'ratio of minima':>16}"
    )
    for row in rows:
        interval = "{:.3f}–{:.3f}".format(*row["interval"])
        print(
            f"{row['family']:18} {row['phase']:8} {row['variant']:8}"
            f" {row['original_ms']:12.2f} {row['median_ratio']:13.3f} {interval:>15}"
            f" {row['minimum_ratio']:16.3f}"
        )
    if options.json:
        options.json.write_text(
            json.dumps(
                {"options": {**vars(options), "json": None}, "rows": rows},
                indent=2,
                default=str,
            )
        )
    if options.limit is None:
        return 0
    ratio = {
        (row["family"], row["variant"]): row["median_ratio"]
        for row in rows
        if row["phase"] == "prefill"
    }
    above = [
        family
        for family in options.family
        if ratio[family, "farskip"] > options.limit >= ratio[family, "control"]
    ]
    if above:
        print(
            f"above the limit of {options.limit}: {', '.join(above)}", file=sys.stderr
        )
    return 1 if above else 0


if __name__ == "__main__":
    raise SystemExit(main())
