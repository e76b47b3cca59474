"""Quantised checkpoints: their quantisation fields, the storage of weights in their
files, copies of them in bfloat16, and copies of other checkpoints in FP8.

Not covered: methods that transformers' own packages alone can read (GPTQ,
AWQ, …), which are refused.
"""
