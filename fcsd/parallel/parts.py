"""The part of each trained parameter that a rank holds: under every engine, it is a
range of the flattened parameter.

It is all of it (copies), the rows of FSDP2, the partition of ZeRO-3, or the rank's own
experts.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from fcsd.parallel.launch import Ranks, reshard
from fcsd.parallel.shard import KEPT


@dataclass(frozen=True)
class Part:
    """The range [start, stop) of a parameter of `size` numbers; this rank has it at
    `offset` of the flattened `slot`.

    slot: the tensor that the optimiser updates: the parameter itself, or ZeRO's flat
    float32 partition of several parameters.
    """

    name: str
    parameter: Any
    size: int
    start: int
    stop: int
    slot: Any
    offset: int = 0

    def of(self, tensor: Any) -> Tensor:
        """Return a view of this range in the slot, or in a state that is laid out like it."""
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        end = self.offset + self.stop - self.start
        return local.detach().view(-1)[self.offset : end]


def inner_optimizer(optimizer: Any) -> Any:
    """Return torch's optimiser inside accelerate's and DeepSpeed's."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def _zero3_optimizer(optimizer: Any) -> Any:
    """Return DeepSpeed's ZeRO-3 optimiser inside accelerate's."""
    while not hasattr(optimizer, "fp32_partitioned_groups_flat"):
        optimizer = optimizer.optimizer
    return optimizer


def writers_of(model: nn.Module, ranks: Ranks) -> tuple[int, int | None]:
    """Return the number of writing ranks, and this rank's index in them; None: not one."""
    # Under ZeRO-3 every rank writes, without sharding only the first.
    rank, world = ranks.rank, ranks.size
    first: Any = next(model.parameters())
    if hasattr(first, "ds_id"):
        return world, rank
    if hasattr(first, "device_mesh"):
        mesh = first.device_mesh
        # With hybrid sharding each replica holds the same, and only the first one
        # writes.
        *replica, index = mesh.get_coordinate()
        return mesh.size(mesh.ndim - 1), index if not any(replica) else None
    return 1, 0 if rank == 0 else None


def parts_of(model: nn.Module, optimizer: Any | None, ranks: Ranks) -> list[Part]:
    """Free gathered weights, and return this rank's part of every trained parameter, in
    the model's order.
    """
    reshard(model)
    return list(_parts(model, optimizer, ranks))


def _parts(model: nn.Module, optimizer: Any | None, ranks: Ranks) -> Iterator[Part]:
    for name, parameter in model.named_parameters():
        p: Any = parameter
        if not p.requires_grad:
            continue
        if hasattr(p, "ds_id"):
            # ZeRO-3 pads the last partitions, beyond the end of the parameter.
            length = p.ds_tensor.ds_numel
            start = min(ranks.rank * length, p.ds_numel)
            stop = min(start + length, p.ds_numel)
            slot, offset = p.ds_tensor, 0
            if optimizer is not None:
                zero = _zero3_optimizer(optimizer)
                group, offset, _ = zero.grad_position[zero.get_param_id(p)]
                slot = zero.fp32_partitioned_groups_flat[group]
            yield Part(name, p, p.ds_numel, start, stop, slot, int(offset))
        # FSDP2 shards along the first dimension, so a shard is contiguous when
        # flattened.
        elif hasattr(p, "device_mesh"):
            start = first_row(p) * (p.numel() // p.shape[0])
            yield Part(name, p, p.numel(), start, start + p.to_local().numel(), p)
        else:
            yield Part(name, p, p.numel(), 0, p.numel(), p)


def first_row(parameter: Any) -> int:
    """Return the first of this rank's rows: FSDP2 shards by rows; the last ranks may
    have fewer.
    """
    mesh, rows = parameter.device_mesh, parameter.shape[0]
    *outer, index = mesh.get_coordinate()
    first = 0
    if "ep" in (mesh.mesh_dim_names or ()):
        # (efsdp, ep): each rank of `ep` has some of the experts, which `efsdp` shards
        # further.
        rows //= mesh.size(mesh.ndim - 1)
        first, index = index * rows, outer[-1] if outer else 0
        ranks = mesh.size(mesh.ndim - 2) if outer else 1
    else:
        ranks = mesh.size(mesh.ndim - 1)
    return first + min(index * -(-rows // ranks), rows)


def begin_in_float32(model: nn.Module, optimizer: Any, ranks: Ranks) -> None:
    """Write the parameters that a family keeps in float32 to ZeRO-3's float32 copy:
    they were rounded when the model was partitioned.
    """
    values = model.__dict__.get(KEPT, {})
    for part in parts_of(model, optimizer, ranks) if values else ():
        if part.name in values:
            part.of(part.slot).copy_(
                values[part.name].flatten()[part.start : part.stop]
            )


def compute_with(parts: list[Part], optimizer: Any | None) -> None:
    """Let an engine compute with the values that were written to its parts; ZeRO-3 has
    copies of them. All ranks call this.
    """
    if optimizer is None or not parts or not hasattr(parts[0].parameter, "ds_id"):
        return
    for part in parts:
        view = part.of(part.slot)
        part.parameter.ds_tensor.data.view(-1)[: view.numel()].copy_(view)
    # Small parameters stay gathered on every rank, and are gathered again.
    persistent = _zero3_optimizer(optimizer).persistent_parameters
    if persistent:
        persistent[0].partition(persistent)
        persistent[0].all_gather(persistent)
