"""Commands on a checkpoint: inspect, convert, unconvert, families."""

import argparse
from pathlib import Path

from fcsd.cli.options import (
    DATA_ROOT_HELP,
    Command,
    connectivity_arguments,
    connectivity_of,
    field_option,
    json_argument,
    model_argument,
    print_result,
    quiet_transformers,
)


def _inspect(arguments: argparse.Namespace) -> None:
    from fcsd.inspect import inspect_model, report_table

    facts = inspect_model(arguments.model, arguments.revision)
    print_result(arguments, facts, report_table)


def _convert(arguments: argparse.Namespace) -> None:
    from fcsd.artifact import SCHEMA_VERSION, versions
    from fcsd.connectivity import convert_checkpoint
    from fcsd.files import write_json

    layers = convert_checkpoint(
        arguments.model,
        arguments.out,
        connectivity_of(arguments),
        revision=arguments.revision,
    )
    record = {  # what `fcsd push` cannot see from the checkpoint: where it comes from
        "schema_version": SCHEMA_VERSION,
        "stage": "convert",
        "settings": {"model": {"path": str(arguments.model), "revision": arguments.revision}},
        "results": {"layers": layers},
        "versions": versions(),
    }
    write_json(Path(arguments.out) / "manifest.json", record)
    print(arguments.out)


def _calibrate(arguments: argparse.Namespace) -> None:
    from fcsd.config.data import source_option
    from fcsd.config.model import model_options
    from fcsd.config.recipe import Recipe
    from fcsd.config.strict import validate

    source = source_option(arguments.text, "--text")
    against = {"decontaminate": {"suite": arguments.decontaminate}} if arguments.decontaminate else {}
    recipe = validate(
        Recipe,
        {
            "name": "calibrate",
            "output_dir": f"{arguments.out}.partial",
            "model": model_options(vars(arguments)),
            "connectivity": {
                "layers": arguments.layers,
                "attention": arguments.attention,
                "mlp": arguments.mlp,
            },
            "calibration": {"tokens": arguments.tokens, "ridge": arguments.ridge},
            "data": {"train": [source], "max_length": arguments.max_length, "loss_on": "all", **against},
            "evaluation": {"data_root": arguments.data_root},
        },
        "the calibration",
    )
    quiet_transformers()
    from fcsd.distributed.launch import join_launch
    from fcsd.stages.calibrate import calibrate_folder

    launch = join_launch()
    calibrate_folder(recipe, arguments.out, launch)
    if launch.first:
        print(arguments.out)


def _unconvert(arguments: argparse.Namespace) -> None:
    from fcsd.connectivity import unconvert_checkpoint

    unconvert_checkpoint(arguments.model, arguments.out, revision=arguments.revision)
    print(arguments.out)


def _families(arguments: argparse.Namespace) -> None:
    from fcsd.report.table import families_facts, families_table

    print_result(arguments, families_facts(), families_table)


def add_commands(command: Command) -> None:
    """Add these commands to the parser."""
    parser = command(
        "inspect",
        _inspect,
        "What a checkpoint is, what would be rewired, and what that needs; weights are not loaded.",
        "Of a hub id only config.json is fetched.",
    )
    model_argument(parser, config_only=True)
    json_argument(parser)

    parser = command(
        "convert",
        _convert,
        "Rewire a checkpoint: same weights, same tensor names, FarSkip connectivity.",
        "The result loads with AutoModelForCausalLM.from_pretrained(OUT, trust_remote_code=True), without fcsd.",
    )
    model_argument(parser)
    parser.add_argument(
        "out", metavar="OUT", type=Path, help="new folder; written under another name, then renamed"
    )
    connectivity_arguments(parser)

    parser = command(
        "calibrate",
        _calibrate,
        "Rewire a checkpoint, and fold closed-form maps into its weights that bring most of its quality back: no"
        " gradient, no new parameter.",
        "One layer's weights are in memory at a time. Continues where it was cut off. On several GPUs: accelerate"
        " launch -m fcsd calibrate …, which share the text.",
    )
    model_argument(parser)
    parser.add_argument(
        "out", metavar="OUT", type=Path, help="new folder; OUT.partial holds what is not finished"
    )
    connectivity_arguments(parser, "all")
    parser.add_argument(
        "--text",
        required=True,
        help=".jsonl file, data set folder or hub id, or what a recipe's data.train holds one of, in YAML:"
        " '{path: X, columns: {text: body}, split: train}'",
    )
    field_option(parser, "calibration.tokens", "tokens of the text to solve on")
    field_option(
        parser, "calibration.ridge", "pull of the maps towards the identity, relative to the mean diagonal"
    )
    field_option(parser, "data.max_length", "tokens in one row of the text")
    parser.add_argument(
        "--decontaminate",
        metavar="SUITE",
        help="leave out what shares 13 words in a row with an item of this suite",
    )
    parser.add_argument("--data-root", help=DATA_ROOT_HELP)

    parser = command(
        "unconvert", _unconvert, "Undo a conversion: the checkpoint of the original family, same weights."
    )
    model_argument(parser)
    parser.add_argument("out", metavar="OUT", type=Path, help="new folder")

    parser = command(
        "families", _families, "List the model families that can be converted, and those that are refused."
    )
    json_argument(parser)
