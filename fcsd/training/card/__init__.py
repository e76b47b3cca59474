"""The model card, which a run, `fcsd push` and `FCSDTrainer` write.

Not covered: its results, which are of `fcsd.report`.
"""
