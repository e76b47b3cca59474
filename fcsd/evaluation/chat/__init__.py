"""Chat with a model in the terminal (paper App. B).

Not covered: serving; that needs vLLM or SGLang.
"""
