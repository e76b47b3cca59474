"""Forward passes for modules whose own code looks at data, which tensors without storage
do not have: the same matmuls, for all tokens and all experts at once.

The values are meaningless; shapes, dtypes and the number of operations are those of the
module's own code when its routing is even.

Not covered: modules whose code transformers can replace by grouped matmuls
(`experts_implementation`), which needs no data.
"""

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn


def stand_in(model: nn.Module) -> None:
    """Give the modules in `STAND_INS` their forward passes, in place."""
    for module in model.modules():
        forward = STAND_INS.get(type(module).__name__)
        if forward is not None:
            module.forward = MethodType(forward, module)


def _by_expert(rows: Tensor, weight: Tensor) -> Tensor:
    """Multiply rows, sorted by expert, by their experts' weights (experts, out, in)."""
    ends = torch.empty(weight.shape[0], dtype=torch.int32)
    return torch._grouped_mm(rows, weight.transpose(-2, -1), offs=ends)


def _experts(
    hidden: Tensor, chosen: Tensor, weights: Tensor, run: Callable[[Tensor], Tensor]
) -> Tensor:
    """Run experts on the rows of tokens (tokens, width), and add up what they return."""
    tokens = chosen.flatten()
    rows = run(hidden[tokens]) * weights.reshape(-1, 1)
    return torch.zeros_like(hidden).index_add(0, tokens, rows.to(hidden.dtype))


def _step_experts(self: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    def run(rows: Tensor) -> Tensor:
        rows = self._apply_gate(_by_expert(rows, self.gate_up_proj))
        return _by_expert(rows, self.down_proj)

    return _experts(hidden, chosen, weights, run)


def _dbrx_experts(self: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    shape = (self.num_experts, self.ffn_hidden_size, self.hidden_size)
    gate, up, down = (
        weight.view(shape) for weight in (self.mlp.w1, self.mlp.v1, self.mlp.w2)
    )

    def run(rows: Tensor) -> Tensor:
        gated = self.mlp.activation_fn(_by_expert(rows, gate))
        return _by_expert(gated * _by_expert(rows, up), down.transpose(-2, -1))

    flat = hidden.reshape(-1, self.hidden_size)
    return _experts(flat, chosen, weights, run).view(hidden.shape)


def _jetmoe_gating(
    self: Any, hidden: Tensor
) -> tuple[Tensor, Tensor, Tensor, list[int], Tensor]:
    logits = self.layer(hidden).float()
    gates, chosen = logits.topk(self.top_k, dim=1)
    gates = torch.softmax(gates, dim=1).type_as(hidden).flatten()
    order = chosen.flatten()
    # Its experts' stand-in does not need the number of rows of each.
    return order, order, gates[order], [], logits


def _jetmoe_experts(self: Any, rows: Tensor, _: list[int]) -> Tensor:
    return _by_expert(rows, self.weight)


def _qwen4_indexer(
    self: Any,
    hidden: Tensor,
    position_embeddings: Any,
    attention_mask: Tensor,
    *others: Any,
) -> Tensor:
    """Score the blocks of keys for all queries at once; its own code does so token by
    token.
    """
    batch, length = hidden.shape[:2]
    sizes = [
        heads * self.index_head_dim
        for heads in (self.index_n_heads, self.index_kv_heads)
    ]
    queries, keys = self.index_qk_proj(hidden).split(sizes, dim=-1)
    queries = self.q_layernorm(queries.reshape(batch, -1, self.index_head_dim))
    blocks = length // self.compress_ratio
    keys = keys[:, : blocks * self.compress_ratio, : self.index_head_dim]
    keys = keys.reshape(batch, blocks, self.compress_ratio, self.index_head_dim)
    keys = self.k_layernorm(keys.float().mean(dim=2).to(hidden.dtype))
    scores = torch.relu(queries.float() @ keys.float().transpose(-2, -1))
    scores = scores.view(batch, length, self.index_n_heads, blocks).sum(dim=2)
    scores.topk(min(self.block_topk, blocks), dim=-1)
    return torch.ones(attention_mask.shape, dtype=torch.bool)


STAND_INS: dict[str, Callable[..., Any]] = {
    "DbrxExperts": _dbrx_experts,
    "JetMoeParallelExperts": _jetmoe_experts,
    "JetMoeTopKGating": _jetmoe_gating,
    "Qwen4ExpTextQSAIndexer": torch.no_grad()(_qwen4_indexer),
    "Step3p7Experts": _step_experts,
}
"""Classes of transformers -> forward passes."""
