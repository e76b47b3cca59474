"""Run what is missing, then write the table and the figure.

    python -m benchmarks.recovery OUT [--models plain shared] [--seeds 0 1 2] [--methods
    'kl*' …] [--text FILE …] python -m benchmarks.recovery OUT --study --models plain
    plain-12x96 --seeds 0 --methods 'kl *ema 0.95' 'ours *'

Every run is a variant of `recipe.yaml` with what `models.yaml` says of the model,
distilled as `fcsd distill` does it. A finished run is
`OUT/results/MODEL/seed-N/METHOD.json` and is never run again; the teacher of a model is
trained once. `--study` measures the untrained model, too, and gives other seeds than
the first only to the best of the `kl` methods and to the best of the rest. One core per
process: start it twice, with different --models or --seeds, to use two.
"""

import argparse
import fnmatch
import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.recovery.corpus import write_corpus
from benchmarks.recovery.depth import write_depth
from benchmarks.recovery.report import BASELINE, write_report
from benchmarks.recovery.untrained import measure_untrained
from fcsd.base.artifact import versions
from fcsd.base.errors import UserError
from fcsd.base.files import read_json, write_json
from fcsd.base.strict import read_yaml, validate
from fcsd.recipe.load_recipe import load_recipe
from fcsd.recipe.recipe import Recipe

HERE = Path(__file__).parent
MODELS = read_yaml(HERE / "models.yaml")


def main(arguments: list[str] | None = None) -> int:
    """The exit status: 0, or 1 after a mistake in what was asked for."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.recovery",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "--models", nargs="+", choices=MODELS["models"], default=["plain", "shared"]
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument(
        "--methods",
        nargs="*",
        default=["*"],
        help="patterns of names in methods.yaml; none: untrained models only",
    )
    parser.add_argument(
        "--text",
        nargs="+",
        type=Path,
        default=[],
        help="text and code in place of Python's own",
    )
    parser.add_argument(
        "--study",
        action="store_true",
        help="untrained models, and other seeds for the best only",
    )
    parser.add_argument("--only-report", action="store_true", help="train nothing")
    parser.add_argument(
        "--plot",
        nargs="+",
        default=["*"],
        help="patterns of the methods that the figure shows",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        help="dotted.key=value in every recipe, for tests",
    )
    options = parser.parse_args(arguments)
    try:
        methods = chosen_methods(read_yaml(HERE / "methods.yaml"), options.methods)
        if not options.only_report:
            write_corpus(options.out / "corpus", options.text)
            if options.study:
                for model in options.models:
                    study(options.out, model, options.seeds, methods, options.set)
            else:
                # Seeds outermost: after the first there is a whole table.
                for seed in options.seeds:
                    for model in options.models:
                        for method in methods:
                            measure(
                                options.out,
                                model,
                                seed,
                                method,
                                methods[method],
                                options.set,
                            )
        if not options.study or any(options.out.glob("results/*/seed-*/*.json")):
            print(write_report(options.out, options.plot))
        if any(options.out.glob("results/*/untrained.json")):
            print(write_depth(options.out, MODELS))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def chosen_methods(
    methods: dict[str, dict[str, Any]], patterns: list[str]
) -> dict[str, dict[str, Any]]:
    """The methods that one of the patterns names.

    Raises:
        UserError: a pattern names none.
    """
    for pattern in patterns:
        if not fnmatch.filter(methods, pattern):
            raise UserError(
                f"--methods {pattern}: no such method; there are: {'; '.join(methods)}"
            )
    return {
        name: methods[name]
        for name in methods
        if any(fnmatch.fnmatch(name, p) for p in patterns)
    }


def study(
    out: Path,
    model: str,
    seeds: list[int],
    methods: dict[str, dict[str, Any]],
    overrides: list[str],
) -> None:
    """Measure the untrained model, all methods with the first seed, and with the others
    the best of either kind.
    """
    from fcsd.parallel.launch import join_launch
    from fcsd.pipeline.context import Run
    from fcsd.pipeline.pretrain import pretrain

    teacher = model_recipe(out, model, overrides)
    pretrain(Run(teacher, join_launch()))
    measure_untrained(teacher, out / "results" / model / "untrained.json")
    for method in methods:
        measure(out, model, seeds[0], method, methods[method], overrides)
    last = {
        method: read_json(result_path(out, model, seeds[0], method))["curve"][-1][1]
        for method in methods
    }
    plain = [method for method in methods if method.startswith(BASELINE)]
    best = [
        min(kind, key=last.__getitem__)
        for kind in (plain, [*methods.keys() - {*plain}])
        if kind
    ]
    for seed in seeds[1:]:
        for method in best:
            measure(out, model, seed, method, methods[method], overrides)


def measure(
    out: Path,
    model: str,
    seed: int,
    method: str,
    replacements: dict[str, Any],
    overrides: list[str],
) -> None:
    """One run, unless its result is there."""
    from fcsd.parallel.launch import join_launch
    from fcsd.pipeline.context import Run
    from fcsd.pipeline.distill import distill
    from fcsd.pipeline.pretrain import pretrain

    result = result_path(out, model, seed, method)
    asked = {
        "model_settings": MODELS["models"][model],
        "replacements": replacements,
        "overrides": overrides,
        "corpus": read_json(out / "corpus" / "corpus.json"),
    }
    if result.is_file():
        finished = read_json(result)
        if {key: finished[key] for key in asked} != asked:
            raise UserError(
                f"{result}: is of other settings than asked for; remove it, or name another folder"
            )
        return
    teacher = model_recipe(out, model, overrides)
    student = {
        "pretrain": None,
        "model": teacher.model.model_dump()
        | {"path": str(teacher.folder / "pretrain" / "model")},
        "seed": seed,
        "output_dir": str(out / model / f"seed-{seed}"),
        "variants": {"method": replacements},
    }
    recipe = validate(Recipe, teacher.dump() | student, f"method '{method}'")
    print(f"{model}, seed {seed}: {method}", flush=True)
    launch = join_launch()
    pretrain(Run(teacher, launch))
    started = time.perf_counter()
    folder = recipe.folder / "variants" / "method"
    # what the folder of an interrupted run belongs to
    running = out / "running" / f"{model}-{seed}.json"
    calibration = recipe.variant("method").calibration
    calibrated = Run(recipe, launch).layout.calibration("method")
    if running.is_file() and read_json(running) != asked:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(calibrated, ignore_errors=True)
    running.parent.mkdir(parents=True, exist_ok=True)
    write_json(running, asked)
    distill(Run(recipe, launch), "method")
    train = recipe.variant("method").train
    used = (
        read_json(calibrated / "manifest.json")["results"]["tokens"]
        if calibration is not None
        else 0
    )
    curve = [
        [point["step"] * train.batch_size_tokens, point["score"]]
        for point in read_json(folder / "scores.json")["points"]
    ]
    row = asked | {
        "model": model,
        "seed": seed,
        "method": method,
        "curve": curve,  # [tokens, KL to the teacher on held-out text, nats a token]
        "calibration_tokens": used,  # read before the curve begins
        "budget_tokens": train.max_steps * train.batch_size_tokens,
        "learning_rate": train.learning_rate,
        "seconds": round(time.perf_counter() - started, 1),
        "versions": versions(),
    }
    result.parent.mkdir(parents=True, exist_ok=True)
    write_json(result, row)
    shutil.rmtree(folder)
    shutil.rmtree(calibrated, ignore_errors=True)
    running.unlink()
    print(
        f"  KL {curve[0][1]:.4f} -> {curve[-1][1]:.4f} in {row['seconds']} s",
        flush=True,
    )


def result_path(out: Path, model: str, seed: int, method: str) -> Path:
    """Where the result of a run lies."""
    return out / "results" / model / f"seed-{seed}" / f"{method}.json"


def model_recipe(out: Path, model: str, overrides: list[str]) -> Recipe:
    """The recipe of a model, with the folders of this benchmark; its seed is the teacher's."""
    corpus = out / "corpus"
    columns = {"text": "text"}
    own = MODELS["models"][model]
    places = {
        **{
            f"pretrain.config.{key}": value
            for key, value in MODELS["kinds"][own["kind"]].items()
        },
        "pretrain.config.num_hidden_layers": own["layers"],
        **{
            f"pretrain.train.{key}": value
            for key, value in MODELS["teachers"][own["teacher"]].items()
        },
        "output_dir": str(out / model),
        "pretrain.tokenizer": str(corpus / "tokenizer"),
        "pretrain.data.train": [
            {"path": str(corpus / "train.jsonl"), "columns": columns}
        ],
        "data.train": [{"path": str(corpus / "distill.jsonl"), "columns": columns}],
        "data.heldout": {"path": str(corpus / "heldout.jsonl"), "columns": columns},
    }
    texts = [f"{key}={json.dumps(value)}" for key, value in places.items()]
    return load_recipe(HERE / "recipe.yaml", [*texts, *overrides])


if __name__ == "__main__":
    sys.exit(main())
