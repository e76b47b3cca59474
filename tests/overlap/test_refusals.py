"""What cannot overlap is told in one line, before weights are loaded."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.distributed.expert_parallel import AllToAllEP

from fcsd.connectivity import Connectivity, convert_model
from fcsd.distributed.engine import Engine, distributed_config, requested_engine
from fcsd.distributed.launch import Launch
from fcsd.errors import UserError
from fcsd.families import FAMILIES
from fcsd.overlap import attach, refusal
from fcsd.overlap.attach import check_connections
from fcsd.overlap.support import check_transformers
from fcsd.stages.checks import check_overlap
from fcsd.stages.context import Run
from fcsd.tiny.models import tiny_config, tiny_model
from tests.support import Bench

CPU = torch.device("cpu")


def test_overlap_without_expert_parallelism_is_refused_and_off_is_transformers_own() -> None:
    with pytest.raises(
        UserError, match=r"^--overlap full: is for the exchanges of --expert-parallel N, which is"
    ):
        requested_engine(8, CPU, 1, "full")
    names = {None: "farskip", "full": "farskip", "forward": "farskip_forward", "off": "all_to_all"}
    for overlap, name in names.items():
        engine = requested_engine(8, CPU, 4, overlap)
        assert engine == Engine("ep", expert_parallel=4, overlap=overlap)
        assert distributed_config(engine, 8).ep_implementation == name


def checked(recipe: Path, overlap: Any, capsys: pytest.CaptureFixture[str], size: int = 2) -> str:
    from fcsd.config.load import load_recipe

    launch = Launch(CPU, Engine("ep", expert_parallel=size, overlap=overlap))
    check_overlap(Run(load_recipe(recipe), launch))
    return capsys.readouterr().err


def test_a_recipe_that_cannot_overlap_is_refused_or_where_nothing_was_asked_for_told(
    bench: Bench, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    none = bench.recipe("none", connectivity={"layers": "none"})
    with pytest.raises(
        UserError, match=r"--overlap full: .* cannot: connectivity.layers rewires no MoE layer"
    ):
        checked(none, "full", capsys)
    assert checked(none, None, capsys) == "overlap: off: connectivity.layers rewires no MoE layer\n"
    assert checked(none, "off", capsys) == ""
    with pytest.raises(UserError, match=r"--expert-parallel 3: does not divide the \d+ experts of "):
        checked(none, None, capsys, size=3)
    tiny_model("mixtral", router_jitter_noise=0.1).save_pretrained(tmp_path / "jitter")
    jitter = bench.recipe("jitter", model={"path": str(tmp_path / "jitter")})
    with pytest.raises(
        UserError, match=r"router_jitter_noise 0.1: a block that is entered twice would draw twice"
    ):
        checked(jitter, "forward", capsys)
    plain = bench.recipe("plain")
    capsys.readouterr()  # the progress of saving
    assert checked(plain, "full", capsys) == ""
    l2 = bench.recipe("l2", objective={"name": "kl+l2", "l2_coefficient": 0.1})
    assert "streams objective l2 compares wait for their own combine" in checked(l2, None, capsys)


def test_models_and_machines_that_cannot_overlap_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("qwen3_moe", attn_implementation="eager")
    with pytest.raises(
        UserError, match=r"no MoE layer of it is rewired and spread by ep_implementation 'farskip'"
    ):
        attach(model)
    convert_model(model, Connectivity("all"))
    with pytest.raises(
        UserError, match=r"split core: attention of layer 0 asks no attention registry .* use end"
    ):
        attach(model, split="core")
    layer = model.model.layers[0]
    layer._compiled_call_impl = layer.forward  # what `compile` sets
    with pytest.raises(UserError, match=r"^layer 0 is compiled as a whole; compile attention and MLPs"):
        attach(model)
    layer._compiled_call_impl = None
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    check_connections(CPU)
    with pytest.raises(UserError, match=r"CUDA_DEVICE_MAX_CONNECTIONS=1: .*; unset it"):
        check_connections(torch.device("cuda"))
    check_transformers()
    monkeypatch.setattr(AllToAllEP, "__call__", lambda self, hidden_states: None)
    with pytest.raises(UserError, match=r"transformers 5\S+: .* is not the one that overlap was written for"):
        check_transformers()


def test_a_family_is_refused_for_what_its_row_or_its_configuration_says() -> None:
    mixtral = FAMILIES["mixtral"]
    assert refusal(mixtral, tiny_config("mixtral")) is None
    assert refusal(replace(mixtral, spread_refused="no plan")) == "no plan"
    assert "conv1d.weight wrongly" in str(refusal(FAMILIES["kimi_linear"]))
    assert "two sets of experts" in str(refusal(FAMILIES["ernie4_5_vl_moe"]))
    assert refusal(FAMILIES["phimoe"], tiny_config("phimoe", router_jitter_noise=0.1)) is None
