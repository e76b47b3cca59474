"""Commands on the network between ranks: profile-network."""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from fcsd.base.errors import UserError
from fcsd.base.files import check_file_place
from fcsd.cli.lazy import lazy_imports
from fcsd.cli.options import Command

with lazy_imports():
    from fcsd.parallel.launch import join_launch
    from fcsd.steering.network.links import read_links, write_links
    from fcsd.steering.network.measure import describe, profile_launch
    from fcsd.steering.network.nccl_tests import read_nccl_tests


def _profile_network(arguments: Namespace) -> None:
    if arguments.nccl_tests is not None:
        _from_nccl_tests(arguments)
        return
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
                f"--{option.replace('_', '-')} has no meaning with --nccl-tests: nothing is measured"
            )
    check_file_place(arguments.links, read_links)
    links = read_nccl_tests(arguments.nccl_tests)
    write_links(arguments.links, links)
    print(describe(links))
    print(
        "nccl-tests times all edges together: all have the same latency and rate here, and no port is known"
    )


def _profile_network_options(parser: ArgumentParser) -> None:
    parser.add_argument("links", metavar="LINKS", type=Path, help="file for the links (JSON)")
    parser.add_argument(
        "--collective",
        choices=["all_to_all_single", "p2p"],
        default="all_to_all_single",
        help="what is measured: the all-to-all that expert parallelism uses, or every irecv, then every isend",
    )
    parser.add_argument(
        "--max-bytes",
        type=int,
        metavar="N",
        help="largest message on one edge: what a rank sends another in one exchange (default: 1 MiB, 16 MiB on a GPU)",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="then exchange 18 patterns of traffic, and say how far simulation is off",
    )
    parser.add_argument(
        "--nccl-tests",
        type=Path,
        metavar="FILE",
        help="read this output of alltoall_perf or sendrecv_perf (nccl-tests, rccl-tests) instead",
    )


COMMANDS = {
    "profile-network": Command(
        "Measure latency and rate of the links between the ranks of a launch, from which exchanges are simulated.",
        _profile_network_options,
        _profile_network,
        "accelerate launch --config_file configs/cpu_2.yaml -m fcsd profile-network links.json (docs/steer.md).",
    ),
}
