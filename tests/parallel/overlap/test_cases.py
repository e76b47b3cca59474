"""Overlapped expert parallelism in unusual cases: precision, layers, tokens, hooks,
caches.
"""

import gc
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from fcsd.model.connectivity import Connectivity, load_model
from fcsd.model.connectivity.rewire import regular
from fcsd.parallel.overlap import detach
from fcsd.parallel.overlap.schedule import LayerFacts, schedule
from tests.parallel.overlap.ranks import (
    CHECKPOINTING,
    X,
    attached,
    same,
    spread,
    step,
    whole,
    worst,
)
from tests.reference.ranks import run_ranks
from tests.reference.tiny import tiny_model
from tests.support import few

FAMILIES = ("qwen2_moe", "deepseek_v3", "axk1", "granitemoeshared")
"""A gated shared expert; a dense layer and latent attention; a norm behind the experts;
a shared expert beside them.
"""
ODD = FAMILIES[:2]
"""Families in which all other unusual cases are tested, too."""
CONNECTIVITIES = {
    "some layers": Connectivity([0, 1, 3]), "the last half": Connectivity("last:50%"),
    "attention alone": Connectivity(mlp="full"), "MLP alone": Connectivity(attention="full"),
    "MLP in some layers": Connectivity(mlp=[1, 2]), "none before": Connectivity([3]),
}  # fmt: skip


def outcome(
    model: Any,
    one: Any,
    *batches: torch.Tensor,
    reference: tuple[torch.Tensor, ...] = (X,),
) -> tuple[bool, bool, float, list[Any]]:
    """Return (whether full has the bits of blocking, whether full with checkpointing
    has, error against one process, steps of full).

    one: the model of one process, on the rank whose turn it is to run it.
    """
    model.activation_checkpointing_disable()
    attached(model, "blocking")
    blocking = step(model, *batches)
    _, steps = attached(model, "full")
    overlapped = same(step(model, *batches), blocking)
    order = list(steps)
    model.activation_checkpointing_enable(CHECKPOINTING)
    checkpointed = same(step(model, *batches), blocking)
    return (
        overlapped,
        checkpointed,
        worst(blocking, one and step(one, *reference)),
        order,
    )


@contextmanager
def starved(*models: Any) -> Iterator[None]:
    """Send all tokens to experts 0 and 1, which the first rank has."""
    handles = []
    for model in filter(None, models):
        for layer in model.model.layers:
            if hasattr(layer.mlp, "gate"):
                handles.append(
                    layer.mlp.gate.register_forward_hook(
                        lambda _m, _a, o: (o[0], o[1], o[2] % 2)
                    )
                )
    yield
    for handle in handles:
        handle.remove()


def freeze(model: Any) -> None:
    for name, parameter in model.named_parameters():
        if (
            "gate.weight" in name
            or "embed" in name
            or ("layers.0." in name and ".experts." not in name)
        ):
            parameter.requires_grad_(False)


def cases(rank: int, folder: Path, family: str) -> dict[str, Any]:
    everything, x = Connectivity("all"), X.chunk(2)[rank]
    turn = itertools.cycle([0, 1])
    outcomes: dict[str, Any] = {}
    for name, connectivity in CONNECTIVITIES.items():
        one = (
            load_model(folder, connectivity=connectivity)
            if next(turn) == rank
            else None
        )
        outcomes[name] = outcome(spread(folder, connectivity, 2), one, x)
    if family not in ODD:
        return outcomes
    model = spread(folder, everything, 2, fsdp_mixed_precision=True)
    outcomes["bf16"] = outcome(model, None, x)
    model, one = (
        spread(folder, everything, 2),
        load_model(folder, connectivity=everything),
    )
    mine = one if next(turn) == rank else None
    with starved(model, mine):
        outcomes["no token for a rank"] = outcome(model, mine, x)
    mine = one if next(turn) == rank else None
    halves = (X[::2], X[1::2])
    outcomes["accumulated"] = outcome(model, mine, x[:1], x[1:], reference=halves)
    outcomes["reads"] = read(model, one, x)
    model = spread(folder, everything, 2)
    freeze(model)
    freeze(one)
    outcomes["frozen"] = outcome(model, one if next(turn) == rank else None, x)
    return outcomes


READ = ("streams", "hook", "block", "while it is read", "regular")


@torch.no_grad()
def read(model: Any, one: Any, x: torch.Tensor) -> dict[str, Any]:
    """Return what a reader of layers sees, the output of the original in the same
    model, and generation with a cache.
    """
    model.eval(), one.eval()
    attached(model, "full")
    before = model(x, use_cache=False).logits
    streams = model(x, output_hidden_states=True, use_cache=False).hidden_states
    expected = one(x, output_hidden_states=True, use_cache=False).hidden_states
    records, _ = attached(model, "full")
    after = model(x, use_cache=False).logits
    seen: list[torch.Tensor] = []
    hook = model.model.layers[1].register_forward_hook(
        lambda _m, _a, out: seen.append(out[0] if isinstance(out, tuple) else out)
    )
    model(x, use_cache=False)
    hook.remove()
    blocks: list[Any] = [[], []]
    for each, outputs in zip((model, one), blocks, strict=True):
        hook = each.model.layers[2].mlp.register_forward_hook(
            lambda _m, _a, out, to=outputs: to.append(out[0])
        )
        again = each(x, use_cache=False).logits
        hook.remove()
    with regular(model), regular(one):
        original = [each(x, use_cache=False).logits for each in (model, one)]
    settings = {
        "max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0,
    }  # fmt: skip
    mask = torch.ones_like(x)
    made = [each.generate(x, attention_mask=mask, **settings) for each in (model, one)]
    order = [
        f"{event} {r.kind} {r.layer}" for event, r in records if r.kind != "counts"
    ]
    return {
        "streams": max(
            float((a - b).abs().max()) for a, b in zip(streams, expected, strict=True)
        ),
        "hook": float((seen[0] - expected[2]).abs().max()),
        "block": float((blocks[0][0] - blocks[1][0]).abs().max()),
        "while it is read": float((whole(after) - again).abs().max()),
        "regular": float((whole(original[0]) - original[1]).abs().max()),
        "is another model": bool((original[1] - again).abs().max() > 0.01),
        "same afterwards": torch.equal(whole(before), whole(after)),
        "overlaps again": order.index("start dispatch 2")
        > order.index("wait combine 1")
        > 0,
        "tokens": torch.equal(*made),
    }


@pytest.fixture(scope="module", params=few(FAMILIES, 1))
def by_case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """Return the outcome of each case, and of the family under its name."""
    folder = tmp_path_factory.mktemp("model")
    tiny_model(request.param).save_pretrained(folder)
    one, other = run_ranks(cases, 2, folder, request.param, timeout_s=240)
    for case, facts in one.items():
        if case != "reads":
            one[case] = (*facts[:2], max(facts[2], other[case][2]), facts[3])
    return {"family": request.param, **one}


def only(families: tuple[str, ...], by_case: dict[str, Any]) -> None:
    if by_case["family"] not in families:
        pytest.skip(f"is looked at with {', '.join(families)}")


def test_every_connectivity_has_the_bits_of_blocking_and_the_gradients_of_one_process(
    by_case: Any,
) -> None:
    for name in CONNECTIVITIES:
        overlapped, checkpointed, error, _ = by_case[name]
        assert overlapped and checkpointed and error < 5e-6, (name, by_case[name])


def test_layers_run_in_the_order_of_their_schedule_with_one_side_alone_and_inside_themselves(
    by_case: Any,
) -> None:
    """In axk1 a norm follows the experts, so that its layers wait for their own
    combine.
    """
    only(("qwen2_moe", "axk1"), by_case)

    def steps(facts: list[LayerFacts]) -> list[tuple[int, str]]:
        return [
            (k, each.name)
            for k, layer in enumerate(facts)
            if layer
            for each in schedule(layer)
        ]

    layers = range(4)
    attention = [
        LayerFacts(incoming=k > 0, outgoing=k < 3, outdated=False) for k in layers
    ]
    if by_case["family"] == "qwen2_moe":
        assert by_case["attention alone"][3] == steps(attention)
        assert by_case["MLP alone"][3] == steps([LayerFacts() for _ in layers])
        return
    own = [
        "router", "start dispatch", "attention a", "finish dispatch", "experts", "start combine", "attention b",
    ]  # fmt: skip
    own += ["shared expert", "finish combine"]
    assert by_case["the last half"][3] == [(k, name) for k in (2, 3) for name in own]


@pytest.mark.parametrize(
    "case", ["bf16", "no token for a rank", "frozen", "accumulated"]
)
def test_what_is_out_of_the_ordinary_changes_no_bit(by_case: Any, case: str) -> None:
    only(ODD, by_case)
    overlapped, checkpointed, error, _ = by_case[case]
    assert overlapped and checkpointed and error < 5e-6, by_case[case]


def test_who_reads_a_layer_gets_the_whole_stream_and_generation_the_tokens_of_one_process(
    by_case: Any,
) -> None:
    only(ODD, by_case)
    facts = by_case["reads"]
    assert max(facts[what] for what in READ) < 1e-4, facts
    flags = ("is another model", "same afterwards", "overlaps again", "tokens")
    assert all(facts[what] for what in flags), facts


# ---- memory


def held(model: Any, x: torch.Tensor) -> int:
    """Return bytes of tensors that a forward pass leaves for the backward pass."""

    def tensors() -> dict[int, int]:
        gc.collect()
        # reading attributes of an object may warn
        plain = (torch.Tensor, torch.nn.Parameter)
        seen = [
            t.untyped_storage()
            for t in gc.get_objects()
            if type(t) in plain and t.is_floating_point()
        ]
        return {storage.data_ptr(): storage.nbytes() for storage in seen}

    model.train()
    before = tensors()
    loss = model(x, labels=x, use_cache=False).loss
    after = tensors()
    loss.backward()
    model.zero_grad(set_to_none=True)
    return sum(size for place, size in after.items() if before.get(place) != size)


def memory(rank: int, folder: Path) -> float:
    x = torch.randint(3, 99, (1, 120), generator=torch.Generator().manual_seed(rank))
    kept = []
    for implementation in ("all_to_all", "farskip"):  # transformers' own, and ours
        model = spread(folder, Connectivity("all"), 2, ep_implementation=implementation)
        model.activation_checkpointing_enable(CHECKPOINTING)
        if implementation == "farskip":
            attached(model, "full")
        held(model, x)
        kept.append(held(model, x))
        detach(model)
    return kept[1] / kept[0]


def test_a_checkpointed_forward_pass_keeps_what_blocking_exchanges_keep(
    tmp_path: Path,
) -> None:
    """It keeps no combined rows, which would be several times as large: one for each
    token and expert.
    """
    tiny_model("deepseek_v3", hidden_size=256, num_hidden_layers=6).save_pretrained(
        tmp_path
    )
    assert max(run_ranks(memory, 2, tmp_path)) < 1.1
