"""Evaluate a model: suites as data, lm-eval's tasks, executed code, paired scores.

`stage.run_evaluation` is the door: `runner` evaluates a `backend` (a model in memory,
or behind a server) on a suite, task by task; `store` keeps finished tasks, `results`
reads and writes their results, `scores` compares two models.

Not covered: starting servers (vLLM, SGLang); they must be running.
"""
