"""Shared by several test files: recipes on a small base checkpoint, processes,
forks.
"""

import contextlib
import ctypes
import faulthandler
import importlib
import importlib.util
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from fcsd.base.errors import UserError
from fcsd.base.weights import weights_fingerprint
from fcsd.evaluation.config import EvaluationConfig
from fcsd.evaluation.runner import prepare_evaluation
from fcsd.model.dtypes import loaded_dtypes
from fcsd.model.families import FAMILIES, UNAVAILABLE
from fcsd.model.preserve import preserved
from fcsd.model.saved_dtypes import FileDtypes
from fcsd.parallel.launch import ALONE, Launch, Ranks
from tests.float64 import BOUND, error, logits_in_float64

ROOT = Path(__file__).resolve().parents[1]
SHARED_DATA = Path(
    os.environ.get("FCSD_SHARED_DATA") or ROOT.parent / "shared" / "data"
)

_PR_SET_PDEATHSIG = 1


def skip_unavailable(model_type: str) -> None:
    """Skip a test of a family that the installed transformers lacks or breaks."""
    if model_type in UNAVAILABLE:
        pytest.skip(f"{model_type} {UNAVAILABLE[model_type]}")


KINDS = {
    "axk1", "deepseek_v3", "glm4_moe", "gpt_oss", "granitemoeshared", "instella_moe", "llama4_text", "minimax",
    "mixtral", "qwen2_moe", "qwen3_moe", "qwen3_vl_moe",
}  # fmt: skip
"""Families of each kind: norms, shared experts, dense layers, latent, linear and
chunked attention, images.
"""


TEXT_FAMILIES = sorted(
    name for name, family in FAMILIES.items() if not family.multimodal
)

WRAPPERS = sorted(FAMILIES.keys() - set(TEXT_FAMILIES))
"""The families whose models also take images."""

COMMON = (
    "qwen3_moe", "qwen2_moe", "deepseek_v2", "deepseek_v3", "instella_moe", "gpt_oss", "llama4_text", "mixtral",
)  # fmt: skip
"""The families that the tests of the ways to use a model run with."""


def cache_of(out: Any) -> dict[str, Any]:
    """Return the cache in a model's output under the name of the argument that takes
    it: past_key_values before transformers 5.24.
    """
    name = "cache" if "cache" in out else "past_key_values"
    return {name: out[name]}


def few(
    cases: Iterable[Any], number: int | None = None, kinds: Container[str] = KINDS
) -> list[Any]:
    """Return the cases. `make test` runs the first `number` of them, or one family of
    each kind; the rest are marked as breadth.
    """
    sets = [
        (
            each
            if hasattr(each, "marks")
            else pytest.param(*(each if isinstance(each, tuple) else [each]))
        )
        for each in cases
    ]
    return [
        (
            each
            if (each.values[0] in kinds if number is None else k < number)
            else each._replace(marks=(*each.marks, pytest.mark.breadth))
        )
        for k, each in enumerate(sets)
    ]


UNLIKE = KINDS - {"axk1", "glm4_moe", "mixtral"}
"""The most different families of `KINDS`, for tests that take seconds per family."""


def few_and_others(
    families: Iterable[str], parts: int = 1, kinds: Container[str] = KINDS
) -> list[Any]:
    """Return the families of each kind as one case, for tests in which one process runs
    many, and the others in this many parts.
    """
    families = list(families)
    others = [name for name in families if name not in kinds]
    return [
        pytest.param([name for name in families if name in kinds], id="few"),
        *(
            pytest.param(others[k::parts], id=f"others {k}", marks=pytest.mark.breadth)
            for k in range(parts)
        ),
    ]


@dataclass(frozen=True)
class Bench:
    """The paths of the base checkpoint, the training rows and the code problems, and a
    folder for runs.
    """

    base: Path
    rows: Path
    problems: Path
    folder: Path

    def recipe(self, name: str = "r", **changes: Any) -> Path:
        """Return a recipe file: 12 KL steps of 4 rows of 32 tokens; `changes` replace sections."""
        assert "RANK" not in os.environ, "another rank may read what this one writes"
        recipe = {
            "name": name, "output_dir": str(self.folder / name), "model": {"path": str(self.base)},
            "data": {"train": [{"path": str(self.rows)}], "max_length": 32},
            "train": {
                "max_steps": 12, "batch_size_tokens": 128, "per_device_train_batch_size": 2, "learning_rate": 1e-3,
                "warmup_steps": 2, "logging_steps": 1, "save_steps": 4,
            },
            **changes,
        }  # fmt: skip
        if isinstance(stopping := changes.get("early_stopping"), dict):
            file = self.folder / f"{name}-stopping.yaml"
            recipe["early_stopping"] = with_suite(stopping, file)
        path = self.folder / f"{name}.yaml"
        path.write_text(
            yaml.safe_dump(
                {key: value for key, value in recipe.items() if value is not None}
            )
        )
        return path

    @property
    def early_stopping(self) -> dict[str, Any]:
        """Score after every second step; a random model solves nothing."""
        task = {
            "kind": "code", "task": "problems", "dataset": str(self.problems), "chat_template": True, "stop": [],
            "max_new_tokens": 2, "timeout_s": 5.0,
        }  # fmt: skip
        return {"task": task, "every_steps": 2, "patience": 50}

    @property
    def choice(self) -> dict[str, Any]:
        """Score by a multiple-choice task of lm-eval: four of its eight items, after
        every second step.
        """
        folder = self.folder.parent / "choice"
        write_rows(
            folder / "test.jsonl",
            [
                {
                    "question": f"{n}+1",
                    "choices": ["1", "2", "3 is it"],
                    "answer": n % 3,
                }
                for n in range(8)
            ],
        )
        task = {
            "metric": "acc,none", "kind": "likelihood", "task": "tiny_choice", "dataset": str(folder),
            "lm_eval_include": "tiny", "chat_template": True,
        }  # fmt: skip
        return {"task": task, "limit": 4, "every_steps": 2, "patience": 50}


def with_suite(stopping: dict[str, Any], file: Path) -> dict[str, Any]:
    """Return an early_stopping section that names its task; if the task is written out
    as a row, it is put into a suite file.
    """
    row = stopping.get("task")
    if not isinstance(row, dict):
        return stopping
    file.write_text(yaml.safe_dump({"name": "stopping", "tasks": [row]}))
    return stopping | {"suite": str(file), "task": row["task"]}


def history(bench: Bench, name: str) -> list[dict[str, float]]:
    """Return the logged points of the distillation of a recipe of `bench`."""
    return json_lines(bench.folder / name / "distill" / "history.jsonl")


def trained_weights(bench: Bench, name: str) -> str:
    """Return the fingerprint of the model that a recipe of `bench` was distilled to."""
    return weights_fingerprint(bench.folder / name / "distill" / "model")


def arithmetic(count: int) -> list[dict[str, Any]]:
    """Return conversations of one question and its answer."""
    return [
        {
            "messages": [
                {"role": "user", "content": f"{n} + {n % 7}"},
                {"role": "assistant", "content": f"{n + n % 7} is it"},
            ]
        }
        for n in range(count)
    ]


def make_bench(base: Path, folder: Path) -> Bench:
    """Return a bench in `folder`."""
    write_rows(folder / "rows.jsonl", arithmetic(60))
    problem = {
        "task_id": 1, "prompt": "Write one().", "code": "def one():\n    return 1\n", "test_imports": [],
        "test_list": ["assert one() == 1"], "test": "assert one() == 1",
    }  # fmt: skip
    write_rows(folder / "problems.jsonl", [problem])
    (folder / "runs").mkdir()
    return Bench(
        base, folder / "rows.jsonl", folder / "problems.jsonl", folder / "runs"
    )


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write a .jsonl file, and its folder."""
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def json_lines(file: Path) -> list[Any]:
    """Return the values of a .jsonl file."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def same_tensors(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Tell whether two state dictionaries are equal to the last bit."""
    return one.keys() == other.keys() and all(
        torch.equal(value, other[name]) for name, value in one.items()
    )


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors in all files of a checkpoint."""
    return {
        name: value
        for file in folder.glob("*.safetensors")
        for name, value in load_file(file).items()
    }


def interrupt_at(step: int, patch: pytest.MonkeyPatch) -> None:
    """Make trainings end like on Ctrl-C after so many steps."""
    from fcsd.training.trainer import DistillTrainer

    compute = DistillTrainer.compute_loss

    def ended(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.state.global_step == step:
            raise KeyboardInterrupt
        return compute(self, *args, **kwargs)

    patch.setattr(DistillTrainer, "compute_loss", ended)


def change_json(file: Path, changes: dict[str, Any]) -> None:
    """Set fields of the object in a JSON file."""
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@contextlib.contextmanager
def edited_json(file: Path) -> Iterator[Any]:
    """Give what a JSON file holds, and write it back as the block leaves it."""
    value = json.loads(file.read_text())
    yield value
    file.write_text(json.dumps(value))


def user_error(match: str) -> pytest.RaisesExc[UserError]:
    """Return a context that must end with a `UserError` in whose text `match` is found."""
    return pytest.raises(UserError, match=match)


def assert_same_model(loaded: Any, model: Any, inputs: dict[str, Any]) -> None:
    """Check that weights are equal to the last bit, and logits in float64 up to the
    order of summation, which depends on the alignment of a memory-mapped file.
    """
    state = model.state_dict()
    assert loaded.state_dict().keys() == state.keys()
    assert all(
        torch.equal(tensor, state[name]) for name, tensor in loaded.state_dict().items()
    )
    one, other = (logits_in_float64(each, inputs) for each in (loaded, model))
    assert error(one, other) < BOUND


def start(*command: str, cwd: Path = ROOT, **environment: str) -> subprocess.Popen[str]:
    """Start a command in its own process, as a user would, with one thread and without
    network.
    """
    return subprocess.Popen(
        [sys.executable, *command],
        cwd=cwd,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def in_forked_ranks(
    call: Callable[[int], int], world_size: int, folder: Path
) -> list[tuple[int, str]]:
    """Return (exit status as from `in_a_fork`, output) of `call(rank)` in each of
    `world_size` forks that form a gloo group.

    Unlike `tests.reference.ranks.run_ranks`, this lets every rank end in its own way,
    and records how.
    """
    children = forked_ranks(call, world_size, folder)
    statuses = [status_of(child) for child, _ in children]
    return [
        (status, output.read_text())
        for status, (_, output) in zip(statuses, children, strict=True)
    ]


def status_of(child: int) -> int:
    """Wait for a fork to end, and return its exit status, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def forked_ranks(
    call: Callable[[int], int], world_size: int, folder: Path
) -> list[tuple[int, Path]]:
    """Return (process, output file) of `call(rank)` in each of `world_size` running
    forks that form a gloo group.
    """
    port = str(free_port())
    store = Path(tempfile.mkdtemp(dir=folder)) / "store"

    def joined(rank: int) -> int:
        import torch.distributed as dist
        from accelerate.state import AcceleratorState

        torch.set_num_threads(1)
        numbers = {
            "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size,
        }  # fmt: skip
        os.environ.update({name: str(number) for name, number in numbers.items()})
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        # the parent may have run alone before
        AcceleratorState._reset_state(reset_partial_state=True)
        files = dist.FileStore(str(store), world_size)
        dist.init_process_group("gloo", rank=rank, world_size=world_size, store=files)
        return call(rank)

    outputs = [store.with_name(f"output-{rank}") for rank in range(world_size)]
    return [
        (forked(partial(joined, rank), output), output)
        for rank, output in enumerate(outputs)
    ]


def free_port() -> int:
    """Return a port on which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def in_a_fork(call: Callable[[], int], output: Path) -> int:
    """Return the exit status of `call` in a forked process, negative for a signal; its
    stdout and stderr go to `output`.
    """
    return status_of(forked(call, output))


def end_if_it_hangs() -> None:
    """Make a forked process end if it hangs, and say where; also when pytest's own
    process ends.

    The watchdog of pytest's configuration ends at a fork, and if it is set there again,
    it waits forever for its thread.
    """
    faulthandler.register(signal.SIGALRM, file=2, chain=True)
    signal.alarm(600)
    with contextlib.suppress(AttributeError):  # only Linux has prctl
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def forked(call: Callable[[], int], output: Path) -> int:
    child = os.fork()
    if child == 0:
        status = 99
        try:
            with output.open("w") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
                sys.stdout = sys.stderr = file
                end_if_it_hangs()
                try:
                    status = call()
                except BaseException:
                    traceback.print_exc()
                file.flush()
        finally:
            os._exit(status)
    return child


def assert_killed(call: Callable[[], int], output: Path) -> None:
    """Check that `call` ends by SIGKILL in a fork."""
    assert in_a_fork(call, output) == -signal.SIGKILL, output.read_text()


def killed_after(
    monkeypatch: Any, module: Any, name: str, call: Callable[[], int], output: Path
) -> None:
    """Run `call` in a fork that is killed when `module.name` has returned for the first
    time.
    """
    does = getattr(module, name)

    def killed() -> int:
        def die(*args: Any) -> None:
            does(*args)
            os.kill(os.getpid(), signal.SIGKILL)

        monkeypatch.setattr(module, name, die)
        return call()

    assert_killed(killed, output)


def documented_keys(chapter: str) -> set[str]:
    """Return the keys that a chapter of docs/results.md names."""
    text = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    return set(
        re.findall(
            r"`([a-z0-9_]+)`", text.split(f"\n## {chapter}\n")[1].split("\n## ")[0]
        )
    )


def command_words(*parts: object) -> list[str]:
    """Return the words of a command: those of a text as a shell would split it, and
    each other part, such as a path, whole.
    """
    return [
        word
        for part in parts
        for word in (shlex.split(part) if isinstance(part, str) else [str(part)])
    ]


def run_command(*parts: object) -> int:
    """Return the status with which `fcsd` ends after these words, in this process."""
    from fcsd.cli.main import main

    return main(command_words(*parts))


def load_script(file: Path) -> Any:
    """Return a script as a module; what it puts in front of `sys.path` goes again."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = list(sys.path)
    spec.loader.exec_module(module)
    sys.path[:] = before
    return module


def load_modules(folder: str, package: str, names: Iterable[str]) -> SimpleNamespace:
    """Return modules of a package in a folder of the checkout, by their names."""
    sys.path.insert(0, str(ROOT / folder))
    try:
        modules = {name: importlib.import_module(f"{package}.{name}") for name in names}
        return SimpleNamespace(**modules)
    finally:
        sys.path.remove(str(ROOT / folder))


def run_of(recipe: Any) -> Any:
    """Return the `Run` of a recipe, given as a path or as an object, in this
    process.
    """
    from fcsd.parallel.launch import join_launch
    from fcsd.pipeline.context import Run
    from fcsd.recipe.load_recipe import load_recipe
    from fcsd.recipe.recipe import Recipe

    return Run(
        recipe if isinstance(recipe, Recipe) else load_recipe(recipe), join_launch()
    )


def evaluate(
    model: Any,
    tokenizer: Any,
    suite: Any,
    *,
    name: str = "model",
    ranks: Ranks = ALONE,
    progress: bool = True,
    original: Any = None,
    **plan: Any,
) -> Any:
    """Return result and samples of one model. plan: keys of a recipe's `evaluation`."""
    prepared = prepare_evaluation(
        tokenizer,
        suite,
        EvaluationConfig.model_construct(**plan),
        ranks=ranks,
        progress=progress,
        original=original,
    )
    with preserved(model, tokenizer), prepared as ask:
        return ask(model, name)


def write_as(
    model: Any,
    folder: Path,
    dtype: torch.dtype,
    launch: Launch | None = None,
    tokenizer: Any = None,
) -> None:
    """Write a model in the dtypes of one that is loaded in `dtype`."""
    from fcsd.parallel.launch import join_launch
    from fcsd.training.save_model import write_model

    dtypes = FileDtypes(dtype, loaded_dtypes(model, dtype))
    own = join_launch() if launch is None else launch
    write_model(model, folder, tokenizer=tokenizer, dtypes=dtypes, launch=own)
