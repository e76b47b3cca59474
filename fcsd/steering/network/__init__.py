"""What an exchange between ranks costs: links measured and fitted, exchanges simulated
from them.

Does not cover: contention inside a node (NVLink, PCIe), kernels that share processors
with communication, topologies that change while a run goes on.
"""
