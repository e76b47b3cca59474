"""KL(teacher || student) on held-out text, row by row: the figure that distillation
minimises, on unseen rows.

A training that scores itself (`fcsd.training.heldout`) and the evaluation of finished
checkpoints share this code: `read_rows` collects the teacher's final hidden states of
this rank's rows, `sums_by_row` the student's KL on them. The caller supplies the
functions that compute hidden states and the KL of a row.

Rows may be split between their examples, so that attention costs no more than the
examples need, and not the square of a row's length.
"""

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fcsd.base.stats import ratio
from fcsd.base.text import progress_bar
from fcsd.data.batches import (
    NO_LOSS,
    ROW_FEATURES,
    Batch,
    Collator,
    next_token_targets,
    trim_padding,
)
from fcsd.model.families.structure import head_scaling, unpadded_vocab_size
from fcsd.parallel.launch import ALONE, Ranks, input_device
from fcsd.parallel.shard import whole_head
from fcsd.training.losses.fused import Head, fused_linear_loss
from fcsd.training.losses.head import batch_hidden, loss_head, refuse_packing
from fcsd.training.losses.objectives import KLObjectiveConfig

AroundRow = Callable[[int], contextlib.AbstractContextManager[None]]


def _as_it_is(row: int) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


PART_TOKENS = {"cpu": 512, "accelerator": 4096}
"""The longest part of a row with several examples. On a CPU a pass is fastest per token
at 256 to 512 tokens; accelerators need many, and compute long attention fast.
"""


def read_rows(
    rows: Sequence[Any],
    prepare: Callable[[Batch], Any],
    *,
    model: nn.Module,
    device: torch.device,
    ranks: Ranks,
    trim: bool = False,
    bar: str | None = None,
    around_row: AroundRow = _as_it_is,
) -> list[Batch]:
    """Collate this rank's rows, one per batch, and let `prepare` add hidden states
    (kept tokens, D).

    All ranks call this. A rank in lockstep appends dummy rows to its own where others
    have more.

    Args:
        model: refuses packed rows if its family would mix their examples.
        device: that of the batches for `prepare`; they are returned in main memory.
        trim: cut off the padding after the last token with loss.
        bar: description of the progress bar; None: no bar.
        around_row: returns the context in which the row of a number is prepared; not
            used for dummy rows.

    Raises:
        UserError: packed rows for a family that would let their examples see each
            other.
    """
    batches: list[Batch] = []

    def read(number: int) -> None:
        batch = {
            name: value.to(device) for name, value in Collator()([rows[number]]).items()
        }
        if trim:
            batch = trim_padding(batch)
        refuse_packing(model, batch["labels"], batch["position_ids"])
        prepare(batch)
        batches.append({name: value.cpu() for name, value in batch.items()})

    # Row 0 serves as the dummy: any row makes the pass run.
    with ranks.sharing(range(len(rows)), lambda: read(0)) as share:
        for number, _ in _with_bar(share.items, bar, ranks):
            with around_row(number):
                read(number)
            share.results.append(None)
    return batches


def sums_by_row(
    batches: Sequence[Batch],
    num_rows: int,
    loss_sum: Callable[[Batch], Tensor],
    *,
    device: torch.device,
    ranks: Ranks,
    bar: str | None = None,
    around_row: AroundRow = _as_it_is,
) -> tuple[list[float], list[int]]:
    """Return the loss of each of `num_rows` rows, summed over tokens, and the number of
    its kept tokens; the same on all ranks.

    batches: this rank's, from `read_rows`. loss_sum: computes the summed loss of one of
    them, on `device`.
    """

    def sum_and_count(batch: Batch) -> tuple[float, int]:
        total = loss_sum({name: value.to(device) for name, value in batch.items()})
        keep, _ = next_token_targets(batch["labels"], batch["position_ids"])
        return float(total), int(keep.sum())

    # The dummy is this rank's last batch.
    with ranks.sharing(range(num_rows), lambda: sum_and_count(batches[-1])) as share:
        items = _with_bar(share.items, bar, ranks)
        for (row, _), batch in zip(items, batches, strict=False):
            with around_row(row):
                share.results.append(sum_and_count(batch))
    return [total for total, _ in share.results], [n for _, n in share.results]


def _with_bar(values: Sequence[Any], bar: str | None, ranks: Ranks) -> Any:
    return progress_bar(
        values, desc=bar, unit="row", shown=bar is not None and ranks.first, leave=False
    )


def row_parts(row: Mapping[str, Any], num_tokens: int) -> list[dict[str, np.ndarray]]:
    """Split a row between its examples into parts of at most `num_tokens` tokens, or of
    a single longer example.

    Tokens after the last one with loss are left out: no counted token sees them.
    """
    columns = {name: np.asarray(row[name]) for name in ROW_FEATURES}
    with_loss = np.flatnonzero(columns["labels"] != NO_LOSS)
    length = int(with_loss[-1]) + 1 if len(with_loss) else 1
    begins = np.flatnonzero(columns["position_ids"][1:length] == 0) + 1
    # Greedy: a part is closed at the last boundary before it would become too long.
    cuts = [0]
    for begin, end in itertools.pairwise([*begins.tolist(), length]):
        if end - cuts[-1] > num_tokens:
            cuts.append(begin)
    return [
        {name: values[begin:end] for name, values in columns.items()}
        for begin, end in itertools.pairwise([*cuts, length])
    ]


@dataclass(frozen=True)
class OriginalOutputs:
    """The batches of `read_rows` and the original's head: with them the original need
    not be in memory together with the model.

    part_rows: for the batches of all ranks, in order, the number of the row that each
    is a part of.
    """

    batches: list[Batch]
    part_rows: list[int]
    head: nn.Linear
    config: Any


@torch.no_grad()
def read_original(
    original: PreTrainedModel,
    rows: Sequence[Any],
    *,
    ranks: Ranks = ALONE,
    in_parts: bool = False,
    around_row: AroundRow = _as_it_is,
) -> OriginalOutputs:
    """Run the original over this rank's share of `rows`; all ranks call this.

    in_parts: split rows (`row_parts`); for models in which a token's output depends on
    its example alone, not on the rest of the batch, and without `around_row`.
    around_row and errors: as for `read_rows`.
    """
    device = input_device(original)
    parts, part_rows = list(rows), list(range(len(rows)))
    # Parts are dealt to the ranks like rows; `part_rows` remembers where they belong.
    if in_parts:
        num_tokens = PART_TOKENS["cpu" if device.type == "cpu" else "accelerator"]
        by_row = [row_parts(row, num_tokens) for row in rows]
        parts = [part for row in by_row for part in row]
        part_rows = [number for number, row in enumerate(by_row) for _ in row]

    def prepare(batch: Batch) -> None:
        batch["teacher_hidden"] = batch_hidden(original, batch)

    with evaluating(original):
        batches = read_rows(
            parts,
            prepare,
            model=original,
            device=device,
            ranks=ranks,
            bar="the original's hidden states",
            around_row=around_row,
        )
        # The head is gathered while the original is still in memory.
        return OriginalOutputs(
            batches, part_rows, whole_head(original, device).cpu(), original.config
        )


def kl_sum(
    teacher: tuple[Tensor, nn.Linear, Any], student: tuple[Tensor, nn.Linear, Any]
) -> Tensor:
    """Return KL(teacher || student) summed over tokens.

    teacher, student: final hidden states (N, D), head and config.
    """
    teacher_head, student_head = (
        Head(hidden, head.weight, head.bias, *head_scaling(config))
        for hidden, head, config in (teacher, student)
    )
    # Padding rows of the head are no tokens: their logits are arbitrary.
    vocab_size = unpadded_vocab_size(student[2])
    return fused_linear_loss(
        student_head, teacher_head, KLObjectiveConfig(), vocab_size=vocab_size
    )[0]


@torch.no_grad()
def kl_by_row(
    original: OriginalOutputs,
    model: PreTrainedModel,
    rows: Sequence[Any],
    *,
    bar: str | None = None,
    ranks: Ranks = ALONE,
    around_row: AroundRow = _as_it_is,
    hidden: list[Tensor] | None = None,
) -> tuple[list[float], list[int]]:
    """Return the sum of KL(original || model) in nats of each row, and its kept tokens;
    the same on all ranks.

    hidden: gets the model's final hidden states (kept tokens, D) of each part of this
    rank's share, in main memory.
    """
    device = input_device(model)
    heads = original.head.to(device), whole_head(model, device)

    def loss_sum(batch: Batch) -> Tensor:
        teacher = batch["teacher_hidden"], heads[0], original.config
        states = batch_hidden(model, batch)
        if hidden is not None:
            hidden.append(states.cpu())
        return kl_sum(teacher, (states, heads[1], model.config))

    num_parts = len(original.part_rows)
    with evaluating(model):
        sums, counts = sums_by_row(
            original.batches,
            num_parts,
            loss_sum,
            device=device,
            ranks=ranks,
            bar=bar,
            around_row=around_row,
        )
    if hidden is not None:
        del hidden[len(ranks.deal(range(num_parts))) :]  # those of dummy rows
    # Parts of a row are added up again: rows are the independent units of `ratio`.
    by_row: list[list[tuple[float, int]]] = [[] for _ in rows]
    for row, total, count in zip(original.part_rows, sums, counts, strict=True):
        by_row[row].append((total, count))
    row_sums = [math.fsum(total for total, _ in parts) for parts in by_row]
    return row_sums, [sum(count for _, count in parts) for parts in by_row]


def mean_kl(
    original: OriginalOutputs,
    model: PreTrainedModel,
    rows: Sequence[Any],
    *,
    ranks: Ranks = ALONE,
    around_row: AroundRow = _as_it_is,
) -> dict[str, float | None]:
    """Compute the forward KL in nats per kept token, over `rows` of
    `fcsd.data.dataset.build_dataset`.

    original: from `read_original`, with the same rows and ranks. around_row: as for
    `read_rows`.

    Returns: `kl`: sum over tokens / number of tokens; `stderr`: of this ratio, with
    rows as the independent units; `num_tokens`. `stderr` is None for a single row, `kl`
    too when no row keeps a token.
    """
    sums, counts = kl_by_row(
        original,
        model,
        rows,
        bar="KL to the original",
        ranks=ranks,
        around_row=around_row,
    )
    kl = ratio(sums, counts)
    return {"kl": kl.value, "stderr": kl.stderr, "num_tokens": sum(counts)}


@contextlib.contextmanager
def evaluating(model: PreTrainedModel) -> Iterator[None]:
    """Put a model into the mode in which `batch_hidden` can be called."""
    from torch.distributed.fsdp import FSDPModule

    training = model.training
    model.eval()
    # Sharded weights are gathered by hooks of the whole model, so that its body cannot
    # be called alone.
    as_a_whole = isinstance(model, FSDPModule)
    try:
        with loss_head(model) if as_a_whole else contextlib.nullcontext():
            yield
    finally:
        model.train(training)
