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


def _plan(arguments: Namespace) -> None:
    settings = PlanSettings(
        arguments.model,
        arguments.revision,
        **_machine(arguments),
        phase=arguments.phase,
        expert_parallel=arguments.ep,
        tensor_parallel=arguments.tp,
        batch=arguments.batch,
        global_batch=arguments.global_batch,
        length=arguments.length,
        fp8=arguments.fp8,
        fused_attention=not arguments.unfused_attention,
        connectivity=connectivity_of(arguments),
    )
    if arguments.windows is not None:
        if arguments.phase != "train":
            raise UserError(
                f"--windows: of dispatch and combine, which --phase {arguments.phase} has not; use train"
            )
        check_file_place(arguments.windows, read_windows_file)
    if arguments.figure is not None:
        check_file_place(arguments.figure, check_figure)
    names = ("links", "measured", "routing", "study", "metric", "figure")
    facts = plan_from_files(settings, **{name: getattr(arguments, name) for name in names})
    if arguments.windows is not None:
        write_windows(facts, arguments.windows)
    print_result(arguments, facts, plan_table)


def _machine(arguments: Namespace) -> dict[str, Any]:
    """Return the machine's settings: from the cluster file, or from the options."""
    given = {name: getattr(arguments, name) for name in ("gpu", "nodes", "gpus_per_node", "network_gb_s")}
    chosen = {name: value for name, value in given.items() if value is not None}
    if arguments.cluster is None:
        return chosen
    if chosen:
        name = next(iter(chosen)).replace("_", "-")
        raise UserError(f"--cluster and --{name} are both given; the cluster file has both, leave one out")
    return read_cluster(arguments.cluster)


def _machine_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--cluster",
        type=Path,
        metavar="FILE",
        help="YAML with gpu, nodes, gpus_per_node, network_gb_s and assumptions, instead of the next four options",
    )
    parser.add_argument("--gpu", help="a100, h100, h200, mi325x, … (a wrong name lists all; default: h200)")
    parser.add_argument("--nodes", type=int, metavar="N", help="default: 1")
    parser.add_argument("--gpus-per-node", type=int, metavar="N", help="default: 8")
    parser.add_argument(
        "--network-gb-s",
        type=float,
        metavar="X",
        help="between nodes, GB/s for each GPU (default: the vendor's reference system, an interface for every GPU)",
    )


def _file_arguments(parser: ArgumentParser) -> None:
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


def _plan_options(parser: ArgumentParser) -> None:
    model_argument(parser, config_only=True)
    _machine_arguments(parser)
    parser.add_argument(
        "--phase", choices=["train", "prefill", "decode"], default="train", help="what is timed"
    )
    parser.add_argument(
        "--ep",
        type=int,
        metavar="N",
        help="ranks that share the experts (default: all GPUs; in serving --tp)",
    )
    parser.add_argument(
        "--tp", type=int, metavar="N", help="tensor-parallel ranks of a server (default: all GPUs)"
    )
    parser.add_argument(
        "--batch",
        type=int,
        default=1,
        metavar="N",
        help="rows of a rank's micro-batch; in serving requests at once",
    )
    parser.add_argument(
        "--global-batch",
        type=int,
        metavar="N",
        help="rows of an optimiser step (default: one micro-batch a rank)",
    )
    parser.add_argument(
        "--length",
        type=int,
        default=4096,
        metavar="N",
        help="tokens of a row, of a prompt, or of the text so far",
    )
    parser.add_argument("--fp8", action="store_true", help="projections and experts in FP8")
    parser.add_argument(
        "--unfused-attention",
        action="store_true",
        help="attention with its scores in memory, not in one kernel",
    )
    connectivity_arguments(parser)
    _file_arguments(parser)
    json_argument(parser)


COMMANDS = {
    "plan": Command(
        "What FarSkip connectivity will bring on a cluster: time of a step or to a token, regular and overlapped.",
        _plan_options,
        _plan,
        "No weights are loaded and nothing is trained; of a hub id only config.json is fetched (docs/plan.md).",
    ),
}
