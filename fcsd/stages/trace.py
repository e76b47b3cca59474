"""One step of the regular and of the rewired model under the profiler: traces for Perfetto, a figure, what was hidden.

Not covered: the teacher, the optimiser and the loss of a distillation; random tokens are trained on.
"""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from fcsd.distributed.engine import checkpoints_activations, distributed_config
from fcsd.errors import UserError
from fcsd.models.load import dtype_of, free_memory, load_checkpoint, to_dtype
from fcsd.overlap.measure import Measured, from_trace, timeline
from fcsd.stages.checks import check_overlap
from fcsd.stages.context import Run

WARM_UP_STEPS = 2


def trace(run: Run, folder: Path) -> dict[str, dict[str, Measured]]:
    """Leave `regular.json`, `farskip.json` (of the first rank) and `overlap.png` in a folder; all ranks call this.

    Returns:
        Of both models, what `fcsd.overlap.measure.from_trace` says of the step; empty on other ranks.

    Raises:
        UserError: the launch spreads no experts; what `check_overlap` refuses.
    """
    launch, recipe = run.launch, run.recipe
    if launch.engine.name != "ep":
        raise UserError("trace: there is nothing to trace without --expert-parallel N; add it")
    check_overlap(run)
    folder.mkdir(parents=True, exist_ok=True)
    found, timelines = {}, {}
    for name, connectivity in (("regular", None), ("farskip", recipe.connectivity.spec())):
        model = load_checkpoint(
            run.original,
            connectivity,
            distributed_config=distributed_config(launch.engine, launch.ranks.size, bf16=recipe.train.bf16),
        )
        to_dtype(model, dtype_of(recipe.train.dtype))
        if checkpoints_activations(recipe.train, model):
            model.activation_checkpointing_enable({"use_reentrant": False})
        path = folder / f"{name}.json"
        _profile(model, run, path if launch.first else None)
        del model
        free_memory()
        if launch.first:
            found[name] = from_trace(path)
            timelines[name] = timeline(path)
    if launch.first:
        from fcsd.report.plots import plot_timelines

        plot_timelines(timelines, folder / "overlap.png")
        table = {name: {key: vars(one) for key, one in each.items()} for name, each in found.items()}
        (folder / "overlap.json").write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    launch.wait()
    return found


def _profile(model: Any, run: Run, path: Path | None) -> None:
    """Record the last of a few steps; other ranks than the first only take them."""
    recipe, device = run.recipe, run.launch.device
    generator = torch.Generator().manual_seed(recipe.seed + run.launch.ranks.rank)
    shape = (recipe.train.per_device_train_batch_size, recipe.data.max_length)
    ids = torch.randint(model.config.get_text_config().vocab_size, shape, generator=generator).to(device)
    model.train()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    for number in range(WARM_UP_STEPS + 1):
        profiler = profile(activities=activities)
        recorded = number == WARM_UP_STEPS and path is not None
        run.launch.wait()
        with profiler if recorded else nullcontext():
            model(ids, labels=ids, use_cache=False).loss.backward()
            if device.type == "cuda":
                torch.cuda.synchronize()
        model.zero_grad(set_to_none=True)
        if recorded:
            profiler.export_chrome_trace(str(path))
