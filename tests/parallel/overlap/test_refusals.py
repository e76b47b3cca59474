"""Models that cannot overlap are refused in one line, before weights are loaded."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.distributed.expert_parallel import EPImplementation

from fcsd.model.config import ModelConfig
from fcsd.model.connectivity import Connectivity, convert_model, load_model
from fcsd.model.families import FAMILIES
from fcsd.model.families.overlap import refusal
from fcsd.model.load import find_model
from fcsd.parallel.engine import Engine, requested_engine
from fcsd.parallel.launch import Launch, Ranks
from fcsd.parallel.overlap import attach, check
from fcsd.parallel.place import check_overlap_of, distributed_config, load_for_launch
from fcsd.pipeline.checks import settle_overlap
from fcsd.pipeline.context import Run
from tests.reference.tiny import tiny_config, tiny_model
from tests.support import Bench, user_error

CPU = torch.device("cpu")


def test_overlap_without_expert_parallelism_is_refused_and_off_is_transformers_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with user_error(r"^--overlap full: applies only to --expert-parallel N"):
        requested_engine(8, CPU, 1, "full")
    names = {
        None: "farskip", "full": "farskip", "forward": "farskip", "off": "all_to_all",
    }  # fmt: skip
    for overlap, name in names.items():
        engine = requested_engine(8, CPU, 4, overlap)
        assert engine == Engine("ep", expert_parallel=4, overlap=overlap)
        assert distributed_config(engine, 8).ep_implementation == name
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR")
    for asked in (None, "full", "forward"):
        with user_error(
            r"dynamo_backend inductor compiles whole layers.*set dynamo_backend: 'no'"
        ):
            requested_engine(8, CPU, 4, asked)  # type: ignore[arg-type]
    assert requested_engine(8, CPU, 4, "off").overlap == "off"
    assert requested_engine(8, CPU).name == "ddp"


def test_the_overlap_that_is_asked_for_is_attached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_model("mixtral").save_pretrained(tmp_path)
    model, attached = find_model(ModelConfig(path=str(tmp_path))), []
    monkeypatch.setattr("fcsd.parallel.place.load_checkpoint", lambda *_, **__: None)
    monkeypatch.setattr(
        "fcsd.parallel.overlap.attach_loaded",
        lambda _, overlap: attached.append(overlap),
    )
    for overlap in (None, "full", "forward", "off"):
        engine = Engine("ep", expert_parallel=2, overlap=overlap)  # type: ignore[arg-type]
        load_for_launch(model, Launch(CPU, engine, Ranks(0, 2, lockstep=True)))
    assert attached == ["full", "full", "forward"]


def checked(
    recipe: Path,
    overlap: Any,
    capsys: pytest.CaptureFixture[str],
    size: int = 2,
    device: torch.device = CPU,
) -> str:
    from fcsd.recipe.load_recipe import load_recipe

    launch = Launch(device, Engine("ep", expert_parallel=size, overlap=overlap))
    settle_overlap(Run(load_recipe(recipe), launch))
    return capsys.readouterr().err


def test_a_recipe_that_cannot_overlap_is_refused_or_where_overlap_is_left_open_warned_of(
    bench: Bench, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    none = bench.recipe("none", connectivity={"layers": "none"})
    with user_error(
        r"--overlap full: .* does not support it: connectivity.layers rewires no MoE layer"
    ):
        checked(none, "full", capsys)
    assert (
        checked(none, None, capsys)
        == "overlap: off: connectivity.layers rewires no MoE layer\n"
    )
    assert checked(none, "off", capsys) == ""
    with user_error(r"--expert-parallel 3: does not divide the \d+ experts of "):
        checked(none, None, capsys, size=3)
    tiny_model("mixtral", router_jitter_noise=0.1).save_pretrained(tmp_path / "jitter")
    jitter = bench.recipe("jitter", model={"path": str(tmp_path / "jitter")})
    with user_error(
        r"router_jitter_noise 0.1: recomputation would draw other random numbers"
    ):
        checked(jitter, "forward", capsys)
    plain = bench.recipe("plain")
    capsys.readouterr()  # the progress of saving
    assert checked(plain, "full", capsys) == ""
    l2 = bench.recipe("l2", objective={"name": "kl+l2", "l2_coefficient": 0.1})
    assert "streams objective l2 compares wait for their own combine" in checked(
        l2, None, capsys
    )


def test_a_transformers_or_a_machine_that_cannot_overlap_is_refused_before_anything_is_loaded(
    bench: Bench, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, gpu = bench.recipe("plain"), torch.device("cuda")
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    assert (
        checked(plain, None, capsys) == checked(plain, "off", capsys, device=gpu) == ""
    )
    with user_error(r"CUDA_DEVICE_MAX_CONNECTIONS=1: .*; unset it"):
        checked(plain, None, capsys, device=gpu)
    monkeypatch.setattr(EPImplementation, "__call__", lambda self, hidden_states: None)
    assert checked(plain, "off", capsys) == ""
    for overlap in (None, "full"):
        with user_error(
            r"transformers 5\S+: .* is not the one that overlap was written for"
        ):
            checked(plain, overlap, capsys)


def test_what_a_model_without_weights_tells_is_refused_before_they_are_loaded(
    tmp_path: Path,
) -> None:
    tiny_model("qwen3_moe").save_pretrained(tmp_path)
    options: dict[str, Any] = {"connectivity": Connectivity("all"), "weights": False}
    model = load_model(tmp_path, attn_implementation="eager", **options)
    assert all(parameter.is_meta for parameter in model.parameters())
    check(model)
    with user_error(
        r"split core: attention of layer 0 uses no attention registry .* use end"
    ):
        check(model, "core")
    check(load_model(tmp_path, **options), "core")
    model.activation_checkpointing_enable({"use_reentrant": True})
    with user_error(
        r"re-entrant activation checkpointing is not supported; use .* False"
    ):
        check(model)
    model.activation_checkpointing_enable({"use_reentrant": False})
    check(model)
    model.model.layers[2].compile(backend="eager")
    with user_error(r"^layer 2 is compiled as a whole; compile attention and MLPs"):
        check(model)


def test_a_checkpoint_that_cannot_overlap_is_not_evaluated_with_overlap(
    bench: Bench,
) -> None:
    launch = Launch(CPU, Engine("ep", expert_parallel=2, overlap="full"))
    model = find_model(ModelConfig(path=str(bench.base)))
    with user_error(
        r"--overlap full: .* does not support it: none of its layers is rewired; leave --overlap"
    ):
        check_overlap_of(model, launch)


def test_models_that_cannot_overlap_are_refused_when_it_is_attached() -> None:
    model = tiny_model("qwen3_moe", attn_implementation="eager")
    with user_error(
        r"no MoE layer is both rewired and distributed by ep_implementation 'farskip'"
    ):
        attach(model)
    convert_model(model, Connectivity("all"))
    with user_error(
        r"split core: attention of layer 0 uses no attention registry .* use end"
    ):
        attach(model, split="core")
    layer = model.model.layers[0]
    layer._compiled_call_impl = layer.forward  # what `compile` sets
    with user_error(r"^layer 0 is compiled as a whole; compile attention and MLPs"):
        attach(model)


def test_a_family_is_refused_for_what_its_row_or_its_configuration_says() -> None:
    mixtral = FAMILIES["mixtral"]
    assert refusal(mixtral, tiny_config("mixtral")) is None
    assert refusal(replace(mixtral, spread_refused="no plan")) == "no plan"
    assert "conv1d.weight wrongly" in str(refusal(FAMILIES["kimi_linear"]))
    assert "two sets of experts" in str(refusal(FAMILIES["ernie4_5_vl_moe"]))
    assert (
        refusal(FAMILIES["phimoe"], tiny_config("phimoe", router_jitter_noise=0.1))
        is None
    )
