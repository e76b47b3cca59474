"""Restore the state that an evaluation in the middle of a training run must not change."""

import contextlib
import copy
import logging
import random
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@contextlib.contextmanager
def preserved(model: "PreTrainedModel", tokenizer: Any = None) -> Iterator[None]:
    """Restore, at the end of the block, every module's `.training`, `use_cache`, the
    generation settings, the tokenizer's padding and the random generators of Python,
    NumPy and torch (CPU, and the CUDA devices that the model is on).
    """
    import numpy
    import torch

    # Of every module: frozen ones may be in evaluation mode while the model trains.
    training = {module: module.training for module in model.modules()}
    config = model.config
    use_cache = getattr(config, "use_cache", None)
    generation = copy.deepcopy(model.generation_config)
    tokenizer_settings = {
        name: getattr(tokenizer, name)
        for name in ("padding_side", "truncation_side", "pad_token")
        if tokenizer
    }
    python, array = random.getstate(), numpy.random.get_state()
    # Afterwards the training must draw the same random numbers as without the
    # evaluation.
    with torch.random.fork_rng(devices=_devices(model)):
        try:
            yield
        finally:
            random.setstate(python)
            numpy.random.set_state(array)
            for module, was_training in training.items():
                module.training = was_training
            if use_cache is not None:
                config.use_cache = use_cache
            model.generation_config = generation
            for name, value in tokenizer_settings.items():
                setattr(tokenizer, name, value)


def _devices(model: "PreTrainedModel") -> list[int]:
    """Return the CUDA devices on which the model computes, and no others.

    Reading a device's generator costs a context of 0.5 GB there; with all devices,
    every rank would have one on each.
    """
    import torch

    if not torch.cuda.is_available():
        return []
    devices = {
        weight.device.index
        for weight in model.parameters()
        if weight.device.type == "cuda"
    }
    return sorted(devices | {torch.cuda.current_device()})


@contextlib.contextmanager
def _only_errors_of(library: str) -> Iterator[None]:
    logger = logging.getLogger(library)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence the notices of lm-eval and the progress bars of datasets."""
    import datasets

    bars = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        with _only_errors_of("lm_eval"):
            yield
    finally:
        if bars:
            datasets.enable_progress_bars()


def without_advice() -> contextlib.AbstractContextManager[None]:
    """Silence transformers' advice on settings, which is for those who run the model."""
    return _only_errors_of("transformers")
