"""What `fcsd bench serve` is asked to measure, and what of it makes no sense before any server is started."""

import shlex
from collections.abc import Mapping
from typing import Annotated, Any, get_args

from pydantic import Field, field_validator

from fcsd.bench.rows import RowName
from fcsd.config.strict import Strict, options_of, parse_yaml, validate
from fcsd.errors import UserError
from fcsd.families import PREFIX, base_model_type
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
    "--profiler-config",
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
    trace: bool = False
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
    own = {"comm": comm, "serve_args": words, "prompt_tokens": [int(word) for word in lengths]}
    chosen = options_of(Benchmark, options) | own
    if (rows := chosen.pop("rows")) is not None:
        chosen["rows"] = [word.strip() for word in rows.split(",")]
    return validate(Benchmark, chosen, "the benchmark")


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
