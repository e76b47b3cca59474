"""Refuse a benchmark's senseless settings before any server is started."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fcsd.base.errors import UserError
from fcsd.base.weights import is_config_only
from fcsd.model.connectivity.checkpoint import has_tokenizer
from fcsd.model.families import PREFIX, base_model_type
from fcsd.model.inspect.checkpoint import find_source
from fcsd_bench.settings import DUMMY, LOAD_FORMAT, Benchmark


def check_models(benchmark: Benchmark) -> dict[str, Any]:
    """Return the converted model's config.

    Raises:
        UserError: a model that is not converted, an original that is converted or
            belongs to another model, a prompt that does not fit.
    """
    model, original = find_source(benchmark.model), find_source(benchmark.against)
    ours, regular = model.own_config, original.own_config
    converted, base = str(ours.get("model_type")), str(regular.get("model_type"))
    if not converted.startswith(PREFIX):
        raise UserError(
            f"{model.where}: model_type '{converted}': MODEL is not converted; convert"
            " it first with `fcsd convert`"
        )
    if base.startswith(PREFIX):
        raise UserError(
            f"{original.where}: --against is also converted; give the original of"
            f" {benchmark.model}"
        )
    if base_model_type(converted) != base:
        raise UserError(
            f"{original.where}: model_type '{base}', but {benchmark.model} was"
            f" converted from '{base_model_type(converted)}'"
        )
    # Equal sizes do not prove that it is the original, but another size proves that it
    # is not.
    mine, theirs = _sizes(ours), _sizes(regular)
    if differ := [
        name for name in mine.keys() & theirs.keys() if mine[name] != theirs[name]
    ]:
        name = min(differ)
        raise UserError(
            f"{original.where}: {name} is {theirs[name]}, but {mine[name]} in"
            f" {benchmark.model}: this is not its original"
        )
    longest = max(benchmark.prompt_tokens) + benchmark.output_tokens
    context = _context(benchmark.serve_flag("--max-model-len"), mine)
    if context is not None and longest > context:
        raise UserError(
            f"--prompt-tokens {max(benchmark.prompt_tokens)} and --output-tokens"
            f" {benchmark.output_tokens} make {longest} tokens, more than the context"
            f" of {benchmark.model}: {context}; shorten one of them"
        )
    return ours


def with_dummies(benchmark: Benchmark) -> Benchmark:
    """Return a benchmark in which all servers, including stock, have dummy weights if
    MODEL has none.

    Raises:
        UserError: they are told to load weights, or there is no tokenizer.
    """
    folder = Path(os.path.expanduser(benchmark.model))
    if benchmark.dummy_weights or not is_config_only(folder):
        return benchmark
    if (chosen := benchmark.serve_flag(LOAD_FORMAT)) is not None:
        raise UserError(
            f"--serve-args: {LOAD_FORMAT} {chosen}: {benchmark.model} was written by"
            f" `fcsd convert --config-only` and has no weights; leave {LOAD_FORMAT}"
            f" out, and fcsd sets it to {DUMMY}"
        )
    if not has_tokenizer(folder):
        raise UserError(
            f"{benchmark.model}: has no tokenizer, which a server needs even with"
            " dummy weights; copy the original's tokenizer.json and"
            " tokenizer_config.json into it"
        )
    words = [*benchmark.serve_args, LOAD_FORMAT, DUMMY]
    return benchmark.model_copy(update={"serve_args": words})


def _sizes(config: Mapping[str, Any], prefix: str = "") -> dict[str, int]:
    """Return a config's integers by dotted key, without token ids."""
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


def _context(length: str | None, sizes: Mapping[str, int]) -> int | None:
    if length is not None and length.isdigit():
        return int(length)
    name = "max_position_embeddings"
    return next(
        (value for key, value in sizes.items() if key.rpartition(".")[2] == name), None
    )
