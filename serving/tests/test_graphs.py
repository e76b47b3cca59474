"""Breakable graphs of vLLM with sums that start and end between their pieces, on
stand-ins for a GPU's graphs and stream.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cpu_graphs import CASES, FAULTS, Graph, alias, check
from vllm.compilation import breakable_cudagraph as graphs


@pytest.fixture
def outside(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's decorator, with graphs and references that work on a CPU."""
    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", "1")
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(graphs, "_weak_ref_capture_arg", alias)
    return graphs.eager_break_during_capture


@torch.inference_mode()
def capture(
    step: Callable[[], torch.Tensor],
) -> tuple[torch.Tensor, Callable[[], None]]:
    with graphs.BreakableCUDAGraphCapture() as captured:
        output = step()
    assert captured.num_graphs > 1
    return output, captured.replay


@pytest.mark.parametrize("case", CASES)
@torch.inference_mode()
def test_pieces_with_overlapped_sums_between_them_compute_what_blocking_layers_do(
    case: str, outside: Any
) -> None:
    check(case, outside, capture)


@pytest.mark.parametrize("fault", FAULTS)
@torch.inference_mode()
def test_a_fault_is_seen(fault: str, outside: Any) -> None:
    backend, message = FAULTS[fault]
    with pytest.raises(AssertionError, match=message):
        check("all, shared experts", outside, capture, backend)
