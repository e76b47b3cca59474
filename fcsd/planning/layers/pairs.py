"""Measure what two MLP sides cost together, beside what each costs alone.

For small damages, the KL to the original of a model with a set S of MLP sides ahead is a
quadratic form in d_i, the change of a token's logits by side i alone:

    KL(S) = base + sum of price(i) over i in S + sum of moment(i, j) over its pairs + O(d^3)
    moment(i, j) = mean over tokens of d_i' (diag(p) - p p') d_j

p holds the original's probabilities. base is the KL of no side ahead; price(i) is what
side i alone adds to it. Prices alone take the damages of any two sides for unrelated.
Attention must be ahead in all layers or in none: attention ahead does not read what the
MLP side before it changed, so that their damages do not add up even where they are small.

A layer study measures every side alone anyway. It keeps the final hidden states of each
in a file, from which the moments are computed in the end by chunks of tokens: nothing of
size tokens x vocabulary is kept, and no forward pass is added.

Not covered: the choice from prices and pairs (`fcsd.planning.layers.front`); metrics
other than the KL.
"""

import contextlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from fcsd.base.errors import UserError
from fcsd.base.text import progress_bar, size
from fcsd.base.writing import file_beside, writing
from fcsd.model.connectivity.selection import selection_text
from fcsd.model.families.structure import head_scaling, unpadded_vocab_size
from fcsd.parallel.launch import Ranks
from fcsd.training.losses.fused import CHUNK_BYTES
from fcsd.training.losses.heldout_kl import OriginalOutputs


def pair_rows(moments: Tensor, *, with_base: bool) -> list[list[float]]:
    """Return the moments of layers for the study's file: row k has those of layer k with
    layers 0 to k.

    moments: of the models with one side ahead. with_base: the first is that of no side,
    which differs from the original, too; its change is taken out of the others.
    """
    if with_base:
        alone = torch.eye(len(moments), dtype=moments.dtype)[1:]
        alone[:, 0] = -1
        moments = alone @ moments @ alone.T
    rows = moments.tolist()
    return [[float(f"{x:.6g}") for x in row[: k + 1]] for k, row in enumerate(rows)]


class HiddenStates:
    """Final hidden states of this rank's share of a text, a file for each selection and
    kind of weights; a killed study continues with them.

    num_files: that there will be on each rank.
    """

    def __init__(self, folder: Path, ranks: Ranks, num_files: int) -> None:
        self.folder, self.ranks, self.num_files = folder, ranks, num_files

    def path(self, layers: Sequence[int], weights: str) -> Path:
        name = selection_text(layers)
        return self.folder / f"{name}-{weights}-{self._share}.safetensors"

    @property
    def _share(self) -> str:
        return f"{self.ranks.rank}-of-{self.ranks.size}"

    def has(self, layers: Sequence[int], weights: Sequence[str]) -> bool:
        """Tell whether every rank has kept a selection; all ranks call this."""
        files = [self.path(layers, kind) for kind in weights]
        return all(self.ranks.share(lambda: all(file.is_file() for file in files)))

    def keep(
        self, layers: Sequence[int], weights: str, states: Sequence[Tensor]
    ) -> None:
        """Write the states of a selection; all ranks call this.

        Raises:
            UserError: the disk has no room for this file and those that are to come.
        """

        def write() -> None:
            path = self.path(layers, weights)
            path.parent.mkdir(exist_ok=True)
            # A rank may have no rows.
            hidden = torch.cat([*states]) if states else torch.empty(0, 0)
            to_come = self.num_files - len([*self.folder.glob(f"*-{self._share}.*")])
            # The ranks of a machine share its disk.
            needed = max(1, to_come) * hidden.nbytes * self.ranks.size
            if needed > (free := shutil.disk_usage(self.folder).free):
                raise UserError(
                    f"{self.folder}: pairs of MLP sides need up to {size(needed)} for"
                    f" hidden states while the study runs, and {size(free)} are free;"
                    " make room, or give fewer --text-examples or a lower --max-length"
                )
            with writing(path), file_beside(path) as temporary:
                temporary.write_bytes(save({"hidden": hidden}))
                os.replace(temporary, path)

        self.ranks.share(write)

    def remove(self) -> None:
        """Remove all files, those of other numbers of ranks, too."""
        shutil.rmtree(self.folder, ignore_errors=True)


@torch.no_grad()
def second_moments(
    original: OriginalOutputs,
    files: Sequence[Path],
    *,
    device: torch.device,
    ranks: Ranks,
) -> Tensor:
    """Return moment(g, h) of the models whose hidden states are in these files, in nats
    per token and float64, the same on all ranks; all ranks call this.

    original: of the same text and ranks.
    """

    def own_share() -> tuple[list[list[float]], int]:
        # Dummy rows, which a rank in lockstep appends, belong to no share.
        batches = ranks.deal(range(len(original.part_rows)))
        hidden = [batch["teacher_hidden"] for batch in original.batches[: len(batches)]]
        with contextlib.ExitStack() as stack:
            stored = [
                stack.enter_context(safe_open(file, "pt")).get_slice("hidden")
                for file in files
            ]
            together = torch.cat(hidden) if hidden else torch.empty(0, 0)
            with progress_bar(
                total=len(together), desc="pairs", unit="token", shown=ranks.first
            ) as bar:
                return _moment_sums(original, together, stored, device, bar)

    by_rank = ranks.share(own_share)
    sums = torch.tensor([moments for moments, _ in by_rank], dtype=torch.float64)
    return sums.sum(0) / sum(count for _, count in by_rank)


def _moment_sums(
    original: OriginalOutputs,
    hidden: Tensor,
    stored: Sequence[Any],
    device: torch.device,
    bar: Any,
) -> tuple[list[list[float]], int]:
    """Return the sums of the moments over tokens, and the number of tokens.

    hidden: (N, D) of the original. stored: of each model the same, to slice. bar:
    counts tokens.
    """
    vocab_size = unpadded_vocab_size(original.config)
    weight = original.head.weight[:vocab_size].to(device)
    weight = weight.to(torch.promote_types(weight.dtype, torch.float32))
    bias: Tensor | None = original.head.bias
    if bias is not None:
        bias = bias[:vocab_size].to(device)
    scale, softcap = head_scaling(original.config)
    num_models = len(stored)
    sums = torch.zeros(num_models, num_models, dtype=torch.float64)
    # Logits of all models, and as much again for what is computed from them.
    token_bytes = 2 * (1 + num_models) * weight.shape[0] * weight.dtype.itemsize
    kind = "cpu" if device.type == "cpu" else "accelerator"
    chunk = max(1, CHUNK_BYTES[kind] // token_bytes)
    for begin in range(0, len(hidden), chunk):
        part = slice(begin, min(begin + chunk, len(hidden)))
        states = torch.stack([hidden[part], *[states[part] for states in stored]])
        # All models in one product: few tokens would use the head badly.
        logits = torch.nn.functional.linear(
            states.to(device, weight.dtype).flatten(0, 1), weight, bias
        )
        logits = logits.mul_(scale).view(1 + num_models, -1, weight.shape[0])
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        probabilities = logits[0].softmax(-1)
        changes = logits[1:].sub_(logits[0])
        changes -= (changes * probabilities).sum(-1, keepdim=True)
        changes *= probabilities.sqrt()
        changes = changes.flatten(1)
        sums += (changes @ changes.T).double().cpu()
        bar.update(len(hidden[part]))
    return sums.tolist(), len(hidden)
