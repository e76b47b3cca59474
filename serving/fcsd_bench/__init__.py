"""Measure servers of vLLM or SGLang against each other, FarSkip and stock: `fcsd-bench serve`.

    cli         the command
    serve       the order of the measurements, and the continuation of a benchmark
    plots       the figures
    gains       times for `fcsd plan`, and the gain planned from them beside the measured one
    summary     medians, spreads and speed-ups; the table
    trace       communication times, by a trace of vLLM's profiler
    server      the start, the end and a measurement of a server
    plan        the settings that are refused
    settings    the settings of a benchmark
    rows        the servers that are compared, by their flags
    engines     vLLM and SGLang: their flags and environments
    times       communication times that a server's ranks report
    guard       nothing of a server outlives the command

It runs in fcsd's environment, and starts the engine's programs in theirs: no version of
transformers suits both.

Not covered: traces of SGLang; the correctness of a server's answers
(`serving/tests`, `fcsd evaluate`).
"""
