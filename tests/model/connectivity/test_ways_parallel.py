"""FSDP2 and transformers' plans for tensor and expert parallelism on two gloo ranks,
against one process.
"""

import pytest
import torch
import torch.distributed as dist

from fcsd.model.connectivity import (
    Connectivity,
    convert_model,
    farskip_layers,
    load_model,
)
from tests.float64 import BOUND, ROUNDINGS, in_float64, logits_in_float64
from tests.reference.ranks import in_turn, run_ranks
from tests.reference.tiny import tiny_model
from tests.support import COMMON, few, user_error

X = torch.randint(3, 99, (4, 12), generator=torch.Generator().manual_seed(3))


FEW = ("qwen2_moe", "deepseek_v3", "gpt_oss", "llama4_text")
"""A shared expert; a dense layer and latent attention; experts with biases; chunked attention."""
PARTS = [
    FEW,
    pytest.param(
        tuple(name for name in COMMON if name not in FEW),
        marks=pytest.mark.breadth,
    ),
]


def full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def step(model, x):
    """(loss, name -> gradient)"""
    model.train()
    loss = model(x, labels=x, use_cache=False).loss
    loss.backward()
    return loss.detach(), {
        n: full(p.grad) for n, p in model.named_parameters() if p.grad is not None
    }


def worst(actual, expected):
    """Return the largest difference of gradients, in units of the largest gradient of
    the tensor, at least 1.
    """
    assert actual.keys() == expected.keys()
    return max(
        float((actual[n] - gradient).abs().max() / gradient.abs().max().clamp(min=1))
        for n, gradient in expected.items()
    )


def mean_over_ranks(x):
    total = x.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def fsdp2(rank, families):
    from torch.distributed.fsdp import fully_shard

    results = {}
    for family in in_turn(families):
        model = tiny_model(family)
        convert_model(model, Connectivity("all"))
        expected_loss, expected = step(model, X)
        for checkpointing in (None, "plain", "reentrant"):
            model = tiny_model(family)
            convert_model(model, Connectivity("all"))
            for layer in model.model.layers:
                fully_shard(layer)
            fully_shard(model)
            assert farskip_layers(model) == [0, 1, 2, 3]
            if checkpointing:
                model.activation_checkpointing_enable(
                    {"use_reentrant": checkpointing == "reentrant"}
                )
                if checkpointing == "reentrant":
                    model.enable_input_require_grads()
            loss, gradients = step(model, X.chunk(2)[rank])
            loss_error = float((mean_over_ranks(loss) - expected_loss).abs())
            results[family, checkpointing] = (loss_error, worst(gradients, expected))
    return results


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("families", PARTS, ids=["few", "others"])
def test_fsdp2_has_the_loss_and_gradients_of_one_process(families):
    for results in run_ranks(fsdp2, 2, families):
        assert len(results) == 3 * len(families)
        for case, (loss, gradients) in results.items():
            assert loss < BOUND and gradients < BOUND, (case, loss, gradients)


def gradients_behind_a_pass_without(rank, way):
    """Return (name -> gradient of a single step, name -> gradient of the same step
    after a pass without gradients)
    """
    from torch.distributed.fsdp import fully_shard

    model = tiny_model("qwen3_moe")  # the original: it is torch's, not the rewiring's
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    _, alone = step(model, X)
    with torch.no_grad():
        model(X, use_cache=False)
    if way == "reshard":
        model.reshard()
    (optimizer if way == "optimizer" else model).zero_grad()
    return alone, step(model, X)[1]


@pytest.mark.parametrize("way", few(["optimizer", "reshard", "model"], 1))
def test_zero_grad_of_an_fsdp2_model_behind_a_pass_without_gradients_leaves_those_outside_the_layers(
    way,
):
    """As docs/scale.md says, torch 2.13 keeps the root's parameters gathered; the
    shards have the gradients.
    """
    for alone, behind in run_ranks(gradients_behind_a_pass_without, 2, way):
        outside = {n for n in alone if not n.startswith("model.layers.")}
        assert outside == {
            "model.embed_tokens.weight",
            "model.norm.weight",
            "lm_head.weight",
        }
        for name, gradient in alone.items():
            doubled = way == "model" and name in outside
            torch.testing.assert_close(
                behind[name], gradient * (2 if doubled else 1), rtol=1e-4, atol=1e-6
            )


@torch.no_grad()
def fsdp2_first(rank):
    from torch.distributed.fsdp import fully_shard

    model = tiny_model("qwen2_moe")
    convert_model(model, Connectivity("all"))
    expected = model(X, use_cache=False).logits
    model = tiny_model("qwen2_moe")
    for layer in model.model.layers:
        fully_shard(layer.mlp)  # the blocks' classes change, too
        fully_shard(layer)
    convert_model(model, Connectivity("all"))
    error = float((model(X, use_cache=False).logits - expected).abs().max())
    fully_shard(model)
    with user_error(
        r"FSDPFarSkipQwen2MoeForCausalLM: .* convert before wrapping the model"
    ):
        convert_model(model, Connectivity("none"))
    return error


@pytest.mark.usefixtures("float64")
def test_converting_after_fsdp2_is_right_for_sharded_layers_and_refused_for_a_sharded_model():
    assert max(run_ranks(fsdp2_first, 2)) < BOUND


def plans(rank, folder, families, ways):
    """Return (family, way, rewired) -> (logits error, gradient error, number of sharded
    tensors), for the original only the last, or the error that was raised.

    In float32: the float64 mode does not work with the collectives of "ep all_to_all".
    Errors are in units of the rounding of one process, its distance from float64.
    """
    from transformers.distributed import DistributedConfig

    options = {
        "tp": lambda: {"distributed_config": DistributedConfig(tp_size=2)},
        "ep all_reduce": lambda: {
            "distributed_config": DistributedConfig(tp_size=2, ep_size=2, ep_implementation="all_reduce"),
        },
        "ep all_to_all": lambda: {
            "distributed_config": DistributedConfig(fsdp_size=2, ep_size=2, ep_implementation="all_to_all"),
        },
    }  # fmt: skip

    def outcome(family, way, rewired):
        connectivity = Connectivity("all") if rewired else None
        model = load_model(folder / family, connectivity=connectivity, **options[way]())
        one = load_model(folder / family, connectivity=connectivity)
        rows = X.chunk(2)[rank] if way == "ep all_to_all" else X
        assert farskip_layers(model) == ([0, 1, 2, 3] if rewired else [])
        if way != "ep all_to_all":
            settings = {
                "max_new_tokens": 3, "do_sample": False, "eos_token_id": None, "pad_token_id": 0,
            }  # fmt: skip
            mask = torch.ones_like(X)
            made = [
                m.generate(X, attention_mask=mask, **settings) for m in (model, one)
            ]
            assert torch.equal(*made)
        sharded = sum(hasattr(p, "full_tensor") for p in model.parameters())
        if not rewired:  # it only has to run
            step(model, rows)
            return sharded
        with torch.no_grad():
            logits = full(model(rows, use_cache=False).logits)
            expected = one(rows, use_cache=False).logits
        rounding = (expected - logits_in_float64(one, {"input_ids": rows})).abs().max()
        error = float((logits - expected).abs().max() / rounding)
        gradients = step(one, X)[1]
        one.double().zero_grad()
        with in_float64():
            rounding = worst(gradients, step(one, X)[1])
        return error, worst(step(model, rows)[1], gradients) / rounding, sharded

    results = {}
    for family in in_turn(families):
        for way in ways:
            for rewired in (False, True):
                try:
                    results[family, way, rewired] = outcome(family, way, rewired)
                except (RuntimeError, ValueError) as error:
                    results[family, way, rewired] = str(error)
                dist.barrier()
    return results


UPSTREAM = {
    ("llama4_text", "tp"): "is a view and is being modified inplace",
    ("llama4_text", "ep all_reduce"): "has no `ep_plan`",
    ("llama4_text", "ep all_to_all"): "has no `ep_plan`",
}
"""(family, way) -> what the original of transformers 5.23 says, in one process or two."""


@pytest.mark.parametrize("way", few(["ep all_to_all", "tp", "ep all_reduce"], 2))
@pytest.mark.parametrize("families", PARTS, ids=["few", "others"])
def test_tensor_and_expert_parallel_plans_give_the_logits_and_gradients_of_one_process(
    families, way, tmp_path
):
    for family in families:
        tiny_model(family).save_pretrained(tmp_path / family)
    for results in run_ranks(plans, 2, tmp_path, families, [way], timeout_s=240):
        for family in families:
            original, rewired = (results[family, way, r] for r in (False, True))
            if (family, way) in UPSTREAM:
                assert UPSTREAM[family, way] in original, (
                    f"{family}: the original can do it now"
                )
                assert UPSTREAM[family, way] in rewired
                continue
            assert not isinstance(original, str) and not isinstance(rewired, str), (
                family,
                original,
                rewired,
            )
            assert rewired[0] < ROUNDINGS and rewired[1] < ROUNDINGS, (family, rewired)
            assert rewired[2] == original > 0, (
                family,
                "another number of sharded tensors",
            )
