"""Load a model and its tokenizer, place it on devices or ranks, and restore it after an evaluation.

Not covered: what is rewired in it (`fcsd.connectivity`).
"""
