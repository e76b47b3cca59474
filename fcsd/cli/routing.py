"""Commands about where tokens go: routing."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fcsd.cli.options import (
    Command,
    CommandParser,
    device_map_argument,
    expert_parallel_argument,
    field_option,
    json_argument,
    launch_of,
    model_argument,
    print_result,
    quiet_transformers,
    task_arguments,
    text_arguments,
)

if TYPE_CHECKING:
    from fcsd.routing.study import RoutingStudy

    Settings = TypeVar("Settings", bound=RoutingStudy)


def _routing(arguments: argparse.Namespace) -> None:
    from fcsd.config.model import model_options
    from fcsd.data.local import data_fingerprint
    from fcsd.report.study_plots import plot_routing
    from fcsd.routing.report import report
    from fcsd.routing.study import RoutingStudy, study_routing

    quiet_transformers()
    against = None
    if arguments.against is not None:
        against = model_options(vars(arguments)) | {"path": arguments.against, "revision": None}
    study = _settings(RoutingStudy, arguments, {"against": against})
    launch = launch_of(arguments)
    inputs, prompts = {}, None
    if study.text is not None:
        inputs["text"] = data_fingerprint(study.text.path, study.text.revision)
    if study.tasks:
        found, prompts = _prompts(study)
        inputs |= found
    result = study_routing(
        study,
        arguments.output,
        launch,
        plot_routing,
        prompts=prompts,
        inputs=inputs,
        device_map=arguments.device_map,
    )
    if launch.first:
        print_result(arguments, result, report)


def _bias(arguments: argparse.Namespace) -> None:
    from fcsd.routing.tables import BiasSettings, write_bias

    quiet_transformers()
    settings = _settings(BiasSettings, arguments, {})
    prompts = _prompts(settings)[1] if settings.tasks else None
    launch = launch_of(arguments)
    facts = write_bias(settings, arguments.out, launch, prompts)
    if launch.first:
        before, after = 1e3 * facts["before_s"], 1e3 * facts["after_s"]
        change = f"{before:.4g} -> {after:.4g} ms ({100 * (after / before - 1):+.1f} %)"
        print(f"exchanges, mean over layers and this text: {change}")
        if facts.get("left"):
            print(f"layers that no bias brings into their windows, and that have none: {facts['left']}")
        print(arguments.out)


def _settings(kind: "type[Settings]", arguments: argparse.Namespace, own: dict[str, Any]) -> "Settings":
    """Return what the options say of a study; own: fields that they do not give as they are."""
    from fcsd.config.data import source_option
    from fcsd.config.model import model_options
    from fcsd.config.strict import options_of, validate_options

    options = vars(arguments)
    own = own | {"model": model_options(options), "text": source_option(arguments.text, "--text")}
    return validate_options(kind, options_of(kind, options) | own | {"tasks": arguments.task})


def _prompts(study: "RoutingStudy") -> tuple[dict[str, str], Callable[[Any], list[list[int]]]]:
    """Return what identifies the tasks' items, and a function that tokenizes their prompts."""
    from fcsd.config.suite import named_tasks
    from fcsd.evaluate.items import suite_prompts
    from fcsd.evaluate.stage import test_set_fingerprints

    suite = named_tasks(study.suite, study.tasks)
    root = Path(study.data_root) if study.data_root is not None else None
    return test_set_fingerprints(suite.tasks, root), lambda tokenizer: suite_prompts(
        suite, root, tokenizer, study.limit
    )


def add_commands(command: Command) -> None:
    """Add these commands to the parser."""
    parser = command(
        "routing",
        _routing,
        "Where a model's routers send the tokens of real text, and what that costs on given links.",
        "Loads of experts, traffic between endpoints, what capacity factors drop, and with --links the time of the"
        " exchanges and placements that lower it; with --against what a conversion did to it (docs/routing.md).",
    )
    model_argument(parser)
    parser.add_argument(
        "--output", type=Path, required=True, help="folder for routing.json, routing.md and figures"
    )
    parser.add_argument(
        "--against",
        metavar="MODEL2",
        help="the model that MODEL is compared with on the same tokens: the original of a conversion",
    )
    _text_arguments(parser)
    parser.add_argument("--links", metavar="FILE", help="links that `fcsd profile-network` measured")
    parser.add_argument(
        "--endpoints",
        type=int,
        help="endpoints that experts and batches are shared out over (default: those of the links, or 8)",
    )
    field_option(parser, "model.dtype", "of the models")
    expert_parallel_argument(parser)
    device_map_argument(parser)
    json_argument(parser)

    parser = command(
        "bias",
        _bias,
        "Tables that steer a model's routers away from slow links, from its traffic on a text.",
        "`fcsd evaluate --router-bias OUT` says what they cost in quality; a recipe's evaluation.router_bias sweeps"
        " strengths (docs/steering.md).",
    )
    model_argument(parser)
    parser.add_argument("out", metavar="OUT", type=Path, help="file for the tables (safetensors)")
    parser.add_argument(
        "--links", metavar="FILE", required=True, help="links that `fcsd profile-network` measured"
    )
    parser.add_argument(
        "--kind",
        choices=["camoe", "bottleneck", "windows"],
        default="camoe",
        help="camoe: pushes from all slow paths; bottleneck: from the slowest only, as far as camoe's time; windows:"
        " each layer as far as its exchanges are hidden",
    )
    parser.add_argument(
        "--strength", type=float, help="CAMoE's lambda; of bottleneck: the lambda whose time is the goal"
    )
    parser.add_argument("--windows", metavar="FILE", help="seconds beside each exchange, of `fcsd plan`")
    field_option(parser, "evaluation.router_bias.placement", "which endpoint has which experts")
    field_option(
        parser, "evaluation.router_bias.selection", "choose experts by the bias, weigh them without it"
    )
    field_option(
        parser, "evaluation.router_bias.scale", "count the strength in standard deviations of the logits"
    )
    _text_arguments(parser)
    parser.add_argument("--endpoints", type=int, help="those that the links have to be between")
    field_option(parser, "model.dtype", "of the model")
    expert_parallel_argument(parser)


def _text_arguments(parser: CommandParser) -> None:
    text_arguments(parser, "text to route", "tokens of one row; what is longer is cut")
    task_arguments(parser, "route the prompts of this task")
    field_option(parser, "evaluation.limit", "items per task")
    parser.add_argument(
        "--batch-size", type=int, default=8, help="rows of one batch; each batch is at one endpoint"
    )
