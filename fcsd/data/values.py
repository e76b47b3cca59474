"""Give examples the values that were written, although they pass through Arrow.

In Arrow a column has one type, so each mapping gets the keys of all others, with null.
JSON as `datasets` (5.2) reads it has these nulls, too, and other numbers: 0.6 becomes
0.6000000000000001. Files of JSON and lists therefore pass through Arrow as JSON text.
From other data, the nulls that Arrow may have added are removed: those of a key that
has a value in another mapping. A key that is null everywhere is null in the data.

Not covered: a null that was written beside values of the same key, in data that are
stored in Arrow's types; JSON text keeps it.
"""

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import datasets
import pyarrow as pa
from datasets.builder import Key
from datasets.utils.file_utils import xopen

from fcsd.base.artifact import without_none

_CHUNK_CHARACTERS = 10 << 20  # of a JSON file; the first ones name its columns
_SPACE = re.compile(r"\s*")


Change = Callable[[str, Any], Any]
"""Returns a value as it was written, from the name of its column and the stored value."""


def null_removal(examples: Any) -> Change | None:
    """Return the change that removes the nulls which Arrow may have added to a data set
    or a stream; None: it has added none.
    """
    features = examples.features
    if features is None:
        # Without types, any null may be one of Arrow's, except in Python's own rows.
        return _without_nulls if _from_arrow(examples) else None
    if not any(map(_has_mapping_type, features.values())):
        return None
    return partial(_unpadded, features)


def decoding(columns: Collection[str] | None = None) -> Change:
    """Return the change to values from columns (None: all) of JSON text."""
    return partial(_decoded, columns)


def json_text(values: Sequence[Any]) -> list[str | None]:
    """Return values as JSON text, None as none; TypeError or ValueError if one cannot
    be.
    """
    return [None if value is None else json.dumps(value) for value in values]


def read_as_text(builder: Any) -> None:
    """Let a builder of `datasets` for JSON give each column as JSON text."""
    builder._generate_tables = partial(_tables, builder)


def has_mapping(value: Any) -> bool:
    """Tell whether a value is a mapping, or a list (of lists) whose first is one."""
    if isinstance(value, list | tuple):
        return has_mapping(next((item for item in value if item is not None), None))
    return isinstance(value, Mapping)


def changed(examples: Any, change: Change | None) -> Any:
    """Change the values of a data set or a stream when rows are read, so that they do
    not become Arrow again.
    """
    if change is None:
        return examples

    def changed_block(block: Mapping[str, list]) -> dict[str, list]:
        return {
            name: [change(name, value) for value in values]
            for name, values in block.items()
        }

    def changed_row(row: Mapping[str, Any]) -> dict[str, Any]:
        return {name: change(name, value) for name, value in row.items()}

    if isinstance(examples, datasets.Dataset):
        return examples.with_transform(changed_block)
    return examples.map(changed_row)


def _decoded(columns: Collection[str] | None, name: str, value: Any) -> Any:
    is_text = value is not None and (columns is None or name in columns)
    return json.loads(value) if is_text else value


def _without_nulls(_: str, value: Any) -> Any:
    return without_none(value)


def _from_arrow(stream: datasets.IterableDataset) -> bool:
    """Tell whether a stream without types may come from Arrow: it does not if its
    examples are made in Python.
    """
    source = stream._ex_iterable
    while hasattr(source, "ex_iterable"):
        source = source.ex_iterable
    return source.iter_arrow is not None or hasattr(source, "ex_iterables")


def _has_mapping_type(kind: Any) -> bool:
    if isinstance(kind, datasets.List | datasets.LargeList):
        return _has_mapping_type(kind.feature)
    return isinstance(kind, dict)


def _unpadded(kinds: Mapping[str, Any], name: str, value: Any) -> Any:
    """Return a value without nulls of keys that have a value in another mapping."""
    kind = kinds[name]
    if isinstance(value, dict) and isinstance(kind, dict):
        return {
            key: _unpadded(kind, key, item)
            for key, item in value.items()
            if item is not None or kind[key] == datasets.Value("null")
        }
    if isinstance(value, list) and isinstance(kind, datasets.List | datasets.LargeList):
        return [_unpadded({name: kind.feature}, name, item) for item in value]
    return value


def _tables(
    builder: Any, files_iterables: Sequence[Any], **_: Any
) -> Iterator[tuple[Key, pa.Table]]:
    """Yield the rows of files of JSON as tables of JSON text, for a builder of
    `datasets`.
    """
    for number, files in enumerate(files_iterables):
        chunks = (chunk for file in files for chunk in _chunks(file, builder.config))
        for index, rows in enumerate(chunks):
            yield Key(number, index), _table(rows, builder.info.features)


def _table(rows: list[dict[str, Any]], features: datasets.Features | None) -> pa.Table:
    names = dict.fromkeys(name for row in rows for name in row)
    if features is not None:
        if missing := [name for name in names if name not in features]:
            raise ValueError(
                f"the first examples have no {missing[0]!r}, later ones do; write it,"
                " or null, in the first, too"
            )
        names = dict.fromkeys(features)
    # A value of null is text, an absent one is none.
    columns = {
        name: [json.dumps(row[name]) if name in row else None for row in rows]
        for name in names
    }
    return pa.table(columns, pa.schema([(name, pa.string()) for name in names]))


def _chunks(file: str, config: Any) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows of a file, about `_CHUNK_CHARACTERS` of it at a time."""
    encoding = "utf-8-sig" if config.encoding == "utf-8" else config.encoding
    options = {"encoding": encoding, "errors": config.encoding_errors, "newline": "\n"}
    rows: list[dict[str, Any]] = []
    size = 0
    with xopen(file, "r", **options) as lines:
        for value, length in _values(lines):
            row = {"text": value} if isinstance(value, str) else value
            if not isinstance(row, dict):
                raise ValueError("not a JSON object")
            rows.append(row)
            size += length
            if size >= _CHUNK_CHARACTERS:
                yield rows
                rows, size = [], 0
    if rows:
        yield rows


def _values(lines: Any) -> Iterator[tuple[Any, int]]:
    """Yield the values of a file, one on each line, with the length of the line; or
    those of a list, or of several lines each.
    """
    is_first, has_blank, is_text = True, False, True
    for line in lines:
        if not line.strip():
            has_blank = True
            continue
        try:
            value = json.loads(line)
        except ValueError:
            if not is_first:
                raise
            value = line
        if is_first and (value is line or isinstance(value, list)):
            yield from _of_many_lines(line + lines.read())
            return
        is_first = False
        is_text &= isinstance(value, dict) and all(
            isinstance(item, str) for item in value.values()
        )
        if has_blank and not is_text:
            raise ValueError("a blank line")
        yield value, len(line)


def _of_many_lines(text: str) -> Iterator[tuple[Any, int]]:
    """Yield the values of a list, or of objects that take several lines."""
    if text.lstrip().startswith("["):
        yield from ((value, 0) for value in json.loads(text))
        return
    position = 0
    while position < len(text):
        begin = _SPACE.match(text, position).end()  # type: ignore[union-attr]
        value, end = json.JSONDecoder().raw_decode(text, begin)
        yield value, end - position
        position = _SPACE.match(text, end).end()  # type: ignore[union-attr]
