"""Measure and fit the links between ranks.

Not covered: contention inside a node (NVLink, PCIe), kernels that share processors with
communication, topologies that change during a run.
"""
