"""torch.func's transforms in a file of the same name as torch's: vmap, grad and the others,
functionalize and debug_unwrap.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from bridge.boundary import handing_over
from bridge.boundary.calls import plain
from bridge.record.functions import called
from bridge.record.tensor import Recorded
from bridge.record.transforms import NOT_RECORDED
from bridge.trace import tracing
from bridge.trace.levels import Unrecordable
from bridge.transform_kinds import FUNCTIONALIZE
from torchfunc_jax._forward import jvp, linearize
from torchfunc_jax._jacobians import hessian, jacfwd, jacrev
from torchfunc_jax._reverse import grad, grad_and_value, vjp
from torchfunc_jax._vmap import chunk_vmap, vmap

__all__ = [
    "chunk_vmap",
    "debug_unwrap",
    "functionalize",
    "grad",
    "grad_and_value",
    "hessian",
    "jacfwd",
    "jacrev",
    "jvp",
    "linearize",
    "vjp",
    "vmap",
]


@handing_over.transform(torch.func.functionalize)
def functionalize(func: Callable[..., Any], *, remove: str = "mutations") -> Callable[..., Any]:
    """func as a program without mutations, which every traced program in JAX is; writes to inputs
    are carried out at the end.

    Args:
        func: any function of tensors.
        remove: "mutations" or "mutations_and_views".

    Returns:
        Callable: takes func's arguments and returns func's outputs; inputs that func changes in
            place are changed.

    Raises:
        RuntimeError: remove has another value.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.func.functionalize.html

    Example:
        >>> import torch
        >>> from torchfunc_jax import functionalize
        >>> functionalize(lambda x: x.clone().add_(1))(torch.zeros(2))
        tensor([1., 1.])
    """
    if remove not in ("mutations", "mutations_and_views"):
        raise RuntimeError(
            f"functionalize(f, remove='mutations'): received invalid argument for remove={remove}. "
            "Valid options are:\n     remove='mutations': all inplace and out= operators will be "
            "removed from the program, and replaced with their out-of-place equivalents.\n     "
            "remove='mutations_and_views': In addition to the above, all aliasing operators {view} "
            "will be replaced with their non-aliasing counterparts, {view}_copy.\n"
        )
    traced = plain(func)

    def run(*args: Any, **kwargs: Any) -> Any:
        done = called(FUNCTIONALIZE, func, args, kwargs)
        return traced(*args, **kwargs) if done is NOT_RECORDED else done

    return run


_torchs_debug_unwrap = torch.func.debug_unwrap  # even after ``patch()``


@handing_over.call(_torchs_debug_unwrap)
def debug_unwrap(tensor: torch.Tensor, *, recurse: bool = True) -> torch.Tensor:
    """The values of a tensor inside a transform, with every level removed, as a plain torch tensor
    to look at.

    Args:
        tensor: any tensor; one from outside a transform is returned as it is.
        recurse: remove all levels, not only the innermost.

    Returns:
        torch.Tensor: of the same dtype, with the mapped dimensions of the removed levels in front.

    Raises:
        RuntimeError: it is called under jit, where tensors have no values.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.func.debug_unwrap.html

    Example:
        >>> import torch
        >>> from torchfunc_jax import debug_unwrap
        >>> debug_unwrap(torch.ones(2))
        tensor([1., 1.])
    """
    if type(tensor) is Recorded:  # it has no values before the record is run
        tensor.level.owner.go_on(Unrecordable("debug_unwrap"))
    return (
        tracing.unwrap(tensor, recurse)
        if type(tensor) is tracing.Traced
        else _torchs_debug_unwrap(tensor, recurse=recurse)
    )
