"""Format the families as a table, for `fcsd families`.

`tests/reference/upstream.py` writes the lists of docs/families.md.
"""

from collections.abc import Mapping
from typing import Any

from fcsd.base.text import markdown
from fcsd.model.families import FAMILIES, served_by
from fcsd.model.families.family import MOE_LAYERS
from fcsd.model.families.overlap import overlap_of
from fcsd.model.families.refused import REFUSED


def families_facts() -> dict[str, Any]:
    """Return the families that can be converted, how they were verified, in which
    engines and how they overlap, and the refused ones with their reasons.

    {"families": [...], "refused": {model type: reason}}
    """
    facts: list[dict[str, Any]] = []
    for name, family in sorted(FAMILIES.items()):
        fields, _ = MOE_LAYERS[family.moe_layers]
        facts.append(
            {
                "model_type": name,
                "model_class": family.causal_lm,
                "multimodal": family.multimodal,
                "shared_experts": bool(family.block_shared or family.layer_shared),
                "additive": family.additive,
                "dense_layers": [] if family.moe_layers == "all" else list(fields),
                "reference": family.reference,
                "training": overlap_of(family),
                "served_by": served_by(name),
            }
        )
    return {"families": facts, "refused": dict(sorted(REFUSED.items()))}


def families_table(facts: Mapping[str, Any]) -> str:
    """Format `families_facts` as the Markdown of `fcsd families`."""
    rows = []
    for fact in facts["families"]:
        # Where a norm follows the sum, shared experts are in flight with the routed ones.
        shared_experts = "no"
        if fact["shared_experts"]:
            shared_experts = "yes" if fact["additive"] else "in flight, too"
        rows.append(
            [
                fact["model_type"],
                fact["model_class"],
                shared_experts,
                ", ".join(fact["dense_layers"]) or "none",
                "written by hand" if fact["reference"] == "written" else "generic",
                fact["training"]["overlap"],
                ", ".join(fact["served_by"]) or "none",
            ]
        )
    table = markdown(
        [
            "family",
            "class",
            "shared experts",
            "dense layers by",
            "reference",
            "overlap in training",
            "overlap in",
        ],
        rows,
        left=7,
    )
    if not facts["refused"]:
        return table
    reasons = [[name, reason] for name, reason in facts["refused"].items()]
    refusals = markdown(["refused", "reason"], reasons, left=2)
    return f"{table}\n\n{refusals}"
