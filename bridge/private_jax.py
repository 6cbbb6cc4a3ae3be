"""Uses of names that JAX does not document; no other file uses such names, so only this one breaks
if they move.

Where no other reason is given, JAX has no public way to do or to ask the same. ``private`` has the
same of PyTorch.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, new_jaxpr_eqn

# By primitive, JAX's rule for Taylor series: (primals, series, **params) -> (primals, series). Only
# the function ``jet`` is documented; it runs user code on tracers of its own, and refuses a
# primitive without a rule.
try:
    from jax.experimental.jet import jet_rules
except ImportError:
    # jax.experimental may drop it: then bridge/jit/taylor.py goes by first derivatives alone, which
    # takes longer
    jet_rules = {}


def _nested(value: Any) -> Iterator[Any]:
    """A tracer, the tracer inside it, and so on: the batched value inside a tracer of vmap, the
    primal inside one that differentiates.
    """
    while hasattr(value, "_trace"):
        yield value
        value = value.val if hasattr(value, "val") else getattr(value, "primal", None)


# The functions behind ``jax.dlpack.from_dlpack`` and ``__dlpack__``; the checks of the public ones
# take ten times as long.
@functools.cache
def _dlpack() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    found: Any = sys.modules.get("jaxlib._jax")
    try:
        return found.dlpack_managed_tensor_to_buffer, found.buffer_to_dlpack_managed_tensor
    except AttributeError:
        return None


def without_wrapper(executable: jax.stages.Compiled) -> Callable[..., Any]:
    """What an executable that has been called before calls itself: a twelfth of a small program's
    time is the method around it.
    """
    return getattr(executable, "_call", None) or executable


@functools.cache
def _call() -> tuple[Any, dict[str, Any]]:
    """The primitive of a jitted function, and its parameters for one operand and one result where
    JAX is to put the function's equations in its place.
    """
    (eqn,) = jax.make_jaxpr(jax.jit(lambda x: x))(0).jaxpr.eqns
    early = getattr(sys.modules.get("jax._src.api"), "Inline", None)
    return eqn.primitive, {**eqn.params, "inline": getattr(early, "JAX_EARLY", True)}


def inlined(jaxpr: Jaxpr, consts: Sequence[Any], *values: Any) -> list[Any]:
    """What ``jax.core.eval_jaxpr`` returns, for the trace of a function that is to be compiled:
    where the values are of the types that the jaxpr takes, its equations are copied, which takes a
    third of the time of tracing them.
    """
    given, invars = [*consts, *values], [*jaxpr.constvars, *jaxpr.invars]
    if any(jax.typeof(x) != v.aval for x, v in zip(given, invars, strict=True)):
        return jax.core.eval_jaxpr(jaxpr, consts, *values)
    unnamed = jaxpr.debug_info.with_unknown_names()
    closed = ClosedJaxpr(jaxpr.replace(constvars=[], invars=invars, debug_info=unnamed), ())
    primitive, one = _call()
    counts = {"in_": len(invars), "don": len(invars), "out": len(jaxpr.outvars)}
    many = {k: v * counts.get(k[:3], 1) for k, v in one.items() if isinstance(v, tuple)}
    found: list[Any] = primitive.bind(*given, **one | many | {"jaxpr": closed})
    return found


def computation(outs: Sequence[Any], inputs: Sequence[Any]) -> ClosedJaxpr | None:
    """How values of the trace in progress have been computed from others; what else they are
    computed from is constant. None if that is not known: the values belong to no trace, to several,
    or to one that differentiates or maps, or an equation has effects.
    """
    every = [*outs, *inputs]
    if not all(hasattr(x, "parent") and x._trace is every[0]._trace for x in every):
        return None
    invars = [x.val for x in inputs]
    if any(isinstance(v, Literal) for v in invars) or len({*invars}) < len(invars):
        return None
    done, consts, eqns = {*invars}, dict[Any, Any](), list[Any]()
    waiting = [*outs]
    while waiting:
        x = waiting[-1]
        if isinstance(x.val, Literal) or x.val in done:
            waiting.pop()
        elif x.parent is None:
            done.add(x.val)
            consts[x.val] = x
        elif x.parent.effects:
            return None
        elif before := [
            y for y in x.parent.in_tracers if not isinstance(y.val, Literal) and y.val not in done
        ]:
            waiting += before
        else:
            done.update(x.parent.outvars)
            eqns.append(x.parent)
    empty = jax.make_jaxpr(lambda: ())().jaxpr
    jaxpr = empty.replace(
        constvars=[*consts],
        invars=invars,
        outvars=[x.val for x in outs],
        eqns=[
            new_jaxpr_eqn(
                [y.val for y in e.in_tracers],
                e.outvars,
                e.primitive,
                e.params,
                e.effects,
                e.source_info,
                e.ctx,
            )
            for e in eqns
        ],
        debug_info=empty.debug_info.with_unknown_names(),
    )
    return ClosedJaxpr(jaxpr, [*consts.values()])


# What ``jax.device_put`` ends in, where there is one device to choose from: the checks of the
# public one take eight times as long. DLPack is as fast, but XLA's thread may free what a capsule
# holds; it waits for Python's lock, with which JAX may be waiting for that thread.
@functools.cache
def takes_numpy() -> Callable[[Any], jax.Array] | None:
    """A function that gives the array with the memory of a NumPy array, which begins where XLA's
    arrays do; None if JAX has none.
    """
    put: Any = getattr(sys.modules.get("jaxlib._jax"), "batched_device_put", None)
    found = jax.local_devices()
    if put is None or len(found) > 1 or found[0].platform != "cpu":
        return None
    sharding = jax.sharding.SingleDeviceSharding(found[0])
    aval = functools.lru_cache(4096)(jax.core.ShapedArray)
    return lambda values: put(
        aval(values.shape, values.dtype), sharding, [values], found, False, enable_x64=True
    )


def from_capsule(capsule: Any, device: jax.Device, stream: int, kind: int) -> jax.Array | None:
    """The array whose memory is in a DLPack capsule; None if this version of JAX has no such
    function.

    Args:
        capsule: not used before; afterwards it is JAX's.
        device: the one with the memory.
        stream: JAX's own stream that waits for what writes to the memory.
        kind: DLPack's number for the kind of device.
    """
    functions = _dlpack()
    return None if functions is None else functions[0](capsule, device, stream, None, kind)


def to_capsule(array: Any, stream: int) -> Any:
    """A DLPack capsule with an array's memory; stream: another library's, which waits until the
    array is computed.
    """
    functions = _dlpack()
    return (
        array.__dlpack__(stream=stream) if functions is None else functions[1](array, stream=stream)
    )


def stop_at(value: jax.Array, probe: Any) -> jax.Array:
    """The value without its derivative at one level of nesting, whose trace is ``probe``; JAX's
    stop_gradient cuts every level.
    """
    inside = 0
    for tracer in _nested(value):
        if tracer._trace is probe:
            return at_level(value, inside, _cut)
        inside += hasattr(tracer, "primal")
    return value


def _cut(value: jax.Array, tangent: jax.Array) -> tuple[jax.Array, jax.Array]:
    return value, jnp.zeros_like(tangent)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def at_level(
    value: jax.Array,
    inside: int,
    rule: Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]],
) -> jax.Array:
    """The value, with another value and tangent, by the rule, at the level that has this number of
    differentiated levels inside it.
    """
    return value


@at_level.defjvp
def _at_level_jvp(
    inside: int, rule: Any, primals: Sequence[jax.Array], tangents: Sequence[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    if inside:  # the tangent of an inner level has a derivative of its own at the level of the rule
        return at_level(primals[0], inside - 1, rule), at_level(tangents[0], inside - 1, rule)
    return rule(primals[0], tangents[0])


def peeled(value: Any) -> Iterator[tuple[Any, int | None, Any]]:
    """The outermost layer of a tracer of vmap, grad or jvp, if it is one: (its trace, vmap's
    dimension or None, the value inside).
    """
    if hasattr(value, "batch_dim"):
        yield value._trace, value.batch_dim, value.val
    elif hasattr(value, "primal"):
        yield value._trace, None, value.primal


def same_trace(one: Any, other: Any) -> bool:
    """Whether two traces are the same one; vmap enters its own again, as another object with the
    same tag, for a function with rules.
    """
    return one is other or (
        hasattr(one, "axis_data") and hasattr(other, "axis_data") and one.tag is other.tag
    )


def differentiations(value: Any) -> int:
    """The number of levels of nesting at which a value is a tracer of a transform that
    differentiates.
    """
    return sum(hasattr(tracer, "primal") for tracer in _nested(value))


def same_computation(one: Any, other: Any) -> bool:
    """Whether two values that are being traced are results of the same primitives, with the same
    parameters, of the same values.
    """
    pairs, seen = [(one, other)], set()
    while pairs:
        a, b = pairs.pop()
        if a is b or (id(a), id(b)) in seen:
            continue
        seen.add((id(a), id(b)))
        if not (hasattr(a, "_trace") and hasattr(b, "_trace") and same_trace(a._trace, b._trace)):
            return False
        if hasattr(a, "primal"):
            pairs.append((a.primal, b.primal))
        elif hasattr(a, "batch_dim"):
            if a.batch_dim != b.batch_dim:
                return False
            pairs.append((a.val, b.val))
        elif not _same_result(a, b):
            return False
        elif getattr(a, "parent", None) is not None and a.parent is not b.parent:
            pairs += zip(a.parent.in_tracers, b.parent.in_tracers, strict=True)
    return True


def _same_result(a: Any, b: Any) -> bool:
    """Whether two tracers of a program are the same input, constant or result, of equations alike,
    whatever these are applied to.
    """
    ours, theirs = getattr(a, "parent", None), getattr(b, "parent", None)
    values = getattr(a, "val", None), getattr(b, "val", None)
    if ours is None or theirs is None or ours is theirs:
        if all(isinstance(x, Literal) for x in values):
            return a.aval == b.aval and np.array_equal(values[0].val, values[1].val)
        return ours is theirs and values[0] is not None and values[0] is values[1]
    places = [[v is x for v in eqn.outvars] for eqn, x in ((ours, values[0]), (theirs, values[1]))]
    if (
        ours.primitive is not theirs.primitive
        or ours.effects
        or len(ours.in_tracers) != len(theirs.in_tracers)
        or places[0] != places[1]
    ):
        return False
    return any(places[0]) and _same_params(ours, theirs, functions=False)


def difference(a: Any, b: Any, functions: bool) -> str | None:
    """How two programs, closed jaxprs or jaxprs, differ apart from the names of variables and the
    rules for derivatives; None if they are one.

    functions: whether any two functions among the parameters count as one.
    """
    consts, others = (getattr(x, "consts", ()) for x in (a, b))
    if len(consts) != len(others):
        return "it uses other tensors from outside"
    if not all(map(_same_constant, consts, others)):
        return "it uses another tensor from outside"
    a, b = (getattr(x, "jaxpr", x) for x in (a, b))
    if len(a.eqns) != len(b.eqns):
        return f"it has {len(b.eqns)} operations, not {len(a.eqns)}"
    given, taken = ([*j.constvars, *j.invars] for j in (a, b))
    if _avals(given) != _avals(taken):
        return "it takes other operands"
    theirs = dict(zip(given, taken, strict=True))

    def same(ours: Sequence[Any], other: Sequence[Any]) -> bool:
        return len(ours) == len(other) and all(
            v.aval == w.aval and isinstance(w, Literal) and _same_constant(v.val, w.val)
            if isinstance(v, Literal)
            else theirs[v] is w
            for v, w in zip(ours, other, strict=True)
        )

    for e, f in zip(a.eqns, b.eqns, strict=True):
        if e.primitive is not f.primitive or _avals(e.outvars) != _avals(f.outvars):
            return f"it computes {f.primitive}, not {e.primitive}"
        if not same(e.invars, f.invars):
            return f"{f.primitive} has other operands or constants"
        if not _same_params(e, f, functions):
            return f"{f.primitive} has other parameters"
        theirs.update(zip(e.outvars, f.outvars, strict=True))
    return None if same(a.outvars, b.outvars) else "it returns other values"


def _avals(variables: Sequence[Any]) -> list[Any]:
    return [v.aval for v in variables]


def _same_constant(a: Any, b: Any) -> bool:
    """Whether two values are the same one, or arrays of the same bits."""
    if a is b or isinstance(a, jax.core.Tracer) or isinstance(b, jax.core.Tracer):
        return a is b
    dtypes = [getattr(x, "dtype", np.dtype(bool)) for x in (a, b)]
    if any(jnp.issubdtype(dtype, jax.dtypes.extended) for dtype in dtypes):  # keys
        return False
    a, b = np.asarray(a), np.asarray(b)
    return (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())


def _same_params(ours: Any, theirs: Any, functions: bool) -> bool:
    """Whether two equations of one primitive have the same parameters."""
    if type(ours.params.get("_prim")) is not type(theirs.params.get("_prim")):
        return False
    (name, a), (_, b) = named(ours), named(theirs)
    # the value depends on the function alone, not on its rules
    if name in ("custom_jvp_call", "custom_vjp_call"):
        a, b = {"jaxpr": called(ours)[1]}, {"jaxpr": called(theirs)[1]}
    return _same_param(dict(a), dict(b), functions)


def _same_param(a: Any, b: Any, functions: bool) -> bool:
    if a is b:
        return True
    if isinstance(a, Jaxpr | ClosedJaxpr) and isinstance(b, Jaxpr | ClosedJaxpr):
        return difference(a, b, functions) is None
    if type(a) is not type(b):
        return functions and callable(a) and callable(b) and not isinstance(a, type)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same_param(a[key], b[key], functions) for key in a)
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(_same_param(x, y, functions) for x, y in zip(a, b))
    if isinstance(a, np.ndarray):
        return _same_constant(a, b)
    try:
        return bool(a == b) or (functions and callable(a) and not isinstance(a, type))
    except Exception:  # it has no equality
        return False


def in_trace(trace: Any, values: Iterable[Any]) -> bool:
    """Whether one of the values is a tracer of this trace, at any level of nesting: for that of a
    transform that differentiates, whether it has a derivative there.
    """
    return trace is not None and any(
        tracer._trace is trace for value in values for tracer in _nested(value)
    )


def trace_of(value: Any) -> Any:
    """The JAX trace that a tracer belongs to; None for an array."""
    return getattr(value, "_trace", None)


def current_trace() -> Any:
    """The JAX trace in progress; inside a function that jax.vmap maps, the one of its tracers."""
    return jax._src.core.trace_ctx.trace


def only_transforms_inside(outermost: Any) -> bool:
    """Whether nothing but vmaps and derivatives lies between a trace and the one in progress, as a
    loop or a checkpoint of JAX's does.
    """
    trace = current_trace()
    while trace is not outermost and not isinstance(
        trace, jax._src.interpreters.partial_eval.DynamicJaxprTrace
    ):
        trace = getattr(trace, "parent_trace", None)
        if trace is None:
            return False
    return trace is outermost


def folds_constants() -> bool:
    """Whether JAX now computes on constants at once, also while it traces
    (``jax.ensure_compile_time_eval``).
    """
    return jax._src.config.eager_constant_folding.value


def bound_outside(operands: Sequence[Any], primitive: Any, params: dict[str, Any]) -> Any:
    """The result of a primitive in the trace of its first operand, which is an outer one: JAX's
    ``bind`` takes the innermost one.
    """
    return operands[0]._trace.process_primitive(primitive, operands, params)


def mapping(value: Any) -> set[Any]:
    """The traces of the vmaps that map a value."""
    return {tracer._trace for tracer in _nested(value) if _maps(tracer)}


def _maps(tracer: Any) -> bool:
    """Whether a tracer is one of vmap and its value is mapped; JAX also has such tracers of values
    that the vmap does not map.
    """
    return getattr(tracer, "batch_dim", None) is not None


def innermost_removed(value: Any, recurse: bool) -> Any:
    """The value inside a tracer of vmap, grad or jvp, the batched array or the primal; recurse:
    inside the tracers of all levels.
    """
    for _, dim, inside in peeled(value):
        value = inside if dim is None else jnp.moveaxis(inside, dim, 0)
        return innermost_removed(value, True) if recurse else value
    return value


def mapped(values: Iterable[Any]) -> bool:
    """Whether a vmap maps one of the values, also if a transform inside that vmap differentiates
    it.
    """
    return any(_maps(tracer) for value in values for tracer in _nested(value))


class Lanes:
    """The lanes of a vmap. JAX has no public way to compute for a moment outside of a vmap that is
    in progress.
    """

    def __init__(self, trace: Any) -> None:
        self.trace, self.size = trace, trace.axis_data.size

    @classmethod
    def of(cls, values: Iterable[Any]) -> Lanes | None:
        """Those of the innermost vmap that maps one of the values; None if there is none, or a
        transform inside it differentiates.
        """
        trace: Any = current_trace()
        mapping = [v._trace for v in values if _maps(v)]
        while hasattr(trace, "axis_data"):  # vmap's
            if any(same_trace(trace, other) for other in mapping):
                return cls(trace)
            trace = trace.parent_trace
        return None

    def outside(self) -> contextlib.AbstractContextManager[Any]:
        """While entered, JAX computes outside of the vmap."""
        return jax._src.core.set_current_trace(self.trace.parent_trace)

    def joined(self, value: Any) -> tuple[Any, int | None]:
        """The value of all lanes, and its mapped dimension; None if the vmap does not map it."""
        of_these = hasattr(value, "batch_dim") and same_trace(value._trace, self.trace)
        return (value.val, value.batch_dim) if of_these else (value, None)

    def apart(self, value: Any, dim: int | None) -> Any:
        """The value inside the vmap of what has a mapped dimension outside."""
        return (
            value
            if dim is None
            else jax._src.interpreters.batching.BatchTracer(self.trace, value, dim)
        )


# JAX takes compiler options only for an outermost jax.jit; bridge/compiling.py says why that is not
# enough, and which versions need this.
def add_compiler_options(more: Callable[[str], dict[str, str]]) -> None:
    """From now on JAX adds ``more(the backend's name)`` to the options of each program that it
    compiles.
    """
    compiler = jax._src.compiler
    original = compiler.get_compile_options

    @functools.wraps(original)
    def get_compile_options(*args: Any, **kwargs: Any) -> Any:
        backend = kwargs.get("backend")
        added = {} if backend is None else more(backend.platform)
        kwargs["env_options_overrides"] = {**added, **(kwargs.get("env_options_overrides") or {})}
        return original(*args, **kwargs)

    compiler.get_compile_options = get_compile_options


def compiled_later(values: Iterable[Any]) -> bool:
    """Whether any of the values is not computed yet, because JAX records the operations to compile
    them later (jit, grad).
    """
    return any(not hasattr(tracer, "batch_dim") for value in values for tracer in _nested(value))


def staged(values: Iterable[Any]) -> bool:
    """Whether JAX records the operations on any of the values, and computes none (jit), also inside
    of vmap and grad.
    """
    return any(
        not hasattr(tracer, "batch_dim") and not hasattr(tracer, "primal")
        for value in values
        for tracer in _nested(value)
    )


def has_started() -> bool:
    """Whether this process has used a device of JAX's; to ask for a device would start JAX."""
    return bool(jax._src.xla_bridge.backends_are_initialized())


def keep_threads() -> None:
    """Never free, in a forked process, what has threads: its end would wait for the threads, which
    only the parent has.

    JAX has no function for the end of a forked process; Python frees what JAX's modules hold after
    all functions of ``atexit``.
    """
    mlir = sys.modules.get("jax._src.interpreters.mlir")
    for owner in (
        getattr(mlir, "global_thread_pool", None),
        *getattr(jax._src.xla_bridge, "_backends", {}).values(),
    ):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(owner))


def coordinator() -> Any:
    """The client of jax.distributed's store and barriers, which take a time limit; None before
    ``jax.distributed.initialize``.
    """
    return jax._src.distributed.global_state.client


def cluster(
    address: str | None, count: int | None, me: int | None, timeout: float
) -> tuple[str | None, int | None, int | None]:
    """The coordinator's address, the number of processes and this one's index where JAX knows the
    cluster (Cloud TPU, Slurm, Open MPI).

    ``jax.distributed.initialize`` looks for them too, but keeps them, and who does not come can be
    named only with the address.
    """
    found = jax._src.clusters.ClusterEnv.auto_detect_unset_distributed_params(
        address, count, me, None, None, round(timeout)
    )
    return found[:3]


def scanned(eqn: Any) -> tuple[Any, int, int]:
    """(the jaxpr of a scan's step, the number of operands that are the same in each step, the
    number of carried operands).

    JAX keeps these numbers in the trees of the operands from 0.12 on. With the option jax_scan3 the
    operands that are the same in each step include references to what is carried.
    """
    _, params = named(eqn)
    jaxpr = getattr(params["jaxpr"], "jaxpr", params["jaxpr"])
    if "num_carry" in params:
        return jaxpr, params["num_consts"], params["num_carry"]
    if "extensives" in params:
        return jaxpr, params["extensives"].count(False), 0
    consts, carried, _ = [len(part) for part in params["ft_in"].unpack()]
    return jaxpr, consts, carried


#: The names of primitives that JAX calls otherwise: in some versions, and where the options
#: jax_scan3, jax_remat3, jax_custom_jvp3 and jax_custom_vjp3 make them one primitive,
#: "call_hi_primitive", with an object of such a class.
_NAMES = {
    "call": "eval_jaxpr",
    "closed_call": "eval_jaxpr",
    "remat2": "checkpoint",
    "RematTraced": "checkpoint",
    "CustomJVPTraced": "custom_jvp_call",
    "CustomVJPTraced": "custom_vjp_call",
    "Scan3": "scan",
}
#: Primitives that are the function in one of their parameters, maybe with rules for derivatives.
_CALLS = frozenset({"jit", "eval_jaxpr", "checkpoint", "custom_jvp_call", "custom_vjp_call"})


def named(eqn: Any) -> tuple[str, Mapping[str, Any]]:
    """The name of an equation's primitive, the same in all versions of JAX and with all of its
    options, and the primitive's parameters.
    """
    name, params = eqn.primitive.name, eqn.params
    if name == "call_hi_primitive":
        name, params = type(params["_prim"]).__name__, params["_prim"].params
    # from 0.12 on, "vjp_node[jit]" is a jit in the derivative of jax.vjp
    name = name.removeprefix("vjp_node[").removesuffix("]")
    return _NAMES.get(name, name), params


def called(eqn: Any) -> tuple[str, Any]:
    """(the name of an equation's primitive, the jaxpr of the function that it is, as "jit",
    "checkpoint" and "custom_vjp_call" are, or else None); the jaxpr takes the equation's operands.
    """
    name, params = named(eqn)
    inner = None
    if name in _CALLS:
        inner = next(params[key] for key in ("call_jaxpr", "traced", "jaxpr") if key in params)
        inner = inner.jaxpr if "traced" in params else inner
    whole = eqn.params.get("_prim")
    if whole is None or whole.effects or name == "scan":
        return name, inner
    if inner is None or len(inner.in_avals) != len(whole.in_avals_flat):
        args = whole.in_tree.unflatten
        with jax.enable_x64(True):  # as when it was bound
            inner = jax.make_jaxpr(lambda *xs: whole.expand(*args(xs)))(*whole.in_avals_flat)
    return name, inner


def mapped_by_jax(tracer: Any = None) -> bool:
    """Whether a tracer, or without one the present trace, is inside a jax.vmap."""
    mapping = jax._src.interpreters.batching.BatchTrace
    trace = current_trace() if tracer is None else getattr(tracer, "_trace", None)
    while trace is not None and not isinstance(trace, mapping):
        trace = getattr(trace, "parent_trace", None)
    return trace is not None


def size_at(dim: Any, sizes: Mapping[str, int]) -> int:
    """The value of a dimension of jax.export for these sizes of its symbols; JAX evaluates one only
    when it runs a program.
    """
    return dim if isinstance(dim, int) else int(dim._evaluate(dict(sizes)))


def as_traced(eqn: Any) -> contextlib.AbstractContextManager[Any]:
    """While entered, what is traced comes from the lines that an equation of a jaxpr comes from, as
    in ``jax.core.eval_jaxpr``.
    """
    info = jax._src.source_info_util
    return info.user_context(
        eqn.source_info.traceback, name_stack=info.current_name_stack() + eqn.source_info.name_stack
    )


def frames(eqn: Any) -> list[tuple[str, str, int]]:
    """(file, function, line) of the Python frames in which an equation of a jaxpr was traced, the
    innermost first.
    """
    traceback = eqn.source_info.traceback
    return (
        []
        if traceback is None
        else [(f.file_name, f.function_name, f.line_num) for f in traceback.frames]
    )
