"""Text to packed rows: sources, chat templates, tokens on disk, packing, batches,
decontamination.

Not covered: images, video and audio.
"""
