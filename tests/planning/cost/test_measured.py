"""A plan from measured times: by hand, and against two ranks whose link is limited."""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.overlap.__main__ import complete, parser
from benchmarks.overlap.modes import Bench, exchanged_bytes
from benchmarks.overlap.report import write_blocking_times
from benchmarks.plan import V3, planned
from fcsd.base.files import read_json
from fcsd.cli.main import main
from fcsd.model.connectivity import Connectivity
from fcsd.parallel.overlap.exchange import Record
from fcsd.parallel.overlap.measure import exchange_times, median_times
from fcsd.planning.cost.measured import ExchangeTime, Times, measured_times, read_times
from fcsd.planning.cost.planned import Planned
from fcsd.planning.cost.times import plan_times
from tests.real_configs import CONFIGS
from tests.reference.ranks import run_ranks
from tests.support import command_words, user_error

SMALL = "--layers 2 --exchange-ms 90"


def rewired(one: Planned, layers: list[int]) -> Planned:
    return replace(one, connectivity=Connectivity(layers))


def options() -> argparse.Namespace:
    return complete(
        parser().parse_args([*SMALL.split(), "--modes", "blocking", "full"])
    )


class Clock:
    """A clock that advances only while something sleeps or waits for the link: `time`,
    as far as the benchmark uses it.
    """

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class SimulatedLink:
    """`benchmarks.overlap.links.Link` on a simulated clock: the rows are there at once,
    and count as arrived when a link that carries one exchange after another would
    deliver them.
    """

    def __init__(self, clock: Clock, seconds_per_byte: float):
        self.clock, self.seconds_per_byte, self.free = clock, seconds_per_byte, 0.0

    def __call__(self, group: Any) -> "SimulatedLink":
        self.group = group
        return self

    def start(self, received: Any, sent: Any, receive: Any, send: Any) -> "Arrival":
        dist.all_to_all_single(received, sent, receive, send, group=self.group)
        row_bytes = sent[:1].numel() * sent.element_size() if len(sent) else 0
        num_bytes = (sum(send) - send[dist.get_rank(self.group)]) * row_bytes
        # An exchange begins when the last rank starts it, and takes as long as that of
        # the fullest rank.
        slowest = torch.tensor([self.clock.now, num_bytes], dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=self.group)
        began, most = slowest.tolist()
        self.free = max(began, self.free) + most * self.seconds_per_byte
        return Arrival(self.clock, self.free)


class Arrival:
    """The end of an exchange, to which the clock advances."""

    def __init__(self, clock: Clock, at: float):
        self.clock, self.at = clock, at

    def wait(self) -> None:
        self.clock.now = max(self.clock.now, self.at)


def steps(rank: int) -> dict[str, list[dict[str, Any]]]:
    """Return a step in each of the benchmark's modes, timed by a simulated clock."""
    chosen, clock = options(), Clock()
    bench = Bench(chosen, clock)
    seconds = chosen.exchange_ms / 1e3
    bench.link = SimulatedLink(clock, seconds / exchanged_bytes(chosen))
    return {mode: [bench.step(mode)] for mode in ("blocking", "full")}


def test_times_of_blocking_steps_predict_the_overlapped_ones_on_two_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """8 exchanges of about 90 ms: forward windows of 80, 55, 50 and 25 ms; backward
    windows are longer than the exchanges, except the first (50).
    """
    by_mode = run_ranks(steps, 2)[0]
    chosen = options()
    chosen.times = tmp_path
    write_blocking_times(chosen, by_mode["blocking"])
    words = ["--gpus-per-node", "2", "--batch", "2", "--length", "64", "--json"]
    assert (
        main(
            ["plan", str(tmp_path), "--measured", str(tmp_path / "times.json"), *words]
        )
        == 0
    )
    facts = json.loads(capsys.readouterr().out)
    (blocking,), (full,) = by_mode["blocking"], by_mode["full"]
    assert facts["times"]["speed_up"] == pytest.approx(
        blocking["step"] / full["step"], rel=1e-9
    )
    # hiding everything would give about 1.8
    assert 1.2 < facts["times"]["speed_up"] < 1.75
    assert not facts["upper_bound"] and facts["sensitivity"] == []
    windows = [
        (row["dispatch_s"], row["combine_s"]) for row in facts["times"]["windows"]
    ]
    assert windows == [pytest.approx((0.08, 0.055)), pytest.approx((0.05, 0.025))]
    assert facts["times"]["exchange_s"]["combine"] == pytest.approx(0.09, rel=0.1)


def test_a_window_begins_when_the_rows_are_there_and_ends_where_they_are_needed():
    def step(seconds: float, window: float) -> list[dict[str, Any]]:
        sent = Record(
            "dispatch",
            3,
            True,
            100,
            10.0,
            waiting=10.0,
            waited=10 + seconds,
            needed=10 + seconds + window,
        )
        counts = Record("counts", 3, False, 8, 9.0, waiting=9.0, waited=9.5)
        return exchange_times([counts, sent])

    (exchange,) = median_times([step(1, 5), step(2, 4), step(9, 6)])
    assert (exchange["layer"], exchange["kind"], exchange["backward"]) == (
        3,
        "dispatch",
        True,
    )
    assert (exchange["seconds"], exchange["window_s"]) == pytest.approx((2, 5))


def times(**changes: Any) -> Times:
    def exchange(layer: int, kind: Any, backward: bool, window: float) -> ExchangeTime:
        return ExchangeTime(
            layer=layer, kind=kind, backward=backward, seconds=0.1, window_s=window
        )

    exchanges = [
        exchange(layer, kind, backward, window * (2 if backward else 1))
        for layer in range(6)
        for kind, window in (("dispatch", 0.04), ("combine", 0.08))
        for backward in (False, True)
    ]
    facts = {
        "model_type": "deepseek_v3", "num_layers": 6, "connectivity": {}, "ranks": 8, "batch": 1, "length": 64,
        "step_s": 5.0,
    }  # fmt: skip
    return Times(**({"exchanges": exchanges} | facts | changes))


def test_a_step_loses_of_each_exchange_what_its_window_holds() -> None:
    one = planned("DeepSeek-V3", V3, {"length": 64})
    all_of_it = measured_times(times(slowdown=0.0), one)
    assert all_of_it["overlapped_s"] == pytest.approx(
        5 - 6 * (0.04 + 0.08 + 0.08 + 0.1)
    )
    assert all_of_it["overlap"] == pytest.approx({"forward": 0.6, "backward": 0.9})
    assert all_of_it["communication_share"] == pytest.approx(2.4 / 5)
    slowed = measured_times(times(), one)  # assumed: 0.15 of what is hidden
    assert slowed["overlapped_s"] == pytest.approx(5 - 0.85 * 1.8)
    assert slowed["speed_up"] == pytest.approx(5 / (5 - 0.85 * 1.8))
    # Layers 4 and 5: two dispatches and both combines, the last of which keeps its own
    # window.
    last = measured_times(times(slowdown=0.0), rewired(one, [4, 5]))
    assert last["overlapped_s"] == pytest.approx(5 - 2 * 0.3)
    # Layer 1 alone: no layer waits for its combine, which runs beside its own
    # attention, as its dispatch does.
    single = measured_times(times(slowdown=0.0), rewired(one, [1]))
    assert single["overlapped_s"] == pytest.approx(5 - 0.3)
    assert single["windows"][1:3] == [
        {"layer": 1, "dispatch_s": 0.04, "combine_s": 0.08},
        {"layer": 2, "dispatch_s": 0.0, "combine_s": 0.0},
    ]
    assert last["windows"][4] == {"layer": 4, "dispatch_s": 0.04, "combine_s": 0.08}


def test_of_a_server_the_gain_follows_from_its_exposed_share() -> None:
    one = planned(
        "DeepSeek-V3", V3, {"length": 64, "phase": "prefill", "gpu": "mi300x"}
    )
    served = {
        "phase": "prefill", "exchanges": [], "step_s": 1.0, "communication_s": 0.16, "overlap": 0.976,
    }  # fmt: skip
    known = measured_times(times(**served), one)
    assert known["speed_up"] == pytest.approx(1 / (1 - 0.16 * 0.976))
    assert known["overlapped_s"] == pytest.approx(1 - 0.16 * 0.976)
    # Not measured: how much the plan hides, and how much that slows computation; NCCL
    # on a side stream takes longer than the engine's own all-reduces.
    unknown, plan = (
        measured_times(times(**served | {"overlap": None}), one),
        plan_times(one),
    )
    assert 0 < unknown["overlap"]["forward"] < 1
    exposed, sent = (
        plan[name] / plan["communication_s"]
        for name in ("exposed_s", "overlapped_communication_s")
    )
    assert sent > 1
    assert unknown["overlapped_s"] == pytest.approx(
        1 - 0.16 * (1 - exposed - 0.15 * (sent - exposed))
    )
    # Nothing of the roofline is set against a measured step.
    assert "engine_beside_s" in plan and "engine_beside_s" not in unknown


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step_s": 2.0}, "step_s: 2, but the communication in it takes 2.4"),
        ({"exchanges": []}, "a training step needs at least one"),
        ({"phase": "decode"}, "communication_s: required for a server (decode)"),
        ({"version": 2}, "version"),
        ({"step_s": float("nan")}, "step_s"),
        ({"connectivity": None}, "connectivity"),
        ({"num_layers": 5}, "exchanges: layer 5, but the model has 5, from 0 on"),
        ({"communication_s": 1e-9}, "communication_s and overlap: only for a server"),
        ({"slowdown": 5}, "slowdown: 5 seconds of computation lost per hidden second; must be at most 1"),
        ({"step_s": 2.4000001}, "the 1e-07 s that are left cannot hide 1.8"),
        ({"phase": "prefill", "exchanges": [], "communication_s": 4.9999988, "overlap": 1.0}, "left cannot hide 2.5"),
    ],
)  # fmt: skip
def test_times_that_cannot_be_are_one_line(
    tmp_path: Path, change: Any, message: str
) -> None:
    path = tmp_path / "times.json"
    path.write_text(json.dumps(times().model_dump(mode="json") | change))
    with user_error(r"^[^\n]*$") as refused:
        read_times(path)
    assert message in str(refused.value) and str(path) in str(refused.value)


def test_times_of_something_else_are_refused() -> None:
    one = planned("DeepSeek-V3", V3, {"length": 64})
    for name in ("model_type", "num_layers", "ranks", "batch"):
        other: Any = "qwen3_moe" if name == "model_type" else 3
        with user_error(f"--measured: {name} is {other} in the file"):
            measured_times(replace_field(times(), name, other), one)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--attention", "full"], "attention is partial in the file, but full in the plan"),
        (["--mlp", "full"], "mlp is outdated in the file, but full in the plan"),
    ],
)  # fmt: skip
def test_times_of_another_connectivity_are_refused(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = read_json(CONFIGS / "DeepSeek-V3.json") | V3
    (tmp_path / "config.json").write_text(json.dumps(config))
    path = tmp_path / "times.json"
    path.write_text(json.dumps(times().model_dump(mode="json")))
    plan = command_words("plan", tmp_path, "--gpu mi325x --length 64 --measured", path)
    # 5 / (5 - 0.85 x 1.8)
    assert main(plan) == 0 and "1.441" in capsys.readouterr().out
    assert main([*plan, *words]) == 2
    assert f"--measured: {message}; make them equal" in capsys.readouterr().err
    without = {
        name: value
        for name, value in times().model_dump(mode="json").items()
        if name != "connectivity"
    }
    path.write_text(json.dumps(without))
    assert main(plan) == 2
    assert "times.json: connectivity: " in capsys.readouterr().err


def test_a_selection_of_mlp_sides_is_compared_by_the_layers_that_it_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = read_json(CONFIGS / "DeepSeek-V3.json") | V3
    (tmp_path / "config.json").write_text(json.dumps(config))
    measured = times().model_dump(mode="json")
    measured["connectivity"]["mlp"] = "last:2"
    last = config["num_hidden_layers"] - 1
    path = tmp_path / "times.json"
    path.write_text(json.dumps(measured))
    plan = ["plan", str(tmp_path), "--gpu", "mi325x", "--length", "64"]
    plan += ["--measured", str(path), "--mlp"]
    assert main([*plan, f"{last - 1},{last}"]) == 0
    assert main([*plan, str(last)]) == 2
    message = f"mlp is [{last - 1}, {last}] in the file, but [{last}] in the plan"
    assert message in capsys.readouterr().err


def test_layers_of_which_nothing_was_measured_are_refused() -> None:
    one = planned("DeepSeek-V3", V3, {"length": 64})
    some = times(exchanges=[each for each in times().exchanges if each.layer > 2])
    assert measured_times(some, rewired(one, [3, 4, 5]))["speed_up"] > 1
    with user_error("rewires layer 0, but the file has no exchange for it"):
        measured_times(some, one)
    dense = planned("DeepSeek-V3", V3 | {"first_k_dense_replace": 1}, {"length": 64})
    with user_error("exchanges of layer 0, which is not an MoE layer"):
        measured_times(times(), dense)
    served = {
        "phase": "prefill", "exchanges": [], "step_s": 1.0, "communication_s": 0.16, "overlap": 0.9,
    }  # fmt: skip
    server = planned(
        "DeepSeek-V3", V3, {"length": 64, "phase": "prefill", "gpu": "mi300x"}
    )
    with user_error("overlap was measured with other layers rewired"):
        measured_times(times(**served), rewired(server, [4, 5]))


def replace_field(one: Times, name: str, value: Any) -> Times:
    return one.model_copy(update={name: value})
