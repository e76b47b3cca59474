"""Which weights of a layer multiply what a branch is given, and which write what it
adds to the stream.

A weight is named by the end of its name, without `.weight` or `.bias`: `q_proj` is
`self_attn.q_proj.weight`. Maps of what a branch reads or adds go into these weights
(`fcsd.training.calibration`). `tests/training/calibration/test_fold.py` holds the rows
of all families true: there the weights are found by following tensors through a layer.
"""

from dataclasses import dataclass

READS = (
    "q_proj", "k_proj", "v_proj", "q_a_proj", "kv_a_proj_with_mqa", "g_proj", "in_proj",
    "gate_proj", "up_proj", "gate_up_proj", "gate", "router", "shared_expert_gate",
)  # fmt: skip
"""Weights that multiply what their branch is given, in every family that has them."""

WRITES = ("o_proj", "out_proj", "down_proj")
"""Weights whose product is what their branch adds, in every family that has them."""

INDEXER = ("indexer.wk", "indexer.weights_proj")
"""What the indexers of sparse attention read with, besides their queries."""


@dataclass(frozen=True)
class Folding:
    """What one family has besides `READS` and `WRITES`, which hold for most."""

    reads: tuple[str, ...] = ()
    """Further weights that multiply what their branch is given, and nothing else."""
    writes: tuple[str, ...] = ()
    """Further weights, or biases, that write what their branch adds."""
    transposed: tuple[str, ...] = ()
    """Weights with inputs before outputs, (E, D, I); those of a linear are (I, D), of
    experts (E, I, D).
    """
    left_out: tuple[str, ...] = ()
    """Modules in a branch whose weights do neither, whatever they are called."""
    unread: tuple[str, ...] = ()
    """Children of the layer with weights that are not given the output of a norm."""
    other_uses: tuple[tuple[str, str], ...] = ()
    """(module, operation in it): takes what the branch is given too, and no map can go
    in front of it.
    """
    closed: tuple[str, ...] = ()
    """Branches behind which a norm, a convolution or a gate a channel lies; where the
    family is not additive, its MoE blocks are closed as well."""
    mlp_factor: str | None = None
    """Attribute of the layer: factor on what the MLP adds, where it is no `residual_multiplier`."""
    routed_factor: str | None = None
    """Attribute of the MoE block: factor on what its experts give."""


USUAL = Folding()
