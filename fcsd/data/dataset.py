"""Turn instruction data into rows of tokens.

    open_source → write_rows (read_pieces → write_tokens) → PackedRows → Collator → next_token_targets

Several examples share a row of `max_length` tokens. Position ids restart at 0 at each
of them, by which transformers (with no attention mask and no cache) keeps them from
attending to each other. Labels follow the convention of transformers: the label at
position t is the token at position t, -100 where there is no loss.

Data that a caller has loaded already take the same path (`given_rows`); the meaning of
their columns is inferred from the names.

Not covered: the location of a recipe's rows (`fcsd.pipeline.rows`).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import datasets
import numpy as np

from fcsd.base.errors import UserError, kind_of, one_line
from fcsd.data.batches import NO_LOSS, ROW_FEATURES
from fcsd.data.columns import check_meanings, column_meanings, refuse_unread
from fcsd.data.config import SourceConfig, TextConfig
from fcsd.data.local import data_fingerprint, scratch
from fcsd.data.rendering import TEMPLATE_DATE, tokenizer_name
from fcsd.data.rows import Layout, PackedRows, Tokenizing
from fcsd.data.sources import (
    GivenSource,
    Source,
    changed,
    decoding,
    has_mapping,
    json_text,
    null_removal,
)
from fcsd.data.write_rows import BadRows, write_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def build_dataset(
    sources: Sequence[Source],
    tokenizer: Any,
    *,
    num_proc: int | None = None,
    bad_rows: BadRows | None = None,
    place: tuple[Path, Sequence[str]] | None = None,
    **options: Any,
) -> PackedRows:
    """Build the rows of all sources, mixed, shuffled and packed; the same seed gives
    the same rows in the same order.

    A single source gives all its examples once. With several, each example comes from a
    source drawn with probability proportional to its `weight`, until every source has
    been read to its end; those that end early start again. A source that is too large
    to be tokenized whole is read as far as `num_rows` rows need (None: to its end).
    `decontaminator`, or the one that it returns when it is called, leaves out the
    examples that overlap with test items, and records them; `bad_rows` decides about
    those that cannot be tokenized (None: the first one is an error), and records them.

    Args:
        num_proc: processes that tokenize; None: one per core, eight at most.
        place: the folder for the tokens, and the name of each source's folder in it,
            which identifies everything that its tokens depend on; None: a folder that
            is removed when this process ends.
        options: `max_length` and other fields of `Layout`; fields of `Tokenizing`.

    Raises: UserError as `load_source` and `tokenize_examples`; also when no example has
    a token to predict.
    """
    pad_token_id = tokenizer.pad_token_id
    if pad_token_id is None:
        pad_token_id = tokenizer.eos_token_id
    if pad_token_id is None:
        raise UserError(
            f"{tokenizer_name(tokenizer)}: neither a padding nor an end-of-sequence"
            " token; name one in its tokenizer_config.json (pad_token or eos_token)"
        )
    names_of_tokenizing = {field.name for field in fields(Tokenizing)} & options.keys()
    tokenizing = {name: options.pop(name) for name in names_of_tokenizing}
    # A caller without a folder gets one for the life of this process.
    folder, names = place or (scratch(), [*map(str, range(len(sources)))])
    path = write_rows(
        [*zip(sources, names, strict=True)],
        folder,
        Tokenizing(tokenizer, **tokenizing),
        Layout(pad_token_id=pad_token_id, **options),
        bad_rows or BadRows(),
        num_proc,
    )
    return PackedRows(path)


def heldout_rows(
    source: TextConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    num_examples: int,
    **options: Any,
) -> Any:
    """Build rows of the first `num_examples` examples of held-out text, in order, with
    the date of evaluations; options as for `build_dataset`.
    """
    keys = source.model_dump()
    # A text of `--text` may have a limit of its own, which is lower.
    limit = min(num_examples, keys.get("max_examples") or num_examples)
    first = SourceConfig(**keys | {"max_examples": limit})
    return build_dataset(
        [first],
        tokenizer,
        shuffle=False,
        bad_rows=BadRows(setting=None),
        date=TEMPLATE_DATE,
        **options,
    )


def given_rows(
    data: Any,
    tokenizer: Any,
    *,
    name: str,
    max_length: int,
    columns: Mapping[str, str] | None = None,
    **options: Any,
) -> Any:
    """Make packed rows of `data`, as `build_dataset` does of sources, in the same order
    for a seed.

    Rows that are packed already (columns input_ids, position_ids and labels) are
    returned as they are; of a stream, `num_rows` rows are written to disk.

    name: of the data in errors, for example "train_dataset". columns: {"messages": …} |
    {"prompt": …, "response": …} | {"prompt": …, "completion": …} | {"text": …}, names
    of columns, and any that accompany them (`fcsd.data.columns`); None: inferred from
    the names. input_ids (and labels, or masks of the loss) are tokens, and are packed
    as they are. options: as for `build_dataset`.

    Raises:
        UserError: there are no such columns or no examples, `tokenize_examples` refuses
            the data, or packed rows have another length.
    """
    as_json: Sequence[str] = ()
    if isinstance(data, Sequence) and not isinstance(data, str | bytes):
        data, as_json = _of_list(data, name)
    if isinstance(data, datasets.Dataset):
        data = _unformatted(data, name)
    names = _column_names(data, name)
    # Named columns ask for tokenization, even if the rows look packed.
    if set(ROW_FEATURES) <= set(names) and columns is None:
        refuse_unread(name, "packed", names, [*ROW_FEATURES])
        return _packed(
            data, name, max_length, options.get("num_rows"), options.get("vocab_size")
        )
    if not isinstance(data, datasets.Dataset | datasets.IterableDataset):
        raise _wrong_data_error(data, name)
    if columns is not None:
        if not isinstance(columns, Mapping):
            column = columns if isinstance(columns, str) else "body"
            raise UserError(
                f"columns: {kind_of(columns)}, {columns!r}; give a mapping from"
                f" meanings to column names, for example columns={{'text': {column!r}}}"
            )
        try:
            check_meanings(columns)
        except ValueError as error:
            raise UserError(str(error)) from None
    meanings = column_meanings(name, names, columns, form="columns={1}")
    change = decoding(as_json) if as_json else null_removal(data)
    source = GivenSource(name, meanings, changed(data, change))
    return build_dataset([source], tokenizer, max_length=max_length, **options)


def _unformatted(data: datasets.Dataset, name: str) -> datasets.Dataset:
    """Return a data set with the columns of its format, and with plain values: tensors
    do not tokenize.

    Raises UserError for one with a transform, which would be lost.
    """
    if data.format["type"] == "custom":
        raise UserError(
            f"data set {name}: has a transform (set_transform or with_transform), which"
            " fcsd does not run; apply it with `map`"
        )
    columns = data.format["columns"]
    if set(columns) != set(data.column_names):
        data = data.select_columns(columns)
    return data if data.format["type"] is None else data.with_format(None)


def _of_list(examples: Sequence[Any], name: str) -> tuple[datasets.Dataset, list[str]]:
    """Return a data set of a list of examples, and its columns that are JSON text of
    the values; a column that an example lacks is None there.
    """
    names: dict[str, None] = {}
    for number, example in enumerate(examples, 1):
        if not isinstance(example, Mapping):
            raise UserError(
                f"data set {name}, row {number}: {kind_of(example)}; an example is a"
                " mapping of columns to values: {'text': …}, {'messages': […]}, or"
                " {'input_ids': […]}"
            )
        names |= dict.fromkeys(example)
    columns = {
        column: [example.get(column) for example in examples] for column in names
    }
    # A common type for mappings would add empty keys and change values.
    as_json = []
    for column, values in columns.items():
        # Other values than JSON's may stand in a column that is not read.
        with contextlib.suppress(TypeError, ValueError, RecursionError):
            if any(map(has_mapping, values)):
                columns[column] = json_text(values)
                as_json.append(column)
    try:
        data = datasets.Dataset.from_dict(columns, on_mixed_types="use_json")
    # pyarrow's errors are subclasses of the first two.
    except (ValueError, TypeError, OverflowError) as error:
        raise UserError(
            f"data set {name}: its examples have no common columns ({one_line(error)});"
            " values of one column must be of one kind"
        ) from None
    return data, as_json


def _wrong_data_error(data: Any, name: str) -> UserError:
    requirement = (
        "a datasets.Dataset or IterableDataset, or a list of examples is needed, or"
        f" packed rows with {', '.join(ROW_FEATURES)}"
    )
    hint = ""
    # The most common wrong arguments have an advice.
    if isinstance(data, str | Path):
        hint = (
            "; datasets.load_dataset reads files and the Hub: load_dataset('json',"
            " data_files=PATH, split='train')"
        )
    elif type(data).__name__ == "DataFrame":
        hint = "; convert it with datasets.Dataset.from_pandas"
    return UserError(f"data set {name}: {kind_of(data)}; {requirement}{hint}")


def _column_names(data: Any, name: str) -> list[str]:
    # A dict may be columns, or several data sets; neither is guessed.
    if isinstance(data, Mapping):  # a DatasetDict, too
        if any(
            isinstance(column, list) and column and not isinstance(column[0], Mapping)
            for column in data.values()
        ):
            raise UserError(
                f"data set {name}: columns {', '.join(map(repr, data))} in a dict;"
                " convert it with datasets.Dataset.from_dict"
            )
        raise UserError(
            f"data set {name}: holds several ({', '.join(map(repr, data))}); give one"
            " of them"
        )
    if isinstance(data, datasets.Dataset):
        if len(data) == 0:
            raise UserError(f"data set {name}: is empty; give rows")
        return data.column_names
    if isinstance(data, datasets.IterableDataset) and data.column_names is not None:
        return data.column_names
    if isinstance(data, str | Path) or not (
        hasattr(data, "__iter__") or hasattr(data, "__getitem__")
    ):
        raise _wrong_data_error(data, name)
    # Anything else that can be iterated must hold rows as mappings.
    first = next(iter(data), None)
    if first is None:
        raise UserError(f"data set {name}: is empty; give rows")
    return list(first) if isinstance(first, Mapping) else []


def _packed(
    data: Any, name: str, max_length: int, num_rows: int | None, vocab_size: int | None
) -> Any:
    row = data[0] if hasattr(data, "__len__") else next(iter(data))
    if (length := len(row["input_ids"])) != max_length:
        raise UserError(
            f"data set {name}: its rows are packed already, with {length} tokens, and"
            f" max_length is {max_length}; set max_length to {length}"
        )
    if isinstance(data, datasets.Dataset):
        _check_packed(data, name, max_length, vocab_size)
    if hasattr(data, "__len__"):
        return data
    # A stream has no length, so its rows are written to disk before training.
    rows = partial(itertools.islice, data, num_rows)
    return datasets.Dataset.from_generator(
        rows, cache_dir=str(scratch()), fingerprint="rows"
    )


def _check_packed(
    data: datasets.Dataset, name: str, max_length: int, vocab_size: int | None
) -> None:
    """Raise UserError for a row of another length, with a token that is not in the
    model's vocabulary, or with a label of another position.
    """
    from fcsd.data.messages import BadExample
    from fcsd.data.tokens import token_ids

    start = 0
    names = ["input_ids", "labels", "position_ids"]
    columns = data.with_format("numpy").select_columns(
        [column for column in names if column in data.column_names]
    )
    # In blocks, so that a large data set need not fit into memory.
    for block in columns.iter(batch_size=_ROWS_AT_A_TIME):
        rows = zip(*block.values(), strict=True)
        for number, (ids, labels, *more) in enumerate(rows, start + 1):
            lengths = [len(values) for values in (ids, labels, *more)]
            if {*lengths} != {max_length}:
                found = ", ".join(
                    f"{length} {column}"
                    for column, length in zip(block, lengths, strict=True)
                )
                raise UserError(
                    f"data set {name}, row {number}: has {found}; packed rows have"
                    f" {max_length} of each, as the first"
                )
            try:
                token_ids(ids, vocab_size)
            except BadExample as error:
                raise UserError(f"data set {name}, row {number}: {error}") from None
            if not np.all((labels == ids) | (labels == NO_LOSS)):
                raise UserError(
                    f"data set {name}, row {number}: each label must be the token of"
                    f" its own position, or {NO_LOSS} where there is no loss (they are"
                    " shifted later)"
                )
        start += len(block["input_ids"])


_ROWS_AT_A_TIME = 1024


def heldout_fingerprint(heldout: TextConfig | None) -> dict[str, str]:
    """Return the fingerprint of a held-out text, as an input of a stage; {} for none."""
    if heldout is None:
        return {}
    return {"data.heldout": data_fingerprint(heldout.path, heldout.revision)}
