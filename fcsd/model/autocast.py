"""Run an MoE under autocast: experts in half precision, routers in float32, and a teacher
that rounds like the student.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fcsd.base.errors import UserError

# Without torch's kernel, transformers runs a loop, which is a separate operator.
_OPERATORS = (("aten", "_grouped_mm"), ("transformers", "grouped_mm_fallback"))
_KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA", "xpu": "AutocastXPU"}
_libraries: list[torch.library.Library] = []  # a rule lasts as long as its library
# Casts of the experts' weights while `kept_casts` keeps them.
_kept: dict[tuple[Any, ...], Tensor] | None = None


def autocast_experts() -> None:
    """Register autocast rules for grouped matmuls, like those for `mm` and `bmm`, for
    the rest of the process.

    transformers runs the experts of an MoE in one grouped matmul, for which torch's
    autocast has no rule (https://github.com/pytorch/pytorch/issues/174763): with
    float32 weights they run in float32 and take seven times as long on an H100 as in
    bfloat16 (docs/scale.md). A rule that torch brings itself is not replaced.
    """
    import transformers.integrations.moe  # noqa: F401, defines the second operator

    # Rules can be registered only once in a process.
    if _libraries:
        return
    for namespace, name in _OPERATORS:
        library = torch.library.Library(namespace, "IMPL")
        for device, key in _KEYS.items():
            if not torch._C._dispatch_has_kernel_for_dispatch_key(
                f"{namespace}::{name}", key
            ):
                library.impl(
                    name,
                    _rule(getattr(getattr(torch.ops, namespace), name), device, key),
                    key,
                )
        _libraries.append(library)


def _rule(
    operator: Callable[..., Tensor], device: str, key: str
) -> Callable[..., Tensor]:
    """Wrap the operator so that it runs in autocast's dtype: float32 tensors are cast,
    as autocast does for `mm`.
    """
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

    def grouped(
        *tensors: Tensor | None, **options: Tensor | torch.dtype | None
    ) -> Tensor:
        dtype = torch.get_autocast_dtype(device)

        def cast(x: Tensor | torch.dtype | None) -> Tensor | torch.dtype | None:
            if isinstance(x, Tensor) and x.dtype == torch.float32:
                return _cast(x, dtype)
            return x

        # Without autocast's key, or the call would come back to this rule.
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return operator(
                *map(cast, tensors), **{name: cast(x) for name, x in options.items()}
            )

    return grouped


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x in the dtype; a parameter, or a view of one, is cast once while
    `kept_casts` keeps it.
    """
    parameter = x._base if x._is_view() else x
    if _kept is None or not isinstance(parameter, nn.Parameter):
        return x.to(dtype)
    key = id(parameter), dtype, x.shape, x.stride(), x.storage_offset()
    if key not in _kept:
        _kept[key] = x.to(dtype)
    return _kept[key]


@contextlib.contextmanager
def kept_casts(device: torch.device) -> Iterator[None]:
    """Cast each weight once for all forward passes within the block, which have no
    gradients and change no weight; but for experts that run in a loop.

    A model that trains under autocast enters it anew for each pass, and casts all of its
    weights again: for each new token of a text, several times the bytes that the token
    needs. The casts take as much memory as the weights in half precision, and are freed
    at the end.
    """
    global _kept
    kind, outer = device.type, _kept
    if not torch.amp.is_autocast_available(kind):
        yield
        return
    # torch keeps its casts up to the end of the outermost autocast, be it switched off.
    same = torch.autocast(
        kind, torch.get_autocast_dtype(kind), enabled=torch.is_autocast_enabled(kind)
    )
    _kept = {}
    try:
        with torch.no_grad(), same:
            yield
    finally:
        _kept = outer
        # They know no gradients, which an autocast around the block may need next.
        torch.clear_autocast_cache()


@contextlib.contextmanager
def float32_routers(model: nn.Module) -> Iterator[None]:
    """Disable autocast in a model's routers within the block.

    Families compute their routers in float32, even in a bfloat16 model. Autocast would
    round the operands of that matmul and send tokens to other experts.
    """
    entered: list[torch.autocast] = []

    def leave_autocast(
        router: nn.Module, args: tuple, kwargs: dict
    ) -> tuple[tuple, dict]:
        weight = next(router.parameters())
        entered.append(torch.autocast(weight.device.type, enabled=False))
        entered[-1].__enter__()

        # The hidden states come from a matmul under autocast, in half precision.
        def widened(value: Any) -> Any:
            if not isinstance(value, Tensor) or not value.is_floating_point():
                return value
            return value.to(torch.promote_types(value.dtype, weight.dtype))

        return tuple(map(widened, args)), {
            name: widened(value) for name, value in kwargs.items()
        }

    def enter_again(*_: Any) -> None:
        entered.pop().__exit__(None, None, None)

    with contextlib.ExitStack() as stack:
        for router in _routers(model):
            stack.callback(
                router.register_forward_pre_hook(
                    leave_autocast, with_kwargs=True
                ).remove
            )
            # Also called after an error, so that no autocast stays disabled.
            stack.callback(
                router.register_forward_hook(enter_again, always_call=True).remove
            )
        yield


def _routers(model: nn.Module) -> list[nn.Module]:
    from fcsd.model.families.routers import find_routers

    try:
        return [router.module for router in find_routers(model)]
    except UserError:  # a teacher may be dense, or of a family that fcsd does not know
        return []


def computing_dtype(
    own: torch.dtype, student: torch.dtype, *, bf16: bool, shards: bool
) -> torch.dtype:
    """Return the dtype of the weights of a teacher that computes like its student.

    own: the dtype in which it was loaded. student: of the student's weights between the
    steps. shards: these are gathered in bfloat16 with `bf16`, without autocast.
    """
    if shards:
        return torch.bfloat16 if bf16 else student
    if not bf16 or student != torch.float32:
        return student
    # `UnderAutocast` rounds as autocast rounds the student, from either dtype.
    return own if own == torch.bfloat16 else torch.float32


class UnderAutocast:
    """A frozen model that rounds like a student that is trained from its weights under
    autocast.

    Autocast rounds only the weights of matmuls. If the student's weights are in float32
    and the model's in bfloat16, the model's matrices stay as they are, and everything
    else (embeddings, norms, routers) is in float32 while it computes. Without this, the
    two differ by the rounding in every layer, and tokens go to other experts.
    """

    def __init__(self, model: nn.Module, *, student_dtype: torch.dtype):
        self.model = model
        narrow = _beside_matmuls(model) if student_dtype == torch.float32 else []
        self.tensors = [(tensor, tensor.data, tensor.data.float()) for tensor in narrow]

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Let the model compute so within the block."""
        device = next(self.model.parameters()).device.type
        try:
            for tensor, _, wide in self.tensors:
                tensor.data = wide
            with float32_routers(self.model), torch.autocast(device, torch.bfloat16):
                yield
        finally:
            for tensor, narrow, _ in self.tensors:
                tensor.data = narrow


def _beside_matmuls(model: nn.Module) -> list[Tensor]:
    """Return the half-precision tensors of routers, and those that some module uses
    without rounding by autocast.
    """
    routers = {part for router in _routers(model) for part in router.modules()}
    rounded = {
        id(parameter) for module in model.modules() for parameter in _of_matmul(module)
    }
    for module in model.modules():
        in_matmul = () if module in routers else _of_matmul(module)
        rounded_here = {id(parameter) for parameter in in_matmul}
        held = {id(parameter) for parameter in module.parameters(recurse=False)}
        # A head may share its weight with the embeddings, which do not round it.
        rounded -= held - rounded_here
    return [
        tensor
        for tensor in (*model.parameters(), *model.buffers())
        if tensor.dtype in (torch.bfloat16, torch.float16) and id(tensor) not in rounded
    ]


def _of_matmul(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of a module that autocast rounds: those of a linear layer,
    and the 3-dimensional ones of experts.
    """
    parameters = list(module.parameters(recurse=False))
    if isinstance(module, nn.Linear):
        return parameters
    if isinstance(module, nn.modules.conv._ConvNd):
        return []
    return [parameter for parameter in parameters if parameter.ndim == 3]
