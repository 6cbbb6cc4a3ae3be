"""torch.utils.checkpoint inside a trace: jax.checkpoint computes the function again in the backward
pass, or what a policy of JAX's does not keep.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import jax
import torch
from jax.ad_checkpoint import checkpoint_name
from torch.utils.checkpoint import SelectiveCheckpointContext

from bridge import private, private_calls
from bridge.boundary.calls import Call, apply
from bridge.boundary.results import Result, put_together, take_apart
from bridge.convert import trees
from bridge.trace.levels import NotInCheckpoint, push, state
from bridge.transform_kinds import CHECKPOINT, PLAIN, Kind

#: What of a program's values is kept for the backward pass, one of ``jax.checkpoint_policies``.
Policy = Callable[..., Any]


class ByPolicy:
    """What ``checkpoint_policy`` returns: a context_fn that has a policy of JAX's.

    Attributes:
        policy: the policy.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    def __call__(
        self,
    ) -> tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]]:
        return contextlib.nullcontext(), contextlib.nullcontext()

    def __repr__(self) -> str:
        return f"checkpoint_policy({getattr(self.policy, '__name__', self.policy)})"


def checkpoint_policy(policy: Policy) -> ByPolicy:
    """A policy of JAX's for ``torch.utils.checkpoint.checkpoint``, as its ``context_fn``: which
    values of the function are kept for the backward pass, where the others are computed again.

    It acts in code that is traced as one program (``torchfunc_jax.jit``, ``jax.jit``). Elsewhere,
    in plain PyTorch too, nothing of the function is kept, as without it; the values are the same.
    Models of the transformers library take it by ``model.gradient_checkpointing_enable({
    "use_reentrant": False, "context_fn": ...})``.

    Args:
        policy: one of ``jax.checkpoint_policies`` (``dots_saveable``,
            ``dots_with_no_batch_dims_saveable``, ``save_only_these_names(...)``,
            ``offload_dot_with_no_batch_dims("device", "pinned_host")``, ...), or a function like
            these.

    Returns:
        A function without arguments that returns two context managers that do nothing.

    Raises:
        TypeError: the policy is no function.

    Source: https://docs.jax.dev/en/latest/jax.html#checkpoint-policies;
    ``torch.utils.checkpoint.create_selective_checkpoint_contexts``

    Example:
        >>> import jax, torch
        >>> from torch.utils.checkpoint import checkpoint
        >>> from torchfunc_jax import checkpoint_policy, grad, jit
        >>> keep = checkpoint_policy(jax.checkpoint_policies.dots_saveable)
        >>> def loss(w, x):
        ...     return checkpoint(
        ...         lambda x: (x @ w).sin().sum(), x, use_reentrant=False, context_fn=keep
        ...     )
        >>> jit(grad(loss))(torch.ones(2, 2), torch.zeros(3, 2))
        tensor([[0., 0.],
                [0., 0.]])
    """
    if not callable(policy):
        raise TypeError(
            "policy: expected one of jax.checkpoint_policies, or a function like these, got "
            f"{policy!r}"
        )
    return ByPolicy(policy)


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    use_reentrant: bool | None = None,
    context_fn: Callable[[], Any] | None = None,
    **kwargs: Any,
) -> Any:
    """torch.utils.checkpoint.checkpoint, through jax.checkpoint if this thread has a trace open."""
    kwargs = {name: x for name, x in kwargs.items() if name not in _OPTIONS}
    if not private_calls.in_call():
        # torch.func does not allow the hooks on saved tensors with which PyTorch's own computes
        # again
        return function(*args, **kwargs)
    if state.level is None:
        return CHECKPOINT.record(function, args, kwargs)
    if context_fn is None:
        return rematerialized(function, args, kwargs)
    if isinstance(context_fn, ByPolicy):
        return rematerialized(function, args, kwargs, context_fn.policy)

    @functools.wraps(function)
    def in_context(*args: Any, **kwargs: Any) -> Any:
        context, _ = context_fn()
        selective = private.selective_policy(context)
        with context if selective is None else _Kept(selective):
            return function(*args, **kwargs)

    kept = jax.checkpoint_policies.save_only_these_names(_KEPT)
    return rematerialized(in_context, args, kwargs, kept)


#: The other keyword arguments of a checkpoint, which its function does not get.
_OPTIONS = frozenset(
    {
        "determinism_check",
        "debug",
        "early_stop",
        "preserve_rng_state",
        "respect_saved_tensors_hooks",
    }
)
#: The name of values that a selective policy of PyTorch's keeps.
_KEPT = "kept by torch's policy"


class _Kept(private.TorchDispatchMode):
    """While entered, the results of operators for which a selective policy of PyTorch's says so
    have the name of kept values.
    """

    def __init__(self, policy: Callable[..., Any]) -> None:
        super().__init__()
        self.policy = policy

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        context = SelectiveCheckpointContext(is_recompute=False)
        decision = self.policy(context, func, *args, **kwargs)
        # what is to be kept in the host's memory is kept where it is
        keep = decision if isinstance(decision, bool) else "RECOMPUTE" not in decision.name
        # a view has another tensor's memory, which is kept or not with that tensor
        if not keep or any(r.alias_info is not None for r in func._schema.returns):
            return out
        return trees.map_leaves(lambda x: _named(x) if isinstance(x, torch.Tensor) else x, out)


def _named(x: torch.Tensor) -> torch.Tensor:
    """The tensor, as a value that is kept."""
    return apply(lambda values: Result([checkpoint_name(v, _KEPT) for v in values]), [x])[0][0]


def policy_of(remat: bool | Policy) -> Policy | None:
    """The policy for jax.checkpoint; None keeps nothing."""
    return None if isinstance(remat, bool) else remat


def rematerialized(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    policy: Policy | None = None,
) -> Any:
    """function(*args, **kwargs) under jax.checkpoint: its values are computed again in the backward
    pass instead of kept, but for those that the policy keeps.
    """
    call = Call.of(args, kwargs)
    traceable = call.traceable(function)

    def compute(values: list[Any]) -> Result:
        found: list[Result] = []

        def body(values: list[Any], kind: Kind) -> list[Any]:
            with push(kind) as level:
                result = traceable.run(level, values, take_apart)
            found[:] = [result]
            return result.values

        try:
            outs = jax.checkpoint(body, static_argnums=1, policy=policy)(values, CHECKPOINT)
        except NotInCheckpoint:
            outs = body(values, PLAIN)
        return Result(outs, found[0].meta, found[0].written)

    return put_together(*apply(compute, call.arrays))


private_calls.IN_TRACES["checkpoint"] = private_calls.Ours(
    checkpoint, lambda *_, **__: private_calls.in_call() or private.transformed_by_torch()
)
