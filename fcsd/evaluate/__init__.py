"""Evaluate a model: suites as data, lm-eval tasks, executed code, paired scores.

    suites      which tasks, shots, metrics and data sets: `eval/suites/*.yaml`
    fetch       fills a data root from the Hub
    stage       `fcsd evaluate`, and the evaluation stage of a recipe
    runner      a suite on a model in memory; the result's folder
    store       finished tasks, by the hash of what they were measured on
    progress    how far, and how long still
    batch       the batch size, given or automatic
    ranks       the ranks that evaluate one model together
    placed      the model on its device, or sharded over ranks or devices
    likelihood  lm-eval's tasks, offline
    in_memory   lm-eval's interface to a model in memory
    columns     what the rows of the benchmarks must hold
    problems    code problems in the schemas of MBPP+ and HumanEval+
    evalplus    their tests as EvalPlus grades them, by the rules in oracle
    code        completions, greedy or sampled
    scorer      runs programs in the sandbox: passed, wrong, error, timeout, memory
    sandbox     the fork server that generated programs run in
    ready       `fcsd score`: samples from a file
    scores      standard errors and the paired comparison of two models
    divergence  KL to the original on held-out text

Not covered: servers that answer for a model (vLLM, SGLang); it is in the memory of the ranks.
"""
