"""Options that several commands share, and the help formatter."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Protocol


class Command(Protocol):
    """Adds one command to the parser, and returns its own."""

    def __call__(
        self, name: str, run: Callable[[argparse.Namespace], int | None], text: str, more: str = ""
    ) -> argparse.ArgumentParser: ...


SEVERAL = "On several GPUs: accelerate launch --config_file configs/fsdp2_8.yaml -m fcsd {} RECIPE (docs/training.md)."


SEVERAL_EVALUATE = (
    "On several GPUs: accelerate launch --multi_gpu -m fcsd evaluate MODEL … (docs/evaluation.md)."
)


LAYERS_HELP = "all | moe | none | first:8 | first:50%% | last:90%% | 0,2,5 | 4-11 (default: all)"


class Help(argparse.ArgumentDefaultsHelpFormatter):
    """Shows the defaults that say something."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        plain = action.default is None or action.default is False or action.default == []
        return action.help if plain else super()._get_help_string(action)


def model_argument(parser: argparse.ArgumentParser, *, optional: bool = False) -> None:
    parser.add_argument(
        "model", metavar="MODEL", help="hub id or local folder", nargs="?" if optional else None
    )
    parser.add_argument("--revision", help="revision of a hub id")
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="allow code that comes with the checkpoint to run"
    )


def expert_parallel_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--expert-parallel",
        type=int,
        default=1,
        metavar="N",
        help="spread the experts over groups of N processes, which send each other tokens instead of weights"
        " (configs/ep_8.yaml)",
    )


def sides_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--attention", choices=["partial", "full"], default="partial", help="what attention reads"
    )
    parser.add_argument(
        "--mlp", choices=["outdated", "full"], default="outdated", help="what MoE and MLP blocks read"
    )


def sandbox_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--allow-weak-sandbox",
        action="store_true",
        help="run generated code even where this machine cannot shut it in",
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
