"""Losses between teacher and student: head and divergence in one module, terms on
hidden states, held-out KL.

Not covered: their weights and schedule, which the objective of a recipe sets.
"""
