"""The models that `FCSDTrainer` is given: a model in memory, or the path of a checkpoint; converted already, or not.

Not covered: models of a recipe (`fcsd.pipeline.distill`, `fcsd.training.teachers.load`).
"""

import copy
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from fcsd.base.errors import UserError
from fcsd.model.connectivity import convert_model, unconvert_model
from fcsd.model.connectivity.checkpoint import read_config
from fcsd.model.connectivity.spec import changed_by, field_text
from fcsd.model.families import family_of, moe_mask
from fcsd.model.load import find_model
from fcsd.model.positions import check_positions
from fcsd.parallel.launch import Launch
from fcsd.parallel.place import load_for_launch
from fcsd.training.fcsd_config import FCSDConfig
from fcsd.training.teachers.load import load_model_teacher


def student_of(model: Any, args: FCSDConfig, launch: Launch) -> PreTrainedModel:
    """Return the model to train, with its connectivity; one in memory is converted in place where that is asked for.

    Raises:
        UserError: it is not converted, and `layers` does not say how; it is converted otherwise than `layers` says;
            what `load_model` and `convert_model` refuse.
    """
    if isinstance(model, str | Path):
        return _loaded_student(str(model), args, launch)
    if not isinstance(model, PreTrainedModel):
        adapted = type(model).__name__.startswith("Peft")
        raise UserError(
            f"model: a {type(model).__name__}; a transformers model or the path of a checkpoint is needed"
            + ("; adapters are a recipe's `lora` section" if adapted else "")
        )
    connectivity = args.connectivity()
    own = getattr(model.config, "farskip", None)
    if own is None:
        if connectivity is None:
            raise _not_converted(type(model).__name__)
        convert_model(model, connectivity)
    elif connectivity is not None:
        wanted = connectivity.field(moe_mask(model.config, family_of(model.config)))
        if wanted != own:
            raise UserError(
                f"{type(model).__name__}: this model is already converted with {field_text(own)}, but"
                f" {field_text(wanted)} is asked for; leave layers out to train it as it is, or convert it first"
            )
    return model


def _loaded_student(path: str, args: FCSDConfig, launch: Launch) -> PreTrainedModel:
    found = find_model(args.model_config(path))
    connectivity = args.connectivity()
    if connectivity is None and read_config(found.folder)[2] is None:
        raise _not_converted(path)
    return load_for_launch(found, launch, connectivity, bf16=args.bf16)


def _not_converted(what: str) -> UserError:
    return UserError(
        f"{what}: is not converted; set layers in FCSDConfig (for example layers='last:90%'), or convert it with"
        " fcsd.convert (layers='none' trains the regular model)"
    )


def check_models(model: Any, teacher: Any, args: FCSDConfig, launch: Launch) -> None:
    """Check, before anything is loaded or tokenized, what models and arguments say; the student may be its own teacher.

    Raises:
        UserError: rows do not fit the positions of a model; a copy of the student would not be the original.
    """
    for each, is_teacher in ((model, False), (teacher, True)):
        if isinstance(each, str | Path):
            source = find_model(args.model_config(str(each), teacher=is_teacher))
            check_positions(source, args.max_length, tell=launch.first)
        elif isinstance(each, PreTrainedModel):
            check_positions(each, args.max_length, tell=launch.first)
    if teacher is None and args.sections().objective.has_teacher:
        _check_own_teacher(model, args)


def _check_own_teacher(model: Any, args: FCSDConfig) -> None:
    name, config = type(model).__name__, getattr(model, "config", {})
    if isinstance(model, str | Path):
        name, config = str(model), read_config(find_model(args.model_config(str(model))).folder)[0]
    if (how := changed_by(config)) is not None:
        raise UserError(
            f"teacher: {name} was {how} already, so that a copy of it is not the original; give the original as"
            " teacher=, a model or its path"
        )


def teacher_of(teacher: Any, student: PreTrainedModel, args: FCSDConfig, launch: Launch) -> Any:
    """Return the model to compare with, or the `Teacher` that was given; of None a regular copy of the student.

    Raises:
        UserError: it is the student itself; what `load_model` refuses.
    """
    if teacher is None:
        original = copy.deepcopy(student)
        unconvert_model(original)
        return original
    if teacher is student:
        raise UserError(
            "teacher: is the model that is trained; leave it out, and a copy with the original connectivity is made"
        )
    if not isinstance(teacher, str | Path):
        return teacher
    return load_model_teacher(find_model(args.model_config(str(teacher), teacher=True)), launch)
