"""An MoE block's exchange with other ranks, in three parts: start dispatch, run
experts, end combine.

vLLM runs a block in one call. Here `apply` of its kernel only starts the dispatch and
returns memory that the combine will fill. The block may return before that, because it
only takes views after its experts. Gate, routing, padding, quantisation, experts and
backends remain vLLM's. A backend that is split already keeps its halves
(`prepare_async`, `finalize_async`); `allgather_reducescatter` is not, and gets those of
`SplitGather`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEActivationFormat
from vllm.model_executor.layers.fused_moe.prepare_finalize import naive_dp_ep
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import (
    TopKWeightAndReduceContiguous,
    TopKWeightAndReduceDelegate,
    TopKWeightAndReduceNoOP,
)

from fcsd_vllm.refusals import MONOLITHIC, SPLIT, Refused
from fcsd_vllm.transports import Transport

ASYNCHRONOUS = ("DeepEPHTPrepareAndFinalize", "DeepEPLLPrepareAndFinalize")
"""Backends of vLLM whose own halves are used."""


class SplitGather:
    """vLLM's all-gather and reduce-scatter in two halves each: the steps of its
    `prepare` and `finalize`.
    """

    def __init__(self, transport: Transport, index: int) -> None:
        self.transport = transport
        self.index = index

    def prepare_async(
        self,
        a1: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        num_experts: int,
        expert_map: torch.Tensor | None,
        *given: Any,
    ) -> Callable[[], tuple[Any, ...]]:
        """Quantise, and start to gather rows, weights and ids."""
        apply_router_weight_on_input, quant_config, defer_input_quant = given
        if apply_router_weight_on_input:
            a1 = a1 * topk_weights.to(a1.dtype)
        a1q, scales, scale = naive_dp_ep._quantize_and_setup_dispatch(
            a1, quant_config, defer_input_quant
        )
        gathered = self.transport.gather(
            [a1q, topk_weights, topk_ids, *(scales or ())],
            _sizes(),
            f"dispatch.{self.index}",
        )

        def receive() -> tuple[Any, ...]:
            rows, weights, ids, *all_scales = gathered()
            row_scale = scale
            if all_scales:
                row_scale = naive_dp_ep._unwrap_scale_and_prepare_for_moe(
                    all_scales, quant_config
                )
            return rows, row_scale, None, ids, weights

        return receive

    def finalize_async(
        self, output: torch.Tensor, fused: torch.Tensor, *given: Any
    ) -> Callable[[], object]:
        """Compute each token's weighted sum over experts, and start to sum over
        ranks."""
        *weighing, reduce = given
        if isinstance(reduce, TopKWeightAndReduceDelegate):
            reduce = TopKWeightAndReduceContiguous()
        rows = reduce.apply(None, fused, *weighing)
        return self.transport.scatter(rows, output, _sizes(), f"combine.{self.index}")


class Whole:
    """vLLM's own exchange, with any backend; complete at once."""

    def __init__(self, back_end: Any) -> None:
        self.back_end = back_end

    def prepare_async(self, *given: Any) -> Callable[[], Any]:
        """Dispatch."""
        received = self.back_end.prepare(*given)
        return lambda: received

    def finalize_async(self, *given: Any) -> Callable[[], object]:
        """Combine."""
        self.back_end.finalize(*given)
        return lambda: None


def _sizes() -> list[int]:
    """Return the number of tokens of each rank in this step, which the runner knows
    inside its `_sequence_parallel_context`.
    """
    sizes: list[int] = (
        get_forward_context().dp_metadata.get_chunk_sizes_across_dp_rank()
    )
    return sizes


def _wait_for(begun: Any) -> Any:
    """Wait for a half of a backend: it returned a receiver, or a hook and a
    receiver."""
    if isinstance(begun, tuple):
        hook, begun = begun
        hook()
    return begun()


def _own_memory(
    shape: Any, dtype: Any, device: Any, reduce: Any
) -> torch.Tensor | None:
    """Return new memory for outputs that a combine reads directly: attention also uses
    the engine's workspace.
    """
    if isinstance(reduce, TopKWeightAndReduceNoOP):
        return torch.empty(shape, dtype=dtype, device=device)
    return None


class Exchange:
    """The exchange of one block, for one step at a time: call `start`, `experts` and
    `wait` in turn.
    """

    def __init__(
        self,
        block: nn.Module,
        runner: Any,
        index: int,
        transport: Transport,
        factor: float,
    ) -> None:
        self.block = block
        self.runner = runner
        self.index = index
        self.transport = transport
        self.kernel: Any = None
        self.halves: Any = None
        self.scale: float = runner.routed_scaling_factor * factor
        runner.routed_scaling_factor = 1.0  # it would scale before the output exists
        self.transform: Any = runner.routed_output_transform
        if self.transform is not None:
            runner.apply_routed_output_transform = self._transform_later
        self.call: dict[str, Any] = {}
        self.begun: Any = None
        self.output: Any = None
        self.routed: Any = None
        self.latent: Any = None

    def start(self, read: torch.Tensor) -> None:
        """Route, and start the dispatch."""
        self._take_kernel()
        self.output = self.latent = None
        routed = self.block(read)
        self.routed = routed if self.latent is None else self.latent
        where = f"layer {self.index}: {type(self.runner._quant_method).__name__}"
        if self.output is None:
            raise Refused(
                f"{where} runs experts without the kernel that FarSkip splits; use"
                " --data-parallel-size 1"
            )
        if (
            self.routed.untyped_storage().data_ptr()
            != self.output.untyped_storage().data_ptr()
        ):
            raise Refused(
                f"{where}: its block computes with the routed output, which is still"
                " in flight then; use --data-parallel-size 1"
            )

    def experts(self) -> None:
        """Wait for the dispatch, run this rank's experts, and start the combine."""
        call, impl = self.call, self.kernel.impl
        rows, scale, meta, ids, weights = _wait_for(self.begun)
        ids = call["topk_ids"] if ids is None else ids
        weights = call["topk_weights"] if weights is None else weights
        same = (
            "w1",
            "w2",
            "activation",
            "global_num_experts",
            "expert_map",
            "apply_router_weight_on_input",
        )
        fused = impl._fused_experts(
            in_dtype=call["hidden_states"].dtype,
            a1q=rows,
            a1q_scale=scale,
            topk_weights=weights,
            topk_ids=ids,
            local_num_experts=len(call["w1"]),
            expert_tokens_meta=meta,
            **{name: call[name] for name in same},
        )
        reduce = impl.fused_experts.finalize_weight_and_reduce_impl()
        with self.runner._sequence_parallel_context():
            self.begun = self._at_once_if_small(
                self.halves.finalize_async(
                    self.output,
                    fused,
                    weights,
                    ids,
                    call["apply_router_weight_on_input"],
                    reduce,
                )
            )
        self.call = {}

    def wait(self) -> torch.Tensor:
        """Wait for the combine; return the routed output."""
        _wait_for(self.begun)
        routed: torch.Tensor = (
            self.routed if self.scale == 1.0 else self.routed * self.scale
        )
        if self.transform is not None:
            routed = self.transform(routed)[0]
        self.begun = self.output = self.routed = self.latent = None
        return routed

    def _transform_later(self, latent: torch.Tensor) -> torch.Tensor:
        """Replace the runner's transform of the routed output, which does not exist yet;
        return memory of its shape.
        """
        self.latent = latent
        return latent.new_empty(*latent.shape[:-1], self.transform.output_size)

    def _begin(self, **call: Any) -> torch.Tensor:
        """Replace the kernel's `apply`."""
        self.call = call
        experts = self.kernel.impl.fused_experts
        self.begun = self._at_once_if_small(
            self.halves.prepare_async(
                call["hidden_states"],
                call["topk_weights"],
                call["topk_ids"],
                call["global_num_experts"],
                call["expert_map"],
                call["apply_router_weight_on_input"],
                experts.quant_config,
                experts.expects_unquantized_inputs,
            )
        )
        # Since 0.33 experts may drop the padding of hidden states.
        rows = call["hidden_states"]
        width = getattr(experts, "output_hidden_dim", int)(rows.shape[-1])
        self.output = rows.new_empty((*rows.shape[:-1], width))
        return self.output

    def _at_once_if_small(self, begun: Any) -> Any:
        """Wait if the message is smaller than `min_overlap_bytes`. The size counts all
        ranks' rows, so that all ranks decide alike.
        """
        rows = self.call["hidden_states"]
        tokens = int(get_forward_context().dp_metadata.num_tokens_across_dp_cpu.sum())
        if (
            tokens * rows.shape[-1] * rows.element_size()
            >= self.transport.settings.min_overlap_bytes
        ):
            return begun
        received = _wait_for(begun)
        return lambda: received

    def _take_kernel(self) -> None:
        """Split the kernel that vLLM created when it loaded weights, or has created
        since."""
        method = self.runner._quant_method
        kernel = method.moe_kernel
        if kernel is None or kernel.is_monolithic:
            raise Refused(f"layer {self.index}: {type(method).__name__} {MONOLITHIC}")
        if kernel is self.kernel:
            return
        self.kernel, back_end = kernel, kernel.prepare_finalize
        name = type(back_end).__name__
        comm = self.transport.settings.comm
        if comm == "blocking":
            self.halves = Whole(back_end)
        elif isinstance(back_end, naive_dp_ep.MoEPrepareAndFinalizeNaiveDPEPModular):
            self.halves = SplitGather(self.transport, self.index)
        elif name in ASYNCHRONOUS and comm in ("stream", "nccl"):
            self.halves = back_end
        else:
            raise Refused(
                f"layer {self.index}: comm: {comm} cannot split {name}; {SPLIT}"
            )
        if (
            comm != "blocking"
            and back_end.activation_format is FusedMoEActivationFormat.Standard
        ):
            back_end.allocate_fused_expert_output = _own_memory
        kernel.impl.apply = self._begin
