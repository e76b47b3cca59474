"""FarSkip connectivity in vLLM: the plugin that `vllm serve DIR` picks up where this
distribution is installed.

Importing the package imports no engine: `families`, `field`, `settings`, `versions` and
`refusals` are plain Python.

Not covered: SGLang, and what was never run without a GPU (`docs/serve.md` says what
that is).
"""

__version__ = "0.1.0"


def register() -> None:
    """Make every FarSkip family known to vLLM; called in each of its processes, so it
    may be called again.
    """
    from fcsd_vllm.registration import register_all

    register_all()
