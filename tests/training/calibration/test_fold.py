"""In every family, folded weights compute the same as unfolded ones with the maps
applied outside.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fcsd.data.batches import Batch
from fcsd.model.connectivity import Connectivity, convert_model
from fcsd.model.families import FAMILIES
from fcsd.training.calibration.experts import Call, adds_up, calls_of
from fcsd.training.calibration.roles import Place, Roles, fold_map, roles_of
from fcsd.training.calibration.solve import LeastSquares
from fcsd.training.calibration.steps import Steps, Stream
from tests.reference.tiny import tiny_model
from tests.reference.trace import trace_layer
from tests.support import few, same_tensors, user_error

TOKENS = 24

ADDS = "output of {}: its last matmul does not reach the stream by sums alone"
NO_NORM = "input of {}: not the output of a norm"
BOTH = {ADDS.format("self_attn"), ADDS.format("mlp")}
INKLING = BOTH | {NO_NORM.format("attn_sconv"), NO_NORM.format("mlp_sconv")}
GEMMA4 = BOTH | {ADDS.format("experts"), NO_NORM.format("router")}
INKLING2 = BOTH | {
    NO_NORM.format(f"post_{side}_convolution") for side in ("attention", "mlp")
}
QWEN4 = BOTH | {ADDS.format("linear_attn"), NO_NORM.format("ple")}
# A norm, a convolution, a gate per channel or the spread over several streams follows the
# branch; everything else in all families is folded.
INDEXER = (
    # a norm of its own before the queries
    "input of self_attn: aten.native_layer_norm reads it, too"
)
LEFT = {
    "afmoe": BOTH, "kolibri1": BOTH, "axk1": {ADDS.format("mlp")}, "inkling_text": INKLING,
    "inkling_mm_model": INKLING, "flex_olmo": BOTH, "beam": BOTH, "minimax": {ADDS.format("self_attn")},
    "gemma4_text": GEMMA4, "gemma4": GEMMA4, "muse_spark": BOTH, "zaya": BOTH,
    **dict.fromkeys(("deepseek_v4", "hy_v4", "hy_v4_vl", "glm5_next"), BOTH),
    "qwen4_exp_text": QWEN4, "qwen4_exp": QWEN4, "mistral_large4": {INDEXER},
    "inkling2_text": INKLING2, "inkling2": INKLING2,
}  # fmt: skip
# Nothing in their MoE block can be folded, or their experts are not called with the
# tokens' choices and weights.
TOGETHER = {
    "afmoe", "kolibri1", "axk1", "inkling_text", "inkling_mm_model", "flex_olmo", "beam", "gemma4_text", "gemma4",
}  # fmt: skip
TOGETHER |= {
    "inkling2_text",
    "inkling2",
    "muse_spark",
    "llama4_text",
    "llama4",
    "dbrx",
    "jetmoe",
}
TOGETHER |= {
    "nemotron_h",
    "deepseek_v4",
    "hy_v4",
    "hy_v4_vl",
    "glm5_next",
    "qwen4_exp_text",
    "qwen4_exp",
    "zaya",
}


def batch(rows: int = 2) -> Batch:
    ids = torch.randint(
        3, 90, (rows, TOKENS), generator=torch.Generator().manual_seed(0)
    )
    return {
        "input_ids": ids,
        "position_ids": torch.arange(TOKENS).expand(rows, TOKENS),
        "labels": ids,
    }


def forward(steps: Steps, index: int, tokens: Batch, stream: Stream) -> Tensor:
    return steps.step(index, tokens, stream)["o"]


def layers(model: Any, family: Any) -> Iterator[tuple[Steps, int, Stream, Roles]]:
    """Yield the first layer of each kind in a model, with the stream before it and the
    roles in its family's row; check that following tensors through the layer gives the
    same roles.
    """
    steps, tokens, seen = Steps(model, family), batch(), set[Any]()
    stream = steps.step(0, tokens, None)
    for index, layer in enumerate(steps.layers):
        kind = tuple((name, value.shape) for name, value in layer.named_parameters())
        if kind not in seen:
            seen.add(kind)
            run = partial(forward, steps, index, tokens, stream)
            roles = roles_of(layer, family)
            assert roles == in_order(trace_layer(layer, family, run), layer), (
                f"layer {index}"
            )
            yield steps, index, stream, roles
        stream = steps.step(index, tokens, stream)


def in_order(roles: Roles, layer: nn.Module) -> Roles:
    """Return roles with their weights in the order of the layer, not of its forward
    pass.
    """
    order = [name for name, _ in layer.named_parameters()]

    def ordered(places: tuple[Place, ...]) -> tuple[Place, ...]:
        return tuple(sorted(places, key=lambda place: order.index(place[0])))

    roles.sides = [replace(side, readers=ordered(side.readers)) for side in roles.sides]
    roles.groups = [
        replace(group, writers=ordered(group.writers)) for group in roles.groups
    ]
    if (experts := roles.experts) is not None:
        roles.experts = replace(
            experts, readers=ordered(experts.readers), writers=ordered(experts.writers)
        )
    return roles


def around(
    layer: nn.Module, reads: dict[str, Tensor], adds: dict[str, Tensor]
) -> list[Any]:
    """Register hooks that map the inputs and the outputs of a layer's modules, and
    return them.
    """

    def before(matrix: Tensor) -> Any:
        def hook(_: Any, args: Any, kwargs: Any) -> Any:
            if "hidden_states" in kwargs:
                kwargs = kwargs | {"hidden_states": kwargs["hidden_states"] @ matrix}
                return args, kwargs
            return (args[0] @ matrix, *args[1:]), kwargs

        return hook

    def mapped(out: Any, matrix: Tensor) -> Any:
        return (
            (mapped(out[0], matrix), *out[1:])
            if isinstance(out, tuple)
            else out @ matrix
        )

    hooks = [
        layer.get_submodule(n).register_forward_pre_hook(before(m), with_kwargs=True)
        for n, m in reads.items()
    ]
    return hooks + [
        layer.get_submodule(n).register_forward_hook(
            lambda _, __, out, m=m: mapped(out, m)
        )
        for n, m in adds.items()
    ]


@pytest.mark.parametrize("model_type", few(FAMILIES))
def test_folded_maps_are_the_maps_and_what_cannot_be_folded_is_listed(
    model_type: str, request: pytest.FixtureRequest
) -> None:
    family = FAMILIES[model_type]
    if model_type in ("inkling2", "inkling2_text"):
        # Their routers multiply float32 by weights that are never anything else.
        request.getfixturevalue("float64")
    model = tiny_model(model_type, dtype=torch.float64, experts_implementation="eager")
    convert_model(model, Connectivity("all"))
    generator = torch.Generator().manual_seed(1)
    unfoldable: set[str] = set()
    one_by_one = False
    for steps, index, stream, roles in layers(model, family):
        layer = steps.layers[index]
        width = model.config.get_text_config().hidden_size
        before = {name: value.clone() for name, value in layer.state_dict().items()}
        identity = torch.eye(width, dtype=torch.float64)

        def near(identity: Tensor = identity) -> Tensor:
            return identity + 0.1 * torch.randn(
                identity.shape, generator=generator, dtype=torch.float64
            )

        whole = [
            side
            for side in roles.sides
            if not (side.modules == ("self_attn",) and INDEXER in roles.rest)
        ]
        reads = {side: near() for side in whole}
        adds = {group: near() for group in roles.groups}
        for places, side in [(r.readers, "reads") for r in reads] + [
            (g.writers, "writes") for g in adds
        ]:
            fold_map(layer, places, identity, side)
        assert same_tensors(layer.state_dict(), before)

        hooks = around(
            layer,
            {name: matrix for side, matrix in reads.items() for name in side.modules},
            {name: matrix for group, matrix in adds.items() for name in group.modules},
        )
        wanted = steps.step(index, batch(), stream)
        for hook in hooks:
            hook.remove()
        for side, matrix in reads.items():
            fold_map(layer, side.readers, matrix, "reads")
        for group, matrix in adds.items():
            fold_map(layer, group.writers, matrix, "writes")
        folded = steps.step(index, batch(), stream)
        plain_error = (folded["o"] - wanted["o"]).abs().max() / wanted["o"].abs().max()
        assert plain_error < 1e-5, f"layer {index}"  # some routers compute in float32
        layer.load_state_dict(before)
        assert len(roles.sides) >= (1 if family.layout == "blocks" else 2)
        unfoldable |= set(roles.rest)
        one_by_one = one_by_one or check_experts(steps, index, stream, roles, near)
    assert unfoldable == LEFT.get(model_type, set())
    assert one_by_one == (model_type not in TOGETHER)


@pytest.mark.parametrize(
    ("model_type", "changes"),
    few(
        [
            ("axk1", {}),
            ("dbrx", {}),
            ("deepseek_v2", {"q_lora_rank": 16}),
            ("deepseek_v3", {"q_lora_rank": None, "attention_bias": True}),
            ("llama4_text", {"interleave_moe_layer_step": 2}),
            ("cohere2_moe", {"num_shared_experts": 0}),
            ("cohere2_moe", {"shared_expert_combination_strategy": "sum"}),
            ("ernie4_5_moe", {"moe_num_shared_experts": 0}),
            ("granitemoeshared", {"shared_intermediate_size": 0}),
            ("jetmoe", {}),
            ("nemotron_h", {"moe_latent_size": None}),
            ("jamba", {"expert_layer_period": 2, "expert_layer_offset": 1}),
            ("minimax", {}),
            ("mistral_large4", {}),
            ("qwen3_moe", {"attention_bias": True, "mlp_only_layers": [0]}),
        ],
        6,
    ),
)
def test_a_familys_row_holds_for_its_other_configurations(
    model_type: str, changes: dict[str, Any]
) -> None:
    for mlp in ("outdated", "full"):
        model = tiny_model(model_type, **changes)
        convert_model(model, Connectivity("all", mlp=mlp))
        assert list(layers(model, FAMILIES[model_type]))


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("rewired", [[], [0, 1, 2, 3], [1, 2]])
def test_layer_by_layer_the_streams_of_earlier_blocks_are_those_of_a_whole_pass(
    rewired: list[int],
) -> None:
    model, tokens = tiny_model("inkling2_text", n_layers_per_attn_res_block=2), batch()
    if rewired:
        convert_model(model, Connectivity(rewired))
    steps = Steps(model, FAMILIES["inkling2_text"])
    stream = steps.step(0, tokens, None)
    inputs = [stream["o"]]
    for index in range(len(steps.layers)):
        stream = steps.step(index, tokens, stream)
        inputs.append(stream["o"])
    assert torch.equal(stream["sources"], torch.stack([inputs[0], inputs[2]], dim=-2))
    with torch.no_grad():
        whole = model.model(
            tokens["input_ids"], position_ids=tokens["position_ids"], use_cache=False
        )
    assert torch.equal(steps.end(tokens, stream), whole.last_hidden_state)


@torch.no_grad()
def check_experts(
    steps: Steps, index: int, stream: Stream, roles: Roles, near: Callable[[], Tensor]
) -> bool:
    """Check that every expert's own maps are applied to its input and to its part of
    the output.
    """
    experts = roles.experts
    if experts is None:
        return False
    layer = steps.layers[index]
    module, before = (
        layer.get_submodule(experts.module),
        copy.deepcopy(layer.state_dict()),
    )
    num_experts = len(layer.get_parameter(experts.writers[0][0]))
    with calls_of(module) as calls:
        plain = steps.step(index, batch(), stream)["o"]
    (call,) = calls
    assert adds_up(module, call, num_experts) and experts.readers
    wanted, seen, identity = (
        torch.zeros_like(call.out),
        0,
        torch.eye(stream["o"].shape[-1]),
    )
    for number in range(num_experts):
        fold_map(layer, experts.readers, identity, "reads", number)
        fold_map(layer, experts.writers, identity, "writes", number)
        assert same_tensors(layer.state_dict(), before)
        reads, adds = near(), near()
        hidden = call.hidden @ reads
        args = tuple(hidden if value is call.hidden else value for value in call.args)
        kwargs = {
            name: hidden if value is call.hidden else value
            for name, value in call.kwargs.items()
        }
        moved = Call(args, kwargs, hidden, call.choices, call.weights, call.out)
        tokens, out = moved.expert(module, number, hidden.device)
        wanted.index_add_(0, tokens, out @ adds)
        seen += len(tokens)
        fold_map(layer, experts.readers, reads, "reads", number)
        fold_map(layer, experts.writers, adds, "writes", number)
        before = copy.deepcopy(layer.state_dict())
    assert seen >= len(call.hidden)
    with calls_of(module) as calls:
        mapped = steps.step(index, batch(), stream)["o"]
    torch.testing.assert_close(
        calls[0].out, wanted, rtol=1e-5, atol=float(1e-5 * wanted.abs().max())
    )
    reached = ((wanted - call.out) * experts.factor).view_as(plain)
    torch.testing.assert_close(
        mapped - plain, reached, rtol=1e-4, atol=float(1e-4 * reached.abs().max())
    )
    return True


def test_the_map_is_the_ridge_regression_towards_the_identity() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(50, 6, generator=generator, dtype=torch.float64)
    y = torch.randn(50, 3, generator=generator, dtype=torch.float64)
    problem = LeastSquares(3, 2)
    problem.add(x[:20].float().double(), y[:20])
    problem.add(x[20:], y[20:])
    x = torch.cat([x[:20].float().double(), x[20:]])
    solution = problem.solve(0.01, "x")
    # the ridge as further rows of an ordinary least squares
    weight = (0.01 * x.square().sum(0).mean()).sqrt()
    towards = torch.eye(3, dtype=torch.float64).repeat(2, 1)
    rows = torch.cat([x, weight * torch.eye(6, dtype=torch.float64)])
    wanted = torch.linalg.lstsq(rows, torch.cat([y, weight * towards])).solution
    torch.testing.assert_close(solution.map, wanted, rtol=1e-10, atol=1e-12)
    assert solution.before == pytest.approx(
        float((x @ towards - y).square().sum() / y.square().sum())
    )
    assert solution.after == pytest.approx(
        float((x @ wanted - y).square().sum() / y.square().sum())
    )


def test_the_same_on_both_sides_changes_nothing_and_bad_sums_are_refused() -> None:
    x = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
    same, singular, infinite = LeastSquares(3), LeastSquares(3), LeastSquares(3)
    same.add(x, x)
    assert same.solve(1e-3, "x").map is None
    singular.add(x[:2], x[2:4])
    with user_error(
        r"layer 3: the Gram matrix .* is singular: .* ridge 0; give more text, more varied"
    ):
        singular.solve(0.0, "layer 3")
    assert singular.solve(1e-3, "x").map is not None
    infinite.add(x, x / 0)
    with user_error("layer 3: the sums over the calibration text are not finite"):
        infinite.solve(1e-3, "layer 3")
