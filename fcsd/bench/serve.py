"""`fcsd bench serve`: servers of vLLM against each other, one at a time, in turns.

    OUT/runs/ROUND-ROW.json     one server, started once: its figures at every length of prompt
    OUT/logs/ROUND-ROW.log      what that server printed
    OUT/serving.json, .md, .png the result, when all is measured
    OUT/stage.json, manifest.json

A round goes once through all rows, each round from another row on, so that a machine that slows down slows down all.
The prompts are random tokens, the same for all rows, others in every round, and no server keeps prefixes. A length is
measured twice: one token each for the time to the first, then a whole answer for the time between tokens.
"""

import contextlib
import hashlib
import json
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, get_args

from pydantic import Field, field_validator
from tqdm import tqdm

from fcsd.artifact import Stage
from fcsd.bench.engine import Engine, NotServed, Server, find_engine, measure, running_server
from fcsd.bench.rows import Row, RowName, make_rows
from fcsd.bench.summary import summarise, table
from fcsd.bench.times import TIMES_VARIABLE, communication_between, settled_times
from fcsd.config.strict import Strict, parse_yaml, validate
from fcsd.errors import UserError
from fcsd.families import PREFIX, base_model_type
from fcsd.files import hold_folder, read_json, release_folder, write_json, write_text
from fcsd.inspect.checkpoint import find_source

_OURS = (
    "--additional-config",
    "--all2all-backend",
    "--data-parallel-size",
    "--enable-dbo",
    "--enable-prefix-caching",
    "--host",
    "--model",
    "--port",
    "--served-model-name",
    "--tensor-parallel-size",
    "-dp",
    "-tp",
)
"""Flags that the rows set."""


class Benchmark(Strict):
    """What is measured, of which servers."""

    model: str
    against: str
    tensor_parallel: int = Field(1, gt=0)
    comm: dict[str, Any] = Field(default_factory=dict)
    serve_args: list[str] = Field(default_factory=list)
    prompt_tokens: list[Annotated[int, Field(gt=0)]] = Field([512, 1024, 2048], min_length=1)
    requests: int = Field(16, gt=0)
    output_tokens: int = Field(128, gt=1)
    rounds: int = Field(3, gt=0)
    rows: list[RowName] = Field(list(get_args(RowName)), min_length=1)

    @field_validator("serve_args")
    @classmethod
    def _leaves_rows_alone(cls, words: list[str]) -> list[str]:
        for word in words:
            if (flag := word.partition("=")[0]) in _OURS:
                raise ValueError(f"{flag} is set by the benchmark; leave it out")
        return words

    @field_validator("prompt_tokens", "rows")
    @classmethod
    def _once_each(cls, values: list[Any]) -> list[Any]:
        if twice := [value for value in values if values.count(value) > 1]:
            raise ValueError(f"{twice[0]} is given twice")
        return values


def benchmark_from_options(options: Mapping[str, Any]) -> Benchmark:
    """Return the benchmark that the options of `fcsd bench serve` describe.

    Raises:
        UserError: an option that does not make sense.
    """
    comm = options["comm"]
    if comm is None:
        comm = {}
    else:
        comm = parse_yaml(comm, "--comm") if comm.lstrip().startswith("{") else {"comm": comm}
    lengths = options["prompt_tokens"].split(",")
    if wrong := [word for word in lengths if not word.strip().isdigit()]:
        raise UserError(f"--prompt-tokens: {wrong[0]!r} is not a number; write for example 512,1024,2048")
    try:
        words = shlex.split(options["serve_args"] or "")
    except ValueError as error:
        raise UserError(f"--serve-args: {error}") from None
    same = {name: options[name] for name in ("model", "against", "tensor_parallel", "requests")}
    chosen = same | {name: options[name] for name in ("output_tokens", "rounds")}
    chosen |= {"comm": comm, "serve_args": words, "prompt_tokens": [int(word) for word in lengths]}
    if options["rows"] is not None:
        chosen["rows"] = [word.strip() for word in options["rows"].split(",")]
    return validate(Benchmark, chosen, "the benchmark")


def bench_serve(
    benchmark: Benchmark, vllm: str, folder: Path, draw: Callable[[dict[str, Any], Path], None]
) -> dict[str, Any]:
    """Measure all rows and return the result; a benchmark that was cut off goes on where it was.

    Args:
        vllm: the program, or its name on PATH.
        draw: makes the figure of the result (`fcsd.report.plots.plot_serving`).

    Raises:
        UserError: models that do not belong together, prompts that are too long, an environment without vLLM or
            plugin, a folder of another benchmark, a server that fails which no other machine would do without.
    """
    config = check_models(benchmark)
    engine = find_engine(vllm, benchmark.comm)
    if engine.warning:
        print(f"fcsd bench: warning: {engine.warning}", file=sys.stderr)
    stage = benchmark_stage(benchmark, engine, config, folder)
    if stage.state() == "finished":
        return dict(read_json(folder / "serving.json"))
    for part in ("runs", "logs"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    hold_folder(folder)
    stage.start()
    rows = make_rows(tuple(benchmark.rows), config, engine.devices, benchmark.tensor_parallel, benchmark.comm)
    missing = _measure_rounds(benchmark, engine, rows, folder)
    runs = {
        row.name: [read_json(_run_file(folder, number, row)) for number in range(1, benchmark.rounds + 1)]
        for row in rows
        if row.name not in missing
    }
    facts = {
        "settings": benchmark.model_dump(mode="json"),
        "engine": {"vllm": engine.version, "fcsd-serving": engine.plugin, "devices": list(engine.devices)},
        "warning": engine.warning,
    }
    result = summarise(facts, rows, runs, missing)
    write_json(folder / "serving.json", result)
    write_text(folder / "serving.md", table(result) + "\n")
    draw(result, folder / "serving.png")
    stage.finish({})
    release_folder(folder)
    return result


def benchmark_stage(benchmark: Benchmark, engine: Engine, config: Mapping[str, Any], folder: Path) -> Stage:
    """Return the folder of a benchmark, with everything that its times depend on; weights do not count."""
    settings = benchmark.model_dump(mode="json")
    settings |= {"vllm": engine.version, "fcsd-serving": engine.plugin, "devices": list(engine.devices)}
    text = json.dumps(config, sort_keys=True)
    return Stage(folder, "bench serve", settings, {"config": hashlib.sha256(text.encode()).hexdigest()})


def check_models(benchmark: Benchmark) -> dict[str, Any]:
    """Return the converted model's config.

    Raises:
        UserError: a model that is not converted, an original that is, or of another model; a prompt that does not fit.
    """
    model, original = find_source(benchmark.model), find_source(benchmark.against)
    converted, base = str(model.config.get("model_type")), str(original.config.get("model_type"))
    if not converted.startswith(PREFIX):
        raise UserError(
            f"{model.where}: model_type '{converted}': MODEL is not converted; `fcsd convert` makes a FarSkip"
            " checkpoint of it"
        )
    if base.startswith(PREFIX):
        raise UserError(
            f"{original.where}: --against is converted, too; give the original of {benchmark.model}"
        )
    if base_model_type(converted) != base:
        raise UserError(
            f"{original.where}: model_type '{base}' is not what {benchmark.model} was converted from,"
            f" '{base_model_type(converted)}'"
        )
    mine, theirs = _sizes(model.config), _sizes(original.config)
    if differ := [name for name in mine.keys() & theirs.keys() if mine[name] != theirs[name]]:
        name = min(differ)
        raise UserError(
            f"{original.where}: {name} is {theirs[name]}, that of {benchmark.model} is {mine[name]}: this is not its"
            " original"
        )
    longest = max(benchmark.prompt_tokens) + benchmark.output_tokens
    context = _context(benchmark.serve_args, mine)
    if context is not None and longest > context:
        raise UserError(
            f"--prompt-tokens {max(benchmark.prompt_tokens)} and --output-tokens {benchmark.output_tokens} make"
            f" {longest} tokens; the context of {benchmark.model} is {context}"
        )
    return model.config


def _sizes(config: Mapping[str, Any], prefix: str = "") -> dict[str, int]:
    """Return the whole numbers of a config by their dotted keys, without ids of tokens."""
    found: dict[str, int] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and key != "farskip":
            found |= _sizes(value, f"{prefix}{key}.")
        elif isinstance(value, int) and not isinstance(value, bool) and not key.endswith(("_id", "_index")):
            found[prefix + key] = value
    return found


def _context(words: list[str], sizes: Mapping[str, int]) -> int | None:
    flags = [word for given in words for word in given.split("=", 1)]
    if "--max-model-len" in flags[:-1] and (given := flags[flags.index("--max-model-len") + 1]).isdigit():
        return int(given)
    name = "max_position_embeddings"
    return next((value for key, value in sizes.items() if key.rpartition(".")[2] == name), None)


def _run_file(folder: Path, number: int, row: Row) -> Path:
    return folder / "runs" / f"{number}-{row.name}.json"


def _measure_rounds(benchmark: Benchmark, engine: Engine, rows: list[Row], folder: Path) -> dict[str, str]:
    """Measure what is not there yet; return why rows cannot be had."""
    missing = {row.name: row.missing for row in rows if row.missing is not None}
    steps = 1 + 2 * len(benchmark.prompt_tokens)  # the start of a server, and its measurements
    with tqdm(total=benchmark.rounds * len(rows) * steps, desc="bench", unit="step", smoothing=0.1) as bar:
        for number in range(1, benchmark.rounds + 1):
            first = (number - 1) % len(rows)
            for row in [*rows[first:], *rows[:first]]:
                file = _run_file(folder, number, row)
                if row.name in missing or file.is_file():
                    bar.update(steps)
                    continue

                def tell(what: str, row: Row = row, number: int = number) -> None:
                    bar.set_postfix_str(f"round {number} of {benchmark.rounds}, {row.title}: {what}")

                log = folder / "logs" / f"{number}-{row.name}.log"
                try:
                    write_json(file, _measure_row(benchmark, engine, row, number, log, tell, bar.update))
                except NotServed as failure:
                    if not row.exact or number > 1:
                        raise UserError(
                            f"the server of row {row.name} failed: {failure.reason}; the last lines of {log}:"
                            f" {failure.tail}"
                        ) from None
                    missing[row.name] = failure.reason
    return missing


def _measure_row(
    benchmark: Benchmark,
    engine: Engine,
    row: Row,
    number: int,
    log: Path,
    tell: Callable[[str], None],
    step: Callable[[], Any],
) -> dict[str, Any]:
    """Start a row's server, measure it at every length, end it."""
    model = benchmark.model if row.farskip else benchmark.against
    words = [model, "--no-enable-prefix-caching", *benchmark.serve_args, *row.flags]
    tell("starting")
    with (
        _times_folder(log, row) as (times, environment),
        running_server(engine, words, environment, log, row.signs) as server,
    ):
        step()
        points = []
        for index, length in enumerate(benchmark.prompt_tokens):
            seed = 1000 * number + index
            point: dict[str, Any] = {"prompt_tokens": length}
            for phase, tokens in (("prefill", 1), ("decode", benchmark.output_tokens)):
                tell(f"{phase}, {length} tokens")
                point[phase] = _measure_phase(
                    benchmark, engine, server, times, {"input": length, "output": tokens, "seed": seed}
                )
                step()
            points.append(point)
    return {"row": row.name, "round": number, "start_s": server.start_s, "points": points}


def _measure_phase(
    benchmark: Benchmark, engine: Engine, server: Server, times: Path | None, shape: Mapping[str, int]
) -> dict[str, Any]:
    """Measure one length and number of tokens, with what the ranks' communication did meanwhile."""
    flags: dict[str, Any] = {
        "random-input-len": shape["input"],
        "random-output-len": shape["output"],
        "seed": shape["seed"],
    }
    before = settled_times(times) if times is not None else None
    found = measure(engine, server, benchmark.against, flags, benchmark.requests)
    if times is not None and before is not None:
        found["communication"] = communication_between(before, settled_times(times))
    return found


@contextlib.contextmanager
def _times_folder(log: Path, row: Row) -> Iterator[tuple[Path | None, dict[str, str]]]:
    """Give the folder in which the plugin's ranks write their times, and the environment that tells them."""
    environment = dict(row.environment)
    if not row.farskip:
        yield None, environment
        return
    folder = log.with_suffix(".times")
    folder.mkdir(exist_ok=True)
    for left in folder.iterdir():
        left.unlink()
    yield folder, environment | {TIMES_VARIABLE: str(folder.resolve())}
