"""Go through the decoder layers in order: solve and fold a rewired one, then hand both
streams on to the next.

The same tokens go through teacher and student. For each rewired layer, all before it
being calibrated already:

1. x is what a branch of the student reads, y what the same branch of the teacher reads;
   A goes into what reads x, for routed experts one of their own
   (`fcsd.training.calibration.experts`).
2. u, v are what the student's branches then add; [u v] B ≈ o(teacher) - o(student) + u
   + v goes into what writes them: what the layer adds beside them (the stream, a part
   that cannot be folded) stays as it is.
3. What is then still missing goes into the routed experts, one after another.

A side whose input depends on another side of the same layer (`mlp: full`) is solved
after that one is folded.

Not covered: layers in which nothing of a branch can be folded are left alone there
(`Roles.rest` says so); where weights and streams come from and go to between the
layers, which is `Models`' and the caller's.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fcsd.base.hooks import After, Before, Stopped, first_tensor, hidden_states, hooked
from fcsd.data.batches import Batch, real_tokens
from fcsd.parallel.ranks import ALONE, Ranks
from fcsd.training.calibration.experts import fold_adds, fold_reads
from fcsd.training.calibration.left_out import LeftOut
from fcsd.training.calibration.roles import Group, Roles, Side, roles_of
from fcsd.training.calibration.state import Models, State, Text, Work, to


def calibrate_layer(work: Work, ridge: float) -> dict[str, Any]:
    """Fold maps into a layer and take both streams behind it; return what was solved."""
    roles = roles_of(work.layer, work.models.student.family)
    held_out: dict[str, list[float]] = {}
    result: dict[str, Any] = {
        "layer": work.index,
        "reads": _fold_reads(work, roles, ridge, held_out),
    }
    result |= {"adds": None, "experts": None, "left": roles.rest}
    if roles.groups:
        result["adds"] = _fold_adds(work, roles.groups, ridge, held_out)
    if roles.experts:
        result["experts"] = fold_adds(work, roles.experts)
    for place in range(len(work.batches)):
        work.student[place] = to(work.step(place), "cpu")
    return result | {"held_out": held_out}


def _fold_reads(
    work: Work, roles: Roles, ridge: float, held_out: dict[str, list[float]]
) -> dict[str, list[float]]:
    """Take the teacher's stream behind the layer, and fold what maps what the student's
    branches read to its.

    held_out: gets the same residuals of rows that were left out.
    """
    sides, experts = roles.sides, roles.experts
    own = experts.readers if experts else ()
    wanted = _teacher(work, sides)
    residuals: dict[str, list[float]] = {}
    together = work.layer.farskip_plan.outdated
    for round_sides in [sides] if together and sides else [[side] for side in sides]:
        problems = {side: work.problems() for side in round_sides}
        expert_inputs: list[Tensor] = []  # what the experts read
        for place, ys in enumerate(wanted):
            xs = _inputs(work, place, round_sides)
            for side, problem in problems.items():
                x = xs[side.modules[0]]
                work.add(problem, place, x, ys[side.modules[0]].to(work.device))
                expert_inputs += (
                    [x.cpu()] if own and set(own) <= set(side.readers) else []
                )
        for side, problem in problems.items():
            name = side.modules[0]
            solution = work.solve(problem, ridge, f"what {name} reads")
            residuals[name], held_out[name] = (
                [solution.before, solution.after],
                list(solution.held_out),
            )
            if solution.map is None:
                continue
            work.models.fold(
                work.index,
                [place for place in side.readers if place not in own],
                solution.map,
                "reads",
            )
            if experts and own and set(own) <= set(side.readers):
                pairs = [
                    (x, ys[name]) for x, ys in zip(expert_inputs, wanted, strict=True)
                ]
                by_expert = fold_reads(work, experts, pairs, solution.map)
                residuals |= {experts.module: by_expert} if by_expert else {}
    return residuals


def _teacher(work: Work, sides: list[Side]) -> list[dict[str, Tensor]]:
    """Run the teacher's layer on every batch; return what its branches read, of text,
    by their names.
    """
    layer, wanted = work.models.teacher.layers[work.index], []
    for place, batch in enumerate(work.batches):
        stream = to(work.teacher[place], work.device)
        with _inputs_of(layer, sides) as inputs:
            stream = work.models.teacher_step(
                work.index, to(batch, work.device), stream
            )
        work.teacher[place] = to(stream, "cpu")
        wanted.append(
            {name: work.rows(value, place).cpu() for name, value in inputs.items()}
        )
    return wanted


def _inputs(work: Work, place: int, sides: list[Side]) -> dict[str, Tensor]:
    """Return what the student gives these branches: by its norms, or by its layer, run
    until it has done so.
    """
    family = work.models.student.family
    names = family.in_norm, family.mlp_norm
    plain = work.layer.farskip_plan.outdated and (family.layout, family.residual) == (
        "pre_norm",
        "sum",
    )
    if plain and isinstance(names[0], str) and isinstance(names[1], str):
        return _normed(work, place, sides, names[0], names[1])
    with (
        _inputs_of(work.layer, sides, stop=True) as inputs,
        contextlib.suppress(Stopped),
    ):
        work.step(place)
    return {name: work.rows(value, place) for name, value in inputs.items()}


@torch.no_grad()
def _normed(
    work: Work, place: int, sides: list[Side], in_norm: str, mlp_norm: str
) -> dict[str, Tensor]:
    family, stream = work.models.student.family, to(work.student[place], work.device)
    norms = getattr(work.layer, family.norms) if family.norms else work.layer
    inputs: dict[str, Tensor] = {}
    for side in sides:
        name = side.modules[0]
        mlp = name == family.moe
        x = stream["o"] if mlp else stream.get("partial", stream["o"])
        inputs[name] = work.rows(getattr(norms, mlp_norm if mlp else in_norm)(x), place)
    return inputs


def _fold_adds(
    work: Work, groups: list[Group], ridge: float, held_out: dict[str, list[float]]
) -> list[float]:
    problem = work.problems(len(groups))
    for place in range(len(work.batches)):
        with _outputs_of(work.layer, groups) as outputs:
            stream = work.step(place)
        x = [work.rows(value, place).double() for value in outputs]
        target = (
            work.teacher[place]["o"].to(work.device).double() - stream["o"].double()
        )
        work.add(problem, place, torch.cat(x, -1), work.rows(target, place) + sum(x))
    solution = work.solve(problem, ridge, "what its branches add")
    if solution.map is not None:
        for group, matrix in zip(groups, solution.map.split(work.width), strict=True):
            work.models.fold(work.index, group.writers, matrix, "writes")
    held_out["adds"] = list(solution.held_out)
    return [solution.before, solution.after]


@contextlib.contextmanager
def _inputs_of(
    layer: nn.Module, sides: Sequence[Side], stop: bool = False
) -> Iterator[dict[str, Tensor]]:
    """Give what the first module of each side is called with, by its name."""
    inputs: dict[str, Tensor] = {}
    names = [side.modules[0] for side in sides]

    def keep(name: str) -> Before:
        def before(args: Any, kwargs: Any) -> None:
            hidden = hidden_states(args, kwargs)
            assert hidden is not None
            inputs[name] = hidden
            if stop and len(inputs) == len(names):
                raise Stopped

        return before

    with hooked(before=[(layer.get_submodule(name), keep(name)) for name in names]):
        yield inputs


@contextlib.contextmanager
def _outputs_of(layer: nn.Module, groups: Sequence[Group]) -> Iterator[list[Tensor]]:
    """Give what each group adds to the stream, when the layer has run."""
    sums: list[Tensor] = []
    parts: dict[str, Tensor] = {}

    def keep(name: str) -> After:
        def after(args: Any, kwargs: Any, out: Any) -> None:
            tensor = first_tensor(out)
            assert tensor is not None
            parts[name] = tensor.reshape(-1, tensor.shape[-1])

        return after

    names = [name for group in groups for name in group.modules]
    with hooked(after=[(layer.get_submodule(name), keep(name)) for name in names]):
        yield sums
    for group in groups:
        summed = [parts[name] for name in group.modules]
        sums.append(sum(summed[1:], summed[0]) * group.factor)


def walk(
    models: Models,
    state: State,
    text: Text,
    *,
    layers: Sequence[int],
    ridge: float,
    ranks: Ranks = ALONE,
    left_out: LeftOut | None = None,
) -> Iterator[dict[str, Any] | None]:
    """Take `state` behind each next layer, up to the last of `layers`; yield its
    result, None if it has none.

    left_out: rows whose streams are taken along, through all layers of the model. While
    a result is looked at, the layer is still loaded. All ranks call this, also those
    without text. Raises UserError as `LeastSquares.solve`.
    """
    masks = [real_tokens(batch).flatten() for batch in text.batches]
    end = max(layers) + 1
    for index in range(
        state.next_layer, end if left_out is None else len(models.student.layers)
    ):
        result = None
        with models.layer(index):
            if left_out is not None:
                left_out.before_folding(models, index)
            if index in layers:
                if state.student is None:
                    state.student = list(state.teacher)
                work = Work(
                    models, index, text, masks, state.teacher, state.student, ranks
                )
                result = calibrate_layer(work, ridge)
                state.results.append(result)
            elif index < end:
                _hand_on(models, state, text.batches, index)
            if left_out is not None:
                left_out.behind_folding(models, index)
            state.next_layer = index + 1
            yield result


def _hand_on(
    models: Models, state: State, batches: Sequence[Batch], index: int
) -> None:
    for number, batch in enumerate(batches):
        batch = to(batch, models.device)
        if state.student is not None:
            stream = to(state.student[number], models.device)
            state.student[number] = to(models.student.step(index, batch, stream), "cpu")
        stream = to(state.teacher[number], models.device)
        state.teacher[number] = to(models.teacher_step(index, batch, stream), "cpu")
