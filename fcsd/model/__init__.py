"""Models: `families`, their `connectivity`, `inspect`, and checkpoints that are found, loaded, restored after a score.

Not covered: where a model is computed (`fcsd.parallel`).
"""
