"""Losses between teacher and student: head and divergence in one module, terms on
hidden states, held-out KL.

Not covered: when they are weighted how much; that is the objective of a recipe
(`fcsd.training.config`).
"""
