"""Make rows of data that a caller holds already: a `datasets.Dataset`, a stream, a list of examples, or packed rows.

What its columns mean is seen from their names, or said with `columns` in the words of a recipe.

Not covered: reading data sets (`fcsd.data.sources`); several data sets in one mixture, which a recipe has.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import datasets

from fcsd.base.errors import UserError
from fcsd.data.batches import ROW_FEATURES
from fcsd.data.config import check_meanings
from fcsd.data.dataset import build_dataset
from fcsd.data.local import scratch
from fcsd.data.sources import GivenSource, column_meanings


def given_rows(
    data: Any,
    tokenizer: Any,
    *,
    name: str,
    max_length: int,
    columns: Mapping[str, str] | None = None,
    **options: Any,
) -> Any:
    """Make packed rows of `data`, as `fcsd.data.dataset.build_dataset` does of sources, in the same order for a seed.

    Rows that are packed already (columns input_ids, position_ids and labels) come back as they are, of a stream as many
    as `num_rows` on disk.

    Args:
        name: what errors call the data, for example "train_dataset".
        columns: {"messages": …} | {"prompt": …, "response": …, "input": … (optional)} | {"text": …}, names of
            columns, and "tools" beside messages and prompts; None: seen from the names. input_ids (and labels) are
            tokens, and are packed as they are.
        options: as `build_dataset`.

    Raises:
        UserError: no such columns, no examples, what `tokenize_examples` refuses, packed rows of another length.
    """
    if isinstance(data, Mapping):  # a DatasetDict, too
        splits = ", ".join(map(repr, data))
        raise UserError(f"data set {name}: holds several ({splits}); give one of them")
    if isinstance(data, Sequence) and not isinstance(data, str):
        data = datasets.Dataset.from_list([dict(example) for example in data])
    names = _column_names(data, name)
    if set(ROW_FEATURES) <= set(names) and columns is None:
        return _packed(data, name, max_length, options.get("num_rows"))
    if not isinstance(data, datasets.Dataset | datasets.IterableDataset):
        raise UserError(
            f"data set {name}: a {type(data).__name__}; a datasets.Dataset or IterableDataset, or a list of examples is"
            f" needed, or packed rows with {', '.join(ROW_FEATURES)}"
        )
    # Tensors of a format that was set would not tokenize.
    plain = data.with_format(None) if isinstance(data, datasets.Dataset) else data
    if columns is not None:
        try:
            check_meanings(columns)
        except ValueError as error:
            raise UserError(str(error)) from None
    source = GivenSource(name, column_meanings(name, names, columns, form="columns={1}"), plain)
    return build_dataset([source], tokenizer, max_length=max_length, **options)


def _column_names(data: Any, name: str) -> list[str]:
    if isinstance(data, datasets.Dataset):
        if len(data) == 0:
            raise UserError(f"data set {name}: it is empty")
        return data.column_names
    if isinstance(data, datasets.IterableDataset) and data.column_names is not None:
        return data.column_names
    iterable = hasattr(data, "__iter__") or hasattr(data, "__getitem__")
    first = next(iter(data), None) if iterable else None
    if first is None:
        raise UserError(f"data set {name}: {'it is empty' if iterable else repr(data)}")
    return list(first) if isinstance(first, Mapping) else []


def _packed(data: Any, name: str, max_length: int, num_rows: int | None) -> Any:
    row = data[0] if hasattr(data, "__len__") else next(iter(data))
    if (length := len(row["input_ids"])) != max_length:
        raise UserError(
            f"data set {name}: its rows are packed already, with {length} tokens, and max_length is {max_length}; set"
            f" max_length to {length}"
        )
    if hasattr(data, "__len__"):
        return data
    rows = partial(itertools.islice, data, num_rows)
    return datasets.Dataset.from_generator(rows, cache_dir=str(scratch()), fingerprint="rows")
