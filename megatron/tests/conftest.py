"""Tests in Megatron-Core on CPU ranks: `make test-megatron` makes the environment."""

from stand_ins import stand_in

stand_in()  # before a rank is forked, and before anything of Megatron builds a module
