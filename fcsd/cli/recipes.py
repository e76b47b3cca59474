"""Commands that take a recipe: recipe, estimate, and the stages; what they need beside it: tiny-data, configs."""

import argparse
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from fcsd.cli.options import (
    SEVERAL,
    Command,
    expert_parallel_argument,
    json_argument,
    launch_of,
    print_result,
    quiet_transformers,
    recipe_arguments,
)
from fcsd.errors import UserError

if TYPE_CHECKING:
    from fcsd.config.recipe import Recipe
    from fcsd.stages.context import Run


def _load_recipe(arguments: argparse.Namespace) -> "Recipe":
    """Load the recipe that a command names, or its rehearsal."""
    from fcsd.config.load import load_recipe

    recipe = load_recipe(arguments.recipe, arguments.overrides)
    if arguments.rehearse is None:
        return recipe
    from fcsd.distributed.launch import join_launch
    from fcsd.tiny.rehearse import rehearse

    return rehearse(recipe, arguments.rehearse, join_launch())


def _estimate(arguments: argparse.Namespace) -> None:
    from fcsd.cost.estimate import Hardware, estimate, parse_mfu
    from fcsd.cost.table import estimate_table

    if arguments.pretrain and arguments.variant is not None:
        raise UserError("--variant and --pretrain are both given; leave one out")
    hardware = Hardware(
        arguments.gpu, arguments.gpus, arguments.sharding, parse_mfu(arguments.mfu), arguments.network_gb_s
    )
    recipe = _load_recipe(arguments)
    facts = estimate(recipe, hardware, variant=arguments.variant, pretrain=arguments.pretrain)
    print_result(arguments, facts, estimate_table)


def _recipe(arguments: argparse.Namespace) -> None:
    from fcsd.config.overrides import to_yaml

    print(to_yaml(_load_recipe(arguments).dump()), end="")


def _run(arguments: argparse.Namespace) -> "Run":
    """Return the recipe that a command names in its launch."""
    if arguments.rehearse is not None:
        quiet_transformers()  # which is loaded only when the recipe is a good one
    recipe = _load_recipe(arguments)
    quiet_transformers()
    from fcsd.stages.context import Run

    return Run(recipe, launch_of(arguments))


def _stage(arguments: argparse.Namespace) -> None:
    """Run the stage that has the command's name."""
    run = _run(arguments)
    from fcsd.stages.distill import cache_teacher, distill, sweep
    from fcsd.stages.pretrain import pretrain
    from fcsd.stages.publish import report
    from fcsd.stages.rows import tokenize
    from fcsd.stages.run import run_all

    name = arguments.command
    if name == "distill":
        distill(run, arguments.variant)
    elif name == "cache-teacher":
        print(cache_teacher(run, arguments.variant, arguments.output, verify=arguments.verify))
    elif name == "tokenize":
        for key, rows in tokenize(run).items():
            print(f"{key}: {len(rows):,} rows of {rows.layout.max_length} tokens, in {rows.path.parent}")
    elif name in ("report", "run"):
        {"report": report, "run": run_all}[name](run, as_json=arguments.json)
    else:
        {"pretrain": pretrain, "sweep": sweep}[name](run)


def _trace(arguments: argparse.Namespace) -> None:
    run = _run(arguments)
    from fcsd.stages.trace import trace

    for name, measured in trace(run, arguments.output).items():
        parts = [f"{key} {one.overlap:.1%} of {one.total * 1e3:.1f} ms" for key, one in measured.items()]
        print(f"{name}: hidden {', '.join(parts)}")


def _tiny_data(arguments: argparse.Namespace) -> None:
    from fcsd.tiny.tasks import write_tiny_data

    write_tiny_data(arguments.out, seed=arguments.seed)
    print(arguments.out)


def _configs(arguments: argparse.Namespace) -> None:
    from fcsd.files import data_dir, new_folder

    if arguments.out.exists():
        raise UserError(f"{arguments.out}: is there already; name a new folder")
    with new_folder(arguments.out) as place:
        for file in data_dir("configs").glob("*.yaml"):
            shutil.copyfile(file, place / file.name)
    print(arguments.out)


def _add_estimate(command: Command) -> None:
    parser = command(
        "estimate",
        _estimate,
        "What a training needs before it starts: memory of a rank, operations, time, and what to change if it does"
        " not fit.",
        "Nothing is loaded; of a hub id only config.json is fetched.",
    )
    recipe_arguments(parser, with_variant=True)
    parser.add_argument("--pretrain", action="store_true", help="the recipe's pre-training instead")
    parser.add_argument(
        "--gpu", default="h200", help="a100, h100, h200, b200, l40s, mi300x, … (a wrong name lists all)"
    )
    parser.add_argument("--gpus", type=int, default=1, help="number of GPUs, one rank each")
    parser.add_argument(
        "--sharding",
        choices=["none", "fsdp2", "hsdp", "zero3"],
        default="none",
        help="none: whole copies on every rank, as with `accelerate launch --multi_gpu`; the others as with"
        " configs/fsdp2_8.yaml, fsdp2_2x8.yaml (a copy a node) and zero3_8.yaml",
    )
    parser.add_argument(
        "--mfu", default="0.1-0.25", help="share of the published peak that is reached, a range or a number"
    )
    parser.add_argument("--network-gb-s", type=float, default=50.0, help="between nodes, GB/s for each GPU")
    json_argument(parser)


def _add_stages(command: Command) -> None:
    for name, text, more in (
        (
            "recipe",
            "Print a recipe with every default filled in.",
            "Exits with an error when the recipe is not valid.",
        ),
        (
            "tokenize",
            "Tokenize the training data of a recipe, once for all its trainings; needs no GPU.",
            "Every other stage does it when it needs the tokens. Two processes on two cores, eight at most; continues"
            " where it was cut off. `fcsd estimate` says how long it takes and the disk that it needs.",
        ),
        (
            "pretrain",
            "Train a model from scratch, regular or FarSkip (paper App. A).",
            SEVERAL.format("pretrain"),
        ),
        (
            "sweep",
            "Choose batch size, then learning rate, by training loss (paper 5.1).",
            f"Leaves a ready recipe. {SEVERAL.format('sweep')}",
        ),
        (
            "distill",
            "Distil a FarSkip model from its original.",
            f"{SEVERAL.format('distill')} Continues where it was cut off.",
        ),
        (
            "cache-teacher",
            "Run the teacher once over a recipe's training rows and keep its final hidden states on disk.",
            "With `teacher: {backend: cache, cache: FOLDER}` trainings then read them: no teacher in memory, and about"
            " the cost of plain fine-tuning. It pays when rows are seen several times: a sweep, variants, epochs."
            " Needs hidden size x 2 bytes (bfloat16) for each token with loss; the need is printed before it starts."
            f" {SEVERAL.format('cache-teacher')}"
            " Continues where it was cut off; rows that are there are not computed again.",
        ),
        ("report", "Write the report of a run from what its stages left.", ""),
        (
            "run",
            "All stages of a recipe in a row.",
            "Pretrain, convert, sweep, distill, the variants, the evaluation of every model, the layer study, report"
            " and publish, as far as the recipe has them; each leaves a folder in the recipe's output_dir. Finished"
            " stages are not run again, one that was cut off goes on; a stage whose settings changed is refused with"
            f" the difference shown. {SEVERAL.format('run')} `fcsd push OUTPUT_DIR OWNER/NAME` then uploads it.",
        ),
    ):
        parser = command(name, _recipe if name == "recipe" else _stage, text, more)
        recipe_arguments(parser, with_variant=name in ("distill", "cache-teacher"))
        if name in ("sweep", "distill", "run"):
            expert_parallel_argument(parser)
        if name == "cache-teacher":
            parser.add_argument(
                "--output",
                type=Path,
                help="folder of the cache (default: the recipe's teacher.cache, else output_dir/teacher-cache)",
            )
            parser.add_argument(
                "--verify", action="store_true", help="then read all of it and check its checksums"
            )
        if name in ("report", "run"):
            parser.add_argument("--json", action="store_true", help="print the report as JSON")


def _add_trace(command: Command) -> None:
    parser = command(
        "trace",
        _trace,
        "Profile one step of the regular and of the rewired model: traces, a figure, how much is hidden.",
        "Launched as a training with --expert-parallel N is (docs/overlap.md); random tokens, no weights kept.",
    )
    recipe_arguments(parser, with_variant=False)
    expert_parallel_argument(parser)
    parser.add_argument(
        "--output", type=Path, required=True, help="folder of the traces (ui.perfetto.dev) and the figure"
    )


def _add_tiny_data(command: Command) -> None:
    parser = command(
        "tiny-data",
        _tiny_data,
        "Generate the instruct-to-Python tasks, tokenizer and test data of recipes/tiny.",
    )
    parser.add_argument("out", metavar="OUT", type=Path, help="new folder")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same bytes")


def _add_configs(command: Command) -> None:
    parser = command(
        "configs",
        _configs,
        "Copy the configurations of `accelerate launch` that ship with fcsd, to be used and edited.",
        "They are what docs and messages call configs/fsdp2_8.yaml and so on (docs/training.md).",
    )
    parser.add_argument(
        "out",
        metavar="OUT",
        type=Path,
        nargs="?",
        default=Path("configs"),
        help="new folder",
    )


def add_commands(command: Command) -> None:
    """Add these commands to the parser."""
    _add_estimate(command)
    _add_stages(command)
    _add_trace(command)
    _add_tiny_data(command)
    _add_configs(command)
