"""Count the operations of a calibration, most of them forward passes in float32."""

PASSES = 6
"""Forward passes of a layer: one of the original; of the student one up to its routed experts, one for what branches
add, one for what is still missing then, the experts one by one, and one with the calibrated weights."""


def calibration_flops(
    *,
    forward: float,
    tokens: int,
    num_layers: int,
    hidden_size: int,
    num_parameters: int,
    num_experts: int,
    experts_per_token: int,
) -> float:
    """Count the operations of a calibration.

    Args:
        forward: of one token's forward pass.
        num_layers: that are rewired. num_parameters: of these layers, each of which a map is multiplied into.
    """
    # XᵀX and XᵀY of two problems of D inputs and one of 2 D, and of two of D for every expert that a token uses.
    sums = (20 + 8 * experts_per_token) * hidden_size**2
    # n inputs are n³/3 for Cholesky and 6 n² D for the map and what is left before and after it; each is solved with
    # and without the rows that it is tested on, of which two more residuals are asked.
    solutions = (2 * (2 * 19 + 12) + 2 * (8 + 72) + 48 + num_experts * 2 * (2 * 19 + 12)) / 3 * hidden_size**3
    return (
        tokens * (PASSES * forward + num_layers * sums)
        + num_layers * solutions
        + 2 * hidden_size * num_parameters
    )
