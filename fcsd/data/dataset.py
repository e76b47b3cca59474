"""From instruction data to rows of tokens.

    load_source → tokenize_example → pack → Collator → next_token_targets

Several examples share a row of `max_length` tokens. Position ids restart at 0 at each of them, which is how
transformers (with no attention mask and no cache) keeps them from seeing each other. Labels follow the convention of
transformers: the label at position t is the token at position t, -100 where there is no loss.

Two kinds of data set come out. Normally one in memory, shuffled once and packed as a whole; when a source
streams, one that shuffles through a buffer and packs a thousand examples at a time (`fcsd.data.stream`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import datasets

from fcsd.config.data import SourceConfig
from fcsd.data.bad_rows import BadRows
from fcsd.data.chat import BadExample, tokenize_example, tokenizer_name
from fcsd.data.packing import PackedRows, PackingStats, pack
from fcsd.data.reading import StreamSource, places
from fcsd.data.sources import Source, columns_of, limited, open_source
from fcsd.data.stream import RowStream
from fcsd.errors import UserError
from fcsd.text import progress_bar

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from fcsd.data.decontaminate import Decontaminator

_EXAMPLE = {
    "input_ids": datasets.List(datasets.Value("int32")),
    "loss_mask": datasets.List(datasets.Value("bool")),
}


_SAMPLE = 100  # examples of a source that are tokenized before all of them are


def build_dataset(
    sources: Sequence[Source],
    tokenizer: Any,
    *,
    max_length: int,
    packing: bool = True,
    loss_on: str = "response",
    seed: int = 0,
    shuffle: bool = True,
    num_proc: int | None = None,
    decontaminator: Decontaminator | None = None,
    bad_rows: BadRows | None = None,
) -> PackedRows | RowStream:
    """Build the rows of all sources, mixed, shuffled and packed; the same seed gives the same rows in the same order.

    One source: all its examples once. Several: each next example comes from a source drawn with probability
    proportional to its `weight`, until every source has been read to its end; those that end early start again.
    Any source streaming: all of them do, and a RowStream comes back.
    `decontaminator` leaves out the examples that overlap with test items, and keeps the record; `bad_rows` says what
    becomes of those that cannot be tokenized (None: the first one is an error), and keeps theirs.

    num_proc: processes that tokenize; None: one in memory, and for a stream as many as there are free cores.

    Raises: UserError as `load_source` and `tokenize_example`; also when no example has a token to predict.
    """
    bad_rows = bad_rows or BadRows()
    sources, opened = zip(*map(open_source, sources), strict=True)
    tokenize = partial(tokenize_example, tokenizer=tokenizer, loss_on=loss_on)
    pad_token_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    if pad_token_id is None:
        raise UserError(f"{tokenizer_name(tokenizer)}: neither a padding nor an end-of-sequence token")
    packed = {"max_length": max_length, "pad_token_id": pad_token_id, "packing": packing}
    if any(isinstance(examples, datasets.IterableDataset) for examples in opened):
        stream = RowStream(
            [_stream_source(*each) for each in zip(sources, opened, strict=True)],
            tokenize,
            packed,
            seed=seed,
            shuffle=shuffle,
            bad_rows=bad_rows,
            decontaminator=decontaminator,
            num_workers=num_proc,
        )
        stream.check_sample()
        return stream
    loaded = [limited(source, examples) for source, examples in zip(sources, opened, strict=True)]
    examples = _in_memory(sources, loaded, tokenize, decontaminator, bad_rows, seed, shuffle, num_proc)
    stats = PackingStats()
    bar = progress_bar(examples, desc="Packing", unit="example", leave=False)
    rows = PackedRows(pack(bar, **packed, stats=stats), stats)
    if len(rows) == 0:
        raise UserError(
            f"data set {', '.join(source.path for source in sources)}: not one of {stats.num_examples} "
            f"examples has a response token within max_length: {max_length}; "
            "raise max_length or check `columns`"
        )
    return rows


def _stream_source(source: Source, examples: datasets.Dataset | datasets.IterableDataset) -> StreamSource:
    if isinstance(examples, datasets.Dataset):
        return StreamSource(source, limited(source, examples).to_iterable_dataset())
    return StreamSource(source, examples, source.max_examples)


def _in_memory(
    sources: Sequence[Source],
    loaded: Sequence[datasets.Dataset],
    tokenize: Callable[..., dict[str, list]],
    decontaminator: Decontaminator | None,
    bad_rows: BadRows,
    seed: int,
    shuffle: bool,
    num_proc: int | None,
) -> datasets.Dataset:
    """Load the tokenized examples of all sources, mixed."""
    tokenized = []
    for source, dataset in zip(sources, loaded, strict=True):
        rows: Sequence[int] = range(len(dataset))  # in the data set, of each example
        _check_sample(source, dataset, tokenize, bad_rows)
        if decontaminator is not None:
            dataset, rows = decontaminator.filter(dataset, source)
        if shuffle:
            dataset = dataset.shuffle(seed=seed)
        # In memory and never from the cache of `datasets`, which does not notice a changed version of this file.
        dataset = dataset.map(
            partial(_tokenized, tokenize=tokenize, columns=columns_of(source)),
            remove_columns=dataset.column_names,
            features=datasets.Features(_EXAMPLE | {"problem": datasets.Value("string")}),
            desc=f"Tokenizing {source.path}",
            num_proc=num_proc,
            keep_in_memory=True,
            load_from_cache_file=False,
        )
        problems = {at: problem for at, problem in enumerate(dataset["problem"]) if problem is not None}
        dataset = dataset.remove_columns("problem")
        # The same seed puts as many numbers into the same order.
        order = (
            datasets.Dataset.from_dict({"row": [*rows]}).shuffle(seed=seed)["row"]
            if problems and shuffle
            else rows
        )
        at_row = {order[at]: problem for at, problem in problems.items()}
        where = places(source, sorted(at_row))
        bad_rows.add(
            [(place, at_row[row]) for place, row in zip(where, sorted(at_row), strict=True)], len(rows)
        )
        if problems:
            dataset = dataset.select([at for at in range(len(dataset)) if at not in problems])
        tokenized.append(dataset)
    return _mixed(tokenized, sources, seed)


def _tokenized(
    example: Mapping[str, Any], tokenize: Callable[..., dict[str, list]], columns: Mapping[Any, str]
) -> dict[str, Any]:
    """Tokenize an example, or say what is bad about it."""
    try:
        return tokenize(example, columns=columns) | {"problem": None}
    except BadExample as error:
        return {"input_ids": [], "loss_mask": [], "problem": str(error)}


def _check_sample(
    source: Source, dataset: datasets.Dataset, tokenize: Callable[..., dict[str, list]], bad_rows: BadRows
) -> None:
    """Tokenize the first examples; what is wrong with all of them is said in a second, not after the last one.

    Raises: UserError where `bad_rows` would.
    """
    found = [
        _tokenized(example, tokenize, columns_of(source))["problem"] for example in islice(dataset, _SAMPLE)
    ]
    problems = {row: problem for row, problem in enumerate(found) if problem is not None}
    check = BadRows(bad_rows.policy, bad_rows.setting)
    check.add([*zip(places(source, [*problems]), problems.values(), strict=True)], len(found))


def _mixed(parts: list[Any], sources: Sequence[Source], seed: int) -> Any:
    if len(parts) == 1:
        return parts[0]
    total = sum(source.weight for source in sources)
    shares = [source.weight / total for source in sources]
    return datasets.interleave_datasets(parts, shares, seed=seed, stopping_strategy="all_exhausted")


def heldout_rows(
    source: SourceConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    num_examples: int,
    **options: Any,
) -> Any:
    """Build rows of the first `num_examples` of held-out text, in order; options as `build_dataset`."""
    limit = min(num_examples, source.max_examples or num_examples)
    plain = SourceConfig.model_validate(source.model_dump() | {"max_examples": limit, "streaming": False})
    return build_dataset([plain], tokenizer, shuffle=False, bad_rows=BadRows(setting=None), **options)
