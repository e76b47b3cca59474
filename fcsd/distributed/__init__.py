"""Processes, engines and ranks of a launch; shards of a model's weights and their state on disk.

Not covered: tensor and context parallel meshes; ZeRO stages 1 and 2.
"""
