"""Least squares with a ridge towards the identity, from sums over tokens in float64.

    A = (XᵀX + λI)⁻¹ (XᵀY + λJ)      λ = ridge · mean diagonal of XᵀX;  J: identities, one below the other

X (N, K·D) and Y (N, D) are never kept: chunks of their rows are added up, and the sums
of several ranks too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fcsd.base.errors import UserError
from fcsd.parallel.ranks import ALONE, Ranks

FITS_THE_SAMPLE = 1.15
"""A map that leaves more than this times what the identity leaves of rows that it was
not solved on is not taken.

Not 1: on the models of benchmarks/recovery the KL falls with maps that leave up to 1.1
times as much.
"""
_NOISE = 1e-12  # float32 gives 1e-14, squared and relative


@dataclass(frozen=True)
class Solution:
    """A map (K·D, D) in float64, and |XJ - Y|²/|Y|² before it, |XA - Y|²/|Y|² after it.

    map: None where X and Y are the same, but for rounding, and nothing is to be
    changed. held_out: the two residuals of rows that a map was tested on, which was
    solved without them.
    """

    map: Tensor | None
    before: float
    after: float
    held_out: tuple[float, float] = (0.0, 0.0)


class LeastSquares:
    """The sums of one problem. width: D; num_inputs: K."""

    def __init__(
        self, width: int, num_inputs: int = 1, device: torch.device | str = "cpu"
    ) -> None:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64, device=device)

        self.width, inputs = width, num_inputs * width
        self.xx, self.xy, self.yy = (
            zeros(inputs, inputs),
            zeros(inputs, width),
            zeros(1),
        )
        self.different, self.rows = zeros(1), zeros(1)

    def add(self, x: Tensor, y: Tensor) -> None:
        """Add rows: x (N, K·D), y (N, D)."""
        x, y = x.double(), y.double()
        self.xx.addmm_(x.T, x)
        self.xy.addmm_(x.T, y)
        self.yy += y.square().sum()
        self.rows += len(x)
        if x.shape != y.shape or not torch.equal(x, y):
            self.different += 1

    def add_sums(self, other: LeastSquares) -> None:
        """Add the rows of another problem of the same widths."""
        for name in ("xx", "xy", "yy", "different", "rows"):
            getattr(self, name).add_(getattr(other, name))

    @property
    def count(self) -> int:
        """Number of rows, of all ranks once they are added up."""
        return int(self.rows.item())

    def sum_over(self, ranks: Ranks) -> None:
        """Add up what all ranks have. All of them call this."""
        if ranks.size > 1:
            import torch.distributed as dist

            for tensor in (self.xx, self.xy, self.yy, self.different, self.rows):
                dist.all_reduce(tensor)

    def solve(
        self,
        ridge: float,
        what: str,
        ranks: Ranks = ALONE,
        towards: Tensor | None = None,
    ) -> Solution:
        """Solve by Cholesky. All ranks get the same map. what: the problem's name in
        errors. towards: J (K·D, D), as a rule identities, the map that the ridge pulls
        to.

        Raises:
            UserError: sums that are not finite, or a matrix that is singular with this
                ridge.
        """
        if not all(torch.isfinite(sums).all() for sums in (self.xx, self.xy, self.yy)):
            raise UserError(
                f"{what}: the sums over the calibration text are not finite; the model"
                " gives values that are not numbers on it, look at the text and at the"
                " checkpoint (fcsd inspect)"
            )
        size = self.xx.shape[0]
        if towards is None:
            towards = self._identities()
        before = self.residual(towards)
        if not self.different.item() or before < _NOISE:
            return Solution(None, before, before)
        weight = ridge * self.xx.diagonal().mean()
        gram = self.xx + weight * torch.eye(
            size, dtype=torch.float64, device=self.xx.device
        )
        factor, failed = torch.linalg.cholesky_ex(gram)
        pivots = factor.diagonal()
        if failed.item() or pivots.min() <= 1e-7 * pivots.max():
            raise UserError(
                f"{what}: the Gram matrix of the calibration text is singular: its"
                f" tokens do not tell {size} directions apart with ridge {ridge:g};"
                " give more, or more varied text, or a larger ridge (1e-3)"
            )
        matrix = torch.cholesky_solve(self.xy + weight * towards, factor)
        if ranks.size > 1:
            import torch.distributed as dist

            dist.broadcast(matrix, 0)
        return Solution(matrix, before, self.residual(matrix))

    def solve_checked(
        self,
        held_out: LeastSquares,
        ridge: float,
        what: str,
        ranks: Ranks = ALONE,
        towards: Tensor | None = None,
        limit: float = FITS_THE_SAMPLE,
    ) -> Solution:
        """Solve with the rows of `held_out` too, if a map that was solved without them
        leaves at most `limit` times as much of them as `towards` does; the map is None
        otherwise: `towards` is to be taken. Raises as `solve`.
        """
        if towards is None:
            towards = self._identities()
        matrix = self.solve(ridge, what, ranks, towards).map
        before = held_out.residual(towards)
        after = before if matrix is None else held_out.residual(matrix)
        fits = matrix is not None and after <= limit * before
        self.add_sums(held_out)
        if not fits:
            residual = self.residual(towards)
            return Solution(None, residual, residual, (before, after))
        return replace(
            self.solve(ridge, what, ranks, towards), held_out=(before, after)
        )

    def _identities(self) -> Tensor:
        one = torch.eye(self.width, dtype=torch.float64, device=self.xx.device)
        return one.repeat(len(self.xx) // self.width, 1)

    def residual(self, matrix: Tensor | None = None) -> float:
        """Return |XA - Y|² / |Y|², from the sums, of the identities without a map; 0 where Y is."""
        matrix = self._identities() if matrix is None else matrix
        squares = (
            self.yy - 2 * (matrix * self.xy).sum() + (matrix * (self.xx @ matrix)).sum()
        )
        return float((squares / self.yy).clamp(min=0)) if self.yy.item() else 0.0
