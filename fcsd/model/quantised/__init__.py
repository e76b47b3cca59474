"""Quantised checkpoints: what they say of it, how their files hold a weight, a copy of
them in bfloat16, and a copy of others in FP8.

Not covered: methods that transformers' own packages alone can read (GPTQ,
AWQ, …), which are refused.
"""
