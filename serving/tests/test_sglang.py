"""FarSkip models in SGLang on a CPU: `make test-sglang` makes the environment and the
checkpoints.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cpu_graphs
import orders
import pytest
import torch
from cases import FULL, LAYERS

from fcsd_sglang.families import FAMILIES, REFUSED
from fcsd_sglang.refusals import ARGUMENTS, check_arguments
from fcsd_sglang.versions import VERSION, EngineError, check_version

pytest.importorskip(
    "sglang",
    reason=(
        "sglang is not installed; `make test-sglang` installs it beside the checkout"
    ),
)

BOUND = 1e-5
"""Nats between two implementations in float32."""
STUBS = Path(__file__).resolve().with_name("sglang_stubs")
ENVIRONMENT = {
    **os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join([str(STUBS), str(STUBS.parent), *filter(None, [os.environ.get("PYTHONPATH")])]),
    "SGLANG_CPU_OMP_THREADS_BIND": "0|0", "SGLANG_EXTERNAL_MODEL_PACKAGE": "fcsd_sglang",
    "SGLANG_USE_CPU_ENGINE": "1",
    # states of linear attention and convolutions
    "SGLANG_MAMBA_CONV_DTYPE": "float32", "SGLANG_MAMBA_SSM_DTYPE": "float32",
}  # fmt: skip


@pytest.fixture(scope="module")
def stack() -> Iterator[Any]:
    """SGLang's layers in this process."""
    sys.path.insert(0, str(STUBS))
    import sglang_stack

    sglang_stack.start()
    yield sglang_stack
    sys.path.remove(str(STUBS))


@pytest.mark.parametrize("connectivity", (*LAYERS, *FULL))
@pytest.mark.parametrize("family", FAMILIES)
def test_layers_compute_what_fcsd_computes_in_the_order_that_hides_sums(
    family: str, connectivity: str, models: Path, stack: Any
) -> None:
    comparison = stack.compare(models, f"{family}-{connectivity}")
    print(comparison["case"], comparison["worst"])
    assert comparison["worst"] < BOUND
    assert comparison["original"] > 0.1
    if comparison["case"] in orders.OF_CASE:
        assert comparison["events"] == orders.events(
            orders.OF_CASE[comparison["case"]], ranks=1
        )


@pytest.mark.parametrize(
    "case", ["deepseek_v2-all", "glm4_moe-mlp_full", "glm4_moe-mixed"]
)
def test_experts_that_write_into_their_input_spoil_nothing(
    case: str, models: Path, stack: Any
) -> None:
    model = stack.load(models / case, models / f"{case.partition('-')[0]}-original")

    def spoiling(experts: Any) -> Any:
        stock = experts.forward

        def forward(hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
            out = stock(hidden_states, *args, **kwargs)
            hidden_states.fill_(7)
            return out

        return forward

    for layer in model.model.layers:
        if hasattr(layer.mlp, "experts"):
            layer.mlp.experts.forward = spoiling(layer.mlp.experts)
    assert stack.worst(model, models / case) < BOUND


# transformers does not write all fields that SGLang asks for, which files of real
# checkpoints have: `Family.defaults`.
@pytest.mark.parametrize(
    "family", [name for name, family in FAMILIES.items() if not family.defaults]
)
def test_a_regular_checkpoint_stays_regular(
    family: str, models: Path, stack: Any
) -> None:
    assert stack.compare(models, f"{family}-original")["worst"] < BOUND


@pytest.mark.parametrize("experts, port", [(1, 29541), (2, 29542)])
def test_two_ranks_compute_the_same_and_sum_in_the_same_order(
    experts: int, port: int, models: Path
) -> None:
    cases = [
        "qwen3_moe-all",
        "qwen3_moe-gap",
        "deepseek_v2-all",
        "deepseek_v3-gap",
        "glm4_moe-mlp_full",
        "ernie4_5_moe-all",  # its blocks sum themselves
        "hunyuan_v1_moe-all",  # these too, and return keys and values
        "granitemoeshared-all",
        "qwen3_5_moe_text-gap",
    ]
    script = str(Path(__file__).with_name("sglang_stack.py"))
    ranks = [
        subprocess.Popen(
            [
                sys.executable, script, str(rank), str(experts), str(port), str(models), *cases,
            ],
            env=ENVIRONMENT,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    outputs = [rank.communicate(timeout=600)[0] for rank in ranks]
    first, second = (
        [
            json.loads(line.partition(" ")[2])
            for line in output.splitlines()
            if line.startswith("RESULT")
        ]
        for output in outputs
    )
    assert [comparison["case"] for comparison in first] == cases
    for ours, theirs in zip(first, second, strict=True):
        assert max(ours["worst"], theirs["worst"]) < BOUND
        assert ours["original"] > 0.1
        assert ours["events"] == theirs["events"]
        if ours["case"] in orders.OF_CASE:
            assert ours["events"] == orders.events(
                orders.OF_CASE[ours["case"]], ranks=2
            )


ENGINE = """
import json, os, sys
import cpu_kernels
import numpy as np

if __name__ == "__main__":
    import sglang

    folder, options = sys.argv[1], json.loads(sys.argv[2])
    engine = sglang.Engine(**{
        "model_path": folder, "device": "cpu", "dtype": "float32", "attention_backend": "torch_native",
        "sampling_backend": "pytorch", "grammar_backend": "none", "disable_radix_cache": True,
        "disable_overlap_schedule": True, "mem_fraction_static": 0.1, "max_total_tokens": 8192, "context_length": 512,
        "skip_server_warmup": True, "log_level": "info", **options,
    })
    reference = np.load(folder + "/reference.npz")
    asked = {
        "input_ids": [reference[f"prompt{k}"].tolist() for k in range(4)],
        "sampling_params": {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True},
    }
    outputs = engine.generate(**asked, return_logprob=True, logprob_start_len=0, top_logprobs_num=5)
    answers = []
    for output, again in zip(outputs, engine.generate(**asked), strict=True):
        rows = output["meta_info"]["input_top_logprobs"] + output["meta_info"]["output_top_logprobs"]
        answers.append({
            "ids": output["output_ids"], "rows": [[entry[:2] for entry in row or []] for row in rows],
            "again": again["output_ids"], "cached": again["meta_info"]["cached_tokens"],
        })
    print("RESULT", json.dumps(answers), flush=True)
    engine.shutdown()
"""


STATES = {"max_mamba_cache_size": 16}
"""Slots for the states of linear attention and convolutions; SGLang would take all memory."""


def run_engine(
    folder: Path, tmp_path: Path, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Return what a server's engine said of a checkpoint, in processes of its own."""
    script = tmp_path / "engine.py"
    script.write_text(ENGINE)
    changed = options.pop("environment", {})
    return subprocess.run(
        [sys.executable, str(script), str(folder), json.dumps(options)],
        env={**ENVIRONMENT, **changed},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.parametrize(
    "case, options",
    [
        ("qwen3_moe-all", {"chunked_prefill_size": 16, "disable_radix_cache": False}),
        ("qwen3_moe-gap", {"tp_size": 2, "ep_size": 2}),
        ("glm4_moe-all", {"tp_size": 2}),
        ("qwen2_moe-all", {}),
        ("mixtral-all", {}),
        ("olmoe-all", {}),
        ("ernie4_5_moe-all", {}),
        ("granitemoe-all", {}),
        ("granitemoeshared-all", {}),
        ("hunyuan_v1_moe-half", {}),
        ("deepseek_v2-all", {}),
        ("lfm2_moe-all", STATES),
        ("qwen3_next-all", STATES),
        ("qwen3_5_moe-all", {**STATES, "enable_multimodal": False}),
        ("qwen3_5_moe_text-gap", {**STATES, "tp_size": 2, "ep_size": 2}),
        ("deepseek_v3-gap", {"tp_size": 2, "ep_size": 2}),
        ("minimax_m2-all", {"tp_size": 2, "ep_size": 2}),
        ("mimo_v2_flash-gap", {"tp_size": 2, "ep_size": 2}),
        # it starts with certain backends only, and loads its experts whole
        ("gpt_oss-half", {"tp_size": 2, "attention_backend": "triton"}),
    ],
)
def test_the_engine_generates_what_load_model_generates(
    case: str, options: dict[str, Any], models: Path, tmp_path: Path
) -> None:
    import numpy as np

    run = run_engine(models / case, tmp_path, **options)
    line = next(
        (line for line in run.stdout.splitlines() if line.startswith("RESULT")), None
    )
    assert line is not None, run.stderr[-2000:]
    reference = np.load(models / case / "reference.npz")
    worst = 0.0
    for k, answer in enumerate(json.loads(line.partition(" ")[2])):
        assert answer["ids"] == answer["again"] == reference[f"ids{k}"].tolist()
        assert bool(answer["cached"]) is not options.get("disable_radix_cache", True)
        for position, row in enumerate(answer["rows"]):
            for logprob, token in row:
                worst = max(
                    worst,
                    abs(
                        logprob - float(reference[f"logprobs{k}"][position - 1, token])
                    ),
                )
    assert worst < BOUND
    assert "FarSkip: rewired" in run.stderr + run.stdout


def test_another_version_is_refused_by_its_name() -> None:
    check_version(VERSION)
    check_version(f"{VERSION}+cpu")
    with pytest.raises(
        EngineError,
        match=r"SGLang 0\.5\.24 is not supported: .* install sglang==0\.5\.23",
    ) as refused:
        check_version("0.5.24")
    assert "\n" not in str(refused.value)


CONFIG = {
    "architectures": ["FarSkipQwen3MoeForCausalLM"], "model_type": "farskip_qwen3_moe", "num_hidden_layers": 4,
    "farskip": {"version": 1, "layers": [0, 1], "attention": "partial", "mlp": "outdated"},
}  # fmt: skip


def read(folder: Path, **changes: Any) -> Any:
    """Return the config that SGLang reads of a checkpoint."""
    from sglang.srt.utils.hf_transformers_utils import get_config

    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    return get_config(str(folder), trust_remote_code=False)


def test_a_config_looks_like_the_base_and_keeps_its_field(
    tmp_path: Path, stack: Any
) -> None:
    config = read(tmp_path)
    assert (config.model_type, config.architectures) == (
        "qwen3_moe",
        ["Qwen3MoeForCausalLM"],
    )
    assert config.farskip == CONFIG["farskip"]


def test_what_transformers_writes_elsewhere_is_where_sglang_looks(
    tmp_path: Path, stack: Any
) -> None:
    rope = {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5}

    def read_of(family: str, **fields: Any) -> Any:
        folder = tmp_path / family  # SGLang reads a folder once
        folder.mkdir()
        row = FAMILIES[family]
        return read(
            folder,
            model_type=row.farskip_type,
            architectures=[row.architecture],
            **fields,
        )

    for config in (
        read_of("qwen3_next", rope_parameters=rope),
        read_of(
            "qwen3_5_moe",
            text_config={"num_hidden_layers": 4, "rope_parameters": rope},
        ).text_config,
    ):
        assert (config.rope_theta, config.partial_rotary_factor) == (5e6, 0.5)
    assert read_of("minimax_m2").use_qk_norm


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"farskip": {**CONFIG["farskip"], "version": 2}}, "farskip.version: this fcsd reads version 1, got 2"),
        (
            {"farskip": {**CONFIG["farskip"], "layers": [9]}},
            "index 9 is out of range: the model has 4 decoder layers",
        ),
        ({"farskip": None}, "farskip.version: this fcsd reads version 1, got None"),
        ({"architectures": ["Qwen3MoeForCausalLM"]}, "needs architectures ['FarSkipQwen3MoeForCausalLM']"),
    ],
)  # fmt: skip
def test_a_config_that_cannot_be_served_is_refused_in_a_line(
    changes: dict[str, Any], message: str, tmp_path: Path, stack: Any
) -> None:
    with pytest.raises(ValueError) as refused:
        read(tmp_path, **changes)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("model_type", ["instella_moe", "farskip_instella_moe"])
def test_instella_is_refused_by_a_line_that_names_what_serves_it(
    model_type: str, tmp_path: Path, stack: Any
) -> None:
    from fcsd_sglang import models

    with pytest.raises(EngineError, match=r"github\.com/AMD-AGI/FarSkip-Collective"):
        read(tmp_path, model_type=model_type)
    amds = next(
        made for made in models.classes() if made.__name__ == "InstellaMoEForCausalLM"
    )
    with pytest.raises(EngineError, match="serve it with vLLM and this plugin"):
        amds(config=None)


@pytest.mark.parametrize("family", REFUSED)
def test_a_family_that_is_not_served_is_refused_by_name(
    family: str, tmp_path: Path, stack: Any
) -> None:
    with pytest.raises(EngineError, match=f"^fcsd-serving: {family}: "):
        read(tmp_path, model_type=f"farskip_{family}")


def test_only_the_family_whose_file_cannot_be_imported_is_refused(
    stack: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fcsd_sglang import models

    stock = models.make_model_class

    def failing(family: Any) -> Any:
        if family.model_type == "mixtral":
            raise AttributeError("no such kernel")
        return stock(family)

    monkeypatch.setattr(models, "make_model_class", failing)
    models.classes.cache_clear()
    made = {each.__name__: each for each in models.EntryClass}
    models.classes.cache_clear()
    assert made["Qwen3MoeForCausalLM"].__mro__[1].__module__.startswith("sglang.")
    with pytest.raises(EngineError, match=r"mixtral: .*AttributeError: no such kernel"):
        made["MixtralForCausalLM"](config=None)


def test_no_class_at_all_is_an_error_that_sglang_does_not_skip(
    stack: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fcsd_sglang import models

    def failing() -> Any:
        raise AttributeError("no such module")

    monkeypatch.setattr(models, "classes", failing)
    with pytest.raises(EngineError, match="no model class can be made"):
        hasattr(models, "EntryClass")


def test_a_farskip_config_is_refused_in_another_version(
    tmp_path: Path, stack: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fcsd_sglang.configs.installed", lambda: "0.5.24")
    with pytest.raises(EngineError, match=r"SGLang 0\.5\.24 is not supported"):
        read(tmp_path)


def test_no_class_is_made_in_another_version(
    stack: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fcsd_sglang import models

    models.classes.cache_clear()
    monkeypatch.setattr(models, "installed", lambda: "0.5.24")
    with pytest.raises(EngineError, match=r"SGLang 0\.5\.24 is not supported"):
        _ = models.EntryClass
    models.classes.cache_clear()


@pytest.mark.parametrize("value", ["", "another_package"])
def test_without_the_variable_a_farskip_config_is_refused(
    value: str, tmp_path: Path, stack: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_EXTERNAL_MODEL_PACKAGE", value)
    with pytest.raises(
        EngineError,
        match="needs SGLANG_EXTERNAL_MODEL_PACKAGE=fcsd_sglang in the environment",
    ):
        read(tmp_path)


def test_without_the_plugin_sglang_refuses_the_folder(models: Path) -> None:
    code = (
        "import sys; from sglang.srt.plugins import load_plugins; load_plugins();"
        "from sglang.srt.utils.hf_transformers_utils import get_config;"
        "get_config(sys.argv[1], trust_remote_code=False)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, str(models / "qwen3_moe-all")],
        env={**ENVIRONMENT, "SGLANG_PLUGINS": "none"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert run.returncode != 0
    assert "contains custom code which must be executed" in run.stderr


@pytest.mark.parametrize(
    "argument, message",
    [
        ({"attn_dp_size": 2}, "data-parallel attention"),
        ({"attn_cp_size": 2}, "context parallelism"),
        ({"moe_a2a_backend": "deepep"}, "--moe-a2a-backend"),
        ({"enable_two_batch_overlap": True}, "two-batch overlap"),
        ({"enable_layernorm_sp": True}, "residual stream on every rank"),
        ({"enable_nvidia_megakernel": True}, "monokernels"),
        ({"enable_fused_moe_sum_all_reduce": True}, "--enable-fused-moe-sum-all-reduce"),
        ({"enable_torch_compile": True}, "--enable-torch-compile"),
        ({"enable_lora": True}, "LoRA"),
        ({"speculative_algorithm": "EAGLE3"}, "stream between layers"),
    ],
)  # fmt: skip
def test_an_argument_that_farskip_layers_do_not_go_with_is_refused(
    argument: dict[str, Any], message: str
) -> None:
    check_arguments(
        SimpleNamespace(
            moe_a2a_backend="none", speculative_algorithm="NGRAM", tp_size=8
        ),
        "FarSkipX",
    )
    with pytest.raises(ValueError, match=message):
        check_arguments(SimpleNamespace(**argument), "FarSkipX")


def test_every_refused_argument_is_one_of_sglang(stack: Any) -> None:
    from sglang.srt.server_args import ServerArgs

    given = ServerArgs(model_path="x")
    assert [name for name in ARGUMENTS if not hasattr(given, name)] == []


@pytest.mark.parametrize(
    "text, message",
    [
        ("blocking", 'must be JSON such as {"comm": "blocking"}'),
        ('{"com": "blocking"}', "FCSD_SERVING.com: unknown key; did you mean 'comm'?"),
        ('{"comm": "stream"}', "must be one of c10d, blocking, timed with SGLang, got 'stream'"),
    ],
)  # fmt: skip
def test_a_setting_that_means_nothing_is_refused(
    text: str, message: str, stack: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fcsd_sglang.settings import settings

    monkeypatch.setenv("FCSD_SERVING", text)
    with pytest.raises(ValueError) as refused:
        settings()
    assert message in str(refused.value)


@pytest.fixture
def breakable(monkeypatch: pytest.MonkeyPatch) -> Any:
    """SGLang's breakable graphs, with graphs, streams and references that work on a
    CPU.
    """
    monkeypatch.syspath_prepend(str(STUBS))
    from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import (
        breakable_cuda_graph as graphs,
    )

    class Stream:
        def wait_stream(self, other: Any) -> None:
            """Wait for nothing: everything here runs in one order."""

    device = SimpleNamespace(Stream=Stream, current_stream=lambda *a: Stream())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", cpu_graphs.Graph)
    monkeypatch.setattr(graphs, "get_device_module", lambda: device)
    monkeypatch.setattr(graphs, "_weak_ref_if_tensor", cpu_graphs.alias)
    return graphs


def capture_with(graphs: Any) -> Any:
    @torch.inference_mode()
    def capture(step: Any) -> Any:
        captured = graphs.BreakableCUDAGraph()
        with graphs.BreakableCUDAGraphCapture(captured):
            output = step()
        assert len(captured._segments) > 1
        return output, captured.replay

    return capture


@pytest.mark.parametrize("case", cpu_graphs.CASES)
@torch.inference_mode()
def test_pieces_with_overlapped_sums_between_them_compute_what_blocking_layers_do(
    case: str, breakable: Any
) -> None:
    cpu_graphs.check(case, breakable.eager_on_graph, capture_with(breakable))


@pytest.mark.parametrize("fault", cpu_graphs.FAULTS)
@torch.inference_mode()
def test_a_fault_in_pieces_is_seen(fault: str, breakable: Any) -> None:
    backend, message = cpu_graphs.FAULTS[fault]
    with pytest.raises(AssertionError, match=message):
        cpu_graphs.check(
            "all, shared experts",
            breakable.eager_on_graph,
            capture_with(breakable),
            backend,
        )
