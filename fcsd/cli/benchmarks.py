"""Commands that measure how fast a model is: bench."""

import argparse
from pathlib import Path

from fcsd.cli.options import Command, json_argument, print_result


def _bench(arguments: argparse.Namespace) -> None:
    from fcsd.bench.plan import benchmark_from_options
    from fcsd.bench.serve import bench_serve
    from fcsd.bench.summary import table
    from fcsd.report.study_plots import plot_serving

    benchmark = benchmark_from_options(vars(arguments))
    result = bench_serve(benchmark, arguments.vllm, arguments.output, plot_serving)
    print_result(arguments, result, table)


def add_commands(command: Command) -> None:
    """Add these commands to the parser."""
    parser = command(
        "bench",
        _bench,
        "A converted model against its original in servers of vLLM: time to the first token and between tokens.",
        "`fcsd bench serve MODEL --against ORIGINAL --output DIR` starts one server after another, in turns: stock,"
        " stock with each exact way to hide communication that this machine has, FarSkip blocking and overlapped."
        " Continues where it was cut off (docs/serving_bench.md).",
    )
    parser.add_argument(
        "benchmark", choices=["serve"], metavar="serve", help="what is measured: servers of vLLM"
    )
    parser.add_argument("model", metavar="MODEL", help="the converted model, hub id or local folder")
    parser.add_argument(
        "--against",
        metavar="ORIGINAL",
        required=True,
        help="what it was converted from, hub id or local folder",
    )
    parser.add_argument(
        "--output", type=Path, required=True, help="folder for the runs, the table and the figure"
    )
    parser.add_argument(
        "--vllm",
        default="vllm",
        metavar="PATH",
        help="the `vllm` program of an environment with vLLM and fcsd-serving; it is not fcsd's own environment",
    )
    parser.add_argument(
        "--tensor-parallel",
        type=int,
        default=1,
        metavar="N",
        help="ranks of a server; the experts are spread over them, too",
    )
    parser.add_argument(
        "--comm",
        metavar="NAME|JSON",
        help="what the overlapped row communicates by: stream, c10d, timed, or the plugin's settings such as"
        ' \'{"comm": "timed", "latency_ms": 2}\' (default: what the plugin takes)',
    )
    parser.add_argument(
        "--serve-args",
        metavar="FLAGS",
        help="flags of `vllm serve` for every server, in one word: --serve-args='--quantization fp8'",
    )
    parser.add_argument(
        "--prompt-tokens", default="512,1024,2048", metavar="N,…", help="lengths of the prompts"
    )
    parser.add_argument(
        "--requests", type=int, default=16, metavar="N", help="sent at once, in every measurement"
    )
    parser.add_argument(
        "--output-tokens",
        type=int,
        default=128,
        metavar="N",
        help="of an answer, for the time between tokens",
    )
    parser.add_argument(
        "--rounds", type=int, default=3, metavar="N", help="how often every server is started and measured"
    )
    parser.add_argument(
        "--rows",
        metavar="A,B,…",
        help="only these: stock, dbo_prefill, dbo_decode, shared_stream, fused_allreduce, farskip_blocking,"
        " farskip_overlapped (default: all)",
    )
    parser.add_argument(
        "--trace",
        action="store_true",
        help="start stock and FarSkip once more under vLLM's profiler: overlap from its trace, and a figure of one"
        " layer (GPUs)",
    )
    json_argument(parser)
