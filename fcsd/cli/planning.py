"""Commands that estimate the gain of a conversion, and choose the layers to rewire:
plan, layers, plan-layers.
"""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace, _ActionsContainer
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fcsd.base.errors import UserError
from fcsd.base.writing import check_file_place
from fcsd.cli.options import (
    Command,
    check_model,
    connectivity_arguments,
    connectivity_of,
    field_options,
    json_argument,
    model_argument,
    print_result,
    quiet_transformers,
    task_arguments,
    text_argument,
)

if TYPE_CHECKING:
    from fcsd.base.strict import Rule

_MACHINE = ("gpu", "nodes", "gpus_per_node", "network_gb_s")


def _plan(arguments: Namespace) -> None:
    from fcsd.planning.cost.hardware import find_gpu
    from fcsd.planning.cost.settings import PlanSettings

    options = vars(arguments) | _cluster(arguments)
    # Bad paths are refused before the planning, not after it.
    if arguments.figure is not None:
        from fcsd.report.figure import check_figure

        check_file_place(arguments.figure, check_figure)
    if arguments.sweep is not None:
        _plan_sweep(arguments, options)
        return
    settings = PlanSettings.from_options(
        options, connectivity=connectivity_of(arguments)
    )
    find_gpu(settings.gpu)
    check_model(arguments, config_only=True)
    if arguments.windows is not None:
        if settings.phase != "train" and settings.data_parallel is None:
            raise UserError(
                f"--windows: --phase {arguments.phase} has no dispatch and combine; use"
                " train, or --dp"
            )
        from fcsd.planning.cost.windows import read_windows_file

        check_file_place(arguments.windows, read_windows_file)
    from fcsd.pipeline.plan import plan_from_files
    from fcsd.planning.cost.table import plan_table
    from fcsd.planning.cost.windows import write_windows

    names = ("links", "measured", "routing", "study", "figure")
    facts = plan_from_files(
        settings, **{name: getattr(arguments, name) for name in names}
    )
    if arguments.windows is not None:
        write_windows(facts, arguments.windows)
    print_result(arguments, facts, plan_table)


_SWEPT = {
    "nodes": int,
    "gpus-per-node": int,
    "network-gb-s": float,
    "batch": int,
    "global-batch": int,
    "length": int,
    "ep": int,
    "tp": int,
    "pp": int,
    "dp": int,
}
"""What `--sweep` varies, by the name of its option -> the type of a value."""


def _sweep_rules(
    arguments: Namespace, options: dict[str, Any], name: str, text: str
) -> Iterator[Rule]:
    """Yield what may not be together with `--sweep`, which varies `name`."""
    for other in ("windows", "study", "measured", "links"):
        yield (
            getattr(arguments, other) is not None,
            f"--sweep and --{other} are both given; plan one value with --{other}",
        )
    yield (
        name not in _SWEPT or not text,
        f"--sweep {arguments.sweep}: must look like nodes=1,2,4; one of"
        f" {', '.join(_SWEPT)} can be swept",
    )
    served = options.get("phase") not in (None, "train")
    for ranks in ("tp", "dp"):
        yield (
            name == "nodes" and served and options[ranks] is not None,
            f"--sweep nodes and --{ranks} are both given: a server of {options.get(ranks)}"
            f" ranks is the same on any number of nodes; leave --{ranks} out, or --sweep"
            f" {ranks}",
        )
    parser, key = ArgumentParser(), name.replace("-", "_")
    _plan_options(parser)
    yield (
        lambda: getattr(arguments, key) != parser.get_default(key),
        f"--sweep {name} and --{name} are both given; leave --{name} out",
    )


def _plan_sweep(arguments: Namespace, options: dict[str, Any]) -> None:
    """Plan for each value of `--sweep`."""
    from fcsd.base.strict import refuse
    from fcsd.pipeline.plan import sweep_plans
    from fcsd.planning.cost.settings import PlanSettings
    from fcsd.planning.cost.table import sweep_table

    name, _, text = arguments.sweep.partition("=")
    refuse(*_sweep_rules(arguments, options, name, text))
    key = name.replace("-", "_")
    values: dict[str, Any] = {}
    for value in text.split(","):
        try:
            number = _SWEPT[name](value)
        except ValueError:
            raise UserError(
                f"--sweep {arguments.sweep}: {value!r} is not a number; separate values"
                " by commas"
            ) from None
        try:
            values[value] = PlanSettings.from_options(
                options | {key: number}, connectivity=connectivity_of(arguments)
            )
        except UserError as error:
            values[value] = error
    rows = sweep_plans(values, routing=arguments.routing)
    facts = {
        "swept": name,
        "phase": arguments.phase or "train",
        "assumptions": options.get("assumptions") or {},
        "rows": rows,
    }
    if arguments.figure is not None:
        from fcsd.report.study_plots import plot_sweep

        plot_sweep(facts, arguments.figure)
    print_result(arguments, facts, sweep_table)


def _cluster(arguments: Namespace) -> dict[str, Any]:
    """Return the machine of the cluster file; {} without one."""
    if arguments.cluster is None:
        return {}
    if chosen := [name for name in _MACHINE if getattr(arguments, name) is not None]:
        name = chosen[0].replace("_", "-")
        raise UserError(
            f"--cluster and --{name} are both given, but the cluster file already sets"
            " it; leave one out"
        )
    from fcsd.planning.cost.machine import read_cluster

    return read_cluster(arguments.cluster)


def _machine_options(parser: _ActionsContainer) -> None:
    """Add what `plan` and `plan-layers` take of a machine and its work."""
    from fcsd.planning.cost.settings import PlanSettings

    parser.add_argument(
        "--cluster",
        type=Path,
        metavar="FILE",
        help=(
            "YAML with gpu, nodes, gpus_per_node, network_gb_s and assumptions, instead"
            " of the next four options; first replace the assumptions on which a"
            " server's gain hangs: {all_reduce_us: X, side_us: X}, your microseconds of"
            " an all-reduce by the engine, and by NCCL on a side stream"
        ),
    )
    field_options(parser, PlanSettings, *_MACHINE, default=None)
    field_options(parser, PlanSettings)
    parser.add_argument(
        "--links",
        type=Path,
        metavar="FILE",
        help="links between the --ep ranks, measured by `fcsd-steer profile-network`",
    )
    parser.add_argument(
        "--routing",
        type=Path,
        metavar="FOLDER",
        help=(
            "use the imbalance between ranks from a study of `fcsd-steer routing`"
            " instead of even routing"
        ),
    )


def _plan_options(parser: ArgumentParser) -> None:
    model_argument(parser, config_only=True)
    _machine_options(parser)
    connectivity_arguments(parser)
    parser.add_argument(
        "--sweep",
        metavar="NAME=A,B,…",
        help=(
            "plan for each value of one option and print one row per value, for example"
            " nodes=1,2,4,8; the option is one of nodes, gpus-per-node, network-gb-s,"
            " batch, global-batch, length, ep, tp, pp, dp"
        ),
    )
    parser.add_argument(
        "--measured",
        type=Path,
        metavar="FILE",
        help=(
            "use times measured by `fcsd trace` or `fcsd-bench serve` instead of the"
            " roofline"
        ),
    )
    parser.add_argument(
        "--study",
        type=Path,
        metavar="FOLDER",
        help=(
            "study of `fcsd layers`: show the quality cost of each selection beside its"
            " gain in time, and choose halves by time saved per loss"
        ),
    )
    parser.add_argument(
        "--figure",
        type=Path,
        metavar="FILE",
        help=(
            "write a PNG: with --study, speed-up against quality; with --sweep, gains and"
            " tokens/s per GPU against the swept value"
        ),
    )
    parser.add_argument(
        "--windows",
        type=Path,
        metavar="FILE",
        help="write the windows of dispatch and combine, in seconds by layer",
    )
    json_argument(parser)


def _layers(arguments: Namespace) -> None:
    from fcsd.planning.layers.settings import read_study, study_from_options

    quiet_transformers()
    study = study_from_options(vars(arguments))
    from fcsd.model.load import find_model
    from fcsd.parallel.launch import join_launch
    from fcsd.planning.layers.proposal import study_table
    from fcsd.planning.layers.study import study_layers
    from fcsd.report.study_plots import plot_layers

    launch = join_launch()
    study_layers(study, find_model(study.model), arguments.output, launch, plot_layers)
    if launch.first:
        print_result(arguments, read_study(arguments.output), study_table)


def _plan_layers(arguments: Namespace) -> None:
    from fcsd.planning.layers.settings import read_study

    has_machine = _has_machine(arguments)
    counts_alone = not has_machine and arguments.max_loss is not None
    if counts_alone:
        if arguments.verify or arguments.calibrated or arguments.model is not None:
            raise UserError(
                "--max-loss reads the finished study, with copied and with calibrated"
                " weights; --verify, --calibrated and --model belong to --budget, or to"
                " --gpu and --cluster"
            )
    elif not has_machine and arguments.budget is None:
        raise UserError(
            "give --budget or --max-loss; or, with the options of a plan (--gpu or"
            " --cluster), leave both out"
        )
    if arguments.model is not None and not (arguments.verify or has_machine):
        raise UserError("--model has no meaning without --verify, --gpu or --cluster")
    read_study(arguments.study)  # refuses, before a library is loaded
    quiet_transformers()
    from fcsd.parallel.launch import join_launch
    from fcsd.planning.layers.proposal import (
        layers_within,
        plan_layers,
        plan_text,
        within_text,
    )

    if counts_alone:
        counts = layers_within(arguments.study, arguments.max_loss)
        print_result(arguments, counts, within_text)
        return
    launch = join_launch() if arguments.verify else None
    # Without --verify there is no launch to ask for the first rank.
    is_first = os.environ.get("RANK", "0") == "0"
    if has_machine:
        from fcsd.pipeline.halves import Goal, choose_halves, halves_text

        result = choose_halves(
            vars(arguments) | _cluster(arguments),
            arguments.study,
            Goal(arguments.calibrated, arguments.budget, arguments.max_loss),
            links=arguments.links,
            routing=arguments.routing,
            model=arguments.model,
            launch=launch,
        )
        if is_first:
            print_result(arguments, result, halves_text)
        return
    plan = plan_layers(
        arguments.study,
        arguments.budget,
        calibrated=arguments.calibrated,
        model=arguments.model,
        verify=launch,
    )
    if is_first:
        print_result(arguments, plan, plan_text)


def _has_machine(arguments: Namespace) -> bool:
    """Tell whether the options name a machine; refuse options of a plan without one."""
    if arguments.cluster is not None or arguments.gpu is not None:
        return True
    parser = ArgumentParser(add_help=False)
    _machine_options(parser)
    for action in parser._actions:
        if getattr(arguments, action.dest) != action.default:
            raise UserError(
                f"{action.option_strings[0]} belongs to a plan, which needs --gpu or"
                " --cluster"
            )
    return False


def _layers_options(parser: ArgumentParser) -> None:
    from fcsd.evaluation.config import EvaluationConfig
    from fcsd.model.config import ModelConfig
    from fcsd.planning.layers.settings import Study

    most_tokens = Study.model_fields["calibration_tokens"].default
    model_argument(parser)
    parser.add_argument(
        "--output",
        type=Path,
        required=True,
        help="folder for layers.json and layers.png",
    )
    text_argument(parser, "measure the KL to the original on this text")
    field_options(parser, Study, "text_examples", "max_length")
    field_options(
        parser,
        Study,
        "loss_on",
        help="tokens over which the KL is computed: response or all",
    )
    parser.add_argument(
        "--calibrated",
        metavar="TEXT",
        help=(
            "also measure every selection with weights calibrated (`fcsd calibrate`) on"
            f" this text (up to {most_tokens:,} tokens), in the format of --text; it must"
            " differ from the measured text, and a short one takes less time"
        ),
    )
    task_arguments(parser, "measure this task")
    field_options(
        parser,
        EvaluationConfig,
        "batch_size",
        type=int,
        help="sequences in one forward pass of a task",
    )
    field_options(parser, Study, "limit")
    parser.add_argument(
        "--sides",
        help=(
            "sides to measure: any of first,last,single,attention (default: the first"
            " three, as far as they can be measured); attention: also attention ahead in"
            " one layer alone, for plan-layers with --gpu"
        ),
    )
    field_options(parser, Study, "every", "attention", "mlp")
    field_options(parser, ModelConfig, "dtype")
    field_options(parser, Study)
    json_argument(parser)


def _plan_layers_options(parser: ArgumentParser) -> None:
    parser.add_argument(
        "study", metavar="STUDY", type=Path, help="folder that `fcsd layers` wrote"
    )
    goal = parser.add_mutually_exclusive_group()
    goal.add_argument(
        "--budget",
        help="share of the layers (90%%) or their number (43); with a machine, at most"
        " so many MLP sides ahead",
    )
    goal.add_argument(
        "--max-loss",
        type=float,
        metavar="X",
        help=(
            "instead, print how many layers from either end can be rewired without"
            " training at this KL, or at this loss of a task's score; with a machine,"
            " choose what saves most time at this loss"
        ),
    )
    parser.add_argument(
        "--calibrated",
        action="store_true",
        help=(
            "choose by the cost of the layers with calibrated weights (needs a study"
            " with --calibrated)"
        ),
    )
    parser.add_argument(
        "--verify",
        action="store_true",
        help="measure the proposal and the last N layers on the study's data",
    )
    parser.add_argument(
        "--model",
        help=(
            "with --verify or a machine: the path of the study's model, if it has moved"
        ),
    )
    _machine_options(
        parser.add_argument_group(
            "machine",
            "With --gpu or --cluster, halves are chosen by planned time saved per loss, on"
            " this machine. Without --budget and --max-loss, the choice is where the"
            " share of the time saved exceeds the share of the loss most.",
        )
    )
    json_argument(parser)


COMMANDS = {
    "plan": Command(
        "Predict how much faster a step or a token becomes with FarSkip connectivity on"
        " a cluster, compared with the best schedule that changes no equation and with"
        " regular blocks.",
        _plan_options,
        _plan,
        "It loads no weights and trains nothing; it fetches only config.json from the"
        " Hub (docs/plan.md).",
    ),
    "layers": Command(
        "Measure quality against the number of rewired layers, without training (paper"
        " Fig. 3).",
        _layers_options,
        _layers,
        "It rewires layers from the start, from the end, and one at a time, and"
        " measures suite tasks, the KL to the original, or both. The same command"
        " continues an interrupted run.",
    ),
    "plan-layers": Command(
        "Propose which layers to rewire, for a given share of layers, from a finished"
        " layer study.",
        _plan_layers_options,
        _plan_layers,
        "It proposes the layers that cost least when each is rewired alone, or, given a"
        " machine, those that save most planned time for what they cost, and compares"
        " them with the last N. It prints the options, and YAML.",
    ),
}
