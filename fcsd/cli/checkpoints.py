"""Commands on a checkpoint: inspect, convert, unconvert, families."""

import argparse
import json
from pathlib import Path

from fcsd.cli.options import (
    DATA_ROOT_HELP,
    LAYERS_HELP,
    Command,
    field_option,
    model_argument,
    sides_arguments,
)
from fcsd.connectivity.spec import Connectivity


def _inspect(arguments: argparse.Namespace) -> None:
    from fcsd.inspect import inspect_model, report_table

    facts = inspect_model(arguments.model, arguments.revision)
    print(json.dumps(facts, indent=2) if arguments.json else report_table(facts))


def _connectivity(arguments: argparse.Namespace) -> Connectivity | None:
    """None where nothing is chosen: AMD's Instella checkpoints then keep what their config says."""
    if arguments.layers is None and (arguments.attention, arguments.mlp) == ("partial", "outdated"):
        return None
    layers = "all" if arguments.layers is None else arguments.layers
    return Connectivity(layers, arguments.attention, arguments.mlp)


def _convert(arguments: argparse.Namespace) -> None:
    from fcsd.artifact import SCHEMA_VERSION, versions
    from fcsd.connectivity import convert_checkpoint
    from fcsd.files import write_json

    layers = convert_checkpoint(
        arguments.model,
        arguments.out,
        _connectivity(arguments),
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
    from fcsd.cli.options import quiet_transformers
    from fcsd.config.data import SourceConfig
    from fcsd.config.recipe import Recipe
    from fcsd.config.strict import parse_yaml, validate

    text = arguments.text
    found = parse_yaml(text, "--text") if text.lstrip().startswith("{") else {"path": text}
    source = validate(SourceConfig, found, "--text").model_dump(mode="json")
    against = {"decontaminate": {"suite": arguments.decontaminate}} if arguments.decontaminate else {}
    model = {name: getattr(arguments, name) for name in ("revision", "trust_remote_code")}
    recipe = validate(
        Recipe,
        {
            "name": "calibrate",
            "output_dir": f"{arguments.out}.partial",
            "model": model | {"path": arguments.model},
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
    from fcsd.report.table import families_table

    print(families_table(as_json=arguments.json))


def add_commands(command: Command) -> None:
    """Add these commands to the parser."""
    parser = command(
        "inspect",
        _inspect,
        "What a checkpoint is, what would be rewired, and what that needs; weights are not loaded.",
        "Of a hub id only config.json is fetched.",
    )
    parser.add_argument("model", metavar="MODEL", help="hub id or local folder")
    field_option(parser, "model.revision", "revision of a hub id")
    parser.add_argument("--json", action="store_true", help="print JSON")

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
    parser.add_argument("--layers", help=LAYERS_HELP)
    sides_arguments(parser)

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
    parser.add_argument("--layers", default="all", help=LAYERS_HELP.removesuffix(" (default: all)"))
    sides_arguments(parser)
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
    parser.add_argument("--json", action="store_true", help="print JSON")
