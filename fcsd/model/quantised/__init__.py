"""Quantised checkpoints: what they say of it, how their files hold a weight, and a copy
of them in bfloat16.

Not covered: quantising; methods that transformers' own packages alone can read (GPTQ,
AWQ, …), which are refused.
"""
