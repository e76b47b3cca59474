"""Evaluate a model: suites as data, lm-eval's tasks, executed code, paired scores.

    stage.run_evaluation            owns the folder: begins, continues, finishes it
      runner.prepare_evaluation     reads the items, starts the sandbox
        STEPS[kind].prepare   in code/, lm_eval/, own_text/
      runner.PreparedEvaluation     called with a model: asks it task by task
        STEPS[kind].run       samples; questions go to `backend` or `served`
        results.TaskStore.put       keeps a finished task
        results.whole_result        the content of results.json
      results.write_result

`scores` compares two results; `config.KINDS` has what holds of tasks of a kind.

Not covered: starting servers (vLLM, SGLang); they must be running.
"""
