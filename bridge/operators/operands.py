"""The plans of operators that compute: traced tensors become values, results are wrapped, and
no_grad is obeyed.

An operator without a lowering runs PyTorch's own decomposition, or in PyTorch, or raises an error
that says how to register a lowering.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
import torch

from bridge import devices, private, private_jax, private_meta
from bridge.convert import tensors
from bridge.convert.strides import contiguous, span, strides_of
from bridge.errors import NoLoweringError, at_line, in_words_of_vmap, is_users
from bridge.lowering.registry import Operator
from bridge.operators.dtype_refusals import Plan
from bridge.process import having
from bridge.trace import folding, requires_grad, saved_tensor_hooks, torch_random
from bridge.trace.levels import around, innermost, refuse_in_checkpoint, state
from bridge.trace.storage import Geometry
from bridge.trace.tracing import HANDED_IN, Traced, traced_python, unknown_value, value_of, wrap
from bridge.transform_kinds import FORWARD, FUNCTION, MAPPING

_CPU = torch.device("cpu")
#: The strides of results, None if they are contiguous, and whether they are known to be PyTorch's.
Layout = tuple[tuple[int, ...] | None, bool]
PLAIN: Layout = (None, True)


def value_in(x: Any) -> Any:
    """An operator's argument with JAX values in the place of its tensors."""
    kind = type(x)
    if kind is Traced:
        node = x.node
        return node.value if node.parent is None and node.level is state.level else value_of(x)
    if kind is list or kind is tuple:
        return [value_in(v) for v in x]
    return value_of(x) if isinstance(x, torch.Tensor) else x


def note_use(args: Sequence[Any]) -> None:
    """Note that a derivative goes back to these arguments, some of them lists of tensors: a hook
    that is registered later would miss it.
    """
    for x in args:
        kind = type(x)
        if kind is Traced:
            x.node.used = True
        elif kind is list or kind is tuple:
            note_use(x)


def device_of(args: Sequence[Any], kwargs: dict[str, Any]) -> torch.device:
    given = kwargs.get("device")
    if given is not None:
        return devices.indexed(torch.device(given))
    return tensors.common_device([x[0] if type(x) is list and x else x for x in args]) or _CPU


def wrap_all(
    out: Any,
    device: torch.device,
    layout: Layout = PLAIN,
    lanes: Any = None,
    lying: Iterator[Any] | None = None,
) -> Any:
    """The results as traced tensors; lanes: see ``Node``; lying: the results' strides inside vmap,
    see ``laid_out``.
    """
    if isinstance(out, tuple | list):
        made = [wrap_all(x, device, layout, lanes, lying) for x in out]
        return type(out)(made) if type(out) in (tuple, list) else tuple(made)
    if not isinstance(out, jax.Array | np.ndarray):
        return out
    strides, known = layout
    strides, between, places = (strides, (), ()) if lying is None else next(lying)
    t = wrap(out, device, strides=strides)
    if layout is not PLAIN or lying is not None:
        dense = strides is None or span(out.shape, strides) == out.size
        t.node.geometry = Geometry(
            out.shape, strides or contiguous(out.shape), dense, None, between, places, known
        )
    t.node.lanes = lanes
    return t


def pure(func: torch._ops.OpOverload, row: Operator) -> Plan:
    """The plan of an operator that writes nothing and returns no view."""
    lower, no_grad = row.lowering, row.no_grad_outputs
    backward = "_backward" in func._schema.name
    # it reads values, which a compiled piece does not have
    checks_only = not func._schema.returns and not func._schema.is_mutable

    def run_pure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        values = [value_in(x) for x in args]
        named = {k: value_in(v) for k, v in kwargs.items()} if kwargs else kwargs
        if row.takes_contiguous:
            named = {**named, "contiguous": args[0].is_contiguous()}
        try:
            out = lower(*values, **named) if checks_only else folding.run(lower, values, named)
        except Exception as error:
            found = _explain(func, args, kwargs, error)
            if innermost(MAPPING) is not None:
                found = in_words_of_vmap(func._schema.name.removeprefix("aten::"), args, found)
            raise found from found.__cause__
        if no_grad:
            out = (
                constant(out)
                if isinstance(out, jax.Array)
                else type(out)(constant(v) if i in no_grad else v for i, v in enumerate(out))
            )
        if not torch.is_grad_enabled():
            out = stop(out)
        else:
            note_use(args)
            saved_tensor_hooks.refuse_hooks()
            out = requires_grad.tie(out, values) if backward else out
        out = requires_grad.stopped_integers(out)
        if state.level.root.strict:
            out = requires_grad.tie_strictly(out, values, no_grad)
        if not private.forward_mode_enabled():
            out = stop_tangents(out)
        device = device_of(args, kwargs)
        lanes, lying = (
            (None, None)
            if innermost(MAPPING) is None
            else torch_random.laid_out(func, args, kwargs, out)
        )
        return wrap_all(out, device, PLAIN if lying else _layout(func, args, kwargs), lanes, lying)

    return run_pure


def _layout(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Layout:
    """How PyTorch's results lie in memory. Whether a later ``.view`` is possible depends on it, and
    what ``as_strided`` means.

    Only elementwise operators and copies are asked for: the first other one on the device meta,
    addmm for example, makes PyTorch import 800 modules, which takes longer than to compile a
    program.
    """
    name = func._schema.name
    if name in _MOVED:
        return None, False
    chosen = name in _OF_STRIDES or kwargs.get("memory_format") in _FORMATS
    if not chosen and (
        name in _CONTIGUOUS
        or kwargs.get("memory_format") is torch.contiguous_format
        or not _moved(args)
    ):
        return PLAIN
    if name in _STRIDES_OF_THE_FIRST and all(
        step or n < 2 for n, step in zip(args[0].shape, args[0].stride(), strict=True)
    ):
        kept = name not in _CONTIGUOUS_IN_VMAP or innermost(MAPPING) is None
        return strides_of(args[0]) if kept else None, not _unknown(args[0])
    like_first = name in _LIKE_THE_FIRST or name in _STRIDES_OF_THE_FIRST
    # others do not keep the operands' memory order
    if not (chosen or like_first or torch.Tag.pointwise in func.tags or name in _COPIES):
        return None, False
    try:
        like = (
            on_meta(torch.ops.aten.empty_like.default, args[:1], {})
            if like_first
            else on_meta(func, args, kwargs)
        )
    except Exception:  # the operator has no kernel for the device meta
        if chosen:  # it refuses the strides or the memory format
            raise
        return None, False
    if not isinstance(like, torch.Tensor):
        return None, False
    # of operands that lie differently in memory, the kernel for the device meta does not always
    # know what the CPU's gives
    lies = like.shape, like.stride()
    known = chosen or (like_first and not _unknown(args[0]))
    known = known or all(
        not x.dim() or ((x.shape, x.stride()) == lies and not _unknown(x))
        for x in args
        if isinstance(x, torch.Tensor)
    )
    return strides_of(like), known


def _unknown(t: torch.Tensor) -> bool:
    """Whether the strides of a computed tensor may not be those that PyTorch gives it."""
    return type(t) is Traced and t.node.root.geometry is not None and not t.node.root.geometry.known


def _moved(x: Any) -> bool:
    """Whether a tensor among the arguments is not contiguous, or may not be in PyTorch."""
    if isinstance(x, torch.Tensor):
        return strides_of(x) is not None or _unknown(x)
    return type(x) in (tuple, list) and any(map(_moved, x))


def drawn(func: torch._ops.OpOverload, otherwise: Plan) -> Plan:
    """The plan of a random operator whose numbers depend on no tensor's values; otherwise: the plan
    for where torch does not draw them.
    """
    name = str(func)

    def run_drawn(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        device = device_of(args, kwargs)
        value = torch_random.numbers(name, args, kwargs, device)
        return (
            otherwise(args, kwargs)
            if value is None
            else wrap_all(value, device, _layout(func, args, kwargs))
        )

    return run_drawn


def ordered(inner: Plan) -> Plan:
    """The plan of a random operator whose numbers follow how its first operand lies in memory."""

    def run_ordered(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with having(state, first=args[0]):
            return inner(args, kwargs)

    return run_ordered


def fallback(func: torch._ops.OpOverload) -> Plan:
    """The plan that runs PyTorch's own decomposition on traced tensors, or the operator itself if
    it is one of torch.library.

    Where neither is possible, the plan raises an error that says what to do.
    """
    decomposition = (
        func.decompose
        if private.has_kernel(func, "CompositeImplicitAutograd")
        else private.decompositions().get(func)
    )
    if decomposition is None and (plan := HANDED_IN["library_operator"](func)) is not None:
        return plan

    def decomposed(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if decomposition is None:
            raise NoLoweringError(
                f"{func}: this operator has no lowering to JAX and no decomposition{at_line()}. "
                f"Register one: @bridge.register_lowering({str(func)!r}) above a function that "
                "takes and returns jax.Arrays"
            )
        with traced_python():
            return decomposition(*args, **kwargs)

    return decomposed


def _named(names: str) -> frozenset[str]:
    return frozenset(f"aten::{name}" for name in names.split())


#: Operators that keep the memory order of their first operand, besides the elementwise ones.
_COPIES = _named(
    "clone _to_copy empty_like full_like ones_like rand_like randint_like randn_like zeros_like"
)
#: Other operators whose results keep the memory order of the first operand.
_LIKE_THE_FIRST = _named("flip index_fill index_put _prelu_kernel")
#: Operators whose results have the strides of the first operand, also those that leave gaps in
#: memory.
_STRIDES_OF_THE_FIRST = _named("slice_scatter select_scatter diagonal_scatter as_strided_scatter")
# of these, those that have a rule of their own in PyTorch's vmap
_CONTIGUOUS_IN_VMAP = _named("slice_scatter select_scatter")
#: Operators whose results are contiguous even if an operand is not.
_CONTIGUOUS = _named(
    "_cdist_forward _log_softmax _safe_softmax _softmax _trilinear addbmm addmm addmv all amax "
    "amin aminmax any argmax argmin baddbmm block_diag bmm bucketize count_nonzero cummax cummin "
    "cumprod cumsum diag_embed diagonal_copy dot embedding expand_copy gather index_add index_copy "
    "index_reduce index_select kthvalue linalg_cross linalg_matrix_exp linalg_vector_norm "
    "logcumsumexp logsumexp max mean median min mm mode multinomial mv nanmedian nansum "
    "native_layer_norm nll_loss2d_forward norm permute_copy pixel_unshuffle prod reflection_pad1d "
    "renorm repeat replication_pad1d roll scatter scatter_add scatter_reduce split_with_sizes_copy "
    "squeeze_copy std std_mean sum topk transpose_copy tril triu unfold_copy unsqueeze_copy var "
    "var_mean view_copy"
)
#: Operators whose results need not be contiguous although all operands are.
_MOVED = _named(
    "_fft_c2c _fft_c2r _fft_r2c _linalg_det _linalg_eigh _linalg_slogdet _linalg_solve_ex "
    "_linalg_svd cholesky cholesky_inverse cholesky_solve empty_permuted geqrf linalg_cholesky_ex "
    "linalg_eig linalg_householder_product linalg_inv_ex linalg_ldl_factor_ex linalg_lstsq "
    "linalg_lu_factor_ex linalg_qr linalg_solve_triangular nonzero rot90 triangular_solve "
    "unsafe_split _scaled_dot_product_flash_attention_for_cpu scaled_dot_product_attention"
)
_OF_STRIDES = _named("empty_strided new_empty_strided")
_FORMATS = frozenset((torch.channels_last, torch.channels_last_3d))


def stop(out: Any) -> Any:
    """Make values computed under no_grad constants to every enclosing grad transform and to JAX's
    own; our forward mode ignores no_grad.
    """
    level, root = state.level, state.level.root
    if level.kind is FUNCTION:  # the Function's own rule gives the derivative
        return out
    probes = [each.probe for each in around() if each.kind.reverse]
    if not (probes or root.stops):
        return out
    if innermost(FORWARD) is None:
        return jax.tree_util.tree_map(constant, out)
    refuse_in_checkpoint()

    def stopped(v: Any) -> Any:
        for probe in probes:
            v = private_jax.stop_at(v, probe)
        return (
            requires_grad.stopped_outside(v) if root.stops and isinstance(v, jax.core.Tracer) else v
        )

    return jax.tree_util.tree_map(stopped, out)


def stop_tangents(out: Any) -> Any:
    """Make values computed while forward-mode AD is off constants to the innermost forward-mode
    transform.
    """
    level = innermost(FORWARD | {FUNCTION})
    if level is None or level.kind is FUNCTION:  # the Function's own rule gives the derivative
        return out
    return jax.tree_util.tree_map(lambda v: private_jax.stop_at(v, level.probe), out)


def constant(value: jax.Array | None) -> jax.Array | None:
    """The same value as a constant to the transforms of every level."""
    return requires_grad.stopped_by_torch(value) if isinstance(value, jax.core.Tracer) else value


def _explain(
    func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception
) -> Exception:
    """The error to raise instead of one that a lowering raised: torch's own error, alone, if torch
    refuses the same call. The lowering's error is the cause if its traceback shows a mistake there.
    """
    own = isinstance(error, RuntimeError | IndexError) and not isinstance(
        error, jax.errors.JaxRuntimeError
    )
    if own or isinstance(error, jax.errors.UnexpectedTracerError):
        return error
    if isinstance(error, jax.errors.JAXTypeError):
        unknown = unknown_value(str(func), torch.Tag.dynamic_output_shape in func.tags)
        frames = traceback.walk_tb(error.__traceback__)
        of_user = any(is_users(frame.f_code.co_filename) for frame, _ in frames)
        unknown.__cause__ = error if of_user else None
        return unknown
    try:
        on_meta(func, args, kwargs)
    except Exception as theirs:
        if (
            isinstance(theirs, RuntimeError | IndexError | ValueError | TypeError)
            and "meta" not in str(theirs).lower()
            # bernoulli_ has a default that bernoulli has not
            and "missing value for argument" not in str(theirs)
        ):
            return theirs
    if not isinstance(error, TypeError | ValueError):
        return error
    mistaken = RuntimeError(f"{func}: {error}{at_line()}")
    mistaken.__cause__ = error
    return mistaken


def on_meta(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of PyTorch's kernel for the device meta, which has a geometry and no values."""
    with private_meta.of_plain_sizes(), private.below_python():
        return func(*_meta(args), **{k: _meta(v) for k, v in kwargs.items() if k != "device"})


def _meta(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    return type(x)(_meta(v) for v in x) if type(x) in (list, tuple) else x
