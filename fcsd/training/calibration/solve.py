"""Solve least squares with a ridge towards the identity, from sums over tokens in
float64.

    A = (XᵀX + λI)⁻¹ (XᵀY + λJ)      λ = ridge · mean diagonal of XᵀX;  J: identities, one below the other

X (N, K·D) and Y (N, D) are never stored: their rows are added to XᵀX and XᵀY chunk by
chunk, and the sums of all ranks are added up.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from fcsd.base.errors import UserError
from fcsd.parallel.launch import ALONE, Ranks

FITS_THE_SAMPLE = 1.15
"""A map is rejected if its residual on held-out rows exceeds that of the identity by more
than this factor.

Not 1: on small models, maps of up to 1.1 times the residual still lower the KL.
"""
_NOISE = 1e-12  # rounding in float32 leaves 1e-14, squared and relative


@dataclass(frozen=True)
class Solution:
    """A map (K·D, D) in float64 and the residuals |XJ - Y|²/|Y|² before, |XA - Y|²/|Y|²
    after it.

    map: None if nothing changes: X and Y are the same up to rounding, or
    the map fits its sample only. held_out: both residuals on the held-out rows, of a
    map that is solved without them.
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
        self.xx = zeros(inputs, inputs)
        self.xy = zeros(inputs, width)
        self.yy = zeros(1)
        self.different, self.rows = zeros(1), zeros(1)

    def add(self, x: Tensor, y: Tensor) -> None:
        """Add rows: x (N, K·D), y (N, D)."""
        x, y = x.double(), y.double()
        self.xx.addmm_(x.T, x)
        self.xy.addmm_(x.T, y)
        self.yy += y.square().sum()
        self.rows += len(x)
        # Counted, not flagged, so that ranks can add it up like the other sums.
        if x.shape != y.shape or not torch.equal(x, y):
            self.different += 1

    def add_sums(self, problem: LeastSquares) -> None:
        """Add the rows of another problem of the same widths."""
        for name in ("xx", "xy", "yy", "different", "rows"):
            getattr(self, name).add_(getattr(problem, name))

    @property
    def count(self) -> int:
        """Number of rows, of all ranks once they are added up."""
        return int(self.rows.item())

    def sum_over(self, ranks: Ranks) -> None:
        """Add up the sums of all ranks. All of them call this."""
        if ranks.size > 1:
            for tensor in (self.xx, self.xy, self.yy, self.different, self.rows):
                dist.all_reduce(tensor)

    def solve(
        self,
        ridge: float,
        name: str,
        ranks: Ranks = ALONE,
        prior: Tensor | None = None,
    ) -> Solution:
        """Solve by Cholesky; all ranks get the same map.

        name: the problem's name in errors. prior: J (K·D, D), the map that the ridge
        pulls towards; identities by default.

        Raises:
            UserError: the sums are not finite, or the matrix is singular with this
                ridge.
        """
        if not all(torch.isfinite(sums).all() for sums in (self.xx, self.xy, self.yy)):
            raise UserError(
                f"{name}: the sums over the calibration text are not finite: the model"
                " computes NaN or infinite values on it; check the text and the"
                " checkpoint (fcsd inspect)"
            )
        size = self.xx.shape[0]
        if prior is None:
            prior = self._identities()
        prior_residual = self.residual(prior)
        # Nothing to be mapped; the Gram matrix need not even be regular here.
        if not self.different.item() or prior_residual < _NOISE:
            return Solution(None, prior_residual, prior_residual)
        weight = ridge * self.xx.diagonal().mean()
        gram = self.xx + weight * torch.eye(
            size, dtype=torch.float64, device=self.xx.device
        )
        factor, failed = torch.linalg.cholesky_ex(gram)
        # Cholesky succeeds on a matrix that is singular up to rounding: its pivots give
        # it away.
        pivots = factor.diagonal()
        if failed.item() or pivots.min() <= 1e-7 * pivots.max():
            raise UserError(
                f"{name}: the Gram matrix of the calibration text is singular: its"
                f" tokens do not span {size} directions with ridge {ridge:g}; give more"
                " text, more varied text, or a larger ridge (1e-3)"
            )
        matrix = torch.cholesky_solve(self.xy + weight * prior, factor)
        # Devices may round differently; the weights have to agree on all ranks.
        if ranks.size > 1:
            dist.broadcast(matrix, 0)
        return Solution(matrix, prior_residual, self.residual(matrix))

    def solve_checked(
        self,
        held_out: LeastSquares,
        ridge: float,
        name: str,
        ranks: Ranks = ALONE,
        prior: Tensor | None = None,
        limit: float = FITS_THE_SAMPLE,
    ) -> Solution:
        """Solve on all rows, those of `held_out` included, if a map that is solved
        without them passes a test on them: a residual of at most `limit` times that of
        `prior`. Otherwise the map is None, and the caller uses `prior`. Raises as
        `solve`.
        """
        # A map that only fits its sample is worse than none on the held-out rows.
        matrix = self.solve(ridge, name, ranks, prior).map
        prior_residual = held_out.residual(prior)
        residual = prior_residual if matrix is None else held_out.residual(matrix)
        fits = matrix is not None and residual <= limit * prior_residual
        # The test is over: all rows count from here on.
        self.add_sums(held_out)
        if not fits:
            all_rows = self.residual(prior)
            return Solution(None, all_rows, all_rows, (prior_residual, residual))
        return replace(
            self.solve(ridge, name, ranks, prior), held_out=(prior_residual, residual)
        )

    def _identities(self) -> Tensor:
        identity = torch.eye(self.width, dtype=torch.float64, device=self.xx.device)
        return identity.repeat(len(self.xx) // self.width, 1)

    def residual(self, matrix: Tensor | None = None) -> float:
        """Compute |XA - Y|² / |Y|² from the sums; 0 if Y is 0. Without a map, A is the
        identities.
        """
        matrix = self._identities() if matrix is None else matrix
        # |XA - Y|² = |Y|² - 2 tr(AᵀXᵀY) + tr(AᵀXᵀXA); rounding may take it below 0.
        squares = (
            self.yy - 2 * (matrix * self.xy).sum() + (matrix * (self.xx @ matrix)).sum()
        )
        return float((squares / self.yy).clamp(min=0)) if self.yy.item() else 0.0
