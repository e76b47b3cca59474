"""The record of a run, put together from the sections of the folders below, and its
layout on disk.

Not covered: the sections themselves; each is defined beside the code that it configures
(`fcsd.data.config`, `fcsd.training.config`, …).
"""
