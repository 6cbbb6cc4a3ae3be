"""Calls of PyTorch's functions that come to ours while a trace or a record is open, by names that
PyTorch does not document.

``private`` has the other uses of such names.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import operator
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import torch

from bridge import private, private_meta
from bridge.process import process
from bridge.trace.levels import Unrecordable, state


# A subclass of Tensor cannot override autograd.Function.apply, and callers hold copies of it
# (``square = Square.apply``), which are methods in C from torch 2.14 on. In every version the C
# code of apply gets the attribute ``_backward_cls`` of the class and then, with grad mode and
# forward-mode AD switched off, ``forward``. Both lookups go through the metaclass, which answers
# them while a trace is open.
class _Applied(threading.local):
    """The last call of apply in this thread."""

    # the class, and grad mode and forward-mode AD around the call
    by: tuple[Any, bool, bool] | None = None
    silent: Any = None  # the class whose setup_context is not to be run


_applied = _Applied()
_function_meta = type(torch.autograd.Function)


def answer_apply(handler: Callable[[Any, bool, bool], Any] | None) -> None:
    """While a handler is set, a Function that is applied runs the handler's result instead of its
    forward; None removes the handler.

    handler takes the Function, and whether grad mode and forward-mode AD were on around the call.
    It returns a callable that takes the arguments of the Function's forward, or None for the
    forward itself.
    """
    if handler is None:
        if "__getattribute__" in vars(_function_meta):
            del _function_meta.__getattribute__
        return

    def answer(cls: Any, name: str) -> Any:
        if name == "_backward_cls":
            _applied.by = (cls, torch.is_grad_enabled(), torch._C._is_fwd_grad_enabled())
        elif (
            name == "forward"
            and _applied.by is not None
            and _applied.by[0] is cls
            and not torch.is_grad_enabled()
        ):
            by, _applied.by = _applied.by, None
            found = handler(*by)
            if found is not None:
                return found
        elif name == "setup_context" and _applied.silent is cls:
            _applied.silent = None
            return lambda *args: None
        return type.__getattribute__(cls, name)

    _function_meta.__getattribute__ = answer  # type: ignore[method-assign]


def skip_setup_context(cls: type[torch.autograd.Function]) -> None:
    """Skip the Function's own setup_context after a forward that ``answer_apply`` replaced; that
    forward calls this at its end.
    """
    _applied.silent = cls


# TorchScript's functions and methods are C++ objects that call C++ operators; their classes are the
# one place to see their calls, because they ask for the __torch_function__ of their own arguments
# alone.
@functools.cache
def _scripts() -> dict[type, Any]:
    """By a class of TorchScript's: its own call."""
    found = [getattr(torch._C, name, None) for name in ("ScriptFunction", "ScriptMethod")]
    return {kind: kind.__call__ for kind in found if kind is not None}


def answer_scripts(handler: Callable[..., Any] | None) -> None:
    """While a handler is set, a call of a TorchScript function or method calls it, with the callee
    first; None removes the handler.
    """
    for kind, own in _scripts().items():
        kind.__call__ = own if handler is None else handler  # type: ignore[method-assign]


def script_itself(callee: Any) -> Callable[..., Any]:
    """A TorchScript function or method, past the handler."""
    return functools.partial(_scripts()[type(callee)], callee)


def script_of_graph(callee: Any) -> Any:
    """A new TorchScript function with the operators of this one, and of what it calls; that of a
    method takes its module first.
    """
    return torch._C._create_function_from_graph(callee.name, callee.inlined_graph.copy())


def script_arguments(
    callee: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, ...] | None:
    """The arguments of a TorchScript function, or of a method with its module first, by position;
    None if TorchScript refuses them.
    """
    if hasattr(callee, "owner"):
        args = (callee.owner, *args)
    rest = callee.schema.arguments[len(args) :]
    if len(args) > len(callee.schema.arguments) or not {
        a.name for a in rest if not a.has_default_value()
    } <= set(kwargs):
        return None
    return (
        (*args, *[kwargs.get(a.name, a.default_value) for a in rest])
        if set(kwargs) <= {a.name for a in rest}
        else None
    )


# A subclass of Tensor cannot override torch.utils.checkpoint and the control-flow functions either.
# They are Python functions, and callers hold references to them
# (``from torch.utils.checkpoint import checkpoint``), so replacing attributes is not enough. The
# function objects get other code while any thread has a trace open; in the other threads that code
# calls the original.
def _shim(function: types.FunctionType, name: str) -> types.CodeType:
    """Code that can replace the function's own, and calls our function of that name."""
    space: dict[str, Any] = {}
    # Code that names its target can only be made from text; the user's line in an error is looked
    # for outside this file. The code reads the same free variables, because reading the locals of a
    # frame whose cells were never filled crashes.
    free = function.__code__.co_freevars
    text = (
        f"def around({', '.join(free)}):\n    def shim(*args, **kwargs):\n        if 0: "
        f"{', '.join(free) or '...'}\n        from {__name__} import called\n        return "
        f"called({name!r}, *args, **kwargs)\n    return shim"
    )
    exec(compile(text, __file__, "exec"), space)
    return space["around"](*free).__code__


def in_trace(*_: Any, **__: Any) -> bool:
    """Whether this thread has a trace open."""
    return state.level is not None


def in_call(*_: Any, **__: Any) -> bool:
    """Whether this thread has a trace or a record open."""
    return state.level is not None or state.recorder is not None


@dataclasses.dataclass(frozen=True, slots=True)
class Ours:
    """Our function in the place of one of torch's.

    Attributes:
        function: ours.
        when: whether a call with these arguments is one of ours.
        recorded: whether a record may call torch's own; from the call of another one on, PyTorch
            goes on with what is recorded.
    """

    function: Callable[..., Any]
    when: Callable[..., bool] = in_trace
    recorded: bool = False


#: By the name in ``_REDIRECTED``; the files that have such functions put them here when they are
#: imported.
IN_TRACES: dict[str, Ours] = {}

#: Functions of torch's that are redirected to ours: name -> (module, name in the module).
_REDIRECTED = {
    "checkpoint": ("torch.utils.checkpoint", "checkpoint"),
    **{
        name: (f"torch._higher_order_ops.{name}", name)
        for name in ("cond", "switch", "while_loop", "map", "scan", "associative_scan")
    },
    "gaussian_nll_loss": ("torch.nn.functional", "gaussian_nll_loss"),
    "flex_attention": ("torch.nn.attention.flex_attention", "flex_attention"),
    "causal_hint": ("torch.nn.modules.transformer", "_detect_is_causal_mask"),
    "multi_head_attention": ("torch.nn.functional", "multi_head_attention_forward"),
    "fused_attention": ("torch.backends.mha", "get_fastpath_enabled"),
    "is_compiling": ("torch.compiler", "is_compiling"),
    "flatten_parameters": ("torch.nn.modules.rnn", "RNNBase.flatten_parameters"),
    "jiterator": ("torch.cuda.jiterator", "_JittedFunction.__call__"),
    "batch_norm_forward": ("torch.nn.modules.batchnorm", "_BatchNorm.forward"),
    "deepcopy": ("torch", "Tensor.__deepcopy__"),
    "run_backward": ("torch.autograd.graph", "_engine_run_backward"),
    "multi_grad_hook": ("torch.autograd.graph", "register_multi_grad_hook"),
    "saved_tensor": ("torch.autograd.graph", "_get_tid"),
    "saved_memory": ("torch.autograd.graph", "_get_sid"),
    "optimizer_zero_grad": ("torch.optim.optimizer", "Optimizer.zero_grad"),
    "optimizer_number": ("torch.optim.optimizer", "_get_value"),
    "module_zero_grad": ("torch.nn", "Module.zero_grad"),
    "in_class": ("torch._tensor", "_convert"),
    "compile": ("torch", "compile"),
    "swap_tensors": ("torch.utils", "swap_tensors"),
    "register_parameter": ("torch.nn.modules.module", "Module.register_parameter"),
    "functional_call": ("torch.nn.utils.stateless", "_functional_call"),
}
#: Those of torch.compile's own module, whose import takes long; who has compiled a function has
#: imported it.
_DYNAMO = "torch._dynamo.eval_frame"
_REDIRECTED_IN_DYNAMO = {"compiler_of_frames": (_DYNAMO, "_callback_from_stance")}


def _imported() -> bool:
    """Whether that module has been imported, to its end."""
    return hasattr(sys.modules.get(_DYNAMO), "_callback_from_stance")


@functools.cache
def _redirects(with_dynamo: bool) -> dict[str, tuple[types.FunctionType, Any, types.CodeType]]:
    """By name: torch's function, a copy of it that keeps its own code, and the code that calls
    ours.
    """
    found = dict(_redirects(False)) if with_dynamo else {}
    for name, (module, attribute) in (
        _REDIRECTED_IN_DYNAMO if with_dynamo else _REDIRECTED
    ).items():
        try:
            with private_meta.of_plain_sizes():  # in torch 2.14, that of flex_attention needs sympy
                function = operator.attrgetter(attribute)(importlib.import_module(module))
        except (ImportError, AttributeError):  # this version of PyTorch does not have the function
            continue
        if isinstance(function, types.FunctionType):
            found[name] = (
                function,
                private.copied(function, function.__globals__),
                _shim(function, name),
            )
    return found


@functools.cache
def _codes(with_dynamo: bool) -> list[tuple[types.FunctionType, types.CodeType, types.CodeType]]:
    """torch's functions that are redirected, with their own code and the code that calls ours."""
    return [
        (function, own.__code__, shim) for function, own, shim in _redirects(with_dynamo).values()
    ]


def called(name: str, /, *args: Any, **kwargs: Any) -> Any:
    """A call of a redirected function."""
    ours = IN_TRACES[name]
    function = ours.function if ours.when(*args, **kwargs) else original(name)
    return function(*args, **kwargs)


def original(name: str) -> Callable[..., Any]:
    """torch's own redirected function of that name."""
    if state.recorder is not None and not IN_TRACES[name].recorded:
        state.recorder.go_on(Unrecordable(name))
    return _redirects(_imported())[name][1]


class _Intercepted:
    """While any thread has entered this, PyTorch's functions are redirected to ours, and Functions
    and TorchScript call the handlers, which look whether their thread has a trace open.

    Attributes:
        apply, scripts: the handlers of ``answer_apply`` and ``answer_scripts``, which
            autograd_function.py and torch_functions.py of bridge/intercepted put here.
    """

    apply: Callable[..., Any]
    scripts: Callable[..., Any]

    def __enter__(self) -> None:
        with _lock:
            if process.open_traces == 0:
                redirect(True)
                answer_apply(self.apply)
                answer_scripts(self.scripts)
            process.open_traces += 1  # last: if one of these raises, the next trace tries again

    def __exit__(self, *_: object) -> None:
        with _lock:
            process.open_traces -= 1
            if process.open_traces == 0:
                redirect(False)
                answer_apply(None)
                answer_scripts(None)


_lock, intercepted = threading.Lock(), _Intercepted()


def redirect(on: bool) -> None:
    """Redirect torch's functions to ours, or with False restore them; if that is interrupted, all
    are restored.
    """
    codes = _codes(_imported())
    try:
        for function, own, shim in codes:
            function.__code__ = shim if on else own
    except BaseException:
        for function, own, _ in codes:
            function.__code__ = own
        raise


def compile_in_trace(compile: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call torch.compile where a trace is open; its own module, which that may import, is
    redirected from then on.
    """
    importlib.import_module(_DYNAMO)
    redirect(True)
    return compile(*args, **kwargs)


def count_no_compiled_frames() -> None:
    """Stop the count of compiled frames, of which a function that is compiled with
    ``fullgraph=True`` demands one.
    """
    with contextlib.suppress(AttributeError):  # older versions do not count
        sys.modules[_DYNAMO].set_fullgraph_compiled_frame_count(-1)


def with_globals(name: str, **others: Any) -> Callable[..., Any]:
    """torch's own redirected function of that name, whose code reads others in the place of some of
    its globals.
    """
    function: Any = _redirects(_imported())[name][1]
    return private.copied(function, {**function.__globals__, **others})


def flex_attention_around(operator: Callable[..., Any]) -> Callable[..., Any]:
    """torch's flex_attention with another function instead of its higher-order operator, called
    without torch.compile.

    Its checks of arguments and the code that makes its outputs are not functions of their own.
    """
    return with_globals(
        "flex_attention",
        flex_attention_hop=operator,
        _FLEX_ATTENTION_DISABLE_COMPILE_DEBUG=True,  # no torch.compile
        _validate_device=lambda *tensors: None,  # it refuses derivatives on CPUs
        setup_compilation_env=contextlib.nullcontext,
    )
