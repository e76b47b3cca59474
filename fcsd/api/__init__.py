"""What `import fcsd` offers beside the trainer: models in memory, evaluation and
recipes, for Python.

Each function is what a command does, with values in the place of files. They are named
in `fcsd/__init__.py`, and imported when they are first asked for.

Not covered: the trainer (`fcsd.training.fcsd_trainer`).
"""
