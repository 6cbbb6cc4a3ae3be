"""torch <-> JAX: tensors, trees, devices, modules, and running torch code on JAX values.

Knows tensors, modules and operators; torch.func's API is in ``torchfunc_jax``.  Flax modules are in ``bridge.flax``, files in
``bridge.checkpoints``.
"""
from bridge import checkpointing as _checkpointing  # noqa: F401  these files hand in what runs in a trace
from bridge import control as _control  # noqa: F401
from bridge import flex_attention as _flex_attention  # noqa: F401
from bridge import functions as _functions  # noqa: F401
from bridge import hooks as _hooks  # noqa: F401
from bridge import operators as _operators  # noqa: F401
from bridge import python_rules as _python_rules  # noqa: F401
from bridge.modules import buffers, call, load, params
from bridge.registering import register_lowering
from bridge.tensors import to_jax, to_torch

__all__ = ["buffers", "call", "load", "params", "register_lowering", "to_jax", "to_torch"]
