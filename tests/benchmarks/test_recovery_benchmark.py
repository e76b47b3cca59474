"""The recovery benchmark: its arithmetic by hand, and one tiny round of it, which is
never run again.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from benchmarks.recovery import __main__ as benchmark
from benchmarks.recovery.corpus import write_corpus
from benchmarks.recovery.depth import write_depth
from benchmarks.recovery.report import baseline, summary, tokens_to_reach
from fcsd.base.errors import UserError
from fcsd.base.files import read_json, write_json
from fcsd.base.strict import read_yaml
from fcsd.model.connectivity import Connectivity
from fcsd.model.connectivity.load import load_model
from fcsd.model.families import family_of, moe_mask
from fcsd.pipeline.checks import model_config
from fcsd.pipeline.distill import distill
from fcsd.recipe.load_recipe import load_recipe
from fcsd.recipe.recipe import Recipe

TEXT = "\n".join(
    f"Line {n} of the text says {n * n % 97}, and {n % 7} more." for n in range(9_000)
)
CODE = "\n".join(
    f"def function_{n}(x):\n    return x + {n * n % 89}" for n in range(9_000)
)
QUICK = [
    "pretrain.config.num_hidden_layers=2", "pretrain.config.hidden_size=32", "pretrain.train.max_steps=2",
    "pretrain.train.warmup_steps=1", "train.max_steps=4", "train.warmup_steps=1", "early_stopping.every_steps=2",
    "data.heldout_examples=4",
]  # fmt: skip


def test_tokens_to_a_kl_are_interpolated_in_the_logarithm() -> None:
    curve = [[0, 1.0], [100, 0.1], [200, 0.01], [300, 0.02]]
    assert tokens_to_reach(curve, 0.1) == 100
    assert tokens_to_reach(curve, math.sqrt(0.1 * 0.01)) == pytest.approx(150)
    assert tokens_to_reach(curve, 2.0) == 0 and tokens_to_reach(curve, 0.005) is None


def result(method: str, seed: int, last: float, budget: int = 200) -> dict[str, Any]:
    return {
        "method": method,
        "seed": seed,
        "curve": [[0, 1.0], [budget, last]],
        "budget_tokens": budget,
    }


def test_the_baseline_is_the_best_plain_method_of_those_with_all_seeds() -> None:
    results = [
        result("kl a", 0, 0.2),
        result("kl a", 1, 0.2),
        result("kl b", 0, 0.1),
        result("x", 0, 0.01),
    ]
    assert baseline(results) == "kl a"
    rows = summary([*results, result("kl b", 1, 0.1)])
    assert [row["method"] for row in rows] == ["x", "kl b", "kl a"]
    assert rows[0]["share"] == {0: pytest.approx(0.5)} and rows[1]["share"] == {
        0: 1.0,
        1: 1.0,
    }
    assert rows[1]["is_baseline"] and rows[2]["share"] == {0: None, 1: None}


def test_every_method_makes_a_recipe() -> None:
    methods = read_yaml(benchmark.HERE / "methods.yaml")
    recipe = load_recipe(benchmark.HERE / "recipe.yaml")
    variants = {
        f"method-{number}": method for number, method in enumerate(methods.values())
    }
    whole = Recipe.model_validate(recipe.dump() | {"variants": variants})
    for name in variants:
        assert whole.variant(name).early_stopping.metric == "heldout_kl"


def test_every_model_is_one_that_fcsd_rewires_with_the_depth_and_width_of_its_name(
    tmp_path: Path,
) -> None:
    sizes = {"plain": (6, 96), "shared": (6, 96)}
    for name, own in benchmark.MODELS["models"].items():
        plan = benchmark.model_recipe(tmp_path, name, []).pretrain
        config = model_config(plan.config | {"vocab_size": 64})
        size = config.num_hidden_layers, config.hidden_size
        assert size == (
            sizes.get(name) or tuple(map(int, name.partition("-")[2].split("x")))
        ), name
        mask = moe_mask(config, family_of(config))
        # MLA's first layer is dense
        assert mask == [own["kind"] != "mla"] + [True] * (size[0] - 1), name


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    for name, content in {"a.txt": TEXT, "b.py": CODE}.items():
        (tmp_path / name).write_text(content)
    return [str(tmp_path / name) for name in ("a.txt", "b.py")]


def test_a_finished_run_is_not_run_again_and_other_settings_are_refused(
    tmp_path: Path,
    texts: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "out"
    command = [
        str(out),
        "--models",
        "shared",
        "--seeds",
        "0",
        "--methods",
        "kl 1e-3",
        "rel l2 10",
        "--text",
        *texts,
    ]
    options = [word for text in QUICK for word in ("--set", text)]
    assert benchmark.main([*command, *options]) == 0
    printed = capsys.readouterr().out
    assert (
        "**kl 1e-3** (baseline)" in printed
        and (out / "recovery.png").stat().st_size > 1000
    )
    finished = json.loads(
        (out / "results" / "shared" / "seed-0" / "rel l2 10.json").read_text()
    )
    assert [point[0] for point in finished["curve"]] == [0, 1024, 2048]
    assert not (out / "shared" / "seed-0" / "variants" / "method").exists()
    monkeypatch.setattr(
        "fcsd.pipeline.distill.distill", lambda *_: pytest.fail("run again")
    )
    assert benchmark.main([*command, *options]) == 0
    assert benchmark.main([*command, *options, "--set", "train.learning_rate=1"]) == 1
    assert "of other settings than asked for" in capsys.readouterr().err


@pytest.mark.breadth
@pytest.mark.slow
def test_a_killed_study_continues_and_other_seeds_have_the_best_methods_only(
    tmp_path: Path,
    texts: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out, calls = tmp_path / "out", []
    methods = ["kl 5e-4", "kl 2e-3", "rel l2 10", "rel l2 30"]
    options = ["--text", *texts, *(word for text in QUICK for word in ("--set", text))]
    study = [str(out), "--study", "--models", "plain", "--seeds", "0", "1"]
    command = [*study, "--methods", *methods, *options]

    def killed_in_the_third(*arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) == 3:
            raise KeyboardInterrupt
        distill(*arguments)

    monkeypatch.setattr("fcsd.pipeline.distill.distill", killed_in_the_third)
    monkeypatch.setattr("benchmarks.recovery.untrained.TOKENS", 512)
    # untrained alone
    assert benchmark.main([*study, "--methods", *options]) == 0 and not calls
    with pytest.raises(KeyboardInterrupt):
        benchmark.main(command)
    untrained = out / "results" / "plain" / "untrained.json"
    before = {
        path: path.stat().st_mtime_ns for path in (out / "results").rglob("*.json")
    }
    assert untrained in before and len(before) == 3
    assert benchmark.main(command) == 0
    assert (
        len(calls) == 3 + 2 + 2
        # what was killed and the fourth method; the best of either kind with the other
        # seed
    )
    assert all(path.stat().st_mtime_ns == time for path, time in before.items())

    last = {
        name: json.loads((out / "results/plain/seed-0" / f"{name}.json").read_text())[
            "curve"
        ][-1][1]
        for name in methods
    }
    best = {min(pair, key=last.__getitem__) for pair in (methods[:2], methods[2:])}
    assert {path.stem for path in (out / "results/plain/seed-1").iterdir()} == best
    assert (
        "| plain " in capsys.readouterr().out
        and (out / "depth.png").stat().st_size > 1000
    )
    check_by_hand(out, read_json(untrained))


def check_by_hand(out: Path, result: dict[str, Any]) -> None:
    """Compare the untrained figures with sums over unpadded examples, one a forward
    pass, in float64.
    """
    recipe = benchmark.model_recipe(out, "plain", QUICK)
    folder = recipe.folder / "pretrain" / "model"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [
        json.loads(line)["text"]
        for line in (out / "corpus/heldout.jsonl").read_text().splitlines()[:4]
    ]
    assert set(result["kl"]) == {"all", "first", "but-1"} and result["num_layers"] == 2
    logits = {}
    for name, layers in {
        "teacher": "none",
        "all": "all",
        "first": [0],
        "but-1": [1],
    }.items():
        model = load_model(
            folder,
            connectivity=Connectivity(layers),
            dtype="float64",
            experts_implementation="eager",
        ).eval()
        ids = [
            tokenizer(text)["input_ids"] + [tokenizer.eos_token_id] for text in texts
        ]
        with torch.no_grad():
            own = [model(input_ids=torch.tensor([one])).logits[0, :-1] for one in ids]
        logits[name] = torch.cat(own).log_softmax(-1)
    targets = torch.cat([torch.tensor(one[1:]) for one in ids])
    wanted = torch.nn.functional.nll_loss(logits["teacher"], targets).item()
    assert result["teacher_ce"] == pytest.approx(wanted, rel=1e-5)
    for name in ("all", "first", "but-1"):
        kl = (
            (logits["teacher"].exp() * (logits["teacher"] - logits[name]))
            .sum(-1)
            .mean()
            .item()
        )
        assert result["kl"][name]["copied"] == pytest.approx(kl, rel=1e-3), name


def test_the_table_of_the_study_has_the_best_run_of_half_the_tokens_and_every_seed(
    tmp_path: Path,
) -> None:
    pair = {"copied": 0.5, "calibrated": 0.25}
    untrained = {
        "num_layers": 24,
        "teacher_ce": 2.5,
        "kl": {"all": pair, "first": pair, "but-1": pair},
    }
    (tmp_path / "results/plain-24x96").mkdir(parents=True)
    write_json(tmp_path / "results/plain-24x96/untrained.json", untrained)
    runs = [
        ("kl 1e-3, 128 tokens a step", 0, [[0, 1.0], [200, 0.1]], 200, 0),
        ("kl 1e-3, 128 tokens a step", 1, [[0, 1.0], [200, 0.2]], 200, 0),
        ("ours", 0, [[0, 0.2], [50, 0.1], [80, 0.05]], 80, 20),
        ("ours", 1, [[0, 0.4], [80, 0.25]], 80, 20),
        ("ours, other rate", 0, [[0, 0.2], [80, 0.01]], 80, 20),  # one seed only
        ("ours, all tokens", 0, [[0, 0.2], [180, 0.001]], 180, 20),
    ]  # fmt: skip
    for method, seed, curve, budget, calibration in runs:
        row = {"method": method, "seed": seed, "curve": curve, "budget_tokens": budget}
        path = tmp_path / f"results/plain-24x96/seed-{seed}/{method}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, row | {"calibration_tokens": calibration})
    lines = write_depth(tmp_path, benchmark.MODELS).splitlines()
    first, second = (
        [cell.strip() for cell in line.split("|")][1:-1]
        for line in (lines[2], lines[-1])
    )
    assert first == ["plain-24x96", "2.50", "0.500; 0.250", "0.500", "0.500", "0.250"]
    assert second == [
        "plain-24x96",
        "128, 1e-3",
        "0.100, 0.200",
        "0.0500, 0.250",
        "0.35, never",
    ]


def test_splits_have_text_and_code_of_different_documents(
    tmp_path: Path, texts: list[str]
) -> None:
    write_corpus(tmp_path / "corpus", [Path(path) for path in texts])
    splits = {
        name: [
            json.loads(line)["text"]
            for line in (tmp_path / "corpus" / f"{name}.jsonl").read_text().splitlines()
        ]
        for name in ("train", "distill", "heldout")
    }
    for pieces in splits.values():
        code = sum(len(piece) for piece in pieces if "def function" in piece)
        assert 0.4 < code / sum(map(len, pieces)) < 0.6
    assert not set(splits["train"]) & set(splits["heldout"])
    assert not set(splits["distill"]) & set(splits["heldout"])


def test_too_little_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("short")
    with pytest.raises(
        UserError, match=r"too little text for the split 'train'.*--text"
    ):
        write_corpus(tmp_path / "corpus", [tmp_path / "a.txt"])


def test_a_method_that_is_not_there_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert benchmark.main([str(tmp_path), "--methods", "l3"]) == 1
    assert (
        "--methods l3: no such method; there are: kl 1e-3;" in capsys.readouterr().err
    )
