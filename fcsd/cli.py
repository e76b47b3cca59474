"""The `fcsd` command: one thin function a stage. Heavy libraries are imported only by the command that needs them."""

import argparse
import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from fcsd import __version__, rank_failure
from fcsd.errors import Interrupted, ScorerError, UserError, is_out_of_memory

if TYPE_CHECKING:
    from fcsd.recipe import Recipe

_SEVERAL = "On several GPUs: accelerate launch --config_file configs/fsdp2_8.yaml -m fcsd {} RECIPE (docs/training.md)."
_SEVERAL_JUDGE = (
    "On several GPUs: accelerate launch --multi_gpu -m fcsd evaluate MODEL … (docs/evaluation.md)."
)
_LAYERS_HELP = "all | moe | none | first:8 | first:50%% | last:90%% | 0,2,5 | 4-11 (default: all)"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; a user's mistake is one line on stderr and exit status 2, Ctrl-C is 130, SIGTERM 143."""
    arguments = _parser().parse_args(argv)
    if arguments.command is None:
        _parser().print_help()
        return 2
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_MININTERVAL", "15")  # seconds between the lines of a bar in a log file
    if os.environ.get("RANK", "0") != "0":
        os.environ.setdefault(
            "TQDM_DISABLE", "1"
        )  # the first rank's bars stand for all, those of libraries too
    try:
        run: Callable[[argparse.Namespace], int | None] = arguments.run
        return run(arguments) or 0
    except UserError as error:
        return _failed(f"fcsd {arguments.command}: error: {' '.join(str(error).split())}", 2, error)
    except ScorerError as error:
        return _failed(f"fcsd {arguments.command}: error: {' '.join(str(error).split())}", 1, error)
    except Interrupted as interruption:
        if os.environ.get("RANK", "0") == "0":
            print(f"fcsd {arguments.command}: {interruption}", file=sys.stderr)
        return interruption.status
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":
            print(
                f"\nfcsd {arguments.command}: interrupted; run the same command again to continue",
                file=sys.stderr,
            )
        return 130
    except BrokenPipeError:
        return 0
    except Exception as error:
        if isinstance(error, RuntimeError | MemoryError) and is_out_of_memory(error):
            reason = (" ".join(str(error).split()) or "the host's memory is full")[:200]
            text = (
                f"fcsd {arguments.command}: error: out of memory: {reason}; `fcsd estimate RECIPE` says what a training"
                " needs, `fcsd inspect MODEL` what its weights need"
            )
            return _failed(text, 2, error)
        if _number_of_processes() == 1:
            raise
        return _failed(f"{traceback.format_exc()}fcsd {arguments.command}: failed", 1, error)
    finally:
        rank_failure.stop_watching()


def _failed(text: str, status: int, error: Exception) -> int:
    """Print an error, once in a launch of several processes."""
    if _number_of_processes() > 1:
        text = f"{text} (rank {os.environ.get('RANK', '?')} of {_number_of_processes()})"
    to_print, status = rank_failure.first_failure(text, status, error)
    if to_print is not None:
        print(to_print, file=sys.stderr)
        rank_failure.wait_until_told()
    return status


def _number_of_processes() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Shows the defaults that say something."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        plain = action.default is None or action.default is False or action.default == []
        return action.help if plain else super()._get_help_string(action)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fcsd",
        description="Convert a Hugging Face MoE checkpoint to FarSkip connectivity, distil it back to its own quality,"
        " evaluate it against the original and leave it ready to publish.",
        epilog="First steps: `fcsd tiny-data runs/tiny-data && fcsd run recipes/tiny/demo.yaml` trains, converts and"
        " evaluates a small MoE on a CPU. `fcsd COMMAND --help` explains each command.",
    )
    parser.add_argument("--version", action="version", version=f"fcsd {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    def command(
        name: str, run: Callable[[argparse.Namespace], int | None], text: str, more: str = ""
    ) -> argparse.ArgumentParser:
        sub = commands.add_parser(
            name,
            help=text,
            description=f"{text} {more}".strip(),
            formatter_class=_Help,
        )
        sub.set_defaults(run=run)
        return sub

    inspect = command(
        "inspect",
        _inspect,
        "What a checkpoint is, what would be rewired, and what that needs; weights are not loaded.",
        "Of a hub id only config.json is fetched.",
    )
    inspect.add_argument("model", metavar="MODEL", help="hub id or local folder")
    inspect.add_argument("--revision", help="revision of a hub id")
    inspect.add_argument("--json", action="store_true", help="print JSON")

    convert = command(
        "convert",
        _convert,
        "Rewire a checkpoint: same weights, same tensor names, FarSkip connectivity.",
        "The result loads with AutoModelForCausalLM.from_pretrained(OUT, trust_remote_code=True), without fcsd.",
    )
    _model_argument(convert)
    convert.add_argument(
        "out", metavar="OUT", type=Path, help="new folder; written under another name, then renamed"
    )
    convert.add_argument("--layers", default=argparse.SUPPRESS, help=_LAYERS_HELP)
    _sides_arguments(convert)

    unconvert = command(
        "unconvert", _unconvert, "Undo a conversion: the checkpoint of the original family, same weights."
    )
    _model_argument(unconvert)
    unconvert.add_argument("out", metavar="OUT", type=Path, help="new folder")

    families = command(
        "families", _families, "List the model families that can be converted, and those that are refused."
    )
    families.add_argument("--json", action="store_true", help="print JSON")

    estimate = command(
        "estimate",
        _estimate,
        "What a training needs before it starts: memory of a rank, operations, time, and what to change if it does"
        " not fit.",
        "Nothing is loaded; of a hub id only config.json is fetched.",
    )
    _recipe_arguments(estimate, with_variant=True)
    estimate.add_argument("--pretrain", action="store_true", help="the recipe's pre-training instead")
    estimate.add_argument(
        "--gpu", default="h200", help="a100, h100, h200, b200, l40s, mi300x, … (a wrong name lists all)"
    )
    estimate.add_argument("--gpus", type=int, default=1, help="number of GPUs, one rank each")
    estimate.add_argument(
        "--sharding",
        choices=["none", "fsdp2", "zero3"],
        default="none",
        help="none: whole copies on every rank, as with `accelerate launch --multi_gpu`; the others as with"
        " configs/fsdp2_8.yaml and configs/zero3_8.yaml",
    )
    estimate.add_argument(
        "--mfu", default="0.1-0.25", help="share of the published peak that is reached, a range or a number"
    )
    estimate.add_argument("--network-gb-s", type=float, default=50.0, help="between nodes, GB/s for each GPU")
    estimate.add_argument("--json", action="store_true", help="print JSON")

    for name, text, more in (
        (
            "recipe",
            "Print a recipe with every default filled in.",
            "Exits with an error when the recipe is not valid.",
        ),
        (
            "pretrain",
            "Train a model from scratch, regular or FarSkip (paper App. A).",
            _SEVERAL.format("pretrain"),
        ),
        (
            "sweep",
            "Choose batch size, then learning rate, by training loss (paper 5.1).",
            f"Leaves a ready recipe. {_SEVERAL.format('sweep')}",
        ),
        (
            "distill",
            "Distil a FarSkip model from its original.",
            f"{_SEVERAL.format('distill')} Continues where it was cut off.",
        ),
        (
            "cache-teacher",
            "Run the teacher once over a recipe's training rows and keep its final hidden states on disk.",
            "With `teacher: {backend: cache, cache: FOLDER}` trainings then read them: no teacher in memory, and about"
            " the cost of plain fine-tuning. It pays when rows are seen several times: a sweep, variants, epochs."
            " Needs hidden size x 2 bytes (bfloat16) for each token with loss; the need is printed before it starts."
            f" {_SEVERAL.format('cache-teacher')}"
            " Continues where it was cut off; rows that are there are not computed again.",
        ),
        ("report", "Write the report of a run from what its stages left.", ""),
        (
            "run",
            "All stages of a recipe in a row.",
            "Pretrain, convert, sweep, distill, the variants, the evaluation of every model, the layer study, report"
            " and publish, as far as the recipe has them; each leaves a folder in the recipe's output_dir. Finished"
            " stages are not run again, one that was cut off goes on; a stage whose settings changed is refused with"
            f" the difference shown. {_SEVERAL.format('run')} `fcsd push OUTPUT_DIR OWNER/NAME` then uploads it.",
        ),
    ):
        sub = command(name, _RECIPE_COMMANDS[name], text, more)
        _recipe_arguments(sub, with_variant=name in ("distill", "cache-teacher"))
        if name in _EXPERT_PARALLEL:
            _expert_parallel_argument(sub)
        if name == "cache-teacher":
            sub.add_argument(
                "--output",
                type=Path,
                help="folder of the cache (default: the recipe's teacher.cache, else output_dir/teacher-cache)",
            )
            sub.add_argument(
                "--verify", action="store_true", help="then read all of it and check its checksums"
            )
        if name in ("report", "run"):
            sub.add_argument("--json", action="store_true", help="print the report as JSON")

    evaluate = command(
        "evaluate",
        _evaluate,
        "Judge a checkpoint on a suite of tasks.",
        "For the original and for the converted model: `fcsd evaluate MODEL --output results/NAME --batch-size auto`;"
        " then `fcsd compare` sets both side by side. Without a network, --data-root ROOT reads a folder that"
        " `fcsd evaluate --fetch ROOT` has filled. Finished tasks are kept: the same command goes on with the next one."
        f" Generated code runs only in a sandbox. {_SEVERAL_JUDGE}",
    )
    _model_argument(evaluate, optional=True)
    evaluate.add_argument(
        "--suite",
        default="paper11",
        help="paper11, paper11_chat, pretrain9, camoe9, tiny, or the path of a suite file of your own"
        " (docs/evaluation.md)",
    )
    evaluate.add_argument(
        "--data-root", type=Path, help="folder in hub layout (owner/name/…); without it the Hub is used"
    )
    evaluate.add_argument(
        "--fetch",
        type=Path,
        metavar="ROOT",
        help="first fill this folder with the suite's data sets from the Hub, and use it as --data-root; without MODEL"
        " that is all",
    )
    evaluate.add_argument("--output", type=Path, help="folder for results.json and samples_*.jsonl")
    evaluate.add_argument(
        "--batch-size", default="16", help="sequences in one forward, or auto: as many as fit the memory"
    )
    evaluate.add_argument(
        "--cache",
        type=Path,
        help="folder of finished tasks that several evaluations share; they are found by hashes of weights, tokenizer,"
        " data and settings, never by a path",
    )
    evaluate.add_argument(
        "--limit", type=int, help="the first items of every task only, for a quick look; every table says so"
    )
    _expert_parallel_argument(evaluate)
    evaluate.add_argument(
        "--device-map",
        choices=["auto"],
        help="auto: one process spreads the layers over all devices, and what does not fit over main memory",
    )
    _sandbox_argument(evaluate)
    evaluate.add_argument("--json", action="store_true", help="print JSON")

    score = command(
        "score",
        _score,
        "Grade a file of ready samples for a code benchmark.",
        "A line is {task_id, solution}, {task_id, completion}, or what `fcsd evaluate` wrote into samples_TASK.jsonl;"
        " several lines of a problem are several samples, and give pass@k. The programs run only in the sandbox.",
    )
    score.add_argument("samples", metavar="SAMPLES", type=Path, help=".jsonl or .jsonl.gz file")
    score.add_argument(
        "--dataset",
        required=True,
        help="mbpp_plus, humaneval_plus, mbpp_plus_lmeval, or the path of a data set in one of their schemas",
    )
    score.add_argument(
        "--data-root", type=Path, help="folder in hub layout (owner/name/…); without it the Hub is used"
    )
    score.add_argument("--output", type=Path, help="folder for results.json and samples_*.jsonl")
    score.add_argument("--partial", action="store_true", help="leave out problems that have no sample")
    score.add_argument("--timeout-s", type=float, help="processor time of one program (default: 10)")
    score.add_argument(
        "--scorer",
        choices=["fcsd", "evalplus"],
        default="fcsd",
        help="evalplus: the package of that name, in a process of its own, without our sandbox",
    )
    score.add_argument("--evalplus-data", type=Path, help="with --scorer evalplus: its own .jsonl.gz file")
    _sandbox_argument(score)
    score.add_argument("--json", action="store_true", help="print JSON")

    layers = command(
        "layers",
        _layers,
        "Quality against the rewired layers, untrained (paper Fig. 3).",
        "From the start, from the end, and one layer at a time; measured by suite tasks, KL to the original, or both."
        " Continues where it was cut off.",
    )
    _model_argument(layers)
    layers.add_argument("--output", type=Path, required=True, help="folder for layers.json and layers.png")
    layers.add_argument(
        "--text",
        help="measure the KL to the original on this text: .jsonl file, data set folder or hub id, or what a recipe's"
        " data.heldout holds, in YAML: '{path: X, columns: {text: body}, split: test}'",
    )
    layers.add_argument("--text-examples", type=int, default=256, help="examples of the text")
    layers.add_argument("--max-length", type=int, default=4096, help="tokens in one row of the text")
    layers.add_argument(
        "--loss-on",
        choices=["response", "all"],
        default="response",
        help="tokens of the text that are judged",
    )
    layers.add_argument(
        "--task",
        action="append",
        default=[],
        help="measure this task of the suite; may be given several times",
    )
    layers.add_argument("--suite", default="tiny", help="name in eval/suites, or a path to a suite file")
    layers.add_argument("--data-root", help="folder in hub layout (owner/name/…); without it the Hub is used")
    layers.add_argument("--batch-size", type=int, default=16, help="sequences in one forward of a task")
    layers.add_argument("--limit", type=int, help="items per task, for a quick look")
    layers.add_argument("--sides", help="some of first,last,single (default: all that can be measured)")
    numbers = layers.add_mutually_exclusive_group()
    numbers.add_argument(
        "--every", type=int, default=1, help="first and last: every Nth number of layers, and all layers"
    )
    numbers.add_argument("--counts", help="first and last: these numbers of layers, for example 1,2,4,8")
    _sides_arguments(layers)
    layers.add_argument(
        "--dtype", choices=["auto", "float32", "bfloat16", "float16"], default="auto", help="of the model"
    )
    _sandbox_argument(layers)
    layers.add_argument("--json", action="store_true", help="print JSON")

    plan = command(
        "plan-layers",
        _plan_layers,
        "Propose which layers to rewire for a given share, from a finished layer study.",
        "Those that hurt least when each is rewired alone, set against the last N; prints --layers text and YAML.",
    )
    plan.add_argument("study", metavar="STUDY", type=Path, help="folder that `fcsd layers` wrote")
    plan.add_argument("--budget", required=True, help="share of the layers (90%%) or their number (43)")
    plan.add_argument(
        "--metric", help="kl or a task of the study (default: the first one, kl if it was measured)"
    )
    plan.add_argument(
        "--verify", action="store_true", help="measure the proposal and the last N layers on the study's data"
    )
    plan.add_argument("--model", help="with --verify: where the study's model lies now")
    plan.add_argument("--json", action="store_true", help="print JSON")

    compare = command(
        "compare",
        _compare,
        "Original against converted, per task, with paired errors.",
        "Item by item: the difference and its 95 % interval, items gained and lost, exact McNemar p, and a verdict in"
        " words. Results may be of different times; other items, prompts, shots or data are refused.",
    )
    compare.add_argument(
        "original", metavar="A", type=Path, help="folder of `fcsd evaluate`, or of lm_eval --log_samples"
    )
    compare.add_argument("converted", metavar="B", type=Path, nargs="+", help="folders to set against it")
    compare.add_argument(
        "--output",
        type=Path,
        help="new folder for table, figures, a page of all answers, and lm-eval's files",
    )
    compare.add_argument(
        "--tasks", metavar="A,B,…", help="only these, where not every result has the same tasks"
    )
    compare.add_argument("--json", action="store_true", help="print JSON")

    chat = command(
        "chat",
        _chat,
        "Talk to a model, or to a converted one and its original side by side (paper App. B).",
        "Replies stream with the model's own generation settings. Without a terminal every line of stdin is a turn."
        " MODEL computes on the accelerator if there is one.",
    )
    _model_argument(chat)
    chat.add_argument(
        "--beside", metavar="ORIGINAL", help="hub id or folder of a second model that answers beside it"
    )
    chat.add_argument("--system", metavar="TEXT", help="system prompt")
    chat.add_argument(
        "--max-new-tokens", type=int, help="longest reply (default: the model's own setting, or 2048)"
    )
    chat.add_argument(
        "--greedy",
        action="store_true",
        help="always the likeliest token, so that two models differ by nothing else",
    )
    chat.add_argument(
        "--no-thinking", action="store_true", help="ask a hybrid model for answers without thoughts"
    )
    chat.add_argument(
        "--device-map", metavar="MAP", help='transformers\' device_map, for example "auto": several GPUs'
    )

    push = command(
        "push",
        _push,
        "Put a FarSkip checkpoint with its card and results on the Hub.",
        "Run it again after an interruption: it goes on from what has arrived. The access token is that of"
        " `hf auth login`, or HF_TOKEN.",
    )
    push.add_argument(
        "folder", metavar="DIR", type=Path, help="a run, its publish folder, or a converted checkpoint"
    )
    push.add_argument("repo_id", metavar="OWNER/NAME", help="model repository; created if there is none")
    push.add_argument("--private", action="store_true", help="create it private")
    push.add_argument(
        "--dry-run",
        metavar="OUT",
        type=Path,
        nargs="?",
        const=Path(),
        help="only write the folder that would be uploaded (default: DIR with -hub after its name)",
    )
    push.add_argument(
        "--base-model", help="for a checkpoint without README.md: hub id or folder of the original"
    )
    push.add_argument(
        "--license", help="for a checkpoint without README.md: instead of the licence on the original's card"
    )
    push.add_argument(
        "--results",
        nargs=2,
        type=Path,
        metavar=("ORIGINAL", "MODEL"),
        help="for a checkpoint without README.md: what `fcsd evaluate` wrote for the original and for it",
    )

    tiny = command(
        "tiny-data",
        _tiny_data,
        "Generate the instruct-to-Python tasks, tokenizer and test data of recipes/tiny.",
    )
    tiny.add_argument("out", metavar="OUT", type=Path, help="new folder")
    tiny.add_argument("--seed", type=int, default=0, help="the same seed gives the same bytes")
    return parser


def _model_argument(parser: argparse.ArgumentParser, *, optional: bool = False) -> None:
    parser.add_argument(
        "model", metavar="MODEL", help="hub id or local folder", nargs="?" if optional else None
    )
    parser.add_argument("--revision", help="revision of a hub id")
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="allow code that comes with the checkpoint to run"
    )


def _expert_parallel_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--expert-parallel",
        type=int,
        default=1,
        metavar="N",
        help="spread the experts over groups of N processes, which send each other tokens instead of weights"
        " (configs/ep_8.yaml)",
    )


def _sides_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--attention", choices=["partial", "full"], default="partial", help="what attention reads"
    )
    parser.add_argument(
        "--mlp", choices=["outdated", "full"], default="outdated", help="what MoE and MLP blocks read"
    )


def _sandbox_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--allow-weak-sandbox",
        action="store_true",
        help="run generated code even where this machine cannot shut it in",
    )


def _recipe_arguments(parser: argparse.ArgumentParser, *, with_variant: bool) -> None:
    parser.add_argument("recipe", metavar="RECIPE", type=Path, help="YAML file, see docs/recipes.md")
    parser.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="replace one value, for example train.learning_rate=4e-5; may be given several times",
    )
    parser.add_argument(
        "--rehearse",
        type=Path,
        metavar="FOLDER",
        help="rehearse in FOLDER: the same recipe on a tiny model of its family, a few invented rows in the columns of"
        " its data, and a few steps",
    )
    if with_variant:
        parser.add_argument("--variant", help="one of the recipe's variants instead of its main distillation")


def _inspect(arguments: argparse.Namespace) -> None:
    from fcsd.inspect import inspect_model, report_table

    facts = inspect_model(arguments.model, arguments.revision)
    print(json.dumps(facts, indent=2) if arguments.json else report_table(facts))


def _connectivity(arguments: argparse.Namespace):  # type: ignore[no-untyped-def]
    """None where nothing is chosen: AMD's Instella checkpoints then keep what their config says."""
    from fcsd.connectivity import Connectivity
    from fcsd.connectivity.spec import parse_selection

    layers = getattr(arguments, "layers", None)
    if layers is None and (arguments.attention, arguments.mlp) == ("partial", "outdated"):
        return None
    selection = parse_selection("all" if layers is None else layers)
    return Connectivity(selection, arguments.attention, arguments.mlp)


def _convert(arguments: argparse.Namespace) -> None:
    from fcsd.artifact import SCHEMA_VERSION, versions, write_json
    from fcsd.connectivity import convert_checkpoint

    layers = convert_checkpoint(
        arguments.model,
        arguments.out,
        _connectivity(arguments),
        revision=arguments.revision,
    )
    record = {  # what `fcsd push` cannot see from the checkpoint: where it comes from
        "schema_version": SCHEMA_VERSION,
        "stage": "convert",
        "settings": {"model": {"path": str(arguments.model), "revision": arguments.revision}},
        "results": {"layers": layers},
        "versions": versions(),
    }
    write_json(Path(arguments.out) / "manifest.json", record)
    print(arguments.out)


def _unconvert(arguments: argparse.Namespace) -> None:
    from fcsd.connectivity import unconvert_checkpoint

    unconvert_checkpoint(arguments.model, arguments.out, revision=arguments.revision)
    print(arguments.out)


def _families(arguments: argparse.Namespace) -> None:
    from fcsd.report.table import families_table

    print(families_table(as_json=arguments.json))


def _quiet_transformers() -> None:
    """Bars for files that are read and written in no time would bury our own."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def _load_recipe(arguments: argparse.Namespace) -> "Recipe":
    """The recipe that a command names, or its rehearsal."""
    from fcsd.recipe import load_recipe

    recipe = load_recipe(arguments.recipe, arguments.overrides)
    if arguments.rehearse is None:
        return recipe
    from fcsd.rehearsal import rehearse

    return rehearse(recipe, arguments.rehearse)


def _estimate(arguments: argparse.Namespace) -> None:
    from fcsd.estimate import Hardware, estimate, estimate_table, parse_mfu

    if arguments.pretrain and arguments.variant is not None:
        raise UserError("--variant and --pretrain are both given; leave one out")
    hardware = Hardware(
        arguments.gpu, arguments.gpus, arguments.sharding, parse_mfu(arguments.mfu), arguments.network_gb_s
    )
    recipe = _load_recipe(arguments)
    facts = estimate(recipe, hardware, variant=arguments.variant, pretrain=arguments.pretrain)
    print(json.dumps(facts, indent=2) if arguments.json else estimate_table(facts))


def _recipe(arguments: argparse.Namespace) -> None:
    from fcsd.recipe import to_yaml

    print(to_yaml(_load_recipe(arguments).dump()), end="")


def _stage(name: str) -> Callable[[argparse.Namespace], None]:
    def run(arguments: argparse.Namespace) -> None:
        if arguments.rehearse is not None:
            _quiet_transformers()  # which is loaded only when the recipe is a good one
        recipe = _load_recipe(arguments)
        from fcsd import stages

        _quiet_transformers()
        from fcsd.distill.engines import expert_parallel

        with expert_parallel(arguments.expert_parallel if name in _EXPERT_PARALLEL else 1):
            if name == "distill":
                stages.distill(recipe, arguments.variant)
            elif name == "cache-teacher":
                print(
                    stages.cache_teacher(recipe, arguments.variant, arguments.output, verify=arguments.verify)
                )
            elif name in ("report", "run"):
                getattr(stages, name)(recipe, as_json=arguments.json)
            else:
                getattr(stages, name)(recipe)

    return run


_EXPERT_PARALLEL = ("sweep", "distill", "run")
_RECIPE_COMMANDS: dict[str, Callable[[argparse.Namespace], None]] = {
    "recipe": _recipe,
    **{name: _stage(name) for name in ("pretrain", "sweep", "distill", "cache-teacher", "report", "run")},
}


def _evaluate(arguments: argparse.Namespace) -> None:
    from fcsd.evaluate.fetch import fetch_suite
    from fcsd.evaluate.ranks import launched_ranks
    from fcsd.evaluate.suites import load_suite

    if arguments.fetch is not None:
        if arguments.data_root is not None:
            raise UserError("--fetch and --data-root are both given; leave one out")
        suite = load_suite(arguments.suite)
        ranks = launched_ranks(in_step=False)
        fetched = ranks.from_first(lambda: fetch_suite(suite, arguments.fetch))
        if ranks.first:
            found = ", ".join(fetched) if fetched else "everything was there"
            print(f"{arguments.fetch}: {found}", file=sys.stderr)
        if arguments.model is None:
            return
    for name in ("model", "output"):
        if getattr(arguments, name) is None:
            raise UserError(f"{'MODEL' if name == 'model' else '--output'} is required")
    from fcsd.distill.engines import expert_parallel
    from fcsd.evaluate.stage import evaluate_checkpoint
    from fcsd.report.table import result_table

    _quiet_transformers()
    with expert_parallel(arguments.expert_parallel):
        evaluate_checkpoint(
            arguments.model,
            suite=arguments.suite,
            data_root=arguments.fetch or arguments.data_root,
            output=arguments.output,
            batch_size=_batch_size(arguments.batch_size),
            cache=arguments.cache,
            limit=arguments.limit,
            allow_weak_sandbox=arguments.allow_weak_sandbox,
            revision=arguments.revision,
            trust_remote_code=arguments.trust_remote_code,
            device_map=arguments.device_map,
        )
    if not launched_ranks(in_step=False).first:
        return
    if arguments.json:
        print((arguments.output / "results.json").read_text(encoding="utf-8"))
    else:
        print(result_table(arguments.output))


def _score(arguments: argparse.Namespace) -> None:
    from fcsd.evaluate.ready import score_file
    from fcsd.report.table import score_table

    result = score_file(
        arguments.samples,
        arguments.dataset,
        data_root=arguments.data_root,
        output=arguments.output,
        scorer=arguments.scorer,
        evalplus_data=arguments.evalplus_data,
        partial=arguments.partial,
        timeout_s=arguments.timeout_s,
        allow_weak_sandbox=arguments.allow_weak_sandbox,
    )
    print(json.dumps(result, indent=2) if arguments.json else score_table(result))


def _batch_size(text: str) -> "int | Literal['auto']":
    if text == "auto":
        return "auto"
    if not text.isdecimal() or int(text) < 1:
        raise UserError(f"--batch-size: a number of at least 1 or 'auto', got {text!r}")
    return int(text)


def _layers(arguments: argparse.Namespace) -> None:
    from fcsd.layer_plan import study_table
    from fcsd.layers import read_study, study_from_options, study_layers

    _quiet_transformers()
    study_layers(study_from_options(vars(arguments)), arguments.output)
    study = read_study(arguments.output)
    print(json.dumps(study, indent=2) if arguments.json else study_table(study))


def _plan_layers(arguments: argparse.Namespace) -> None:
    from fcsd.layer_plan import plan_layers, plan_text

    _quiet_transformers()
    plan = plan_layers(
        arguments.study,
        arguments.budget,
        metric=arguments.metric,
        verify=arguments.verify,
        model=arguments.model,
    )
    if os.environ.get("RANK", "0") == "0":
        print(plan_text(plan, as_json=arguments.json))


def _compare(arguments: argparse.Namespace) -> None:
    from fcsd.report.comparison import compare_all, comparison_text, read_evaluated, write_comparison

    evaluated = read_evaluated(arguments.original, arguments.converted)
    only = None if arguments.tasks is None else [task.strip() for task in arguments.tasks.split(",")]
    comparisons = compare_all(evaluated, only)
    if arguments.output is not None:
        write_comparison(evaluated, arguments.output, only)
    print(json.dumps(comparisons, indent=2) if arguments.json else comparison_text(comparisons, evaluated))


def _chat(arguments: argparse.Namespace) -> None:
    if arguments.max_new_tokens is not None and arguments.max_new_tokens < 1:
        raise UserError(f"--max-new-tokens: must be at least 1, got {arguments.max_new_tokens}")
    from transformers.utils import logging

    from fcsd.chat import chat, load_speaker

    _quiet_transformers()
    logging.set_verbosity_error()  # advice on generation settings would stand between the replies
    options = {
        "trust_remote_code": arguments.trust_remote_code,
        "device_map": arguments.device_map,
        "thinking": not arguments.no_thinking,
    }
    speakers = [load_speaker(arguments.model, revision=arguments.revision, **options)]
    if arguments.beside is not None:
        speakers.append(load_speaker(arguments.beside, **options))
    for stream in (sys.stdin, sys.stdout):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    chat(
        speakers,
        system=arguments.system,
        max_new_tokens=arguments.max_new_tokens,
        greedy=arguments.greedy,
    )


def _push(arguments: argparse.Namespace) -> None:
    from fcsd.push import NewCard, push

    out = arguments.dry_run
    if out == Path():
        folder = arguments.folder.resolve()
        out = folder.with_name(f"{folder.name}-hub")
    card = NewCard(
        arguments.base_model, arguments.license, tuple(arguments.results) if arguments.results else None
    )
    print(push(arguments.folder, arguments.repo_id, private=arguments.private, dry_run=out, card=card))


def _tiny_data(arguments: argparse.Namespace) -> None:
    from fcsd.tiny_data import write_tiny_data

    write_tiny_data(arguments.out, seed=arguments.seed)
    print(arguments.out)
