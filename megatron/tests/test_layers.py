"""FarSkip layers of Megatron-Core compute what `load_model` does: logits and gradients,
on one rank and on two.
"""

import dataclasses
import itertools
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import (
    CONNECTIVITIES,
    MODELS,
    call,
    fcsd_outputs,
    make_checkpoint,
    megatron_model,
    megatron_outputs,
    start,
    tokens_of,
)
from megatron.core.transformer import TransformerConfig

from fcsd_megatron import read_source
from fcsd_megatron.layer import FarSkipTransformerLayer
from fcsd_megatron.names import is_expert, own_name
from fcsd_megatron.refusals import RULES
from tests.float64 import BOUND, error
from tests.reference.ranks import run_ranks

NUM_EXPERTS = 8


def check_equal(
    rank: int, folder: Path, num_ranks: int, options: dict[str, Any]
) -> int:
    """Compare a rank's model with fcsd's; return how many gradients were compared."""
    start(num_ranks)
    model = megatron_model(folder, **options)
    logits, gradients = megatron_outputs(model, tokens_of(rank))
    references = [fcsd_outputs(folder, tokens_of(each)) for each in range(num_ranks)]
    assert error(logits, references[rank][0]) < BOUND
    count = NUM_EXPERTS // num_ranks
    compared = 0
    for name in references[rank][1]:
        if (own := own_name(name, rank * count, count)) is None:
            continue
        # An expert has the tokens of all ranks, everything else those of its own.
        batches = range(num_ranks) if is_expert(name) else [rank]
        expected = sum(references[each][1][name] for each in batches)
        assert error(gradients.pop(own), expected) < BOUND, name
        compared += 1
    assert not gradients
    return compared


VARIANTS = [
    (model, connectivity)
    for model in list(MODELS)[2:]
    for connectivity in ("all", "gap")
]


@pytest.mark.parametrize(
    "model, connectivity",
    [*itertools.product(("qwen3_moe", "deepseek_v3"), CONNECTIVITIES), *VARIANTS],
)
def test_logits_and_gradients_are_those_of_load_model(
    model: str, connectivity: str, tmp_path: Path
) -> None:
    if model == "deepseek_v3-full_queries" and version("megatron-core") == "0.19.2":
        pytest.skip(
            "0.19.2 has no such local layer, which test_what_does_not_fit_is_refused sees"
        )
    folder = make_checkpoint(tmp_path, model, connectivity)
    (compared,) = run_ranks(check_equal, 1, folder, 1, {})
    biases = sum(name.endswith("expert_bias") for name in read_source(folder).pieces)
    assert compared == len(read_source(folder).pieces) - biases


@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall"])
@pytest.mark.parametrize("connectivity", ["all", "half", "mlp_full"])
@pytest.mark.parametrize("model", ["qwen3_moe", "deepseek_v3"])
def test_two_expert_parallel_ranks_compute_the_same(
    model: str, connectivity: str, dispatcher: str, tmp_path: Path
) -> None:
    folder = make_checkpoint(tmp_path, model, connectivity)
    run_ranks(check_equal, 2, folder, 2, {"moe_token_dispatcher_type": dispatcher})


def test_every_refused_option_is_a_field_of_megatrons_config() -> None:
    fields = {field.name for field in dataclasses.fields(TransformerConfig)}
    # which 0.16.1 does not have
    assert RULES.keys() - fields <= {"mlp_chunks_for_training"}


def mutate(rank: int, folder: Path) -> dict[str, float]:
    """Return how far logits are from fcsd's with one thing wrong in every layer."""
    start(1)
    expected, _ = fcsd_outputs(folder, tokens_of(0))
    model = megatron_model(folder)
    layers = [
        layer
        for layer in model.decoder.layers
        if isinstance(layer, FarSkipTransformerLayer)
    ]
    plans = [layer.plan for layer in layers]
    branches = FarSkipTransformerLayer.branches

    def distance(layer: Any, method: Any = branches, **wrong: Any) -> float:
        for each, plan in zip(layers, plans, strict=True):
            each.plan = dataclasses.replace(plan, **wrong)
            each.branches = method.__get__(each)
        with torch.no_grad():
            return error(call(model, tokens_of(0)), expected)

    def all_in_flight(self: Any, m: Any, padding_mask: Any) -> Any:
        shared, routed = branches(self, m, padding_mask)
        return None, routed if shared is None else shared + routed

    return {
        "nothing": distance(layers),
        "attention reads what is in flight": distance(layers, carry=False),
        "the MLP reads after attention": distance(layers, outdated=False),
        "shared experts in flight, too": distance(layers, all_in_flight),
    }


def test_a_wrong_order_stands_out_by_orders(tmp_path: Path) -> None:
    (distances,) = run_ranks(mutate, 1, make_checkpoint(tmp_path, "deepseek_v3", "all"))
    assert distances.pop("nothing") < BOUND
    assert min(distances.values()) > 1e-2, distances
