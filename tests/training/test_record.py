"""A checkpoint records what it was made from: a training continues only with the same
settings and data.
"""

import copy
import json
import math
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch

from fcsd.api.trainer import FCSDTrainer
from fcsd.api.trainer_inputs import rows_fingerprint
from fcsd.base.files import read_json
from fcsd.base.writing import write_json
from fcsd.data import rendering
from fcsd.data.dataset import given_rows
from fcsd.pipeline.tiny.models import tiny_tokenizer
from fcsd.training.fcsd_config import FCSDConfig
from fcsd.training.record import RECORD_FILE
from tests.reference.tiny import tiny_model
from tests.support import few, same_tensors, user_error

SETTINGS: dict[str, Any] = {
    "objective": "ce", "layers": "all", "max_length": 16, "max_steps": 3, "save_steps": 2, "learning_rate": 1e-3,
    "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "loss_on": "all", "disable_tqdm": True,
}  # fmt: skip


def texts(count: int, last: str = "") -> list[dict[str, str]]:
    return [{"text": f"{n} + 1 is {n + 1}"} for n in range(count - bool(last))] + [
        {"text": last}
    ] * bool(last)


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("qwen3_moe", num_hidden_layers=1, vocab_size=300, num_experts=4)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny_tokenizer(300)


@pytest.fixture(scope="module")
def first(
    model: Any, tokenizer: Any, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., FCSDTrainer]:
    """Return a function that makes trainers in the folder of a finished one; keywords
    are other settings or data.
    """
    folder = tmp_path_factory.mktemp("first")

    def make(**changes: Any) -> FCSDTrainer:
        data = changes.pop("train_dataset", texts(40))
        student = changes.pop("model", None) or copy.deepcopy(model)
        teacher = changes.pop("teacher", None)
        arguments = FCSDConfig(str(changes.pop("folder", folder)), **SETTINGS | changes)
        return FCSDTrainer(
            student,
            arguments,
            train_dataset=data,
            processing_class=tokenizer,
            teacher=teacher,
        )

    make().train()
    return make


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"learning_rate": 2e-3}, r"learning_rate: 0\.001 -> 0\.002"),
        ({"weight_decay": 0.1}, r"weight_decay: 0\.0 -> 0\.1"),
        ({"lr_scheduler_type": "linear"}, 'lr_scheduler_type: "cosine" -> "linear"'),
        ({"warmup_steps": 1}, "warmup_steps: 0 -> 1"),
        ({"max_steps": 2}, "max_steps: 3 -> 2"),
        ({"max_steps": 5, "seed": 7}, "max_steps: 3 -> 5; seed: 42 -> 7"),
        (
            {"max_steps": 5, "train_dataset": datasets.IterableDataset.from_generator(lambda: iter(texts(40)))},
            "train_dataset: .*; of a stream, .* with a larger max_steps they are others: use a data set or a list",
        ),
        ({"max_steps": -1, "num_train_epochs": 1}, "max_steps: 3 -> -1; num_train_epochs: null -> 1"),
        ({"seed": 7}, "seed: 42 -> 7"),
        ({"objective": "sft"}, 'objective: "ce" -> "sft"'),
        ({"optim": "sgd"}, 'optim: "adamw_torch_fused" -> "sgd"'),
        ({"ema_decay": 0.9}, r"ema_decay: null -> 0\.9"),
        ({"dtype": "bfloat16"}, 'dtype: "float32" -> "bfloat16"'),
        ({"layers": "none"}, r"connectivity\.layers: \[0\] -> \[\]"),
        ({"packing": False}, "packing: true -> false"),
        ({"gradient_accumulation_steps": 1}, "batch_size_tokens: 64 -> 32"),
        ({"balance_loss_coefficient": 0.1}, r"balance_loss_coefficient: null -> 0\.1"),
        ({"train_dataset": texts(41)}, "train_dataset: other content"),
        ({"train_dataset": texts(40, "0 + 1 is not 2")}, "train_dataset: other content"),
        ({"train_dataset": texts(40)[::-1]}, "train_dataset: other content"),
        ({"data_seed": 7}, "data_seed: null -> 7; train_dataset: other content"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)  # fmt: skip
def test_another_setting_or_other_data_are_refused_with_what_they_were(
    first: Callable[..., FCSDTrainer], changes: dict[str, Any], message: str
) -> None:
    trainer = first(**changes)
    before = copy.deepcopy(trainer.model.state_dict())
    with user_error(
        rf"checkpoint-3: was made with other settings \({message}.*; continue with those settings, or start"
    ) as caught:
        trainer.train(resume_from_checkpoint=True)
    assert "\n" not in str(caught.value)
    assert same_tensors(trainer.model.state_dict(), before)


def test_an_argument_that_is_set_on_a_trainer_counts_as_one_that_is_given(
    first: Callable[..., FCSDTrainer],
) -> None:
    trainer = first()
    trainer.args.learning_rate, trainer.args.max_steps = 2e-3, 9
    with user_error(r"settings \(learning_rate: 0\.001 -> 0\.002; max_steps: 3 -> 9\)"):
        trainer.train(resume_from_checkpoint=True)


@pytest.mark.parametrize(
    "changes",
    [
        {"logging_steps": 1, "save_steps": 1, "save_total_limit": 3, "eval_delay": 2, "run_name": "again"},
        {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1},
        {"batch_size_tokens": 64},
        {"activation_checkpointing": True, "dataloader_num_workers": 1},
        {"on_bad_row": "skip", "dataset_num_proc": 1, "safety": {"max_skipped_steps": 3}},
        {"train_dataset": datasets.Dataset.from_list(texts(40))},
    ],
    ids=" ".join,
)  # fmt: skip
def test_what_the_weights_do_not_depend_on_may_be_another(
    first: Callable[..., FCSDTrainer], changes: dict[str, Any]
) -> None:
    trainer = first(**changes)
    trainer.train(
        resume_from_checkpoint=str(Path(str(trainer.args.output_dir)) / "checkpoint-2")
    )
    assert trainer.state.global_step == 3


@pytest.mark.parametrize("step", few([2, 3], 1))
@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_a_training_continues_for_more_steps_along_the_schedule_of_the_longer_one(
    first: Callable[..., FCSDTrainer],
    step: int,
    schedule: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "more"
    first(lr_scheduler_type=schedule, folder=folder).train()
    steps = {"max_steps": 8, "logging_steps": 1, "lr_scheduler_type": schedule}
    trainer = first(folder=folder, **steps)
    checkpoint = Path(str(trainer.args.output_dir)) / f"checkpoint-{step}"
    trainer.train(resume_from_checkpoint=str(checkpoint))
    assert trainer.state.global_step == 8
    error = capfd.readouterr().err
    assert "continuing to max_steps 8 instead of 3; from here on the learning" in error
    rates = {
        entry["step"]: entry["learning_rate"]
        for entry in trainer.state.log_history
        if "learning_rate" in entry and entry["step"] > step
    }
    for number in range(step + 1, 9):
        done = (number - 1) / 8  # the rate with which the step was taken
        share = (1 + math.cos(math.pi * done)) / 2 if schedule == "cosine" else 1 - done
        assert rates[number] == pytest.approx(1e-3 * share, abs=1e-12)
    # Its checkpoints are those of the longer training.
    whole = first(folder=folder, **steps)
    whole.train(resume_from_checkpoint=True)
    assert whole.state.global_step == 8


def test_a_training_continues_for_more_epochs(
    first: Callable[..., FCSDTrainer], tmp_path: Path
) -> None:
    epochs = {"max_steps": -1, "save_strategy": "epoch", "folder": tmp_path / "epochs"}
    short = first(num_train_epochs=1, **epochs)
    short.train()
    longer = first(num_train_epochs=2, **epochs)
    longer.train(resume_from_checkpoint=True)
    assert longer.state.global_step == 2 * short.state.global_step > 0


def test_a_training_that_is_continued_on_another_day_writes_the_day_of_its_beginning(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = tiny_tokenizer(300)
    tokenizer.chat_template = (
        "{{ strftime_now('%d') }}: {% for m in messages %}{{ m.content }} {% endfor %}"
    )
    turns = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]

    def on_day(day: int, folder: Path, steps: int) -> FCSDTrainer:
        monkeypatch.setattr(rendering, "BEGAN", datetime(2026, 11, day))
        return FCSDTrainer(
            copy.deepcopy(model),
            FCSDConfig(str(folder), **SETTINGS | {"save_steps": 1, "max_steps": steps}),
            train_dataset=[{"messages": turns}] * 40,
            eval_dataset=[{"messages": turns}],
            processing_class=tokenizer,
        )

    def first_words(trainer: FCSDTrainer, rows: str = "train_dataset") -> str:
        return tokenizer.decode(getattr(trainer, rows)[0]["input_ids"]).split(":")[0]

    begun = on_day(24, tmp_path / "run", 2)
    begun.train()
    assert first_words(begun) == "24" and first_words(begun, "eval_dataset") == "01"
    record = read_json(tmp_path / "run" / "checkpoint-2" / RECORD_FILE)
    assert record["template_date"] == "2026-11-24T00:00:00"
    continued = on_day(25, tmp_path / "run", 2)
    assert first_words(continued) == "24"
    continued.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-1"))
    assert same_tensors(continued.model.state_dict(), begun.model.state_dict())
    # The date of a damaged checkpoint is not used.
    file = tmp_path / "run" / "checkpoint-2" / RECORD_FILE
    write_json(file, record | {"template_date": "2026-11-21T00:00:00"})
    assert first_words(on_day(25, tmp_path / "run", 2)) == "24"
    elsewhere = on_day(25, tmp_path / "another", 2)
    assert first_words(elsewhere) == "25"
    with user_error(r"wrote the date 2026-11-24.*output_dir .*run"):
        elsewhere.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-1"))


def test_a_checkpoint_says_what_it_was_made_from_and_names_no_place_or_token(
    first: Callable[..., FCSDTrainer], tmp_path: Path
) -> None:
    trainer = first(folder=tmp_path / "run", hub_token="secret", max_steps=2)
    trainer.train()
    record = read_json(tmp_path / "run" / "checkpoint-2" / RECORD_FILE)
    settings = record["settings"]
    assert settings["learning_rate"] == 1e-3 and settings["batch_size_tokens"] == 64
    assert settings["connectivity"] == trainer.model.config.farskip
    assert record["inputs"] == {
        "train_dataset": rows_fingerprint(first().train_dataset)
    }
    assert str(tmp_path) not in json.dumps(record)
    assert "secret" not in json.dumps(record)
    assert (
        not {"output_dir", "hub_token", "logging_steps", "num_train_epochs"}
        & settings.keys()
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"balance_loss_coefficient": 0.1, "balance_loss_over": "batch"},
            "micro-batches of a step, on which balance_loss_over 'batch' depends: 2 -> 1",
        ),
        ({"capacity_factor": 1.0}, "per_device_train_batch_size: 2 -> 4"),
    ],
)  # fmt: skip
def test_where_the_loss_depends_on_how_a_batch_is_cut_the_cut_may_not_change(
    first: Callable[..., FCSDTrainer],
    tmp_path: Path,
    settings: dict[str, Any],
    message: str,
) -> None:
    first(folder=tmp_path, **settings).train()
    other = first(
        folder=tmp_path,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=1,
        **settings,
    )
    with user_error(message):
        other.train(resume_from_checkpoint=True)


def test_models_that_are_given_by_their_paths_are_known_by_their_weights(
    first: Callable[..., FCSDTrainer], model: Any, tokenizer: Any, tmp_path: Path
) -> None:
    for folder in ("base", "moved"):
        model.save_pretrained(tmp_path / folder)
        tokenizer.save_pretrained(tmp_path / folder)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.lm_head.weight[0, 0] += 1
    other.save_pretrained(tmp_path / "other")
    tokenizer.save_pretrained(tmp_path / "other")
    first(folder=tmp_path / "run", model=str(tmp_path / "base"), max_steps=2).train()
    again: dict[str, Any] = {"folder": tmp_path / "run", "max_steps": 2}
    first(model=str(tmp_path / "moved"), **again).train(resume_from_checkpoint=True)
    first(model=copy.deepcopy(model), **again).train(resume_from_checkpoint=True)
    with user_error(r"was made with other settings \(model: other content"):
        first(model=str(tmp_path / "other"), **again).train(resume_from_checkpoint=True)


def test_a_teacher_is_known_by_its_weights_wherever_it_comes_from(
    first: Callable[..., FCSDTrainer], model: Any, tmp_path: Path
) -> None:
    model.save_pretrained(tmp_path / "same")
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.lm_head.weight[0, 0] += 1
    again: dict[str, Any] = {
        "folder": tmp_path / "run",
        "objective": "kl",
        "max_steps": 2,
    }
    first(teacher=copy.deepcopy(model), **again).train()
    for same in (None, str(tmp_path / "same")):
        first(teacher=same, **again).train(resume_from_checkpoint=True)
    with user_error(r"was made with other settings \(teacher: other content"):
        first(teacher=other, **again).train(resume_from_checkpoint=True)


def test_rows_are_known_by_their_tokens_wherever_they_lie(tokenizer: Any) -> None:
    options: dict[str, Any] = {
        "name": "rows", "max_length": 16, "loss_on": "all", "seed": 0,
    }  # fmt: skip
    rows, again, other = (
        given_rows(data, tokenizer, **options)
        for data in (texts(40), texts(40), texts(40, "1"))
    )
    assert rows_fingerprint(rows) == rows_fingerprint(again) != rows_fingerprint(other)
    plain = [
        {name: value.tolist() for name, value in rows[k].items()}
        for k in range(len(rows))
    ]
    assert rows_fingerprint(plain) == rows_fingerprint(
        datasets.Dataset.from_list(plain)
    )
    plain[-1]["labels"][-1] = 5
    assert rows_fingerprint(plain) != rows_fingerprint(
        datasets.Dataset.from_list(plain[:-1])
    )
