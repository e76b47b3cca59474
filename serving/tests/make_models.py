"""Write tiny checkpoints and what fcsd computes on them; run by fcsd's Python, which
has no serving engine.

    python serving/tests/make_models.py FOLDER [sglang | CASE …]

FOLDER/CASE is a checkpoint made by `convert_checkpoint` from a model whose every
parameter is random; beside its files lies `reference.npz`: prompts, the 16 ids that
`load_model(...).generate` adds greedily, and the log-probabilities of the whole
vocabulary at every position, of one forward without a cache.
"""

import functools
import json
import multiprocessing
import shutil
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cases import BREADTH, FEW, IN_SGLANG_CASES, MTP, ONLY_IN_SGLANG
from safetensors.torch import load_file, save_file

from fcsd.model.connectivity import Connectivity, convert_checkpoint, load_model
from fcsd.model.connectivity.export import export_checkpoint
from fcsd.model.families import base_model_type
from fcsd.pipeline.tiny.models import tiny_tokenizer
from fcsd.training.mtp import MtpLayers, train_mtp

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.reference.tiny import tiny_model
from tests.training.test_mtp import LIKE_QWEN, random_mtp

VOCABULARY = 512
PROMPT_TOKENS = (5, 17, 33, 64)
DATA_PARALLEL_TOKENS = (1, 17, 3, 64, 130, 257, 1021, 511)
"""Lengths of the prompts in `data_parallel.npz`, which ranks take in turn: two of them
have sums of 1,155 and 849.
"""
NEW_TOKENS = 16
_FIRST_TEXT = 128  # the wrapper's ids of images are below

# Sizes that the engine's CPU kernels have: heads of 32, MLA as in the real models.
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 256, "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}  # fmt: skip
_HEADS = {"head_dim": 32}
_EXPERTS = {"moe_intermediate_size": 64}
_YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "beta_fast": 32, "beta_slow": 1, "mscale": 0.707,
    "mscale_all_dim": 0.707, "original_max_position_embeddings": 4096,
}  # fmt: skip
_GPT_OSS_YARN = {
    "rope_type": "yarn", "rope_theta": 150000.0, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
    "original_max_position_embeddings": 4096, "truncate": False,
}  # fmt: skip
_MLA = {
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "max_position_embeddings": 16384, "rope_parameters": _YARN,
}  # fmt: skip
_LINEAR = {
    "layer_types": ["linear_attention", "full_attention"] * 2, "full_attention_interval": 2,  # where SGLang looks
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
}  # fmt: skip
_QWEN3_5 = {
    **_HEADS,
    **_EXPERTS,
    **_LINEAR,
    "shared_expert_intermediate_size": 128,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [4, 2, 2],
        "partial_rotary_factor": 0.5,
    },
}
_GEMMA4 = {
    **_HEADS, **_EXPERTS, "global_head_dim": 32, "sliding_window": 32,
}  # fmt: skip

SIZES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {**_HEADS, **_EXPERTS},
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 128},
    "mixtral": {"sliding_window": None},
    "olmoe": {"num_key_value_heads": 4},
    "deepseek_v2": {**_MLA, **_EXPERTS},
    "deepseek_v3": {**_MLA, **_EXPERTS, "q_lora_rank": 64},
    "instella_moe": {
        **_MLA,
        **_EXPERTS,
        "q_lora_rank": None,
        "qk_nope_head_dim": 96,
        "n_shared_experts": 2,
    },
    "llama4_text": {
        **_HEADS,
        "intermediate_size": 64,
        "intermediate_size_mlp": 128,
        "attention_chunk_size": 8192,
    },
    "llama4": {
        **_HEADS,
        "intermediate_size": 64,
        "intermediate_size_mlp": 128,
        "attention_chunk_size": 8192,
    },
    "glm4_moe": {**_HEADS, **_EXPERTS, "use_qk_norm": True},
    "gpt_oss": {
        **_HEADS,
        "intermediate_size": 64,
        "sliding_window": 32,
        "max_position_embeddings": 16384,
        "rope_parameters": _GPT_OSS_YARN,
    },
    # the engine knows no biases in o_proj and shared experts
    "ernie4_5_moe": {**_HEADS, **_EXPERTS, "use_bias": False},
    "minimax_m2": {**_HEADS, "intermediate_size": 64, "rotary_dim": 16},
    "hunyuan_v1_moe": {**_HEADS, "intermediate_size": 64},
    "mimo_v2_flash": {
        **_HEADS,
        **_EXPERTS,
        "v_head_dim": 32,  # others have kernels for GPUs only
        "num_local_experts": 8,
        "n_group": 1,
        "topk_group": 1,
        "sliding_window": 4097,
        "layer_types": ["full_attention", "sliding_attention"] * 2,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "rope_parameters": {
            kind: {
                "rope_type": "default",
                "rope_theta": theta,
                "partial_rotary_factor": 0.5,
            }
            for kind, theta in (("full_attention", 5e6), ("sliding_attention", 1e4))
        },
    },
    "granitemoe": {"intermediate_size": 64},
    "granitemoeshared": {"intermediate_size": 64, "shared_intermediate_size": 128},
    "granitemoehybrid": {
        "intermediate_size": 64,
        "shared_intermediate_size": 128,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "mamba_n_heads": 8,
        "mamba_d_head": 32,
        "mamba_d_state": 16,
        "mamba_chunk_size": 16,
    },
    # mixers before experts, experts behind experts, mixers alone
    "nemotron_h": {
        **_HEADS,
        **_EXPERTS,
        "layers_block_type": [
            *("linear_attention", "moe", "full_attention", "moe"),
            *("moe", "linear_attention", "mlp", "moe"),
        ],
        "moe_shared_expert_intermediate_size": 128,
        "moe_latent_size": 96,
        "mamba_num_heads": 8,
        "mamba_head_dim": 32,
        "n_groups": 4,  # as many ranks share them
        "ssm_state_size": 16,
        "chunk_size": 16,
    },
    "gemma4_text": _GEMMA4,
    "gemma4": _GEMMA4,
    # the engine's head is always the embedding
    "lfm2_moe": {**_EXPERTS, "tie_word_embeddings": True},
    "qwen3_5_moe_text": _QWEN3_5,
    "qwen3_5_moe": _QWEN3_5,
    "qwen3_next": {
        **_HEADS,
        **_EXPERTS,
        **_LINEAR,
        "shared_expert_intermediate_size": 128,
        "mlp_only_layers": [],  # as in the real model; SGLang ignores others
    },
}

DATA_PARALLEL = (
    "qwen3_moe", "qwen2_moe", "deepseek_v3", "glm4_moe", "gpt_oss", "instella_moe",
)  # fmt: skip
"""Families whose every checkpoint has prompts for data-parallel ranks, too; of others
`-all` and `-original` have.
"""

_HALF, _GAP = [2, 3], [0, 1, 3]
CASES: dict[str, tuple[str, Connectivity | None]] = {
    **{f"{family}-original": (family, None) for family in SIZES},
    **{f"{family}-all": (family, Connectivity("all")) for family in SIZES},
    **{f"{family}-half": (family, Connectivity(_HALF)) for family in SIZES},
    **{f"{family}-gap": (family, Connectivity(_GAP)) for family in SIZES},
    **{
        f"{family}-{side}_full": (family, Connectivity("all", **{side: "full"}))
        for family in SIZES
        for side in ("attention", "mlp")
    },
    **{
        f"{family}-mixed": (family, Connectivity("all", mlp=[1, 3]))
        for family in ("qwen2_moe", "deepseek_v2", "glm4_moe", "gpt_oss")
    },
}
PUBLISHED = {"instella_moe-amd": "instella_moe-all"}
"""Name of a checkpoint in the keys of AMD's -> checkpoint of the same model in ours."""
CASES |= {case: CASES[source] for case, source in PUBLISHED.items()}
"""Name of a checkpoint -> family and connectivity; deepseek and glm4_moe begin with a
dense layer, which is selected in `all` and in `gap`."""


def make(case: str, folder: Path, *, ranks: bool = True) -> None:
    """Write one checkpoint with its reference, and the original's where it is missing.

    ranks: also with the prompts of data-parallel ranks, where tests need them.
    """
    if case in VARIANTS:
        if not (folder / case / "reference.npz").exists():
            VARIANTS[case](folder, folder / case)
        return
    family, connectivity = CASES[case]
    if case in PUBLISHED and not (folder / case).exists():
        make(PUBLISHED[case], folder)
        export_checkpoint(folder / PUBLISHED[case], folder / case)
    original = folder / f"{family}-original"
    if not (original / "config.json").exists():
        make_original(original, family)
    if connectivity is not None and not (folder / case).exists():
        convert_checkpoint(original, folder / case, connectivity)
    wanted = {"reference.npz": PROMPT_TOKENS}
    whole = case.endswith(("-all", "-original")) and (
        BREADTH or family not in (*FEW, *ONLY_IN_SGLANG)
    )
    if ranks and (family in DATA_PARALLEL or whole):
        wanted["data_parallel.npz"] = DATA_PARALLEL_TOKENS
    for name, lengths in wanted.items():
        if not (folder / case / name).exists():
            model = load_model(folder / case, dtype=torch.float32)
            np.savez(folder / case / name, **outputs_of(model, lengths))


def make_original(place: Path, family: str, **sizes: Any) -> None:
    """Write a regular checkpoint of a family; `sizes` are other than the family's here."""
    model = tiny_model(family, **{**_COMMON, **SIZES.get(family, _HEADS), **sizes})
    # log-probabilities of a few nats, whose rounding stays far below the bound
    with torch.no_grad():
        head = model.get_output_embeddings().weight
        head.mul_(0.125)
        # in an answer, an image's id would be read as an image
        for name in ("image_token_id", "video_token_id", "audio_token_id"):
            if (token := getattr(model.config, name, None)) is not None:
                head[token] = 0
        # SGLang keeps those of gpt_oss in bfloat16
        for name, parameter in model.named_parameters():
            if name.endswith(".sinks"):
                parameter.copy_(parameter.bfloat16())
    model.save_pretrained(place)
    if family == "mimo_v2_flash":
        _add_published_names(place / "config.json")
    tiny_tokenizer(VOCABULARY).save_pretrained(place)


def _add_published_names(file: Path) -> None:
    """Write MiMo's config as published: engines read these names, which transformers
    does not write.
    """
    config = json.loads(file.read_text())
    rope = config["rope_parameters"]
    published = {
        "hybrid_layer_pattern": [
            int(kind == "sliding_attention") for kind in config["layer_types"]
        ],
        "moe_layer_freq": [int(kind == "sparse") for kind in config["mlp_layer_types"]],
        "layernorm_epsilon": config["rms_norm_eps"],
        "sliding_window_size": config["sliding_window"] - 1,
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "swa_num_attention_heads": config["num_attention_heads"],
        "swa_num_key_value_heads": 2 * config["num_key_value_heads"],
        "swa_head_dim": config["head_dim"],
        "swa_v_head_dim": config["v_head_dim"],
        "rope_theta": rope["full_attention"]["rope_theta"],
        "swa_rope_theta": rope["sliding_attention"]["rope_theta"],
        "partial_rotary_factor": rope["full_attention"]["partial_rotary_factor"],
    }
    file.write_text(json.dumps(config | published))


def make_sized(folder: Path, place: Path, family: str, **sizes: Any) -> None:
    """Convert a model of other sizes than the family's here."""
    original = folder / f"{place.name}-original"
    make_original(original, family, **sizes)
    convert_checkpoint(original, place)
    np.savez(
        place / "reference.npz", **outputs_of(load_model(place, dtype=torch.float32))
    )


def make_adapter(folder: Path, place: Path) -> None:
    """Write a LoRA adapter of attention and shared experts in PEFT's format; the
    reference has W + B·A as weights.
    """
    make(BASE, folder)
    model, generator = (
        load_model(folder / BASE, dtype=torch.float32),
        torch.Generator().manual_seed(2),
    )
    tensors, rank = {}, 4
    for name, linear in _dense(model):
        a = (
            torch.randn(rank, linear.in_features, generator=generator)
            / linear.in_features**0.5
        )
        b = torch.randn(linear.out_features, rank, generator=generator)
        tensors[f"base_model.model.{name}.lora_A.weight"] = a
        tensors[f"base_model.model.{name}.lora_B.weight"] = b
        linear.weight.add_(b @ a)
    place.mkdir()
    save_file(tensors, place / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(DENSE), "bias": "none",
    }  # fmt: skip
    (place / "adapter_config.json").write_text(json.dumps(config))
    np.savez(place / "reference.npz", **outputs_of(model))


def make_int8(folder: Path, place: Path) -> None:
    """Convert a checkpoint in compressed-tensors' format: int8 in attention and shared
    experts, by output channel.

    The reference computes with integers: y = (round(x / s) · Wq) s sw, s = max |x| / 127 by token.
    """
    make(BASE, folder)
    model, original = (
        load_model(folder / BASE, dtype=torch.float32),
        folder / f"{place.name}-original",
    )
    shutil.copytree(folder / f"{BASE.partition('-')[0]}-original", original)
    tensors = load_file(original / "model.safetensors")
    for name, linear in _dense(model):
        scale = linear.weight.abs().amax(1, keepdim=True) / 127
        integers = (linear.weight / scale).round()
        tensors |= {
            f"{name}.weight": integers.to(torch.int8),
            f"{name}.weight_scale": scale,
        }
        linear.forward = functools.partial(_multiply, integers, scale, linear.bias)
    save_file(tensors, original / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((original / "config.json").read_text())
    (original / "config.json").write_text(
        json.dumps(config | {"quantization_config": _INT8})
    )
    convert_checkpoint(original, place, CASES[BASE][1])
    np.savez(place / "reference.npz", **outputs_of(model))


def make_mtp(folder: Path, place: Path) -> None:
    """Convert a model with a random layer for multi-token prediction (MTP)."""
    original = folder / f"{place.name}-original"
    make_original(original, place.name.partition("-")[0])
    model = load_model(original)
    torch.manual_seed(1)
    tensors = load_file(original / "model.safetensors")
    # The model writes eight tokens alone, of which drafts hit some by chance.
    tensors["lm_head.weight"][8:] = 0
    tensors |= random_mtp(model, 1)
    promise = "mtp_num_hidden_layers"
    if model.config.model_type not in LIKE_QWEN:
        promise = "num_nextn_predict_layers"
        # The engine's layer has what it shares with the model, too.
        begin = f"model.layers.{model.config.num_hidden_layers}."
        tensors[f"{begin}embed_tokens.weight"] = tensors[
            "model.embed_tokens.weight"
        ].clone()
        tensors[f"{begin}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, original / "model.safetensors", {"format": "pt"})
    config = json.loads((original / "config.json").read_text())
    config[promise] = 1
    (original / "config.json").write_text(json.dumps(config))
    convert_checkpoint(original, place)
    np.savez(place / "reference.npz", **drafts_of(place))


def make_trained_mtp(folder: Path, place: Path) -> None:
    """Train the same layer on what the converted model writes."""
    source = folder / place.name.removesuffix("_trained")
    make(source.name, folder)
    model = load_model(source, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    prompts = torch.randint(_FIRST_TEXT, VOCABULARY, (256, 4))
    whole = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        do_sample=False,
        max_new_tokens=28,
    )
    rows = [
        {"input_ids": ids, "position_ids": np.arange(32), "labels": ids}
        for ids in whole.numpy()
    ]
    layers = MtpLayers(model, source, ["model.safetensors"])
    with torch.enable_grad():
        train_mtp(layers, rows * 4, batch_rows=16, learning_rate=1e-2)
    shutil.copytree(source, place)
    tensors = load_file(place / "model.safetensors") | layers.tensors()
    save_file(tensors, place / "model.safetensors", {"format": "pt"})
    np.savez(place / "reference.npz", **drafts_of(place))


def drafts_of(folder: Path) -> dict[str, Any]:
    """Return `outputs_of`, and how many drafts of its MTP layer a model verifies, and
    accepts, to write them.
    """
    model = load_model(folder, dtype=torch.float32)
    arrays = outputs_of(model)
    layers = MtpLayers(model, folder, ["model.safetensors"])
    drafts = accepted = 0
    for k in range(len(PROMPT_TOKENS)):
        ids = torch.tensor(np.concatenate([arrays[f"prompt{k}"], arrays[f"ids{k}"]]))
        batch = {"input_ids": ids[None], "position_ids": torch.arange(len(ids))[None]}
        embedded = model.get_input_embeddings()(ids[None, 1:])
        if base_model_type(model.config.model_type) not in LIKE_QWEN:
            embedded[:, 0] = 0  # vLLM hides the first token from these layers
        states = layers.mtp.forward_layer(
            0,
            layers.hidden(batch)[:, :-1],
            batch["position_ids"][:, 1:],
            None,
            inputs_embeds=embedded,
        )
        # Position t reads the token behind and drafts the one after that.
        right = model.lm_head(states[0, :-1]).argmax(-1) == ids[2:]
        written = 1
        while written < NEW_TOKENS:
            hit = bool(right[PROMPT_TOKENS[k] + written - 2])
            drafts, accepted, written = drafts + 1, accepted + hit, written + 1 + hit
    return arrays | {"drafts": drafts, "accepted": accepted}


def _dense(model: Any) -> list[tuple[str, torch.nn.Linear]]:
    return [
        (name, module)
        for name, module in model.named_modules()
        if name.rpartition(".")[2] in DENSE and isinstance(module, torch.nn.Linear)
    ]


def _multiply(integers: Any, scale: Any, bias: Any, x: Any) -> Any:
    each = x.abs().amax(-1, keepdim=True) / 127
    y = ((x / each).round() @ integers.T) * each * scale[:, 0]
    return y if bias is None else y + bias


BASE = "qwen2_moe-all"
"""The checkpoint of which some variants are made."""
VARIANTS = {
    "qwen2_moe-adapter": make_adapter,
    "qwen2_moe-int8": make_int8,
    # the latent cache of the real model's size, 512 + 32
    "instella_moe-latent": functools.partial(
        make_sized, family="instella_moe", qk_rope_head_dim=32
    ),
    # experts of the whole width, as in Nemotron 3 Nano
    "nemotron_h-plain": functools.partial(
        make_sized, family="nemotron_h", moe_latent_size=None
    ),
    **{f"{family}-mtp": make_mtp for family in MTP},
    **{f"{family}-mtp_trained": make_trained_mtp for family in MTP},
}
DENSE = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_INT8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head", r"re:.*\.experts(\.|$)", r"re:.*\.(shared_expert_)?gate$"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"},
            "input_activations": {
                "num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True,
            },
        }
    },
}  # fmt: skip


def outputs_of(model: Any, lengths: tuple[int, ...] = PROMPT_TOKENS) -> dict[str, Any]:
    """Return prompts, greedy ids and log-probabilities of a model."""
    # all 16 tokens, as with the engine's ignore_eos
    model.generation_config.eos_token_id = None
    generator = torch.Generator().manual_seed(1)
    arrays: dict[str, Any] = {}
    for k, length in enumerate(lengths):
        prompt = torch.randint(
            _FIRST_TEXT, VOCABULARY, (1, length), generator=generator
        )
        whole = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
        )
        assert whole.shape[1] == length + NEW_TOKENS
        arrays[f"prompt{k}"] = prompt[0].numpy()
        arrays[f"ids{k}"] = whole[0, length:].numpy()
        arrays[f"logprobs{k}"] = model(whole).logits[0].log_softmax(-1).numpy()
    return arrays


def wanted_cases() -> list[str]:
    """Return the checkpoints that the tests of this run use."""
    return [
        case
        for case in (*CASES, *VARIANTS)
        if BREADTH
        or case.partition("-")[0] not in (*FEW, *ONLY_IN_SGLANG)
        or case.endswith(("-all", "-original"))
    ]


def make_all(names: list[str], folder: Path, *, ranks: bool) -> None:
    for name in names:
        make(name, folder, ranks=ranks)
        print(name, flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    target = Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    in_sglang = sys.argv[2:] == ["sglang"]
    wanted = IN_SGLANG_CASES if in_sglang else sys.argv[2:] or wanted_cases()
    # A family's checkpoints are made of one another, so one process makes them.
    of_family: dict[str, list[str]] = {}
    for name in wanted:
        of_family.setdefault(name.partition("-")[0], []).append(name)
    with ProcessPoolExecutor(2, multiprocessing.get_context("fork")) as pool:
        made = [
            pool.submit(make_all, names, target, ranks=not in_sglang)
            for names in sorted(of_family.values(), key=len, reverse=True)
        ]
        for family in made:
            family.result()
