"""`fcsd trace`: one step of both models under the profiler."""

import json

import pytest

from fcsd.planning.cost.measured import read_times
from tests.parallel.test_engines import EP, launch
from tests.support import Bench, run_command


def test_a_trace_shows_both_models_and_what_the_rewired_one_starts(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, folder = str(bench.recipe()), bench.folder / "traces"
    assert launch("cpu_2_ep", ["trace", recipe, *EP, "--output", str(folder)]) == [0]
    names = {
        "farskip.json", "overlap.json", "overlap.png", "regular.json", "times.json",
    }  # fmt: skip
    assert {path.name for path in folder.iterdir()} == names
    measured = json.loads((folder / "overlap.json").read_text())
    assert measured["regular"]["all"]["total"] > 0
    assert measured["farskip"]["all"]["total"] > 0
    events = {
        name: [
            event.get("name", "")
            for event in json.loads((folder / f"{name}.json").read_text())[
                "traceEvents"
            ]
        ]
        for name in ("regular", "farskip")
    }
    for phase in ("forward", "backward"):
        for kind in ("dispatch", "combine"):
            label = f"farskip::start {kind} {phase} 1"
            assert label in events["farskip"] and label not in events["regular"]
    assert any("all_to_all" in name for name in events["regular"])
    times = read_times(folder / "times.json")
    moe = {each.layer for each in times.exchanges}
    assert len(times.exchanges) == 4 * len(moe) and times.ranks == 2
    # The rows of a dispatch are needed after the core of attention, in every layer and
    # both passes.
    assert all(
        each.window_s > 0 and each.seconds > 0
        for each in times.exchanges
        if each.kind == "dispatch"
    )


def test_a_trace_without_expert_parallelism_is_refused(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        run_command("trace", bench.recipe(), "--output", bench.folder / "traces") == 2
    )
    assert (
        "needs --expert-parallel N, 2 or more; without it there is nothing"
        in capsys.readouterr().err
    )
