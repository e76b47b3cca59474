"""Evaluate a model: suites as data, lm-eval tasks, executed code, paired scores.

    suites      the data set of a suite's row, and what its task needs of the tokenizer
    fetch       fills a data root from the Hub
    items       the texts of test items, which training data is compared with
    stage       `fcsd evaluate`, and the evaluations of a recipe: `run_evaluation`
    runner      a suite on one model after another
    backend     what answers: a model in memory, or one behind a server (served, server, identity)
    endpoints   routers that are biased by where a batch would be; steered: the original under a sweep of them
    lines       files of one JSON value a line
    results     `results.json` and the samples of each task, with what a reader of single answers is shown
    store       finished tasks, by the hash of what they were measured on
    progress    how far, and how long still
    batch       the batch size, given or automatic
    scores      the paired comparison of two models
    lm_eval     lm-eval's tasks on a model in memory, offline, and its files
    code        completions, and the sandbox that runs them: passed, wrong, error, timeout, memory

Not covered: starting servers (vLLM, SGLang); they are asked where they run.
"""
