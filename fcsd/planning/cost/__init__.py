"""Estimate the cost of a training (`fcsd estimate`) and plan the gain of a conversion
(`fcsd plan`) before running either.

    from fcsd.planning.cost.estimate import estimate
    from fcsd.planning.cost.settings import Hardware
    from fcsd.planning.cost.table import estimate_table
    print(estimate_table(estimate(load_recipe("recipe.yaml"), Hardware(num_gpus=8))))

    from fcsd.planning.cost.plan import plan
    from fcsd.planning.cost.planned import prepare
    from fcsd.planning.cost.settings import PlanSettings
    planned = prepare(PlanSettings(model="owner/name", gpu="h200", nodes=2))
    print(plan(planned)["times"]["speed_up"])

`tracker` counts operations that run without storage: for `trace` one optimiser step
with all live bytes, for `operations` a layer's submodules. `machine` has GPUs
(`hardware`), links and assumptions (`assumptions`); `roofline` turns operations into
seconds on it, `times` adds these up to a step, `memory` adds bytes up to a rank.
`training` reads the recipe, `job` puts a training on a machine, `estimate` computes its
needs; `planned` and `plan` compute the gain from overlap, `measured` does so without
the roofline. `table` prints.

Not covered: tensor and pipeline parallelism in `estimate` (`plan` has both), a teacher
of another shape, the needs of evaluation, the speed at which the Hub or a disk delivers
the examples.
"""
