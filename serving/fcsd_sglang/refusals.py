"""Features of SGLang that FarSkip layers do not support, refused before weights are
loaded. Standard library only.
"""

import json
from collections.abc import Callable
from typing import Any

from fcsd_sglang.families import Row
from fcsd_vllm.refusals import Refused

ARGUMENTS: list[str] = ["moe_a2a_backend", "speculative_algorithm"]
"""Server arguments that are checked."""


def _above_one(*names: str) -> Callable[[Any], bool]:
    ARGUMENTS.extend(names)
    return lambda arguments: any(
        (getattr(arguments, name, None) or 1) > 1 for name in names
    )


def _set(*names: str) -> Callable[[Any], bool]:
    ARGUMENTS.extend(names)
    return lambda arguments: any(getattr(arguments, name, None) for name in names)


def _exchanges(arguments: Any) -> bool:
    return getattr(arguments, "moe_a2a_backend", None) not in (None, "none")


def _drafts(arguments: Any) -> bool:
    algorithm = getattr(arguments, "speculative_algorithm", None)
    return algorithm is not None and algorithm.upper() != "NGRAM"


_RULES: tuple[tuple[Callable[[Any], bool], str], ...] = (
    (
        _above_one("attn_dp_size", "moe_dp_size", "dwdp_size"),
        (
            "data-parallel attention and experts exchange tokens where FarSkip sums"
            " them; start one server per replica"
        ),
    ),
    (
        _above_one("attn_cp_size", "dcp_size"),
        "context parallelism splits a layer's sums; leave it off",
    ),
    (
        _exchanges,
        "--moe-a2a-backend exchanges tokens in every MoE block; leave it at none",
    ),
    (
        _set("enable_two_batch_overlap", "enable_single_batch_overlap", "enable_pdmux"),
        (
            "two-batch overlap, single-batch overlap and PD multiplexing split the"
            " step that FarSkip overlaps; leave them off"
        ),
    ),
    (
        _set("enable_attn_tp_input_scattered", "enable_layernorm_sp"),
        (
            "FarSkip needs the whole residual stream on every rank; leave"
            " --enable-attn-tp-input-scattered and sequence parallelism off"
        ),
    ),
    (
        _set("enable_nvidia_megakernel", "enable_amd_monokernel"),
        (
            "mega- and monokernels replace the layers with the stock model; leave them"
            " off"
        ),
    ),
    (
        _set("enable_fused_moe_sum_all_reduce"),
        (
            "--enable-fused-moe-sum-all-reduce sums routed experts inside their"
            " kernel, which FarSkip cannot delay; leave it off"
        ),
    ),
    (
        _set("enable_torch_compile"),
        "--enable-torch-compile may move the end of an all-reduce to its start; leave"
        " it off",
    ),
    (
        _set("enable_lora", "lora_paths"),
        "LoRA gets its rows from layer_boundary, which FarSkip bypasses; merge the"
        " adapter into the weights",
    ),
    (
        _drafts,
        (
            "drafts by a model or by MTP layers are untested with FarSkip (EAGLE3 reads"
            " the stream between layers, where sums are in flight); use"
            " --speculative-algorithm NGRAM"
        ),
    ),
)


def check_arguments(arguments: Any, architecture: str) -> None:
    """Raise Refused for the first resolved server argument that FarSkip layers do not
    support.
    """
    for applies, sentence in _RULES:
        if applies(arguments):
            raise Refused(f"fcsd-serving: {architecture}: {sentence}")


def check_fields(config: Any, row: Row, architecture: str) -> None:
    """Raise Refused for the first config field whose value SGLang computes wrongly."""
    for name, value, sentence in row.requires:
        given = getattr(config, name, value)
        if given != value:
            raise Refused(
                f"fcsd-serving: {architecture}: config.json has {name}:"
                f" {json.dumps(given)}, but {sentence}; serve it without overlap, with"
                " --model-impl transformers"
            )
