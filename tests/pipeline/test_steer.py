"""A recipe's sweep of router biases: what it measures, that it is made once, and what
it refuses.
"""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from fcsd.base.errors import UserError
from fcsd.base.files import read_json, write_json
from fcsd.evaluation.stage import heldout_of
from fcsd.model.load import load_checkpoint
from fcsd.pipeline import steer as steer_module
from fcsd.pipeline.checks import check_run
from fcsd.pipeline.run import convert, evaluate_models
from fcsd.pipeline.steer import steer
from fcsd.recipe.load_recipe import load_recipe
from fcsd.report.report import write_report
from fcsd.steering.network.links import read_links, write_links
from fcsd.steering.network.simulate import Payload
from fcsd.steering.routing.bias import read_tables, router_bias
from fcsd.steering.routing.camoe import camoe
from fcsd.steering.routing.placement import balanced
from tests.reference.ranks import run_ranks
from tests.steering.network.test_simulate import links
from tests.support import ROOT, Bench, make_bench, run_of

TABLES = {  # by the model whose routers are steered
    "original": ("camoe-0.2", "bottleneck-0.2"),
    "converted": ("converted-camoe-0.2", "converted-bottleneck-0.2"),
}
LINKS = ROOT / "recipes" / "studies" / "camoe.links.json"  # four endpoints
BATCH = 2


def recipe_of(bench: Bench, **bias: Any) -> Path:
    """Return a recipe that steers the base checkpoint, which has two layers of four
    experts, two of them for a token."""
    row = bench.choice["task"]
    suite = bench.folder / "suite.yaml"
    suite.write_text(yaml.safe_dump({"name": "mine", "tasks": [row]}))
    return bench.recipe(
        data={
            "train": [{"path": str(bench.rows)}], "heldout": {"path": str(bench.rows)}, "max_length": 32,
            "heldout_examples": 30, "loss_on": "all",
        },
        evaluation={
            "suite": str(suite), "batch_size": BATCH,
            "router_bias": {
                "links": str(LINKS), "models": ["original", "converted"], "kind": ["camoe", "bottleneck"],
                "strengths": [0, 0.2], **bias,
            },
        },
    )  # fmt: skip


@pytest.fixture(scope="module")
def finished(base_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Yield a run whose original, converted and steered models are evaluated, and reported on."""
    bench = make_bench(base_checkpoint, tmp_path_factory.mktemp("steer"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("datasets.config.HF_DATASETS_CACHE", bench.folder / "cache")
        run = run_of(recipe_of(bench))
        convert(run)
        evaluate_models(run)
        steer(run)
        write_report(run.recipe, list(run.models()), run.layout.report)
        yield run


def by_hand(run: Any, of: str, name: str | None) -> dict[str, Any]:
    """Return mean KL, mean time, and the experts' loads, row by row from logits: no
    recording, no losses of fcsd.

    of: whose routers are steered; name: by which tables, None: by none.
    """
    original, model = (
        load_checkpoint(run.model(each)).eval() for each in ("original", of)
    )
    tables = read_tables(run.layout.bias_tables(name or next(iter(TABLES[of])), of))
    rows, links = (
        heldout_of(run.recipe.data, run.tokenizer, run.original),
        read_links(LINKS),
    )
    kl, loads, exchanges, moved = [], torch.zeros(2, 4), [], []
    for j, row in enumerate(rows):
        ids = {
            key: torch.tensor(row[key])[None].long()
            for key in ("input_ids", "position_ids")
        }
        text = ids["input_ids"][0] != run.tokenizer.pad_token_id
        with torch.no_grad():
            before = original(**ids).logits[0]
            outputs = plain = model(**ids, output_router_logits=True)
            if name is not None:
                with router_bias(model, tables) as steering:
                    steering.endpoint = j % 4
                    outputs = model(**ids, output_router_logits=True)
        kept = torch.tensor(row["labels"])[1:] != -100
        p, q = (
            logits[:-1][kept].double().log_softmax(-1)
            for logits in (before, outputs.logits[0])
        )
        kl += (p.exp() * (p - q)).sum(-1).tolist()
        if j % (4 * BATCH) == 0:
            # layer, source, expert: one expert at each endpoint
            exchanges.append(torch.zeros(2, 4, 4))
        for layer, logits in enumerate(outputs.router_logits):
            chosen = logits[text].topk(2).indices.flatten().bincount(minlength=4)
            exchanges[-1][layer, j % 4] += chosen
            loads[layer] += chosen
            pairs = [
                each[text].topk(2).indices.tolist()
                for each in (plain.router_logits[layer], logits)
            ]
            moved += [
                len(set(one) - set(other)) / 2
                for one, other in zip(*pairs, strict=True)
            ]
    assert len(rows) % (4 * BATCH)  # what is left over makes no exchange
    times, width = [], model.config.hidden_size
    for exchange in exchanges[:-1]:
        for pairs in exchange.tolist():
            total = 0.0
            for phase in ("metadata", "dispatch", "combine"):
                alpha, beta = links.alpha(phase), links.beta(phase)
                size = {
                    "metadata": 4 * 8,
                    "dispatch": 2 * width + 4,
                    "combine": 2 * width,
                }[phase]
                total += max(
                    alpha[u, v]
                    + beta[u, v]
                    * size
                    * (
                        1
                        if phase == "metadata"
                        else pairs[v][u]
                        if phase == "combine"
                        else pairs[u][v]
                    )
                    for u in range(4)
                    for v in range(4)
                    if u != v
                )
            times.append(total)
    tokens = [
        float(each.sum()) / (2 * 2 * 4) for each in exchanges[:-1]
    ]  # layers, experts of a token, endpoints
    return {
        "kl": sum(kl) / len(kl), "loads": loads, "moved": sum(moved) / len(moved), "tokens": sum(tokens) / len(tokens),
        "num": len(times), "mean_s": sum(times) / len(times), "p95_s": float(np.percentile(times, 95)),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("of", "name"), [(of, name) for of, names in TABLES.items() for name in names]
)
def test_kl_time_and_routing_are_those_of_logits_looked_at_row_by_row(
    finished: Any, of: str, name: str
) -> None:
    result = read_json(finished.layout.evaluation(name) / "results.json")
    base = read_json(finished.layout.router_bias(of) / "manifest.json")["results"][
        "unbiased"
    ]
    after, before = by_hand(finished, of, name), by_hand(finished, of, None)
    assert (
        result["kl_to_original"]["kl"] == pytest.approx(after["kl"], rel=1e-4)
        and after["kl"] > 1e-5
    )
    assert {
        key: result["exchange"][key] for key in ("mean_s", "p95_s", "tokens")
    } == pytest.approx({key: after[key] for key in ("mean_s", "p95_s", "tokens")})
    assert base["exchange"]["mean_s"] == pytest.approx(before["mean_s"])
    assert (
        base["exchange"]["num_exchanges"]
        == result["exchange"]["num_exchanges"]
        == before["num"]
    )
    p, q = (
        each["loads"].sum(0).double() / each["loads"].sum() for each in (before, after)
    )
    assert result["routing"]["kl"] == pytest.approx(
        float((p * (p / q).log()).sum()), abs=1e-6
    )
    layers = [
        (each["loads"].double() / each["loads"].sum(-1, keepdim=True))
        for each in (before, after)
    ]
    by_layer = (layers[0] * (layers[0] / layers[1]).log()).sum(-1).mean()
    assert result["routing"]["avg_layer_kl"] == pytest.approx(float(by_layer), abs=1e-6)
    assert (
        result["routing"]["routes_moved"] == pytest.approx(after["moved"])
        and 0 < after["moved"] < 1
    )
    for kind, each in ((result, after), (base, before)):
        loads = each["loads"].double()
        spread = loads.std(-1, correction=0) / loads.mean(-1)
        assert kind["routing"]["avg_layer_cv"] == pytest.approx(float(spread.mean()))
        assert kind["routing"]["cv"] == pytest.approx(
            float(loads.sum(0).std(correction=0) / loads.sum(0).mean())
        )
    assert result["settings"]["router_bias"]["kind"] == name.split("-")[-2]


def test_the_report_has_every_strength_beside_the_original(finished: Any) -> None:
    report = read_json(finished.layout.report / "report.json")
    points = [(point["model"], point["name"]) for point in report["router_bias"]]
    assert points == [
        (of, name) for of, names in TABLES.items() for name in (of, *names)
    ]
    assert set(report["comparisons"]) == {
        "converted",
        *TABLES["original"],
        *TABLES["converted"],
    }
    layers = {name: model["layers"] for name, model in report["models"].items()}
    assert (
        layers["camoe-0.2"] == "0"
        and layers["converted-camoe-0.2"] == layers["converted"] == "2/2"
    )
    # The point without a bias is that model's own row.
    own = report["models"]["converted"]["result"]["kl_to_original"]["kl"]
    assert report["router_bias"][3]["kl"]["kl"] == own > 0
    text = (finished.layout.report / "report.md").read_text()
    chapter = text[text.index("## Steered routers") : text.index("## Figures")]
    assert chapter.index("### `original`") < chapter.index("### `converted`")
    assert "](steering.png)" in text and "](steering-converted.png)" in text


def test_what_is_finished_is_not_done_again_and_other_links_are_refused(
    finished: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(steer_module, "load_for_evaluation", None)  # no model is loaded
        patch.setattr("fcsd.evaluation.stage.load_for_evaluation", None)
        steer(finished)
    other = read_json(LINKS)
    other["dispatch"]["alpha_s"][0][1] *= 2
    write_json(tmp_path / "links.json", other)
    bias = finished.recipe.evaluation.router_bias.model_copy(
        update={"links": str(tmp_path / "links.json")}
    )
    evaluation = finished.recipe.evaluation.model_copy(update={"router_bias": bias})
    changed = run_of(finished.recipe.model_copy(update={"evaluation": evaluation}))
    with pytest.raises(UserError, match=r"was made with other settings \(links: "):
        steer(changed)


def test_tables_are_those_of_the_recipe_and_padding_is_not_counted(
    bench: Bench, finished: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Placement, scale and selection reach the tables; rows of one example come with a
    mask of their padding.
    """
    seen: dict[str, Any] = {}

    class Noted(steer_module.Calibration):  # type: ignore[name-defined,misc]
        def __init__(self, model: Any, batches: Any, *args: Any, **kwargs: Any):
            super().__init__(model, batches, *args, **kwargs)
            seen.update(batches=batches, counts=self.counts, logit_std=self.logit_std)

    class Done(Exception):
        pass

    def stop(*args: Any, **kwargs: Any) -> None:
        raise Done

    monkeypatch.setattr(steer_module, "Calibration", Noted)
    monkeypatch.setattr(steer_module, "run_evaluation", stop)
    path = recipe_of(
        bench, placement="balanced", scale="logit_std", selection=True, sigma_floor=0.7
    )
    run = run_of(load_recipe(path, ["data.packing=false"]))
    with pytest.raises(Done):
        steer(run)
    tables = read_tables(run.layout.bias_tables("camoe-0.2"))
    batches, counts = seen["batches"], seen["counts"]
    pad = run.tokenizer.pad_token_id
    assert any((batch["input_ids"] == pad).any() for batch in batches)
    assert all(
        torch.equal(batch["attention_mask"], (batch["input_ids"] != pad).long())
        for batch in batches
    )
    assert tables.selection
    mean = counts.mean(0)
    np.testing.assert_array_equal(tables.placement, balanced(mean.sum(1), 4))
    payload = Payload(load_checkpoint(run.original).config.hidden_size, 4)
    expected = [
        camoe(
            mean,
            read_links(LINKS),
            payload,
            tables.placement,
            0.2,
            logit_std=seen["logit_std"],
            sigma_floor=floor,
        )
        for floor in (0.7, 0.0)
    ]
    np.testing.assert_array_equal(tables.tables, expected[0])
    assert not np.allclose(tables.tables, expected[1])


def test_tables_that_were_left_by_a_killed_run_are_kept_and_the_others_come_out_the_same(
    finished: Any,
) -> None:
    first, second = (
        finished.layout.bias_tables(name) for name in ("camoe-0.2", "bottleneck-0.2")
    )
    kept, made = first.stat().st_mtime_ns, second.read_bytes()
    second.unlink()
    (finished.layout.router_bias("original") / "manifest.json").unlink()
    steer(finished)
    assert first.stat().st_mtime_ns == kept and second.read_bytes() == made


def on_two_ranks(rank: int, recipe: Any) -> None:
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    steer(run_of(recipe))


def test_two_ranks_find_what_one_process_finds(finished: Any, tmp_path: Path) -> None:
    recipe = finished.recipe.model_copy(update={"output_dir": str(tmp_path / "two")})
    shutil.copytree(finished.layout.convert, tmp_path / "two" / "convert")
    run_ranks(on_two_ranks, 2, recipe)
    for name in (name for names in TABLES.values() for name in names):
        one, two = (
            finished.layout.evaluation(name),
            tmp_path / "two" / "evaluate" / name,
        )
        assert (one / "samples_tiny_choice.jsonl").read_bytes() == (
            two / "samples_tiny_choice.jsonl"
        ).read_bytes()
        results = [read_json(place / "results.json") for place in (one, two)]
        for key in ("tasks", "kl_to_original", "exchange", "routing"):
            assert results[0][key] == results[1][key], key


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["evaluation.batch_size=auto"], "batch_size: 'auto' has no meaning with router_bias"),
        (["evaluation.server={url: 'http://localhost:1'}"], "end a layer in an all-reduce"),
        (["data.heldout=null"], "evaluation.router_bias needs data.heldout"),
        (["evaluation.router_bias.strengths=[-0.1]"], "a strength is 0 or more, got -0.1"),
        (["evaluation.router_bias.strengths=[0]"], "needs a strength above 0"),
        (["evaluation.router_bias.strengths=[true]"], "router_bias.strengths.0: a number is needed, got True"),
        (["evaluation.router_bias.sigma_floor=-1"], "sigma_floor: Input should be greater than or equal to 0, got -1"),
        (["evaluation.router_bias.models=[]"], "router_bias.models: List should have at least 1 item"),
        (["evaluation.router_bias.models=[fcsd, fcsd]"], "router_bias.models: a model is given twice"),
        (["evaluation.router_bias.models=[convrted]"], "models: no model 'convrted' in the report; did you mean 'conv"),
        (["evaluation.router_bias.models=[calibrated]"], "no model 'calibrated' in the report"),
        (["evaluation.router_bias.strength=[1]"], "router_bias.strength: unknown key; did you mean 'strengths'"),
        (["variants={camoe-0.2: {objective.name: sft}}"], "variants.camoe-0.2: is the name of a model of"),
        (["evaluation.router_bias.endpoints=2"], "endpoints: 2, but .* has 4"),
        (["evaluation.router_bias.links=nowhere.json"], "nowhere.json: no such file"),
        (["evaluation.router_bias.links={three}"], "bias: 4 experts cannot be shared out evenly over 3 endpoints"),
        (["evaluation.router_bias.tokens=64"], "64 tokens of data.train are 4 rows, and 4 endpoints need 2 each"),
    ],
)  # fmt: skip
def test_what_cannot_be_steered_is_refused(
    bench: Bench, changes: list[str], message: str
) -> None:
    write_links(bench.folder / "three.json", links())
    changes = [
        text.replace("{three}", str(bench.folder / "three.json")) for text in changes
    ]
    with pytest.raises(UserError, match=message):
        run = run_of(load_recipe(recipe_of(bench), changes))
        check_run(run)
        steer(run)
