"""Commands on which layers to rewire: layers, plan-layers."""

import argparse
import os
from pathlib import Path

from fcsd.cli.options import (
    Command,
    field_option,
    json_argument,
    model_argument,
    print_result,
    quiet_transformers,
    sandbox_argument,
    sides_arguments,
    task_arguments,
    text_arguments,
)
from fcsd.errors import UserError


def _layers(arguments: argparse.Namespace) -> None:
    from fcsd.distributed.launch import join_launch
    from fcsd.layers.proposal import study_table
    from fcsd.layers.settings import study_from_options
    from fcsd.layers.study import read_study, study_layers
    from fcsd.models.load import find_model
    from fcsd.report.study_plots import plot_layers

    quiet_transformers()
    study = study_from_options(vars(arguments))
    launch = join_launch()
    study_layers(study, find_model(study.model), arguments.output, launch, plot_layers)
    if launch.first:
        found = read_study(arguments.output)
        print_result(arguments, found, study_table)


def _plan_layers(arguments: argparse.Namespace) -> None:
    from fcsd.distributed.launch import join_launch
    from fcsd.layers.proposal import layers_within, plan_layers, plan_text, within_text

    if arguments.max_loss is not None:
        if arguments.verify or arguments.calibrated or arguments.model is not None:
            raise UserError(
                "--max-loss reads the finished study, with copied and with calibrated weights; --verify, --calibrated"
                " and --model belong to --budget"
            )
        found = layers_within(arguments.study, arguments.max_loss, metric=arguments.metric)
        print_result(arguments, found, within_text)
        return
    quiet_transformers()
    launch = join_launch() if arguments.verify else None
    plan = plan_layers(
        arguments.study,
        arguments.budget,
        metric=arguments.metric,
        calibrated=arguments.calibrated,
        model=arguments.model,
        verify=launch,
    )
    if os.environ.get("RANK", "0") == "0":
        print_result(arguments, plan, plan_text)


def _add_layers(command: Command) -> None:
    parser = command(
        "layers",
        _layers,
        "Quality against the rewired layers, untrained (paper Fig. 3).",
        "From the start, from the end, and one layer at a time; measured by suite tasks, KL to the original, or both."
        " Continues where it was cut off.",
    )
    model_argument(parser)
    parser.add_argument("--output", type=Path, required=True, help="folder for layers.json and layers.png")
    text_arguments(parser, "measure the KL to the original on this text", "tokens in one row of the text")
    field_option(parser, "data.loss_on", "tokens the KL is computed on: response or all")
    parser.add_argument(
        "--calibrated",
        metavar="TEXT",
        help="measure every selection with calibrated weights too (`fcsd calibrate`), solved on this text, written as"
        " for --text; not on the text that is measured",
    )
    field_option(
        parser,
        "calibration.tokens",
        "with --calibrated: tokens to solve on",
        name="calibration_tokens",
    )
    task_arguments(parser, "measure this task")
    field_option(parser, "evaluation.batch_size", "sequences in one forward of a task", type=int)
    field_option(parser, "evaluation.limit", "items per task, for a quick look")
    parser.add_argument("--sides", help="some of first,last,single (default: all that can be measured)")
    numbers = parser.add_mutually_exclusive_group()
    numbers.add_argument(
        "--every", type=int, default=1, help="first and last: every Nth number of layers, and all layers"
    )
    numbers.add_argument("--counts", help="first and last: these numbers of layers, for example 1,2,4,8")
    sides_arguments(parser)
    field_option(parser, "model.dtype", "of the model")
    sandbox_argument(parser)
    json_argument(parser)


def _add_plan_layers(command: Command) -> None:
    parser = command(
        "plan-layers",
        _plan_layers,
        "Propose which layers to rewire for a given share, from a finished layer study.",
        "Those that hurt least when each is rewired alone, set against the last N; prints --layers text and YAML.",
    )
    parser.add_argument("study", metavar="STUDY", type=Path, help="folder that `fcsd layers` wrote")
    wanted = parser.add_mutually_exclusive_group(required=True)
    wanted.add_argument("--budget", help="share of the layers (90%%) or their number (43)")
    wanted.add_argument(
        "--max-loss",
        type=float,
        metavar="X",
        help="answer instead how many layers, from either end, can be rewired without training for this KL, or this"
        " loss of a task's score",
    )
    parser.add_argument(
        "--metric", help="kl or a task of the study (default: the first one, kl if it was measured)"
    )
    parser.add_argument(
        "--calibrated",
        action="store_true",
        help="go by what the layers cost with calibrated weights (a study with --calibrated)",
    )
    parser.add_argument(
        "--verify", action="store_true", help="measure the proposal and the last N layers on the study's data"
    )
    parser.add_argument("--model", help="with --verify: where the study's model lies now")
    json_argument(parser)


def add_commands(command: Command) -> None:
    """Add these commands to the parser."""
    _add_layers(command)
    _add_plan_layers(command)
