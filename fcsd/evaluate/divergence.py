"""KL(original || model) on held-out text: the figure that distillation minimises, on rows it has not seen."""

import contextlib
import copy
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from fcsd.distill.data import Collator, next_token_targets
from fcsd.distill.head import final_hidden, head_scaling, output_head, refuse_packing, unpadded_vocab_size
from fcsd.distill.losses import fused_linear_kl


@torch.no_grad()
def mean_kl(
    original: PreTrainedModel, model: PreTrainedModel, rows: Sequence[Any], *, progress: bool = False
) -> dict[str, float | None]:
    """Forward KL in nats per kept token, over `rows` of `fcsd.distill.data.build_dataset`.

    Both compute on the device of `model`, one after the other, because an accelerator may not hold both: meanwhile the
    other is in main memory, where `original` is left.

    Returns:
        `kl`: sum over tokens / number of tokens; `stderr`: of this ratio, with rows as the independent units;
        `num_tokens`. `stderr` is None for a single row, `kl` too when no row keeps a token.

    Raises:
        UserError: packed rows for a family that would let the examples in them see each other.
    """
    device = model.device
    _move(model, "cpu")
    _move(original, device)
    hidden = original_hidden(original, rows, progress=progress)
    _move(original, "cpu")
    _move(model, device)
    head = copy.deepcopy(output_head(original)).to(device)
    with _evaluating(model):
        bar = tqdm(rows, desc="KL to the original", unit="row", disable=not progress, leave=False)
        sums = [
            _sum(original, head, known.to(device), model, _hidden(model, row))
            for row, known in zip(bar, hidden, strict=True)
        ]
    return ratio(sums, [len(known) for known in hidden])


def _move(model: PreTrainedModel, device: Any) -> None:
    torch.nn.Module.to(model, device)


@torch.no_grad()
def original_hidden(
    original: PreTrainedModel, rows: Sequence[Any], *, progress: bool = False
) -> list[Tensor]:
    """What KL needs to know of the original, so that the only copy of the model can then be rewired in place.

    Returns: for each row the (kept tokens, D) hidden states after the final norm, in main memory.
    """
    with _evaluating(original):
        bar = tqdm(rows, desc="the original's hidden states", unit="row", disable=not progress, leave=False)
        return [_hidden(original, row).cpu() for row in bar]


@torch.no_grad()
def kl_by_row(
    model: PreTrainedModel, rows: Sequence[Any], hidden: Sequence[Tensor]
) -> tuple[list[float], list[int]]:
    """For each row the sum of the forward KL in nats, and the number of kept tokens.

    hidden: from `original_hidden` of the same weights with regular connectivity.
    """
    with _evaluating(model):
        sums = [
            _sum(model, output_head(model), known.to(model.device), model, _hidden(model, row))
            for known, row in zip(hidden, rows, strict=True)
        ]
    return sums, [len(known) for known in hidden]


@contextlib.contextmanager
def _evaluating(*models: PreTrainedModel) -> Iterator[None]:
    modes = [(model, model.training) for model in models]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for model, training in modes:
            model.train(training)


def _hidden(model: PreTrainedModel, row: Any) -> Tensor:
    """(N, D) hidden states of the row's kept tokens."""
    batch = Collator()([row])
    ids, positions = (batch[name].to(model.device) for name in ("input_ids", "position_ids"))
    refuse_packing(model, batch["labels"], batch["position_ids"])
    keep, _ = next_token_targets(batch["labels"].to(model.device), positions)
    return final_hidden(model, ids, positions, keep)


def _sum(
    original: PreTrainedModel,
    teacher_head: Any,
    teacher_hidden: Tensor,
    model: PreTrainedModel,
    hidden: Tensor,
) -> float:
    """Forward KL summed over tokens; `teacher_head` is the original's, on the device of `model`."""
    teacher_scale, teacher_softcap = head_scaling(original.config)
    scale, softcap = head_scaling(model.config)
    head = output_head(model)
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
        vocab_size=unpadded_vocab_size(model.config),
    )
    return float(total)


def ratio(sums: list[float], counts: list[int]) -> dict[str, float | None]:
    """Ratio estimate and its standard error (Cochran, Sampling Techniques, 6.4): residuals s_i - r c_i over rows."""
    num_tokens = sum(counts)
    if num_tokens == 0:
        return {"kl": None, "stderr": None, "num_tokens": 0}
    ratio = math.fsum(sums) / num_tokens
    n = len(sums)
    if n < 2:
        return {"kl": ratio, "stderr": None, "num_tokens": num_tokens}
    residuals = math.fsum((total - ratio * count) ** 2 for total, count in zip(sums, counts, strict=True))
    return {"kl": ratio, "stderr": math.sqrt(n / (n - 1) * residuals) / num_tokens, "num_tokens": num_tokens}
