"""The `fcsd-bench` command: how fast servers of a converted model are.

Slow libraries, and modules that load them, are imported inside functions and after the
checks of the options: help and mistakes then appear at once.
"""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from fcsd.cli.options import Command, field_options, json_argument, print_result
from fcsd.cli.program import Program


def _serve(arguments: Namespace) -> None:
    from fcsd_bench.settings import Benchmark

    engine, program = (
        ("sglang", arguments.sglang) if arguments.sglang else ("vllm", arguments.vllm)
    )
    benchmark = Benchmark.from_options(vars(arguments), engine=engine)
    from fcsd_bench.serve import bench_serve
    from fcsd_bench.summary import table

    result = bench_serve(benchmark, program, arguments.output)
    print_result(arguments, result, table)


def _serve_options(parser: ArgumentParser) -> None:
    from fcsd_bench.settings import Benchmark

    parser.add_argument(
        "model", metavar="MODEL", help="the converted model, hub id or local folder"
    )
    field_options(parser, Benchmark, "against", type=None)
    parser.add_argument(
        "--output",
        type=Path,
        required=True,
        help="folder for the runs, the table and the figure",
    )
    engines = parser.add_mutually_exclusive_group()
    engines.add_argument(
        "--vllm",
        default="vllm",
        metavar="PATH",
        help=(
            "the `vllm` program of a separate environment with vLLM and fcsd-serving"
        ),
    )
    engines.add_argument(
        "--sglang",
        metavar="PATH",
        help=(
            "measure SGLang instead, with the `sglang` program of a separate"
            " environment with SGLang and fcsd-serving"
        ),
    )
    field_options(parser, Benchmark)
    json_argument(parser)


COMMANDS = {
    "serve": Command(
        "Time a converted model and its original in servers of vLLM or SGLang: time to"
        " the first token and between tokens.",
        _serve_options,
        _serve,
        "`fcsd-bench serve MODEL --against ORIGINAL --output DIR` starts one server"
        " after another, in turn: stock, stock with each exact way to hide"
        " communication that this machine supports, FarSkip blocking and overlapped. If"
        " MODEL has no weights (`fcsd convert --config-only`), every server gets"
        " --load-format dummy, and the result says so. The same command continues an"
        " interrupted run (docs/serve.md).",
    ),
}

BENCH = Program(
    name="fcsd-bench",
    description="Measure servers of a converted model against those of its original.",
    epilog="docs/serve.md has examples. `fcsd-bench COMMAND --help` explains each command.",
    commands=COMMANDS,
)
