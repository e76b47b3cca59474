"""Typed configuration: what a recipe and a suite may say, and what they are refused for.

Not covered: where a run happens (processes, FSDP, DeepSpeed); that is accelerate's configuration, see `configs/`.
"""
