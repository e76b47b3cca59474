"""Measure where a model sends its tokens and what that costs on given links, and steer
routers away from slow links.

Does not cover: routers that read no logits (hash routing), steering in servers whose
ranks all hold the same tokens (tensor-parallel all-reduce has no source endpoint).
"""
