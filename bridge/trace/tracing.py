"""Runs torch code on JAX values: the traced tensor, and the dispatch of the operators that reach
it.

``Traced`` is a torch.Tensor without storage whose values live in a ``Node``. While a trace is open,
a dispatch mode hands every ATen operator, factories included, to ``dispatch``.
bridge/operators/plan.py decides once per operator how it is run.
"""

from __future__ import annotations

import contextlib
import gc
import textwrap
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np
import torch

from bridge import compiling, devices, private, private_jax
from bridge.convert import dtypes, tensors
from bridge.convert.sparse import SparseOperand
from bridge.errors import (
    DataDependentError,
    EscapedTensorError,
    NeedsTorch,
    NoLoweringError,
    at_line,
    escaped,
)
from bridge.lowering.registry import of_this_torch
from bridge.private_calls import intercepted
from bridge.process import process
from bridge.trace import python_numbers, saved_tensor_hooks
from bridge.trace.aliasing import Keep, again, read, views_between, write
from bridge.trace.levels import Level, answers, around, innermost, push, state
from bridge.trace.storage import Node
from bridge.transform_kinds import DIFFERENTIATING, FUNCTION, MAPPING, NUMBERED, PLAIN, ROOT

#: Ends the message for code that reads or writes at a tensor's address.
NO_KERNEL = (
    "a tensor inside a transform has no memory that a kernel (Triton, jiterator, C++) could read "
    "at an address; call the kernel in an operator of torch.library that has a fake "
    "(torch.library.custom_op), which PyTorch runs, or a lowering (bridge.register_lowering)"
)
_make = private.make_wrapper
_CPU = torch.device("cpu")
_LISTED = 128  # numbers of a list that are known later: each is a result of the program
_torch_dtype = dtypes._TO_TORCH


class Traced(torch.Tensor):
    """A torch tensor whose values are a JAX array or tracer; shape, dtype, device and strides are
    torch's own.
    """

    node: Node
    number: int = -1  # see ``numbered``

    @classmethod
    @private.opaque
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if len(types) > 1:
            # a traced tensor is a plain one to other classes with rules of their own
            rest = tuple([t for t in types if t is not cls])
            others = [t for t in rest if has_rules(t)]
            for other in others:
                if (
                    found := other.__torch_function__(func, rest, args, kwargs or {})
                ) is not NotImplemented:
                    return found
            if others:
                return NotImplemented
        if settled(args) or (kwargs and settled(kwargs.values())):
            return func(*args, **kwargs or {})
        rule = PYTHON_RULES.get(func)
        args, kwargs = (
            _ordinary(func, args),
            kwargs and dict(zip(kwargs, _ordinary(None, tuple(kwargs.values())), strict=True)),
        )
        with private.without_torch_function():
            if rule is not None:
                return rule(func, *args, **kwargs or {})
            return func(*args, **kwargs) if kwargs else func(*args)

    @classmethod
    @private.opaque
    # torch's documentation has this signature, its types another
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return dispatch(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        if settled((self,)):
            return repr(self)
        if state.level is None or self.node.level.closed:
            return f"Traced(shape={tuple(self.shape)}, dtype={self.dtype}, escaped)"
        return _shown(value_of(self), self.device, self.node.level)

    def __format__(self, spec: str) -> str:
        refuse_format(self, spec)
        with (
            contextlib.nullcontext()
            if spec
            else contextlib.suppress(DataDependentError, EscapedTensorError)
        ):
            return repr(self) if self.dim() else format(self.item(), spec)
        return repr(self)  # of a number that a vmap maps, or whose value is not known

    @property
    def data(self) -> torch.Tensor:
        """The same memory, without derivatives (the dispatcher cannot tell torch's own getter from
        autograd's use of detach).
        """
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        with torch.no_grad():
            self.set_(value)  # type: ignore[call-overload]  # torch's types allow only storages

    @property
    # torch's types declare a writable attribute
    def grad_fn(self) -> Any:  # type: ignore[override]
        return HANDED_IN["graph_node"](torch.Tensor.grad_fn.__get__(self))  # type: ignore[attr-defined]

    def tolist(self) -> Any:
        if settled((self,)):
            return self.tolist()
        known = answers()
        if state.jitting and (known is None or not known.knows(value_of(self))):
            later = _list_later(self)
            if later is not None:
                return later
        return concrete(self, "tolist()").tolist()

    def numpy(self, *, force: bool = False) -> np.ndarray:
        if settled((self,)):
            return self.numpy(force=force)
        return concrete(self if force else _without_derivative(self), "numpy()")

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        if settled((self,)):
            return self.__array__(dtype)
        found = concrete(_without_derivative(self), "numpy.asarray()")
        return found if dtype is None else found.astype(dtype)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        # it has no memory: JAX, which asks for this first, calls __array__
        raise AttributeError("__cuda_array_interface__")

    def data_ptr(self) -> int:
        raise RuntimeError(f"data_ptr(): {NO_KERNEL}{at_line()}")

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        if settled((self,)):
            return self.__reduce_ex__(protocol)
        raise RuntimeError(
            "a tensor inside a transform cannot be pickled or saved; return it from the function "
            f"first{at_line()}"
        )


#: Functions of files that import this one: "plan" makes an operator's plan, "graph_node"
#: gives a tensor's grad_fn, "library_operator" makes the plan of an operator that PyTorch runs. The
#: file that defines such a function puts it here when it is imported.
HANDED_IN: dict[str, Callable[..., Any]] = {}
#: Rules that run instead of PyTorch's own code for a public function;
#: bridge/intercepted/torch_functions.py fills the table.
PYTHON_RULES: dict[Any, Any] = {}
_default = torch.Tensor.__torch_function__.__func__  # type: ignore[attr-defined]


def _ordinary(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """A function's arguments with traced tensors in the place of inference tensors from outside,
    which PyTorch cannot save for backward.

    The target of a write stays as it is: the function returns it.
    """
    if not any(type(x) is list or type(x) is tuple or _from_inference(x) for x in args):
        return args
    target = args[0] if getattr(func, "__name__", "").endswith("_") else None
    return tuple(
        [
            over(lift(x), x)
            if _from_inference(x) and x is not target
            else type(x)(_ordinary(None, tuple(x)))
            if type(x) is list or type(x) is tuple
            else x
            for x in args
        ]
    )


def _from_inference(x: Any) -> bool:
    return (
        type(x) in (torch.Tensor, torch.nn.Parameter)
        and x.is_inference()
        and state.level is not None
    )


def has_rules(cls: Any) -> bool:
    """Whether a class that PyTorch's functions take has a __torch_function__ of its own."""
    return getattr(cls.__torch_function__, "__func__", None) is not _default


def _shown(value: Any, device: torch.device, level: Level | None) -> str:
    """A value in torch.func's words: the kinds and numbers of the levels around it, and the value
    if there is one.

    What is made inside a transform that differentiates is one of its tensors; what is made inside a
    vmap only if it differs between lanes.
    """
    while level is not None:
        trace, dim, inner = next(private_jax.peeled(value), (None, None, None))
        if trace is not None and private_jax.same_trace(level.probe, trace):
            value = inner
        else:
            dim = None
        if level.kind in DIFFERENTIATING or dim is not None:
            number = sum(each.kind in NUMBERED for each in around(level))
            return in_level(_shown(value, device, level.parent), number, dim)
        level = level.parent
    # torch's autograd around the call
    while (layer := next(private_jax.peeled(value), None)) is not None:
        value = layer[2]
    if isinstance(value, jax.core.Tracer):
        return f"Traced(shape={value.shape}, dtype={dtypes.to_torch(value.dtype)})"
    with private.below_python():  # a tensor to look at, which is not part of the trace
        return repr(tensors.to_torch(value, device))


def refuse_format(t: torch.Tensor, spec: str) -> None:
    """Raise torch's TypeError for a format that only a number can have."""
    if spec and t.dim():
        raise TypeError("unsupported format string passed to Tensor.__format__")


def in_level(text: str, number: int, dim: int | None = None) -> str:
    """The text of a tensor of the transform with this number, counted from the outermost; dim: the
    one that this vmap maps.
    """
    kind = (
        f"GradTrackingTensor(lvl={number}"
        if dim is None
        else f"BatchedTensor(lvl={number}, bdim={dim}"
    )
    return f"{kind}, value=\n{textwrap.indent(text, '    ')}\n)"


def _without_inference() -> contextlib.AbstractContextManager[Any]:
    """While entered, what is made is no inference tensor: a transform inside could not save it, nor
    PyTorch make a view of it.
    """
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else _nothing


_nothing = contextlib.nullcontext()


def wrap(
    value: jax.Array | np.ndarray,
    device: torch.device = _CPU,
    level: Level | None = None,
    strides: tuple[int, ...] | None = None,
) -> Traced:
    """A traced tensor with that value and a new root node; strides None: it is contiguous."""
    dtype = _torch_dtype.get(value.dtype) or dtypes.to_torch(value.dtype)
    level = level or state.level
    with _without_inference():
        t: Traced = _make(Traced, value.shape, strides=strides, dtype=dtype, device=device)
    private.forbid_reading(t)
    t.node = node = Node(value, level)
    node.maker = level.operator
    return t


def numbered(t: Traced) -> Traced:
    """A tensor that the user's function gets while a program is traced; it requires grad if it is
    one of ``Level.leaves``.
    """
    root = state.level.root
    t.number = root.made = root.made + 1
    if t.number in root.leaves and t.is_leaf and (t.is_floating_point() or t.is_complex()):
        t.requires_grad_()
    return t


def over(node: Node, like: torch.Tensor, device: torch.device | None = None) -> Traced:
    """A traced tensor on a node, with the geometry and the dtype of another tensor, and its device
    if none is given.
    """
    with _without_inference():
        t: Traced = _make(
            Traced,
            like.shape,
            strides=like.stride(),
            storage_offset=like.storage_offset(),
            dtype=like.dtype,
            device=device or like.device,
        )
    private.forbid_reading(t)
    t.node = node
    return t


def value_of(t: torch.Tensor) -> Any:
    """The JAX value of a tensor: a traced tensor's own, or another tensor's values converted to
    JAX.
    """
    level = state.level
    if type(t) is Traced:
        node = _outside(t) if t.node.level.closed else t.node
        if node.root.level is not level:
            level.met[id(t)] = t
        note_outer(t, node)
        if node.parent is None:
            return node.value
        return read(node, level)
    if level is None:
        return tensors.to_jax(t)
    node = lift(t)
    if level is not level.root:
        level.met[id(t)] = t
        note_outer(t, node)
    return node.value


def settled(args: Iterable[Any]) -> bool:
    """Make plain tensors of the escaped ones among an operator's arguments, as far as they have
    values; whether there was one.

    A module that keeps a table of positions, or its loss, finds a tensor afterwards, as in
    torch.func. What a vmap maps has no value, and what torch's autograd goes back through would
    lose its history.
    """
    found = False
    for x in args:
        if type(x) is Traced:
            found = (x.node.level.closed and _settle(x)) or found
        elif type(x) is list or type(x) is tuple:
            found = settled(x) or found
    return found


def _settle(t: Traced) -> bool:
    with private.without_torch_function():
        over = state.level is None and not weakref.getweakrefs(t)
        if not over and not state.replaying and not private.only_python_refers(t):
            # a graph of torch's that is no longer in use is as young as the trace
            gc.collect(0)
        if not over and not private.only_python_refers(t):
            return False
        plain = _view_of_source(t) if over else None
        if plain is None:
            known = _undifferentiated(t.node, not t.requires_grad)
            if isinstance(known, jax.core.Tracer) or isinstance(
                value := _read_from(known, t.node), jax.core.Tracer
            ):
                return False
            plain = tensors.to_torch(jax.numpy.asarray(value), t.device).clone()
        plain.__dict__.update({name: x for name, x in vars(t).items() if name != "node"})
        private.become(t, plain, over)
    return True


def _view_of_source(t: Traced) -> torch.Tensor | None:
    """The same views of the tensor from outside whose memory an escaped tensor is; None if there is
    none.
    """
    root, views = views_between(t.node)
    source = root.source
    if not isinstance(source, torch.Tensor) or (type(source) is Traced and not settled((source,))):
        return None
    return again(source, views) if views else source.view_as(source)


def outside(t: torch.Tensor) -> torch.Tensor:
    """A tensor that the function of a transform has kept, after that: a plain one, or one of the
    trace in progress; or raise.
    """
    if type(t) is Traced and t.node.level.closed and not settled((t,)):
        _outside(t)
    return t


def _outside(t: Traced) -> Node:
    """Make a tensor of a transform that has ended one of the transform around it, with the value
    that it has there; or raise.
    """
    ended = [level for level in around(t.node.level) if level.closed]
    if (level := ended[-1].parent) is None or any(each.kind not in NUMBERED for each in ended):
        raise escaped(t.node.level)
    if isinstance(source := t.node.root.source, torch.Tensor):
        t.node = _views_again(t.node, node_of(source))
        return t.node
    known = rest = _undifferentiated(t.node, False)
    while (layer := next(private_jax.peeled(rest), None)) is not None:
        # it differs from lane to lane
        if any(private_jax.same_trace(each.probe, layer[0]) for each in ended):
            raise escaped(t.node.level)
        rest = layer[2]
    t.node = Node(_read_from(known, t.node), level)
    return t.node


def _views_again(node: Node, base: Node) -> Node:
    """The views that lead from its root to a node, of another root."""
    return (
        base
        if node.parent is None
        else Node(None, base.level, _views_again(node.parent, base), node.view)
    )


def _undifferentiated(node: Node, by_autograd: bool) -> Any:
    """The value of a node's memory without the derivatives of levels that have ended; by_autograd:
    without those of torch's, too.
    """
    value, level = node.root.value, node.level
    while level is not None and level.closed:
        trace, dim, inner = next(private_jax.peeled(value), (None, None, None))
        if (
            trace is not None
            and dim is None
            and (by_autograd or level is not level.root)
            and private_jax.same_trace(level.probe, trace)
        ):
            value = inner
        level = level.parent
    return value


def _read_from(value: Any, node: Node) -> Any:
    """A node's value if its memory has this one. A tensor on the same memory through which torch's
    autograd goes back keeps its own.
    """
    root = node.root
    before = root.value, root.version
    # what the node has read before may have derivatives
    root.value, root.version = value, root.version + 1
    try:
        with push(PLAIN):  # the rules of some views look at the levels
            return read(node, node.level)
    finally:
        root.value, root.version = before


def note_outer(t: torch.Tensor, node: Node) -> None:
    """Note that the level in progress uses a tensor from outside of it through which torch's
    autograd goes back.
    """
    level = state.level
    if (
        node.level is not level
        and t.requires_grad
        and (type(t) is Traced or (level is not level.root and torch.is_grad_enabled()))
    ):
        level.outer[id(t)] = t


def lift(t: torch.Tensor) -> Node:
    """The node that stands for a torch tensor from outside the trace; each tensor has one per
    trace.
    """
    root = state.level.root
    entry = root.captured.get(id(t))
    if entry is None:
        value = root.overrides.get(id(t))
        if value is None:
            value = beside(tensors.to_jax(t), t)
        if t.requires_grad:
            root.with_history.add(id(t))
        node = Node(value, root)
        node.source = t
        root.captured[id(t)] = entry = (t, node)
    return entry[1]


def beside(value: jax.Array, t: torch.Tensor) -> jax.Array:
    """A tensor's value where the trace computes: that of a tensor on the CPU is copied to the
    accelerator, if one is in use.
    """
    device = state.level.root.device
    return (
        value
        if device is None or t.device.type != "cpu"
        else jax.device_put(value, devices.of(device))
    )


def node_of(t: torch.Tensor) -> Node:
    """The node of a traced tensor, or the node that stands for a tensor from outside."""
    if type(t) is Traced:
        value_of(t) if t.node.level.closed else None
        return t.node
    return lift(t)


def assign(
    t: torch.Tensor, value: Any, detached: bool | None = None, keep: Keep | None = None
) -> None:
    """Write a value of t's shape and dtype into t, and so into every tensor that shares its memory.

    detached: torch's autograd does not record the write; None: the grad mode decides. keep: see
    ``aliasing.write``.
    """
    if type(t) is not Traced and torch.is_grad_enabled():
        node_of(t)
        if id(t) in state.level.root.with_history:
            raise RuntimeError(
                "a tensor from outside that requires grad was changed in place; pass it to the "
                "function as an argument, change a clone of it, or write under "
                f"torch.no_grad(){at_line()}"
            )
    if state.level is not state.level.root:
        state.level.met[id(t)] = t
    write(
        node_of(t),
        value,
        state.level,
        not torch.is_grad_enabled() if detached is None else detached,
        keep,
    )


def concrete(t: torch.Tensor, what: str) -> np.ndarray:
    """The tensor's current values; raises DataDependentError if they are not known (under vmap and
    jit).
    """
    value = value_of(t)
    if (known := answers()) is not None and (found := known.answer(value)) is not None:
        return found
    try:
        return np.asarray(
            jax.lax.stop_gradient(value) if isinstance(value, jax.core.Tracer) else value
        )
    except jax.errors.JAXTypeError:
        raise unknown_value(what) from None


def item_later(t: torch.Tensor) -> Any:
    """What stands for the number ``t.item()`` of a jitted function that gets torch tensors; None
    where nothing does: for a bool or uint64, for a constant, and where the tensor is another one in
    each lane or repetition.
    """
    level = state.level
    root = level.root
    inside = [each for each in around(level) if each is not root]
    if (
        root.grads is None
        or state.exporting
        or t.numel() != 1
        or t.dtype in (torch.bool, torch.uint64)
        or t.is_complex()
        or not all(each.kind is PLAIN or each.kind in DIFFERENTIATING for each in inside)
    ):
        return None
    value = value_of(t)
    if not isinstance(value, jax.core.Tracer):  # it is known now
        return None
    value = jax.lax.stop_gradient(value).reshape(())
    array = value.astype(np.float64 if t.is_floating_point() else np.int64)
    state.numbers = state.numbers or python_numbers.Inputs(())

    def refuse() -> Any:
        raise escaped(level) if level.closed else unknown_value("item()")

    return python_numbers.late(
        state.numbers, array, lambda x: refuse() if level.closed else wrap(x, _CPU), refuse
    )


def _list_later(t: torch.Tensor) -> Any:
    """What stands for ``t.tolist()``, with ``item_later`` of each element; None where nothing does,
    and for many elements.
    """
    if t.numel() > _LISTED:
        return None
    if t.dim():
        rows = [_list_later(row) for row in t.unbind()]
        return None if any(row is None for row in rows) else rows
    return item_later(t)


#: Functions that read a tensor's memory without an operator that a dispatch mode sees.
READS_MEMORY = frozenset(
    [torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.__dlpack__]
)
#: Functions of a tensor from outside that PyTorch would carry out on its memory, which is none of
#: the trace's.
AT_MEMORY = READS_MEMORY | {
    torch.Tensor.data.__set__,  # type: ignore[attr-defined]
    torch.Tensor.grad.__set__,  # type: ignore[attr-defined]
    torch.Tensor.__repr__,
    torch.Tensor.__format__,
}


def at_memory(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], read: Callable[..., Any]
) -> Any:
    """Call such a function, which may set data or grad of a tensor from outside; read: what is done
    instead if it reads the memory.
    """
    if func in READS_MEMORY:
        return read(func, args, kwargs)
    if func in (torch.Tensor.__repr__, torch.Tensor.__format__):
        _, node = state.level.root.captured.get(id(args[0]), (None, None))
        if (
            node is None
            or not node.version
            or (func == torch.Tensor.__format__ and (args[1] or not args[0].dim()))
        ):
            # the format of a number asks for its value; a vector's raises
            return func(*args, **kwargs)
        return _shown(value_of(args[0]), args[0].device, None)
    if func == torch.Tensor.grad.__set__ and type(args[1]) is not Traced:  # type: ignore[attr-defined]
        return func(*args, **kwargs)
    if args[1] is args[0]:  # Module.to, where nothing changes
        return None
    raise exchanged("grad" if func == torch.Tensor.grad.__set__ else "data")  # type: ignore[attr-defined]


def exchanged(what: str) -> BaseException:
    """The error for a tensor from outside that gets other memory: torch.func does it, except in a
    transform that differentiates.
    """
    level = state.level or state.recorder.level
    differentiates = any(
        each.kind in DIFFERENTIATING or each.kind is FUNCTION for each in around(level)
    )
    return (RuntimeError if differentiates else NeedsTorch)(
        f"{what}: a tensor from outside the transform was to get other memory inside it, which "
        f"{'a transform that differentiates' if differentiates else 'JAX'} cannot do; change the "
        "tensor with copy_ under torch.no_grad(), pass it as an argument, or use functional_call "
        f"for a module{at_line()}"
    )


def read_memory(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What such a function gives for the values that a tensor from outside has in the trace; a
    numpy array is read-only.
    """
    if args[0].requires_grad:
        return func(*args, **kwargs)
    value = concrete(args[0], f"{func.__name__}()")
    with private.below_python(), jax.ensure_compile_time_eval():
        found = func(tensors.to_torch(jax.numpy.array(value), args[0].device), *args[1:], **kwargs)
    if isinstance(found, np.ndarray):
        found.flags.writeable = False  # what is written to it would be lost
    return found


def _without_derivative(t: torch.Tensor) -> torch.Tensor:
    """The tensor; raises torch's RuntimeError if a transform differentiates it, because a numpy
    array would end the derivative.
    """
    value = value_of(t)
    own = state.level.kind is FUNCTION  # it has its own derivative
    if not own and (t.requires_grad or private_jax.differentiations(value)):
        raise RuntimeError(
            "Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead; "
            "a JAX function or a Flax module called with it would have no derivative "
            f"either{at_line()}"
        )
    return t


def unknown_value(what: str, dynamic_shape: bool = False) -> DataDependentError:
    """The error for a value, or a shape that depends on values, asked for under vmap or jit; its
    words contain torch.func's own.
    """
    said, where = "", "jit" if innermost(MAPPING) is None else "vmap"
    if where == "vmap" and dynamic_shape:
        said = (
            "vmap: We do not support batching operators that can output dynamic shape. "
            f"Attempted to vmap over {'::'.join(what.split('.')[:2])}. "
        )
    elif where == "vmap" and "item" in what:
        said = (
            "vmap: It looks like you're calling .item() on a Tensor. We don't support vmap over "
            "calling .item() on a Tensor. "
        )
    elif where == "vmap":
        said = (
            "vmap: It looks like you're attempting to use a Tensor in some data-dependent control "
            "flow. We don't support that yet. "
        )
    needs, instead = "needs a tensor's values", "compute with torch.where or torch.cond instead"
    if what == "bool()":
        needs += " (`if`, `while`, `and`, `or` and `not` ask for it)"
    if "item" in what:
        instead += ", take x[i:i + n] as x.narrow(0, i, n)"
        # what float(), int(), print() and comparisons of numbers ask
        if where == "jit" and not state.exporting:
            it = "x.item() as it is" if what == "item()" else "the tensor itself"
            instead += f", return or keep {it}"
    if dynamic_shape:
        needs = "has an output of dynamic shape, which depends on a tensor's values"
        instead = "keep the shape and mask with torch.where instead"
    return DataDependentError(
        f"{said}{what} {needs}, and under {where} only its shape and dtype are known; {instead}, "
        f"or do it outside the transformed function{at_line()}"
    )


class _Mode(private.DispatchMode):
    """Hands every operator called while a trace is open to ``dispatch``."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return dispatch(func, args, kwargs or {})


def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one operator on traced and captured tensors."""
    level = state.level
    if level is None:
        raise escaped(next((x.node.level for x in args if type(x) is Traced), None))
    if on_meta(args, kwargs):
        with private.below_python():
            return func(*_without_data(args), **kwargs)
    level.operator = func
    args, kwargs = python_numbers.own(args, kwargs)
    plan = process.plans.get(func) or plan_of(func)
    try:
        return plan(args, kwargs)
    except (SparseOperand, NoLoweringError) as refused:
        return HANDED_IN["sparse"](refused, func, args, kwargs)


def on_meta(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operator asks for a tensor on the device meta, or changes or takes only such
    tensors: no trace has a part in it.
    """
    device = (
        kwargs.get("device")
        if kwargs
        else args[1]
        if len(args) > 1 and type(args[1]) in (str, torch.device)
        else None
    )
    if device is not None:
        return str(device).partition(":")[0] == "meta"
    found = False
    for x in args:
        if isinstance(x, torch.Tensor):
            # a subclass may have rules
            if type(x) not in (torch.Tensor, torch.nn.Parameter) or not x.is_meta:
                return False
            found = True
    return found


def _without_data(args: tuple[Any, ...]) -> list[Any]:
    """The arguments with tensors on the device meta in the place of traced ones."""
    return [
        torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        if type(x) is Traced
        else x
        for x in args
    ]


def plan_of(func: Any) -> Any:
    """The function (args, kwargs) -> result that runs an operator, made at the operator's first
    use.
    """
    found = process.plans.get(func)
    if found is None:
        found = process.plans[func] = HANDED_IN["plan"](func)
    return found


#: Plans of operators that read values, exchange memory or return no tensor; ``own_rule`` fills the
#: table.
OWN_RULES: dict[Any, Any] = {}


def own_rule(*names: str) -> Any:
    """Decorator: makes the function (args, kwargs) -> result the plan of these operators, whether
    or not they have a lowering.
    """

    def register(plan: Any) -> Any:
        OWN_RULES.update(of_this_torch(dict.fromkeys(names, plan)))
        return plan

    return register


@contextlib.contextmanager
def root() -> Iterator[Level]:
    """Open a trace, with a root level: 64-bit types on, the dispatch mode active. Everything is
    restored on exit, even after an error.
    """
    with (
        push(ROOT) as level,
        jax.enable_x64(True),
        compiling.correctly(),
        intercepted,
        _without_cast_weights(),
        saved_tensor_hooks.hidden_from_pytorch(),
        _Mode(),
    ):
        try:
            yield level
        finally:
            forget_captured(level)


def forget_captured(root: Level) -> None:
    """Remove the autograd history that a trace has left on tensors from outside.

    PyTorch's C++ gives a tensor such a history, made of the trace's nodes, if it was changed in
    place to a value with a derivative.
    """
    for t, node in root.captured.values():
        if node.version and id(t) not in root.with_history:
            owner = t._base if t._is_view() else t
            if owner.requires_grad and not owner.is_leaf:
                owner.detach_()


#: While entered in an operator's handler, operators called from Python are traced again, for
#: decompositions.
traced_python = _Mode


def unwrap(t: torch.Tensor, recurse: bool = True) -> torch.Tensor:
    """A traced tensor's values as a plain tensor with mapped dimensions in front; any other tensor
    unchanged.
    """
    if type(t) is not Traced:
        return t
    value = private_jax.innermost_removed(value_of(t), recurse)
    if isinstance(value, jax.core.Tracer):
        return wrap(value, t.device)
    with private.below_python():  # a tensor to look at, which is not part of the trace
        return tensors.to_torch(value, t.device)


@contextlib.contextmanager
def _without_cast_weights() -> Iterator[None]:
    """While entered, autocast keeps no copies of weights, and no parametrized weights are kept.

    Copies from before would be constants in the trace, and copies from the trace would be useless
    after it.
    """
    enabled = torch.is_autocast_cache_enabled()
    if private.any_autocast():
        torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(False)
    try:
        with private.parametrizations_anew():
            yield
    finally:
        torch.set_autocast_cache_enabled(enabled)
        if private.any_autocast():
            torch.clear_autocast_cache()
