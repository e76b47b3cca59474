"""The rows that a recipe trains on, what they were made from, and what was left out of them."""

import itertools
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from fcsd.config.data import DataConfig, DecontaminateConfig
from fcsd.config.suite import load_suite
from fcsd.data.bad_rows import BadRows
from fcsd.data.dataset import build_dataset
from fcsd.data.decontaminate import Decontaminator, ItemIndex
from fcsd.data.local import data_fingerprint
from fcsd.data.packing import PackedRows
from fcsd.data.stream import RowStream
from fcsd.distributed.launch import Launch
from fcsd.evaluate.items import dataset_items, suite_items, test_set_location
from fcsd.evaluate.stage import test_set_fingerprints
from fcsd.files import write_json
from fcsd.stages.context import Run


@dataclass(frozen=True)
class Record:
    """What was left out of training data: examples with test items in them, and those that cannot be tokenized."""

    overlapping: Decontaminator | None
    bad: BadRows


def training_rows(
    data: DataConfig, tokenizer: PreTrainedTokenizerBase, run: Run, on_bad_row: str | None = "data.on_bad_row"
) -> tuple[PackedRows | RowStream, Record]:
    """Return packed rows of a `data` section of the recipe, and the record of what was left out of them.

    They stay in memory, for the next stage of the run that reads the same data. on_bad_row: see `BadRows`.
    """
    plan = data.model_dump(exclude={"heldout", "heldout_examples"})
    # What the rows depend on; two stages of one run may find the same tokenizer in different folders.
    inputs = list(data_inputs(data, run).values())
    parts = [plan, inputs, run.recipe.seed, tokenizer.chat_template, tokenizer.get_vocab()]
    key = json.dumps(parts, sort_keys=True)  # a vocabulary comes in another order every time it is loaded

    def make() -> tuple[PackedRows | RowStream, Record]:
        overlapping = _decontaminator(data.decontaminate, tokenizer, run.data_root)
        record = Record(overlapping, BadRows(data.on_bad_row, on_bad_row))
        rows = build_dataset(
            data.train,
            tokenizer,
            max_length=data.max_length,
            packing=data.packing,
            loss_on=data.loss_on,
            seed=run.recipe.seed,
            decontaminator=record.overlapping,
            bad_rows=record.bad,
        )
        return rows, record

    held: dict[str, tuple[PackedRows | RowStream, Record]] = run.once("rows", dict)
    if key not in held:
        held.clear()  # two data sets are not kept in memory
        held[key] = make()
    return held[key]


def _decontaminator(
    plan: DecontaminateConfig | None, tokenizer: PreTrainedTokenizerBase, data_root: Path | None
) -> Decontaminator | None:
    if plan is None:
        return None
    sets = [dataset_items(**test_set.model_dump(), data_root=data_root) for test_set in plan.against]
    if plan.suite is not None:
        sets.append(suite_items(load_suite(plan.suite), data_root, tokenizer))
    return Decontaminator(ItemIndex(itertools.chain(*sets), plan.ngram))


def left_out(record: Record, folder: Path, launch: Launch) -> dict[str, Any]:
    """For a manifest: how many examples were left out, and why; which ones goes to files in `folder`."""
    found: dict[str, Any] = {}
    if record.overlapping is not None:
        found["decontamination"] = summary = record.overlapping.summary()
        what = f"{summary['num_left_out']} examples that overlap with test items"
        _write(
            folder / "decontamination.json",
            summary | {"left_out": record.overlapping.overlaps()},
            what,
            launch,
        )
    if record.bad.num_bad:
        found["bad_rows"] = summary = record.bad.summary()
        what = f"{summary['num_left_out']} of {summary['num_examples']} examples that cannot be tokenized"
        _write(folder / "bad_rows.json", summary | {"left_out": record.bad.listed()}, what, launch)
    return found


def _write(file: Path, record: dict[str, Any], what: str, launch: Launch) -> None:
    if launch.first:
        write_json(file, record)
        print(f"data: {what} were left out, see {file}", file=sys.stderr)


def data_inputs(data: DataConfig, run: Run) -> dict[str, str]:
    """Return what identifies the bytes of the training sources, and of the test items that are kept out of them."""
    inputs = {
        f"data.train.{index}": data_fingerprint(source.path, source.revision)
        for index, source in enumerate(data.train)
    }
    plan, data_root = data.decontaminate, run.data_root
    if plan is not None:
        for index, test_set in enumerate(plan.against):
            location = test_set_location(test_set.path, data_root)
            inputs[f"data.decontaminate.against.{index}"] = data_fingerprint(location, test_set.revision)
        if plan.suite is not None:
            found = test_set_fingerprints(load_suite(plan.suite).tasks, data_root)
            inputs |= {f"data.decontaminate {name}": value for name, value in found.items()}
    return inputs
