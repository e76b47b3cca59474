"""Quality against the number of rewired layers, untrained (paper Fig. 3), and the
layers to rewire proposed from it.

Not covered: training any of them.
"""
