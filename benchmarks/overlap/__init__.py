"""Training steps with expert parallelism, rewired and regular, over one link: ratios of
one run, and what was hidden.

    python -m benchmarks.overlap                                    # 2 gloo ranks, emulated link, computation by sleeps
    python -m benchmarks.overlap --model none --checkpointing
    python -m benchmarks.overlap --compute real --link plain        # real products over gloo as it is
    python -m benchmarks.overlap --device cuda --rate-gb-s 150      # one GPU: real kernels and streams, emulated link

Modes, interleaved step by step; a ratio is the median over rounds of (time of `regular`
/ time of the mode):

    regular     the original connectivity, exchanges block
    beside      the same; the dispatch runs beside the shared expert
    both        the same; dispatch and combine each run beside the shared expert of half of the tokens
    batons      the same in two halves of the batch, in two threads that hand on a baton at every wait: the strongest
                schedule that changes no equation (host waits, so on a CPU only)
    blocking    FarSkip connectivity, the overlapped runtime, every exchange waited for at once
    forward     overlapped in the forward pass only
    full        overlapped both ways
    start, end  full, where attention is not cut in the middle but behind the combine (start) or before it (end)
    one-node    full, by the paper's means: one autograd node an exchange, whose sequence number is set (on a CPU only)
    each        full, where each expert of a token gets a row of its own, as in most engines; blocking-each: blocking

--model shared: DeepSeek-V3 layers with a shared expert; none: Qwen3-MoE layers without.
--checkpointing compares blocking and full with activation checkpointing. Experts are
spread, nothing else is: gathered weights would drown the tokens on the link.

--link netns (root; `ip` and `tc`): two network namespaces joined by a pair of
interfaces whose rate tbf limits, so that an exchange takes --exchange-ms; gloo's own
messages go over it. They are removed at the end, whatever happens.

The emulated link is a thread (a stream of high priority on a GPU) that is busy for
bytes / rate, one exchange after the other. On the GPU the group has one rank, which
stands for one of --virtual-ranks: what it would send the others is what occupies the
link, by `torch.cuda._sleep`; the rows themselves are copied. Hidden there is what the
profiler's trace says, on a CPU what the host has not waited
(`fcsd.parallel.overlap.measure`).

--compute sleeps: parts of a layer sleep, and twice that in the backward pass (ms: a 30,
b 50, shared 25, experts 40, router 5), and the link's rate is such that an exchange
takes --exchange-ms.
"""
