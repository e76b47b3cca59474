"""The Python interface of `import fcsd` besides the trainer: models in memory,
evaluation and recipes.

Each function does what a command does, with values instead of files. They are listed in
`fcsd/__init__.py`, and imported on first use.

Not covered: the trainer (`fcsd.training.fcsd_trainer`).
"""
