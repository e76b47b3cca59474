"""Calibrate a converted model: closed-form maps, folded into its existing weights, bring
it nearer to the original before the first training step.

    A         maps the input of a branch to that of the original's branch; folded into the weights that read it
    B         maps the outputs of a layer's branches so that the layer's output is nearer to the original's;
              folded into the weights that write them
    A_e, B_e  the same for one routed expert, on the tokens that are routed to it

`solve` is the arithmetic; `roles` finds the weights and folds maps into them; `steps`
runs single layers; `layer` goes through them in order; `experts` maps routed experts;
`model` calibrates models in memory, `checkpoint` from folder to folder; `left_out`
measures the result on text that no map is solved on; `state` holds the data that they
share.

Not covered: quantised weights; a teacher with another residual width.
"""
