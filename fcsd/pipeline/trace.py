"""Profile one optimiser step of the regular and of the rewired model: traces for
Perfetto, a figure, the time of a step, and the share of communication that was hidden.

A step has the micro-batches of the recipe's batch, clipping and AdamW. A few more
micro-batches of the rewired model have exchanges that block; `fcsd plan --measured`
reads their times. A recipe that only pre-trains has no weights yet: its model gets
random ones.

Not covered: the teacher and the loss of a distillation; the steps train on random
tokens.
"""

import json
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import Trainer, TrainingArguments, set_seed

from fcsd.base.errors import UserError
from fcsd.base.memory import free_memory
from fcsd.base.strict import refuse
from fcsd.base.writing import check_folder_place, make_folder, new_folder
from fcsd.model.connectivity import Connectivity
from fcsd.model.connectivity.spec import ConnectivityConfig
from fcsd.model.dtypes import dtype_of, to_dtype
from fcsd.model.families import family_of
from fcsd.model.load import ModelFolder
from fcsd.parallel.engine import checkpoints_activations, precision_rules
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
from fcsd.pipeline.checks import settle_overlap
from fcsd.pipeline.context import Run
from fcsd.pipeline.pretrain import new_model
from fcsd.planning.cost.measured import ExchangeTime, Times, write_times
from fcsd.report.study_plots import plot_timelines
from fcsd.training.config import TrainConfig, micro_batches

WARM_UP_STEPS = 2
TIMED_STEPS = 5


@dataclass(frozen=True)
class Traced:
    """The measurements of one model: the seconds of an optimiser step without the
    profiler, and those of its exchanges (`fcsd.parallel.overlap.measure.from_trace`).
    """

    step_s: float
    exchanges: dict[str, Measured]


@dataclass(frozen=True)
class _Training:
    """The training whose step is traced."""

    connectivity: ConnectivityConfig
    train: TrainConfig
    max_length: int


def trace(run: Run, folder: Path) -> dict[str, Traced]:
    """Write `regular.json`, `farskip.json` (of the first rank), `overlap.png` and
    `times.json` to a folder.

    All ranks call this. times.json is written if the launch overlaps. Returns: by model;
    empty on other ranks.

    Raises:
        UserError: the launch does not shard the experts, the folder holds something
            else, the batch is no whole number of micro-batches, or `settle_overlap`
            refuses the run.
    """
    launch = run.launch
    launch.ranks.from_first(lambda: check_folder_place(folder, "regular.json", "trace"))
    if not launch.engine.spreads_experts:
        raise UserError(
            "trace: needs --expert-parallel N, 2 or more; without it there is nothing to trace"
        )
    settle_overlap(run)
    with _training(run, folder) as (original, training):
        traced, timelines = {}, {}
        # One model after the other: a device may not hold both.
        for name, connectivity in (
            ("regular", None),
            ("farskip", training.connectivity.spec),
        ):
            path = folder / f"{name}.json"
            model = load_for_launch(
                original, launch, connectivity, bf16=training.train.bf16
            )
            step_s = _trace_model(model, run, training, path)
            del model
            free_memory()
            # The trace is read only after the model has been freed.
            if launch.first:
                traced[name] = Traced(step_s, from_trace(path))
                timelines[name] = timeline(path)
    if launch.first:
        plot_timelines(timelines, folder / "overlap.png")
        table = {
            name: {"step_s": model.step_s}
            | {key: vars(value) for key, value in model.exchanges.items()}
            for name, model in traced.items()
        }
        (folder / "overlap.json").write_text(
            json.dumps(table, indent=1) + "\n", encoding="utf-8"
        )
    launch.wait()
    return traced


@contextmanager
def _training(run: Run, folder: Path) -> Iterator[tuple[ModelFolder, _Training]]:
    """Check the training of a recipe, make the folder of the traces, and yield the
    model and the training. The random weights of a model that has none yet are there
    for the block.
    """
    recipe, launch = run.recipe, run.launch
    section = recipe.pretrain if recipe.only_pretrains else None
    source, where = (recipe, "") if section is None else (section, "pretrain.")
    training = _Training(source.connectivity, source.train, source.data.max_length)
    refuse(*precision_rules(training.train, launch.engine))
    micro_batches(
        training.train,
        training.max_length,
        launch.ranks.size,
        f"{where}train.batch_size_tokens",
    )
    make_folder(folder)
    if section is None:
        yield run.original, training
        return
    weights = folder / "weights"
    try:
        if launch.first:
            set_seed(recipe.seed)
            config = section.config | {"dtype": "bfloat16"}
            with new_folder(weights) as new:
                new_model(config, Connectivity(layers="none")).save_pretrained(new)
        launch.wait()
        settings = recipe.model.model_copy(update={"path": str(weights)})
        yield ModelFolder(settings, weights), training
    finally:
        if launch.first:
            shutil.rmtree(weights, ignore_errors=True)


def _trace_model(model: Any, run: Run, training: _Training, path: Path) -> float:
    """Time and record steps of a model; return the median seconds of a step. Of a
    rewired model, the times of exchanges that block are written beside the trace.
    """
    first, train = run.launch.first, training.train
    to_dtype(model, dtype_of(train.dtype))
    # As in training, since recomputation changes what exchanges can hide behind.
    if checkpoints_activations(train.gradient_checkpointing, model):
        model.activation_checkpointing_enable({"use_reentrant": False})
    model.train()
    step_s = _profile(model, run, training, path if first else None)
    if next(runtimes(model), None) is not None:
        times = _times(model, run, training)
        if first:
            write_times(path.parent / "times.json", times)
    return step_s


def _profile(model: Any, run: Run, training: _Training, path: Path | None) -> float:
    """Return the median seconds of a step after some to warm up, and record one more in
    a trace; ranks other than the first run it unrecorded.
    """
    launch = run.launch
    step, seconds = _step(model, run, training), []
    for _ in range(WARM_UP_STEPS + TIMED_STEPS):
        launch.wait()
        began = _clock(launch.device)
        step()
        seconds.append(_clock(launch.device) - began)
    activities = [
        ProfilerActivity.CPU,
        *([ProfilerActivity.CUDA] if launch.device.type == "cuda" else []),
    ]
    profiler = profile(activities=activities)
    launch.wait()
    with profiler if path is not None else nullcontext():
        step()
        _clock(launch.device)
    if path is not None:
        profiler.export_chrome_trace(str(path))
    return statistics.median(seconds[WARM_UP_STEPS:])


def _clock(device: torch.device) -> float:
    """Return the time when the device is done: of its work, not of the launch of it."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def _step(model: Any, run: Run, training: _Training) -> Callable[[], None]:
    """Return an optimiser step on random tokens: the Trainer's clipping and AdamW, which
    know weights on several meshes.
    """
    train = training.train
    _, number = micro_batches(train, training.max_length, run.launch.ranks.size)
    micro_batch = _micro_batch(model, run, training, share=1 / number)
    names = (
        "learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm",
    )  # fmt: skip
    arguments = TrainingArguments(
        use_cpu=run.launch.device.type == "cpu",
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        **{name: getattr(train, name) for name in names},
    )
    trainer = Trainer(model, arguments)
    optimizer = trainer.create_optimizer()

    def step() -> None:
        for _ in range(number):
            micro_batch()
        trainer._clip_grad_norm(model)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _micro_batch(
    model: Any, run: Run, training: _Training, share: float = 1.0
) -> Callable[[], None]:
    """Return the forward and backward pass of a micro-batch of random tokens, whose loss
    is this share of the step's.
    """
    rows, _ = micro_batches(training.train, training.max_length, run.launch.ranks.size)
    generator = torch.Generator().manual_seed(run.recipe.seed + run.launch.ranks.rank)
    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.randint(vocabulary, (rows, training.max_length), generator=generator)
    ids = ids.to(run.launch.device)
    return lambda: (share * model(ids, labels=ids, use_cache=False).loss).backward()


def _times(model: Any, run: Run, training: _Training) -> Times:
    """Run micro-batches whose exchanges block; return the times of exchanges and
    computation.
    """
    launch = run.launch

    def clock() -> float:
        return _clock(launch.device)

    micro_batch = _micro_batch(model, run, training)
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
        launch.wait()
        began = clock()
        micro_batch()
        seconds.append(clock() - began)
        exchanges.append(
            exchange_times(record for event, record in records if event == "start")
        )
        model.zero_grad(set_to_none=True)
    rows, _ = micro_batches(training.train, training.max_length, launch.ranks.size)
    return Times(
        model_type=family_of(model.config).model_type,
        num_layers=model.config.get_text_config().num_hidden_layers,
        connectivity=training.connectivity,
        ranks=ep_layers[0].ep_mesh.size(),
        batch=rows,
        length=training.max_length,
        step_s=statistics.median(seconds[WARM_UP_STEPS:]),
        exchanges=[
            ExchangeTime(**exchange_time)
            for exchange_time in median_times(exchanges[WARM_UP_STEPS:])
        ],
    )
