"""Where tokens go and over which links: `network` measures links, `routing` studies and
steers routers, `study` evaluates the models of a run with steered routers.
"""
