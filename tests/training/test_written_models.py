"""The files beside the weights of a trained model."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import fcsd
from fcsd.cli.main import main
from fcsd.model.load import load_tokenizer
from fcsd.pipeline.tiny.models import tiny_tokenizer
from tests.reference.tiny import tiny_model
from tests.support import Bench, make_bench, run_command, tensors_of, write_as


def test_the_tokenizer_of_a_trained_model_names_the_class_that_its_original_names(
    tmp_path: Path,
) -> None:
    """transformers 5 would write one of its own classes, which transformers 4 does not
    have.
    """
    tiny_tokenizer(99).save_pretrained(tmp_path / "original")
    file = tmp_path / "original" / "tokenizer_config.json"
    file.write_text(
        json.dumps(
            json.loads(file.read_text())
            | {"tokenizer_class": "PreTrainedTokenizerFast"}
        )
    )
    tokenizer = load_tokenizer(tmp_path / "original")
    model = tiny_model("mixtral")
    write_as(model, tmp_path / "left", torch.float32, tokenizer=tokenizer)
    named = json.loads((tmp_path / "left" / "tokenizer_config.json").read_text())[
        "tokenizer_class"
    ]
    assert named == "PreTrainedTokenizerFast"
    assert (
        load_tokenizer(tmp_path / "left")("add 1")["input_ids"]
        == tokenizer("add 1")["input_ids"]
    )


@pytest.fixture
def with_mtp(tmp_path: Path) -> Bench:
    """Return a bench whose base has an MTP layer."""
    base = tmp_path / "base"
    tiny_model("deepseek_v3", num_hidden_layers=2, vocab_size=300).save_pretrained(base)
    tiny_tokenizer(300).save_pretrained(base)
    layer = {"model.layers.61.eh_proj.weight": torch.randn(6, 12).to(torch.bfloat16)}
    tensors = load_file(base / "model.safetensors") | layer
    save_file(tensors, base / "model.safetensors", {"format": "pt"})
    assert (
        json.loads((base / "config.json").read_text())["num_nextn_predict_layers"] == 1
    )
    return make_bench(base, tmp_path)


def same_mtp(folder: Path, base: Path) -> bool:
    """Tell whether a folder declares and contains the MTP layer of the base, and
    everything else.
    """
    config = json.loads((folder / "config.json").read_text())
    tensors = tensors_of(folder)
    before = load_file(base / "model.safetensors")
    (name,) = (name for name in before if ".61." in name)
    is_same = torch.equal(tensors[name], before[name])
    is_same &= tensors[name].dtype == torch.bfloat16
    is_same &= config["num_nextn_predict_layers"] == 1
    return is_same and tensors.keys() == before.keys()


def test_a_recipe_keeps_mtp_layers_in_every_stage(with_mtp: Bench) -> None:
    train = {
        "max_steps": 1, "batch_size_tokens": 64, "per_device_train_batch_size": 2, "learning_rate": 1e-3,
        "warmup_steps": 0,
    }  # fmt: skip
    recipe = with_mtp.recipe("r", train=train, calibration={"tokens": 1024})
    for stage in ("calibrate", "distill"):
        assert same_mtp(fcsd.run_stage(stage, recipe) / "model", with_mtp.base), stage


def test_save_model_keeps_mtp_layers_and_so_does_what_is_pushed_and_undone(
    with_mtp: Bench, tmp_path: Path
) -> None:
    args = fcsd.FCSDConfig(
        output_dir=str(tmp_path / "out"), layers="all", max_steps=1, max_length=32, save_strategy="no",
        per_device_train_batch_size=2, disable_tqdm=True,
    )  # fmt: skip
    rows = [{"input_ids": [*range(3, 35)]} for _ in range(4)]
    trainer = fcsd.FCSDTrainer(str(with_mtp.base), args, train_dataset=rows)
    trainer.train()
    for _ in range(2):  # the second time over the output of the first
        trainer.save_model()
        assert same_mtp(tmp_path / "out", with_mtp.base)
    assert (
        run_command("push", tmp_path / "out", "me/x --dry-run", tmp_path / "pushed")
        == 0
    )
    assert same_mtp(tmp_path / "pushed", with_mtp.base)
    card = (tmp_path / "pushed" / "README.md").read_text()
    assert (
        "multi-token prediction are the original's, trained for the original's hidden"
        " states" in card
    )
    assert main(["unconvert", str(tmp_path / "out"), str(tmp_path / "regular")]) == 0
    assert same_mtp(tmp_path / "regular", with_mtp.base)
