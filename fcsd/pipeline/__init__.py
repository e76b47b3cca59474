"""Stages of a recipe: each reads folders and leaves a folder with a manifest.

Not covered: uploading what they leave; that is `fcsd.report.publish.push`.
"""
