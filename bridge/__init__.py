"""torch <-> JAX: tensors, trees, devices, modules, and running torch code on JAX values.

Knows tensors, modules and operators; torch.func's API is in ``torchfunc_jax``. Flax modules are in
``bridge.flax``, files in ``bridge.checkpoints``.
"""

from bridge.blocks import scan_blocks
from bridge.convert.arrays import to_jax, to_torch
from bridge.family_rules import rules
from bridge.int8_weights import quantize_int8
from bridge.intercepted import autograd_function as _functions  # noqa: F401

# these files register what runs in a trace
from bridge.intercepted import torch_functions as _python_rules  # noqa: F401
from bridge.intercepted.checkpointing import checkpoint_policy
from bridge.jax_functions import from_jax
from bridge.modules import Function, buffers, call, function, load, params
from bridge.operators import plan as _operators  # noqa: F401
from bridge.operators.register import register_lowering
from bridge.sharding import load_sharded, shard, shardings
from bridge.version import __version__ as __version__  # for type checkers, a name of ours

__all__ = [
    "Function",
    "buffers",
    "call",
    "checkpoint_policy",
    "from_jax",
    "function",
    "load",
    "load_sharded",
    "params",
    "quantize_int8",
    "register_lowering",
    "rules",
    "scan_blocks",
    "shard",
    "shardings",
    "to_jax",
    "to_torch",
]
