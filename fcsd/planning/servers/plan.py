"""Refuse senseless settings of a benchmark before any server is started."""

from collections.abc import Mapping
from typing import Any

from fcsd.base.errors import UserError
from fcsd.model.families import PREFIX, base_model_type
from fcsd.model.inspect.checkpoint import find_source
from fcsd.planning.servers.settings import Benchmark


def check_models(benchmark: Benchmark) -> dict[str, Any]:
    """Return the converted model's config.

    Raises:
        UserError: a model that is not converted, an original that is, or of another
            model; a prompt that does not fit.
    """
    model, original = find_source(benchmark.model), find_source(benchmark.against)
    ours, regular = model.own_config, original.own_config
    converted, base = str(ours.get("model_type")), str(regular.get("model_type"))
    if not converted.startswith(PREFIX):
        raise UserError(
            f"{model.where}: model_type '{converted}': MODEL is not converted; `fcsd"
            " convert` makes a FarSkip checkpoint of it"
        )
    if base.startswith(PREFIX):
        raise UserError(
            f"{original.where}: --against is converted, too; give the original of"
            f" {benchmark.model}"
        )
    if base_model_type(converted) != base:
        raise UserError(
            f"{original.where}: model_type '{base}' is not what {benchmark.model} was"
            f" converted from, '{base_model_type(converted)}'"
        )
    # Equal sizes do not prove that it is the original, but another size proves that it
    # is not.
    mine, theirs = _sizes(ours), _sizes(regular)
    if differ := [
        name for name in mine.keys() & theirs.keys() if mine[name] != theirs[name]
    ]:
        name = min(differ)
        raise UserError(
            f"{original.where}: {name} is {theirs[name]}, that of {benchmark.model} is"
            f" {mine[name]}: this is not its original"
        )
    longest = max(benchmark.prompt_tokens) + benchmark.output_tokens
    context = _context(benchmark.serve_args, mine)
    if context is not None and longest > context:
        raise UserError(
            f"--prompt-tokens {max(benchmark.prompt_tokens)} and --output-tokens"
            f" {benchmark.output_tokens} make {longest} tokens; the context of"
            f" {benchmark.model} is {context}"
        )
    return ours


def _sizes(config: Mapping[str, Any], prefix: str = "") -> dict[str, int]:
    """Return the whole numbers of a config by their dotted keys, without ids of tokens."""
    sizes: dict[str, int] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and key != "farskip":
            sizes |= _sizes(value, f"{prefix}{key}.")
        elif (
            isinstance(value, int)
            and not isinstance(value, bool)
            and not key.endswith(("_id", "_index"))
        ):
            sizes[prefix + key] = value
    return sizes


def _context(words: list[str], sizes: Mapping[str, int]) -> int | None:
    # Both `--max-model-len N` and `--max-model-len=N` are understood.
    flags = [word for argument in words for word in argument.split("=", 1)]
    if (
        "--max-model-len" in flags[:-1]
        and (length := flags[flags.index("--max-model-len") + 1]).isdigit()
    ):
        return int(length)
    name = "max_position_embeddings"
    return next(
        (value for key, value in sizes.items() if key.rpartition(".")[2] == name), None
    )
