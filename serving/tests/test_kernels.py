"""The engine's kernels on FarSkip's stream. They need several GPUs, so that here stand-ins
with vLLM's own signatures record what runs where, and in which order.
"""

import contextlib
import inspect
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from fcsd_vllm import kernels
from fcsd_vllm.communication import Blocking, SmallAtOnce, Stream, make_communication
from fcsd_vllm.settings import Settings

KIB = 1024


class Recorded:
    """Streams and events, and what was queued on each stream."""

    def __init__(self) -> None:
        self.log: list[tuple[str, ...]] = []
        self.current = "computing"


class Custom:
    """A stand-in for vLLM's CustomAllreduce: doubles its input as two equal ranks do."""

    made = 0

    def __init__(
        self, group: Any, device: Any, max_size: int = 8192 * KIB, max_all_gather_size: int = 2048 * KIB
    ) -> None:  # fmt: skip
        type(self).made += 1
        self.group, self.device, self.max_size = group, device, max_size
        self.gather_size = max_all_gather_size
        self.disabled = False
        self.recorded = group.recorded

    def should_custom_ar(self, inp: torch.Tensor) -> bool:
        return inp.nbytes < self.max_size and inp.nbytes % 16 == 0

    def all_reduce(
        self, inp: torch.Tensor, *, out: torch.Tensor = None, registered: bool = False  # type: ignore[assignment]
    ) -> torch.Tensor:  # fmt: skip
        assert not registered  # the input is copied into the kernel's buffer
        self.recorded.log.append(
            (self.recorded.current, type(self).__name__, str(id(self)))
        )
        out.copy_(2 * inp)
        return out


class Multimem(Custom):
    """A stand-in for SymmMemCommunicator, which takes larger messages."""

    def __init__(
        self, group: Any, device: Any, max_size_override: int | None = None
    ) -> None:
        super().__init__(group, device, 64 * KIB)

    should_use_symm_mem = Custom.should_custom_ar


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    """Replace CUDA's streams and NCCL's communicator."""
    recorded = Recorded()

    class Event:
        def record(self, stream: Any = None) -> None:
            recorded.log.append((stream or recorded.current, "record", str(id(self))))

    class Side(str):
        def wait_event(self, event: Any) -> None:
            recorded.log.append((self, "wait", str(id(event))))

    class Nccl:
        disabled = False

        def __init__(self, group: Any, device: Any) -> None:
            pass

        def all_reduce(self, x: Any, summed: Any, stream: Any) -> None:
            recorded.log.append((stream, "nccl"))
            summed.copy_(2 * x)

    @contextlib.contextmanager
    def stream(side: Any) -> Iterator[None]:
        before, recorded.current = recorded.current, side
        yield
        recorded.current = before

    monkeypatch.setattr(torch.cuda, "Stream", lambda: Side("side"))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Side(recorded.current))
    module: Any = ModuleType("pynccl")
    module.PyNcclCommunicator = Nccl
    monkeypatch.setitem(
        sys.modules, "vllm.distributed.device_communicators.pynccl", module
    )
    return recorded


def group_of(recorded: Recorded, **communicators: Any) -> Any:
    """Return a group coordinator of two ranks with these communicators."""
    cpu_group = SimpleNamespace(recorded=recorded)
    group = SimpleNamespace(world_size=2, cpu_group=cpu_group, device="cuda:0")
    group.device_communicator = SimpleNamespace(
        **{name: make(cpu_group, "cuda:0") for name, make in communicators.items()}
    )
    return group


def sum_of(
    communication: Any, num_bytes: int, tag: str = "attention.0"
) -> torch.Tensor:
    x = torch.randn(num_bytes // 4)
    summed = communication.start(x, tag)
    assert torch.equal(communication.wait(summed, tag), 2 * x)
    return summed


def test_a_message_runs_in_a_kernel_with_buffers_of_its_own_on_the_side_stream(
    recorded: Recorded,
) -> None:
    group = group_of(recorded, ca_comm=lambda *a: Custom(*a, max_size=4 * KIB))
    theirs = group.device_communicator.ca_comm
    stream = make_communication(Settings(comm="stream"), group)
    assert isinstance(stream, Stream)
    [ours] = stream.kernels
    own = ours.reduce.__self__  # type: ignore[attr-defined]
    assert own is not theirs and type(own) is Custom
    # The engine's limit; no room for collectives that do not run here.
    assert own.max_size == theirs.max_size == 4 * KIB and own.gather_size == KIB

    sum_of(stream, 2 * KIB)
    ready, waits, reduces, done, waited = recorded.log
    assert ready[:2] == ("computing", "record") and waits == ("side", "wait", ready[2])
    assert reduces == ("side", "Custom", str(id(own)))
    assert done[:2] == ("side", "record") and waited == ("computing", "wait", done[2])
    assert recorded.current == "computing"


def test_what_no_kernel_takes_goes_through_nccl_and_sizes_choose_as_in_the_engine(
    recorded: Recorded,
) -> None:
    group = group_of(
        recorded,
        ca_comm=lambda *a: Custom(*a, max_size=4 * KIB),
        symm_mem_comm=Multimem,
    )
    stream = make_communication(Settings(comm="stream"), group)
    for num_bytes in (KIB, 16 * KIB, 64 * KIB, 20):
        sum_of(stream, num_bytes)
    ran = [entry[1] for entry in recorded.log if entry[1] not in ("record", "wait")]
    assert ran == ["Custom", "Multimem", "nccl", "nccl"]
    assert all(entry[0] == "side" for entry in recorded.log if entry[1] in ran)


def test_all_collectives_follow_one_another_on_one_stream(recorded: Recorded) -> None:
    """Two in flight at once share a kernel's buffer, in the order of the program."""
    group = group_of(recorded, ca_comm=Custom)
    stream = make_communication(Settings(comm="stream"), group)
    first, second = torch.randn(64), torch.randn(64)
    started = [
        stream.start(x, tag)
        for x, tag in ((first, "attention.3"), (second, "routed.3"))
    ]
    for summed, x, tag in zip(
        started, (first, second), ("attention.3", "routed.3"), strict=True
    ):
        assert torch.equal(stream.wait(summed, tag), 2 * x)
    assert [entry[0] for entry in recorded.log if entry[1] == "Custom"] == ["side"] * 2


@pytest.mark.parametrize("comm", ["stream", "nccl"])
def test_nccl_alone_is_a_setting_and_what_the_engine_switched_off_stays_off(
    recorded: Recorded, comm: str
) -> None:
    group = group_of(recorded, ca_comm=Custom)
    group.device_communicator.ca_comm.disabled = comm == "stream"
    made = Custom.made
    stream = make_communication(Settings(comm=comm), group)
    sum_of(stream, KIB)
    assert ("side", "nccl") in recorded.log and Custom.made == made
    small = make_communication(Settings(comm=comm, min_overlap_bytes=KIB), group)
    assert isinstance(small, SmallAtOnce) and isinstance(small.small, Blocking)


def test_a_communicator_of_another_form_is_left_out_with_a_warning(
    recorded: Recorded, caplog: pytest.LogCaptureFixture
) -> None:
    class InPlace(Custom):
        def all_reduce(self, inp: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return inp

    group = group_of(recorded, ca_comm=InPlace)
    stream = make_communication(Settings(comm="stream"), group)
    assert isinstance(stream, Stream) and not stream.kernels
    assert "InPlace of this vLLM has another form" in caplog.text
    sum_of(stream, KIB)


def test_this_vllm_has_the_communicators_and_arguments_that_are_used() -> None:
    from vllm.distributed.device_communicators import cuda_communicator
    from vllm.distributed.device_communicators.custom_all_reduce import CustomAllreduce
    from vllm.distributed.device_communicators.quick_all_reduce import QuickAllReduce
    from vllm.distributed.device_communicators.symm_mem import SymmMemCommunicator

    source = inspect.getsource(cuda_communicator.CudaCommunicator)
    classes = {
        "qr_comm": QuickAllReduce, "ca_comm": CustomAllreduce, "symm_mem_comm": SymmMemCommunicator
    }  # fmt: skip
    for attribute, fits, reduce in kernels._ROWS:
        assert f"self.{attribute} = {classes[attribute].__name__}(" in source
        accepted = inspect.signature(classes[attribute]).parameters
        assert {"group", "device"} <= accepted.keys()
        assert (
            "out" in inspect.signature(getattr(classes[attribute], reduce)).parameters
        )
        assert [*inspect.signature(getattr(classes[attribute], fits)).parameters] == [
            "self",
            "inp",
        ]
    wanted = {"max_size", *kernels._SMALL}
    assert wanted <= inspect.signature(CustomAllreduce).parameters.keys()
