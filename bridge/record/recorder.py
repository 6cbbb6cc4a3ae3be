"""Records a function: its operators with static arguments and operands, and the transforms inside
it, in the order of the program.

Every value gets the next number. An entry of the record is (what, numbers of the operands).
Operators with the same static arguments and shapes share one object ``what``, so that equal records
are found by comparing objects.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from bridge import private
from bridge.boundary.results import inexact_dtype
from bridge.cache_keys import identical
from bridge.convert.arguments import mapped, tensors_in, with_values
from bridge.convert.sparse import SparseOperand
from bridge.errors import NeedsTorch, escaped, in_words_of_vmap
from bridge.intercepted.library_operators import LibraryOperators, called_in_torch
from bridge.operators.sparse import FUNCTIONS as OF_SPARSE
from bridge.process import having, process
from bridge.programs.guards import autocast
from bridge.record.entries import Begin, End, Input, Left, Op, Out, Pull, Ref, Value, interned
from bridge.record.in_torch import InTorch
from bridge.record.inference import WITH_NUMBERS, ByValue, entry
from bridge.record.parts import Known, part_of
from bridge.record.rules import BY_VALUE, OPERATOR, RULES, TO_PYTHON
from bridge.record.tensor import Aval, Recorded, aval_of
from bridge.trace.levels import Unrecordable, state
from bridge.trace.random_keys import SeededInside, Watch
from bridge.trace.torch_random import by_torch
from bridge.trace.tracing import in_level, on_meta, settled
from bridge.transform_kinds import DIFFERENTIATING, FUNCTION, Kind


@dataclasses.dataclass(slots=True, eq=False)
class Level:
    """A transform that is being recorded."""

    kind: Kind
    owner: Recorder
    parent: Level | None
    before: tuple[int, int]  # how many entries and numbers the record had when it began
    arguments: range  # the numbers of its function's arguments
    depth: int  # how many vmaps are entered in its function
    open: bool = True
    # after it has ended, whether its results are computed from derivatives and require grad outside
    # of it
    goes_back: bool = False


class Ended(Exception):
    """Raised at an operand that was made inside a transform that has ended."""

    def __init__(self, tensor: Recorded) -> None:
        self.tensor = tensor


_Result = TypeVar("_Result")
_BY_VALUE = object()  # in the place of the entry of an operator that needs its operands' values
# how often the whole record so far is run when Python asks for values; later only what has been
# added since
_WHOLE = 2
#: A function that shows more tensors in this way runs in PyTorch from its next call on, which
#: computes each of them once.
SHOWN = 8
# how many entries run for that in one call, a matter of seconds; then the function starts again
_REPLAYED = 50_000
_INDEXED = (torch.Tensor.__getitem__, torch.Tensor.__setitem__)
# it asks for these at each operator
_grad_mode, _default_dtype = torch.is_grad_enabled, torch.get_default_dtype
_autocast, _forward_mode, _saved_hooks = (
    private.any_autocast,
    private.forward_mode_enabled,
    private.saved_tensor_hooks,
)
_innermost_of_torch = private.innermost_level
_dispatch_modes, _function_modes = private.count_of_dispatch_modes, private.function_modes
_enter_mode, _leave_mode = private.enter_function_mode, private.leave_function_mode
_make, _forbid_reading = private.make_wrapper, private.forbid_reading
_OF_PYTORCH = frozenset({torch.Tensor, torch.nn.Parameter})
#: Types of arguments in which there is no tensor or device, which might be meta.
_NOT_META = frozenset({Recorded, int, float, bool, type(None)})


def _ambient() -> tuple[torch.dtype, Any, bool, bool, int, int]:
    """State that changes what operators do; except for autocast, it must stay the same for the
    whole record.

    The default dtype, the state of autocast if it is on, whether forward-mode AD is on, whether
    saved_tensors_hooks are entered, and the numbers of torch dispatch modes and of function modes
    below the recorder, where torch.set_default_device puts one.
    """
    cast = autocast() if _autocast() else None
    return (
        _default_dtype(),
        cast,
        _forward_mode(),
        _saved_hooks() is not None,
        _dispatch_modes(),
        _function_modes(),
    )


class Recorder(TorchFunctionMode):
    """The record of one call."""

    def __init__(
        self,
        execute: Callable[[Recorder, list[int], bool], Sequence[torch.Tensor]],
        default_device: torch.device | None = None,
        above: Sequence[TorchFunctionMode] = (),
    ) -> None:
        super().__init__()
        self.execute, self.default_device = execute, default_device
        self.trace: list[tuple[Any, tuple[int, ...]]] = []
        self.inputs: list[torch.Tensor] = []
        self.by_id: dict[int, int] = {}
        # all that it has made, which the function may keep elsewhere
        self.tensors: list[Recorded] = []
        self.numbers: list[Any] = []
        self.count = 0
        self.level: Level | None = None
        self.resumable = False  # whether PyTorch may go on where the record ends
        # whether an operator runs on meta tensors, which tells the shapes of its results
        self.inferring = False
        # what PyTorch runs since it went on, or in the place of a program
        self.in_torch: InTorch | None = None
        self.refused: Unrecordable | None = None  # why it was not recorded to its end
        self.within = False  # whether a rule writes down a function
        self.written: set[int] = set()
        self.with_grad: set[int] = set()  # the numbers of the values that require grad
        # whether any tensor was written to; it may share memory with a tensor from outside
        self.writes = False
        # whether it will be repeated: then it may neither draw random numbers nor write
        self.lasting = False
        # whether its inputs are copies of another record's: then it may not write to them
        self.copied = False
        self.asked = 0  # how often Python has asked for values
        # how many tensors it has shown in the transforms around them, and how many entries ran for
        # that
        self.shows = self.replayed = 0
        self.broken: str | None = None  # the reason if the record is incomplete
        # the user's modes that are entered above this one whenever it is; empty while they are
        self.above = list(above)
        self.ambient = _ambient()
        self.forward_mode, self.modes = self.ambient[2], self.ambient[4]
        self.start: torch.Tensor | None = None  # the state of torch's generator before the call,
        self.after: torch.Tensor | None = None  # and after it, if the function has set it back
        # watches torch's generator; None until a random operator is recorded
        self.watch: Watch | None = None

    @functools.cached_property
    def known(self) -> Known:
        """The values that Python has asked for."""
        return Known()

    # -- modes -------------------------------------------------------------------------------------
    def watched(self, call: Callable[[], Any]) -> Any:
        """What call returns; meanwhile torch functions are written down. The user's modes lie above
        this one, and see each function before it.
        """
        above, self.above = self.above, []
        if self.in_torch is None:
            self._enter(above)
            try:
                return call()
            finally:
                self._leave()
        wanted = process.library_operators and not any(
            type(mode) is LibraryOperators for mode in above
        )
        modes = [LibraryOperators(), *above] if wanted else above
        private.enter_function_modes(modes)
        try:
            return call()
        finally:
            self.above = private.leave_function_modes(len(modes))[wanted:]

    @contextlib.contextmanager
    def unwatched(self) -> Iterator[bool]:
        """While entered, torch functions are not written down and no mode of the user's sees them;
        gives whether they were written down.
        """
        entered = self._leave()
        try:
            yield entered
        finally:
            if entered:
                above, self.above = self.above, []
                self._enter(above)

    def _enter(self, above: Sequence[TorchFunctionMode]) -> None:
        """Enter this mode, and above it these."""
        _enter_mode(self)
        for mode in above:
            _enter_mode(mode)

    def _leave(self) -> bool:
        """Leave this mode and the user's above it, if it is entered; tells whether it was."""
        above: list[TorchFunctionMode] = []
        for _ in range(_function_modes()):
            mode = _leave_mode()
            if mode is self:
                self.above = above[::-1]
                return True
            above.append(mode)
        private.enter_function_modes(above[::-1])
        return False

    # -- operands ----------------------------------------------------------------------------------
    def ref(self, t: torch.Tensor) -> int:
        if type(t) is Recorded:
            if not t.level.open or t.level.owner is not self:
                self.outside(t)
            return t.ref
        found = self.by_id.get(id(t))
        if found is None:
            if type(t) not in _OF_PYTORCH and not (settled((t,)) and type(t) in _OF_PYTORCH):
                raise Unrecordable(str(type(t)))
            if t.layout is not torch.strided:
                raise SparseOperand(t)
            if t.device.type not in ("cpu", "cuda") or t.is_quantized or t.is_nested:
                raise Unrecordable("an input of another kind")
            found = self.by_id[id(t)] = self.count
            self.count += 1
            self.inputs.append(t)
            self.trace.append((interned(Input, aval_of(t)), ()))
            if t.requires_grad:
                self.with_grad.add(found)
        return found

    def outside(self, t: Recorded) -> None:
        """Make a tensor of a transform that has ended one of the transform in progress, with the
        value that it has there; or raise.
        """
        before, depth = (t.ref, t.aval, t.level, t.before), self.mapped()
        ended = [level for level in around(t.level) if not level.open]
        if not self.leaves(t):
            raise escaped(t.level)
        grad = t.aval.requires_grad and all(
            level.goes_back or level.kind not in DIFFERENTIATING for level in ended
        )
        self.trace.append((interned(Left), (t.ref,)))
        t.ref, t.aval, t.level, t.before = (
            self.count,
            t.aval.outside(depth).with_grad(grad),
            self.level,
            before,
        )
        if grad:
            self.with_grad.add(self.count)
        self.count += 1

    def leaves(self, t: Recorded) -> bool:
        """Whether a tensor has a value outside of the transforms around it that have ended: no vmap
        among them maps it.
        """
        ended = [level for level in around(t.level) if not level.open]
        parent = ended[-1].parent
        depth = 0 if parent is None else parent.depth
        return (
            t.level.owner is self
            and t.ref >= 0
            and t.aval.outside(depth) is t.aval
            and all(
                x.kind.leaves or (x.kind is FUNCTION and not self._changes_since(x)) for x in ended
            )
        )

    def _changes_since(self, level: Level) -> bool:
        """Whether the record has a write, or draws random numbers, since this transform began."""
        return any(
            type(what) is Op and bool(what.changed or what.draws)
            for what, _ in self.trace[level.before[0] :]
        )

    def made(self, what: Aval) -> Recorded:
        t: Recorded = _make(
            Recorded,
            what.shape,
            what.strides,
            what.offset,
            dtype=what.dtype,
            device=what.device,
            requires_grad=what.requires_grad,
        )
        _forbid_reading(t)
        t.ref, t.aval, t.level = self.count, what, self.level
        self.tensors.append(t)
        if what.requires_grad:
            self.with_grad.add(self.count)
        self.count += 1
        return t

    # -- operators ---------------------------------------------------------------------------------
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if self.in_torch is not None:
            return called_in_torch(func, args, kwargs or {})
        entries = len(self.trace)
        try:
            if _innermost_of_torch() is not None:
                raise Unrecordable("a transform of torch.func's")
            rule = RULES.get(func)
            if rule is not None:
                found = rule(self, func, args, kwargs or {})
                if found is not OPERATOR:
                    return found
            if (
                self.default_device is not None
                and private.takes_default_device(func)
                and (kwargs or {}).get("device") is None
            ):
                kwargs = {**(kwargs or {}), "device": self.default_device}
            if (kwargs or not _NOT_META.issuperset(map(type, args[:2]))) and on_meta(
                args[:2], kwargs or {}
            ):
                return func(
                    *mapped(lambda x: x.aval.meta() if type(x) is Recorded else x, args),
                    **(kwargs or {}),
                )
            refs: list[int] = []
            key: list[Any] = [func]
            numbers = len(self.numbers)
            try:
                for x in args:
                    if type(x) is Recorded:
                        if not x.level.open:
                            raise Ended(x)
                        refs.append(x.ref)
                        key.append(x.aval)
                    else:
                        key.append(self._static(func, x, refs))
                if kwargs:
                    for name, x in kwargs.items():
                        key.append(name)
                        key.append(self._static(func, x, refs))
            except Ended as ended:
                # what it is computed from comes before this operator, with its numbers
                del self.numbers[numbers:]
                self.outside(ended.tensor)
                return self.__torch_function__(func, types, args, kwargs)
            except SparseOperand:
                del self.numbers[numbers:]
                return self._of_sparse(func, args, kwargs or {})
            except TypeError:  # an argument is not hashable
                del self.numbers[numbers:]
                return self._with_indices(func, args)
            ambient = _ambient()
            if ambient != self.ambient and (ambient[0], ambient[2:]) != (
                self.ambient[0],
                self.ambient[2:],
            ):
                raise Unrecordable("a mode that is entered inside")
            key.append(ambient)
            key.append(_grad_mode())
            whole = tuple(key)
            try:
                op = process.recorded.get(whole)
            except TypeError:
                raise Unrecordable("an unhashable argument") from None
            if op is None:
                try:
                    # the operator runs on meta tensors
                    with having(self, resumable=False, inferring=True):
                        op = entry(func, args, kwargs or {}, self.numbers[numbers:], ambient[1])
                except ByValue:
                    op = process.recorded[whole] = _BY_VALUE
                except Exception as error:
                    # PyTorch refuses the operands; the caller may catch that
                    del self.numbers[numbers:]
                    found = (
                        in_words_of_vmap(getattr(func, "__name__", ""), args, error)
                        if self.mapped()
                        else error
                    )
                    if found is error:
                        raise
                    raise found from None
                else:
                    op.alike = process.alike.setdefault(_without_strides(whole), op)
                    process.recorded[whole] = op
            if op is _BY_VALUE:
                del self.numbers[numbers:]
                return self.by_value(func, args, kwargs or {})
            if op.draws:
                self.draw(op.by_value)
            self.trace.append((op, tuple(refs)))
            if op.single is not None:
                return self.made(op.single)
            return self._results(op, args, kwargs or {})
        except Unrecordable as reason:
            if self.within:
                raise
            self._drop(entries)  # a rule may have written some down
            self.go_on(reason)
        return called_in_torch(func, args, kwargs or {})

    def record(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Write down the call of a torch function for a rule, which is refused as a whole if this
        is; gives its result.
        """
        with having(self, within=True):
            return self.__torch_function__(func, (), args, kwargs)

    def go_on(self, reason: Unrecordable) -> None:
        """Go on in PyTorch itself from here, because of this; raises it if that is not possible."""
        # a level of PyTorch's and inference mode must be left in the order in which they were
        # entered
        if (
            not self.resumable
            or private.transformed_by_torch()
            or torch.is_inference_mode_enabled()
        ):
            raise reason
        self.resumable, self.refused = False, reason
        after = self._set_back()
        self.draw_again()
        in_torch, modes = (
            InTorch(self.numbers),
            private.leave_function_modes(private.function_modes() - self.ambient[-1]),
        )
        try:
            with (
                having(state, recorder=None),
                _default_dtype_of(self.ambient[0]),
                private.set_forward_mode_enabled(self.forward_mode),
            ):
                in_torch.whole(self.trace, self.inputs, self.tensors)
        except Unrecordable:
            raise reason from None
        finally:
            private.enter_function_modes(modes)
        in_torch.env.clear()  # the function holds what it needs
        self.in_torch, self.watch, state.recorder = in_torch, None, None
        self.tensors.clear()
        reason.__traceback__ = reason.__context__ = None  # its frames hold the user's tensors
        if after is not None:
            torch.default_generator.set_state(after)

    def _set_back(self) -> torch.Tensor | None:
        """The state of torch's generator if the function has set it back to the one before the
        call; raises SeededInside if to another.
        """
        try:
            if self.watch is not None:
                self.watch.check()
            return None
        except SeededInside:
            now = torch.default_generator.get_state()
            # maybe one that it has asked for while it was recorded: none of PyTorch's
            if not torch.equal(now, self.start):
                raise
            return now

    def call(self, func: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Write down the call of a function that PyTorch does not hand to modes."""
        with self.unwatched():
            return self.__torch_function__(func, (), args)

    def _with_indices(self, func: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Record an indexing by numpy arrays, with tensors in their place."""
        arrays: list[Any] = []
        mapped(lambda x: arrays.append(x) if isinstance(x, np.ndarray) else None, args[1:2])
        if func not in _INDEXED or not arrays or any(x.dtype.kind not in "biu" for x in arrays):
            raise Unrecordable("an unhashable argument") from None
        index = mapped(lambda x: torch.tensor(x) if isinstance(x, np.ndarray) else x, args[1])
        return self.record(func, (args[0], index, *args[2:]))

    def _of_sparse(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Record a product with a sparse tensor; what else is made of sparse tensors alone is
        computed now: a tensor from outside.
        """
        rule = OF_SPARSE.get(func)
        if rule is not None:
            try:
                with self:
                    return rule(*args, **kwargs)
            except TypeError as error:
                # a SparseOperand, or arguments by names; a trace says it in words for the user
                raise Unrecordable(str(error)) from None
        name = getattr(func, "__name__", "_")
        if (
            any(type(t) is Recorded for t in tensors_in((args, kwargs)))
            or name.endswith("_")
            or "out" in kwargs
        ):
            raise Unrecordable(f"{name} of a sparse tensor")
        return func(*args, **kwargs)

    def draw(self, by_value: bool) -> None:
        """Note that a random operator was recorded. This advances the generator, so that setting
        its state back is noticed.
        """
        if by_value and by_torch():
            raise Unrecordable("random numbers that depend on values")
        self.watch = self.watch or Watch([])
        self.watch.draw(None)

    def draw_again(self) -> None:
        """Give torch's generator the state back from which the record has drawn, before its numbers
        are drawn again.
        """
        if self.watch is not None:
            self.watch.restore()

    def drawn(self, record: Callable[[Recorder], _Result]) -> _Result:
        """What record, which records the function, returns. Torch's generator has the state then
        that it had before the first draw.
        """
        self.start = torch.default_generator.get_state()
        try:
            found = record(self)
            self.after = self._set_back()
            return found
        except (SeededInside, Unrecordable, NeedsTorch) as reason:
            # the function runs again from the start
            self.watch = None
            torch.default_generator.set_state(self.start)
            raise (
                Unrecordable(str(reason)) if isinstance(reason, SeededInside) else reason
            ) from None
        finally:
            self.draw_again()

    def noted(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], outs: Any
    ) -> Any:
        """Write down the call of a torch function whose results are known; outs: an ``Out`` for
        each new tensor among them.
        """
        tensors = tensors_in((args, kwargs))
        key = (
            func,
            mapped(lambda x: aval_of(x) if isinstance(x, torch.Tensor) else x, args),
            tuple(kwargs.items()),
            mapped(lambda x: x.aval if type(x) is Out else x, outs),
            _ambient(),
            _grad_mode(),
        )
        op = process.recorded.get(key)
        if op is None:
            places = itertools.count()
            args, kwargs = mapped(
                lambda x: Ref(next(places)) if isinstance(x, torch.Tensor) else x, (args, kwargs)
            )
            op = process.recorded[key] = Op(
                func, args, kwargs, _grad_mode(), outs, (), 0, False, False, views=False
            )
        self.trace.append((op, tuple([self.ref(t) for t in tensors])))
        return self._built(outs, tensors)

    def reached(self, outs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> list[bool]:
        """Whether outputs depend on each of these inputs, along values that require grad."""
        needed, wanted = {self.ref(t) for t in outs}, [self.ref(t) for t in inputs]
        at = self.count
        for what, operands in reversed(self.trace):
            at -= what.made
            written = {operands[k] for k, _ in what.changed} if type(what) is Op else ()
            if not needed.isdisjoint(range(at, at + what.made)) or not needed.isdisjoint(written):
                needed.update(r for r in operands if r in self.with_grad)
                if type(what) is Pull:
                    needed.add(what.node)
        return [r in needed for r in wanted]

    def _results(self, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = tensors_in((args, kwargs))
        self.writes |= bool(op.changed)
        for k, what in op.changed:
            t = tensors[k]
            if type(t) is Recorded:
                if what.requires_grad and not t.aval.requires_grad:
                    t.requires_grad_()
                    self.with_grad.add(t.ref)
                t.aval = what
                self.written.add(t.ref)
            else:
                self.written.add(self.by_id[id(t)])
        return self._built(op.outs, tensors)

    def _built(self, outs: Any, tensors: list[Any]) -> Any:
        kind = type(outs)
        if kind is Out:
            return self.made(outs.aval)
        if kind is Ref:
            return tensors[outs.k]
        return (
            kind([self._built(o, tensors) for o in outs])
            if isinstance(outs, tuple | list)
            else outs
        )

    def _static(self, func: Callable[..., Any], x: Any, refs: list[int]) -> Any:
        kind = type(x)
        if kind is int or kind is float:
            if func in WITH_NUMBERS[kind]:
                self.numbers.append(x)
                return kind
            return x if kind is int else identical(x)
        if isinstance(x, torch.Tensor):
            if type(x) is Recorded and not x.level.open:
                raise Ended(x)
            refs.append(self.ref(x))
            return x.aval if isinstance(x, Recorded) else aval_of(x)
        if kind is list or isinstance(x, tuple):
            return (kind, *[self._static(func, v, refs) for v in x])
        if kind is slice:
            return (
                slice,
                self._static(func, x.start, refs),
                self._static(func, x.stop, refs),
                self._static(func, x.step, refs),
            )
        if kind is dict:
            return (dict, *[(k, self._static(func, v, refs)) for k, v in x.items()])
        if x is None or kind is str or kind in _ATOMS:
            return (kind, x)
        if callable(x) or isinstance(x, torch.Generator):
            raise Unrecordable(str(kind))
        return identical(x)

    # -- values ------------------------------------------------------------------------------------
    def mapped(self) -> int:
        """How many vmaps are entered."""
        return 0 if self.level is None else self.level.depth

    def by_value(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call a function that needs its operands' values: they are computed first."""
        tensors = tensors_in((args, kwargs))
        if func in TO_PYTHON and not any(map(_differs, tensors)):
            args, kwargs = with_values((args, kwargs), self.now(tensors))
            return func(*args, **kwargs)
        rule = BY_VALUE.get(func)
        if rule is None:
            raise Unrecordable(str(func))
        return rule(self, func, args, kwargs)

    def now(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The values of these tensors at this point of the program."""
        if all(type(t) is not Recorded for t in tensors) and not (
            self.writes and self.known.writes_outside(self)
        ):
            return list(tensors)
        refs = [self.ref(t) for t in tensors]
        if self.mapped():
            part = None if self.writes or any(map(_differs, tensors)) else part_of(self, refs)
            if part is None:
                raise Unrecordable("values inside vmap")
            return list(self.execute(*part, False))
        self.asked += 1
        return (
            self.known.now(self, refs)
            if self.asked > _WHOLE
            else list(self.computed(self, refs)[0])
        )

    def computed(
        self, part: Recorder, refs: list[int], start: torch.Tensor | None = None
    ) -> tuple[Sequence[torch.Tensor], torch.Tensor | None]:
        """The values with these numbers in this record or a part of it, and the state in which that
        leaves torch's generator.

        Args:
            start: the state of torch's generator at the part's beginning; None: that at the
                record's.
        """
        if self.watch is None:
            return self.execute(part, refs, False), None
        with self.watch.again(start):
            return self.execute(part, refs, False), torch.default_generator.get_state()

    def shown(self, t: torch.Tensor) -> str:
        """The text of a tensor, with its values and the transforms around it."""
        modes = [
            private.leave_function_mode()
            for _ in range(private.function_modes() - self.ambient[-1])
        ]
        try:
            kinds = [level.kind for level in around(t.level if type(t) is Recorded else None)]
            if self.writes or self.mapped() or not all(kind.in_texts for kind in kinds):
                return self._shown_in_transforms(t)
            text = repr(self.now([t])[0])
            for number in range(1, len(kinds) + 1):
                text = in_level(text, number)
            return text
        finally:
            for mode in reversed(modes):
                private.enter_function_mode(mode)

    def _shown_in_transforms(self, t: torch.Tensor) -> str:
        """That text, from a run of what there is, by PyTorch and inside of the transforms that are
        entered.
        """
        self.shows += 1
        self.replayed += len(self.trace)
        if self.replayed > _REPLAYED:
            raise Unrecordable("many tensors that are shown")
        ref = self.ref(t)
        again, given = InTorch(self.numbers), [x.detach() for x in self.inputs]
        try:
            with (
                having(state, recorder=None),
                self.watch.again() if self.watch else contextlib.nullcontext(),
            ):
                again.whole(self.trace, copy.deepcopy(given) if self.writes else given)
                return repr(again.env[ref])
        finally:
            while again.entered:
                again.leave()

    # -- transforms --------------------------------------------------------------------------------
    def begin(
        self, kind: Kind, params: Any, operands: Sequence[torch.Tensor], avals: Sequence[Aval]
    ) -> list[Any]:
        """Enter a transform with these operands; returns the arguments of its function."""
        if self.in_torch is not None:
            return self.in_torch.begin(Begin(kind, params, len(avals), _grad_mode()), operands)
        refs = [self.ref(t) for t in operands]
        before = len(self.trace), len(self.numbers)
        try:
            what = interned(Begin, kind, params, len(avals), _grad_mode())
        except TypeError:
            raise Unrecordable("an unhashable argument") from None
        arguments = range(self.count, self.count + len(avals))
        self.level = Level(kind, self, self.level, before, arguments, self.mapped() + (kind.maps))
        return self._noted(what, refs, avals)

    def end(self, params: Any, results: Sequence[torch.Tensor], avals: Sequence[Aval]) -> list[Any]:
        """Leave the innermost transform; returns its results."""
        if self.in_torch is None:
            try:
                refs = [self.ref(t) for t in results]
            except Unrecordable as reason:
                self.go_on(reason)
        if self.in_torch is not None:
            return self.in_torch.end(params, results)
        level = self.level
        level.goes_back = (
            level.kind in DIFFERENTIATING and level.parent is not None and self._goes_back(level)
        )
        if level.goes_back:
            avals = [a.with_grad(inexact_dtype(a.dtype)) for a in avals]
        level.open, self.level = False, level.parent
        return self._noted(interned(End, params, len(avals)), refs, avals)

    def _goes_back(self, level: Level) -> bool:
        """Whether a transform that ends takes what requires grad, outside of it, as an operand or
        from around its function.
        """
        (begin, operands), *entries = self.trace[level.before[0] :]
        if not begin.grad or not self.with_grad:
            return False
        around = {r for r in self.with_grad if r < level.arguments.start}
        return not around.isdisjoint(
            itertools.chain(operands, *[refs for _, refs in entries])
        ) or True in [type(what) is Input and what.aval.requires_grad for what, _ in entries]

    def pull(self, node: int, operands: Sequence[torch.Tensor], avals: Sequence[Aval]) -> list[Any]:
        """Call the function that vjp or linearize has returned (see ``Pull``);
        returns its results.
        """
        refs = [self.ref(t) for t in operands]
        if _grad_mode() and not self.with_grad.isdisjoint((node, *refs)):
            avals = [a.with_grad(inexact_dtype(a.dtype)) for a in avals]
        return self._noted(interned(Pull, node, len(avals)), refs, avals)

    def _noted(self, what: Any, refs: Sequence[int], avals: Sequence[Aval]) -> list[Any]:
        self.trace.append((what, tuple(refs)))
        if self.level is not None:
            return [self.made(a) for a in avals]
        first, self.count = self.count, self.count + len(avals)
        self.with_grad.update([first + k for k, a in enumerate(avals) if a.requires_grad])
        return [Value(number) for number in range(first, self.count)]

    def repeat(self, other: Recorder) -> list[int]:
        """Write down the entries of another record again; returns the numbers here of its values,
        in the order of their numbers there.
        """
        found: list[int] = []
        inputs = iter(other.inputs)
        for what, refs in other.trace:
            if type(what) is Input:
                t = next(inputs)  # the other record may be repeated again: it keeps its own
                found.append(self.ref(t.clone() if other.writes and not t.requires_grad else t))
                continue
            if type(what) is Pull:
                what = interned(Pull, found[what.node], what.made)
            self.trace.append((what, tuple([found[r] for r in refs])))
            found += range(self.count, self.count + what.made)
            self.count += what.made
        if not self.with_grad.isdisjoint(found):
            self.with_grad.update(found)
        self.numbers += other.numbers
        return found

    def alike(self) -> Recorder:
        """A record with the same entries and with zeros as inputs, so that it keeps none of this
        one's alive.
        """
        other = Recorder(self.execute)
        other.trace, other.numbers, other.count, other.lasting = (
            list(self.trace),
            list(self.numbers),
            self.count,
            self.lasting,
        )
        zeros = [
            torch.empty_strided(t.shape, t.stride(), dtype=t.dtype).zero_() for t in self.inputs
        ]
        other.inputs = [
            zero.requires_grad_(t.requires_grad) for zero, t in zip(zeros, self.inputs, strict=True)
        ]
        return other

    def leave(self) -> None:
        """Remove the innermost transform, whose function has raised, from the record."""
        if self.in_torch is None and self._changes_since(self.level):
            self.go_on(
                Unrecordable("a write, or random numbers, in a transform whose function raises")
            )
        if self.in_torch is not None:
            return self.in_torch.leave()
        entries, numbers = self.level.before
        self.level.open, self.level = False, self.level.parent
        del self.numbers[numbers:]
        self._drop(entries)

    def _drop(self, entries: int) -> None:
        """Forget what has been written down from this entry on."""
        if len(self.trace) == entries:
            return
        self.count = sum(what.made for what, _ in self.trace[:entries])
        del (
            self.inputs[sum(type(what) is Input for what, _ in self.trace[:entries]) :],
            self.trace[entries:],
        )
        self.by_id = {
            tensor: number for tensor, number in self.by_id.items() if number < self.count
        }
        self.with_grad = {number for number in self.with_grad if number < self.count}
        for t in self.tensors:
            while t.ref >= self.count:
                t.ref, t.aval, t.level, t.before = t.before or (-1, t.aval, t.level, None)
        self.tensors = [t for t in self.tensors if t.ref >= 0]
        self.known = Known()


def around(level: Level | None) -> Iterator[Level]:
    """A transform and those around it."""
    while level is not None:
        yield level
        level = level.parent


@contextlib.contextmanager
def _default_dtype_of(dtype: torch.dtype) -> Iterator[None]:
    """While entered, this is the default dtype: the user's function may have changed it since the
    record began.
    """
    now = _default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(now)


def _differs(t: torch.Tensor) -> bool:
    """Whether a tensor has another value in each lane of a vmap."""
    return type(t) is Recorded and bool(t.aval.lanes)


def _without_strides(key: Any) -> Any:
    """The key of an operator with contiguous operands in the place of its own."""
    if type(key) is tuple:
        return tuple(map(_without_strides, key))
    return key.like(key.shape, key.requires_grad) if type(key) is Aval else key


_ATOMS = frozenset(
    {
        bool,
        bytes,
        type(None),
        torch.dtype,
        torch.device,
        torch.layout,
        torch.memory_format,
        type(Ellipsis),
        type(NotImplemented),
        complex,
    }
)
