"""Place a model on devices: launch, engines, ranks and sharding; `overlap` has the
exchanges of experts.

Not covered: tensor and context parallel meshes; ZeRO stages 1 and 2.
"""
