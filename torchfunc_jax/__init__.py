"""torch.func on JAX: the same names, the same signatures, compiled by XLA."""
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
from torchfunc_jax.functional_call import functional_call, stack_module_state
from torchfunc_jax.jit import jit

__all__ = [
    "chunk_vmap", "debug_unwrap", "functional_call", "functionalize", "grad", "grad_and_value", "hessian", "jacfwd", "jacrev", "jit", "jvp", "linearize",
    "stack_module_state", "vjp", "vmap",
]
