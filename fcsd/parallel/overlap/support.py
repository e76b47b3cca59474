"""Fit transformers' plans to overlap, and check that its interfaces are the known ones."""

import dataclasses
import inspect
from typing import Any

from transformers.distributed.expert_parallel import EPImplementation
from transformers.modeling_utils import AttentionInterface

from fcsd.base.errors import UserError
from fcsd.model.families.family import Family
from fcsd.parallel.overlap.experts import IMPLEMENTATION


def with_plan(distributed_config: Any, family: Family | None) -> Any:
    """Return a `DistributedConfig` with a plan for the experts of a family, where
    transformers has none.
    """
    if (
        family is None
        or family.scaled_experts is None
        or distributed_config.ep_implementation != IMPLEMENTATION
    ):
        return distributed_config
    plan = dict.fromkeys(
        (f"{family.scaled_experts}.{name}" for name in ("gate_up_proj", "down_proj")),
        "grouped_gemm",
    )
    plan[family.scaled_experts] = "ep_dispatch_experts"
    # transformers' rules for FSDP do not match its layers' names either: the whole
    # model would be gathered at once.
    stack = family.scaled_experts.partition("layers.*")[0]
    units = dict.fromkeys(
        (f"{stack}embed_tokens", f"{stack}layers.*"), "free_full_weight"
    )
    return dataclasses.replace(distributed_config, ep_plan=plan, fsdp_plan=units)


def check_transformers() -> None:
    """Raise UserError if the interfaces of transformers are not those that overlap was
    written for.
    """
    expected: dict[Any, list[str]] = {
        EPImplementation.__init__: ["self", "experts", "ep_mesh", "tp_mesh"],
        EPImplementation.__call__: [
            "self",
            "hidden_states",
            "top_k_index",
            "top_k_weights",
        ],
        AttentionInterface.get_interface: ["self", "attn_implementation", "default"],
    }
    # Overlap replaces or calls these; an added or moved parameter would not fail, but
    # change the result.
    for function, names in expected.items():
        if list(inspect.signature(function).parameters) != names:
            import transformers

            raise UserError(
                f"transformers {transformers.__version__}: {function.__qualname__} is"
                f" not the one that overlap was written for ({', '.join(names)});"
                " install transformers 5.23, or use --overlap off"
            )
