"""A training that is out of memory ends with one line that names what to change."""

from typing import Any

import pytest
import torch

from fcsd.base.errors import UserError, is_out_of_memory
from fcsd.cli.main import main
from fcsd.training.out_of_memory import explain_oom


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
def test_every_way_in_which_memory_is_refused_is_known(error: Exception) -> None:
    with (
        pytest.raises(
            UserError, match=r"out of memory on cuda:0.*gradient_checkpointing: true"
        ) as refusal,
        explain_oom(torch.device("cuda:0")),
    ):
        raise error
    assert ("requested" in str(refusal.value)) == (
        "allocate" in str(error) and not isinstance(error, OSError)
    )


def test_other_errors_pass_unchanged() -> None:
    error = RuntimeError("shapes do not match")
    assert not is_out_of_memory(error) and not is_out_of_memory(
        ValueError("out of memory")
    )
    with (
        pytest.raises(RuntimeError, match="shapes do not match"),
        explain_oom(torch.device("cpu")),
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
    assert (
        error.count("\n") == 1
        and "out of memory: CUDA out of memory. Tried to allocate 2.50 GiB" in error
    )
