"""How many tokens a conversion needs to recover: small MoEs, real text and code,
several seeds.

    python -m benchmarks.recovery runs/recovery

See `docs/distil.md` for what is measured and what was found.
"""
