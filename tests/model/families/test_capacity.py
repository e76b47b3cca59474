"""Capacity and dropping, against the loop of the article and against experts that are
called pair by pair.
"""

from typing import Any

import pytest
import torch

from fcsd.model.connectivity import Connectivity, convert_model
from fcsd.model.families import FAMILIES
from fcsd.model.families.capacity import capacity, dropping, kept_pairs
from fcsd.model.families.routers import find_routers
from tests.float64 import in_float64
from tests.reference.tiny import tiny_model
from tests.support import few, user_error

WITHOUT = {"jetmoe", "llama4", "llama4_text"}
"""Families whose experts are not called with choices and weights."""


def article(
    expert_indices: list[list[int]], n_experts: int, expert_capacity: int
) -> list[list[bool]]:
    """`update_expert_inputs` of the article: a pair whose place is beyond its expert's
    buffer is not stored.
    """
    counters = [0] * n_experts
    kept = []
    for token in expert_indices:
        kept.append([])
        for expert in token:
            kept[-1].append(counters[expert] < expert_capacity)
            counters[expert] += 1
    return kept


def by_weight(
    experts: list[list[int]], weights: list[list[float]], limit: int
) -> list[list[bool]]:
    kept = [[False] * len(token) for token in experts]
    for expert in {e for token in experts for e in token}:
        pairs = [
            (-weights[t][k], t, k)
            for t, token in enumerate(experts)
            for k, e in enumerate(token)
            if e == expert
        ]
        for _, t, k in sorted(pairs)[:limit]:
            kept[t][k] = True
    return kept


def test_the_pairs_kept_are_those_of_the_articles_loop() -> None:
    random = torch.Generator().manual_seed(0)
    dropped = 0
    for _ in range(200):
        tokens, n_experts, top_k = (
            int(torch.randint(*r, (), generator=random))
            for r in ((1, 40), (2, 9), (1, 3))
        )
        load_factor = 0.25 + 2 * float(torch.rand((), generator=random))
        skew = torch.rand(n_experts, generator=random) * 2
        scores = torch.randn(tokens, n_experts, generator=random) + skew
        weights, experts = scores.topk(top_k)
        weights = (weights * 2).round()  # with ties
        # the article rounds down, we round up
        for limit in (
            int(load_factor * top_k * tokens // n_experts),
            capacity(load_factor, tokens, top_k, n_experts),
        ):
            wanted = article(experts.tolist(), n_experts, limit)
            assert kept_pairs(experts, limit).tolist() == wanted
            assert kept_pairs(experts, limit, weights).tolist() == by_weight(
                experts.tolist(), weights.tolist(), limit
            )
            dropped += sum(not pair for token in wanted for pair in token)
    assert dropped > 200


def seen(model: Any) -> tuple[list[Any], list[Any]]:
    """Return the actual arguments of each layer's experts, after all hooks; and the
    handles of the hooks.
    """
    calls: list[Any] = []
    handles = []
    for router in find_routers(model):
        experts = model.get_submodule(router.name.rpartition(".")[0] + ".experts")

        def before(
            module: Any, args: Any, calls: list[Any] = calls, name: str = router.name
        ) -> None:
            calls.append((name, args[1], args[2]))

        handles.append(experts.register_forward_pre_hook(before))
    return calls, handles


def tokens(rows: int = 2, length: int = 11) -> torch.Tensor:
    return torch.randint(
        3, 99, (rows, length), generator=torch.Generator().manual_seed(3)
    )


@pytest.mark.contract
@pytest.mark.parametrize("family", few(sorted(FAMILIES)))
def test_every_family_drops_or_is_refused_in_one_line(family: str) -> None:
    model = tiny_model(family)
    if family == "zaya":
        # The weight of a token that chooses no expert is zero, whatever is dropped.
        for router in find_routers(model):
            router.module.balancing_biases[-1] = -1
    if family in WITHOUT:
        with user_error(
            r"not called with the choices and weights[^\n]*leave the factor out$"
        ):
            dropping(model, 1.0).__enter__()
        return
    for kind in ("original", "converted"):
        if kind == "converted":
            convert_model(model, Connectivity("all"))
        before = model(tokens(), use_cache=False).logits
        routers = find_routers(model)
        top_k, num_experts = routers[0].top_k, routers[0].num_experts
        with dropping(model, 1.0) as counts, torch.no_grad():
            calls, handles = seen(model)
            model(tokens(), use_cache=False)
        assert sorted(name for name, *_ in calls) == sorted(
            router.name for router in routers
        )
        zeros = 0
        for _, experts, weights in calls:
            kept = torch.tensor(
                article(
                    experts.tolist(), num_experts, capacity(1.0, 22, top_k, num_experts)
                )
            )
            assert torch.equal(weights != 0, kept), kind
            zeros += int((~kept).sum())
        taken = counts.take()
        assert taken is not None
        assert [int(n) for n in taken] == [zeros, 22 * top_k * len(routers)]
        assert zeros > 0
        for handle in handles:
            handle.remove()
        assert torch.equal(model(tokens(), use_cache=False).logits, before)


@pytest.mark.parametrize("drop", ["order", "weight"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_dropped_pair_adds_nothing_and_has_no_gradient(
    drop: Any, checkpointing: bool
) -> None:
    """Experts whose pairs are all dropped have no gradient; the gradient of the others
    comes only from the kept pairs.
    """
    with in_float64():
        model = tiny_model("qwen3_moe", num_hidden_layers=1).double()
        block = model.model.layers[0].mlp
        x = torch.randn(
            1, 22, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64
        )
        _, weights, experts = block.gate(x.view(22, 32))
        kept = kept_pairs(experts, 3, weights if drop == "weight" else None)
        assert (~kept).sum() > 5
        wanted = torch.zeros(22, 32, dtype=torch.float64)
        for t in range(22):
            for k in range(2):
                if kept[t, k]:
                    expert = int(experts[t, k])
                    gate, up = (block.experts.gate_up_proj[expert] @ x[0, t]).chunk(2)
                    out = block.experts.down_proj[expert] @ (
                        torch.nn.functional.silu(gate) * up
                    )
                    wanted[t] = wanted[t] + weights[t, k] * out
        direction = torch.randn(
            22, 32, generator=torch.Generator().manual_seed(2), dtype=torch.float64
        )
        parameters = [
            block.gate.weight,
            block.experts.gate_up_proj,
            block.experts.down_proj,
        ]
        gradients = torch.autograd.grad((wanted * direction).sum(), parameters)
        factor = 3 * block.experts.num_experts / 44
        with dropping(model, factor, drop) as counts:
            counts.begin(None)
            if checkpointing:
                made = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
            else:
                made = block(x)
            actual = torch.autograd.grad(
                (made.view(22, 32) * direction).sum(), parameters
            )
        assert torch.allclose(made.view(22, 32), wanted, rtol=0, atol=1e-14)
        for one, other in zip(actual, gradients, strict=True):
            assert torch.allclose(one, other, rtol=0, atol=1e-13)
            assert float(one.abs().max()) > 0
        taken = counts.take()
        assert taken is not None and int(taken[0]) == int((~kept).sum())


def test_experts_with_adapters_drop_in_training_and_the_teacher_inside_them_does_not():
    pytest.importorskip("peft")
    from fcsd.training.teachers.config import AdapterConfig
    from fcsd.training.teachers.lora import add_adapters, as_original

    model = tiny_model("qwen3_moe", num_hidden_layers=1)
    before = model(tokens()).logits
    lora = AdapterConfig(
        r=2,
        lora_alpha=2,
        target_modules=[],
        target_parameters=["mlp.experts.down_proj"],
    )
    add_adapters(model, lora, 0, torch.float32)
    model.train()
    with dropping(model, 0.5, training_only=True) as counts:
        counts.begin(None)
        with as_original(model):
            assert torch.equal(model(tokens()).logits, before) and counts.take() is None
        assert not torch.allclose(model(tokens()).logits, before, atol=1e-3)
        taken = counts.take()
        assert taken is not None and int(taken[0]) > 0


def test_the_weight_of_a_dropped_pair_has_no_gradient() -> None:
    model = tiny_model("qwen3_moe", num_hidden_layers=1)
    experts = torch.tensor([[0, 1], [0, 2], [0, 3]])
    weights = torch.rand(3, 2, requires_grad=True)
    with dropping(model, 1e-6) as counts:  # room for one
        counts.begin(None)
        model.model.layers[0].mlp.experts(
            torch.randn(3, 32), experts, weights
        ).square().sum().backward()
    assert weights.grad is not None
    assert weights.grad.ne(0).tolist() == [[True, True], [False, True], [False, True]]


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_takes_no_room(side: str) -> None:
    """The logits of the text are those of the text alone: its pairs are dropped as if
    there were no padding.
    """
    model = tiny_model("qwen3_moe")
    text = tokens(1, 11)
    padding = torch.full((1, 9), 7)
    ids = torch.cat([padding, text] if side == "left" else [text, padding], 1)
    mask = torch.cat(
        [torch.zeros_like(padding), torch.ones_like(text)][
            :: 1 if side == "left" else -1
        ],
        1,
    )
    where = slice(9, None) if side == "left" else slice(0, 11)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with dropping(model, 1.0) as counts, torch.no_grad():
        alone = model(text, use_cache=False).logits
        wanted = counts.take()
        padded = model(
            input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False
        ).logits
        assert counts.take() == wanted and wanted is not None and int(wanted[0]) > 0
        unmasked = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    assert torch.allclose(padded[:, where], alone, atol=1e-5)
    if side == "left":
        assert not torch.allclose(unmasked[:, where], alone, atol=1e-3)


def test_a_single_token_that_is_generated_keeps_its_experts() -> None:
    model = tiny_model("qwen3_moe")
    with dropping(model, 0.01) as counts, torch.no_grad():
        model(tokens(1, 1), use_cache=False)
        assert counts.take() == (0, 2 * 4)


@pytest.mark.parametrize(
    ("factor", "drop"),
    [(0.0, "order"), (-1.0, "order"), (float("nan"), "order"), (1.0, "first")],
)
def test_a_bad_value_is_one_line(factor: float, drop: Any) -> None:
    with user_error(
        r"^capacity factor [^\n]*must be above 0, and drop must be order or weight$"
    ):
        dropping(tiny_model("qwen3_moe", num_hidden_layers=1), factor, drop).__enter__()


def test_dropping_twice_and_masks_that_hide_the_padding_are_refused() -> None:
    model = tiny_model("qwen3_moe", num_hidden_layers=1)
    with dropping(model, 1.0):
        with user_error("already has one"), dropping(model, 1.0):
            pass
        with user_error(r"needs an attention_mask \(B, T\)"):
            model(tokens(), attention_mask=torch.zeros(2, 1, 11, 11))
