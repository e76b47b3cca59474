"""Stands in for SGLang's compiled kernels of linear attention; `cpu_kernels` computes them."""

from sgl_kernel import __getattr__  # noqa: F401
