"""DeepSpeed ZeRO-3 on two gloo ranks has the loss and gradients of one process."""

import importlib
import importlib.util
import warnings

import pytest
import torch
import torch.distributed as dist

from fcsd.model.connectivity import Connectivity, convert_model, farskip_layers
from fcsd.model.connectivity.stack import decoder_layers
from fcsd.model.families import FAMILIES
from tests.float64 import ROUNDINGS, in_float64
from tests.reference.ranks import import_what_deepspeed_imports, run_ranks
from tests.reference.tiny import converted, gradients_of
from tests.support import user_error

FAMILY_NAMES = (
    "qwen3_moe", "qwen2_moe", "deepseek_v3", "instella_moe", "gpt_oss", "llama4_text",
)  # fmt: skip
X = torch.randint(3, 99, (4, 12), generator=torch.Generator().manual_seed(3))

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None,
    reason="needs DeepSpeed: pip install 'fcsd[deepspeed]'",
)


def largest(actual, expected):
    """Return the largest difference of gradients."""
    assert actual.keys() == expected.keys()
    return max(
        float((actual[name] - gradient).abs().max())
        for name, gradient in expected.items()
    )


def zero3(rank, cases):
    """Return (family, checkpointing, leaf) -> (loss error, gradient error): the loss
    error in units of float32's spacing there, the gradient error in units of the
    distance of one process's gradients from float64. DeepSpeed has no float64.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import deepspeed
        from deepspeed.utils import safe_get_full_grad, set_z3_leaf_modules

        # Otherwise a C++ extension for reductions in shared memory is compiled, which
        # takes a minute.
        importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
        deepspeed.init_distributed("gloo")
        results = {}
        for family, checkpointing, leaf in cases:
            one = converted(family).train()
            expected_loss = one(X, labels=X, use_cache=False).loss
            expected_loss.backward()
            expected = gradients_of(one)
            one.double().zero_grad()
            with in_float64():
                one(X, labels=X, use_cache=False).loss.backward()
                rounding = largest(expected, gradients_of(one))

            model = converted(family).train()
            if checkpointing:
                model.activation_checkpointing_enable({"use_reentrant": False})
            if leaf:
                stack = decoder_layers(model, FAMILIES[family])
                set_z3_leaf_modules(
                    model, [type(getattr(stack[-1], FAMILIES[family].moe))]
                )
            engine, *_ = deepspeed.initialize(
                model=model,
                optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
                config={
                    "train_micro_batch_size_per_gpu": 2,
                    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
                    "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False,
                },
            )  # fmt: skip
            assert farskip_layers(engine.module) == [0, 1, 2, 3]
            with user_error("DeepSpeedEngine: not a transformers model"):
                convert_model(engine, Connectivity("all"))
            rows = X.chunk(2)[rank]
            loss = engine(rows, labels=rows, use_cache=False).loss
            engine.backward(loss)
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            parameters = dict(engine.module.named_parameters())
            actual = {name: safe_get_full_grad(parameters[name]) for name in expected}
            error = (
                float((mean / 2 - expected_loss).abs() / expected_loss)
                / torch.finfo(mean.dtype).eps
            )
            results[family, checkpointing, leaf] = (
                error,
                largest(actual, expected) / rounding,
            )
            engine.destroy()
    return results


CASES = [
    ("qwen2_moe", False, False),
    ("gpt_oss", False, False),
    ("deepseek_v3", True, True),
]
OTHERS = [
    (family, False, False)
    for family in FAMILY_NAMES
    if family not in ("qwen2_moe", "gpt_oss")
]
OTHERS += [("qwen3_moe", True, False)]


@pytest.mark.parametrize(
    "cases",
    [CASES, pytest.param(OTHERS, marks=pytest.mark.breadth)],
    ids=["few", "others"],
)
def test_zero3_has_the_loss_and_gradients_of_one_process(cases, monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    import_what_deepspeed_imports()
    for results in run_ranks(zero3, 2, cases):
        assert list(results) == cases
        for case, (loss, gradients) in results.items():
            assert loss < ROUNDINGS and gradients < ROUNDINGS, (case, loss, gradients)
