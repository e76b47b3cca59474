"""The names on which other distributions build: `megatron/` and `steering/` here, and
yours. Programs with commands build on `fcsd.cli.program` and `fcsd.cli.options`, too.

Each module re-exports names of one kind; nothing is defined here.
"""
