"""`serving/` is a separate distribution that cannot import fcsd: what must be the same
in both is compared here.
"""

import importlib.util
import json
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fcsd.base.errors import UserError
from fcsd.model.connectivity import Connectivity
from fcsd.model.connectivity.aliases import from_instella
from fcsd.model.families import FAMILIES, PREFIX, SERVED
from fcsd.planning.cost.collectives import TABLES
from fcsd.planning.cost.planned import ALL2ALL
from tests.reference.served import with_lists
from tests.serving.test_serving_sglang import PURE as PURE_OF_SGLANG
from tests.support import ROOT, load_modules

SERVING = ROOT / "serving"
PURE = ("families", "field", "refusals", "settings", "sources", "versions", "weights")


@pytest.fixture(scope="module")
def plugin() -> Any:
    """The plugin's modules that need no engine."""
    return load_modules("serving", "fcsd_vllm", PURE)


def test_every_family_is_named_as_in_fcsd(plugin: Any) -> None:
    assert sorted(plugin.families.FAMILIES) == list(SERVED)
    for name, row in plugin.families.FAMILIES.items():
        family = FAMILIES[name]
        config = FAMILIES[family.like].config if family.like else family.config
        assert (row.model_type, row.config, row.causal_lm) == (
            name,
            config,
            family.causal_lm,
        )
        assert row.like == (family.like or "")
        assert row.farskip_type == PREFIX + name
        assert row.text_config == family.multimodal


def test_a_row_has_what_its_family_adds_to_the_plain_layer(plugin: Any) -> None:
    """No family is served whose layer has more than a row and the schedules express."""
    for name, row in plugin.families.FAMILIES.items():
        family = FAMILIES[name]
        assert family.layout == ("blocks" if row.one_branch else "pre_norm")
        assert (family.stream_edit, family.side_output) == (None, None)
        assert row.factor == (family.residual_multiplier or "")
        assert row.norms[0] == family.in_norm
        if row.normed_sums:
            assert not family.additive
            assert family.residual_names == (None, "layer_scalar")
            assert row.norms[1] in family.mlp_norm
        else:
            assert family.additive
            assert family.residual == "sum"
            assert row.norms[1] == (family.mlp_norm or family.in_norm)
            assert row.shared == (family.layer_shared or "")


def test_the_guide_lists_the_families_of_both_engines() -> None:
    page = (ROOT / "docs" / "serve.md").read_text(encoding="utf-8")
    assert page == with_lists(page), "run python -m tests.reference.served"


def test_a_family_is_not_both_served_and_refused(plugin: Any) -> None:
    refused = set(plugin.families.REFUSED)
    assert not refused & set(plugin.families.FAMILIES)
    assert refused <= set(FAMILIES)


def test_no_size_of_a_decode_step_says_that_nccl_beside_computation_loses() -> None:
    """So `min_overlap_bytes` is 0: what NCCL takes longer than the engine's kernel is
    the same at all these sizes, within what docs/serve.md says, and it is as fast only
    at those of a long prefill.
    """
    nccl, engine = (TABLES[way]["NVIDIA H"][8].rows for way in ("side", "engine"))
    engines = {kib: typical for kib, _, typical, _ in engine}
    extra = {
        kib: typical - engines[kib]
        for kib, _, typical, _ in nccl
        if kib in engines and kib <= 1024
    }
    assert min(extra.values()) == pytest.approx(11)
    assert max(extra.values()) == pytest.approx(13.6)
    assert "11 to 14 µs" in (ROOT / "docs" / "serve.md").read_text(encoding="utf-8")
    faster = [kib for kib, _, typical, _ in nccl if typical < engines.get(kib, 0)]
    assert faster == [65536]


@pytest.mark.parametrize(
    "field",
    [
        None,
        [],
        {},
        {"version": 2, "layers": [0], "attention": "partial", "mlp": "outdated"},
        {"version": "1", "layers": [0], "attention": "partial", "mlp": "outdated"},
        {"version": 1, "layers": [0], "attention": "partial"},
        {"version": 1, "layers": [0], "attention": "partial", "mlp": "outdated", "more": 1},
        {"version": 1, "layers": "all", "attention": "partial", "mlp": "outdated"},
        {"version": 1, "layers": [0], "attention": "half", "mlp": "outdated"},
        {"version": 1, "layers": [0], "attention": "partial", "mlp": "late"},
        {"version": 1, "layers": [0], "attention": "partial", "mlp": [1]},
        {"version": 1, "layers": [0], "attention": "partial", "mlp": [0, 9]},
        {"version": 1, "layers": [0], "attention": "partial", "mlp": ["0"]},
        {"version": 1, "layers": [0], "attention": "full", "mlp": "full"},
        {"version": 1, "layers": [0, 0], "attention": "partial", "mlp": "outdated"},
        {"version": 1, "layers": [-1], "attention": "partial", "mlp": "outdated"},
        {"version": 1, "layers": [True], "attention": "partial", "mlp": "outdated"},
        {"version": 1, "layers": ["0"], "attention": "partial", "mlp": "outdated"},
        {"version": 1, "layers": [1, 9], "attention": "partial", "mlp": "outdated"},
    ],
)  # fmt: skip
def test_a_field_that_fcsd_refuses_is_refused_with_the_same_words(
    plugin: Any, field: Any
) -> None:
    with pytest.raises(UserError) as ours:
        Connectivity.from_field(field).field([True] * 4)
    with pytest.raises(plugin.field.FieldError) as theirs:
        plugin.field.read_field(field, 4)
    assert str(theirs.value) == str(ours.value)


@pytest.mark.parametrize("layers", [[], [3, 1], [0, 1, 2, 3]])
@pytest.mark.parametrize(
    "attention, mlp",
    [("partial", "outdated"), ("full", "outdated"), ("partial", "full")],
)
def test_a_field_that_fcsd_writes_is_read(
    plugin: Any, layers: list[int], attention: Any, mlp: Any
) -> None:
    written = Connectivity(layers or "none", attention, mlp).field([True] * 4)
    read = plugin.field.read_field(json.loads(json.dumps(written)), 4)
    assert list(read.layers) == written["layers"]
    outdated = read.layers if mlp == "outdated" else []
    assert (read.partial, read.outdated) == (attention == "partial", set(outdated))


def test_a_list_of_outdated_layers_is_read(plugin: Any) -> None:
    written = Connectivity([0, 1, 3], mlp="last:2").field([True] * 4)
    read = plugin.field.read_field(json.loads(json.dumps(written)), 4)
    assert (read.layers, read.outdated) == ((0, 1, 3), {3})


KEYS: list[dict[str, Any]] = [
    {"farskip": True, "farskip_start_idx": start, "farskip_end_idx": end, **sides}
    for start in (None, 0, 1, 2, 3, 9)
    for end in (None, 0, 2, 1e4)
    for sides in (
        {},
        {"attn_only_farskip": True},
        {"mlp_only_farskip": True, "attn_only_farskip": False},
    )
]
KEYS += [
    {"farskip": True, "attn_only_farskip": True, "mlp_only_farskip": True},
    {"farskip": False},
    {},
]


@pytest.mark.parametrize("dense", [0, 1, 2])
def test_amds_keys_are_read_and_refused_as_by_fcsd(plugin: Any, dense: int) -> None:
    mask = [index >= dense for index in range(5)]
    for keys in KEYS:
        given = {name: value for name, value in keys.items() if value is not None}
        config = SimpleNamespace(first_k_dense_replace=dense, **given)
        try:
            ours = from_instella(given, mask).field(mask)
        except UserError:
            with pytest.raises(
                plugin.field.FieldError, match="follows a regular MoE layer"
            ):
                plugin.field.field_of(config, 5)
            continue
        read = plugin.field.field_of(config, 5)
        assert list(read.layers) == ours["layers"], given
        if read.layers:
            assert (read.partial, read.outdated) == (
                ours["attention"] == "partial",
                set(read.layers) if ours["mlp"] == "outdated" else set(),
            )
    with pytest.raises(plugin.field.FieldError, match="farskip_stride: unknown key"):
        plugin.field.field_of(SimpleNamespace(farskip=True, farskip_stride=2), 5)


@pytest.mark.parametrize(
    ("engine", "names"), [("vllm", PURE), ("sglang", PURE_OF_SGLANG)]
)
def test_the_pure_modules_import_neither_an_engine_nor_torch(
    engine: str, names: tuple[str, ...]
) -> None:
    code = f"import sys; sys.path.insert(0, {str(SERVING)!r}); "
    code += "; ".join(f"import fcsd_{engine}.{name}" for name in names)
    code += (
        f"; print([name for name in ({engine!r}, 'torch', 'transformers', 'fcsd')"
        " if name in sys.modules])"
    )
    run = subprocess.run(
        [sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == "[]"


def test_the_distribution_needs_nothing_and_names_its_entry_point() -> None:
    project = tomllib.loads((SERVING / "pyproject.toml").read_text(encoding="utf-8"))[
        "project"
    ]
    assert project["dependencies"] == []
    assert project["license"] == "Apache-2.0"
    assert project["entry-points"]["vllm.general_plugins"] == {
        "fcsd": "fcsd_vllm:register"
    }
    assert (SERVING / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
    assert (
        f'__version__ = "{project["version"]}"'
        in (SERVING / "fcsd_vllm/__init__.py").read_text()
    )


def engine_config(
    dtype: str = "torch.bfloat16",
    method: str | None = None,
    lora: Any = None,
    comm: str = "",
    config: Any = None,
    **parallel: Any,
) -> Any:
    """Make the parts of a vLLM config that refusals read."""
    sizes = {f"{name}_parallel_size": 1 for name in ("data", "tensor", "pipeline")}
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            **{**sizes, "all2all_backend": "allgather_reducescatter", **parallel},
        ),
        model_config=SimpleNamespace(
            dtype=dtype, hf_text_config=SimpleNamespace(**(config or {}))
        ),
        speculative_config=SimpleNamespace(method=method) if method else None,
        lora_config=lora,
        additional_config={"fcsd": {"comm": comm}} if comm else {},
    )


@pytest.mark.parametrize(
    "family, config, words",
    [
        ("qwen3_moe", engine_config(use_ubatching=True), "--enable-dbo, --ubatch-size"),
        ("qwen3_moe", engine_config(tensor_parallel_size=2, data_parallel_size=2),
         "use --tensor-parallel-size 1, or --data-parallel-size 1"),
        ("qwen3_moe", engine_config(pipeline_parallel_size=2, data_parallel_size=2), "use --pipeline-parallel-size 1"),
        ("qwen3_moe", engine_config(lora="LoRA", data_parallel_size=2), "merge them"),
        ("qwen3_moe", engine_config(enable_eplb=True, data_parallel_size=2), "--enable-eplb"),
        ("qwen3_moe", engine_config(all2all_backend="mori_low_latency", data_parallel_size=2),
         "use --all2all-backend allgather_reducescatter, deepep_high_throughput, deepep_low_latency"),
        ("qwen3_moe", engine_config(all2all_backend="deepep_low_latency", data_parallel_size=2, comm="timed"),
         "the last two with comm: stream"),
        ("qwen3_moe", engine_config(prefill_context_parallel_size=2), "context-parallel prefill"),
        ("deepseek_v3", engine_config(decode_context_parallel_size=2), "--decode-context-parallel-size"),
        ("qwen3_moe", engine_config(enable_elastic_ep=True), "--enable-elastic-ep"),
        ("llama4_text", engine_config(method="eagle3"), "use n-gram speculation"),
        ("qwen3_moe", engine_config(method="dspark"), "use n-gram speculation"),
        ("qwen3_moe", engine_config(method="extract_hidden_states"), "use n-gram speculation"),
        ("deepseek_v3", engine_config(dtype="torch.float16"), "use --dtype bfloat16"),
        ("ernie4_5_moe", engine_config(config={"use_bias": True}), "use_bias: true, but .*VLLM_PLUGINS=none"),
        ("lfm2_moe", engine_config(config={"tie_word_embeddings": False}), "has tie_word_embeddings: false, but"),
    ],
)  # fmt: skip
def test_a_feature_that_farskip_layers_lack_is_refused_in_one_line(
    plugin: Any, family: str, config: Any, words: str
) -> None:
    row = plugin.families.FAMILIES[family]
    with pytest.raises(plugin.refusals.Refused, match=words) as refused:
        plugin.refusals.check_engine(config, row)
    assert str(refused.value).startswith(f"fcsd-serving: {row.architecture}: ")
    assert "\n" not in str(refused.value)


def test_an_fp8_weight_without_its_scale_is_refused_before_weights_load(
    plugin: Any, tmp_path: Path
) -> None:
    weight, scale = torch.ones(4, 4).to(torch.float8_e4m3fn), torch.ones(1)
    shards = {
        "norm.weight": torch.ones(4),
        "a.weight": weight, "a.weight_scale": scale,  # compressed-tensors, modelopt
        "b.weight": weight, "b.weight_scale_inv": scale,  # DeepSeek-V3
        "experts.gate_up_proj": weight, "experts.gate_up_proj_scale_inv": scale,
        # NVFP4's scales are FP8
        "c.weight_packed": torch.ones(4, dtype=torch.uint8), "c.weight_scale": weight,
    }  # fmt: skip
    for number, (name, tensor) in enumerate(shards.items()):
        save_file(
            {name: tensor},
            tmp_path / f"model-{number}.safetensors",
            metadata={"format": "pt"},
        )
    (tmp_path / "no.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1"
    )
    plugin.weights.check_weights(str(tmp_path))
    plugin.weights.check_weights("owner/model")  # of the hub
    (tmp_path / "model-4.safetensors").unlink()
    with pytest.raises(
        ValueError, match=r": b.weight is FP8 and has no scale \(b.weight_scale or"
    ) as refused:
        plugin.weights.check_weights(str(tmp_path))
    assert "\n" not in str(refused.value)


def test_what_farskip_layers_have_is_not_refused(plugin: Any) -> None:
    rows = plugin.families.FAMILIES
    plugin.refusals.check_engine(
        engine_config(data_parallel_size=1, use_ubatching=False, enable_eplb=True),
        rows["deepseek_v3"],
    )
    assert tuple(ALL2ALL) == plugin.refusals.SPLITTABLE  # those that are planned
    for back_end in plugin.refusals.SPLITTABLE:
        plugin.refusals.check_engine(
            engine_config(data_parallel_size=8, all2all_backend=back_end),
            rows["deepseek_v3"],
        )
    plugin.refusals.check_engine(
        engine_config(
            data_parallel_size=8, all2all_backend="mori_low_latency", comm="blocking"
        ),
        rows["qwen3_moe"],
    )
    plugin.refusals.check_engine(engine_config(method="ngram"), rows["qwen3_moe"])
    plugin.refusals.check_engine(
        engine_config(config={"use_bias": False}), rows["ernie4_5_moe"]
    )
    plugin.refusals.check_engine(
        engine_config(dtype="torch.float16"), rows["qwen3_moe"]
    )


@pytest.mark.parametrize(
    "given, words",
    [
        ({"com": "blocking"}, r"additional_config: fcsd.com: unknown key; did you mean 'comm'\?"),
        ({"comm": "rccl"}, "must be one of blocking, stream, nccl, c10d, timed, got 'rccl'"),
        ({"comm": "timed", "latency_ms": -1}, "latency_ms: must be a number of 0 or more, got -1"),
        ({"comm": "c10d", "latency_ms": 2}, "they need comm: timed"),
        ({"looked_at": True}, "looked_at: must be the digest that the refusal named, got True"),
        ("blocking", "must be a mapping"),
    ],
)  # fmt: skip
def test_a_setting_that_has_no_meaning_is_refused(
    plugin: Any, given: Any, words: str
) -> None:
    with pytest.raises(plugin.settings.SettingsError, match=words):
        plugin.settings.read_settings({"fcsd": given})


def test_the_key_of_the_compile_cache_tells_the_plugin_and_keeps_what_others_set(
    plugin: Any,
) -> None:
    config = plugin.settings.with_version(
        {"other": 1, "fcsd": {"comm": "timed"}}, "0.1.0"
    )
    assert config == {"other": 1, "fcsd": {"comm": "timed", "version": "0.1.0"}}
    assert plugin.settings.read_settings(config) == plugin.settings.read_settings(
        {"fcsd": {"comm": "timed"}}
    )


def test_a_verified_engine_is_silent_and_another_warns_with_the_list(
    plugin: Any,
) -> None:
    verified = plugin.versions.VERIFIED[0]
    assert plugin.versions.unverified(f"{verified}+cpu") is None
    assert f"({', '.join(plugin.versions.VERIFIED)} is)" in plugin.versions.unverified(
        "9.9.9"
    )


def test_an_engine_that_was_only_read_is_known_by_its_sources_and_warned_about(
    plugin: Any,
) -> None:
    sources, (read,) = plugin.sources.SOURCES, plugin.versions.READ
    assert read not in plugin.versions.VERIFIED
    assert sources[read].keys() == sources[plugin.versions.VERIFIED[0]].keys()
    assert "not verified, its source was only read" in plugin.versions.unverified(read)
    assert plugin.sources.changed(sources[read]) == {}


def test_a_missing_internal_is_an_error_that_names_the_verified_versions(
    plugin: Any,
) -> None:
    # fcsd's environment has no engine at all.
    with pytest.raises(
        plugin.versions.EngineError,
        match=f"install a verified version: vllm=={plugin.versions.VERIFIED[0]}",
    ):
        plugin.versions.check_internals("9.9.9")


def test_a_source_is_known_by_what_it_does_and_a_change_is_refused_until_a_user_has_looked_at_it(
    plugin: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def written(text: str) -> Any:
        file = tmp_path / f"engine{len(list(tmp_path.iterdir()))}.py"
        file.write_text(text)
        spec = importlib.util.spec_from_file_location("engine", file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.forward

    first = written(
        'def forward(x, *, y=None):\n    """Add."""\n    return x + 1  # one\n'
    )
    same = written(
        "# a comment\n\ndef forward(x, *, y=None):\n    return (x\n            + 1)\n"
    )
    other = written("def forward(x, *, y=None):\n    return x + 2\n")
    known = plugin.sources.digests([first])
    assert plugin.sources.digests([same]) == known != plugin.sources.digests([other])
    monkeypatch.setitem(plugin.sources.SOURCES, "0.32.0", known)
    plugin.versions.check_sources([first, same], "0.33.0")
    with pytest.raises(plugin.versions.EngineError) as refused:
        plugin.versions.check_sources([other], "0.33.0")
    assert "reviewed: engine.forward; install vllm==0.32.0" in str(refused.value)
    looked_at = plugin.sources.seal(plugin.sources.digests([other]))
    assert f'"looked_at": "{looked_at}"' in str(refused.value)
    plugin.versions.check_sources([other], "0.33.0", looked_at)
    with pytest.raises(plugin.versions.EngineError):
        # another change, of no source at all
        plugin.versions.check_sources([len], "0.33.0", looked_at)


def test_an_architecture_of_another_family_is_refused(plugin: Any) -> None:
    sys.path.insert(0, str(SERVING))
    try:
        configs = importlib.import_module("fcsd_vllm.configs")
    finally:
        sys.path.remove(str(SERVING))
    field = {"version": 1, "layers": [0], "attention": "partial", "mlp": "outdated"}
    row = plugin.families.FAMILIES["qwen3_moe"]
    good = {
        "architectures": ["FarSkipQwen3MoeForCausalLM"],
        "farskip": field,
        "num_hidden_layers": 4,
    }
    configs.check_config(good, row)
    for wrong in (["Qwen3MoeForCausalLM"], ["FarSkipMixtralForCausalLM"], []):
        with pytest.raises(
            plugin.field.FieldError,
            match=r"needs architectures \['FarSkipQwen3MoeForCausalLM'\]",
        ):
            configs.check_config({**good, "architectures": wrong}, row)
    with pytest.raises(plugin.field.FieldError, match="the model has 4 decoder layers"):
        configs.check_config({**good, "farskip": {**field, "layers": [4]}}, row)
