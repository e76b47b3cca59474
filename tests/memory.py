"""Peak memory of real training steps on a CPU: each in a process of its own, none of
which inherits another's.
"""

import contextlib
import gc
import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from fcsd.data.batches import next_token_targets
from fcsd.data.config import RowsConfig
from fcsd.model.connectivity import Connectivity, convert_model
from fcsd.parallel.launch import join_launch
from fcsd.pipeline.tiny.models import tiny_tokenizer
from fcsd.planning.cost.trace import Setting
from fcsd.training.arguments import Job
from fcsd.training.config import Sections, TrainConfig
from fcsd.training.losses.objectives import KLObjectiveConfig
from fcsd.training.prepare import TrainingInputs
from fcsd.training.run import train
from fcsd.training.teachers.base import Teacher
from fcsd.training.teachers.config import AdapterConfig
from fcsd.training.teachers.lora import AdapterOffTeacher, add_adapters
from tests.reference.ranks import run_ranks
from tests.support import ROOT, end_if_it_hangs

SMALL = {
    "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 256,
    "num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "num_experts": 8,
    "num_experts_per_tok": 2, "tie_word_embeddings": False,
}  # fmt: skip
PLAIN = Setting(
    objective=KLObjectiveConfig(),
    num_rows=4,
    num_tokens=128,
    student_dtype=torch.float32,
    teacher_dtype=torch.float32,
    autocast=False,
    sharded=False,
    checkpointing=False,
    freeze_embeddings_and_head=False,
    accumulates=True,
    on_gpu=False,
)


def small_model(**overrides: Any) -> Any:
    config = AutoConfig.for_model("qwen3_moe", **{**SMALL, **overrides})
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")


class Rows(torch.utils.data.Dataset):
    def __init__(self, number: int, length: int, vocabulary: int):
        self.number, self.length, self.vocabulary = number, length, vocabulary

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(6, self.vocabulary, (self.length,))
        return {
            "input_ids": ids,
            "labels": ids.clone(),
            "position_ids": torch.arange(self.length),
        }


class Ready(Teacher):
    """Stands for a teacher that reads from a cache: hidden states and a head, no
    model.
    """

    def __init__(self, head: torch.nn.Linear):
        self.head = torch.nn.Linear(
            head.in_features, head.out_features, bias=False
        ).requires_grad_(False)

    def prepare(self, batches: list[dict[str, torch.Tensor]]) -> None:
        for batch in batches:
            number = int(
                next_token_targets(batch["labels"], batch["position_ids"])[0].sum()
            )
            batch["teacher_hidden"] = torch.randn(number, self.head.in_features)


def train_two_steps(folder: Path, setting: Setting, **overrides: Any) -> None:
    student = small_model(**overrides)
    convert_model(student, Connectivity("all"))
    teacher: Any = None
    adapters: Any = None
    if setting.adapters:
        adapters = add_adapters(student, AdapterConfig(), seed=0, dtype=torch.float32)
    if setting.has_teacher:
        original = (
            small_model(**overrides) if setting.teacher != "adapter_off" else None
        )
        teacher = {
            "sharded": lambda: original,
            "adapter_off": lambda: AdapterOffTeacher(student),
            "cache": lambda: Ready(original.lm_head),
        }[setting.teacher]()
        del original
    micro_batches = 2 if setting.accumulates else 1
    rows = setting.num_rows * micro_batches * int(os.environ.get("WORLD_SIZE", "1"))
    inputs = TrainingInputs(
        student,
        teacher,
        tiny_tokenizer(512),
        Rows(2 * rows, setting.num_tokens, student.config.vocab_size),
        adapters=adapters,
    )
    sections = Sections(
        objective=setting.objective.model_copy(
            update={"freeze_embeddings_and_head": setting.freeze_embeddings_and_head}
        ),
        train=TrainConfig(
            max_steps=2,
            batch_size_tokens=rows * setting.num_tokens,
            per_device_train_batch_size=setting.num_rows,
            warmup_steps=0,
            gradient_checkpointing=setting.checkpointing,
        ),
        data=RowsConfig(max_length=setting.num_tokens),
    )
    job = Job(folder, "measured", 0, save_model=False)
    train(inputs, sections, job, join_launch())


def memory_of_this_process(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def peak_of_two_steps(setting: Setting, **overrides: Any) -> int:
    """Return the bytes by which two real steps raise the peak of this process above the
    memory that a tiny training left in use.
    """
    with tempfile.TemporaryDirectory() as folder:
        warm_up = {"vocab_size": 512, "hidden_size": 64, "moe_intermediate_size": 32}
        few = {"num_rows": 2, "num_tokens": 16}
        train_two_steps(
            Path(folder) / "a", Setting(**{**vars(setting), **few}), **warm_up
        )
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        before = memory_of_this_process("VmRSS")
        train_two_steps(Path(folder) / "b", setting, **overrides)
        return memory_of_this_process("VmHWM") - before


def peak_on_two_ranks(setting: Setting, **overrides: Any) -> int:
    """Return `peak_of_two_steps` for the rank that needs more, under FSDP2; the second
    rank starts without weights.
    """
    from tests.parallel.test_engines import environment

    variables = environment(ROOT / "configs" / "cpu_2_fsdp2.yaml")
    return max(run_ranks(_rank_peak, 2, variables, setting, overrides, timeout_s=400))


def _rank_peak(
    rank: int, variables: dict[str, str], setting: Setting, overrides: dict[str, Any]
) -> int:
    from accelerate.state import AcceleratorState

    os.environ.update(variables)
    AcceleratorState._reset_state(reset_partial_state=True)
    if rank > 0:
        whole = small_model

        def empty(**overrides: Any) -> Any:
            with torch.device("meta"):
                return whole(**overrides)

        globals()["small_model"] = empty  # of this forked process
    return peak_of_two_steps(setting, **overrides)


def forked(fn: Callable[[], Any]) -> Any:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        end_if_it_hangs()
        with contextlib.suppress(BaseException):
            os.write(writer, json.dumps(fn()).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return json.loads(text)


def _measure_all(module: str, names: list[str]) -> None:
    torch.set_num_threads(1)
    measure = importlib.import_module(module).measure
    with contextlib.suppress(ImportError):
        # which a training looks for: half a second in each fork
        importlib.import_module("deepspeed")
    gc.collect()
    gc.freeze()  # imported modules stay out of the collections of each fork
    print(
        "RESULT",
        json.dumps({name: forked(lambda name=name: measure(name)) for name in names}),
    )


def selected(request: pytest.FixtureRequest, parameter: str) -> list[Any]:
    """Return the values of a parameter in the selected tests that ask for the fixture
    of this request.
    """
    asking = (each for each in request.session.items if each.path == request.path)
    return [
        each.callspec.params[parameter]
        for each in asking
        if request.fixturename in getattr(each, "fixturenames", ())
    ]


def measured_by(module: str, names: list[str]) -> dict[str, int]:
    """Return {name: `measure(name)` of that test module}, each from a fork of one
    process that has only imported the module.
    """
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip(
            "the peak of a process is read from /proc, which this system does not have"
        )
    code = (
        "import warnings; warnings.simplefilter('ignore');"
        f"from tests.memory import _measure_all as m; m({module!r}, {names!r})"
    )
    # With a fixed threshold every freed tensor goes back to the system, so that
    # resident memory is live memory.
    environment = {
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stderr
    return dict(json.loads(lines[0].removeprefix("RESULT ")))
