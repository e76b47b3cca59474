"""Calibrate a converted model: closed-form maps, folded into weights that are there
already, bring it nearer to the original before the first training step.

    A  what a branch of a rewired layer reads -> what the original's branch reads there     into what reads it
    B  what its branches add -> what is missing to the original's stream behind the layer   into what writes it
    A_e, B_e  the same for one routed expert, on the tokens that it is chosen for

`solve` is the arithmetic, `roles` says which weights and folds into them, `steps` runs
single layers, `layer` goes through them in order, `experts` is about routed experts,
`model` calibrates models in memory, `checkpoint` from folder to folder; `left_out`
measures the result on text that no map is solved on; `state` is what all of them work
on.

Not covered: weights that are quantised; a teacher with another residual width.
"""
