"""Check the models of a distillation before one is loaded: their tokenizers are the same,
and the teacher is not what the student already is.

A recipe's stages and `FCSDTrainer` call the same functions.
"""

import contextlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from transformers import PreTrainedTokenizerBase

from fcsd.base.errors import UserError
from fcsd.model.connectivity.checkpoint import Checkpoint, has_tokenizer, read_config
from fcsd.model.connectivity.spec import Connectivity, changed_by, field_text
from fcsd.model.families import moe_mask
from fcsd.model.load import ModelFolder, load_tokenizer


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
    name = str(getattr(getattr(model, "config", None), "_name_or_path", "") or "")
    folder = Path(name)
    if name and not folder.is_dir():
        # A name that cannot be one of the Hub raises.
        cached: Any = None
        with contextlib.suppress(HFValidationError):
            cached = try_to_load_from_cache(name, "tokenizer_config.json")
        folder = Path(cached).parent if isinstance(cached, str) else Path()
    if not name or folder == Path() or not has_tokenizer(folder):
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
    config, _, of_teacher = read_config(teacher.folder, any_family=True)
    if of_teacher is None:
        return
    _, family, of_student = read_config(student.folder)
    connectivity = of_student if connectivity is None else connectivity
    # Hashing the weights takes time, so it comes last.
    if (
        same_weights
        and connectivity is not None
        and family is not None
        and teacher.weights == student.weights
    ):
        mask = moe_mask(student.load_config(), family)
        refuse_copy_of_student(of_teacher.field(mask), connectivity.field(mask), name)
    tell_of_untrained(config, name, teacher.folder)


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
