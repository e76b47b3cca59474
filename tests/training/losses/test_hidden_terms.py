"""The terms beside the divergence, against the equations of the connectivity written
out in float64.
"""

import copy
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from fcsd.model.connectivity import Connectivity, convert_model
from fcsd.training.losses.hidden_terms import (
    StreamDistance,
    captured_streams,
    relative_distance,
    squared_distance,
)
from fcsd.training.losses.objectives import KLWithL2ObjectiveConfig
from fcsd.training.prepare import freeze_routers
from tests.reference.tiny import tiny_model
from tests.support import user_error

B, T = 2, 9


def make(layers: Any = "all", seed: int = 1, **overrides: Any) -> tuple[Any, Any, Any]:
    """Return (rewired student, the student's weights with regular connectivity, another
    teacher) in float64 with 4 layers.
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


def by_hand(model: Any, ids: torch.Tensor, selected: set[int]) -> list[torch.Tensor]:
    """Return o_k of every layer, from the equations."""
    stack = model.model
    o = stack.embed_tokens(ids)
    rotary = stack.rotary_emb(o, torch.arange(T)[None])
    streams = []
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
        streams.append(o)
    return streams


def expected(
    objective: KLWithL2ObjectiveConfig, regular: Any, teacher: Any, ids: Any, keep: Any
) -> torch.Tensor:
    """Return the distance as a sum over tokens, one token at a time."""
    own, theirs = by_hand(regular, ids, {0, 1, 2, 3}), by_hand(teacher, ids, set())
    l2 = torch.zeros((), dtype=torch.float64)
    for n in torch.nonzero(keep).tolist():
        for x, t in zip(own, theirs, strict=True):
            x, t = x[tuple(n)], t[tuple(n)]
            distance = (x - t).pow(2).sum()
            if objective.l2_relative:
                distance = distance / t.pow(2).sum() / len(own)
            l2 = l2 + distance
    return l2


def objective_of(**keys: Any) -> KLWithL2ObjectiveConfig:
    return KLWithL2ObjectiveConfig(name="kl+l2", **{"l2_coefficient": 1.0} | keys)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["stored", "checkpointed"])
@pytest.mark.parametrize("relative", [False, True])
def test_values_and_gradients_are_those_of_the_equations(
    relative: bool, checkpointing: bool
) -> None:
    student, regular, teacher = make()
    ids, keep = batch()
    objective = objective_of(l2_relative=relative)
    hand = expected(objective, regular, teacher, ids, keep)
    if checkpointing:
        student.activation_checkpointing_enable({"use_reentrant": False})
    with torch.no_grad(), captured_streams(teacher) as theirs:
        teacher(ids, use_cache=False)
    with captured_streams(student) as own:
        student(ids, use_cache=False)
    value = StreamDistance(objective, 10).value(own, theirs, keep)
    torch.testing.assert_close(value, hand, rtol=1e-9, atol=0)
    value.backward()
    hand.backward()
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
    with captured_streams(student) as streams:
        student(ids, use_cache=False)
    student(ids, use_cache=False)
    assert len(streams) == 4
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
    assert distance.dtype == torch.float32
    assert distance.item() == pytest.approx(0.03125**2 / (9 + 4.03125**2))


def test_the_coefficient_of_l2_falls_to_nothing_over_its_share_of_the_steps() -> None:
    distance = StreamDistance(objective_of(l2_until=0.5, l2_coefficient=8.0), 8)
    coefficients = [distance.coefficient(step) for step in (0, 1, 3, 4, 7)]
    assert coefficients == [8.0, 6.0, 2.0, 0.0, 0.0]
    assert StreamDistance(objective_of(), 8).coefficient(7) == 1.0


@pytest.mark.parametrize(
    ("student", "teacher", "message"),
    [
        ([4, 4], [4], "has 2 decoder layers and the teacher 1: .* one by one"),
        ([4], [6], "layers have 4 numbers per token, but the teacher's have 6"),
    ],
)
def test_streams_of_other_layers_and_of_another_width_are_refused(
    student: list[int], teacher: list[int], message: str
) -> None:
    streams = [[torch.zeros(1, 1, size) for size in of] for of in (student, teacher)]
    with user_error(message):
        StreamDistance(objective_of(), 1).value(*streams, None)


def test_frozen_routers_are_all_that_is_frozen() -> None:
    student, _, _ = make()
    freeze_routers(student)
    frozen = {
        name
        for name, parameter in student.named_parameters()
        if not parameter.requires_grad
    }
    assert frozen == {f"model.layers.{k}.mlp.gate.weight" for k in range(4)}


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
    with user_error(r"no router found.*leave out objective\.freeze_routers"):
        freeze_routers(dense)
