"""Overlapped expert parallelism on two gloo ranks has the bits of blocking exchanges
and the gradients of one process.
"""

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from fcsd.model.connectivity import Connectivity, load_model
from fcsd.parallel.overlap import OverlappedEP, attach
from fcsd.parallel.overlap.exchange import Port
from fcsd.parallel.overlap.layer import runtimes
from fcsd.parallel.overlap.schedule import LayerFacts, schedule
from tests.parallel.overlap.ranks import (
    CHECKPOINTING,
    X,
    attached,
    same,
    spread,
    step,
    worst,
)
from tests.reference.ranks import run_ranks
from tests.reference.tiny import tiny_model
from tests.support import user_error

FAMILIES = ("qwen2_moe", "qwen3_moe")


class Late:
    """A transport that exchanges only when it is waited for; whoever reads earlier
    reads NaN, and so does whoever reads its input afterwards.
    """

    def __init__(self, group: Any):
        self.group = group

    def start(self, received: Any, sent: Any, receive: Any, send: Any) -> Any:
        received.fill_(float("nan"))
        # others read the experts' output, too
        own, group = not sent.requires_grad, self.group

        class Work:
            def wait(self) -> None:
                dist.all_to_all_single(received, sent, receive, send, group=group)
                if own:
                    sent.fill_(float("nan"))

        return Work()


def events(records: list[Any]) -> list[tuple[str, str, int, bool]]:
    return [
        (event, r.kind, r.layer, r.backward)
        for event, r in records
        if r.kind != "counts"
    ]


def counted(records: list[Any]) -> tuple[int, int]:
    """Return the numbers of exchanges of rows and of counts, all of which have been
    waited for.
    """
    assert all(record.waited is not None for _, record in records)
    started = [record.kind for event, record in records if event == "start"]
    return len(started) - started.count("counts"), started.count("counts")


def trained(rank: int, folder: Path, families: tuple[str, ...]) -> dict[str, Any]:
    by_family: dict[str, Any] = {}
    for family in families:
        x = X.chunk(2)[rank]
        everything = Connectivity("all")
        one = None
        if FAMILIES.index(family) == rank:
            one = step(load_model(folder / family, connectivity=everything), X)
        model = spread(folder / family, everything, 2)
        attached(model, "blocking")
        blocking = step(model, x)
        facts = by_family[family] = {"error": worst(blocking, one)}
        attached(model, "forward")
        facts["forward"] = same(step(model, x), blocking)
        records, steps = attached(model, "full")
        facts["full"] = same(step(model, x), blocking)
        facts |= {
            "events": events(records),
            "steps": list(steps),
            "counts": counted(records),
        }
        facts["tags"] = tagged(model, x, records)
        for split in ("start", "end"):
            attached(model, "blocking", split=split)
            # gradients are summed in another order than with `core`
            expected = step(model, x)
            attached(model, "full", split=split)
            facts[split] = same(step(model, x), expected)
        attached(model, "full", transport=Late)
        facts["late"] = same(step(model, x), blocking)
        model.activation_checkpointing_enable(CHECKPOINTING)
        facts["late, checkpointing"] = same(step(model, x), blocking)
        records, _ = attached(model, "full")
        facts["checkpointing"] = same(step(model, x), blocking)
        facts["counts, checkpointing"] = counted(records)
        if family == "qwen2_moe":
            facts["compiled"] = compiled(model, x, blocking)
        model.activation_checkpointing_enable({"use_reentrant": True})
        with user_error(r"re-entrant activation checkpointing .* --overlap off"):
            step(model, x)
        with user_error("attached already; detach it first"):
            attach(model)
    return by_family


def compiled(model: Any, x: torch.Tensor, expected: Any) -> bool:
    """Take a step with attention and shared expert of a layer compiled by dynamo only,
    whose graphs run eagerly.
    """
    model.activation_checkpointing_disable()
    layer = model.model.layers[2]
    parts = (layer.self_attn, layer.mlp.shared_expert)
    for part in parts:
        part.compile(backend="eager")
    with warnings.catch_warnings():
        # dynamo's warning: it looks at the gradient of everything that it traces
        warnings.simplefilter("ignore")
        equal = same(step(model, x), expected)
    for part in parts:
        part._compiled_call_impl = None
    return equal


class Tag(torch.autograd.Function):
    """Records when the backward pass has left the module whose input this is."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tag: str, log: list[str]) -> torch.Tensor:
        ctx.noted = tag, log
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        tag, log = ctx.noted
        log.append(tag)
        return gradient, None, None


def tagged(model: Any, x: torch.Tensor, records: list[Any]) -> str:
    """Return the backward pass in order: a, b (parts of attention), s (shared expert),
    g (router) with the layer's number; l, w (launch, wait) with D, C (dispatch,
    combine)."""
    log: list[str] = []
    handles = []
    for k, layer in enumerate(model.model.layers):
        tags = {
            "a": layer.self_attn.q_proj,
            "b": layer.self_attn.o_proj,
            "g": layer.mlp.gate,
        }
        if hasattr(layer.mlp, "shared_expert"):
            tags["s"] = layer.mlp.shared_expert
        for tag, module in tags.items():

            def note(_: Any, args: Any, tag: str = f"{tag}{k}") -> Any:
                return (Tag.apply(args[0], tag, log), *args[1:])

            handles.append(module.register_forward_pre_hook(note))

    class Log(list[Any]):
        def append(self, entry: Any) -> None:
            event, record = entry
            if record.backward:
                log.append(
                    {"start": "l", "wait": "w"}[event]
                    + record.kind[0].upper()
                    + str(record.layer)
                )

    for runtime in runtimes(model):
        assert runtime.ep is not None
        runtime.ep.port.records = Log()
    step(model, x)
    for handle in handles:
        handle.remove()
    return " ".join(log)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("models")
    for family in FAMILIES:
        tiny_model(family).save_pretrained(folder / family)
    ranks = run_ranks(trained, 2, folder, FAMILIES)
    by_family: dict[str, Any] = ranks[0]
    for family in FAMILIES:
        by_family[family]["error"] = max(each[family]["error"] for each in ranks)
    return by_family


def test_overlapped_exchanges_change_no_bit_and_one_process_has_the_gradients(
    two_ranks: Any,
) -> None:
    for family in FAMILIES:
        facts = two_ranks[family]
        assert facts["error"] < 5e-6
        assert facts["full"] and facts["forward"] and facts["checkpointing"], family
        assert facts["start"] and facts["end"], family


def test_compiled_attention_is_cut_in_the_middle_and_changes_no_bit(
    two_ranks: Any,
) -> None:
    assert two_ranks["qwen2_moe"]["compiled"]


def test_nothing_reads_rows_before_they_are_waited_for_or_keeps_what_was_sent(
    two_ranks: Any,
) -> None:
    for family in FAMILIES:
        assert two_ranks[family]["late"] and two_ranks[family]["late, checkpointing"]


def test_a_recomputation_sends_its_dispatch_again_and_nothing_else(
    two_ranks: Any,
) -> None:
    """4 layers, forward and backward, make 16 exchanges; the dispatch of each layer is
    sent once more.
    """
    for family in FAMILIES:
        assert two_ranks[family]["counts"] == (16, 4)
        assert two_ranks[family]["counts, checkpointing"] == (20, 4)


def recomputed(rank: int, folder: Path) -> dict[str, Any]:
    """Return the exchanges of regular layers in a step that recomputes each, and
    whether it changed a gradient.
    """
    facts = {}
    launch = Port.launch
    for family in REGULAR:
        kinds: list[tuple[str, bool]] = []

        def noted(
            port: Port, kind: Any, backward: bool, *rows: Any, kinds: Any = kinds
        ) -> Any:
            kinds.append((kind, backward))
            return launch(port, kind, backward, *rows)

        model, x = spread(folder / family, Connectivity("none"), 2), X.chunk(2)[rank]
        kept = step(model, x)
        model.activation_checkpointing_enable(CHECKPOINTING)
        Port.launch = noted  # type: ignore[method-assign, assignment]
        equal = same(step(model, x), kept)
        Port.launch = launch  # type: ignore[method-assign]
        facts[family] = {
            "equal": equal,
            **{f"{k} {b}": kinds.count((k, b)) for k, b in set(kinds)},
        }
    return facts


REGULAR = ("qwen3_moe", "mixtral", "gpt_oss", "olmoe", "deepseek_v2")


def test_a_recomputed_regular_layer_does_not_send_its_combine_again(
    tmp_path: Path,
) -> None:
    """Weights are applied before the combine, so no gradient needs its rows. A shared
    expert behind the routed ones keeps tensors, so that the recomputation goes on.
    """
    for family in REGULAR:
        tiny_model(family).save_pretrained(tmp_path / family)
    for facts in run_ranks(recomputed, 2, tmp_path):
        for family, counts in facts.items():
            number = counts["dispatch True"]  # one for each MoE layer
            assert counts["equal"] and counts["combine True"] == number
            assert counts["dispatch False"] == 2 * number
            again = 2 if family == "deepseek_v2" else 1
            assert counts["combine False"] == again * number, family


def test_launches_and_waits_come_in_the_schedules_order_and_mirrored(
    two_ranks: Any,
) -> None:
    facts = [LayerFacts(incoming=k > 0, outgoing=k < 3) for k in range(4)]
    steps = [(k, step) for k, layer in enumerate(facts) for step in schedule(layer)]
    forward = []
    for k, each in steps:
        if each.starts:
            forward.append(("start", each.starts, k))
        if each.waits:
            before = each.waits == "before"
            forward.append(("wait", "combine" if before else each.waits, k - before))
    mirrored = [
        ({"start": "wait", "wait": "start"}[e], kind, k)
        for e, kind, k in reversed(forward)
    ]
    for family in FAMILIES:
        seen = two_ranks[family]["events"]
        assert [event[:3] for event in seen if not event[3]] == forward
        assert [event[:3] for event in seen if event[3]] == mirrored
        assert two_ranks[family]["steps"] == [(k, each.name) for k, each in steps]


@pytest.mark.parametrize(
    ("facts", "steps"),
    [
        ({"incoming": True, "outgoing": True}, "a wC- router sD b wD experts sC shared"),
        ({"outgoing": True}, "router sD a b wD experts sC shared"),
        ({"incoming": True}, "a wC- router sD b wD experts sC shared wC"),
        ({}, "router sD a wD experts sC b shared wC"),
        ({"split": "end"}, "router sD a b wD experts sC shared wC"),
        ({"incoming": True, "split": "start"}, "wC- router sD a b wD experts sC shared wC"),
        ({"incoming": True, "outgoing": True, "split": "end"}, "a b wC- router sD shared wD experts sC"),
        ({"incoming": True, "outgoing": True, "outdated": False}, "a b wC- router sD shared wD experts sC"),
        ({"moe": False, "incoming": True}, "a b wC- mlp"),
    ],
)  # fmt: skip
def test_the_steps_of_a_layer_follow_from_what_is_in_flight(
    facts: dict[str, Any], steps: str
) -> None:
    """By hand. s, w: start and wait for D (dispatch), C (combine), C- (combine of the
    layer before).
    """
    signs = {"dispatch": "D", "combine": "C", "before": "C-"}
    words = []
    for each in schedule(LayerFacts(**facts)):
        name = each.name.removeprefix("attention ").removesuffix(" expert")
        words.append(
            f"s{signs[each.starts]}"
            if each.starts
            else f"w{signs[each.waits]}"
            if each.waits
            else name
        )
    assert " ".join(words) == steps


def test_the_backward_pass_computes_while_gradients_travel(two_ranks: Any) -> None:
    """By hand: the combine travels beside attention's part a and the shared expert, the
    dispatch beside part b.
    """
    assert (
        two_ranks["qwen2_moe"]["tags"]
        == "lC3 s3 wC3 lD3 b3 wD3 g3 lC2 a3 s2 wC2 lD2 b2 wD2 g2"
        " lC1 a2 s1 wC1 lD1 b1 wD1 g1 lC0 a1 s0 wC0 lD0 b0 a0 wD0 g0"
    )
    assert (
        two_ranks["qwen3_moe"]["tags"]
        == "lC3 wC3 lD3 b3 wD3 g3 lC2 a3 wC2 lD2 b2 wD2 g2 lC1 a2 wC1 lD1 b1 wD1 g1 lC0"
        " a1 wC0 lD0 b0 a0 wD0 g0"
    )


def test_counts_are_on_their_way_while_the_rows_are_gathered() -> None:
    """The ranks thus learn each other's counts while each has something to do."""
    log: list[str] = []
    rows = torch.randn(5, 3)

    class Logged:
        def __init__(self, what: str):
            self.what = what

        def start(self, received: Any, sent: Any, receive: Any, send: Any) -> Any:
            received.copy_(sent)
            log.append(f"start {self.what}")
            return SimpleNamespace(wait=lambda: log.append(f"wait {self.what}"))

    class Gathers(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if any(each is rows for each in args):
                log.append("gather rows")
            return func(*args, **(kwargs or {}))

    ep: Any = object.__new__(OverlappedEP)
    ep.__dict__.update(
        ep_mesh=SimpleNamespace(size=lambda: 1), num_here=4, scaled=False
    )
    ep.__dict__.update(port=Port(Logged("rows")), _counts=Logged("counts"))
    experts, weights = (
        torch.tensor([[0, 3], [1, 2], [3, 0], [3, 1], [2, 0]]),
        torch.rand(5, 2),
    )
    with Gathers():
        dispatch = ep.start_dispatch(rows, experts, weights, None)
        again = [*log]
        ep.start_dispatch(rows, experts, weights, dispatch.sizes)
    assert again == ["start counts", "gather rows", "wait counts", "start rows"]
    assert log == [*again, "gather rows", "start rows"]
    received, pairs = ep.finish_dispatch(dispatch)
    assert torch.equal(received, rows.repeat_interleave(2, 0))
    assert torch.equal(pairs.weights, weights.view(-1))
    assert pairs.ids.tolist() == experts.view(-1).tolist()
    assert dispatch.exchange.send == [5 + 7]
    assert log[-1] == "wait rows"
