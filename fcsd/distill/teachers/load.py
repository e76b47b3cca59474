"""The teacher that a recipe names: loaded, left to the student's own weights, or read from a cache.

Not covered: how a teacher's weights are spread over ranks (`fcsd.distributed.engine`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fcsd.config.model import ModelConfig
from fcsd.config.recipe import Recipe
from fcsd.connectivity.checkpoint import find_folder, read_config
from fcsd.distill.teachers.base import ModelTeacher, Teacher
from fcsd.distill.teachers.cache import CachedTeacher, HiddenCache
from fcsd.distill.teachers.cache_fill import fill_cache, keyed, spot_check, verify_cache
from fcsd.distill.teachers.unloaded import identity, read_head, unloaded
from fcsd.distributed.engine import distributed_config, holds_weights, launched_engine
from fcsd.distributed.launch import processes
from fcsd.distributed.ranks import launched_ranks
from fcsd.distributed.shard import spread_teacher
from fcsd.errors import UserError
from fcsd.models.load import free_memory, load_tokenizer, original_model


def load_teacher(
    recipe: Recipe, rows: Any, tokenizer: PreTrainedTokenizerBase, weights: str, *, fill: bool = False
) -> PreTrainedModel | Teacher | None:
    """The teacher of a recipe's distillation; None without one, and where the student is made to be it.

    rows: the training rows; weights: fingerprint of the teacher's checkpoint; fill: compute what a cache lacks.

    Raises:
        UserError: a checkpoint with another tokenizer, or that is the student already; a cache that does not fit.
    """
    plan = recipe.teacher
    if plan is None:
        return None
    _check_is_original(recipe)
    if plan.backend == "adapter_off":
        return None
    _check_tokenizer(recipe, tokenizer)
    if plan.backend == "sharded":
        path, model = recipe.teacher_model
        return _loaded(model, path)
    assert plan.cache is not None
    if fill:
        fill_teacher_cache(recipe, rows, tokenizer, weights, Path(plan.cache))
    return _cached_teacher(recipe, rows, weights)


def _loaded(model: ModelConfig, path: str) -> PreTrainedModel:
    """The teacher's model as this rank of the launch begins with it."""
    engine = launched_engine()
    return original_model(
        model, path, weights=holds_weights(engine), distributed_config=distributed_config(engine)
    )


def _cached_teacher(recipe: Recipe, rows: Any, weights: str) -> CachedTeacher:
    plan = recipe.teacher
    assert plan is not None and plan.cache is not None
    path, model = recipe.teacher_model
    facts = unloaded(path, model)
    cache = HiddenCache(Path(plan.cache), identity(facts, weights))
    in_memory = hasattr(rows, "__len__")
    if in_memory:
        cache.require([key for key, _ in keyed(rows[i] for i in range(len(rows)))])
    if plan.spot_check_rows:
        some = _some(rows, plan.spot_check_rows, recipe.seed)
        if launched_engine().shards:  # all ranks are needed for a pass, and see the same
            spot_check(cache, _model_teacher(recipe), some)
        else:
            launched_ranks(in_step=launched_engine().shards).from_first(
                lambda: spot_check(cache, _model_teacher(recipe), some)
            )
        free_memory()
    return CachedTeacher(cache, read_head(facts).to(processes().device))


def _some(rows: Any, number: int, seed: int) -> list[Any]:
    if not hasattr(rows, "__len__"):
        return list(itertools.islice(rows, number))
    chosen = np.random.default_rng(seed).choice(len(rows), min(number, len(rows)), replace=False)
    return [rows[int(i)] for i in chosen]


def _model_teacher(recipe: Recipe) -> Teacher:
    """The teacher, loaded: whole, or spread over the ranks as the launch says."""
    path, model = recipe.teacher_model
    engine = launched_engine()
    try:
        loaded = _loaded(model, path)
        if engine.shards:
            return ModelTeacher(loaded, spread_teacher(loaded, engine))
        return ModelTeacher(torch.nn.Module.to(loaded, processes().device))
    except torch.OutOfMemoryError:
        raise UserError(
            f"the teacher {path} does not fit on one device; launch with weights that are spread over several"
            " (configs/fsdp2_8.yaml), or, to train on a cache without loading it, set teacher.spot_check_rows: 0"
        ) from None


def fill_teacher_cache(
    recipe: Recipe,
    rows: Any,
    tokenizer: PreTrainedTokenizerBase,
    weights: str,
    folder: Path,
    *,
    verify: bool = False,
) -> None:
    """Run a recipe's teacher over its training rows and keep what it gives in `folder`.

    Of data in memory all rows; of a stream those that the longest training of the recipe reads.
    """
    _check_is_original(recipe)
    _check_tokenizer(recipe, tokenizer)
    facts = unloaded(*recipe.teacher_model)
    if hasattr(rows, "__len__"):
        wanted: Any = (rows[i] for i in range(len(rows)))
    else:
        wanted = itertools.islice(_endless(rows), _rows_of_a_stream(recipe))
    fill_cache(
        folder,
        identity(facts, weights),
        wanted,
        batch_size=recipe.train.per_device_train_batch_size,
        load_teacher=lambda: _model_teacher(recipe),
        in_step=launched_engine().shards,
    )
    free_memory()
    if verify:
        launched_ranks(in_step=launched_engine().shards).from_first(
            lambda: verify_cache(HiddenCache(folder, identity(facts, weights)))
        )


def _endless(rows: Any) -> Iterator[Any]:
    """The rows of a stream in the order in which a training reads them, epoch after epoch."""
    for epoch in itertools.count():
        rows.set_epoch(epoch)
        found = False
        for row in rows:
            found = True
            yield row
        if not found:
            raise UserError("data.train: the stream gives no row")


def _rows_of_a_stream(recipe: Recipe) -> int:
    """Rows that the longest training of a recipe, its sweep included, reads."""
    tokens: Sequence[int] = [recipe.train.batch_size_tokens]
    steps = recipe.train.max_steps
    if recipe.sweep is not None:  # the choice among these batch sizes then trains the whole number of steps
        tokens, steps = recipe.sweep.batch_size_tokens, max(steps, recipe.sweep.steps)
    return steps * max(tokens) // recipe.data.max_length


def _check_is_original(recipe: Recipe) -> None:
    """Raises: UserError when the student would be compared with itself: its checkpoint is rewired already."""
    assert recipe.teacher is not None
    if recipe.teacher.path is None:
        folder = find_folder(recipe.model_path, recipe.model.revision)
        if read_config(folder, any_family=True)[2] is not None:
            raise UserError(
                f"{folder}: is a FarSkip checkpoint, and as its own teacher it would teach nothing; set teacher.path to"
                " the original (backend sharded or cache), or model.path to the original"
            )


def _check_tokenizer(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises: UserError when the teacher's tokenizer gives a token another id than the student's."""
    assert recipe.teacher is not None
    if recipe.teacher.path is None:
        return
    theirs = load_tokenizer(*recipe.teacher_model).get_vocab()
    ours = tokenizer.get_vocab()
    if ours == theirs:
        return
    token = min(
        (t for t in {*ours, *theirs} if ours.get(t) != theirs.get(t)), key=lambda t: ours.get(t, 1 << 40)
    )
    differ = sum(ours.get(t) != theirs.get(t) for t in {*ours, *theirs})
    raise UserError(
        f"teacher.path {recipe.teacher.path}: its tokenizer is not the student's: {differ} tokens have other ids or are"
        f" missing, the first is {token!r} ({ours.get(token, 'none')} in the student's, {theirs.get(token, 'none')} in"
        " the teacher's); distributions over different vocabularies cannot be compared, use a teacher with the same"
        " tokenizer"
    )
