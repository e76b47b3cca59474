"""fcsd's training loop beside the one of `transformers.Trainer` that it replaces: the
same steps in the same order, and few private methods, each for a reason.
"""

import ast
import inspect
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from fcsd.api.trainer import FCSDTrainer
from fcsd.pipeline.tiny.models import tiny_tokenizer
from fcsd.training.fcsd_config import FCSDConfig
from fcsd.training.trainer import OVERRIDDEN
from tests.reference.tiny import tiny_model
from tests.support import ROOT

# fcsd's classes, without those of transformers
CLASSES = FCSDTrainer.__mro__[: FCSDTrainer.__mro__.index(Trainer)]


def private_methods(kind: type) -> set[str]:
    return {
        name
        for name, value in vars(kind).items()
        if name.startswith("_") and not name.startswith("__") and callable(value)
    }


def test_every_private_method_of_the_trainer_that_is_overridden_has_a_reason() -> None:
    own = set().union(*map(private_methods, CLASSES))
    assert own & private_methods(Trainer) == set(OVERRIDDEN)
    for method, reason in OVERRIDDEN.items():
        file, _, harm = reason.partition(": ")
        assert f"def {method}(" in (ROOT / "fcsd" / file).read_text(encoding="utf-8")
        assert len(harm.split()) > 5
    assert len(OVERRIDDEN) <= 4


def names(source: str, context: type[ast.expr_context]) -> set[str]:
    """Return the private attributes of `self` that a class's source reads or sets."""
    return {
        node.attr
        for node in ast.walk(ast.parse(textwrap.dedent(source)))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
        and isinstance(node.ctx, context)
        and node.attr.startswith("_")
    }


def test_this_release_has_what_fcsd_uses_of_the_trainers_private_parts() -> None:
    """Also `getattr` by name would fail at the first step alone, so sources are read."""
    sources = [inspect.getsource(kind) for kind in CLASSES]
    used = set().union(*(names(source, ast.Load) for source in sources))
    used -= set().union(*(names(source, ast.Store) for source in sources))
    used -= set().union(*map(private_methods, CLASSES)) - set(OVERRIDDEN)
    known = private_methods(Trainer) | names(inspect.getsource(Trainer), ast.Store)
    assert used <= known, used - known
    # What the Trainer's loop sets and its other methods read, fcsd's loop sets as well.
    theirs = inspect.getsource(Trainer._inner_training_loop)
    ours = set().union(*(names(source, ast.Store) for source in sources))
    assert names(theirs, ast.Store) <= ours


EVENTS = [
    name
    for name in vars(TrainerCallback)
    if name.startswith("on_") and name not in ("on_prediction_step", "on_log")
]


class Recorder(TrainerCallback):
    """The events of a training with step, epoch and what the control asks for."""

    def __init__(self, stops: tuple[str, int] | None = None) -> None:
        self.events: list[tuple[Any, ...]] = []
        self.stops = stops


def recorded(event: str) -> Any:
    def call(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.events.append(
            (
                event, state.global_step, state.epoch, control.should_save, control.should_evaluate,
                control.should_training_stop,
            )
        )  # fmt: skip
        if self.stops == (event, state.global_step):
            control.should_training_stop = True

    return call


for event in EVENTS:
    setattr(Recorder, event, recorded(event))


class Rows(torch.utils.data.Dataset):
    """Rows that are packed already, of one example each: the Trainer can read them, too."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.rows = torch.randint(3, 90, (count, 8), generator=generator)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = self.rows[index].numpy().astype("int32")
        positions = torch.arange(8).numpy().astype("int32")
        return {
            "input_ids": ids,
            "position_ids": positions,
            "labels": ids.astype("int64"),
        }


SETTINGS: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    # Adam would make much of the last digits of a small gradient.
    "optim": "sgd",
    "learning_rate": 0.1,
    "lr_scheduler_type": "linear",
    "logging_steps": 1,
    "disable_tqdm": True,
    "report_to": [],
    "use_cpu": True,
    "remove_unused_columns": False,
    "logging_nan_inf_filter": False,
    "seed": 3,
}


@pytest.mark.parametrize(
    ("settings", "stops"),
    [
        ({"max_steps": 7, "save_steps": 2, "eval_strategy": "steps", "eval_steps": 3}, None),
        ({"num_train_epochs": 2, "save_strategy": "epoch", "eval_strategy": "epoch", "eval_on_start": True}, None),
        ({"max_steps": 5, "save_strategy": "no"}, ("on_step_end", 2)),
        ({"max_steps": 5, "save_strategy": "no"}, ("on_substep_end", 2)),
        ({"max_steps": 5, "save_strategy": "no", "max_grad_norm": 0.01}, ("on_step_begin", 2)),
    ],
)  # fmt: skip
def test_callbacks_loss_and_rate_are_those_of_the_trainer(
    settings: dict[str, Any], stops: tuple[str, int] | None, tmp_path: Path
) -> None:
    """The reference is the library's own trainer on the same rows, with cross-entropy."""
    runs = {}
    for name in ("reference", "fcsd"):
        model = tiny_model("qwen2_moe", num_hidden_layers=2, vocab_size=99)
        recorder = Recorder(stops)
        chosen = SETTINGS | settings | {"output_dir": str(tmp_path / name)}
        given: dict[str, Any] = {
            "model": model, "train_dataset": Rows(12), "eval_dataset": Rows(3), "callbacks": [recorder],
        }  # fmt: skip
        trainer: Trainer
        if name == "reference":
            model.config.output_router_logits = False
            arguments = TrainingArguments(**chosen, prediction_loss_only=True)
            trainer = Trainer(args=arguments, **given)
        else:
            config = FCSDConfig(**chosen, objective="sft", layers="none", max_length=8)
            tokenizer = tiny_tokenizer(99)
            trainer = FCSDTrainer(args=config, processing_class=tokenizer, **given)
        trainer.train()
        runs[name] = trainer, recorder.events
    (reference, expected), (ours, events) = runs["reference"], runs["fcsd"]
    assert events == expected
    for entry, other in zip(
        reference.state.log_history, ours.state.log_history, strict=True
    ):
        assert entry["step"] == other["step"] and entry["epoch"] == other["epoch"]
        assert entry.get("learning_rate") == other.get("learning_rate")
        for key in entry.keys() & {"loss", "grad_norm", "eval_loss"}:
            assert other[key] == pytest.approx(entry[key], rel=1e-4)
