"""The model card of a model that an `FCSDTrainer` has trained, for `create_model_card`
and `push_to_hub`.

Not covered: results of `fcsd evaluate`, which `fcsd push` adds.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fcsd.base.errors import UserError
from fcsd.base.text import nats
from fcsd.base.writing import write_text
from fcsd.data.rows import step_rows
from fcsd.model.connectivity.modeling import auto_map
from fcsd.model.connectivity.spec import changed_by
from fcsd.model.families import family_of
from fcsd.training.card.card import card_of, public_name
from fcsd.training.card.facts import (
    CARD,
    HERE,
    Facts,
    front_matter,
    hub_id,
    inherited_by,
    licence_of,
    recorded_origin,
    with_linked_licence,
)

TAGS = ("farskip", "fcsd")
"""Tags of a model on the Hub."""

_NO_PLACE = ("tasks", "dataset_args")
_FILE_FORMATS = (
    "arrow",
    "csv",
    "generator",
    "json",
    "pandas",
    "parquet",
    "sql",
    "text",
    "webdataset",
)


@dataclass(frozen=True)
class InputNames:
    """The arguments of a trainer as a card names them.

    model: the path or Hub id of the model, or "". teacher: the same; None where the
    teacher is the original. data: names of the training data, as far as they are known.
    """

    model: str = ""
    teacher: str | None = None
    data: tuple[str, ...] = ()


def input_names(model: Any, teacher: Any, data: Any) -> InputNames:
    """Read the names from a trainer's arguments, before anything is loaded or
    converted.
    """
    return InputNames(
        _name_of(model),
        None if teacher is None else _name_of(teacher),
        dataset_names(data),
    )


def _name_of(model: Any) -> str:
    if isinstance(model, str | Path):
        return str(model)
    return str(getattr(getattr(model, "config", None), "_name_or_path", "") or "")


def dataset_names(data: Any) -> tuple[str, ...]:
    """Return the Hub ids that a data set was loaded from, or the name of its builder;
    () where it has none.
    """
    # The builder of plain files is named after their format, which names no data set.
    info = getattr(data, "info", None)
    files = getattr(info, "download_checksums", None) or {}
    matches = [
        re.match(r"hf://datasets/([\w.-]+(?:/[\w.-]+)?)@", str(file)) for file in files
    ]
    names = list(dict.fromkeys(match[1] for match in matches if match is not None))
    builder = getattr(info, "dataset_name", None) or getattr(info, "builder_name", None)
    return tuple(
        names or ([builder] if builder and builder not in _FILE_FORMATS else [])
    )


def _origin(model: str) -> tuple[str, str | None] | None:
    """Return path and revision of the original that a model was made from: the model
    itself if nothing else is recorded.
    """
    if not model:
        return None
    folder = Path(model)
    # A path in the cache of the Hub contains repository and revision.
    cached = re.search(r"models--([\w.-]+?)--([\w.-]+)/snapshots/(\w+)$", model)
    if cached is not None:
        return f"{cached[1]}/{cached[2]}", cached[3]
    if not folder.is_dir():
        return model, None
    if (recorded := recorded_origin(folder)) is not None:
        return recorded
    named = None
    if (folder / CARD).is_file():
        named = front_matter(folder / CARD).get("base_model")
    return (named, None) if isinstance(named, str) else (model, None)


def write_trainer_card(trainer: Any, arguments: Mapping[str, Any]) -> None:
    """Write `README.md` into the output folder of an `FCSDTrainer`.

    arguments: those of `transformers.Trainer.create_model_card`, which override the
    facts of the training.

    Raises:
        UserError: an argument that has no place on the card.
    """
    if unknown := [name for name in _NO_PLACE if arguments.get(name) is not None]:
        raise UserError(
            f"create_model_card: {unknown[0]}: does not appear on the card; leave it"
            f" out, or edit {CARD}"
        )
    folder = Path(str(trainer.args.output_dir))
    facts = _facts(
        trainer, {name: value for name, value in arguments.items() if value is not None}
    )
    write_text(folder / CARD, str(card_of(with_linked_licence(facts, folder))))


def _facts(trainer: Any, arguments: Mapping[str, Any]) -> Facts:
    config = trainer.plain_model.config
    # The saved config names the model's code; the config in memory may not yet.
    values = config.to_dict()
    values.setdefault("auto_map", auto_map(family_of(config)))
    where = trainer.hub_model_id or trainer.args.hub_model_id
    inputs = trainer.inputs.names if trainer.inputs is not None else InputNames()
    origin = _origin(inputs.model)
    base = arguments.get("finetuned_from") or (
        hub_id(origin[0]) if origin is not None else None
    )
    # The original's card comes first, a stated base model's second.
    inherited: dict[str, Any] = {}
    for path, revision in dict.fromkeys(
        [*filter(None, [origin]), *([(base, None)] if base else [])]
    ):
        inherited = inherited or inherited_by(path, revision)
    return Facts(
        name=arguments.get("model_name")
        or (where or Path(str(trainer.args.output_dir)).absolute().name).split("/")[-1],
        where=where or HERE,
        config=values,
        base=base,
        licence=licence_of(inherited, arguments.get("license")),
        language=tuple(
            _listed(arguments.get("language")) or inherited.get("language", [])
        ),
        training=_training(
            trainer,
            inputs,
            _listed(arguments.get("dataset")) + _listed(arguments.get("dataset_tags")),
        ),
        untrained=trainer.state.global_step == 0 and changed_by(config) is None,
        chat=bool(getattr(trainer.processing_class, "chat_template", None)),
        tags=(*TAGS, *_listed(arguments.get("tags"))),
    )


def _listed(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else list(value or [])


def _training(
    trainer: Any, inputs: InputNames, data: list[str]
) -> dict[str, Any] | None:
    """Describe the training in the form of a stage's manifest; None where there were no
    steps.
    """
    state, args = trainer.state, trainer.args
    if not state.global_step:
        return None
    # The notes are sentences for facts that a stage's manifest has no field for.
    objective, origin = trainer.step_loss.objective, _origin(inputs.model)
    notes = []
    if origin is not None and hub_id(origin[0]) is None:
        notes.append(f"It was made from `{public_name(origin[0])}`.")
    if args.load_best_model_at_end and state.best_global_step:
        notes.append(
            f"The checkpoint of step {state.best_global_step} was chosen by"
            f" `{args.metric_for_best_model}`."
        )
    # Only a measurement of the very weights that are saved belongs on the card.
    last = next(
        (entry for entry in reversed(state.log_history) if "eval_kl" in entry), None
    )
    if (
        last is not None
        and not args.load_best_model_at_end
        and last["step"] == state.global_step
    ):
        notes.append(
            f"KL(teacher || this model) on held-out rows: {nats(last['eval_kl'])} nats"
            " per token."
        )
    training: dict[str, Any] = {
        "stage": "distill",
        "settings": {
            "objective": {"name": objective.name, "own_text": objective.own_text},
            "train": {
                "batch_size_tokens": (
                    step_rows(args, trainer.launch.ranks.size) * args.max_length
                ),
                "learning_rate": args.learning_rate,
            },
            "data": {"train": [{"path": name} for name in data or inputs.data]},
        },
        "results": {"steps": state.global_step},
        "notes": notes,
    }
    if trainer.inputs is not None:
        training["results"]["bad_rows"] = trainer.inputs.bad_rows.summary()
    if inputs.teacher is not None and _origin(inputs.teacher) != origin:
        name = _origin(inputs.teacher)
        if name is not None:
            training["teacher"] = f"`{public_name(name[0])}`"
        else:
            training["teacher"] = "a model that was given"
    return training
