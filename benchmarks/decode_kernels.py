"""Two Triton kernels for `benchmarks.decode_step`: a stand-in for an all-reduce, and
attention of one query token over a paged cache.

Imported only where there is a GPU.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

_ALL_REDUCE_BLOCK = 32 * 1024
"""Elements that a program of the stand-in keeps in registers: 32 for each thread."""
_TOKENS = 64
"""Tokens of the cache in one step of the attention kernel's loop."""
_ROWS = 16
"""Rows of the smallest matmul: query heads of a group, padded."""


@triton.jit
def all_reduce_stand_in(x, out, numel, share, nanoseconds, BLOCK: tl.constexpr):
    """Copy `share` elements per program, and take `nanoseconds` for it."""
    began = globaltimer()
    for offset in range(0, share, BLOCK):
        place = offset + tl.arange(0, BLOCK)
        index = tl.program_id(0) * share + place
        mask = (place < share) & (index < numel)
        values = tl.load(x + index, mask=mask, other=0.0).to(tl.float32)
        now = globaltimer()
        while now - began < nanoseconds:
            now = globaltimer()
        tl.store(out + index, values, mask=mask)


@triton.jit
def paged_attention_parts(
    queries,
    keys,
    values,
    table,
    out,
    lse,
    num_pages,
    split_pages,
    page_stride,
    token_stride,
    kv_heads,
    scale,
    PAGE: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Attend to the pages of one part of one request, for one group of query heads."""
    request, head = tl.program_id(0) // kv_heads, tl.program_id(0) % kv_heads
    part = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    rows, dims = tl.arange(0, ROWS), tl.arange(0, HEAD)
    query = tl.load(
        queries + (tl.program_id(0) * GROUP + rows)[:, None] * HEAD + dims[None, :],
        mask=rows[:, None] < GROUP,
        other=0.0,
    )
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    summed = tl.zeros([ROWS, HEAD], tl.float32)
    first = tl.program_id(1) * split_pages
    last = tl.minimum(first + split_pages, num_pages)
    for begin in range(first * PAGE, last * PAGE, TOKENS):
        page = tl.load(table + request * num_pages + begin // PAGE).to(tl.int64)
        token = begin % PAGE + tl.arange(0, TOKENS)
        place = page * page_stride + token * token_stride + head * HEAD
        key = tl.load(keys + place[:, None] + dims[None, :])
        value = tl.load(values + place[:, None] + dims[None, :])
        scores = tl.dot(query, tl.trans(key)) * scale
        larger = tl.maximum(largest, tl.max(scores, 1))
        weights, shrink = tl.exp(scores - larger[:, None]), tl.exp(largest - larger)
        total = total * shrink + tl.sum(weights, 1)
        summed = summed * shrink[:, None] + tl.dot(weights.to(value.dtype), value)
        largest = larger
    tl.store(lse + part * ROWS + rows, largest + tl.log(total))
    tl.store(
        out + (part * ROWS + rows)[:, None] * HEAD + dims[None, :],
        summed / total[:, None],
    )


def run_all_reduce(
    x: torch.Tensor, out: torch.Tensor, microseconds: float, sms: int
) -> None:
    """Copy x to out, which takes the time on so many multiprocessors.

    1024 threads with 32 accumulators each fill the registers of a multiprocessor, so
    that nothing else runs there; NCCL's blocks do not share theirs, either.
    """
    share = triton.cdiv(x.numel(), sms)
    all_reduce_stand_in[(sms,)](
        x,
        out,
        x.numel(),
        share,
        int(microseconds * 1e3),
        BLOCK=_ALL_REDUCE_BLOCK,
        num_warps=32,
    )


def paged_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    sms: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs of attention over each part of the cache, and the logarithms
    of the sums of its weights.

    Args:
        queries: (B, heads, head_dim), contiguous.
        keys, values: (pages, page size, kv_heads, head_dim), with equal strides.
        table: (B, pages of a request), the places of its pages; all of them are full.
        sms: multiprocessors, for which there are to be two programs each.

    Returns:
        (B * kv_heads, parts, 16, head_dim), and the same without head_dim.
    """
    batch, heads, head_dim = queries.shape
    _, page, kv_heads, _ = keys.shape
    num_pages = table.shape[1]
    assert keys.stride() == values.stride() and keys.stride()[2:] == (head_dim, 1)
    parts = min(num_pages, triton.cdiv(2 * sms, batch * kv_heads))
    split_pages = triton.cdiv(num_pages, parts)
    parts = triton.cdiv(num_pages, split_pages)  # none is empty
    made: dict[str, Any] = {"dtype": torch.float32, "device": queries.device}
    out = torch.empty(batch * kv_heads, parts, _ROWS, head_dim, **made)
    lse = torch.empty(batch * kv_heads, parts, _ROWS, **made)
    paged_attention_parts[(batch * kv_heads, parts)](
        queries,
        keys,
        values,
        table,
        out,
        lse,
        num_pages,
        split_pages,
        keys.stride(0),
        keys.stride(1),
        kv_heads,
        head_dim**-0.5,
        PAGE=page,
        GROUP=heads // kv_heads,
        HEAD=head_dim,
        TOKENS=_TOKENS,
        ROWS=_ROWS,
        num_warps=4,
        num_stages=3,
    )
    return out, lse
