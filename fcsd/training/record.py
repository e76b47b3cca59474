"""Record in each checkpoint the settings and data that a training depends on, and
refuse to continue it with others.

A recipe's stage compares settings and inputs before anything is loaded
(`fcsd.base.artifact`). This module applies the same rule to things that are in no
recipe: the arguments of `FCSDTrainer`, its rows, and the way in which a launch cuts a
batch.

Not covered: the initial weights of a student that was given in memory, because a
continuation uses the checkpoint's.
"""

import json
import sys
from collections.abc import Callable
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import TrainingArguments

from fcsd.base.artifact import changed_settings, differences
from fcsd.base.errors import UserError
from fcsd.base.files import read_json, write_sealed
from fcsd.data.rendering import NOTED
from fcsd.data.rows import step_rows
from fcsd.parallel.launch import Launch
from fcsd.training.argument_rules import MAY_CHANGE_ARGUMENTS
from fcsd.training.config import Sections

RECORD_FILE = "record.json"  # in each checkpoint

# fcsd's arguments that the weights do not depend on, or that the record has in another
# form.
_LEFT_OUT = {
    "on_bad_row",
    "own_text_batch_size",
    "own_text_sample_steps",
    "dataset_num_proc",
    "safety",
    "trust_remote_code",
    "columns",
    # recorded as the model's connectivity
    "layers",
    "attention",
    "mlp",
    # recorded by `_cut_settings`
    "batch_size_tokens",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
}


def _given_settings(args: TrainingArguments) -> dict[str, Any]:
    """Return the arguments that the weights depend on."""
    settings = {
        name: value
        for name, value in args.to_dict().items()
        if name not in MAY_CHANGE_ARGUMENTS
        and name not in _LEFT_OUT
        and value not in (None, {}, [])
    }
    if args.max_steps > 0:
        settings.pop("num_train_epochs", None)  # has no effect then
    # as a record that was written to a file and read again
    plain: dict[str, Any] = json.loads(json.dumps(settings, default=str))
    return plain


def _cut_settings(
    args: TrainingArguments, sections: Sections, launch: Launch
) -> dict[str, Any]:
    """Return the tokens of a step, and how they are divided if the weights depend on
    that.

    args: after `fit_to_engine`.
    """
    rows, train = step_rows(args, launch.ranks.size), sections.train
    settings: dict[str, Any] = {"batch_size_tokens": rows * sections.data.max_length}
    # A capacity is one of a forward pass.
    if train.capacity_factor is not None:
        settings["per_device_train_batch_size"] = args.per_device_train_batch_size
    if train.depends_on_micro_batches:
        name = "micro-batches of a step, on which balance_loss_over 'batch' depends"
        settings[name] = args.gradient_accumulation_steps
    return settings


class TrainingRecord:
    """The settings of a training that its weights depend on, and fingerprints of its
    data and models (`inputs`).

    It is made from the arguments as they were given, before an engine changes them.
    owner: the identity of a recipe's stage, which has recorded and compared all but the
    cut of the batch, and to which alone the checkpoints belong; None in a script.
    """

    def __init__(
        self,
        args: TrainingArguments,
        sections: Sections,
        launch: Launch,
        *,
        owner: Any,
    ):
        self.args = args
        self.sections = sections
        self.launch = launch
        self.owner = owner
        self._given = self._fit = _given_settings(args)
        self._connectivity: dict[str, Any] | None = None
        self._fingerprints: Callable[[], dict[str, str]] = dict
        self._date: dict[str, str] = {}
        self._adapters: dict[str, Any] | None = None

    def complete(
        self,
        student: Any,
        fingerprints: Callable[[], dict[str, str]],
        date: datetime | None,
        adapters: dict[str, Any] | None = None,
    ) -> None:
        """Add the facts that depend on the engine, the model and the data, once these
        are ready.

        date: the day that the chat template wrote, if any. adapters: their settings.
        """
        self._date = {} if date is None else {NOTED: date.isoformat()}
        self._fit = _given_settings(self.args)
        self._connectivity = getattr(student.config, "farskip", None)
        self._fingerprints = fingerprints
        # as a record that was written to a file and read again
        self._adapters = json.loads(json.dumps(adapters, default=str))

    @property
    def settings(self) -> dict[str, Any]:
        """The settings with which the training runs, including arguments that were set
        after the trainer was made.
        """
        cut = _cut_settings(self.args, self.sections, self.launch)
        # The stage of a recipe has recorded and compared everything else.
        if self.owner is not None:
            return cut
        # The arguments as given hold, so that another engine may continue. A value that
        # differs from the fitted ones was changed by the user since then.
        current = _given_settings(self.args)
        changed = {
            name
            for name in {*current, *self._fit}
            if current.get(name) != self._fit.get(name)
        }
        overrides = {name: current.get(name) for name in changed}
        settings = self._given | overrides | cut
        if self._adapters is not None:
            settings["peft_config"] = self._adapters
        return settings | {"connectivity": self._connectivity}

    @cached_property
    def inputs(self) -> dict[str, str]:
        return self._fingerprints()

    def write(self, checkpoint: Path) -> None:
        write_sealed(
            checkpoint / RECORD_FILE,
            {"settings": self.settings, "inputs": self.inputs, **self._date},
        )

    def refuse_another(self, checkpoint: Path) -> None:
        """Raise UserError for a checkpoint of another training; all ranks call this."""
        self.launch.ranks.from_first(lambda: self._refuse_another(checkpoint))

    def longer_than(self, record: dict[str, Any]) -> str | None:
        """Return max_steps or num_train_epochs where this training goes on longer than
        the recorded one, otherwise None. A recipe compares its steps itself.
        """
        recorded, current = record["settings"], self.settings
        # `max_steps` is -1 where the epochs count.
        for name in ("max_steps", "num_train_epochs"):
            old, new = recorded.get(name, 0), current.get(name, 0)
            if 0 < old < new:
                return name
        return None

    def _refuse_another(self, checkpoint: Path) -> None:
        record = read_json(checkpoint / RECORD_FILE)
        if changes := self._changes(record, checkpoint.parent):
            raise UserError(
                f"{checkpoint}: was made with other settings ({'; '.join(changes)});"
                " continue with those settings, or start another training in another"
                " output folder"
            )
        if (longer := self.longer_than(record)) is not None:
            print(
                f"{checkpoint}: continuing to {longer} {self.settings[longer]:g} instead"
                f" of {record['settings'][longer]:g}; from here on the learning rate"
                " follows the schedule of the longer training",
                file=sys.stderr,
            )

    def _changes(self, record: dict[str, Any], folder: Path) -> list[str]:
        """Return how this training differs from a recorded one; folder: of its
        checkpoints.
        """
        longer = self.longer_than(record)
        recorded_inputs = record["inputs"]
        # An input that only one side knows cannot be compared.
        common_inputs = {
            name: value
            for name, value in self.inputs.items()
            if name in recorded_inputs
        }
        changes = changed_settings(record["settings"], self.settings)
        # Alone, more steps are no other training.
        if len(changes) == 1 and longer is not None:
            changes = []
        changes += differences(
            {name: recorded_inputs[name] for name in common_inputs}, common_inputs
        )
        if changes and record.get(NOTED) != self._date.get(NOTED):
            changes.append(
                f"the chat template wrote the date {record.get(NOTED)} at that"
                f" time; with output_dir {folder} it writes that date again"
            )
        other_rows = any(change.startswith("train_dataset:") for change in changes)
        if longer is not None and other_rows:
            changes.append(
                "of a stream, as many rows are read and packed as max_steps needs, so"
                f" with a larger {longer} they are others: use a data set or a list"
            )
        return changes
