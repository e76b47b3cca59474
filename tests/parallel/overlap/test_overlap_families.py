"""Every family that overlaps has the bits of blocking exchanges on two ranks, in
float32 and bfloat16; and the page that lists them.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from fcsd.model.connectivity import Connectivity, load_model
from fcsd.model.families import ALL_FAMILIES, FAMILIES
from fcsd.model.families.overlap import refusal
from tests.parallel.overlap.ranks import (
    CHECKPOINTING,
    X,
    attached,
    same,
    spread,
    step,
    worst,
)
from tests.reference.ranks import in_turn, run_ranks
from tests.reference.tiny import tiny_model
from tests.reference.upstream import families_lists
from tests.support import ROOT, few

NAMES = [name for name, family in FAMILIES.items() if refusal(family) is None]
TIGHT = [
    "qwen2_moe", "qwen3_moe", "mixtral", "deepseek_v2", "deepseek_v3", "glm4_moe", "gpt_oss", "granitemoeshared",
    "instella_moe", "llama4_text", "qwen3_next",
]  # fmt: skip
NOT_IN_BF16 = {"minimax", "inkling2", "inkling2_text"}
"""Whose own attention or router multiplies float32 by bfloat16 under FSDP's mixed
precision; fails in transformers alone, too.
"""
WIDER: dict[str, dict[str, int]] = {"muse_spark": {"moe_hidden_size": 32}}
"""A grouped matmul in bfloat16 takes rows of a multiple of 16 bytes."""


def compared(rank: int, folder: Path) -> tuple[bool, bool, bool, float]:
    """Return whether full, full with checkpointing, and the latter with bfloat16 mixed
    precision have the bits of blocking; and, on the first rank, the error against one
    process.
    """
    model = spread(folder, Connectivity("all"), 2)
    steps = []
    for overlap in ("blocking", "full", "full"):
        attached(model, overlap)
        torch.manual_seed(5)  # PhiMoE's routers sample
        steps.append(step(model, X.chunk(2)[rank]))
        if overlap == "full":
            model.activation_checkpointing_enable(CHECKPOINTING)
    expected = None
    if rank == 0:
        expected = step(load_model(folder, connectivity=Connectivity("all")), X)
    blocking, full, checkpointed = steps
    return (
        same(full, blocking), same(checkpointed, blocking), in_bf16(rank, folder), worst(blocking, expected),
    )  # fmt: skip


def in_bf16(rank: int, folder: Path) -> bool:
    """Tell whether full with checkpointing has the bits of blocking without it, with
    the weights gathered in bfloat16.
    """
    if folder.name in NOT_IN_BF16:
        return True
    model = spread(folder, Connectivity("all"), 2, fsdp_mixed_precision=True)
    steps = []
    for overlap in ("blocking", "full"):
        attached(model, overlap)
        torch.manual_seed(5)
        steps.append(step(model, X.chunk(2)[rank]))
        model.activation_checkpointing_enable(CHECKPOINTING)
    return same(*steps)


# of heads that upstream's forward views
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.parametrize("name", few(NAMES, kinds={"deepseek_v3", "gpt_oss"}))
def test_a_family_that_overlaps_has_the_bits_of_blocking_and_one_processs_gradients(
    name: str, tmp_path: Path
) -> None:
    """Larger errors come from sums of tiny gradients in another order (qwen3_5_moe
    1.3e-5, granitemoehybrid 6.4e-6).
    """
    folder = tmp_path / name
    tiny_model(name, **WIDER.get(name, {})).save_pretrained(folder)
    by_rank = run_ranks(compared, 2, folder, timeout_s=600)
    for full, checkpointed, bf16, _ in by_rank:
        assert full and checkpointed and bf16
    error = by_rank[0][3]
    assert name == "phimoe" or error < (5e-6 if name in TIGHT else 5e-5)


def four(rank: int, folder: Path) -> dict[Any, Any]:
    by_size = {}
    for name in ("qwen3_moe", "deepseek_v3"):
        one = None
        if rank == 0:
            one = step(load_model(folder / name, connectivity=Connectivity("all")), X)
        for size in in_turn((2, 4)):
            model = spread(folder / name, Connectivity("all"), size)
            attached(model, "blocking")
            blocking = step(model, X[rank : rank + 1])
            attached(model, "full")
            by_size[name, size] = (
                same(step(model, X[rank : rank + 1]), blocking),
                worst(blocking, one),
            )
    return by_size


@pytest.mark.breadth
def test_four_ranks_share_the_experts_in_pairs_or_all_of_them(tmp_path: Path) -> None:
    for name in ("qwen3_moe", "deepseek_v3"):
        tiny_model(name).save_pretrained(tmp_path / name)
    for case, (same_bits, error) in run_ranks(four, 4, tmp_path)[0].items():
        assert same_bits and error < 5e-6, (case, error)


def test_the_page_lists_every_family_and_how_far_it_overlaps() -> None:
    page = (ROOT / "docs" / "families.md").read_text(encoding="utf-8")
    assert f"<!-- families -->\n\n{families_lists()}\n\n<!-- /families -->" in page, (
        "python -m tests.reference.upstream writes it"
    )
    refused = page.partition("\nNo overlap, because\n")[2].partition(
        "\nNo shared experts"
    )[0]
    without = [row for row in ALL_FAMILIES.values() if refusal(row) is not None]
    assert refused.count("`") == 2 * len(without)
