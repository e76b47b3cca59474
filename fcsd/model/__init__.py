"""Models: `families`, their `connectivity`, `inspect`, and checkpoints: found, loaded,
left as they were by a score.

Not covered: where a model is computed (`fcsd.parallel`).
"""
