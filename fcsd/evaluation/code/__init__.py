"""Code tasks: completions, EvalPlus's tests and rules, and the sandbox that runs
programs.

Not covered: languages other than Python.
"""
