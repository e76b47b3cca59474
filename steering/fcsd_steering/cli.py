"""The `fcsd-steer` command: links, routes, bias tables, and steered models.

Slow libraries, and modules that load them, are imported inside functions and after the
checks of the options: help and mistakes then appear at once.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fcsd.base.errors import UserError
from fcsd.base.text import show
from fcsd.base.writing import check_file_place
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
from fcsd.cli.program import Program

if TYPE_CHECKING:
    from fcsd_steering.config import RoutingStudy


def _routing(arguments: Namespace) -> None:
    from fcsd.model.config import ModelConfig
    from fcsd_steering.config import RoutingStudy

    quiet_transformers()
    options, against = vars(arguments), None
    if arguments.against is not None:
        against = ModelConfig.from_options(
            options | {"revision": None}, path=arguments.against
        )
    study = RoutingStudy.from_options(options, against=against)
    from fcsd.data.local import data_fingerprint
    from fcsd_steering.plots import plot_routing
    from fcsd_steering.routing.report import report
    from fcsd_steering.routing.study import study_routing

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
    from fcsd_steering.config import BiasSettings

    quiet_transformers()
    settings = BiasSettings.from_options(vars(arguments))
    from fcsd_steering.routing.tables import write_bias

    prompts = _prompts(settings)[1] if settings.tasks else None
    launch = launch_of(arguments)
    facts = write_bias(settings, arguments.out, launch, prompts)
    if launch.first:
        unsteered_ms, steered_ms = 1e3 * facts["before_s"], 1e3 * facts["after_s"]
        change = (
            f"{unsteered_ms:.4g} -> {steered_ms:.4g} ms"
            f" ({100 * (steered_ms / unsteered_ms - 1):+.1f} %)"
        )
        show(f"exchanges, mean over layers and this text: {change}")
        if facts.get("left"):
            show(
                "layers left without a bias, because none brings them into their"
                f" windows: {facts['left']}"
            )
        print(arguments.out)


def _prompts(
    study: RoutingStudy,
) -> tuple[dict[str, str], Callable[[Any], list[list[int]]]]:
    """Return the fingerprints of the tasks' items, and a function that tokenizes their
    prompts.
    """
    from fcsd.evaluation.datasets import test_set_fingerprints
    from fcsd.evaluation.items import suite_prompts
    from fcsd.evaluation.suites import named_tasks

    suite = named_tasks(study.suite, study.tasks)
    root = Path(study.data_root) if study.data_root is not None else None
    return test_set_fingerprints(suite, root), lambda tokenizer: suite_prompts(
        suite, root, tokenizer, study.limit
    )


def _routing_options(parser: ArgumentParser) -> None:
    from fcsd.model.config import ModelConfig
    from fcsd_steering.config import RoutingStudy

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
            "compare MODEL with this model on the same tokens: the original of a"
            " conversion"
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
    from fcsd_steering.config import BiasSettings

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
        help="number of endpoints; must match the links",
    )
    field_options(parser, ModelConfig, "dtype")
    expert_parallel_argument(parser)


def _text_arguments(parser: ArgumentParser) -> None:
    from fcsd_steering.config import RoutingStudy

    text_argument(parser, "text to route")
    field_options(parser, RoutingStudy, "text_examples")
    field_options(
        parser,
        RoutingStudy,
        "max_length",
        help="tokens per row; longer rows are truncated",
    )
    task_arguments(parser, "route the prompts of this task")
    field_options(parser, RoutingStudy, "limit", "batch_size")


def _profile_network(arguments: Namespace) -> None:
    if arguments.nccl_tests is not None:
        _from_nccl_tests(arguments)
        return
    from fcsd.parallel.launch import join_launch
    from fcsd_steering.network.measure import describe, profile_launch

    launch = join_launch()
    links, comparison = profile_launch(
        launch,
        arguments.links,
        collective=arguments.collective,
        largest_bytes=arguments.max_bytes,
        check=arguments.check,
    )
    if launch.first:
        show(describe(links))
        if comparison is not None:
            show(str(comparison))


def _from_nccl_tests(arguments: Namespace) -> None:
    for option in ("max_bytes", "check"):
        if getattr(arguments, option):
            raise UserError(
                f"--{option.replace('_', '-')} has no effect with --nccl-tests, which"
                " measures nothing; leave it out"
            )
    from fcsd.planning.network.links import read_links, write_links
    from fcsd_steering.network.measure import describe
    from fcsd_steering.network.nccl_tests import read_nccl_tests

    check_file_place(arguments.links, read_links)
    links = read_nccl_tests(arguments.nccl_tests)
    write_links(arguments.links, links)
    show(describe(links))
    show(
        "nccl-tests times all edges together: the file has the same latency and rate"
        " for all, and no shared ports"
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
            "exchange to measure: the all-to-all that expert parallelism uses, or every"
            " irecv, then every isend"
        ),
    )
    parser.add_argument(
        "--max-bytes",
        type=int,
        metavar="N",
        help=(
            "largest message on one edge, that is, from one rank to another in one"
            " exchange (default: 1 MiB, 16 MiB on a GPU)"
        ),
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help=(
            "exchange 18 patterns of traffic afterwards, and print the error of the"
            " simulation"
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


def _evaluate(arguments: Namespace) -> None:
    from fcsd_steering.routing.bias import read_tables

    tables = read_tables(arguments.tables)
    quiet_transformers()
    from fcsd.evaluation.results import read_result
    from fcsd.evaluation.suites import load_suite, named_tasks
    from fcsd.model.config import ModelConfig
    from fcsd.model.load import find_model
    from fcsd.parallel.place import load_for_evaluation
    from fcsd_steering.evaluate import SteeredEvaluation, check_model_type

    folder = find_model(ModelConfig.from_options(vars(arguments), path=arguments.model))
    check_model_type(tables, folder.load_config(any_family=True).model_type)
    launch = launch_of(arguments).for_evaluation()
    if arguments.task:
        suite = named_tasks(arguments.suite, arguments.task)
    else:
        suite = load_suite(arguments.suite)
    if suite.has_own_text:
        raise UserError(
            f"suite {suite.name}: has own text, which compares a model with its original,"
            " but fcsd-steer evaluates one model alone; name other tasks with --task"
        )
    evaluation = SteeredEvaluation(
        arguments.model,
        folder,
        tables,
        suite,
        arguments.batch_size,
        data_root=arguments.data_root,
        limit=arguments.limit,
        allow_weak_sandbox=arguments.allow_weak_sandbox,
        settings={"model": {"dtype": folder.config.dtype}},
    )
    evaluation.run(
        arguments.output, launch, lambda: load_for_evaluation(folder, launch)
    )
    if launch.first:
        result, _ = read_result(arguments.output)
        for task, score in result["tasks"].items():
            print(f"{task}: {100 * score['value']:.1f}")
        print(arguments.output)


def _evaluate_options(parser: ArgumentParser) -> None:
    from fcsd.model.config import ModelConfig
    from fcsd_steering.config import RoutingStudy

    model_argument(parser)
    parser.add_argument(
        "tables", metavar="TABLES", type=Path, help="file that `fcsd-steer bias` wrote"
    )
    parser.add_argument(
        "--output",
        type=Path,
        required=True,
        help="folder for results.json and samples_*.jsonl; `fcsd compare` reads it",
    )
    task_arguments(parser, "evaluate only this task")
    field_options(parser, RoutingStudy, "limit")
    parser.add_argument(
        "--batch-size",
        type=int,
        default=16,
        metavar="N",
        help="sequences in one forward pass; batch j of a task belongs to endpoint j"
        " mod N",
    )
    parser.add_argument(
        "--allow-weak-sandbox",
        action="store_true",
        help="run generated code even if the sandbox cannot block network access",
    )
    field_options(parser, ModelConfig, "dtype")
    expert_parallel_argument(parser)


def _study(arguments: Namespace) -> None:
    quiet_transformers()
    from fcsd_steering.study import load_study, run_study

    study = load_study(arguments.study)
    launch = launch_of(arguments)
    text = run_study(study, launch)
    if launch.first:
        show(text)


def _study_options(parser: ArgumentParser) -> None:
    parser.add_argument(
        "study",
        metavar="STUDY",
        type=Path,
        help="YAML file: recipe, links, models, kind, strengths (docs/steer.md)",
    )
    expert_parallel_argument(parser)


COMMANDS = {
    "routing": Command(
        "Count where a model's routers send the tokens of a text, and compute the cost"
        " on given links.",
        _routing_options,
        _routing,
        "The result has the loads of experts, the traffic between endpoints, and the"
        " pairs that capacity factors drop. With --links it adds the time of the"
        " exchanges and placements that lower it; with --against, what the"
        " conversion changed (docs/steer.md).",
    ),
    "bias": Command(
        "Count a model's traffic on a text, and write tables that steer its routers"
        " away from slow links.",
        _bias_options,
        _bias,
        "`fcsd-steer evaluate MODEL OUT` measures their cost in quality; `fcsd-steer"
        " study` sweeps strengths (docs/steer.md).",
    ),
    "profile-network": Command(
        "Measure latency and rate of the links between the ranks of a launch, to"
        " simulate exchanges.",
        _profile_network_options,
        _profile_network,
        "Run it as: accelerate launch --config_file configs/cpu_2.yaml -m"
        " fcsd_steering profile-network links.json (docs/steer.md).",
    ),
    "evaluate": Command(
        "Evaluate a model under a router bias, in memory.",
        _evaluate_options,
        _evaluate,
        "It writes results like `fcsd evaluate`, and `fcsd compare` reads them.",
    ),
    "study": Command(
        "Evaluate the models of a finished run under one bias after another, and report"
        " quality against the time of an exchange.",
        _study_options,
        _study,
        "The same command continues an interrupted study (docs/steer.md).",
    ),
}

STEER = Program(
    name="fcsd-steer",
    description=(
        "Measure the links between ranks, count where tokens go, and steer a model's"
        " routers away from slow links."
    ),
    epilog="First steps: docs/steer.md. `fcsd-steer COMMAND --help` explains each command.",
    commands=COMMANDS,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status, as `fcsd` does."""
    return STEER.run(argv)
