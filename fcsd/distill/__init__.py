"""Distillation: instruction data to packed rows, fused head and loss, the trainer, early stopping, the sweep.

Not covered: teachers that are sharded, cached or adapters switched off; reverse divergences; generation for early
stopping while the model is sharded.
"""
