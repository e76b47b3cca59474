"""Settings of `fcsd-bench serve`."""

import itertools
import shlex
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple, get_args

from pydantic import Field, ValidationInfo, field_validator, model_validator

from fcsd.base.files import parse_yaml
from fcsd.base.strict import Strict
from fcsd_bench.engines import ENGINES, EngineName
from fcsd_bench.rows import ROWS_OF, RowName

_OURS = (
    "--additional-config",
    "--all2all-backend",
    "--data-parallel-address",
    "--data-parallel-rpc-port",
    "--data-parallel-size",
    "--data-parallel-size-local",
    "--data-parallel-start-rank",
    "--disable-radix-cache",
    "--dist-init-addr",
    "--dp",
    "--dp-size",
    "--enable-dbo",
    "--enable-dp-attention",
    "--enable-prefix-caching",
    "--ep",
    "--ep-size",
    "--expert-parallel-size",
    "--headless",
    "--host",
    "--master-addr",
    "--master-port",
    "--model",
    "--model-path",
    "--moe-a2a-backend",
    "--nccl-init-addr",
    "--nnodes",
    "--node-rank",
    "--port",
    "--profiler-config",
    "--served-model-name",
    "--tensor-parallel-size",
    "--tp",
    "--tp-size",
    "-dp",
    "-tp",
)
"""Flags that the rows set."""
LOAD_FORMAT, DUMMY = "--load-format", "dummy"
"""The flag and value with which vLLM and SGLang invent weights."""

_NUMBERS = {"prompt_tokens": "512,1024,2048", "requests": "1,8,64"}
"""Lists of numbers, with an example."""


class Shape(NamedTuple):
    """What one measurement sends: this many prompts at once, of this length."""

    prompt_tokens: int
    requests: int


def shapes_of(settings: Mapping[str, Any]) -> list[Shape]:
    """Return what a benchmark with these settings measures a server at: every number of
    requests at the first length of prompt, then at the second, …
    """
    pairs = itertools.product(settings["prompt_tokens"], settings["requests"])
    return list(itertools.starmap(Shape, pairs))


class Benchmark(Strict):
    """The measurements of a benchmark and its servers."""

    engine: EngineName = "vllm"
    model: str
    against: str = Field(
        ...,
        description="the original of MODEL, hub id or local folder",
        json_schema_extra={"metavar": "ORIGINAL"},
    )
    tensor_parallel: int = Field(
        1,
        description="ranks of a server, which also share the experts",
        json_schema_extra={"metavar": "N"},
        gt=0,
    )
    comm: dict[str, Any] = Field(
        {},
        description=(
            "communication of the overlapped row: stream, nccl, c10d, timed, or the plugin's"
            ' settings such as \'{"comm": "timed", "latency_ms": 2}\' (default: the'
            " plugin's)"
        ),
        json_schema_extra={"metavar": "NAME|JSON"},
    )
    all2all: str = Field(
        "allgather_reducescatter",
        description=(
            "vLLM's all-to-all backend for all wide rows (data-parallel attention, experts"
            " over all ranks): deepep_high_throughput, deepep_low_latency, …"
        ),
        json_schema_extra={"metavar": "NAME"},
    )
    nodes: list[str] = Field(
        [],
        description=(
            "addresses of the machines that a server spans, this one first; fcsd reaches"
            " the others by ssh, and they must have the same folders (default: this"
            " machine)"
        ),
        json_schema_extra={"metavar": "A,B,…"},
    )
    serve_args: list[str] = Field(
        [],
        description=(
            "extra flags of the engine's `serve` for every server, as one argument:"
            " --serve-args='--quantization fp8'"
        ),
        json_schema_extra={"metavar": "FLAGS"},
    )
    prompt_tokens: list[Annotated[int, Field(gt=0)]] = Field(
        [512, 1024, 2048],
        description="lengths of the prompts",
        json_schema_extra={"metavar": "N,…"},
        min_length=1,
    )
    requests: list[Annotated[int, Field(gt=0)]] = Field(
        [16],
        description=(
            "numbers of concurrent requests, each measured at every length on the same"
            " server"
        ),
        json_schema_extra={"metavar": "N,…"},
        min_length=1,
    )
    output_tokens: int = Field(
        128,
        description="length of an answer, for the time between tokens",
        json_schema_extra={"metavar": "N"},
        gt=1,
    )
    rounds: int = Field(
        3,
        description="number of times that every server is started and measured",
        json_schema_extra={"metavar": "N"},
        gt=0,
    )
    rows: list[RowName] = Field(
        [],
        description=(
            f"measure only these rows: {', '.join(get_args(RowName))}; SGLang has"
            f" {', '.join(ROWS_OF['sglang'])} (default: all)"
        ),
        json_schema_extra={"metavar": "A,B,…"},
    )
    trace: bool = Field(
        False,
        description=(
            "start stock and FarSkip again under vLLM's profiler: measure overlap from its"
            " trace, and draw one layer (GPUs)"
        ),
    )

    @property
    def shapes(self) -> list[Shape]:
        """Return what a server is measured at, in this order."""
        return shapes_of(
            {"prompt_tokens": self.prompt_tokens, "requests": self.requests}
        )

    def serve_flag(self, flag: str) -> str | None:
        """Return the value of a flag in `serve_args`; None if absent."""
        words = [
            word for argument in self.serve_args for word in argument.split("=", 1)
        ]
        return words[words.index(flag) + 1] if flag in words[:-1] else None

    @property
    def dummy_weights(self) -> bool:
        """Tell whether the servers fill their weights with random numbers."""
        return self.serve_flag(LOAD_FORMAT) == DUMMY

    @field_validator("prompt_tokens", "requests", "rows", "nodes", mode="before")
    @classmethod
    def _split_list(cls, value: Any, info: ValidationInfo) -> Any:
        """Read `512,1024`; in Python, `requests` may be one number."""
        if isinstance(value, int) and info.field_name == "requests":
            return [value]
        if not isinstance(value, str):
            return value
        words = [word.strip() for word in value.split(",")]
        if (example := _NUMBERS.get(str(info.field_name))) is not None and (
            wrong := [word for word in words if not word.isdigit()]
        ):
            raise ValueError(
                f"{wrong[0]!r} is not a number; write for example {example}"
            )
        return words

    @field_validator("comm", mode="before")
    @classmethod
    def _read_comm(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        if value.lstrip().startswith("{"):
            return parse_yaml(value, "--comm")
        return {"comm": value}

    @field_validator("serve_args", mode="before")
    @classmethod
    def _split_words(cls, value: Any) -> Any:
        return shlex.split(value) if isinstance(value, str) else value

    @field_validator("nodes")
    @classmethod
    def _check_nodes(cls, nodes: list[str], info: ValidationInfo) -> list[str]:
        # Engines give every machine the same number of ranks.
        ranks = info.data.get("tensor_parallel", 1)
        if nodes and (len(nodes) < 2 or ranks % len(nodes)):
            raise ValueError(
                f"{ranks} ranks on {len(nodes)} machine(s): give two or more machines,"
                " of a number that divides the ranks; for one machine, leave it out"
            )
        return nodes

    @field_validator("serve_args")
    @classmethod
    def _check_serve_args(cls, words: list[str]) -> list[str]:
        for word in words:
            # A flag that the rows also set would contradict their titles.
            if (flag := word.partition("=")[0]) in _OURS:
                raise ValueError(f"{flag} is set by the benchmark; leave it out")
        return words

    @field_validator("prompt_tokens", "requests", "rows", "nodes")
    @classmethod
    def _check_repeats(cls, values: list[Any]) -> list[Any]:
        if twice := [value for value in values if values.count(value) > 1]:
            raise ValueError(f"{twice[0]} is given twice")
        return values

    @field_validator("rows")
    @classmethod
    def _check_rows(cls, rows: list[RowName], info: ValidationInfo) -> list[RowName]:
        engine: EngineName = info.data["engine"]
        if foreign_rows := [row for row in rows if row not in ROWS_OF[engine]]:
            raise ValueError(
                f"{foreign_rows[0]} belongs to another engine; {ENGINES[engine].title}"
                f" has {', '.join(ROWS_OF[engine])}"
            )
        # Without a choice all of the engine's rows are measured.
        return rows or list(ROWS_OF[engine])

    @model_validator(mode="after")
    def _check_engine(self) -> "Benchmark":
        if self.engine != "vllm":
            if self.all2all != type(self).model_fields["all2all"].default:
                raise ValueError(
                    f"--all2all {self.all2all}: applies to wide rows, which only vLLM"
                    " has; leave it out"
                )
            if self.trace:
                raise ValueError(
                    "--trace: works with vLLM's profiler only; for SGLang, measure"
                    " overlap with --comm timed"
                )
        return self
