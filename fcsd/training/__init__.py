"""Distillation: instruction data to packed rows, fused head and loss, the trainer,
early stopping, the sweep.

Not covered: pre-training's own architectures; how a checkpoint is rewired
(`fcsd.model.connectivity`); how a model is scored (`fcsd.evaluation`,
`fcsd.pipeline.scoring`).
"""
