"""Load a data set: a hub id, a local folder in hub layout, or one file."""

import dataclasses
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import datasets

from fcsd.base.errors import UserError, one_line
from fcsd.data.config import SourceConfig, making_of
from fcsd.data.local import check_data, fresh_cache


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
_PART_OF_SPLIT = r"[\[+]"  # begins what cannot be read file by file: train[:90%], train+test
WHOLE_BYTES = 4 << 30
_FILE_FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}


def columns_of(source: Source) -> Mapping[Any, str]:
    """Return the meanings of the columns of a source that was opened: meaning -> name."""
    assert source.columns is not None
    return source.columns


def check_place(source: SourceConfig) -> None:
    """Refuse, before anything is read, a file or folder that is not there, and a split that a file does not have."""
    path = Path(source.path).expanduser()
    check_data(path)
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

    columns: what was said of them; None: seen from the names. form: how a caller writes path and columns, for the
    advice of an error, which is a UserError: one is not there, or the names say nothing.
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
        open_source(source.model_copy(update={"split": re.split(_PART_OF_SPLIT, source.split)[0]}))


def load_source(source: Source) -> datasets.Dataset | datasets.IterableDataset:
    """Load the examples of `source`, untouched but for `max_examples`.

    Raises: UserError for a path, configuration or split that is not there, a missing column, no examples.
    """
    opened = open_source(source)
    limit = opened.settings.max_examples
    return opened.examples if limit is None else opened.examples.take(limit)


@dataclass(frozen=True)
class Opened:
    """A source whose columns are known, and all its examples.

    files: names of the files that the examples are in, one a shard; empty where they are not known.
    whole: all of it is tokenized, however few tokens a training needs: it is here, and of no more than `WHOLE_BYTES`.
    """

    settings: Source
    examples: Any
    whole: bool
    files: tuple[str, ...] = ()

    @property
    def num_files(self) -> int:
        return len(self.files) or 1


def open_source(source: Any) -> Opened:
    """Open `source`; its first example tells what its columns mean. Raises as `load_source`."""
    if isinstance(source, GivenSource):
        return Opened(source, source.examples, isinstance(source.examples, datasets.Dataset))
    check_place(source)
    try:
        with fresh_cache(Path(source.path).expanduser()):
            opened = _open(source, None)
            columns = column_meanings(source.path, _column_names(opened.examples, source), source.columns)
            if features := _as_written(opened.examples, columns.values()):
                opened = _open(source, features)
    except StopIteration:  # `datasets` 5.2 looks for the first line of an empty file
        raise _empty(source) from None
    except (ValueError, OSError, datasets.exceptions.DatasetsError) as error:
        # Where `datasets` wraps an error of its reader, that one says more.
        cause = error.__cause__ if isinstance(error, datasets.exceptions.DatasetGenerationError) else None
        raise UserError(f"data set {source.path}: {one_line(cause or error)}") from error
    return dataclasses.replace(opened, settings=source.model_copy(update={"columns": columns}))


def _open(source: SourceConfig, features: datasets.Features | None) -> Opened:
    """Open files one by one; a part of a split, and a data set of the Hub that is small or here, as a whole."""
    path, options = Path(source.path).expanduser(), {"features": features}
    if path.suffix in _FILE_FORMATS and not path.is_dir():
        options |= {"path": _FILE_FORMATS[path.suffix], "data_files": {"train": str(path)}}
    else:
        here = path.is_dir()
        options |= {"path": str(path) if here else source.path, "name": source.name}
        options["revision"] = None if here else source.revision
    builder = datasets.load_dataset_builder(**options)
    is_part = re.search(_PART_OF_SPLIT, source.split) is not None
    if is_part or (not path.exists() and (Path(builder.cache_dir).is_dir() or _says_small(builder, source))):
        return Opened(source, datasets.load_dataset(**options, split=source.split), whole=True)
    examples = builder.as_streaming_dataset(split=source.split)
    files = (builder.config.data_files or {}).get(source.split, [])
    files = tuple(map(str, files)) if len(files) == examples.num_shards else ()
    sizes = sum(os.path.getsize(file) for file in files if os.path.isfile(file)) if path.exists() else None
    whole = source.max_examples is not None or (sizes is not None and sizes <= WHOLE_BYTES)
    return Opened(source, examples, whole, files)


def _says_small(builder: Any, source: SourceConfig) -> bool:
    split = (builder.info.splits or {}).get(source.split)
    return split is not None and 0 < split.num_bytes <= WHOLE_BYTES


def _column_names(examples: Any, source: SourceConfig) -> list[str]:
    """Return the names of all columns; files fail, or turn out to be empty, when they are read."""
    first = next(iter(examples), None)
    if first is None:
        raise _empty(source)
    return list(first)


def _empty(source: SourceConfig) -> UserError:
    return UserError(f"data set {source.path}, split {source.split!r}: it is empty")


def _as_written(examples: Any, columns: Collection[str]) -> datasets.Features | None:
    """Return features that keep each value of these columns of JSON files as it is written; None: for other files.

    `datasets` (5.2) gives a column the type of its values in the first 10 MB. Where one further on has another type,
    all of that stretch becomes text: the number, and quotes around every text beside it.
    """
    if examples.info.builder_name != "json" or examples.features is None:
        return None
    types = examples.features
    return datasets.Features({name: datasets.Json() if name in columns else types[name] for name in types})
