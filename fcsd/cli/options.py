"""Options that several commands share, and the help formatter."""

import argparse
import json
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args, get_origin

if TYPE_CHECKING:
    from fcsd.connectivity.spec import Connectivity
    from fcsd.distributed.launch import Launch


class CommandParser(argparse.ArgumentParser):
    """The parser of one command.

    asked_for: whether this command is the one that runs. The schema of recipes, which takes as long to import as all
    the rest, is read for its options alone.
    """

    asked_for = True


class Command(Protocol):
    """Adds one command to the parser, and returns its own."""

    def __call__(
        self, name: str, run: Callable[[argparse.Namespace], int | None], text: str, more: str = ""
    ) -> CommandParser: ...


SEVERAL = "On several GPUs: accelerate launch --config_file configs/fsdp2_8.yaml -m fcsd {} RECIPE (docs/training.md)."


SEVERAL_EVALUATE = (
    "On several GPUs: accelerate launch --multi_gpu -m fcsd evaluate MODEL … (docs/evaluation.md)."
)


DATA_ROOT_HELP = "folder in hub layout (owner/name/…); without it the Hub is used"


class Help(argparse.ArgumentDefaultsHelpFormatter):
    """Shows the defaults that say something."""

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
        plain = action.default is None or action.default is False or action.default == []
        return action.help if plain else super()._get_help_string(action)


def field_option(
    parser: CommandParser, key: str, help: str, *, name: str | None = None, **changes: Any
) -> None:
    """Add the option that mirrors a key of a recipe, with the type, the choices and the default of its field.

    name: that of the option, where it is not the last part of the key. changes: what is different here, in the words
    of `add_argument`. Whether a value is in its range is for the code that it is handed to.
    """
    if not parser.asked_for:
        return
    from fcsd.config.recipe import Recipe
    from fcsd.config.unions import place_of

    place = place_of(Recipe, key.split("."))
    assert place.record is not None
    field = place.record.model_fields[str(place.keys[-1])]
    members = get_args(field.annotation) if get_origin(field.annotation) is not Literal else ()
    kinds = [kind for kind in members or (field.annotation,) if kind is not type(None)]
    options: dict[str, Any] = {"help": help, "default": field.default}
    if kinds == [bool]:
        options["action"] = "store_true"
    elif len(kinds) > 1:
        options["type"] = _number_or(
            [word for kind in kinds for word in get_args(kind) if isinstance(word, str)]
        )
    elif get_origin(kinds[0]) is Literal:
        options["choices"] = list(get_args(kinds[0]))
    else:
        options["type"] = kinds[0]
    flag = (name or key.rpartition(".")[2]).replace("_", "-")
    parser.add_argument(f"--{flag}", **options | changes)


def _number_or(words: list[str]) -> Callable[[str], int | str]:
    def read(text: str) -> int | str:
        try:
            return text if text in words else int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"a number or {' or '.join(words)} is needed, got {text!r}"
            ) from None

    return read


def model_argument(parser: CommandParser, *, optional: bool = False, config_only: bool = False) -> None:
    """Add MODEL and what finds it; config_only: its config is read, and no code of its own runs."""
    parser.add_argument(
        "model", metavar="MODEL", help="hub id or local folder", nargs="?" if optional else None
    )
    field_option(parser, "model.revision", "revision of a hub id")
    if not config_only:
        field_option(parser, "model.trust_remote_code", "allow code that comes with the checkpoint to run")


def expert_parallel_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--expert-parallel",
        type=int,
        default=1,
        metavar="N",
        help="shard the experts over groups of N processes, which send each other tokens instead of weights"
        " (configs/ep_8.yaml)",
    )
    parser.add_argument(
        "--overlap",
        choices=["full", "forward", "off"],
        help="with --expert-parallel: run what rewired layers send beside attention and the shared expert, in both"
        " passes, in the forward pass only, or not at all (default: full where the model can; docs/overlap.md)",
    )


def launch_of(arguments: argparse.Namespace) -> "Launch":
    """Join the launch; with `expert_parallel_argument` as it says."""
    from fcsd.distributed.launch import join_launch

    given = {name: value for name, value in vars(arguments).items() if name in ("expert_parallel", "overlap")}
    return join_launch(**given)


def device_map_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device-map",
        choices=["auto"],
        help="auto: one process spreads the layers over all devices, and what does not fit over main memory",
    )


def sides_arguments(parser: CommandParser) -> None:
    field_option(parser, "connectivity.attention", "what attention reads")
    field_option(parser, "connectivity.mlp", "what MoE and MLP blocks read")


def connectivity_arguments(parser: CommandParser, layers: str | None = None) -> None:
    """Add --layers, --attention and --mlp; layers: the default of the first, None where that says more than `all`."""
    help = "all | moe | none | first:8 | first:50%% | last:90%% | 0,2,5 | 4-11"
    parser.add_argument("--layers", default=layers, help=f"{help} (default: all)" if layers is None else help)
    sides_arguments(parser)


def connectivity_of(arguments: argparse.Namespace) -> "Connectivity | None":
    """None where nothing is chosen: a checkpoint that says how it is wired (FarSkip, Instella) then keeps that."""
    from fcsd.connectivity.spec import Connectivity

    if arguments.layers is None and (arguments.attention, arguments.mlp) == ("partial", "outdated"):
        return None
    layers = "all" if arguments.layers is None else arguments.layers
    return Connectivity(layers, arguments.attention, arguments.mlp)


def text_arguments(parser: CommandParser, text: str, rows: str) -> None:
    """Add --text with its examples and --max-length; text, rows: what the first and the last are for."""
    parser.add_argument(
        "--text",
        help=f"{text}: .jsonl file, data set folder or hub id, or what a recipe's data.heldout holds, in YAML:"
        " '{path: X, columns: {text: body}, split: test}'",
    )
    field_option(parser, "data.heldout_examples", "examples of the text", name="text_examples")
    field_option(parser, "data.max_length", rows)


def task_arguments(parser: CommandParser, task: str) -> None:
    """Add --task, the suite that it is of, and where its data lie; task: what is done with it."""
    parser.add_argument(
        "--task", action="append", default=[], help=f"{task} of the suite; may be given several times"
    )
    field_option(parser, "evaluation.suite", "name in eval/suites, or a path to a suite file")
    field_option(parser, "evaluation.data_root", DATA_ROOT_HELP)


def sandbox_argument(parser: CommandParser) -> None:
    field_option(
        parser,
        "evaluation.allow_weak_sandbox",
        "run generated code even where this machine cannot shut it in",
    )


def recipe_arguments(parser: argparse.ArgumentParser, *, with_variant: bool) -> None:
    parser.add_argument(
        "recipe",
        metavar="RECIPE",
        type=Path,
        help="YAML file, or the name of a shipped recipe such as tiny/demo (docs/recipes.md)",
    )
    parser.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="replace one value, for example train.learning_rate=4e-5; may be given several times",
    )
    parser.add_argument(
        "--rehearse",
        type=Path,
        metavar="FOLDER",
        help="rehearse in FOLDER: the same recipe on a tiny model of its family, a few invented rows in the columns of"
        " its data, and a few steps",
    )
    if with_variant:
        parser.add_argument("--variant", help="one of the recipe's variants instead of its main distillation")


def quiet_transformers() -> None:
    """Bars for files that are read and written in no time would bury our own."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def json_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def print_result(arguments: argparse.Namespace, result: Any, text: Callable[[Any], str]) -> None:
    """Print what a command found: as JSON where --json is given, else as text."""
    print(json.dumps(result, indent=2) if arguments.json else text(result))
