"""Load the teacher of a recipe: a model, the student's own weights, or a cache.

A cached teacher is not loaded: its identity and its head are read from the checkpoint's
files alone. The models of a distillation are checked before one is loaded: their
tokenizers are the same, and the teacher is not what the student already is; a recipe's
stages and `FCSDTrainer` call the same functions.
"""

import contextlib
import hashlib
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fcsd.base.errors import UserError
from fcsd.base.files import NOT_COMPUTED
from fcsd.base.memory import free_memory
from fcsd.model.connectivity.checkpoint import (
    Checkpoint,
    has_tokenizer,
    read_config,
    source_folder,
)
from fcsd.model.connectivity.spec import Connectivity, changed_by, field_text
from fcsd.model.dtypes import dtype_of
from fcsd.model.families import moe_mask
from fcsd.model.families.structure import head_scaling, output_head
from fcsd.model.load import ModelFolder, load_checkpoint, load_tokenizer
from fcsd.model.saved_dtypes import declared_dtype
from fcsd.parallel.launch import Launch
from fcsd.parallel.place import load_for_launch
from fcsd.training.prepare import place_teacher
from fcsd.training.teachers.base import Teacher
from fcsd.training.teachers.config import CachedTeacherConfig, TeacherConfig

if TYPE_CHECKING:
    from fcsd.training.teachers.cache import CachedTeacher

# Fields of a configuration that change no hidden state; `identity` has the dtype
# itself.
_NOT_COMPUTED = NOT_COMPUTED | {
    "dtype", "torch_dtype", "model_type", "bos_token_id", "eos_token_id", "pad_token_id",
}  # fmt: skip


@dataclass(frozen=True)
class Unloaded:
    """A checkpoint and its model on the meta device.

    loaded_dtype: in which the model would be loaded. dtype: in which it would compute.
    """

    checkpoint: Checkpoint
    model: Any
    loaded_dtype: torch.dtype
    dtype: torch.dtype


def unloaded(source: ModelFolder, dtype: torch.dtype | None = None) -> Unloaded:
    """Build the model of a checkpoint on the meta device, as a recipe's `model` section
    would load it; dtype: in which it computes then, None: in that in which it is loaded.
    """
    checkpoint = source.checkpoint
    if source.config.dtype == "auto":
        loaded_dtype = declared_dtype(checkpoint) or torch.float32
    else:
        loaded_dtype = dtype_of(source.config.dtype)
    # Only shapes, names and the config are read.
    model = load_checkpoint(source, weights=False)
    return Unloaded(checkpoint, model, loaded_dtype, dtype or loaded_dtype)


def identity(teacher: Unloaded, weights: str) -> dict[str, Any]:
    """Return everything that a teacher's hidden states depend on, except the tokens.

    weights: fingerprint of the checkpoint's files.
    """
    config = teacher.model.config
    text = config.get_text_config()
    facts = {
        "weights": weights,
        "model_type": config.model_type,
        "config": _config_hash(config),
        "connectivity": getattr(config, "farskip", None),
        "dtype": str(teacher.loaded_dtype).removeprefix("torch."),
        "attn_implementation": text._attn_implementation,
        "experts_implementation": getattr(text, "_experts_implementation", None),
        "hidden_size": output_head(teacher.model).in_features,
    }
    if teacher.loaded_dtype != teacher.dtype:
        from fcsd.training.teachers.cache import COMPUTING_DTYPE

        facts[COMPUTING_DTYPE] = str(teacher.dtype).removeprefix("torch.")
    return facts


def _config_hash(config: Any) -> str:
    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {
                str(key): plain(item)
                for key, item in value.items()
                if key not in _NOT_COMPUTED
            }
        # A tuple comes back from a file as a list.
        if isinstance(value, list | tuple):
            return [plain(item) for item in value]
        return value

    text = json.dumps(plain(config.to_dict()), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_head(teacher: Unloaded) -> nn.Linear:
    """Read the teacher's head from the files to the CPU, with `logit_scale` and
    `softcap` for the loss head; a tied head is read from the embeddings.
    """
    head = output_head(teacher.model)
    loaded: Any = nn.Linear(
        head.in_features, head.out_features, bias=head.bias is not None, device="meta"
    )
    for name, parameter in head.named_parameters():
        value = _tensor(teacher, parameter)
        value = value.to(teacher.loaded_dtype).to(teacher.dtype)
        setattr(loaded, name, nn.Parameter(value, requires_grad=False))
    loaded.logit_scale, loaded.softcap = head_scaling(teacher.model.config)
    return loaded


def _tensor(teacher: Unloaded, parameter: nn.Parameter) -> torch.Tensor:
    """Read a parameter of the model from the files."""
    from transformers.core_model_loading import revert_weight_conversion

    # The files may have the tensor under the name of the tied embedding, and under the
    # names from before transformers' weight conversion.
    checkpoint, state = teacher.checkpoint, teacher.model.state_dict(keep_vars=True)
    names = [name for name, tensor in state.items() if tensor is parameter]
    for name in names:
        in_files = revert_weight_conversion(teacher.model, {name: parameter})
        for candidate in (*in_files, name):
            if checkpoint.shapes.get(candidate) != parameter.shape:
                continue
            for file_name in checkpoint.weight_files:
                with safe_open(checkpoint.folder / file_name, framework="pt") as file:
                    if candidate in file.keys():  # noqa: SIM118
                        return file.get_tensor(candidate)
    raise UserError(f"{checkpoint.folder}: has no tensor '{names[-1]}', the head")


@dataclass(frozen=True)
class TeacherSource:
    """The settings and models that a teacher is loaded from.

    settings: the `teacher` section. model: the teacher's checkpoint. rows: the training
    rows. batch_size: rows in one forward pass. seed: selects the rows that are compared
    with a cache. dtype: in which the model computes for a cache; None: in that in which
    it is loaded.
    """

    settings: TeacherConfig
    model: ModelFolder
    rows: Any
    batch_size: int
    seed: int
    launch: Launch
    dtype: torch.dtype | None = None


def load_teacher(
    source: TeacherSource, *, fill: bool = False
) -> PreTrainedModel | Teacher | None:
    """Load the teacher; None where the student itself serves as it. fill: compute the
    rows that a cache lacks.

    `check_teacher_folder` has checked its checkpoint. Raises UserError: a cache that does
    not fit.
    """
    plan = source.settings
    if plan.backend == "adapter_off":
        return None
    if plan.backend == "sharded":
        return _own_or_other(source)
    if fill:
        fill_teacher_cache(source, Path(plan.cache))
    return _cached_teacher(source, plan)


def _own_or_other(source: TeacherSource) -> PreTrainedModel:
    """Load the model of the `teacher` section, of any family; without a path the
    student's original, whose family can be converted.
    """
    return load_for_launch(
        source.model, source.launch, any_family=source.settings.path is not None
    )


def _cached_teacher(
    source: TeacherSource, settings: CachedTeacherConfig
) -> "CachedTeacher":
    from fcsd.training.teachers.cache import CachedTeacher, HiddenCache
    from fcsd.training.teachers.cache_fill import keyed, spot_check

    rows, launch, num_checked = source.rows, source.launch, settings.spot_check_rows
    facts = unloaded(source.model, source.dtype)
    weights = launch.ranks.from_first(lambda: source.model.weights)
    cache = HiddenCache(Path(settings.cache), identity(facts, weights))
    # Missing rows are refused before the training, not in the step that needs them.
    cache.require([key for key, _ in keyed(rows[i] for i in range(len(rows)))])
    if num_checked:
        checked_rows = _some(rows, num_checked, source.seed)

        def check() -> None:
            spot_check(cache, _model_teacher(source), checked_rows, launch.device)

        # A sharded teacher needs all ranks for a pass, and all get the same result.
        if launch.engine.shards:
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
    """Load the teacher on one device, or sharded over the ranks, as the launch says."""
    try:
        loaded = _own_or_other(source)
        return cast(Teacher, place_teacher(loaded, source.launch, source.dtype))
    except torch.OutOfMemoryError:
        raise UserError(
            f"the teacher {source.model.config.path} does not fit on one device; shard"
            " the weights over several (configs/fsdp2_8.yaml), or set"
            " teacher.spot_check_rows: 0 to train on a cache without loading the"
            " teacher"
        ) from None


def fill_teacher_cache(
    source: TeacherSource, folder: Path, *, verify: bool = False
) -> None:
    """Run the teacher over the training rows and store its hidden states in `folder`."""
    from fcsd.training.teachers.cache import HiddenCache
    from fcsd.training.teachers.cache_fill import fill_cache, verify_cache

    rows = source.rows
    # On one rank, because the fingerprint reads all weights.
    weights = source.launch.ranks.from_first(lambda: source.model.weights)
    teacher_identity = identity(unloaded(source.model, source.dtype), weights)
    fill_cache(
        folder,
        teacher_identity,
        (rows[i] for i in range(len(rows))),
        source.launch,
        batch_size=source.batch_size,
        load_teacher=lambda: _model_teacher(source),
    )
    free_memory()
    if verify:
        source.launch.ranks.from_first(
            lambda: verify_cache(HiddenCache(folder, teacher_identity))
        )


def refuse_other_tokenizer(
    theirs: PreTrainedTokenizerBase,
    ours: PreTrainedTokenizerBase,
    name: str,
    *,
    may_lack: bool = False,
    advice: str = "use a teacher with the same tokenizer",
    whose: str = "the student's",
) -> None:
    """Raise UserError where a token has another id in the tokenizer of `name` than in
    the one that makes the rows.

    may_lack: tokens that only one of them has are no difference. whose: the tokenizer
    that makes the rows is.
    """
    own, other = ours.get_vocab(), theirs.get_vocab()
    tokens = own.keys() & other.keys() if may_lack else own.keys() | other.keys()
    differ = [token for token in tokens if own.get(token) != other.get(token)]
    if not differ:
        return
    # The example in the message: the smallest of the student's ids.
    token = min(differ, key=lambda token: own.get(token, 1 << 40))
    raise UserError(
        f"{name}: its tokenizer is not {whose}: {len(differ)} tokens have other"
        f" ids or are missing, the first is {token!r}"
        f" ({own.get(token, 'none')} in {whose}, {other.get(token, 'none')} in"
        f" {name}'s); fcsd cannot compare distributions over different vocabularies;"
        f" {advice}"
    )


def tokenizer_of_model(model: Any, *, trust_remote_code: bool) -> Any:
    """Return the tokenizer beside the checkpoint that a model in memory was loaded
    from, if it is on this machine and can be read; otherwise None.
    """
    folder = source_folder(model.config)
    if folder is None or not has_tokenizer(folder):
        return None
    with contextlib.suppress(UserError):
        return load_tokenizer(folder, trust_remote_code=trust_remote_code)
    return None


def refuse_copy_of_student(
    teacher: Mapping[str, Any] | None, student: Mapping[str, Any] | None, name: str
) -> None:
    """Raise UserError for a teacher with the student's weights, and with its
    connectivity too, where that is not the original's.

    teacher, student: their fields `farskip`; None for a regular model.
    """
    if teacher and teacher.get("layers") and teacher == student:
        raise UserError(
            f"{name}: has the weights of the student and its connectivity"
            f" ({field_text(dict(teacher))}), so it would teach nothing; give the"
            " original"
        )


def tell_of_untrained(config: Any, name: str, folder: Path | None = None) -> None:
    """Print a line for a rewired teacher of which no training is recorded: it is
    further from the original than a student can learn to be.

    config: an object or the contents of a file.
    """
    values = config if isinstance(config, Mapping) else vars(config)
    if not (values.get("farskip") or {}).get("layers") or changed_by(config):
        return
    from fcsd.training.card.facts import recorded_origin

    origin = recorded_origin(folder) if folder is not None else None
    original = f"its original, {origin[0]}" if origin is not None else "its original"
    print(
        f"{name}: is a FarSkip model of which no training is recorded; if it was not"
        f" trained, give {original}, because the student would learn what the"
        " conversion has lost",
        file=sys.stderr,
    )


def check_teacher_folder(
    teacher: ModelFolder,
    student: ModelFolder,
    connectivity: Connectivity | None,
    name: str,
    *,
    same_weights: bool = True,
) -> None:
    """Check a teacher that is given by its path, on one rank; name: in messages.

    connectivity: what the student is converted to; None: its checkpoint's own.
    same_weights: the student starts from the weights of its checkpoint.
    """
    of_teacher = read_config(teacher.folder, any_family=True)
    if of_teacher.connectivity is None:
        return
    of_student = read_config(student.folder)
    family, connectivity = of_student.family, connectivity or of_student.connectivity
    # Hashing the weights takes time, so it comes last.
    if (
        same_weights
        and connectivity is not None
        and family is not None
        and teacher.weights == student.weights
    ):
        mask = moe_mask(student.load_config(), family)
        teacher_field = of_teacher.connectivity.field(mask)
        refuse_copy_of_student(teacher_field, connectivity.field(mask), name)
    tell_of_untrained(of_teacher.config, name, teacher.folder)


def check_is_original(checkpoint: Checkpoint) -> None:
    """Raise UserError when a student would be compared with itself, because its
    checkpoint is rewired or trained already.
    """
    change = changed_by(checkpoint.config)
    if checkpoint.connectivity is None and change is None:
        return
    if checkpoint.connectivity is not None:
        description = "is a FarSkip checkpoint"
    else:
        description = f"was {change} as a FarSkip checkpoint"
    raise UserError(
        f"{checkpoint.folder}: {description}, so as its own teacher it would teach nothing; set"
        " teacher.path to the original (backend sharded or cache), or model.path to the"
        " original"
    )
