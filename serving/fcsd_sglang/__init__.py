"""FarSkip connectivity in one version of SGLang.

    SGLANG_EXTERNAL_MODEL_PACKAGE=fcsd_sglang sglang serve --model-path DIR

SGLang loads two halves: the plugin `register` (entry point `sglang.srt.plugins`), which
registers the configs in each of its processes, and `models`, named by the variable,
which replaces the stock classes. Each half refuses to serve without the other. Code
that is independent of the engine comes from `fcsd_vllm`. Importing the package imports
no engine.

Not covered: the features in `refusals`, and those that need a GPU and were never run
(`docs/serve.md` lists them).
"""

__version__ = "0.1.0"


def register() -> None:
    """Register the configs of FarSkip families. Each of SGLang's processes calls this,
    possibly more than once.
    """
    from fcsd_sglang.configs import register_all

    register_all()
