"""With one option, every recipe for a real model runs on a tiny model of its family."""

import functools
import itertools
import json
import os
import re
import shlex
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import yaml
from accelerate.commands.launch import launch_command_parser
from transformers import AutoConfig

from fcsd.base.errors import UserError
from fcsd.base.files import data_dir, read_json
from fcsd.cli.main import build_parser, main
from fcsd.data.dataset import build_dataset
from fcsd.data.local import making_of
from fcsd.evaluation import stage as evaluation_stage
from fcsd.evaluation.datasets import dataset_location
from fcsd.evaluation.stage import PlannedEvaluation, run_evaluation
from fcsd.evaluation.suites import load_suite
from fcsd.model.families import UNAVAILABLE
from fcsd.model.load import find_model
from fcsd.parallel.launch import join_launch
from fcsd.pipeline import distill, pretrain, run, trace
from fcsd.pipeline.reference import Reference
from fcsd.pipeline.tiny.models import tiny_tokenizer
from fcsd.pipeline.tiny.rehearse import rehearse as rehearse_in
from fcsd.pipeline.tiny.tasks import write_tiny_data
from fcsd.recipe.load_recipe import load_recipe
from fcsd.recipe.recipe import Recipe
from fcsd.training.trainer import DistillTrainer
from tests.parallel.test_engines import EP, launch
from tests.parallel.test_engines import environment as launch_environment
from tests.pipeline.tiny.test_tasks import SIZES
from tests.reference.tiny import tiny_model
from tests.support import (
    ROOT,
    command_words,
    few,
    in_a_fork,
    in_forked_ranks,
    run_command,
    skip_unavailable,
    user_error,
)


def rehearse(recipe: Recipe, folder: Path) -> Recipe:
    return rehearse_in(recipe, folder, join_launch())


LEFT_OUT = {"tiny", *(["llama-4-scout"] if "llama4" in UNAVAILABLE else [])}
REAL = sorted(
    path
    for path in data_dir("recipes").glob("*/*.yaml")
    if path.parent.name not in LEFT_OUT
)
RECIPES = {path: load_recipe(path) for path in REAL}
DISTILLED = [
    path
    for path, recipe in RECIPES.items()
    if recipe.pretrain is None and recipe.train.max_steps
]
PRETRAINED = [path for path, recipe in RECIPES.items() if recipe.pretrain is not None]


def name(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def differences(one: Any, other: Any, prefix: str = "") -> set[str]:
    """Return the dotted keys of the leaves that differ, without the indices of list
    items.
    """
    if isinstance(one, dict) and isinstance(other, dict):
        keys = one.keys() | other.keys()
        return set().union(
            *(
                differences(one.get(key), other.get(key), f"{prefix}.{key}")
                for key in keys
            )
        )
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return set().union(
            *(differences(a, b, prefix) for a, b in zip(one, other, strict=True))
        )
    return set() if one == other else {prefix.removeprefix(".")}


SWAPPED = {
    "name", "output_dir", "model.path", "data.train.path", "data.heldout.path", "data.heldout_examples",
    "data.max_length", "train.max_steps", "train.batch_size_tokens", "train.warmup_steps", "train.logging_steps",
    "train.save_steps", "early_stopping.every_steps", "early_stopping.limit", "sweep.batch_size_tokens",
    "sweep.steps", "sweep.warmup_steps", "sweep.last_steps", "sweep.train_tokens", "evaluation.data_root",
    "evaluation.limit", "evaluation.suite", "early_stopping.suite",
}  # fmt: skip


@pytest.mark.parametrize("path", few(REAL, 5), ids=name)
def test_a_rehearsal_swaps_model_data_and_steps_and_nothing_else(
    path: Path, tmp_path: Path
) -> None:
    recipe = load_recipe(path)
    small = rehearse(recipe, tmp_path / "r")
    swapped = SWAPPED | {f"pretrain.{key}" for key in SWAPPED} | {"pretrain.tokenizer"}
    changes = differences(recipe.dump(), small.dump())
    assert {
        key for key in changes if not key.startswith(("pretrain.config", "variants"))
    } <= swapped
    for variant in recipe.variants:
        changes = differences(
            recipe.variant(variant).dump(), small.variant(variant).dump()
        )
        assert {
            key for key in changes if not key.startswith("pretrain.config")
        } <= swapped
    assert load_recipe(tmp_path / "r" / "recipe.yaml") == small
    suites = load_suite(recipe.evaluation.suite), load_suite(small.evaluation.suite)
    real_rows, short_rows = (suite.model_dump()["tasks"] for suite in suites)
    for real_row, short_row in zip(real_rows, short_rows, strict=True):
        length = {"max_new_tokens": 32} if "max_new_tokens" in real_row else {}
        assert short_row == real_row | length
    # A batch divides over ranks and micro-batches like the real one.
    for variant in [None, *recipe.variants]:
        real, tiny = (
            each.variant(variant) if variant else each for each in (recipe, small)
        )
        if recipe.only_pretrains:
            real, tiny = real.pretrain, tiny.pretrain
        rows = real.train.batch_size_tokens // real.data.max_length
        assert tiny.train.batch_size_tokens == min(rows, 64) * tiny.data.max_length


def test_the_model_is_of_the_recipes_family_and_the_rows_have_the_columns_of_the_real_data(
    tmp_path: Path,
) -> None:
    for family, recipe in {
        "qwen3_moe": "qwen3-30b-a3b",
        "deepseek_v2": "deepseek-v2-lite",
        "llama4": "llama-4-scout",
    }.items():
        skip_unavailable(family)
        small = rehearse(
            load_recipe(data_dir("recipes") / recipe / "distill.yaml"),
            tmp_path / recipe,
        )
        config = AutoConfig.from_pretrained(small.model.path)
        assert config.model_type == family and config.dtype == torch.bfloat16
    hub = tmp_path / "llama-4-scout" / "hub"
    genqa = datasets.load_dataset(str(hub / "tomg-group-umd/GenQA"), split="dialog")
    assert genqa.column_names == ["text", "prompt", "template", "idx", "category"]
    assert set(genqa[0]["text"][0]) == {"role", "content"}
    infinity = datasets.load_dataset(
        str(hub / "BAAI/Infinity-Instruct"), "7M", split="train"
    )
    assert set(infinity[0]["conversations"][0]) == {"from", "value"}
    mbpp = datasets.load_dataset(str(hub / "evalplus/mbppplus"), split="test")
    assert mbpp.column_names[:3] == ["task_id", "code", "prompt"]


# The recipes' own micro-batch of a row or two would take most of the time.
FEW_MICRO_BATCHES = "train.per_device_train_batch_size=8"


def one_task(folder: Path) -> list[str]:
    """Return options for a suite of one task; eleven benchmarks take ten seconds to
    read and more to answer.
    """
    row = {
        "task": "piqa", "kind": "likelihood", "metric": "acc_norm,none", "dataset": "baber/piqa",
    }  # fmt: skip
    (folder / "suite.yaml").write_text(json.dumps({"name": "one", "tasks": [row]}))
    return ["--set", f"evaluation.suite={folder / 'suite.yaml'}"]


def distilled(
    path: Path, folder: Path, *changes: str, variant: str | None = None
) -> dict[str, Any]:
    """Distil a rehearsal with changed keys; return the results in its manifest."""
    words = ["distill", str(path), "--rehearse", str(folder)]
    words += ["--variant", variant] if variant is not None else []
    # Another test trains the sweep, for which the distillation would wait.
    for change in ("sweep=null", FEW_MICRO_BATCHES, *changes):
        words += ["--set", change]
    assert main(words) == 0
    place = folder / "run" / (f"variants/{variant}" if variant else "distill")
    assert (place / "model" / "model.safetensors").is_file()
    return read_json(place / "manifest.json")["results"]


@pytest.mark.parametrize("path", few(DISTILLED, 1), ids=name)
def test_every_distillation_runs_at_tiny_size(path: Path, tmp_path: Path) -> None:
    # Reading the items of eleven benchmarks takes ten seconds: once is enough.
    looked_at = name(path) == "qwen3-30b-a3b/distill"
    changes = [] if looked_at else ["data.decontaminate=null"]
    results = distilled(path, tmp_path / "r", *changes)
    assert results["steps"] == 2
    if looked_at:
        record = results["decontamination"]
        # MBPP+ twice, MMLU by subject
        assert record["num_left_out"] == 0 and record["num_items"] == 8 * (11 + 57)
    scores = read_json(tmp_path / "r" / "run" / "distill" / "scores.json")["points"]
    assert [point["step"] for point in scores] == [0, 1, 2]


@pytest.mark.breadth
@pytest.mark.parametrize(
    "path", [path for path in DISTILLED if RECIPES[path].variants], ids=name
)
def test_every_variant_runs_at_tiny_size(path: Path, tmp_path: Path) -> None:
    seen = set()
    for variant, changes in load_recipe(path).variants.items():
        kind = str(
            {
                key: value
                for key, value in changes.items()
                if key != "objective.l2_coefficient"
            }
        )
        if kind in seen:
            continue  # another coefficient of the same loss
        seen.add(kind)
        off = ("early_stopping=null", "data.decontaminate=null")
        results = distilled(path, tmp_path / "r", *off, variant=variant)
        assert results["steps"] == 2


@pytest.mark.breadth
def test_the_sweep_runs_at_tiny_size_and_the_distillation_follows_its_choice(
    tmp_path: Path,
) -> None:
    path, folder = (
        data_dir("recipes") / "qwen3-30b-a3b" / "distill.yaml",
        tmp_path / "r",
    )
    small = command_words(
        "--rehearse", folder, "--set data.decontaminate=null --set early_stopping=null"
    )
    small += ["--set", "train.per_device_train_batch_size=32"]
    assert main(["sweep", str(path), *small]) == 0
    choice = read_json(folder / "run" / "sweep" / "manifest.json")["results"]
    assert len(choice["candidates"]) == 6
    assert main(["distill", str(path), *small]) == 0
    settings = read_json(folder / "run" / "distill" / "manifest.json")["settings"][
        "train"
    ]
    assert settings["batch_size_tokens"] == choice["batch_size_tokens"]
    # As many tokens as two steps of the batch that the recipe names.
    assert settings["max_steps"] * settings["batch_size_tokens"] >= 2 * 32 * 64


@pytest.mark.breadth
@pytest.mark.parametrize("path", few(PRETRAINED, 1), ids=name)
def test_every_pretraining_runs_at_tiny_size(path: Path, tmp_path: Path) -> None:
    words = ["pretrain", str(path), "--rehearse", str(tmp_path / "r")]
    for change in ("data.decontaminate=null", FEW_MICRO_BATCHES):
        words += ["--set", f"pretrain.{change}"]
    assert main(words) == 0
    place = tmp_path / "r" / "run" / "pretrain"
    assert read_json(place / "manifest.json")["results"]["steps"] == 2
    model_type = json.loads((place / "model" / "config.json").read_text())["model_type"]
    assert (
        model_type
        == {
            "pretrain": "deepseek_v2",
            "table3": "farskip_deepseek_v2",
            "figure5": "farskip_deepseek_v3",
        }[path.stem]
    )


TRACED = [path for path in PRETRAINED if path.stem in ("table3", "figure5")]


@pytest.mark.breadth
@pytest.mark.parametrize("path", TRACED, ids=name)
def test_every_recipe_of_a_trace_runs_at_tiny_size(path: Path, tmp_path: Path) -> None:
    folder = tmp_path / "traces"
    options = ["--rehearse", str(tmp_path / "r"), "--output", str(folder)]
    # Two micro-batches on each rank: a row at a time would take most of the time.
    options += ["--set", "pretrain.train.per_device_train_batch_size=16"]
    assert launch("cpu_2_ep", ["trace", str(path), *options, *EP]) == [0]
    # The random weights are gone.
    assert {file.name for file in folder.iterdir()} == {
        "regular.json", "farskip.json", "overlap.json", "overlap.png", "times.json",
    }  # fmt: skip
    measured = read_json(folder / "overlap.json")
    assert all(measured[model]["step_s"] > 0 for model in ("regular", "farskip"))
    names = [
        event.get("name", "")
        for event in read_json(folder / "farskip.json")["traceEvents"]
    ]
    # Each of two micro-batches sends twice in each MoE layer, forwards and backwards;
    # then the weights are updated once.
    starts = [name for name in names if re.match(r"farskip::start (disp|comb)", name)]
    moe_layers = {"table3": 3, "figure5": 4}[path.stem]
    assert len(starts) == 2 * 2 * 2 * moe_layers
    assert sum(name.startswith("Optimizer.step#AdamW") for name in names) == 1


@pytest.mark.breadth
def test_the_eleven_benchmarks_score_a_rehearsal(tmp_path: Path) -> None:
    path = data_dir("recipes") / "qwen3-30b-a3b" / "distill.yaml"
    small = rehearse(load_recipe(path), tmp_path / "r")
    model = find_model(small.model)
    suite, reference = load_suite(small.evaluation.suite), Reference(model, small.data)
    folder = model
    evaluation = PlannedEvaluation(
        "original", folder, suite, small.evaluation, reference, original=folder
    )
    result = run_evaluation(evaluation, tmp_path / "out", join_launch())
    assert result == read_json(tmp_path / "out" / "results.json")
    assert result["tasks"].keys() == {row.task for row in suite.tasks}
    assert len(result["tasks"]) == len(load_suite("paper11").tasks) + 1
    assert abs(result["kl_to_original"]["kl"]) < 1e-6


@pytest.mark.breadth
def test_a_multimodal_model_comes_from_its_conversion_to_the_folder_for_the_hub(
    tmp_path: Path,
) -> None:
    skip_unavailable("llama4")
    changes = [
        "sweep=null", "variants={}", "data.decontaminate=null", "early_stopping=null",
    ]  # fmt: skip
    path = data_dir("recipes") / "llama-4-scout" / "distill.yaml"
    options = [
        *one_task(tmp_path),
        *(word for change in changes for word in ("--set", change)),
    ]
    assert main(["run", str(path), "--rehearse", str(tmp_path / "r"), *options]) == 0
    run = tmp_path / "r" / "run"
    models = read_json(run / "report" / "report.json")["models"]
    assert {name: model["layers"] for name, model in models.items()} == {
        "original": "0", "converted": "4/4", "fcsd": "4/4"
    }  # fmt: skip
    assert (
        "# llama-4-scout-rehearsal-farskip"
        in (run / "publish" / "README.md").read_text()
    )


MINIMAL = {
    "name": "x",
    "output_dir": "runs/x",
    "data": {"train": [{"path": "some.jsonl"}], "max_length": 32},
    "train": {"batch_size_tokens": 128, "warmup_steps": 0},
}


def small_recipe(path: str, **changes: Any) -> Recipe:
    return Recipe.model_validate(MINIMAL | {"model": {"path": path}} | changes)


@pytest.fixture
def own_model(tmp_path: Path) -> str:
    model = tiny_model(
        "granitemoeshared", vocab_size=300, num_hidden_layers=8, residual_multiplier=0.3
    )
    model.save_pretrained(tmp_path / "own")
    tiny_tokenizer(300).save_pretrained(tmp_path / "own")
    return str(tmp_path / "own")


def test_of_any_other_model_the_sizes_of_its_config_are_cut(
    own_model: str, tmp_path: Path
) -> None:
    # A number of layers leaves a regular one.
    counted = small_recipe(own_model, connectivity={"layers": {"last": 7}})
    small = rehearse(counted, tmp_path / "counted")
    assert AutoConfig.from_pretrained(small.model.path).num_hidden_layers == 8
    small = rehearse(
        small_recipe(own_model, connectivity={"layers": [0, 5]}), tmp_path / "r"
    )
    config = AutoConfig.from_pretrained(small.model.path)
    assert config.model_type == "granitemoeshared"
    # so that every layer that the recipe names exists
    assert config.num_hidden_layers == 6
    assert config.residual_multiplier == 0.3 and config.shared_intermediate_size == 32


@pytest.mark.parametrize(
    ("suffix", "columns"),
    [
        (".jsonl", {"messages": "m"}),
        (".json", {"text": "t"}),
        (".parquet", {"prompt": "p", "input": "i", "response": "r"}),
        ("", {"prompt": "p", "response": "r"}),
    ],
    ids=["jsonl", "json", "parquet", "folder"],
)
def test_data_under_a_path_is_rehearsed_in_its_own_format_and_columns(
    suffix: str, columns: dict[str, str], own_model: str, tmp_path: Path
) -> None:
    source = {"path": str(tmp_path / f"mine{suffix}"), "columns": columns}
    if not suffix:
        source |= {"split": "train[:50%]+dev"}
    small = rehearse(
        small_recipe(
            own_model,
            data={"train": [source], "max_length": 32},
            objective={"vocab_size": 300},
        ),
        tmp_path / "r",
    )
    rows = build_dataset(small.data.train, tiny_tokenizer(), max_length=32)
    assert len(rows) >= 4  # one batch
    assert (
        small.objective.vocab_size
        == AutoConfig.from_pretrained(small.model.path).vocab_size
    )


def test_another_checkpoint_as_the_teacher_and_a_cache_are_swapped_too(
    own_model: str, tmp_path: Path
) -> None:
    recipe = small_recipe(
        own_model,
        teacher={
            "path": "Qwen/Qwen3-30B-A3B",
            "backend": "cache",
            "cache": "/data/cache",
        },
        variants={"alone": {"teacher": None}},
    )
    small = rehearse(recipe, tmp_path / "r")
    assert small.teacher is not None and small.variant("alone").teacher.path is None
    assert AutoConfig.from_pretrained(small.teacher.path).model_type == "qwen3_moe"
    assert small.teacher.cache == str(tmp_path / "r" / "teacher-cache")


def test_a_rehearsal_is_made_once_and_never_over_something_else(
    own_model: str, tmp_path: Path
) -> None:
    recipe = small_recipe(own_model)
    first = rehearse(recipe, tmp_path / "r")
    made = (tmp_path / "r" / "model" / "model.safetensors").stat().st_mtime_ns
    assert rehearse(recipe, tmp_path / "r") == first
    assert (tmp_path / "r" / "model" / "model.safetensors").stat().st_mtime_ns == made
    with user_error("holds a rehearsal with other settings; choose another folder"):
        rehearse(small_recipe(own_model, seed=3), tmp_path / "r")
    with user_error("is not a rehearsal; choose a new folder"):
        rehearse(recipe, Path(own_model))
    with user_error(r"--rehearse: no/such: no such folder.*to find the model's family"):
        rehearse(small_recipe("no/such"), tmp_path / "other")


def test_data_that_fcsd_makes_are_advised_with_their_command_and_used_when_they_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["run", "tiny/demo"]) == 2
    command = "`fcsd tiny-data runs/tiny-data` makes it"
    assert capsys.readouterr().err.endswith(
        f"runs/tiny-data/train.jsonl: no such file; {command}\n"
    )
    assert main(["run", "tiny/demo", "--rehearse", "small"]) == 2
    note, *warnings, line = capsys.readouterr().err.splitlines()
    assert note.startswith("--rehearse: the model is tiny and random: figures, and")
    first = "the selection last:3 leaves out layer 0 (docs/convert.md)"
    assert [each.rpartition("; ")[2] for each in warnings] == [*[command] * 3, first]
    assert line.endswith(
        "in the layout of its hub repository; `fcsd tiny-data OUT` makes it"
    )
    # The command does not put another data set into that folder.
    assert making_of("Rowan/hellaswag", "runs/tiny-data") == ""
    assert making_of("fcsd/tiny-code", "runs/tiny-data") == f"; {command}"
    for name in ("code", "choice", "answers"):
        (tmp_path / "runs" / "tiny-data" / "data" / "fcsd" / f"tiny-{name}").mkdir(
            parents=True
        )
    small = rehearse(load_recipe("tiny/demo"), Path("small"))
    assert capsys.readouterr().err == ""
    for row in load_suite(small.evaluation.suite).tasks:
        assert dataset_location(row, Path("small/hub")).endswith(
            f"runs/tiny-data/data/{row.dataset}"
        )


def test_a_suite_of_ones_own_is_rehearsed_on_its_own_data_or_refused_before_any_training(
    own_model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"kind": "code", "task": "mine", "dataset": "me/mine"}
    (tmp_path / "own.yaml").write_text(yaml.safe_dump({"name": "own", "tasks": [row]}))
    evaluation = {"suite": str(tmp_path / "own.yaml")}
    (tmp_path / "recipe.yaml").write_text(
        yaml.safe_dump(
            MINIMAL | {"model": {"path": own_model}, "evaluation": evaluation}
        )
    )
    assert (
        run_command("run", tmp_path / "recipe.yaml", "--rehearse", tmp_path / "r") == 2
    )
    said = capsys.readouterr().err
    assert (
        "--rehearse: task mine of suite own: fcsd cannot invent rows of the data set me/mine"
        in said
    )
    assert "task mine: " in said.splitlines()[-1]
    assert not (tmp_path / "r" / "run").exists()

    (tmp_path / "root" / "me" / "mine").mkdir(parents=True)
    (tmp_path / "root" / "me" / "mine" / "test.jsonl").write_text("{}")
    evaluation["data_root"] = str(tmp_path / "root")
    small = rehearse(small_recipe(own_model, evaluation=evaluation), tmp_path / "again")
    place = dataset_location(
        load_suite(small.evaluation.suite).tasks[0],
        Path(str(small.evaluation.data_root)),
    )
    assert (Path(place) / "test.jsonl").read_text() == "{}"


# ---- the commands that their headers print


def header_commands(path: Path) -> list[list[str]]:
    """Return the indented commands in a recipe's header, split into words; a backslash
    continues on the next line.
    """
    header = itertools.takewhile(
        lambda line: line.startswith("#"), path.read_text().splitlines()
    )
    text = "\n".join(line.removeprefix("#") for line in header).replace("\\\n", " ")
    lines = (line for line in text.splitlines() if line.startswith("    "))
    return [
        shlex.split(line.replace("--machine_rank N", "--machine_rank 0"), comments=True)
        for line in lines
    ]


def test_every_recipe_of_a_real_model_says_how_to_launch_it_and_accelerate_reads_that():
    for path in REAL:
        launched = [
            words for words in header_commands(path) if words[0] == "accelerate"
        ]
        assert launched, path
        for words in launched:
            arguments = launch_command_parser().parse_args(words[2:])
            config = data_dir("recipes").parent / arguments.config_file
            assert config.is_file() or (
                arguments.config_file == "MY.yaml"
                and re.search(
                    r"MY\.yaml is configs/(fsdp2_2x8|ep_8)\.yaml with", path.read_text()
                )
            )


def up_to_the_first_stage(command: list[str]) -> int:
    """Run a command until it would read its first rows, or write or trace its first
    model: everything that it refuses has been refused by then.
    """

    def checked(*args: Any, **kwargs: Any) -> None:
        raise UserError("has been checked")

    distill.training_rows = pretrain.pretraining_rows = run.convert = checked  # type: ignore[attr-defined]
    run.pretrain = trace.load_for_launch = checked  # type: ignore[attr-defined]
    return main(command)  # in a fork of its own


@pytest.mark.parametrize(
    "path", few(sorted(REAL, key=lambda path: path.stem == "distill"), 1), ids=name
)
def test_no_command_of_a_recipes_header_is_refused_on_two_ranks(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where there is no checkout
    for number, words in enumerate(header_commands(path)):
        command = words[words.index("fcsd") + 1 :]
        spread = "--expert-parallel" in command
        if spread:
            command[command.index("--expert-parallel") + 1] = "2"
        environment = launch_environment(
            ROOT / "configs" / f"cpu_2_{'ep' if spread else 'fsdp2'}.yaml"
        )
        build_parser().parse_args(command)
        if command[0] == "tiny-data":
            write_tiny_data(Path(command[1]), **SIZES)
        if command[0] in ("tiny-data", "evaluate") or "--rehearse" in command:
            continue
        rehearsal = functools.partial(
            up_to_the_first_stage, [*command, "--rehearse", str(number)]
        )
        if words[0] == "accelerate":

            def on_one(
                rank: int,
                rehearsal: Callable[[], int] = rehearsal,
                environment: dict[str, str] = environment,
            ) -> int:
                os.environ.update(environment)
                return rehearsal()

            outcomes = in_forked_ranks(on_one, 2, tmp_path)
        else:
            outcomes = [
                (in_a_fork(rehearsal, tmp_path / "output"), (tmp_path / "output").read_text()),
            ]  # fmt: skip
        assert [status for status, _ in outcomes] == [2] * len(outcomes), outcomes
        assert sum("error: has been checked" in text for _, text in outcomes) == 1, (
            words,
            outcomes,
        )


@pytest.mark.breadth
def test_a_recipes_header_runs_on_two_ranks_to_its_end(tmp_path: Path) -> None:
    path = data_dir("recipes") / "studies" / "pretrain.yaml"
    words = next(words for words in header_commands(path) if words[0] == "accelerate")
    command = [*words[words.index("fcsd") + 1 :], "--rehearse", str(tmp_path / "r")]
    command += ["--set", "pretrain.train.per_device_train_batch_size=8"]
    assert launch("cpu_2_fsdp2", command) == [0]
    run = tmp_path / "r" / "run"
    rewired = {}
    for name, stage in {"original": "pretrain", "farskip": "variants/farskip"}.items():
        assert read_json(run / stage / "manifest.json")["results"]["steps"] == 2
        config = read_json(run / stage / "model" / "config.json")
        rewired[name] = len(config.get("farskip", {"layers": []})["layers"])
    assert rewired["original"] == 0 and rewired["farskip"] > 0
    # Both start from the same seed and use the same tokens, in one report; nothing else
    # ran.
    report = read_json(run / "report" / "report.json")
    assert list(report["models"]) == ["original", "farskip"]
    assert list(report["comparisons"]) == ["farskip"]
    assert set(report["training"]) == {"original", "farskip"}
    assert (run / "report" / "loss.png").is_file()
    assert not (run / "distill").exists() and not (run / "convert").exists()


@pytest.mark.breadth
def test_an_economical_run_of_two_ranks_that_was_killed_twice_ends_with_the_same_bytes(
    tmp_path: Path,
) -> None:
    """FSDP2, with the average of weights; killed in the second of two steps, then
    before the second evaluation.
    """
    path = data_dir("recipes") / "qwen3-30b-a3b" / "economical.yaml"
    assert load_recipe(path).train.ema_decay is not None
    variables = launch_environment(ROOT / "configs" / "cpu_2_fsdp2.yaml")

    def run_whole(name: str, *deaths: tuple[Any, str]) -> list[str]:
        options = ["--set", "data.decontaminate=null", *one_task(tmp_path)]
        command = ["run", str(path), "--rehearse", str(tmp_path / name), *options]

        def on_rank(rank: int, death: tuple[Any, ...]) -> int:
            os.environ.update(variables)
            if death:
                owner, does = death
                calls, work = itertools.count(1), getattr(owner, does)

                def deadly(*args: Any, **kwargs: Any) -> Any:
                    if next(calls) == 2:
                        os.kill(os.getpid(), signal.SIGKILL)
                    return work(*args, **kwargs)

                setattr(owner, does, deadly)  # a fork of its own
            return main(command)

        texts = []
        for death in (*deaths, ()):
            outcomes = in_forked_ranks(
                functools.partial(on_rank, death=death), 2, tmp_path
            )
            assert [status for status, _ in outcomes] == [
                -signal.SIGKILL if death else 0
            ] * 2, outcomes
            texts.append("".join(text for _, text in outcomes))
        return texts

    run_whole("whole")
    _, second, third = run_whole(
        "killed",
        (DistillTrainer, "_get_grad_norm"),
        (evaluation_stage, "run_evaluation"),
    )
    assert "continuing from" in second
    assert "checkpoint-1" in second
    assert "distill: finished before" in third
    whole, killed = (tmp_path / name / "run" for name in ("whole", "killed"))
    weights = sorted(
        path.relative_to(whole) for path in whole.rglob("model.safetensors")
    )
    assert len(weights) == 4, weights  # converted, calibrated, trained, published
    for file in weights:
        assert (killed / file).read_bytes() == (whole / file).read_bytes(), file
    for name in ("original", "converted", "calibrated", "fcsd"):
        one, other = (
            read_json(place / "evaluate" / name / "results.json")
            for place in (whole, killed)
        )
        assert one["kl_to_original"] == other["kl_to_original"]
        assert one["tasks"]["piqa"]["value"] == other["tasks"]["piqa"]["value"]


@pytest.mark.parametrize("key", ["split", "name"])
def test_a_rehearsal_writes_nothing_outside_its_folder(
    own_model: str, tmp_path: Path, key: str
) -> None:
    source = {"path": "some/data", "columns": {"text": "text"}, key: "../../../../x"}
    recipe = small_recipe(own_model, data={"train": [source]})
    with user_error(r"'\.\./\.\./\.\./\.\./x.*leads out of the folder"):
        rehearse(recipe, tmp_path / "rehearsal")
    assert not (tmp_path / "rehearsal").exists() and not (tmp_path / "x").exists()


def test_a_stage_before_the_pre_training_names_the_command_that_comes_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["tiny/demo", "--rehearse", str(tmp_path / "r"), "--set", "sweep=null"]
    for command in (["distill"], ["run", "--only", "report"]):
        assert main([*command, *options]) == 2
        message = capsys.readouterr().err.strip().splitlines()[-1]
        assert message.endswith(
            "pretrain/model: the pre-training has not finished; run `fcsd pretrain`"
            " first, with the same recipe and options, or `fcsd run`, which runs all"
            " stages"
        )
