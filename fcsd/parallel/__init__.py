"""Where a model is computed: launch, engines, ranks, placing and sharding; `overlap` of
experts' exchanges.

Not covered: tensor and context parallel meshes; ZeRO stages 1 and 2.
"""
