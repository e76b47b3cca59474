"""From instruction data to rows of tokens.

    load_source → tokenize_example → pack → Collator → next_token_targets

Several examples share a row of `max_length` tokens. Position ids restart at 0 at each of them, which is how
transformers (with no attention mask and no cache) keeps them from seeing each other. Labels follow the convention of
transformers: the label at position t is the token at position t, -100 where there is no loss.

Two kinds of data set come out. Normally one in memory, shuffled once and packed as a whole; when a source
streams, one that shuffles through a buffer and packs a thousand examples at a time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import datasets
from tqdm import tqdm

from fcsd.config.data import SourceConfig
from fcsd.data.batches import ROW_FEATURES
from fcsd.data.chat import tokenize_example
from fcsd.data.packing import PackedRows, PackingStats, pack
from fcsd.data.sources import Source, load_source
from fcsd.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from fcsd.data.decontaminate import Decontaminator

_EXAMPLE = {
    "input_ids": datasets.List(datasets.Value("int32")),
    "loss_mask": datasets.List(datasets.Value("bool")),
}


_MIXED = {"source": datasets.Value("int32"), "json": datasets.Value("string")}


_STREAM_BATCH = 1000


_SHUFFLE_BUFFER = 10_000


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
) -> PackedRows | datasets.IterableDataset:
    """Build the rows of all sources, mixed, shuffled and packed; the same seed gives the same rows in the same order.

    One source: all its examples once. Several: each next example comes from a source drawn with probability
    proportional to its `weight`, until every source has been read to its end; those that end early start again.
    Any source streaming: all of them do, and an IterableDataset comes back.
    `decontaminator` leaves out the examples that overlap with test items, and keeps the record.

    Raises: UserError as `load_source` and `tokenize_example`; also when no example has a token to predict.
    """
    loaded = [load_source(source) for source in sources]
    streaming = any(isinstance(examples, datasets.IterableDataset) for examples in loaded)
    tokenize = partial(tokenize_example, tokenizer=tokenizer, loss_on=loss_on)
    if streaming:
        examples = _stream(sources, loaded, tokenize, decontaminator, seed, shuffle)
    else:
        examples = _in_memory(sources, loaded, tokenize, decontaminator, seed, shuffle, num_proc)
    pad_token_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    if pad_token_id is None:
        raise UserError(f"tokenizer {tokenizer.name_or_path}: neither a padding nor an end-of-sequence token")
    if streaming:
        return examples.map(
            partial(_pack_batch, max_length=max_length, pad_token_id=pad_token_id, packing=packing),
            batched=True,
            batch_size=_STREAM_BATCH,
            remove_columns=list(_EXAMPLE),
            features=datasets.Features(ROW_FEATURES),
        )
    stats = PackingStats()
    bar = tqdm(examples, desc="Packing", unit="example", leave=False)
    rows = PackedRows(pack(bar, max_length, pad_token_id=pad_token_id, packing=packing, stats=stats), stats)
    if len(rows) == 0:
        raise UserError(
            f"data set {', '.join(source.path for source in sources)}: not one of {stats.num_examples} "
            f"examples has a response token within max_length: {max_length}; "
            "raise max_length or check `columns`"
        )
    return rows


def _in_memory(
    sources: Sequence[Source],
    loaded: Sequence[datasets.Dataset],
    tokenize: Callable[..., dict[str, list]],
    decontaminator: Decontaminator | None,
    seed: int,
    shuffle: bool,
    num_proc: int | None,
) -> datasets.Dataset:
    """Load the tokenized examples of all sources, mixed."""
    tokenized = []
    for source, dataset in zip(sources, loaded, strict=True):
        if decontaminator is not None:
            dataset = decontaminator.filter(dataset, source)
        if shuffle:
            dataset = dataset.shuffle(seed=seed)
        # In memory and never from the cache of `datasets`, which does not notice a changed version of this file.
        dataset = dataset.map(
            partial(tokenize, columns=source.columns),
            remove_columns=dataset.column_names,
            features=datasets.Features(_EXAMPLE),
            desc=f"Tokenizing {source.path}",
            num_proc=num_proc,
            keep_in_memory=True,
            load_from_cache_file=False,
        )
        tokenized.append(dataset)
    return _mixed(tokenized, sources, seed)


def _stream(
    sources: Sequence[Source],
    loaded: Sequence[datasets.Dataset | datasets.IterableDataset],
    tokenize: Callable[..., dict[str, list]],
    decontaminator: Decontaminator | None,
    seed: int,
    shuffle: bool,
) -> datasets.IterableDataset:
    """Load the same as a stream.

    Mixed first and tokenized then: `datasets` (5.2) reads the sources of a mixture in a thread each, and the chat
    templates of transformers (5.23) that mark responses have one state for all threads. Examples of different columns
    are mixed as JSON.
    """
    streams = []
    for index, (source, dataset) in enumerate(zip(sources, loaded, strict=True)):
        if isinstance(dataset, datasets.Dataset):
            dataset = dataset.to_iterable_dataset()
        if shuffle:
            dataset = dataset.shuffle(seed=seed, buffer_size=_SHUFFLE_BUFFER)
        dataset = dataset.map(
            partial(_as_json, columns=source.columns, source=index),
            remove_columns=dataset.column_names or list(next(iter(dataset))),
            features=datasets.Features(_MIXED),
        )
        streams.append(dataset)
    mixed = _mixed(streams, sources, seed)

    def example(row: Mapping[str, Any]) -> tuple[Source, dict[str, Any]]:
        return sources[row["source"]], json.loads(row["json"])

    if decontaminator is not None:
        mixed = mixed.filter(lambda row: decontaminator.keeps(*example(row)))

    def tokenized(row: Mapping[str, Any]) -> dict[str, list]:
        source, values = example(row)
        return tokenize(values, columns=source.columns)

    return mixed.map(tokenized, remove_columns=list(_MIXED), features=datasets.Features(_EXAMPLE))


def _as_json(example: Mapping[str, Any], columns: Mapping[Any, str], source: int) -> dict[str, Any]:
    values = {name: example[name] for name in columns.values()}
    return {"source": source, "json": json.dumps(values, ensure_ascii=False, default=str)}


def _mixed(parts: list[Any], sources: Sequence[Source], seed: int) -> Any:
    if len(parts) == 1:
        return parts[0]
    total = sum(source.weight for source in sources)
    shares = [source.weight / total for source in sources]
    return datasets.interleave_datasets(parts, shares, seed=seed, stopping_strategy="all_exhausted")


def _pack_batch(batch: Mapping[str, list], **options: Any) -> dict[str, list]:
    """Call `pack` for `datasets.map(batched=True)`: columns in, columns out."""
    columns = zip(batch["input_ids"], batch["loss_mask"], strict=True)
    rows = list(pack(({"input_ids": ids, "loss_mask": mask} for ids, mask in columns), **options))
    return {name: [row[name] for row in rows] for name in ROW_FEATURES}


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
    return build_dataset([plain], tokenizer, shuffle=False, **options)
