"""FCSDTrainer trains what a recipe trains, is a Trainer in every respect, and reports
errors in one line.
"""

import copy
import importlib.util
import inspect
import math
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    EarlyStoppingCallback,
    Seq2SeqTrainingArguments,
    TrainerCallback,
)
from transformers.trainer_callback import ExportableState

import fcsd
from fcsd.api.trainer import FCSDTrainer
from fcsd.base.errors import UserError
from fcsd.cli.main import main
from fcsd.model.connectivity import Connectivity, convert_model, unconvert_model
from fcsd.pipeline.tiny.models import tiny_tokenizer
from fcsd.training.fcsd_config import FCSDConfig
from tests.reference.ranks import run_ranks
from tests.reference.tiny import tiny_model
from tests.report.publish.hub_server import Hub, hub
from tests.support import (
    ROOT,
    Bench,
    arithmetic,
    edited_json,
    few,
    history,
    json_lines,
    same_tensors,
    user_error,
)

__all__ = ["hub"]  # the fixture

SETTINGS: dict[str, Any] = {
    "max_steps": 6, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_length": 32,
    "learning_rate": 1e-3, "logging_steps": 1, "save_steps": 2, "seed": 0, "disable_tqdm": True,
}  # fmt: skip


def other_optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)


@pytest.fixture(scope="module")
def original() -> Any:
    return tiny_model(
        "qwen2_moe",
        num_hidden_layers=2,
        vocab_size=300,
        num_experts=4,
        experts_implementation="eager",
    )


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny_tokenizer(300)


@pytest.fixture
def make(original: Any, tokenizer: Any, tmp_path: Path) -> Callable[..., FCSDTrainer]:
    """Return a trainer of a freshly converted copy; keywords that the trainer does not
    have are settings.
    """

    def trainer(folder: str = "run", **changes: Any) -> FCSDTrainer:
        names = {
            "model", "train_dataset", "eval_dataset", "processing_class", "teacher", "callbacks", "optimizers",
            "compute_metrics",
        }  # fmt: skip
        model = copy.deepcopy(original)
        convert_model(model, Connectivity("all"))
        arguments = {
            "model": model,
            "train_dataset": datasets.Dataset.from_list(arithmetic(60)),
            "processing_class": tokenizer,
        } | {name: value for name, value in changes.items() if name in names}
        settings = SETTINGS | {
            name: value for name, value in changes.items() if name not in names
        }
        return FCSDTrainer(
            args=FCSDConfig(output_dir=str(tmp_path / folder), **settings), **arguments
        )

    return trainer


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


def curve(trainer: Any, name: str = "kl") -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


@pytest.mark.parametrize("own", few([{}, {"own_text": 0.5, "own_text_tokens": 6}], 1))
def test_it_trains_what_a_recipe_trains_to_the_last_bit(
    bench: Bench, own: dict[str, Any]
) -> None:
    path = bench.recipe("recipe", objective={"name": "kl"} | own)
    assert main(["distill", str(path)]) == 0
    rows = datasets.Dataset.from_list(json_lines(bench.rows))
    settings = {
        "max_steps": 12, "max_length": 32, "batch_size_tokens": 128, "per_device_train_batch_size": 2, **own,
    }  # fmt: skip
    arguments = FCSDConfig(
        output_dir=str(bench.folder / "python"), layers="all", learning_rate=1e-3, warmup_steps=2, seed=0,
        logging_steps=1, save_strategy="no", disable_tqdm=True, **settings,
    )  # fmt: skip
    trainer = FCSDTrainer(model=str(bench.base), args=arguments, train_dataset=rows)
    trainer.train()
    trainer.save_model()
    folder = bench.folder / "recipe" / "distill"
    assert curve(trainer) == [entry["kl"] for entry in history(bench, "recipe")]
    left, right = (
        load_file(path / "model.safetensors")
        for path in (folder / "model", bench.folder / "python")
    )
    assert same_tensors(left, right)


def test_the_teacher_is_made_from_the_unconverted_weights_before_anything_is_trained(
    make: Callable[..., FCSDTrainer], original: Any
) -> None:
    other = make("given", teacher=copy.deepcopy(original))
    other.train()
    made = make("made")
    made.train()
    assert curve(made) == curve(other) and same_tensors(weights(made), weights(other))
    teacher: Any = made.teacher
    assert same_tensors(teacher.model.state_dict(), original.state_dict())
    assert type(teacher.model) is type(original)


def test_a_model_that_was_trained_or_calibrated_is_not_its_own_teacher(
    make: Callable[..., FCSDTrainer], original: Any, tokenizer: Any, tmp_path: Path
) -> None:
    fresh = copy.deepcopy(original)
    fresh.save_pretrained(tmp_path / "original")
    tokenizer.save_pretrained(tmp_path / "original")
    fcsd.convert_checkpoint(tmp_path / "original", tmp_path / "converted")
    # a fresh conversion has the original's weights
    first = make(model=str(tmp_path / "converted"), max_steps=1)
    model: Any = first.model
    make(model=model, max_steps=1)  # the trainer before it has not trained
    first.train()
    first.save_model(str(tmp_path / "trained"))
    message = r"was trained already, so a copy of it is not the original; pass the original as teacher="
    for again in (model, str(tmp_path / "trained"), fcsd.load(tmp_path / "trained")[0]):
        with user_error(message):
            make(model=again)
    # another connectivity for the same weights
    with user_error(message):
        make(model=fcsd.convert(fcsd.unconvert(model), "last:1"))
    trainer = make(model=str(tmp_path / "trained"), teacher=str(tmp_path / "original"))
    teacher: Any = trainer.teacher
    assert same_tensors(teacher.model.state_dict(), original.state_dict())
    make(model=str(tmp_path / "trained"), objective="sft")  # has no teacher

    calibrated = fcsd.convert(copy.deepcopy(original), "all")
    fcsd.calibrate(calibrated, original, torch.arange(3, 259).repeat(8, 1))
    with user_error("FarSkipQwen2MoeForCausalLM was calibrated already"):
        make(model=calibrated)


def test_rows_longer_than_the_positions_of_a_model_give_a_warning_or_are_refused(
    make: Callable[..., FCSDTrainer],
    base_checkpoint: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    text = "max_length 256: rows are longer than the 128 positions of"
    for model in (None, str(base_checkpoint)):
        capfd.readouterr()
        make(max_length=128, **({"model": model, "layers": "all"} if model else {}))
        assert "positions" not in capfd.readouterr().err
        rows = [{"text": "1 + 1 is 2. " * 200}] * 4
        make(
            max_length=256,
            train_dataset=rows,
            **({"model": model, "layers": "all"} if model else {}),
        )
        assert (
            f"{text} {model or 'FarSkipQwen2MoeForCausalLM'}" in capfd.readouterr().err
        )

    table = GPT2LMHeadModel(
        GPT2Config(vocab_size=300, n_positions=16, n_embd=16, n_layer=1, n_head=2)
    )
    table.save_pretrained(tmp_path / "table")
    message = (
        "max_length 32: rows are longer than the 16 positions of .*, which are a table"
        " of that length"
    )
    for teacher in (table, str(tmp_path / "table")):
        with user_error(
            rf"{message} \(transformer\.wpe\.weight\); set max_length to 16 or less"
        ):
            make(teacher=teacher)


def test_a_regular_model_that_was_trained_is_an_original(
    make: Callable[..., FCSDTrainer], original: Any
) -> None:
    regular = make(
        model=copy.deepcopy(original), layers="none", objective="sft", max_steps=1
    )
    regular.train()
    make(model=fcsd.convert(regular.model, "all"))


@pytest.mark.breadth
def test_a_dense_model_of_the_same_vocabulary_is_a_teacher_in_memory_and_by_its_path(
    make: Callable[..., FCSDTrainer], tmp_path: Path
) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    }  # fmt: skip
    dense = LlamaForCausalLM(
        LlamaConfig(vocab_size=300, num_key_value_heads=2, **sizes)
    ).eval()
    dense.save_pretrained(tmp_path / "dense")
    heldout = datasets.Dataset.from_list(arithmetic(10))
    trainer = make(teacher=str(tmp_path / "dense"), eval_dataset=heldout, packing=False)
    student = copy.deepcopy(trainer.model).double()
    expected = reference_kl(
        student, copy.deepcopy(dense).double(), trainer.eval_dataset
    )
    assert trainer.evaluate()["eval_kl"] == pytest.approx(expected, rel=2e-5)
    trainer.train()
    in_memory = make("given", teacher=dense, eval_dataset=heldout, packing=False)
    in_memory.train()
    assert curve(in_memory) == curve(trainer)


def mean_over_tokens(
    rows: Any, loss: Callable[..., torch.Tensor], *models: Any
) -> float:
    """Return the mean over kept tokens of all rows, one example per row, of a loss of
    the models' full float64 log-probabilities and of the labels.
    """
    total, count = 0.0, 0
    for number in range(len(rows)):
        labels, ids = (
            torch.as_tensor(np.asarray(rows[number][name]), dtype=torch.int64)
            for name in ("labels", "input_ids")
        )
        keep = labels[1:] != -100
        with torch.no_grad():
            chances = [
                model(ids[None], use_cache=False).logits[0, :-1][keep].log_softmax(-1)
                for model in models
            ]
        total += float(loss(*chances, labels[1:][keep]).sum())
        count += int(keep.sum())
    return total / count


def reference_kl(student: Any, teacher: Any, rows: Any) -> float:
    def kl(own: Any, theirs: Any, labels: Any) -> torch.Tensor:
        return theirs.exp() * (theirs - own)

    return mean_over_tokens(rows, kl, student, teacher)


def test_the_held_out_kl_is_that_of_full_logits_and_training_lowers_it(
    make: Callable[..., FCSDTrainer], original: Any
) -> None:
    heldout = datasets.Dataset.from_list(arithmetic(80)[60:])
    trainer = make(eval_dataset=heldout, packing=False)
    student = copy.deepcopy(trainer.model).double()
    expected = reference_kl(
        student, copy.deepcopy(original).double(), trainer.eval_dataset
    )
    before = trainer.evaluate()
    assert before["eval_kl"] == pytest.approx(expected, rel=2e-5)
    assert before["eval_loss"] == before["eval_kl"]
    assert before["eval_kl_stderr"] > 0
    trainer.train()
    after = trainer.evaluate()
    assert after["eval_kl"] < 0.9 * before["eval_kl"]
    # rows that were not packed yet
    assert trainer.evaluate(heldout)["eval_kl"] == after["eval_kl"]
    assert trainer.model.training or not trainer.is_in_train


def test_outside_training_the_model_is_the_model_that_it_was(
    make: Callable[..., FCSDTrainer],
) -> None:
    trainer = make(max_steps=1)
    trainer.train()
    model: Any = trainer.model
    assert "forward" not in model.__dict__ and type(model.lm_head) is torch.nn.Linear
    copied = copy.deepcopy(model)
    ids = torch.arange(3, 19)[None]
    with torch.no_grad():
        torch.nn.init.zeros_(model.lm_head.weight)
        assert float(copied(ids).logits.abs().max()) > 0


@pytest.mark.breadth
def test_early_stopping_and_the_best_checkpoint_go_by_the_held_out_kl(
    make: Callable[..., FCSDTrainer],
) -> None:
    trainer = make(
        eval_dataset=datasets.Dataset.from_list(arithmetic(80)[60:]),
        callbacks=[
            EarlyStoppingCallback(
                early_stopping_patience=2, early_stopping_threshold=0.0
            )
        ],
        eval_strategy="steps",
        eval_steps=2,
        save_steps=2,
        save_total_limit=1,
        load_best_model_at_end=True,
        metric_for_best_model="kl",
        learning_rate=0.03,  # so large that it gets worse
        lr_scheduler_type="constant",
        max_steps=40,
    )
    trainer.train()
    scores = curve(trainer, "eval_kl")
    best = int(np.argmin(scores))
    assert len(scores) == best + 3 < 20 and trainer.state.global_step == 2 * len(scores)
    assert trainer.state.best_metric == min(scores)
    assert trainer.state.best_model_checkpoint is not None
    assert (
        Path(trainer.state.best_model_checkpoint).name == f"checkpoint-{2 * (best + 1)}"
    )
    assert trainer.evaluate()["eval_kl"] == pytest.approx(min(scores), rel=1e-6)


@pytest.mark.parametrize(
    ("objective", "metric", "names"),
    few(
        [
            ("sft", "ce", None),
            ("kl", "eval_a_kl", ("a", "b")),
            ("kl", "b_loss", ("a", "b")),
        ],
        1,
    ),
)
def test_of_every_loss_the_smallest_is_the_best_also_for_one_of_several_data_sets(
    make: Callable[..., FCSDTrainer],
    objective: str,
    metric: str,
    names: tuple[str, ...] | None,
) -> None:
    rows = datasets.Dataset.from_list(arithmetic(70)[60:])
    trainer = make(
        objective=objective,
        eval_dataset=rows if names is None else dict.fromkeys(names, rows),
        eval_strategy="steps",
        eval_steps=2,
        load_best_model_at_end=True,
        metric_for_best_model=metric,
    )
    trainer.train()
    name = f"eval_{metric.removeprefix('eval_')}"
    scores = curve(trainer, name)
    assert len(scores) == 3 and scores[-1] < scores[0]
    assert trainer.state.best_metric == min(scores)
    assert trainer.evaluate()[name] == pytest.approx(min(scores), rel=1e-6)


def test_the_direction_of_a_metric_is_known_or_asked_for(tmp_path: Path) -> None:
    from transformers import TrainingArguments

    def arguments(metric: str, **more: Any) -> FCSDConfig:
        return FCSDConfig(
            output_dir=str(tmp_path), metric_for_best_model=metric, **more
        )

    assert arguments("accuracy").greater_is_better is True
    assert arguments("eval_math_f1").greater_is_better is True
    assert arguments("eval_math_ce").greater_is_better is False
    assert arguments("perplexity", greater_is_better=False).greater_is_better is False
    with user_error(
        r"metric_for_best_model: 'perplexity' does not imply .* set"
        r" greater_is_better=True or False, or use"
        " eval_loss, eval_kl or eval_ce"
    ):
        arguments("perplexity")
    # Plain TrainingArguments have already guessed True.
    plain = TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, metric_for_best_model="kl"
    )
    assert FCSDConfig.of(plain).greater_is_better is False


def test_a_loss_that_is_not_measured_cannot_choose_the_best_model(
    make: Callable[..., FCSDTrainer],
) -> None:
    one = {"eval_dataset": arithmetic(10), "metric_for_best_model": "ce"}
    with user_error(
        r"'ce' is not measured in this training; allowed: eval_loss, eval_kl$"
    ):
        make(**one)
    several = one | {
        "eval_dataset": {"a": arithmetic(10)},
        "metric_for_best_model": "kl",
    }
    with user_error(r"'kl' is not measured .*; allowed: eval_a_loss, eval_a_kl$"):
        make(**several)


def test_the_time_of_evaluations_is_left_out_of_the_throughput_once(
    make: Callable[..., FCSDTrainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    from fcsd.training import meters

    clock = [0.0]
    monkeypatch.setattr(meters.time, "perf_counter", lambda: clock[0])
    trainer = make(eval_dataset={"a": arithmetic(4), "b": arithmetic(4)}, max_steps=2)
    measure = trainer.heldout

    def slow(*args: Any, **options: Any) -> dict[str, float]:
        clock[0] += 100.0  # seconds of each data set
        return measure(*args, **options)

    trainer.heldout = slow  # type: ignore[assignment]
    trainer.meters.reset()
    trainer.meters.num_tokens = 50
    trainer.evaluate()
    clock[0] += 10.0  # seconds of training
    assert trainer.meters.tokens_per_second() == 5.0


class StopAt(TrainerCallback):
    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step >= self.step


@pytest.mark.breadth
def test_a_training_continues_to_the_weights_of_one_that_was_not_interrupted(
    make: Callable[..., FCSDTrainer],
) -> None:
    whole = make("whole")
    whole.train()
    # the newest checkpoint is that of step 4
    make("cut", callbacks=[StopAt(5)]).train()
    rest = make("cut")
    rest.train(resume_from_checkpoint=True)
    assert same_tensors(weights(rest), weights(whole)) and curve(rest) == curve(whole)
    done = make("cut")
    done.train(resume_from_checkpoint=True)  # there is nothing left to do
    assert same_tensors(weights(done), weights(whole)) and done.state.global_step == 6


class Halving(TrainerCallback, ExportableState):
    """Halve the learning rate in every third step that this object has seen."""

    def __init__(self, factor: float = 0.5):
        self.factor, self.seen = factor, 0

    def on_step_begin(self, *rest: Any, optimizer: Any, **more: Any) -> None:
        self.seen += 1
        if self.seen % 3 == 0:
            for group in optimizer.param_groups:
                group["lr"] *= self.factor

    def state(self) -> dict[str, Any]:
        return {"args": {"factor": self.factor}, "attributes": {"seen": self.seen}}


def test_callbacks_continue_with_the_state_that_they_had_in_the_checkpoint(
    make: Callable[..., FCSDTrainer],
) -> None:
    def callbacks() -> list[TrainerCallback]:
        return [Halving(), Halving(0.9)]

    settings = {"save_steps": 1, "lr_scheduler_type": "constant"}
    whole = make("whole", callbacks=callbacks(), **settings)
    whole.train()
    given = callbacks()
    rest = make("rest", callbacks=given, **settings)
    order = [type(one) for one in rest.callback_handler.callbacks]
    folder = Path(str(whole.args.output_dir))
    rest.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    assert same_tensors(weights(rest), weights(whole))
    # They are the caller's own objects, in the order in which they were given.
    assert [one.seen for one in given] == [6, 6]
    assert [type(one) for one in rest.callback_handler.callbacks] == order
    # One that the training was not begun with begins anew.
    plain = make("plain", **settings)
    plain.train()
    late = Halving()
    rest = make("plain", callbacks=[late], **settings)
    checkpoint = Path(str(plain.args.output_dir)) / "checkpoint-2"
    rest.train(resume_from_checkpoint=str(checkpoint))
    assert late.seen == 4


@pytest.mark.parametrize("patience", few([3, 4], 1))
def test_early_stopping_counts_on_from_the_checkpoint_and_ends_in_the_same_step(
    make: Callable[..., FCSDTrainer], patience: int
) -> None:
    def stopping(folder: str, patience: int = 3) -> FCSDTrainer:
        return make(
            folder,
            # no evaluation is better than the first one by as much as this
            callbacks=[EarlyStoppingCallback(patience, early_stopping_threshold=9.0)],
            eval_dataset=arithmetic(70)[60:],
            eval_strategy="steps",
            eval_steps=1,
            save_steps=1,
            max_steps=9,
            load_best_model_at_end=True,
            metric_for_best_model="kl",
        )

    whole = stopping("whole")
    whole.train()
    folder = Path(str(whole.args.output_dir))
    assert whole.state.global_step == 4
    # 2: the counter is at 1; 4: nothing is left to do, unless the patience is greater.
    for step in (2, 4):
        rest = stopping("rest", patience)
        rest.train(resume_from_checkpoint=str(folder / f"checkpoint-{step}"))
        assert rest.state.global_step == patience + 1
        if patience == 3:
            assert same_tensors(weights(rest), weights(whole))


def test_a_training_that_is_complete_is_left_with_its_best_weights(
    make: Callable[..., FCSDTrainer],
) -> None:
    def trainer() -> FCSDTrainer:
        return make(
            eval_dataset=arithmetic(70)[60:],
            eval_strategy="steps",
            eval_steps=2,
            load_best_model_at_end=True,
            metric_for_best_model="kl",
            greater_is_better=True,  # so that the best weights are not the last ones
        )

    whole = trainer()
    whole.train()
    assert whole.state.best_global_step == 2
    done = trainer()
    done.train(resume_from_checkpoint=True)
    assert same_tensors(weights(done), weights(whole))


@pytest.mark.breadth
def test_workers_of_a_fork_server_read_the_rows_of_one_process(
    make: Callable[..., FCSDTrainer],
) -> None:
    """A server's workers get the trainer's hooks as pickles, and are not its children."""
    alone = make("alone", save_strategy="no")
    alone.train()
    served = make(
        "served",
        save_strategy="no",
        dataloader_num_workers=1,
        dataloader_multiprocessing_context="forkserver",
    )
    served.train()
    assert same_tensors(weights(served), weights(alone))


def test_training_again_in_the_same_folder_writes_its_own_checkpoints(
    make: Callable[..., FCSDTrainer],
) -> None:
    make("run").train()
    other = make("run", learning_rate=1e-2)
    other.train()
    rest = make("run", learning_rate=1e-2)
    rest.train(
        resume_from_checkpoint=str(Path(str(other.args.output_dir)) / "checkpoint-4")
    )
    assert same_tensors(weights(rest), weights(other))


def test_epochs_callbacks_and_an_optimiser_of_ones_own_are_transformers(
    make: Callable[..., FCSDTrainer],
) -> None:
    seen: list[str] = []

    class Look(TrainerCallback):
        def on_epoch_end(
            self, args: Any, state: Any, control: Any, **kwargs: Any
        ) -> None:
            seen.append(f"epoch {state.epoch:g}")

        def on_log(
            self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any
        ) -> None:
            if "kl" in logs:
                seen.append("kl")

    trainer = make(
        max_steps=-1,
        num_train_epochs=2,
        save_strategy="epoch",
        logging_strategy="epoch",
        callbacks=[Look()],
    )
    model: Any = trainer.model
    moved = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trainer.optimizer = moved
    trainer.train()
    steps = len(trainer.train_dataset) // 4  # type: ignore[arg-type]
    assert trainer.state.global_step == 2 * steps
    # the last step is recorded in any case
    assert seen == ["epoch 1", "kl", "kl", "epoch 2"]
    folder = Path(str(trainer.args.output_dir))
    assert sorted(path.name for path in folder.glob("checkpoint-*")) == sorted(
        f"checkpoint-{n * steps}" for n in (1, 2)
    )


def test_an_optimiser_whose_states_a_checkpoint_would_lose_is_refused(
    make: Callable[..., FCSDTrainer],
) -> None:
    trainer = make(optim="adafactor")
    with user_error(
        "Adafactor: its state 'exp_avg_sq_row' does not have the shape of its parameter"
    ):
        trainer.train()
    assert trainer.state.global_step == 1  # no work is lost
    trainer = make(optim="adafactor", save_strategy="no")
    trainer.train()
    assert trainer.state.global_step == 6


def test_metrics_are_computed_from_the_logits_of_the_model(
    make: Callable[..., FCSDTrainer],
) -> None:
    def agreement(evaluation: Any) -> dict[str, float]:
        kept = evaluation.label_ids[:, 1:] != -100
        right = evaluation.predictions[:, :-1].argmax(-1) == evaluation.label_ids[:, 1:]
        return {"accuracy": float(right[kept].mean())}

    heldout = datasets.Dataset.from_list(arithmetic(10))
    trainer = make(eval_dataset=heldout, compute_metrics=agreement, packing=False)
    assert trainer.evaluate().keys() >= {"eval_accuracy", "eval_kl", "eval_loss"}
    predicted = trainer.predict(heldout)
    assert predicted.metrics.keys() >= {"test_accuracy", "test_kl"}
    rows: Any = trainer.eval_dataset
    ids = torch.stack(
        [torch.as_tensor(row["input_ids"], dtype=torch.int64) for row in rows]
    )
    model: Any = trainer.model
    with torch.no_grad():
        logits = model.eval()(ids, use_cache=False).logits
    kept = np.stack([row["labels"] for row in rows]) != -100
    assert predicted.predictions.shape == logits.shape
    np.testing.assert_allclose(
        predicted.predictions[kept], logits.numpy()[kept], atol=1e-4
    )


def test_a_baseline_has_no_teacher_and_its_held_out_loss_is_the_cross_entropy(
    make: Callable[..., FCSDTrainer],
) -> None:
    trainer = make(
        objective="sft",
        eval_dataset=datasets.Dataset.from_list(arithmetic(10)),
        packing=False,
    )
    assert trainer.teacher is None
    metrics = trainer.evaluate()
    model = copy.deepcopy(trainer.model).double()

    def cross_entropy(own: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return -own.gather(1, labels[:, None])

    expected = mean_over_tokens(trainer.eval_dataset, cross_entropy, model)
    assert (
        metrics["eval_loss"] == metrics["eval_ce"] == pytest.approx(expected, rel=2e-5)
    )
    assert "eval_kl" not in metrics
    trainer.train()
    assert "ce" in trainer.state.log_history[0]
    assert "kl" not in trainer.state.log_history[0]


def test_a_stream_and_tokens_train_as_the_same_examples_in_memory(
    make: Callable[..., FCSDTrainer], tokenizer: Any
) -> None:
    rows = [{"text": f"{n} + {n % 7} is {n + n % 7}"} for n in range(60)]
    text = make("text", train_dataset=datasets.Dataset.from_list(rows))
    text.train()
    tokens = [
        {"input_ids": [*tokenizer(row["text"])["input_ids"], tokenizer.eos_token_id]}
        for row in rows
    ]
    tokenised = make("tokens", train_dataset=datasets.Dataset.from_list(tokens))
    tokenised.train()
    assert same_tensors(weights(text), weights(tokenised))
    stream = make(
        "stream", train_dataset=datasets.Dataset.from_list(rows).to_iterable_dataset()
    )
    stream.train()
    assert stream.state.global_step == 6 and np.isfinite(curve(stream)).all()


LOADS = """
import sys
sys.modules["fcsd"] = None  # importing it fails from here on
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
ids = torch.arange(3, 19)[None]
with torch.no_grad():
    logits = model(ids, use_cache=False).logits
head = model.lm_head.weight.detach()
result = {"logits": logits, "head": head, "dtype": str(model.dtype), "length": len(tokenizer)}
torch.save(result, sys.argv[2])
"""


@pytest.mark.breadth
def test_what_is_saved_loads_without_fcsd_in_the_dtype_that_the_model_came_in(
    make: Callable[..., FCSDTrainer], original: Any, tmp_path: Path
) -> None:
    model = copy.deepcopy(original).bfloat16()
    trainer = make(
        model=model, layers="last:1", ema_decay=0.5, eval_dataset=arithmetic(4)
    )
    assert next(model.parameters()).dtype == torch.float32
    assert trainer.teacher is not None
    trainer.train()
    before = weights(trainer)
    trainer.save_model(str(tmp_path / "left"))
    assert same_tensors(weights(trainer), before) and model.config.farskip[
        "layers"
    ] == [1]
    modes = {file.name: file.stat().st_mode for file in (tmp_path / "left").iterdir()}
    # safetensors itself leaves 0600
    assert modes["model.safetensors"] == modes["config.json"]
    result = subprocess.run(
        [sys.executable, "-c", LOADS, str(tmp_path / "left"), str(tmp_path / "result.pt")],
        capture_output=True, text=True, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    loaded = torch.load(tmp_path / "result.pt")
    assert loaded["dtype"] == "torch.bfloat16" and loaded["length"] == 300
    with torch.no_grad():
        expected = (
            copy.deepcopy(model)
            .bfloat16()
            .eval()(torch.arange(3, 19)[None], use_cache=False)
            .logits
        )
    # other kernels, in bfloat16
    torch.testing.assert_close(loaded["logits"], expected, atol=0.3, rtol=0)
    assert torch.equal(loaded["head"], model.lm_head.weight.bfloat16())


@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
@pytest.mark.parametrize("strategy", ["end", "checkpoint"])
def test_a_push_leaves_a_repository_that_loads(
    hub: Hub, make: Callable[..., FCSDTrainer], tmp_path: Path, strategy: str
) -> None:
    during = strategy != "end"
    trainer = make(
        "pushed",
        max_steps=2,
        hub_model_id="me/tiny",
        hub_strategy=strategy,
        push_to_hub=during,
    )
    trainer.train()
    files = hub.repos["me/tiny"].files if during else {}
    if during:  # pushed with each checkpoint, from which training can continue
        assert {
            "model.safetensors",
            "modeling_farskip.py",
            "last-checkpoint/trainer_state.json",
        } <= files.keys()
    trainer.push_to_hub()
    files = hub.repos["me/tiny"].files
    assert {
        "config.json", "model.safetensors", "modeling_farskip.py", "tokenizer.json", "README.md",
    } <= files.keys()  # fmt: skip
    assert not any(name.startswith("checkpoint-") for name in files)
    card = files["README.md"].decode()
    assert 'from_pretrained("me/tiny", trust_remote_code=True)' in card
    assert "- farskip" in card
    folder = hub.repos["me/tiny"].write(tmp_path / "fetched")
    loaded = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    assert same_tensors(loaded.state_dict(), trainer.model.state_dict())


def trained(rank: int, folder: str, base: str) -> tuple[list[float], float]:
    """Return the curve and the held-out KL of a training of 8 rows per step."""
    arguments = FCSDConfig(
        output_dir=folder, layers="all", max_steps=4, batch_size_tokens=256, per_device_train_batch_size=2,
        max_length=32, learning_rate=1e-3, logging_steps=1, save_steps=2, seed=0, disable_tqdm=True,
    )  # fmt: skip
    rows = arithmetic(70)
    trainer = FCSDTrainer(
        model=base, args=arguments, train_dataset=rows[:60], eval_dataset=rows[60:]
    )
    trainer.train()
    trainer.save_model()
    return curve(trainer), trainer.evaluate()["eval_kl"]


@pytest.mark.breadth
@pytest.mark.parametrize("engine", few(["fsdp2", "ddp"], 1))
def test_two_ranks_train_what_one_process_trains(
    base_checkpoint: Path, tmp_path: Path, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, kl = trained(0, str(tmp_path / "one"), str(base_checkpoint))
    if engine == "fsdp2":
        from tests.parallel.test_engines import environment

        for name, value in environment(ROOT / "configs" / "cpu_2_fsdp2.yaml").items():
            monkeypatch.setenv(name, value)
    ranks = run_ranks(
        trained, 2, str(tmp_path / "two"), str(base_checkpoint), timeout_s=240
    )
    for two, heldout in ranks:
        assert two == pytest.approx(one, rel=1e-3)
        assert heldout == pytest.approx(kl, rel=1e-3)
    one_weights, two_weights = (
        load_file(tmp_path / name / "model.safetensors") for name in ("one", "two")
    )
    for name, value in one_weights.items():
        torch.testing.assert_close(value, two_weights[name], atol=1e-4, rtol=1e-2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_dataset": [{"story": "x", "other": "y"}]}, r"data set train_dataset: no column 'messages', .*it has"),
        ({"train_dataset": []}, "data set train_dataset: is empty"),
        ({"train_dataset": {"train": [], "test": []}}, "holds several \\('train', 'test'\\); give one of them"),
        ({"columns": {"text": "words"}}, "no column 'words'; it has 'messages'; name the right ones under `columns`"),
        ({"batch_size_tokens": 100}, r"^batch_size_tokens: 100 is not a multiple of 64 \(per_.* 2 x max_length 32 x"),
        ({"train_dataset": arithmetic(3)},
         "has 3 rows of 32 tokens, but one batch of 128 tokens needs 4; use more data"),
        ({"train_dataset": arithmetic(40), "max_length": 2}, "not one of 40 examples has a response token"),
        ({"objective": "kl2"}, "FCSDConfig: objective: must be 'kl', .* or 'ce', got 'kl2'"),
        ({"objective": "kl", "jsd_beta": 0.3}, "FCSDConfig: jsd_beta: no meaning for objective 'kl', only for jsd"),
        ({"temperature": 0.0}, "FCSDConfig: temperature: must be greater than 0, got 0.0"),
        ({"temperature": math.inf}, "FCSDConfig: temperature: must be a finite number"),
        ({"objective": "jsd", "jsd_beta": 1.0}, "FCSDConfig: jsd_beta: must be less than 1, got 1.0"),
        ({"learning_rate": 0.0}, "FCSDConfig: learning_rate: must be greater than 0, got 0"),
        ({"layers": "lasst:1"}, "layers: 'lasst:1' is not a selection; allowed: all, moe, none, first:N"),
        ({"layers": "first:1"}, "is already converted with layers \\[0, 1\\].*, but layers \\[0\\].* was requested"),
        ({"loss_on": "answer"}, "FCSDConfig: loss_on: must be 'response' or 'all', got 'answer'"),
        ({"safety": {"max_skipped": 1}}, "safety.max_skipped: unknown key; did you mean 'max_skipped_steps'"),
        ({"model_init_kwargs": {"dtipe": "bfloat16"}, "model": "BASE"}, "dtipe: unknown key; did you mean 'dtype'"),
        ({"max_steps": "ten"}, "FCSDConfig: max_steps: a number is needed, got 'ten'"),
        ({"lr_scheduler_type": "x"}, "FCSDConfig: transformers refuses it: x is not a valid SchedulerType, please"),
        ({"model_init_kwargs": 3}, "FCSDConfig: model_init_kwargs: an int; a dict is needed"),
        ({"model": None}, "model: None; a transformers model or the path of a checkpoint is needed"),
        ({"model": ""}, "'': is not a path; a checkpoint is a folder with"),
        ({"model": (1, 2)}, "model: a tuple; .*; fcsd.load gives a model and its tokenizer"),
        ({"teacher": 3}, "teacher: an int; a transformers model, the path of one, or a Teacher is needed"),
        ({"teacher": (1, 2)}, r"teacher: a tuple; a transformers model \(fcsd.load gives a model and its"),
        ({"processing_class": 3}, "processing_class: an int; a tokenizer or its path is needed"),
        ({"processing_class": "nowhere"}, "nowhere: no such folder"),
        ({"processing_class": SimpleNamespace(tokenizer=1)}, r"a SimpleNamespace; a tokenizer \(its `.tok"),
        ({"callbacks": TrainerCallback()}, "callbacks: a TrainerCallback; a list of callbacks is needed"),
        ({"callbacks": [3]}, "callbacks: an int; a TrainerCallback of transformers is needed"),
        ({"optimizers": 3}, r"optimizers: an int; give a pair \(optimizer, scheduler\), with None for one that"),
        ({"optimizers": (None, torch.optim.lr_scheduler.ConstantLR(other_optimizer()))}, "a schedule alone steers"),
        ({"optim": "adamw_bnb_8bit"}, "^FCSDConfig: optim: You need to install `bitsandbytes`"),
        ({"eval_strategy": "epoch"}, "eval_dataset: is required, because eval_strategy or eval_on_start"),
        ({"eval_dataset": {}}, "eval_dataset: a dict without data sets"),
        ({"compute_metrics": "acc"}, "compute_metrics: a str; a function of logits and labels is needed"),
        ({"train_dataset": ["a", "b"]}, "data set train_dataset, row 1: a str; an example is a mapping"),
        ({"train_dataset": [{"input_ids": [5, 999]}]}, "row 1: token id 999 at position 1 is.*set on_bad_row='skip'"),
        ({"train_dataset": [{"input_ids": [5] * 32, "position_ids": [*range(32)], "labels": [999] * 32}] * 8},
         "data set train_dataset, row 1: each label must be the token of its own position, or -100"),
        ({"eval_dataset": {"one": "a"}}, "data set eval_dataset 'one': a str; a datasets.Dataset"),
        ({"eval_dataset": [{"input_ids": [5, 999]}]}, "eval_dataset, row 1: token id 999 at position 1 is not in"),
        ({"columns": "body"}, "columns: a str, 'body'; give a mapping from meanings to column names, for example"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(
    make: Callable[..., FCSDTrainer],
    base_checkpoint: Path,
    changes: dict[str, Any],
    message: str,
) -> None:
    if changes.get("model") == "BASE":
        changes = changes | {"model": str(base_checkpoint)}
    with user_error(message) as caught:
        make(**changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            {"max_steps": 1},
            r"args: a dict; an FCSDConfig is needed; write FCSDConfig\(\*\*args\)",
        ),
        ("settings.yaml", "args: a str; an FCSDConfig is needed"),
        (FCSDConfig, "args: the class FCSDConfig; an FCSDConfig is needed"),
        (
            Seq2SeqTrainingArguments(use_cpu=True),
            r"args: a Seq2SeqTrainingArguments, with arguments that FCSDTrainer does"
            r" not have \(sortish_sampler, .*, "
            r"…\); give an FCSDConfig, or a TrainingArguments of transformers",
        ),
    ],
    ids=["dict", "text", "class", "other"],
)
def test_arguments_of_another_trainer_are_refused_with_what_is_needed(
    args: Any, message: str
) -> None:
    with user_error(message):
        FCSDTrainer("model", args)


def test_what_is_missing_or_given_without_a_name_is_said(tmp_path: Path) -> None:
    with user_error("FCSDTrainer: missing a required argument: 'model'"):
        FCSDTrainer()  # type: ignore[call-arg]
    with user_error("too many positional arguments; pass arguments by name"):
        FCSDTrainer("model", FCSDConfig(str(tmp_path), use_cpu=True), None, [])  # type: ignore[misc]


def test_data_of_an_evaluation_are_checked_as_those_of_the_constructor(
    make: Callable[..., FCSDTrainer],
) -> None:
    trainer = make(eval_dataset={"one": arithmetic(8)})
    assert trainer.evaluate("one")["eval_kl"] > 0
    for measure, name in (
        (trainer.evaluate, "eval_dataset"),
        (trainer.predict, "test_dataset"),
    ):
        with user_error(f"data set {name}: a str; a datasets.Dataset"):
            measure("rows.jsonl")
        with user_error(f"data set {name}, row 1: a str; an example is a mapping"):
            measure(["a"])
    with user_error(r"test_dataset: holds several \('one'\); give"):
        trainer.predict({"one": arithmetic(8)})
    with user_error("test_dataset: None; give the data to measure"):
        trainer.predict(None)
    with user_error("eval_dataset: None; give the data to measure"):
        make().evaluate()


def test_data_that_are_set_later_are_measured_but_not_trained_on(
    make: Callable[..., FCSDTrainer],
) -> None:
    """The order of rows and the record of a training are made with the trainer."""
    trainer, other = (
        make(eval_dataset=arithmetic(8)),
        make(eval_dataset=arithmetic(9)[3:]),
    )
    trainer.eval_dataset = arithmetic(9)[3:]
    assert trainer.evaluate()["eval_kl"] == other.evaluate()["eval_kl"]
    trainer.train_dataset = other.train_dataset
    with user_error("train_dataset: was replaced after"):
        trainer.train()


@pytest.mark.parametrize(
    ("place", "reason"),
    [("afile", "afile is not a folder"), ("/proc/x", "/proc is not writable")],
)
def test_a_folder_that_cannot_be_made_is_refused_before_the_training_and_when_it_is_saved(
    make: Callable[..., FCSDTrainer], place: str, reason: str, tmp_path: Path
) -> None:
    (tmp_path / "afile").write_text("x")
    with user_error(f"{place}: cannot be created, .*{reason}"):
        make(place)
    with user_error(f"{place}: cannot be created, .*{reason}"):
        make().save_model(str(tmp_path / place))


def test_numbers_may_be_given_as_text(tmp_path: Path) -> None:
    given = FCSDConfig(
        str(tmp_path), max_steps="10", learning_rate="2e-5", use_cpu=True
    )  # type: ignore[arg-type]
    assert (given.max_steps, given.learning_rate) == (10, 2e-5)


def test_the_tokenizer_may_be_a_path(
    make: Callable[..., FCSDTrainer], base_checkpoint: Path, tokenizer: Any
) -> None:
    for path in (base_checkpoint, str(base_checkpoint)):
        trainer = make(processing_class=path)
        assert trainer.processing_class.get_vocab() == tokenizer.get_vocab()


def test_the_examples_that_were_left_out_are_printed(
    make: Callable[..., FCSDTrainer],
) -> None:
    bad = {"messages": [{"role": "user", "content": None}]}
    trainer = make(on_bad_row="skip", train_dataset=[*arithmetic(40), bad])
    first, second = repr(trainer.bad_rows).splitlines()
    assert first == "1 of 41 examples left out"
    assert second.startswith(
        "data set train_dataset, row 41: column 'messages': a message needs"
    )


def test_mistakes_of_models_tokenizers_and_checkpoints_are_refused(
    make: Callable[..., FCSDTrainer], original: Any, tmp_path: Path
) -> None:
    plain = tiny_tokenizer(300, chat_template=False)
    nameless = copy.deepcopy(plain)
    nameless.name_or_path = ""
    with user_error(
        rf"tokenizer {type(plain).__name__}: no chat template, .* under"
        r" columns=\{'text': …\}"
    ):
        make(processing_class=nameless)
    with user_error(
        "no chat template, needed for prompts and messages; use the tokenizer of an"
    ):
        make(processing_class=plain)
    model = copy.deepcopy(original)
    convert_model(model, Connectivity("all"))
    with user_error("teacher: is the model in training; leave it out"):
        make(model=model, teacher=model)
    with user_error("processing_class: is required, because the model"):
        make(model=model, processing_class=None)
    trainer = make("empty")
    with user_error(
        "no checkpoint to continue from; leave resume_from_checkpoint out to start"
    ):
        trainer.train(resume_from_checkpoint=True)
    (tmp_path / "checkpoint-1").mkdir()
    with user_error("cannot be resumed"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


# peft 0.21 reads a property that transformers 5.23 deprecates
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
def test_adapters_and_weights_that_cannot_be_trained_or_compared_are_refused(
    make: Callable[..., FCSDTrainer], original: Any
) -> None:
    import peft
    from peft.tuners.tuners_utils import BaseTunerLayer

    lora = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    # What `add_adapter` calls; in transformers 5.24.0 it needs a peft that is not out.
    adapted = peft.inject_adapter_in_model(copy.deepcopy(lora), copy.deepcopy(original))
    rows = torch.arange(3, 259).view(8, 32)
    for is_deleted in (False, True):
        if is_deleted:
            for module in adapted.modules():
                if isinstance(module, BaseTunerLayer):
                    module.delete_adapter("default")
        reason = r"has adapters of its own; give a model without"
        with user_error(f"model: .* {reason}"):
            make(model=adapted, layers="all")
        with user_error(f"student: .* {reason}"):
            student = fcsd.convert(copy.deepcopy(adapted))
            fcsd.calibrate(student, original, rows)
    wrapped: Any = peft.get_peft_model(copy.deepcopy(original), lora)
    with user_error(r"teacher: a PeftModel; .*get_base_model\(\)"):
        make(teacher=wrapped)
    base, merged = wrapped.get_base_model(), copy.deepcopy(wrapped).merge_and_unload()
    heldout = {"eval_dataset": arithmetic(8)}
    kl, merged_kl = (
        make(teacher=copy.deepcopy(teacher), **heldout).evaluate()["eval_kl"]
        for teacher in (base, merged)
    )
    assert kl == pytest.approx(merged_kl, rel=1e-5)
    with user_error(r"no parameter of .* merge_and_unload\(\); call"):
        make(model=merged, layers="all")
    with user_error(r"teacher: .* is not in the memory of a device"):
        make(teacher=copy.deepcopy(original).to("meta"))
    with user_error("teacher: has weights in float64"):
        make(teacher=copy.deepcopy(original).double())


def other_names() -> list[str]:
    from fcsd.training.python_words import OTHER_NAMES

    return list(OTHER_NAMES)


@pytest.mark.parametrize("name", other_names())
def test_names_of_other_libraries_are_answered_with_ours(name: str) -> None:
    from fcsd.training.python_words import OTHER_NAMES

    for cls in (FCSDConfig, FCSDTrainer):
        with pytest.raises(UserError) as caught:
            cls(**{name: object()})
        supported = not OTHER_NAMES[name].startswith("not supported")
        assert str(caught.value) == (
            f"{cls.__name__}: {name}: {'use ' if supported else ''}{OTHER_NAMES[name]}"
        )
    page = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    assert f"| `{name}` | {OTHER_NAMES[name]} |" in page
    arguments = re.findall(r"(FCSD\w+)\((\w+)=", OTHER_NAMES[name])
    for door, argument in arguments:
        assert argument in inspect.signature(getattr(fcsd, door)).parameters


@pytest.mark.parametrize(
    ("cls", "name", "advice"),
    [
        (FCSDConfig, "lr", "did you mean 'learning_rate'?"),
        (FCSDTrainer, "lr", "give `FCSDConfig(learning_rate=…)`"),
        (FCSDTrainer, "max_steps", "give `FCSDConfig(max_steps=…)`"),
        (FCSDConfig, "teacher", "give `FCSDTrainer(teacher=…)`"),
        (FCSDConfig, "log_every", "did you mean 'logging_steps'?"),
    ],
)
def test_a_guessed_name_and_one_given_to_the_wrong_class_are_answered(
    cls: Any, name: str, advice: str
) -> None:
    from fcsd.training.python_words import GUESSED_NAMES

    with pytest.raises(UserError) as caught:
        cls(**{name: object()})
    assert str(caught.value) == f"{cls.__name__}: {name}: no such argument; {advice}"
    arguments = inspect.signature(FCSDConfig).parameters
    assert set(GUESSED_NAMES.values()) <= set(arguments)
    assert not set(GUESSED_NAMES) & set(arguments)


def test_errors_of_a_training_name_arguments_and_no_keys_of_a_recipe(
    make: Callable[..., FCSDTrainer],
) -> None:
    with user_error(r"^eval_dataset: no row has a token to predict"):
        row = {
            "input_ids": [5] * 32,
            "position_ids": [*range(32)],
            "labels": [-100] * 32,
        }
        make(eval_dataset=[row]).evaluate()


def test_arguments_of_transformers_are_taken_for_ones_own(
    original: Any, tokenizer: Any, tmp_path: Path
) -> None:
    from transformers import TrainingArguments

    model = copy.deepcopy(original)
    convert_model(model, Connectivity("all"))
    settings: dict[str, Any] = {
        "learning_rate": 3e-4,
        "use_cpu": True,
        "disable_tqdm": True,
    }
    arguments = TrainingArguments(
        str(tmp_path), per_device_train_batch_size=1, **settings
    )
    trainer = FCSDTrainer(
        model, arguments, train_dataset=arithmetic(40), processing_class=tokenizer
    )
    assert isinstance(trainer.args, FCSDConfig) and trainer.args.learning_rate == 3e-4
    assert trainer.args.max_length == 4096 and fcsd.FCSDTrainer is FCSDTrainer
    unconvert_model(model)


# ---- the tokenizers of model and teacher


def swapped(folder: Path, *, add: bool = False) -> Any:
    """Write the tokenizer of 300 tokens with two ids swapped, or with one more token in
    the place of an unused one.
    """
    tiny_tokenizer(300).save_pretrained(folder)
    file = folder / "tokenizer.json"
    with edited_json(file) as contents:
        names = contents["model"]["vocab"]
        if add:
            names["<mine>"] = names.pop("<unused22>")
        else:
            names["<unused22>"], names["<unused23>"] = (
                names["<unused23>"],
                names["<unused22>"],
            )
    return AutoTokenizer.from_pretrained(folder)


OTHER_TOKENIZER = r"its tokenizer is not the student's: 2 tokens have other ids .*"


def test_a_teacher_with_another_tokenizer_is_refused_however_it_is_given(
    make: Callable[..., FCSDTrainer], original: Any, tmp_path: Path
) -> None:
    original.save_pretrained(tmp_path / "teacher")
    make("none", teacher=str(tmp_path / "teacher"))  # it has no tokenizer
    swapped(tmp_path / "teacher")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "teacher")
    for teacher in (str(tmp_path / "teacher"), tmp_path / "teacher", loaded):
        with user_error(
            rf"^teacher: {OTHER_TOKENIZER}'<unused22>' .* a teacher with the same"
        ):
            make(teacher=teacher)
    loaded.config._name_or_path = ""
    make(teacher=loaded)  # what it was loaded from is not known
    # A token that the student's lacks: a recipe refuses it, too. A model in memory may
    # have got it after it was loaded.
    swapped(tmp_path / "teacher", add=True)
    with user_error(r"^teacher: .* \(\d+ in .*'<unused22>'|missing"):
        make(teacher=str(tmp_path / "teacher"))
    make(teacher=AutoModelForCausalLM.from_pretrained(tmp_path / "teacher"))


def test_the_tokenizer_that_is_given_beside_a_model_is_that_of_the_model(
    make: Callable[..., FCSDTrainer], original: Any, tmp_path: Path
) -> None:
    original.save_pretrained(tmp_path / "model")
    tiny_tokenizer(300).save_pretrained(tmp_path / "model")
    other = swapped(tmp_path / "other")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    for model in (str(tmp_path / "model"), loaded):
        with user_error(rf"^model: {OTHER_TOKENIZER} give the tokenizer of the model"):
            make(model=model, processing_class=other, layers="all")
    added = swapped(tmp_path / "added", add=True)
    make(model=str(tmp_path / "model"), processing_class=added, layers="all")


def test_a_teacher_that_is_the_student_itself_teaches_nothing_and_is_refused(
    make: Callable[..., FCSDTrainer],
    original: Any,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    original.save_pretrained(tmp_path / "base")
    tiny_tokenizer(300).save_pretrained(tmp_path / "base")
    fcsd.convert_checkpoint(tmp_path / "base", tmp_path / "far", layers="all")
    fcsd.convert_checkpoint(tmp_path / "base", tmp_path / "half", layers="last:1")
    loaded, _ = fcsd.load(tmp_path / "far")
    nothing = (
        r"^teacher: has the weights of the student and its connectivity \(layers"
        r" \[0, 1\], .*\), so it would teach nothing; give the original$"
    )
    for model, settings in (
        (str(tmp_path / "far"), {}),
        (str(tmp_path / "base"), {"layers": "all"}),
        (copy.deepcopy(loaded), {}),
    ):
        for teacher in (str(tmp_path / "far"), loaded):
            with user_error(nothing):
                make(model=model, teacher=teacher, **settings)
    capfd.readouterr()
    # One that differs is the caller's choice, of which a line tells.
    make(model=str(tmp_path / "far"), teacher=str(tmp_path / "half"))
    error = capfd.readouterr().err
    assert re.search(
        r"^teacher: is a FarSkip model of which no training is recorded; .* give its"
        r" original, \S+base, because",
        error,
        re.MULTILINE,
    )
    half, _ = fcsd.load(tmp_path / "half")
    half.config.farskip_trained = True
    make(model=str(tmp_path / "far"), teacher=half)
    make(model=str(tmp_path / "far"), teacher=str(tmp_path / "base"))
    assert "no training is recorded" not in capfd.readouterr().err


# ---- what is known before data are read


def unread() -> Any:
    """Return training data that must not be read."""

    def read() -> Any:
        raise AssertionError("data were read")
        yield {}

    return datasets.IterableDataset.from_generator(read)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layers": None}, "(base|ForCausalLM): is not converted; set layers in FCSDConfig"),
        ({"layers": [7]}, r"layers: .*7"),
        ({"report_to": ["wandb"]}, r"^report_to: wandb is not installed; pip install 'fcsd\[wandb\]'"),
        ({"report_to": "comet_ml"}, "^report_to: .*comet"),
        ({"report_to": "nothing"}, "^report_to: nothing is not supported, only .* are supported"),
        ({"balance_bias_rate": 0.1}, "^balance_bias_rate: .* does not have a correction bias"),
        ({"vocab_size": 400}, "^vocab_size 400: must be between the 300 tokens of the tokenizer and the 300 rows"),
        ({"processing_class": 310}, "^the tokenizer has 310 tokens, the model's vocabulary only 300"),
        ({"teacher": 290}, "^the vocabularies differ: 290 tokens in the teacher, 300 in the student"),
        ({"teacher": "290"}, "^the vocabularies differ: 290 tokens in the teacher, 300 in the student"),
        ({"teacher": 290, "vocab_size": 300}, "^vocab_size 300: must be between the 300 .* and the 290 rows"),
        ({"callbacks": [EarlyStoppingCallback(2)]}, "^callbacks: EarlyStoppingCallback needs an evaluation and its"),
        ({"optimizers": (other_optimizer(), None)}, "optimizers: the optimizer has no parameter of the model in"),
        ({"metric_for_best_model": "ce", "eval_strategy": "steps"}, "metric_for_best_model: 'ce' is not measured"),
        ({"output_dir": "/dev/null/x"}, "/dev/null"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("in_memory", [False, True])
def test_what_needs_no_data_is_said_before_they_are_read(
    original: Any,
    tmp_path: Path,
    in_memory: bool,
    settings: dict[str, Any],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec",
        lambda name, *rest: None if name == "wandb" else find(name, *rest),
    )
    original.save_pretrained(tmp_path / "base")
    arguments = dict(settings)
    if "teacher" in arguments:
        rows = int(arguments["teacher"])
        teacher = tiny_model("qwen2_moe", num_hidden_layers=2, vocab_size=rows)
        arguments["teacher"] = teacher
        if isinstance(settings["teacher"], str):
            teacher.save_pretrained(tmp_path / "teacher")
            arguments["teacher"] = str(tmp_path / "teacher")
    arguments["processing_class"] = tiny_tokenizer(
        settings.get("processing_class", 300)
    )
    names = ("teacher", "processing_class", "callbacks", "optimizers")
    given = {name: arguments.pop(name) for name in names if name in arguments}
    eval_dataset = unread() if "eval_strategy" in arguments else None
    folder = arguments.pop("output_dir", str(tmp_path / "run"))
    with user_error(message) as caught:
        FCSDTrainer(
            copy.deepcopy(original) if in_memory else str(tmp_path / "base"),
            FCSDConfig(folder, **SETTINGS | {"layers": "all"} | arguments),
            train_dataset=unread(),
            eval_dataset=eval_dataset,
            **given,
        )
    assert "\n" not in str(caught.value)
