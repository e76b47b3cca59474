"""The record of a run, put together from the sections of the folders below, and its
layout on disk.

Not covered: what a section says; each stands beside what it configures
(`fcsd.data.config`, `fcsd.training.config`, …).
"""
