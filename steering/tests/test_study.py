"""The study of steered models: what it measures, that it is made once, and what it
refuses.
"""

import re
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from fcsd.base.errors import UserError
from fcsd.base.files import read_json
from fcsd.base.writing import write_json
from fcsd.cli.main import main
from fcsd.evaluation.suites import load_suite
from fcsd.model.load import load_checkpoint
from fcsd.pipeline.reference import heldout_of
from fcsd.pipeline.run import convert, evaluate_models
from fcsd.planning.network.links import read_links, write_links
from fcsd.planning.network.simulate import Payload
from fcsd_steering import study as study_module
from fcsd_steering.cli import STEER
from fcsd_steering.config import SteeringStudy
from fcsd_steering.report import evaluation_folder, tables_folder
from fcsd_steering.routing.bias import read_tables, router_bias
from fcsd_steering.routing.camoe import camoe
from fcsd_steering.routing.placement import balanced
from fcsd_steering.study import load_study, run_study
from tests.planning.network.test_simulate import links
from tests.reference.ranks import run_ranks
from tests.support import ROOT, Bench, make_bench, run_of

TABLES = {  # by the model whose routers are steered
    "original": ("camoe-0.2", "bottleneck-0.2"),
    "converted": ("converted-camoe-0.2", "converted-bottleneck-0.2"),
}
LINKS = ROOT / "steering" / "recipes" / "camoe.links.json"  # four endpoints
BATCH = 2


def recipe_of(bench: Bench, **data: Any) -> Path:
    """Return a recipe of the base checkpoint, which has two layers of four experts, two
    of them for a token."""
    row = bench.choice["task"]
    suite = bench.folder / "suite.yaml"
    suite.write_text(yaml.safe_dump({"name": "mine", "tasks": [row]}))
    return bench.recipe(
        data={
            "train": [{"path": str(bench.rows)}], "heldout": {"path": str(bench.rows)}, "max_length": 32,
            "heldout_examples": 30, "loss_on": "all", **data,
        },
        evaluation={"suite": str(suite), "batch_size": BATCH},
    )  # fmt: skip


def study_of(recipe_file: Path, **changes: Any) -> Path:
    """Write a study of a recipe beside it."""
    path = recipe_file.with_name("study.yaml")
    study = {
        "recipe": str(recipe_file), "links": str(LINKS), "models": ["original", "converted"],
        "kind": ["camoe", "bottleneck"], "strengths": [0, 0.2],
    }  # fmt: skip
    path.write_text(yaml.safe_dump(study | changes))
    return path


@dataclass(frozen=True)
class Finished:
    """A study that ran, and the run that it is of."""

    run: Any
    study: SteeringStudy

    @property
    def folder(self) -> Path:
        return Path(self.run.layout.root / "steering")

    def tables(self, name: str, model: str = "original") -> Path:
        return tables_folder(self.folder, model) / f"{name}.safetensors"


@pytest.fixture(scope="module")
def finished(base_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Yield a run whose original, converted and steered models are evaluated, and reported on."""
    bench = make_bench(base_checkpoint, tmp_path_factory.mktemp("steer"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("datasets.config.HF_DATASETS_CACHE", bench.folder / "cache")
        recipe = recipe_of(bench)
        run = run_of(recipe)
        convert(run)
        evaluate_models(run)
        study = load_study(study_of(recipe))
        run_study(study, run.launch)
        yield Finished(run, study)


def by_hand(finished: Finished, of: str, name: str | None) -> dict[str, Any]:
    """Return mean KL, mean time, and the experts' loads, row by row from logits: no
    recording, no losses of fcsd.

    of: whose routers are steered; name: by which tables, None: by none.
    """
    run = finished.run
    original, model = (
        load_checkpoint(run.model(each)).eval() for each in ("original", of)
    )
    tables = read_tables(finished.tables(name or next(iter(TABLES[of])), of))
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
    result = read_json(evaluation_folder(finished.folder, name) / "results.json")
    manifest = read_json(tables_folder(finished.folder, of) / "manifest.json")
    base = manifest["results"]["unbiased"]
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
    assert result["settings"]["router_bias"].split()[0] == name.split("-")[-2]


def test_the_report_has_every_strength_beside_its_model(finished: Finished) -> None:
    folder = finished.folder / "report"
    report = read_json(folder / "steering.json")
    points = [(point["model"], point["name"]) for point in report["points"]]
    assert points == [
        (of, name) for of, names in TABLES.items() for name in (of, *names)
    ]
    assert set(report["comparisons"]) == {*TABLES["original"], *TABLES["converted"]}
    # The point without a bias is that model's own row.
    evaluated = finished.run.layout.evaluate / "converted" / "results.json"
    own = read_json(evaluated)["kl_to_original"]["kl"]
    assert report["points"][3]["kl"]["kl"] == own > 0
    text = (folder / "steering.md").read_text()
    assert text.index("## `original`") < text.index("## `converted`")
    assert "](steering.png)" in text and "](steering-converted.png)" in text
    assert (folder / "steering.png").is_file()
    # What differs between the two is the bias.
    assert "router bias: none (original), camoe 0.2 over 4 endpoints" in text


def test_what_is_finished_is_not_done_again_and_other_links_are_refused(
    finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(study_module, "load_for_evaluation", None)  # no model is loaded
        patch.setattr("fcsd.pipeline.reference.load_for_evaluation", None)
        run_study(finished.study, finished.run.launch)
    other = read_json(LINKS)
    other["dispatch"]["alpha_s"][0][1] *= 2
    write_json(tmp_path / "links.json", other)
    changed = finished.study.model_copy(update={"links": str(tmp_path / "links.json")})
    with pytest.raises(UserError, match=r"was made with other settings \(links: "):
        run_study(changed, finished.run.launch)


def test_tables_are_those_of_the_recipe_and_padding_is_not_counted(
    bench: Bench, finished: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Placement, scale and selection reach the tables; rows of one example come with a
    mask of their padding.
    """
    seen: dict[str, Any] = {}

    class Noted(study_module.Calibration):  # type: ignore[name-defined,misc]
        def __init__(self, model: Any, batches: Any, *args: Any, **kwargs: Any):
            super().__init__(model, batches, *args, **kwargs)
            seen.update(batches=batches, counts=self.counts, logit_std=self.logit_std)

    class Done(Exception):
        pass

    def stop(*args: Any, **kwargs: Any) -> None:
        raise Done

    monkeypatch.setattr(study_module, "Calibration", Noted)
    monkeypatch.setattr(study_module.SteeredEvaluation, "run", stop)
    recipe = recipe_of(bench, packing=False)
    run = run_of(recipe)
    convert(run)
    evaluate_models(run)
    options = {"scale": "logit_std", "selection": True, "sigma_floor": 0.7}
    study = load_study(study_of(recipe, placement="balanced", **options))
    with pytest.raises(Done):
        run_study(study, run.launch)
    folder = tables_folder(run.layout.root / "steering", "original")
    tables = read_tables(folder / "camoe-0.2.safetensors")
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


def test_what_a_killed_study_left_is_kept_and_the_rest_comes_out_the_same(
    finished: Finished, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = map(finished.tables, ("camoe-0.2", "bottleneck-0.2"))
    kept, made = first.stat().st_mtime_ns, second.read_bytes()
    for is_gone in (True, False):
        second.unlink()
        if not is_gone:
            shutil.copy(first, second)  # stands for the tables of another run
        (tables_folder(finished.folder, "original") / "manifest.json").unlink()
        run_study(finished.study, finished.run.launch)
        assert first.stat().st_mtime_ns == kept and second.read_bytes() == made
        assert f"{second}: is damaged or gone" in capsys.readouterr().err
    # One whose tables had been finished: the model without a bias is run again, too.
    place = evaluation_folder(finished.folder, "bottleneck-0.2")
    before = read_json(place / "results.json")
    shutil.rmtree(place)
    run_study(finished.study, finished.run.launch)
    after = read_json(place / "results.json")
    assert {key: after[key] for key in MEASURED} == {
        key: before[key] for key in MEASURED
    }


MEASURED = ("tasks", "kl_to_original", "exchange", "routing")


def on_two_ranks(rank: int, study: SteeringStudy) -> None:
    from accelerate.state import AcceleratorState

    from fcsd.parallel.launch import join_launch

    AcceleratorState._reset_state(reset_partial_state=True)
    run_study(study, join_launch())


def test_two_ranks_find_what_one_process_finds(
    finished: Finished, tmp_path: Path
) -> None:
    study = finished.study.model_copy(update={"output_dir": str(tmp_path / "two")})
    run_ranks(on_two_ranks, 2, study)
    for name in (name for names in TABLES.values() for name in names):
        places = [
            evaluation_folder(folder, name)
            for folder in (finished.folder, tmp_path / "two")
        ]
        samples = [
            (place / "samples_tiny_choice.jsonl").read_bytes() for place in places
        ]
        assert samples[0] == samples[1]
        results = [read_json(place / "results.json") for place in places]
        for key in MEASURED:
            assert results[0][key] == results[1][key], key


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"strengths": [-0.1]}, "a strength is 0 or more, got -0.1"),
        ({"strengths": [0]}, "needs a strength above 0"),
        ({"strengths": [True]}, "strengths.0: a number is needed, got True"),
        ({"sigma_floor": -1}, "sigma_floor: Input should be greater than or equal to 0, got -1"),
        ({"models": []}, "models: List should have at least 1 item"),
        ({"models": ["fcsd", "fcsd"]}, "models: a model is given twice"),
        ({"models": ["convrted"]}, "models: no model 'convrted' in .*; did you mean 'conv"),
        ({"models": ["calibrated"]}, "no model 'calibrated' in "),
        ({"models": ["fcsd"]}, "fcsd has not been evaluated; run `fcsd run "),
        ({"strength": [1]}, "strength: unknown key; did you mean 'strengths'"),
        ({"endpoints": 2}, "endpoints: 2, but .* has 4"),
        ({"links": "nowhere.json"}, "nowhere.json: no such file"),
        ({"links": "three.json"}, "4 experts cannot be divided evenly among 3 endpoints"),
        ({"recipe": "nowhere.yaml"}, "nowhere.yaml: no such file"),
        ({"tokens": 64}, "64 tokens of data.train make 4 rows, but 4 endpoints need 2 each"),
    ],
)  # fmt: skip
def test_what_cannot_be_studied_is_refused(
    finished: Finished, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    write_links(tmp_path / "three.json", links())  # beside the study
    recipe = Path(finished.study.recipe)
    path = tmp_path / "study.yaml"
    study_of(recipe, output_dir=str(tmp_path / "out"), **changes).rename(path)
    with pytest.raises(UserError, match=message):
        run_study(load_study(path), finished.run.launch)


@pytest.mark.parametrize(
    ("data", "evaluation", "message"),
    [
        ({"heldout": None}, {}, "has no data.heldout, the text on which time"),
        ({}, {"batch_size": "auto"}, "evaluation.batch_size: with 'auto', an item's"),
        ({}, {"batch_size": 1, "capacity_factor": 1.0}, "evaluation.capacity_factor: not supported for steered"),
    ],
)  # fmt: skip
def test_a_recipe_that_no_study_can_be_of_is_refused(
    bench: Bench, data: Any, evaluation: Any, message: str
) -> None:
    path = recipe_of(bench, **data)
    recipe = yaml.safe_load(path.read_text())
    recipe["evaluation"] |= evaluation
    path.write_text(yaml.safe_dump(recipe))
    with pytest.raises(UserError, match=message):
        run_study(load_study(study_of(path)), run_of(path).launch)


def test_every_command_of_the_page_can_be_parsed() -> None:
    page = (ROOT / "docs" / "steer.md").read_text().replace("\\\n", "")
    commands = re.findall(r"^    .*?(?:fcsd-steer|-m fcsd_steering) (.+)$", page, re.M)
    assert {command.split()[0] for command in commands} == set(STEER.commands)
    for command in commands:
        STEER.parser().parse_args(shlex.split(command))


def test_the_shipped_studies_are_of_shipped_recipes() -> None:
    from fcsd.recipe.load_recipe import load_recipe

    paths = sorted((ROOT / "steering" / "recipes").glob("*-study.yaml"))
    assert len(paths) == 2
    for path in paths:
        study = load_study(path)
        assert load_recipe(study.recipe).data.heldout is not None
        assert len(read_links(study.links).endpoints) == 4


def test_a_rehearsal_of_camoes_setting_can_be_steered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipes = ROOT / "steering" / "recipes"
    recipe = recipes / "qwen3-30b-a3b.yaml"
    header = recipe.read_text().partition("\nname:")[0]
    (words,) = re.findall(r"^#     fcsd (run .*--rehearse .*)$", header, re.M)
    monkeypatch.chdir(tmp_path)
    command = shlex.split(words.replace(str(recipe.relative_to(ROOT)), str(recipe)))
    # Prompts of 25 shots in a tokenizer of bytes take minutes: one task of the nine.
    (row,) = (row for row in load_suite("camoe9").tasks if row.task == "piqa")
    task = row.model_dump(mode="json", exclude_unset=True)
    Path("suite.yaml").write_text(yaml.safe_dump({"name": "piqa", "tasks": [task]}))
    # In bfloat16 torch's attention refuses ATEN_CPU_CAPABILITY=default on newer CPUs.
    changes = ["evaluation.suite=suite.yaml", "model.dtype=float32"]
    assert main([*command, "--set", changes[0], "--set", changes[1]]) == 0

    study = yaml.safe_load((recipes / "qwen3-30b-a3b-study.yaml").read_text())
    assert study["strengths"] == [0, 0.05, 0.1, 0.15, 0.2, 0.25]
    rehearsal = Path(command[-1])
    study |= {"recipe": str(rehearsal / "recipe.yaml"), "links": str(LINKS)}
    study |= {"strengths": [0, 0.25], "tokens": 1024}
    Path("study.yaml").write_text(yaml.safe_dump(study))
    assert STEER.run(["study", "study.yaml"]) == 0

    report = read_json(rehearsal / "run" / "steering" / "report" / "steering.json")
    plain, steered = report["points"]
    assert (plain["model"], steered["strength"]) == ("original", 0.25)
    assert steered["exchange"]["mean_s"] < plain["exchange"]["mean_s"]
    assert steered["kl"]["kl"] > 0
