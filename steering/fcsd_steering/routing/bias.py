"""Add a bias to the logits of a model's routers, before the family's own softmax,
groups and top-k.

A rank's tokens all come from one endpoint u, so the bias in layer l is a single row,
G[l, u], of a table [L, N, E] (CAMoE, equation 13). L MoE layers, N endpoints, E
experts; experts without an endpoint (those that compute nothing, or that every rank
has) get 0.
"""

import contextlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from fcsd.base.errors import UserError
from fcsd.base.files import arrays_fingerprint, check_regular
from fcsd.base.strict import Strict, validate
from fcsd.base.writing import file_beside, writing
from fcsd.model.families import base_model_type
from fcsd.model.families.routers import Router, find_routers
from fcsd.model.families.structure import unwrapped
from fcsd_steering.config import Kind
from fcsd_steering.routing.placement import contiguous


@dataclass(frozen=True)
class BiasTables:
    """The values to add to the routers' logits of one model.

    kind, strength: the method of the tables, and how hard they push (camoe: lambda;
    bottleneck: the lambda of CAMoE whose time is the goal; windows: 1). selection: the
    bias affects only the choice of experts; their weights come from the logits without
    it. layers: indices of the MoE layers. tables: float32 [L, N, E]. placement: int [L,
    E], the endpoint that has each expert; -1: none. model_type: of the regular model;
    num_hidden_layers: its decoder layers, MoE or dense.
    """

    kind: Kind
    strength: float
    selection: bool
    layers: tuple[int, ...]
    tables: NDArray[np.float32]
    placement: NDArray[np.integer]
    model_type: str
    num_hidden_layers: int

    def __post_init__(self) -> None:
        num_layers, num_endpoints, num_experts = self.tables.shape
        if len(self.layers) != num_layers or self.placement.shape != (
            num_layers,
            num_experts,
        ):
            raise UserError(
                f"bias tables: {len(self.layers)} layers, tables of shape"
                f" {self.tables.shape} and placement of shape {self.placement.shape} do"
                " not match"
            )
        if self.strength < 0:
            raise UserError(
                f"bias tables: strength (lambda) {self.strength:g} is negative; use 0"
                " or more"
            )
        if not np.isfinite(self.tables).all():
            raise UserError("bias tables: a value is not a finite number")
        if self.placement.min() < -1 or self.placement.max() >= num_endpoints:
            raise UserError(
                "bias tables: the placement has an endpoint beyond the last,"
                f" {num_endpoints - 1}"
            )

    @property
    def num_endpoints(self) -> int:
        """N."""
        return int(self.tables.shape[1])

    @property
    def num_experts(self) -> int:
        """E."""
        return int(self.tables.shape[2])


def steered_routers(model: torch.nn.Module) -> list[Router]:
    """Return the model's routers; UserError where a bias does not change their choice."""
    routers = find_routers(model)
    if layers := [router.layer for router in routers if router.by_token]:
        raise UserError(
            f"{type(unwrapped(model)).__name__}: layers {layers} choose experts by the"
            " token's id, so a bias would only change their weights; steer a model"
            " whose routers all choose by their logits"
        )
    return routers


def tables_for(
    model: torch.nn.Module,
    kind: Kind,
    strength: float,
    tables: NDArray[Any],
    placement: NDArray[np.integer],
    *,
    selection: bool = False,
) -> BiasTables:
    """Wrap tables [L, N, E] with the names of the model and its layers; placement [L,
    E].
    """
    config = unwrapped(model).config
    return BiasTables(
        kind=kind,
        strength=strength,
        selection=selection,
        layers=tuple(router.layer for router in steered_routers(model)),
        tables=tables.astype(np.float32),
        placement=placement,
        model_type=base_model_type(config.model_type),
        num_hidden_layers=config.get_text_config().num_hidden_layers,
    )


class _Facts(Strict):
    version: Literal[1]
    sha256: str | None = None  # tables of an earlier fcsd have none
    kind: Kind
    strength: float
    selection: bool
    layers: tuple[int, ...]
    model_type: str
    num_hidden_layers: int


def write_tables(path: str | Path, tables: BiasTables) -> None:
    """Write tables to one safetensors file, under a temporary name first."""
    path = Path(path)
    facts = {"version": 1} | {
        name: value
        for name, value in asdict(tables).items()
        if name not in ("tables", "placement")
    }
    arrays: dict[str, Any] = {
        "tables": tables.tables,
        "placement": tables.placement.astype(np.int64),
    }
    with writing(path), file_beside(path) as temporary:
        # Not save_file: safetensors 0.8 ignores the umask and writes files that only
        # their owner can read.
        facts["sha256"] = arrays_fingerprint(arrays, facts)
        temporary.write_bytes(save(arrays, {"fcsd_bias": json.dumps(facts)}))
        temporary.replace(path)


def read_tables(path: str | Path) -> BiasTables:
    """Read a file of `write_tables`; raise UserError for any other file, or parts that
    do not match.
    """
    path = Path(path)
    check_regular(path)
    try:
        with safe_open(path, "numpy") as file:
            metadata = file.metadata() or {}
            arrays = {name: file.get_tensor(name) for name in ("tables", "placement")}
        record = json.loads(metadata["fcsd_bias"])
        facts = validate(_Facts, record, str(path))
        # With other types the file was not written by `write_tables`.
        if (arrays["tables"].dtype, arrays["placement"].dtype) != (
            np.float32,
            np.int64,
        ):
            raise ValueError("of other types")
        written = record.pop("sha256", None)
        if written is not None and written != arrays_fingerprint(arrays, record):
            raise UserError(
                f"{path}: is damaged: its content differs from what was written; write"
                " it again with `fcsd-steer bias` (in a recipe's run, remove its"
                " stage's folder)"
            )
        try:
            content = facts.model_dump(exclude={"version", "sha256"})
            return BiasTables(**content, **arrays)
        except UserError as error:
            raise UserError(f"{path}: {error}") from None
    except FileNotFoundError:
        raise UserError(
            f"{path}: no such file; write one with `fcsd-steer bias`"
        ) from None
    except (SafetensorError, OSError, KeyError, TypeError, ValueError):
        raise UserError(
            f"{path}: not a file of bias tables; write them with `fcsd-steer bias`"
        ) from None


class Steering:
    """The bias on a model's routers. Set `endpoint` to the source of the next forward
    pass's tokens.

    heard: if set to a list, collects every router's logits (tokens, E) before the bias,
    in the order of the calls.
    """

    def __init__(self, tables: BiasTables, rows: list[Tensor]) -> None:
        self._tables, self._rows = tables, rows
        self._endpoint: int | None = None
        # For compiled layers: a graph that read the endpoint itself would hold for one
        # endpoint only.
        self.has_endpoint = False
        self.heard: list[Tensor] | None = None

    @property
    def endpoint(self) -> int | None:
        """The source of this rank's or this batch's tokens; None: not set yet, and
        routers refuse to run.
        """
        return self._endpoint

    @endpoint.setter
    def endpoint(self, endpoint: int) -> None:
        if not 0 <= endpoint < self._tables.num_endpoints:
            raise UserError(
                f"endpoint {endpoint}: the bias tables have 0 to"
                f" {self._tables.num_endpoints - 1}"
            )
        self._endpoint, self.has_endpoint = endpoint, True
        # In place: compiled layers have these tensors in their graphs.
        for row, table in zip(self._rows, self._tables.tables, strict=True):
            row.copy_(torch.from_numpy(table[endpoint]))

    def use(self, tables: BiasTables) -> None:
        """Switch to other tables of the same model, placement and number of endpoints."""
        # Compiled layers hold the bias tensors, so only their values may change.
        for name in ("model_type", "num_hidden_layers", "layers", "selection"):
            if (new := getattr(tables, name)) != (old := getattr(self._tables, name)):
                raise UserError(
                    f"bias tables: {name} is {new}, but {old} in the tables in use"
                )
        if tables.tables.shape != self._tables.tables.shape:
            raise UserError(
                f"bias tables: shape {tables.tables.shape}, in use"
                f" {self._tables.tables.shape}"
            )
        if not np.array_equal(tables.placement, self._tables.placement):
            raise UserError(
                "bias tables: the placement of experts differs from that of the tables"
                " in use"
            )
        self._tables = tables
        if self._endpoint is not None:
            self.endpoint = self._endpoint


@contextlib.contextmanager
def router_bias(model: torch.nn.Module, tables: BiasTables) -> Iterator[Steering]:
    """Add tables to the logits of a model's routers, in forward passes within the
    block; the model may be converted or regular.

    The bias is added to the one linear in a router's forward that is at least E wide,
    to its first E columns, in the logits' precision or float32, whichever is wider, and
    rounded once. Every rank of an expert-parallel group does this for its endpoint.

    Raises:
        UserError: the tables belong to another model; the model has no routers, or is
            already steered, or chooses by token ids; its ranks share their tokens. In the first forward pass: a
            router has no such linear, or several; or `selection` is set, and the router
            chooses without a top-k of its own.
    """
    # Checked first, so that a refusal leaves the model as it was.
    routers = steered_routers(model)
    check_tables(unwrapped(model), routers, tables)
    rows, original_forwards = [], []
    try:
        for router in routers:
            parameter = next(router.module.parameters())
            device = torch.device("cpu") if parameter.is_meta else parameter.device
            rows.append(torch.zeros(tables.num_experts, device=device))
        steering = Steering(tables, rows)
        for router, row in zip(routers, rows, strict=True):
            # The instance attribute is replaced, not the class's method, and restored
            # afterwards even where a device map had set one.
            attributes = vars(router.module)
            original_forwards.append((attributes, attributes.get("forward")))
            module: Any = router.module
            module.forward = _Biased(router, row, steering, tables.selection).forward
        yield steering
    finally:
        for attributes, forward in original_forwards:
            attributes.pop("forward")
            if forward is not None:
                # It was set by a device map or a tensor-parallel plan.
                attributes["forward"] = forward


def check_tables(model: Any, routers: list[Router], tables: BiasTables) -> None:
    """Raise UserError if tables do not fit a model, or its ranks share their tokens."""
    name, config = type(model).__name__, model.config
    num_layers = config.get_text_config().num_hidden_layers
    facts = [
        ("model type", tables.model_type, base_model_type(config.model_type)),
        ("decoder layers", tables.num_hidden_layers, num_layers),
        ("experts", tables.num_experts, routers[0].num_experts),
        ("MoE layers", list(tables.layers), [router.layer for router in routers]),
    ]
    for quantity, table_value, model_value in facts:
        if table_value != model_value:
            raise UserError(
                f"bias tables: {quantity} {table_value}, but {name} has {model_value};"
                " write tables for this model with `fcsd-steer bias`"
            )
    if any(
        isinstance(getattr(vars(r.module).get("forward"), "__self__", None), _Biased)
        for r in routers
    ):
        raise UserError(f"{name}: its routers already have a bias")
    # Ranks that share their tokens would add different rows to the same token's logits.
    distributed = getattr(config, "distributed_config", None)
    if (getattr(distributed, "tp_size", None) or 1) > 1:
        raise UserError(
            f"{name}: its ranks share their tokens (tensor parallelism, experts summed"
            " by all-reduce), so a token has no source endpoint, and ranks with"
            " different biases would disagree; shard the experts with an all-to-all"
            " (fcsd's expert parallelism)"
        )
    ranks = getattr(distributed, "ep_size", None)
    if (
        ranks == tables.num_endpoints
        and (tables.placement != contiguous(tables.num_experts, ranks)).any()
    ):
        raise UserError(
            "bias tables: made for another placement of the experts, but those of"
            f" {name} are distributed in order over {ranks} ranks; make tables with"
            " --placement contiguous"
        )


class _Biased:
    """The forward pass of one router, with its row [E] of the bias."""

    def __init__(
        self, router: Router, row: Tensor, steering: Steering, selection: bool
    ):
        self.name = router.name
        self.num_experts, self.top_k = router.num_experts, router.top_k
        self.inner = router.module.forward
        self.row, self.steering, self.selection = row, steering, selection

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self.steering.has_endpoint:
            raise UserError(
                "router bias: the endpoint of these tokens was not set; set `endpoint`"
                " first"
            )
        # The bias goes in between the router's linear and the family's own scoring,
        # which no hook reaches.
        biased = _Pass(self, self.row)
        with biased:
            output = self.inner(*args, **kwargs)
        if biased.linears != 1:
            raise UserError(
                f"router {self.name}: its forward has {biased.linears} linears that"
                f" are at least {self.num_experts} wide, but its logits must come from"
                " exactly one; this model cannot be steered"
            )
        if not self.selection:
            return output
        if not biased.choices:
            raise UserError(
                f"router {self.name}: its forward has no top-{self.top_k} of all"
                " experts, so a bias cannot choose experts without changing their"
                " weights; leave selection off for this model"
            )
        # Weights come from a second, unbiased run, which is given the choices of the
        # first.
        with _Pass(self, None, biased.choices):
            return self.inner(*args, **kwargs)


class _Pass(TorchFunctionMode):
    """One run of a router's forward: biased, recording its choices; or unbiased, with
    the choices of the biased run.

    The last top-k over all experts is the choice; earlier ones choose groups.
    """

    def __init__(
        self, biased: _Biased, row: Tensor | None, imposed: list[Tensor] | None = None
    ):
        super().__init__()
        self.num_experts, self.top_k, self.row = biased.num_experts, biased.top_k, row
        self.given, self.linears, self.heard = imposed, 0, biased.steering.heard
        self.choices: list[Tensor] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        # A router's linear may be wider than E; its first E columns are those of the
        # experts.
        if func is F.linear and output.shape[-1] >= self.num_experts:
            self.linears += 1
            if self.row is not None:
                if self.heard is not None:
                    self.heard.append(
                        output[..., : self.num_experts].reshape(-1, self.num_experts)
                    )
                return self._add(output, self.row.to(output.device))
        # Families call either the function or the method.
        elif func in (torch.topk, Tensor.topk) and self._chooses(
            args[0], output.indices
        ):
            self.choices.append(output.indices)
            if self.given is not None and len(self.choices) == len(self.given):
                # Same type as torch's top-k: the values at the imposed indices, and
                # these indices.
                return type(output)(
                    (args[0].gather(-1, self.given[-1]), self.given[-1])
                )
        return output

    def _add(self, logits: Tensor, row: Tensor) -> Tensor:
        num_others = logits.shape[-1] - self.num_experts
        return (logits + (F.pad(row, (0, num_others)) if num_others else row)).to(
            logits.dtype
        )

    def _chooses(self, scores: Tensor, indices: Tensor) -> bool:
        return scores.shape[-1] == self.num_experts and indices.shape[-1] == self.top_k
