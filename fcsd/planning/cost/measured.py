"""Plan from measured times instead of the roofline: the contents of `times.json`, and
the plan made from them.

A training step with blocking exchanges has its seconds, the seconds of each exchange,
and the window of each exchange: the computation between its end and the point that
needs its rows. The overlapped step hides as much of each exchange as its window holds,
so

    overlapped = step - sum(min(seconds, window)) x (1 - slowdown)

whatever the kernels do. A server has its time, and the share of that time in which it
only communicates.

`fcsd trace` (docs/plan.md) and `python -m benchmarks.overlap --times` write the file,
for a server `fcsd-bench serve`.
"""

from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from fcsd.base.errors import UserError
from fcsd.base.files import read_editable, write_sealed
from fcsd.base.strict import Rule, Strict, refuse, validate
from fcsd.model.connectivity.selection import resolve_layers
from fcsd.model.connectivity.spec import ConnectivityConfig
from fcsd.parallel.overlap.schedule import beside
from fcsd.planning.cost.planned import Planned
from fcsd.planning.cost.times import gain, plan_times, summary


class ExchangeTime(Strict):
    """One exchange of a step, and its window."""

    layer: int = Field(ge=0)
    kind: Literal["dispatch", "combine"]
    backward: bool
    seconds: float = Field(ge=0, allow_inf_nan=False)
    window_s: float = Field(ge=0, allow_inf_nan=False)


class Times(Strict):
    """Measured times, and the model and setting to which they belong. step_s: the
    forward and backward pass of a micro-batch, or the time of a server.

    connectivity: that of the model whose windows or overlap were measured. exchanges:
    only for training. communication_s: only for a server, the exposed communication of
    the regular model; overlap: the share of it that is hidden in the converted model,
    null: as planned. data_parallel: a server's ranks exchange tokens (--dp) instead of
    summing. slowdown: null: the assumption.
    """

    version: Literal[1] = 1
    phase: Literal["train", "prefill", "decode"] = "train"
    model_type: str
    num_layers: int = Field(gt=0)
    connectivity: ConnectivityConfig
    ranks: int = Field(gt=0)
    data_parallel: bool = False
    batch: int = Field(gt=0)
    length: int = Field(gt=0)
    step_s: float = Field(gt=0, allow_inf_nan=False)
    exchanges: list[ExchangeTime] = Field(default_factory=list)
    communication_s: float | None = Field(None, ge=0, allow_inf_nan=False)
    overlap: float | None = Field(None, ge=0, le=1)
    slowdown: float | None = Field(None, ge=0, allow_inf_nan=False)

    rules: ClassVar[tuple[Rule, ...]] = (
        (
            lambda times: times.phase == "train" and not times.exchanges,
            "exchanges: a training step needs at least one",
        ),
        (
            lambda times: (
                times.phase == "train"
                and not times.communication_s == times.overlap is None
            ),
            "communication_s and overlap: only for a server; a training step has"
            " exchanges",
        ),
        (
            lambda times: times.phase != "train" and times.communication_s is None,
            "communication_s: required for a server ({0.phase})",
        ),
        (
            lambda times: times.layers_outside,
            "exchanges: layer {0.layers_outside[0]}, but the model has {0.num_layers},"
            " from 0 on",
        ),
        (
            lambda times: times.slowdown is not None and times.slowdown > 1,
            "slowdown: {0.slowdown:g} seconds of computation lost per hidden second;"
            " must be at most 1, or overlap would not pay off",
        ),
        (
            lambda times: times.sent_s >= times.step_s,
            "step_s: {0.step_s:g}, but the communication in it takes {0.sent_s:g}",
        ),
        # Computation of the same step hides it: a file with more hidden time is wrong.
        (
            lambda times: times.hidden_s > times.step_s - times.sent_s,
            lambda times: (
                f"step_s: {times.step_s:g}, of which {times.sent_s:g} are communication;"
                f" the {times.step_s - times.sent_s:g} s that are left cannot hide"
                f" {times.hidden_s:g}"
            ),
        ),
    )

    @property
    def layers_outside(self) -> list[int]:
        """Layers of exchanges that the model does not have."""
        layers = (exchange.layer for exchange in self.exchanges)
        return [layer for layer in layers if layer >= self.num_layers]

    @property
    def sent_s(self) -> float:
        """Seconds of communication in a step."""
        exchanged = sum(exchange.seconds for exchange in self.exchanges)
        return self.communication_s or exchanged

    @property
    def hidden_s(self) -> float:
        """Seconds of communication that the windows, or a server's overlap, hide."""
        hidden = sum(
            min(exchange.seconds, exchange.window_s) for exchange in self.exchanges
        )
        # One of the two all-reduces that a server runs per layer may hide the other; an
        # exchange hides none.
        free = 0.0 if self.data_parallel else 0.5
        return hidden + self.sent_s * max(0.0, (self.overlap or 0.0) - free)


def read_times(path: Path) -> Times:
    """Read and check a file of times; raise a UserError that names the fault."""
    return validate(Times, read_editable(path, "fcsd trace", ["step_s"]), str(path))


def write_times(path: Path, times: Times) -> None:
    """Write a file of times with its seal."""
    write_sealed(path, times.model_dump(mode="json"))


def measured_times(times: Times, planned: Planned) -> dict[str, Any]:
    """Compute the result of `plan_times` from measured times; raise UserError where
    something else was measured.
    """
    refuse(
        (
            planned.megatron,
            "--measured: the times are of fcsd's training, which has neither tensor nor"
            " pipeline parallelism; leave --tp and --pp out",
        ),
        *(
            (
                theirs != ours,
                f"--measured: {name} is {theirs} in the file, but {ours} in the plan;"
                " make them equal",
            )
            for name, (theirs, ours) in _compared(times, planned).items()
        ),
    )
    slowdown = (
        planned.machine.values["slowdown"] if times.slowdown is None else times.slowdown
    )
    if times.phase != "train":
        return _server_times(times, planned, slowdown)
    measured = {exchange.layer for exchange in times.exchanges}
    moe = {layer for layer, is_moe in enumerate(planned.work.moe) if is_moe}
    rewired = {layer for layer, is_so in enumerate(planned.rewired()) if is_so}
    refuse(
        (
            dense := sorted(measured - moe),
            lambda: (
                f"--measured: the file has exchanges of layer {dense[0]}, which is not an"
                " MoE layer"
            ),
        ),
        (
            missing := sorted((rewired & moe) - measured),
            lambda: (
                f"--measured: the plan rewires layer {missing[0]}, but the file has no"
                " exchange for it; measure with this layer rewired, or plan --layers that"
                " were measured"
            ),
        ),
    )
    # An exchange stays exposed if the plan computes nothing during it, whatever its
    # measured window.
    computed = beside(planned.facts())
    exchanges = [
        exchange
        if computed[exchange.layer][exchange.kind]
        else exchange.model_copy(update={"window_s": 0.0})
        for exchange in times.exchanges
    ]
    shares = {"forward": [0.0, 0.0], "backward": [0.0, 0.0]}
    for exchange in exchanges:
        share = shares["backward" if exchange.backward else "forward"]
        share[0] += min(exchange.seconds, exchange.window_s)
        share[1] += exchange.seconds
    hidden, sent = (sum(share[i] for share in shares.values()) for i in (0, 1))
    # Windows and mean seconds are those of the forward pass, as `plan_times` returns
    # them.
    forward = [exchange for exchange in exchanges if not exchange.backward]
    windows = {
        (exchange.layer, exchange.kind): exchange.window_s for exchange in forward
    }
    mean = {
        kind: sum(seconds) / len(seconds)
        for kind in ("dispatch", "combine")
        if (
            seconds := [
                exchange.seconds for exchange in forward if exchange.kind == kind
            ]
        )
    }
    return summary(times.step_s - sent, sent, sent - hidden, slowdown) | {
        "overlap": {
            name: done / total for name, (done, total) in shares.items() if total
        },
        "exchange_s": mean,
        "windows": [
            {
                "layer": k,
                **{
                    f"{kind}_s": windows.get((k, kind), 0.0)
                    for kind in ("dispatch", "combine")
                },
            }
            for k in sorted({layer for layer, _ in windows})
        ],
    }


def _server_times(times: Times, planned: Planned, slowdown: float) -> dict[str, Any]:
    assert times.communication_s is not None
    # The roofline gives the windows and the split of the communication; the seconds are
    # measured.
    estimate = plan_times(planned)
    estimate.pop("engine_beside_s", None)  # cannot be compared with a measured step
    share = times.communication_s / times.step_s
    if times.overlap is None:
        # The roofline's seconds as shares of its communication; hidden seconds slow the
        # computation down a little.
        sent_share, exposed_share = (
            estimate[name] / (estimate["communication_s"] or 1.0)
            for name in ("overlapped_communication_s", "exposed_s")
        )
        speed_up = 1 + gain(
            share, 1 - exposed_share - slowdown * (sent_share - exposed_share)
        )
    else:
        moe = planned.work.moe
        measured, layers = (
            resolve_layers(spec.layers, moe)
            for spec in (times.connectivity.spec, planned.connectivity)
        )
        if measured != layers:
            raise UserError(
                "--measured: overlap was measured with other layers rewired"
                f" ({times.connectivity.layers}) than planned; measure the planned"
                " layers, or plan the measured ones"
            )
        sent_share, exposed_share = 1.0, 1 - times.overlap
        # Measured on a whole server, so it includes the slowdown.
        speed_up = 1 + gain(share, times.overlap)
    return estimate | {
        "regular_s": times.step_s,
        "overlapped_s": times.step_s / speed_up,
        "speed_up": speed_up,
        "compute_s": times.step_s - times.communication_s,
        "communication_s": times.communication_s,
        "overlapped_communication_s": times.communication_s * sent_share,
        "exposed_s": times.communication_s * exposed_share,
        "communication_share": share,
        "overlap": {"forward": 1 - exposed_share / sent_share if sent_share else 0.0},
    }


def _measured_mlp(times: Times, planned: Planned) -> str | list[int]:
    """Return the MLP side's input; for a selection, its layers."""
    if times.connectivity.mlp in ("outdated", "full"):
        return str(times.connectivity.mlp)
    return times.connectivity.spec.field(planned.work.moe)["mlp"]


def _compared(times: Times, planned: Planned) -> dict[str, tuple[Any, Any]]:
    """Return what times and plan must have in common: that of the file, of the plan."""
    settings, train = planned.settings, planned.settings.phase == "train"
    sharing_experts = train or planned.wide
    return {
        "phase": (times.phase, settings.phase),
        "model_type": (times.model_type, planned.model_type),
        "num_layers": (times.num_layers, len(planned.work.layers)),
        "attention": (times.connectivity.attention, planned.connectivity.attention),
        "mlp": (_measured_mlp(times, planned), planned.mlp),
        "data_parallel": (times.data_parallel, planned.wide),
        "ranks": (
            times.ranks,
            planned.expert_parallel if sharing_experts else planned.tensor_parallel,
        ),
        "batch": (times.batch, settings.batch),
        "length": (times.length, settings.length),
    }
