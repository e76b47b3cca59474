"""Models that cannot be served are refused in one line, before weights are sought:
these folders have none.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import engine
import pytest
import torch
from safetensors.torch import load_file, save_file

from fcsd_vllm import registration, versions
from fcsd_vllm.families import REFUSED
from fcsd_vllm.refusals import Refused


@pytest.fixture
def folder(models: Path, tmp_path: Path) -> Any:
    """Make folders that hold a changed config.json of a checkpoint, and nothing else."""

    def make(case: str, **changes: Any) -> Path:
        config = json.loads((models / case / "config.json").read_text())
        place = tmp_path / case
        place.mkdir()
        (place / "config.json").write_text(json.dumps({**config, **changes}))
        return place

    return make


def refusal(folder: Path, **options: Any) -> str:
    """Return what an engine says that does not start."""
    with pytest.raises(Exception) as raised:
        engine.start_engine(folder, skip_tokenizer_init=True, **options)
    engine.stop_engine()
    return str(raised.value)


START = "import engine, pathlib, sys; engine.start_engine(pathlib.Path(sys.argv[1]))"
FIELD = {
    "version": 1, "layers": [0, 1, 2, 3], "attention": "partial", "mlp": "outdated",
}  # fmt: skip


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"farskip": {**FIELD, "version": 2}}, "config.json: farskip.version: this fcsd reads version 1, got 2"),
        ({"farskip": None}, "config.json: farskip.version: this fcsd reads version 1, got None"),
        ({"farskip": {**FIELD, "layers": [3, 4]}}, "layers: index 4 is out of range: the model has 4 decoder layers"),
        (
            {"architectures": ["Qwen3MoeForCausalLM"]},
            "model_type 'farskip_qwen3_moe' needs architectures ['FarSkipQwen3MoeForCausalLM']",
        ),
        (
            {"model_type": "qwen3_moe"},
            "architecture 'FarSkipQwen3MoeForCausalLM' needs model_type 'farskip_qwen3_moe', got 'qwen3_moe'",
        ),
    ],
)  # fmt: skip
def test_a_config_that_does_not_belong_together_is_refused(
    changes: Any, words: str, folder: Any
) -> None:
    assert words in refusal(folder("qwen3_moe-all", **changes))


def test_settings_and_features_are_refused_by_the_engine_that_is_configured(
    folder: Any,
) -> None:
    assert "fcsd.com: unknown key; did you mean 'comm'?" in refusal(
        folder("qwen3_moe-all"), additional_config={"fcsd": {"com": "blocking"}}
    )
    assert (
        "vLLM rescales this family's residual stream in float16; use --dtype bfloat16"
        in refusal(folder("deepseek_v2-all"), dtype="float16", attention_backend=None)
    )


@pytest.mark.parametrize(
    "options, words",
    [
        ({"pipeline_parallel_size": 2}, "pipeline stages is untested; use --pipeline-parallel-size 1"),
        ({"enable_lora": True}, "FarSkip's exchange does not send LoRA adapters along with the tokens; merge them"),
    ],
)  # fmt: skip
def test_what_data_parallel_ranks_lack_is_refused_before_weights_are_looked_for(
    options: dict[str, Any], words: str, folder: Any
) -> None:
    from vllm.engine.arg_utils import EngineArgs

    ranks = {
        "data_parallel_size": 2,
        "enable_expert_parallel": True,
        "skip_tokenizer_init": True,
    }
    with pytest.raises(ValueError, match="fcsd-serving") as raised:
        EngineArgs(
            str(folder("qwen2_moe-all")), dtype="float32", **ranks, **options
        ).create_engine_config()
    (line,) = [
        line for line in str(raised.value).splitlines() if "fcsd-serving" in line
    ]
    assert words in line


def test_an_fp8_checkpoint_without_scales_is_refused_by_the_engine_that_is_configured(
    folder: Any,
) -> None:
    place = folder("qwen3_moe-all")
    save_file(
        {"x.weight": torch.ones(4).to(torch.float8_e4m3fn)}, place / "model.safetensors"
    )
    assert (
        "x.weight is FP8 and has no scale (x.weight_scale or x.weight_scale_inv)"
        in refusal(place)
    )


@pytest.mark.parametrize(
    "case",
    ["qwen3_moe-all", "instella_moe-amd"],
)
def test_without_the_plugin_the_checkpoint_is_refused_and_never_served_as_the_regular_model(
    case: str, folder: Any
) -> None:
    run = subprocess.run(
        [sys.executable, "-c", START, str(folder(case))],
        env={**os.environ, "VLLM_PLUGINS": ""},
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
    )
    assert run.returncode != 0
    names = (
        "farskip_qwen3_moe",
        "trust_remote_code",
        "['InstellaMoEForCausalLM'] are not supported",
    )
    assert any(name in run.stderr for name in names), run.stderr[-2000:]
    assert "rewired" not in run.stderr


def test_a_gate_that_is_missing_and_one_too_many_are_errors(
    models: Path, folder: Any
) -> None:
    tensors = load_file(models / "instella_moe-amd" / "model.safetensors")
    gate = tensors.pop("model.layers.2.self_attn.gate_proj.weight")
    place = folder("instella_moe-amd")
    save_file(tensors, place / "model.safetensors")
    assert "layers.2.self_attn.gate_proj.weight is missing" in refusal(place)
    tensors["model.layers.2.self_attn.gate_proj.weight"] = gate
    tensors["model.layers.4.self_attn.gate_proj.weight"] = gate.clone()
    save_file(tensors, place / "model.safetensors")
    assert "layers.4.self_attn.gate_proj.weight matches no parameter" in refusal(place)
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps(config | {"gated_attention": False}))
    assert "layers.0.self_attn.gate_proj.weight matches no parameter" in refusal(place)


def test_amds_keys_that_cannot_be_served_are_refused(folder: Any) -> None:
    assert "farskip_stride: unknown key" in refusal(
        folder("instella_moe-amd", farskip_stride=2)
    )


def test_an_engine_that_is_not_on_the_list_warns_and_one_without_an_internal_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    monkeypatch.setattr(versions, "VERIFIED", ("0.0.1",))
    monkeypatch.setattr(
        "logging.Logger.warning",
        lambda self, message, *args, **kwargs: said.append(message),
    )
    registration.register_all()
    assert any("is not verified (0.0.1 is)" in text for text in said)
    from vllm.model_executor.layers.fused_moe.runner import moe_runner

    monkeypatch.delattr(moe_runner, "MoERunner")
    with pytest.raises(
        versions.EngineError,
        match=r"has no .*MoERunner.*install a verified version: vllm==0.0.1",
    ):
        registration.register_all()


@pytest.mark.parametrize(
    "given, kept",
    [
        (None, "FULL_DECODE_ONLY"),
        ("FULL_AND_PIECEWISE", "FULL_DECODE_ONLY"),
        ("PIECEWISE", "NONE"),
        ("FULL", "FULL"),
    ],
)
def test_no_graph_ends_where_sums_are_in_flight(given: str | None, kept: str) -> None:
    from vllm.config import CUDAGraphMode

    config = SimpleNamespace(cudagraph_mode=given and CUDAGraphMode[given])
    registration.keep_whole_graphs(config)
    assert config.cudagraph_mode is CUDAGraphMode[kept]


def test_the_functions_that_layers_replace_or_call_are_known_and_a_change_is_refused(
    folder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.model_executor.models.qwen3_moe import Qwen3MoeDecoderLayer

    from fcsd_vllm import models, sources

    digests = sources.digests([*versions.needed_functions(), *models.forwards()])
    # rewritten by `python -m fcsd_vllm.write_sources`
    assert sources.SOURCES["0.32.0"] == digests
    stock = Qwen3MoeDecoderLayer.forward

    def forward(self: Any, positions: Any, hidden_states: Any, residual: Any) -> Any:
        return stock(self, positions, hidden_states, residual)

    forward.__module__, forward.__qualname__ = stock.__module__, stock.__qualname__
    monkeypatch.setattr(Qwen3MoeDecoderLayer, "forward", forward)
    engine.inspect_here("qwen3_moe")
    said = refusal(folder("qwen3_moe-all"))
    assert (
        "functions that changed and were not reviewed: Qwen3MoeDecoderLayer.forward;"
        " install vllm==0.32.0" in said
    )
    name = f"{stock.__module__}.{stock.__qualname__}"
    looked_at = sources.seal({name: sources.digest(forward)})
    assert f'{{"fcsd": {{"looked_at": "{looked_at}"}}}}' in said
    versions.check_sources([forward], "0.32.0", looked_at)


def test_a_layer_in_whose_place_another_forward_stands_is_refused() -> None:
    from torch import nn

    from fcsd_vllm import rewire
    from fcsd_vllm.families import FAMILIES
    from fcsd_vllm.field import read_field

    stack, layer = nn.Module(), nn.Module()
    layer.self_attn, layer.mlp = nn.Identity(), nn.Identity()
    # as vLLM's offloaders do, which fetch the layer's weights there
    layer.forward = lambda *args: None
    stack.layers = nn.ModuleList([layer])
    with pytest.raises(
        Refused,
        match=("layer 0: test_refusals has replaced the layer's forward"),
    ):
        rewire.rewire(
            stack,
            FAMILIES["qwen3_moe"],
            read_field({**FIELD, "layers": [0]}),
            None,
            {},
            "0.32.0",
        )


@pytest.mark.parametrize(
    "comm, breakable, refused",
    [("blocking", "0", False), ("c10d", "0", True), ("c10d", "1", False)],
)
def test_a_piecewise_graph_is_refused_where_its_capture_begins_unless_sums_can_be_between_pieces(
    comm: str, breakable: str, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.config import CUDAGraphMode

    from fcsd_vllm import ops
    from fcsd_vllm.communication import make_communication
    from fcsd_vllm.settings import Settings

    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", breakable)
    group = SimpleNamespace(world_size=2, device_group=None)
    layer = SimpleNamespace(
        communication=make_communication(Settings(comm=comm), group)
    )
    for mode in CUDAGraphMode:
        context = SimpleNamespace(
            cudagraph_runtime_mode=mode, no_compile_layers={"layer": layer}
        )
        monkeypatch.setattr(ops, "get_forward_context", lambda context=context: context)
        if refused and mode is CUDAGraphMode.PIECEWISE:
            with pytest.raises(Refused, match="set VLLM_USE_BREAKABLE_CUDAGRAPH=1"):
                ops._schedule("layer")
        else:
            assert ops._schedule("layer") is layer


class Summing:
    """A kernel of experts that sums over the ranks itself."""

    def output_is_reduced(self) -> bool:
        return True


@pytest.mark.parametrize(
    "runner, block, words",
    [
        ({"moe_config": SimpleNamespace(is_sequence_parallel=True)}, {}, "use --tensor-parallel-size 1 or --data"),
        ({}, {"is_fused_shared_expert_enabled": True}, "set VLLM_ROCM_USE_AITER_FUSION_SHARED_EXPERTS=0"),
        ({}, {"replicate_shared_expert": True}, "use a tensor-parallel size that divides its width"),
        (
            {"routed_output_transform": SimpleNamespace(reduce_commutative=False)}, {},
            "with a bias, or quantised.*serve the original model",
        ),
        ({"_quant_method": SimpleNamespace(moe_kernel=Summing())}, {}, "Summing sums .* choose another MoE backend"),
    ],
)  # fmt: skip
def test_experts_whose_sum_cannot_be_taken_apart_are_refused_with_what_to_do(
    runner: dict[str, Any],
    block: dict[str, Any],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from fcsd_vllm import rewire
    from fcsd_vllm.families import FAMILIES

    usual = {
        "moe_config": SimpleNamespace(
            is_sequence_parallel=False, skip_final_all_reduce=False
        ),
        "_quant_method": SimpleNamespace(moe_kernel=None),
        "_shared_experts": None,
        "_select_forward": lambda: None,
        "_forward_entry": None,
    }
    monkeypatch.setattr(
        rewire, "_runner", lambda block: SimpleNamespace(**usual | runner)
    )
    monkeypatch.setattr(rewire, "_row", lambda *_: SimpleNamespace())
    schedule: Any = SimpleNamespace(
        index=3,
        dense=False,
        layer=SimpleNamespace(),
        attention=SimpleNamespace(),
        block=SimpleNamespace(**block),
    )
    with pytest.raises(Refused, match=f"layer 3: .*{words}"):
        rewire._give_partial_sums(schedule, FAMILIES["qwen2_moe"], "0.32.0")


@pytest.mark.parametrize("side", ["leaves", "arrives"])
def test_a_stage_whose_loop_passes_one_tensor_is_refused_with_what_to_do(
    side: str,
) -> None:
    from fcsd_vllm import rewire
    from fcsd_vllm.families import FAMILIES

    schedule: Any = SimpleNamespace(
        index=3,
        layer=SimpleNamespace(),
        carries=side == "leaves",
        ends_stage=True,
        receives=side == "arrives",
        begins_stage=True,
    )
    with pytest.raises(Refused, match=r"layer 3: .* use --pipeline-parallel-size 1"):
        rewire._check_layer(schedule, FAMILIES["granitemoe"])
    schedule.carries = schedule.receives = False
    rewire._check_layer(schedule, FAMILIES["granitemoe"])


def test_a_mixer_in_another_stage_than_the_experts_behind_it_is_refused() -> None:
    from fcsd_vllm.field import read_field
    from fcsd_vllm.schedule import branches

    field, is_moe = read_field(FIELD), [False, True] * 2
    with pytest.raises(Refused, match=r"layer 3: .* use --pipeline-parallel-size 1"):
        list(branches(field, [True, True, True, False], is_moe))
    placed = list(branches(field, [True] * 4, is_moe))
    assert [(each["first"], each["index"]) for each in placed] == [(0, 1), (2, 3)]


def test_experts_whose_exchange_cannot_be_cut_out_are_refused_with_what_to_do() -> None:
    from fcsd_vllm.exchange import Exchange
    from fcsd_vllm.settings import Settings

    def refused(
        words: str, block: Any = None, comm: str = "c10d", **kernel: Any
    ) -> None:
        impl, back_end = SimpleNamespace(), SimpleNamespace(activation_format=None)
        made = SimpleNamespace(
            **{
                "is_monolithic": False, "impl": impl, "prepare_finalize": back_end, **kernel,
            }
        )  # fmt: skip
        runner = SimpleNamespace(
            routed_scaling_factor=1.0,
            routed_output_transform=None,
            _quant_method=SimpleNamespace(moe_kernel=made),
        )
        exchange: Any = Exchange(
            block, runner, 3, SimpleNamespace(settings=Settings(comm=comm)), 1.0
        )
        exchange.block = block and (lambda read: block(exchange, read))
        with pytest.raises(Refused, match=f"layer 3: .*{words}"):
            exchange.start(torch.ones(2, 4))

    def computing(exchange: Any, read: torch.Tensor) -> torch.Tensor:
        exchange.output = torch.empty_like(read)
        return 2 * exchange.output

    refused(
        "so its exchange cannot be split; choose another --moe-backend",
        is_monolithic=True,
    )
    refused(
        "comm: c10d cannot split SimpleNamespace; use --all2all-backend"
        " allgather_reducescatter, deepep_high"
    )
    refused(
        "without the kernel that FarSkip splits; use --data-parallel-size 1",
        lambda _, read: read,
        "blocking",
    )
    refused(
        "computes with the routed output, .* use --data-parallel-size 1",
        computing,
        "blocking",
    )


@pytest.mark.parametrize("base", REFUSED)
def test_the_transformers_backend_does_not_compute_a_refused_family_wrongly(
    base: str,
) -> None:
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            hf_config=SimpleNamespace(model_type=f"farskip_{base}", farskip={})
        )
    )
    with pytest.raises(Refused, match=f"^fcsd-serving: {base}: "):
        MODELS_CONFIG_MAP["TransformersMoEForCausalLM"].verify_and_update_config(config)
