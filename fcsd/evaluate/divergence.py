"""KL(original || model) on held-out text: the figure that distillation minimises, on rows it has not seen."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from fcsd.distill.data import Collator, next_token_targets
from fcsd.distill.head import final_hidden, head_scaling
from fcsd.distill.losses import fused_linear_kl


@torch.no_grad()
def mean_kl(
    original: PreTrainedModel, model: PreTrainedModel, rows: Sequence[Any], *, progress: bool = False
) -> dict[str, float | None]:
    """Forward KL in nats per kept token, over `rows` of `fcsd.distill.data.build_dataset`.

    Returns:
        `kl`: sum over tokens / number of tokens; `stderr`: of this ratio, with rows as the independent units;
        `num_tokens`. `stderr` is None for a single row, `kl` too
        when no row keeps a token.
    """
    from tqdm import tqdm

    sums: list[float] = []
    counts: list[int] = []
    modes = [(each, each.training) for each in (original, model)]
    for each, _ in modes:
        each.eval()
    try:
        for row in tqdm(rows, desc="KL to the original", unit="row", disable=not progress, leave=False):
            batch = Collator()([row])
            total, count = _row(original, model, batch)
            sums.append(total)
            counts.append(count)
    finally:
        for each, training in modes:
            each.train(training)
    return _ratio(sums, counts)


def _row(original: PreTrainedModel, model: PreTrainedModel, batch: dict[str, Tensor]) -> tuple[float, int]:
    ids, positions = (batch[name].to(model.device) for name in ("input_ids", "position_ids"))
    keep, _ = next_token_targets(batch["labels"].to(model.device), positions)
    teacher_hidden = final_hidden(original, ids, positions, keep)
    hidden = final_hidden(model, ids, positions, keep)
    teacher_scale, teacher_softcap = head_scaling(original.config)
    scale, softcap = head_scaling(model.config)
    total = fused_linear_kl(
        hidden,
        model.lm_head.weight,
        teacher_hidden,
        original.lm_head.weight,
        bias=model.lm_head.bias,
        teacher_bias=original.lm_head.bias,
        logit_scale=scale,
        teacher_logit_scale=teacher_scale,
        softcap=softcap,
        teacher_softcap=teacher_softcap,
    )
    return float(total), int(keep.sum())


def _ratio(sums: list[float], counts: list[int]) -> dict[str, float | None]:
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
