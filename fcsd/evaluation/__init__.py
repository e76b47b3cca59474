"""Evaluate a model: suites as data, lm-eval's tasks, executed code, paired scores.

`stage.run_evaluation` is the door: `runner` asks a suite of a `backend` (a model in
memory, or behind a server) task by task, `store` keeps finished ones, `results` is what
they leave, `scores` compares two models.

Not covered: starting servers (vLLM, SGLang); they are asked where they run.
"""
