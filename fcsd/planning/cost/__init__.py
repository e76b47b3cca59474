"""Estimate what a training costs, and plan what a conversion brings, before either:
`fcsd estimate`, `fcsd plan`.

    from fcsd.planning.cost.estimate import estimate
    from fcsd.planning.cost.job import Hardware
    from fcsd.planning.cost.table import estimate_table
    print(estimate_table(estimate(load_recipe("recipe.yaml"), Hardware(num_gpus=8))))

    from fcsd.planning.cost.plan import plan from fcsd.planning.cost.planned import
    PlanSettings, prepare plan(prepare(PlanSettings(model="owner/name", gpu="h200",
    nodes=2)))["times"]["speed_up"]

`tracker` counts what runs without storage: `trace` one optimiser step with all that
lives, `operations` a layer's submodules. `machine` has GPUs (`hardware`), links and
what is assumed (`assumptions`); `roofline` turns operations into seconds of it, `times`
adds them up to a step, `memory` bytes to a rank's. `training` reads the recipe, `job`
puts a training on a machine, `estimate` says what it needs; `planned` and `plan` say
what overlap brings, `measured` without the roofline. `table` prints.

Not covered: tensor and pipeline parallelism, a teacher of another shape, what
evaluation needs, how fast the Hub or a disk gives the examples.
"""
