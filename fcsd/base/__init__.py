"""Foundations that every folder uses: errors, files, artifacts of stages, text,
statistics, hooks of modules, strict records.
"""
