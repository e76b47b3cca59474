"""Under autocast the experts' grouped matmul runs in bfloat16, forward and backward;
outside it nothing changes.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fcsd.model.autocast import autocast_experts, kept_casts
from tests.reference.tiny import tiny_model


class Kernels(TorchDispatchMode):
    """Records the dtypes of the operands of all grouped matmuls that run."""

    def __init__(self):
        super().__init__()
        self.dtypes: set[torch.dtype] = set()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "grouped_mm" in str(func):
            self.count += 1
            self.dtypes |= {
                x.dtype
                for x in args
                if isinstance(x, torch.Tensor) and x.is_floating_point()
            }
        return func(*args, **(kwargs or {}))


def gradients(model, enabled):
    ids = torch.arange(3, 35, device=model.device).view(2, 16)
    kernels = Kernels()
    with torch.autocast(model.device.type, torch.bfloat16, enabled=enabled):
        with kernels:
            logits = model(ids, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(
            logits.float().flatten(0, 1), ids.flatten()
        )
    with kernels:
        loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}, kernels


@pytest.mark.parametrize("fallback", [False, True])
# gpt_oss: transposed weights, and biases
@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_the_experts_are_computed_in_bfloat16(model_type, fallback, monkeypatch):
    """Compared with the loop over experts, whose matmuls autocast knows, and with
    float32.
    """
    autocast_experts()
    autocast_experts()  # once per process
    if fallback:
        monkeypatch.setattr(
            "transformers.integrations.moe._can_use_grouped_mm", lambda *_: False
        )
    grouped = tiny_model(model_type, experts_implementation="grouped_mm")
    looped = tiny_model(model_type, experts_implementation="eager")
    exact_loss, exact, plain = gradients(
        tiny_model(model_type, experts_implementation="grouped_mm"), False
    )
    loss, actual, kernels = gradients(grouped, True)
    _, loop, none = gradients(looped, True)
    assert plain.dtypes == {torch.float32}
    assert kernels.dtypes == {torch.bfloat16}
    assert none.count == 0
    assert (
        kernels.count == plain.count == 4 * 2 * 3
        if not fallback
        else kernels.count == plain.count > 0
    )
    assert loss == pytest.approx(exact_loss, rel=0.02)
    for name, gradient in actual.items():
        assert gradient.dtype == torch.float32
        error, same = ((g[name] - exact[name]).norm() for g in (actual, loop))
        assert error <= 3 * same + 0.01 * exact[name].norm(), name


class Casts(TorchDispatchMode):
    """Counts how often tensors with as many elements as a weight go to bfloat16."""

    def __init__(self, sizes: set[int]):
        super().__init__()
        self.sizes, self.count = sizes, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if str(func) == "aten._to_copy.default" and out.dtype == torch.bfloat16:
            self.count += out.numel() in self.sizes
        return out


@pytest.mark.parametrize(
    ("model_type", "implementation"),
    [("qwen3_moe", "grouped_mm"), ("gpt_oss", "grouped_mm"), ("qwen3_moe", "eager")],
)
def test_passes_without_gradients_cast_each_weight_once(model_type, implementation):
    """Each pass enters autocast by itself, as that of a model in training does; the
    logits are the same to the last bit.
    """
    autocast_experts()
    model = tiny_model(model_type, experts_implementation=implementation)
    ids = torch.arange(3, 14).view(1, 11)  # 11 tokens: no activation is a weight's size
    # A loop over experts takes their weights one by one, which are cast anew.
    dimensions = (2,) if implementation == "eager" else (2, 3)
    sizes = {w.numel() for w in model.parameters() if w.ndim in dimensions}

    @torch.no_grad()
    def logits():
        with torch.autocast("cpu", torch.bfloat16):
            return model(ids, use_cache=False).logits

    with Casts(sizes) as casts:
        plain = [logits() for _ in range(3)]
    apart = casts.count
    with Casts(sizes) as casts, kept_casts(model.device):
        kept = [logits() for _ in range(3)]
    assert casts.count * 3 == apart > 0
    assert all(torch.equal(plain[0], other) for other in plain + kept)
    # Nothing is left of them, also within another autocast: gradients flow, and a
    # changed weight counts.
    with torch.autocast("cpu", torch.bfloat16):
        with kept_casts(model.device):
            model(ids, use_cache=False)
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(0.5)
        changed = model(ids, use_cache=False).logits
    changed.float().sum().backward()
    assert all(weight.grad is not None for weight in model.parameters())
    assert not torch.allclose(changed, plain[0], atol=0.01)
