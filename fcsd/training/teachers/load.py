"""The teacher that a recipe names: loaded, left to the student's own weights, or read
from a cache.

A cached teacher is not loaded: what identifies it, and its head, are read from the
checkpoint's files alone.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fcsd.base.errors import UserError
from fcsd.base.fingerprints import NOT_COMPUTED
from fcsd.model.config import CachedTeacherConfig, TeacherConfig
from fcsd.model.connectivity.checkpoint import Checkpoint, read_checkpoint, read_config
from fcsd.model.connectivity.load import config_and_class
from fcsd.model.connectivity.spec import changed_by
from fcsd.model.dtypes import declared_dtype, dtype_of
from fcsd.model.families.structure import head_scaling, output_head
from fcsd.model.load import ModelFolder, free_memory, load_tokenizer
from fcsd.parallel.launch import Launch
from fcsd.parallel.place import load_for_launch
from fcsd.training.prepare import place_teacher
from fcsd.training.teachers.base import Teacher
from fcsd.training.teachers.cache import CachedTeacher, HiddenCache
from fcsd.training.teachers.cache_fill import (
    fill_cache,
    keyed,
    spot_check,
    verify_cache,
)

# Fields of a configuration that change no hidden state; the dtype stands beside them.
_NOT_COMPUTED = NOT_COMPUTED | {
    "dtype", "torch_dtype", "model_type", "bos_token_id", "eos_token_id", "pad_token_id",
}  # fmt: skip


@dataclass(frozen=True)
class Unloaded:
    """A checkpoint, and the model that it would give, without storage. dtype: in which
    the model would be loaded.
    """

    checkpoint: Checkpoint
    model: Any
    dtype: torch.dtype


def unloaded(source: ModelFolder) -> Unloaded:
    """Return the model of a checkpoint as a recipe's `model` section would load it, on
    the meta device.
    """
    model = source.config
    checkpoint = read_checkpoint(source.folder)
    config, cls = config_and_class(checkpoint, None, False)
    dtype = (
        declared_dtype(checkpoint) if model.dtype == "auto" else dtype_of(model.dtype)
    )
    dtype = dtype or torch.float32
    options = model.model_dump(
        include={"attn_implementation", "experts_implementation"}, exclude_none=True
    )
    with torch.device("meta"):
        return Unloaded(
            checkpoint, cls._from_config(config, dtype=dtype, **options), dtype
        )


def identity(teacher: Unloaded, weights: str) -> dict[str, Any]:
    """Return what a teacher's hidden states depend on, besides the tokens. weights:
    fingerprint of the checkpoint's files.
    """
    config = teacher.model.config
    text = config.get_text_config()
    return {
        "weights": weights,
        "model_type": config.model_type,
        "config": _config_hash(config),
        "connectivity": getattr(config, "farskip", None),
        "dtype": str(teacher.dtype).removeprefix("torch."),
        "attn_implementation": text._attn_implementation,
        "experts_implementation": getattr(text, "_experts_implementation", None),
        "hidden_size": output_head(teacher.model).in_features,
    }


def _config_hash(config: Any) -> str:
    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {
                str(key): plain(item)
                for key, item in value.items()
                if key not in _NOT_COMPUTED
            }
        return (
            [plain(item) for item in value]
            if isinstance(value, list | tuple)
            else value
        )

    text = json.dumps(plain(config.to_dict()), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_head(teacher: Unloaded) -> nn.Linear:
    """Return the teacher's head, with `logit_scale` and `softcap` for the loss head, on
    the CPU: two tensors of the files, or the embeddings where they are tied.
    """
    head = output_head(teacher.model)
    prefix = next(
        name for name, module in teacher.model.named_modules() if module is head
    )
    loaded: Any = nn.Linear(
        head.in_features, head.out_features, bias=head.bias is not None, device="meta"
    )
    for name, parameter in head.named_parameters():
        value = _tensor(teacher, f"{prefix}.{name}", tuple(parameter.shape))
        setattr(
            loaded, name, nn.Parameter(value.to(teacher.dtype), requires_grad=False)
        )
    loaded.logit_scale, loaded.softcap = head_scaling(teacher.model.config)
    return loaded


def _tensor(teacher: Unloaded, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    from transformers.core_model_loading import revert_weight_conversion

    tied = getattr(teacher.model, "all_tied_weights_keys", None) or {}
    state = teacher.model.state_dict()
    for one in (
        tied.get(name, name),
        name,
        *(other for other, target in tied.items() if target == name),
    ):
        in_file = list(revert_weight_conversion(teacher.model, {one: state[one]}))
        for candidate in (*in_file, one):
            if teacher.checkpoint.shapes.get(candidate) == shape:
                return _read(teacher.checkpoint, candidate)
    raise UserError(
        f"{teacher.checkpoint.folder}: the head '{name}' is not among its tensors"
    )


def _read(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    for file_name in checkpoint.weight_files:
        with safe_open(checkpoint.folder / file_name, framework="pt") as file:
            if name in file.keys():  # noqa: SIM118
                return file.get_tensor(name)
    raise UserError(f"{checkpoint.folder}: tensor '{name}' is in none of its files")


@dataclass(frozen=True)
class TeacherSource:
    """What a distillation compares its student with.

    settings: the `teacher` section. model: the teacher's checkpoint. tokenizer: the
    student's. rows: what is trained on. batch_size: rows in one forward. seed: chooses
    the rows that are compared with a cache.
    """

    settings: TeacherConfig
    model: ModelFolder
    tokenizer: PreTrainedTokenizerBase
    rows: Any
    batch_size: int
    seed: int
    launch: Launch


def load_teacher(
    source: TeacherSource, *, fill: bool = False
) -> PreTrainedModel | Teacher | None:
    """Load the teacher; None where the student is made to be it. fill: compute what a
    cache lacks.

    Raises UserError: a checkpoint with another tokenizer, or that is the student
    already; a cache that does not fit.
    """
    plan = source.settings
    _check_is_original(source)
    if plan.backend == "adapter_off":
        return None
    _check_tokenizer(source)
    if plan.backend == "sharded":
        return _own_or_other(source)
    if fill:
        fill_teacher_cache(source, Path(plan.cache))
    return _cached_teacher(source, plan)


def _own_or_other(source: TeacherSource) -> PreTrainedModel:
    """Load the model of the `teacher` section; the student's original is of a family
    that can be converted.
    """
    return load_for_launch(
        source.model, source.launch, any_family=source.settings.path is not None
    )


def _cached_teacher(
    source: TeacherSource, settings: CachedTeacherConfig
) -> CachedTeacher:
    rows, launch, num_checked = source.rows, source.launch, settings.spot_check_rows
    facts = unloaded(source.model)
    weights = launch.ranks.from_first(lambda: source.model.weights)
    cache = HiddenCache(Path(settings.cache), identity(facts, weights))
    cache.require([key for key, _ in keyed(rows[i] for i in range(len(rows)))])
    if num_checked:
        some = _some(rows, num_checked, source.seed)

        def check() -> None:
            spot_check(cache, _model_teacher(source), some, launch.device)

        if launch.engine.shards:  # all ranks are needed for a pass, and see the same
            check()
        else:
            launch.ranks.from_first(check)
        free_memory()
    return CachedTeacher(cache, read_head(facts).to(launch.device))


def _some(rows: Any, number: int, seed: int) -> list[Any]:
    chosen = np.random.default_rng(seed).choice(
        len(rows), min(number, len(rows)), replace=False
    )
    return [rows[int(i)] for i in chosen]


def _model_teacher(source: TeacherSource) -> Teacher:
    """Load the teacher whole, or sharded over the ranks as the launch says."""
    try:
        loaded = _own_or_other(source)
        return cast(Teacher, place_teacher(loaded, source.launch))
    except torch.OutOfMemoryError:
        raise UserError(
            f"the teacher {source.model.config.path} does not fit on one device; launch"
            " with weights that are sharded over several (configs/fsdp2_8.yaml), or,"
            " to train on a cache without loading it, set teacher.spot_check_rows: 0"
        ) from None


def fill_teacher_cache(
    source: TeacherSource, folder: Path, *, verify: bool = False
) -> None:
    """Run the teacher over the training rows and keep what it gives in `folder`."""
    _check_is_original(source)
    _check_tokenizer(source)
    rows = source.rows
    weights = source.launch.ranks.from_first(lambda: source.model.weights)
    known = identity(unloaded(source.model), weights)
    fill_cache(
        folder,
        known,
        (rows[i] for i in range(len(rows))),
        source.launch,
        batch_size=source.batch_size,
        load_teacher=lambda: _model_teacher(source),
    )
    free_memory()
    if verify:
        source.launch.ranks.from_first(lambda: verify_cache(HiddenCache(folder, known)))


def _check_is_original(source: TeacherSource) -> None:
    """Raise UserError when the student would be compared with itself: its checkpoint is
    rewired or trained already.
    """
    folder = source.model.folder
    if source.settings.path is not None:
        return
    config, _, connectivity = read_config(folder, any_family=True)
    how = changed_by(config)
    if connectivity is not None or how is not None:
        what = (
            "is a FarSkip checkpoint"
            if connectivity is not None
            else f"was {how} as a FarSkip checkpoint"
        )
        raise UserError(
            f"{folder}: {what}, and as its own teacher it would teach nothing; set"
            " teacher.path to the original (backend sharded or cache), or model.path"
            " to the original"
        )


def _check_tokenizer(source: TeacherSource) -> None:
    """Raise UserError when the teacher's tokenizer gives a token another id than the student's."""
    if source.settings.path is None:
        return
    model = source.model
    theirs = load_tokenizer(
        model.folder, trust_remote_code=model.config.trust_remote_code
    ).get_vocab()
    ours = source.tokenizer.get_vocab()
    differ = [
        token for token in {*ours, *theirs} if ours.get(token) != theirs.get(token)
    ]
    if not differ:
        return
    token = min(differ, key=lambda token: ours.get(token, 1 << 40))
    raise UserError(
        f"teacher.path {source.settings.path}: its tokenizer is not the student's:"
        f" {len(differ)} tokens have other ids or are missing, the first is {token!r}"
        f" ({ours.get(token, 'none')} in the student's, {theirs.get(token, 'none')} in"
        " the teacher's); distributions over different vocabularies cannot be"
        " compared, use a teacher with the same tokenizer"
    )
