"""Send a model from the first rank's memory to the devices of all ranks, module by
module, so that no device holds it whole.

Not covered: sharding the modules that were sent (`fcsd.parallel.shard`).
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fcsd.parallel.launch import Launch


class Sender:
    """Sends the first rank's parameters and buffers to the devices of all ranks."""

    def __init__(self, model: nn.Module, launch: Launch):
        self.device, self.first = launch.device, launch.first
        # A tied parameter has several owners. The old parameters are kept, without
        # data, because their ids are the keys: a freed id could be reused.
        self.kept: list[nn.Parameter] = []
        self.places: dict[int, tuple[nn.Parameter, list[tuple[nn.Module, str]]]] = {}
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    self.places.setdefault(id(parameter), (parameter, []))[1].append(
                        (module, name)
                    )
        self.sent: set[tuple[int, str]] = set()  # buffers
        # For parameters with these names, the values before they are cast.
        self.kept_names: set[str] = set()
        self.float32: dict[str, Tensor] = {}
        kinds = _kinds(model)
        of_first = [kinds]
        dist.broadcast_object_list(of_first, src=0)
        # The first rank decides: a model without storage may have other dtypes, and
        # other parameters of it may be frozen.
        self.kinds = of_first[0]
        if kinds.keys() != self.kinds.keys():
            raise RuntimeError(
                f"{type(model).__name__}: the ranks built different models"
            )
        # Names identify a tensor across ranks; ids are local.
        self.names = {
            (id(module), name): f"{prefix}.{name}" if prefix else name
            for prefix, module in model.named_modules()
            for name in (*module._parameters, *module._buffers)
        }

    def send(self, module: nn.Module, dtype: torch.dtype | None) -> None:
        """Send everything in `module` that has not been sent yet; floating-point
        parameters arrive as `dtype`, None: in their own.
        """
        for part in module.modules():
            for name, parameter in list(part._parameters.items()):
                if parameter is None or id(parameter) not in self.places:
                    continue  # sent already, and perhaps sharded
                old_parameter, owners = self.places.pop(id(parameter))
                full_name = self.names[id(part), name]
                own_dtype, requires_grad = self.kinds[full_name]
                value = self._sent(old_parameter.data, own_dtype)
                if full_name in self.kept_names:
                    self.float32[full_name] = value.float()
                if dtype is not None and value.is_floating_point():
                    value = value.to(dtype)
                new_parameter = nn.Parameter(value, requires_grad=requires_grad)
                if not old_parameter.is_meta:
                    old_parameter.data = torch.empty(0)
                self.kept.append(old_parameter)
                for owner, own_name in owners:
                    owner._parameters[own_name] = new_parameter
            for name, buffer in part._buffers.items():
                if buffer is not None and (id(part), name) not in self.sent:
                    self.sent.add((id(part), name))
                    part._buffers[name] = self._sent(
                        buffer, self.kinds[self.names[id(part), name]][0]
                    )

    def _sent(self, value: Tensor, dtype: torch.dtype) -> Tensor:
        if self.first:
            value = value.detach().to(self.device).contiguous()
        else:
            value = torch.empty(value.shape, dtype=dtype, device=self.device)
        # As bytes: not every backend broadcasts every dtype.
        if value.numel():
            dist.broadcast(value.reshape(-1).view(torch.uint8), src=0)
        return value


def _kinds(model: nn.Module) -> dict[str, tuple[torch.dtype, bool]]:
    """Return the dtype of each parameter and buffer, and whether it is trained."""
    tensors = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    return {name: (tensor.dtype, tensor.requires_grad) for name, tensor in tensors}
