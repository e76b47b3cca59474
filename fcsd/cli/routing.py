"""Commands about the routing of tokens and the links they cross: routing, bias,
profile-network.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fcsd.base.errors import UserError
from fcsd.base.files import check_file_place
from fcsd.cli.options import (
    Command,
    device_map_argument,
    expert_parallel_argument,
    field_options,
    json_argument,
    launch_of,
    model_argument,
    print_result,
    quiet_transformers,
    task_arguments,
    text_argument,
)

if TYPE_CHECKING:
    from fcsd.steering.config import RoutingStudy


def _routing(arguments: Namespace) -> None:
    from fcsd.model.config import ModelConfig
    from fcsd.steering.config import RoutingStudy

    quiet_transformers()
    options, against = vars(arguments), None
    if arguments.against is not None:
        against = ModelConfig.from_options(
            options | {"revision": None}, path=arguments.against
        )
    study = RoutingStudy.from_options(options, against=against)
    from fcsd.data.local import data_fingerprint
    from fcsd.report.study_plots import plot_routing
    from fcsd.steering.routing.report import report
    from fcsd.steering.routing.study import study_routing

    launch = launch_of(arguments)
    # The study records the fingerprints of its data, so that it never continues on
    # other data.
    inputs, prompts = {}, None
    if study.text is not None:
        inputs["text"] = data_fingerprint(study.text.path, study.text.revision)
    if study.tasks:
        fingerprints, prompts = _prompts(study)
        inputs |= fingerprints
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


def _bias(arguments: Namespace) -> None:
    from fcsd.steering.config import BiasSettings

    quiet_transformers()
    settings = BiasSettings.from_options(vars(arguments))
    from fcsd.steering.routing.tables import write_bias

    prompts = _prompts(settings)[1] if settings.tasks else None
    launch = launch_of(arguments)
    facts = write_bias(settings, arguments.out, launch, prompts)
    if launch.first:
        unsteered_ms, steered_ms = 1e3 * facts["before_s"], 1e3 * facts["after_s"]
        change = (
            f"{unsteered_ms:.4g} -> {steered_ms:.4g} ms"
            f" ({100 * (steered_ms / unsteered_ms - 1):+.1f} %)"
        )
        print(f"exchanges, mean over layers and this text: {change}")
        if facts.get("left"):
            print(
                "layers that no bias brings into their windows, and that have none:"
                f" {facts['left']}"
            )
        print(arguments.out)


def _prompts(
    study: RoutingStudy,
) -> tuple[dict[str, str], Callable[[Any], list[list[int]]]]:
    """Return the fingerprints of the tasks' items, and a function that tokenizes their
    prompts.
    """
    from fcsd.evaluation.config import named_tasks
    from fcsd.evaluation.items import suite_prompts
    from fcsd.evaluation.stage import test_set_fingerprints

    suite = named_tasks(study.suite, study.tasks)
    root = Path(study.data_root) if study.data_root is not None else None
    return test_set_fingerprints(suite, root), lambda tokenizer: suite_prompts(
        suite, root, tokenizer, study.limit
    )


def _routing_options(parser: ArgumentParser) -> None:
    from fcsd.model.config import ModelConfig
    from fcsd.steering.config import RoutingStudy

    model_argument(parser)
    parser.add_argument(
        "--output",
        type=Path,
        required=True,
        help="folder for routing.json, routing.md and figures",
    )
    parser.add_argument(
        "--against",
        metavar="MODEL2",
        help=(
            "the model that MODEL is compared with on the same tokens: the original of"
            " a conversion"
        ),
    )
    _text_arguments(parser)
    field_options(parser, RoutingStudy)
    field_options(parser, ModelConfig, "dtype")
    expert_parallel_argument(parser)
    device_map_argument(parser)
    json_argument(parser)


def _bias_options(parser: ArgumentParser) -> None:
    from fcsd.model.config import ModelConfig
    from fcsd.steering.config import BiasSettings

    model_argument(parser)
    parser.add_argument(
        "out", metavar="OUT", type=Path, help="file for the tables (safetensors)"
    )
    field_options(parser, BiasSettings, "links", type=None)
    field_options(parser, BiasSettings, "kind", "strength")
    field_options(parser, BiasSettings, "windows", type=None)
    field_options(parser, BiasSettings, "placement", "selection", "scale")
    field_options(parser, BiasSettings, "sigma_floor", default=None)
    _text_arguments(parser)
    field_options(
        parser,
        BiasSettings,
        "endpoints",
        help="number of endpoints; the links must be between as many",
    )
    field_options(parser, ModelConfig, "dtype")
    expert_parallel_argument(parser)


def _text_arguments(parser: ArgumentParser) -> None:
    from fcsd.steering.config import RoutingStudy

    text_argument(parser, "text to route")
    field_options(parser, RoutingStudy, "text_examples")
    field_options(
        parser,
        RoutingStudy,
        "max_length",
        help="tokens of one row; what is longer is cut",
    )
    task_arguments(parser, "route the prompts of this task")
    field_options(parser, RoutingStudy, "limit", "batch_size")


def _profile_network(arguments: Namespace) -> None:
    if arguments.nccl_tests is not None:
        _from_nccl_tests(arguments)
        return
    from fcsd.parallel.launch import join_launch
    from fcsd.steering.network.measure import describe, profile_launch

    launch = join_launch()
    links, comparison = profile_launch(
        launch,
        arguments.links,
        collective=arguments.collective,
        largest_bytes=arguments.max_bytes,
        check=arguments.check,
    )
    if launch.first:
        print(describe(links))
        if comparison is not None:
            print(comparison)


def _from_nccl_tests(arguments: Namespace) -> None:
    for option in ("max_bytes", "check"):
        if getattr(arguments, option):
            raise UserError(
                f"--{option.replace('_', '-')} has no meaning with --nccl-tests:"
                " nothing is measured"
            )
    from fcsd.steering.network.links import read_links, write_links
    from fcsd.steering.network.measure import describe
    from fcsd.steering.network.nccl_tests import read_nccl_tests

    check_file_place(arguments.links, read_links)
    links = read_nccl_tests(arguments.nccl_tests)
    write_links(arguments.links, links)
    print(describe(links))
    print(
        "nccl-tests times all edges together: all have the same latency and rate here,"
        " and no port is known"
    )


def _profile_network_options(parser: ArgumentParser) -> None:
    parser.add_argument(
        "links", metavar="LINKS", type=Path, help="file for the links (JSON)"
    )
    parser.add_argument(
        "--collective",
        choices=["all_to_all_single", "p2p"],
        default="all_to_all_single",
        help=(
            "what is measured: the all-to-all that expert parallelism uses, or every"
            " irecv, then every isend"
        ),
    )
    parser.add_argument(
        "--max-bytes",
        type=int,
        metavar="N",
        help=(
            "largest message on one edge: what a rank sends another in one exchange"
            " (default: 1 MiB, 16 MiB on a GPU)"
        ),
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help=(
            "exchange 18 patterns of traffic afterwards, and print how far the"
            " simulation is off"
        ),
    )
    parser.add_argument(
        "--nccl-tests",
        type=Path,
        metavar="FILE",
        help=(
            "read this output of alltoall_perf or sendrecv_perf (nccl-tests,"
            " rccl-tests) instead of measuring"
        ),
    )


COMMANDS = {
    "routing": Command(
        "Count where a model's routers send the tokens of a text, and compute what that"
        " costs on given links.",
        _routing_options,
        _routing,
        "The result has the loads of experts, the traffic between endpoints, what"
        " capacity factors drop, and with --links the time of the exchanges and"
        " placements that lower it; with --against what a conversion changed"
        " (docs/steer.md).",
    ),
    "bias": Command(
        "Write tables that steer a model's routers away from slow links, from its"
        " traffic on a text.",
        _bias_options,
        _bias,
        "`fcsd evaluate --router-bias OUT` measures what they cost in quality; a"
        " recipe's evaluation.router_bias sweeps strengths (docs/steer.md).",
    ),
    "profile-network": Command(
        "Measure latency and rate of the links between the ranks of a launch, from"
        " which exchanges are simulated.",
        _profile_network_options,
        _profile_network,
        "Run it as: accelerate launch --config_file configs/cpu_2.yaml -m fcsd"
        " profile-network links.json (docs/steer.md).",
    ),
}
