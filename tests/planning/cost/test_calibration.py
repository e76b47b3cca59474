"""The operations of a calibration, by hand."""

import pytest

from fcsd.planning.cost.estimate import calibration_flops


def test_the_operations_of_a_calibration_are_those_counted_by_hand() -> None:
    # Two layers of width 4: XᵀX and XᵀY of two problems of 4 inputs (4 x 2 x 16) and of
    # one of 8 (2 x 64 + 2 x 32), and of two of 4 inputs for each of the 3 experts of a
    # token.
    sums = 4 * 2 * 16 + 2 * 64 + 2 * 32 + 3 * 2 * 2 * 2 * 16
    # Cholesky of 4 and of 8 inputs, the map by two triangles and two residuals, each a
    # product with the Gram matrix; each map is solved twice, with two more residuals,
    # those of 5 experts too.
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
