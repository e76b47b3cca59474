"""Commands that tell what a conversion will bring: plan."""

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from fcsd.base.errors import UserError
from fcsd.base.files import check_file_place
from fcsd.cli.lazy import lazy_imports
from fcsd.cli.options import (
    Command,
    connectivity_arguments,
    connectivity_of,
    field_options,
    json_argument,
    model_argument,
    print_result,
)

with lazy_imports():
    from fcsd.pipeline.plan import plan_from_files
    from fcsd.planning.cost.machine import read_cluster
    from fcsd.planning.cost.plan import write_windows
    from fcsd.planning.cost.planned import PlanSettings
    from fcsd.planning.cost.table import plan_table
    from fcsd.report.figure import check_figure
    from fcsd.steering.routing.tables import read_windows_file


_MACHINE = ("gpu", "nodes", "gpus_per_node", "network_gb_s")


def _plan(arguments: Namespace) -> None:
    options = vars(arguments) | _cluster(arguments)
    settings = PlanSettings.from_options(options, connectivity=connectivity_of(arguments))
    if arguments.windows is not None:
        if settings.phase != "train" and settings.data_parallel is None:
            raise UserError(
                f"--windows: of dispatch and combine, which --phase {arguments.phase} has not; use train, or --dp"
            )
        check_file_place(arguments.windows, read_windows_file)
    if arguments.figure is not None:
        check_file_place(arguments.figure, check_figure)
    names = ("links", "measured", "routing", "study", "metric", "figure")
    facts = plan_from_files(settings, **{name: getattr(arguments, name) for name in names})
    if arguments.windows is not None:
        write_windows(facts, arguments.windows)
    print_result(arguments, facts, plan_table)


def _cluster(arguments: Namespace) -> dict[str, Any]:
    """Return what a cluster file says of the machine; nothing without one."""
    if arguments.cluster is None:
        return {}
    if chosen := [name for name in _MACHINE if getattr(arguments, name) is not None]:
        name = chosen[0].replace("_", "-")
        raise UserError(f"--cluster and --{name} are both given; the cluster file has both, leave one out")
    return read_cluster(arguments.cluster)


def _plan_options(parser: ArgumentParser) -> None:
    model_argument(parser, config_only=True)
    parser.add_argument(
        "--cluster",
        type=Path,
        metavar="FILE",
        help="YAML with gpu, nodes, gpus_per_node, network_gb_s and assumptions, instead of the next four options",
    )
    field_options(parser, PlanSettings, *_MACHINE, default=None)
    field_options(parser, PlanSettings)
    connectivity_arguments(parser)
    parser.add_argument("--links", type=Path, metavar="FILE", help="measured links between the --ep ranks")
    parser.add_argument(
        "--measured",
        type=Path,
        metavar="FILE",
        help="measured times (of `fcsd trace` or `fcsd bench serve`), not the roofline",
    )
    parser.add_argument(
        "--routing",
        type=Path,
        metavar="FOLDER",
        help="routing study (`fcsd routing`): the imbalance of this model's ranks, not even routing",
    )
    parser.add_argument(
        "--study",
        type=Path,
        metavar="FOLDER",
        help="layer study: what each selection brings beside what it costs",
    )
    parser.add_argument("--metric", metavar="NAME", help="of the study (default: its first)")
    parser.add_argument(
        "--figure", type=Path, metavar="FILE", help="PNG of speed-up against quality, with --study"
    )
    parser.add_argument(
        "--windows",
        type=Path,
        metavar="FILE",
        help="write the windows of dispatch and combine, seconds by layer",
    )
    json_argument(parser)


COMMANDS = {
    "plan": Command(
        "What FarSkip connectivity will bring on a cluster: time of a step or to a token, regular and overlapped.",
        _plan_options,
        _plan,
        "No weights are loaded and nothing is trained; of a hub id only config.json is fetched (docs/plan.md).",
    ),
}
