"""Text to packed rows: sources, chat templates, packing, batches, decontamination.

Not covered: images, video and audio.
"""
