"""`fcsd inspect`: numbers by hand, published numbers, and what it says about models
that cannot be converted.
"""

import json
import shutil
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from fcsd.base.repository import plugin_install
from fcsd.base.text import size
from fcsd.cli.main import main
from fcsd.model.connectivity import Connectivity, convert_checkpoint
from fcsd.model.connectivity.selection import ranges
from fcsd.model.families import FAMILIES, text_config
from fcsd.model.families.refused import REFUSED
from fcsd.model.inspect import inspect_model, report_table
from fcsd.model.inspect.memory import cache_bytes
from fcsd.model.inspect.parameters import count_parameters
from tests.real_configs import real_config, real_folder
from tests.reference.tiny import TINY, tiny_config, tiny_model
from tests.support import cache_of, few, user_error

D, V, L = 32, 99, 4  # of the tiny models


def config_only(folder, model_type, **overrides):
    tiny_config(model_type, **overrides).save_pretrained(folder)
    return folder


def damaged(**changes):
    """Return what writes the config of a small Qwen3 with these values."""

    def write(folder):
        config = tiny_config("qwen3_moe").to_dict() | changes
        (folder / "config.json").write_text(json.dumps(config))

    return write


HAND = {  # model type -> part -> parameters, written out from the tiny configuration
    "qwen2_moe": {
        "embeddings": V * D,
        "lm_head": V * D,
        "attention": L * (D * D + D + 2 * (16 * D + 16) + D * D),
        "shared_experts": L * (3 * 32 * D + D),  # with its gate
        "routed_experts": L * 8 * 3 * 24 * D,
        "router": L * 8 * D,
        "norms": L * 2 * D + D,
    },
    "deepseek_v3": {
        "embeddings": V * D,
        "lm_head": V * D,
        # q_a, its norm, q_b, kv_a, its norm, kv_b, o
        "attention": (
            L
            * (16 * D + 16 + 4 * 16 * 16 + (16 + 8) * D + 16 + 4 * 16 * 16 + D * 4 * 8)
        ),
        "dense_mlp": 1 * 3 * 48 * D,
        "shared_experts": 3 * 3 * 24 * D,
        "routed_experts": 3 * 8 * 3 * 24 * D,
        "router": 3 * 8 * D,
        "norms": L * 2 * D + D,
    },
    "granitemoeshared": {  # the shared expert is on the layer
        "embeddings": V * D,
        "lm_head": V * D,
        "attention": L * (2 * D * D + 2 * 16 * D),
        "shared_experts": L * 3 * 32 * D,
        "routed_experts": L * 4 * 3 * 48 * D,
        "router": L * 4 * D,
        "norms": L * 2 * D + D,
    },
    "gpt_oss": {  # biases everywhere, four sinks per layer
        "embeddings": V * D,
        "lm_head": V * D,
        "attention": L * (32 * D + 32 + 2 * (16 * D + 16) + D * 32 + D + 4),
        "routed_experts": L * 4 * (D * 96 + 96 + 48 * D + D),
        "router": L * (4 * D + 4),
        "norms": L * 2 * D + D,
    },
}
EXPERTS = {
    "qwen2_moe": (8, 2), "deepseek_v3": (8, 2), "granitemoeshared": (4, 2), "gpt_oss": (4, 2),
}  # fmt: skip


@pytest.mark.parametrize("model_type", HAND)
def test_parameters_are_those_of_a_count_by_hand(model_type, tmp_path):
    facts = inspect_model(config_only(tmp_path, model_type, tie_word_embeddings=False))
    parts = facts["parameters"]["parts"]
    assert {part: row["total"] for part, row in parts.items()} == HAND[model_type]
    assert facts["parameters"]["total"] == sum(HAND[model_type].values())
    experts, chosen = EXPERTS[model_type]
    unused = HAND[model_type]["routed_experts"] * (experts - chosen) // experts
    assert facts["parameters"]["active"] == facts["parameters"]["total"] - unused
    assert (
        parts["routed_experts"]["active"] == parts["routed_experts"]["total"] - unused
    )
    assert facts["experts"] == {
        "routed": experts,
        "per_token": chosen,
        "shared": "shared_experts" in HAND[model_type],
    }


def test_experts_of_a_subclass_of_the_familys_block_are_counted_as_experts():
    model, family = tiny_model("qwen2_moe"), FAMILIES["qwen2_moe"]
    expected = count_parameters(model, family, *EXPERTS["qwen2_moe"])
    for layer in model.model.layers:
        block = type(layer.mlp)
        if block.__name__ == family.moe_block:
            layer.mlp.__class__ = type("GatedBlock", (block,), {})
    assert count_parameters(model, family, *EXPERTS["qwen2_moe"]) == expected
    assert expected["parts"]["routed_experts"]["total"]


def test_a_tied_head_is_counted_once(tmp_path):
    tied = inspect_model(
        config_only(tmp_path / "a", "mixtral", tie_word_embeddings=True)
    )["parameters"]
    apart = inspect_model(
        config_only(tmp_path / "b", "mixtral", tie_word_embeddings=False)
    )["parameters"]
    assert apart["total"] - tied["total"] == V * D
    assert "lm_head" not in tied["parts"]
    model = tiny_model("mixtral", tie_word_embeddings=True)
    assert tied["total"] == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("model_type", few(sorted(FAMILIES.keys() & TINY.keys())))
def test_every_family_is_described_to_the_last_parameter(model_type, tmp_path):
    facts = inspect_model(config_only(tmp_path, model_type))
    parameters, parts = facts["parameters"], facts["parameters"]["parts"]
    model = tiny_model(model_type)
    assert parameters["total"] == sum(
        parameter.numel() for parameter in model.parameters()
    )
    for key in ("total", "active"):
        assert sum(row[key] for row in parts.values()) == parameters[key]
    experts, chosen = facts["experts"]["routed"], facts["experts"]["per_token"]
    assert (
        parts["routed_experts"]["active"] * experts
        == parts["routed_experts"]["total"] * chosen
    )
    assert facts["can_be_converted"]
    assert facts["memory"]["serve"]["cache"]["first_bytes"] > 0
    assert "other" not in parts or FAMILIES[model_type].multimodal


def test_a_real_model_is_described(tmp_path):
    facts = inspect_model(real_folder("DeepSeek-V3", tmp_path))
    assert facts["can_be_converted"]
    assert facts["reason"] is None
    assert facts["connectivity"] is None
    assert facts["quantization"] == "fp8"
    assert facts["layers"] == {
        "total": 61,
        "moe": list(range(3, 61)),
        "dense": [0, 1, 2],
    }
    assert facts["experts"] == {"routed": 256, "per_token": 8, "shared": True}
    chosen = {
        name: (row["layers"][:1], len(row["layers"]), row["moe"])
        for name, row in facts["selections"].items()
    }
    assert chosen == {
        "all": ([0], 61, 58), "moe": ([3], 58, 58), "first:50%": ([0], 31, 28), "first:75%": ([0], 46, 43),
        "first:90%": ([0], 55, 52), "last:50%": ([30], 31, 31), "last:75%": ([15], 46, 46), "last:90%": ([6], 55, 55),
    }  # fmt: skip
    number = 671_026_404_352
    assert facts["memory"]["serve"]["weights_bytes"] == 2 * number
    cache = facts["memory"]["serve"]["cache"]
    # 68.6 MiB
    assert cache["latent"] and cache["first_bytes"] == 2 * 61 * (512 + 64) * 1024
    text = report_table(facts)
    assert "run `fcsd estimate RECIPE` for the memory of a training" in text
    assert "layers        61: 58 MoE (3-60), 3 dense (0-2)" in text
    assert "| all            | 671,026,404,352 |      37,552,282,624 |" in text
    assert "quantised     fp8" in text


@pytest.mark.parametrize(
    "model_type", ["qwen3_moe", "deepseek_v2", "deepseek_v3", "gpt_oss", "llama4_text"]
)
def test_cache_bytes_are_those_that_transformers_holds(model_type):
    model = tiny_model(model_type)
    tokens = 6  # below every window
    with torch.no_grad():
        (cache,) = cache_of(
            model(torch.zeros(1, tokens, dtype=torch.long), use_cache=True)
        ).values()
    numbers = sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)
    assert cache_bytes(model.config, tokens) == 2 * numbers


def test_a_window_bounds_the_cache_and_a_layer_without_keys_has_none():
    config = SimpleNamespace(
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        hidden_size=32,
        sliding_window=100,
        attention_chunk_size=200,
        layer_types=[
            "full_attention", "sliding_attention", "chunked_attention", "linear_attention",
        ],
    )  # fmt: skip
    assert cache_bytes(config, 50) == 2 * 32 * 3 * 50
    assert cache_bytes(config, 1000) == 2 * 32 * (1000 + 100 + 200)


def test_deepseek_v4_caches_what_is_published_of_it(tmp_path):
    family, config = real_config("DeepSeek-V4-Pro", tmp_path / "m")
    tokens = 2**20
    kinds = Counter(text_config(config, family).layer_types)
    # 9.62 GiB at 2^20 tokens (AINews, 2026-04-25) have the indexers' keys, which do not
    # count here: 128 numbers for every fourth token.
    indexers = kinds["compressed_sparse_attention"] * tokens // 4 * 128 * 2
    cached = cache_bytes(text_config(config, family), tokens)
    assert (cached + indexers) / 2**30 == pytest.approx(9.62, abs=0.01)


def test_a_converted_checkpoint_shows_its_connectivity_and_files(tmp_path):
    tiny_model("deepseek_v3").save_pretrained(tmp_path / "base", max_shard_size="60KB")
    base = inspect_model(tmp_path / "base")
    files = sorted((tmp_path / "base").glob("*.safetensors"))
    assert base["files"] == {
        "count": len(files),
        "missing": [],
        "total_bytes": sum(file.stat().st_size for file in files),
        "largest_bytes": max(file.stat().st_size for file in files),
    }
    assert len(files) > 2
    assert base["memory"]["convert"]["at_most_bytes"] == base["files"]["largest_bytes"]

    convert_checkpoint(
        tmp_path / "base", tmp_path / "far", Connectivity("last:2", mlp="full")
    )
    far = inspect_model(tmp_path / "far")
    assert far["connectivity"] == {
        "version": 1, "layers": [2, 3], "attention": "partial", "mlp": "full",
    }  # fmt: skip
    assert (far["model_type"], far["family"]) == ("farskip_deepseek_v3", "deepseek_v3")
    for key in ("layers", "experts", "selections", "parameters", "memory"):
        assert far[key] == base[key]
    text = report_table(far)
    assert "FarSkip in 2 of 4 layers (2-3), attention partial, mlp full" in text
    assert "is already FarSkip; `fcsd convert` can choose other layers" in text
    assert (
        f"vllm serve {tmp_path / 'far'}   (vLLM with fcsd-serving: {plugin_install()})"
        in text
    )
    assert far["serve_command"] == f"vllm serve {tmp_path / 'far'}"
    assert base["serve_command"] is None

    files[1].unlink()
    broken = inspect_model(tmp_path / "base")
    assert not broken["can_be_converted"]
    assert (
        f"1 weight files that the index names are missing, the first is {files[1].name}"
        in broken["reason"]
    )


def test_pickles_are_named_as_the_reason(tmp_path):
    config_only(tmp_path, "qwen2_moe")
    assert inspect_model(tmp_path)["can_be_converted"]
    for name in ("training_args.bin", "optimizer.pt", "rng_state_0.pth"):
        (tmp_path / name).touch()
    assert inspect_model(tmp_path)["can_be_converted"]
    (tmp_path / "pytorch_model-00001-of-00002.bin").touch()
    facts = inspect_model(tmp_path)
    assert not facts["can_be_converted"]
    assert (
        "pytorch_model-00001-of-00002.bin is a pickle, convert it to safetensors first"
        in facts["reason"]
    )
    tiny_model("qwen2_moe").save_pretrained(tmp_path)
    assert inspect_model(tmp_path)["can_be_converted"]


def test_instellas_keys_are_shown_as_our_connectivity(tmp_path):
    facts = inspect_model(real_folder("Instella-MoE-16B-A3B-Think", tmp_path))
    assert facts["connectivity"]["layers"] == list(range(27))
    assert (facts["connectivity"]["attention"], facts["connectivity"]["mlp"]) == (
        "partial",
        "outdated",
    )
    assert facts["can_be_converted"]
    assert (facts["family"], facts["model_type"]) == ("instella_moe", "deepseek_v3")
    # The report on the checkpoint includes 26 router biases of 64 values.
    assert facts["parameters"]["total"] + 26 * 64 == 15_862_789_248
    assert facts["parameters"]["active"] == 2_817_453_568
    text = report_table(facts)
    for line in (
        "family        instella_moe (written as deepseek_v3), InstellaMoEForCausalLM",
        (
            "connectivity  FarSkip in 27 of 27 layers (0-26), attention partial, mlp"
            " outdated"
        ),
        (
            "to run it     fcsd, as it is; without it what `fcsd convert` writes,"
            " transformers >=5.23,<6 and trust_remote_code=True; transformers alone"
            " drops the gate"
        ),
    ):
        assert line in text.splitlines()

    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps(
            config
            | {
                "gated_attention": False,
                "mlp_only_farskip": True,
                "farskip_end_idx": 3,
            }
        )
    )
    plain = inspect_model(tmp_path)
    assert plain["can_be_converted"]
    assert plain["connectivity"]["layers"] == [0, 1, 2, 3]
    assert plain["connectivity"]["attention"] == "full"
    assert plain["connectivity_keys"] == facts["connectivity_keys"] == "instella"
    assert "is already FarSkip, with AMD's keys" in report_table(plain)
    assert plain["needs"] is None
    late = {"farskip_start_idx": 9}
    (tmp_path / "config.json").write_text(json.dumps(config | late))
    unreadable = inspect_model(tmp_path)
    assert not unreadable["can_be_converted"] and unreadable["connectivity"] is None
    assert "farskip_start_idx: 9 follows the regular MoE layer 8" in report_table(
        unreadable
    )
    (tmp_path / "config.json").write_text(json.dumps(config | {"gate_rank": 9}))
    assert "gate_rank: unknown key" in report_table(inspect_model(tmp_path))


@pytest.mark.parametrize(
    ("config", "reason", "known"),
    [
        (
            {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 8, "vocab_size": 9,
             "intermediate_size": 16, "num_attention_heads": 2, "torch_dtype": "bfloat16"},
            "model type 'llama' is a dense model",
            (2, None, 2 * 9 * 8 + 2 * (4 * 64 + 3 * 128 + 16) + 8),
        ),
        (
            {"model_type": "switch_transformers", "num_layers": 2, "d_model": 8, "num_experts": 4},
            "model type 'switch_transformers' ",
            (None, 4, None),
        ),
        (
            {"model_type": "nobody_knows_moe", "num_hidden_layers": 7, "num_experts": 12,
             "num_experts_per_tok": 3},
            "model type 'nobody_knows_moe' is not supported",
            (7, 12, None),
        ),
    ],
)  # fmt: skip
def test_a_model_that_cannot_be_converted_is_still_described(
    config, reason, known, tmp_path
):
    (tmp_path / "config.json").write_text(json.dumps(config))
    facts = inspect_model(tmp_path)
    assert not facts["can_be_converted"] and facts["selections"] == {}
    assert reason in facts["reason"]
    num_layers, experts, total = known
    assert facts["experts"]["routed"] == experts
    if num_layers is not None:
        assert facts["layers"]["total"] == num_layers
    if total is not None:
        assert facts["parameters"]["total"] == total
        assert facts["memory"]["convert"] is None
        assert facts["memory"]["serve"]["weights_bytes"] == 2 * total
    text = report_table(facts)
    assert f"not possible: {reason}" in text
    if config["model_type"] == "nobody_knows_moe":
        assert "no remote code is run" in text and facts["parameters"] is None


@pytest.mark.parametrize("model_type", few(sorted(REFUSED), 8))
def test_a_refused_family_is_described_with_the_reason(model_type, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    facts = inspect_model(tmp_path)
    assert not facts["can_be_converted"] and facts["family"] is None
    assert facts["reason"].startswith(
        f"model type '{model_type}' cannot be converted: {REFUSED[model_type]}"
    )
    assert facts["reason"].endswith("(`fcsd families` lists what can)")
    assert REFUSED[model_type] in report_table(facts)


def test_a_dense_model_of_a_supported_family_is_described(tmp_path):
    facts = inspect_model(config_only(tmp_path, "deepseek_v3", first_k_dense_replace=4))
    assert not facts["can_be_converted"]
    assert "none of its 4 layers is an MoE layer" in facts["reason"]
    assert facts["layers"] == {"total": 4, "moe": [], "dense": [0, 1, 2, 3]}
    assert facts["selections"] == {}
    assert "routed_experts" not in facts["parameters"]["parts"]


def test_code_in_a_checkpoint_does_not_run(tmp_path):
    config_only(tmp_path, "qwen3_moe")
    config = json.loads((tmp_path / "config.json").read_text())
    own = {
        "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    }
    (tmp_path / "config.json").write_text(json.dumps(config | own))
    (tmp_path / "evil.py").write_text("raise SystemExit('ran')")
    assert inspect_model(tmp_path)["can_be_converted"]


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda folder: None, "is an empty folder"),
        (lambda folder: (folder / "notes.txt").write_text("mine"), "config.json: no such file"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json: not valid JSON"),
        (lambda folder: (folder / "config.json").write_text("{}"), "config.json: model_type is missing"),
        (lambda folder: (folder / "config.json").write_text('{"model_type": "farskip_mixtral"}'),
         "model_type 'farskip_mixtral' without the field farskip"),
        (lambda folder: (folder / "config.json").write_text('{"model_type": "mixtral", "num_hidden_layers": "two"}'),
         "config.json: transformers refuses it: "),
        (damaged(num_experts_per_tok=500),
         "num_experts_per_tok must be from 1 to 8, the number of experts in a layer, got 500"),
        (damaged(text_config="none"), "config.json: text_config must be an object, got none"),
    ],
)  # fmt: skip
def test_a_folder_that_is_no_checkpoint_is_refused(prepare, message, tmp_path, capsys):
    prepare(tmp_path)
    assert main(["inspect", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err


def test_paths_that_are_nothing_are_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for path, message in (
        (tmp_path / "nowhere", "no such folder"),
        (tmp_path / "file", "is a file"),
        ("a b/c", "no such folder"),
    ):
        with user_error(message):
            inspect_model(path)
    config_only(tmp_path / "model", "mixtral")
    with user_error("revision 'main' applies to a Hub repository"):
        inspect_model(tmp_path / "model", "main")


def test_of_a_hub_id_only_the_config_is_fetched(tmp_path, monkeypatch):
    import huggingface_hub

    folder = real_folder("OLMoE-1B-7B-0924", tmp_path)
    asked = []

    def download(name, file, revision=None, local_files_only=False):
        asked.append((name, file, revision))
        return str(folder / file)

    def model_info(self, name, revision=None, files_metadata=False):
        assert files_metadata
        sizes = {
            "model-1.safetensors": 7, "model-2.safetensors": 9, "config.json": 3, "a/b.safetensors": 5,
        }  # fmt: skip
        return SimpleNamespace(
            siblings=[
                SimpleNamespace(rfilename=name, size=size)
                for name, size in sizes.items()
            ]
        )

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    facts = inspect_model("allenai/OLMoE-1B-7B-0924", "6d84c48")
    assert asked == [("allenai/OLMoE-1B-7B-0924", "config.json", "6d84c48")]
    assert facts["files"] == {
        "count": 2, "missing": [], "total_bytes": 16, "largest_bytes": 9,
    }  # fmt: skip
    assert "allenai/OLMoE-1B-7B-0924 @ 6d84c48" in report_table(facts)

    def offline(*args, **options):
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", offline)
    assert inspect_model("allenai/OLMoE-1B-7B-0924")["files"] is None
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", offline)
    with user_error(
        r"the Hub did not give config\.json of a repository of this name: no"
        r" network"
    ):
        inspect_model("allenai/OLMoE-1B-7B-0924", "6d84c48")


def test_the_command_prints_a_table_or_json(tmp_path, capsys):
    config_only(tmp_path, "qwen3_moe")
    assert main(["inspect", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    for part in (
        "qwen3_moe, ",
        "can be converted",
        "| last:75%  |       3 |",
        "| routed experts |",
        "fcsd estimate",
    ):
        assert part in text
    assert main(["inspect", str(tmp_path), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == inspect_model(str(tmp_path))
    shutil.rmtree(tmp_path)


def test_numbers_are_written_for_people():
    assert [size(value) for value in (0, 1023, 1024, 3 * 2**29, 5 * 2**40, 2**51)] == [
        "0 B", "1023 B", "1.0 KiB", "1.5 GiB", "5.0 TiB", "2048.0 TiB",
    ]  # fmt: skip
    assert ranges([]) == "-"
    assert ranges([3]) == "3"
    assert ranges([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"
