"""Overlapped expert parallelism where something is out of the ordinary: precision, layers, tokens, hooks, caches."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from fcsd.connectivity import Connectivity, load_model
from fcsd.overlap import detach
from fcsd.tiny.models import tiny_model
from tests.overlap.ranks import CHECKPOINTING, X, attached, same, spread, step, whole, worst
from tests.reference.ranks import run_ranks

FAMILIES = ("qwen2_moe", "deepseek_v3", "axk1", "granitemoeshared")
"""A gated shared expert; a dense layer and latent attention; a norm behind the experts; a shared expert beside them."""
CONNECTIVITIES = {
    "some layers": Connectivity([0, 1, 3]),
    "the last half": Connectivity("last:50%"),
    "attention alone": Connectivity(mlp="full"),
    "MLP alone": Connectivity(attention="full"),
    "none before": Connectivity([3]),
}


def outcome(model: Any, one: Any, *batches: torch.Tensor, reference: tuple[torch.Tensor, ...] = (X,)) -> Any:
    """(bits of blocking and full, bits of full with checkpointing, error against one process)."""
    attached(model, "blocking")
    blocking = step(model, *batches)
    attached(model, "full")
    overlapped = same(step(model, *batches), blocking)
    model.activation_checkpointing_enable(CHECKPOINTING)
    checkpointed = same(step(model, *batches), blocking)
    error = worst(blocking, step(one, *reference)) if one is not None else 0.0
    return overlapped, checkpointed, error


@contextmanager
def starved(*models: Any) -> Iterator[None]:
    """All tokens go to experts 0 and 1, which are the first rank's."""
    handles = []
    for model in models:
        for layer in model.model.layers:
            if hasattr(layer.mlp, "gate"):
                handles.append(layer.mlp.gate.register_forward_hook(lambda _m, _a, o: (o[0], o[1], o[2] % 2)))
    yield
    for handle in handles:
        handle.remove()


def freeze(model: Any) -> None:
    for name, parameter in model.named_parameters():
        if "gate.weight" in name or "embed" in name or ("layers.0." in name and ".experts." not in name):
            parameter.requires_grad_(False)


def cases(rank: int, folder: Path, families: tuple[str, ...]) -> dict[Any, Any]:
    everything, x = Connectivity("all"), X.chunk(2)[rank]
    found: dict[Any, Any] = {}
    for family in families:
        for name, connectivity in CONNECTIVITIES.items():
            model, one = (
                spread(folder / family, connectivity, 2),
                load_model(folder / family, connectivity=connectivity),
            )
            found[family, name] = outcome(model, one, x)
        if family not in ("qwen2_moe", "deepseek_v3"):
            continue
        model = spread(folder / family, everything, 2, fsdp_mixed_precision=True)
        found[family, "bf16"] = outcome(model, None, x)
        model, one = (
            spread(folder / family, everything, 2),
            load_model(folder / family, connectivity=everything),
        )
        with starved(model, one):
            found[family, "no token for a rank"] = outcome(model, one, x)
        freeze(model)
        freeze(one)
        found[family, "frozen"] = outcome(model, one, x)
        model, one = (
            spread(folder / family, everything, 2),
            load_model(folder / family, connectivity=everything),
        )
        found[family, "accumulated"] = outcome(model, one, x[:1], x[1:], reference=(X[::2], X[1::2]))
        found[family, "reads"] = read(spread(folder / family, everything, 2), one, x)
    return found


def read(model: Any, one: Any, x: torch.Tensor) -> dict[str, Any]:
    """What a reader of layers sees, and generation with a cache."""
    model.eval(), one.eval()
    attached(model, "full")
    with torch.no_grad():
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
        settings = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        mask = torch.ones_like(x)
        made = [each.generate(x, attention_mask=mask, **settings) for each in (model, one)]
    order = [f"{event} {r.kind} {r.layer}" for event, r in records if r.kind != "counts"]
    return {
        "streams": max(float((a - b).abs().max()) for a, b in zip(streams, expected, strict=True)),
        "hook": float((seen[0] - expected[2]).abs().max()),
        "block": float((blocks[0][0] - blocks[1][0]).abs().max()),
        "while it is read": float((whole(after) - again).abs().max()),
        "same afterwards": torch.equal(whole(before), whole(after)),
        "overlaps again": order.index("start dispatch 2") > order.index("wait combine 1") > 0,
        "tokens": torch.equal(*made),
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    folder = tmp_path_factory.mktemp("models")
    for family in FAMILIES:
        tiny_model(family).save_pretrained(folder / family)
    result: dict[Any, Any] = run_ranks(cases, 2, folder, FAMILIES, timeout_s=240)[0]
    return result


def test_every_connectivity_has_the_bits_of_blocking_and_the_gradients_of_one_process(found: Any) -> None:
    for family in FAMILIES:
        for name in CONNECTIVITIES:
            overlapped, checkpointed, error = found[family, name]
            assert overlapped and checkpointed and error < 5e-6, (family, name, found[family, name])


@pytest.mark.parametrize("case", ["bf16", "no token for a rank", "frozen", "accumulated"])
def test_what_is_out_of_the_ordinary_changes_no_bit(found: Any, case: str) -> None:
    for family in ("qwen2_moe", "deepseek_v3"):
        overlapped, checkpointed, error = found[family, case]
        assert overlapped and checkpointed and error < 5e-6, (family, found[family, case])


def test_who_reads_a_layer_gets_the_whole_stream_and_generation_the_tokens_of_one_process(found: Any) -> None:
    for family in ("qwen2_moe", "deepseek_v3"):
        facts = found[family, "reads"]
        assert max(facts[what] for what in ("streams", "hook", "block", "while it is read")) < 1e-4, facts
        assert facts["same afterwards"] and facts["overlaps again"] and facts["tokens"], facts


# ---- memory


def held(model: Any, x: torch.Tensor) -> int:
    """Bytes of tensors that a forward pass leaves for the backward pass."""

    def tensors() -> dict[int, int]:
        gc.collect()
        plain = (torch.Tensor, torch.nn.Parameter)  # asking for more of an object may warn
        seen = [t.untyped_storage() for t in gc.get_objects() if type(t) in plain and t.is_floating_point()]
        return {storage.data_ptr(): storage.nbytes() for storage in seen}

    model.train()
    before = tensors()
    loss = model(x, labels=x, use_cache=False).loss
    after = tensors()
    loss.backward()
    model.zero_grad(set_to_none=True)
    return sum(size for place, size in after.items() if before.get(place) != size)


def memory(rank: int, folder: Path) -> float:
    model = spread(folder, Connectivity("all"), 2)
    model.activation_checkpointing_enable(CHECKPOINTING)
    x = torch.randint(3, 99, (1, 120), generator=torch.Generator().manual_seed(rank))
    held(model, x)
    landed = held(model, x)
    attached(model, "full")
    held(model, x)
    ratio = held(model, x) / landed
    detach(model)
    return ratio


def test_a_checkpointed_forward_pass_keeps_what_blocking_exchanges_keep(tmp_path: Path) -> None:
    """No combined rows: those would be several times as much, one for each token and expert."""
    tiny_model("deepseek_v3", hidden_size=256, num_hidden_layers=6).save_pretrained(tmp_path)
    assert max(run_ranks(memory, 2, tmp_path)) < 1.1
