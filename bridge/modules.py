"""nn.Module <-> trees of jax.Arrays: a module's state is read or written, and a module is called as
a function of its state.
"""

from __future__ import annotations

import collections
import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.parameter import is_lazy

from bridge import private_calls
from bridge.boundary.calls import plain
from bridge.convert import dtypes, tensors, trees
from bridge.convert.arrays import owned
from bridge.errors import public
from bridge.private import opaque
from bridge.trace.random_keys import NoKeyError, drawing_from

State = dict[str, jax.Array]

#: Held while a call changes objects that other threads see: a module's attributes and mode, here
#: and in torchfunc_jax; whatever a trace changes for its time; what a jitted function changes.
SWAPPING = threading.RLock()


@public
def params(module: nn.Module) -> State:
    """Copies of a module's parameters as jax.Arrays; a parameter with several names appears once.

    These are all parameters, also those with ``requires_grad=False``, which JAX ignores. To train
    only the others, differentiate with respect to them: ``{name: p for name, p in params.items() if
    module.get_parameter(name).requires_grad}``. ``bridge.flax`` keeps the two apart.

    Args:
        module: any nn.Module.

    Returns:
        dict: name -> jax.Array of the parameter's shape and dtype; 64-bit types become 32-bit
            unless JAX's ``jax_enable_x64`` is on.

    Raises:
        TypeError: a parameter has no values (device "meta", a lazy module before its first call),
            or JAX cannot hold it (sparse, quantized).

    Source: ``torch.nn.Module.named_parameters``; names and order are the same.

    Example:
        >>> import bridge, torch
        >>> {name: array.shape for name, array in bridge.params(torch.nn.Linear(3, 2)).items()}
        {'weight': (2, 3), 'bias': (2,)}
    """
    return _state(_checked(module).named_parameters)


@public
def buffers(module: nn.Module) -> State:
    """Copies of a module's buffers as jax.Arrays; a buffer with several names appears once.

    Args:
        module: any nn.Module.

    Returns:
        dict: name -> jax.Array of the buffer's shape and dtype, as in ``params``.

    Raises:
        TypeError: as in ``params``.

    Source: ``torch.nn.Module.named_buffers``.

    Example:
        >>> import bridge, torch
        >>> list(bridge.buffers(torch.nn.BatchNorm1d(2)))
        ['running_mean', 'running_var', 'num_batches_tracked']
    """
    return _state(_checked(module).named_buffers)


def _checked(module: nn.Module) -> nn.Module:
    if not isinstance(module, nn.Module):
        kind = (
            f"the class {module.__name__}; make a module of it"
            if isinstance(module, type)
            else str(type(module))
        )
        raise TypeError(f"module: expected an nn.Module, got {kind}")
    return module


def _state(members: Callable[[], Iterator[tuple[str, torch.Tensor]]]) -> State:
    with SWAPPING:
        return {name: as_array(t) for name, t in members()}


@public
def load(
    module: nn.Module,
    params: Mapping[str, Any] | None = None,
    buffers: Mapping[str, Any] | None = None,
    *,
    strict: bool = True,
) -> nn.Module:
    """Write parameters and buffers into a module's own tensors, so that optimizers and tied names
    see the new values.

    Args:
        module: changed in place.
        params, buffers: name -> jax.Array, numpy array or torch.Tensor of the right shape; None:
            they stay as they are. Values are converted to the tensor's device and dtype, which may
            round floating-point numbers but not change other values. A tied parameter may be given
            under any of its names, or under several with the same value. Parameters may be among
            the buffers, as they are in the state of ``function``.
        strict: every parameter (or buffer) must be given.

    Returns:
        nn.Module: the module.

    Raises:
        RuntimeError: unknown names; missing names if strict; another shape; different values for
            one tied tensor; values that the tensor's dtype cannot hold (complex in a real one, 3.7
            in an integer, 1e10 in float16). The module is then unchanged.
        TypeError: a value is not an array.

    Source: ``torch.nn.Module.load_state_dict``.

    Example:
        >>> import bridge, jax, torch
        >>> model = torch.nn.Linear(2, 1)
        >>> trained = jax.tree.map(lambda p: 0 * p + 1, bridge.params(model))
        >>> bridge.load(model, trained).weight
        Parameter containing:
        tensor([[1., 1.]], requires_grad=True)
    """
    writes: list[tuple[torch.Tensor, torch.Tensor]] = []
    with SWAPPING:
        state = _split(module, params or {}, buffers or {})
        for kind, asked, given, members in zip(
            ("params", "buffers"),
            (params, buffers),
            state,
            (module.named_parameters, module.named_buffers),
            strict=True,
        ):
            if asked is not None or given:
                writes += matched(
                    kind, given, dict(members(remove_duplicate=False)), strict and asked is not None
                )
        write(writes)
    return module


def _split(
    module: nn.Module, params: Mapping[str, Any], buffers: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Parameters and buffers, where parameters were given among the buffers; a name that is given
    twice stays where it is refused.
    """
    known = dict(module.named_parameters(remove_duplicate=False))
    moved = {name: value for name, value in buffers.items() if name in known and name not in params}
    return {**params, **moved}, {
        name: value for name, value in buffers.items() if name not in moved
    }


def matched(
    kind: str, given: Mapping[str, Any], targets: Mapping[str, torch.Tensor], strict: bool
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """A list of (tensor of a module, its new value) for the values given by the targets' names;
    raises as ``load`` does.
    """
    unknown = [name for name in given if name not in targets]
    if unknown:
        raise RuntimeError(
            f"{kind}: the module has no {', '.join(map(repr, unknown))}; it has "
            f"{', '.join(map(repr, targets)) or 'none'}"
        )
    found: dict[int, tuple[str, torch.Tensor, torch.Tensor]] = {}
    for name, value in given.items():
        target, new = targets[name], as_tensor(value)
        if new.shape != target.shape:
            raise RuntimeError(
                f"{kind}: {name!r} has shape {tuple(target.shape)} in the module, got "
                f"{tuple(new.shape)}"
            )
        if new.dtype != target.dtype:
            new = as_tensor(
                converted(
                    np.asarray(tensors.to_jax(new)),
                    dtypes.to_jax(target.dtype),
                    f"{kind}: {name!r}",
                )
            )
        other, _, same = found.setdefault(id(target), (name, target, new))
        if same is not new and not np.array_equal(
            tensors.to_jax(same), tensors.to_jax(new), equal_nan=True
        ):
            raise RuntimeError(
                f"{kind}: {other!r} and {name!r} are one tensor in the module, got different values"
            )
    missing = [name for name, t in targets.items() if id(t) not in found]
    if strict and missing:
        raise RuntimeError(
            f"{kind}: {', '.join(map(repr, missing))} missing; give them, or strict=False to leave "
            "them as they are"
        )
    return [(target, new) for _, target, new in found.values()]


def write(writes: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Write values into tensors; all values are read before the first write, because a value may be
    one of the tensors.
    """
    written = {t.untyped_storage().data_ptr() for t, _ in writes}
    values = [
        value.clone() if value.untyped_storage().data_ptr() in written else value
        for _, value in writes
    ]
    with torch.no_grad():
        for (target, _), value in zip(writes, values, strict=True):
            target.copy_(value)


@opaque
@public
def call(
    module: nn.Module,
    params: Mapping[str, Any],
    buffers: Mapping[str, Any],
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    training: bool | None = None,
    rng: jax.Array | Callable[[], jax.Array] | None = None,
    method: str | Callable[..., Any] | None = None,
    strict: bool = True,
    tie_weights: bool = True,
) -> tuple[Any, State]:
    """A module as a pure function of its state, for JAX's own transforms: jax.jit, jax.grad,
    jax.vmap.

    ``function`` gives the same with the module filled in, beside its parameters and its state.

    Args:
        module: any nn.Module; it is not changed.
        params, buffers: name -> jax.Array, as ``params`` and ``buffers`` return them. They are
            converted to the module's dtypes, which may be narrower but not of a lower kind.
            Parameters may be among the buffers, and are then returned with them.
        args, kwargs: of the call; jax.Arrays in any tree.
        training: the mode for this call; None: the module's own mode.
        rng: a JAX key that all random operators draw from, another key at each call; or a function
            without arguments that returns the key, or raises, when the first of them draws.
        method: what is called: a method of the module by its name, or a function
            ``method(module, *args, **kwargs)`` in torch; None: the module itself.
        strict: every parameter and buffer must be given; False: the module's own values are used
            for the others.
        tie_weights: a tensor that has several names in the module has one value in the call, given
            under any of them; False: each name is a tensor of its own.

    Returns:
        (output, buffers): jax.Arrays; the buffers have their values after the call, and with
            strict=False include those that were not given. A buffer that the call did not change is
            the array that was given.

    Raises:
        RuntimeError: names or shapes that are not the module's; complex values for a real tensor,
            or floating-point ones for integers; missing names if strict.
        ValueError: several names of one tied tensor are given, and ``tie_weights`` is True.
        TypeError: the module has no such method.
        flax.errors.InvalidRngError: a random operator (for example dropout in training mode) draws,
            and there is no rng.

    Source: ``flax.linen.Module.apply``; ``torch.func.functional_call``, whose strict is False by
    default.

    Example:
        >>> import bridge, jax, jax.numpy as jnp, torch
        >>> norm = torch.nn.BatchNorm1d(2)
        >>> out, after = jax.jit(lambda p, b, x: bridge.call(norm, p, b, (x,)))(
        ...     bridge.params(norm), bridge.buffers(norm), jnp.ones((4, 2))
        ... )
        >>> out.shape, bool(jnp.allclose(after["running_mean"], 0.1))
        ((4, 2), True)
    """
    own: dict[str, torch.Tensor] = {}
    types: dict[str, torch.dtype] = {}
    called, prefix = (module, "") if method is None else (_Method(module, method), "module.")
    with SWAPPING:
        state = _split(module, params, buffers)
        for kind, given, members in zip(
            ("params", "buffers"),
            state,
            (module.named_parameters, module.named_buffers),
            strict=True,
        ):
            known = dict(members(remove_duplicate=False))
            _check_names(kind, given, known)
            covered = {id(known[name]) for name in given} if tie_weights else set()
            missing = {
                name: t for name, t in known.items() if name not in given and id(t) not in covered
            }
            if missing and strict:
                names = ", ".join(map(repr, missing))
                raise RuntimeError(
                    f"{kind}: {names} missing; give them, or strict=False to "
                    "use the module's own values"
                )
            own |= {
                next(n for n, other in missing.items() if other is t) if tie_weights else name: t
                for name, t in missing.items()
            }
            # at the end, the buffers that are not given
            kept = [name for name in missing if name in own]
            types |= {name: known[name].dtype for name in given}

    def run(params: Any, buffers: Any, args: Any, kwargs: Any) -> Any:
        given = {**params, **buffers}
        state = {
            name: v if v.dtype == types[name] else v.to(types[name]) for name, v in given.items()
        }
        before = {name: (v, v.node.version) for name, v in state.items()}
        state |= {name: t.detach().clone() for name, t in own.items()}
        with (
            SWAPPING,
            _mode(module, training),
            drawing_from(functools.partial(_no_key, module) if rng is None else rng),
        ):
            # It puts into inside the tensors with which the module replaced others.
            inside = {prefix + name: v for name, v in state.items()}
            out = functional_call(called, inside, args, kwargs, tie_weights=tie_weights)
        state = {name: inside[prefix + name] for name in state}
        left = {
            name
            for name, (v, version) in before.items()
            if state[name] is v and v.node.version == version
        }
        return out, {
            name: given[name] if name in left else state[name] for name in (*buffers, *kept)
        }

    arrays = trees.map_leaves(
        lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x,
        (params, buffers, args, dict(kwargs or {})),
    )
    try:
        out, after = plain(run)(*arrays)
    except NoKeyError as error:
        raise error.reason from None
    for name, value in after.items():
        if isinstance(value, torch.Tensor):  # inside of a transform
            wide = buffers[name].dtype if name in buffers else value.dtype
            after[name] = value.to(wide if isinstance(wide, torch.dtype) else dtypes.to_torch(wide))
        else:
            wide = (
                buffers[name].dtype
                if name in buffers
                else jax.dtypes.canonicalize_dtype(value.dtype)
            )
            after[name] = value if value.dtype == wide else value.astype(wide)
    return out, after


@contextmanager
def own_tensors(module: nn.Module, given: Any) -> Iterator[None]:
    """Around a call of torch.func.functional_call, whose tensors are given in any tree: the module
    has its own tensors afterwards.

    PyTorch puts them back in the order in which it has taken them out. A submodule that has two
    names in the module gets the tensors of the call first and its own tensors second, and the one
    under the second name is what the first name has left there.
    """
    names: dict[int, int] = collections.Counter()
    before = []
    for _, m in module.named_modules(remove_duplicate=False):
        names[id(m)] += 1
        if names[id(m)] == 2:
            before += [(held, dict(held)) for held in (m._parameters, m._buffers)]
    of_call = trees.flatten(given)[0] if before else []
    try:
        yield
    finally:
        for held, own in before:
            held.update({k: t for k, t in own.items() if any(held.get(k) is x for x in of_call)})


def _functional_call(module: nn.Module, given: Any, *args: Any, **kwargs: Any) -> Any:
    """That of torch.func in a trace, whose tensors must not stay in the module."""
    with own_tensors(module, given):
        return private_calls.original("functional_call")(module, given, *args, **kwargs)


private_calls.IN_TRACES["functional_call"] = private_calls.Ours(
    _functional_call, private_calls.in_call, recorded=True
)


class _Method(nn.Module):
    """A module whose forward is a method of another one, or a function of it."""

    def __init__(self, module: nn.Module, method: str | Callable[..., Any]) -> None:
        super().__init__()
        if not callable(getattr(module, method, None) if isinstance(method, str) else method):
            raise TypeError(
                f"method: expected the name of a method of {type(module).__name__}, or a function "
                f"whose first argument is the module, got {method!r}"
            )
        self.module, self.method = module, method

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        method = self.method
        return (
            getattr(self.module, method)(*args, **kwargs)
            if isinstance(method, str)
            else method(self.module, *args, **kwargs)
        )


class Function(NamedTuple):
    """A module as JAX code has it, from ``function``: unpack it into ``apply, params, state``.

    Attributes:
        apply: a pure function ``apply(params, state, *args, rng=None, training=None, method=None,
            **kwargs)``, which returns ``(output, state)``.
        params: name -> jax.Array, the parameters that require grad.
        state: name -> jax.Array, the other parameters and the buffers.
    """

    apply: Callable[..., tuple[Any, dict[str, Any]]]
    params: State
    state: State


def function(module: nn.Module) -> Function:
    """A module as a pure function of arrays, with its parameters and its state, for a program that
    is JAX throughout.

    ``apply`` may be called inside ``jax.jit``, ``jax.grad``, ``jax.vmap``, ``jax.lax.scan`` and
    every other transform or loop of JAX's, by samplers, solvers and optimizers. What is to be
    trained is in ``params``; what is not is in ``state``: buffers, of which a call may return new
    values (BatchNorm's in training mode), and parameters with ``requires_grad=False``.
    ``bridge.load(module, params, state)`` writes both back into the module.

    Args:
        module: any nn.Module. ``apply`` uses its code and its mode, and neither reads nor writes
            its values.

    Returns:
        Function: ``(apply, params, state)``. ``apply`` takes, after params and state, the module's
            own arguments, jax.Arrays in any tree,
        and by keyword what ``call`` takes: ``rng``, a JAX key, another one at each call, which
            random operators need; ``training``, the
        mode, None for the module's own; ``method``, what is called in the place of the module. All
            other keywords are the module's.

    Raises:
        ValueError: a parameter is float64 or complex128, and JAX's 64-bit types are off, so that
            its values would be rounded. ``with jax.enable_x64(True):`` turns them on for the calls
            inside, on this thread; the calls of ``apply`` need it too.
        TypeError: as in ``params``.
        RuntimeError, flax.errors.InvalidRngError: by ``apply``, as in ``call``.

    Source: ``flax.linen.Module.apply``; ``functorch.make_functional_with_buffers``.

    Example:
        >>> import bridge, jax, jax.numpy as jnp, torch
        >>> net = torch.nn.Sequential(
        ...     torch.nn.Linear(3, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1)
        ... )
        >>> apply, params, state = bridge.function(net)
        >>> def loss(params, x, key):
        ...     out, _ = apply(params, state, x, rng=key)
        ...     return (out**2).mean()
        >>> keys = jax.random.split(jax.random.key(0), 5)
        >>> jax.vmap(jax.grad(loss), in_axes=(None, 0, 0))(params, jnp.ones((5, 3)), keys)[
        ...     "0.weight"
        ... ].shape
        (5, 4, 3)
    """
    with SWAPPING:
        trained, fixed = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
        for name, p in module.named_parameters():
            (trained if p.requires_grad else fixed)[name] = p
            if (
                p.dtype in (torch.float64, torch.complex128)
                and jax.dtypes.canonicalize_dtype(np.float64) != np.float64
            ):
                raise ValueError(
                    f"module: {name!r} is {p.dtype}, and JAX's 64-bit types are off; put the "
                    "program into `with jax.enable_x64(True):`, or pass module.float()"
                )

        def apply(
            params: Mapping[str, Any],
            state: Mapping[str, Any],
            *args: Any,
            rng: jax.Array | Callable[[], jax.Array] | None = None,
            training: bool | None = None,
            method: str | Callable[..., Any] | None = None,
            **kwargs: Any,
        ) -> tuple[Any, dict[str, Any]]:
            return call(
                module, params, state, args, kwargs, training=training, rng=rng, method=method
            )

        return Function(
            apply,
            _state(lambda: iter(trained.items())),
            _state(lambda: iter((fixed | dict(module.named_buffers())).items())),
        )


def _check_names(kind: str, given: Mapping[str, Any], known: Mapping[str, torch.Tensor]) -> None:
    for name, value in given.items():
        if name not in known or tuple(value.shape) != tuple(known[name].shape):
            expected = (
                f"shape {tuple(known[name].shape)}"
                if name in known
                else f"one of {', '.join(map(repr, known)) or 'no names'}"
            )
            raise RuntimeError(
                f"{kind}: {name!r} of shape {tuple(value.shape)} is not the "
                f"module's; expected {expected}"
            )
        dtype = (
            value.dtype if isinstance(value.dtype, torch.dtype) else dtypes.to_torch(value.dtype)
        )
        if not torch.can_cast(dtype, known[name].dtype):
            raise RuntimeError(
                f"{kind}: {name!r} is {known[name].dtype} in the module, got "
                f"{dtype}, which it cannot hold"
            )


def drawing_layer(module: nn.Module) -> str:
    """The layer of a module whose code is running now, for an error about a key that it needs:
    "'1.drop' (Dropout)".
    """
    names, frame = {id(m): name for name, m in module.named_modules()}, inspect.currentframe()
    while frame is not None and id(frame.f_locals.get("self")) not in names:
        frame = frame.f_back
    layer = module if frame is None else frame.f_locals["self"]
    return (
        f"{names[id(layer)]!r} ({type(layer).__name__})"
        if names[id(layer)]
        else type(layer).__name__
    )


def _no_key(module: nn.Module) -> jax.Array:
    """Raises if no key is given: a compiled program would draw from torch's generator once for all
    its calls.
    """
    # imported here, because a module that draws nothing needs no Flax
    from flax.errors import InvalidRngError

    raise InvalidRngError(
        f"a random operator (dropout in training mode, say) of {drawing_layer(module)} needs a "
        "PRNG key: pass rng=jax.random.key(seed), another key at each call, or training=False"
    )


@contextmanager
def _mode(module: nn.Module, training: bool | None) -> Iterator[None]:
    """While entered, the module has that mode; afterwards each submodule has its own mode again."""
    before = [] if training is None else [(m, m.training) for m in module.modules()]
    try:
        if training is not None:
            module.train(training)
        yield
    finally:
        for m, mode in before:
            m.training = mode


def converted(value: np.ndarray, dtype: np.dtype[Any] | type[np.generic], where: str) -> np.ndarray:
    """An array in another dtype if that dtype can hold its values; floating-point numbers are
    rounded, other values are unchanged.

    It raises RuntimeError for complex to real, for an integer or bool that would change (3.7, 300
    or NaN as uint8, 2 as bool, 2**24 + 1 as float32), and for a finite number that would become
    infinite or NaN. where: the beginning of the message, "params: 'weight'" say.

    Example:
        >>> converted(np.array([3.0]), np.int32, "value")
        array([3], dtype=int32)
        >>> converted(np.array([3.7]), np.int32, "value")
        Traceback (most recent call last):
        RuntimeError: value: expected int32, got float64 that it cannot hold, 3.7 for one; convert
        it yourself if that is meant
    """
    if value.dtype == dtype:
        return value
    refusal = (
        f"{where}: expected {np.dtype(dtype)}, got {value.dtype}"
        + "{}; convert it yourself if that is meant"
    )
    if jnp.issubdtype(value.dtype, jnp.complexfloating) and not jnp.issubdtype(
        dtype, jnp.complexfloating
    ):
        raise RuntimeError(refusal.format(""))
    with np.errstate(all="ignore"):
        after = value.astype(dtype)
        if jnp.issubdtype(value.dtype, jnp.inexact) and jnp.issubdtype(dtype, jnp.inexact):
            kept = (np.isfinite(value) == np.isfinite(after)) & (np.isnan(value) == np.isnan(after))
        else:
            # negative integers become unsigned ones and back without an error, so signs are
            # compared too
            kept = (after.astype(value.dtype) == value) & ((np.real(after) < 0) == (value < 0))
    if not kept.all():
        raise RuntimeError(
            refusal.format(f" that it cannot hold, {value[~kept].ravel()[0]} for one")
        )
    return after


def as_array(t: torch.Tensor) -> jax.Array:
    """A tensor's values as a jax.Array that shares no memory with it, in a dtype that JAX's
    configuration allows.

    Example:
        >>> as_array(torch.ones(2, dtype=torch.float64)).dtype
        dtype('float32')
    """
    if is_lazy(t):
        raise TypeError(
            "module: it has parameters or buffers that are not initialized; call it once, so that "
            "they have a shape"
        )
    array = tensors.to_jax(t.detach())
    wanted = jax.dtypes.canonicalize_dtype(array.dtype)
    if array.dtype != wanted:
        return tensors.to_jax(t.detach().to(dtypes.to_torch(wanted), copy=True))
    return owned(array)


def as_tensor(value: torch.Tensor | jax.Array | np.ndarray | np.generic) -> torch.Tensor:
    """A jax.Array, numpy array or tensor as a tensor, which does not require grad and may share
    memory; else raises TypeError.

    Example:
        >>> as_tensor(np.ones(2, np.float32))
        tensor([1., 1.])
    """
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, np.ndarray | np.generic):
        with jax.enable_x64(True):
            value = jnp.asarray(value)
    if not isinstance(value, jax.Array):
        raise TypeError(f"expected a jax.Array, a numpy array or a torch.Tensor, got {type(value)}")
    dtypes.to_torch(value.dtype)
    return tensors.to_torch(value)
