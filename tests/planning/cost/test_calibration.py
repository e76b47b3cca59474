"""The operations of a calibration, by hand."""

import pytest

from fcsd.planning.cost.estimate import calibration_flops


def test_the_operations_of_a_calibration_are_those_counted_by_hand() -> None:
    # Two layers of width 4: XᵀX and XᵀY for two problems with 4 inputs (4 x 2 x 16) and
    # one with 8 (2 x 64 + 2 x 32), and for two with 4 inputs for each of a token's 3
    # experts.
    sums = 4 * 2 * 16 + 2 * 64 + 2 * 32 + 3 * 2 * 2 * 2 * 16
    # Cholesky for 4 and for 8 inputs, the map from two triangles, and two residuals,
    # each a product with the Gram matrix. Each map is solved twice, with two more
    # residuals, including the maps of 5 experts.
    four, eight = (
        2 * (n**3 / 3 + 6 * n**2 * 4) + 2 * 2 * n**2 * 4  # n inputs
        for n in (4, 8)
    )
    solved = 2 * four + eight + 5 * 2 * four
    flops = calibration_flops(
        forward=100,
        tokens=10,
        num_layers=2,
        hidden_size=4,
        num_parameters=50,
        num_experts=5,
        experts_per_token=3,
    )
    assert flops == pytest.approx(
        10 * (6 * 100 + 2 * sums) + 2 * solved + 50 * 4 * 2, rel=1e-12
    )
