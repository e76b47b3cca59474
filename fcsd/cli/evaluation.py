"""Commands that measure a model on tasks: evaluate, score, compare."""

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from fcsd.cli.options import (
    DATA_ROOT_HELP,
    SEVERAL_EVALUATE,
    Command,
    device_map_argument,
    expert_parallel_argument,
    field_option,
    json_argument,
    launch_of,
    model_argument,
    print_result,
    quiet_transformers,
    sandbox_argument,
)
from fcsd.errors import UserError

if TYPE_CHECKING:
    from fcsd.config.recipe import ServerConfig
    from fcsd.config.suite import SuiteConfig
    from fcsd.evaluate.stage import Evaluation


def _evaluate(arguments: argparse.Namespace) -> None:
    from fcsd.evaluate.fetch import fetch_suite

    launch = launch_of(arguments)
    suite = _suite(arguments)
    if arguments.fetch is not None:
        if arguments.data_root is not None:
            raise UserError("--fetch and --data-root are both given; leave one out")
        fetched = launch.ranks.from_first(lambda: fetch_suite(suite, arguments.fetch))
        if launch.first:
            found = ", ".join(fetched) if fetched else "everything was there"
            print(f"{arguments.fetch}: {found}", file=sys.stderr)
        if arguments.model is None:
            return
    for name in ("model", "output"):
        if getattr(arguments, name) is None:
            raise UserError(f"{'MODEL' if name == 'model' else '--output'} is required")
    from fcsd.evaluate.stage import run_evaluation
    from fcsd.report.table import result_table

    quiet_transformers()
    run_evaluation(_evaluation(arguments, suite), arguments.output, launch)
    if not launch.first:
        return
    if arguments.json:
        print((arguments.output / "results.json").read_text(encoding="utf-8"))
    else:
        print(result_table(arguments.output))


def _evaluation(arguments: argparse.Namespace, suite: "SuiteConfig") -> "Evaluation":
    """Return what the options ask for; whether a number is in its range is for what it is handed to."""
    from fcsd.config.model import ModelConfig
    from fcsd.config.recipe import EvaluationConfig
    from fcsd.evaluate.stage import Evaluation
    from fcsd.routing.bias import read_tables

    data_root, cache = arguments.fetch or arguments.data_root, arguments.cache
    return Evaluation(
        name=arguments.model,
        model=ModelConfig(
            path=arguments.model,
            revision=arguments.revision,
            trust_remote_code=arguments.trust_remote_code,
        ),
        suite=suite,
        plan=EvaluationConfig.model_construct(
            data_root=None if data_root is None else str(data_root),
            batch_size=arguments.batch_size,
            cache=None if cache is None else str(cache),
            limit=arguments.limit,
            allow_weak_sandbox=arguments.allow_weak_sandbox,
            server=_server(arguments),
        ),
        device_map=arguments.device_map,
        server_check=not arguments.no_server_check,
        bias=None if arguments.router_bias is None else read_tables(arguments.router_bias),
    )


def _server(arguments: argparse.Namespace) -> "ServerConfig | None":
    """Return the server that is to be asked, if one is given."""
    from fcsd.config.recipe import EvaluationConfig, ServerConfig
    from fcsd.config.strict import validate

    if arguments.server is None:
        for option in ("concurrency", "no_server_check"):
            if getattr(arguments, option) not in (None, False):
                raise UserError(f"--{option.replace('_', '-')} has no meaning without --server")
        return None
    if arguments.batch_size != EvaluationConfig.model_fields["batch_size"].default:
        raise UserError(
            "--batch-size has no meaning with --server; how many are asked at a time is --concurrency"
        )
    if arguments.device_map is not None and arguments.no_server_check:
        raise UserError("--device-map has no meaning with --server and --no-server-check: no model is loaded")
    given = {"url": arguments.server, "concurrency": arguments.concurrency}
    return validate(
        ServerConfig, {name: value for name, value in given.items() if value is not None}, "--server"
    )


def _suite(arguments: argparse.Namespace) -> "SuiteConfig":
    """Return the suite, or the tasks that are named, under the settings that are given for all of them."""
    from fcsd.config.suite import changed_suite, load_suite

    suite = load_suite(arguments.suite)
    if arguments.tasks is not None:
        from fcsd.evaluate.lm_eval.chosen import chosen_suite

        names = [name for word in arguments.tasks.split(",") if (name := word.strip())]
        suite = chosen_suite(list(dict.fromkeys(names)), suite, arguments.include_path)
    elif arguments.include_path is not None:
        raise UserError("--include-path has no meaning without --tasks, which names tasks of that folder")
    return changed_suite(
        suite,
        chat_template=arguments.apply_chat_template or None,
        system_prompt=arguments.system_prompt,
        thinking=arguments.thinking or None,
    )


def _score(arguments: argparse.Namespace) -> None:
    from fcsd.config.suite import load_suite
    from fcsd.evaluate.ready import Scoring, score_file
    from fcsd.report.table import score_table

    options = {each.name: getattr(arguments, each.name) for each in dataclasses.fields(Scoring)}
    result = score_file(Scoring(**options | {"suite": load_suite(arguments.suite)}))
    print_result(arguments, result, score_table)


def _compare(arguments: argparse.Namespace) -> None:
    from fcsd.report.comparison import compare_all, comparison_text, read_evaluated, write_comparison

    evaluated = read_evaluated(arguments.original, arguments.converted)
    only = None if arguments.tasks is None else [task.strip() for task in arguments.tasks.split(",")]
    comparisons = compare_all(evaluated, only)
    if arguments.output is not None:
        write_comparison(evaluated, arguments.output, only)
    print_result(arguments, comparisons, lambda found: comparison_text(found, evaluated))


def _add_evaluate(command: Command) -> None:
    parser = command(
        "evaluate",
        _evaluate,
        "Evaluate a checkpoint on a suite of tasks.",
        "For the original and for the converted model: `fcsd evaluate MODEL --output results/NAME --batch-size auto`;"
        " then `fcsd compare` sets both side by side. Without a network, --data-root ROOT reads a folder that"
        " `fcsd evaluate --fetch ROOT` has filled. Finished tasks are kept: the same command goes on with the next one."
        f" Generated code runs only in a sandbox. {SEVERAL_EVALUATE}",
    )
    model_argument(parser, optional=True)
    field_option(
        parser,
        "evaluation.suite",
        "paper11, paper11_chat, pretrain9, camoe9, instruct, livecodebench, tiny, or the path of your suite file"
        " (docs/evaluation.md)",
        default="paper11",
    )
    parser.add_argument(
        "--tasks",
        metavar="A,B,…",
        help="only these: rows of the suite, or any task or group of lm-eval, with its own shots and metric",
    )
    parser.add_argument(
        "--include-path",
        type=Path,
        metavar="DIR",
        help="with --tasks: your own task definitions (lm-eval YAML)",
    )
    parser.add_argument(
        "--apply-chat-template",
        action="store_true",
        help="ask every task through the chat template, shots as turns",
    )
    parser.add_argument(
        "--system-prompt", metavar="TEXT", help="first turn of every task that has a chat template"
    )
    parser.add_argument(
        "--thinking",
        action="store_true",
        help="let a hybrid think before it writes an answer (needs room for it)",
    )
    field_option(parser, "evaluation.data_root", DATA_ROOT_HELP, type=Path)
    parser.add_argument(
        "--fetch",
        type=Path,
        metavar="ROOT",
        help="first fill this folder with the suite's data sets from the Hub, and use it as --data-root; without MODEL"
        " that is all",
    )
    parser.add_argument("--output", type=Path, help="folder for results.json and samples_*.jsonl")
    field_option(
        parser, "evaluation.batch_size", "sequences in one forward, or auto: as many as fit the memory"
    )
    field_option(
        parser,
        "evaluation.cache",
        "folder of finished tasks that several evaluations share; they are found by hashes of weights, tokenizer, data"
        " and settings, never by a path",
        type=Path,
    )
    field_option(
        parser,
        "evaluation.limit",
        "the first items of every task only, for a quick look; every table says so",
    )
    expert_parallel_argument(parser)
    device_map_argument(parser)
    parser.add_argument(
        "--router-bias",
        type=Path,
        metavar="TABLES",
        help="steer the model's routers by what `fcsd bias` wrote; batch j of a task belongs to endpoint j mod N",
    )
    _server_arguments(parser)
    sandbox_argument(parser)
    json_argument(parser)


def _server_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--server",
        metavar="URL",
        help="ask a server for all answers (`vllm serve MODEL`), after a check that it serves MODEL; its key, if it"
        " wants one, is in FCSD_SERVER_API_KEY",
    )
    parser.add_argument(
        "--concurrency", type=int, metavar="N", help="with --server: requests at a time (default: 64)"
    )
    parser.add_argument(
        "--no-server-check",
        action="store_true",
        help="with --server: do not load MODEL to check that it is what the server serves; the result says so",
    )


def _add_score(command: Command) -> None:
    parser = command(
        "score",
        _score,
        "Grade a file of ready samples, programs or answers to lm-eval's generation tasks.",
        "A line is {doc_id, completion}, {task_id, solution}, {task_id, completion}, or what `fcsd evaluate` wrote into"
        " samples_TASK.jsonl; several samples of a problem give pass@k, several answers the mean. Programs run only"
        " in the sandbox, answers are graded by lm-eval's own filters and metrics.",
    )
    parser.add_argument("samples", metavar="SAMPLES", type=Path, help=".jsonl or .jsonl.gz file")
    parser.add_argument(
        "--dataset",
        metavar="TASK",
        help="a task of the suite or of lm-eval, or the path of a code data set; without it, every line has its `task`",
    )
    field_option(parser, "evaluation.suite", "whose rows say how a task is graded", default="paper11")
    parser.add_argument(
        "--include-path", type=Path, metavar="DIR", help="your own task definitions (lm-eval YAML)"
    )
    parser.add_argument(
        "--thinking", action="store_true", help="cut off the thoughts before an answer, which end at </think>"
    )
    field_option(parser, "evaluation.data_root", DATA_ROOT_HELP, type=Path)
    parser.add_argument("--output", type=Path, help="folder for results.json and samples_*.jsonl")
    parser.add_argument("--partial", action="store_true", help="leave out problems that have no sample")
    parser.add_argument("--timeout-s", type=float, help="processor time of one program (default: 10)")
    parser.add_argument(
        "--scorer",
        choices=["fcsd", "evalplus"],
        default="fcsd",
        help="evalplus: the package of that name, in a process of its own, without our sandbox",
    )
    parser.add_argument("--evalplus-data", type=Path, help="with --scorer evalplus: its own .jsonl.gz file")
    sandbox_argument(parser)
    json_argument(parser)


def _add_compare(command: Command) -> None:
    parser = command(
        "compare",
        _compare,
        "Original against converted, per task, with paired errors.",
        "Item by item: the difference and its 95 % interval, items gained and lost, exact McNemar p, and a verdict in"
        " words. Results may be of different times; other items, prompts, shots or data are refused.",
    )
    parser.add_argument(
        "original", metavar="A", type=Path, help="folder of `fcsd evaluate`, or of lm_eval --log_samples"
    )
    parser.add_argument("converted", metavar="B", type=Path, nargs="+", help="folders to set against it")
    parser.add_argument(
        "--output",
        type=Path,
        help="new folder for table, figures, a page of all answers, and lm-eval's files",
    )
    parser.add_argument(
        "--tasks", metavar="A,B,…", help="only these, where not every result has the same tasks"
    )
    json_argument(parser)


def add_commands(command: Command) -> None:
    """Add these commands to the parser."""
    _add_evaluate(command)
    _add_score(command)
    _add_compare(command)
