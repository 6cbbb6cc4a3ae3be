"""Uses of names that PyTorch does not document; no other file uses such names, so only this one
breaks if they move.

Where no other reason is given, PyTorch has no public way to do or to ask the same.
``private_calls`` has the names by which calls of PyTorch's functions come to ours, ``private_jax``
those of JAX.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import operator
import sys
import types
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch.autograd import forward_ad
from torch.autograd.profiler import record_function
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree

# A dispatch mode is the only hook below autograd that also sees factory functions. PyTorch's notes
# on extending torch document it as stable, but a module with an underscore exports it.
from torch.utils._python_dispatch import TorchDispatchMode

from bridge.process import having


def _named(path: str) -> Any:
    """The object under a name of torch's, looked up once because it is used at each call.

    If this version lacks the name, the package still imports, and a use of the name raises.
    """

    def missing(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            f"{path}: torch {torch.__version__} does not have this name, which is needed here; "
            "docs/versions.md lists the versions that work, and `torchfunc-jax doctor` tells which "
            "transforms do"
        )

    try:
        return operator.attrgetter(path.removeprefix("torch."))(torch)
    except AttributeError:
        return missing


#: Makes a tensor without storage, with only a shape, dtype, device and strides. It is documented
#: for subclass authors but named privately.
make_wrapper: Callable[..., Any] = _named("torch.Tensor._make_wrapper_subclass")
#: Makes PyTorch raise if a tensor that has no memory is asked for its address; otherwise that is 0,
#: and who reads there ends the process.
forbid_reading = _named("torch._C._set_throw_on_mutable_data_ptr")
#: The tensor inside of one that a transform of torch.func, which has returned, has wrapped; any
#: other tensor itself.
alive = _named("torch._C._functorch.unwrap_if_dead")
#: While entered, torch functions do not ask the subclass of their arguments first (inside a
#: ``__torch_function__`` of our own).
without_torch_function = _named("torch._C.DisableTorchFunctionSubclass")
#: While entered, they do, as where the user's code runs inside such a function (a hook).
with_torch_function = _named("torch._C._EnableTorchFunction")
#: While entered, a view is noted with the operator that makes it, because autograd is not to find
#: it by its place in memory.
replaying_views = _named("torch.autograd.grad_mode._force_original_view_tracking")
#: While entered, no dispatch mode is active, so operators on plain tensors run as usual inside a
#: trace.
without_modes = _named("torch.utils._python_dispatch._disable_current_modes")
#: The number of torch dispatch modes that are entered, PyTorch's own among them, and of torch
#: function modes (a default device is one).
count_of_dispatch_modes = _named("torch._C._len_torch_dispatch_stack")
function_modes: Callable[[], int] = _named("torch._C._len_torch_function_stack")
#: The torch function modes that are entered, the outermost first.
function_mode_stack = _named("torch.overrides._get_current_function_mode_stack")
#: Enters a torch function mode, and leaves the innermost one, which is returned; the public way, a
#: context, takes ten times as long.
enter_function_mode = _named("torch._C._push_on_torch_function_stack")
leave_function_mode = _named("torch._C._pop_torch_function_stack")


def leave_function_modes(count: int) -> list[TorchFunctionMode]:
    """Leave the innermost torch function modes, this many, and return them, the outermost first."""
    return [leave_function_mode() for _ in range(count)][::-1]


def enter_function_modes(modes: Iterable[TorchFunctionMode]) -> None:
    """Enter torch function modes that were left, the outermost first."""
    for mode in modes:
        enter_function_mode(mode)


# -- the levels by which torch.func keeps its transforms apart; it offers them only around a
# function
#: Contexts in which a transform that differentiates in reverse mode is in progress, or a vmap of a
#: size and a randomness. Each gives its level.
grad_level = _named("torch._functorch.eager_transforms.grad_increment_nesting")
vmap_level = _named("torch._functorch.vmap.vmap_increment_nesting")
#: A lane of a tensor that a vmap maps over a dimension, at the vmap's level; all lanes of one:
#: (tensor, level, size, where they lie).
lane, all_lanes = (
    _named("torch._C._functorch._add_batch_dim"),
    _named("torch._C._functorch._remove_batch_dim"),
)
#: Whether a vmap maps a tensor.
is_mapped = _named("torch._C._functorch.is_batchedtensor")
#: A tensor and its tangent as one, at the innermost level.
dual = forward_ad.make_dual
_wrap_for_grad, _unwrap_for_grad = (
    _named("torch._C._functorch._wrap_for_grad"),
    _named("torch._C._functorch._unwrap_for_grad"),
)
#: A context in which requires_grad_ is allowed inside of those levels, or with False is not.
requires_grad_allowed = _named("torch._functorch.eager_transforms.enable_inplace_requires_grad")


@contextlib.contextmanager
def jvp_level() -> Iterator[int]:
    """While entered, a transform that differentiates in forward mode is in progress."""
    dual_level = (
        forward_ad.dual_level() if forward_ad._current_level < 0 else contextlib.nullcontext()
    )
    jvp = torch._functorch.eager_transforms.jvp_increment_nesting()
    with jvp as level, set_forward_mode_enabled(True), dual_level:
        yield level


def wrapped(tensors: Iterable[torch.Tensor], level: int) -> list[torch.Tensor]:
    """The tensors at a level that differentiates."""
    return [_wrap_for_grad(t, level) for t in tensors]


def differentiated(
    tensors: Sequence[torch.Tensor], active: Iterable[int], level: int
) -> list[torch.Tensor]:
    """The tensors at a level of ``grad_level``; the active ones among them require grad there."""
    every = wrapped(tensors, level)
    for k in active:
        torch._functorch.eager_transforms._create_differentiable(every[k], level)
    return every


def out_of(level: int, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors outside of a level that differentiates."""
    return [_unwrap_for_grad(t, level) for t in tensors]


def pulled_back(
    outs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    cotangents: Sequence[torch.Tensor] | None,
    *,
    create_graph: bool,
) -> list[torch.Tensor]:
    """The gradients of outputs, with zeros where there is none; cotangents None: the only output is
    a scalar.
    """
    return list(
        torch._functorch.eager_transforms._autograd_grad(
            outs, inputs, cotangents, retain_graph=True, create_graph=create_graph
        )
    )


def parts_of_duals(
    duals: Iterable[torch.Tensor], strict: bool
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The values and the tangents of duals; strict: one without a tangent is refused."""
    pairs = [torch._functorch.eager_transforms.safe_unpack_dual(t, strict) for t in duals]
    return [p for p, _ in pairs], [t for _, t in pairs]


#: Whether autocast is on for any device; the public function takes one device at a time and four
#: times as long.
any_autocast: Callable[[], bool] = _named("torch._C._is_any_autocast_enabled")
#: The functions with which ``torch.profiler.record_function`` begins and ends, and used to; they
#: compute nothing.
profiler_marks = tuple(
    _named(f"torch.ops.profiler._record_function_{name}")
    for name in ("enter_new", "exit._RecordFunction", "enter", "exit")
)
#: Whether forward-mode AD is on, and a context in which it is on or off.
forward_mode_enabled: Callable[[], bool] = _named("torch._C._is_fwd_grad_enabled")
set_forward_mode_enabled = _named("torch.autograd.forward_ad._set_fwd_grad_enabled")
#: The ``info`` argument of a Function's vmap staticmethod.
vmap_info = _named("torch._functorch.autograd_function.VmapInfo")
#: The Function that samples a Dirichlet distribution, and with it Beta.
Dirichlet = _named("torch.distributions.dirichlet._Dirichlet")
torch_chunk_vmap = _named("torch._functorch.apis.chunk_vmap")

# torch.autograd's own vmap (is_grads_batched, vectorize) is older than torch.func's, and has levels
# of its own
_begin_autograds_vmap, _end_autograds_vmap = (
    _named("torch._C._vmapmode_increment_nesting"),
    _named("torch._C._vmapmode_decrement_nesting"),
)
mapped_by_autograd: Callable[[torch.Tensor], bool] = _named(
    "torch._C._functorch.is_legacy_batchedtensor"
)
_unwrap_batched = _named("torch._C._functorch._unwrap_batched")

#: What keeps the innermost transform of torch.func's that is in progress apart; None if there is
#: none.
innermost_level = _named("torch._C._functorch.peek_interpreter_stack")
#: The functions that pack and unpack the tensors saved for backward, if ``saved_tensors_hooks`` is
#: entered; else None.
saved_tensor_hooks = functools.partial(
    _named("torch._C._autograd._top_saved_tensors_default_hooks"), True
)
_precision = _named("torch._C._get_float32_matmul_precision")

_Function = TypeVar("_Function", bound=Callable[..., Any])


def opaque(
    function: _Function,
    reason: str = "it runs in JAX; leave it outside of what is compiled with fullgraph",
) -> _Function:
    """Make torch.compile break its graph at a function and not look into it, nor into the functions
    that it calls.

    ``torch.compiler.disable`` does the same with a wrapper around each call and an import of all of
    dynamo. These are the marks that dynamo looks for: the attribute when it meets a call, the
    strategy when it would compile a frame. They make calls no slower.
    """
    # a version without strategies has the attributes below, which break the graph at a call
    with contextlib.suppress(AttributeError):
        frames = torch._C._dynamo.eval_frame
        # the frame, and the frames that it calls; of a decorated function that of its own, because
        # all functions with this decorator share the code around it
        skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
        frames.set_code_exec_strategy(inspect.unwrap(function).__code__, skip)
    function._torchdynamo_disable, function._torchdynamo_disable_msg = True, reason  # type: ignore[attr-defined]
    return function


class DispatchMode(TorchDispatchMode):
    """PyTorch's dispatch mode, which torch.compile does not look into; the first call of PyTorch's
    own imports all of dynamo for that.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        opaque(cls.__torch_dispatch__)
        super().__init_subclass__(**kwargs)


def copied(function: Any, space: dict[str, Any]) -> Any:
    """A copy of a function with these globals."""
    copy = types.FunctionType(
        function.__code__, space, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def torch_node(tree: Any) -> tuple[list[Any], Any] | None:
    """Children and context of a node registered with torch's pytrees."""
    kind = _pytree._get_node_type(tree)
    if kind not in _pytree.SUPPORTED_NODES:
        return None
    children, context = _pytree.SUPPORTED_NODES[kind].flatten_fn(tree)
    return list(children), (kind, context)


def torch_node_build(children: list[Any], context: Any) -> Any:
    """The node from which ``torch_node`` took the children."""
    node, inner = context
    return _pytree.SUPPORTED_NODES[node].unflatten_fn(children, inner)


@contextlib.contextmanager
def below_python() -> Iterator[None]:
    """While entered, operators run PyTorch's own kernels even on wrapper tensors, and no mode sees
    them.
    """
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        yield


def decompositions() -> dict[Any, Callable[..., Any]]:
    """PyTorch's own decompositions of operators into simpler ones."""
    return torch._decomp.decomposition_table


def has_kernel(op: torch._ops.OpOverload, key: str) -> bool:
    """Whether an operator has a kernel for a dispatch key: "CompositeImplicitAutograd" if PyTorch's
    C++ implements it by other operators, which ``OpOverload.decompose`` runs.
    """
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key)


def mapped_by_torch(
    fn: Callable[[torch.Tensor], torch.Tensor], t: torch.Tensor, in_dim: int, out_dim: int
) -> torch.Tensor:
    """``torch.func.vmap(fn, in_dim, out_dim)(t)`` without its checks, which take five times as long
    as a view.
    """
    size = t.shape[in_dim]
    with vmap_level(size, "error") as level:
        return all_lanes(fn(lane(t, in_dim, level)), level, size, out_dim)


def below_vmap(
    fn: Callable[[list[torch.Tensor]], list[torch.Tensor]], given: list[torch.Tensor]
) -> list[torch.Tensor]:
    """fn of tensors that the innermost vmap of torch.func's maps: fn takes and returns their lanes
    as the first dimension, below it.
    """
    level = max(map(torch._C._functorch.maybe_get_level, given))
    with torch._functorch.pyfunctorch.temporarily_pop_interpreter_stack():
        unwrapped = [_unwrap_batched(t, level) for t in given]
        size = next(t.shape[dim] for t, dim in unwrapped if dim is not None)
        found = fn(
            [t.expand(size, *t.shape) if dim is None else t.movedim(dim, 0) for t, dim in unwrapped]
        )
    return [lane(t, 0, level) for t in found]


def below_autograds_vmap(
    fn: Callable[[list[torch.Tensor]], list[torch.Tensor]], given: list[torch.Tensor]
) -> list[torch.Tensor]:
    """fn of tensors that torch.autograd maps over: fn takes and returns the lanes of the innermost
    map as the first dimension.
    """
    level = _begin_autograds_vmap() - 1
    _end_autograds_vmap()
    lanes = [torch._remove_batch_dim(t, level, 1, 0) for t in given]
    _end_autograds_vmap()  # because random operators are refused inside, also those of a trace
    try:
        found = fn(lanes)
    finally:
        _begin_autograds_vmap()
    return [torch._add_batch_dim(t, 0, level) for t in found]


def parametrizations_anew() -> contextlib.AbstractContextManager[None]:
    """While entered, ``torch.nn.utils.parametrize.cached`` has an empty cache; afterwards it has
    its earlier cache again.
    """
    return having(torch.nn.utils.parametrize, _cache={})


def which_generator(generator: torch.Generator) -> int:
    """The identity of a generator: an operator gets a new Python object for it at each call, and
    those objects are not equal.
    """
    return generator._cdata  # type: ignore[attr-defined]


def transformed_by_torch() -> bool:
    """Whether a transform of torch.func, or a level of torch.autograd.forward_ad, is in progress.

    Inside of the forward of an autograd.Function, PyTorch has switched forward-mode AD off.
    """
    return innermost_level() is not None or (
        forward_ad._current_level >= 0 and forward_mode_enabled()
    )


#: The dispatch keys that are always included and excluded, outside of modes and of their handlers.
_KEYS = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()


@contextlib.contextmanager
def plain_torch() -> Iterator[None]:
    """While entered, operators run as outside of every mode: inside a mode's handler, torch's own
    transforms would have no effect.
    """
    with torch._C._ForceDispatchKeyGuard(*_KEYS), torch._C.DisableTorchFunction(), torch.no_grad():
        yield


@contextlib.contextmanager
def outside_of_transforms() -> Iterator[None]:
    """``plain_torch``, in which an autograd.Function is not one of the transforms of torch.func
    that are in progress.
    """
    with plain_torch(), torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack():
        yield


def lane_of_torch(
    t: torch.Tensor, levels: Sequence[int], places: Sequence[int] = ()
) -> torch.Tensor:
    """The tensor as the lanes of these levels of torch's vmap see it; its first dimensions are
    theirs, the outermost first.

    places: where each vmap is to find its dimension, among those that it gets; without any, in
    front.
    """
    for k, place in reversed([*enumerate(places)]):
        t = t.movedim(k, k + place)
    for level, place in zip(levels, places or [0] * len(levels), strict=True):
        t = lane(t, place, level)
    return t


def vmapped_by_torch(
    run: Callable[[Sequence[int]], torch.Tensor],
    vmaps: Sequence[tuple[int, str]],
    levels: tuple[int, ...] = (),
) -> tuple[torch.Tensor, tuple[bool, ...]]:
    """The result of a function inside torch's own vmaps, which torch.func offers only for functions
    of mapped tensors.

    run takes the numbers of the vmaps' levels; vmaps has the size and the randomness of each, the
    outermost first. Also returns for each vmap whether its lanes have results of their own: these
    have a dimension in front, the outermost vmap's first.
    """
    if not vmaps:
        return run(levels), ()
    (size, randomness), *inner = vmaps
    with vmap_level(size, randomness) as level:
        out, mapped = vmapped_by_torch(run, inner, (*levels, level))
        out, dim = _unwrap_batched(out, level)
    if dim is None or randomness == "same":
        return out if dim is None else out.select(dim, 0), (False, *mapped)
    return out.movedim(dim, 0), (True, *mapped)


def only_python_refers(t: torch.Tensor) -> bool:
    """Whether neither C++ refers to a tensor, as a view or an autograd graph does, nor a weak
    reference: swap_tensors needs that.
    """
    return t._use_count() == 1 and not weakref.getweakrefs(t)  # type: ignore[attr-defined]


def become(held: torch.Tensor, other: torch.Tensor, over: bool = False) -> None:
    """Make one tensor's object the other tensor; the other's object keeps its class and attributes.

    A tensor that C++ refers to, as to the arguments of an autograd.Function that is being applied,
    gets the other's class and attributes alone: its operators are not in torch's graph, which is
    not the one that JAX differentiates.

    over: the tensor's trace has ended, so that nobody uses the graph by which C++ refers to it.
    """
    alone = over or held._use_count() == 1  # type: ignore[attr-defined]
    held.__class__, held.__dict__ = other.__class__, dict(other.__dict__)
    if alone and not weakref.getweakrefs(held) and not weakref.getweakrefs(other):
        torch._C._swap_tensor_impl(held, other)


def lanes_by_torch(
    run: Callable[[Sequence[int]], Any], sizes: Sequence[int]
) -> list[tuple[tuple[int, ...], list[tuple[int, int, int]]]]:
    """How the tensors that a function computes inside torch's own vmaps of these sizes lie in
    memory.

    Of each tensor: a lane's strides, and the vmaps that map it, each with the stride from lane to
    lane and the place of its dimension.
    """
    found: list[tuple[tuple[int, ...], list[tuple[int, int, int]]]] = []

    def look(levels: Sequence[int]) -> torch.Tensor:
        for t in _pytree.tree_leaves(run(levels)):
            if isinstance(t, torch.Tensor):
                lane, between = t.stride(), list[tuple[int, int, int]]()
                for k in reversed(range(len(levels))):
                    t, dim = _unwrap_batched(t, levels[k])
                    if dim is not None:
                        between.insert(0, (k, t.stride(dim), dim))
                found.append((lane, between))
        return torch.empty(0, device="meta")

    with plain_torch():
        vmapped_by_torch(look, [(size, "different") for size in sizes])
    return found


def mapped_container(
    x: Any, dim: int, flatten: Callable[[Any], list[Any]]
) -> tuple[Any, list[tuple[Any, int | None]]] | None:
    """What torch.func.vmap hands to its function for an argument that is no tensor and that it
    maps; None if it maps no such argument.

    flatten: gives the leaves of a tree. Returns that tree, and of its leaves the values of all
    lanes and the dimension that is mapped.
    """
    # what torch.func.vmap does to its arguments: a library replaces these two functions to map its
    # own containers of tensors, as tensordict does
    vmap: Any = torch._functorch.vmap
    with plain_torch():
        try:
            size, *inputs, spec = vmap._process_batched_inputs((dim,), (x,), vmap)
        except (AttributeError, ValueError):
            return None
        with vmap_level(size, "error") as level:
            (tree,) = vmap._create_batched_inputs(*inputs, level, spec)
            return tree, [
                _unwrap_batched(leaf, level) if isinstance(leaf, torch.Tensor) else (leaf, None)
                for leaf in flatten(tree)
            ]


def selective_policy(context: object) -> Callable[..., Any] | None:
    """The policy of the first of the contexts that create_selective_checkpoint_contexts returns;
    None for others.
    """
    selective = torch.utils.checkpoint._CachingTorchDispatchMode
    return context.policy_fn if isinstance(context, selective) else None


def is_fake(x: object) -> bool:
    """Whether x is a FakeTensor, which has a shape and no values."""
    fake: Any = torch._subclasses.fake_tensor
    # from torch 2.15 on, a fake tensor may also be a plain Tensor that C++ knows to be one
    known = getattr(fake, "is_fake_tensor", None)
    return isinstance(x, fake.FakeTensor) if known is None else known(x)


def without_memory(t: torch.Tensor) -> str:
    """A description of a tensor that has no memory of its own, so that it cannot become a
    jax.Array; "" for an ordinary tensor.
    """
    if torch._C._functorch.is_functorch_wrapped_tensor(t):
        return (
            "a tensor of a torch.func transform; use torchfunc_jax for the outer transform too, or "
            "torchfunc_jax.patch()"
        )
    if mapped_by_autograd(t):
        return (
            "one that torch.autograd maps over (is_grads_batched, vectorize); map with "
            "torchfunc_jax.vmap, or use jacrev"
        )
    if type(t) not in (torch.Tensor, torch.nn.Parameter):
        if is_fake(t):
            return "a FakeTensor, which has no values"
        try:
            memory = t.numel() == 0 or t.data_ptr()
        except RuntimeError:
            # a tensor of an open trace, whose values only that trace's operators see
            memory = 0
        if not memory:
            return f"a {type(t).__name__}, which has no memory of its own"
    return ""


#: Where a torch.library.CustomOpDef keeps what ``register_autograd`` has been given.
RULES_OF_CUSTOM_OPS = "_backward_fn", "_setup_context_fn"


def generated_for(cls: type[torch.autograd.Function]) -> tuple[torch._ops.OpOverload | None, Any]:
    """The torch.library operator for which PyTorch generated this Function, and its derivative;
    else None twice.

    The derivative's ``_backward_fn`` and ``_setup_context_fn`` are the user's functions, or None.
    """
    function: Any = cls.forward if cls.__name__.startswith("GeneratedBackwardFor_") else None
    names: dict[str, Any] = {}
    # an operator on lists of tensors has a forward around the generated one
    while function is not None and "op" not in names:
        cells = getattr(function, "__closure__", None) or ()
        names = dict(
            zip(function.__code__.co_freevars, [cell.cell_contents for cell in cells], strict=True)
        )
        function = names.get("orig_forward")
    return names.get("op"), names.get("info")


def derivative_of(op: torch._ops.OpOverload, out: Any) -> Any:
    """What ``generated_for`` gives of an operator's derivative; out: its results for operands that
    require grad. None: there is none.
    """
    definition = torch._library.custom_ops.OPDEFS.get(op.name())
    if definition is not None:
        return definition
    for t in _pytree.tree_leaves(out):
        cls = (
            getattr(type(t.grad_fn), "_forward_cls", None) if isinstance(t, torch.Tensor) else None
        )
        if cls is not None and generated_for(cls)[0] is op:
            return generated_for(cls)[1]
    return None


def has_fake(op: torch._ops.OpOverload) -> bool:
    """Whether ``torch.library.register_fake``, or a kernel for the device meta, tells the shapes of
    an operator's results.
    """
    definition = torch._library.custom_ops.OPDEFS.get(op.name())
    if definition is not None and definition._abstract_fn is None and op._schema.returns:
        return False
    return has_kernel(op, "Meta")


def meta_kernel(op: torch._ops.OpOverload) -> Callable[..., Any]:
    """The kernel for the device meta of an operator without tensors among its arguments, which do
    not tell the device.
    """
    return functools.partial(op.redispatch, torch._C.DispatchKeySet(torch._C.DispatchKey.Meta))


def overload_called(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], others: Container[str]
) -> torch._ops.OpOverload | None:
    """The overload that a call of ``torch.ops.namespace.operator`` runs; None for other functions,
    and other namespaces' operators.
    """
    if isinstance(func, torch._ops.OpOverload):
        return None if func.namespace in others else func
    if (
        not isinstance(func, torch._ops.OpOverloadPacket)
        or func._qualified_op_name.partition("::")[0] in others
    ):
        return None
    return getattr(func, torch._C._jit_resolve_packet(func._qualified_op_name, *args, **kwargs))


def once_differentiable_inner(method: Callable[..., Any]) -> Callable[..., Any] | None:
    """The backward inside ``@once_differentiable``; None if the decorator, which leaves no other
    mark, was not used.
    """
    inner = getattr(method, "__wrapped__", None)
    return (
        inner
        if inner is not None and method.__code__.co_filename == torch.autograd.function.__file__
        else None
    )


def check_vmap_rules(cls: type[torch.autograd.Function]) -> None:
    """Raise PyTorch's own error for a Function that has two rules for vmap, or none."""
    if (cls.vmap is not torch.autograd.Function.vmap) is cls.generate_vmap_rule:
        torch._functorch.autograd_function.custom_function_call_vmap(None, cls)


_ANY = torch.empty(0)


def results_of_rule(
    result: Any,
    arguments: Sequence[Any],
    originals: Sequence[Any],
    lane: Callable[[torch.Tensor, int | None], torch.Tensor],
) -> Any:
    """What a Function's vmap staticmethod has returned, with PyTorch's checks, as the Function's
    results.

    An output that is one of the staticmethod's arguments becomes the original; lane takes another
    output and its out_dim.
    """
    rules = torch._functorch.autograd_function
    # it names the type
    rules.validate_vmap_returns_tuple_of_two_elements(
        _ANY if isinstance(result, torch.Tensor) else result
    )
    return rules.wrap_outputs_maintaining_identity(
        result[0], arguments, originals, lane, out_dims=result[1]
    )


#: Graph nodes that save their result only for comparisons, so that a second derivative does not
#: pass through the saved result.
_ONLY_COMPARED = frozenset(
    {
        "ReluBackward0",
        "AmaxBackward0",
        "AminBackward0",
        "AminmaxBackward0",
        "MaxBackward1",
        "MinBackward1",
        "MedianBackward0",
        "NanmedianBackward0",
        "SgnBackward0",
    }
)


def saved_by_its_operator(t: torch.Tensor) -> bool:
    """Whether PyTorch computes the derivative of the operator that made a tensor from the tensor
    itself, as for tanh.
    """
    made_by = torch.Tensor.grad_fn.__get__  # type: ignore[attr-defined]
    node: Any = made_by(t)
    if node is None or node.name() in _ONLY_COMPARED:
        return False
    saved = [getattr(node, name) for name in dir(node) if name.startswith("_saved_")] + [
        *getattr(node, "saved_tensors", ())
    ]
    return any(
        isinstance(s, torch.Tensor) and made_by(s) is node and s.output_nr == t.output_nr
        for s in saved
    )


def by_user() -> bool:
    """Whether a program called ``detach``, and not torch's autograd to save or return a saved
    tensor; asked inside its handler.

    A program's calls come through the ADInplaceOrView layer, which then excludes itself; autograd's
    own calls do not.
    """
    return torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.ADInplaceOrView)


def torch_rearrange() -> Callable[..., torch.Tensor]:
    """``torch.func.rearrange``; before torch 2.12 only functorch has it.

    functorch's version makes a function with exec and looks for it in locals(), where Python 3.13
    no longer puts it, so that every call raises KeyError. In that case the same code runs with an
    exec and a locals() that share a dictionary.
    """
    if hasattr(torch.func, "rearrange"):
        return torch.func.rearrange
    try:
        module = importlib.import_module("functorch.einops.rearrange")
    except ModuleNotFoundError:
        return _named("functorch.einops.rearrange")
    try:
        module.rearrange(torch.zeros(1), "a -> a")
    except KeyError:
        space = {"dims": module.dims}
        made = {**vars(module), "exec": lambda code: exec(code, space), "locals": lambda: space}
        made["_create_rearrange_callable"] = functools.lru_cache(256)(
            copied(module._create_rearrange_callable.__wrapped__, made)
        )
        return functools.wraps(module.rearrange)(copied(module.rearrange, made))
    return module.rearrange


def marked_distributed() -> DistributedDataParallel | None:
    """The DistributedDataParallel whose forward sets the present profiler's mark, its first
    operator; None if another function sets it.
    """
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code not in (
        record_function.__enter__.__code__,
        record_function.__exit__.__code__,
    ):
        frame = frame.f_back
    caller = None if frame is None else frame.f_back
    return (
        caller.f_locals["self"]
        if caller is not None and caller.f_code is DistributedDataParallel.forward.__code__
        else None
    )


def is_local(distributed: DistributedDataParallel) -> bool:
    """Whether a DistributedDataParallel only calls the module that it wraps, as it does for
    torch.compile's own reducer.
    """
    return distributed._use_python_reducer


def make_local(distributed: DistributedDataParallel, local: bool) -> None:
    """Set whether a DistributedDataParallel only calls the module that it wraps."""
    distributed._use_python_reducer = local


def state_question() -> Callable[[], bool]:
    """A function that tells whether grad mode, autocast, the default dtype and deterministic
    algorithms are as they are now.

    The public functions ask for each of them and take five times as long. Autocast's dtypes are
    compared only for devices on which it is on.
    """
    try:
        return torch._C._dynamo.guards.GlobalStateGuard().check
    except AttributeError:
        return lambda: False  # it is not known


def float32_precision() -> Any:
    """``torch.get_float32_matmul_precision()``; if it raises, because each backend has its own,
    CUDA's and the CPU's precision.
    """
    try:
        return _precision()
    except RuntimeError:  # "a mix of the legacy and new APIs to set the matmul precision"
        backends: Any = torch.backends
        return backends.cuda.matmul.fp32_precision, backends.mkldnn.matmul.fp32_precision


#: For each kind, the hooks that ``register_module_forward_hook``,
#: ``register_optimizer_step_pre_hook`` and similar functions have added, by their ids.
GLOBAL_HOOKS = [
    *[
        _named(f"torch.nn.modules.module._global_{kind}_hooks")
        for kind in ("forward", "forward_pre", "backward", "backward_pre")
    ],
    # torch.optim has no attribute of that name
    *[
        getattr(sys.modules["torch.optim.optimizer"], f"_global_optimizer_{kind}_hooks", {})
        for kind in ("pre", "post")
    ],
]


def default_device_of(mode: TorchFunctionMode) -> torch.device | None:
    """The default device that a torch function mode sets, if ``torch.set_default_device`` or
    ``with device`` entered it; else None.
    """
    module: Any = sys.modules.get("torch.utils._device")  # PyTorch imports it to make such a mode
    return mode.device if module is not None and isinstance(mode, module.DeviceContext) else None


def takes_default_device(function: Callable[..., Any]) -> bool:
    """Whether a function makes a tensor on the default device if none is given."""
    module: Any = sys.modules.get("torch.utils._device")
    return module is not None and function in module._device_constructors()


def bits_are_compared() -> bool:
    """Whether the same call must give the same bits again: deterministic algorithms are on, or a
    thread is inside of gradcheck.

    gradcheck has no hook and sets no flag, so its file is looked for on the threads' stacks; ask
    this only before a call would change.
    """
    if torch.are_deterministic_algorithms_enabled():
        return True
    file = torch.autograd.gradcheck.__code__.co_filename
    for frame in sys._current_frames().values():
        inner: types.FrameType | None = frame
        while inner is not None:
            if inner.f_code.co_filename == file:
                return True
            inner = inner.f_back
    return False
