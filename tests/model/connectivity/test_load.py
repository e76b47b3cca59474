"""Loading checkpoints: the result of each combination, and a line for every mistake
before weights are read.
"""

import errno
import json
import os
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fcsd.base.errors import UserError
from fcsd.model.connectivity import (
    Connectivity,
    convert_checkpoint,
    farskip_layers,
    load_model,
    unconvert_checkpoint,
)
from fcsd.model.connectivity import load as load_module
from fcsd.model.connectivity.checkpoint import read_checkpoint
from fcsd.model.families import FAMILIES
from fcsd.model.inspect import inspect_model
from fcsd.model.load import load_tokenizer
from tests.reference.images import inputs_of
from tests.reference.tiny import X, logits, tiny_config, tiny_model
from tests.support import assert_same_model, few, user_error


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return a base checkpoint of qwen3_moe, the same in shards, and its FarSkip
    conversion; read-only.
    """
    root = tmp_path_factory.mktemp("checkpoints")
    model = tiny_model("qwen3_moe")
    model.save_pretrained(root / "base")
    model.save_pretrained(root / "sharded", max_shard_size="30KB")
    convert_checkpoint(root / "base", root / "far", Connectivity("last:2"))
    return root


@pytest.fixture
def base(saved, tmp_path):
    """Return a copy of the base checkpoint to damage."""
    return shutil.copytree(saved / "base", tmp_path / "base")


@pytest.fixture
def no_weights_read(monkeypatch):
    """Fail the test if loading gets as far as building the model with weights."""

    def refuse(*args, **kwargs):
        raise AssertionError("weights were read")

    monkeypatch.setattr(
        "transformers.modeling_utils.PreTrainedModel.from_pretrained", refuse
    )


def edit_config(folder, **changes):
    file = folder / "config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(
        json.dumps({key: value for key, value in config.items() if value is not None})
    )


@pytest.mark.parametrize("family", few(sorted(FAMILIES)))
def test_every_combination_of_checkpoint_and_connectivity(family, tmp_path):
    model, inputs = tiny_model(family), inputs_of(family)
    base, far = tmp_path / "base", tmp_path / "far"
    model.save_pretrained(base)
    connectivity = Connectivity("all", mlp="full")
    assert convert_checkpoint(base, far, connectivity) == [0, 1, 2, 3]
    regular = logits(model, **inputs)

    plain = load_model(base)
    assert type(plain) is type(model) and not plain.training
    assert_same_model(plain, model, inputs)

    rewired = load_model(base, connectivity=connectivity)
    assert type(rewired).__name__ == f"FarSkip{FAMILIES[family].causal_lm}"
    assert farskip_layers(rewired) == [0, 1, 2, 3]
    assert (logits(rewired, **inputs) - regular).abs().max() > 0.5
    assert rewired.config.model_type == f"farskip_{family}"

    stored = load_model(far)
    assert type(stored) is type(rewired)
    assert_same_model(stored, rewired, inputs)

    undone = load_model(far, original=True)
    assert type(undone) is type(model)
    assert_same_model(undone, model, inputs)
    assert undone.config.model_type == family

    unconvert_checkpoint(far, tmp_path / "back")
    back = (tmp_path / "back" / "config.json").read_text()
    assert json.loads(back) == json.loads((base / "config.json").read_text())


@pytest.mark.parametrize("spelled", ["last:2", [2, 3]])
def test_a_connectivity_that_says_what_the_checkpoint_has_changes_nothing(
    saved, spelled
):
    stored, named = (
        load_model(saved / "far", connectivity=each)
        for each in (None, Connectivity(spelled))
    )
    assert type(named) is type(stored) and farskip_layers(named) == [2, 3]
    assert_same_model(named, stored, {"input_ids": X})


def test_the_auto_classes_load_a_farskip_checkpoint_after_registering(saved):
    from transformers import AutoModel, AutoModelForCausalLM

    from fcsd.model.connectivity import register

    register()
    expected = logits(load_model(saved / "far"))
    model = AutoModelForCausalLM.from_pretrained(saved / "far").eval()
    assert torch.equal(logits(model), expected)
    headless = AutoModel.from_pretrained(saved / "far").eval()
    with torch.no_grad():
        assert torch.equal(model.lm_head(headless(X).last_hidden_state), expected)


def test_options_reach_the_model(saved):
    model = load_model(
        saved / "base",
        connectivity=Connectivity("all"),
        dtype="bfloat16",
        attn_implementation="eager",
        experts_implementation="eager",
    )
    assert model.dtype == torch.bfloat16
    assert model.config._attn_implementation == "eager"
    assert model.config._experts_implementation == "eager"
    assert load_model(saved / "base").dtype == torch.float32


def test_a_sharded_checkpoint_loads(saved):
    assert len(list((saved / "sharded").glob("*.safetensors"))) > 2
    assert torch.equal(
        logits(load_model(saved / "sharded")), logits(load_model(saved / "base"))
    )


def test_another_connectivity_than_the_checkpoints_is_refused(saved, no_weights_read):
    with user_error(
        r"already converted with layers \[2, 3\].* but layers \[0, 1, 2, 3\]"
    ):
        load_model(saved / "far", connectivity=Connectivity("all"))
    with user_error("attention full"):
        load_model(saved / "far", connectivity=Connectivity("last:2", attention="full"))
    with user_error("give no connectivity with it"):
        load_model(saved / "far", connectivity=Connectivity("last:2"), original=True)


def test_missing_and_wrong_paths(tmp_path, saved, no_weights_read):
    for path in (
        tmp_path / "nowhere",
        str(tmp_path / "nowhere"),
        "./runs/nowhere",
        "nowhere",
    ):
        with user_error("nowhere: no such folder"):
            load_model(path)
    with user_error("is a file; a checkpoint is a folder"):
        load_model(saved / "base" / "config.json")
    (tmp_path / "notes.txt").write_text("no checkpoint")
    with user_error(
        r"config\.json: no such file; make sure that this folder is a complete Hugging Face checkpoint"
    ):
        load_model(tmp_path)
    with user_error("revision 'main' applies to a Hub repository"):
        load_model(saved / "base", revision="main")


def test_the_state_of_a_training_is_no_model_and_the_error_says_how_to_get_one(
    tmp_path,
):
    state = tmp_path / "out" / "checkpoint-4"
    state.mkdir(parents=True)
    (state / "trainer_state.json").write_text("{}")
    for load in (
        load_model,
        load_tokenizer,
        lambda path: convert_checkpoint(path, tmp_path / "new"),
        inspect_model,
    ):
        with user_error(
            r"checkpoint-4: is the state of a training, .* save_model, or the end of"
        ):
            load(state)
        with user_error(
            r"out: holds states of a training \(checkpoint-4\), not a model"
        ):
            load(state.parent)
    (tmp_path / "out" / "model").mkdir()
    (tmp_path / "out" / "model" / "config.json").write_text("{}")
    with user_error(r"out: is not a checkpoint, but contains one; give \S*out/model$"):
        load_model(state.parent)


def test_a_name_that_the_hub_does_not_give_is_one_line(monkeypatch, no_weights_read):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with user_error(r"^owner/name: no such folder, and the Hub did not give") as caught:
        load_model("owner/name")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": None}, "model_type is missing"),
        ({"model_type": "bloomz"}, "model type 'bloomz' is not supported; `fcsd families` lists the "),
        ({"model_type": "llama", "num_experts": None, "num_local_experts": None}, "is a dense model"),
        ({"mlp_only_layers": [0, 1, 2, 3]}, "none of its 4 layers is an MoE layer"),
        ({"farskip": {"version": 1}}, "contradicts the field farskip, which is present"),
        ({"model_type": "farskip_qwen3_moe"}, "contradicts the field farskip, which is absent"),
        ({"hidden_size": 48}, "but config.json says"),
        ({"num_hidden_layers": 5}, "tensors are missing, the first is 'model.layers.4."),
        ({"hidden_size": "wide"}, "transformers refuses it"),
        ({"num_attention_heads": 0}, "config.json: num_attention_heads must be at least 1, got 0"),
        ({"num_key_value_heads": 3}, "must be a multiple of num_key_value_heads, 3, got 4"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": -3}}, "rope_theta must be a number above 0"),
        ({"num_experts_per_tok": 500}, "num_experts_per_tok must be from 1 to 8, the number of experts in a layer"),
        ({"architectures": ["MixtralForCausalLM"]}, "architectures names MixtralForCausalLM, but model_type"),
        ({"model_type": "mixtral"}, "names Qwen3MoeForCausalLM, but model_type is 'mixtral'"),
        ({"architectures": ["FarSkipQwen3MoeForCausalLM"]}, "names FarSkipQwen3MoeForCausalLM, but"),
        ({"model_type": ["qwen3_moe"]}, "model_type must be a text such as 'qwen3_moe', got ['qwen3_moe']"),
        ({"model_type": {"a": 1}}, "model_type must be a text"),
        ({"text_config": {"model_type": [1]}}, "text_config.model_type must be a text"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is NaN, a number is needed"),
        ({"rope_parameters": {"a": [1, float("nan")]}}, "rope_parameters.a.1 is NaN"),
        ({"vocab_size": int("9" * 400)}, "config.json"),
        ({"quantization_config": {"quant_method": "mine"}}, "quant_method 'mine' is not one that the installed"),
        ({"quantization_config": {"quant_method": ["fp8"]}}, "quant_method \"['fp8']\" is not one"),
        ({"quantization_config": {"bits": 4}}, "quant_method 'None' is not one"),
        ({"quantization_config": "fp8"}, "config.json: transformers refuses it"),
        ({"model_type": "doge"}, "cannot be converted: its experts are rows of an embedding"),
        ({"model_type": "own", "auto_map": {"AutoModelForCausalLM": "modeling_own.Own"}},
         "has its own code: trust_remote_code=True"),
    ],
)  # fmt: skip
def test_a_config_that_does_not_fit_is_refused_before_weights_are_read(
    base, changes, message, no_weights_read
):
    edit_config(base, **changes)
    for connectivity in (None, Connectivity("all")):
        with pytest.raises(UserError) as caught:
            load_model(base, connectivity=connectivity)
        assert message in str(caught.value)
        assert str(base) in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_damaged_config_is_refused(base, no_weights_read):
    (base / "config.json").write_text('{"model_type": ')
    with user_error(r"config\.json: not valid JSON"):
        load_model(base)
    for text in ("[" * 5000, '{"vocab_size": ' + "9" * 5000 + "}"):
        (base / "config.json").write_text(text)
        with user_error(r"config\.json: not valid JSON"):
            load_model(base)
    (base / "config.json").write_text("[]")
    with user_error(r"config\.json: a JSON object is needed, got list"):
        load_model(base)


@pytest.mark.parametrize("kept", [0, 4, 100, 5000, -1])
def test_a_truncated_weight_file_is_refused(base, kept, no_weights_read):
    file = base / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:kept])
    with user_error(r"model\.safetensors: damaged or incomplete safetensors file"):
        load_model(base, connectivity=Connectivity("all"))


def test_a_pointer_of_git_lfs_says_how_to_get_the_weights(base, no_weights_read):
    (base / "model.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1\n"
    )
    with user_error(r"is a pointer of Git LFS, .* `git lfs pull`"):
        load_model(base)


def test_a_corrupt_weight_file_is_refused(base, no_weights_read):
    file = base / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[20:60] = b"\xff" * 40
    file.write_bytes(bytes(data))
    with user_error(r"model\.safetensors: damaged or incomplete"):
        load_model(base)


def test_a_weight_file_that_may_not_be_read_is_not_called_damaged(
    base, monkeypatch, no_weights_read
):
    opened = Path.open

    def refuse(path, *arguments, **options):
        if path.suffix == ".safetensors":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return opened(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", refuse)
    with user_error(r"model\.safetensors: cannot be read: Permission denied"):
        load_model(base)


def test_missing_weights_and_pickles_are_refused(base, no_weights_read):
    (base / "model.safetensors").unlink()
    with user_error(r"no weights: neither model\.safetensors nor"):
        load_model(base)
    (base / "pytorch_model.bin").write_bytes(b"x")
    with user_error(r"pytorch_model\.bin is a pickle, convert it to safetensors first"):
        load_model(base)


def test_a_missing_shard_or_a_tensor_that_is_not_in_its_shard_is_refused(
    saved, tmp_path, no_weights_read
):
    folder = shutil.copytree(saved / "sharded", tmp_path / "sharded")
    shards = sorted(folder.glob("*.safetensors"))
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    moved = dict(index["weight_map"])
    name = next(key for key, file in moved.items() if file == shards[0].name)
    moved[name] = shards[1].name
    (folder / "model.safetensors.index.json").write_text(
        json.dumps(index | {"weight_map": moved})
    )
    with user_error(f"tensor '{name}' is not in this file"):
        load_model(folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    shards[1].unlink()
    with user_error(rf"{shards[1].name}: no such file, .* \(1 of {len(shards)} shards"):
        load_model(folder)
    (folder / "model.safetensors.index.json").write_text("{}")
    with user_error("weight_map is missing or empty"):
        load_model(folder)


def change_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_missing_unexpected_and_misshapen_tensors_are_refused(saved, tmp_path):
    def damaged(change):
        folder = shutil.copytree(
            saved / "base", tmp_path / f"damaged{len(list(tmp_path.iterdir()))}"
        )
        change_tensors(folder, change)
        return folder

    expert = "model.layers.2.mlp.experts.3.up_proj.weight"
    norm = "model.layers.1.input_layernorm.weight"
    for name in (expert, norm, "lm_head.weight"):
        with user_error(rf"1 tensors are missing, the first is '{name}'"):
            load_model(damaged(lambda tensors: tensors.pop(name)))  # noqa: B023
    with user_error(rf"tensor '{norm}' has shape \[16\], but config\.json says \[32\]"):
        load_model(damaged(lambda tensors: tensors.update({norm: torch.ones(16)})))
    with user_error(rf"tensor '{expert}' has shape \[24, 16\]"):
        load_model(
            damaged(lambda tensors: tensors.update({expert: torch.ones(24, 16)}))
        )
    extra = {"model.layers.1.self_attn.extra.weight": torch.ones(3)}
    with user_error(
        r"belong to no parameter, the first is 'model\.layers\.1\.self_attn\.extra"
    ):
        load_model(
            damaged(lambda tensors: tensors.update(extra)),
            connectivity=Connectivity("all"),
        )


def test_what_transformers_reports_as_missing_is_an_error_even_if_the_headers_look_right(
    saved, monkeypatch
):
    """The second line of defence: weights that transformers could not place never stay
    at random values.
    """
    monkeypatch.setattr(load_module, "check_tensors", lambda *args: None)
    folder = saved.parent / "defence"
    shutil.copytree(saved / "base", folder)
    change_tensors(folder, lambda tensors: tensors.pop("model.norm.weight"))
    with user_error(r"1 tensors are missing, the first is 'model\.norm\.weight'"):
        load_model(folder)


def test_a_checkpoint_with_fused_experts_loads(saved, tmp_path):
    model = load_model(saved / "base")
    model.save_pretrained(tmp_path / "fused", save_original_format=False)
    names = load_file(tmp_path / "fused" / "model.safetensors").keys()
    assert "model.layers.0.mlp.experts.gate_up_proj" in names
    far = load_model(tmp_path / "fused", connectivity=Connectivity("last:2"))
    assert torch.equal(logits(far), logits(load_model(saved / "far")))


def test_tied_embeddings_load(tmp_path):
    model = tiny_model("qwen3_moe", tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "tied")
    assert "lm_head.weight" not in load_file(tmp_path / "tied" / "model.safetensors")
    far = load_model(tmp_path / "tied", connectivity=Connectivity("none"))
    assert torch.equal(logits(far), logits(model))
    far.save_pretrained(tmp_path / "again")
    assert torch.equal(logits(load_model(tmp_path / "again")), logits(model))


def test_an_unknown_family_loads_as_it_is_only_when_remote_code_is_allowed(tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "llama",
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        vocab_size=99,
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(tmp_path)
    with user_error("dense model"):
        load_model(tmp_path)
    with user_error("dense model"):
        load_model(tmp_path, connectivity=Connectivity("all"), trust_remote_code=True)
    assert torch.equal(
        logits(load_model(tmp_path, trust_remote_code=True)), logits(model)
    )


def test_a_checkpoint_without_moe_layers_cannot_be_made(tmp_path):
    assert tiny_config("deepseek_v2").first_k_dense_replace == 1
    tiny_model("deepseek_v2", first_k_dense_replace=4).save_pretrained(
        tmp_path / "dense"
    )
    with user_error(r"none of its 4 layers is an MoE layer .*first_k_dense_replace"):
        load_model(tmp_path / "dense", connectivity=Connectivity("all"))


def test_folders_that_are_no_checkpoint_are_named_as_what_they_are(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "gguf").mkdir()
    (tmp_path / "gguf" / "q4.gguf").write_bytes(b"GGUF")
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("publish", "distill/model", "pretrain/model"):
        (tmp_path / "run" / name).mkdir(parents=True)
        (tmp_path / "run" / name / "config.json").write_text("{}")
    (tmp_path / "adapter").mkdir()
    config = {"peft_type": "LORA", "base_model_name_or_path": "owner/base"}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    for read in (load_model, load_tokenizer, inspect_model):
        with user_error("empty: is an empty folder; a checkpoint"):
            read(tmp_path / "empty")
        with user_error(r"is a LoRA adapter of owner/base.* merge_and_unload"):
            read(tmp_path / "adapter")
        with user_error(r"holds GGUF files \(q4.gguf\), not a"):
            read(tmp_path / "gguf")
        with user_error("link: is a link to nowhere, which is no"):
            read(tmp_path / "link")
        with user_error(
            r"contains one; give \S*run/publish \(or \S*distill/model, \S*pretrain/model\)"
        ):
            read(tmp_path / "run")


def test_how_experts_are_computed_has_no_meaning_for_a_dense_model(tmp_path):
    """A recipe's `model` section sets it for the student, and its teacher may be dense."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=99,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
        )
    ).eval()
    model.save_pretrained(tmp_path)
    for implementation in ("eager", "grouped_mm", "batched_mm"):
        loaded = load_model(
            tmp_path, any_family=True, experts_implementation=implementation
        )
        assert torch.equal(logits(loaded), logits(model))


@pytest.mark.parametrize("connectivity", [None, Connectivity("all")])
def test_an_implementation_that_a_family_does_not_have_is_refused_in_a_line(
    tmp_path, connectivity
):
    model = tiny_model("jetmoe", experts_implementation="eager")
    model.save_pretrained(tmp_path)
    options = {"connectivity": connectivity}
    loaded = load_model(tmp_path, experts_implementation="eager", **options)
    assert torch.equal(logits(loaded), logits(load_model(tmp_path, **options)))
    with user_error("='grouped_mm': it computes the experts of jetmoe in one way"):
        load_model(tmp_path, experts_implementation="grouped_mm", **options)


@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"experts_implementation": "fast"}, "refuses experts_implementation='fast': .*eager"),
        ({"attn_implementation": "fast"}, "refuses attn_implementation='fast': .*eager"),
        pytest.param(
            {
                "attn_implementation": "flash_attention_2",
                "experts_implementation": "eager",
            },
            "refuses attn_implementation='flash_attention_2': .*installed",
            marks=pytest.mark.skipif(
                find_spec("flash_attn") is not None, reason="FlashAttention is there"
            ),
        ),
    ],
)  # fmt: skip
def test_an_implementation_that_does_not_exist_here_is_refused_in_a_line(
    saved, options, message, weights, tmp_path
):
    for folder in ("base", "far"):
        with user_error(message):
            load_model(saved / folder, weights=weights, **options)
    if weights and "fast" in options.values():
        from fcsd.model.config import ModelConfig
        from fcsd.model.load import find_model
        from fcsd.training.calibration.shards import Layerwise
        from fcsd.training.teachers.load import unloaded

        source = find_model(ModelConfig(path=str(saved / "base"), **options))
        with user_error(message):
            unloaded(source)
        checkpoint = read_checkpoint(saved / "base")
        with user_error(message):
            Layerwise(checkpoint, Connectivity("all"), torch.device("cpu"), **options)
