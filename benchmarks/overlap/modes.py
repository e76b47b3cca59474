"""Run the steps of one rank in every mode."""

import argparse
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.overlap.links import CudaLink, Link
from benchmarks.overlap.models import (
    SLEEPS_MS,
    a_row_for_each_expert,
    add_sleeps,
    in_steps,
    spread_model,
)
from benchmarks.overlap.one_node import one_node
from benchmarks.overlap.report import flat, from_records
from fcsd.planning.network.simulate import rows_per_token

MODES = (
    "regular", "beside", "both", "batons", "blocking", "forward", "full", "start", "end", "one-node", "each",
    "blocking-each",
)  # fmt: skip
REGULAR = ("regular", "beside", "both", "batons")
EACH = ("each", "blocking-each")
ON_A_CPU = ("batons", "one-node")


class Batons:
    """Two threads, one of which computes at a time; each passes the baton when it
    waits, so that the order is the same on all ranks.
    """

    def __init__(self) -> None:
        self.changed, self.turn, self.running = threading.Condition(), 0, {0, 1}
        self.own = threading.local()

    def run(self, functions: Any) -> None:
        self.turn, self.running = 0, {0, 1}
        threads = [
            threading.Thread(target=self._run, args=pair)
            for pair in enumerate(functions)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _run(self, number: int, function: Any) -> None:
        self.own.number = number
        self._await_turn()
        function()
        with self.changed:
            self.running.discard(number)
            self.turn = 1 - number
            self.changed.notify_all()

    def hand_on(self) -> None:
        with self.changed:
            if 1 - self.own.number in self.running:
                self.turn = 1 - self.own.number
                self.changed.notify_all()
        self._await_turn()

    def _await_turn(self) -> None:
        with self.changed:
            self.changed.wait_for(lambda: self.turn == self.own.number)

    def transport(self, inner: Any) -> Any:
        batons = self

        class Handing:
            def start(self, *args: Any) -> Any:
                return _Handing(batons, inner.start(*args))

        return Handing()


class _Handing:
    def __init__(self, batons: Batons, work: Any):
        self.batons, self.work = batons, work
        self.get_future = work.get_future

    def wait(self) -> None:
        self.batons.hand_on()
        self.work.wait()


class Bench:
    """The models of one rank, and steps of them in every mode.

    clock: clock of steps, exchanges and sleeps: the module `time`, or a simulated one.
    """

    def __init__(self, options: argparse.Namespace, clock: Any = time):
        self.options, self.clock = options, clock
        self.batons = Batons()
        generator = torch.Generator().manual_seed(1 + torch.distributed.get_rank())
        shape = (options.rows, options.length)
        self.ids = torch.randint(3, 999, shape, generator=generator).to(options.device)
        self.models: dict[bool, Any] = {}
        self.records: list[Any] = []
        self.link: Any = None
        if options.device == "cuda":
            self.link = CudaLink(options.rate_gb_s * 1e9, options.virtual_ranks)
        elif options.link == "emulated":
            self.link = Link(options.exchange_ms / 1e3 / exchanged_bytes(options))

    def prepare(self, mode: str) -> Any:
        from fcsd.parallel.overlap import attach, detach
        from fcsd.parallel.overlap.transport import AllToAll

        regular, options = mode in REGULAR, self.options
        if options.device == "cuda":
            experts = options.experts * options.virtual_ranks
            rows = (
                1.0
                if mode in EACH
                else rows_per_token(experts, options.top_k, options.virtual_ranks)
            )
            self.link.stands_for = rows
        if regular not in self.models:
            model = self.models[regular] = spread_model(self.options, not regular)
            if self.options.compute == "sleeps":
                add_sleeps(model, self.ids.numel(), self.clock)
            if self.options.checkpointing:
                model.activation_checkpointing_enable({"use_reentrant": False})
        model = self.models[regular]
        if regular:
            link = self.link or AllToAll
            transport = (
                (lambda group: self.batons.transport(link(group)))
                if mode == "batons"
                else link
            )
            in_steps(model, transport, mode)
        else:
            detach(model)
            split = {"start": "start", "end": "end"}.get(mode)
            named = mode.removesuffix("-each")
            overlap: Any = named if named in ("blocking", "forward") else "full"
            attach(model, overlap, split=split, transport=self.link)
        self.records.clear()
        for layer in model.model.layers:
            port = layer.mlp.experts.farskip_ep.port
            port.records, port.clock = self.records, self.clock.perf_counter
        return model

    def step(self, mode: str) -> dict[str, Any]:
        """Return the seconds of one step and of its parts."""
        from fcsd.parallel.overlap.measure import exchange_times

        model = self.prepare(mode)
        model.zero_grad(set_to_none=True)
        torch.distributed.barrier()
        self.synchronize()
        began = self.clock.perf_counter()
        with self.way(mode):
            middle = self.passes(model, mode, began)
        self.synchronize()
        ended = self.clock.perf_counter()
        measured: dict[str, Any] = {"step": ended - began, "forward": middle - began}
        # whose waits are the other half's computation
        if self.options.device != "cuda" and mode != "batons":
            measured |= self.hidden()
        if mode == "blocking":
            measured["exchanges"] = exchange_times(
                record for event, record in self.records if event == "start"
            )
        torch.distributed.barrier()
        return measured

    def way(self, mode: str) -> Any:
        """Use what a mode needs in place of the runtime's own exchanges."""
        if mode in EACH:
            return a_row_for_each_expert(self.options.top_k)
        return one_node() if mode == "one-node" else nullcontext()

    def passes(self, model: Any, mode: str, began: float) -> float:
        """Run forward and backward pass; return when the latter began."""
        if mode == "batons":
            halves = self.ids.chunk(2, dim=0 if len(self.ids) > 1 else 1)
            SLEEPS_MS["share"] = 0.5
            self.batons.run(
                [lambda x=x: model(x, labels=x).loss.backward() for x in halves]
            )
            SLEEPS_MS["share"] = 1.0
            return began
        loss = model(self.ids, labels=self.ids).loss
        middle = self.clock.perf_counter()
        loss.backward()
        return middle

    def synchronize(self) -> None:
        if self.options.device == "cuda":
            torch.cuda.synchronize()

    def hidden(self) -> dict[str, float]:
        self.clock.sleep(0.02)  # callbacks of the last exchange
        measured = from_records(
            record for event, record in self.records if event == "start"
        )
        return flat(measured)

    def traced(self, mode: str, path: Path) -> dict[str, float]:
        """Return the seconds of one step on a GPU, from the profiler's trace."""
        from torch.profiler import ProfilerActivity, profile

        from fcsd.parallel.overlap.measure import from_trace

        with profile(
            activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]
        ) as profiler:
            self.step(mode)
        profiler.export_chrome_trace(str(path))
        return flat(from_trace(path))


def run_rank(
    number: int, options: argparse.Namespace, store: str, pipe: Any = None
) -> dict[str, Any]:
    """Run all steps of one rank; return the seconds of each, by mode."""
    import transformers

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1 if options.device == "cpu" else 8)
    if options.device == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group(
        "nccl" if options.device == "cuda" else "gloo",
        store=dist.FileStore(store, options.ranks),
        rank=number,
        world_size=options.ranks,
    )
    bench = Bench(options)
    modes = [
        mode
        for mode in options.modes
        if options.device == "cpu" or mode not in ON_A_CPU
    ]
    measurements: dict[str, list[dict[str, Any]]] = {mode: [] for mode in modes}
    for number_of_round in range(options.rounds + 1):
        for mode in modes:
            measured = bench.step(mode)
            if number_of_round:  # the first warms up
                measurements[mode].append(measured)
    if options.device == "cuda":
        folder = Path(options.traces) if options.traces else Path(store).parent
        folder.mkdir(parents=True, exist_ok=True)
        for mode in modes:
            measured = bench.traced(mode, folder / f"{mode}.json")
            for each in measurements[mode]:
                each |= measured
    dist.destroy_process_group()
    if pipe is not None:
        pipe.send(measurements)
    return measurements


def exchanged_bytes(options: argparse.Namespace) -> float:
    """Return the mean bytes that leave a CPU rank in one exchange, besides the words of
    the pairs.
    """
    each = rows_per_token(options.experts, options.top_k, options.ranks)
    return (
        options.rows
        * options.length
        * each
        * options.dim
        * 4
        * (options.ranks - 1)
        / options.ranks
    )
