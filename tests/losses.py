"""Objectives by their names, and the fused loss of plain tensors."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fcsd.base.strict import validate
from fcsd.training.losses.fused import Head, TokenStatistics, fused_linear_loss
from fcsd.training.losses.objectives import MEASURES, OBJECTIVES, ObjectiveConfig

EXAMPLES: dict[str, dict[str, Any]] = {
    "jsd": {"jsd_beta": 0.3, "temperature": 1.5},
    "kl+l2": {"l2_coefficient": 0.01},
}
"""Settings of objectives with keys that are required, or that change the arithmetic."""

DIVERGENCE_NAMES = [name for name in MEASURES if OBJECTIVES[name].has_teacher]
LABEL_NAMES = [name for name in MEASURES if not OBJECTIVES[name].has_teacher]
DIVERGENCES = [{"name": name} | EXAMPLES.get(name, {}) for name in DIVERGENCE_NAMES]


def objective_of(name: str = "kl", **settings: Any) -> Any:
    """Make an objective; required keys that are not given are those of `EXAMPLES`."""
    required = {
        key: value
        for key, value in EXAMPLES.get(name, {}).items()
        if OBJECTIVES[name].requires(key)
    }
    fields = {"name": name, **required, **settings}
    return validate(ObjectiveConfig, fields, "objective")


def reference_loss(student: Tensor, target: Tensor, by: Any) -> Tensor:
    """Return the loss of each token from full logits, as it stands in the papers.

    target: the teacher's logits (N, V), or labels (N,) for an objective without one.
    """
    if by.has_teacher:
        target = (target / by.temperature).log_softmax(-1)
    return FORMULAS[by.logged]((student / by.temperature).log_softmax(-1), target, by)


def kl(p: Tensor, q: Tensor) -> Tensor:
    return (p.exp() * (p - q)).sum(-1)


def jsd(s: Tensor, t: Tensor, beta: float) -> Tensor:
    m = torch.logaddexp(s + math.log(1 - beta), t + math.log(beta))
    return beta * kl(t, m) + (1 - beta) * kl(s, m)


FORMULAS = {
    "kl": lambda s, t, by: kl(t, s),
    "reverse_kl": lambda s, t, by: kl(s, t),
    "jsd": lambda s, t, by: jsd(s, t, by.jsd_beta),
    "ce": lambda s, labels, by: F.nll_loss(s, labels, reduction="none"),
}
"""Of the student's log-probabilities and the teacher's, or labels; the only reference
that a measure needs."""


def fused_divergence(
    h: Tensor,
    w: Tensor,
    th: Tensor,
    tw: Tensor,
    *,
    divergence: Any,
    bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    scaling: tuple[float, float | None] = (1.0, None),
    teacher_scaling: tuple[float, float | None] = (1.0, None),
    **options: Any,
) -> tuple[Tensor, TokenStatistics | None]:
    """Return the sum of a divergence between teacher and student; scalings: logit scale
    and softcap.
    """
    student, teacher = (
        Head(h, w, bias, *scaling),
        Head(th, tw, teacher_bias, *teacher_scaling),
    )
    return fused_linear_loss(student, teacher, divergence, **options)


def fused_kl(h: Tensor, w: Tensor, th: Tensor, tw: Tensor, **options: Any) -> Tensor:
    return fused_divergence(h, w, th, tw, divergence=objective_of("kl"), **options)[0]


def fused_label_loss(
    h: Tensor,
    w: Tensor,
    labels: Tensor,
    *,
    objective: Any,
    bias: Tensor | None = None,
    scaling: tuple[float, float | None] = (1.0, None),
    **options: Any,
) -> Tensor:
    head = Head(h, w, bias, *scaling)
    return fused_linear_loss(head, labels, objective, **options)[0]


def fused_cross_entropy(h: Tensor, w: Tensor, labels: Tensor, **options: Any) -> Tensor:
    return fused_label_loss(h, w, labels, objective=objective_of("ce"), **options)
