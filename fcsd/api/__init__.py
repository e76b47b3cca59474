"""The Python interface of `import fcsd` besides the trainer: models in memory,
evaluation and recipes.

Each function does what a command does, with values instead of files. `fcsd/__init__.py`
lists them and imports them on first use.

Not covered: the trainer (`fcsd.training.ready_trainer`).
"""
