"""Commands that take a recipe (run, estimate, and the stages), and those that write
files for them (tiny-data, configs).
"""

from __future__ import annotations

import shutil
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fcsd.base.errors import UserError
from fcsd.base.files import data_dir
from fcsd.base.text import show
from fcsd.base.writing import new_folder
from fcsd.cli.options import (
    SEVERAL,
    Command,
    expert_parallel_argument,
    field_options,
    json_argument,
    launch_of,
    out_argument,
    print_result,
    quiet_transformers,
    recipe_arguments,
)
from fcsd.recipe.layout import STAGES, VARIANT_STAGES

if TYPE_CHECKING:
    from fcsd.base.strict import Rule
    from fcsd.pipeline.context import Run
    from fcsd.recipe.recipe import Recipe


def _load_recipe(arguments: Namespace) -> Recipe:
    from fcsd.recipe.load_recipe import load_recipe

    recipe = load_recipe(arguments.recipe, arguments.overrides)
    if arguments.rehearse is None:
        return recipe
    from fcsd.parallel.launch import join_launch
    from fcsd.pipeline.tiny.rehearse import rehearse

    launch = join_launch()
    if launch.first:
        print(
            "--rehearse: the model is tiny and random: figures, and warnings about the"
            " amount of text, truncated examples and a worse model, mean nothing here",
            file=sys.stderr,
        )
    return rehearse(recipe, arguments.rehearse, launch)


def _run(arguments: Namespace) -> Run:
    """Return the recipe of a command, joined to the launch that it runs in.

    Commands call this before they import their stage: a recipe with a mistake is then
    refused before torch is loaded.
    """
    if arguments.rehearse is not None:
        quiet_transformers()
    recipe = _load_recipe(arguments)
    quiet_transformers()
    from fcsd.pipeline.context import Run

    return Run(recipe, launch_of(arguments))


def _estimate(arguments: Namespace) -> None:
    if arguments.pretrain and arguments.variant is not None:
        raise UserError("--variant and --pretrain are both given; leave one out")
    from fcsd.planning.cost.settings import Hardware

    hardware = Hardware.from_options(vars(arguments))
    recipe = _load_recipe(arguments)
    from fcsd.planning.cost.estimate import estimate
    from fcsd.planning.cost.table import estimate_table

    facts = estimate(
        recipe, hardware, variant=arguments.variant, pretrain=arguments.pretrain
    )
    print_result(arguments, facts, estimate_table)


def _pretrain(arguments: Namespace) -> None:
    run = _run(arguments)
    from fcsd.pipeline.pretrain import pretrain

    pretrain(run, arguments.variant)


def _sweep(arguments: Namespace) -> None:
    run = _run(arguments)
    from fcsd.pipeline.sweep import sweep

    sweep(run)


def _distill(arguments: Namespace) -> None:
    run = _run(arguments)
    from fcsd.pipeline.distill import distill

    distill(run, arguments.variant)


def _run_all(arguments: Namespace) -> None:
    from fcsd.base.strict import refuse

    refuse(*_run_rules(arguments))
    if arguments.show_rows is not None:
        from fcsd.data.show import check_number

        check_number(arguments.show_rows, "--show-rows")
    if arguments.show:
        from fcsd.recipe.recipe import to_yaml

        print(to_yaml(_load_recipe(arguments).dump()), end="")
        return
    run = _run(arguments)
    from fcsd.pipeline.run import run_all, run_only

    if arguments.only is None:
        run_all(run, as_json=arguments.json)
        return
    folder = run_only(
        run,
        arguments.only,
        arguments.variant,
        as_json=arguments.json,
        num_rows_shown=arguments.show_rows or 0,
        verify=arguments.verify,
    )
    if arguments.only == "cache-teacher" and run.launch.first:
        print(folder)


_STAGES_OF = {
    "variant": VARIANT_STAGES,
    "show_rows": ("tokenize",),
    "verify": ("cache-teacher",),
}
"""Option of `fcsd run` -> the stages of which one must be named with --only."""


def _run_rules(arguments: Namespace) -> Iterator[Rule]:
    """Yield the options of `fcsd run` that would have no effect."""
    yield (
        arguments.show and arguments.only is not None,
        "--show and --only are both given; leave one out",
    )
    for name, stages in _STAGES_OF.items():
        is_given = getattr(arguments, name) not in (None, False)
        yield (
            is_given and arguments.only not in stages,
            f"--{name.replace('_', '-')} needs"
            f" {' or '.join(f'--only {stage}' for stage in stages)}; add it, or leave"
            " the option out",
        )
    writes_report = arguments.only in (None, "report", "publish")
    yield (
        arguments.json and (arguments.show or not writes_report),
        "--json prints the report, but this command does not write one",
    )


def _trace(arguments: Namespace) -> None:
    run = _run(arguments)
    from fcsd.pipeline.trace import trace

    traced = trace(run, arguments.output)
    for name, model in traced.items():
        parts = [
            f"{key} {exchange.overlap:.1%} of {exchange.total * 1e3:.1f} ms"
            for key, exchange in model.exchanges.items()
        ]
        ratio = traced["regular"].step_s / model.step_s
        show(
            f"{name}: {model.step_s:.4g} s a step ({ratio:.3f} times as fast as"
            f" regular); hidden {', '.join(parts)}"
        )


def _tiny_data(arguments: Namespace) -> None:
    from fcsd.pipeline.tiny.tasks import write_tiny_data

    write_tiny_data(arguments.out, seed=arguments.seed)
    print(arguments.out)


def _configs(arguments: Namespace) -> None:
    if arguments.out.exists():
        raise UserError(f"{arguments.out}: exists already; choose a new folder")
    with new_folder(arguments.out) as temporary:
        for file in data_dir("configs").glob("*.yaml"):
            shutil.copyfile(file, temporary / file.name)
    print(arguments.out)


def _estimate_options(parser: ArgumentParser) -> None:
    from fcsd.planning.cost.settings import Hardware

    recipe_arguments(parser, with_variant=True)
    parser.add_argument(
        "--pretrain",
        action="store_true",
        help="estimate the recipe's pre-training instead of its distillation",
    )
    field_options(parser, Hardware)
    json_argument(parser)


def _sweep_options(parser: ArgumentParser, *, with_variant: bool = False) -> None:
    recipe_arguments(parser, with_variant=with_variant)
    expert_parallel_argument(parser)


def _run_options(parser: ArgumentParser) -> None:
    _sweep_options(parser, with_variant=True)
    parser.add_argument(
        "--only",
        metavar="STAGE",
        choices=STAGES,
        help=f"run one stage: {', '.join(STAGES)}",
    )
    parser.add_argument(
        "--show",
        action="store_true",
        help="print the recipe with every default filled in, without running it",
    )
    parser.add_argument(
        "--show-rows",
        metavar="N",
        type=int,
        help=(
            "with --only tokenize: print the text of the first N rows, with special"
            " tokens and without padding; tokens that carry loss are in [[double"
            " brackets]], on a terminal in reverse video"
        ),
    )
    parser.add_argument(
        "--verify",
        action="store_true",
        help=(
            "with --only cache-teacher: read the finished cache again and verify its"
            " checksums"
        ),
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def _trace_options(parser: ArgumentParser) -> None:
    _sweep_options(parser)
    parser.add_argument(
        "--output",
        type=Path,
        required=True,
        help="folder of the traces (ui.perfetto.dev) and the figure",
    )


def _tiny_data_options(parser: ArgumentParser) -> None:
    out_argument(parser)
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="seed of the generator; the same seed gives the same bytes",
    )


def _configs_options(parser: ArgumentParser) -> None:
    parser.add_argument(
        "out",
        metavar="OUT",
        type=Path,
        nargs="?",
        default=Path("configs"),
        help="new folder",
    )


COMMANDS = {
    "estimate": Command(
        "Estimate what a training needs before it starts: memory per rank, FLOPs, time,"
        " and what to change if it does not fit.",
        _estimate_options,
        _estimate,
        "It loads no weights, and fetches only config.json from the Hub.",
    ),
    "pretrain": Command(
        "Train a model from scratch, regular or FarSkip (paper App. A).",
        partial(recipe_arguments, with_variant=True),
        _pretrain,
        SEVERAL.format("pretrain"),
    ),
    "sweep": Command(
        "Choose batch size, then learning rate, by training loss (paper 5.1).",
        _sweep_options,
        _sweep,
        f"It writes a recipe that is ready to run. {SEVERAL.format('sweep')}",
    ),
    "distill": Command(
        "Distil a FarSkip model from its original.",
        partial(_sweep_options, with_variant=True),
        _distill,
        f"{SEVERAL.format('distill')} The same command continues an interrupted run.",
    ),
    "run": Command(
        "Run all stages of a recipe in order, or one of them.",
        _run_options,
        _run_all,
        "The stages are pretrain, convert, calibrate, sweep, distill, the variants,"
        " the evaluation of every model, the layer study, report and publish, as far"
        " as the recipe has them. Each writes a folder in the recipe's output_dir."
        " fcsd skips finished stages and continues interrupted ones; if a stage's"
        " settings have changed, it shows the difference and stops. --only tokenize"
        " writes the tokens of all trainings in advance, without a GPU. --only"
        " cache-teacher stores the teacher's hidden states on disk, for trainings with"
        " `teacher: {backend: cache, cache: FOLDER}` (docs/distil.md)."
        f" {SEVERAL.format('run')} `fcsd push OUTPUT_DIR OWNER/NAME` then uploads the result.",
    ),
    "trace": Command(
        "Profile one optimiser step of the regular and of the rewired model: write"
        " traces and a figure, and print the time of a step and how much communication"
        " is hidden.",
        _trace_options,
        _trace,
        "Launch it like a training with --expert-parallel N (docs/scale.md). It uses"
        " random tokens and keeps no weights. The model of a recipe that only"
        " pre-trains has random ones, which lie in the output folder meanwhile.",
    ),
    "tiny-data": Command(
        "Generate the instruct-to-Python tasks, tokenizer and test data of"
        " recipes/tiny.",
        _tiny_data_options,
        _tiny_data,
    ),
    "configs": Command(
        "Copy the configurations for `accelerate launch` that ship with fcsd, so that"
        " you can use and edit them.",
        _configs_options,
        _configs,
        "The docs and messages refer to them as configs/fsdp2_8.yaml and so on"
        " (docs/scale.md).",
    ),
}
