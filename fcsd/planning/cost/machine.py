"""Describe a machine from options or a cluster file: GPUs of one kind, the links
between them, and the assumptions about both.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import Field

from fcsd.base.errors import UserError
from fcsd.base.files import read_yaml
from fcsd.base.strict import Strict, did_you_mean, validate
from fcsd.planning.cost.assumptions import ASSUMPTIONS, default_values
from fcsd.planning.cost.hardware import Gpu, find_gpu
from fcsd.planning.network.links import LinkModel


@dataclass(frozen=True)
class Machine:
    """Equal GPUs on one or more nodes.

    nic_gb_s: of each GPU to other nodes. values: values of the assumptions. links:
    links measured between the ranks that share experts, used instead of published
    rates.
    """

    gpu: Gpu
    num_gpus: int
    gpus_per_node: int
    nic_gb_s: float
    values: Mapping[str, float] = field(default_factory=default_values)
    links: LinkModel | None = None

    @property
    def num_nodes(self) -> int:
        """The number of nodes; the last one may have unused GPUs."""
        return -(-self.num_gpus // self.gpus_per_node)

    @property
    def peer_gb_s(self) -> float:
        """The rate at which data reach one peer of the node."""
        return (self.gpu.peer_gb_s or self.gpu.link_gb_s) * self.gpu.payload

    def assuming(self, values: Mapping[str, float]) -> "Machine":
        """Return this machine with other values of some assumptions."""
        return replace(self, values={**self.values, **values})

    def near(self, ranks: int, groups: int, apart: int = 1) -> list[int]:
        """Return how many ranks of a group are on a node, for each node of each group.

        groups: number of groups, one after another. apart: distance in ranks from one
        member of a group to the next.
        """
        first = [g * ranks for g in range(groups)]
        # A group may begin or end in the middle of a node, so nodes are counted rank by
        # rank.
        nodes = Counter(
            (g, (g + k * apart) // self.gpus_per_node)
            for g in first
            for k in range(ranks)
        )
        return list(nodes.values())


def make_machine(
    gpu: str,
    num_gpus: int,
    gpus_per_node: int = 8,
    network_gb_s: float | None = None,
    assumptions: Mapping[str, float] | None = None,
    links: LinkModel | None = None,
) -> Machine:
    """Make a machine from the name of its GPU. network_gb_s: None: as in the GPU's
    reference system.

    Raises:
        UserError: a GPU that is not in the table, an assumption outside its bounds.
    """
    published, changes = find_gpu(gpu), assumptions or {}
    for name, value in changes.items():
        if name not in ASSUMPTIONS:
            raise UserError(
                f"assumptions.{name}: unknown{did_you_mean(name, list(ASSUMPTIONS))};"
                f" allowed: {', '.join(ASSUMPTIONS)}"
            )
        assumption = ASSUMPTIONS[name]
        # 0 is refused where the plausible range lies above it: some of these values are
        # divisors.
        above = assumption.low > 0 and assumption.least == 0
        if (
            not math.isfinite(value)
            or not assumption.least <= value <= assumption.most
            or (above and value == 0)
        ):
            least = "above 0" if above else f"{assumption.least:g} or more"
            most = (
                f", at most {assumption.most:g}" if assumption.most < math.inf else ""
            )
            raise UserError(
                f"assumptions.{name}: {value:g}: must be {least}{most}:"
                f" {assumption.what}"
            )
    values = default_values() | dict(changes)
    return Machine(
        published,
        num_gpus,
        gpus_per_node,
        network_gb_s or published.nic_gb_s,
        values,
        links,
    )


class Cluster(Strict):
    """Equal GPUs. assumptions: values of `fcsd.planning.cost.assumptions`."""

    gpu: str = Field(
        "h200",
        description="a100, h100, h200, b200, l40s, mi300x, mi325x, … (a wrong name lists all)",
    )
    nodes: int = Field(
        1, description="machines", json_schema_extra={"metavar": "N"}, ge=1
    )
    gpus_per_node: int = Field(
        8, description="GPUs per machine", json_schema_extra={"metavar": "N"}, ge=1
    )
    network_gb_s: float | None = Field(
        None,
        description=(
            "rate between nodes, GB/s per GPU (default: the vendor's reference system, with"
            " one interface per GPU)"
        ),
        json_schema_extra={"metavar": "X"},
        gt=0,
    )
    assumptions: dict[str, float] = Field(default_factory=dict)


class _ClusterFile(Cluster):
    gpu: str


def read_cluster(path: Path) -> dict[str, Any]:
    """Read a cluster file as settings of a plan; raise UserError as `validate` does,
    and for an unknown GPU.
    """
    cluster = validate(_ClusterFile, read_yaml(path), str(path))
    find_gpu(cluster.gpu, f"{path}: gpu")
    return cluster.model_dump()
