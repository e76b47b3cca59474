"""Benchmarks that drive programs of other environments: `fcsd bench serve` measures
servers against each other.

    settings    what is asked for
    plan        what of it is refused
    engines     vLLM and SGLang: their words, and what an environment of one has
    rows        which servers are set against each other, by their flags
    serve       the order of the measurements, and what is measured already
    server      a server that comes up and ends, and a measurement of it
    guard       nothing of a server outlives the command
    times       what a server's ranks say of their communication
    trace       the same from a trace of vLLM's profiler
    gains       times for `fcsd plan`, and the gain planned from them beside the measured one
    summary     medians, spreads and speed-ups; the table

Not covered: traces of SGLang; whether a server computes the right thing
(`serving/tests`, `fcsd evaluate`).
"""
