"""Run cases on two or four ranks, each with a whole engine in its process (`torchrun`,
executor `external_launcher`).

    torchrun --nproc-per-node 2 tensor_ranks.py MODELS RESULTS CASE …

A case is CHECKPOINT:LAYOUT[:MUTANT]: a layout of `LAYOUTS`, a mutant of `MUTANTS`. Rank
R writes RESULTS.R, a line of JSON a case.
"""

import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import engine

_STAGES = {
    "comm": "blocking", "tensor_parallel_size": 1, "pipeline_parallel_size": 2, "enforce_eager": False,
}  # fmt: skip
LAYOUTS: dict[str, dict[str, Any]] = {
    "pp": _STAGES,  # compiled: on CPUs vLLM's own stages do not run eagerly
    "tp": {"comm": "blocking"},
    "ep": {"comm": "blocking", "enable_expert_parallel": True},
    "async": {"comm": "c10d"},
    "async_ep": {"comm": "c10d", "enable_expert_parallel": True},
    "timed": {"comm": "timed"},
    "compiled": {"comm": "c10d", "enforce_eager": False},
}


def wait_early(llm: Any) -> None:
    """Every collective is waited for where it begins, which hides nothing."""
    from fcsd_vllm.schedule import Schedule

    for schedule in engine.schedules_of(llm):
        start = schedule._start
        schedule._start = lambda x, what, start=start, schedule=schedule: (
            Schedule._wait(schedule, start(x, what), what)
        )
        schedule._wait = lambda x, *_: x


def wait_late(llm: Any) -> None:
    """Attention does not wait for the sum that it reads; the MoE block does."""
    for schedule in engine.schedules_of(llm):
        wait = schedule._wait
        late: list[Any] = []

        def attention_input(
            stream: Any, flight: Any, schedule: Any = schedule, late: Any = late
        ) -> Any:
            base = stream + flight
            late.append(flight)
            return base, schedule.norms[0](base)

        def wait_for_both(
            x: Any, what: str, index: Any = None, wait: Any = wait, late: Any = late
        ) -> Any:
            x = wait(x, what, index)
            if late and what == "routed":
                wait(late.pop(), "attention", index)
            return x

        schedule.attention_input, schedule._wait = attention_input, wait_for_both


def forget_all_reduce(llm: Any) -> None:
    """The routed outputs of the second layer are not summed."""
    schedule = engine.schedules_of(llm)[1]
    start, wait = schedule._start, schedule._wait
    schedule._start = lambda x, what: x.clone() if what == "routed" else start(x, what)
    following = engine.schedules_of(llm)[2]
    wait = following._wait
    following._wait = lambda x, what, index=None: (
        x if what == "routed" else wait(x, what, index)
    )


def reduce_shared_twice(llm: Any) -> None:
    """The shared experts sum their outputs themselves too."""
    from vllm.model_executor.layers.linear import RowParallelLinear

    for schedule in engine.schedules_of(llm):
        for part in schedule.shared.modules() if schedule.shared is not None else ():
            if isinstance(part, RowParallelLinear):
                part.reduce_results = True


def leave_dense_stock(llm: Any) -> None:
    """A selected dense layer is the stock layer."""
    from vllm.model_executor.layers.linear import RowParallelLinear

    for schedule in engine.schedules_of(llm):
        if schedule.dense:
            schedule.layer.forward = type(schedule.layer).forward.__get__(
                schedule.layer
            )
            for part in schedule.layer.modules():
                if isinstance(part, RowParallelLinear):
                    part.reduce_results = True


MUTANTS = {
    function.__name__: function
    for function in (
        wait_early, wait_late, forget_all_reduce, reduce_shared_twice, leave_dense_stock,
    )
}  # fmt: skip


def run(case: str, models: Path) -> dict[str, Any]:
    """Return what a case gave: prompts with equal ids, largest difference, order of events."""
    checkpoint, layout, *mutants = case.split(":")
    options = dict(LAYOUTS[layout])
    settings = {"fcsd": {"comm": options.pop("comm")}}
    folder = models / checkpoint
    llm = engine.start_engine(
        folder,
        distributed_executor_backend="external_launcher",
        additional_config=settings,
        seed=0,
        **{"tensor_parallel_size": int(os.environ["WORLD_SIZE"]), **options},
    )
    try:
        for mutant in mutants:
            MUTANTS[mutant](llm)
        recorder = engine.record(llm)
        # vLLM's stages under torchrun give none for prompts: the first stage looks for
        # logits, too.
        outputs = engine.generate(
            llm, folder, prompt_logprobs=None if layout == "pp" else 5
        )
        equal, worst = engine.compare(outputs, folder)
        original, _ = engine.compare(
            outputs, folder.with_name(f"{checkpoint.partition('-')[0]}-original")
        )
        recorder.forget()
        return {
            "case": case, "equal": equal, "worst": worst, "original": original, "events": recorder.events,
        }  # fmt: skip
    finally:
        engine.stop_engine(llm)


def name_shared_memory() -> None:
    """Name the memory that ranks share after their launch: to vLLM all are one, also
    those that were killed.
    """
    from vllm.distributed.device_communicators.cpu_communicator import (
        _CPUSHMDistributed as SharedMemory,
    )

    stock = SharedMemory.make_group_name
    SharedMemory.make_group_name = staticmethod(
        lambda communicator: f"{stock(communicator)}-{os.getppid()}"
    )


def main(
    run: Callable[[str, Path], dict[str, Any]], models: str, results: str, *cases: str
) -> None:
    """Run cases one after another; one that fails says why and ends the launch, in
    which the other rank would wait.
    """
    name_shared_memory()
    engine.stand_in_for_torchvision()
    engine.inspect_here(*{case.partition("-")[0] for case in cases})
    with open(f"{results}.{os.environ['RANK']}", "w") as file:
        for case in cases:
            try:
                result = run(case, Path(models))
            except Exception as error:
                traceback.print_exc()
                result = {"case": case, "error": f"{type(error).__name__}: {error}"}
            print(json.dumps(result), file=file, flush=True)
            if "error" in result:
                os._exit(1)
    # engines that are kept leave it
    for shared in Path("/dev/shm").glob(f"*-cpushm-{os.getppid()}_*"):
        shared.unlink(missing_ok=True)
    os._exit(0)  # and would take minutes to be taken apart one by one


if __name__ == "__main__":
    main(run, *sys.argv[1:])
