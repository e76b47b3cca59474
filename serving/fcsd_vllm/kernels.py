"""The engine's own all-reduce kernels on FarSkip's stream.

Within a node vLLM reduces small messages two to four times as fast as NCCL does: by its
custom kernel over IPC buffers, by multimem over symmetric memory, or on AMD by quick
reduce. Each communicator has one buffer and one set of signals, so that a kernel of the
computing stream and one beside it must not share it. Here are second instances of the
communicators that the engine has, with buffers of their own: of the same classes, so that
nothing of the engine is named but its attributes.

All their kernels run on one stream, in the program's order, which is the same on every
rank; so is the choice, which depends on dtype and size alone. They copy their input into a
buffer whose address never changes, so that a captured graph may hold them.

Not run yet: this needs several GPUs. Not covered: kernels of FlashInfer and AITER, in
whose place NCCL or RCCL is used.
"""

import inspect
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

_logger = logging.getLogger(__name__)


class Kernel(NamedTuple):
    """A communicator for FarSkip's stream. fits: whether it takes a tensor. reduce: (x,
    out=) sums over the ranks."""

    name: str
    fits: Callable[[torch.Tensor], bool]
    reduce: Callable[..., object]


# In the order of the engine's choice: attribute of its device communicator, method that
# says whether a tensor fits, method that reduces.
_ROWS = (
    ("qr_comm", "should_quick_allreduce", "quick_all_reduce"),
    ("ca_comm", "should_custom_ar", "all_reduce"),
    ("symm_mem_comm", "should_use_symm_mem", "all_reduce"),
)
# All-gathers and reduce-scatters do not run here: their buffers are as small as allowed.
_SMALL = dict.fromkeys(
    (
        "max_all_gather_size", "max_reduce_scatter_size", "max_mnnvl_all_gather_size",
        "max_mnnvl_reduce_scatter_size", "max_mnnvl_multimem_reduce_scatter_size",
    ),
    1024,
)  # fmt: skip


def own_kernels(group: Any) -> list[Kernel]:
    """Return second instances of the communicators that a group coordinator of vLLM
    uses; all ranks call this. Those of another form than the plugin knows are left out.
    """
    engine = getattr(group, "device_communicator", None)
    found = []
    for attribute, fits, reduce in _ROWS:
        theirs = getattr(engine, attribute, None)
        if theirs is None or getattr(theirs, "disabled", True):
            continue
        if not _is_known(theirs, fits, reduce):
            _logger.warning(
                "fcsd-serving: %s of this vLLM has another form; FarSkip's all-reduces"
                " use NCCL or RCCL in its place",
                type(theirs).__name__,
            )
            continue
        accepted = inspect.signature(type(theirs).__init__).parameters
        # What the engine limits by size, it has measured to be faster otherwise.
        limits = {**_SMALL, "max_size": getattr(theirs, "max_size", None)}
        options = {
            name: value
            for name, value in limits.items()
            if name in accepted and value is not None
        }
        ours = type(theirs)(group=group.cpu_group, device=group.device, **options)
        if not ours.disabled:
            found.append(
                Kernel(type(ours).__name__, getattr(ours, fits), getattr(ours, reduce))
            )
    return found


def _is_known(communicator: Any, fits: str, reduce: str) -> bool:
    """Return whether a communicator has the methods and arguments that are used here."""
    methods = [getattr(communicator, name, None) for name in (fits, reduce)]
    if not all(map(callable, methods)):
        return False
    accepted = inspect.signature(type(communicator).__init__).parameters
    writes = "out" in inspect.signature(methods[1]).parameters  # type: ignore[arg-type]
    return writes and {"group", "device"} <= accepted.keys()
