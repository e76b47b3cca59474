"""Maps of its own for every routed expert, where one map would have to do for all of
them.

    x_e, y_e  what student and teacher read on the tokens that expert e of the student is chosen for, (N_e, D)
    A_e       x_e A_e ≈ y_e, ridge towards the map A of all, into the weights that e reads with

    r_t  what is still missing to the original's stream behind the layer, token t (N, D)
    v_e  what expert e adds, weighted by the router, on the tokens that it is chosen for (N_e, D)
    B_e  v_e B_e ≈ v_e + r_e, ridge towards the identity, into what expert e writes;   then r_e <- r_e - v_e (B_e - I)

What experts add is solved one after another, each sees what those before it have left.
One expert's outputs are in memory at a time: the module that holds them all is called
again with the tokens, choices and weights of this one. An expert keeps the map of all
where fewer tokens than D chose it, or where its own fits its sample only.

Not covered: experts that are not called with (hidden states, choices, weights), or that
add something beside them.
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
    """What a module of routed experts was called with, hidden (N, D), choices and
    weights (N, K), and gave, (N, D).
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    hidden: Tensor
    choices: Tensor
    weights: Tensor
    out: Tensor

    def expert(
        self, module: nn.Module, number: int, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the tokens (N_e,) that expert `number` is chosen for, of those in
        `mask`, and what it adds there.
        """
        chosen = self.choices == number
        if mask is not None:
            chosen = chosen & mask.to(chosen.device)[:, None]
        tokens, slots = chosen.nonzero(as_tuple=True)
        if not len(tokens):
            return tokens, self.out.new_empty(0, self.out.shape[-1])
        slices = {
            id(self.hidden): self.hidden[tokens],
            id(self.choices): self.choices[tokens, slots][:, None],
            id(self.weights): self.weights[tokens, slots][:, None],
        }
        args = [slices.get(id(value), value) for value in self.args]
        kwargs = {
            name: slices.get(id(value), value) for name, value in self.kwargs.items()
        }
        out = first_tensor(module(*args, **kwargs))
        assert out is not None
        return tokens, out

    def to(self, device: torch.device) -> Call:
        moved = {
            id(value): value.to(device)
            for value in (self.hidden, self.choices, self.weights)
        }
        return Call(
            tuple(moved.get(id(value), value) for value in self.args),
            {name: moved.get(id(value), value) for name, value in self.kwargs.items()},
            moved[id(self.hidden)],
            moved[id(self.choices)],
            moved[id(self.weights)],
            self.out.to(device),
        )


def _call_tensors(args: Any, kwargs: Any) -> tuple[Tensor, Tensor, Tensor] | None:
    """Tell hidden states, choices and weights of a call apart; None for calls that are
    of another kind.
    """
    tensors = [
        value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)
    ]
    if len(tensors) != 3 or any(value.ndim != 2 for value in tensors):
        return None
    hidden, *others = tensors
    choices = [value for value in others if not value.is_floating_point()]
    weights = [value for value in others if value.is_floating_point()]
    if not choices or not weights or choices[0].shape != weights[0].shape:
        return None
    return hidden, choices[0], weights[0]


@contextlib.contextmanager
def calls_of(module: nn.Module) -> Iterator[list[Call]]:
    """Give the calls of a module of routed experts; nothing for calls that are of another kind."""
    calls: list[Call] = []

    def after(args: Any, kwargs: Any, out: Any) -> None:
        tensors, out = _call_tensors(args, kwargs), first_tensor(out)
        if tensors is not None and out is not None and out.ndim == 2:
            calls.append(Call(args, kwargs, *tensors, out))

    with hooked(after=[(module, after)]):
        yield calls


@torch.no_grad()
def adds_up(module: nn.Module, call: Call, num_experts: int) -> bool:
    """Return whether the experts, one at a time, add what the module gave."""
    total = torch.zeros_like(call.out)
    for number in range(num_experts):
        tokens, out = call.expert(module, number)
        total.index_add_(0, tokens, out)
    return bool((total - call.out).abs().max() <= 1e-4 * call.out.abs().max())


def fold_reads(
    work: Work, experts: Experts, pairs: Sequence[tuple[Tensor, Tensor]], shared: Tensor
) -> list[float] | None:
    """Give what every expert reads a map of its own, or the one of all (`shared`),
    which the router has already.

    pairs: what student and teacher read, (N, D) of each batch.

    Returns: squares left by the map of all and by these, relative to those of what the
    teacher reads, over all experts; None where it is not known which of them are
    chosen.
    """
    routes = _routes(work, experts)
    if not all(work.ranks.share(lambda: len(routes) == len(pairs))):
        work.models.fold(work.index, experts.readers, shared, "reads")
        return None
    wanted = before = after = 0.0
    for number in range(_num_experts(work, experts)):
        parts = (
            (
                work.rows(work.text.held_out[place][:, None], place)[chosen, 0],
                x[chosen],
                y[chosen],
            )
            for place, (route, (x, y)) in enumerate(zip(routes, pairs, strict=True))
            for chosen in [(route == number).any(-1)]
        )
        squares, solution = _solve(
            work, parts, READS_RIDGE, f"what expert {number} reads", shared
        )
        work.models.fold(
            work.index,
            experts.readers,
            shared if solution.map is None else solution.map,
            "reads",
            number,
        )
        wanted, before = wanted + squares, before + solution.before * squares
        after += solution.after * squares
    return [before / wanted, after / wanted] if wanted else [0.0, 0.0]


def _routes(work: Work, experts: Experts) -> list[Tensor]:
    """Return which experts (N, K) are chosen for the tokens of text of each batch in
    which that is known.
    """
    routes: list[Tensor] = []
    called: list[Any] = []

    def before(args: Any, kwargs: Any) -> None:
        called.append(_call_tensors(args, kwargs))
        raise Stopped

    with hooked(before=[(work.layer.get_submodule(experts.module), before)]):
        for place, mask in enumerate(work.masks):
            called.clear()
            with contextlib.suppress(Stopped):
                work.step(place)
            if called and called[0] is not None and len(called[0][1]) == len(mask):
                routes.append(work.rows(called[0][1], place).cpu())
    return routes


def fold_adds(work: Work, experts: Experts) -> list[float] | None:
    """Give what every expert adds a map of its own.

    Returns: squares of what is missing before and after, relative to those before; None
    where experts cannot be called one by one.
    """
    module = work.layer.get_submodule(experts.module)
    num_experts = _num_experts(work, experts)
    calls: list[Call] = []
    missing: list[Tensor] = []  # (N, D) of each batch
    understood = True
    for place, mask in enumerate(work.masks):
        with calls_of(module) as batch_calls:
            stream = work.step(place)
        one = len(batch_calls) == 1 and len(batch_calls[0].hidden) == len(mask)
        understood = (
            understood
            and one
            and (place > 0 or adds_up(module, batch_calls[0], num_experts))
        )
        if understood:
            calls.append(batch_calls[0].to(torch.device("cpu")))
            missing.append(
                (work.teacher[place]["o"] - stream["o"].cpu()).flatten(0, -2)
            )
    if not all(work.ranks.share(lambda: understood)):
        return None
    before = _squares(work, missing)
    for number in range(num_experts):
        _fold_adds(work, experts, number, calls, missing)
    return [1.0, _squares(work, missing) / before] if before else [0.0, 0.0]


def _fold_adds(
    work: Work,
    experts: Experts,
    number: int,
    calls: Sequence[Call],
    missing: Sequence[Tensor],
) -> None:
    module = work.layer.get_submodule(experts.module)
    added: list[tuple[Tensor, Tensor]] = []

    def parts() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        for place, (call, rest) in enumerate(zip(calls, missing, strict=True)):
            with torch.no_grad():
                tokens, out = call.to(work.device).expert(
                    module, number, work.masks[place]
                )
            tokens, out = tokens.cpu(), out.double() * experts.factor
            added.append((tokens, out.cpu()))
            yield (
                work.text.held_out[place][tokens],
                out,
                out + rest[tokens].to(work.device).double(),
            )

    _, solution = _solve(work, parts(), ADDS_RIDGE, f"what expert {number} adds")
    if solution.map is None:
        return
    work.models.fold(work.index, experts.writers, solution.map, "writes", number)
    change = solution.map.cpu() - torch.eye(work.width, dtype=torch.float64)
    for (tokens, out), rest in zip(added, missing, strict=True):
        rest[tokens] -= (out @ change).to(rest.dtype)


def _solve(
    work: Work,
    parts: Iterable[tuple[Tensor, Tensor, Tensor]],
    ridge: float,
    what: str,
    towards: Tensor | None = None,
) -> tuple[float, Solution]:
    """Solve for one expert over all ranks; return the squares of what was wanted, too.

    parts: of each batch which tokens the map is tested on (N_e,), x and y (N_e, D).
    """
    problem, held_out = work.problems()
    for held, x, y in parts:
        for rows, sums in ((~held, problem), (held, held_out)):
            sums.add(
                x[rows.to(x.device)].to(work.device),
                y[rows.to(y.device)].to(work.device),
            )
    problem.sum_over(work.ranks)
    held_out.sum_over(work.ranks)
    if problem.count < work.width:  # they say little of it: it keeps the map of all
        problem.add_sums(held_out)
        residual = problem.residual(towards)
        solution = Solution(None, residual, residual)
    else:
        solution = problem.solve_checked(
            held_out, ridge, f"layer {work.index}, {what}", work.ranks, towards
        )
    return float(problem.yy), solution


def _num_experts(work: Work, experts: Experts) -> int:
    return len(work.layer.get_parameter(experts.writers[0][0]))


def _squares(work: Work, missing: Sequence[Tensor]) -> float:
    own = [
        work.rows(rest, place).double().square().sum()
        for place, rest in enumerate(missing)
    ]
    return float(sum(work.ranks.share(lambda: float(sum(own)))))
