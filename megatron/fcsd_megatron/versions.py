"""Which megatron-core the package is verified with; any other is refused. Standard
library only.

A rewired layer calls the steps of Megatron's MoE layer one by one. What a step does and
hands on may change between releases without notice, and an output that is added twice
or not at all raises nothing.
"""

from importlib.metadata import version

from fcsd.extension.base import UserError

VERSIONS = ("0.16.1", "0.19.2")
"""Releases whose layers were compared with fcsd's: the newest for Python 3.11, and for
3.12 and later.
"""


def check_version(installed: str | None = None) -> None:
    """Raise UserError for another release than those of `VERSIONS`; None looks the
    installed one up.
    """
    installed = installed or version("megatron-core")
    if installed.partition("+")[0] not in VERSIONS:
        raise UserError(
            f"fcsd-megatron: megatron-core {installed} is refused:"
            f" {' and '.join(VERSIONS)} were compared; install"
            f" megatron-core=={VERSIONS[-1]}, or {VERSIONS[0]} for Python before 3.12"
        )
