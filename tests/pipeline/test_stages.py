"""All stages of a small recipe: their output, that they run only once, and that the
publication loads anywhere.
"""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from fcsd.base.weights import weights_fingerprint
from fcsd.cli.main import main
from fcsd.evaluation import stage as evaluate_stage
from fcsd.model.connectivity import Connectivity, farskip_layers, load_model
from fcsd.pipeline import distill as distill_stages
from fcsd.pipeline import pretrain as pretrain_stage
from fcsd.pipeline import reference
from fcsd.pipeline import rows as training_data
from fcsd.pipeline import run as stages
from fcsd.pipeline.context import Run
from fcsd.pipeline.tiny.models import tiny_tokenizer
from fcsd.pipeline.tiny.tasks import write_tiny_data
from fcsd.planning.layers import study as layers
from fcsd.recipe.load_recipe import load_recipe
from tests.support import Bench, run_of, start, user_error, with_suite

CONFIG = {
    "model_type": "qwen2_moe",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    # large enough for the connectivity to matter without much training
    "initializer_range": 0.2,
    "experts_implementation": "eager",
}
TRAIN = {
    "max_steps": 4, "batch_size_tokens": 512, "per_device_train_batch_size": 2, "learning_rate": 1e-3,
    "warmup_steps": 1, "logging_steps": 1,
}  # fmt: skip


def pipeline(folder: Path) -> dict[str, Any]:
    data = folder / "data"
    return {
        "name": "small",
        "output_dir": str(folder / "run"),
        "pretrain": {
            "tokenizer": str(data / "tokenizer"),
            "config": CONFIG,
            "data": {"train": [{"path": str(data / "train.jsonl")}], "max_length": 256},
            "train": TRAIN | {"max_steps": 6},
        },
        "model": {"experts_implementation": "eager"},
        "data": {
            "train": [{"path": str(data / "train.jsonl")}],
            "heldout": {"path": str(data / "heldout.jsonl")},
            "heldout_examples": 8,
            "max_length": 256,
        },
        "train": TRAIN,
        "early_stopping": {
            "task": {
                "kind": "code", "task": "tiny_code", "dataset": "fcsd/tiny-code", "split": "validation",
                "chat_template": True, "stop": [], "max_new_tokens": 4,
            },
            "every_steps": 2, "patience": 9, "limit": 2,
        },
        "sweep": {
            "batch_size_tokens": [512, 1024], "learning_rate": [1e-3, 2e-3], "steps": 2, "warmup_steps": 0,
            "last_steps": 1,
        },
        "variants": {"sft": {"objective.name": "sft"}, "last-50": {"connectivity.layers": {"last": "50%"}}},
        "evaluation": {
            "suite": "tiny", "data_root": str(data / "data"), "batch_size": 4, "limit": 4,
            "layer_study": {"tasks": ["tiny_choice"]},
        },
    }  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder in which `fcsd run` has run the whole recipe."""
    folder = tmp_path_factory.mktemp("stages")
    write_tiny_data(
        folder / "data",
        num_train=300,
        num_distill=10,
        num_heldout=8,
        num_validation=4,
        num_test=4,
        vocab_size=400,
    )
    recipe = pipeline(folder)
    stopping = recipe["early_stopping"]
    recipe["early_stopping"] = with_suite(stopping, folder / "stopping.yaml")
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("datasets.config.HF_DATASETS_CACHE", folder / "cache")
        assert main(["run", str(folder / "recipe.yaml")]) == 0
    return folder


@pytest.fixture
def recipe(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the finished run's recipe, with a cache of its own."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    return finished / "recipe.yaml"


def stages_of(run: Path) -> dict[str, str]:
    """Return folder below the run -> stage of its manifest."""
    return {
        str(path.parent.relative_to(run)): json.loads(path.read_text())["stage"]
        for path in run.rglob("manifest.json")
    }


def test_every_stage_leaves_its_folder_and_manifest(finished: Path) -> None:
    run = finished / "run"
    assert stages_of(run) == {
        "pretrain": "pretrain",
        "convert": "convert",
        "sweep": "sweep",
        "distill": "distill",
        "variants/sft": "distill",
        "variants/last-50": "distill",
        **{
            f"evaluate/{name}": "evaluate"
            for name in ("original", "converted", "fcsd", "sft", "last-50")
        },
        "layers": "layers",
    }
    assert {path.name for path in run.iterdir()} == {
        "tokens", "pretrain", "convert", "sweep", "distill", "variants", "evaluate", "layers", "report", "publish",
    }  # fmt: skip
    for file in (
        "sweep/sweep.json", "sweep/sweep.md", "sweep/sweep.png", "sweep/recipe.yaml", "distill/history.jsonl",
        "distill/scores.json", "layers/layers.json", "layers/layers.png", "report/report.md", "report/report.json",
        "publish/config.json", "publish/model.safetensors", "publish/README.md", "publish/tokenizer.json",
    ):  # fmt: skip
        assert (run / file).stat().st_size > 0, file
    assert not [
        path
        for path in run.rglob("*")
        if path.name.endswith((".tmp", ".old")) or "checkpoint" in path.name
    ]


def test_every_json_file_of_the_run_is_strict(finished: Path) -> None:
    def refuse(word: str) -> None:
        pytest.fail(f"{path}: {word} is not JSON")

    paths = [*(finished / "run").rglob("*.json"), *(finished / "run").rglob("*.jsonl")]
    assert len(paths) > 20
    for path in paths:
        for text in (
            path.read_text().splitlines()
            if path.suffix == ".jsonl"
            else [path.read_text()]
        ):
            json.loads(text, parse_constant=refuse)


def test_the_report_is_printed_as_json_on_request(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", str(recipe), "--only", "report", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert set(printed["models"]) == {"original", "converted", "fcsd", "sft", "last-50"}
    assert printed == json.loads(
        (recipe.parent / "run" / "report" / "report.json").read_text()
    )


def test_the_models_are_what_their_names_say(finished: Path) -> None:
    run = finished / "run"
    layers = {
        name: farskip_layers(load_model(run / name / "model"))
        for name in (
            "pretrain", "convert", "distill", "variants/sft", "variants/last-50",
        )
    }  # fmt: skip
    assert layers == {
        "pretrain": [], "convert": [0, 1], "distill": [0, 1], "variants/sft": [0, 1], "variants/last-50": [1],
    }  # fmt: skip
    history = json.loads(
        (run / "variants" / "sft" / "history.jsonl").read_text().splitlines()[0]
    )
    assert "ce" in history and "kl" not in history


def test_the_original_has_no_divergence_from_itself_and_the_converted_model_has(
    finished: Path,
) -> None:
    results = {
        name: json.loads(
            (finished / "run" / "evaluate" / name / "results.json").read_text()
        )
        for name in ("original", "converted", "fcsd")
    }
    kl = {name: result["kl_to_original"]["kl"] for name, result in results.items()}
    assert kl["original"] == pytest.approx(0, abs=1e-6)
    assert kl["converted"] > 1e-5
    points = json.loads((finished / "run" / "layers" / "layers.json").read_text())[
        "points"
    ]
    whole = [
        point["values"]["kl"]["value"] for point in points if point["num_layers"] == 2
    ]
    # all layers, from either end
    assert whole == pytest.approx([kl["converted"]] * 2, rel=1e-4)
    scores = [
        point["values"]["tiny_choice"]["value"]
        for point in points
        if point["num_layers"] == 2
    ]
    assert scores == [results["converted"]["tasks"]["tiny_choice"]["value"]] * 2


def test_the_main_run_uses_the_choice_of_the_sweep(finished: Path) -> None:
    choice = json.loads((finished / "run" / "sweep" / "manifest.json").read_text())[
        "results"
    ]
    settings = json.loads((finished / "run" / "distill" / "manifest.json").read_text())[
        "settings"
    ]["train"]
    assert (settings["learning_rate"], settings["batch_size_tokens"]) == (
        choice["learning_rate"],
        choice["batch_size_tokens"],
    )
    assert len(choice["candidates"]) == 4
    assert (
        load_recipe(finished / "run" / "sweep" / "recipe.yaml").train.learning_rate
        == choice["learning_rate"]
    )


def test_a_second_run_trains_and_evaluates_nothing(
    finished: Path,
    recipe: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def never(*args: Any, **kwargs: Any) -> None:
        pytest.fail("was run again")

    for module, name in (
        (distill_stages, "train"), (stages, "convert_checkpoint"),
        (evaluate_stage, "prepare_evaluation"), (reference, "mean_kl"),
        (layers, "measuring"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, never)
    kept = {
        path: path.stat().st_mtime_ns
        for path in (finished / "run").rglob("model.safetensors")
        if "publish" not in path.parts
    }
    assert main(["run", str(recipe)]) == 0
    assert kept == {path: path.stat().st_mtime_ns for path in kept}
    captured = capsys.readouterr()
    assert captured.err.count("finished before") == 12
    assert "FCSD" in captured.out or "fcsd" in captured.out


@pytest.mark.breadth
def test_the_published_checkpoint_loads_where_fcsd_does_not_exist(
    finished: Path, tmp_path: Path
) -> None:
    code = (
        "import sys, torch\nclass No:\n    def find_spec(self, name, *rest):\n       "
        " if name.split('.')[0] == 'fcsd': raise"
        " ModuleNotFoundError(name)\nsys.meta_path.insert(0, No())\nfrom transformers"
        " import AutoModelForCausalLM, AutoTokenizer\nm ="
        " AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)\nt"
        " = AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=True)\nids ="
        " torch.arange(5, 25)[None]\ntorch.save(m(ids).logits.detach(),"
        " sys.argv[2])\nprint(type(m).__name__, len(t), 'fcsd' in sys.modules)\n"
    )
    environment = {"HF_MODULES_CACHE": str(tmp_path / "modules")}
    with start(
        "-c",
        code,
        str(finished / "run" / "publish"),
        str(tmp_path / "logits"),
        **environment,
    ) as child:
        out, error = child.communicate()
    assert child.returncode == 0, error
    assert out.splitlines()[-1].split() == [
        "FarSkipQwen2MoeForCausalLM",
        "400",
        "False",
    ]
    own = load_model(finished / "run" / "distill" / "model")
    with torch.no_grad():
        torch.testing.assert_close(
            own(torch.arange(5, 25)[None]).logits, torch.load(tmp_path / "logits")
        )


@pytest.mark.parametrize(
    ("override", "difference"),
    [
        ("evaluation.limit=3", r"evaluate/original: .*evaluation\.limit: 4 -> 3"),
        ("sweep.steps=3", r"run/sweep: .*sweep\.steps: 2 -> 3"),
        ("objective.name=sft", r"run/sweep: .*objective\.name: \"kl\" -> \"sft\""),
        ("connectivity.layers=none", r"run/convert: .*connectivity\.layers"),
        ("pretrain.config.hidden_size=64", r"run/pretrain: .*hidden_size: 32 -> 64"),
        ("data.heldout_examples=7", r"evaluate/original: .*heldout_examples: 8 -> 7"),
    ],
)
def test_a_changed_recipe_is_refused_with_the_difference(
    recipe: Path, override: str, difference: str, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert main(["run", str(recipe), "--set", override]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert re.search(difference, error), error
    assert "choose another output folder, or remove this folder" in error


@pytest.mark.breadth
def test_a_stage_whose_folder_was_removed_is_run_again_alone(
    finished: Path, recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (finished / "run" / "evaluate" / "sft" / "results.json").read_text()
    shutil.rmtree(finished / "run" / "evaluate" / "sft")
    assert main(["run", str(recipe)]) == 0
    said = capsys.readouterr().err
    assert said.count("finished before") == 11
    assert "\n== 12/13: evaluation of sft" in said and "sweep: chosen: " in said
    tasks = [
        json.loads(text)["tasks"]
        for text in (
            before,
            (finished / "run" / "evaluate" / "sft" / "results.json").read_text(),
        )
    ]
    assert tasks[0] == tasks[1]


def test_a_learning_rate_that_diverges_loses_the_sweep(bench: Bench) -> None:
    sweep = {
        "batch_size_tokens": [128], "learning_rate": [1e30, 1e-3], "steps": 3, "warmup_steps": 0, "last_steps": 1,
    }  # fmt: skip
    assert main(["sweep", str(bench.recipe("r", sweep=sweep))]) == 0
    result = json.loads((bench.folder / "r" / "sweep" / "sweep.json").read_text())
    assert [row["loss"] is None for row in result["candidates"]] == [False, True, False]
    assert result["learning_rate"] == 1e-3


def test_stages_that_read_the_same_data_tokenize_it_once(bench: Bench) -> None:
    def tokens(run: Run) -> dict[Path, int]:
        return {
            path: path.stat().st_mtime_ns
            for path in run.layout.tokens.glob("*/0*.safetensors")
        }

    run = run_of(
        bench.recipe(
            "r", variants={"sft": {"objective.name": "sft"}, "seed": {"seed": 5}}
        )
    )
    distill_stages.distill(run, None)
    written = tokens(run)
    assert written
    for variant in ("sft", "seed"):
        distill_stages.distill(run, variant)
        assert tokens(run) == written
    bench.rows.write_text(bench.rows.read_text() * 2)
    other = run_of(run.recipe.model_copy(update={"seed": 7}))
    assert (
        len(training_data.training_rows(other.recipe.data, other.tokenizer, other)) > 0
    )
    assert len(tokens(run)) > len(written)


# ---- a model from scratch


def pretraining(bench: Bench, **changes: Any) -> Path:
    tiny_tokenizer(300).save_pretrained(bench.folder / "tokenizer")
    plan = {
        "tokenizer": str(bench.folder / "tokenizer"),
        "config": CONFIG,
        "data": {"train": [{"path": str(bench.rows)}], "max_length": 32},
        "train": TRAIN | {"batch_size_tokens": 64, "max_steps": 2},
    }
    return bench.recipe("r", model=None, pretrain=plan | changes)


def test_a_farskip_model_can_be_pretrained_from_scratch(bench: Bench) -> None:
    assert (
        main(["pretrain", str(pretraining(bench, connectivity={"layers": "all"}))]) == 0
    )
    folder = bench.folder / "r" / "pretrain" / "model"
    assert farskip_layers(load_model(folder)) == [0, 1]
    config = json.loads((folder / "config.json").read_text())
    assert (config["vocab_size"], config["eos_token_id"], config["pad_token_id"]) == (
        300,
        2,
        0,
    )


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "qwen9_moe"}, r"pretrain\.config: .*qwen9_moe"),
        ({"model_type": "llama"}, r"llama"),
        ({"num_experts": 0}, r"dense|MoE"),
        ({"hidden_size": "wide"}, r"pretrain\.config: qwen2_moe: .*hidden_size"),
        ({"vocab_size": 200}, (r"pretrain\.config\.vocab_size: 200 does not fit the tokenizer's 300; leave it out")),
        ({"eos_token_id": 7}, r"pretrain\.config\.eos_token_id: 7 does not fit the tokenizer's 2"),
    ],
)  # fmt: skip
def test_a_configuration_that_makes_no_model_is_refused(
    bench: Bench,
    config: dict[str, Any],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["pretrain", str(pretraining(bench, config=CONFIG | config))]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert re.search(message, error) and len(error) < 600, error


def test_a_larger_vocabulary_than_the_tokenizers_is_kept() -> None:
    assert (
        pretrain_stage._token_ids(tiny_tokenizer(300), {"vocab_size": 320})[
            "vocab_size"
        ]
        == 320
    )


def test_a_new_model_has_the_weights_of_its_seed() -> None:
    models = []
    for _ in range(2):
        torch.manual_seed(3)
        models.append(
            pretrain_stage.new_model(CONFIG | {"vocab_size": 99}, Connectivity("none"))
        )
    one, two = (model.state_dict() for model in models)
    assert all(torch.equal(value, two[name]) for name, value in one.items())


def test_a_variant_that_does_not_exist_is_refused(bench: Bench) -> None:
    with user_error("has no variant 'x'; allowed: none"):
        distill_stages.distill(run_of(bench.recipe("r")), "x")


def test_a_run_looks_the_original_up_once_and_hashes_it_once(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every look-up of a hub id is a request, and every fingerprint reads all of a
    large checkpoint.
    """
    requests, hashed = [], []

    def snapshot_download(repository: str, **options: Any) -> str:
        requests.append((repository, options["revision"]))
        return str(bench.base)

    def fingerprint(folder: Path, **options: bool) -> str:
        hashed.append(folder)
        return weights_fingerprint(folder, **options)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    monkeypatch.setattr("fcsd.model.load.weights_fingerprint", fingerprint)
    data = {
        "train": [{"path": str(bench.rows)}],
        "heldout": {"path": str(bench.rows)},
        "heldout_examples": 4,
    }
    task = {
        "task": "tiny_choice", "kind": "likelihood", "metric": "acc,none", "dataset": bench.choice["task"]["dataset"],
        "lm_eval_include": "tiny", "chat_template": True,
    }  # fmt: skip
    suite = bench.folder / "suite.yaml"
    suite.write_text(yaml.safe_dump({"name": "s", "tasks": [task]}))
    recipe = bench.recipe(
        "r",
        model={"path": "owner/name", "revision": "a" * 40},
        data=data | {"max_length": 32},
        variants={"sft": {"objective.name": "sft"}},
        sweep={
            "batch_size_tokens": [64], "learning_rate": [1e-3], "steps": 2, "warmup_steps": 0, "last_steps": 1,
        },
        evaluation={"suite": str(suite), "batch_size": 4, "limit": 1},
    )  # fmt: skip
    assert main(["run", str(recipe), "--set", "evaluation.layer_study=true"]) == 0
    assert requests == [("owner/name", "a" * 40)]
    assert hashed.count(bench.base) == 1


def test_a_conversion_that_was_killed_before_its_manifest_is_written_again(
    bench: Bench,
) -> None:
    untrained = {
        "max_steps": 0, "warmup_steps": 0, "batch_size_tokens": 128, "per_device_train_batch_size": 2,
        "learning_rate": 1e-3,
    }  # fmt: skip
    run = run_of(bench.recipe("converted", train=untrained))
    for write in (stages.convert, distill_stages.distill):
        model = write(run).folder / "model"
        whole = (model / "config.json").read_text()
        (model.parent / "manifest.json").unlink()
        (model / "config.json").write_text(whole.replace('"layers"', '"lines"'))
        write(run)
        assert (model / "config.json").read_text() == whole
