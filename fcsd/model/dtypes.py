"""Determine the dtype of each tensor in memory, as transformers loads it.

A model in bfloat16 is not bfloat16 throughout. Families list tensors that stay in
float32 (`_keep_in_fp32_modules_strict`: the weight or the correction bias of a router),
and modules create tensors in float32 (rotary frequencies). Rounding these sends tokens
to other experts.
"""

import copy
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fcsd.base.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


PLAIN = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
"""Dtypes of weights that are not quantised, by their names in safetensors files."""


def dtype_of(name: str) -> torch.dtype:
    """Return the torch dtype that a recipe names."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def real_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield names and floating-point tensors, buffers included; a tied tensor comes
    under each of its names.
    """
    parameters = model.named_parameters(remove_duplicate=False)
    for name, tensor in (*parameters, *model.named_buffers(remove_duplicate=False)):
        if tensor.is_floating_point():
            yield name, tensor


def loaded_dtypes(
    model: "PreTrainedModel", dtype: torch.dtype
) -> dict[str, torch.dtype]:
    """Return the dtypes that the floating-point tensors of a model would have if
    `from_pretrained` loaded it in `dtype`.
    """
    fresh = without_storage(model, dtype)
    dtypes = {name: tensor.dtype for name, tensor in real_tensors(fresh)}
    for pattern, planned_dtype in fresh._get_dtype_plan(dtype).items():
        # transformers reads the patterns in the same way (`build_glob_alternation`).
        expression = re.compile(pattern.replace("*", ".*"))
        dtypes |= dict.fromkeys(filter(expression.search, dtypes), planned_dtype)
    return dtypes


def kept_in_float32(model: "PreTrainedModel") -> set[str]:
    """Return the names of the tensors that stay in float32 in a bfloat16 model."""
    dtypes = loaded_dtypes(model, torch.bfloat16)
    return {name for name in dtypes if dtypes[name] == torch.float32}


def kept_routers(model: "PreTrainedModel") -> list[nn.Module]:
    """Return the routers whose parameters all stay in float32 in a bfloat16 model."""
    from fcsd.model.families.routers import find_routers

    float32_names = kept_in_float32(model)
    try:
        routers = find_routers(model)
    except UserError:
        return []
    modules = []
    for router in routers:
        names = {
            f"{router.name}.{name}" for name, _ in router.module.named_parameters()
        }
        # Only whole modules can be excluded. A family may keep the correction bias
        # alone in float32; its router then stays with its layer.
        if names and names <= float32_names:
            modules.append(router.module)
    return modules


def without_storage(model: "PreTrainedModel", dtype: torch.dtype | None = None) -> Any:
    """Build the same model on the meta device, as it is before weights are loaded in
    `dtype`.
    """
    from transformers.modeling_utils import local_torch_dtype

    built: Any = type(model)
    config, dtype = copy.deepcopy(model.config), model.dtype if dtype is None else dtype
    _set_dtype(config, dtype)
    # transformers builds a model under the dtype that it loads; modules that ask for
    # float32 get it all the same.
    with local_torch_dtype(dtype), torch.device("meta"):
        fresh = built(config)
    if "_weight_conversions" in model.__dict__:
        fresh._weight_conversions = model._weight_conversions
    return fresh


def _set_dtype(config: Any, dtype: torch.dtype) -> None:
    """Write a dtype into a config and its sub-configs, from which the parts of a
    multimodal model are built.
    """
    config.dtype = dtype
    for name in config.sub_configs:
        if (part := getattr(config, name, None)) is not None:
            _set_dtype(part, dtype)


def cast(model: nn.Module, dtypes: Mapping[str, torch.dtype]) -> None:
    """Cast the named tensors to their dtypes, in place.

    `Module.to` casts all tensors to one dtype, and drops the imaginary part of complex
    buffers (the rotary embedding of Llama 4's images).
    """
    for name, tensor in list(real_tensors(model)):
        dtype = dtypes.get(name, tensor.dtype)
        if dtype == tensor.dtype:
            continue
        # The data of a sharded tensor (DTensor) is a tensor inside it.
        if is_traceable_wrapper_subclass(tensor):
            cast_tensor = tensor.detach().to(dtype)
            if isinstance(tensor, nn.Parameter):
                cast_tensor = nn.Parameter(cast_tensor, tensor.requires_grad)
            torch.utils.swap_tensors(tensor, cast_tensor)
        else:
            tensor.data = tensor.data.to(dtype)


def is_in_dtype(model: "PreTrainedModel", dtype: torch.dtype) -> bool:
    """Return whether `to_dtype` would change nothing."""
    dtypes = loaded_dtypes(model, dtype)
    return all(
        tensor.dtype == dtypes.get(name, tensor.dtype)
        for name, tensor in real_tensors(model)
    )


def has_plain_weights(model: nn.Module) -> bool:
    """Return whether no weight is quantised, so that a cast keeps the meaning of all."""
    return all(
        parameter.dtype in PLAIN.values()
        and type(parameter.data) in (Tensor, DTensor, FakeTensor)
        for parameter in model.parameters()
    )


def to_dtype(model: "PreTrainedModel", dtype: torch.dtype) -> None:
    """Cast a model in place to the dtypes that it would have if it had been loaded in
    `dtype`.
    """
    cast(model, loaded_dtypes(model, dtype))
