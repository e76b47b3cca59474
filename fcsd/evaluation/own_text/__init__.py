"""What a model writes, compared with its original: the divergence of the two along the
model's own samples.

Not covered: the sampler (`fcsd.training.generation`), and the divergence itself
(`fcsd.training.losses.fused`).
"""
