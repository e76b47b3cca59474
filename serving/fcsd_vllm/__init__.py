"""FarSkip connectivity in vLLM: a plugin that `vllm serve DIR` loads if this
distribution is installed.

Importing the package imports no engine: `families`, `field`, `settings`, `versions` and
`refusals` are plain Python.

Not covered: SGLang, and features that need a GPU and were never run (`docs/serve.md`
lists them).
"""

__version__ = "0.1.0"


def register() -> None:
    """Register every FarSkip family with vLLM. Each of its processes calls this,
    possibly more than once.
    """
    from fcsd_vllm.registration import register_all

    register_all()
