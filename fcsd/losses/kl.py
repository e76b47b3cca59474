"""KL(original || model) on held-out text: the figure that distillation minimises, on rows it has not seen."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedModel

from fcsd.data.batches import Collator, next_token_targets
from fcsd.distributed.ranks import ALONE, Ranks, input_device
from fcsd.distributed.shard import whole_head
from fcsd.families.structure import head_scaling, unpadded_vocab_size
from fcsd.losses.fused import fused_linear_kl
from fcsd.losses.head import attach_loss_head, detach_loss_head, final_hidden, refuse_packing
from fcsd.stats import ratio


@dataclass(frozen=True)
class Original:
    """What the KL needs to know of the original, which then need not be in memory beside the model.

    hidden: for each of this rank's rows the (kept tokens, D) hidden states after the final norm, in main memory.
    """

    hidden: list[Tensor]
    head: nn.Linear
    config: Any


@torch.no_grad()
def read_original(
    original: PreTrainedModel, rows: Sequence[Any], *, progress: bool = False, ranks: Ranks = ALONE
) -> Original:
    """Run the original over this rank's share of `rows`; all ranks call this.

    Raises:
        UserError: packed rows for a family that would let the examples in them see each other.
    """
    with _evaluating(original):
        hidden = [
            _hidden(original, row).cpu()
            for row in _share(rows, ranks, "the original's hidden states", progress)
        ]
        _idle(original, rows, ranks)
        return Original(hidden, whole_head(original, input_device(original)).cpu(), original.config)


@torch.no_grad()
def kl_by_row(
    original: Original,
    model: PreTrainedModel,
    rows: Sequence[Any],
    *,
    progress: bool = False,
    ranks: Ranks = ALONE,
) -> tuple[list[float], list[int]]:
    """For each row the sum of KL(original || model) in nats, and the number of kept tokens; the same on all ranks."""
    device = input_device(model)
    teacher_head, head = original.head.to(device), whole_head(model, device)

    def own_share() -> list[tuple[float, int]]:
        found = []
        for row, known in zip(
            _share(rows, ranks, "KL to the original", progress), original.hidden, strict=True
        ):
            total = _sum(
                original.config, teacher_head, known.to(device), model.config, head, _hidden(model, row)
            )
            found.append((total, len(known)))
        _idle(model, rows, ranks)
        return found

    with _evaluating(model):
        by_rank = ranks.share(own_share)
    pairs = [by_rank[row % ranks.size][row // ranks.size] for row in range(len(rows))]
    return [total for total, _ in pairs], [count for _, count in pairs]


def mean_kl(
    original: Original,
    model: PreTrainedModel,
    rows: Sequence[Any],
    *,
    progress: bool = False,
    ranks: Ranks = ALONE,
) -> dict[str, float | None]:
    """Forward KL in nats per kept token, over `rows` of `fcsd.data.dataset.build_dataset`.

    Args:
        original: from `read_original`, with the same rows and ranks.

    Returns:
        `kl`: sum over tokens / number of tokens; `stderr`: of this ratio, with rows as the independent units;
        `num_tokens`. `stderr` is None for a single row, `kl` too when no row keeps a token.
    """
    return ratio(*kl_by_row(original, model, rows, progress=progress, ranks=ranks))


def _share(rows: Sequence[Any], ranks: Ranks, what: str, progress: bool) -> Iterator[Any]:
    """This rank's rows, with a bar on the first."""
    own = ranks.deal(range(len(rows)))
    for number in tqdm(own, desc=what, unit="row", disable=not (progress and ranks.first), leave=False):
        yield rows[number]


def _idle(model: PreTrainedModel, rows: Sequence[Any], ranks: Ranks) -> None:
    for _ in range(ranks.idle_passes(len(rows))):
        _hidden(model, rows[0])


@contextlib.contextmanager
def _evaluating(model: PreTrainedModel) -> Iterator[None]:
    from torch.distributed.fsdp import FSDPModule

    training = model.training
    model.eval()
    # Weights that transformers has spread are gathered by hooks of the whole model, so its body cannot be called alone.
    as_a_whole = isinstance(model, FSDPModule)
    if as_a_whole:
        attach_loss_head(model)
    try:
        yield
    finally:
        if as_a_whole:
            detach_loss_head(model)
        model.train(training)


def _hidden(model: PreTrainedModel, row: Any) -> Tensor:
    """(N, D) hidden states of the row's kept tokens."""
    batch = Collator()([row])
    device = input_device(model)
    ids, positions = (batch[name].to(device) for name in ("input_ids", "position_ids"))
    refuse_packing(model, batch["labels"], batch["position_ids"])
    keep, _ = next_token_targets(batch["labels"].to(device), positions)
    return final_hidden(model, ids, positions, keep)


def _sum(
    original_config: Any,
    teacher_head: nn.Linear,
    teacher_hidden: Tensor,
    config: Any,
    head: nn.Linear,
    hidden: Tensor,
) -> float:
    """Forward KL summed over tokens; all tensors are on one device."""
    teacher_scale, teacher_softcap = head_scaling(original_config)
    scale, softcap = head_scaling(config)
    total = fused_linear_kl(
        hidden,
        head.weight,
        teacher_hidden,
        teacher_head.weight,
        bias=head.bias,
        teacher_bias=teacher_head.bias,
        logit_scale=scale,
        teacher_logit_scale=teacher_scale,
        softcap=softcap,
        teacher_softcap=teacher_softcap,
        vocab_size=unpadded_vocab_size(config),
    )
    return float(total)
