"""How a model is judged: suites as data, lm-eval tasks, executed code, paired scores.

    suites      which tasks, shots, metrics and data sets: `eval/suites/*.yaml`
    stage       `fcsd evaluate`, and the evaluation stage of a recipe
    runner      a suite on a model in memory; the result's folder
    likelihood  lm-eval on a model in memory, offline
    code        problems in the MBPP+ schema, greedy completions
    scorer      runs programs in the sandbox: passed, wrong, error, timeout, memory
    sandbox     the fork server that generated programs run in
    scores      standard errors and the paired comparison of two models
    divergence  KL to the original on held-out text

Not covered: several ranks, several samples a problem, continuing an evaluation between tasks.
"""
