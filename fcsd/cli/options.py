"""The type of a command, options that mirror the fields of a record, options that
several commands share, and the help formatter.
"""

from __future__ import annotations

import argparse
import json
import textwrap
from argparse import ArgumentParser
from collections.abc import Callable
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    NamedTuple,
    get_args,
    get_origin,
)

from fcsd.base.text import show

if TYPE_CHECKING:
    from pydantic import BaseModel

    from fcsd.model.connectivity.spec import Connectivity
    from fcsd.parallel.launch import Launch


class Command(NamedTuple):
    """A command: its summary in one line, the functions that add its options and run
    it, and further text of its help.
    """

    text: str
    options: Callable[[ArgumentParser], None]
    run: Callable[[argparse.Namespace], object]
    more: str = ""


SEVERAL = (
    "On several GPUs: accelerate launch --config_file configs/fsdp2_8.yaml -m fcsd {}"
    " RECIPE (docs/scale.md)."
)


class Help(argparse.ArgumentDefaultsHelpFormatter):
    """Shows only informative defaults, and breaks no word at a hyphen."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return textwrap.fill(
            " ".join(text.split()),
            width,
            initial_indent=indent,
            subsequent_indent=indent,
            break_on_hyphens=False,
        )

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        plain = (
            action.default is None or action.default is False or action.default == []
        )
        return action.help if plain else super()._get_help_string(action)


def field_options(
    parser: argparse._ActionsContainer,
    record: type[BaseModel],
    *names: str,
    **changes: Any,
) -> None:
    """Add options that mirror fields of a record, with their type, choices, default and
    help. Ranges are not checked here: the record does that.

    names: the fields; none: all fields that are declared as options and have no option
    yet. changes: arguments of `add_argument` that differ from the field's. With
    `default=None` an absent option can be told from one that is given its default,
    which the help still names.
    """
    from fcsd.base.strict import flags_of

    flags = flags_of(record)
    undeclared = [
        name
        for name, field in record.model_fields.items()
        if field.description is not None
        and flags[name] not in parser._option_string_actions
    ]
    for name in names or undeclared:
        field = record.model_fields[name]
        default = field.get_default(call_default_factory=True)
        options: dict[str, Any] = {
            "help": (field.description or "").replace("%", "%%"),
            "default": default,
        }
        # argparse shows no default of None, so the help names the field's own.
        if "default" in changes and isinstance(default, int | float | str):
            options["help"] += (
                f" (default: {default})" if changes["default"] is None else ""
            )
        is_choice = get_origin(field.annotation) is Literal
        members = () if is_choice else get_args(field.annotation)
        kinds = [
            get_args(kind)[0] if get_origin(kind) is Annotated else kind
            for kind in members or (field.annotation,)
            if kind is not type(None)
        ]
        if field.is_required():
            options |= {"required": True, "default": None}
        elif isinstance(default, list | dict):  # given as text, which the record parses
            named = "(default: " in options["help"]
            options["default"] = None if named else ",".join(map(str, default)) or None
        elif kinds == [bool]:
            options["action"] = "store_true"
        elif len(kinds) > 1 and str not in kinds:
            words = [
                word
                for kind in kinds
                for word in get_args(kind)
                if isinstance(word, str)
            ]
            # A union of numbers and words, such as int | Literal['auto'].
            options["type"] = _number_or(words)
        elif get_origin(kinds[0]) is Literal:
            options["choices"] = list(get_args(kinds[0]))
        elif isinstance(kinds[0], type):  # any other is text, which the record parses
            options["type"] = kinds[0]
        extra = (
            field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
        )
        options |= {key: value for key, value in extra.items() if key != "flag"}
        parser.add_argument(flags[name], **options | changes)


def _number_or(words: list[str]) -> Callable[[str], int | str]:
    def read(text: str) -> int | str:
        try:
            return text if text in words else int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"a number or {' or '.join(words)} is needed, got {text!r}"
            ) from None

    return read


def model_argument(
    parser: ArgumentParser,
    *,
    optional: bool = False,
    config_only: bool = False,
    remote_code: bool = True,
) -> None:
    """Add MODEL and the options that locate it; config_only: the command reads the
    config alone, and so runs no remote code.
    """
    from fcsd.model.config import ModelConfig

    parser.add_argument(
        "model",
        metavar="MODEL",
        help="hub id or local folder",
        nargs="?" if optional else None,
    )
    field_options(parser, ModelConfig, "revision")
    if remote_code and not config_only:
        field_options(parser, ModelConfig, "trust_remote_code")


def check_model(arguments: argparse.Namespace, *, config_only: bool = False) -> None:
    """Refuse a MODEL that is not there, before the command loads a library."""
    from fcsd.model.connectivity.checkpoint import CONFIG, WEIGHTS, local_folder

    contents = CONFIG if config_only else f"{CONFIG} and {WEIGHTS}"
    local_folder(arguments.model, arguments.revision, contents)


def out_argument(parser: ArgumentParser, help: str = "new folder") -> None:
    """Add OUT, the folder that a command writes."""
    parser.add_argument("out", metavar="OUT", type=Path, help=help)


def expert_parallel_argument(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--expert-parallel",
        type=int,
        default=1,
        metavar="N",
        help=(
            "shard the experts over groups of N processes that exchange tokens instead"
            " of weights (configs/ep_8.yaml)"
        ),
    )
    parser.add_argument(
        "--overlap",
        choices=["full", "forward", "off"],
        help=(
            "with --expert-parallel: overlap the communication of rewired layers with"
            " attention and the shared expert in both passes, in the forward pass only,"
            " or not at all (default: full if the model supports it; docs/scale.md)"
        ),
    )


def launch_of(arguments: argparse.Namespace) -> Launch:
    """Join the launch with the options of `expert_parallel_argument`, if any."""
    from fcsd.parallel.launch import join_launch

    options = {
        name: value
        for name, value in vars(arguments).items()
        if name in ("expert_parallel", "overlap")
    }
    return join_launch(**options)


def device_map_argument(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--device-map",
        choices=["auto"],
        help=(
            "auto: one process distributes the layers over all devices; layers that do"
            " not fit go to main memory"
        ),
    )


def connectivity_arguments(parser: ArgumentParser, layers: str | None = None) -> None:
    """Add --layers, --attention and --mlp.

    layers: the default of --layers; None where an absent option must be told from
    `all` (see `connectivity_of`).
    """
    from fcsd.model.connectivity.spec import ConnectivityConfig

    help = (
        "layers to rewire: all | moe | none | first:8 | first:50%% | last:90%% | 0,2,5"
        " | 4-11"
    )
    parser.add_argument(
        "--layers",
        default=layers,
        help=f"{help} (default: all)" if layers is None else help,
    )
    field_options(parser, ConnectivityConfig, "attention", "mlp")


def connectivity_of(arguments: argparse.Namespace) -> Connectivity | None:
    """Return the connectivity that the options choose; None where they choose none, and
    a checkpoint keeps its own.
    """
    from fcsd.model.connectivity.spec import chosen_connectivity

    return chosen_connectivity(arguments.layers, arguments.attention, arguments.mlp)


def text_argument(parser: ArgumentParser, text: str) -> None:
    """Add --text; text: its purpose, for the help."""
    parser.add_argument(
        "--text",
        help=(
            f"{text}: .jsonl file, data set folder or hub id, or a source as in a"
            " recipe's data.heldout, in YAML: '{path: X, columns: {text: body},"
            " split: test}'"
        ),
    )


def task_arguments(parser: ArgumentParser, task: str) -> None:
    """Add --task, --suite and --data-root; task: what the command does with a task, for
    the help.
    """
    from fcsd.evaluation.config import EvaluationConfig

    parser.add_argument(
        "--task",
        action="append",
        default=[],
        help=f"{task} of the suite; may be given several times",
    )
    field_options(parser, EvaluationConfig, "suite", "data_root")


def recipe_arguments(parser: ArgumentParser, *, with_variant: bool = False) -> None:
    """Add RECIPE and the options that change it."""
    parser.add_argument(
        "recipe",
        metavar="RECIPE",
        type=Path,
        help=(
            "YAML file, or the name of a shipped recipe such as tiny/demo"
            " (docs/recipes.md)"
        ),
    )
    parser.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help=(
            "replace one value, for example train.learning_rate=4e-5; may be given"
            " several times"
        ),
    )
    parser.add_argument(
        "--rehearse",
        type=Path,
        metavar="FOLDER",
        help=(
            "rehearse in FOLDER: run the same recipe with a tiny model of its family, a"
            " few invented rows with the columns of its data, and a few steps"
        ),
    )
    if with_variant:
        parser.add_argument(
            "--variant",
            help="use this variant of the recipe instead of its main training",
        )


def quiet_transformers() -> None:
    """Turn off transformers' progress bars for files, which would bury our output."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def json_argument(parser: ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def print_result(
    arguments: argparse.Namespace, result: Any, text: Callable[[Any], str]
) -> None:
    """Print the result of a command: as JSON where --json is given, else as text for the
    terminal.
    """
    if arguments.json:
        print(json.dumps(result, indent=2))
    else:
        show(text(result))
