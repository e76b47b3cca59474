"""What a training depends on, noted in its checkpoints: one is continued with the same
settings and data alone.

A recipe's stage compares settings and inputs before anything is loaded
(`fcsd.base.artifact`); this is the same rule for what no recipe says: arguments of
`FCSDTrainer`, the rows that it was given, and how a launch cuts a batch.

Not covered: the weights of a student that was given in memory, which are those of the
checkpoint from there on.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from fcsd.base.artifact import changed_settings, differences
from fcsd.base.errors import UserError
from fcsd.base.files import read_json, write_json
from fcsd.data.batches import ROW_FEATURES
from fcsd.data.dates import NOTED
from fcsd.data.rows import PackedRows
from fcsd.parallel.launch import Launch
from fcsd.training.argument_rules import MAY_CHANGE_ARGUMENTS
from fcsd.training.config import TrainConfig
from fcsd.training.fcsd_config import FCSDConfig

RECORD_FILE = "record.json"  # in each checkpoint
_SAMPLED = 1024  # values of a parameter
_ROWS_AT_ONCE = 1000

# Arguments of ours that the weights do not depend on, or that stand here in other
# words.
_LEFT_OUT = {
    *("on_bad_row", "dataset_num_proc", "safety", "trust_remote_code", "columns"),
    *("layers", "attention", "mlp"),  # the connectivity of the model
    # `cut_settings`
    *(
        "batch_size_tokens",
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
    ),
}


def _given_settings(args: FCSDConfig) -> dict[str, Any]:
    """Return the arguments that the weights depend on."""
    settings = {
        name: value
        for name, value in args.to_dict().items()
        if name not in MAY_CHANGE_ARGUMENTS
        and name not in _LEFT_OUT
        and value not in (None, {}, [])
    }
    if args.max_steps > 0:
        settings.pop("num_train_epochs", None)  # has no part in it
    plain: dict[str, Any] = json.loads(json.dumps(settings, default=str))
    return plain


def _cut_settings(
    args: FCSDConfig, train: TrainConfig, launch: Launch
) -> dict[str, Any]:
    """Return the tokens of a step, and how they are cut where the weights depend on
    that; args: fit to the engine.
    """
    settings: dict[str, Any] = {
        "batch_size_tokens": args.rows_of_a_step(launch) * args.max_length
    }
    if train.capacity_factor is not None:
        settings["per_device_train_batch_size"] = args.per_device_train_batch_size
    if train.depends_on_micro_batches:
        name = "micro-batches of a step, which balance_loss_over 'batch' depends on"
        settings[name] = args.gradient_accumulation_steps
    return settings


def model_fingerprint(model: nn.Module) -> str:
    """Return a hash of names, shapes and some values of each parameter, in seconds for
    a model of any size.
    """
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {tuple(parameter.shape)}".encode())
        if not parameter.is_meta:
            values = parameter.detach().flatten()[
                :: max(1, parameter.numel() // _SAMPLED)
            ]
            digest.update(values.float().cpu().numpy().tobytes())
    return digest.hexdigest()


class TrainingRecord:
    """What the weights of a training depend on: settings, and what identifies data and
    models by name (`inputs`).

    It is made of the arguments as they are given, before an engine changes them.
    of_recipe: its stage has noted and compared them, but for how a launch cuts the
    batch.
    """

    def __init__(
        self, args: FCSDConfig, train: TrainConfig, launch: Launch, *, of_recipe: bool
    ):
        self.args, self.train, self.launch, self.of_recipe = (
            args,
            train,
            launch,
            of_recipe,
        )
        self._given = self._fit = _given_settings(args)
        self._connectivity: dict[str, Any] | None = None
        self._fingerprints: Callable[[], dict[str, str]] = dict
        self._date: dict[str, str] = {}

    def complete(
        self,
        student: Any,
        fingerprints: Callable[[], dict[str, str]],
        date: datetime | None,
    ) -> None:
        """Add what is known once the arguments fit the engine, and there are model and
        data; date: what the chat template wrote, if any.
        """
        self._date = {} if date is None else {NOTED: date.isoformat()}
        self._fit = _given_settings(self.args)
        self._connectivity, self._fingerprints = (
            getattr(student.config, "farskip", None),
            fingerprints,
        )

    @property
    def settings(self) -> dict[str, Any]:
        """The settings with which the training runs; arguments may have been set since
        the trainer was made.
        """
        cut = _cut_settings(self.args, self.train, self.launch)
        if self.of_recipe:
            return cut
        now = _given_settings(self.args)
        changed = {
            name for name in {*now, *self._fit} if now.get(name) != self._fit.get(name)
        }
        later = {name: now.get(name) for name in changed}
        return self._given | later | cut | {"connectivity": self._connectivity}

    @cached_property
    def inputs(self) -> dict[str, str]:
        return self._fingerprints()

    def write(self, checkpoint: Path) -> None:
        write_json(
            checkpoint / RECORD_FILE,
            {"settings": self.settings, "inputs": self.inputs, **self._date},
        )

    def refuse_another(self, checkpoint: Path) -> None:
        """Raise UserError where a checkpoint is one of another training; all ranks call this."""
        self.launch.ranks.from_first(lambda: self._refuse_another(checkpoint))

    def _refuse_another(self, checkpoint: Path) -> None:
        record = read_json(checkpoint / RECORD_FILE)
        before = record["inputs"]
        known = {name: value for name, value in self.inputs.items() if name in before}
        changes = changed_settings(record["settings"], self.settings)
        changes += differences({name: before[name] for name in known}, known)
        if changes and record.get(NOTED) != self._date.get(NOTED):
            changes.append(
                f"the chat template writes the date, {record.get(NOTED)} then: with"
                f" output_dir {checkpoint.parent} it does again"
            )
        if changes:
            raise UserError(
                f"{checkpoint}: was made with other settings ({'; '.join(changes)}); go"
                " on with those, or begin another training, in another output folder"
            )


def rows_fingerprint(rows: Any) -> str:
    """Return a hash of all tokens, positions and labels of rows, in their order,
    wherever they lie.
    """
    digest = hashlib.sha256()
    if isinstance(rows, PackedRows):
        rows.add_to(digest)
        return digest.hexdigest()
    for row in _in_order(rows):
        for name in sorted(ROW_FEATURES):
            digest.update(np.asarray(row[name], np.int64).tobytes())
    return digest.hexdigest()


def _in_order(rows: Any) -> Iterator[Any]:
    # of `datasets`, which reads many at once faster than one by one
    if hasattr(rows, "with_format"):
        for block in rows.with_format("numpy").iter(_ROWS_AT_ONCE):
            for number in range(len(block["input_ids"])):
                yield {name: block[name][number] for name in ROW_FEATURES}
    else:
        yield from (rows[number] for number in range(len(rows)))
