"""Models: `families` and their `connectivity`, `inspect`, and how checkpoints are found
and loaded; `preserve` restores a model after an evaluation.

Not covered: devices and ranks (`fcsd.parallel`).
"""
