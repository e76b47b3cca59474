"""Commands that measure a model on tasks: evaluate, compare."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fcsd.base.errors import UserError
from fcsd.base.text import show
from fcsd.cli.options import (
    Command,
    check_model,
    device_map_argument,
    expert_parallel_argument,
    field_options,
    json_argument,
    launch_of,
    model_argument,
    print_result,
    quiet_transformers,
)

if TYPE_CHECKING:
    from fcsd.evaluation.config import EvaluationConfig, ServerConfig, SuiteConfig
    from fcsd.model.config import ModelConfig


def _evaluate(arguments: Namespace) -> None:
    if arguments.samples is not None:
        _grade_samples(arguments)
        return
    _refuse_given(arguments, _samples_defaults(), "has no meaning without --samples")
    launch = launch_of(arguments)
    suite = _suite(arguments)
    if arguments.fetch is not None:
        if arguments.data_root is not None:
            raise UserError("--fetch and --data-root are both given; leave one out")
        from fcsd.evaluation.datasets import fetch_suite

        fetched = launch.ranks.from_first(lambda: fetch_suite(suite, arguments.fetch))
        if launch.first:
            summary = ", ".join(fetched) if fetched else "everything was already there"
            print(f"{arguments.fetch}: {summary}", file=sys.stderr)
        if arguments.model is None:
            return
    # argparse cannot require them: with --fetch alone neither is needed.
    for name in ("model", "output"):
        if getattr(arguments, name) is None:
            raise UserError(f"{'MODEL' if name == 'model' else '--output'} is required")
    check_model(arguments)
    if arguments.original is not None and not suite.has_own_text:
        raise UserError(
            f"--original: no task of suite {suite.name} is own text, which alone"
            " compares a model with its original; leave it out, or choose a suite with"
            " own text (paper11_own_text)"
        )
    from fcsd.evaluation.results import read_numbers
    from fcsd.evaluation.runner import own_original, refuse_converted
    from fcsd.evaluation.stage import PlannedEvaluation, run_evaluation
    from fcsd.model.load import find_model
    from fcsd.parallel.place import check_device_map, check_overlap_of
    from fcsd.report.table import result_table

    quiet_transformers()
    model, config = _model_and_config(arguments)
    check_device_map(arguments.device_map, launch)
    checkpoint = find_model(model)
    check_overlap_of(checkpoint, launch)
    original = None
    if arguments.original is not None:
        original = find_model(model.model_copy(update={"path": arguments.original}))
        refuse_converted(arguments.original, original.any_checkpoint.config)
    evaluation = PlannedEvaluation(
        name=arguments.model,
        model=checkpoint,
        suite=suite,
        config=config,
        server_check=not arguments.no_server_check,
        original=original,
        device_map=arguments.device_map,
    )
    if suite.has_own_text and original is None:
        known = checkpoint.any_checkpoint.config
        if launch.ranks.from_first(lambda: own_original(arguments.model, known)):
            evaluation = replace(evaluation, original=evaluation.model)
    result = run_evaluation(evaluation, arguments.output, launch)
    if not launch.first:
        return
    if arguments.json:
        print((arguments.output / "results.json").read_text(encoding="utf-8"))
    else:
        show(result_table(result or read_numbers(arguments.output)))


# Options of a file of samples alone, and those that a model and a file share.
_SAMPLES_ONLY = frozenset({"partial", "timeout_s"})
_FOR_SAMPLES = frozenset(
    {
        *("command", "run", "json", "samples", "output"),
        *("suite", "tasks", "include_path", "thinking", "data_root"),
        "allow_weak_sandbox",
    }
)


def _model_and_config(arguments: Namespace) -> tuple[ModelConfig, EvaluationConfig]:
    """Return the model and the settings that the options describe."""
    from fcsd.evaluation.config import EvaluationConfig
    from fcsd.model.config import ModelConfig

    options = vars(arguments)
    places = {
        "data_root": arguments.fetch or arguments.data_root,
        "cache": arguments.cache,
    }
    model = ModelConfig.from_options(options, path=arguments.model)
    return model, EvaluationConfig.from_options(
        options,
        server=_server(arguments),
        **{name: str(path) for name, path in places.items() if path is not None},
    )


def _server(arguments: Namespace) -> ServerConfig | None:
    from fcsd.base.strict import refuse
    from fcsd.evaluation.config import EvaluationConfig, ServerConfig

    if arguments.server is None:
        for option in ("concurrency", "no_server_check"):
            if getattr(arguments, option) not in (None, False):
                raise UserError(
                    f"--{option.replace('_', '-')} has no meaning without --server"
                )
        return None
    # With a server, concurrency takes its place. The default value counts as not given.
    refuse(
        (
            arguments.batch_size != EvaluationConfig.model_fields["batch_size"].default,
            "--batch-size has no meaning with --server; use --concurrency",
        ),
        (
            arguments.device_map is not None and arguments.no_server_check,
            "--device-map has no meaning with --server and --no-server-check: no model"
            " is loaded",
        ),
    )
    settings = {"url": arguments.server, "concurrency": arguments.concurrency}
    # Options that were not given must not hide the defaults of the record.
    settings = {name: value for name, value in settings.items() if value is not None}
    return ServerConfig.from_plain(settings, "--server")


def _suite(arguments: Namespace) -> SuiteConfig:
    """Return the suite, or the named tasks of it, with the settings that the options
    give for all tasks.
    """
    from fcsd.evaluation.suites import changed_suite, chosen_suite, load_suite

    suite = load_suite(arguments.suite)
    if arguments.tasks is not None:
        names = [name for word in arguments.tasks.split(",") if (name := word.strip())]
        suite = chosen_suite(list(dict.fromkeys(names)), suite, arguments.include_path)
    elif arguments.include_path is not None:
        raise UserError(
            "--include-path has no meaning without --tasks; name the tasks of that"
            " folder there"
        )
    return changed_suite(
        suite,
        chat_template=arguments.apply_chat_template or None,
        system_prompt=arguments.system_prompt,
        thinking=arguments.thinking or None,
    )


def _grade_samples(arguments: Namespace) -> None:
    """Grade a file of samples that another program generated."""
    parser = ArgumentParser()
    _evaluate_options(parser)
    foreign = vars(arguments).keys() - _FOR_SAMPLES - _SAMPLES_ONLY
    defaults = {name: parser.get_default(name) for name in foreign}
    reason = "has no meaning with --samples, which runs no model"
    _refuse_given(arguments, defaults, reason)
    from fcsd.evaluation.config import SampleFile
    from fcsd.evaluation.grade_file import score_file
    from fcsd.report.table import score_table

    sample_file = SampleFile.from_options(vars(arguments), dataset=arguments.tasks)
    print_result(arguments, score_file(sample_file), score_table)


def _samples_defaults() -> dict[str, Any]:
    """Return the options of a file of samples alone, with their defaults."""
    from fcsd.evaluation.config import SampleFile

    return {name: SampleFile.model_fields[name].default for name in _SAMPLES_ONLY}


def _refuse_given(
    arguments: Namespace, defaults: Mapping[str, Any], reason: str
) -> None:
    """Raise UserError where an option has another value than its default here."""
    for name in sorted(defaults):
        if getattr(arguments, name) != defaults[name]:
            text = name.upper() if name == "model" else f"--{name.replace('_', '-')}"
            raise UserError(f"{text} {reason}")


def _compare(arguments: Namespace) -> None:
    from fcsd.report.comparison import (
        compare_all,
        comparison_text,
        read_evaluated,
        write_comparison,
    )

    evaluated = read_evaluated(arguments.original, arguments.converted)
    only = None
    if arguments.tasks is not None:
        only = [task.strip() for task in arguments.tasks.split(",")]
    comparisons = compare_all(evaluated, only)
    if arguments.output is not None:
        write_comparison(evaluated, comparisons, arguments.output)
    print_result(
        arguments, comparisons, lambda result: comparison_text(result, evaluated)
    )


def _evaluate_options(parser: ArgumentParser) -> None:
    from fcsd.evaluation.config import EvaluationConfig, SampleFile

    model_argument(parser, optional=True)
    field_options(
        parser,
        EvaluationConfig,
        "suite",
        help=(
            "paper11, paper11_chat, paper11_own_text, pretrain9, camoe9, instruct, own_text,"
            " own_text_base, tiny, or the path of your suite file (docs/evaluate.md)"
        ),
        default="paper11",
    )
    parser.add_argument(
        "--tasks",
        metavar="A,B,…",
        help=(
            "evaluate only these: rows of the suite, or any task or group of lm-eval"
            " with its own shots and metric; with --samples: the one task of the file,"
            " or the path of its code data set"
        ),
    )
    field_options(
        parser,
        SampleFile,
        "include_path",
        type=Path,
        help="with --tasks: your own task definitions (lm-eval YAML)",
    )
    parser.add_argument(
        "--apply-chat-template",
        action="store_true",
        help="format every task with the chat template, shots as turns",
    )
    parser.add_argument(
        "--system-prompt",
        metavar="TEXT",
        help="system prompt of every task with a chat template",
    )
    field_options(
        parser,
        SampleFile,
        "thinking",
        help=(
            "let a hybrid model think before it answers (allow enough tokens for it);"
            " with --samples: remove the thoughts before an answer"
        ),
    )
    parser.add_argument(
        "--original",
        metavar="MODEL",
        help=(
            "for tasks of kind own_text: the model that MODEL was converted from, with"
            " which they compare what it writes (default: MODEL itself, if it is not"
            " converted)"
        ),
    )
    field_options(parser, EvaluationConfig, "data_root", type=Path)
    parser.add_argument(
        "--fetch",
        type=Path,
        metavar="ROOT",
        help=(
            "first download the suite's data sets from the Hub to this folder, then use"
            " it as --data-root; without MODEL, download only"
        ),
    )
    field_options(
        parser,
        SampleFile,
        "output",
        type=Path,
        help="folder for results.json and samples_*.jsonl",
    )
    field_options(parser, EvaluationConfig, "batch_size")
    field_options(parser, EvaluationConfig, "cache", type=Path)
    field_options(parser, EvaluationConfig, "limit")
    field_options(parser, EvaluationConfig, "capacity_factor", metavar="F")
    field_options(parser, EvaluationConfig, "capacity_drop")
    expert_parallel_argument(parser)
    device_map_argument(parser)
    _server_arguments(parser)
    field_options(parser, EvaluationConfig, "allow_weak_sandbox")
    _samples_arguments(parser)
    json_argument(parser)


def _samples_arguments(parser: ArgumentParser) -> None:
    from fcsd.evaluation.config import SampleFile

    parser.add_argument(
        "--samples",
        type=Path,
        metavar="FILE",
        help=(
            "instead of MODEL: grade a .jsonl or .jsonl.gz file of existing programs or"
            " answers"
        ),
    )
    for name in sorted(_SAMPLES_ONLY):
        help = SampleFile.model_fields[name].description or ""
        changes = {"help": f"with --samples: {help}"}
        field_options(parser, SampleFile, name, **changes)


def _server_arguments(parser: ArgumentParser) -> None:
    from fcsd.evaluation.config import ServerConfig

    parser.add_argument(
        "--server",
        metavar="URL",
        help=(
            "take all answers from a server (`vllm serve MODEL`), after checking that"
            " it serves MODEL; set FCSD_SERVER_API_KEY if it needs a key"
        ),
    )
    field_options(parser, ServerConfig, "concurrency", default=None)
    parser.add_argument(
        "--no-server-check",
        action="store_true",
        help=(
            "with --server: do not load MODEL to check that the server serves it; the"
            " result says so"
        ),
    )


def _compare_options(parser: ArgumentParser) -> None:
    from fcsd.evaluation.config import SampleFile

    parser.add_argument(
        "original",
        metavar="A",
        type=Path,
        help="folder that `fcsd evaluate` or `lm_eval --log_samples` wrote",
    )
    parser.add_argument(
        "converted",
        metavar="B",
        type=Path,
        nargs="+",
        help="folders to compare with A",
    )
    field_options(
        parser,
        SampleFile,
        "output",
        type=Path,
        help=(
            "new folder for the table, figures, a page of all answers, and files in"
            " lm-eval's format"
        ),
    )
    parser.add_argument(
        "--tasks",
        metavar="A,B,…",
        help="compare only these tasks, if the results have different tasks",
    )
    json_argument(parser)


COMMANDS = {
    "evaluate": Command(
        "Evaluate a checkpoint on a suite of tasks, or grade a file of samples.",
        _evaluate_options,
        _evaluate,
        "Run `fcsd evaluate MODEL --output results/NAME --batch-size auto` for the"
        " original and for the converted model; `fcsd compare` then compares the two."
        " Without a network, --data-root ROOT reads a folder that `fcsd evaluate"
        " --fetch ROOT` has filled. Finished tasks are kept, so the same command"
        " continues with the next one. Generated code runs only in a sandbox. On"
        " several GPUs: accelerate launch --multi_gpu -m fcsd evaluate MODEL …"
        " (docs/evaluate.md). With --samples FILE no model runs. A line of the file is"
        " {doc_id, completion}, {task_id, solution}, {task_id, completion}, or a line"
        " that this command wrote to samples_TASK.jsonl; several samples per problem"
        " give pass@k, several answers their mean.",
    ),
    "compare": Command(
        "Compare converted models with their original, task by task, with paired"
        " errors.",
        _compare_options,
        _compare,
        "The table has the difference and its 95 % interval, items gained and lost, the"
        " exact McNemar p, and a verdict in words. Results may have been measured at"
        " different times; fcsd refuses different items, prompts, shots or data.",
    ),
}
