"""Gather the figures of the steps for the next line of the log.

Quantiles are taken over a stream of positive numbers that no rank has to store: they
are counted in logarithmic bins, a factor of 10^(1/128) wide, which gives a quantile to
within 1 %, and the counts of several batches and ranks are added up.
"""

import contextlib
import math
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

BINS_PER_DECADE = 128
SMALLEST, LARGEST = 1e-9, 1e3
NUM_BINS = BINS_PER_DECADE * round(math.log10(LARGEST / SMALLEST))


def bin_counts(values: Tensor) -> Tensor:
    """Count (N,) values in (NUM_BINS + 2,) int64 bins; the first holds all below
    `SMALLEST`, the last all from `LARGEST` on.

    No host synchronisation; NaN counts as larger than everything.
    """
    bin_indices = (values.double().clamp(min=SMALLEST / 2) / SMALLEST).log10().mul(
        BINS_PER_DECADE
    ).floor() + 1
    bin_indices = (
        bin_indices.nan_to_num(nan=NUM_BINS + 1.0).clamp(0, NUM_BINS + 1).long()
    )
    counts = torch.zeros(NUM_BINS + 2, dtype=torch.int64, device=values.device)
    return counts.scatter_add_(0, bin_indices, torch.ones_like(bin_indices))


def quantile(counts: Tensor, q: float) -> float | None:
    """Return the value at rank ceil(q * N) of the N counted ones, within 1 %; 0 below
    `SMALLEST`; None for N = 0.
    """
    cumulative = counts.cumsum(0)
    total = int(cumulative[-1])
    if total == 0:
        return None
    rank = max(1, math.ceil(q * total))
    bin_index = int(torch.searchsorted(cumulative, rank))
    if bin_index == 0:
        return 0.0
    if bin_index == NUM_BINS + 1:
        return LARGEST
    # the geometric middle of the bin
    return SMALLEST * 10 ** ((bin_index - 0.5) / BINS_PER_DECADE)


class Meters:
    """Sums over the kept tokens of this rank since the last log; the logged figures are
    over those of all ranks.

    Logged beside what `Trainer` logs, each the mean of the steps since the last log, over kept tokens of all ranks:
        ce                          cross-entropy, nats, of the objectives sft and ce
        kl | reverse_kl | jsd       the divergence, nats
        kl_p50, kl_p90, kl_p99      its quantiles over all tokens of these steps, within 1 % (likewise for the others)
        top1_agreement              share of tokens whose most probable continuation is the teacher's; of ties the first
        teacher_entropy             nats
        l2                          before its coefficient, see `fcsd.training.losses.hidden_terms`
        balance                     mean of MoE layers, 1 when balanced, see `fcsd.training.losses.balance`; with it
        load_max_over_mean          of an expert's tokens since the last log, mean of MoE layers
        dead_experts                that had none of them, in all MoE layers
        dropped_share               of the pairs of token and expert, with train.capacity_factor
        own_rows                    their number, of rows with own text (`fcsd.training.own_text`)
        own_ended, own_cut          texts in them that the student has ended, and that their limit has
        own_mean_tokens             their mean length
        own_time_share              share of the time that writing them took, mean of the ranks
        tokens_per_second           all tokens, of all ranks
    Divergence and entropy are taken at objective.temperature.

    divergence: the name that the divergence is logged under.
    """

    def __init__(self, accelerator: Any, divergence: str):
        self.accelerator, self.divergence = accelerator, divergence
        self.reset()

    def reset(self) -> None:
        """Start the sums of the next log line."""
        self._sums: dict[str, Tensor] = {}  # this rank's part of each mean
        self._counts: Tensor | None = None  # this rank's tokens by their divergence
        # of all ranks: tokens of each expert, [layers, experts]
        self._loads: Tensor | None = None
        self._pairs: Tensor | None = None  # this rank's pairs: dropped, and all
        self._written: list[float] | None = None  # this rank's own text
        self.num_tokens = 0  # of all ranks
        self._since = time.perf_counter()

    def kept(self) -> tuple[dict[str, Tensor], Tensor | None, Tensor | None]:
        """Return sums, counts and pairs for `go_back`; no tensor in them is ever
        changed.
        """
        return dict(self._sums), self._counts, self._pairs

    def go_back(self, snapshot: Any) -> None:
        self._sums, self._counts, self._pairs = snapshot

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time within the block, in which nothing is trained, from
        `tokens_per_second`; blocks may nest.
        """
        # The outer of two nested blocks overwrites the shift of the inner one, whose
        # time it contains.
        since, start = self._since, time.perf_counter()
        yield
        self._since = since + time.perf_counter() - start

    def add(self, name: str, value: Tensor) -> None:
        self._sums[name] = self._sums.get(name, 0) + value.detach().float()

    def add_statistics(self, outputs: Any, scale: Tensor) -> None:
        """Add the statistics that a loss head returns for each token."""
        divergence = outputs["divergence"]
        self.add(self.divergence, divergence.sum() * scale)
        self.add("teacher_entropy", outputs["teacher_entropy"].sum() * scale)
        self.add("top1_agreement", outputs["top1_agreement"].sum() * scale)
        counts = bin_counts(divergence)
        self._counts = counts if self._counts is None else self._counts + counts

    def means(self, steps: int) -> dict[str, float]:
        """Return the means of `steps` steps, and quantiles of the divergence. All ranks
        call this.
        """
        if not steps or not self._sums:
            return {}
        # Sorted, because all ranks must stack the sums in the same order.
        names = sorted(self._sums)
        means = self._of_all(
            torch.stack([self._sums[name] for name in names]) / steps, "mean"
        )
        return (
            dict(zip(names, means.tolist(), strict=True))
            | self._quantiles()
            | self._balance()
            | self._dropped()
        )

    def add_loads(self, loads: Tensor | None) -> None:
        """Add the tokens of each expert in a step, over all ranks, [layers, experts]."""
        if loads is not None:
            self._loads = loads if self._loads is None else self._loads + loads

    def add_pairs(self, pairs: tuple[Tensor, Tensor] | None) -> None:
        """Add a micro-batch's pairs of token and expert: the dropped ones, and all."""
        if pairs is not None:
            added = torch.stack(pairs)
            self._pairs = added if self._pairs is None else self._pairs + added

    def add_written(
        self, *, rows: int, texts: int, ended: int, tokens: int, seconds: float
    ) -> None:
        """Add the own text of a step: rows that hold it, texts, those among them that
        the student has ended, their tokens, and the time that it took.
        """
        added = [rows, texts, ended, tokens, seconds]
        sums = self._written or [0.0] * len(added)
        self._written = [a + b for a, b in zip(sums, added, strict=True)]

    def written(self) -> dict[str, float]:
        """Return the figures of own text since the last log. All ranks call this."""
        if self._written is None:
            return {}
        share = self._written[-1] / (time.perf_counter() - self._since)
        sums = torch.tensor(
            [*self._written[:-1], share, 1.0],
            dtype=torch.float64,
            device=self.accelerator.device,
        )
        rows, texts, ended, tokens, shares, ranks = self._of_all(sums, "sum").tolist()
        return {
            "own_rows": rows,
            "own_ended": ended,
            "own_cut": texts - ended,
            "own_mean_tokens": tokens / max(texts, 1),
            "own_time_share": round(shares / ranks, 4),
        }

    def _dropped(self) -> dict[str, float]:
        if self._pairs is None:
            return {}
        dropped, pairs = self._of_all(self._pairs, "sum").tolist()
        return {"dropped_share": dropped / max(pairs, 1)}

    def _balance(self) -> dict[str, float]:
        if self._loads is None:
            return {}
        loads = self._loads.double()
        max_over_mean = (loads.amax(1) / loads.mean(1).clamp(min=1e-9)).mean()
        return {
            "load_max_over_mean": float(max_over_mean),
            "dead_experts": float((loads == 0).sum()),
        }

    def tokens_per_second(self) -> float:
        return round(self.num_tokens / (time.perf_counter() - self._since), 1)

    def _quantiles(self) -> dict[str, float]:
        if self._counts is None:
            return {}
        counts = self._of_all(self._counts, "sum").cpu()
        quantiles = {
            f"{self.divergence}_p{q}": quantile(counts, q / 100) for q in (50, 90, 99)
        }
        return {name: value for name, value in quantiles.items() if value is not None}

    def _of_all(self, values: Tensor, reduction: str) -> Tensor:
        reduced: Tensor = self.accelerator.reduce(values, reduction)
        return reduced
