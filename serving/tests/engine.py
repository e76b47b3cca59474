"""What the tests of the engine share: its environment, prompts, and the comparison with fcsd's reference."""

import gc
import os
from pathlib import Path
from typing import Any

import numpy as np

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # engine and worker in this process
    "VLLM_NO_USAGE_STATS": "1",
}
os.environ.update(ENVIRONMENT)

NEW_TOKENS = 16
BOUND = 1e-5
"""Nats between two implementations in float32."""


def start_engine(folder: Path, **options: Any) -> Any:
    """Return an `LLM` of a tiny checkpoint in float32; `options` are its arguments."""
    from vllm import LLM

    family = folder.name.partition("-")[0]
    if family.startswith("deepseek"):
        options.setdefault("attention_backend", "CPU_MLA")  # the default one has no float32
    return LLM(
        str(folder),
        **{
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 512,
            "max_num_seqs": 8,
            "kv_cache_memory_bytes": 2**26,
            "disable_log_stats": True,
            **options,
        },
    )


def stop_engine(llm: Any) -> None:
    """Free what an engine in this process holds, so that another can start."""
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()
    cleanup_dist_env_and_memory()


def generate(llm: Any, folder: Path, **options: Any) -> list[Any]:
    """Return what the engine makes of the reference's prompts, 16 greedy tokens each, with the top five log-probs."""
    from vllm import SamplingParams

    reference = np.load(folder / "reference.npz")
    prompts = [{"prompt_token_ids": reference[f"prompt{k}"].tolist()} for k in range(4)]
    sampling = SamplingParams(
        temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=5, prompt_logprobs=5, detokenize=False
    )
    return llm.generate(prompts, sampling, use_tqdm=False, **options)


def compare(outputs: list[Any], folder: Path) -> tuple[int, float]:
    """Return how many prompts have all ids equal to the reference's, and the largest difference of a log-probability.

    A prompt's log-probabilities are compared where its ids are the reference's; those of the prompts always.
    """
    reference = np.load(folder / "reference.npz")
    equal, worst = 0, 0.0
    for k, output in enumerate(outputs):
        logprobs, ids = reference[f"logprobs{k}"], list(output.outputs[0].token_ids)
        same = ids == reference[f"ids{k}"].tolist()
        equal += same
        rows = [*output.prompt_logprobs, *(output.outputs[0].logprobs if same else ())]
        for position, row in enumerate(rows):
            for token, entry in (row or {}).items():
                worst = max(worst, abs(entry.logprob - float(logprobs[position - 1, token])))
    return equal, worst
