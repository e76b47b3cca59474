"""Backends of the teacher: a sharded model, the student with adapters off, or hidden
states cached on disk.

Not covered: teachers with another tokenizer.
"""
