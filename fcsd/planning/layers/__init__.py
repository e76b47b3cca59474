"""Measure the untrained model's quality against the number of rewired layers (paper
Fig. 3), and propose the layers to rewire.

Not covered: training of a proposed selection.
"""
