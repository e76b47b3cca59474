"""Go through the decoder layers in order: solve and fold the maps of a rewired layer,
then pass both streams on to the next layer.

The same tokens go through teacher and student. When a rewired layer is reached, all
layers before it are calibrated already:

1. x is the input of a student's branch, y that of the same branch of the teacher. The
   map A is folded into the weights that read x; routed experts get a map each
   (`fcsd.training.calibration.experts`).
2. u and v are then the outputs of the student's branches. The map in [u v] B ≈
   o(teacher) - o(student) + u + v is folded into the weights that write them. The other
   terms of the layer's output (the stream, a part that cannot be folded) stay as they
   are.
3. The remaining error goes into the routed experts, one after another.

A branch whose input depends on another branch of the same layer (`mlp: full`) is solved
after that branch is folded.

Not covered: branches into which nothing can be folded stay as they are (`Roles.rest`
lists them). `Models` and the caller load the weights and store the streams.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fcsd.base.hooks import After, Before, Stopped, first_tensor, hidden_states, hooked
from fcsd.data.batches import real_tokens
from fcsd.parallel.launch import ALONE, Ranks
from fcsd.training.calibration.experts import fold_adds, fold_reads
from fcsd.training.calibration.left_out import LeftOut
from fcsd.training.calibration.roles import Group, Roles, Side, roles_of
from fcsd.training.calibration.state import Models, State, Text, Work, move_past, to


def calibrate_layer(work: Work, ridge: float) -> dict[str, Any]:
    """Fold maps into a layer, move both streams past it, and return the residuals."""
    # Looked up again in each layer: a model may have dense ones, and several kinds.
    roles = roles_of(work.layer, work.models.student.family)
    held_out: dict[str, list[float]] = {}
    # The order matters: each step is solved on the layer after the previous steps, and
    # `_fold_reads` moves the teacher's stream, with which the others compare.
    result: dict[str, Any] = {
        "layer": work.index,
        "reads": _fold_reads(work, roles, ridge, held_out),
    }
    result |= {"adds": None, "experts": None, "left": roles.rest}
    if roles.groups:
        result["adds"] = _fold_adds(work, roles.groups, ridge, held_out)
    if roles.experts:
        result["experts"] = fold_adds(work, roles.experts)
    move_past(work.models.student_step, work.index, work.batches, work.student)
    return result | {"held_out": held_out}


def _fold_reads(
    work: Work, roles: Roles, ridge: float, held_out: dict[str, list[float]]
) -> dict[str, list[float]]:
    """Move the teacher's stream past the layer; map the inputs of the student's
    branches to the teacher's, and fold the maps.

    held_out: receives the same residuals on the held-out rows.
    """
    branches, experts = roles.sides, roles.experts
    expert_readers = set(experts.readers) if experts else set()

    def feeds_experts(branch: Side) -> bool:
        return bool(expert_readers) and expert_readers <= set(branch.readers)

    teacher_inputs = _teacher(work, branches)
    residuals: dict[str, list[float]] = {}
    # Where the MLP reads an outdated stream, no branch's input depends on another
    # branch of this layer, so one pass over the text serves them all.
    if work.layer.farskip_plan.outdated and branches:
        rounds = [branches]
    else:
        rounds = [[branch] for branch in branches]
    for round_branches in rounds:
        problems = {branch: work.problems() for branch in round_branches}
        expert_inputs: list[Tensor] = []
        for batch_index, ys in enumerate(teacher_inputs):
            xs = _inputs(work, batch_index, round_branches)
            for branch, problem in problems.items():
                x, y = xs[branch.modules[0]], ys[branch.modules[0]]
                work.add(problem, work.tested(batch_index), x, y)
                if feeds_experts(branch):
                    expert_inputs.append(x.cpu())
        for branch, problem in problems.items():
            name = branch.modules[0]
            solution = work.solve(problem, ridge, f"input of {name}")
            residuals[name] = [solution.before, solution.after]
            held_out[name] = list(solution.held_out)
            if solution.map is None:
                continue
            # The experts are left out here: `fold_reads` below gives each a map,
            # starting from the one that the router already has.
            work.models.fold(
                work.index,
                [weight for weight in branch.readers if weight not in expert_readers],
                solution.map,
                "reads",
            )
            if experts and feeds_experts(branch):
                pairs = [
                    (x, ys[name])
                    for x, ys in zip(expert_inputs, teacher_inputs, strict=True)
                ]
                by_expert = fold_reads(work, experts, pairs, solution.map)
                residuals |= {experts.module: by_expert} if by_expert else {}
    return residuals


def _teacher(work: Work, branches: list[Side]) -> list[dict[str, Tensor]]:
    """Run the teacher's layer on every batch; return the inputs of its branches at the
    tokens of text, by module name.
    """
    layer, branch_inputs = work.models.teacher.layers[work.index], []
    for batch_index, batch in enumerate(work.batches):
        with _inputs_of(layer, branches) as inputs:
            stream = work.models.teacher_step(
                work.index, batch, work.teacher[batch_index]
            )
        work.teacher[batch_index] = to(stream, "cpu")
        branch_inputs.append(
            {
                name: work.rows(value, batch_index).cpu()
                for name, value in inputs.items()
            }
        )
    return branch_inputs


def _inputs(work: Work, batch_index: int, branches: list[Side]) -> dict[str, Tensor]:
    """Return the inputs of the student's branches: computed by its norms alone, or by
    the layer, which runs until all of them are known.
    """
    family = work.models.student.family
    names = family.in_norm, family.mlp_norm
    # In a plain pre-norm layer both inputs are norms of the stream before the layer.
    # They need neither attention nor experts, which would take a tenth more time.
    plain = work.layer.farskip_plan.outdated and (family.layout, family.residual) == (
        "pre_norm",
        "sum",
    )
    if plain and isinstance(names[0], str) and isinstance(names[1], str):
        return _normed(work, batch_index, branches, names[0], names[1])
    with (
        _inputs_of(work.layer, branches, stop=True) as inputs,
        contextlib.suppress(Stopped),
    ):
        work.step(batch_index)
    return {name: work.rows(value, batch_index) for name, value in inputs.items()}


@torch.no_grad()
def _normed(
    work: Work, batch_index: int, branches: list[Side], in_norm: str, mlp_norm: str
) -> dict[str, Tensor]:
    family = work.models.student.family
    stream = to(work.student[batch_index], work.device)
    norms = getattr(work.layer, family.norms) if family.norms else work.layer
    inputs: dict[str, Tensor] = {}
    for branch in branches:
        name = branch.modules[0]
        is_mlp = name == family.moe
        # Attention reads the partial stream where a routed output is in flight; the
        # outdated input of the MLP is the stream before this layer's attention.
        x = stream["o"] if is_mlp else stream.get("partial", stream["o"])
        norm = getattr(norms, mlp_norm if is_mlp else in_norm)
        inputs[name] = work.rows(norm(x), batch_index)
    return inputs


def _fold_adds(
    work: Work, groups: list[Group], ridge: float, held_out: dict[str, list[float]]
) -> list[float]:
    problem = work.problems(len(groups))
    for batch_index in range(len(work.batches)):
        with _outputs_of(work.layer, groups) as outputs:
            stream = work.step(batch_index)
        x = [work.rows(value, batch_index).double() for value in outputs]
        # In float64, since the error is a small difference of two large streams.
        error = (
            work.teacher[batch_index]["o"].to(work.device).double()
            - stream["o"].double()
        )
        y = work.rows(error, batch_index) + sum(x)
        work.add(problem, work.tested(batch_index), torch.cat(x, -1), y)
    solution = work.solve(problem, ridge, "outputs of its branches")
    # B (K·D, D) is one map above the other, in the order of the groups.
    if solution.map is not None:
        for group, matrix in zip(groups, solution.map.split(work.width), strict=True):
            work.models.fold(work.index, group.writers, matrix, "writes")
    held_out["adds"] = list(solution.held_out)
    return [solution.before, solution.after]


@contextlib.contextmanager
def _inputs_of(
    layer: nn.Module, branches: Sequence[Side], stop: bool = False
) -> Iterator[dict[str, Tensor]]:
    """Record the input of the first module of each branch, by module name.

    stop: end the pass with `Stopped` once all inputs are recorded.
    """
    inputs: dict[str, Tensor] = {}
    # All modules of a branch read the same input.
    names = [branch.modules[0] for branch in branches]

    def recorder(name: str) -> Before:
        def record(args: Any, kwargs: Any) -> None:
            hidden = hidden_states(args, kwargs)
            assert hidden is not None
            inputs[name] = hidden
            if stop and len(inputs) == len(names):
                raise Stopped

        return record

    with hooked(before=[(layer.get_submodule(name), recorder(name)) for name in names]):
        yield inputs


@contextlib.contextmanager
def _outputs_of(layer: nn.Module, groups: Sequence[Group]) -> Iterator[list[Tensor]]:
    """Record the output that each group adds to the stream; the list is filled when the
    block ends.
    """
    sums: list[Tensor] = []
    outputs: dict[str, Tensor] = {}

    def recorder(name: str) -> After:
        def record(args: Any, kwargs: Any, out: Any) -> None:
            tensor = first_tensor(out)
            assert tensor is not None
            outputs[name] = tensor.reshape(-1, tensor.shape[-1])

        return record

    names = [name for group in groups for name in group.modules]
    with hooked(after=[(layer.get_submodule(name), recorder(name)) for name in names]):
        yield sums
    for group in groups:
        group_outputs = [outputs[name] for name in group.modules]
        sums.append(sum(group_outputs[1:], group_outputs[0]) * group.factor)


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
    """Move `state` past one layer after another, up to the last of `layers`; yield the
    result of each, or None for a layer that is not calibrated.

    All ranks call this, also those without text. A layer is still loaded when its
    result is yielded. Raises UserError as `LeastSquares.solve`.

    left_out: rows whose streams go through all layers of the model.
    """
    masks = [real_tokens(batch).flatten() for batch in text.batches]
    end = max(layers) + 1
    last = end if left_out is None else len(models.student.layers)
    for index in range(state.next_layer, last):
        result = None
        with models.layer(index):
            if left_out is not None:
                left_out.before_folding(models, index)
            if index in layers:
                # None: no layer so far is rewired, and both streams are the same.
                if state.student is None:
                    state.student = list(state.teacher)
                work = Work(
                    models, index, text, masks, state.teacher, state.student, ranks
                )
                result = calibrate_layer(work, ridge)
                state.results.append(result)
            elif index < end:
                if state.student is not None:
                    move_past(models.student_step, index, text.batches, state.student)
                move_past(models.teacher_step, index, text.batches, state.teacher)
            if left_out is not None:
                left_out.behind_folding(models, index)
            state.next_layer = index + 1
            yield result
