"""From instruction data to rows of tokens.

    open_source → read_pieces → Tokenizing → PackedRows → Collator → next_token_targets

Several examples share a row of `max_length` tokens. Position ids restart at 0 at each of them, which is how
transformers (with no attention mask and no cache) keeps them from seeing each other. Labels follow the convention of
transformers: the label at position t is the token at position t, -100 where there is no loss.

Not covered: where the rows of a recipe lie (`fcsd.pipeline.rows`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fcsd.base.errors import UserError
from fcsd.data.bad_rows import BadRows
from fcsd.data.chat import tokenizer_name
from fcsd.data.config import SourceConfig
from fcsd.data.local import scratch
from fcsd.data.rows import Layout, PackedRows, write_rows
from fcsd.data.shards import Tokenizing
from fcsd.data.sources import Source

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from fcsd.data.decontaminate import Decontaminator


def build_dataset(
    sources: Sequence[Source],
    tokenizer: Any,
    *,
    loss_on: str = "response",
    num_proc: int | None = None,
    decontaminator: Decontaminator | Callable[[], Decontaminator | None] | None = None,
    bad_rows: BadRows | None = None,
    place: tuple[Path, Sequence[str]] | None = None,
    **layout: Any,
) -> PackedRows:
    """Build the rows of all sources, mixed, shuffled and packed; the same seed gives the same rows in the same order.

    One source: all its examples once. Several: each next example comes from a source drawn with probability
    proportional to its `weight`, until every source has been read to its end; those that end early start again. Of a
    source that is too large to be tokenized whole, as much as `num_rows` rows need (None: all of it).
    `decontaminator` (or what it gives when it is called, once it is needed) leaves out the examples that overlap with
    test items, and keeps the record; `bad_rows` says what becomes of
    those that cannot be tokenized (None: the first one is an error), and keeps theirs.

    Args:
        num_proc: processes that tokenize; None: one a core, eight at most.
        place: where the tokens are kept, and a folder's name for each source, which says all that they depend on; None:
            until this process ends.
        layout: `max_length`, and what else a `Layout` has.

    Raises: UserError as `load_source` and `tokenize_examples`; also when no example has a token to predict.
    """
    pad_token_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    if pad_token_id is None:
        raise UserError(f"{tokenizer_name(tokenizer)}: neither a padding nor an end-of-sequence token")
    folder, names = place or (scratch(), [*map(str, range(len(sources)))])
    path = write_rows(
        [*zip(sources, names, strict=True)],
        folder,
        Tokenizing(tokenizer, loss_on, decontaminator),
        Layout(pad_token_id=pad_token_id, **layout),
        bad_rows or BadRows(),
        num_proc,
    )
    return PackedRows(path)


def heldout_rows(
    source: SourceConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    num_examples: int,
    **options: Any,
) -> Any:
    """Build rows of the first `num_examples` of held-out text, in order; options as `build_dataset`."""
    limit = min(num_examples, source.max_examples or num_examples)
    first = source.model_copy(update={"max_examples": limit})
    return build_dataset([first], tokenizer, shuffle=False, bad_rows=BadRows(setting=None), **options)
