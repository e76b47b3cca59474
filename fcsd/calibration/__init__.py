"""Calibrate a converted model: closed-form maps, folded into weights that are there already, bring most of its quality
back before the first training step.

    A  what a branch of a rewired layer reads -> what the original's branch reads there     into what reads it
    B  what its branches add -> what is missing to the original's stream behind the layer   into what writes it
    B_e  what one routed expert adds -> what is still missing there                         into what it writes with

`solve` is the arithmetic, `trace` finds the weights, `fold` changes them, `steps` runs single layers, `experts` single
experts, `walk` goes through the layers in order, `model` does so for models in memory, `checkpoint` from folder to
folder.

Not covered: weights that are quantised; a teacher with another residual width.
"""
