"""The benchmark of overlap: the content of its table, who computes when batons are
passed on, and what its link is told.
"""

import math
import time
from typing import Any

import pytest

from benchmarks.overlap.__main__ import complete, parser
from benchmarks.overlap.modes import REGULAR, Batons, Bench, exchanged_bytes
from benchmarks.overlap.report import printed, summary
from tests.reference.ranks import run_ranks


def test_a_ratio_is_the_median_over_rounds_and_hidden_the_share_of_what_was_sent():
    def rounds(*steps: float, exposed: float) -> list[dict[str, float]]:
        return [
            {"step": step, "total of all": 1.0, "exposed of all": exposed}
            for step in steps
        ]

    table = summary(
        {"regular": rounds(4, 6, 5, exposed=1), "full": rounds(2, 2, 5, exposed=0.25)}
    )
    # of 2, 3 and 1
    assert table["regular"]["ratio"] == 1 and table["full"]["ratio"] == 2
    assert table["full"]["hidden of all"] == pytest.approx(0.75)
    assert table["full"]["step"] == 2
    assert "| full | 2000 | 2.00 | 50% | 75.0% | - | - | - | - |" in printed(table)


def test_two_halves_compute_one_at_a_time_and_in_the_same_order_on_every_rank() -> None:
    batons, log = Batons(), []

    def half(number: int, waits: int) -> Any:
        def run() -> None:
            for wait in range(waits):
                log.append((number, wait))
                time.sleep(0.001 * (2 - number))
                batons.hand_on()
            log.append((number, "end"))

        return run

    batons.run([half(0, 2), half(1, 3)])
    assert log == [(0, 0), (1, 0), (0, 1), (1, 1), (0, "end"), (1, 2), (1, "end")]


def test_the_modes_and_sizes_follow_from_model_and_device() -> None:
    def options(*words: str) -> Any:
        return complete(parser().parse_args(words))

    # it has no shared expert
    assert not {"beside", "both"} & set(options("--model", "none").modes)
    assert options("--checkpointing").modes == ["blocking", "full"]
    cuda = options("--device", "cuda", "--layers", "2")
    assert (cuda.ranks, cuda.compute, cuda.dim, cuda.layers) == (1, "real", 2048, 2)
    plain = options()
    ranks = 2 * (1 - math.comb(8, 4) / math.comb(16, 4))  # of a token's 4 experts of 16
    assert exchanged_bytes(plain) == pytest.approx(2 * 64 * ranks * 64 * 4 / 2)


SMALL = (
    "--link plain --compute real --layers 3 --dim 32 --expert-dim 16 --experts 4"
    " --top-k 2 --rows 1 --length 8"
)


def stepped(rank: int, model: str, modes: tuple[str, str]) -> Any:
    """Return for each mode the gradients, the launches and waits, and the tokens of
    layer 1's shared expert.
    """
    bench = Bench(complete(parser().parse_args([*SMALL.split(), "--model", model])))
    steps = []
    for mode in modes:
        block, hook = bench.prepare(mode).model.layers[1].mlp, None
        if model == "shared":
            hook = block.shared_experts.register_forward_pre_hook(
                lambda _, args: bench.records.append(
                    ("shared", args[0].shape[:-1].numel())
                )
            )
        bench.step(mode)
        if hook is not None:
            hook.remove()
        events = [
            (event, r) if event == "shared" else (event, r.kind, r.layer, r.backward)
            for event, r in bench.records
            if event == "shared" or r.kind != "counts"
        ]
        named = bench.models[mode in REGULAR].named_parameters()
        gradients = {
            name: getattr(p.grad, "_local_tensor", p.grad).clone() for name, p in named
        }
        steps.append((gradients, events))
    return steps


def check_gradients(expected: Any, actual: Any) -> None:
    for name, gradient in expected.items():
        assert (actual[name] - gradient).abs().max() <= 2e-6 * gradient.abs().max(), (
            name
        )


@pytest.mark.parametrize("model", ["shared", "none"])
def test_one_node_an_exchange_has_the_gradients_of_two_and_their_order(
    model: str,
) -> None:
    """This holds only because the sequence number of the node is set: without it,
    autograd would wait at once for what it has launched.
    """
    for (expected, order), (actual, seen) in run_ranks(
        stepped, 2, model, ("full", "one-node")
    ):
        assert seen == order
        assert len([event for event in order if event[0] != "shared"]) == 2 * 4 * 3
        check_gradients(expected, actual)


def test_the_exact_rivals_shared_expert_is_computed_beside_both_exchanges_in_halves():
    """Each half has 4 of the 8 tokens of a rank."""
    for (expected, _), (actual, seen) in run_ranks(
        stepped, 2, "shared", ("regular", "both")
    ):
        check_gradients(expected, actual)
        layer = [
            event[:2]
            for event in seen
            if event[0] == "shared" or (event[2:] == (1, False))
        ]
        assert layer == [
            ("start", "dispatch"), ("shared", 4), ("wait", "dispatch"),
            ("start", "combine"), ("shared", 4), ("wait", "combine"),
        ]  # fmt: skip
