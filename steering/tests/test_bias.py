"""The bias on the routers of every family, original and converted, against the family's
own forward plus the table.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import save

from fcsd.base.errors import UserError
from fcsd.model.connectivity import Connectivity, convert_model
from fcsd.model.families import FAMILIES, base_model_type
from fcsd.model.families.choices import recording
from fcsd.model.families.routers import find_routers
from fcsd_steering.routing.bias import (
    BiasTables,
    read_tables,
    router_bias,
    write_tables,
)
from tests.reference.tiny import tiny_model
from tests.support import few

IDS = torch.randint(3, 99, (2, 7), generator=torch.Generator().manual_seed(3))
N = 3
# The first layers of DeepSeek-V4 choose by token ids; ZAYA's router is an MLP.
STEERED = [name for name in FAMILIES if name not in ("deepseek_v4", "zaya")]

SCALED = {
    "gemma4": "its router puts out probabilities: what is added to the logits, a softmax has seen",
    "gemma4_text": "its router puts out probabilities: what is added to the logits, a softmax has seen",
    "muse_spark": "its router multiplies the linear's output, and the bias with it, by output_multiplier",
}  # fmt: skip
"""Families whose recorded "logits" are not the linear's output."""

NO_SELECTION = {
    "dbrx": "its router gives logits only; the block chooses",
    "phimoe": "its router takes one maximum after another, and masks what is far below",
}
"""Families in which a bias cannot choose experts without changing their weights."""


def tables_for(
    model: Any, values: np.ndarray | float, selection: bool = False
) -> BiasTables:
    """Tables of a model: random ones, these everywhere, or these."""
    routers = find_routers(model)
    shape = len(routers), N, routers[0].num_experts
    return BiasTables(
        kind="camoe",
        strength=1.0,
        selection=selection,
        layers=tuple(router.layer for router in routers),
        tables=np.broadcast_to(np.float32(values), shape).copy(),
        placement=np.tile(np.arange(shape[2]) % N, (shape[0], 1)),
        model_type=base_model_type(model.config.model_type),
        num_hidden_layers=model.config.get_text_config().num_hidden_layers,
    )


def random_tables(model: Any, selection: bool = False) -> BiasTables:
    routers = find_routers(model)
    shape = len(routers), N, routers[0].num_experts
    return tables_for(model, np.random.default_rng(5).normal(size=shape), selection)


@torch.no_grad()
def run(
    model: Any, tables: BiasTables | None = None, endpoint: int = 1
) -> torch.Tensor:
    if tables is None:
        return model(IDS, use_cache=False).logits
    with router_bias(model, tables) as steering:
        steering.endpoint = endpoint
        return model(IDS, use_cache=False).logits


@torch.no_grad()
def logits_both(
    model: Any, tables: BiasTables, endpoint: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """For each router what it puts out as logits, and what its class does with the same
    input, without a bias.
    """
    pairs, handles = [], []
    for router in find_routers(model):

        def compare(
            module: Any,
            args: Any,
            kwargs: Any,
            output: Any,
            index: int = router.logits_index,
        ) -> None:
            plain = type(module).forward(module, *args, **kwargs)
            both = [
                out[index] if isinstance(out, tuple) else out for out in (output, plain)
            ]
            pairs.append((both[0], both[1]))

        handles.append(router.module.register_forward_hook(compare, with_kwargs=True))
    run(model, tables, endpoint)
    for handle in handles:
        handle.remove()
    return pairs


def check_exact(name: str, model: Any) -> None:
    """The logits of every layer differ by the endpoint's row, to the bit; nothing is
    left of it afterwards.
    """
    plain, tables = run(model), random_tables(model)
    both = logits_both(model, tables, 2)
    assert len(both) == len(tables.layers)
    for (biased, unbiased), table in zip(both, tables.tables, strict=True):
        row = torch.from_numpy(table[2])
        if name.startswith("gemma4"):
            added = biased.double().log() - unbiased.double().log() - row
            # a softmax takes a constant off
            assert (added - added.mean(-1, keepdim=True)).abs().max() < 1e-5
        elif name == "muse_spark":
            multiplier = model.config.get_text_config().output_multiplier
            assert multiplier != 1
            torch.testing.assert_close(biased, unbiased + multiplier * row)
        else:
            assert torch.equal(biased, unbiased + row)
    assert not torch.equal(run(model, tables), plain)
    assert torch.equal(run(model, tables_for(model, 0.0)), plain)
    assert torch.equal(run(model), plain)


def test_routers_that_choose_by_token_ids_are_refused() -> None:
    model = tiny_model("deepseek_v4")
    with (
        pytest.raises(
            UserError, match=r"layers \[\d.*\] choose experts by the token's"
        ),
        router_bias(model, tables_for(tiny_model("deepseek_v3"), 1.0)),
    ):
        pass


def test_a_router_of_several_layers_is_refused() -> None:
    model = tiny_model("zaya")
    with pytest.raises(UserError, match="logits must come from exactly one; this"):
        run(model, random_tables(model))


@pytest.mark.parametrize("name", few(STEERED))
def test_a_table_is_added_to_the_logits_of_every_layer_and_a_zero_one_changes_nothing(
    name: str,
) -> None:
    model = tiny_model(name)
    check_exact(name, model)
    convert_model(model, Connectivity("all"))
    check_exact(name, model)


def test_a_row_is_added_to_bfloat16_logits_in_float32_and_rounded_once() -> None:
    model = tiny_model("qwen3_moe", dtype=torch.bfloat16)
    tables = random_tables(model)
    for (biased, plain), table in zip(
        logits_both(model, tables, 1), tables.tables, strict=True
    ):
        assert biased.dtype == torch.bfloat16
        assert torch.equal(
            biased, (plain.float() + torch.from_numpy(table[1])).bfloat16()
        )


def groups_of(config: Any) -> int:
    return getattr(config.get_text_config(), "n_group", None) or 1


@pytest.mark.parametrize("name", few(STEERED))
def test_fifty_forces_an_expert_or_leaves_it_to_its_group(name: str) -> None:
    """Sigmoid scores saturate at 1: a correction bias decides between such experts, so
    it is 0 here; and a group is chosen by its two best experts, so that one of them can
    be left with the rest of its group."""
    model = tiny_model(name)
    for buffer_name, buffer in (*model.named_buffers(), *model.named_parameters()):
        if "correction_bias" in buffer_name or buffer_name.endswith("expert_bias"):
            buffer.data.zero_()
    expert, groups = 2, groups_of(model.config)
    tables = tables_for(
        model, 50.0 * (np.arange(find_routers(model)[0].num_experts) == expert)
    )
    with recording(model) as recorded:
        run(model, tables)
        layers = recorded.take()
    for routed in layers:
        size = routed.logits.shape[-1] // groups
        in_group = (routed.experts // size == expert // size).any(-1)
        forced = (routed.experts == expert).any(-1)
        assert torch.equal(forced, in_group) if groups > 1 else forced.all()
        assert forced.any()


@pytest.mark.parametrize(
    "name",
    ["qwen3_moe", "deepseek_v3", "deepseek_v3 of one group", "gpt_oss", "llama4_text"],
)
def test_selection_chooses_by_the_bias_and_weighs_without_it(name: str) -> None:
    """In one group the score of the group is a top 2 of all experts, too: it is not the choice."""
    name, _, groups = name.partition(" of ")
    model = tiny_model(name, **({"n_group": 1, "topk_group": 1} if groups else {}))
    tables, router = random_tables(model, selection=True), find_routers(model)[0]
    seen: list[Any] = []
    handle = router.module.register_forward_hook(
        lambda module, args, output: seen.append(output)
    )
    run(model)
    run(model, random_tables(model))
    run(model, tables)
    handle.remove()
    plain, biased, chosen = seen
    logits = plain[router.logits_index]
    assert torch.equal(chosen[router.logits_index], logits)
    if name == "llama4_text":
        experts = biased[0].topk(router.top_k).indices
        mask = torch.zeros_like(logits).scatter(1, experts, 1.0)
        torch.testing.assert_close(chosen[0], logits.sigmoid() * mask)
        assert not torch.equal(chosen[0] > 0, plain[0] > 0)
        return
    experts = biased[2]
    assert torch.equal(chosen[2], experts) and not torch.equal(experts, plain[2])
    if name == "gpt_oss":
        weights = logits.gather(1, experts).softmax(-1)
    else:
        scores = logits.sigmoid() if name == "deepseek_v3" else logits.softmax(-1)
        weights = scores.gather(1, experts)
        weights = (
            weights
            / weights.sum(-1, keepdim=True)
            * getattr(model.config, "routed_scaling_factor", 1.0)
        )
    torch.testing.assert_close(chosen[1], weights)


def test_selection_is_refused_where_a_router_makes_no_choice_of_its_own() -> None:
    for name in NO_SELECTION:
        model = tiny_model(name)
        with pytest.raises(
            UserError,
            match=r"its forward has no top-2 of all experts.*leave selection off",
        ):
            run(model, random_tables(model, selection=True))


def test_tables_survive_a_file(tmp_path: Path) -> None:
    tables = random_tables(tiny_model("qwen3_moe"))
    write_tables(tmp_path / "tables", tables)
    (tmp_path / "other").write_text("{}")
    # the umask's
    assert (tmp_path / "tables").stat().st_mode == (tmp_path / "other").stat().st_mode
    read = read_tables(tmp_path / "tables")
    np.testing.assert_array_equal(read.tables, tables.tables)
    np.testing.assert_array_equal(read.placement, tables.placement)
    for name in (
        "kind",
        "strength",
        "selection",
        "layers",
        "model_type",
        "num_hidden_layers",
    ):
        assert getattr(read, name) == getattr(tables, name)
    whole = (tmp_path / "tables").read_bytes()
    (tmp_path / "half").write_bytes(whole[: len(whole) // 2])
    negative = dataclasses.replace(tables)
    object.__setattr__(negative, "strength", -0.5)
    write_tables(tmp_path / "negative", negative)
    write_tables(
        tmp_path / "floats",
        dataclasses.replace(tables, tables=tables.tables.astype(np.float64)),
    )
    for name, message in (
        ("other", "not a file of bias tables"),
        ("half", "not a file of bias tables"),
        ("floats", "not a file of bias tables"),
        ("negative", r"bias tables: strength \(lambda\) -0.5 is negative"),
        ("none", "no such file"),
    ):
        with pytest.raises(UserError, match=f"{name}: {message}"):
            read_tables(tmp_path / name)


def test_tables_whose_bytes_changed_are_refused_and_former_ones_without_a_hash_read(
    tmp_path: Path,
) -> None:
    tables = random_tables(tiny_model("qwen3_moe"))
    file = tmp_path / "tables"
    write_tables(file, tables)
    whole = file.read_bytes()
    begin, end = 8 + int.from_bytes(whole[:8], "little"), len(whole)
    for place in (begin, (begin + end) // 2, end - 1):
        flipped = bytearray(whole)
        flipped[place] ^= 1
        file.write_bytes(flipped)
        with pytest.raises(UserError, match=r"tables: is damaged: .*`fcsd-steer bias`"):
            read_tables(file)
    strength = b'strength\\": '
    assert whole.count(strength) == 1
    place = whole.index(strength) + len(strength)
    flipped = bytearray(whole)
    flipped[place] = ord("1") + (flipped[place] - ord("0")) % 9
    file.write_bytes(flipped)
    with pytest.raises(UserError, match="tables: is damaged"):
        read_tables(file)
    with safe_open(file, "numpy") as opened:
        facts = json.loads(opened.metadata()["fcsd_bias"])
        arrays = {name: opened.get_tensor(name) for name in ("tables", "placement")}
    del facts["sha256"]
    file.write_bytes(save(arrays, {"fcsd_bias": json.dumps(facts)}))
    np.testing.assert_array_equal(read_tables(file).tables, tables.tables)


def test_tables_of_another_model_are_refused() -> None:
    model, tables = tiny_model("qwen3_moe"), random_tables(tiny_model("qwen3_moe"))
    for other, message in (
        (tiny_model("olmoe"), "model type qwen3_moe, but OlmoeForCausalLM has olmoe"),
        (
            tiny_model("qwen3_moe", num_hidden_layers=3),
            "decoder layers 4, but Qwen3MoeForCausalLM has 3",
        ),
        (
            tiny_model("qwen3_moe", num_experts=4),
            "experts 8, but Qwen3MoeForCausalLM has 4",
        ),
        (
            tiny_model("qwen3_moe", mlp_only_layers=[1]),
            r"MoE layers \[0, 1, 2, 3\], but .* has \[0, 2, 3\]",
        ),
    ):
        with pytest.raises(UserError, match=message):
            run(other, tables)
    with router_bias(model, tables) as steering:
        with (
            pytest.raises(UserError, match="already have a bias"),
            router_bias(model, tables),
        ):
            pass
        with pytest.raises(UserError, match="endpoint of these tokens was not set"):
            model(IDS)
        with pytest.raises(UserError, match="endpoint 3: the bias tables have 0 to 2"):
            steering.endpoint = 3


def test_a_model_whose_routers_are_not_known_is_refused() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    dense = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=99,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
        )
    )
    with (
        pytest.raises(UserError, match="no router found"),
        router_bias(dense, random_tables(tiny_model("qwen3_moe"))),
    ):
        pass
    model = tiny_model("qwen3_moe")
    tables, router = random_tables(model), find_routers(model)[1]
    router.module.forward = own = lambda x: (x, x, x)
    with pytest.raises(UserError, match=rf"{router.name}: its forward has 0 linears"):
        run(model, tables)
    assert router.module.forward is own  # as one that a device map has put there
    assert "forward" not in vars(find_routers(model)[0].module)


def test_tables_can_be_changed_for_others_of_the_same_model() -> None:
    model = tiny_model("qwen3_moe")
    one, other = random_tables(model), tables_for(model, np.arange(8.0))
    wanted = run(model, other)
    with router_bias(model, one) as steering, torch.no_grad():
        steering.endpoint = 1
        before = model(IDS, use_cache=False).logits
        steering.use(other)
        assert torch.equal(model(IDS, use_cache=False).logits, wanted)
        assert steering.endpoint == 1 and not torch.equal(before, wanted)
        for change, message in (
            ({"placement": one.placement[:, ::-1]}, "the placement of experts differs"),
            ({"selection": True}, "selection is True, but False in the tables"),
            ({"model_type": "olmoe"}, "model_type is olmoe"),
            ({"tables": one.tables[:, :2], "placement": one.placement % 2}, "shape"),
        ):
            with pytest.raises(UserError, match=message):
                steering.use(dataclasses.replace(other, **change))


def test_values_that_are_no_tables_are_refused() -> None:
    tables = random_tables(tiny_model("qwen3_moe"))
    for change, message in (
        ({"strength": -0.1}, r"strength \(lambda\) -0.1 is negative"),
        ({"tables": np.full_like(tables.tables, np.nan)}, "not a finite number"),
        ({"placement": tables.placement + 1}, "beyond the last, 2"),
        ({"layers": (0, 1)}, "do not match"),
    ):
        with pytest.raises(UserError, match=message):
            dataclasses.replace(tables, **change)
