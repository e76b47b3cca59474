"""Objectives by their names, and the fused loss of plain tensors."""

import math
from typing import Any

import torch
from torch import Tensor

from fcsd.base.strict import validate
from fcsd.training.losses.fused import Head, TokenStatistics, fused_linear_loss
from fcsd.training.losses.objectives import MEASURES, OBJECTIVES, ObjectiveConfig

DIVERGENCE_NAMES = [name for name in MEASURES if OBJECTIVES[name].has_teacher]
DIVERGENCES = [
    {"name": name} | {"jsd": {"jsd_beta": 0.3, "temperature": 1.5}}.get(name, {})
    for name in DIVERGENCE_NAMES
]
"""An objective of each divergence, away from the defaults where keys change it."""


def objective_of(name: str = "kl", **settings: Any) -> Any:
    return validate(ObjectiveConfig, {"name": name, **settings}, "objective")


def reference_divergence(student: Tensor, teacher: Tensor, by: Any) -> Tensor:
    """Return for each token, from full logits, the sum over the vocabulary as it stands
    in the papers.
    """
    s, t = ((logits / by.temperature).log_softmax(-1) for logits in (student, teacher))
    return FORMULAS[by.name](s, t, by)


def kl(p: Tensor, q: Tensor) -> Tensor:
    return (p.exp() * (p - q)).sum(-1)


def jsd(s: Tensor, t: Tensor, beta: float) -> Tensor:
    m = torch.logaddexp(s + math.log(1 - beta), t + math.log(beta))
    return beta * kl(t, m) + (1 - beta) * kl(s, m)


FORMULAS = {
    "kl": lambda s, t, by: kl(t, s),
    "reverse_kl": lambda s, t, by: kl(s, t),
    "jsd": lambda s, t, by: jsd(s, t, by.jsd_beta),
}
"""Of log-probabilities of student and teacher; the only reference that an objective
needs."""


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


def fused_cross_entropy(
    h: Tensor,
    w: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    scaling: tuple[float, float | None] = (1.0, None),
    **options: Any,
) -> Tensor:
    return fused_linear_loss(
        Head(h, w, bias, *scaling), labels, objective_of("ce"), **options
    )[0]
