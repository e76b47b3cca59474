"""One rank: every family and connectivity gives the ids and log-probabilities of
`load_model`, in one process.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import engine
import numpy as np
import orders
import pytest
from cases import BREADTH, FEW, FULL, LAYERS, MANY, MTP

from fcsd_vllm.families import FAMILIES

CASES = [
    *(
        f"{family}-{layers}"
        for family in MANY
        for layers in (LAYERS if BREADTH else ("all", "gap"))
    ),
    *(
        f"{family}-{layers}"
        for family in FEW
        for layers in ((*LAYERS, *FULL) if BREADTH else ("all",))
    ),
    # Shared experts with a gate; MLA, shared experts and a dense layer; neither.
    *(
        f"{family}-{side}_full"
        for family in ("qwen2_moe", "deepseek_v2", "gpt_oss")
        for side in ("attention", "mlp")
    ),
    *(f"{family}-mixed" for family in ("qwen2_moe", "deepseek_v2", "gpt_oss")),
    *(["nemotron_h-plain"] if BREADTH else []),
]


UNSEEN = {
    "instella_moe-all": ("attention",),
    "nemotron_h-all": ("attention 0", "attention 5", "attention 6"),
}
"""Mixers of compiled models in which there is no kernel that the recorder sees."""


def test_every_family_runs() -> None:
    assert sorted((*MANY, *FEW)) == sorted(FAMILIES)


@pytest.fixture(scope="module", autouse=True)
def classes_at_hand() -> None:
    """All families but one, which takes the way of `vllm serve`."""
    engine.stand_in_for_torchvision()
    engine.inspect_here(*(name for name in FAMILIES if name != "qwen3_moe"))


@pytest.fixture
def start() -> Iterator[Any]:
    """Start engines that are stopped when the test ends."""
    started: list[Any] = []

    def begin(folder: Path, **options: Any) -> Any:
        started.append(engine.start_engine(folder, **options))
        return started[-1]

    yield begin
    for llm in started or [None]:
        engine.stop_engine(llm)


@pytest.mark.parametrize("case", CASES)
def test_the_engine_computes_what_load_model_computes_and_not_the_original(
    case: str, models: Path, start: Any
) -> None:
    folder = models / case
    llm = start(folder)
    recorder = engine.record(llm)
    outputs = engine.generate(llm, folder)
    recorder.forget()
    equal, worst = engine.compare(outputs, folder)
    print(f"{case}: {equal} of 4 prompts, {worst:.1e}")
    assert equal == 4
    assert worst < engine.BOUND
    original, _ = engine.compare(
        outputs, folder.with_name(f"{case.partition('-')[0]}-original")
    )
    assert original == 0
    if case in orders.OF_CASE:
        step = orders.events(orders.OF_CASE[case], ranks=1)
        assert recorder.events == step * (len(recorder.events) // len(step))


def test_a_checkpoint_of_amd_and_a_regular_gated_one_are_served_as_they_are(
    models: Path, start: Any
) -> None:
    for case, other in (
        ("instella_moe-amd", "instella_moe-original"),
        ("instella_moe-original", "instella_moe-all"),
    ):
        llm = start(models / case)
        assert len(engine.schedules_of(llm)) == (4 if case == "instella_moe-amd" else 0)
        outputs = engine.generate(llm, models / case)
        equal, worst = engine.compare(outputs, models / case)
        assert equal == 4
        assert worst < engine.BOUND
        assert engine.compare(outputs, models / other)[0] == 0
        engine.stop_engine(llm)


def test_a_latent_of_544_is_refused_on_a_cpu_and_served_as_whole_heads(
    models: Path, start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = models / "instella_moe-latent"
    with pytest.raises(Exception) as raised:
        start(folder)
    assert "CPU_MLA has no kernel for its latent cache of 544 channels" in str(
        raised.value
    )
    monkeypatch.setenv("VLLM_MLA_DISABLE", "1")
    outputs = engine.generate(start(folder, attention_backend=None), folder)
    equal, worst = engine.compare(outputs, folder)
    assert equal == 4
    assert worst < engine.BOUND
    assert engine.compare(outputs, models / "instella_moe-all")[0] == 0


@pytest.mark.parametrize(
    "case",
    [
        "qwen2_moe-all",
        "instella_moe-all",
        "granitemoeshared-all",
        *(["qwen3_moe-all", "gemma4_text-all", "nemotron_h-all"] if BREADTH else []),
    ],
)
def test_a_compiled_model_computes_the_same_in_the_same_order(
    case: str, models: Path, start: Any
) -> None:
    folder = models / case
    llm = start(folder, enforce_eager=False)
    recorder = engine.record(llm)
    outputs = engine.generate(llm, folder)
    recorder.forget()
    equal, worst = engine.compare(outputs, folder)
    assert equal == 4
    assert worst < engine.BOUND
    step = orders.events(orders.OF_CASE[case], ranks=1)
    step = [event for event in step if not event.startswith(UNSEEN.get(case, ()))]
    assert recorder.events == step * (len(recorder.events) // len(step))


@pytest.mark.parametrize("case", ["qwen2_moe-all", "glm4_moe-all"])
def test_prefixes_in_the_cache_and_chunks_of_sixteen_change_nothing(
    case: str, models: Path, start: Any
) -> None:
    folder = models / case
    llm = start(
        folder,
        enable_prefix_caching=True,
        max_num_batched_tokens=16,
        block_size=32,
        max_num_seqs=4,
    )
    first, second = (
        engine.generate(llm, folder, prompt_logprobs=cold) for cold in (5, None)
    )
    for outputs in (first, second):
        equal, worst = engine.compare(outputs, folder)
        assert equal == 4
        assert worst < engine.BOUND
    # of the prompt of 64 tokens
    assert max(output.num_cached_tokens for output in second) >= 32


def test_an_adapter_of_attention_and_shared_experts_is_added_to_the_rewired_layers(
    models: Path, start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LoRA of experts needs Triton; vLLM 0.32.0 chooses that on CPUs too, whatever
    modules the adapter may have.
    """
    from vllm.lora.request import LoRARequest
    from vllm.model_executor.layers.fused_moe import layer

    make = layer.FusedMoEConfig
    monkeypatch.setattr(
        layer,
        "FusedMoEConfig",
        lambda **given: make(**{**given, "is_lora_enabled": False}),
    )
    base, adapter = models / "qwen2_moe-all", models / "qwen2_moe-adapter"
    modules = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
    llm = start(base, enable_lora=True, lora_target_modules=modules)
    for folder, request in (
        (adapter, LoRARequest("adapter", 1, str(adapter))),
        (base, None),
    ):
        outputs = engine.generate(llm, folder, lora_request=request)
        equal, worst = engine.compare(outputs, folder)
        assert equal == 4
        assert worst < engine.BOUND
        assert engine.compare(outputs, base if request else adapter)[0] == 0


def off_by() -> float:
    """Multiply integers of eight bits by oneDNN, and return the largest error in steps of one."""
    import torch
    from vllm import _custom_ops as ops

    some = torch.Generator().manual_seed(0)
    rows, weight = (
        torch.randint(-127, 128, (64, 128), generator=some).to(torch.int8)
        for _ in range(2)
    )
    out, one = torch.empty(64, 64), torch.ones(64, 1)
    ops.onednn_scaled_mm(
        ops.create_onednn_scaled_mm(weight.T, one, torch.float32, True, False),
        rows,
        out,
        one,
        None,
        None,
        None,
    )
    return float((out - rows.float() @ weight.float().T).abs().max())


def test_int8_attention_and_shared_experts_compute_what_integers_compute(
    models: Path, start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By oneDNN on every CPU: vLLM's kernel for AMX has no float32, and its int8
    experts need AMX.
    """
    from vllm.model_executor.kernels.linear.scaled_mm import cpu

    monkeypatch.setattr(cpu, "check_cpu_sgl_kernel", lambda *_: False)
    folder = models / "qwen2_moe-int8"
    if (wrong := off_by()) > 0.5:
        pytest.skip(
            f"vLLM's int8 kernel for this processor overflows: integers are off by {wrong:.0f}"
        )
    outputs = engine.generate(start(folder), folder)
    equal, worst = engine.compare(outputs, folder)
    print(f"int8: {equal} of 4 prompts, {worst:.1e}")
    assert equal == 4
    assert worst < 5e-3  # a value within rounding of half a step falls to either side
    # the same without int8
    assert engine.compare(outputs, models / "qwen2_moe-all")[1] > 2e-2
    assert engine.compare(outputs, models / "qwen2_moe-original")[0] == 0


def test_a_family_without_a_row_runs_in_the_transformers_backend_which_says_that_it_blocks(
    models: Path, start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm import ModelRegistry
    from vllm.model_executor.models.transformers import TransformersMoEForCausalLM

    ModelRegistry.register_model(
        "TransformersMoEForCausalLM", TransformersMoEForCausalLM
    )  # as `inspect_here`
    said: list[str] = []
    monkeypatch.setattr(
        "logging.Logger.warning",
        lambda self, text, *args, **_: said.append(text % args if args else text),
    )
    folder = models / "hunyuan_v1_moe-all"
    outputs = engine.generate(start(folder, trust_remote_code=True), folder)
    assert any(
        "hunyuan_v1_moe runs in vLLM's Transformers backend, which overlaps no all-red"
        in text
        for text in said
    )
    equal, worst = engine.compare(outputs, folder)
    assert equal == 4
    assert worst < engine.BOUND
    assert engine.compare(outputs, models / "hunyuan_v1_moe-original")[0] == 0


@pytest.mark.parametrize(
    ("layer", "number"), [("mtp", 1), ("mtp_trained", 1), ("mtp_trained", 3)]
)
@pytest.mark.parametrize("family", MTP)
def test_a_converted_model_drafts_with_its_mtp_layer(
    family: str, layer: str, number: int, models: Path, start: Any
) -> None:
    folder = models / f"{family}-{layer}"
    speculation = {"method": "mtp", "num_speculative_tokens": number}
    llm = start(folder, speculative_config=speculation, disable_log_stats=False)
    outputs = engine.generate(llm, folder, prompt_logprobs=None)
    equal, worst = engine.compare(outputs, folder)
    assert equal == 4
    assert worst < engine.BOUND
    found, known = drafts_in(llm), known_drafts(folder)
    if number == 1:
        # Transformers' layer on fcsd's states drafts the same.
        assert found == known
    else:
        # The layer reads its own states for later tokens, some of which are right.
        assert found[1] > known[1]


@pytest.mark.parametrize("family", MTP)
def test_training_an_mtp_layer_makes_its_drafts_better(
    family: str, models: Path
) -> None:
    (drafts, accepted), (fewer, more) = (
        known_drafts(models / f"{family}-{layer}") for layer in ("mtp", "mtp_trained")
    )
    assert 0 < accepted / drafts < more / fewer / 2


def known_drafts(folder: Path) -> tuple[int, int]:
    """Return how many drafts fcsd's reference verifies and accepts."""
    reference = np.load(folder / "reference.npz")
    return int(reference["drafts"]), int(reference["accepted"])


@pytest.mark.parametrize(
    ("family", "architecture"),
    [
        ("glm4_moe", "Glm4MoeMTPModel"),
        ("deepseek_v3", "DeepSeekMTPModel"),
        ("qwen3_next", "Qwen3NextMTP"),
        ("qwen3_5_moe_text", "Qwen3_5MoeMTP"),
        ("qwen3_5_moe", "Qwen3_5MoeMTP"),
        # vLLM knows no MTP layers of it: it drafts as a whole model.
        ("mixtral", "FarSkipMixtralForCausalLM"),
    ],
)
def test_a_draft_is_the_mtp_layer_of_a_checkpoint_or_all_of_it(
    family: str, architecture: str, models: Path
) -> None:
    from transformers import AutoConfig
    from vllm.config import SpeculativeConfig

    config = AutoConfig.from_pretrained(models / f"{family}-all")
    assert SpeculativeConfig.hf_config_override(config).architectures == [architecture]


def drafts_in(llm: Any) -> tuple[int, int]:
    """Return how many drafts an engine has verified, and how many it has accepted."""
    counted = {
        metric.name: metric.value
        for metric in llm.get_metrics()
        if hasattr(metric, "value")
    }
    return (
        counted["vllm:spec_decode_num_drafts"],
        counted["vllm:spec_decode_num_accepted_tokens"],
    )


def test_ngram_speculation_changes_nothing(models: Path, start: Any) -> None:
    """Last, because vLLM 0.32.0 starts no other engine in a process that has numba,
    which these drafts are made by.
    """
    folder = models / "qwen2_moe-all"
    speculation = {
        "method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1,
    }  # fmt: skip
    llm = start(folder, speculative_config=speculation, disable_log_stats=False)
    equal, worst = engine.compare(
        engine.generate(llm, folder, prompt_logprobs=None), folder
    )
    assert equal == 4
    assert worst < engine.BOUND
    drafts, accepted = drafts_in(llm)
    assert drafts > 0
    assert accepted > 0
