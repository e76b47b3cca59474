"""The command line: one module for each group of commands.

Not covered: the work of the commands; each calls one function of another package.
"""
