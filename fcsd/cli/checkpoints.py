"""Commands on a checkpoint: inspect, convert, unconvert, families."""

import argparse
import json
from pathlib import Path

from fcsd.cli.options import (
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
        "unconvert", _unconvert, "Undo a conversion: the checkpoint of the original family, same weights."
    )
    model_argument(parser)
    parser.add_argument("out", metavar="OUT", type=Path, help="new folder")

    parser = command(
        "families", _families, "List the model families that can be converted, and those that are refused."
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
