"""A training that runs out of memory ends with one line that names the largest terms
and what to change.
"""

import json
import os
import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fcsd.base.errors import UserError, is_out_of_memory
from fcsd.cli.main import main
from fcsd.training import ready_trainer
from fcsd.training.config import TrainConfig
from fcsd.training.ready_trainer import REST, advice, explain_oom, held
from fcsd.training.teachers.base import ModelTeacher
from tests.memory import PLAIN, memory_of_this_process, small_model, train_two_steps
from tests.reference.tiny import tiny_model
from tests.support import end_if_it_hangs, user_error


def in_limited_memory(folder: Path, more_bytes: int, **changes: Any) -> str:
    """Return the error of a training in a fork that may use only this much more address
    space than it already has.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        end_if_it_hangs()
        answer = "no error"
        try:
            torch.set_num_threads(1)
            limit = memory_of_this_process("VmSize") + more_bytes
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            train_two_steps(folder, replace(PLAIN, **changes))
        except UserError as error:
            answer = str(error)
        except BaseException as error:
            answer = f"{type(error).__name__}: {error}"
        os.write(writer, json.dumps(answer).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return str(json.loads(text))


@pytest.mark.skipif(
    not Path("/proc/self/status").exists(),
    reason="sizes of a process are read from /proc",
)
def test_too_little_memory_for_a_training_names_the_terms_and_the_changes(
    tmp_path: Path,
) -> None:
    # Student, gradients, moments and teacher are 210 MB; 64 rows need more than a
    # gigabyte of activations.
    error = in_limited_memory(tmp_path, 600 << 20, num_rows=64, accumulates=False)
    assert error.startswith("out of memory on cpu: a rank needs about "), error
    number = sum(p.numel() for p in small_model().parameters())
    for term in (
        REST,
        f"optimizer states {8 * number / 2**20:.1f} MiB",
        f"teacher weights {4 * number / 2**20:.1f} MiB",
    ):
        assert term in error
    for change in (
        "train.gradient_checkpointing: true",
        "train.per_device_train_batch_size below 64",
        "configs/fsdp2_8.yaml",
        "teacher.backend: cache",
        "fcsd estimate RECIPE",
    ):
        assert change in error
    assert "\n" not in error and "were requested" in error


def test_what_is_held_is_counted_once_and_frozen_weights_have_no_moments() -> None:
    student, teacher = tiny_model("qwen2_moe"), ModelTeacher(tiny_model("qwen2_moe"))
    number = sum(p.numel() for p in student.parameters())
    assert held(student, teacher) == {
        "student weights": 4 * number,
        "gradients": 4 * number,
        "optimizer states": 8 * number,
        "teacher weights": 4 * number,
    }
    student.requires_grad_(False)
    student.lm_head.requires_grad_(True)
    shared = held(student, ModelTeacher(student))
    # ModelTeacher freezes what it is given
    assert shared["teacher weights"] == 0 and shared["gradients"] == 0


def changes(
    largest: list[str], student: Any, teacher: Any = None, **train: Any
) -> list[str]:
    return list(advice(largest, student, teacher, TrainConfig(**train), 512))


def test_advice_begins_with_the_largest_term_and_leaves_out_what_is_done_already(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    student = tiny_model("qwen2_moe")
    teacher = ModelTeacher(tiny_model("qwen2_moe"))
    first = changes(
        ["optimizer states", REST], student, teacher, per_device_train_batch_size=4
    )
    assert "configs/fsdp2_8.yaml" in first[0] and "adapter_off" in first[1]
    assert first[2:] == [
        "train.gradient_checkpointing: true",
        "train.per_device_train_batch_size below 4 (the step's batch does not change)",
    ]
    assert changes(["teacher weights"], student, teacher)[0] == "teacher.backend: cache"
    student.activation_checkpointing_enable()
    assert changes([REST], student, per_device_train_batch_size=1) == [
        "data.max_length below 512"
    ]
    monkeypatch.setenv("WORLD_SIZE", "8")
    weight: Any = next(student.parameters())
    weight.ds_tensor = weight.data[:1]  # as under ZeRO-3
    assert "configs/zero3_offload_8.yaml" in changes(["gradients"], student)[0]
    student.model.requires_grad_(False)
    assert len(changes(["gradients"], student)) == 1


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of …"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you"
                     " tried to allocate 64000 bytes. Error code 12 (Cannot allocate memory)"),
        RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 64000 bytes."),
        MemoryError(),
        OSError(12, "Cannot allocate memory"),
    ],
)  # fmt: skip
def test_every_way_in_which_memory_is_refused_is_known(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ready_trainer, "peak_bytes", lambda device: 10 << 30)
    student = tiny_model("qwen2_moe")
    with (
        user_error(
            r"out of memory on cuda:0: .* loss and buffers 10\.0 GiB"
        ) as refusal,
        explain_oom(student, None, TrainConfig(), 512, torch.device("cuda:0")),
    ):
        raise error
    assert ("requested" in str(refusal.value)) == (
        "allocate" in str(error) and not isinstance(error, OSError)
    )


def test_other_errors_pass_unchanged() -> None:
    error = RuntimeError("shapes do not match")
    assert not is_out_of_memory(error)
    assert not is_out_of_memory(ValueError("out of memory"))
    with (
        pytest.raises(RuntimeError, match="shapes do not match"),
        explain_oom(
            tiny_model("qwen2_moe"), None, TrainConfig(), 512, torch.device("cpu")
        ),
    ):
        raise error


def test_the_command_line_has_one_line_for_it_wherever_it_happens(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import fcsd.model.inspect

    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2.50 GiB.")

    monkeypatch.setattr(fcsd.model.inspect, "inspect_model", full)
    assert main(["inspect", "somewhere"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "out of memory: CUDA out of memory. Tried to allocate 2.50 GiB" in error
