"""Auxiliary losses: compare the streams inside the layers, and the routers' choices.

Each term is a sum over the kept tokens, so that a step's mean does not depend on how
its batch is cut.

    l2          absolute    sum over points k of |x_k - t_k|^2                        paper Eq. 5
                relative    mean over points k of |x_k - t_k|^2 / |t_k|^2, token by token
    router_kl   mean over MoE layers of KL(softmax(t) || softmax(s)) of the routers' logits t (teacher), s (student)

The points of l2, x of the student and t of the teacher:

    blocks      o_k, the stream after every decoder layer
    merges      o_k of the layers whose routed output is in flight while the next layer begins: rewired MoE layers that
                a rewired layer follows. Attention of layer k+1 has read o_k - routed_k;
                where its MoE block reads, o_k, is the first point at which routed_k is
                back in the stream, and the two streams can be compared.
    sublayers   the outputs of attention and of the MoE block (or MLP) of every rewired layer: what is added to the
                stream, whatever has been added before
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fcsd.base.errors import UserError
from fcsd.base.hooks import After, first_tensor, hooked
from fcsd.model.connectivity.rewire import decoder_layers
from fcsd.model.families import family_of
from fcsd.model.families.routers import Router, find_routers
from fcsd.model.families.structure import unwrapped
from fcsd.training.losses.head import kept
from fcsd.training.losses.objectives import ObjectiveConfig

_ONE_BY_ONE = (
    "objective kl+l2 and router_kl_coefficient compare them one by one; use the"
    " original as the teacher"
)


@dataclass
class Captured:
    """The tensors captured in one forward pass: `streams`, each (B, T, D) or (B T, D);
    `routers`, logits (B T, E).
    """

    streams: list[Tensor] = field(default_factory=list)
    routers: list[Tensor] = field(default_factory=list)


def squared_distance(
    student: Sequence[Tensor], teacher: Sequence[Tensor], keep: Tensor | None
) -> Tensor:
    """Sum over kept tokens and points of |x_k - t_k|^2, paper Eq. 5; 0 when none is kept.

    student, teacher: (…, D) for each point. Returns: a float32 scalar (float64 for
    float64).
    """
    return torch.stack(
        [_squares(x, t, keep)[0].sum() for x, t in zip(student, teacher, strict=True)]
    ).sum()


def relative_distance(
    student: Sequence[Tensor], teacher: Sequence[Tensor], keep: Tensor | None
) -> Tensor:
    """Sum over kept tokens of the mean over points of |x_k - t_k|^2 / |t_k|^2;
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


def router_divergence(
    student: Sequence[Tensor], teacher: Sequence[Tensor], keep: Tensor | None
) -> Tensor:
    """Sum over kept tokens of the mean over layers of KL(softmax(t) || softmax(s)), in
    nats; logits (…, E) a layer.
    """
    sums = []
    for s, t in zip(student, teacher, strict=True):
        dtype = torch.promote_types(s.dtype, torch.float32)
        student_log_probs = kept(s, keep).to(dtype).log_softmax(-1)
        teacher_log_probs = kept(t.detach(), keep).to(dtype).log_softmax(-1)
        sums.append(
            (teacher_log_probs.exp() * (teacher_log_probs - student_log_probs)).sum()
        )
    return torch.stack(sums).mean()


def student_routers(model: nn.Module) -> list[Router]:
    """Find the routers that an objective compares or freezes; UserError unless there is
    one for each MoE layer.
    """
    try:
        return find_routers(model)
    except UserError as error:
        raise UserError(
            f"{error}; leave out objective.router_kl_coefficient and"
            " objective.freeze_routers"
        ) from None


class AuxiliaryLosses:
    """The terms of `objective` for one student, whose connectivity is set already;
    `steps` is the length of the training.

    Raises:
        UserError: the student has no such points, or no known routers.
    """

    def __init__(self, objective: ObjectiveConfig, student: nn.Module, steps: int):
        self.objective, self.steps = objective, steps
        self.with_routers = objective.router_kl_coefficient is not None
        self.layers = _point_layers(objective, student)
        if self.with_routers:
            student_routers(student)

    def coefficients(self, step: int) -> dict[str, float]:
        """Return the coefficient of each term in optimiser step 0, 1, …; a term that
        has ended is left out.

        With l2_until u of S steps the one of l2 falls linearly:
        l2_coefficient · (1 - step / (u S)).
        """
        by_term = {}
        if self.objective.l2_coefficient is not None:
            fraction = 1.0
            if self.objective.l2_until is not None:
                fraction = 1 - step / (self.objective.l2_until * self.steps)
            if fraction > 0:
                by_term["l2"] = self.objective.l2_coefficient * fraction
        if self.objective.router_kl_coefficient is not None:
            by_term["router_kl"] = self.objective.router_kl_coefficient
        return by_term

    def values(
        self,
        student: Captured,
        teacher: Captured,
        keep: Tensor | None,
        names: Sequence[str],
    ) -> dict[str, Tensor]:
        """Compute the terms with these names, sums over the kept tokens."""
        # Points are compared pairwise: a teacher with other layers or widths has none.
        for student_tensors, teacher_tensors, kind in (
            (student.streams, teacher.streams, "decoder layers"),
            (student.routers, teacher.routers, "routers"),
        ):
            if len(student_tensors) != len(teacher_tensors):
                raise UserError(
                    f"the student has {len(student_tensors)} {kind} and the teacher"
                    f" {len(teacher_tensors)}: {_ONE_BY_ONE}"
                )
            for student_tensor, teacher_tensor in zip(
                student_tensors, teacher_tensors, strict=True
            ):
                if student_tensor.shape[-1] != teacher_tensor.shape[-1]:
                    raise UserError(
                        f"the student's {kind} have {student_tensor.shape[-1]} numbers"
                        " per token, but the teacher's have"
                        f" {teacher_tensor.shape[-1]}: {_ONE_BY_ONE}"
                    )
        distance = relative_distance if self.objective.l2_relative else squared_distance
        term_functions = {
            "l2": lambda: distance(student.streams, teacher.streams, keep),
            "router_kl": lambda: router_divergence(
                student.routers, teacher.routers, keep
            ),
        }
        return {name: term_functions[name]() for name in names}

    @contextmanager
    def captured(self, model: nn.Module) -> Iterator[Captured]:
        """Capture the points and router logits of one forward pass of student or
        teacher, with their gradients.
        """
        # Modules are called in the order of the layers, so the lists of student and
        # teacher correspond.
        captured = Captured()
        inner = unwrapped(model)

        def add_stream(args: Any, kwargs: Any, out: Any) -> None:
            stream = first_tensor(out)
            assert stream is not None
            captured.streams.append(stream)

        def add_logits(index: int) -> After:
            return lambda _, __, out: captured.routers.append(
                out[index] if isinstance(out, tuple) else out
            )

        hooks: list[tuple[nn.Module, After]] = [
            (module, add_stream) for module in self._modules(inner)
        ]
        if self.with_routers:
            hooks += [
                (router.module, add_logits(router.logits_index))
                for router in student_routers(inner)
            ]
        with hooked(after=hooks):
            yield captured

    def _modules(self, model: nn.Module) -> list[nn.Module]:
        if self.objective.l2_coefficient is None:
            return []
        family = family_of(getattr(model, "config", None))
        stack = decoder_layers(model, family)
        # For "blocks" and "merges" the point is the output of the layer itself.
        chosen = [stack[k] for k in self.layers]
        if self.objective.l2_points != "sublayers":
            return chosen
        return [
            getattr(layer, name)
            for layer in chosen
            for name in (family.attention, family.moe)
        ]


def _point_layers(objective: ObjectiveConfig, student: nn.Module) -> list[int]:
    """List the indices of the layers with a point of l2."""
    if objective.l2_coefficient is None:
        return []
    family = family_of(getattr(student, "config", None))
    stack = decoder_layers(student, family)
    points = objective.l2_points
    if points == "blocks":
        return list(range(len(stack)))
    # A layer without a plan is regular.
    plans = [getattr(layer, "farskip_plan", None) for layer in stack]
    if points == "merges":
        layers = [k for k, plan in enumerate(plans) if plan is not None and plan.carry]
    else:
        layers = [k for k, plan in enumerate(plans) if plan is not None]
        for k in layers:
            if not all(
                isinstance(getattr(stack[k], name, None), nn.Module)
                for name in (family.attention, family.moe)
            ):
                raise UserError(
                    f"objective.l2_points: sublayers: layer {k} of model type"
                    f" '{family.model_type}' does not have both `{family.attention}`"
                    f" and `{family.moe}`; use blocks or merges"
                )
    if not layers:
        raise UserError(
            f"objective.l2_points: {points}: connectivity.layers gives this model no"
            " such point; use blocks, or rewire layers that follow each other"
        )
    return layers


def freeze_routers(model: nn.Module) -> None:
    """Keep the routers' weights as they are."""
    for router in student_routers(model):
        router.module.requires_grad_(False)
