"""Published checkpoints whose model type is another name of a family."""

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fcsd.model.connectivity import (
    Connectivity,
    convert_checkpoint,
    farskip_layers,
    load_model,
    unconvert_checkpoint,
)
from fcsd.model.families import ALIASES, FAMILIES, REFUSED, family_of
from fcsd.model.inspect import inspect_model, report_table
from fcsd.model.inspect.checkpoint import find_source
from fcsd.pipeline.checks import model_config
from tests.reference.tiny import tiny_config, tiny_model
from tests.support import edited_json

X = torch.randint(3, 99, (2, 9), generator=torch.Generator().manual_seed(0))
FAR = Connectivity("moe")


@torch.no_grad()
def logits(folder: Path, **options: object) -> torch.Tensor:
    return load_model(folder, **options)(X, use_cache=False).logits


def rename(folder: Path, name: str) -> None:
    with edited_json(folder / "config.json") as config:
        # As published: names of code in the repository, which is never run.
        config |= {
            "model_type": name,
            "auto_map": {"AutoConfig": "configuration_x.XConfig"},
        }


@pytest.mark.parametrize("name", sorted(ALIASES))
def test_a_checkpoint_with_another_name_of_its_family_is_the_same_to_the_bit(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    family = ALIASES[name]
    tiny_model(family).save_pretrained(tmp_path / "known")
    tiny_model(family).save_pretrained(tmp_path / "alias")
    rename(tmp_path / "alias", name)
    layers = convert_checkpoint(tmp_path / "known", tmp_path / "far-known", FAR)
    with caplog.at_level(logging.WARNING, "transformers"):
        assert convert_checkpoint(tmp_path / "alias", tmp_path / "far", FAR) == layers
        assert torch.equal(logits(tmp_path / "alias"), logits(tmp_path / "known"))
    # a warning of transformers that does not apply
    assert "to instantiate a model of type" not in caplog.text
    assert torch.equal(logits(tmp_path / "far"), logits(tmp_path / "far-known"))
    assert torch.equal(
        logits(tmp_path / "alias", connectivity=FAR), logits(tmp_path / "far")
    )
    assert torch.equal(
        logits(tmp_path / "far", original=True), logits(tmp_path / "known")
    )
    config = json.loads((tmp_path / "far" / "config.json").read_text())
    assert config["model_type"] == f"farskip_{family}"
    unconvert_checkpoint(tmp_path / "far", tmp_path / "back")
    assert (
        json.loads((tmp_path / "back" / "config.json").read_text())["model_type"]
        == family
    )
    tensors = (
        load_file(tmp_path / folder / "model.safetensors")
        for folder in ("back", "alias")
    )
    assert len({tuple(sorted(files)) for files in tensors}) == 1
    saved = load_model(tmp_path / "alias", connectivity=FAR)
    saved.save_pretrained(tmp_path / "saved")
    assert farskip_layers(load_model(tmp_path / "saved")) == layers


@pytest.mark.parametrize("name", sorted(ALIASES))
def test_an_alias_is_described_and_known_in_every_place_that_takes_a_config(
    name: str, tmp_path: Path
) -> None:
    family = ALIASES[name]
    assert family in FAMILIES and name not in {*FAMILIES, *REFUSED}
    tiny_config(family).save_pretrained(tmp_path)
    rename(tmp_path, name)
    facts = inspect_model(tmp_path)
    assert facts["can_be_converted"] and facts["family"] == family
    assert f"{family} (written as {name})" in report_table(facts)
    assert find_source(tmp_path).own_config["model_type"] == family
    assert family_of({"model_type": name}).model_type == family
    assert (
        model_config({**tiny_config(family).to_dict(), "model_type": name}).model_type
        == family
    )
