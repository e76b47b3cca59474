"""Price text that a model writes: the student in a step (`fcsd.training.own_text`), and
the original once, as a source of data (`fcsd.pipeline.written`).

The prompts are read in one pass each batch; every further token of the batch takes a
pass that reads the weights of all experts which its tokens choose, and costs the host's
time for each layer.

Not covered: the original behind a server, whose time depends on its machine.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import torch

from fcsd.data.config import TrainingSourceConfig
from fcsd.model.families import text_config
from fcsd.model.inspect.memory import layer_cache_bytes
from fcsd.parallel.launch import fits_whole
from fcsd.planning.cost.job import Job, assumed_values, gather_s, roofline_of
from fcsd.planning.cost.memory import CONTEXT_BYTES, compute_dtype
from fcsd.planning.cost.operations import ModelWork, part_of
from fcsd.planning.cost.roofline import total
from fcsd.planning.cost.training import built

HOST_US = (400, 700, 1500)
"""Assumption: microseconds of the host for a layer of a pass in which transformers
writes one token; fast, expected and slow. Measured: the tests' qwen3_moe and qwen2_moe,
rewired, with 4 and 24 layers, on one core: 490 to 1,230.
"""

_TEXT_BYTES = 4  # of a token of English; SmolLM2's tokenizer: 4.4


@dataclass(frozen=True)
class TextOfStudent:
    """What a rank writes in a step: `texts` of `tokens` each, in `batches`, `passes`
    forward passes in all. seconds: at the fast ends of the assumptions, as expected,
    and at their slow ends.
    """

    texts: float
    tokens: int
    batches: int
    passes: int
    seconds: list[float]


def text_of_student(job: Job, free_bytes: int) -> TextOfStudent | None:
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
    seconds = _seconds(
        job,
        compute_dtype(job.setting),
        texts,
        batches,
        length - tokens,
        tokens,
        free_bytes,
    )
    return TextOfStudent(texts, tokens, batches, batches * tokens, seconds)


@dataclass(frozen=True)
class TextOfOriginal:
    """What the original writes once for a source, and the share of a rank: `batches`,
    `passes` forward passes in all. tokens: of a text, at most.

    num_bytes: of the file, which exists twice while its parts are joined. seconds: as in
    `TextOfStudent`; None where the original is behind a server.
    """

    source: str
    texts: int
    tokens: int
    batches: int
    passes: int
    num_bytes: int
    seconds: list[float] | None


def texts_of_original(
    job: Job, sources: Sequence[TrainingSourceConfig]
) -> Iterator[TextOfOriginal]:
    """Yield what the original writes for the sources of a training, each text as long
    as it may be.
    """
    dtype = job.training.saved_dtype
    # The original is alone in memory while it writes.
    shard = job.trace.num_parameters * dtype.itemsize // job.layout.num_shards
    free_bytes = job.machine.gpu.memory_bytes - CONTEXT_BYTES - shard
    family, config, _ = built(job.training)
    # A line of the file has each token as text, as a number and as a mask.
    digits = len(str(text_config(config, family).vocab_size))
    bytes_per_token = _TEXT_BYTES + digits + len(", ") + len("1, ")
    for index, source in enumerate(sources):
        if (written := source.written) is None:
            continue
        assert source.max_examples is not None
        texts, tokens = source.max_examples, written.max_new_tokens
        # Ranks share the batches that one process would make.
        all_batches = math.ceil(texts / written.batch_size)
        batches = math.ceil(all_batches / job.machine.num_gpus)
        seconds = None
        if written.server is None:
            seconds = _seconds(
                job,
                dtype,
                texts * batches / all_batches,
                batches,
                written.prompt_tokens,
                tokens,
                free_bytes,
            )
        yield TextOfOriginal(
            source=f"data.train.{index}",
            texts=texts,
            tokens=tokens,
            batches=batches,
            passes=batches * tokens,
            num_bytes=texts * (written.prompt_tokens + tokens) * bytes_per_token,
            seconds=seconds,
        )


def _seconds(
    job: Job,
    dtype: torch.dtype,
    texts: float,
    batches: int,
    prompt_tokens: int,
    tokens: int,
    free_bytes: int,
) -> list[float]:
    """Return the seconds of a rank that writes `texts` of so many tokens behind
    prompts of so many, in three cases; free_bytes: of a GPU beside its weights.
    """
    passes, size = batches * tokens, max(1, round(texts / batches))
    decoding = _decoding(job, size, prompt_tokens + tokens // 2)
    prompts = texts * prompt_tokens / job.tokens
    gathers = 0.0
    if job.layout.num_shards > 1:
        num_bytes = job.trace.num_parameters * dtype.itemsize
        once = fits_whole(num_bytes, free_bytes)
        gathers = gather_s(job) * (1 if once else passes)

    cases = []
    for values, host_us in zip(assumed_values(job.hardware.mfu), HOST_US, strict=True):
        roofline = roofline_of(job, dtype).assuming(values)
        token_s = sum(map(total, roofline.layers(decoding, 1))) + roofline.head(
            decoding
        )
        # The host launches kernels while the GPU computes: the longer of both counts.
        host = host_us / 1e6 * len(decoding.layers)
        read = prompts * sum(map(total, roofline.layers(job.work, 1)))
        cases.append(passes * max(token_s, host) + read + gathers)
    return cases


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
