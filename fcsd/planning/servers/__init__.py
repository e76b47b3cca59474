"""Benchmarks that drive programs of other environments: `fcsd bench serve` measures
servers against each other.

    settings    the settings of a benchmark
    plan        the settings that are refused
    engines     vLLM and SGLang: their flags and environments
    rows        the servers that are compared, by their flags
    serve       the order of the measurements, and the continuation of a benchmark
    server      the start, the end and a measurement of a server
    guard       nothing of a server outlives the command
    times       the communication times that a server's ranks report
    trace       the same from a trace of vLLM's profiler
    gains       times for `fcsd plan`, and the gain planned from them beside the measured one
    summary     medians, spreads and speed-ups; the table

Not covered: traces of SGLang; the correctness of a server's answers
(`serving/tests`, `fcsd evaluate`).
"""
