"""Halves by planned time saved per loss: by hand, against all subsets, against plans of
each connectivity alone, and measured.
"""

import contextlib
import json
import re
from argparse import ArgumentParser
from collections.abc import Callable, Collection
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml

from fcsd.base.strict import validate
from fcsd.cli.main import main
from fcsd.cli.planning import COMMANDS
from fcsd.data.config import SourceConfig
from fcsd.data.dataset import heldout_rows
from fcsd.evaluation.own_text.measure import Original
from fcsd.evaluation.suites import load_suite
from fcsd.model.connectivity import Connectivity, load_model
from fcsd.model.connectivity.spec import ConnectivityConfig
from fcsd.model.load import load_tokenizer
from fcsd.pipeline import halves as halves_module
from fcsd.pipeline.plan import study_seconds
from fcsd.planning.cost.planned import prepare
from fcsd.planning.cost.settings import PlanSettings
from fcsd.planning.layers.front import (
    Half,
    Prices,
    choose,
    front,
    greedy,
    halves_connectivity,
)
from fcsd.planning.layers.points import number_text
from fcsd.planning.layers.settings import read_study
from fcsd.planning.layers.study import Measured
from fcsd.training.losses.heldout_kl import mean_kl, read_original
from tests.planning.cost.test_plan import lite
from tests.planning.layers.test_kinds import ATTENTION, KINDS, without_kl, written
from tests.planning.layers.test_study import ROWS, command
from tests.planning.layers.test_study import model as model
from tests.planning.layers.test_study import text as text
from tests.support import edited_json, evaluate, few

Run = Callable[..., Any]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Return what a command prints, read as JSON where it has --json."""

    def of(*words: Any) -> Any:
        capsys.readouterr()
        assert main([str(word) for word in words]) == 0
        printed = capsys.readouterr().out
        return json.loads(printed) if "--json" in words else printed

    return of


def study_of_lite(folder: Path, kind: str, **changes: Any) -> Path:
    """Write a study of a kind whose model is that of `lite`."""
    path = written(folder / kind, kind, **changes)
    with edited_json(path / "layers.json") as study:
        study["study"]["model"] = {"path": lite(folder)}
    return path


# ---- the order, by hand


def halves_of(prices: dict[int, float]) -> tuple[list[Half], Callable[..., float]]:
    """Return halves with these prices, and the sum of the prices of a set."""
    halves = {Half("MLP", layer): price for layer, price in prices.items()}
    return list(halves), lambda chosen: sum(halves[half] for half in chosen)


def layers_of(steps: Any) -> list[list[int | None]]:
    return [[half.layer for half in step] for step in steps]


def test_the_next_half_is_the_one_that_saves_most_time_per_loss() -> None:
    # 80, 60, 20 and 10 µs per nat; layer 4's exchange is hidden already.
    saves = {0: 6.0, 1: 8.0, 2: 4.0, 3: 4.0, 4: 0.0}
    halves, loss = halves_of({0: 0.3, 1: 0.1, 2: 0.4, 3: 4 / 60, 4: 0.001})

    def seconds(chosen: Collection[Half]) -> float:
        return 100.0 - sum(saves[half.layer or 0] for half in chosen)

    steps = list(greedy(halves, seconds, loss))
    assert layers_of(steps) == [[1], [3], [0], [2]]
    sizes = range(len(halves) + 1)
    subsets = [set_ for size in sizes for set_ in combinations(halves, size)]
    for count in range(5):
        path = [half for step in steps[:count] for half in step]
        # No other subset saves as much and costs less.
        for subset in subsets:
            if seconds(subset) <= seconds(path):
                assert loss(subset) >= loss(path) - 1e-12


def test_what_costs_nothing_comes_first_and_of_equal_halves_the_later_layer() -> None:
    halves, loss = halves_of({0: 0.1, 1: 0.1, 2: 0.0, 3: -0.2})
    saves = {0: 2.0, 1: 2.0, 2: 3.0, 3: 1.0}

    def seconds(chosen: Collection[Half]) -> float:
        return 9.0 - sum(saves[half.layer or 0] for half in chosen)

    assert layers_of(greedy(halves, seconds, loss)) == [[2], [3], [1], [0]]


def test_a_half_that_another_makes_worthless_or_worth_more_is_looked_at_again() -> None:
    # Layer 0 hides what layer 1 would hide, and layer 3 saves only beside layer 2.
    def seconds(chosen: Collection[Half]) -> float:
        layers = {half.layer for half in chosen}
        saved = 5.0 * bool({0, 1} & layers) + 4.0 * (2 in layers)
        return 50.0 - saved - 3.0 * ({2, 3} <= layers)

    halves, loss = halves_of({0: 0.1, 1: 0.11, 2: 0.2, 3: 0.1})
    assert layers_of(greedy(halves, seconds, loss)) == [[0], [2], [3]]


def test_halves_that_only_save_time_together_come_at_once() -> None:
    # Two stages of a pipeline, layers 0 and 1, 2 and 3: the slower sets the pace.
    def seconds(chosen: Collection[Half]) -> float:
        layers = {half.layer for half in chosen}
        return max(20.0 - len(layers & {0, 1}), 20.0 - len(layers & {2, 3}))

    halves, loss = halves_of({0: 0.1, 1: 0.2, 2: 0.4, 3: 0.3})
    steps = layers_of(greedy(halves, seconds, loss))
    assert [{*step} for step in steps] == [{0, 3}, {1, 2}]
    assert list(greedy(halves, lambda chosen: 20.0, loss)) == []


# ---- a front, by hand


def hand_seconds(spec: Connectivity) -> float:
    """Return the microseconds of four MoE layers, by hand: attention ahead hides 3 of
    each combine but the last; an MoE block ahead hides its dispatch of 4, but layer 2's
    is hidden by its shared expert wherever the layer is rewired.
    """
    field = spec.field([False, True, True, True])
    layers, ahead = set(field["layers"]), set(spec.outdated_layers([True] * 4))
    carried = sum(
        3.0 for k in layers if k + 1 in layers and field["attention"] == "partial"
    )
    return 100.0 - carried - 4.0 * len(ahead - {2}) - 4.0 * (2 in layers)


def test_a_front_goes_from_regular_through_attention_to_the_blocks(
    tmp_path: Path,
) -> None:
    facts = front(
        read_study(written(tmp_path / "s", "selected", task=True)), "kl", False, hand_seconds
    )  # fmt: skip
    steps = facts["rows"][: facts["steps"]]
    # Attention saves 13 at 0.2988; beside it layer 3 saves 4 at 0.02, 1 at 0.03, 0 at
    # 0.5. Layer 2's dispatch is hidden then: its block ahead saves nothing.
    assert [row["name"] for row in steps] == [
        "regular", "+ attention in all layers", "+ MLP 3", "+ MLP 1", "+ MLP 0",
    ]  # fmt: skip
    assert [row["saved_s"] for row in steps] == [0, 13, 17, 21, 25]
    # Sums of prices where the study did not measure the selection.
    assert [row["measured"] for row in steps] == [True, True, True, False, False]
    added = (0, 0.02, 0.05, 0.55)
    assert [row["loss"] for row in steps] == pytest.approx(
        [0, *(ATTENTION + loss for loss in added)]
    )
    quiz = [row["losses"]["quiz"]["value"] for row in steps]
    assert quiz == pytest.approx([row["loss"] / 10 for row in steps])
    beside = {row["name"]: row for row in facts["rows"][facts["steps"] :]}
    assert beside["last 2"]["saved_s"] == 13 + 4
    assert all(row["front"] for row in steps)
    assert {name: row["front"] for name, row in beside.items()} == dict.fromkeys(
        ["first 1", "first 2", "first 3", "first 4", "last 2", "last 3"], False
    )


def test_mlp_sides_have_no_price_without_the_attention_that_they_were_measured_beside(
    tmp_path: Path,
) -> None:
    study = read_study(written(tmp_path / "s", "selected"))
    # Damages of attention and of an MLP side may cancel.
    for point in study["points"]:
        if point["layers"] == [3]:
            point["values"]["kl"]["value"] = ATTENTION - 0.1

    def seconds(spec: Connectivity) -> float:
        return 100.0 - 4.0 * len(spec.outdated_layers([True] * 4))

    facts = front(study, "kl", False, seconds)
    for row in facts["rows"][1:]:
        assert row["connectivity"]["layers"] == "all"
        assert row["loss"] >= ATTENTION - 0.1 - 1e-9
    # Attention saves nothing here, so that it comes with the first side that does.
    assert facts["rows"][1]["name"] == "+ attention in all layers, MLP 3"
    assert choose(facts, max_loss=0.1)["name"] == "regular"


def test_a_block_whose_dispatch_is_hidden_already_is_never_ahead(
    tmp_path: Path,
) -> None:
    folder = written(tmp_path / "s", "selected")
    study = read_study(folder)
    # Attention ahead costs next to nothing, so it comes first.
    for point in study["points"]:
        point["values"]["kl"]["value"] -= ATTENTION - 0.001
    facts = front(study, "kl", False, hand_seconds)
    steps = facts["rows"][: facts["steps"]]
    assert [row["name"] for row in steps[1:]] == [
        "+ attention in all layers", "+ MLP 3", "+ MLP 1", "+ MLP 0",
    ]  # fmt: skip
    assert steps[-1]["connectivity"] == {"layers": "all", "mlp": [0, 1, 3]}


def test_attention_is_chosen_layer_by_layer_where_the_study_measured_it_so(
    tmp_path: Path,
) -> None:
    study = read_study(written(tmp_path / "s", "both"))
    study["moe_layers"] = [0, 1, 2, 3]
    study["attention"] = [
        {"layer": layer, "values": {"kl": {"value": price, "stderr": 0.001}}}
        for layer, price in ((1, 0.4), (2, 0.01), (3, 0.02))
    ]

    def seconds(spec: Connectivity) -> float:
        # Attention ahead hides 3 µs of the combine before it, an MLP side its dispatch.
        field, ahead = spec.field([True] * 4), spec.outdated_layers([True] * 4)
        carried = [k for k in field["layers"] if k - 1 in field["layers"]]
        partial = field["attention"] == "partial"
        return 100.0 - 3.0 * len(carried) * partial - 4.0 * len(ahead)

    facts = front(study, "kl", False, seconds)
    steps = facts["rows"][: facts["steps"]]
    # Per nat: attention 2 saves 300, MLP 3 then 175 with attention 3 between rewired
    # layers, MLP 1 133, MLP 2 80; MLP 0 7.8 with attention 1, which alone saves 7.5.
    assert [row["name"] for row in steps] == [
        "regular", "+ attention 2", "+ MLP 3", "+ MLP 1", "+ MLP 2", "+ MLP 0",
    ]  # fmt: skip
    assert [row["saved_s"] for row in steps] == [0, 3, 10, 14, 18, 25]
    assert [row["loss"] for row in steps] == pytest.approx(
        [0, 0.01, 0.05, 0.08, 0.23, 0.83]
    )
    # Attention 2 alone was measured, and so were the last three layers, and all.
    assert [row["measured"] for row in steps] == [True, True, False, False, True, True]
    assert [row["connectivity"] for row in steps[1:4]] == [
        {"layers": [1, 2], "mlp": "full"},
        {"layers": [1, 2, 3], "mlp": [3]},
        {"layers": [1, 2, 3], "mlp": [1, 3]},
    ]
    assert steps[4]["connectivity"] == {"layers": [1, 2, 3], "mlp": "outdated"}


def test_what_to_choose_is_a_number_a_loss_or_the_largest_share_saved(
    tmp_path: Path,
) -> None:
    facts = front(
        read_study(written(tmp_path / "s", "selected")), "kl", False, hand_seconds
    )
    assert choose(facts, num=2)["name"] == "+ MLP 1"
    assert choose(facts, num=0)["name"] == "+ attention in all layers"
    assert choose(facts, max_loss=0.0)["name"] == "regular"
    assert choose(facts, max_loss=0.3)["name"] == "+ attention in all layers"
    assert choose(facts, max_loss=0.32)["name"] == "+ MLP 3"
    assert choose(facts, max_loss=9)["name"] == "+ MLP 0"
    # Layer 0 costs far more than others. Without it 21 µs can be saved for 0.35 nats:
    # no row has more of the time than of the loss.
    assert facts["special"] == [0]
    assert choose(facts)["name"] == "+ MLP 1"
    # Where one step is all of the front, that step is chosen.
    first = choose(facts | {"rows": facts["rows"][:2]})
    assert first["name"] == "+ attention in all layers"


@pytest.mark.parametrize("better", ["higher", "lower"])
def test_a_loss_is_how_much_worse_a_task_becomes_whichever_way_is_better(
    better: str, tmp_path: Path
) -> None:
    study = read_study(written(tmp_path / "s", "both", task=True))
    study["metrics"][1]["better"] = better
    if better == "lower":
        for point in study["points"]:
            quiz = point["values"]["quiz"]
            quiz["value"] = 1.8 - quiz["value"]
    facts = front(study, "quiz", False, hand_seconds)
    rows = facts["rows"][1 : facts["steps"]]
    assert [row["name"] for row in rows] == [
        "+ layer 3", "+ layer 2", "+ layer 1", "+ layer 0",
    ]  # fmt: skip
    assert rows[0]["loss"] == pytest.approx(0.002)
    assert rows[1]["loss"] == pytest.approx(0.011)  # measured: the last two layers


# ---- with planned times


MACHINES = [
    "--length 512 --keep-activations",
    "--length 512 --pp 2 --global-batch 64",
    "--phase decode --batch 64 --length 2048",
    "--phase decode --dp 8 --batch 64 --length 2048 --all2all deepep_low_latency",
]


@pytest.mark.parametrize("kind", few(["selected", "both", "mlp"], 1))
@pytest.mark.parametrize("machine", few(MACHINES, 2))
def test_each_row_has_the_time_of_its_connectivity_planned_by_itself(
    kind: str, machine: str, tmp_path: Path, run: Run
) -> None:
    study = study_of_lite(tmp_path, kind)
    words = ["--gpu", "h200", *machine.split(), "--json"]
    result = run("plan-layers", study, *words)
    model = json.loads((study / "layers.json").read_text())["study"]["model"]["path"]
    rows = result["rows"]
    assert result["steps"] > 1 and len(rows) > result["steps"]
    for row in rows[:: 2 if kind == "both" else 3]:
        section = row["connectivity"]
        options = []
        for name, value in section.items():
            text = value if isinstance(value, str) else ",".join(map(str, value))
            options += [f"--{name}", text]
        times = run("plan", model, *words, *options)["times"]
        assert row["step_s"] == pytest.approx(times["overlapped_s"], rel=1e-9)
        assert row["speed_up"] == pytest.approx(times["speed_up"], rel=1e-9)
    # Every step saves time, and what is on the front is beaten by no other row.
    saved = [row["saved_s"] for row in rows[: result["steps"]]]
    assert saved == sorted(set(saved))
    for row in (row for row in rows if row["front"]):
        assert not any(
            other["loss"] < row["loss"] and other["saved_s"] > row["saved_s"]
            for other in rows
        )


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("by_layer", [False, True])
@pytest.mark.parametrize("everywhere", [0.004, 0.3])
def test_no_set_of_halves_saves_much_more_than_a_front_at_the_loss_of_a_step(
    everywhere: float, by_layer: bool, machine: str, tmp_path: Path
) -> None:
    study = read_study(study_of_lite(tmp_path, "selected"))
    for point in study["points"]:
        point["values"]["kl"]["value"] += everywhere - ATTENTION
    if by_layer:
        study["attention"] = [
            {"layer": k, "values": {"kl": {"value": price, "stderr": None}}}
            for k, price in ((2, everywhere / 3), (3, everywhere / 4))
        ]
    parser = ArgumentParser()
    COMMANDS["plan"].options(parser)
    words = [study["study"]["model"]["path"], *machine.split()]
    planned = prepare(PlanSettings.from_options(vars(parser.parse_args(words))))
    seconds = study_seconds(planned, None, tmp_path)
    facts = front(study, "kl", False, seconds)
    prices, mask = Prices.of(study, "kl", False), [False, True, True, True]
    regular_s, found = seconds(Connectivity("none")), []
    halves = prices.halves()
    for size in range(1, len(halves) + 1):
        for subset in combinations(halves, size):
            spec = halves_connectivity(study, frozenset(subset))
            # Sides have prices beside attention in all layers alone.
            if spec.outdated_layers(mask) and spec.attention_layers(mask) != [2, 3]:
                continue
            found.append((prices.total(spec, mask), regular_s - seconds(spec)))
    most = max(saved for _, saved in found)
    steps = facts["rows"][1 : facts["steps"]]
    assert steps
    for row in steps:
        lost = prices.total(Connectivity(**row["connectivity"]), mask)
        best = max(saved for loss, saved in found if loss <= lost + 1e-9)
        near = max(
            one["saved_s"] for one in facts["rows"] if one["loss"] <= row["loss"]
        )
        assert near >= best - 0.1 * most


@pytest.mark.parametrize("kind", few(KINDS, 1))
def test_the_lines_of_a_recipe_mean_the_connectivity_that_was_planned(
    kind: str, tmp_path: Path, run: Run
) -> None:
    study = study_of_lite(tmp_path, kind)
    for goal in ([], ["--max-loss", "0.4"], ["--max-loss", "0"]):
        words = ["plan-layers", study, "--gpu", "h100", "--length", "512", *goal]
        chosen = run(*words, "--json")["chosen"]
        text = run(*words)
        section = yaml.safe_load(text[text.index("connectivity:") :])["connectivity"]
        assert section == chosen["connectivity"] and "layers" in section
        spec = validate(ConnectivityConfig, section, "recipe").spec
        assert section["layers"] == "none" or "mlp" in section
        mask = [False, True, True, True]
        assert spec.field(mask) == Connectivity(**section).field(mask)
        # The options that are printed above it mean the same.
        (options,) = re.findall(r"^(--layers .*)$", text, flags=re.M)
        own = run("plan", tmp_path / "lite", *words[2:6], *options.split(), "--json")
        assert own["times"]["speed_up"] == pytest.approx(chosen["speed_up"])


def test_a_plan_shows_the_front_of_a_study_for_each_kind_of_weights(
    tmp_path: Path, run: Run
) -> None:
    study = study_of_lite(tmp_path, "selected", calibrated=True, task=True)
    plan = ["plan", tmp_path / "lite", "--length", "512", "--study", study]
    fronts = run(*plan, "--json")["fronts"]
    assert [one["calibrated"] for one in fronts] == [False, True]
    for one in fronts:
        own = run(
            "plan-layers", study, "--gpu", "h200", "--length", "512", "--json",
            *(["--calibrated"] if one["calibrated"] else []),
        )  # fmt: skip
        assert (one["rows"], one["chosen"]) == (own["rows"], own["chosen"])
    assert fronts[1]["chosen"]["loss"] == pytest.approx(
        0.7 * fronts[0]["chosen"]["loss"]
    )
    without_kl(study)
    text = run(*plan)
    assert "HALVES by time saved per loss, calibrated weights:" in text
    assert "quiz lost" in text and text.count("\nconnectivity:\n") == 2


def test_a_cluster_file_plans_as_the_options_do_with_its_own_assumptions(
    tmp_path: Path, run: Run
) -> None:
    study = study_of_lite(tmp_path, "selected")
    cluster = tmp_path / "cluster.yaml"
    words = ["plan-layers", study, "--length", "512", "--json"]
    own = run(*words, "--gpu", "h100", "--nodes", "2")
    cluster.write_text("gpu: h100\nnodes: 2\ngpus_per_node: 8\n")
    assert run(*words, "--cluster", cluster) == own
    slow = "gpu: h100\nnodes: 2\nassumptions: {latency_us: 47}\n"
    cluster.write_text(slow)
    assert (
        run(*words, "--cluster", cluster)["rows"][0]["step_s"]
        > own["rows"][0]["step_s"]
    )


def test_where_nothing_saves_time_the_regular_model_is_chosen(
    tmp_path: Path, run: Run
) -> None:
    study = study_of_lite(tmp_path, "selected")
    # Ranks that share nothing exchange nothing.
    words = ["plan-layers", study, "--gpu", "h100", "--gpus-per-node", "1"]
    words += ["--phase", "decode", "--tp", "1", "--batch", "4"]
    result = run(*words, "--json")
    assert (result["steps"], result["chosen"]["name"]) == (1, "regular")
    text = run(*words)
    assert "Nothing here saves time: the regular model is chosen." in text
    assert "\n--layers none\n" in text and "connectivity:\n  layers: none" in text


def test_a_study_of_single_layers_alone_has_a_front(tmp_path: Path, run: Run) -> None:
    study = study_of_lite(tmp_path, "mlp")
    with edited_json(study / "layers.json") as content:
        content["points"] = [p for p in content["points"] if p["side"] == "single"]
    figure = tmp_path / "front.png"
    plan = ["plan", tmp_path / "lite", "--length", "512", "--study", study]
    assert "Chosen: " in run(*plan, "--figure", figure)
    assert figure.stat().st_size > 5000


def test_without_a_machine_the_proposal_counts_collectives_and_says_what_is_better(
    tmp_path: Path, run: Run
) -> None:
    text = run("plan-layers", study_of_lite(tmp_path, "both"), "--budget", "2")
    assert "Every collective counts the same here. With --gpu or --cluster" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], r"give --budget or --max-loss; or, with .*--gpu or --cluster"),
        (["--budget", "2", "--phase", "decode"], r"--phase belongs to a plan"),
        (["--max-loss", "1", "--nodes", "2"], r"--nodes belongs to a plan"),
        (["--gpu", "h99"], r"h99"),
        (["--gpu", "h100", "--max-loss", "-1"], r"--max-loss -1: needs a number from 0"),
        (["--gpu", "h100", "--budget", "9"], r"budget '9': must be a share"),
        (["--gpu", "h100", "--calibrated"], r"copied weights only"),
        (["--gpu", "h100", "--cluster", "x.yaml"], r"--cluster and --gpu are both given"),
        (["--gpu", "h100", "--model", "/nowhere"], r"/nowhere"),
        (["--gpu", "h100", "--ep", "3"], r"--ep 3: does not divide"),
    ],
)  # fmt: skip
def test_what_cannot_be_chosen_is_one_line(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = study_of_lite(tmp_path, "both", task=True)
    assert main(["plan-layers", str(study), *words]) == 2
    printed = capsys.readouterr()
    (line,) = printed.err.strip().splitlines()
    assert re.search(message, line) and printed.out == ""


def test_a_study_of_another_model_has_no_front(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = study_of_lite(tmp_path, "both")
    content = json.loads((study / "layers.json").read_text())
    for changes, message in (
        ({"num_hidden_layers": 5}, "a study of 5 layers, but the model has 4"),
        (
            {"moe_layers": [0, 1]},
            "the study's MoE layers are 0-1, those of the model 1-3",
        ),
    ):
        (study / "layers.json").write_text(json.dumps(content | changes))
        assert main(["plan-layers", str(study), "--gpu", "h100"]) == 2
        assert message in capsys.readouterr().err


# ---- measured


def test_a_study_measures_attention_ahead_in_one_layer_and_continues(
    model: Path, text: Path, tmp_path: Path, run: Run
) -> None:
    words = command(model, text, tmp_path / "s", "--sides", "single,attention")
    printed = run(*words)
    path = tmp_path / "s" / "layers.json"
    study = read_study(tmp_path / "s")
    # Layer 0 is dense: nothing of it is in flight when attention 1 begins.
    assert [entry["layer"] for entry in study["attention"]] == [2, 3]
    source = SourceConfig(path=str(text))
    rows = heldout_rows(source, load_tokenizer(model), **ROWS)  # type: ignore[arg-type]
    original = read_original(load_model(model), rows)
    for entry in study["attention"]:
        layers = [entry["layer"] - 1, entry["layer"]]
        converted = load_model(model, connectivity=Connectivity(layers, mlp="full"))
        measured = mean_kl(original, converted, rows)["kl"]
        assert entry["values"]["kl"]["value"] == pytest.approx(measured, rel=1e-5)
        # The combine before it is in flight beside it; no other is.
        value = re.escape(number_text(entry["values"]["kl"]))
        row = rf"only attention {entry['layer']} +\| +{value} \| +1 of 6 \|"
        assert re.search(row, printed)
    whole = path.read_bytes()
    for kept in (0, 1, 2):
        (tmp_path / "s" / "manifest.json").unlink()
        begun = json.loads(whole)
        begun["attention"] = begun["attention"][:kept]
        del begun["sha256"]
        path.write_text(json.dumps(begun) if kept < 2 else whole.decode())
        run(*words)
        assert path.read_bytes() == whole
    result = run("plan-layers", tmp_path / "s", "--gpu", "h100", "--ep", "4", "--json")
    names = {row["name"] for row in result["rows"][: result["steps"]]}
    assert any(name.startswith("+ attention ") for name in names)
    # What read such a study before reads it as ever.
    assert (
        len(run("plan-layers", tmp_path / "s", "--budget", "2", "--json")["layers"])
        == 2
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--sides", "attention"], r"side 'attention' is measured beside others"),
        (["--sides", "single,attention", "--attention", "full"],
         r"attention: full would measure nothing: attention is ahead in no layer"),
        (["--sides", "single,attention", "--every", "2"], r"applies to the sides first"),
    ],
)  # fmt: skip
def test_attention_alone_that_cannot_be_measured_is_refused(
    words: list[str], message: str, model: Path, text: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    assert main(command(model, text, tmp_path / "s", *words)) == 2
    assert re.search(message, capsys.readouterr().err)


def test_verify_measures_the_choice_and_the_last_layers_that_are_as_fast(
    model: Path, text: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(halves_module, "study_seconds", lambda *_: hand_seconds)
    words = ["--mlp", "selected", "--sides", "single"]
    run(*command(model, text, tmp_path / "s", *words))
    result = run(
        "plan-layers", tmp_path / "s", "--gpu", "h100", "--ep", "4", "--budget", "2",
        "--verify", "--json",
    )  # fmt: skip
    source = SourceConfig(path=str(text))
    rows = heldout_rows(source, load_tokenizer(model), **ROWS)  # type: ignore[arg-type]
    original = load_model(model)
    # All four layers, with either sides, are as fast as anything.
    assert len(result["compared"]) == 3
    values = []
    for row in result["compared"]:
        assert row["step_s"] <= result["chosen"]["step_s"] * (1 + 1e-9)
        spec = Connectivity(**row["connectivity"])
        direct = mean_kl(
            read_original(original, rows), load_model(model, connectivity=spec), rows
        )
        assert row["measured"]["value"] == pytest.approx(direct["kl"], rel=1e-5)
        values.append(direct["kl"])
    for row, value in zip(result["compared"][1:], values[1:], strict=True):
        margin = row["difference"]["value"]
        assert margin == pytest.approx(values[0] - value, abs=1e-6)


def test_what_measured_better_and_is_as_fast_is_what_the_lines_say(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = iter([0.5, 0.2, 0.3])

    def measured(folder: Path, specs: Any, metric: str, *_: Any) -> list[Measured]:
        found = []
        for _spec, value in zip(specs, values, strict=False):
            item = {"value": value, "stderr": 0.001, "num_items": 2}
            found.append(Measured({metric: item}, {metric: [(value, 1), (value, 1)]}))
        return found

    monkeypatch.setattr(halves_module, "study_seconds", lambda *_: hand_seconds)
    monkeypatch.setattr(halves_module, "measure_selections", measured)
    printed = run(
        "plan-layers", study_of_lite(tmp_path, "selected"), "--gpu", "h100", "--ep", "4",
        "--max-loss", "0.36", "--verify",
    )  # fmt: skip
    name = "MoE blocks of the last 3"
    assert f"Take {name} instead: as fast, and measured better." in printed
    assert "more than --max-loss" not in printed  # 0.2 is within the limit
    assert printed.rstrip().endswith("mlp: [1, 2, 3]")
    assert "--layers all --mlp 1-3" in printed.splitlines()


@pytest.mark.breadth
def test_a_study_measures_own_text_and_its_front_has_it_beside_the_kl(
    model: Path, text: Path, tmp_path: Path, run: Run
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"text": f"{n} + {n % 7} is it {n} or {n}"}) for n in range(6)]
    prompts.write_text("\n".join(lines) + "\n")
    suite = tmp_path / "suite.yaml"
    row = {
        "task": "own", "kind": "own_text", "dataset": str(prompts), "prompt_tokens": 4,
        "max_new_tokens": 6,
    }  # fmt: skip
    suite.write_text(yaml.safe_dump({"name": "own", "tasks": [row]}))
    words = [
        "--mlp", "selected", "--sides", "single", "--suite", suite, "--task", "own",
    ]  # fmt: skip
    run(*command(model, text, tmp_path / "s", *map(str, words)))
    study = read_study(tmp_path / "s")
    assert study["metrics"][1] == {
        "name": "own", "unit": "nats per token", "better": "lower",
    }  # fmt: skip
    original = load_model(model)
    beside = Original(lambda: contextlib.nullcontext(original))
    points = {(p["side"], *p["layers"]): p["values"]["own"] for p in study["points"]}
    assert points["none",]["value"] == pytest.approx(0, abs=1e-6)
    for (side, *layers), value in list(points.items())[1:4]:
        spec = Connectivity("all", "partial", layers or "full")
        converted = load_model(model, connectivity=spec)
        result, _ = evaluate(
            converted, load_tokenizer(model), load_suite(suite), original=beside,
            progress=False,
        )  # fmt: skip
        measured = result["tasks"]["own"]["value"]
        assert value["value"] == pytest.approx(measured, rel=1e-4), side
    words = ["plan-layers", tmp_path / "s", "--gpu", "h100", "--phase", "decode"]
    words += ["--tp", "2", "--batch", "64"]
    facts = run(*words, "--json")
    assert facts["metric"]["name"] == "kl" and facts["steps"] > 1
    first = facts["rows"][1]["losses"]
    assert first["own"]["value"] > 0 and set(first) == {"kl", "own"}
    header = run(*words)
    assert "own added" in header and "KL" in header
    # Without the KL, own text chooses.
    without_kl(tmp_path / "s")
    facts = run(*words, "--json")
    assert facts["metric"]["name"] == "own" and facts["steps"] > 1
    assert facts["rows"][1]["losses"].keys() == {"own"}
    assert "own added" in run(*words)
