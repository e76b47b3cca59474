"""Every epoch has whole steps and leaves out different rows; how many rows are unused
is reported before the first step.
"""

import copy
import re
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from accelerate import skip_first_batches
from accelerate.data_loader import prepare_data_loader
from torch.utils.data import DataLoader, RandomSampler

from fcsd.api.trainer import FCSDTrainer
from fcsd.cli.main import main
from fcsd.data import rows as rows_module
from fcsd.data.dataset import given_rows
from fcsd.data.rows import EpochRows
from fcsd.model.connectivity import Connectivity, convert_model
from fcsd.pipeline.tiny.models import tiny_tokenizer
from fcsd.training.fcsd_config import FCSDConfig
from tests.reference.tiny import tiny_model
from tests.support import (
    Bench,
    command_words,
    few,
    interrupt_at,
    trained_weights,
    user_error,
)
from tests.training.test_resume import curve, on_two_ranks

TOKENIZER = tiny_tokenizer(300)


def examples(count: int, *, cut: int = 0, gone: int = 0) -> list[dict[str, Any]]:
    """Return short conversations; `cut` of them have an answer, and `gone` a question,
    longer than 64 tokens.
    """

    def messages(number: int) -> list[dict[str, str]]:
        question = f"{number} + 1" + " x" * (70 if number < gone else 0)
        answer = f"{number + 1} is it" + " y" * (
            70 if gone <= number < gone + cut else 0
        )
        return [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]

    return [{"messages": messages(number)} for number in range(count)]


@pytest.fixture(scope="module")
def original() -> Any:
    model = tiny_model(
        "qwen2_moe",
        num_hidden_layers=2,
        vocab_size=300,
        num_experts=4,
        experts_implementation="eager",
    )
    convert_model(model, Connectivity("all"))
    return model


Trained = Callable[..., FCSDTrainer]


@pytest.fixture
def trained(original: Any, tmp_path: Path) -> Trained:
    """Train a copy on examples; the steps are 4 rows of 64 tokens unless settings say otherwise."""

    def train(
        data: Any, folder: str = "run", resume: bool = False, **settings: Any
    ) -> FCSDTrainer:
        arguments = {
            "max_length": 64, "per_device_train_batch_size": 4, "save_strategy": "no", "disable_tqdm": True,
            "logging_steps": 100, "seed": 0,
        }  # fmt: skip
        trainer = FCSDTrainer(
            copy.deepcopy(original),
            FCSDConfig(output_dir=str(tmp_path / folder), **arguments | settings),
            train_dataset=(
                datasets.Dataset.from_list(data) if isinstance(data, list) else data
            ),
            processing_class=TOKENIZER,
        )
        trainer.train(resume_from_checkpoint=resume or None)
        return trainer

    return train


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the indices of the rows that are read from now on."""
    numbers: list[int] = []
    get = rows_module.PackedRows.__getitems__

    def noted(self: Any, indices: list[int]) -> Any:
        numbers.extend(indices)
        return get(self, indices)

    monkeypatch.setattr(rows_module.PackedRows, "__getitems__", noted)
    return numbers


# ---- the order


def in_order(num_rows: int, rows_of_a_step: int) -> EpochRows:
    return EpochRows(num_rows, rows_of_a_step, 8)


@pytest.mark.parametrize(
    ("num_rows", "step"), [(100, 64), (10, 4), (7, 4), (12, 4), (5, 5), (9, 2)]
)
def test_two_epochs_read_every_row_and_no_epoch_one_twice(
    num_rows: int, step: int
) -> None:
    order, seen = in_order(num_rows, step), []
    for epoch in range(5):
        order.set_epoch(epoch)
        rows = list(order)
        assert len(order) == len(rows) == len(set(rows)) == num_rows // step * step
        assert set(rows) <= set(range(num_rows))
        seen.append(set(rows))
    assert seen[0] == set(range(num_rows // step * step))
    for before, after in pairwise(seen):
        assert before | after == set(range(num_rows))


def test_no_row_is_left_out_more_often_than_others_by_more_than_once() -> None:
    order, times = in_order(10, 4), Counter(range(10))
    for epoch in range(25):
        order.set_epoch(epoch)
        times.update(order)
    # 25 epochs of 8 of 10 rows, and the first count of each
    assert set(times.values()) == {21}


@pytest.mark.parametrize(("num_rows", "data_seed"), [(12, None), (12, 7), (14, None)])
def test_the_first_epoch_and_all_of_whole_steps_come_in_the_order_of_accelerate(
    num_rows: int, data_seed: int | None
) -> None:
    torch.manual_seed(3)
    loader = DataLoader(range(12), sampler=RandomSampler(range(12)))  # type: ignore[arg-type]
    reference = prepare_data_loader(
        loader, use_seedable_sampler=True, data_seed=data_seed, put_on_device=False
    )
    order = in_order(num_rows, 4)
    order.ordered_by(RandomSampler(order.part(range(num_rows))), data_seed)
    for epoch in range(3 if num_rows == 12 else 1):
        reference.set_epoch(epoch)
        order.set_epoch(epoch)
        assert list(order) == [int(row) for row in reference]
        assert list(order) == list(order)  # as often as requested


def test_the_rows_of_a_part_of_a_training_are_those_that_it_reads() -> None:
    order = in_order(10, 4)
    order.ordered_by(RandomSampler(order.part(range(10))), 5)
    state, numbers = torch.get_rng_state(), []
    for epoch in range(3):
        order.set_epoch(epoch)
        numbers += list(order)
    for steps in range(7):
        assert set(np.flatnonzero(order.are_read(steps))) == set(numbers[: 4 * steps])
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("ranks", [1, 2])
def test_each_rank_that_continues_reads_the_rows_that_it_would_have(ranks: int) -> None:
    """Tests the loaders that `Trainer` makes: that of each rank, and one that skips the
    batches already trained on.
    """

    def loaded(rank: int, skipped: int) -> list[list[int]]:
        order = in_order(22, 4)
        order.ordered_by(RandomSampler(order.part(range(22))), 5)
        loader = prepare_data_loader(
            DataLoader(range(22), batch_size=2, sampler=order),  # type: ignore[arg-type]
            num_processes=ranks, process_index=rank, put_on_device=False, use_seedable_sampler=True,
        )  # fmt: skip
        if skipped:
            loader = skip_first_batches(loader, skipped)
        order.set_epoch(1)
        loader.set_epoch(1)
        return [batch.tolist() for batch in loader]

    for rank in range(ranks):
        assert len(loaded(rank, 0)) == 10 // ranks
        assert loaded(rank, 2) == loaded(rank, 0)[2:]


# ---- a training


def test_three_epochs_of_100_rows_in_steps_of_64_use_all_of_them(
    trained: Trained, read: list[int]
) -> None:
    data = examples(100)
    trainer = trained(data, packing=False, per_device_train_batch_size=32, gradient_accumulation_steps=2,
                      num_train_epochs=3)  # fmt: skip
    assert trainer.state.global_step == 3 and len(read) == 3 * 64
    assert trainer.num_examples(trainer.get_train_dataloader()) == 64
    assert set(read) == set(range(100))
    assert all(
        len(set(read[64 * epoch : 64 * (epoch + 1)])) == 64 for epoch in range(3)
    )


@pytest.mark.parametrize("workers", few([0, 1], 1))
def test_a_training_that_continues_in_its_second_epoch_reads_the_same_rows(
    trained: Trained, read: list[int], monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    settings: dict[str, Any] = {
        "packing": False, "num_train_epochs": 3, "save_strategy": "steps", "save_steps": 1,
        "dataloader_num_workers": workers, "dataloader_persistent_workers": workers > 0, "logging_steps": 1,
        "max_length": 16,
    }  # fmt: skip
    data = examples(11)  # two steps of 4 in each epoch
    whole = trained(data, **settings)
    in_one_go = [*read]
    assert len(in_one_go) == (0 if workers else 24)
    with monkeypatch.context() as patch:
        interrupt_at(3, patch)
        with pytest.raises(KeyboardInterrupt):
            trained(data, "other", **settings)
    read[:] = []
    other = trained(data, "other", resume=True, **settings)
    assert read == in_one_go[12:]
    losses = [
        [point["kl"] for point in each.state.log_history if "kl" in point]
        for each in (whole, other)
    ]
    assert losses[0] == losses[1] and len(losses[0]) == 6


@pytest.mark.breadth
def test_two_ranks_continue_in_the_second_epoch_to_the_same_weights(
    bench: Bench, tmp_path: Path
) -> None:
    data = {"train": [{"path": str(bench.rows), "max_examples": 22}], "max_length": 32}
    command = {
        name: ["distill", str(bench.recipe(name, data=data))]
        for name in ("whole", "cut")
    }
    assert [status for status, _ in on_two_ranks(command["whole"], tmp_path)] == [0, 0]
    statuses = [
        status
        for status, _ in on_two_ranks(command["cut"], tmp_path, 1, "compute_loss")
    ]
    assert statuses == [143, 143]  # after step 6, in the second epoch of five steps
    assert [status for status, _ in on_two_ranks(command["cut"], tmp_path)] == [0, 0]
    assert curve(bench, "whole") == curve(bench, "cut")
    one, other = (trained_weights(bench, name) for name in command)
    assert one == other


@pytest.mark.parametrize("strategy", ["group_by_length", "batch_rebalance"])
def test_a_strategy_that_looks_at_the_lengths_of_rows_is_refused(strategy: str) -> None:
    with user_error(rf"train_sampling_strategy: '{strategy}' .* rows have one length"):
        FCSDConfig(output_dir="x", train_sampling_strategy=strategy)


# ---- what is reported


def data_lines(text: str) -> list[str]:
    return [
        line
        for line in text.replace("\r", "\n").splitlines()
        if line.startswith("data: ")
    ]


def test_the_examples_that_are_cut_or_vanish_are_counted_before_the_first_step(
    trained: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(
        examples(100, cut=45, gone=45),
        num_train_epochs=2,
        per_device_train_batch_size=16,
    )
    count, *warnings = data_lines(capsys.readouterr().err)
    assert (
        count
        == "data: 100 examples read: 45 cut, 45 without loss, 0 left out, 0 never used"
    )
    assert warnings == [
        (
            "data: warning: 45 of 100 examples (45 %) are truncated: some of their"
            " tokens with loss are beyond max_length 64; raise it"
        ),
        (
            "data: warning: 45 of 100 examples (45 %) are without loss: all of their"
            " tokens with loss are beyond max_length 64; raise it"
        ),
    ]


def test_what_is_never_used_is_counted_and_two_epochs_use_it(
    trained: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {
        "packing": False,
        "per_device_train_batch_size": 32,
        "gradient_accumulation_steps": 2,
    }
    trained(examples(100), num_train_epochs=1, **settings)
    assert data_lines(capsys.readouterr().err) == [
        "data: 100 examples read: 0 cut, 0 without loss, 0 left out, 36 never used",
        (
            "data: warning: 36 of 100 examples (36 %) are never used: 36 of 100 rows do"
            " not fill a step of 64; train for two epochs, or with a smaller batch"
        ),
    ]
    trained(examples(100), num_train_epochs=3, **settings)
    assert data_lines(capsys.readouterr().err) == [
        "data: 100 examples read: 0 cut, 0 without loss, 0 left out, 0 never used"
    ]


def test_a_training_that_ends_before_its_data_says_so_and_warns_of_nothing(
    trained: Trained, read: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = trained(examples(40), max_steps=1, max_length=32)
    used = trainer.train_dataset.num_examples(
        np.isin(np.arange(len(trainer.train_dataset)), read[:4])
    )
    assert 4 <= used < 40
    (line,) = data_lines(capsys.readouterr().err)
    assert (
        line
        == f"data: 40 examples read: 0 cut, 0 without loss, 0 left out, {40 - used}"
        " never used (the training ends before them)"
    )


def test_examples_that_cannot_be_tokenized_are_left_out_of_the_count(
    trained: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    data: list[dict[str, Any]] = [*examples(20), {"messages": []}, {"messages": []}]
    trained(data, num_train_epochs=2, on_bad_row="skip", max_length=32)
    count, warning = data_lines(capsys.readouterr().err)
    assert (
        count
        == "data: 22 examples read: 0 cut, 0 without loss, 2 left out, 0 never used"
    )
    assert "2 of 22 examples (9 %) are left out: they cannot be tokenized" in warning


def test_rows_that_came_packed_are_counted_as_rows(
    trained: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = given_rows(
        datasets.Dataset.from_list(examples(7)),
        TOKENIZER,
        name="x",
        max_length=16,
        packing=False,
    )
    trained(
        datasets.Dataset.from_list([dict(row) for row in rows]),
        max_length=16,
        num_train_epochs=1,
    )
    count, warning = data_lines(capsys.readouterr().err)
    assert count == "data: 7 rows that were packed already: 3 never used"
    assert "3 of 7 rows (43 %) are never used" in warning


def test_a_recipe_counts_also_the_examples_of_rows_that_were_there(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = str(
        bench.recipe("r", data={"train": [{"path": str(bench.rows)}], "max_length": 16})
    )
    sentence = "60 examples read: 60 cut, 0 without loss, 0 left out"
    for _ in range(2):
        assert main(["run", recipe, "--only", "tokenize"]) == 0
        assert (
            f"data: {sentence}\ndata: warning: 60 of 60 examples (100 %) are truncated"
            in capsys.readouterr().err
        )
    train = command_words(
        "--set train.max_steps=2 --set train.warmup_steps=0 --set train.batch_size_tokens=64"
    )
    assert main(["distill", recipe, *train]) == 0
    lines = data_lines(capsys.readouterr().err)
    assert (
        lines[0] == f"data: {sentence}, 52 never used (the training ends before them)"
    )


def test_a_trainer_shows_the_rows_that_it_trains_on(
    trained: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = trained(examples(12), max_steps=1)
    capsys.readouterr()
    trainer.show_rows(2)
    shown = capsys.readouterr().out
    assert shown.count("\n-- example") >= 2 and shown.count("row ") == 2
    assert len(re.findall(r"\[\[\d+ is it", shown)) == shown.count("-- example")
    with user_error("show_rows: 0: a number of rows from 1 is needed"):
        trainer.show_rows(0)
    trainer.train_dataset = None
    with user_error("train_dataset: is required for show_rows"):
        trainer.show_rows()
