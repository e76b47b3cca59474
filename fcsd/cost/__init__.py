"""Estimate what a training costs, and plan what a conversion brings, before either: `fcsd estimate`, `fcsd plan`.

    from fcsd.cost.estimate import Hardware, estimate
    from fcsd.cost.table import estimate_table
    print(estimate_table(estimate(load_recipe("recipe.yaml"), Hardware("h200", num_gpus=8))))

    from fcsd.cost.plan import plan
    from fcsd.cost.planned import PlanSettings, prepare
    plan(prepare(PlanSettings("owner/name", gpu="h200", nodes=2)))["times"]["speed_up"]

`trace` runs one optimiser step without storage, `memory` and `time` turn what it saw into bytes and seconds of a rank,
`hardware` has published figures, `estimate` reads the recipe, `table` prints. `operations` counts a layer's submodules,
`assumptions` has what is assumed, `roofline` turns both into seconds, `windows` says what hides an exchange,
`plan_times` adds up, `measured` does without the roofline, `plan` puts it together.

Not covered: tensor, pipeline and expert parallelism of an estimate, a teacher of another shape, what evaluation needs.
"""
