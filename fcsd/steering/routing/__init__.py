"""Where a model sends its tokens, what that costs on given links, and how routers are
steered away from slow ones.

Does not cover: routers that read no logits (hash routing), steering in servers whose
ranks all hold the same tokens (tensor-parallel all-reduce has no source endpoint).
"""
