"""Solve and fold separate maps for each routed expert, in place of one map for all.

    x_e, y_e  inputs of student and teacher at the tokens that the student routes to expert e, (N_e, D)
    A_e       x_e A_e ≈ y_e, ridge towards the shared map A; folded into the weights with which e reads

    r         the error that remains in the stream after the layer, (N, D); r_e at the tokens of expert e
    v_e       output of expert e, weighted by the router, at the tokens that are routed to it, (N_e, D)
    B_e       v_e B_e ≈ v_e + r_e, ridge towards the identity; folded into the weights with which e writes;
              then r_e <- r_e - v_e (B_e - I)

The outputs are solved one expert after another, each on the error that the experts
before it leave. Only one expert's outputs are in memory at a time: the module that
holds all experts is called again with the tokens, choices and weights of that one. An
expert keeps the shared map if fewer than D tokens are routed to it, or if its own map
fits its sample only.

Not covered: experts that are not called with (hidden states, choices, weights), or
modules that add more than the experts' outputs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fcsd.base.hooks import Stopped, first_tensor, hooked
from fcsd.training.calibration.roles import Experts
from fcsd.training.calibration.solve import Solution
from fcsd.training.calibration.state import Work

READS_RIDGE = 3e-2
ADDS_RIDGE = 1e-2


@dataclass(frozen=True)
class Call:
    """One call of a module of routed experts: hidden (N, D), choices and weights (N, K),
    and the module's output, out (N, D).
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    hidden: Tensor
    choices: Tensor
    weights: Tensor
    out: Tensor

    def expert(
        self,
        module: nn.Module,
        number: int,
        device: torch.device,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the tokens (N_e,) that are routed to expert `number`, restricted to
        `mask`, and the expert's output at them, which is computed on `device`.
        """
        chosen = self.choices == number
        if mask is not None:
            chosen = chosen & mask.to(chosen.device)[:, None]
        tokens, slots = chosen.nonzero(as_tuple=True)
        if not len(tokens):
            return tokens, self.out.new_empty(0, self.out.shape[-1], device=device)
        # Families differ in the order and names of the arguments, so each tensor is
        # recognised by identity. One choice a token makes the module run this expert
        # alone. Only its tokens go to the device: with many experts the whole text would
        # go there once for each.
        slices = {
            id(self.hidden): self.hidden[tokens].to(device),
            id(self.choices): self.choices[tokens, slots][:, None].to(device),
            id(self.weights): self.weights[tokens, slots][:, None].to(device),
        }
        args, kwargs = self._with(slices)
        out = first_tensor(module(*args, **kwargs))
        assert out is not None
        return tokens, out

    def _with(self, tensors: dict[int, Tensor]) -> tuple[tuple, dict[str, Any]]:
        """Return the arguments with other tensors in the place of some, by their ids."""
        args = tuple(tensors.get(id(value), value) for value in self.args)
        return args, {
            name: tensors.get(id(value), value) for name, value in self.kwargs.items()
        }

    def to(self, device: torch.device) -> Call:
        """Move the tensors of the call to a device."""
        moved = {
            id(value): value.to(device)
            for value in (self.hidden, self.choices, self.weights)
        }
        return Call(
            *self._with(moved),
            moved[id(self.hidden)],
            moved[id(self.choices)],
            moved[id(self.weights)],
            self.out.to(device),
        )


def _call_tensors(args: Any, kwargs: Any) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return hidden states, choices and weights of a call; None if its arguments
    differ.
    """
    tensors = [
        value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)
    ]
    if len(tensors) != 3 or any(value.ndim != 2 for value in tensors):
        return None
    # Choices are integers and weights are not; hidden states come first.
    hidden, *routing = tensors
    choices = [value for value in routing if not value.is_floating_point()]
    weights = [value for value in routing if value.is_floating_point()]
    if not choices or not weights or choices[0].shape != weights[0].shape:
        return None
    return hidden, choices[0], weights[0]


@contextlib.contextmanager
def calls_of(module: nn.Module) -> Iterator[list[Call]]:
    """Record the calls of a module of routed experts, except those with other arguments."""
    calls: list[Call] = []

    def record(args: Any, kwargs: Any, out: Any) -> None:
        tensors, out = _call_tensors(args, kwargs), first_tensor(out)
        if tensors is not None and out is not None and out.ndim == 2:
            calls.append(Call(args, kwargs, *tensors, out))

    with hooked(after=[(module, record)]):
        yield calls


@torch.no_grad()
def adds_up(module: nn.Module, call: Call, num_experts: int) -> bool:
    """Return whether the outputs of single experts add up to the module's output."""
    # A shared expert inside the module, or a scale on the sum, shows here.
    total = torch.zeros_like(call.out)
    for number in range(num_experts):
        tokens, out = call.expert(module, number, call.out.device)
        total.index_add_(0, tokens, out)
    return bool((total - call.out).abs().max() <= 1e-4 * call.out.abs().max())


def fold_reads(
    work: Work, experts: Experts, pairs: Sequence[tuple[Tensor, Tensor]], shared: Tensor
) -> list[float] | None:
    """Fold a map into the input weights of each expert: its own map, or `shared`, which
    is already folded into the router.

    pairs: inputs (N, D) of student and teacher, one pair a batch.

    Returns: squared residuals of the shared map and of these maps over all experts,
    relative to the teacher's inputs; None if the routes of the tokens are not known.
    """
    routes = _routes(work, experts)
    # Ranks decide together: the sums below are over all of them.
    if not all(work.ranks.share(lambda: len(routes) == len(pairs))):
        work.models.fold(work.index, experts.readers, shared, "reads")
        return None

    def parts(number: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        for batch_index, (route, (x, y)) in enumerate(zip(routes, pairs, strict=True)):
            chosen = (route == number).any(-1)
            yield work.tested(batch_index)[chosen], x[chosen], y[chosen]

    # The residuals of a solution are relative to the squares of its y: times these, they
    # add up over the experts.
    target_squares = shared_squares = solved_squares = 0.0
    for number in range(_num_experts(work, experts)):
        squares, solution = _solve(
            work, parts(number), READS_RIDGE, f"input of expert {number}", shared
        )
        work.models.fold(
            work.index,
            experts.readers,
            shared if solution.map is None else solution.map,
            "reads",
            number,
        )
        target_squares += squares
        shared_squares += solution.before * squares
        solved_squares += solution.after * squares
    if not target_squares:
        return [0.0, 0.0]
    return [shared_squares / target_squares, solved_squares / target_squares]


def _routes(work: Work, experts: Experts) -> list[Tensor]:
    """Return the experts (N, K) to which the text's tokens are routed, for each batch
    in which they are known.
    """
    routes: list[Tensor] = []
    calls: list[Any] = []

    # The routes are known before the experts run, so the pass ends there.
    def record(args: Any, kwargs: Any) -> None:
        calls.append(_call_tensors(args, kwargs))
        raise Stopped

    with hooked(before=[(work.layer.get_submodule(experts.module), record)]):
        for batch_index, mask in enumerate(work.masks):
            calls.clear()
            with contextlib.suppress(Stopped):
                work.step(batch_index)
            if not calls or calls[0] is None:
                continue
            _, choices, _ = calls[0]
            if len(choices) == len(mask):
                routes.append(work.rows(choices, batch_index).cpu())
    return routes


def fold_adds(work: Work, experts: Experts) -> list[float] | None:
    """Fold a map into the weights with which each expert writes.

    Returns: squares of the error before and after, relative to those before; None if
    the experts cannot be called one by one.
    """
    module = work.layer.get_submodule(experts.module)
    num_experts = _num_experts(work, experts)
    calls: list[Call] = []
    errors: list[Tensor] = []  # r, (N, D) for each batch
    understood = True
    for batch_index, mask in enumerate(work.masks):
        with calls_of(module) as batch_calls:
            stream = work.step(batch_index)
        # One call with all tokens of the batch, which single experts can reproduce. The
        # latter is a matter of the module, so the first batch is enough.
        is_single = len(batch_calls) == 1 and len(batch_calls[0].hidden) == len(mask)
        understood = (
            understood
            and is_single
            and (batch_index > 0 or adds_up(module, batch_calls[0], num_experts))
        )
        if understood:
            calls.append(batch_calls[0].to(torch.device("cpu")))
            errors.append(
                (work.teacher[batch_index]["o"] - stream["o"].cpu()).flatten(0, -2)
            )
    if not all(work.ranks.share(lambda: understood)):
        return None
    initial = _squares(work, errors)
    for number in range(num_experts):
        _fold_adds(work, experts, number, calls, errors)
    return [1.0, _squares(work, errors) / initial] if initial else [0.0, 0.0]


def _fold_adds(
    work: Work,
    experts: Experts,
    number: int,
    calls: Sequence[Call],
    errors: Sequence[Tensor],
) -> None:
    """Fold a map into the weights with which one expert writes, and subtract its effect
    from the errors, in place.
    """
    module = work.layer.get_submodule(experts.module)
    outputs: list[tuple[Tensor, Tensor]] = []

    def parts() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        for batch_index, (call, error) in enumerate(zip(calls, errors, strict=True)):
            with torch.no_grad():
                tokens, out = call.expert(
                    module, number, work.device, work.masks[batch_index]
                )
            outputs.append((tokens, out.cpu()))
            out = out.double() * experts.factor
            # The expert's output, and its target: the output plus the whole error. The
            # experts after it get the error that its map cannot remove.
            yield (
                work.text.held_out[batch_index][tokens],
                out,
                out + error[tokens].to(work.device).double(),
            )

    _, solution = _solve(work, parts(), ADDS_RIDGE, f"output of expert {number}")
    if solution.map is None:
        return
    work.models.fold(work.index, experts.writers, solution.map, "writes", number)
    # The stream has `out` already, so the fold adds out (M - 1).
    change = solution.map.clone()
    change.diagonal().sub_(1.0)
    change *= experts.factor
    for (tokens, out), error in zip(outputs, errors, strict=True):
        # On the device: the product in float64 costs as much as the sums of the problem.
        error[tokens] -= (out.to(work.device).double() @ change).to(error.dtype).cpu()


def _solve(
    work: Work,
    parts: Iterable[tuple[Tensor, Tensor, Tensor]],
    ridge: float,
    name: str,
    prior: Tensor | None = None,
) -> tuple[float, Solution]:
    """Solve for one expert over all ranks; return the squares of y and the solution.

    parts: for each batch, which tokens (N_e,) the map is tested on, and x and y
    (N_e, D).
    """
    problem, held_out = problems = work.problems()
    for part in parts:
        work.add(problems, *part)
    problem.sum_over(work.ranks)
    held_out.sum_over(work.ranks)
    # Too few tokens to determine a map: the expert keeps the prior.
    if problem.count < work.width:
        problem.add_sums(held_out)
        residual = problem.residual(prior)
        solution = Solution(None, residual, residual)
    else:
        solution = problem.solve_checked(
            held_out, ridge, f"layer {work.index}, {name}", work.ranks, prior
        )
    return float(problem.yy), solution


def _num_experts(work: Work, experts: Experts) -> int:
    return len(work.layer.get_parameter(experts.writers[0][0]))


def _squares(work: Work, errors: Sequence[Tensor]) -> float:
    """Sum the squared errors at the tokens of text, over all ranks."""
    squares = [
        work.rows(error, batch_index).double().square().sum()
        for batch_index, error in enumerate(errors)
    ]
    return float(sum(work.ranks.share(lambda: float(sum(squares)))))
