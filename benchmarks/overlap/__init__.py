"""Measure training steps with expert parallelism, rewired and regular, over one link:
ratios from one run, and the hidden communication.

    python -m benchmarks.overlap                                    # 2 gloo ranks, emulated link, computation by sleeps
    python -m benchmarks.overlap --model none --checkpointing
    python -m benchmarks.overlap --compute real --link plain        # real products over gloo as it is
    python -m benchmarks.overlap --device cuda --rate-gb-s 150      # one GPU: real kernels and streams, emulated link

Modes, interleaved step by step; a ratio is the median over rounds of (time of `regular`
/ time of the mode):

    regular     the original connectivity, exchanges block
    beside      the same; the dispatch runs beside the shared expert
    both        the same; dispatch and combine each run beside the shared expert of half of the tokens
    batons      the same in two halves of the batch, in two threads that pass a baton at
                every wait: the strongest schedule that changes no equation (the host
                waits, so only on a CPU)
    blocking    FarSkip connectivity, the overlapped runtime, every exchange waited for at once
    forward     overlapped in the forward pass only
    full        overlapped in both passes
    start, end  full, with attention cut not in the middle but after the combine (start) or before it (end)
    one-node    full, with the paper's method: one autograd node per exchange, whose
                sequence number is set (only on a CPU)
    each        full, but each expert of a token gets its own row, as in most engines;
                blocking-each: the same for blocking

--model shared: DeepSeek-V3 layers with a shared expert; none: Qwen3-MoE layers without.
--checkpointing compares blocking and full with activation checkpointing. Only experts
are spread over ranks: on the link, gathered weights would drown out the tokens.

--link netns (root; `ip` and `tc`): two network namespaces joined by a pair of
interfaces whose rate tbf limits, so that an exchange takes --exchange-ms; gloo's own
messages go over it. The namespaces are removed at the end, whatever happens.

The emulated link is a thread (on a GPU, a stream of high priority) that is busy for
bytes / rate, one exchange after another. On a GPU the group has one rank, which stands
for one of --virtual-ranks: the bytes that it would send to the others occupy the link,
by `torch.cuda._sleep`; the rows themselves are copied. On a GPU the profiler's trace
tells how much is hidden; on a CPU, the time for which the host did not wait counts as
hidden (`fcsd.parallel.overlap.measure`).

--compute sleeps: parts of a layer sleep (ms: a 30, b 50, shared 25, experts 40, router
5), and twice as long in the backward pass; the rate of the link is such that an
exchange takes --exchange-ms.
"""
