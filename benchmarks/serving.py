"""Measure how much of its collectives a FarSkip model hides in vLLM, and how much time
that saves: two ranks on a CPU, an emulated network.

    .serving/bin/python benchmarks/serving.py [--rounds N] [--data-parallel] [--real-time]      `make bench-serving`

Two ranks run a model of 8 layers with random weights (tensor and expert parallel or,
with --data-parallel, each with its own prompts and half of the experts). Their
collectives take turns in a thread that waits as a network of 2 ms and 0.5 GB/s would.
One engine runs both ways, in alternating steps: overlapped, and with each collective
waited for where it starts. Hidden is the part of the collectives' time in which the
computing thread did not wait for them; other waits are for the other rank, and for
threads to run.

Unlike the model, the network takes the same time whatever else the machine does: beside
other work, --real-time gives the ranks' threads priority over it (Linux, root).

An emulation shows that the order lets collectives run beside computation; it says
nothing about a real network.
"""

import argparse
import json
import os
import random
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "serving/tests"))
from launch import start_ranks

NETWORK = {"comm": "timed", "latency_ms": 2.0, "bandwidth_gb_per_s": 0.5}
WORK = {"prefill": (4, 32, 1), "decode": (4, 16, 16)}
"""Setting -> prompts, tokens of a prompt, tokens to generate."""
CONFIG: dict[str, Any] = {
    "architectures": ["FarSkipQwen3MoeForCausalLM"],
    "model_type": "farskip_qwen3_moe",
    "farskip": {
        "version": 1,
        "layers": list(range(8)),
        "attention": "partial",
        "mlp": "outdated",
    },
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "moe_intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}


# With a shared expert, as models that are served in this way have: a dispatch runs
# beside attention from its kernel on, a combine beside the shared expert and attention
# up to its kernel.
DATA_PARALLEL_CONFIG: dict[str, Any] = {
    **CONFIG,
    "architectures": ["FarSkipQwen2MoeForCausalLM"],
    "model_type": "farskip_qwen2_moe",
    "num_key_value_heads": 16,
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 512,
}


def start_engine(folder: str, compiled: bool, data_parallel: bool) -> Any:
    """Return an engine of two ranks with invented weights."""
    from vllm import LLM

    return LLM(
        folder,
        additional_config={"fcsd": NETWORK},
        distributed_executor_backend="external_launcher",
        dtype="bfloat16",
        enable_expert_parallel=True,
        enable_prefix_caching=False,
        enforce_eager=not compiled,
        kv_cache_memory_bytes=2**28,
        load_format="dummy",
        max_model_len=2048,
        max_num_batched_tokens=4096,
        max_num_seqs=16,
        seed=0,
        skip_tokenizer_init=True,
        **{"data_parallel_size" if data_parallel else "tensor_parallel_size": 2},
    )


def measure(llm: Any, work: tuple[int, int, int], rounds: int) -> dict[str, Any]:
    """Return the milliseconds per run of both ways, and the hidden part of the
    overlapped one's collectives.
    """
    from vllm import SamplingParams

    from fcsd_vllm.communication import Times

    communication = llm.apply_model(lambda model: model.farskip_communication)[0]
    communication = getattr(communication, "timed", communication)
    overlapped = communication.settings
    ways = {
        "overlapped": overlapped,
        "blocking": replace(overlapped, min_overlap_bytes=2**62),
    }
    prompts, tokens, new_tokens = work
    sampling = SamplingParams(
        temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False
    )
    draw = random.Random(0)
    took: dict[str, list[float]] = {name: [] for name in ways}
    times = {name: Times() for name in ways}
    for each in range(rounds + 1):  # the first warms up
        for name, settings in ways.items():
            communication.settings, communication.times = (
                settings,
                Times() if each == 0 else times[name],
            )
            rows = [
                {"prompt_token_ids": [draw.randrange(2, 500) for _ in range(tokens)]}
                for _ in range(prompts)
            ]
            begun = time.perf_counter()
            llm.generate(rows, sampling, use_tqdm=False)
            if each:
                took[name].append(1e3 * (time.perf_counter() - begun))
    communication.settings = overlapped
    return {
        name: {
            "median_ms": median(took[name]),
            "runs_ms": took[name],
            **asdict(times[name]),
        }
        for name in ways
    }


def run_first() -> None:
    """Give this process priority over all others, and in it, what a collective needs
    priority over computation.
    """
    for thread in map(int, os.listdir("/proc/self/task")):
        priority = 10 if thread == os.getpid() else 20
        os.sched_setscheduler(thread, os.SCHED_FIFO, os.sched_param(priority))


def run_rank(folder: str, compiled: bool, given: argparse.Namespace) -> None:
    """Measure on this rank, and write the results beside the config."""
    llm = start_engine(folder, compiled, given.data_parallel)
    if given.real_time:
        run_first()
    results = {name: measure(llm, work, given.rounds) for name, work in WORK.items()}
    Path(folder, f"results-{int(compiled)}-{os.environ['RANK']}.json").write_text(
        json.dumps(results)
    )


def launch(folder: str, compiled: bool, rounds: int) -> dict[str, Any]:
    """Run both ranks; return the milliseconds of rank 0, and what was hidden on both."""
    words = ["--rank-of", folder, *sys.argv[1:], *(["--compiled"] if compiled else [])]
    if start_ranks(Path(__file__), *words).wait() != 0:
        sys.exit("a rank failed")
    ranks = [
        json.loads(Path(folder, f"results-{int(compiled)}-{rank}.json").read_text())
        for rank in range(2)
    ]
    for name in WORK:
        for way, measured in ranks[0][name].items():
            total, exposed, behind = (
                sum(rank[name][way][figure] for rank in ranks)
                for figure in ("total_s", "exposed_s", "behind_s")
            )
            measured |= {
                "hidden": max(0.0, 1 - exposed / total),
                "collective_ms": 1e3 * total / (2 * measured["collectives"]),
                "behind_ms": 1e3 * behind / (2 * rounds),
            }
    return ranks[0]


def main() -> None:
    """Print a table: way, median, ratio to blocking, hidden."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument(
        "--real-time",
        action="store_true",
        help="before other work on this machine; needs root",
    )
    parser.add_argument(
        "--data-parallel",
        action="store_true",
        help="whole attention on each rank, experts over the ranks",
    )
    parser.add_argument("--compiled", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank_of:
        run_rank(given.rank_of, given.compiled, given)
        return
    with tempfile.TemporaryDirectory() as folder:
        config = DATA_PARALLEL_CONFIG if given.data_parallel else CONFIG
        Path(folder, "config.json").write_text(json.dumps(config))
        print(
            "| work | model | blocking ms | overlapped ms | ratio | collectives | ms"
            " each | hidden | other waits ms |"
        )
        print("|---|---|---|---|---|---|---|---|---|")
        for compiled in (False, True):
            for work, ways in launch(folder, compiled, given.rounds).items():
                blocking, overlapped = ways["blocking"], ways["overlapped"]
                print(
                    f"| {work} | {'compiled' if compiled else 'eager'} |"
                    f" {blocking['median_ms']:.0f} | {overlapped['median_ms']:.0f} |"
                    f" {overlapped['median_ms'] / blocking['median_ms']:.2f} |"
                    f" {overlapped['collectives'] // given.rounds} |"
                    f" {overlapped['collective_ms']:.1f} | {overlapped['hidden']:.1%} |"
                    f" {overlapped['behind_ms']:.0f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
