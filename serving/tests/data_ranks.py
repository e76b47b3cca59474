"""Run cases on data-parallel ranks, each with a whole engine in its process
(`torchrun`, executor `external_launcher`).

    torchrun --nproc-per-node N data_ranks.py MODELS RESULTS CASE …

A case is CHECKPOINT:LAYOUT[:MUTANT]: a layout of `LAYOUTS`, a mutant of `MUTANTS`.
Ranks take the eight prompts of `data_parallel.npz` in turn, so their numbers of tokens
differ; the third step of a short prompt meets a prefill.
"""

import itertools
import os
import signal
import sys
from pathlib import Path
from typing import Any

import engine
import tensor_ranks

_CHUNKS = {
    "enable_prefix_caching": True, "max_num_batched_tokens": 48, "block_size": 32, "max_num_seqs": 4,
}  # fmt: skip
LAYOUTS: dict[str, dict[str, Any]] = {
    "blocking": {"comm": "blocking"}, "async": {"comm": "c10d"}, "timed": {"comm": "timed"},
    "no_ep": {"comm": "c10d", "enable_expert_parallel": False},
    "compiled": {"comm": "c10d", "enforce_eager": False},
    "chunks": {"comm": "c10d", **_CHUNKS},
    "small_at_once": {"comm": "c10d", "min_overlap_bytes": 2**16},
    "idle": {"comm": "c10d"}, "few": {"comm": "c10d"}, "abort": {"comm": "c10d"}, "hooks": {"comm": "c10d"},
}  # fmt: skip
"""In `idle` the last rank has no prompt, in `few` there are fewer prompts than ranks,
of a token each step; in `abort` the first client of each rank goes after four steps; in
`hooks` halves are waited for as those of DeepEP are."""


def give_hooks(llm: Any) -> None:
    """Let each half give a hook and a receiver, which is empty before the hook: as
    DeepEP's low-latency halves do.
    """
    for schedule in engine.exchanging(llm):
        halves = schedule.exchange.halves
        for name in ("prepare_async", "finalize_async"):
            begin = getattr(halves, name)

            def begin_with_hook(*given: Any, begin: Any = begin) -> Any:
                receive, arrived = begin(*given), []
                return lambda: arrived.append(receive()), arrived.pop

            setattr(halves, name, begin_with_hook)


def wait_at_start(llm: Any) -> None:
    """Every exchange is waited for where it begins, which hides nothing."""
    for schedule in engine.exchanging(llm):
        halves = schedule.exchange.halves
        for name in ("prepare_async", "finalize_async"):
            begin = getattr(halves, name)

            def begin_and_wait(*given: Any, begin: Any = begin) -> Any:
                received = begin(*given)()
                return lambda: received

            setattr(halves, name, begin_and_wait)


def dispatch_after_attention(llm: Any) -> None:
    """The dispatch begins after attention, beside which it could run."""
    for schedule in engine.exchanging(llm):
        owner, name = engine.kernel_of(schedule.layer)
        setattr(owner, name, vars(getattr(owner, name))["kernel"])


def read_before_combine(llm: Any) -> None:
    """The MoE block does not wait for the routed output that it reads; the layer after does."""
    for schedule in engine.exchanging(llm):
        exchange = schedule.exchange
        exchange.wait = lambda exchange=exchange: exchange.routed.clone()


def attend_to_routed(llm: Any) -> None:
    """Attention reads the routed output of the layer before, which is in flight."""
    for schedule in engine.exchanging(llm):

        def layer_input(stream: Any, routed: Any, schedule: Any = schedule) -> Any:
            before = schedule.before.wait() if schedule.receives else routed
            schedule.receives = False
            return type(schedule).layer_input(schedule, stream, before)

        schedule.layer_input = layer_input


def forget_scale(llm: Any) -> None:
    """The routed outputs are not scaled."""
    for schedule in engine.exchanging(llm):
        schedule.exchange.scale = 1.0


def add_shared_twice(llm: Any) -> None:
    """The block adds its shared experts, too, to what it hands on."""
    for schedule in engine.exchanging(llm):
        shared = schedule.shared
        schedule.shared = lambda read, shared=shared: 2 * shared(read)


def die(llm: Any) -> None:
    """The last rank is killed in the middle of a layer."""
    if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
        engine.exchanging(llm)[2].exchange.experts = lambda: os.kill(
            os.getpid(), signal.SIGKILL
        )


def leave_dense_stock(llm: Any) -> None:
    """A selected dense layer is the stock layer."""
    for schedule in engine.schedules_of(llm):
        if schedule.dense:
            schedule.layer.forward = type(schedule.layer).forward.__get__(
                schedule.layer
            )


MUTANTS = {
    function.__name__: function
    for function in (
        wait_at_start, dispatch_after_attention, read_before_combine, attend_to_routed, forget_scale,
        add_shared_twice, die, leave_dense_stock,
    )
}  # fmt: skip


def prompts_of(layout: str, rank: int, ranks: int) -> list[int]:
    """Return which of the eight prompts a rank has."""
    if layout == "few":
        return [0] if rank == 0 else []
    busy = ranks - 1 if layout == "idle" else ranks
    return [k for k in range(8) if k % busy == rank]


def generate_and_abort(llm: Any, reference: Path, which: list[int]) -> list[Any]:
    """Return what `engine.generate` does, without the first prompt, which is taken back
    while the others go on.
    """
    serving = llm.llm_engine
    step, steps = serving.step, itertools.count()

    def step_and_abort() -> Any:
        if next(steps) == 4:
            serving.abort_request(
                [min(serving.output_processor.external_req_ids, key=int)]
            )
        return step()

    serving.step = step_and_abort
    return engine.generate(llm, reference, which=which)


def run(case: str, models: Path) -> dict[str, Any]:
    """Return what a case gave on this rank: its prompts, those with equal ids, largest
    difference, order of events.
    """
    checkpoint, layout, *mutants = case.split(":")
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    options = {"enable_expert_parallel": True, "max_model_len": 1152, **LAYOUTS[layout]}
    settings = {
        name: options.pop(name)
        for name in ("comm", "min_overlap_bytes")
        if name in options
    }
    reference = models / checkpoint / "data_parallel.npz"
    which = prompts_of(layout, rank, ranks)
    llm = engine.start_engine(
        models / checkpoint,
        additional_config={"fcsd": settings},
        data_parallel_size=ranks,
        distributed_executor_backend="external_launcher",
        seed=0,
        **options,
    )
    try:
        # the exchange is cut in a model's first step
        engine.generate(llm, reference, which=[0])
        for change in [
            *([give_hooks] if layout == "hooks" else []),
            *map(MUTANTS.get, mutants),
        ]:
            change(llm)
        recorder = engine.record_exchange(llm)
        if layout == "abort":
            outputs, which = generate_and_abort(llm, reference, which), which[1:]
        else:
            outputs = engine.generate(llm, reference, which=which)
        recorder.forget()
        result: dict[str, Any] = {
            "case": case,
            "prompts": len(which),
            "events": recorder.events,
        }
        if layout == "chunks":
            again = engine.generate(llm, reference, prompt_logprobs=None, which=which)
            result["cached"] = max(output.num_cached_tokens for output in again)
            outputs, which = outputs + again, which * 2
            result["prompts"] *= 2
        original = models / f"{checkpoint.partition('-')[0]}-original" / reference.name
        result["equal"], result["worst"] = engine.compare(outputs, reference, which)
        result["original"] = engine.compare(outputs, original, which)[0]
        return result
    finally:
        engine.stop_engine(llm)


if __name__ == "__main__":
    tensor_ranks.main(run, *sys.argv[1:])
