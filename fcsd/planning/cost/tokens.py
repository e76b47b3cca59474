"""Estimate what tokenizing the data of a recipe takes, once before its trainings.

Not covered: how fast the Hub or a disk gives the examples; decontamination.
"""

from typing import Any

from fcsd.data.workers import MOST_WORKERS

# benchmarks/tokens.py, docs/decisions.md of 2026-11-23: 13,031 rows of 4096 tokens, read, tokenized and packed in one
# process, took 70.0 s of processor time.
WORKER_TOKENS_S = 13_031 * 4096 / 70.0
TOKEN_BYTES = 5  # its id, and whether it is to be predicted


def tokenizing(num_tokens: int) -> dict[str, Any]:
    """Return tokens, bytes on disk, and seconds with as many processes as work at most and with one."""
    seconds = num_tokens / WORKER_TOKENS_S
    return {
        "num_tokens": num_tokens,
        "bytes": num_tokens * TOKEN_BYTES,
        "processes": MOST_WORKERS,
        "seconds": [seconds / MOST_WORKERS, seconds],
    }
