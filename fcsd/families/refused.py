"""MoE families that the connectivity has no meaning for, each with the reason that the user is told."""

REFUSED: dict[str, str] = {}
