"""A teacher computes in its student's precision: without a rewired layer, the first loss
is 0, and so is its gradient.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fcsd.api.trainer import FCSDTrainer
from fcsd.cli.main import main
from fcsd.model.dtypes import to_dtype
from fcsd.pipeline.tiny.models import tiny_tokenizer
from fcsd.training.fcsd_config import FCSDConfig
from tests.parallel.test_engines import environment
from tests.reference.ranks import run_ranks
from tests.reference.tiny import tiny_model
from tests.support import ROOT, Bench, few, history

SAVED = [torch.bfloat16, torch.float16, torch.float32]
LORA = {"r": 2, "lora_alpha": 4}
TRAIN = {"max_steps": 1, "warmup_steps": 0, "logging_steps": 1}


def in_dtype(family: str, dtype: torch.dtype) -> Any:
    """Return a model as `from_pretrained` loads it from a checkpoint in a dtype."""
    model = tiny_model(family, num_hidden_layers=2, vocab_size=300)
    to_dtype(model, dtype)
    model.config.dtype = dtype
    return model


def first_step(history: list[dict[str, Any]]) -> tuple[float, float]:
    (entry,) = [entry for entry in history if "kl" in entry][:1]
    return round(entry["kl"], 7), entry["grad_norm"]


def trainer_of(folder: Path, model: Any, **arguments: Any) -> FCSDTrainer:
    names = ("teacher", "eval_dataset")
    ids = torch.randint(3, 300, (8, 32), generator=torch.Generator().manual_seed(1))
    settings: dict[str, Any] = {
        "layers": "none", "max_length": 32, "max_steps": 1, "logging_steps": 1, "save_strategy": "no",
        "disable_tqdm": True,
    }  # fmt: skip
    settings |= {name: arguments[name] for name in arguments if name not in names}
    return FCSDTrainer(
        model,
        FCSDConfig(str(folder / "run"), **settings),
        train_dataset=[{"input_ids": row} for row in ids.tolist()],
        processing_class=tiny_tokenizer(300),
        **{name: arguments[name] for name in arguments if name in names},
    )


def trained(*given: Any, **arguments: Any) -> tuple[float, float]:
    """Return the KL of the first step, to the rounding of a float32 sum of nats, and
    the norm of its gradient.
    """
    trainer = trainer_of(*given, **arguments)
    trainer.train()
    return first_step(trainer.state.log_history)


@pytest.mark.parametrize(
    ("family", "dtype"),
    few([*(("qwen3_moe", dtype) for dtype in SAVED), ("deepseek_v3", SAVED[0])], 1),
    ids=str,
)
@pytest.mark.parametrize(
    "settings",
    [{}, {"bf16": True}, {"dtype": "bfloat16"}, {"dtype": "bfloat16", "bf16": True}],
    ids=str,
)
def test_without_a_rewired_layer_the_first_loss_and_its_gradient_are_zero(
    family: str, settings: dict[str, Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    path = str(tmp_path / "model")
    in_dtype(family, dtype).save_pretrained(path)
    for student, teacher in (
        (path, path),
        (in_dtype(family, dtype), None),
        (in_dtype(family, dtype), in_dtype(family, dtype)),
    ):
        assert trained(tmp_path, student, teacher=teacher, **settings) == (0, 0)
    # The held-out KL too, of an objective that has no teacher.
    rows = [{"input_ids": [*range(5, 25)]}]
    trainer = trainer_of(
        tmp_path, path, teacher=path, eval_dataset=rows, objective="sft", **settings
    )
    assert trainer.evaluate()["eval_kl"] == pytest.approx(0, abs=1e-7)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_teacher_in_memory_stays_as_its_owner_made_it(
    dtype: str, tmp_path: Path
) -> None:
    for saved in SAVED:
        teacher = in_dtype("qwen3_moe", saved)
        before = {name: value.clone() for name, value in teacher.state_dict().items()}
        trained(tmp_path, in_dtype("qwen3_moe", saved), teacher=teacher, dtype=dtype)
        for name, value in teacher.state_dict().items():
            assert value.dtype == before[name].dtype
            assert torch.equal(value, before[name])


@pytest.fixture
def recipe(bench: Bench, tmp_path: Path) -> Callable[..., Path]:
    def write(name: str, dtype: torch.dtype, **sections: Any) -> Path:
        folder = tmp_path / f"base_{name}"
        in_dtype("qwen2_moe", dtype).save_pretrained(folder)
        tiny_tokenizer(300).save_pretrained(folder)
        train = TRAIN | {"batch_size_tokens": 128} | sections.pop("train", {})
        return bench.recipe(
            name,
            model={"path": str(folder)},
            connectivity={"layers": "none"},
            train=train,
            **sections,
        )

    return write


@pytest.mark.parametrize("dtype", few(SAVED, 1), ids=str)
@pytest.mark.parametrize("backend", ["sharded", "cache", "adapter_off", "lora"])
def test_the_first_loss_of_a_recipe_is_zero_with_each_teacher(
    backend: str,
    dtype: torch.dtype,
    recipe: Callable[..., Path],
    bench: Bench,
    tmp_path: Path,
) -> None:
    sections: dict[str, Any] = {"teacher": {"backend": backend}}
    if backend == "cache":
        sections["teacher"]["cache"] = str(tmp_path / "cache")
    if backend == "lora":
        sections["teacher"]["backend"] = "sharded"
    if backend in ("adapter_off", "lora"):
        sections["lora"] = LORA
    path = str(recipe("r", dtype, **sections))
    if backend == "cache":
        assert main(["run", path, "--only", "cache-teacher"]) == 0
    assert main(["distill", path]) == 0
    assert first_step(history(bench, "r")) == (0, 0)


def test_a_cache_belongs_to_the_precision_of_the_training(
    recipe: Callable[..., Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    teacher = {"backend": "cache", "cache": str(tmp_path / "cache")}
    paths = [
        str(recipe(f"r{k}", torch.bfloat16, teacher=teacher, train=train))
        for k, train in enumerate(({}, {"dtype": "bfloat16"}))
    ]
    assert main(["run", paths[0], "--only", "cache-teacher"]) == 0
    capfd.readouterr()
    assert main(["distill", paths[1]]) == 2
    assert "dtype: " in capfd.readouterr().err


def rank_trained(rank: int, folder: Path, bf16: bool) -> tuple[float, float]:
    return trained(folder, str(folder / "model"), bf16=bf16)


@pytest.mark.parametrize("dtype", few(SAVED, 1), ids=str)
@pytest.mark.parametrize("bf16", [False, True])
def test_the_first_loss_is_zero_with_shards_on_two_ranks(
    bf16: bool, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_dtype("qwen3_moe", dtype).save_pretrained(tmp_path / "model")
    tiny_tokenizer(300).save_pretrained(tmp_path / "model")
    for name, value in environment(ROOT / "configs" / "cpu_2_fsdp2.yaml").items():
        monkeypatch.setenv(name, value)
    assert run_ranks(rank_trained, 2, tmp_path, bf16) == [(0, 0)] * 2
