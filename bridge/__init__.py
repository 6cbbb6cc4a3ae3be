"""torch <-> JAX: tensors, trees, devices, modules, and running torch code on JAX values.

Knows tensors, modules and operators; torch.func's API is in ``torchfunc_jax``.  Flax modules are in ``bridge.flax``, files in
``bridge.checkpoints``.
"""
from bridge.modules import buffers, call, load, params
from bridge.registering import register_lowering
from bridge.tensors import to_jax, to_torch

__all__ = ["buffers", "call", "load", "params", "register_lowering", "to_jax", "to_torch"]
