"""Estimate cost and gain before paying for them: `cost` of a training or a conversion,
`layers` to rewire.
"""
