"""List the weights of a layer that multiply the input of a branch, and those that write
its output to the stream.

A weight is given by the end of its name, without `.weight` or `.bias`: `q_proj` is
`self_attn.q_proj.weight`. Calibration folds its maps into these weights
(`fcsd.training.calibration`). `tests/training/calibration/test_fold.py` verifies the
rows of all families: it finds the weights by tracing tensors through a layer.
"""

from dataclasses import dataclass

READS = (
    "q_proj", "k_proj", "v_proj", "q_a_proj", "kv_a_proj_with_mqa", "g_proj", "in_proj",
    "gate_proj", "up_proj", "gate_up_proj", "gate", "router", "shared_expert_gate",
)  # fmt: skip
"""Weights that multiply the input of their branch, in every family that has them."""

WRITES = ("o_proj", "out_proj", "down_proj")
"""Weights whose product is the output of their branch, in every family that has them."""

INDEXER = ("indexer.wk", "indexer.weights_proj")
"""Weights with which the indexers of sparse attention read, besides their queries."""


@dataclass(frozen=True)
class Folding:
    """The weights of one family that are not in `READS` and `WRITES`, and exceptions."""

    reads: tuple[str, ...] = ()
    """Further weights that multiply the input of their branch, and nothing else."""
    writes: tuple[str, ...] = ()
    """Further weights, or biases, that write the output of their branch."""
    transposed: tuple[str, ...] = ()
    """Weights with inputs before outputs, (E, D, I); by default those of a linear are
    (I, D), those of experts (E, I, D).
    """
    left_out: tuple[str, ...] = ()
    """Modules in a branch whose weights do neither, although their names say so."""
    latent: str | None = None
    """Projection into a space of the experts' own. In a model that has one, and no
    identity there, the experts are left out."""
    unread: tuple[str, ...] = ()
    """Children of the layer with weights whose input is not the output of a norm."""
    other_uses: tuple[tuple[str, str], ...] = ()
    """(module, operation in it) that also reads the input of the branch, and before
    which no map can be put.
    """
    closed: tuple[str, ...] = ()
    """Branches that are followed by a norm, a convolution or a gate per channel. In a
    family that is not additive, the MoE blocks are closed as well; with
    hyper-connections, all branches."""
    mlp_factor: str | None = None
    """Attribute of the layer: factor on the MLP's output, unless it is
    `residual_multiplier`."""
    routed_factor: str | None = None
    """Attribute of the MoE block: factor on the output of its experts."""


USUAL = Folding()
