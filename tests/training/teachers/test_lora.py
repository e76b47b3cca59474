"""LoRA students: what is trained, what is left, and the teacher inside them."""

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file

from fcsd.cli.main import main
from fcsd.data.batches import next_token_targets
from fcsd.model.connectivity import Connectivity, convert_model, load_model
from fcsd.model.families import FAMILIES
from fcsd.training import checkpoint_writer as writer_module
from fcsd.training.losses.head import attach_loss_head
from fcsd.training.teachers.base import ModelTeacher
from fcsd.training.teachers.config import AdapterConfig
from fcsd.training.teachers.lora import AdapterOffTeacher, add_adapters, as_original
from tests.float64 import ROUNDINGS, logits_in_float64
from tests.reference.ranks import run_ranks
from tests.reference.tiny import tiny_model
from tests.support import Bench, history, killed_after, trained_weights, user_error

FAMILY_NAMES = (
    "qwen3_moe", "mixtral", "qwen2_moe", "deepseek_v3", "gpt_oss", "llama4_text", "olmoe", "dots1",
)  # fmt: skip
LORA = {
    "r": 4,
    "lora_alpha": 16,
    "target_modules": ["q_proj", "o_proj"],
    "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
}


def batch(seed: int = 0) -> dict[str, torch.Tensor]:
    """Return two packed rows of 16 tokens."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 99, (2, 16), generator=generator)
    positions = torch.cat([torch.arange(7), torch.arange(9)]).expand(2, -1).clone()
    labels = ids.clone()
    labels[:, :3], labels[:, 7] = -100, -100
    return {"input_ids": ids, "position_ids": positions, "labels": labels}


def student_of(original: Any, lora: dict[str, Any], *, trained: bool = True) -> Any:
    student = copy.deepcopy(original)
    convert_model(student, Connectivity("all"))
    add_adapters(student, AdapterConfig.model_validate(lora), 0, torch.float32)
    if trained:
        with torch.no_grad():
            for name, value in student.named_parameters():
                if ".lora_" in name:
                    value.normal_(std=0.2)
    attach_loss_head(student)
    return student


def hidden(teacher: Any, rows: dict[str, torch.Tensor]) -> torch.Tensor:
    one = dict(rows)
    teacher.prepare([one])
    return one["teacher_hidden"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_with_adapters_and_connectivity_off_the_student_is_the_original_to_the_last_bit(
    family: str, dtype: torch.dtype
) -> None:
    original = tiny_model(family, dtype=dtype)
    experts = f"{FAMILIES[family].moe}.experts.down_proj"
    student = student_of(
        original, LORA | {"target_modules": ["o_proj"], "target_parameters": [experts]}
    )
    rows, own = batch(), {"keep": None, "objective": "hidden"}

    def of_the_student() -> torch.Tensor:
        with torch.no_grad():
            return student(rows["input_ids"], rows["position_ids"], **own)["hidden"]

    before = of_the_student()
    states = hidden(AdapterOffTeacher(student), rows)
    assert torch.equal(states, hidden(ModelTeacher(original), rows))
    assert torch.equal(of_the_student(), before)
    keep, _ = next_token_targets(rows["labels"], rows["position_ids"])
    _, streams = AdapterOffTeacher(student).hidden_and_streams(rows, keep)
    _, expected = ModelTeacher(original).hidden_and_streams(rows, keep)
    assert len(streams) == len(expected) == 4
    assert all(
        torch.equal(stream, original_stream)
        for stream, original_stream in zip(streams, expected, strict=True)
    )


def test_the_pass_leaves_every_training_flag_gradient_flag_and_the_random_state_as_they_were():
    student = student_of(
        tiny_model("qwen2_moe"),
        {"r": 2, "target_modules": ["o_proj"], "lora_dropout": 0.5},
    )
    student.train()
    student.model.layers[1].eval()
    before = [module.training for module in student.modules()]
    trained = [value.requires_grad for value in student.parameters()]
    torch.manual_seed(7)
    state = torch.get_rng_state()
    hidden(AdapterOffTeacher(student), batch())
    assert [module.training for module in student.modules()] == before
    assert any(before)
    assert not all(before)
    assert [value.requires_grad for value in student.parameters()] == trained
    assert torch.equal(torch.get_rng_state(), state)
    with pytest.raises(ZeroDivisionError), as_original(student):
        raise ZeroDivisionError
    assert [module.training for module in student.modules()] == before


def test_only_adapters_are_trained_and_fresh_ones_change_nothing() -> None:
    original = tiny_model("qwen2_moe", dtype=torch.bfloat16)
    rewired = copy.deepcopy(original)
    convert_model(rewired, Connectivity("all"))
    student = student_of(original, LORA, trained=False)
    for name, value in student.named_parameters():
        assert value.requires_grad == (".lora_" in name)
        assert value.dtype == (torch.float32 if value.requires_grad else torch.bfloat16)
    with torch.no_grad():
        ids = batch()["input_ids"]
        assert torch.equal(
            student(ids, use_cache=False).logits, rewired(ids, use_cache=False).logits
        )


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({"target_modules": ["nothing_like_it"]}, r"lora: peft cannot adapt .*nothing_like_it.*check lora"),
        ({"target_modules": ["lm_head"]}, r"lora.target_modules: names the head of the model"),
        ({"target_modules": ["embed_tokens"]}, r"lora.target_modules: names the embeddings"),
    ],
)  # fmt: skip
def test_names_that_cannot_be_adapted_are_refused(
    lora: dict[str, Any], message: str
) -> None:
    model = tiny_model("qwen2_moe")
    convert_model(model, Connectivity("all"))
    with user_error(message):
        add_adapters(model, AdapterConfig.model_validate(lora), 0, torch.float32)


def test_a_student_without_adapters_is_no_teacher() -> None:
    with pytest.raises(ValueError, match="no adapters"):
        AdapterOffTeacher(tiny_model("qwen2_moe"))


# peft 0.21
@pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)
def test_a_run_leaves_the_adapter_and_the_model_with_the_adapter_merged(
    bench: Bench,
) -> None:
    path = bench.recipe("r", lora=LORA, teacher={"backend": "adapter_off"})
    assert main(["distill", str(path)]) == 0
    folder = bench.folder / "r" / "distill"
    assert {p.name for p in folder.iterdir()} == {
        "stage.json", "manifest.json", "history.jsonl", "model", "adapter",
    }  # fmt: skip
    assert main(["convert", str(bench.base), str(bench.folder / "converted")]) == 0
    adapted = peft.PeftModel.from_pretrained(
        load_model(bench.folder / "converted"), folder / "adapter"
    )
    merged = load_model(folder / "model")
    ids = torch.arange(3, 33)[None]
    with torch.no_grad():
        difference = (
            adapted(input_ids=ids, use_cache=False).logits
            - merged(ids, use_cache=False).logits
        )
        with adapted.disable_adapter():
            untrained = adapted(input_ids=ids, use_cache=False).logits
        moved = (merged(ids, use_cache=False).logits - untrained).abs().max()
    with torch.no_grad():
        rounding = merged(ids, use_cache=False).logits - logits_in_float64(
            merged, {"input_ids": ids}
        )
    assert (
        difference.abs().max() < ROUNDINGS * rounding.abs().max() < 0.01 < 0.1 < moved
    )
    before, after = (
        load_file(bench.base / "model.safetensors"),
        load_file(folder / "model/model.safetensors"),
    )
    assert before.keys() == after.keys()
    changed = {
        name.split(".")[-2]
        for name in before
        if not torch.equal(before[name], after[name])
    }
    assert changed == {"q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.mark.breadth
def test_a_killed_lora_run_continues_to_the_same_weights_from_checkpoints_of_adapters_only(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sections = {
        "lora": LORA | {"target_parameters": None},
        "teacher": {"backend": "adapter_off"},
    }
    stopping = bench.early_stopping | {"every_steps": 6}
    assert (
        main(
            ["distill", str(bench.recipe("whole", early_stopping=stopping, **sections))]
        )
        == 0
    )
    command = [
        "distill",
        str(bench.recipe("killed", early_stopping=stopping, **sections)),
    ]
    killed_after(
        monkeypatch,
        writer_module,
        "replace_folder",
        lambda: main(command),
        tmp_path / "output",
    )
    checkpoints = bench.folder / "killed" / "distill" / "checkpoints"
    kept = load_file(checkpoints / "checkpoint-4" / "state-00001-of-00001.safetensors")
    assert kept and all(".lora_" in name for name in kept)
    assert main(command) == 0
    assert trained_weights(bench, "whole") == trained_weights(bench, "killed")
    assert [p["loss"] for p in history(bench, "whole")][-8:] == [
        p["loss"] for p in history(bench, "killed")
    ][-8:]


def of_a_rank(rank: int, command: list[str]) -> int:
    return main(command)


@pytest.mark.breadth
def test_two_ranks_train_adapters_on_bfloat16_weights_as_one_does(bench: Bench) -> None:
    sections = {
        "model": {"path": str(bench.base), "dtype": "bfloat16"},
        "lora": LORA,
        "teacher": {"backend": "adapter_off"},
        "train": {
            "max_steps": 3, "batch_size_tokens": 128, "per_device_train_batch_size": 2, "learning_rate": 1e-2,
            "warmup_steps": 0, "logging_steps": 1, "gradient_checkpointing": True,
        },
    }  # fmt: skip
    assert run_ranks(
        of_a_rank, 2, ["distill", str(bench.recipe("two", **sections))]
    ) == [0, 0]
    assert main(["distill", str(bench.recipe("one", **sections))]) == 0
    for one, two in zip(history(bench, "one"), history(bench, "two"), strict=True):
        assert one["loss"] == pytest.approx(two["loss"], rel=0.02)
    left, right = (
        load_file(bench.folder / n / "distill/adapter/adapter_model.safetensors")
        for n in ("one", "two")
    )
    assert left.keys() == right.keys()
    assert all(value.dtype == torch.float32 for value in left.values())
    assert all(value.abs().max() > 0 for value in left.values())
    merged = load_file(bench.folder / "two" / "distill" / "model" / "model.safetensors")
    assert all(value.dtype == torch.bfloat16 for value in merged.values())
