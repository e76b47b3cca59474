"""Start engines that run entirely in their own process, alone or as ranks; the
benchmark starts them so, too.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # engine and worker in this process
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}


def start_ranks(
    script: Path, *words: str, ranks: int = 2, **options: Any
) -> subprocess.Popen[str]:
    """Start a script on ranks, where engines take the executor `external_launcher`;
    `options` are Popen's.
    """
    number = ["--nproc-per-node", str(ranks)]
    command = [
        "-m", "torch.distributed.run", "--standalone", *number, str(script), *words,
    ]  # fmt: skip
    return subprocess.Popen(
        [sys.executable, *command],
        env={**ENVIRONMENT, **os.environ},
        text=True,
        **options,
    )
