"""The releases of megatron-core that the package supports; it refuses all others.
Standard library only.

A rewired layer calls the steps of Megatron's MoE layer one by one. Releases may change
a step or its outputs without notice, and no error shows an output that is added twice
or not at all.
"""

from importlib.metadata import version

from fcsd.base.errors import UserError

VERSIONS = ("0.16.1", "0.19.2")
"""Releases whose layers were compared with fcsd's: the newest for Python 3.11, and for
3.12 and later.
"""


def check_version(installed: str | None = None) -> None:
    """Raise UserError unless the release is in `VERSIONS`; None: check the installed
    one.
    """
    installed = installed or version("megatron-core")
    if installed.partition("+")[0] not in VERSIONS:
        raise UserError(
            f"fcsd-megatron: megatron-core {installed} is not supported, only"
            f" {' and '.join(VERSIONS)}; install"
            f" megatron-core=={VERSIONS[-1]}, or {VERSIONS[0]} for Python before 3.12"
        )
