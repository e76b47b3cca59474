"""Features of vLLM that FarSkip layers do not support, refused before weights are
loaded. Standard library only.
"""

import json
from collections.abc import Callable
from typing import Any

from fcsd_vllm.families import Family
from fcsd_vllm.settings import read_settings


class Refused(ValueError):
    """FarSkip layers do not support a feature of the engine; the message is one
    line.
    """


MONOLITHIC = (
    "routes and computes in one call, so its exchange cannot be split; choose another"
    " --moe-backend"
)
SPLITTABLE = ("allgather_reducescatter", "deepep_high_throughput", "deepep_low_latency")
"""Backends (`--all2all-backend`) that start and end an exchange in separate calls."""
SPLIT = (
    f"use --all2all-backend {', '.join(SPLITTABLE)}, the last two with comm: stream; or"
    " comm: blocking"
)


def _parallel(name: str) -> Callable[[Any, Family], bool]:
    return lambda config, family: bool(getattr(config.parallel_config, name, False))


def _above_one(name: str) -> Callable[[Any, Family], bool]:
    return lambda config, family: getattr(config.parallel_config, name, 1) > 1


def _float16(config: Any, family: Family) -> bool:
    return family.fp16_rescales and str(config.model_config.dtype) == "torch.float16"


def _method(*names: str) -> Callable[[Any, Family], bool]:
    return lambda config, family: (
        getattr(config.speculative_config, "method", None) in names
    )


def _data_parallel(applies: Callable[[Any], bool]) -> Callable[[Any, Family], bool]:
    return lambda config, family: (
        config.parallel_config.data_parallel_size > 1 and applies(config)
    )


def _unsplit(config: Any) -> bool:
    comm = read_settings(config.additional_config).comm
    back_end = config.parallel_config.all2all_backend
    if comm in ("c10d", "timed"):
        return bool(back_end != SPLITTABLE[0])
    return comm != "blocking" and back_end not in SPLITTABLE


_RULES: tuple[tuple[Callable[[Any, Family], bool], str], ...] = (
    (
        _parallel("use_ubatching"),
        (
            "dual batch overlap (--enable-dbo, --ubatch-size) splits the step that"
            " FarSkip layers overlap; leave it off"
        ),
    ),
    # It would take a reduce-scatter of attention over the tensor-parallel ranks, an
    # exchange between all ranks with each one's share of the tokens, and a gather of
    # the routed outputs before the next MoE block, each with a start and an end of its
    # own, where vLLM has one call (`MoERunner`, `use_sequence_parallel_moe`). Asked for
    # or changed in vllm-project/vllm 46635, 47006, 48763.
    (
        _data_parallel(lambda config: config.parallel_config.tensor_parallel_size > 1),
        (
            "with data parallelism, tensor parallelism scatters the stream over ranks"
            " or adds sums beside the exchange; use --tensor-parallel-size 1, or"
            " --data-parallel-size 1 and start one server per replica"
        ),
    ),
    (
        _data_parallel(
            lambda config: config.parallel_config.pipeline_parallel_size > 1
        ),
        (
            "data parallelism with pipeline stages is untested; use"
            " --pipeline-parallel-size 1"
        ),
    ),
    (
        _data_parallel(_unsplit),
        (
            "the start and the end of this exchange of data-parallel ranks cannot be"
            f" separated; {SPLIT}"
        ),
    ),
    (
        _data_parallel(lambda config: config.lora_config is not None),
        (
            "with data parallelism, FarSkip's exchange does not send LoRA adapters"
            " along with the tokens; merge them into the weights"
        ),
    ),
    (
        # vLLM 0.32 has it only on GPUs: on CPUs expert ids are not mapped to the
        # experts' places.
        _data_parallel(
            lambda config: getattr(config.parallel_config, "enable_eplb", False)
        ),
        (
            "with data parallelism, the load balancer (--enable-eplb) moves experts"
            " between ranks in a separate thread and communicators, which is untested"
            " beside FarSkip's exchange; leave it off"
        ),
    ),
    (
        _above_one("prefill_context_parallel_size"),
        "context-parallel prefill splits a layer's sums; leave it off",
    ),
    (
        _above_one("decode_context_parallel_size"),
        (
            "context-parallel decoding (--decode-context-parallel-size) exchanges"
            " queries and sums within attention, while FarSkip has sums in flight;"
            " leave it off"
        ),
    ),
    (
        _parallel("enable_elastic_ep"),
        (
            "elastic expert parallelism (--enable-elastic-ep) changes a running"
            " server's process groups; leave it off"
        ),
    ),
    (
        _method("eagle3", "dflash", "dspark", "extract_hidden_states"),
        (
            "this speculation reads the stream between layers, where FarSkip has sums"
            " in flight; use n-gram speculation"
        ),
    ),
    (
        _float16,
        "vLLM rescales this family's residual stream in float16; use --dtype bfloat16",
    ),
)


def check_engine(vllm_config: Any, family: Family) -> None:
    """Raise Refused for the first feature in an engine's config that FarSkip layers do not have."""
    for applies, sentence in _RULES:
        if applies(vllm_config, family):
            raise Refused(f"fcsd-serving: {family.architecture}: {sentence}")
    for name, value, sentence in family.requires:
        given = getattr(vllm_config.model_config.hf_text_config, name, value)
        if given != value:
            raise Refused(
                f"fcsd-serving: {family.architecture}: config.json has {name}:"
                f" {json.dumps(given)}, but {sentence}; serve it with"
                " --trust-remote-code and without the plugin (VLLM_PLUGINS=none)"
            )
