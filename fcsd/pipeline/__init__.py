"""Stages of a recipe: each reads folders and writes a folder with a manifest.

Not covered: uploading the results (`fcsd.report.publish.push`).
"""
