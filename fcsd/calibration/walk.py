"""Go through the decoder layers in order: solve and fold one, then hand both streams on to the next.

    for result in walk(models, state, batches, layers=[...], ridge=1e-3): ...

The same tokens go through teacher and student. Of a rewired layer, all layers before it being folded already:

1. x is what a branch of the student reads, y what the same branch of the teacher reads; A goes into what reads x.
2. u, v are what the student's branches then add; [u v] B ≈ o(teacher) - o(student) + u + v goes into what writes them:
   what the layer adds beside them (the stream, a part that cannot be folded) stays as it is.
3. What is then still missing goes into the routed experts, one after another (`fcsd.calibration.experts`).

A side whose input depends on another side of the same layer (`mlp: full`) is solved after that one is folded.

Not covered: where weights and streams come from and go to, between the layers; that is `Models` and the caller.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fcsd.calibration.experts import Call, adds_up, calls_of
from fcsd.calibration.solve import LeastSquares
from fcsd.calibration.steps import Steps, Stream
from fcsd.calibration.trace import Group, Place, Roles, Side, first_tensor, trace_layer
from fcsd.data.batches import Batch, real_tokens
from fcsd.distributed.ranks import ALONE, Ranks

EXPERT_RIDGE = 1e-2
_HELD_OUT = 4  # every so many-th row says whether an expert's map fits the others only
_TRACED_TOKENS = 64


class Models(Protocol):
    """Teacher and student, of which a layer is in memory while it is worked on."""

    student: Steps
    device: torch.device

    def teacher_step(self, index: int, batch: Batch, stream: Stream) -> Stream:
        """Return the teacher's stream behind a layer."""

    def teacher_layer(self, index: int) -> nn.Module:
        """Return the module that `teacher_step` runs."""

    def layer(self, index: int) -> contextlib.AbstractContextManager[Any]:
        """Have the weights of a layer in memory."""

    def fold(
        self, index: int, places: Sequence[Place], found: Tensor, side: Any, expert: int | None = None
    ) -> None:
        """Fold a map into weights of the student's layer, or into those of one expert."""


@dataclass
class State:
    """How far a walk is. student: None while it is the teacher's stream. results: one of each layer that was solved."""

    next_layer: int
    teacher: list[Stream]
    student: list[Stream] | None = None
    results: list[dict[str, Any]] = field(default_factory=list)


def walk(
    models: Models,
    state: State,
    batches: Sequence[Batch],
    *,
    layers: Sequence[int],
    ridge: float,
    ranks: Ranks = ALONE,
) -> Iterator[dict[str, Any] | None]:
    """Take `state` behind each next layer, up to the last of `layers`; yield its result, None if it has none.

    While a result is looked at, the layer is still loaded.

    All ranks call this, each with its share of the batches, at least one.

    Raises:
        UserError: as `LeastSquares.solve`.
    """
    masks = [real_tokens(batch).flatten() for batch in batches]
    for index in range(state.next_layer, max(layers) + 1):
        result = None
        with models.layer(index):
            if index in layers:
                if state.student is None:
                    state.student = list(state.teacher)
                result = _Layer(models, state, batches, masks, index, ranks).calibrate(ridge)
                state.results.append(result)
            else:
                _hand_on(models, state, batches, index)
            state.next_layer = index + 1
            yield result


def _hand_on(models: Models, state: State, batches: Sequence[Batch], index: int) -> None:
    for number, batch in enumerate(batches):
        batch = _on(batch, models.device)
        if state.student is not None:
            state.student[number] = _cpu(
                models.student.step(index, batch, _on(state.student[number], models.device))
            )
        state.teacher[number] = _cpu(
            models.teacher_step(index, batch, _on(state.teacher[number], models.device))
        )


class _Layer:
    """One rewired layer."""

    def __init__(
        self,
        models: Models,
        state: State,
        batches: Sequence[Batch],
        masks: list[Tensor],
        index: int,
        ranks: Ranks,
    ) -> None:
        assert state.student is not None
        self.models, self.state, self.student = models, state, state.student
        self.batches, self.masks, self.index, self.ranks = batches, masks, index, ranks
        self.layer: Any = models.student.layers[index]
        self.width = state.student[0]["o"].shape[-1]
        self.roles = self._trace()

    def _trace(self) -> Roles:
        batch = {name: value[:1, :_TRACED_TOKENS] for name, value in self.batches[0].items()}
        stream = {name: value[:1, :_TRACED_TOKENS] for name, value in self.student[0].items()}
        if "side" in stream:  # positions that lie behind the tokens that are traced
            stream["side"] = stream["side"].clamp(max=batch["input_ids"].shape[1] - 1)
        batch, stream = _on(batch, self.models.device), _on(stream, self.models.device)
        run = self.models.student.step
        return trace_layer(
            self.layer, self.models.student.family, lambda: run(self.index, batch, stream)["o"]
        )

    def calibrate(self, ridge: float) -> dict[str, Any]:
        result: dict[str, Any] = {"layer": self.index, "reads": {}, "adds": None, "experts": None}
        result["left"] = self.roles.left
        sides = self.roles.sides
        rounds = [sides] if self.layer.farskip_plan.outdated else [[side] for side in sides]
        later: list[dict[str, Tensor]] = []
        for number, round_sides in enumerate(rounds):
            problems = {side: LeastSquares(self.width, device=self.models.device) for side in round_sides}
            for place in range(len(self.batches)):
                ys = self._teacher(place, sides, later) if number == 0 else later[place]
                xs = self._inputs(place, round_sides) if round_sides else {}
                for side, problem in problems.items():
                    problem.add(xs[side.modules[0]], ys[side.modules[0]].to(self.models.device))
            for side, problem in problems.items():
                solution = self._solve(problem, ridge, f"what {side.modules[0]} reads")
                result["reads"][side.modules[0]] = [solution.before, solution.after]
                if solution.map is not None:
                    self.models.fold(self.index, side.readers, solution.map, "reads")
        if not rounds:
            for place in range(len(self.batches)):
                self._teacher(place, sides, later)
        if self.roles.groups:
            result["adds"] = self._outputs(ridge)
        if self.roles.experts:
            result["experts"] = self._experts()
        for place in range(len(self.batches)):
            self.student[place] = _cpu(self._step(place))
        return result

    def _teacher(self, place: int, sides: list[Side], later: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Run the teacher's layer on a batch; return what its branches read, and keep it for later rounds."""
        batch, device = _on(self.batches[place], self.models.device), self.models.device
        with _inputs_of(self.models.teacher_layer(self.index), sides) as found:
            stream = self.models.teacher_step(self.index, batch, _on(self.state.teacher[place], device))
        self.state.teacher[place] = _cpu(stream)
        ys = {name: _rows(value, self.masks[place]) for name, value in found.items()}
        if not self.layer.farskip_plan.outdated:
            later.append({name: value.cpu() for name, value in ys.items()})
        return ys

    def _inputs(self, place: int, sides: list[Side]) -> dict[str, Tensor]:
        """Return what the student gives these branches: by its norms, or by its layer, run until it has done so."""
        family = self.models.student.family
        names = family.in_norm, family.mlp_norm
        plain = self.layer.farskip_plan.outdated and (family.layout, family.residual) == ("pre_norm", "sum")
        if plain and isinstance(names[0], str) and isinstance(names[1], str):
            return self._normed(place, sides, names[0], names[1])
        with _inputs_of(self.layer, sides, stop=True) as found, contextlib.suppress(_Enough):
            self._step(place)
        return {name: _rows(value, self.masks[place]) for name, value in found.items()}

    @torch.no_grad()
    def _normed(self, place: int, sides: list[Side], in_norm: str, mlp_norm: str) -> dict[str, Tensor]:
        family, stream = self.models.student.family, _on(self.student[place], self.models.device)
        norms = getattr(self.layer, family.norms) if family.norms else self.layer
        found: dict[str, Tensor] = {}
        for side in sides:
            name = side.modules[0]
            mlp = name == family.moe
            x = stream["o"] if mlp else stream.get("partial", stream["o"])
            found[name] = _rows(getattr(norms, mlp_norm if mlp else in_norm)(x), self.masks[place])
        return found

    def _outputs(self, ridge: float) -> list[float]:
        groups = self.roles.groups
        problem = LeastSquares(self.width, len(groups), self.models.device)
        for place in range(len(self.batches)):
            with _outputs_of(self.layer, groups) as found:
                stream = self._step(place)
            x = [_rows(value, self.masks[place]).double() for value in found]
            target = self.state.teacher[place]["o"].to(self.models.device).double() - stream["o"].double()
            problem.add(torch.cat(x, -1), _rows(target, self.masks[place]) + sum(x))
        solution = self._solve(problem, ridge, "what its branches add")
        if solution.map is not None:
            for group, found_map in zip(groups, solution.map.split(self.width), strict=True):
                self.models.fold(self.index, group.writers, found_map, "writes")
        return [solution.before, solution.after]

    def _experts(self) -> list[float] | None:
        """Give every expert a map of its own; None where they cannot be called one by one."""
        group, cpu = self.roles.experts[0], torch.device("cpu")
        module = self.layer.get_submodule(group.modules[0])
        num_experts = len(self.layer.get_parameter(group.writers[0][0]))
        calls: list[Call] = []
        missing: list[Tensor] = []  # (N, D) of each batch
        understood = True
        for place in range(len(self.batches)):
            with calls_of(module) as found:
                stream = self._step(place)
            one = len(found) == 1 and len(found[0].hidden) == len(self.masks[place])
            understood = understood and one and (place > 0 or adds_up(module, found[0], num_experts))
            if understood:
                calls.append(found[0].to(cpu))
                missing.append((self.state.teacher[place]["o"] - stream["o"].cpu()).flatten(0, -2))
        if not all(self.ranks.share(lambda: understood)):
            return None
        before = self._squares(missing)
        for number in range(num_experts):
            self._expert(number, group, module, calls, missing)
        return [1.0, self._squares(missing) / before] if before else [0.0, 0.0]

    def _expert(
        self, number: int, group: Group, module: nn.Module, calls: list[Call], missing: list[Tensor]
    ) -> None:
        device = self.models.device
        problem, held_out = (LeastSquares(self.width, device=device) for _ in range(2))
        added: list[tuple[Tensor, Tensor]] = []
        row = 0
        for call, mask, rest, batch in zip(calls, self.masks, missing, self.batches, strict=True):
            with torch.no_grad():
                tokens, out = call.to(device).expert(module, number, mask)
            out, tokens = out.double() * group.factor, tokens.cpu()
            wanted = out + rest[tokens].to(device).double()
            num_rows, length = batch["input_ids"].shape
            held = (row + tokens // length) % _HELD_OUT == _HELD_OUT - 1
            for rows, sums in ((~held, problem), (held, held_out)):
                sums.add(out[rows.to(device)], wanted[rows.to(device)])
            added.append((tokens, out.cpu()))
            row += num_rows
        problem.sum_over(self.ranks)
        held_out.sum_over(self.ranks)
        if problem.count < problem.width:  # they say little of it: it keeps the map of all
            return
        what = f"layer {self.index}, what expert {number} adds"
        solution = problem.solve_checked(held_out, EXPERT_RIDGE, what, self.ranks)
        if solution.map is None:
            return
        self.models.fold(self.index, group.writers, solution.map, "writes", number)
        change = solution.map.cpu() - torch.eye(self.width, dtype=torch.float64)
        for (tokens, out), rest in zip(added, missing, strict=True):
            rest[tokens] -= (out @ change).to(rest.dtype)

    def _squares(self, missing: list[Tensor]) -> float:
        own = [
            _rows(rest, mask).double().square().sum() for rest, mask in zip(missing, self.masks, strict=True)
        ]
        return float(sum(self.ranks.share(lambda: float(sum(own)))))

    def _solve(self, problem: LeastSquares, ridge: float, what: str) -> Any:
        problem.sum_over(self.ranks)
        return problem.solve(ridge, f"layer {self.index}, {what}", self.ranks)

    def _step(self, place: int) -> Stream:
        device = self.models.device
        return self.models.student.step(
            self.index, _on(self.batches[place], device), _on(self.student[place], device)
        )


class _Enough(BaseException):
    """Ends a pass when everything that was wanted has been seen."""


@contextlib.contextmanager
def _inputs_of(layer: nn.Module, sides: Sequence[Side], stop: bool = False) -> Iterator[dict[str, Tensor]]:
    """Give what the first module of each side is called with, by its name."""
    found: dict[str, Tensor] = {}
    names = [side.modules[0] for side in sides]

    def hook(name: str) -> Any:
        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            given = kwargs.get("hidden_states", first_tensor(args))
            assert given is not None
            found[name] = given
            if stop and len(found) == len(names):
                raise _Enough

        return before

    hooks = [
        layer.get_submodule(name).register_forward_pre_hook(hook(name), with_kwargs=True) for name in names
    ]
    try:
        yield found
    finally:
        for one in hooks:
            one.remove()


@contextlib.contextmanager
def _outputs_of(layer: nn.Module, groups: Sequence[Group]) -> Iterator[list[Tensor]]:
    """Give what each group adds to the stream, when the layer has run."""
    found: list[Tensor] = []
    parts: dict[str, Tensor] = {}

    def hook(name: str) -> Any:
        def after(module: nn.Module, args: Any, out: Any) -> None:
            found_first = first_tensor(out)
            assert found_first is not None
            parts[name] = found_first

        return after

    names = [name for group in groups for name in group.modules]
    hooks = [layer.get_submodule(name).register_forward_hook(hook(name)) for name in names]
    try:
        yield found
        for group in groups:
            summed = [parts[name].reshape(-1, parts[name].shape[-1]) for name in group.modules]
            found.append(sum(summed[1:], summed[0]) * group.factor)
    finally:
        for one in hooks:
            one.remove()


def _rows(values: Tensor, mask: Tensor) -> Tensor:
    flat = values.reshape(-1, values.shape[-1])
    return flat if bool(mask.all()) else flat[mask.to(flat.device)]


def _on(values: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    return {name: value.to(device) for name, value in values.items()}


def _cpu(stream: Stream) -> Stream:
    return {name: value.cpu() for name, value in stream.items()}
