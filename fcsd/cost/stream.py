"""Estimate whether a stream's rows are tokenized as fast as the GPUs take them.

Only the first rank reads a stream; worker processes on its machine tokenize it (`fcsd.data.workers`).

Not covered: how fast the Hub or a disk gives the rows; decontamination.
"""

import math
from typing import Any

from fcsd.data.workers import MOST_WORKERS

# benchmarks/stream.py, docs/LOG.md of 2026-11-22: 13,031 rows of 4096 tokens, read, tokenized and packed in one
# process, took 70.0 s of processor time; the process that trains takes 92 microseconds for a thousand tokens of its
# workers.
WORKER_TOKENS_S = 13_031 * 4096 / 70.0
HANDED_OVER_TOKENS_S = 1000 / 92e-6


def stream_rate(step_tokens: int, step_s: tuple[float, float]) -> dict[str, Any]:
    """Compare tokenizing with as many workers as a run starts at most with the GPUs at their fastest and slowest.

    Args:
        step_tokens: tokens of an optimiser step. step_s: its seconds, best and worst.

    Returns: tokens per second of one worker, of all, and of the GPUs (slowest, fastest); the workers that the fastest
        need, None where none are enough; whether the most workers keep up; the least seconds of a step.
    """
    fastest = step_tokens / step_s[0]
    most = min(MOST_WORKERS * WORKER_TOKENS_S, HANDED_OVER_TOKENS_S)
    return {
        "worker_tokens_per_second": WORKER_TOKENS_S,
        "workers_at_most": MOST_WORKERS,
        "tokens_per_second": most,
        "gpu_tokens_per_second": [step_tokens / step_s[1], fastest],
        "workers_needed": math.ceil(fastest / WORKER_TOKENS_S) if fastest <= HANDED_OVER_TOKENS_S else None,
        "keeps_up": fastest <= most,
        "least_step_s": step_tokens / most,
    }
