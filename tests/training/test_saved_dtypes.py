"""A training saves each tensor in the dtype that it had in the checkpoint, and computes
as the original does.
"""

import json
import math
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

import fcsd
from fcsd.cli.main import main
from fcsd.model.connectivity.load import load_model
from fcsd.model.dtypes import loaded_dtypes, real_tensors, to_dtype
from fcsd.model.families import FAMILIES
from fcsd.model.saved_dtypes import saved_dtypes
from fcsd.parallel.shard import shard_student
from fcsd.pipeline.tiny.models import tiny_tokenizer
from fcsd.training.config import TrainConfig
from fcsd.training.losses.head import attach_loss_head
from tests.parallel.test_engines import NEEDS_DEEPSPEED, launch, on_rank
from tests.reference.ranks import run_ranks
from tests.reference.tiny import TINY, tiny_model
from tests.support import Bench, few, same_tensors, tensors_of, user_error, write_as

KEPT_IN_FLOAT32 = {
    "axk1", "axk2", "bailing_hybrid", "beam", "deepseek_v3", "deepseek_v32", "deepseek_v4", "dots1", "dots3_note",
    "dots3_note_text", "ernie4_5_moe", "ernie4_5_vl_moe", "exaone_moe", "flint", "glm4_moe", "glm4_moe_lite",
    "glm4v_moe", "glm5_next", "glm_moe_dsa", "hunyuan_v1_moe", "hy_v3", "hy_v4", "hy_v4_vl", "inkling2",
    "inkling2_text", "inkling_mm_model", "inkling_text", "instella_moe", "kolibri1", "lfm2_moe", "mimo_v2_flash",
    "mistral_large4", "muse_spark", "nemotron_h", "solar_open", "zaya",
}  # fmt: skip
"""Families of which some tensor is float32 in a bfloat16 model: by transformers' lists,
or by how it is created.
"""
if Version(transformers.__version__) >= Version("5.24"):
    # Its lists have routers (`mlp.gate.weight`, `expert_bias`) of more families.
    KEPT_IN_FLOAT32 |= {
        "afmoe", "deepseek_ocr2", "deepseek_v2", "kimi_linear", "sarvam_mla", "sarvam_moe", "unlimited_ocr",
    }  # fmt: skip

# A bias, two weights, a parameter that is created in float32, and a model inside a
# multimodal one.
UNLIKE = {"deepseek_v3", "ernie4_5_moe", "hunyuan_v1_moe", "mistral_large4"}

# torch cannot multiply experts of other widths in bfloat16: "strides should be multiple
# of 16 bytes".
WIDTHS = {"muse_spark": {"moe_hidden_size": 24}}


def checkpoint(model_type: str, folder: Path, **overrides: Any) -> Path:
    """Write a random bfloat16 checkpoint as transformers holds it in memory, with its
    float32 tensors.
    """
    model = tiny_model(model_type, **WIDTHS.get(model_type, {}), **overrides)
    model.save_pretrained(folder / "wide")
    # With its config: the class of sarvam_moe is that of another model type.
    narrow = type(model).from_pretrained(
        folder / "wide", config=model.config, dtype=torch.bfloat16
    )
    narrow.save_pretrained(folder / "original")
    tiny_tokenizer(110).save_pretrained(folder / "original")
    return folder / "original"


def trainer(path: Path, folder: Path, **changes: Any) -> Any:
    settings = {
        "layers": "all", "max_steps": 1, "max_length": 24, "batch_size_tokens": 48, "learning_rate": 1e-30,
        "packing": False, "save_strategy": "no", "logging_steps": 1, "disable_tqdm": True, "report_to": "none",
        "warmup_steps": 0,
    } | changes  # fmt: skip
    args = fcsd.FCSDConfig(str(folder / "run"), **settings)
    return fcsd.FCSDTrainer(
        str(path), args, train_dataset=[{"input_ids": list(range(3, 27))}] * 2
    )


def assert_equal_files(left: Path, original: Path) -> None:
    saved, loaded = tensors_of(left), tensors_of(original)
    assert same_tensors(saved, loaded)
    for name, value in loaded.items():
        assert saved[name].dtype == value.dtype, name


def test_the_families_that_keep_tensors_in_float32_are_those_of_transformers() -> None:
    """Determined by transformers' own loading, so that a new family is not left out of
    the tests below.
    """
    keeping = set()
    for name in TINY:
        model = tiny_model(name)
        dtypes = loaded_dtypes(model, torch.bfloat16)
        if any(
            dtypes[key] == torch.float32 for key in model.state_dict() if key in dtypes
        ):
            keeping.add(name)
    # An older transformers lacks some of them.
    assert keeping == KEPT_IN_FLOAT32 & TINY.keys()


# Routing is random in training; the gradient of a position bias makes torch choose
# another attention kernel.
NOT_DETERMINED = {"phimoe", "inkling_text", "inkling_mm_model"}


def assert_no_divergence(trained: Any) -> None:
    """Check the first step of a student that is its teacher."""
    first = trained.state.log_history[0]
    assert abs(first["kl"]) < 1e-7  # sums of float32
    assert first["teacher_entropy"] > 1


@pytest.mark.parametrize(
    "model_type", few(sorted(FAMILIES.keys() & TINY.keys()), kinds=UNLIKE)
)
def test_a_step_at_rate_zero_leaves_the_checkpoint_that_was_loaded(
    model_type: str, tmp_path: Path
) -> None:
    """Tensor by tensor, dtype by dtype, key by key; trained in float32 and in bfloat16, and
    as its own teacher in bfloat16, where the KL is zero.
    """
    path = checkpoint(model_type, tmp_path, vocab_size=120)
    floats = [value for value in tensors_of(path).values() if value.is_floating_point()]
    kept = {value.dtype for value in floats} == {torch.bfloat16, torch.float32}
    assert kept == (model_type in KEPT_IN_FLOAT32)
    for dtype, layers in (
        ("float32", "all"),
        ("bfloat16", "all"),
        ("bfloat16", "none"),
    ):
        folder = tmp_path / f"{dtype}-{layers}"
        trained = trainer(path, folder, dtype=dtype, layers=layers)
        trained.train()
        if layers == "none" and model_type not in NOT_DETERMINED:
            assert_no_divergence(trained)
        trained.save_model(str(folder / "left"))
        assert_equal_files(folder / "left", path)
        config = json.loads((folder / "left" / "config.json").read_text())
        assert config["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    "model_type", few(sorted(FAMILIES.keys() & TINY.keys()), kinds=UNLIKE)
)
def test_a_model_taken_to_bfloat16_has_the_dtypes_and_numbers_of_one_that_is_loaded_so(
    model_type: str, tmp_path: Path
) -> None:
    """Includes rotary frequencies, which no checkpoint has, against transformers'
    `from_pretrained`.
    """
    model = tiny_model(model_type)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16)
    to_dtype(model, torch.bfloat16)
    theirs = dict(real_tensors(loaded))
    if model_type == "zaya":
        # transformers overwrites the last number of these after loading.
        for name in [name for name in theirs if name.endswith("balancing_biases")]:
            assert theirs[name][-1] == -1, f"{name}: delete Family.overwritten"
            theirs[name][-1] = model.state_dict()[name][-1]
    in_files = model.state_dict().keys()
    for name, tensor in real_tensors(model):
        assert tensor.dtype == theirs[name].dtype, name
        # Tensors that no checkpoint has are computed: in bfloat16 by a model that is
        # built in it, and rounded here.
        if name in in_files or tensor.dtype == torch.float32:
            assert torch.equal(tensor, theirs[name]), name


def kl(logits: torch.Tensor, others: torch.Tensor) -> float:
    p, q = logits.double().log_softmax(-1), others.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


def chosen(model: Any, ids: torch.Tensor) -> list[torch.Tensor]:
    """Return the experts of each token by layer, from the routers' own outputs."""
    experts: list[torch.Tensor] = []
    hooks = [
        module.register_forward_hook(
            lambda _, args, output: experts.append(output[-1].sort(-1).values)
        )
        for name, module in model.named_modules()
        if name.endswith("mlp.gate")
    ]
    with torch.no_grad():
        model(input_ids=ids)
    for hook in hooks:
        hook.remove()
    return experts


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_biases_that_differ_by_less_than_bfloat16_resolves_still_choose_the_experts(
    dtype: str, tmp_path: Path
) -> None:
    """The biases of GLM-5.2 lie between 6.82 and 7.06, where bfloat16 has steps of
    0.03.
    """
    path = checkpoint("deepseek_v3", tmp_path, vocab_size=120)
    state = tensors_of(path)
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in state if name.endswith("e_score_correction_bias")]:
        state[name] = 6.82 + 0.24 * torch.rand(state[name].shape, generator=generator)
    save_file(state, path / "model.safetensors", {"format": "pt"})
    trained = trainer(path, tmp_path, layers="none", dtype=dtype, learning_rate=1e-12)
    trained.train()
    trained.save_model(str(tmp_path / "left"))
    original = AutoModelForCausalLM.from_pretrained(path)
    left = load_model(tmp_path / "left")
    ids = torch.arange(3, 90)[None]
    for one, other in zip(chosen(original, ids), chosen(left, ids), strict=True):
        assert torch.equal(one, other)
    with torch.no_grad():
        assert kl(original(input_ids=ids).logits, left(input_ids=ids).logits) == 0


@pytest.mark.parametrize(
    "settings", [{"dtype": "bfloat16"}, {"bf16": True}], ids=["bfloat16", "autocast"]
)
@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        *few(
            [
                (name, {})
                for name in sorted((FAMILIES.keys() & TINY.keys()) - NOT_DETERMINED)
            ],
            kinds={"deepseek_v3", "ernie4_5_moe", "mixtral", "minimax"},
        ),
        ("qwen3_moe", {"tie_word_embeddings": True}),
    ],
)
def test_a_student_that_is_its_teacher_has_a_kl_of_zero_in_bfloat16(
    model_type: str, fields: dict[str, Any], settings: dict[str, Any], tmp_path: Path
) -> None:
    path = checkpoint(model_type, tmp_path, vocab_size=120, **fields)
    same = trainer(path, tmp_path, layers="none", **settings)
    same.train()
    assert_no_divergence(same)


def test_the_teacher_keeps_its_own_tensors_outside_of_a_step(tmp_path: Path) -> None:
    path = checkpoint("deepseek_v3", tmp_path, vocab_size=120)
    same = trainer(path, tmp_path, layers="none", bf16=True)
    before = {
        name: (tensor.dtype, tensor.data_ptr())
        for name, tensor in real_tensors(same.teacher.model)
    }
    same.train()
    after = {
        name: (tensor.dtype, tensor.data_ptr())
        for name, tensor in real_tensors(same.teacher.model)
    }
    assert before == after


# ---- what the files had


def rewritten(path: Path, ending: str, dtype: torch.dtype) -> list[str]:
    """Write tensors of a checkpoint in another dtype, and return their names."""
    state = tensors_of(path)
    names = [name for name in state if name.endswith(ending)]
    state |= {name: state[name].to(dtype) for name in names}
    save_file(state, path / "model.safetensors", {"format": "pt"})
    return names


@pytest.mark.parametrize(
    ("model_type", "ending", "dtype"),
    [
        # transformers converts it to float32
        ("deepseek_v3", "e_score_correction_bias", torch.bfloat16),
        # transformers converts it to bfloat16
        ("mixtral", "layernorm.weight", torch.float32),
        # one of the tensors that are fused in memory
        ("qwen3_moe", "experts.1.up_proj.weight", torch.float32),
        ("mixtral", "embed_tokens.weight", torch.float32),  # the first of all
    ],
)
def test_a_tensor_leaves_in_the_dtype_of_its_file_whatever_it_is_in_memory(
    model_type: str, ending: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    path = checkpoint(model_type, tmp_path, vocab_size=120)
    names = rewritten(path, ending, dtype)
    trained = trainer(path, tmp_path)
    trained.train()
    assert {value.dtype for value in trained.model.parameters()} == {torch.float32}
    trained.save_model(str(tmp_path / "left"))
    saved, original = tensors_of(tmp_path / "left"), tensors_of(path)
    assert names and saved.keys() == original.keys()
    for name in names:
        assert saved[name].dtype == dtype
    for name in saved:
        assert torch.equal(saved[name].float(), original[name].bfloat16().float()), name
    assert (
        json.loads((tmp_path / "left" / "config.json").read_text())["dtype"]
        == "bfloat16"
    )


def test_a_model_that_was_loaded_in_another_dtype_is_saved_in_that(
    tmp_path: Path,
) -> None:
    path = checkpoint("deepseek_v3", tmp_path, vocab_size=120)
    model, _ = fcsd.load(str(path), layers="all", dtype="float32")
    dtypes = saved_dtypes(model)
    assert {dtypes.declared, *dtypes.tensors.values()} == {torch.float32}


NEEDS_PEFT = pytest.mark.skipif(
    find_spec("peft") is None, reason="needs peft: pip install 'fcsd[lora]'"
)


@pytest.mark.parametrize(
    ("configuration", "settings", "lora"),
    few(
        [
            (None, {"dtype": "bfloat16"}, None),
            ("cpu_2_fsdp2", {"bf16": True}, None),
            ("cpu_2", {"bf16": True}, None),
            ("cpu_2_fsdp2", {"dtype": "bfloat16"}, None),
            pytest.param("cpu_2_zero3", {"bf16": True}, None, marks=NEEDS_DEEPSPEED),
            pytest.param(None, {}, {"r": 2}, marks=NEEDS_PEFT),
        ],
        2,
    ),
    ids=["alone", "fsdp2", "ddp", "fsdp2-bfloat16", "zero3", "merged adapters"],
)
def test_a_recipe_leaves_what_its_checkpoint_had_under_every_engine(
    configuration: str | None,
    settings: dict[str, Any],
    lora: dict[str, Any] | None,
    bench: Bench,
    tmp_path: Path,
) -> None:
    """The router's weight and bias of ERNIE 4.5 are parameters; ZeRO-3 computes with
    them in bfloat16.
    """
    family = "ernie4_5_moe" if lora is None else "deepseek_v3"
    path = checkpoint(family, tmp_path, vocab_size=300)
    tiny_tokenizer(300).save_pretrained(path)
    train = {
        "max_steps": 1, "warmup_steps": 0, "batch_size_tokens": 128, "learning_rate": 1e-30,
    }  # fmt: skip
    recipe = bench.recipe(model={"path": str(path)}, train=train | settings, lora=lora)
    command = ["distill", str(recipe)]
    assert (
        main(command) if configuration is None else launch(configuration, command)
    ) in (0, [0])
    assert_equal_files(bench.folder / "r" / "distill" / "model", path)


# ---- what is written is what was trained


def test_a_model_that_does_not_load_as_it_was_trained_is_not_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoint("mixtral", tmp_path, vocab_size=120)
    trained = trainer(path, tmp_path)
    save = type(trained.model).save_pretrained

    def damaged(self: Any, folder: Path, *args: Any, **more: Any) -> None:
        save(self, folder, *args, **more)
        state = tensors_of(Path(folder))
        state["model.norm.weight"][3] += 1
        save_file(state, Path(folder) / "model.safetensors", {"format": "pt"})

    monkeypatch.setattr(type(trained.model), "save_pretrained", damaged)
    with user_error(r"'model\.norm\.weight' differs from the trained"):
        trained.save_model(str(tmp_path / "left"))
    assert not list((tmp_path / "left").iterdir())


def test_a_model_that_is_saved_again_leaves_the_other_files_of_its_folder(
    tmp_path: Path,
) -> None:
    path = checkpoint("mixtral", tmp_path, vocab_size=120)
    trained = trainer(path, tmp_path)
    left = tmp_path / "left"
    trained.save_model(str(left))
    (left / "model-00001-of-00002.safetensors").write_bytes(b"of an earlier model")
    (left / "notes.txt").write_text("mine")
    trained.save_model(str(left))
    assert (left / "notes.txt").read_text() == "mine"
    assert [file.name for file in left.glob("*.safetensors")] == ["model.safetensors"]
    assert not list(tmp_path.glob(".left*"))


def test_weights_that_are_no_numbers_are_compared_too(tmp_path: Path) -> None:
    model = tiny_model("mixtral")
    model.model.norm.weight.data[0] = math.nan
    write_as(model, tmp_path, torch.float32)
    assert tensors_of(tmp_path)["model.norm.weight"][0].isnan()


def test_where_memory_is_short_the_model_is_not_loaded_and_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("fcsd.training.save_model.available_memory", lambda: 1000)
    model = tiny_model("mixtral")
    write_as(model, tmp_path, torch.float32)
    assert "was not compared with the trained model" in capsys.readouterr().err


# ---- on shards


def ernie() -> Any:
    model = tiny_model("ernie4_5_moe", num_hidden_layers=2)
    to_dtype(model, torch.bfloat16)
    return model


def spread_on_rank(rank: int, folder: Path, dtype: str, bf16: bool) -> Any:
    model, own = on_rank("fsdp2", ernie)
    attach_loss_head(model, None)
    shard_student(model, own, TrainConfig(dtype=dtype, bf16=bf16))
    gate = model.model.layers[1].mlp.gate
    dtypes = {name: parameter.dtype for name, parameter in gate.named_parameters()}
    seen = []
    gate.register_forward_hook(lambda module, *_: seen.append(module.weight.dtype))
    ids = torch.arange(3, 27)[None]
    with torch.no_grad():
        hidden = model(
            input_ids=ids, position_ids=torch.arange(24)[None], objective="hidden"
        )["hidden"]
    write_as(model, folder, torch.bfloat16, own)
    return dtypes, seen, hidden


@pytest.mark.parametrize(("dtype", "bf16"), [("bfloat16", False), ("float32", True)])
def test_fsdp2_keeps_routers_in_float32_and_computes_as_one_process(
    dtype: str, bf16: bool, tmp_path: Path
) -> None:
    """The router of ERNIE 4.5 has a weight and a bias, both in float32; compared with
    the bfloat16 model itself.
    """
    whole = ernie()
    with torch.no_grad():
        expected = whole.model(
            input_ids=torch.arange(3, 27)[None], use_cache=False
        ).last_hidden_state[0]
    for dtypes, seen, hidden in run_ranks(spread_on_rank, 2, tmp_path, dtype, bf16):
        assert set(dtypes.values()) == {torch.float32}
        assert set(seen) == {torch.float32}
        assert torch.equal(hidden, expected)
    saved = tensors_of(tmp_path)
    kept = {name for name, value in saved.items() if value.dtype == torch.float32}
    assert kept == {
        "model.layers.1.mlp.gate.weight",
        "model.layers.1.mlp.moe_statics.e_score_correction_bias",
    }
    assert {saved[name].dtype for name in saved.keys() - kept} == {torch.bfloat16}
