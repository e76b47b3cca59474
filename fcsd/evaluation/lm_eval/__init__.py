"""lm-eval's tasks on a model in memory, and its files read and written.

Not covered: lm-eval's own model classes.
"""
