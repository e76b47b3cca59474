"""FarSkip connectivity in SGLang, of one version.

    SGLANG_EXTERNAL_MODEL_PACKAGE=fcsd_sglang sglang serve --model-path DIR

SGLang finds the two halves by itself: `register` as a plugin (entry point
`sglang.srt.plugins`), which makes the configs known in each of its processes, and
`models` by the variable, which takes the places of the stock classes. One without the
other refuses to serve. What is not about an engine comes from `fcsd_vllm`. Importing
the package imports no engine.

Not covered: what `refusals` names, and what was never run without a GPU
(`docs/serve.md` says what that is).
"""

__version__ = "0.1.0"


def register() -> None:
    """Make the configs of FarSkip families known; called in each of SGLang's processes,
    so it may be called again.
    """
    from fcsd_sglang.configs import register_all

    register_all()
