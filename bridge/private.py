"""The one place where names that PyTorch and JAX do not document are used, each with the reason why.

A new version of either that moves one of them breaks this file and no other.
"""
from __future__ import annotations

import contextlib
import functools
import importlib
import operator
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import torch
from torch.autograd import forward_ad
from torch.autograd.profiler import record_function
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree

# A dispatch mode is the only hook below autograd that also sees factory functions; documented as stable in PyTorch's notes on
# extending torch, exported from a module with an underscore.
from torch.utils._python_dispatch import TorchDispatchMode as DispatchMode  # noqa: F401


class _Missing:
    """In the place of a name that this version of PyTorch does not have: the package imports, and says so where the name is used."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            f"{self.path}: torch {torch.__version__} does not have this name, which is needed here; docs/versions.md lists the versions "
            "that work, and `torchfunc-jax doctor` tells which transforms do"
        )


def _jax(path: str) -> Any:
    """A module of JAX's own, by its name in jax._src; looked up at each use, so that a version without it breaks that use alone."""
    return operator.attrgetter(path)(jax._src)


def _named(path: str) -> Any:
    """What torch keeps under a name: for what is asked at each call, and looked up once."""
    try:
        return operator.attrgetter(path.removeprefix("torch."))(torch)
    except AttributeError:
        return _Missing(path)


#: Makes a tensor without storage: shape, dtype, device, strides only.  Documented for subclass authors, private by its name.
make_wrapper: Callable[..., Any] = _named("torch.Tensor._make_wrapper_subclass")

_Function = TypeVar("_Function", bound=Callable[..., Any])


def opaque(function: _Function) -> _Function:
    """Have torch.compile neither look into a function nor into what that calls; it breaks its graph there.

    ``torch.compiler.disable`` says the same by a wrapper around each call and an import of all of dynamo.  These are the marks that
    dynamo looks for: the attribute where it meets a call, the strategy where it would compile a frame.  A call is as fast as without.
    """
    with contextlib.suppress(AttributeError):  # a version without strategies has the marks below, which break the graph at a call
        frames = torch._C._dynamo.eval_frame
        skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)  # the frame, and those that it calls
        frames.set_code_exec_strategy(function.__code__, skip)
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = "it runs in JAX; leave it outside of what is compiled with fullgraph"  # type: ignore[attr-defined]
    return function


def torch_node(tree: Any) -> tuple[list[Any], Any] | None:
    """Children and context of a node registered with torch's pytrees (torch offers no public registry to ask)."""
    kind = _pytree._get_node_type(tree)
    if kind not in _pytree.SUPPORTED_NODES:
        return None
    children, context = _pytree.SUPPORTED_NODES[kind].flatten_fn(tree)
    return list(children), (kind, context)


def torch_node_build(kind: type, children: list[Any], context: Any) -> Any:
    """The node that ``torch_node`` took apart."""
    node, inner = context
    return _pytree.SUPPORTED_NODES[node].unflatten_fn(children, inner)


@contextlib.contextmanager
def below_python() -> Iterator[None]:
    """Operators run PyTorch's own kernels, also on wrapper tensors, and no mode sees them: used to change a wrapper's shape in place."""
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        yield


def decompositions() -> dict[Any, Callable[..., Any]]:
    """PyTorch's own decompositions of operators into simpler ones."""
    return torch._decomp.decomposition_table


#: While entered, torch functions do not ask the subclass of their arguments first (inside a ``__torch_function__`` of our own).
without_torch_function = _named("torch._C.DisableTorchFunctionSubclass")


@contextlib.contextmanager
def without_modes() -> Iterator[None]:
    """While entered, operators run as outside of every dispatch mode: on plain tensors, inside a trace."""
    with torch.utils._python_dispatch._disable_current_modes():
        yield


def is_composite(func: Any) -> bool:
    """Whether an operator is made of other operators in C++ (``OpOverload.decompose`` runs it)."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


_functorch_innermost = _named("torch._C._functorch.peek_interpreter_stack")


def watched_by_torch() -> bool:
    """Whether one of torch's transforms is in progress, or a dispatch mode, the user's or that of make_fx and torch.export, is entered:
    there is no public way to ask.
    """
    return _functorch_innermost() is not None or count_of_dispatch_modes() > 0 or forward_ad._current_level >= 0


def recorded_by_torch() -> bool:
    """Whether make_fx or torch.export records."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


@contextlib.contextmanager
def parametrizations_anew() -> Iterator[None]:
    """While entered, ``torch.nn.utils.parametrize.cached`` knows nothing of before, and afterwards nothing of what was cached in here."""
    module = torch.nn.utils.parametrize
    before, module._cache = module._cache, {}
    try:
        yield
    finally:
        module._cache = before


def which_generator(generator: torch.Generator) -> int:
    """What tells generators apart: an operator gets another Python object for the same one at each call, and they are not equal."""
    return generator._cdata  # type: ignore[attr-defined]


def dispatch_mode() -> str | None:
    """The name of a torch dispatch mode of the user's that is entered; None where there is none.

    The modes of PyTorch's own machinery have a key, and one of its own copies what is written to, which changes no values.
    """
    if not count_of_dispatch_modes():
        return None
    modes = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    names = [type(m).__name__ for m in modes if getattr(m, "_mode_key", None) is None]
    return next((name for name in names if name != "_CloneArgBeforeMutateMode"), None)


count_of_dispatch_modes = _named("torch._C._len_torch_dispatch_stack")


def transformed_by_torch() -> bool:
    """Whether it is a transform of torch.func's, or a level of torch.autograd.forward_ad."""
    return _functorch_innermost() is not None or forward_ad._current_level >= 0


def without_memory(t: torch.Tensor) -> str:
    """What a tensor is that has no memory of its own to cross with; "" for an ordinary one."""
    if torch._C._functorch.is_functorch_wrapped_tensor(t):
        return "a tensor of a torch.func transform; use torchfunc_jax for the outer transform too, or torchfunc_jax.patch()"
    if torch._C._functorch.is_legacy_batchedtensor(t):
        return "one that torch.autograd maps over (is_grads_batched, vectorize); map with torchfunc_jax.vmap, or use jacrev"
    if type(t) not in (torch.Tensor, torch.nn.Parameter):
        if isinstance(t, torch._subclasses.fake_tensor.FakeTensor):
            return "a FakeTensor, which has no values"
        if t.numel() and not t.data_ptr():  # also one of an open trace, whose values only the operators there see
            return f"a {type(t).__name__}, which has no memory of its own"
    return ""


def operator_without_formula(cls: Any) -> Any:
    """The torch.library operator whose generated autograd kernel a Function is, where nobody registered a derivative; else None."""
    forward = vars(cls).get("forward")
    code = getattr(getattr(forward, "__func__", None), "__code__", None)
    if not cls.__name__.startswith("GeneratedBackwardFor_") or code is None:
        return None
    names = {name: cell.cell_contents for name, cell in zip(code.co_freevars, forward.__func__.__closure__ or (), strict=True)}
    return names.get("op") if getattr(names.get("info"), "_backward_fn", True) is None else None


def _traces_of(value: Any) -> Iterator[tuple[Any, bool]]:
    """The traces that a tracer belongs to, innermost first, each with whether it is one that differentiates."""
    while hasattr(value, "_trace"):
        yield value._trace, not hasattr(value, "val")
        value = getattr(value, "val", None) if hasattr(value, "val") else getattr(value, "primal", None)


def stop_at(value: Any, probe: Any) -> Any:
    """value without its derivative at one level of nesting: the one whose trace ``probe`` is.

    JAX's stop_gradient cuts every level; which level a tracer belongs to is not public.
    """
    inside = 0
    for trace, differentiates in _traces_of(value):
        if trace is probe:
            return _cut(value, inside)
        inside += differentiates
    return value


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _cut(value: Any, inside: int) -> Any:
    return value


@_cut.defjvp
def _cut_jvp(inside: int, primals: Any, tangents: Any) -> Any:
    if inside:  # the tangent at an inner level has a derivative of its own at the one that is cut
        return _cut(primals[0], inside - 1), _cut(tangents[0], inside - 1)
    return primals[0], jnp.zeros_like(tangents[0])


def times_differentiated(value: Any) -> int:
    """At how many levels of nesting a value is a tracer of a transform that differentiates."""
    return sum(differentiates for _, differentiates in _traces_of(value))


def differentiates(value: Any) -> bool:
    """Whether a value is a tracer of a transform that differentiates, at whatever level."""
    while hasattr(value, "_trace"):
        if hasattr(value, "primal"):
            return True
        value = getattr(value, "val", None)
    return False


def saved_tensor_pack() -> Any:
    """The function that packs what PyTorch saves for backward, where ``saved_tensors_hooks`` is entered; there is no public way to ask."""
    found = _saved_tensors_hooks(True)
    return None if found is None else found[0]


_saved_tensors_hooks = _named("torch._C._autograd._top_saved_tensors_default_hooks")


def trace_of(value: Any) -> Any:
    """The JAX trace a tracer belongs to; None for an array."""
    return getattr(value, "_trace", None)


def innermost_removed(value: Any, recurse: bool) -> Any:
    """What a tracer of vmap, grad or jvp holds: the batched array, the primal; all levels with recurse (for debug_unwrap)."""
    while hasattr(value, "_trace"):
        if hasattr(value, "val"):
            below = jnp.moveaxis(value.val, value.batch_dim, 0) if isinstance(getattr(value, "batch_dim", None), int) else value.val
        elif hasattr(value, "primal"):
            below = value.primal
        else:
            break
        value = below
        if not recurse:
            break
    return value


def batched_value(tracer: Any) -> Any:
    """What a tracer of vmap holds; None for any other."""
    return tracer.val if hasattr(tracer, "batch_dim") and hasattr(tracer, "val") else None


def mapped_first(values: Any) -> bool:
    """Whether a vmap maps one of these, and no derivative is taken inside that vmap."""
    trace: Any = _jax("core").trace_ctx.trace
    mapping = {v._trace for v in values if batched_value(v) is not None}
    while hasattr(trace, "axis_data"):  # vmap's
        if trace in mapping:
            return True
        trace = trace.parent_trace
    return False


# JAX takes compiler options for a jax.jit of the user's alone; bridge/compiling.py says why that is not enough.
def add_compiler_options(more: Callable[[str], dict[str, str]]) -> None:
    """Whenever JAX compiles a program from now on, it asks for options to add to the program's own; more: from the backend's name.

    Of use for the versions that bridge/compiling.py names and no others, so that no other one can break it.
    """
    compiler = _jax("compiler")
    original = compiler.get_compile_options

    @functools.wraps(original)
    def get_compile_options(*args: Any, **kwargs: Any) -> Any:
        backend = kwargs.get("backend")
        added = {} if backend is None else more(backend.platform)
        kwargs["env_options_overrides"] = {**added, **(kwargs.get("env_options_overrides") or {})}
        return original(*args, **kwargs)

    compiler.get_compile_options = get_compile_options


def compiled_later(values: Any) -> bool:
    """Whether any of these is a value that JAX has not computed: it records what is done, to compile it later (under jit and grad)."""
    for value in values:
        while isinstance(value, jax.core.Tracer):
            below = batched_value(value)
            if below is None:
                return True
            value = below
    return False


def once_differentiable_inner(method: Any) -> Any:
    """The backward inside ``@once_differentiable``; None where the decorator was not used (it leaves no other mark)."""
    inner = getattr(method, "__wrapped__", None)
    return inner if inner is not None and method.__code__.co_filename == torch.autograd.function.__file__ else None


def vmap_info(batch_size: int, randomness: str) -> Any:
    """The ``info`` that a Function's vmap staticmethod gets."""
    return torch._functorch.autograd_function.VmapInfo(batch_size=batch_size, randomness=randomness)


def perturbed(values: Any, level: Any) -> bool:
    """Whether one of the values has a derivative at that level."""
    return level.probe is not None and any(trace is level.probe for v in values for trace, _ in _traces_of(v))


# autograd.Function.apply cannot be overridden by a subclass of Tensor, and callers hold copies of it (``square = Square.apply``), which
# from torch 2.14 on are methods in C.  In every version the C code of apply asks the class for ``_backward_cls`` and then, with grad
# mode and forward-mode AD switched off, for ``forward``.  Both questions go through the metaclass, which answers them while a trace is
# open.
class _Applied(threading.local):
    """What apply asked for last in this thread."""

    by: tuple[Any, bool, bool] | None = None  # the class, and grad mode and forward-mode AD around the call
    silent: Any = None  # the class whose setup_context is not to be run


_applied = _Applied()
_function_meta = type(torch.autograd.Function)


def answer_apply(handler: Callable[[Any, bool, bool], Any] | None) -> None:
    """While set, a Function that is applied runs what ``handler`` gives in the place of its forward; None: as PyTorch made it.

    handler takes the Function, and whether grad mode and forward-mode AD were on around the call.  It gives a callable with the arguments
    of the Function's own forward, or None for that forward itself.
    """
    if handler is None:
        if "__getattribute__" in vars(_function_meta):
            del _function_meta.__getattribute__
        return

    def answer(cls: Any, name: str) -> Any:
        if name == "_backward_cls":
            _applied.by = (cls, torch.is_grad_enabled(), torch._C._is_fwd_grad_enabled())
        elif name == "forward" and _applied.by is not None and _applied.by[0] is cls and not torch.is_grad_enabled():
            by, _applied.by = _applied.by, None
            found = handler(*by)
            if found is not None:
                return found
        elif name == "setup_context" and _applied.silent is cls:
            _applied.silent = None
            return _nothing
        return type.__getattribute__(cls, name)

    _function_meta.__getattribute__ = answer  # type: ignore[method-assign]


def _nothing(*args: Any) -> None:
    pass


def skip_setup_context(cls: Any) -> None:
    """Called at the end of a forward that ``answer_apply`` replaced: the Function's own setup_context is not run after it."""
    _applied.silent = cls


def forward_mode_enabled() -> bool:
    """Whether forward-mode AD is on: the public module has a switch with an underscore, and no function that asks."""
    return torch._C._is_fwd_grad_enabled()


@contextlib.contextmanager
def set_forward_mode_enabled(on: bool) -> Iterator[None]:
    """While entered, forward-mode AD is on or off: no public name does that."""
    before = torch._C._is_fwd_grad_enabled()
    torch._C._set_fwd_grad_enabled(on)
    try:
        yield
    finally:
        torch._C._set_fwd_grad_enabled(before)


# torch.utils.checkpoint and the control-flow functions cannot be overridden by a subclass of Tensor either, they are Python functions, and
# callers hold copies of them (``from torch.utils.checkpoint import checkpoint``), so replacing attributes is not enough: the function
# objects themselves get other code while a trace is open anywhere, which in other threads calls the original.
class _Redirect:
    """One Python function of torch's that can be made to ask one of ours first."""

    def __init__(self, function: types.FunctionType, name: str) -> None:
        self.function, self.code = function, function.__code__
        self.original = types.FunctionType(
            function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
        )
        self.original.__kwdefaults__ = function.__kwdefaults__
        space: dict[str, Any] = {}
        # code that names its target can only be made from text; an error's line is looked for outside of this file
        # it reads the same free variables: a frame whose cells were never filled crashes who looks at its locals
        free = function.__code__.co_freevars
        text = (
            f"def around({', '.join(free)}):\n    def shim(*args, **kwargs):\n        if 0: {', '.join(free) or '...'}\n"
            f"        from {__name__} import IN_TRACES\n        return IN_TRACES[{name!r}](*args, **kwargs)\n    return shim"
        )
        exec(compile(text, __file__, "exec"), space)
        self.shim = space["around"](*free).__code__

    def turn(self, on: bool) -> None:
        self.function.__code__ = self.shim if on else self.code


#: Ours, by the names of ``_REDIRECTED``: each file that has some puts them here when it is imported.
IN_TRACES: dict[str, Callable[..., Any]] = {}

#: Functions of torch's that ask ours first: name -> (their module, their name there).
_REDIRECTED = {
    "checkpoint": ("torch.utils.checkpoint", "checkpoint"),
    **{
        name: (f"torch._higher_order_ops.{name}", name)
        for name in ("cond", "while_loop", "map", "scan", "associative_scan")
    },
    "gaussian_nll_loss": ("torch.nn.functional", "gaussian_nll_loss"),
    "flex_attention": ("torch.nn.attention.flex_attention", "flex_attention"),
    "causal_hint": ("torch.nn.modules.transformer", "_detect_is_causal_mask"),
    "fused_attention": ("torch.backends.mha", "get_fastpath_enabled"),
}


@functools.cache
def _redirects() -> dict[str, _Redirect]:
    found = {}
    for name, (module, attribute) in _REDIRECTED.items():
        try:
            function = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError):  # this version of PyTorch does not have it: nobody can call it
            continue
        if isinstance(function, types.FunctionType):
            found[name] = _Redirect(function, name)
    return found


def outside_of_traces(name: str) -> None:
    """What is intercepted in a trace is called where none is open: whoever records without one has its say."""
    for asked in asked_outside:
        asked(name)


asked_outside: list[Callable[[str], None]] = []


def original(name: str) -> Callable[..., Any]:
    """torch's own function of that name among those that are redirected, to be called where no trace is open."""
    outside_of_traces(name)
    return _redirects()[name].original


def redirect(on: bool) -> None:
    """Make torch's functions ask ours first; off: as torch made them.  All or none, also where one of them fails."""
    turned: list[_Redirect] = []
    try:
        for r in _redirects().values():
            turned.append(r)
            r.turn(on)
    except BaseException:
        for r in turned:
            r.turn(not on)
        raise


#: Nodes that save their result to compare with it alone, so that a second derivative does not go back through what is saved.
_ONLY_COMPARED = frozenset({
    "ReluBackward0", "AmaxBackward0", "AminBackward0", "AminmaxBackward0", "MaxBackward1", "MinBackward1", "MedianBackward0",
    "NanmedianBackward0", "SgnBackward0",
})  # fmt: skip


def saved_by_its_operator(t: torch.Tensor) -> bool:
    """Whether the derivative of the operator that made a tensor is computed from the tensor itself, as tanh's is."""
    node: Any = torch.Tensor.grad_fn.__get__(t)  # type: ignore[attr-defined]
    if node is None or node.name() in _ONLY_COMPARED:
        return False
    saved = [getattr(node, name) for name in dir(node) if name.startswith("_saved_")] + [*getattr(node, "saved_tensors", ())]
    return any(
        isinstance(s, torch.Tensor) and torch.Tensor.grad_fn.__get__(s) is node and s.output_nr == t.output_nr  # type: ignore[attr-defined]
        for s in saved
    )


def by_user() -> bool:
    """Inside the handler of ``detach``: whether a program called for it, rather than torch's autograd to keep or hand out a saved tensor.

    Operators called for come through the ADInplaceOrView layer, which then excludes itself; autograd's own calls do not.
    """
    return torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.ADInplaceOrView)


def torch_rearrange() -> Callable[..., torch.Tensor]:
    """``torch.func.rearrange``; before torch 2.12 it is functorch's alone.

    There it makes a function with exec and looks for it in locals(), where Python 3.13 no longer puts it (every call is a KeyError):
    then the same code runs here with an exec and a locals() of its own that share a dictionary.
    """
    if hasattr(torch.func, "rearrange"):
        return torch.func.rearrange
    try:
        module = importlib.import_module("functorch.einops.rearrange")
    except ModuleNotFoundError:
        return _Missing("functorch.einops.rearrange")
    try:
        module.rearrange(torch.zeros(1), "a -> a")
    except KeyError:
        space = {"dims": module.dims}
        made: dict[str, Any] = {"exec": lambda code: exec(code, space), "locals": lambda: space}
        make = module._create_rearrange_callable.__wrapped__
        made["_create_rearrange_callable"] = functools.lru_cache(256)(types.FunctionType(make.__code__, {**vars(module), **made}))
        return functools.wraps(module.rearrange)(types.FunctionType(module.rearrange.__code__, {**vars(module), **made}))
    return module.rearrange


def marked_distributed() -> Any:
    """The DistributedDataParallel whose forward the profiler's mark being set belongs to; None where another function sets it.

    The mark is the first thing that it does, and the only operator that shows a trace that a module is one.
    """
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code not in (record_function.__enter__.__code__, record_function.__exit__.__code__):
        frame = frame.f_back
    caller = None if frame is None else frame.f_back
    return caller.f_locals["self"] if caller is not None and caller.f_code is DistributedDataParallel.forward.__code__ else None


def is_local(distributed: Any) -> bool:
    """Whether a DistributedDataParallel calls the module that it wraps and nothing else, as it does for torch.compile's own reducer."""
    return distributed._use_python_reducer


def make_local(distributed: Any, local: bool) -> None:
    """Have a DistributedDataParallel call the module that it wraps and nothing else, or no longer."""
    distributed._use_python_reducer = local


def processes(group: Any) -> int:
    """How many processes are in a process group that an operator of ``torch.ops.c10d`` gets: it is boxed, and unboxing is undocumented."""
    return torch.distributed.ProcessGroup.unbox(group).size()


#: Whether autocast is on for any device; the public question is asked of one device at a time and takes four times as long.
any_autocast: Callable[[], bool] = _named("torch._C._is_any_autocast_enabled")
#: How many torch function modes are entered (a default device is one): public is only to enter one.
function_modes: Callable[[], int] = _named("torch._C._len_torch_function_stack")


def state_question() -> Callable[[], bool]:
    """Asks whether grad mode, autocast, the default dtype and deterministic algorithms are as they are now: public are only questions
    about each of them, which together take five times as long.  Of autocast's dtypes only those of devices where it is on are compared.
    """
    try:
        return torch._C._dynamo.guards.GlobalStateGuard().check
    except AttributeError:
        return lambda: False  # nobody knows


_precision = _named("torch._C._get_float32_matmul_precision")


def float32_precision() -> Any:
    """``torch.get_float32_matmul_precision()``; where it raises, as each backend has its own, what CUDA's and the CPU's are."""
    try:
        return _precision()
    except RuntimeError:  # "a mix of the legacy and new APIs to set the matmul precision"
        return torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]


def forbid_reading(t: torch.Tensor) -> None:
    """Have PyTorch raise if it is to read the memory of a tensor that has none; it would read whatever is there."""
    torch._C._set_throw_on_mutable_data_ptr(t)


def enter_function_mode(mode: Any) -> None:
    """Have a torch function mode see what is called from now on; its public way, a context, takes ten times as long."""
    torch._C._push_on_torch_function_stack(mode)


def leave_function_mode() -> Any:
    """End the innermost torch function mode, and give it."""
    return torch._C._pop_torch_function_stack()


def function_mode_stack() -> list[Any]:
    """The torch function modes that are entered, the outermost first."""
    return torch.overrides._get_current_function_mode_stack()


@functools.cache
def _global_hooks() -> tuple[dict[int, Any], ...]:
    module = torch.nn.modules.module
    return (
        module._global_forward_hooks, module._global_forward_pre_hooks, module._global_backward_hooks, module._global_backward_pre_hooks
    )


def global_module_hooks() -> tuple[Any, ...] | None:
    """The numbers of the hooks that ``register_module_forward_hook`` and its like have added; None where there are none."""
    forward, before, backward, before_backward = hooks = _global_hooks()
    return tuple([tuple(h) for h in hooks]) if forward or before or backward or before_backward else None


def functions_of_global_hooks() -> list[Callable[..., Any]]:
    """The hooks of all modules, for what they read."""
    return [hook for hooks in _global_hooks() for hook in hooks.values()]


def default_device_of(mode: Any) -> torch.device | None:
    """The device that a torch function mode gives to factory functions, as ``torch.set_default_device`` enters one; else None."""
    module: Any = sys.modules.get("torch.utils._device")  # PyTorch imports it to make such a mode
    return mode.device if module is not None and isinstance(mode, module.DeviceContext) else None


def linear_program(pull: Any) -> Any:
    """The jaxpr of what a function of ``jax.vjp`` pulls back through, tangents last among its inputs; None where JAX does not show it."""
    return getattr(pull, "jaxpr", None)


def scanned(eqn: Any) -> tuple[Any, int, int]:
    """The jaxpr of a scan's step, how many of its operands are the same in each step, and how many it carries.

    JAX has no public way to ask, and from 0.12 on says it by the trees of the operands.
    """
    params = eqn.params
    jaxpr = getattr(params["jaxpr"], "jaxpr", params["jaxpr"])
    if "num_carry" in params:
        return jaxpr, params["num_consts"], params["num_carry"]
    consts, carried, _ = [len(part) for part in params["ft_in"].unpack()]
    return jaxpr, consts, carried


def mapped_by_jax(tracer: Any = None) -> bool:
    """Whether a tracer, or without one what is computed now, is inside of a jax.vmap; JAX has no public way to ask."""
    mapping = _jax("interpreters.batching").BatchTrace
    trace = _jax("core").trace_ctx.trace if tracer is None else getattr(tracer, "_trace", None)
    while trace is not None and not isinstance(trace, mapping):
        trace = getattr(trace, "parent_trace", None)
    return trace is not None


def flex_attention_around(operator: Callable[..., Any]) -> Callable[..., Any]:
    """torch's flex_attention with another function in the place of its higher-order operator: called at once, not by torch.compile.

    Its checks of the arguments and the making of its outputs have no names of their own, so its code runs with other globals.
    """
    function: Any = original("flex_attention")
    space = {
        **function.__globals__, "flex_attention_hop": operator, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG": True,  # no torch.compile
        "_validate_device": lambda *tensors: None,  # it refuses derivatives on CPUs
        "setup_compilation_env": contextlib.nullcontext,
    }
    around = types.FunctionType(function.__code__, space, function.__name__, function.__defaults__)
    around.__kwdefaults__ = function.__kwdefaults__
    return around
