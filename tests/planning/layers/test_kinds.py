"""Every kind of layer study and every reader of it: a value belongs to the connectivity
that it was measured with.

The studies are written by hand, for four layers of DeepSeek-V2-Lite, the first of them
dense. Each selection has a value of its own, which does not follow from others.
"""

import json
import re
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from matplotlib.axes import Axes

from fcsd.base.strict import validate
from fcsd.cli.main import main
from fcsd.model.connectivity.spec import ConnectivityConfig
from fcsd.planning.cost.measured import ExchangeTime, Times, write_times
from fcsd.planning.layers.first import special_layers
from fcsd.planning.layers.proposal import plan_layers, plan_text, study_table
from fcsd.planning.layers.settings import read_study
from fcsd.report.study_plots import plot_layers
from tests.planning.cost.test_plan import lite
from tests.support import change_json, edited_json, few

NUM_LAYERS = 4
KINDS = {
    "both": ("partial", "outdated", "--layers"),
    "attention": ("partial", "full", "--mlp full --layers"),
    "mlp": ("full", "outdated", "--attention full --layers"),
    "selected": ("partial", "selected", "--mlp"),
}
"""Kind of study -> attention, mlp, and the options that choose a selection of it."""

ATTENTION = 0.2988  # of attention alone, which is a part of every `selected` point
COSTS: dict[tuple[int, ...], float] = {
    (0,): 0.5, (1,): 0.03, (2,): 0.05, (3,): 0.02,
    (0, 1): 0.61, (0, 1, 2): 0.67, (0, 1, 2, 3): 0.83,
    (2, 3): 0.11, (1, 2, 3): 0.23,
}  # fmt: skip
"""Selection -> the KL that it adds to the original, or to attention alone."""


def value_of(kind: str, layers: tuple[int, ...], calibrated: bool = False) -> float:
    base = ATTENTION if kind == "selected" else 0.0
    return (0.7 if calibrated else 1) * (base + (COSTS[layers] if layers else 0.0))


def written(
    folder: Path, kind: str, *, calibrated: bool = False, task: bool = False
) -> Path:
    """Write a finished study of a kind into a new folder."""
    attention, mlp, _ = KINDS[kind]
    sides = [("attention", ())] if kind == "selected" else []
    sides += [("first", tuple(range(count))) for count in (1, 2, 3, 4)]
    sides += [("last", tuple(range(4 - count, 4))) for count in (1, 2, 3, 4)]
    if mlp != "full":
        sides += [("single", (layer,)) for layer in range(4)]
    sides = [*([("none", ())] if task else []), *sides]

    def point(side: str, layers: tuple[int, ...]) -> dict[str, Any]:
        def values(is_calibrated: bool) -> dict[str, Any]:
            kl = 0.0 if side == "none" else value_of(kind, layers, is_calibrated)
            quiz = {"quiz": {"value": 0.9 - kl / 10, "stderr": 0.001, "num_items": 50}}
            return {"kl": {"value": kl, "stderr": 0.001, "num_items": 100}} | (
                quiz if task else {}
            )

        facts = {"side": side, "num_layers": len(layers), "layers": list(layers)}
        more = {"calibrated": values(True)} if calibrated else {}
        return facts | {"values": values(False)} | more

    metrics = [{"name": "kl", "unit": "nats per token", "better": "lower"}]
    metrics += [{"name": "quiz", "unit": "acc", "better": "higher"}] if task else []
    study = {
        "schema_version": 1,
        "study": {
            "model": {"path": "x"}, "text": {"path": "y"}, "attention": attention, "mlp": mlp,
        },
        "num_hidden_layers": NUM_LAYERS, "moe_layers": [1, 2, 3], "metrics": metrics,
        "points": [point(*side) for side in sides],
    }  # fmt: skip
    folder.mkdir()
    (folder / "layers.json").write_text(json.dumps(study))
    (folder / "manifest.json").write_text(json.dumps({"inputs": {}}))
    return folder


def without_kl(folder: Path) -> Path:
    """Leave only the scores of tasks in a finished study, which choose its layers then."""
    with edited_json(folder / "layers.json") as study:
        study["metrics"] = study["metrics"][1:]
        for point in study["points"]:
            for weights in point.keys() & {"values", "calibrated"}:
                del point[weights]["kl"]
    (folder / "manifest.json").write_text(json.dumps({"inputs": {}}))
    return folder


Printed = Callable[..., Any]
Refused = Callable[[list[str], str], None]


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Refused:
    """Require that a command fails, and that its message matches."""

    def run(words: list[str], message: str) -> None:
        assert main(words) == 2
        assert re.search(message, capsys.readouterr().err)

    return run


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Printed:
    """Return what a command prints, read as JSON where it has --json."""

    def run(*words: str) -> Any:
        assert main([str(word) for word in words]) == 0
        text = capsys.readouterr().out
        return json.loads(text) if "--json" in words else text

    return run


@pytest.mark.parametrize("calibrated", few([True, False], 1))
@pytest.mark.parametrize("kind", few(reversed(KINDS), 1))
def test_a_plan_puts_a_loss_beside_the_gain_of_the_connectivity_that_has_it(
    kind: str, calibrated: bool, tmp_path: Path, printed: Printed
) -> None:
    model = lite(tmp_path)
    study = written(tmp_path / "s", kind, calibrated=calibrated)
    plan = ["plan", model, "--length", "512", "--json"]
    # The plan's own connectivity is another one in all kinds but one.
    rows = printed(*plan, "--study", study)["study"]
    assert len(rows) == (9 if kind == "selected" else 8) * (2 if calibrated else 1)
    alone: dict[str, float] = {}
    for row in rows:
        layers = {
            "first": tuple(range(row["num_layers"])),
            "last": tuple(range(NUM_LAYERS - row["num_layers"], NUM_LAYERS)),
            "attention": (),
        }[row["side"]]
        is_calibrated = row["weights"] == "calibrated"
        assert row["loss"] == pytest.approx(value_of(kind, layers, is_calibrated))
        words = ",".join(map(str, layers)) or "none"
        if row["options"] not in alone:
            # The same connectivity, planned by itself from options written here.
            own = shlex.split(f"{KINDS[kind][2]} {words}")
            # No layer follows a rewired MoE layer: refused as the regular model. Its
            # shared expert alone hides a little.
            if kind == "attention" and layers in ((0,), (0, 1), (3,)):
                assert 1 <= row["speed_up"] < 1.01
                continue
            alone[row["options"]] = printed(*plan, *own)["times"]["speed_up"]
        assert row["speed_up"] == pytest.approx(alone[row["options"]])
    assert any(gain > 1 for gain in alone.values())
    text = printed(*plan[:-1], "--study", study)
    header = next(
        line for line in text.splitlines() if "weights" in line and "|" in line
    )
    assert header.split("|")[1].strip() == KINDS[kind][2]


def test_a_study_of_mlp_sides_shows_attention_alone_beside_its_gain(
    tmp_path: Path, printed: Printed
) -> None:
    study = written(tmp_path / "s", "selected")
    plan = ["plan", lite(tmp_path), "--length", "512"]
    rows = printed(*plan, "--study", study, "--json")["study"]
    (row,) = (row for row in rows if row["side"] == "attention")
    assert (row["options"], row["loss"]) == ("--mlp none", pytest.approx(ATTENTION))
    gain = printed(*plan, "--mlp", "full", "--json")["times"]["speed_up"]
    assert row["speed_up"] == pytest.approx(gain) and gain > 1
    assert f"{gain:.3f} | 0.2988 |" in printed(*plan, "--study", study)


@pytest.mark.parametrize("metric", ["kl", "quiz"])
@pytest.mark.parametrize("calibrated", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_most_layers_within_a_loss_have_the_loss_that_was_measured(
    kind: str, calibrated: bool, metric: str, tmp_path: Path, printed: Printed
) -> None:
    study = written(tmp_path / "s", kind, calibrated=calibrated, task=True)
    if metric == "quiz":
        without_kl(study)
    share = 1.0 if metric == "kl" else 0.1
    base = ATTENTION if kind == "selected" else 0.0
    for limit, first, last in (
        # Between attention alone and the first layer, with the cheap ones, with all.
        (base + 0.001, 0, 0), (base + 0.12, 0, 2), (base + 0.9, 4, 4),
    ):  # fmt: skip
        words = ["plan-layers", study, "--max-loss", limit * share]
        answer = printed(*words, "--json")["within"]
        rows = {row["side"]: row for row in answer if not row["calibrated"]}
        assert [rows[end]["num_layers"] for end in ("first", "last")] == [first, last]
        for end, count in (("first", first), ("last", last)):
            layers = range(count) if end == "first" else range(4 - count, 4)
            cost = share * value_of(kind, tuple(layers))
            assert rows[end]["loss"]["value"] == pytest.approx(cost)
            assert rows[end]["within"]
            assert rows[end]["options"].startswith(KINDS[kind][2] + " ")
        for row in (row for row in answer if row["calibrated"]):
            count = row["num_layers"]
            layers = range(count) if row["side"] == "first" else range(4 - count, 4)
            cost = share * value_of(kind, tuple(layers), True)
            assert row["loss"]["value"] == pytest.approx(cost)
        header = printed(*words).splitlines()[0]
        assert header.split("|")[3].strip() == KINDS[kind][2]


def test_attention_alone_that_costs_too_much_is_not_within_the_loss(
    tmp_path: Path, printed: Printed
) -> None:
    study = written(tmp_path / "s", "selected")
    words = ["plan-layers", study, "--max-loss", "0.1"]
    for row in printed(*words, "--json")["within"]:
        assert row["num_layers"] == 0 and row["within"] is False
        assert row["loss"]["value"] == pytest.approx(ATTENTION)
    text = printed(*words)
    assert text.count("none: attention alone") == 2
    assert "0.2988 ± 0.001" in text and "0 ± 0 " not in text
    text = printed("plan-layers", study, "--max-loss", "0.3")
    assert "none: " not in text and "0.2988 ± 0.001" in text


@pytest.mark.parametrize("calibrated", [False, True])
@pytest.mark.parametrize("kind", ["both", "mlp", "selected"])
def test_a_sum_of_costs_counts_attention_alone_once(
    kind: str, calibrated: bool, tmp_path: Path
) -> None:
    study = written(tmp_path / "s", kind, calibrated=True)
    plan = plan_layers(study, "2", calibrated=calibrated)
    assert plan["layers"] == [1, 3]
    share, base = 0.7 if calibrated else 1, ATTENTION if kind == "selected" else 0.0
    rows = {row["name"]: row for row in plan["selections"]}
    assert rows["proposal"]["predicted"] == pytest.approx(share * (base + 0.03 + 0.02))
    last = rows["last 2"]
    assert last["predicted"] == pytest.approx(share * (base + 0.05 + 0.02))
    assert last["measured"]["value"] == pytest.approx(share * (base + 0.11))
    assert [row["value"] for row in plan["sensitivities"]] == pytest.approx(
        [share * (base + COSTS[layer,]) for layer in range(4)]
    )
    text = plan_text(plan)
    assert f"\n{KINDS[kind][2]} 1,3\n" in text
    section = yaml.safe_load(text[text.index("connectivity:") :])["connectivity"]
    spec = validate(ConnectivityConfig, section, "recipe").spec
    field = spec.field([False, True, True, True])
    attention, mlp, _ = KINDS[kind]
    layers: Any = ([0, 1, 2, 3], [1, 3]) if mlp == "selected" else ([1, 3], mlp)
    assert (field["layers"], field["mlp"]) == layers
    assert field["attention"] == attention


@pytest.mark.parametrize("kind", ["both", "mlp", "selected"])
def test_a_special_layer_is_one_that_adds_far_more_whatever_attention_alone_costs(
    kind: str, tmp_path: Path
) -> None:
    study = read_study(written(tmp_path / "s", kind, calibrated=True, task=True))
    for metric, share in (("kl", 1), ("quiz", 0.1)):
        special = special_layers(study, metric)
        assert special is not None and special["layers"] == [0]
        assert special["alone"] == pytest.approx([share * 0.5])
        assert special["typical"] == pytest.approx(share * 0.03)
        assert special["all"] == pytest.approx(share * value_of(kind, (0, 1, 2, 3)))
    head = KINDS[kind][2]
    text = study_table(study)
    assert f"All but the first layer ({head} last:3): KL" in text
    cost = f"{value_of(kind, (1, 2, 3)):.4f}"
    assert f"KL {cost} ± 0.001 copied" in text
    if kind == "selected":
        assert (
            "1 layer adds far more to attention alone (0.2988) than a typical one"
            " (0.03000): layer 0 0.5000, and all layers cost with attention 1.129."
        ) in text


def test_a_study_of_attention_alone_says_that_it_has_no_single_layers(
    tmp_path: Path, refused: Refused
) -> None:
    study = written(tmp_path / "s", "attention")
    refused(
        ["plan-layers", str(study), "--budget", "2"],
        r"mlp: full .* has no sensitivities: .* use --max-loss",
    )


def test_a_study_of_other_moe_layers_is_refused(
    tmp_path: Path, refused: Refused
) -> None:
    folder = written(tmp_path / "s", "both")
    change_json(folder / "layers.json", {"moe_layers": [0, 1, 2, 3]})
    refused(
        ["plan", lite(tmp_path), "--study", str(folder)],
        r"the study's MoE layers are 0-3, those of the model 1-3",
    )


def test_times_measured_with_one_connectivity_say_nothing_about_the_study_of_another(
    tmp_path: Path, refused: Refused, printed: Printed
) -> None:
    both = [
        ExchangeTime(layer=k, kind=kind, backward=back, seconds=0.01, window_s=0.02)
        for k in (1, 2, 3)
        for kind in ("dispatch", "combine")
        for back in (False, True)
    ]  # fmt: skip
    write_times(
        tmp_path / "times.json",
        Times(
            model_type="deepseek_v2", num_layers=4, ranks=8, batch=1, length=64,
            step_s=5.0, connectivity=ConnectivityConfig(), exchanges=both,
        ),
    )  # fmt: skip
    plan = ["plan", lite(tmp_path), "--length", "64", "--measured"]
    plan += [str(tmp_path / "times.json"), "--study"]
    for kind, message in (
        ("attention", r"measured with --mlp full --layers 0: --measured: mlp is outdated"),
        ("mlp", r"with --attention full --layers 0: --measured: attention is partial"),
        ("selected", r"measured with --mlp none: --measured: mlp is outdated in the file"),
    ):  # fmt: skip
        refused([*plan, str(written(tmp_path / kind, kind))], message)
    rows = printed(*plan, written(tmp_path / "both", "both"), "--json")["study"]
    (whole,) = (row for row in rows if (row["side"], row["num_layers"]) == ("last", 4))
    # All windows hold their exchanges but the one after the last layer.
    assert whole["loss"] == pytest.approx(0.83) and whole["speed_up"] > 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_figure_says_which_sides_were_rewired(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: dict[str, float] = {}
    labels: list[str] = []
    monkeypatch.setattr(
        Axes, "axhline", lambda _, y, *, label, **__: lines.update({label: y})
    )
    put = Axes.set

    def set_labels(axis: Axes, **values: Any) -> Any:
        labels.append(values.get("xlabel", ""))
        return put(axis, **values)

    monkeypatch.setattr(Axes, "set", set_labels)
    monkeypatch.setattr(Axes, "legend", lambda *_, **__: None)
    study = read_study(written(tmp_path / "s", kind))
    plot_layers(study, tmp_path / "figure.png")
    said: Mapping[str, str] = {
        "both": "N, rewired layers of 4",
        "attention": "N, rewired layers of 4, attention alone",
        "mlp": "N, rewired layers of 4, MLP side alone",
        "selected": "N of 4 layers whose MLP side is outdated, too",
    }
    assert said[kind] in labels
    expected = {"attention alone": ATTENTION} if kind == "selected" else {}
    assert lines == pytest.approx(expected)
