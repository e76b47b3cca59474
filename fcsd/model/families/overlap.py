"""Tell how far a family's training can overlap exchanges with computation, and why not
farther.
"""

from typing import Any

from fcsd.model.families.family import Family

_JITTER = ("router_jitter_noise", "input_jitter_noise")
_KEPT_INSIDE = {
    "streams": "its layers mix several streams",
    "sources": "its layers mix the streams of earlier blocks",
    "blocks": "each of its layers is one branch",
    "post_norm": "norms follow its branches",
    "parallel": "attention and experts read one stream",
}
"""Layout -> why a layer waits for its own combine."""


def refusal(family: Family, config: Any = None) -> str | None:
    """Return a clause that says why a model cannot overlap; None: it can.

    config: of the model; None: any model of the family.
    """
    if family.spread_refused is not None:
        return family.spread_refused
    if family.fuses_rows is not None:
        return (
            f"transformers loads {family.fuses_rows} wrongly when it shards during"
            " loading"
        )
    if family.overlap_refused is not None:
        return family.overlap_refused
    if config is None:
        return None
    # The experts of a multimodal model are in its language model.
    config = config.get_text_config()
    for name in _JITTER:
        # PhiMoE's routers sample inside a module, which is called once.
        once = family.model_type == "phimoe" and name == _JITTER[0]
        if (getattr(config, name, 0) or 0) > 0 and not once:
            return (
                f"{name} {getattr(config, name)}: recomputation would draw other"
                " random numbers; set it to 0"
            )
    return None


def kept_inside(family: Family) -> str | None:
    """Return a clause that says why a layer must wait for its own combine; None: the
    next layer can wait for it.

    Such a layer keeps its forward pass; its exchanges run beside its own attention and
    shared expert.
    """
    if family.layout in _KEPT_INSIDE:
        return _KEPT_INSIDE[family.layout]
    if family.norms is not None:
        return "its norms are in a separate module"
    if family.side_output is not None:
        return f"its layers also pass on {family.side_output}"
    if family.stream_edit is not None:
        return "the model edits the stream between layers"
    return None if family.additive else "a norm follows its experts"


def overlap_of(family: Family) -> dict[str, str | None]:
    """Return how far a family's training overlaps exchanges with computation ("between
    layers", "inside the layer", "none"), and the reason if not between layers.
    """
    if reason := refusal(family):
        return {"overlap": "none", "because": reason}
    if reason := kept_inside(family):
        return {"overlap": "inside the layer", "because": reason}
    return {"overlap": "between layers", "because": None}
