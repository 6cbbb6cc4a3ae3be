"""torch <-> JAX: tensors, trees, devices, modules, and running torch code on JAX values.

Knows tensors, modules and operators; knows no transform of torch.func's by name.
"""
from bridge.lowering.registry import lowering as _lowering
from bridge.tensors import to_jax, to_torch

__all__ = ["to_jax", "to_torch"]
