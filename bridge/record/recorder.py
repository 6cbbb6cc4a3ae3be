"""Records a function: its operators with static arguments and operands, and the transforms inside it, in the order of the program.

Every value gets the next number.  An entry of the record is (what, numbers of the operands).  Operators with the same static arguments and
shapes share one object ``what``, so that equal records are found by comparing objects.
"""
from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from bridge import private
from bridge.errors import DataDependentError
from bridge.process import process
from bridge.programs.cache_keys import identical
from bridge.record.tensor import Aval, Recorded, Unrecordable, aval, aval_of, escaped, recorded
from bridge.trace.levels import state
from bridge.trace.random_keys import SeededInside, Watch


class Ref:
    """The place of an operand among an operator's arguments: the k-th."""

    __slots__ = ("k",)

    def __init__(self, k: int) -> None:
        self.k = k


class Number:
    """The place of a Python number, a float or an int, that is an input of the program."""

    __slots__ = ("k", "kind")

    def __init__(self, k: int, kind: type) -> None:
        self.k, self.kind = k, kind


class Out:
    """The place of a new tensor among an operator's results."""

    __slots__ = ("aval",)

    def __init__(self, what: Aval) -> None:
        self.aval = what


class Again:
    """The place of an operand among an operator's results: the tensor itself, changed in place."""

    __slots__ = ("k",)

    def __init__(self, k: int) -> None:
        self.k = k


class Op:
    """An operator with its static arguments, its operands' shapes, and a description of its results."""

    __slots__ = ("args", "changed", "draws", "func", "grad", "kwargs", "numbers", "outs", "single", "words")

    def __init__(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], grad: bool, outs: Any,
        changed: tuple[tuple[int, Aval], ...], numbers: int, draws: bool,
    ) -> None:
        self.numbers, self.draws = numbers, draws
        self.words: str | None = None  # made and used by bridge/record/disk.py
        self.func, self.args, self.kwargs, self.grad, self.outs, self.changed = func, args, kwargs, grad, outs, changed
        self.single: Aval | None = outs.aval if type(outs) is Out and not changed else None


class Begin:
    """A transform begins: its kind and static arguments."""

    __slots__ = ("arguments", "grad", "kind", "params")

    def __init__(self, kind: str, params: Any, arguments: int, grad: bool) -> None:
        self.kind, self.params, self.arguments, self.grad = kind, params, arguments, grad


class End:
    """The innermost transform ends, with these values as its function's results."""

    __slots__ = ("outs", "params")

    def __init__(self, params: Any, outs: int) -> None:
        self.params, self.outs = params, outs


class Pull:
    """A call of the function that vjp or linearize has returned; node: the number of that transform's first result."""

    __slots__ = ("node", "outs")

    def __init__(self, node: int, outs: int) -> None:
        self.node, self.outs = node, outs


class Input:
    """A tensor from outside."""

    __slots__ = ("aval",)

    def __init__(self, what: Aval) -> None:
        self.aval = what


def values_of(what: Any) -> int:
    """How many values an entry of a record gives numbers to."""
    kind = type(what)
    if kind is Op:
        return _tensors(what.outs)
    if kind is Input:
        return 1
    return what.arguments if kind is Begin else what.outs


def _tensors(outs: Any) -> int:
    if type(outs) is Out:
        return 1
    return sum(map(_tensors, outs)) if isinstance(outs, tuple | list) else 0


@functools.cache
def interned(kind: Any, *what: Any) -> Any:
    """The one object of a kind (Begin, End, Pull or Input) with these fields."""
    return kind(*what)


class Level:
    """A transform that is being recorded.

    Attributes:
        before: how many entries, values, numbers and inputs the record had when it began.
    """

    __slots__ = ("before", "kind", "open", "owner", "parent")

    def __init__(self, kind: str, owner: Recorder) -> None:
        self.kind, self.owner, self.parent, self.open = kind, owner, owner.level, True
        self.before = (len(owner.trace), owner.count, len(owner.numbers), len(owner.inputs))


#: Functions that record what is neither a torch function nor a transform of ours, by name; "shapes" is the function of that name in
#: replay.py.  Each file enters its function here when it is imported.
PARTS: dict[str, Callable[..., Any]] = {}


def _refuse(name: str) -> None:
    if state.recorder is not None and name not in ("gaussian_nll_loss", "causal_hint"):
        raise Unrecordable(name)


private.asked_outside.append(_refuse)

_FLOAT, _INT = object(), object()
_grad_mode = torch.is_grad_enabled


class _Ambient(NamedTuple):
    """State that changes what operators do and is not recorded with them; it must stay the same for the whole record."""

    dtype: torch.dtype
    autocast: bool
    forward_mode: bool
    saved_tensor_hooks: bool
    dispatch_modes: int


def _ambient() -> _Ambient:
    return _Ambient(
        torch.get_default_dtype(), torch.is_autocast_enabled("cpu"), private.forward_mode_enabled(),
        private.saved_tensor_pack() is not None, private.count_of_dispatch_modes(),
    )  # fmt: skip


class Recorder(TorchFunctionMode):
    """The record of one call."""

    def __init__(self, execute: Callable[[Recorder, list[int], bool], Sequence[torch.Tensor]]) -> None:
        super().__init__()
        self.execute = execute
        self.trace: list[tuple[Any, tuple[int, ...]]] = []
        self.inputs: list[torch.Tensor] = []
        self.by_id: dict[int, int] = {}
        self.numbers: list[Any] = []
        self.count = 0
        self.level: Level | None = None
        self.written: set[int] = set()
        self.writes = False  # whether any tensor was written to; it may share memory with a tensor from outside
        self.lasting = False  # whether it will be repeated: then it may neither draw random numbers nor write
        self.copied = False  # whether its inputs are copies of another record's: then it may not write to them
        self.broken: str | None = None  # the reason if the record is incomplete
        self.ambient = _ambient()
        self.watch: Watch | None = None  # watches torch's generator; None until a random operator is recorded

    # -- operands ----------------------------------------------------------------------------------------------------------------------
    def ref(self, t: torch.Tensor) -> int:
        if type(t) is Recorded:
            if not t.level.open or t.level.owner is not self:
                raise escaped()
            return t.ref
        found = self.by_id.get(id(t))
        if found is None:
            if type(t) is not torch.Tensor and type(t) is not torch.nn.Parameter:
                raise Unrecordable(str(type(t)))
            if t.layout is not torch.strided or t.device.type != "cpu" or t.is_quantized or t.is_nested:
                raise Unrecordable("an input of another kind")
            found = self.by_id[id(t)] = self.count
            self.count += 1
            self.inputs.append(t)
            self.trace.append((interned(Input, aval_of(t)), ()))
        return found

    def active(self) -> bool:
        """Whether this thread is recording into it."""
        return state.recorder is self

    def aval(self, t: torch.Tensor) -> Aval:
        return t.aval if type(t) is Recorded else aval_of(t)

    def made(self, what: Aval) -> Recorded:
        t = recorded(self.count, what, self.level)
        self.count += 1
        return t

    # -- operators ---------------------------------------------------------------------------------------------------------------------
    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        rule = RULES.get(func)
        if rule is not None:
            return rule(self, func, args, kwargs or {})
        refs: list[int] = []
        key: list[Any] = [func]
        numbers = len(self.numbers)
        for x in args:
            kind = type(x)
            if kind is Recorded:
                if not x.level.open:
                    raise escaped()
                refs.append(x.ref)
                key.append(x.aval)
            elif kind is int:
                if func in WITH_INTS:
                    self.numbers.append(x)
                    key.append(_INT)
                else:
                    key.append(x)
            elif kind is float:
                key.append(self._float(func, x))
            else:
                key.append(self._static(func, x, refs))
        if kwargs:
            for name, x in kwargs.items():
                key.append(name)
                key.append(self._static(func, x, refs))
        ambient = _ambient()
        if ambient != self.ambient:
            raise Unrecordable("a mode that is entered inside")
        key += ambient
        key.append(_grad_mode())
        whole = tuple(key)
        try:
            op = process.recorded.get(whole)
        except TypeError:
            raise Unrecordable("an unhashable argument") from None
        if op is None:
            try:
                op = self._infer(func, args, kwargs or {})
            except _ByValue:
                del self.numbers[numbers:]
                return self.by_value(func, args, kwargs or {})
            except Exception:  # PyTorch refuses the operands; the caller may catch that
                del self.numbers[numbers:]
                raise
            process.recorded[whole] = op
        if op.draws:
            self.draw()
        self.trace.append((op, tuple(refs)))
        if op.single is not None:
            t = recorded(self.count, op.single, self.level)
            self.count += 1
            return t
        return self._results(op, args, kwargs or {})

    def draw(self) -> None:
        """Note that a random operator was recorded.  This advances the generator, so that setting its state back is noticed."""
        if self.watch is None:
            self.watch = Watch([])
        self.watch.draw(None)

    @contextlib.contextmanager
    def drawing(self) -> Iterator[None]:
        """While entered, the function is recorded.  On exit torch's generator gets the state back that it had before the first draw."""
        start = torch.default_generator.get_state()
        try:
            try:
                yield
                if self.watch is not None:
                    self.watch.check()
            except SeededInside as reason:
                raise Unrecordable(str(reason)) from None
        except Unrecordable:  # the function runs again from the start
            torch.default_generator.set_state(start)
            raise
        except BaseException:
            self._undraw()
            raise
        self._undraw()

    def _undraw(self) -> None:
        if self.watch is not None:
            self.watch.restore()

    def _results(self, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors: list[Any] = []
        _collect((args, kwargs), tensors)
        self.writes |= bool(op.changed)
        for k, what in op.changed:
            t = tensors[k]
            if type(t) is Recorded:
                if what.requires_grad and not t.aval.requires_grad:
                    t.requires_grad_()
                t.aval = what
            else:
                self.written.add(self.by_id[id(t)])
        return self._built(op.outs, tensors)

    def _built(self, outs: Any, tensors: list[Any]) -> Any:
        kind = type(outs)
        if kind is Out:
            return self.made(outs.aval)
        if kind is Again:
            return tensors[outs.k]
        if kind is tuple or kind is list:
            return kind([self._built(o, tensors) for o in outs])
        if isinstance(outs, tuple):  # torch.return_types
            return kind([self._built(o, tensors) for o in outs])
        return outs

    def _float(self, func: Callable[..., Any], x: float) -> Any:
        if func in WITH_NUMBERS:
            self.numbers.append(x)
            return _FLOAT
        return (float, identical(x))

    def _static(self, func: Callable[..., Any], x: Any, refs: list[int]) -> Any:
        kind = type(x)
        if kind is Recorded:
            refs.append(self.ref(x))
            return x.aval
        if isinstance(x, torch.Tensor):
            refs.append(self.ref(x))
            return aval_of(x)
        if kind is float:
            return self._float(func, x)
        if kind is int:
            if func in WITH_INTS:
                self.numbers.append(x)
                return _INT
            return x
        if kind is list or isinstance(x, tuple):
            return (kind, *[self._static(func, v, refs) for v in x])
        if kind is slice:
            return (slice, self._static(func, x.start, refs), self._static(func, x.stop, refs), self._static(func, x.step, refs))
        if kind is dict:
            return (dict, *[(k, self._static(func, v, refs)) for k, v in x.items()])
        if x is None or kind is str or kind in _ATOMS:
            return (kind, x)
        if callable(x) or isinstance(x, torch.Generator):
            raise Unrecordable(str(kind))
        return identical(x)

    def _infer(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Op:
        """The entry for an operator on such operands; PyTorch's meta kernels give its results' shapes."""
        metas: list[torch.Tensor] = []
        template = _Template(self, func)
        given, kw = template.of(args), template.of(kwargs)
        if func in _SHAPES_BY_TRACING:
            return self._staged(func, given, kw, template, TypeError(f"{func}: no tensors"))
        metas = [self.aval(t).meta() for t in template.tensors]
        values = [_filled(x, metas, self.numbers[template.first :]) for x in (given, kw)]
        where = values[1].get("device")
        if where is not None and torch.device(where).type != "cpu":
            raise Unrecordable("a tensor on another device")
        if (metas and where is not None) or (not metas and func in FACTORIES):
            values[1]["device"] = torch.device("meta")  # draws nothing and takes no memory
        before = [(m.shape, m.stride()) for m in metas]
        avals = [self.aval(t) for t in template.tensors]
        draws = _Draws()
        try:
            with draws:
                out = func(*values[0], **values[1])
        except Exception as error:
            return self._staged(func, given, kw, template, error)
        for m, (shape, stride) in zip(metas, before, strict=True):
            if m.shape != shape or m.stride() != stride:
                raise Unrecordable(f"{func}: changes its argument's shape")
        device = next((a.device for a in avals if a.shape), avals[0].device if avals else torch.device(where or "cpu"))
        outs = _outs(out, metas, device)
        # an in-place operator may have made its target require grad
        changed = []
        for k, (m, a) in enumerate(zip(metas, avals, strict=True)):
            if m._version != self._fresh_version(a):
                changed.append((k, a.with_grad(m.requires_grad or a.requires_grad)))
            elif m.requires_grad is not a.requires_grad:
                changed.append((k, a.with_grad(m.requires_grad)))
        return Op(func, given, kw, _grad_mode(), outs, tuple(changed), template.count, draws.found)

    def _fresh_version(self, a: Aval) -> int:
        return 1 if a.requires_grad else 0

    def _staged(self, func: Callable[..., Any], given: tuple[Any, ...], kw: dict[str, Any], template: _Template, error: Exception) -> Op:
        """As _infer, for an operator that has no meta kernel: it is traced."""
        if not template.tensors:
            raise error
        try:
            avals = [self.aval(t) for t in template.tensors]
            out, draws = PARTS["shapes"](func, given, kw, template.tensors, self.numbers[template.first :], avals)
        except DataDependentError as unknown:
            raise _ByValue from unknown
        return Op(func, given, kw, _grad_mode(), out, (), template.count, draws)

    # -- values ------------------------------------------------------------------------------------------------------------------------
    def mapped(self) -> bool:
        level = self.level
        while level is not None:
            if level.kind == "vmap":
                return True
            level = level.parent
        return False

    def by_value(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function that needs its operands' values: they are computed first."""
        tensors: list[Any] = []
        _collect((args, kwargs), tensors)
        if func in _TO_PYTHON and (not self.mapped() or all(type(t) is not Recorded for t in tensors)):
            values = dict(zip(map(id, tensors), self.now(tensors), strict=True))
            return func(*_replaced(args, values), **_replaced(kwargs, values))
        rule = _BY_VALUE.get(func)
        if rule is None or self.mapped():
            raise Unrecordable(str(func))
        return rule(self, func, args, kwargs)

    def now(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The values of these tensors at this point of the program."""
        if not self.writes and all(type(t) is not Recorded for t in tensors):
            return list(tensors)
        return list(self.execute(self, [self.ref(t) for t in tensors], False))

    # -- transforms --------------------------------------------------------------------------------------------------------------------
    def begin(self, kind: str, params: Any, operands: Sequence[torch.Tensor], avals: Sequence[Aval]) -> list[Recorded]:
        """Enter a transform with these operands; returns the arguments of its function."""
        refs = tuple([self.ref(t) for t in operands])
        self.level = Level(kind, self)
        self.trace.append((interned(Begin, kind, params, len(avals), _grad_mode()), refs))
        return [self.made(a) for a in avals]

    def end(self, params: Any, results: Sequence[torch.Tensor], avals: Sequence[Aval]) -> list[Recorded]:
        """Leave the innermost transform; returns its results."""
        refs = tuple([self.ref(t) for t in results])
        self.trace.append((interned(End, params, len(avals)), refs))
        assert self.level is not None
        self.level.open = False
        self.level = self.level.parent
        return [self.made(a) for a in avals]

    def pull(self, node: int, operands: Sequence[torch.Tensor], avals: Sequence[Aval]) -> list[Recorded]:
        """Call the function that vjp or linearize has returned (see ``Pull``); returns its results."""
        refs = tuple([self.ref(t) for t in operands])
        self.trace.append((interned(Pull, node, len(avals)), refs))
        return [self.made(a) for a in avals]

    def repeat(self, other: Recorder) -> dict[int, int]:
        """Write down the entries of another record again; returns the numbers that its values have here, by their numbers there."""
        found: dict[int, int] = {}
        inputs = iter(other.inputs)
        used = 0
        for what, refs in other.trace:
            if type(what) is Input:
                found[len(found)] = self.ref(next(inputs))
                continue
            if type(what) is Pull:
                what = interned(Pull, found[what.node], what.outs)
            self.trace.append((what, tuple([found[r] for r in refs])))
            if type(what) is Op:
                self.numbers += other.numbers[used : used + what.numbers]
                used += what.numbers
            made = values_of(what)
            first = len(found)
            found.update(zip(range(first, first + made), range(self.count, self.count + made), strict=True))
            self.count += made
        return found

    def alike(self) -> Recorder:
        """A record with the same entries and other tensors as inputs, so that it keeps none of this one's alive."""
        other = Recorder(self.execute)
        other.trace, other.numbers, other.count = list(self.trace), list(self.numbers), self.count
        for t in self.inputs:
            other.inputs.append(torch.zeros((), dtype=t.dtype).expand(t.shape).requires_grad_(t.requires_grad))
        return other

    def leave(self) -> None:
        """Remove the innermost transform, whose function has raised, from the record; the user may catch the exception and go on."""
        assert self.level is not None
        self.level.open = False
        entries, values, numbers, inputs = self.level.before
        self.level = self.level.parent
        if any(type(what) is Op and (what.changed or what.draws) for what, _ in self.trace[entries:]):
            self.broken = "a write, or random numbers, in a transform whose function raises"
        del self.trace[entries:], self.numbers[numbers:], self.inputs[inputs:]
        self.by_id = {tensor: number for tensor, number in self.by_id.items() if number < values}
        self.count = values


class _ByValue(Exception):
    pass


class _Draws(private.DispatchMode):
    """Notices whether an operator draws random numbers."""

    found = False

    def __torch_dispatch__(
        self, func: torch._ops.OpOverload, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.found = self.found or torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **kwargs or {})


class _Template:
    """An operator's arguments with places for its operands and numbers."""

    def __init__(self, recorder: Recorder, func: Callable[..., Any]) -> None:
        self.tensors: list[torch.Tensor] = []
        self.numeric = {float: func in WITH_NUMBERS, int: func in WITH_INTS}
        self.total = recorder
        self.first = 0
        self.count = 0

    def of(self, x: Any) -> Any:
        kind = type(x)
        if isinstance(x, torch.Tensor):
            self.tensors.append(x)
            return Ref(len(self.tensors) - 1)
        if kind is float or kind is int:
            if not self.numeric[kind]:
                return x
            self.count += 1
            self.first = len(self.total.numbers) - self.count
            return Number(self.count - 1, kind)
        if kind is slice:
            return slice(self.of(x.start), self.of(x.stop), self.of(x.step))
        if kind is list or isinstance(x, tuple):
            return (list if kind is list else tuple)([self.of(v) for v in x])
        if kind is dict:
            return {k: self.of(v) for k, v in x.items()}
        return x


def _filled(x: Any, tensors: Sequence[Any], numbers: Sequence[Any]) -> Any:
    kind = type(x)
    if kind is Ref:
        return tensors[x.k]
    if kind is Number:
        return numbers[x.k]
    if kind is tuple or kind is list:
        return kind([_filled(v, tensors, numbers) for v in x])
    if kind is dict:
        return {k: _filled(v, tensors, numbers) for k, v in x.items()}
    if kind is slice:
        return slice(_filled(x.start, tensors, numbers), _filled(x.stop, tensors, numbers), _filled(x.step, tensors, numbers))
    return x


filled = _filled


def _collect(x: Any, found: list[torch.Tensor]) -> None:
    """Append the tensors among an operator's arguments to found, in order."""
    kind = type(x)
    if isinstance(x, torch.Tensor):
        found.append(x)
    elif kind is list or isinstance(x, tuple):
        for v in x:
            _collect(v, found)
    elif kind is dict:
        for v in x.values():
            _collect(v, found)
    elif kind is slice:
        _collect((x.start, x.stop, x.step), found)


def _replaced(x: Any, values: dict[int, Any]) -> Any:
    kind = type(x)
    if isinstance(x, torch.Tensor):
        return values[id(x)]
    if kind is list or isinstance(x, tuple):
        return (list if kind is list else tuple)([_replaced(v, values) for v in x])
    if kind is dict:
        return {k: _replaced(v, values) for k, v in x.items()}
    return x


def _outs(out: Any, metas: list[torch.Tensor], device: torch.device | None) -> Any:
    if isinstance(out, torch.Tensor):
        for k, m in enumerate(metas):
            if out is m:
                return Again(k)
        where = device if out.device.type == "meta" and device is not None else out.device
        return Out(aval(tuple(out.shape), out.stride(), out.storage_offset(), out.dtype, where, out.requires_grad))
    if type(out) is tuple or type(out) is list:
        return type(out)([_outs(o, metas, device) for o in out])
    if isinstance(out, tuple):
        return type(out)([_outs(o, metas, device) for o in out])
    if out is None or isinstance(out, bool | int | float | str | torch.dtype | torch.device):
        return out
    raise Unrecordable(f"a result of {type(out)}")


# -- functions that are not recorded as operators --------------------------------------------------------------------------------------
def _passed(recorder: Recorder, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(*args, **kwargs)


def _refused(recorder: Recorder, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    raise Unrecordable(str(func))


def _valued(recorder: Recorder, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return recorder.by_value(func, args, kwargs)


def _array(recorder: Recorder, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A tensor from outside as a read-only numpy array: the record reads the tensor's values only at its end."""
    if type(args[0]) is Recorded or recorder.writes:
        raise Unrecordable(str(func))
    found = func(*args, **kwargs).view()
    found.flags.writeable = False
    return found


def _iterated(recorder: Recorder, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    t = args[0]
    if t.dim() == 0:
        raise TypeError("iteration over a 0-d tensor")
    return iter(recorder.__torch_function__(torch.Tensor.unbind, (), (t, 0)))


def _formatted(recorder: Recorder, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    t, spec = args
    if t.dim() or (type(t) is Recorded and recorder.mapped()):
        return repr(t) if not spec else format(repr(t), spec)
    return format(recorder.now([t])[0].item(), spec)


def _scalar(recorder: Recorder, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """torch.tensor and torch.as_tensor: a float becomes an input of the program, other data a tensor from outside."""
    data = args[0] if args else kwargs.get("data")
    if type(data) is float and not args[1:] and not kwargs:
        return recorder.__torch_function__(torch.full, (), ((), data), {"dtype": torch.get_default_dtype()})
    if isinstance(data, torch.Tensor) and func is torch.as_tensor:
        return data if len(args) == 1 and not kwargs else recorder.__torch_function__(torch.Tensor.to, (), (data, *args[1:]), kwargs)
    found: list[Any] = []
    _collect(data, found)
    if found:
        raise Unrecordable("torch.tensor of tensors")
    return func(*args, **kwargs)


# -- functions whose results' shapes depend on values, outside of vmap: the values are computed first ----------------------------------
def _indices_of(recorder: Recorder, index: Any) -> tuple[Any, ...]:
    """An index in which each mask is replaced by the places where it is True."""
    if type(index) is not tuple and type(index) is not list:
        index = (index,)
    masks = [x for x in index if isinstance(x, torch.Tensor) and x.dtype in (torch.bool, torch.uint8)]
    if not masks:
        raise Unrecordable("an index")
    places = dict(zip(map(id, masks), recorder.now(masks), strict=True))
    found: list[Any] = []
    for x in index:
        found += places[id(x)].nonzero(as_tuple=True) if isinstance(x, torch.Tensor) and id(x) in places else [x]
    return tuple(found)


def _indexed(recorder: Recorder, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return recorder.__torch_function__(func, (), (args[0], _indices_of(recorder, args[1]), *args[2:]), kwargs)


def _masked_select(recorder: Recorder, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = dict(zip(("input", "mask"), args, strict=False)) | kwargs
    if set(given) != {"input", "mask"}:
        raise Unrecordable(str(func))
    t, mask = recorder.__torch_function__(torch.broadcast_tensors, (), (given["input"], given["mask"]))
    return recorder.__torch_function__(torch.Tensor.__getitem__, (), (t, _indices_of(recorder, mask)))


def _repeated(recorder: Recorder, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = dict(zip(("input", "repeats", "dim"), args, strict=False)) | kwargs
    t, repeats, dim = given.get("input"), given.get("repeats"), given.get("dim")
    if not isinstance(repeats, torch.Tensor) or not isinstance(t, torch.Tensor) or repeats.dim() != 1 or "output_size" in given:
        raise Unrecordable(str(func))
    if dim is None:
        t, dim = recorder.__torch_function__(torch.flatten, (), (t,)), 0
    (times,) = recorder.now([repeats])
    places = torch.repeat_interleave(torch.arange(t.shape[dim]), times if len(times) == t.shape[dim] else times.expand(t.shape[dim]))
    return recorder.__torch_function__(torch.index_select, (), (t, dim, places))


def _counted(recorder: Recorder, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function on its operands' values; its result has no derivative and is a tensor from outside."""
    tensors: list[Any] = []
    _collect((args, kwargs), tensors)
    if "out" in kwargs or (func not in _PLACES and any(recorder.aval(t).requires_grad for t in tensors)):
        raise Unrecordable(str(func))
    values = dict(zip(map(id, tensors), recorder.now(tensors), strict=True))
    return func(*_replaced(args, values), **_replaced(kwargs, values))


def _detached(recorder: Recorder, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return recorder.__torch_function__(torch.Tensor.detach, (), args)


def _names(owner: Any, names: str) -> list[Any]:
    return [f for n in names.split() if (f := getattr(owner, n, None)) is not None]


_TO_PYTHON = frozenset([
    *_names(torch.Tensor, "item __bool__ __float__ __int__ __index__ __complex__ tolist __contains__ equal allclose"),
    *_names(torch, "equal allclose is_nonzero"),
])
_PASSED = [
    *_names(torch.Tensor, "size dim stride numel storage_offset is_contiguous is_floating_point is_complex element_size nelement "
            "ndimension get_device is_signed __len__ __hash__ has_names is_inference is_same_size is_conj is_neg "
            "__repr__ is_shared is_pinned"),
    *_names(torch, "is_floating_point is_complex numel is_tensor is_same_size promote_types result_type is_conj is_neg is_inference "
            "broadcast_shapes can_cast get_default_dtype"),
    *[getattr(torch.Tensor, n).__get__ for n in (
        "shape", "dtype", "device", "ndim", "requires_grad", "is_leaf", "layout", "is_cuda", "is_cpu", "is_sparse", "is_meta",
        "is_quantized",
        "is_nested", "is_mkldnn", "itemsize",
        "nbytes", "names", "is_xpu", "is_mps", "_base", "grad", "_version", "output_nr",
        "is_sparse_csr", "is_vulkan", "is_mtia", "is_xla", "is_ipu", "is_maia", "name", "retains_grad", "_backward_hooks",
    ) if hasattr(torch.Tensor, n)],
    torch._C._set_grad_enabled, torch.manual_seed,
]
_REFUSED = [
    *_names(torch.Tensor, "backward register_hook register_post_accumulate_grad_hook retain_grad data_ptr untyped_storage storage set_ "
            "resize_ resize_as_ share_memory_ __deepcopy__ __reduce_ex__ __dlpack__ __setstate__ as_strided as_strided_ "
            "to_sparse to_mkldnn unsafe_chunk apply_ map_ new new_tensor requires_grad_ detach_ is_set_to"),
    torch.Tensor.grad_fn.__get__,  # type: ignore[attr-defined]
    *_names(torch, "set_default_device as_strided frombuffer from_numpy"),
    torch.autograd.backward, torch.autograd.grad,
    *[getattr(torch.Tensor, n).__set__ for n in ("data", "grad", "requires_grad", "names") if hasattr(torch.Tensor, n)],
]
RULES: dict[Any, Any] = {
    **dict.fromkeys(_PASSED, _passed), **dict.fromkeys(_REFUSED, _refused), **dict.fromkeys(_TO_PYTHON, _valued),
    torch.Tensor.numpy: _array, torch.Tensor.__array__: _array,
    torch.Tensor.__iter__: _iterated, torch.tensor: _scalar, torch.Tensor.data.__get__: _detached,  # type: ignore[attr-defined]
    torch.as_tensor: _scalar, torch.Tensor.__format__: _formatted,
}

#: Functions whose Python numbers are inputs of the program: their result depends smoothly on the numbers, its shape not at all.
WITH_NUMBERS = frozenset([
    *_names(torch.Tensor, "add add_ sub sub_ mul mul_ div div_ true_divide __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ "
            "__rtruediv__ __iadd__ __isub__ __imul__ __itruediv__ __rdiv__ addcmul addcmul_ addcdiv addcdiv_ lerp lerp_ clamp clamp_ "
            "clamp_min clamp_max fill_ masked_fill masked_fill_ subtract multiply divide "
            "__lt__ __le__ __gt__ __ge__ __eq__ __ne__ lt le gt "
            "ge eq ne"),
    *_names(torch, "add sub rsub mul div true_divide subtract multiply divide addcmul addcdiv lerp clamp clamp_min clamp_max masked_fill "
            "lt le gt ge eq ne where"),
    torch.full,
])
WITH_INTS = WITH_NUMBERS - {torch.where, torch.full}
FACTORIES = frozenset(_names(torch, "zeros ones empty full rand randn randint randperm arange linspace logspace eye empty_strided "
                              "tril_indices "
                              "triu_indices bernoulli normal hann_window hamming_window bartlett_window blackman_window kaiser_window"))
#: Functions whose shapes PyTorch's own functions for shapes say wrongly: those of 2.11.
_SHAPES_BY_TRACING = frozenset([torch.segment_reduce])
_PLACES = frozenset([*_names(torch.Tensor, "nonzero argwhere"), *_names(torch, "nonzero argwhere where")])
_BY_VALUE = {
    **dict.fromkeys([f for owner in (torch.Tensor, torch) for f in _names(owner, "unique unique_consecutive bincount")], _counted),
    **dict.fromkeys(_PLACES, _counted),
    **dict.fromkeys(_names(torch.Tensor, "__getitem__ __setitem__"), _indexed),
    **dict.fromkeys([torch.Tensor.masked_select, torch.masked_select], _masked_select),
    **dict.fromkeys([torch.Tensor.repeat_interleave, torch.repeat_interleave], _repeated),
}
_ATOMS = frozenset({
    bool, bytes, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, type(Ellipsis), type(NotImplemented), complex,
})
__all__ = [
    "PARTS", "Again", "Begin", "End", "Input", "Level", "Number", "Op", "Out", "Pull", "Recorder", "Ref", "filled", "interned",
    "values_of",
]
