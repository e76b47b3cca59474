"""What recipe and machine rule out is reported before any model is loaded, not after
hours of training.
"""

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from transformers import GPT2Config, GPT2LMHeadModel

from fcsd.api.trainer import FCSDTrainer
from fcsd.base.errors import UserError
from fcsd.cli.main import main
from fcsd.model.connectivity import Connectivity, convert_model
from fcsd.model.quantised.dequantise import dequantize_checkpoint
from fcsd.pipeline import checks
from fcsd.pipeline.checks import check_run
from fcsd.pipeline.distill import distill
from fcsd.pipeline.tiny.models import tiny_tokenizer
from fcsd.planning.cost.estimate import estimate
from fcsd.recipe.load_recipe import load_recipe
from tests.model.quantised.test_dequantize import LAYOUTS, write, write_gpt_oss
from tests.reference.tiny import tiny_model
from tests.support import Bench, few, run_of, user_error

SWEEP = {"batch_size_tokens": [128, 96], "learning_rate": [1e-3], "steps": 2}
DATA = {"train": [{"path": "gone/rows.jsonl"}], "max_length": 32}
ALPACA = {
    "path": "alpaca.jsonl",
    "columns": {"prompt": "instruction", "response": "output"},
}
WRONG = {
    "tracker": (
        {"variants": {"v": {"train.report_to": ["wandb"]}}},
        r"variants\.v: train\.report_to: wandb is not",
    ),
    "batch": (
        {"sweep": SWEEP},
        r"^sweep\.batch_size_tokens: 96 is not a multiple of 64",
    ),
    "layers": (
        {"variants": {"v": {"connectivity.layers": [0, 9]}}},
        (
            r"variants\.v: connectivity\.layers: index 9 is out of range: the model has"
            r" 2 decoder layers"
        ),
    ),
    "regular layers": (
        {"variants": {"v": {"connectivity": {"layers": [0], "mlp": "full"}}}},
        r"variants\.v: connectivity: layers \[0\], .* change nothing",
    ),
    "regular mlp": (
        {"variants": {"v": {"connectivity": {"layers": [0], "mlp": [1]}}}},
        r"variants\.v: connectivity\.mlp: layer 1 is not rewired",
    ),
    "few tokens": (
        {"calibration": {"tokens": 10}},
        r"^calibration\.tokens \(--tokens\): 10 are too few",
    ),
    "nothing to calibrate": (
        {"calibration": {}, "variants": {"v": {"connectivity.layers": "none"}}},
        r"variants\.v: connectivity\.layers: none .* nothing to calibrate; .*false$",
    ),
    "layer study": (
        {
            "data": {"train": [ALPACA], "heldout": ALPACA, "max_length": 32},
            "connectivity": {"mlp": "full"},
            "evaluation": {"layer_study": {"sides": ["single"]}},
        },
        r"^evaluation\.layer_study: side 'single' with mlp: full would measure nothing",
    ),
    "data": (
        {"variants": {"v": {"data": DATA}}},
        r"variants\.v: data set gone/rows\.jsonl: no such file",
    ),
    "column": (
        {"variants": {"v": {"data.train": [{"path": "alpaca.jsonl"}]}}},
        r"variants\.v: data set alpaca\.jsonl: no column 'messages'; it has"
        r" 'instruction', 'output'; name the right"
        r" ones under `columns`, for example \{path: alpaca\.jsonl, columns:"
        r" \{'prompt': 'instruction', 'response': ",
    ),
    "empty file": (
        {
            "variants": {
                "v": {"data.train": [{"path": "empty.jsonl", "split": "train[:50%]"}]}
            }
        },
        r"variants\.v: data set empty\.jsonl, split 'train.*': is empty",
    ),
    "test set": (
        {"evaluation": {"suite": "tiny", "data_root": "."}},
        r"task tiny_code: .*: no such folder; the data root must hold",
    ),
    "package of a grader": (
        {"evaluation": {"suite": "./graded.yaml", "data_root": "."}},
        r"task graded: needs packages that are not installed \(no_such_package\); pip",
    ),
}


@pytest.mark.parametrize(("changes", "message"), WRONG.values(), ids=WRONG)
def test_a_run_that_cannot_end_well_does_not_begin(
    bench: Bench,
    changes: dict[str, Any],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "alpaca.jsonl").write_text('{"instruction": "a", "output": "b"}\n')
    (tmp_path / "empty.jsonl").write_text("")
    graded = tmp_path / "graded"
    graded.mkdir()
    (graded / "graded.yaml").write_text("process_results: !function utils.grade\n")
    (graded / "utils.py").write_text("import no_such_package\n")
    row = {"task": "graded", "kind": "generation", "metric": "acc,none"}
    suite = {"name": "own", "tasks": [row | {"dataset": "graded"}]}
    (tmp_path / "graded.yaml").write_text(json.dumps(suite))
    find = checks.check_reporters.__globals__["importlib"].util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "wandb" else find(name)
    )
    with user_error(message):
        check_run(run_of(bench.recipe("r", **changes)))
    assert not (bench.folder / "r").exists()


@pytest.mark.parametrize("method", few(["fp8", "mxfp4"], 1))
def test_a_training_whose_weights_could_not_be_saved_does_not_begin(
    bench: Bench, tmp_path: Path, method: str
) -> None:
    """FP8 and MXFP4 originals used to be trained to the end, and then could not be
    saved.
    """
    if method == "fp8":
        write(tmp_path / "quantised", *LAYOUTS["block fp8"])
    else:
        write_gpt_oss(tmp_path / "quantised")
    recipe = bench.recipe("r", model={"path": str(tmp_path / "quantised")})
    reason = (
        rf"its weights are quantised by {method} .*`fcsd dequantize` writes them in"
        " bfloat16"
    )
    with user_error(reason):
        check_run(run_of(recipe))
    refused = estimate(load_recipe(recipe))["refused"]
    assert len(refused) == 1 and re.search(reason, refused[0])
    dequantize_checkpoint(tmp_path / "quantised", tmp_path / "plain")
    assert (
        estimate(
            load_recipe(bench.recipe("s", model={"path": str(tmp_path / "plain")}))
        )["refused"]
        == []
    )


def test_a_trainer_refuses_weights_that_could_not_be_saved() -> None:
    model = tiny_model("qwen3_moe", vocab_size=512)
    convert_model(model, Connectivity("all"))
    model.config.quantization_config = {
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    }
    rows = Dataset.from_dict({"text": ["one row of text"]})
    with user_error("FarSkipQwen3MoeForCausalLM: its weights are quantised by fp8"):
        FCSDTrainer(model, train_dataset=rows, processing_class=tiny_tokenizer())


def test_a_recipe_whose_first_layer_is_rewired_has_a_warning_with_what_leaves_it_out(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    check_run(run_of(bench.recipe("all")))
    said = capsys.readouterr().err
    assert (
        "in the models that we measured, layer 0 costs the most. To find how many first layers to keep regular, run"
        in said
    )
    assert "`; the selection last:1 leaves out layer 0" in said
    check_run(run_of(bench.recipe("but-one", connectivity={"layers": "last:1"})))
    assert "layer 0" not in capsys.readouterr().err


def test_a_sandbox_that_this_machine_does_not_have_is_missed_before_the_trainings(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise UserError("the sandbox would be weak")

    monkeypatch.setattr(checks, "CodeScorer", refuse)
    with user_error("the sandbox would be weak"):
        check_run(run_of(bench.recipe("r")))


def test_what_is_finished_is_not_checked_again(bench: Bench) -> None:
    run = run_of(bench.recipe("r", variants={"v": {"data": DATA}}))
    folder = run.layout.stage("v")
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")
    check_run(run)


def test_fcsd_run_checks_first(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", str(bench.recipe("r", variants={"v": {"data": DATA}}))]) == 2
    assert "gone/rows.jsonl: no such file" in capsys.readouterr().err
    assert not (bench.folder / "r" / "convert").exists()


def test_rows_longer_than_the_models_positions_give_one_warning_and_beyond_a_table_are_refused(
    bench: Bench, capfd: pytest.CaptureFixture[str]
) -> None:
    data = {"train": [{"path": str(bench.rows)}], "max_length": 256}
    train = {
        "max_steps": 1, "warmup_steps": 0, "batch_size_tokens": 512, "per_device_train_batch_size": 2,
    }  # fmt: skip
    run = run_of(bench.recipe("long", data=data, train=train))
    for _ in range(2):
        check_run(run)
    text = (
        f"data.max_length 256: rows are longer than the 128 positions of {bench.base}:"
        " the model was not trained on later positions"
    )
    assert capfd.readouterr().err.count(text) == 1
    check_run(run_of(bench.recipe("short")))
    assert "positions" not in capfd.readouterr().err

    pretrain = {
        "config": {"model_type": "qwen2_moe", "max_position_embeddings": 24},
        "tokenizer": str(bench.base),
        "data": {"train": [{"path": str(bench.rows)}], "max_length": 32},
        "train": train | {"batch_size_tokens": 64},
    }
    check_run(run_of(bench.recipe("new", model=None, pretrain=pretrain)))
    error = capfd.readouterr().err
    assert (
        "pretrain.data.max_length 32: rows are longer than the 24 positions of a"
        " qwen2_moe" in error
    )

    table = GPT2LMHeadModel(
        GPT2Config(vocab_size=300, n_positions=16, n_embd=16, n_layer=1, n_head=2)
    )
    table.save_pretrained(bench.folder / "table")
    run = run_of(bench.recipe("table", teacher={"path": str(bench.folder / "table")}))
    with user_error(
        r"data\.max_length 32: rows are longer than the 16 positions of .*table,"
        r" which"
    ):
        check_run(run)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"train": {"balance_bias_rate": 0.1}}, r"train\.balance_bias_rate: .* does not have a correction bias"),
        ({"objective": {"name": "kl", "vocab_size": 301}}, r"objective\.vocab_size 301: must be between the 300"),
        ({"lora": {"target_modules": ["no_such"]}}, "^lora: peft cannot adapt .*no_such"),
        ({"lora": {"target_modules": ["lm_head"]}}, r"^lora\.target_modules: names the head of the model"),
        ({"teacher": {"path": "290"}}, "^the vocabularies differ: 290 tokens in the teacher, 300 in the student"),
    ],
    ids=str,
)  # fmt: skip
def test_what_the_student_cannot_do_is_said_before_data_are_read(
    bench: Bench,
    sections: dict[str, Any],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def read(*_: Any, **__: Any) -> None:
        raise AssertionError("data were read")

    monkeypatch.setattr("fcsd.pipeline.distill.training_rows", read)
    sections = copy.deepcopy(sections)
    if "teacher" in sections:
        folder = bench.folder / "teacher"
        tiny_model("qwen2_moe", vocab_size=290).save_pretrained(folder)
        tiny_tokenizer(300).save_pretrained(folder)
        sections["teacher"]["path"] = str(folder)
    train = {"max_steps": 1, "warmup_steps": 0, "batch_size_tokens": 128}
    sections["train"] = train | sections.get("train", {})
    run = run_of(bench.recipe("r", **sections))
    for stage in (check_run, distill):
        with user_error(message):
            stage(run)


def test_a_training_is_checked_once_in_a_run_and_again_with_other_settings(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = []
    check = checks._check_student
    monkeypatch.setattr(
        checks,
        "_check_student",
        lambda run: (checked.append(run.recipe.train.learning_rate), check(run)),
    )
    run = run_of(bench.recipe("r", variants={"v": {"train.learning_rate": 0.5}}))
    check_run(run)
    checks.check_training(run)
    checks.check_training(run.variant("v"))
    assert checked == [run.recipe.train.learning_rate, 0.5]
