"""What is beside the weights of a trained model."""

import json
from pathlib import Path

import torch

from fcsd.model.load import load_tokenizer
from fcsd.parallel.launch import join_launch
from fcsd.pipeline.tiny.models import tiny_tokenizer
from fcsd.training.export import write_model
from tests.reference.tiny import tiny_model


def test_the_tokenizer_of_a_trained_model_names_the_class_that_its_original_names(tmp_path: Path) -> None:
    """transformers 5 would write a class of its own, which transformers 4 does not have."""
    tiny_tokenizer(99).save_pretrained(tmp_path / "original")
    file = tmp_path / "original" / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}))
    tokenizer = load_tokenizer(tmp_path / "original")
    model = tiny_model("mixtral")
    write_model(model, tmp_path / "left", tokenizer=tokenizer, dtype=torch.float32, launch=join_launch())
    named = json.loads((tmp_path / "left" / "tokenizer_config.json").read_text())["tokenizer_class"]
    assert named == "PreTrainedTokenizerFast"
    assert load_tokenizer(tmp_path / "left")("add 1")["input_ids"] == tokenizer("add 1")["input_ids"]
