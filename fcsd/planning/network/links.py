"""Read and write links between endpoints: latency and seconds per byte of each
direction and phase, and rates of shared ports.

The model is that of CAMoE (Cost-Aware Communication Optimization for Mixture-of-Experts
Inference, section 3.1): T_uv(B) = alpha_uv + beta_uv * B, for each phase of an
expert-parallel exchange: metadata (counts of tokens), dispatch (hidden states and
routing weights), combine (hidden states on their way back). Where only the hops of a
path are known (a card, a switch, NVLink), a file gives an edge as the list of its hops'
values, and `forwarding` (`compose`).
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from fcsd.base.errors import UserError
from fcsd.base.files import read_editable, write_sealed
from fcsd.base.strict import Rule, Strict, broken, validate

Array = NDArray[np.float64]
Phase = Literal["metadata", "dispatch", "combine"]
Collective = Literal["p2p", "all_to_all_single"]
"""p2p: every irecv posted, then every isend, so that both directions of a pair run at
once. all_to_all_single: the backend's own; gloo's serves the two directions of a pair
one after another."""

Forwarding = Literal["store_and_forward", "cut_through"]
"""Whether a hop forwards a message once it has all of it, or as its bytes arrive."""

# The largest latency or time per byte: sums of larger ones may become infinite.
_LONGEST_S = 1e6
_TIMES = ("alpha_s", "beta_s_per_byte")

PHASES: tuple[Phase, ...] = ("metadata", "dispatch", "combine")


def compose(
    alphas_s: Sequence[float], betas_s_per_byte: Sequence[float], forwarding: Forwarding
) -> tuple[float, float]:
    """Return alpha and beta of a path from those of its hops (CAMoE, equation 7 and
    section 3.4).

    store_and_forward: T(B) = sum_h (alpha_h + beta_h B), equation 7. cut_through: sum_h
    alpha_h + max_h beta_h B.
    """
    slowest = sum if forwarding == "store_and_forward" else max
    return float(sum(alphas_s)), float(slowest(betas_s_per_byte))


class PhaseLinks(Strict):
    """The fitted links of one phase; rows are sources, columns are destinations, the
    diagonal is 0.

    r2 of an edge is null where it was not fitted from measurements; refined is true
    where it was also measured under contention (phase 2 of the profile); else its
    values were measured alone. In a file an edge may be a list of its hops' values,
    with `forwarding` beside the tables; r2, refined and repeats may then be omitted.
    """

    alpha_s: list[list[float]]
    beta_s_per_byte: list[list[float]]
    r2: list[list[float | None]]
    refined: list[list[bool]]
    repeats: int = Field(ge=1)

    @model_validator(mode="before")
    @classmethod
    def _compose_hops(cls, value: Any) -> Any:
        return _with_edges_of_hops(value) if isinstance(value, dict) else value


class Ports(Strict):
    """Seconds per byte of an endpoint's total traffic to all others, or from them; null
    if its edges do not share a port.
    """

    egress_s_per_byte: list[float | None]
    ingress_s_per_byte: list[float | None]


class LinkModel(Strict):
    """Links between N endpoints; `endpoints` names them in the order of ranks."""

    version: Literal[1] = 1
    endpoints: list[str] = Field(min_length=2)
    collective: Collective
    backend: str
    world_size: int = Field(ge=2)
    libraries: dict[str, str]
    metadata: PhaseLinks
    dispatch: PhaseLinks
    combine: PhaseLinks
    ports: Ports

    # Messages name the edge, so that a file written by hand can be corrected.
    rules: ClassVar[tuple[Rule, ...]] = (
        (
            lambda links: len({*links.endpoints}) != len(links.endpoints),
            "endpoints: a name is given twice",
        ),
        (
            lambda links: links.world_size != len(links.endpoints),
            lambda links: (
                f"world_size {links.world_size}, but it names {len(links.endpoints)}"
                " endpoints"
            ),
        ),
        (
            lambda links: links.incomplete_tables,
            "{0.incomplete_tables[0]}: needs {0.world_size} rows of {0.world_size}, but an"
            " edge is missing",
        ),
        (
            lambda links: links.impossible_edges,
            lambda links: links.impossible_edges[0],
        ),
        (
            lambda links: links.incomplete_ports,
            "ports.{0.incomplete_ports[0]}: needs {0.world_size} values",
        ),
        (
            lambda links: links.impossible_ports,
            lambda links: (
                "ports.{}: endpoint {}: {:g} seconds per byte; must be 0 to {:g}, or null"
                " where its edges share no port"
            ).format(*links.impossible_ports[0], _LONGEST_S),
        ),
    )

    def _tables(self, *names: str) -> Iterator[tuple[str, list[list[Any]]]]:
        for phase in PHASES:
            links: PhaseLinks = getattr(self, phase)
            yield from ((f"{phase}.{name}", getattr(links, name)) for name in names)

    @property
    def incomplete_tables(self) -> list[str]:
        """Names of the tables that lack an edge."""
        size = self.world_size
        return [
            name
            for name, rows in self._tables(*_TIMES, "r2", "refined")
            if len(rows) != size or any(len(row) != size for row in rows)
        ]

    @property
    def impossible_edges(self) -> list[str]:
        """What is wrong with each edge whose latency or time per byte cannot be."""
        return [
            f"{name}: edge {u} -> {v} is"
            f" {f'negative ({x:g})' if x < 0 else f'not a valid time ({x:g} s)'}"
            for name, rows in self._tables(*_TIMES)
            for u, row in enumerate(rows)
            for v, x in enumerate(row)
            if not 0 <= x <= _LONGEST_S
        ]

    @property
    def incomplete_ports(self) -> list[str]:
        """Directions in which an endpoint's port is missing."""
        return [name for name, rates in self.ports if len(rates) != self.world_size]

    @property
    def impossible_ports(self) -> list[tuple[str, int, float]]:
        """Direction, endpoint and seconds per byte of each port that cannot be."""
        return [
            (name, u, rate)
            for name, rates in self.ports
            for u, rate in enumerate(rates)
            if rate is not None and not 0 <= rate <= _LONGEST_S
        ]

    @property
    def half_duplex(self) -> bool:
        """Whether the two directions of a pair run one after another."""
        return self.backend == "gloo" and self.collective == "all_to_all_single"

    def require(
        self, size: int | None = None, collective: Collective | None = None
    ) -> None:
        """Refuse links between another number of endpoints, or measured with another
        collective.
        """
        # Without this check, a profile of other ranks or another collective would be
        # used without an error.
        if size is not None and size != len(self.endpoints):
            raise UserError(
                f"the links are between {len(self.endpoints)} endpoints, but {size}"
                " were requested; request as many, or measure the links again with"
                " `fcsd-steer profile-network`"
            )
        if collective is not None and collective != self.collective:
            raise UserError(
                f"the links were measured with {self.collective}, the exchanges are"
                f" {collective}; measure them with `fcsd-steer profile-network --collective"
                f" {collective}`"
            )

    def alpha(self, phase: Phase) -> Array:
        """Return the latencies in seconds, [N, N], 0 on the diagonal."""
        return _without_diagonal(getattr(self, phase).alpha_s)

    def beta(self, phase: Phase) -> Array:
        """Return the seconds per byte, [N, N], 0 on the diagonal."""
        return _without_diagonal(getattr(self, phase).beta_s_per_byte)

    def port(self, direction: Literal["egress", "ingress"]) -> Array:
        """Return the seconds per byte of each endpoint's port, [N]; 0 where its edges
        share none.
        """
        rates = getattr(self.ports, f"{direction}_s_per_byte")
        return np.array([0.0 if rate is None else rate for rate in rates])


def read_links(path: str | Path) -> LinkModel:
    """Read and check a links file; raise a UserError that names the edge whose value is
    missing, negative or not a number.
    """
    value = read_editable(
        Path(path), "fcsd-steer profile-network", ["endpoints", "ports"]
    )
    return validate(LinkModel, value, str(path))


def write_links(path: str | Path, links: LinkModel) -> None:
    """Write a links file under a temporary name, then rename it."""
    write_sealed(Path(path), links.model_dump(mode="json"))


def _with_edges_of_hops(phase: dict[str, Any]) -> dict[str, Any]:
    """Replace the edges of a phase that are given by their hops, as `compose` does;
    other faults are left to the validation.
    """
    # Runs before pydantic checks the types, so nothing is known of the tables yet.
    forwarding = phase.get("forwarding")
    phase = {name: value for name, value in phase.items() if name != "forwarding"}
    tables = [phase.get("alpha_s"), phase.get("beta_s_per_byte")]
    if not all(
        isinstance(table, list) and all(isinstance(row, list) for row in table)
        for table in tables
    ):
        return phase
    edges = sorted({edge for table in tables for edge in _edges_of_hops(table)})
    if (forwarding is not None) != bool(edges) or (
        edges and forwarding not in get_args(Forwarding)
    ):
        raise ValueError(
            f"forwarding: {forwarding!r}, with {len(edges)} edges given by their hops;"
            f" with such edges it must be {' or '.join(get_args(Forwarding))}, without"
            " them it must be left out"
        )
    alpha, beta = ([list(row) for row in table or ()] for table in tables)
    for u, v in edges:
        alphas, betas = (
            table[u][v] if u < len(table) and v < len(table[u]) else None
            for table in (alpha, beta)
        )
        if problem := broken(_HOPS, f"edge {u} -> {v}", alphas, betas):
            raise ValueError(problem)
        alpha[u][v], beta[u][v] = compose(alphas, betas, forwarding)  # type: ignore[arg-type]
    # A composed edge was not fitted, so the fields of a fit get defaults.
    unfitted = {
        "r2": [[None] * len(row) for row in alpha],
        "refined": [[False] * len(row) for row in alpha],
    }
    return (
        (unfitted | {"repeats": 1} if edges else {})
        | phase
        | {"alpha_s": alpha, "beta_s_per_byte": beta}
    )


def _edges_of_hops(table: Any) -> list[tuple[int, int]]:
    return [
        (u, v)
        for u, row in enumerate(table)
        for v, value in enumerate(row)
        if isinstance(value, list)
    ]


def _is_time(hop: Any) -> bool:
    is_number = isinstance(hop, int | float) and not isinstance(hop, bool)
    return is_number and 0 <= hop < math.inf


def _impossible_hop(alphas: list[Any], betas: list[Any]) -> tuple[str, int, Any] | None:
    """Return table, number and value of the first hop whose time cannot be."""
    return next(
        (
            (name, number, hop)
            for name, hops in zip(_TIMES, (alphas, betas), strict=True)
            for number, hop in enumerate(hops)
            if not _is_time(hop)
        ),
        None,
    )


_HOPS: tuple[Rule, ...] = (
    (
        lambda edge, alphas, betas: (
            not (
                isinstance(alphas, list)
                and isinstance(betas, list)
                and len(alphas) == len(betas) > 0
            )
        ),
        "{0}: alpha_s and beta_s_per_byte need a list with the same hops, one or more,"
        " got {1} and {2}",
    ),
    (
        lambda edge, alphas, betas: _impossible_hop(alphas, betas),
        lambda edge, alphas, betas: (
            "{1}: {0}, hop {2}: a number of 0 or more is needed, got {3!r}"
        ).format(edge, *_impossible_hop(alphas, betas) or ()),
    ),
)
"""Of an edge by name, and its hops' latencies and times per byte."""


def _without_diagonal(rows: list[list[float]]) -> Array:
    matrix = np.array(rows, dtype=np.float64)
    np.fill_diagonal(matrix, 0)
    return matrix
