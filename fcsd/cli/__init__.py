"""The command line: one module for each group of commands.

Not covered: what the commands do; each calls one function of another package.
"""
