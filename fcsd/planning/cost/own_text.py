"""Price the text that a student writes in a step (`fcsd.training.own_text`).

The prompts of the rows that it writes are read in one pass each batch; every further
token of the batch takes a pass that reads the weights of all experts which its tokens
choose, and costs the host's time for each layer.
"""

import math
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

from fcsd.model.families import text_config
from fcsd.model.inspect.memory import layer_cache_bytes
from fcsd.parallel.gathered import fits_whole
from fcsd.planning.cost.job import Job, assumed_values, gather_s, roofline_of
from fcsd.planning.cost.memory import compute_dtype
from fcsd.planning.cost.operations import ModelWork, part_of
from fcsd.planning.cost.roofline import total
from fcsd.planning.cost.training import built

HOST_US = (400, 700, 1500)
"""Assumption: microseconds of the host for a layer of a pass in which transformers
writes one token; fast, expected and slow. Measured: the tests' qwen3_moe and qwen2_moe,
rewired, with 4 and 24 layers, on one core: 490 to 1,230.
"""


@dataclass(frozen=True)
class Written:
    """What a rank writes in a step: `texts` of `tokens` each, in `batches`, `passes`
    forward passes in all. seconds: at the fast ends of the assumptions, as expected,
    and at their slow ends.
    """

    texts: float
    tokens: int
    batches: int
    passes: int
    seconds: list[float]


def written(job: Job, free_bytes: int) -> Written | None:
    """Return what a rank writes; None where the student does not write.

    One text for each row, of half a row unless `own_text_tokens` is less. free_bytes:
    of a GPU's memory between steps.
    """
    objective: Any = job.training.objective
    if objective.own_text is None:
        return None
    length = job.setting.num_tokens
    tokens = min(objective.own_text_tokens or length, length // 2 or 1)
    texts = objective.own_text * job.micro_batches * job.setting.num_rows
    batches = math.ceil(texts / objective.own_text_batch_size)
    passes = batches * tokens
    size = max(1, round(texts / batches))
    decoding = _decoding(job, size, length - tokens // 2)
    prompts = texts * (length - tokens) / job.tokens
    gathers = 0.0
    if job.layout.num_shards > 1:
        num_bytes = job.trace.num_parameters * compute_dtype(job.setting).itemsize
        once = fits_whole(num_bytes, free_bytes)
        gathers = gather_s(job) * (1 if once else passes)

    cases = []
    for values, host_us in zip(assumed_values(job.hardware.mfu), HOST_US, strict=True):
        roofline = roofline_of(job, compute_dtype(job.setting)).assuming(values)
        one = sum(map(total, roofline.layers(decoding, 1))) + roofline.head(decoding)
        # The host launches kernels while the GPU computes: the longer of both counts.
        host = host_us / 1e6 * len(decoding.layers)
        read = prompts * sum(map(total, roofline.layers(job.work, 1)))
        cases.append(passes * max(one, host) + read + gathers)
    return Written(texts, tokens, batches, passes, cases)


def _decoding(job: Job, size: int, context: int) -> ModelWork:
    """Return the work of one token for each of `size` texts that follows `context`
    others and reads their keys and values.
    """
    family, config, _ = built(job.training)
    cached = layer_cache_bytes(text_config(config, family), context) or []
    work = part_of(job.work, size)
    layers = (
        replace(layer, cache_bytes=float(size * (num_bytes or 0)))
        for layer, num_bytes in zip_longest(work.layers, cached[: len(work.layers)])
    )
    return replace(work, layers=tuple(layers))
