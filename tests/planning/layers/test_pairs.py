"""Pairs of MLP sides against the exact KL of sets, against full logits, by hand and in studies."""

import copy
import json
import shutil
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from fcsd.cli.main import main
from fcsd.data.config import SourceConfig
from fcsd.data.dataset import heldout_rows
from fcsd.model.connectivity import Connectivity, convert_model, load_model
from fcsd.model.load import load_tokenizer
from fcsd.parallel.launch import ALONE
from fcsd.planning.layers import study as study_module
from fcsd.planning.layers.front import Prices, front, front_text
from fcsd.planning.layers.pairs import HiddenStates, pair_rows, second_moments
from fcsd.planning.layers.points import study_connectivity
from fcsd.planning.layers.proposal import least_costly, plan_layers, plan_text
from fcsd.planning.layers.settings import Study, read_study
from fcsd.training.losses.heldout_kl import OriginalOutputs, kl_by_row, read_original
from tests.planning.layers.test_kinds import ATTENTION, without_kl, written
from tests.planning.layers.test_study import ROWS, command
from tests.planning.layers.test_study import model as model
from tests.planning.layers.test_study import other_text as other_text
from tests.planning.layers.test_study import text as text
from tests.reference.tiny import tiny_model
from tests.support import few, forked_ranks, status_of

NUM_LAYERS = 4
CPU = torch.device("cpu")
KINDS = {"selected": {"mlp": "selected"}, "attention full": {"attention": "full"}}


# ---- to second order


@torch.no_grad()
def measured_study(kind: str, size: float, folder: Path) -> tuple[dict[str, Any], Any]:
    """Measure the MLP sides of a random model in float64, whose MoE blocks add `size` times
    as much, as a study does; return it, and the exact KL of a connectivity.
    """
    # All experts are active: a router's choice would be a step, not a small change.
    fields = {
        "num_hidden_layers": NUM_LAYERS, "vocab_size": 97, "num_experts": 4, "num_experts_per_tok": 4,
    }  # fmt: skip
    original = tiny_model("qwen2_moe", experts_implementation="eager", **fields)
    original = original.double()
    for layer in original.model.layers:
        layer.mlp.experts.down_proj *= size
        layer.mlp.shared_expert.down_proj.weight *= size
    generator = np.random.default_rng(0)
    rows = [
        {
            "input_ids": generator.integers(0, 97, 12),
            "labels": generator.integers(0, 97, 12),
            "position_ids": np.arange(12),
        }
        for _ in range(4)
    ]
    outputs = read_original(original, rows)
    settings = {"model": {"path": "x"}, "text": {"path": "y"}, "sides": ["single"]}
    spec = Study.model_validate(settings | KINDS[kind])
    kept = HiddenStates(folder / f"hidden-{size}", ALONE, 1)

    def kl_of(layers: Sequence[int], hidden: list[Tensor] | None = None) -> float:
        converted = copy.deepcopy(original)
        convert_model(converted, spec.connectivity(layers), regular_ok=True)
        sums, counts = kl_by_row(outputs, converted, rows, hidden=hidden)
        return sum(sums) / sum(counts)

    with_base = spec.mlp == "selected"
    points, files = [], []
    for layers in [[]] * with_base + [[layer] for layer in range(NUM_LAYERS)]:
        hidden: list[Tensor] = []
        value = {"kl": {"value": kl_of(layers, hidden), "stderr": None}}
        side = "single" if layers else "attention"
        points.append({"side": side, "layers": layers, "values": value})
        kept.keep(layers, "values", hidden)
        files.append(kept.path(layers, "values"))
    moments = second_moments(outputs, files, device=CPU, ranks=ALONE)
    study = {
        "study": {"attention": spec.attention, "mlp": spec.mlp},
        "num_hidden_layers": NUM_LAYERS,
        "moe_layers": list(range(NUM_LAYERS)),
        "points": points,
        "pairs": {"values": pair_rows(moments, with_base=with_base)},
    }
    return study, kl_of


@pytest.mark.parametrize("kind", few(KINDS, 1))
def test_the_error_of_what_prices_and_pairs_predict_falls_with_the_cube_of_the_damage(
    kind: str, tmp_path: Path
) -> None:
    errors: dict[tuple[int, ...], list[float]] = {}
    missed: dict[tuple[int, ...], list[float]] = {}
    for size in (0.02, 0.01, 0.005):
        study, kl_of = measured_study(kind, size, tmp_path)
        prices = Prices.of(study, "kl", False)
        by_sums = Prices.of(
            {key: study[key] for key in study if key != "pairs"}, "kl", False
        )
        for number in (2, 3, 4):
            for layers in combinations(range(NUM_LAYERS), number):
                spec = study_connectivity(study, layers)
                exact, mask = kl_of(layers), [True] * NUM_LAYERS
                error = prices.total(spec, mask) - exact
                errors.setdefault(layers, []).append(abs(error) / size**3)
                error = by_sums.total(spec, mask) - exact
                missed.setdefault(layers, []).append(abs(error) / size**3)
    # In units of the cube it is bounded; that of sums, of the square, doubles.
    worst = max(one[0] for one in errors.values())
    for large, half, quarter in errors.values():
        assert max(half, quarter) <= 1.2 * large + 0.2 * worst
    doubles = [one for one in missed.values() if one[2] > 3 * worst]
    assert len(doubles) >= 3
    for _, half, quarter in doubles:
        assert 1.6 < quarter / half < 3


# ---- where sums choose worse


class Toy:
    """States of a model whose head is the identity: logits are what is set here."""

    def __init__(self, folder: Path) -> None:
        generator = torch.Generator().manual_seed(0)
        self.logits = torch.randn(50, 6, generator=generator, dtype=torch.float64)
        head = nn.Linear(6, 6, bias=False)
        head.weight = nn.Parameter(torch.eye(6, dtype=torch.float64))
        config = PretrainedConfig()
        batches = [{"teacher_hidden": self.logits}]
        self.original = OriginalOutputs(batches, [0], head, config)
        self.kept = HiddenStates(folder / "hidden", ALONE, 1)

    def kl(self, change: Tensor) -> float:
        p, q = (z.log_softmax(-1) for z in (self.logits, self.logits + change))
        return float((p.exp() * (p - q)).sum(-1).mean())

    def pairs(self, changes: Sequence[Tensor]) -> dict[str, Any]:
        for layer, change in enumerate(changes):
            self.kept.keep([layer], "values", [self.logits + change])
        files = [self.kept.path([layer], "values") for layer in range(len(changes))]
        moments = second_moments(self.original, files, device=CPU, ranks=ALONE)
        return {"values": pair_rows(moments, with_base=False)}


def toy_changes() -> list[Tensor]:
    """Return changes of four layers: 0 and 1 in one direction, 2 in another, and 3 against
    that of 0.
    """
    generator = torch.Generator().manual_seed(1)
    one, two = 0.1 * torch.randn(2, 50, 6, generator=generator, dtype=torch.float64)
    return [one, 0.9 * one, 1.4 * two, -1.2 * one]


def test_a_proposal_by_pairs_is_better_where_damages_add_up(tmp_path: Path) -> None:
    changes, toy = toy_changes()[:3], Toy(tmp_path)
    alone = [toy.kl(change) for change in changes]
    folder = written(tmp_path / "s", "mlp")
    study = json.loads((folder / "layers.json").read_text())
    study |= {"num_hidden_layers": 3, "moe_layers": [0, 1, 2]}
    study["points"] = [
        {
            "side": "single",
            "num_layers": 1,
            "layers": [layer],
            "values": {"kl": {"value": loss, "stderr": 0.001, "num_items": 50}},
        }
        for layer, loss in enumerate(alone)
    ]

    def proposed(pairs: dict[str, Any] | None) -> tuple[list[int], float, str]:
        content = study | ({} if pairs is None else {"pairs": pairs})
        (folder / "layers.json").write_text(json.dumps(content))
        plan = plan_layers(folder, "2")
        return plan["layers"], plan["selections"][0]["predicted"], plan_text(plan)

    def exact(layers: Sequence[int]) -> float:
        return toy.kl(torch.stack([changes[layer] for layer in layers]).sum(0))

    by_sum, total, words = proposed(None)
    assert by_sum == [0, 1] and total == pytest.approx(alone[0] + alone[1])
    assert "sum of KL alone" in words
    by_pairs, predicted, words = proposed(toy.pairs(changes))
    assert by_pairs == [1, 2] and exact(by_pairs) < 0.85 * exact(by_sum)
    assert predicted == pytest.approx(exact(by_pairs), rel=0.05)
    assert total < 0.6 * exact(by_sum)
    assert "KL predicted from pairs" in words and "sum of" not in words


def test_of_layers_that_cancel_each_other_both_are_chosen(tmp_path: Path) -> None:
    changes, toy = toy_changes(), Toy(tmp_path)
    alone = [toy.kl(change) for change in changes]
    pairs = Prices.of(
        {
            "study": {"attention": "full", "mlp": "outdated"},
            "num_hidden_layers": 4,
            "moe_layers": [0, 1, 2, 3],
            "points": [],
            "pairs": toy.pairs(changes),
        },
        "kl",
        False,
    ).pairs
    assert least_costly(dict(enumerate(alone)), 2, {}) == [0, 1]
    assert least_costly(dict(enumerate(alone)), 2, pairs) == [1, 3]
    best = min(
        combinations(range(4), 2),
        key=lambda two: toy.kl(changes[two[0]] + changes[two[1]]),
    )
    assert best == (0, 3) or best == (1, 3)


def test_the_next_half_of_a_front_is_priced_beside_those_chosen(tmp_path: Path) -> None:
    study = read_study(written(tmp_path / "s", "selected", task=True))
    # Layers 3 and 1, the cheapest alone, cost much together; 0 and 2 cancel each other.
    rows = [[9.0], [0.0, 9.0], [-0.3, 0.0, 9.0], [0.0, 0.2, 0.0, 9.0]]
    study["pairs"] = {"values": rows}
    prices, mask = Prices.of(study, "kl", False), [False, True, True, True]
    for layers, loss in (
        ([1, 3], 0.25),
        ([0], 0.5),
        ([0, 1, 2], 0.28),
        ([0, 1, 2, 3], 0.5),
    ):
        spec = Connectivity("all", mlp=layers)
        assert prices.total(spec, mask) == pytest.approx(ATTENTION + loss)

    def seconds(spec: Connectivity) -> float:
        field = spec.field(mask)
        partial = bool(field["layers"]) and field["attention"] == "partial"
        return 100.0 - 30.0 * partial - 4.0 * len(spec.outdated_layers(mask))

    facts = front(study, "kl", False, seconds)
    steps = facts["rows"][1 : facts["steps"]]
    assert [row["name"] for row in steps[:3]] == [
        "+ attention in all layers", "+ MLP 3", "+ MLP 2",
    ]  # fmt: skip
    predicted = next(row for row in steps if not row["measured"])
    assert predicted["losses"]["kl"]["pairs"]
    assert not predicted["losses"]["quiz"]["pairs"]
    printed = "\n".join(front_text(facts | {"chosen": steps[0]}))
    # 0 beside 2 and 3: the measured 0.4088, and 0.5 with -0.3 for 0 and 2.
    assert "pairs 0.6088" in printed and "sum 0.09088" in printed


# ---- in a study


SELECTED = ("--mlp", "selected", "--sides", "single")


@pytest.fixture(scope="module")
def finished(model: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pairs") / "study"
    assert main(command(model, text, folder, *SELECTED)) == 0
    return folder


@torch.no_grad()
def by_hand(model: Path, text: Path) -> list[list[float]]:
    """Return the moments of MLP sides beside attention in all layers, from full logits in
    float64.
    """
    source = SourceConfig(path=str(text))
    rows = heldout_rows(source, load_tokenizer(model), **ROWS)  # type: ignore[arg-type]
    specs = [Connectivity("all", mlp="full")]
    specs += [Connectivity("all", mlp=[layer]) for layer in range(NUM_LAYERS)]
    regular = load_model(model)
    models = [load_model(model, connectivity=spec) for spec in specs]
    total, count = torch.zeros(4, 4, dtype=torch.float64), 0
    for number in range(len(rows)):
        row = {
            name: torch.as_tensor(value)[None] for name, value in rows[number].items()
        }
        words = {key: row[key].long() for key in ("input_ids", "position_ids")}
        # The label of a token is predicted by the token before it in its example.
        labels = row["labels"][0, 1:]
        keep = (labels != -100) & (row["position_ids"][0, 1:] > 0)
        logits = [
            one(**words).logits[0, :-1][keep].double() for one in (regular, *models)
        ]
        everywhere = logits[1]
        changes = torch.stack([z - everywhere for z in logits[2:]])
        for p, d in zip(logits[0].softmax(-1), changes.transpose(0, 1), strict=True):
            total += d @ (torch.diag(p) - torch.outer(p, p)) @ d.T
        count += int(keep.sum())
    return (total / count).tolist()


def test_the_pairs_of_a_study_are_those_of_full_logits(
    model: Path, text: Path, finished: Path
) -> None:
    study = read_study(finished)
    pairs = study["pairs"]
    expected = by_hand(model, text)
    scale = max(map(max, expected))
    for k, row in enumerate(pairs["values"]):
        assert row == pytest.approx(expected[k][: k + 1], rel=1e-3, abs=1e-5 * scale)
    assert not (finished / "hidden").exists()


def test_a_study_of_whole_layers_and_one_of_tasks_have_no_pairs(
    model: Path, text: Path, tmp_path: Path
) -> None:
    words = ("--sides", "single")
    assert main(command(model, text, tmp_path / "s", *words)) == 0
    study = read_study(tmp_path / "s")
    assert "pairs" not in study
    folder = written(tmp_path / "t", "selected", task=True)
    content = json.loads((folder / "layers.json").read_text())
    rows = [[1.0] * (k + 1) for k in range(4)]
    (folder / "layers.json").write_text(
        json.dumps(content | {"pairs": {"values": rows}})
    )
    assert plan_layers(folder, "2")["pairs"]
    # Pairs are those of the KL and say nothing about a score.
    assert not plan_layers(without_kl(folder), "2")["pairs"]


@pytest.mark.parametrize("lost", few([False, True], 1))
def test_a_killed_study_continues_with_the_states_that_it_kept(
    lost: bool,
    model: Path,
    text: Path,
    finished: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measure, calls = study_module.kl_by_row, []

    def killed(*args: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return measure(*args, **options)

    monkeypatch.setattr(study_module, "kl_by_row", killed)
    words = command(model, text, tmp_path / "s", *SELECTED)
    assert main(words) == 130
    kept = sorted((tmp_path / "s" / "hidden").iterdir())
    assert len(kept) == 3
    if lost:
        kept[0].unlink()
    assert main(words) == 0
    # Attention alone, four blocks, all but the special ones; and what was lost.
    num_points = len(read_study(finished)["points"])
    assert len(calls) == 4 + num_points - 3 + lost
    whole = (finished / "layers.json").read_bytes()
    assert (tmp_path / "s" / "layers.json").read_bytes() == whole
    assert not (tmp_path / "s" / "hidden").exists()


def test_pairs_of_calibrated_weights_are_of_their_own(
    model: Path, text: Path, other_text: Path, tmp_path: Path
) -> None:
    source = f"{{path: {other_text}, columns: {{text: text}}}}"
    words = (*SELECTED, "--calibrated", source)
    assert main(command(model, text, tmp_path / "s", *words)) == 0
    pairs = read_study(tmp_path / "s")["pairs"]
    assert pairs["values"] != pairs["calibrated"]
    assert [len(row) for row in pairs["calibrated"]] == [1, 2, 3, 4]
    plan = plan_layers(tmp_path / "s", "2", calibrated=True)
    assert plan["pairs"] and plan["selections"][0]["predicted"] > 0


def test_two_ranks_make_the_pairs_of_one(
    model: Path, text: Path, finished: Path, tmp_path: Path
) -> None:
    words = command(model, text, tmp_path / "s", *SELECTED)
    ranks = forked_ranks(lambda rank: main(words), 2, tmp_path)
    for process, output in ranks:
        assert status_of(process) == 0, output.read_text()
    two, one = read_study(tmp_path / "s"), read_study(finished)
    for shared, alone in zip(
        two["pairs"]["values"], one["pairs"]["values"], strict=True
    ):
        assert shared == pytest.approx(alone, rel=1e-4, abs=1e-9)
    assert not (tmp_path / "s" / "hidden").exists()


def test_a_disk_without_room_for_the_hidden_states_is_named_before_it_is_full(
    model: Path,
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = command(model, text, tmp_path / "s", *SELECTED)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    assert main(words) == 2
    error = capsys.readouterr().err
    assert f"{tmp_path / 's' / 'hidden'}: pairs of MLP sides need up to" in error
    assert "1000 B are free; make room, or give fewer --text-examples" in error
    assert not [*(tmp_path / "s" / "hidden").iterdir()]
    monkeypatch.undo()
    assert main(words) == 0
