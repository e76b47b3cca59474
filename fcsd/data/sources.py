"""Load a data set: a hub id, a local folder in hub layout, or one file."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import datasets

from fcsd.config.data import SourceConfig, making_of
from fcsd.data.local import fresh_cache
from fcsd.errors import UserError, one_line


@dataclass(frozen=True)
class GivenSource:
    """Examples that a caller holds, with the keys of a `SourceConfig`. path: what errors call them."""

    path: str
    columns: dict[Any, str]
    examples: datasets.Dataset | datasets.IterableDataset
    name: ClassVar[None] = None
    split: ClassVar[None] = None
    weight: ClassVar[float] = 1.0
    max_examples: ClassVar[None] = None


Source = SourceConfig | GivenSource

# The first of these whose columns are all there is what a data set holds: what each column means, by its name.
_KNOWN: tuple[dict[Any, str], ...] = (
    {"input_ids": "input_ids"},
    {"messages": "messages"},
    {"messages": "conversations"},
    {"prompt": "prompt", "response": "response"},
    {"prompt": "prompt", "response": "completion"},
    {"prompt": "instruction", "response": "output"},  # Alpaca
    {"text": "text"},
)
# Taken where they are there.
_BESIDE = {
    "input_ids": ("labels", "attention_mask"),
    "messages": ("tools",),
    "prompt": ("input", "tools"),
}
_PART_OF_SPLIT = r"[\[+]"  # begins what a stream cannot read: train[:90%], train+test
_FILE_FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}


def columns_of(source: Source) -> Mapping[Any, str]:
    """Return the meanings of the columns of a source that was opened: meaning -> name."""
    assert source.columns is not None
    return source.columns


def check_place(source: SourceConfig) -> None:
    """Refuse, before anything is read, a file or folder that is not there, and a split that a file does not have."""
    path = Path(source.path).expanduser()
    if path.is_dir():
        return
    if path.suffix in _FILE_FORMATS:
        if not path.is_file():
            raise UserError(f"data set {source.path}: no such file{making_of(source.path)}")
        if not source.split.startswith("train"):
            raise UserError(
                f"data set {source.path}: no split {source.split!r}; a file has the split 'train' only"
            )
    elif path.is_absolute() or source.path.startswith((".", "~")) or source.path.count("/") > 1:
        raise UserError(f"data set {source.path}: no such folder, and not the name of a data set on the Hub")


def column_meanings(
    path: str,
    names: Sequence[str],
    columns: Mapping[Any, str] | None,
    form: str = "{{path: {}, columns: {}}}",
) -> dict[Any, str]:
    """Return what each column that is read means: meaning -> its name.

    A column of tools is read beside messages and prompts, said or not: chat templates write it into the prompt.

    Args:
        names: of all columns.
        columns: what was said of them; None: seen from the names.
        form: how a caller writes path and columns, for the advice of an error.

    Raises:
        UserError: one is not there; the names say nothing.
    """
    known = next((kind for kind in _KNOWN if set(kind.values()) <= set(names)), None)
    if known is not None:
        known = known | {name: name for key in known for name in _BESIDE.get(key, ()) if name in names}
    if columns is None and known is not None:
        return known
    missing = [column for column in (columns or {}).values() if column not in names]
    if missing or columns is None:
        kinds = "'messages', 'text', 'prompt' with 'response', 'instruction' with 'output', or 'input_ids'"
        example = known or ({"text": "content"} if columns is None else None)
        raise UserError(
            f"data set {path}: no column {', '.join(map(repr, missing)) or kinds}; it has"
            f" {', '.join(map(repr, names))}; name the right ones under `columns`"
            + (f", for example {form.format(path, example)}" if example else "")
        )
    tools = {"tools": "tools"} if "tools" in names and {"messages", "prompt"} & set(columns) else {}
    return tools | dict(columns)


def check_source(source: SourceConfig) -> None:
    """Refuse, before a model is loaded, local data that cannot be read, are empty, or lack a column; reads one row."""
    check_place(source)
    if Path(source.path).expanduser().exists():
        split = re.split(_PART_OF_SPLIT, source.split)[0]
        open_source(source.model_copy(update={"streaming": True, "split": split}))


def load_source(source: Source) -> datasets.Dataset | datasets.IterableDataset:
    """Load the examples of `source`, untouched but for `max_examples`.

    Raises: UserError for a path, configuration or split that is not there, a missing column, no examples.
    """
    source, opened = open_source(source)
    examples: datasets.Dataset | datasets.IterableDataset = limited(source, opened)
    return examples


def limited(source: Source, examples: Any) -> Any:
    """Take the first `max_examples`."""
    return examples if source.max_examples is None else examples.take(source.max_examples)


def open_source(source: Any) -> tuple[Any, Any]:
    """Load all examples of `source`; return it with what its columns mean, and them. Raises as `load_source`."""
    if isinstance(source, GivenSource):
        return source, source.examples
    path = Path(source.path).expanduser()
    check_place(source)
    if path.suffix in _FILE_FORMATS and not path.is_dir():
        load = partial(datasets.load_dataset, _FILE_FORMATS[path.suffix], data_files={"train": str(path)})
    elif path.is_dir():
        load = partial(datasets.load_dataset, str(path), name=source.name)
    else:
        load = partial(datasets.load_dataset, source.path, name=source.name, revision=source.revision)
    try:
        with fresh_cache(path):
            if path.exists():
                examples = load(split=re.split(_PART_OF_SPLIT, source.split)[0], streaming=True)
            else:
                examples = load(split=source.split, streaming=source.streaming)
            columns = column_meanings(source.path, _column_names(examples, source), source.columns)
            if path.exists():
                features = _as_written(examples, columns.values())
                examples = load(split=source.split, streaming=source.streaming, features=features)
    except StopIteration:  # `datasets` 5.2 looks for the first line of an empty file
        raise _empty(source) from None
    except (ValueError, OSError, datasets.exceptions.DatasetsError) as error:
        # Where `datasets` wraps an error of its reader, that one says more.
        cause = error.__cause__ if isinstance(error, datasets.exceptions.DatasetGenerationError) else None
        raise UserError(f"data set {source.path}: {one_line(cause or error)}") from error
    if isinstance(source, SourceConfig):
        return source.model_copy(update={"columns": columns}), examples
    return dataclasses.replace(source, columns=columns), examples


def _column_names(examples: Any, source: SourceConfig) -> list[str]:
    """Return the names of all columns; a stream fails, or turns out to be empty, when it is read."""
    first = next(iter(examples), None)
    if first is None:
        raise _empty(source)
    return list(first)


def _empty(source: SourceConfig) -> UserError:
    return UserError(f"data set {source.path}, split {source.split!r}: it is empty")


def _as_written(examples: Any, columns: Collection[str]) -> datasets.Features | None:
    """Return features that keep each value of these columns of JSON files as it is written; None: for other files.

    `datasets` (5.2) gives a column the type of its values in the first 10 MB. Where one further on has another type, it
    turns all of that stretch into JSON and this into text: the number, and quotes around every text beside it.
    """
    if examples.info.builder_name != "json" or examples.features is None:
        return None
    types = examples.features
    return datasets.Features({name: datasets.Json() if name in columns else types[name] for name in types})


def shard_file(examples: datasets.IterableDataset, shard: int) -> str | None:
    """Return the name of a file of a stream; None where it is not known."""
    arguments = getattr(getattr(examples, "_ex_iterable", None), "kwargs", {})
    for name in ("original_files", "files", "base_files"):
        files = arguments.get(name)
        if isinstance(files, list) and len(files) == examples.num_shards:
            return str(files[shard])
    return None
