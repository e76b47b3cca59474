"""Estimate what a training costs before it starts: `fcsd estimate RECIPE`.

    from fcsd.cost.estimate import Hardware, estimate
    from fcsd.cost.table import estimate_table
    print(estimate_table(estimate(load_recipe("recipe.yaml"), Hardware("h200", num_gpus=8))))

`trace` runs one optimiser step without storage, `memory` and `time` turn what it saw into bytes and seconds of a rank,
`hardware` has published figures, `estimate` reads the recipe, `table` prints.

Not covered: tensor, pipeline and expert parallelism, a teacher of another shape, and what evaluation needs.
"""
