"""Profile one step of the regular and of the rewired model: traces for Perfetto, a
figure, and the share of communication that was hidden.

A few more steps of the rewired model have exchanges that block; `fcsd plan --measured`
reads their times.

Not covered: the teacher, the optimiser and the loss of a distillation; the steps train
on random tokens.
"""

import json
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from fcsd.base.errors import UserError
from fcsd.base.files import check_folder_place, make_folder
from fcsd.base.memory import free_memory
from fcsd.model.dtypes import dtype_of, to_dtype
from fcsd.model.families import family_of
from fcsd.parallel.engine import checkpoints_activations
from fcsd.parallel.overlap import attach, detach
from fcsd.parallel.overlap.exchange import Record
from fcsd.parallel.overlap.layer import runtimes
from fcsd.parallel.overlap.measure import (
    Measured,
    exchange_times,
    from_trace,
    median_times,
    timeline,
)
from fcsd.parallel.place import load_for_launch
from fcsd.pipeline.checks import check_overlap
from fcsd.pipeline.context import Run
from fcsd.planning.cost.measured import ExchangeTime, Times, write_times
from fcsd.report.study_plots import plot_timelines

WARM_UP_STEPS = 2
TIMED_STEPS = 5


def trace(run: Run, folder: Path) -> dict[str, dict[str, Measured]]:
    """Write `regular.json`, `farskip.json` (of the first rank), `overlap.png` and
    `times.json` to a folder.

    All ranks call this. times.json is written if the launch overlaps. Returns: for both
    models, the result of `fcsd.parallel.overlap.measure.from_trace`; empty on other
    ranks.

    Raises:
        UserError: the launch does not shard the experts, the folder holds something
            else, or `check_overlap` refuses the run.
    """
    launch, recipe = run.launch, run.recipe
    launch.ranks.from_first(lambda: check_folder_place(folder, "regular.json", "trace"))
    if not launch.engine.spreads_experts:
        raise UserError(
            "trace: needs --expert-parallel N, 2 or more; without it there is nothing to trace"
        )
    check_overlap(run)
    make_folder(folder)
    measured, timelines = {}, {}
    # One model after the other: a device may not hold both.
    for name, connectivity in (
        ("regular", None),
        ("farskip", recipe.connectivity.spec()),
    ):
        model = load_for_launch(
            run.original, launch, connectivity, bf16=recipe.train.bf16
        )
        to_dtype(model, dtype_of(recipe.train.dtype))
        # As in training, since recomputation changes what exchanges can hide behind.
        if checkpoints_activations(recipe.train.gradient_checkpointing, model):
            model.activation_checkpointing_enable({"use_reentrant": False})
        path = folder / f"{name}.json"
        _profile(model, run, path if launch.first else None)
        times = _times(model, run) if next(runtimes(model), None) is not None else None
        if times is not None and launch.first:
            write_times(folder / "times.json", times)
        del model
        free_memory()
        # The trace is read only after the model has been freed.
        if launch.first:
            measured[name] = from_trace(path)
            timelines[name] = timeline(path)
    if launch.first:
        plot_timelines(timelines, folder / "overlap.png")
        table = {
            name: {key: vars(value) for key, value in directions.items()}
            for name, directions in measured.items()
        }
        (folder / "overlap.json").write_text(
            json.dumps(table, indent=1) + "\n", encoding="utf-8"
        )
    launch.wait()
    return measured


def _profile(model: Any, run: Run, path: Path | None) -> None:
    """Record the last of a few steps; ranks other than the first run them unrecorded."""
    device, step = run.launch.device, _step(model, run)
    activities = [
        ProfilerActivity.CPU,
        *([ProfilerActivity.CUDA] if device.type == "cuda" else []),
    ]
    for number in range(WARM_UP_STEPS + 1):
        profiler = profile(activities=activities)
        recorded = number == WARM_UP_STEPS and path is not None
        run.launch.wait()
        # The steps before it warm up allocator and kernels, and are not recorded.
        with profiler if recorded else nullcontext():
            step()
            if device.type == "cuda":
                torch.cuda.synchronize()
        model.zero_grad(set_to_none=True)
        if recorded:
            profiler.export_chrome_trace(str(path))


def _step(model: Any, run: Run) -> Callable[[], None]:
    """Return a training step on random tokens."""
    recipe = run.recipe
    generator = torch.Generator().manual_seed(recipe.seed + run.launch.ranks.rank)
    shape = (recipe.train.per_device_train_batch_size, recipe.data.max_length)
    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.randint(vocabulary, shape, generator=generator).to(run.launch.device)
    model.train()
    return lambda: model(ids, labels=ids, use_cache=False).loss.backward()


def _times(model: Any, run: Run) -> Times:
    """Run steps whose exchanges block; return the times of exchanges and computation."""

    def clock() -> float:
        if run.launch.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    step, recipe = _step(model, run), run.recipe
    # The same layers, with exchanges that block and are timed.
    detach(model)
    attach(model, "blocking")
    records: list[tuple[str, Record]] = []
    ep_layers = [runtime.ep for runtime in runtimes(model) if runtime.ep is not None]
    # A clock that waits for the device gives the times of its work, not of its launch.
    for ep_layer in ep_layers:
        ep_layer.port.records, ep_layer.port.clock = records, clock
    exchanges, seconds = [], []
    for _ in range(WARM_UP_STEPS + TIMED_STEPS):
        # Only the records of the current step are kept.
        records.clear()
        run.launch.wait()
        began = clock()
        step()
        seconds.append(clock() - began)
        exchanges.append(
            exchange_times(record for event, record in records if event == "start")
        )
        model.zero_grad(set_to_none=True)
    return Times(
        model_type=family_of(model.config).model_type,
        num_layers=model.config.get_text_config().num_hidden_layers,
        connectivity=recipe.connectivity,
        ranks=ep_layers[0].ep_mesh.size(),
        batch=recipe.train.per_device_train_batch_size,
        length=recipe.data.max_length,
        step_s=statistics.median(seconds[WARM_UP_STEPS:]),
        exchanges=[
            ExchangeTime(**exchange_time)
            for exchange_time in median_times(exchanges[WARM_UP_STEPS:])
        ],
    )
