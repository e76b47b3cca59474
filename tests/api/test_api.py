"""The functions of `import fcsd`: models in memory, evaluation and recipes, with the
command line's errors.
"""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import fcsd
from fcsd.base.errors import UserError
from fcsd.base.files import read_json
from fcsd.cli.main import main
from fcsd.evaluation.config import SuiteConfig
from fcsd.model.connectivity import farskip_layers
from fcsd.pipeline.tiny.models import tiny_tokenizer
from tests.reference.tiny import tiny_model
from tests.support import Bench, user_error, write_rows

X = torch.arange(3, 19)[None]


@pytest.fixture(scope="module")
def original() -> Any:
    return tiny_model("qwen2_moe", num_hidden_layers=4, vocab_size=300, num_experts=4)


@pytest.mark.parametrize(
    ("layers", "indices"),
    [
        ("last:75%", [1, 2, 3]),
        ([0, 2], [0, 2]),
        ({"first": 2}, [0, 1]),
        (fcsd.Connectivity("0-2", mlp="full"), [0, 1, 2]),
    ],
)
def test_a_model_in_memory_is_converted_in_place_and_back(
    original: Any, layers: Any, indices: list[int]
) -> None:
    model = copy.deepcopy(original)
    with torch.no_grad():
        regular = model(X, use_cache=False).logits
        assert fcsd.convert(model, layers) is model
        assert farskip_layers(model) == indices == model.config.farskip["layers"]
        assert not torch.equal(model(X, use_cache=False).logits, regular)
        assert fcsd.unconvert(model) is model
        assert torch.equal(model(X, use_cache=False).logits, regular)


def test_sides_are_given_once(original: Any) -> None:
    model = fcsd.convert(copy.deepcopy(original), "all", attention="full")
    assert model.config.farskip["attention"] == "full"
    assert model.config.farskip["mlp"] == "outdated"
    with user_error("attention, mlp: set them in the Connectivity instead"):
        fcsd.convert(model, fcsd.Connectivity("all"), mlp="full")
    # another connectivity replaces the first
    fcsd.convert(model, "all", mlp="full")
    assert model.config.farskip["mlp"] == "full"


def test_checkpoints_are_converted_and_loaded_with_their_tokenizers(
    base_checkpoint: Path, tmp_path: Path
) -> None:
    out = fcsd.convert_checkpoint(
        str(base_checkpoint), tmp_path / "out", layers="last:1"
    )
    assert out == tmp_path / "out"
    # The command leaves the same files, with a note of the original.
    words = [str(base_checkpoint), str(tmp_path / "command"), "--layers", "last:1"]
    assert main(["convert", *words]) == 0
    left_by_python, left_by_command = (
        {file.name: file.read_bytes() for file in folder.iterdir()}
        for folder in (out, tmp_path / "command")
    )
    assert left_by_python == left_by_command
    noted = {"model": {"path": str(base_checkpoint), "revision": None}}
    assert read_json(out / "manifest.json")["settings"] == noted
    model, tokenizer = fcsd.load(out)
    while_loaded, _ = fcsd.load(base_checkpoint, layers=[1])
    back, _ = fcsd.load(str(out), original=True)
    regular, _ = fcsd.load(base_checkpoint, dtype="bfloat16")
    assert farskip_layers(model) == farskip_layers(while_loaded) == [1]
    assert not model.training
    assert type(back).__name__ == "Qwen2MoeForCausalLM"
    assert regular.dtype == torch.bfloat16
    assert len(tokenizer) == 300
    with torch.no_grad():
        one, other = (each(X, use_cache=False).logits for each in (model, while_loaded))
    torch.testing.assert_close(one, other, atol=1e-5, rtol=0)


def test_what_cannot_be_converted_or_undone_in_memory_is_refused(original: Any) -> None:
    model = fcsd.convert(copy.deepcopy(original), "all")
    with user_error(
        r"^FarSkipQwen2MoeForCausalLM: is already converted with this connectivity"
        r" \(layers \[0, 1, 2, 3\]\)$"
    ):
        fcsd.convert(model, "all")
    with user_error("^layers: last:9: the model has only 4 decoder layers$"):
        fcsd.convert(model, "last:9")
    with user_error("is not converted, so there is nothing to undo"):
        fcsd.unconvert(copy.deepcopy(original))


def test_the_dtype_of_a_model_that_is_loaded_has_one_name(
    base_checkpoint: Path,
) -> None:
    with user_error(
        r"^fcsd\.load: torch_dtype: use dtype=… instead, for example dtype='bfloat16'"
    ):
        fcsd.load(base_checkpoint, torch_dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"token": "hf_x"}, "token: set HF_TOKEN, or log in"),
        ({"cache_dir": "/big/disk"}, "cache_dir: set HF_HUB_CACHE"),
        ({"connectivity": fcsd.Connectivity(layers="all")}, "connectivity: give it as layers="),
        ({"local_files_only": True}, "local_files_only: set HF_HUB_OFFLINE=1"),
        ({"config": object()}, "config: change the config.json of the checkpoint"),
        ({"output_loading_info": True}, "output_loading_info: a checkpoint that does"),
    ],
)  # fmt: skip
def test_an_option_of_from_pretrained_that_would_have_no_effect_is_refused(
    options: dict[str, Any], message: str, base_checkpoint: Path
) -> None:
    with pytest.raises(UserError) as caught:
        fcsd.load(base_checkpoint, **options)
    assert str(caught.value).startswith(f"fcsd.load: {message}")
    assert "\n" not in str(caught.value)
    fcsd.load(base_checkpoint, local_files_only=False, token=None)


def suite() -> SuiteConfig:
    row = {
        "task": "tiny_choice", "kind": "likelihood", "metric": "acc,none", "dataset": "choice",
        "lm_eval_include": "tiny", "chat_template": True,
    }  # fmt: skip
    return SuiteConfig.model_validate({"name": "quick", "tasks": [row]})


def test_models_in_memory_are_evaluated_and_compared_as_folders_are(
    base_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {"question": f"{n}+1", "choices": ["1", "2", "3 is it"], "answer": n % 3}
        for n in range(8)
    ]
    (tmp_path / "data").mkdir()
    write_rows(tmp_path / "data" / "choice" / "test.jsonl", rows)
    model, tokenizer = fcsd.load(base_checkpoint)
    options: dict[str, Any] = {"data_root": tmp_path / "data", "progress": False}
    model.train()
    before = fcsd.evaluate_model(model, suite(), tokenizer=tokenizer, **options)
    assert model.training
    assert before["suite"] == "quick"
    assert len(before.samples["tiny_choice"]) == 8
    assert json.loads(json.dumps(before)) == before
    fcsd.convert(model, "all")
    after = fcsd.evaluate_model(model, suite(), tokenizer=tokenizer, **options)
    named = fcsd.evaluate_model(
        model, suite(), tasks=["tiny_choice"], tokenizer=tokenizer, **options
    )
    assert named["tasks"] == after["tasks"] and named["suite"] == "quick-tasks"
    wrong: Any
    for wrong in ("tiny_choice", [], [None]):
        with user_error(r"^tasks: .* a list of names"):
            # before the model is looked for
            fcsd.evaluate_model("nowhere", suite(), tasks=wrong)
    comparison = fcsd.compare(before, after)
    assert comparison["tasks"]["tiny_choice"]["num_items"] == 8
    assert "tiny_choice" in str(comparison)
    folders = [
        result.save(tmp_path / name)
        for name, result in (("before", before), ("after", after))
    ]
    assert (
        dict(fcsd.compare(*folders))
        == dict(fcsd.compare(before, folders[1]))
        == dict(comparison)
    )
    # The record of another command stays, and the result beside it is read.
    record = {"stage": "convert", "outputs": {}}
    (folders[1] / "manifest.json").write_text(json.dumps(record))
    after.save(folders[1])
    assert json.loads((folders[1] / "manifest.json").read_text()) == record
    capsys.readouterr()
    assert main(["compare", *map(str, folders)]) == 0
    assert capsys.readouterr().out.strip() == str(fcsd.compare(*folders))
    with user_error("tokenizer: is required for a model in memory"):
        fcsd.evaluate_model(model, suite(), **options)
    with user_error("suite 'tini': no such suite"):
        fcsd.evaluate_model(model, "tini", tokenizer=tokenizer, **options)
    with user_error(
        "compare: a dict; give the result of evaluate_model, or the folder"
    ):
        fcsd.compare(dict(before), after)  # type: ignore[arg-type]


def test_recipes_are_loaded_by_name_and_run_from_a_path_and_from_plain_data(
    bench: Bench,
) -> None:
    recipe = fcsd.load_recipe(
        "tiny/demo", overrides={"train.learning_rate": 1e-5, "connectivity.layers": [0]}
    )
    assert recipe.train.learning_rate == 1e-5 and recipe.connectivity.layers == [0]
    path = bench.recipe("python")
    folder = fcsd.run_stage("distill", path)
    assert folder == bench.folder / "python" / "distill"
    assert (folder / "model" / "config.json").is_file()
    plain = fcsd.load_recipe(path).dump() | {"output_dir": str(bench.folder / "plain")}
    again = fcsd.run_stage("distill", plain)
    results = [read_json(each / "manifest.json")["results"] for each in (folder, again)]
    assert results[0]["last_loss"] == results[1]["last_loss"]
    assert fcsd.run_stage("convert", plain) == bench.folder / "plain" / "convert"
    assert fcsd.run_stage("tokenize", plain) == bench.folder / "plain" / "tokens"
    with user_error(r"has no `evaluation\.layer_study`; add one"):
        fcsd.run_stage("layers", plain)
    with user_error(
        "run_stage: no stage 'all'; allowed: cache-teacher, calibrate, convert,"
        " distill, evaluate"
    ):
        fcsd.run_stage("all", path)
    with user_error("no stage 'destill'; did you mean 'distill'"):
        fcsd.run_stage("destill", path)
    with user_error("its variants are distillations; use `fcsd"):
        fcsd.run_stage("pretrain", path, variant="sft")
    with user_error("has no `train` section, so it only pre-train"):
        fcsd.run_stage("distill", "studies/pretrain", variant="farskip")
    with user_error("stage 'convert' has no variants"):
        fcsd.run_stage("convert", path, variant="sft")
    with user_error(r"recipe: train.max_step: unknown key; did you mean 'max_steps'"):
        fcsd.run_stage("distill", plain | {"train": {"max_step": 3}})


MODEL: Any = object()  # stands for a converted model in memory
WRONG_KINDS: list[tuple[str, dict[str, Any], str]] = [
    (
        "convert",
        {"model": "path"},
        "model: 'path' is a path; fcsd.convert rewires a model in memory: use"
        " fcsd.convert_checkpoint(model, out) to convert a folder",
    ),
    ("convert", {"model": (1, 2)}, "model: a tuple; a model in memory (fcsd.load gives one and its tokenizer)"),
    ("convert", {"model": MODEL, "layers": None}, "layers: None; leave it out for all of them, or give 'none'"),
    ("unconvert", {"model": "path"}, "model: a str; a model in memory"),
    ("convert_checkpoint", {"model": MODEL, "out": "x"}, "; the path of a checkpoint (fcsd.convert takes a model in"),
    ("convert_checkpoint", {"model": "x", "out": None}, "out: None; the path of a new folder is needed"),
    ("convert_checkpoint", {"model": "BASE", "out": "x", "layers": "all", "format": "amd"},
     "format='amd'): writes the model's own connectivity and weights; leave layers,"),
    ("convert_checkpoint", {"model": "BASE", "out": "x", "format": "xyz"}, "format: 'xyz'; allowed: None, 'amd'"),
    ("convert_checkpoint", {"model": "BASE", "out": "/proc/x"},
     "/proc/x: cannot be created, because /proc is not writable"),
    ("load", {"path": MODEL}, "; the path of a checkpoint, or owner/name on the Hub, is needed"),
    ("load", {"path": "BASE", "dtype": "bf"}, "fcsd.load: transformers refuses dtype='bf': "),
    ("load", {"path": "BASE", "attn_implementation": "x"}, "transformers refuses attn_implementation='x': "),
    ("load", {"path": "BASE", "nonsense": 3}, "transformers refuses nonsense=3: "),
    ("calibrate", {"student": "x", "teacher": MODEL, "rows": X}, "student: a str; a model in memory"),
    ("calibrate", {"student": MODEL, "teacher": None, "rows": X}, "teacher: None; a model in memory"),
    ("calibrate", {"student": MODEL, "teacher": MODEL, "rows": None}, "rows: None; give token ids (N, T)"),
    ("calibrate", {"student": MODEL, "teacher": MODEL, "rows": ["a"]}, "rows: a list of str; give token ids (N, T)"),
    ("calibrate", {"student": MODEL, "teacher": MODEL, "rows": torch.tensor(3)}, "rows: a Tensor; give token ids"),
    ("calibrate", {"student": MODEL, "teacher": MODEL, "rows": X / 2}, "rows: a tensor of torch.float32; token ids"),
    ("calibrate", {"student": MODEL, "teacher": MODEL, "rows": X, "ridge": "x"},
     "calibrate: ridge: Input should be a valid number"),
    ("calibrate", {"student": MODEL, "teacher": MODEL, "rows": X, "ridge": 1},
     "calibrate: ridge: Input should be less than 1, got 1"),
    ("calibrate", {"student": MODEL, "teacher": MODEL, "rows": [{"text": "a"}], "tokenizer": 3},
     "tokenizer: an int; a tokenizer or its path is needed"),
    ("evaluate_model", {"model": (1, 2)}, "model: a tuple; a model in memory (the first value that fcsd.load returns)"),
    ("evaluate_model", {"model": MODEL, "tokenizer": 3}, "tokenizer: an int; a tokenizer or its path is needed"),
    ("evaluate_model", {"model": "BASE", "suite": {}}, "suite: a dict; the name or path of a suite, or a SuiteConfig"),
    ("evaluate_model", {"model": "BASE", "limit": "few"}, "evaluate_model: limit: Input should be a valid integer"),
    ("evaluate_model", {"model": "BASE", "launch": 3}, "launch: an int; what fcsd.parallel.launch.join_launch"),
    ("compare", {"original": None, "converted": None},
     "compare: None; give the result of evaluate_model, or the folder"),
    ("compare", {"original": "x", "converted": "x", "tasks": "piqa"}, 'tasks: a str; a list of names, such as ["arc_'),
    ("compare", {"original": "x", "converted": "x", "tasks": []}, 'tasks: []; a list of names, such as ["arc_easy"],'),
    ("load_recipe", {"path": {}}, "path: a dict; the path of a recipe, or the name of one that ships with fcsd"),
    ("load_recipe", {"path": "tiny/demo", "overrides": "a=1"}, "overrides: a str; a dict of keys to values"),
    ("load_recipe", {"path": "tiny/demo", "overrides": [{}]}, "overrides: a dict; KEY=VALUE in a list is needed"),
    ("load_recipe", {"path": "tiny/demo", "overrides": {"a": X}}, "overrides: a: a Tensor; a recipe cannot hold"),
    ("run_stage", {"stage": "convert", "recipe": None}, "recipe: None; a recipe, its path or name, or a dict"),
    ("run_stage", {"stage": "convert", "recipe": {}, "expert_parallel": "2"}, "expert_parallel: a str; a number of"),
]  # fmt: skip


@pytest.mark.parametrize(("function", "arguments", "message"), WRONG_KINDS)
def test_an_argument_of_the_wrong_kind_is_one_line(
    function: str,
    arguments: dict[str, Any],
    message: str,
    original: Any,
    base_checkpoint: Path,
) -> None:
    """Covers values of other types, paths in place of models, and the whole tuple of
    `fcsd.load`.
    """
    model = fcsd.convert(copy.deepcopy(original))
    given = {
        name: (
            model
            if value is MODEL
            else (
                base_checkpoint if isinstance(value, str) and value == "BASE" else value
            )
        )
        for name, value in arguments.items()
    }
    with pytest.raises(UserError) as caught:
        getattr(fcsd, function)(**given)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_tokenizer_may_be_a_path(original: Any, base_checkpoint: Path) -> None:
    student = fcsd.convert(copy.deepcopy(original))
    rows = [{"text": f"{n} and {n * n % 97}, then {n * 31 % 89}"} for n in range(200)]
    by_path = fcsd.calibrate(
        student, original, rows, tokenizer=base_checkpoint, max_length=32
    )
    student = fcsd.convert(copy.deepcopy(original))
    tokenizer = fcsd.load(base_checkpoint)[1]
    assert (
        fcsd.calibrate(student, original, rows, tokenizer=tokenizer, max_length=32)
        == by_path
    )


def test_a_token_that_the_model_has_no_embedding_for_is_one_line(
    original: Any, tmp_path: Path
) -> None:
    tokenizer = tiny_tokenizer(original.config.vocab_size)
    tokenizer.add_tokens(["zebra"])
    (tmp_path / "choice").mkdir()
    row = {"question": "zebra", "choices": ["1", "2", "3"], "answer": 0}
    (tmp_path / "choice" / "test.jsonl").write_text(json.dumps(row) + "\n")
    task = {
        "task": "tiny_choice", "kind": "likelihood", "metric": "acc,none", "dataset": "choice",
        "lm_eval_include": "tiny", "chat_template": True,
    }  # fmt: skip
    suite = SuiteConfig.model_validate({"name": "quick", "tasks": [task]})
    size = original.config.vocab_size
    with user_error(
        rf"the tokenizer gives the token id \d+, but the model's .* only {size} "
    ):
        fcsd.evaluate_model(
            original,
            suite,
            tokenizer=tokenizer,
            data_root=str(tmp_path),
            progress=False,
        )
