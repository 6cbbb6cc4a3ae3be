"""torch.func on JAX: the same names, the same signatures, compiled by XLA."""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

from torchfunc_jax import _own_bridge  # noqa: F401  before anything is imported from bridge

# isort: split
from bridge.blocks import scan_blocks
from bridge.intercepted.checkpointing import checkpoint_policy
from bridge.jit.explaining import explain
from bridge.private import torch_rearrange

# lets records contain autograd.Function and torch.utils.checkpoint
from bridge.record import functions as _functions  # noqa: F401
from bridge.record.programs import cold
from bridge.trace.attention_scores import attention_scores
from bridge.trace.torch_random import random_numbers
from bridge.version import __version__ as __version__  # for type checkers, a name of ours
from torchfunc_jax._calculus import hvp, jacobian_diagonal, jet, laplacian
from torchfunc_jax.apis import (
    chunk_vmap,
    debug_unwrap,
    functionalize,
    grad,
    grad_and_value,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    linearize,
    vjp,
    vmap,
)
from torchfunc_jax.batch_norm_replacement import replace_all_batch_norm_modules_
from torchfunc_jax.export import export
from torchfunc_jax.functional_call import functional_call, stack_module_state
from torchfunc_jax.generate import generate
from torchfunc_jax.jit import jit
from torchfunc_jax.make_functional import (
    FunctionalModule,
    FunctionalModuleWithBuffers,
    combine_state_for_ensemble,
    functional_init,
    functional_init_with_buffers,
    make_functional,
    make_functional_deprecated_v1,
    make_functional_with_buffers,
    make_functional_with_buffers_deprecated_v1,
)
from torchfunc_jax.patching import OURS, patch

if TYPE_CHECKING:
    from torchfunc_jax import testing

rearrange = torch_rearrange()


def __getattr__(name: str) -> ModuleType:
    """``torchfunc_jax.testing``, which imports Flax, when it is first asked for."""
    if name == "testing":
        return importlib.import_module("torchfunc_jax.testing")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "FunctionalModule",
    "FunctionalModuleWithBuffers",
    "attention_scores",
    "checkpoint_policy",
    "chunk_vmap",
    "cold",
    "combine_state_for_ensemble",
    "debug_unwrap",
    "explain",
    "export",
    "functional_call",
    "functional_init",
    "functional_init_with_buffers",
    "functionalize",
    "generate",
    "grad",
    "grad_and_value",
    "hessian",
    "hvp",
    "jacfwd",
    "jacobian_diagonal",
    "jacrev",
    "jet",
    "jit",
    "jvp",
    "laplacian",
    "linearize",
    "make_functional",
    "make_functional_deprecated_v1",
    "make_functional_with_buffers",
    "make_functional_with_buffers_deprecated_v1",
    "patch",
    "random_numbers",
    "rearrange",
    "replace_all_batch_norm_modules_",
    "scan_blocks",
    "stack_module_state",
    "testing",
    "vjp",
    "vmap",
]

vars(OURS).update({name: globals()[name] for name in __all__ if name != "testing"})
