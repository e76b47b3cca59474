"""The terms beside the divergence, against the equations of the connectivity written
out in float64.
"""

import copy
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from fcsd.base.errors import UserError
from fcsd.base.strict import validate
from fcsd.model.connectivity import Connectivity, convert_model
from fcsd.model.families.routers import find_routers
from fcsd.training.losses.hidden_terms import (
    AuxiliaryLosses,
    Captured,
    freeze_routers,
    relative_distance,
    squared_distance,
)
from fcsd.training.losses.objectives import ObjectiveConfig
from tests.reference.tiny import tiny_model

B, T = 2, 9


def make(layers: Any = "all", seed: int = 1, **overrides: Any) -> tuple[Any, Any, Any]:
    """Return (rewired student, the student's weights with regular connectivity, another
    teacher), float64, 4 layers.
    """
    regular = tiny_model(
        "qwen2_moe", seed=seed, experts_implementation="eager", **overrides
    ).double()
    teacher = tiny_model(
        "qwen2_moe", seed=0, experts_implementation="eager", **overrides
    ).double()
    student = copy.deepcopy(regular)
    convert_model(student, Connectivity(layers))
    return student.train(), regular, teacher.requires_grad_(False)


def batch(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randint(3, 99, (B, T), generator=g), torch.rand(
        B, T, generator=g
    ) > 0.4


def by_hand(
    model: Any, ids: torch.Tensor, selected: set[int]
) -> dict[str, list[torch.Tensor]]:
    """Return o_k, attention's and the MoE block's output and the router's logits of
    every layer, from the equations.
    """
    stack = model.model
    o = stack.embed_tokens(ids)
    rotary = stack.rotary_emb(o, torch.arange(T)[None])
    streams: dict[str, list[torch.Tensor]] = {
        "o": [],
        "attn": [],
        "moe": [],
        "logits": [],
    }
    partial = None
    for k, layer in enumerate(stack.layers):
        rewired = k in selected
        a = partial if rewired and partial is not None else o
        attn = layer.self_attn(
            hidden_states=layer.input_layernorm(a),
            position_embeddings=rotary,
            attention_mask=None,
        )[0]
        x = layer.post_attention_layernorm(o if rewired else o + attn)
        moe = layer.mlp(x)
        shared = torch.sigmoid(
            x @ layer.mlp.shared_expert_gate.weight.T
        ) * layer.mlp.shared_expert(x)
        partial = o + attn + shared if rewired else None
        o = o + attn + moe
        for name, value in (
            ("o", o),
            ("attn", attn),
            ("moe", moe),
            ("logits", x @ layer.mlp.gate.weight.T),
        ):
            streams[name].append(value)
    return streams


def expected(
    objective: ObjectiveConfig,
    regular: Any,
    teacher: Any,
    ids: Any,
    keep: Any,
    selected: set[int],
) -> Any:
    """Return the terms of the objective as sums over tokens, one token at a time."""
    own, theirs = by_hand(regular, ids, selected), by_hand(teacher, ids, set())
    num_layers = len(own["o"])
    points = {
        "blocks": [("o", k) for k in range(num_layers)],
        "merges": [("o", k) for k in selected if k + 1 in selected],
        "sublayers": [(name, k) for k in selected for name in ("attn", "moe")],
    }
    l2 = router = torch.zeros((), dtype=torch.float64)
    for n in torch.nonzero(keep).tolist():
        for name, k in points[objective.l2_points] if objective.l2_points else []:
            x, t = own[name][k][tuple(n)], theirs[name][k][tuple(n)]
            distance = (x - t).pow(2).sum()
            l2 = l2 + (
                distance / t.pow(2).sum() / len(points[objective.l2_points])
                if objective.l2_relative
                else distance
            )
        for s, t in zip(own["logits"], theirs["logits"], strict=True):
            p, q = t[tuple(n)].softmax(-1), s[tuple(n)].softmax(-1)
            router = router + (p * (p / q).log()).sum() / num_layers
    return {"l2": l2, "router_kl": router}


def measured(
    terms: AuxiliaryLosses, student: Any, teacher: Any, ids: Any, keep: Any
) -> dict[str, torch.Tensor]:
    with torch.no_grad(), terms.captured(teacher) as theirs:
        teacher(ids, use_cache=False)
    with terms.captured(student) as own:
        student(ids, use_cache=False)
    return terms.values(own, theirs, keep, list(terms.coefficients(0)))


L2 = {"name": "kl+l2", "l2_coefficient": 1.0}
OBJECTIVES = [
    L2,
    L2 | {"l2_relative": True},
    L2 | {"l2_relative": True, "l2_points": "merges"},
    L2 | {"l2_points": "sublayers"},
    L2 | {"l2_relative": True, "l2_points": "sublayers", "router_kl_coefficient": 0.1},
    {"name": "kl", "router_kl_coefficient": 0.1},
]


@pytest.mark.parametrize("checkpointing", [False, True], ids=["stored", "checkpointed"])
@pytest.mark.parametrize(
    "values", OBJECTIVES, ids=lambda v: ",".join(map(str, v.values()))
)
def test_values_and_gradients_are_those_of_the_equations(
    values: dict[str, Any], checkpointing: bool
) -> None:
    selected = {0, 1, 3} if "l2_points" in values else {0, 1, 2, 3}
    student, regular, teacher = make(sorted(selected))
    ids, keep = batch()
    objective = validate(ObjectiveConfig, values, "objective")
    hand = expected(objective, regular, teacher, ids, keep, selected)
    if checkpointing:
        student.activation_checkpointing_enable({"use_reentrant": False})
    terms = measured(
        AuxiliaryLosses(objective, student, 10), student, teacher, ids, keep
    )
    assert set(terms) == {
        name
        for name, value in hand.items()
        if value != 0 and (name == "l2" or "router_kl_coefficient" in values)
    }
    for name, value in terms.items():
        torch.testing.assert_close(value, hand[name], rtol=1e-9, atol=0)
    total, same = (sum(each[name] for name in terms) for each in (terms, hand))
    total.backward()
    same.backward()
    for name, parameter in regular.named_parameters():
        gradient = student.get_parameter(name).grad
        if parameter.grad is None:
            assert gradient is None or not gradient.any()
        else:
            torch.testing.assert_close(
                gradient, parameter.grad, rtol=1e-6, atol=1e-9, msg=name
            )


def test_nothing_is_collected_outside_the_context_and_no_hook_stays() -> None:
    student, _, _ = make()
    ids, _ = batch()
    terms = AuxiliaryLosses(
        validate(ObjectiveConfig, OBJECTIVES[4], "objective"), student, 10
    )
    with terms.captured(student) as seen:
        student(ids, use_cache=False)
    student(ids, use_cache=False)
    assert len(seen.streams) == 8 and len(seen.routers) == 4
    assert not any(module._forward_hooks for module in student.modules())


def test_no_kept_token_gives_zeros_that_still_reach_the_student() -> None:
    points = [torch.randn(B, T, 4, requires_grad=True) for _ in range(2)]
    targets, none = (
        [torch.randn(B, T, 4) for _ in range(2)],
        torch.zeros(B, T, dtype=torch.bool),
    )
    for distance in (squared_distance, relative_distance):
        loss = distance(points, targets, none)
        loss.backward()
        assert loss.item() == 0 and all((point.grad == 0).all() for point in points)


def test_bfloat16_streams_are_compared_in_float32() -> None:
    x, t = torch.tensor([[[3.0, 4.0]]]), torch.tensor([[[3.0, 4.03125]]])
    distance = relative_distance([x.bfloat16()], [t.bfloat16()], None)
    assert distance.dtype == torch.float32 and distance.item() == pytest.approx(
        0.03125**2 / (9 + 4.03125**2)
    )


def test_the_coefficient_of_l2_falls_to_nothing_over_its_share_of_the_steps() -> None:
    student, _, _ = make()
    objective = validate(
        ObjectiveConfig,
        L2 | {"l2_until": 0.5, "l2_coefficient": 8.0, "router_kl_coefficient": 0.1},
        "objective",
    )
    terms = AuxiliaryLosses(objective, student, 8)
    assert [terms.coefficients(step).get("l2") for step in (0, 1, 3, 4, 7)] == [
        8.0,
        6.0,
        2.0,
        None,
        None,
    ]
    assert terms.coefficients(7) == {"router_kl": 0.1}


def test_models_of_different_depth_are_refused() -> None:
    student, _, _ = make()
    terms = AuxiliaryLosses(validate(ObjectiveConfig, L2, "objective"), student, 1)
    with pytest.raises(
        UserError,
        match=r"the student has 2 decoder layers and the teacher 1: .* one by one",
    ):
        terms.values(
            Captured([torch.zeros(1, 1, 1)] * 2),
            Captured([torch.zeros(1, 1, 1)]),
            None,
            ["l2"],
        )


@pytest.mark.parametrize("points", ["merges", "sublayers"])
def test_points_that_the_connectivity_does_not_make_are_refused(points: str) -> None:
    student, _, _ = make([1, 3] if points == "merges" else "none")
    with pytest.raises(
        UserError, match=rf"objective\.l2_points: {points}: .* no such point"
    ):
        AuxiliaryLosses(
            validate(ObjectiveConfig, L2 | {"l2_points": points}, "objective"),
            student,
            1,
        )


@pytest.mark.parametrize(
    "model_type",
    [
        "qwen3_moe",
        "deepseek_v3",
        "llama4_text",
        "gpt_oss",
        "mixtral",
        "granitemoeshared",
    ],
)
def test_router_logits_are_the_routers_inputs_times_its_weights(
    model_type: str,
) -> None:
    model = tiny_model(model_type, num_hidden_layers=3)
    convert_model(model, Connectivity("all"))
    inputs: dict[Any, torch.Tensor] = {}
    routers = [router.module for router in find_routers(model)]
    for module in routers:
        module.register_forward_pre_hook(
            lambda m, args: inputs.__setitem__(m, args[0].detach())
        )
    terms = AuxiliaryLosses(
        validate(ObjectiveConfig, OBJECTIVES[5], "objective"), model, 1
    )
    with torch.no_grad(), terms.captured(model) as seen:
        model(batch()[0], use_cache=False)
    assert len(seen.routers) == len(routers) >= 1
    for module, logits in zip(routers, seen.routers, strict=True):
        linear = next(
            m
            for m in module.modules()
            if isinstance(getattr(m, "weight", None), torch.nn.Parameter)
        )
        by_weight = inputs[module].flatten(0, -2) @ linear.weight.T
        if getattr(linear, "bias", None) is not None:
            by_weight = by_weight + linear.bias
        torch.testing.assert_close(
            logits.flatten(0, -2).float(), by_weight, rtol=1e-4, atol=1e-4
        )


def test_frozen_routers_are_all_that_is_frozen() -> None:
    student, _, _ = make()
    freeze_routers(student)
    frozen = {
        name
        for name, parameter in student.named_parameters()
        if not parameter.requires_grad
    }
    assert frozen == {f"model.layers.{k}.mlp.gate.weight" for k in range(4)}


def test_streams_of_another_width_and_routers_of_more_experts_are_refused() -> None:
    student, _, _ = make()
    terms = AuxiliaryLosses(validate(ObjectiveConfig, L2, "objective"), student, 1)
    with pytest.raises(
        UserError,
        match="decoder layers have 4 numbers per token, but the teacher's have 6",
    ):
        terms.values(
            Captured([torch.zeros(1, 1, 4)]),
            Captured([torch.zeros(1, 1, 6)]),
            None,
            ["l2"],
        )
    with pytest.raises(
        UserError, match="routers have 4 numbers per token, but the teacher's have 8"
    ):
        terms.values(
            Captured([], [torch.zeros(1, 4)]),
            Captured([], [torch.zeros(1, 8)]),
            None,
            ["router_kl"],
        )


def test_a_model_without_routers_is_refused_with_the_keys_to_leave_out() -> None:
    dense = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=9,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
        )
    )
    with pytest.raises(
        UserError,
        match=r"no router found.*leave out objective.router_kl_coefficient and objective.f",
    ):
        freeze_routers(dense)
