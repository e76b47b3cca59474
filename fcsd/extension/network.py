"""Links between endpoints, and the simulated time of exchanges over them."""

from fcsd.planning.cost.windows import Windows, read_windows_file
from fcsd.planning.network.links import (
    Array,
    Collective,
    LinkModel,
    Phase,
    read_links,
    write_links,
)
from fcsd.planning.network.simulate import (
    Payload,
    edge_times,
    endpoint_counts,
    exchange_counts,
    exchange_time,
    exchange_times,
    path_times,
    simulate,
    time_summary,
)

__all__ = [
    "Array",
    "Collective",
    "LinkModel",
    "Payload",
    "Phase",
    "Windows",
    "edge_times",
    "endpoint_counts",
    "exchange_counts",
    "exchange_time",
    "exchange_times",
    "path_times",
    "read_links",
    "read_windows_file",
    "simulate",
    "time_summary",
    "write_links",
]
