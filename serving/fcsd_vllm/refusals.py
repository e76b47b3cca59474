"""What of vLLM cannot be had with FarSkip layers, told before weights are loaded. Standard library only."""

from collections.abc import Callable
from typing import Any

from fcsd_vllm.families import Family


class Refused(ValueError):
    """A feature of the engine that FarSkip layers do not have; the message is one line."""


def _parallel(name: str) -> Callable[[Any, Family], bool]:
    return lambda config, family: bool(getattr(config.parallel_config, name, False))


def _above_one(name: str) -> Callable[[Any, Family], bool]:
    return lambda config, family: getattr(config.parallel_config, name, 1) > 1


def _float16(config: Any, family: Family) -> bool:
    return family.fp16_rescales and str(config.model_config.dtype) == "torch.float16"


def _method(*names: str) -> Callable[[Any, Family], bool]:
    return lambda config, family: getattr(config.speculative_config, "method", None) in names


# Sequence-parallel MoE needs data parallelism above one too; the more general sentence comes last.
_RULES: tuple[tuple[Callable[[Any, Family], bool], str], ...] = (
    (
        _parallel("use_ubatching"),
        "dual batch overlap (--enable-dbo, --ubatch-size) splits the step that FarSkip layers overlap; leave it off",
    ),
    (
        _parallel("use_sequence_parallel_moe"),
        "sequence-parallel MoE (expert parallel with data parallel) scatters the stream over the ranks; use"
        " --data-parallel-size 1",
    ),
    (
        _above_one("data_parallel_size"),
        "data parallelism exchanges tokens between its ranks in every MoE block; use --data-parallel-size 1 and start"
        " one server a replica",
    ),
    (
        _above_one("prefill_context_parallel_size"),
        "context-parallel prefill splits the sums of a layer; leave it off",
    ),
    (
        _above_one("decode_context_parallel_size"),
        "context-parallel decoding (--decode-context-parallel-size) moves queries and sums between the ranks within"
        " attention, beside the sums in flight; leave it off",
    ),
    (
        _parallel("enable_elastic_ep"),
        "elastic expert parallelism (--enable-elastic-ep) changes the groups of ranks of a running server; leave it"
        " off",
    ),
    (
        _method("eagle3", "dflash", "dspark", "extract_hidden_states"),
        "this speculation reads the stream between layers, where FarSkip has sums in flight; use n-gram speculation",
    ),
    (_float16, "vLLM rescales the stream of this family in float16; use --dtype bfloat16"),
)


def check_engine(vllm_config: Any, family: Family) -> None:
    """Raise Refused for the first feature in an engine's config that FarSkip layers do not have."""
    for applies, sentence in _RULES:
        if applies(vllm_config, family):
            raise Refused(f"fcsd-serving: {family.architecture}: {sentence}")
