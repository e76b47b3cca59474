"""A cluster as a file: its GPUs, its network, and what is known of them instead of assumed."""

from pathlib import Path
from typing import Any

from pydantic import Field

from fcsd.config.strict import Strict, read_yaml, validate
from fcsd.cost.hardware import find_gpu


class Cluster(Strict):
    """GPUs of one kind. network_gb_s: of each GPU to other nodes. assumptions: values of `fcsd.cost.assumptions`."""

    gpu: str
    nodes: int = Field(1, gt=0)
    gpus_per_node: int = Field(8, gt=0)
    network_gb_s: float | None = Field(None, gt=0, allow_inf_nan=False)
    assumptions: dict[str, float] = Field(default_factory=dict)


def read_cluster(path: Path) -> dict[str, Any]:
    """Read a cluster file, as settings of a plan.

    Raises:
        UserError: no such file, an unknown key, a value that no cluster has.
    """
    cluster = validate(Cluster, read_yaml(path), str(path))
    find_gpu(cluster.gpu, f"{path}: gpu")
    return cluster.model_dump()
