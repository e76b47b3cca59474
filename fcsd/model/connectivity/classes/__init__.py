"""Classes of families that transformers does not have: MODEL_TYPE.py of a row with
`Family.like`.

A file defines <Name>Config, <Name>Model and <Name>ForCausalLM of the row as subclasses
of transformers' own, and what these need: <Name>ForCausalLM replaces the inherited
model by <Name>Model. `fcsd.model.connectivity.modeling` puts its text, without its
imports of fcsd, after the text of the rewiring in the module of the family, in fcsd and
in checkpoints. That module's classes are the ones in use: none is imported from here.
Not covered: wrappers of images and sounds.
"""
