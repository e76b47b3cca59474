"""Benchmarks that drive programs of other environments: `fcsd bench serve` measures servers of vLLM against each other.

    engine      another environment's `vllm`: what is installed there, a server that comes up and ends, one measurement
    guard       nothing of a server outlives the command
    rows        which servers are set against each other, by their flags
    serve       the order of the measurements, what is finished, what is refused
    summary     medians, spreads and speed-ups; the table

Not covered: SGLang; whether a server computes the right thing (`serving/tests`, `fcsd evaluate`); a model whose
tensors several machines share.
"""
