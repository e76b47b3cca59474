"""Small models, data and recipes that train on a CPU in minutes: the demo, rehearsals,
and tests.

Not covered: sizes and speed of real models; that is `fcsd estimate`.
"""
