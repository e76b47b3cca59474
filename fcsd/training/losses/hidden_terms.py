"""The auxiliary loss l2: compare the streams of student and teacher after every decoder
layer.

It is a sum over the kept tokens, so that a step's mean does not depend on how its batch
is cut. o_k is the stream after layer k, x_k of the student and t_k of the teacher:

    absolute    sum over layers k of |x_k - t_k|^2                        paper Eq. 5
    relative    mean over layers k of |x_k - t_k|^2 / |t_k|^2, token by token

This is the arithmetic alone. `grep -rnE "l2_coefficient|StreamDistance" fcsd` finds what
else such a term needs: its keys, the teacher's streams, its share in the loss of a step,
where it is refused, its cost.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fcsd.base.errors import UserError
from fcsd.base.hooks import first_tensor, hooked
from fcsd.model.connectivity.stack import decoder_layers
from fcsd.model.families import family_of
from fcsd.model.families.structure import unwrapped
from fcsd.training.losses.head import kept
from fcsd.training.losses.objectives import KLWithL2ObjectiveConfig

_ONE_BY_ONE = (
    "objective kl+l2 compares them one by one; use the original as the teacher"
)


def squared_distance(
    student: Sequence[Tensor], teacher: Sequence[Tensor], keep: Tensor | None
) -> Tensor:
    """Sum over kept tokens and layers of |x_k - t_k|^2, paper Eq. 5; 0 when none is kept.

    student, teacher: (…, D) for each layer. Returns: a float32 scalar (float64 for
    float64).
    """
    return torch.stack(
        [_squares(x, t, keep)[0].sum() for x, t in zip(student, teacher, strict=True)]
    ).sum()


def relative_distance(
    student: Sequence[Tensor], teacher: Sequence[Tensor], keep: Tensor | None
) -> Tensor:
    """Sum over kept tokens of the mean over layers of |x_k - t_k|^2 / |t_k|^2;
    arguments as `squared_distance`.
    """
    shares = []
    for x, t in zip(student, teacher, strict=True):
        distance, norm = _squares(x, t, keep)
        # A zero vector of the teacher would divide by 0.
        shares.append((distance / norm.clamp(min=torch.finfo(norm.dtype).tiny)).sum())
    return torch.stack(shares).mean()


def _squares(
    student: Tensor, teacher: Tensor, keep: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute the (N,) |x - t|^2 and (N,) |t|^2."""
    dtype = torch.promote_types(student.dtype, torch.float32)
    x, t = kept(student, keep).to(dtype), kept(teacher.detach(), keep).to(dtype)
    return (x - t).square().sum(-1), t.square().sum(-1)


class StreamDistance:
    """The distance between the streams, as `objective` has it; `steps` is the length of
    the training.
    """

    def __init__(self, objective: KLWithL2ObjectiveConfig, steps: int):
        self.objective, self.steps = objective, steps

    def coefficient(self, step: int) -> float:
        """Return the coefficient in optimiser step 0, 1, …; 0 when the distance has
        ended.

        With l2_until u of S steps it falls linearly:
        l2_coefficient · (1 - step / (u S)).
        """
        if self.objective.l2_until is None:
            return self.objective.l2_coefficient
        remaining = 1 - step / (self.objective.l2_until * self.steps)
        return self.objective.l2_coefficient * max(remaining, 0.0)

    def value(
        self, student: Sequence[Tensor], teacher: Sequence[Tensor], keep: Tensor | None
    ) -> Tensor:
        """Compute the distance, a sum over the kept tokens; UserError for a teacher
        with other layers or widths.
        """
        if len(student) != len(teacher):
            raise UserError(
                f"the student has {len(student)} decoder layers and the teacher"
                f" {len(teacher)}: {_ONE_BY_ONE}"
            )
        for x, t in zip(student, teacher, strict=True):
            if x.shape[-1] != t.shape[-1]:
                raise UserError(
                    f"the student's decoder layers have {x.shape[-1]} numbers per"
                    f" token, but the teacher's have {t.shape[-1]}: {_ONE_BY_ONE}"
                )
        distance = relative_distance if self.objective.l2_relative else squared_distance
        return distance(student, teacher, keep)


@contextmanager
def captured_streams(model: nn.Module) -> Iterator[list[Tensor]]:
    """Capture the streams of one forward pass of student or teacher, with their
    gradients: each (B, T, D) or (B T, D).
    """
    # Layers are called in their order, so the lists of student and teacher correspond.
    streams: list[Tensor] = []
    inner = unwrapped(model)

    def add_stream(args: Any, kwargs: Any, out: Any) -> None:
        stream = first_tensor(out)
        assert stream is not None
        streams.append(stream)

    layers = decoder_layers(inner, family_of(getattr(inner, "config", None)))
    with hooked(after=[(layer, add_stream) for layer in layers]):
        yield streams
