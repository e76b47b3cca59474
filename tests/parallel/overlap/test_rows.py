"""A row travels once to each rank: packing, bytes on the wire, sums and gradients by
hand.
"""

import itertools
import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.overlap.models import a_row_for_each_expert
from fcsd.base.errors import UserError
from fcsd.parallel.overlap import OverlappedEP
from fcsd.parallel.overlap.rows import Parcels, gathered, pairs_of, summed
from fcsd.parallel.overlap.transport import AllToAll
from fcsd.planning.network.simulate import rows_per_token
from tests.reference.ranks import run_ranks
from tests.support import few

EXPERTS, TOKENS, WIDTH = 8, 280, 512
TOP_K = (2, 4, 8)


class Scales(nn.Module):
    """Expert e multiplies by its own vector."""

    def __init__(self, scales: Tensor):
        super().__init__()
        self.num_experts = len(scales)
        self.scales = nn.Parameter(scales)

    def forward(self, rows: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return rows * self.scales[ids.squeeze(-1)] * weights


class Counting(AllToAll):
    """Sums the bytes that leave this rank."""

    num_bytes = 0

    def start(self, received: Tensor, sent: Tensor, receive: Any, send: Any) -> Any:
        elsewhere = sum(send) - send[dist.get_rank(self.group)]
        Counting.num_bytes += elsewhere * sent[:1].numel() * sent.element_size()
        return super().start(received, sent, receive, send)


def routed(rank: int, top_k: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return tokens, their experts, weights, the gradient of their sum, and all
    experts' vectors.

    Every set of experts is chosen equally often, so that exactly the expected rows
    travel, besides the words of the pairs.
    """
    made = torch.Generator().manual_seed(10 * top_k + rank)
    rows, gradient = (
        torch.randn(TOKENS, WIDTH, generator=made, dtype=torch.float64)
        for _ in range(2)
    )
    sets = torch.tensor(list(itertools.combinations(range(EXPERTS), top_k)))
    experts = sets.repeat(TOKENS // len(sets), 1)[
        torch.randperm(TOKENS, generator=made)
    ]
    weights = torch.rand(TOKENS, top_k, generator=made, dtype=torch.float64)
    scales = torch.randn(
        EXPERTS, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    return rows, experts, weights, gradient, scales


def exchanged(rank: int, top_k: int, world: int) -> tuple[float, list[float]]:
    """Return (bytes relative to a row for each expert, errors of output and gradients
    against sums by hand).
    """
    rows, experts, weights, gradient, scales = routed(rank, top_k)
    mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("ep", "tp"))
    module = Scales(scales.chunk(world)[rank])
    ep = OverlappedEP(module, mesh["ep"], mesh["tp"])
    ep.open(0, (True, True), Counting)
    num_bytes = []
    for way in (a_row_for_each_expert(top_k), nullcontext()):
        module.zero_grad()
        x, w = rows.clone().requires_grad_(), weights.clone().requires_grad_()
        Counting.num_bytes = 0
        with way:
            out = ep(x, experts, w)
        out.backward(gradient)
        num_bytes.append(Counting.num_bytes)
    chosen = scales[experts]  # (N, K, D)
    expected = (
        (out, rows * (weights.unsqueeze(-1) * chosen).sum(1)),
        (x.grad, gradient * (weights.unsqueeze(-1) * chosen).sum(1)),
        (w.grad, ((gradient * rows).unsqueeze(1) * chosen).sum(-1)),
        (module.scales.grad, own_gradient(rank, top_k, world)),
    )
    errors = [
        float(((one - other).abs().max() / other.abs().max()).detach())
        for one, other in expected
    ]
    return num_bytes[1] / num_bytes[0], errors


def each_exchanged(rank: int, world: int) -> list[tuple[float, list[float]]]:
    return [exchanged(rank, top_k, world) for top_k in TOP_K]


def own_gradient(rank: int, top_k: int, world: int) -> Tensor:
    """Return the gradients of the vectors of a rank's experts, from the tokens of all ranks."""
    total = torch.zeros(EXPERTS, WIDTH, dtype=torch.float64)
    for other in range(world):
        rows, experts, weights, gradient, _ = routed(other, top_k)
        for choice in range(top_k):
            total.index_add_(
                0, experts[:, choice], weights[:, choice, None] * rows * gradient
            )
    return total.chunk(world)[rank]


@pytest.mark.parametrize("world", few([2, 4], 1))
def test_bytes_fall_by_the_predicted_share_and_sums_are_those_by_hand(
    world: int,
) -> None:
    for each in run_ranks(each_exchanged, world, world):
        for top_k, (share, errors) in zip(TOP_K, each, strict=True):
            assert share == pytest.approx(
                rows_per_token(EXPERTS, top_k, world) / top_k, rel=0.01
            )
            assert max(errors) < 1e-13, errors


def counted(num_experts: int, top_k: int, ranks: int, groups: tuple[int, int]) -> float:
    """Return the mean number of ranks that hold the experts of an allowed set, by
    counting; all sets are equally likely.
    """
    rows = sets = 0
    own = num_experts // groups[0]
    for kept in itertools.combinations(range(groups[0]), groups[1]):
        allowed = [
            expert for group in kept for expert in range(group * own, (group + 1) * own)
        ]
        for chosen in itertools.combinations(allowed, top_k):
            sets += 1
            rows += len({expert * ranks // num_experts for expert in chosen})
    return rows / sets


@pytest.mark.parametrize("top_k", [1, 2, 4])
@pytest.mark.parametrize(
    ("ranks", "groups"),
    [
        (2, (1, 1)), (4, (1, 1)), (12, (1, 1)), (4, (4, 2)), (2, (4, 2)), (12, (4, 3)), (3, (6, 4)), (4, (3, 3)),
    ],
)  # fmt: skip
def test_the_rows_of_a_token_are_the_ranks_of_its_experts(
    top_k: int, ranks: int, groups: tuple[int, int]
) -> None:
    rows = rows_per_token(12, top_k, ranks, groups=groups)
    assert rows == pytest.approx(counted(12, top_k, ranks, groups))


def test_eight_experts_over_eight_ranks_send_5_25_rows_and_a_busy_rank_at_most_one_of_each_token():
    assert rows_per_token(10**6, 8, 8) == pytest.approx(5.25, abs=0.002)
    # by what has 12 instead of 8 experts
    missed = math.comb(64 - 12, 6) / math.comb(64, 6)
    assert rows_per_token(64, 6, 8, imbalance=1.5) == pytest.approx(8 * (1 - missed))
    assert rows_per_token(64, 6, 8, imbalance=8) == 8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_what_is_unpacked_is_what_was_packed(dtype: torch.dtype) -> None:
    """By hand: rows of 4 (bfloat16: 2) words for three ranks; the second gets none, and
    the third gets three pairs for two rows.
    """
    rows, pairs = [1, 0, 2], [2, 0, 3]
    words = 2 if dtype == torch.bfloat16 else 4
    parcels = Parcels(torch.tensor([rows, pairs]).t(), rows, pairs, words)
    assert parcels.splits == ([1 + 2, 0, 2 + 3] if words == 2 else [1 + 1, 0, 2 + 2])
    sent, weights, codes = (
        torch.randn(3, 4).to(dtype),
        torch.rand(5),
        torch.tensor([0, 3, 1, 4, 2**31 - 1]),
    )
    for numbering in (codes, None):  # forward, and gradients
        packed = parcels.pack(sent, weights, numbering)
        of_rows, unpacked, numbers = parcels.unpack(packed)
        assert of_rows.tolist() == [0, *((3, 4) if words == 2 else (2, 3))]
        assert torch.equal(packed[of_rows], sent)
        assert torch.equal(unpacked.float(), weights)
        assert (
            torch.equal(numbers, codes) if numbering is not None else not numbers.any()
        )


def test_pairs_know_their_row_and_sums_are_those_of_float32_in_both_directions():
    """Two ranks with 2 rows each, 3 experts here."""
    counts = torch.tensor([[2, 3], [2, 2]])
    received = Parcels(counts, [2, 2], [3, 2], 8)
    ids, row, lengths = pairs_of(torch.tensor([2, 3, 5, 0, 4]), received, 3)
    assert ids.tolist() == [2, 0, 2, 0, 1] and row.tolist() == [0, 1, 1, 2, 3]
    assert lengths.tolist() == [1, 2, 1, 1]
    rows = torch.tensor([[256.0], [1.0], [1.0], [2.0], [1.0]], dtype=torch.bfloat16)
    assert summed(rows, torch.tensor([3, 2])).tolist() == [[258.0], [3.0]]
    assert summed(rows[:0], lengths[:0]).shape == (0, 1)
    total = gathered(rows, torch.tensor([0, 1, 0, 1, 0]), [2, 2, 1], 3)
    assert total.dtype == torch.bfloat16 and total.tolist() == [[258.0], [3.0], [0.0]]


def refused(rank: int) -> str:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("ep", "tp"))
    with pytest.raises(UserError) as error:
        OverlappedEP(Scales(torch.ones(2, 2)), mesh["ep"], mesh["tp"])
    return str(error.value)


def test_tensor_parallelism_beside_it_is_refused() -> None:
    message, _ = run_ranks(refused, 2)
    assert message.endswith(
        "does not work with tensor parallelism, but tp_size is 2; set it to 1, or use all_to_all"
    )
