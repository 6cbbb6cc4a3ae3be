"""Equal blocks of a module, such as the layers of a transformer, traced and compiled once: a loop
over their stacked parameters.

The module's own forward runs as it is. What its calls of the blocks hand on from one to the next is
learned from the first two of them; the second call runs all further blocks as one ``lax.scan``, and
each later call only checks that it is the one that the loop has made. bridge/block_programs.py
compares blocks and traces one of them.

Under jit this happens by itself where a list has many equal blocks. Where the loop turns out not to
be what the calls do, the trace ends, and the function is traced again with these blocks one by one:
``scan_blocks`` alone, which a user has written, says what differs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from bridge import private
from bridge.block_programs import Differ, Loop, equal, is_constant, parts, unlike
from bridge.boundary.calls import apply
from bridge.boundary.results import put_together
from bridge.convert import trees
from bridge.errors import at_line
from bridge.intercepted.checkpointing import Policy, policy_of, rematerialized
from bridge.intercepted.leaf_gradients import AskedForGradients
from bridge.modules import SWAPPING
from bridge.programs.closure_scan import HOOKS
from bridge.programs.guards import ambient
from bridge.trace.levels import Level, state
from bridge.trace.random_keys import source
from bridge.trace.tracing import Traced, node_of

_FEWEST = 3  # the first block is traced by itself, and a loop takes at least two others
# so many blocks become a loop by themselves: what fewer take to be traced and compiled is small
_DEEP = 8


class OneByOne(BaseException):
    """Ends a trace in which a loop that nobody has asked for is not what the calls of the blocks
    do; ``blocks`` are to run one by one.
    """

    def __init__(self, blocks: Sequence[nn.Module], reason: str) -> None:
        super().__init__(reason)
        self.blocks = blocks


@contextlib.contextmanager
def scan_blocks(module: nn.Module, *names: str, remat: bool | Policy = False) -> Iterator[None]:
    """Compile equal blocks of a module once, as a loop over them, while entered: compile time and
    program size do not grow with depth.

    Under ``torchfunc_jax.jit``, lists of at least eight equal blocks are compiled so by themselves,
    where nothing stands against it.

    It acts in code that is traced as one program: inside of a jitted function
    (``torchfunc_jax.jit``, ``jax.jit``), or around its first call; with grad, vmap, jvp and
    ``functional_call`` inside too. Elsewhere the blocks run as without it. The module's forward is
    not changed: it may loop over the blocks, index them, hand constants to each of them and keep
    what they return.

    The blocks must be of one class and have the same submodules, shapes and dtypes; they are called
    one after the other, and each tensor that one takes is the same for all, or was returned by the
    block before. Blocks may draw random numbers and write to their own buffers. The first block is
    traced by itself, and then all once together, or the others if it is called in another way or
    does more than compute its result. A Python attribute that differs between blocks, such
    as their number, is watched: if it is read, the blocks that differ are traced too, and their
    programs must be the first one's.

    Args:
        module: any nn.Module.
        names: of nn.ModuleLists and nn.Sequentials in the module, "layers" or "encoder.h"; "" is
            the module itself. None: each of them with at least three equal members, the outermost
            if one contains another.
        remat: True: compute each block again in the backward pass (``jax.checkpoint``), which keeps
            only what flows between the blocks; one of ``jax.checkpoint_policies``: keep what it
            says, too.

    Returns:
        a context manager, which is a decorator too.

    Raises:
        RuntimeError: the blocks differ, or their calls do; the message names the block and the
            difference.
        ValueError: a name is of no such list, or no name is given and there is none.
        TypeError: remat is no bool and no function.

    Source: https://docs.jax.dev/en/latest/_autosummary/jax.lax.scan.html

    Example:
        >>> import torch
        >>> from torchfunc_jax import jit, scan_blocks
        >>> model = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(24)])
        >>> fast = jit(scan_blocks(model)(lambda x: model(x).sum()))
        >>> x = torch.ones(2, 4)
        >>> torch.allclose(fast(x), model(x).sum())
        True
    """
    if not isinstance(remat, bool) and not callable(remat):
        raise TypeError(f"remat: expected a bool or one of jax.checkpoint_policies, got {remat!r}")
    found = [(name, _listed(module, name)) for name in names] or list(_alike(module))
    if not found:
        raise ValueError(
            f"scan_blocks: {type(module).__name__} has no nn.ModuleList or nn.Sequential of at "
            f"least {_FEWEST} equal blocks; name the list whose blocks you hold to be equal, and "
            "the error says what differs"
        )
    with SWAPPING, contextlib.ExitStack() as stack:
        for name, blocks in found:
            stack.enter_context(_Sequence(name, list(blocks), remat).replaced())
        yield


@contextlib.contextmanager
def deep_lists(
    modules: Iterable[nn.Module], apart: Iterable[Sequence[nn.Module]] = ()
) -> Iterator[None]:
    """While entered, long lists of equal blocks among these modules run as loops, the outermost if
    one contains another.

    modules: with their submodules.  apart: the blocks of lists that are left as they are.

    Raises:
        OneByOne: the calls of a list's blocks are not what a loop does.
    """
    left = {id(m) for blocks in apart for block in blocks for m in block.modules()}
    lists = (_equal_blocks(m, _DEEP) for m in modules)
    found = [
        blocks
        for blocks in lists
        if blocks and left.isdisjoint(map(id, blocks)) and not any(map(_has_hooks_inside, blocks))
    ]
    inside = {
        id(m) for blocks in found for block in blocks for m in block.modules() if m is not block
    }
    with contextlib.ExitStack() as stack:
        for blocks in found:
            if inside.isdisjoint(map(id, blocks)):
                stack.enter_context(_Sequence("", blocks, False, asked=False).replaced())
        yield


def _has_hooks_inside(block: nn.Module) -> bool:
    """Whether a submodule has hooks; those of the block itself are called around each call of its
    forward.
    """
    return any(m.__dict__.get(kind) for m in block.modules() if m is not block for kind in HOOKS)


def _listed(module: nn.Module, name: str) -> nn.ModuleList | nn.Sequential:
    known = {
        n: m
        for n, m in module.named_modules(remove_duplicate=False)
        if isinstance(m, nn.ModuleList | nn.Sequential)
    }
    if name not in known:
        raise ValueError(
            "scan_blocks: names: expected the name of an nn.ModuleList or nn.Sequential, got "
            f"{name!r}; {type(module).__name__} has {', '.join(map(repr, known)) or 'none'}"
        )
    if len(set(map(id, known[name]))) < len(known[name]):
        raise ValueError(
            f"scan_blocks: names: one block is at two places of {name!r}; it is compiled once "
            "without a loop"
        )
    return known[name]


def _alike(module: nn.Module, name: str = "") -> Iterator[tuple[str, Any]]:
    """The names and the outermost lists in a module whose members are equal."""
    if blocks := _equal_blocks(module, _FEWEST):
        yield name, blocks
        return
    for key, child in module.named_children():
        yield from _alike(child, f"{name}.{key}" if name else key)


def _equal_blocks(module: nn.Module, fewest: int) -> list[nn.Module]:
    """The members of a list that has at least so many, if they have tensors and are equal apart
    from the values of these and of Python attributes; [] for other modules.
    """
    blocks = list(module) if isinstance(module, nn.ModuleList | nn.Sequential) else []
    if not fewest <= len(blocks) == len(set(map(id, blocks))):
        return []
    first, *others = map(parts, blocks)
    alike = first.slots and all(unlike(first, other) is None for other in others)
    return blocks if alike else []


@dataclasses.dataclass(slots=True)
class _Expected:
    """The next call of a sequence in progress.

    Attributes:
        leaves, spec: the arguments that the loop has assumed, and their tree; of the first two
            calls, those of the call before.
        outs: what the block before returned.
        settings: those of PyTorch that a program depends on, at the first call.
        before, after: the ``_state`` of the first block before it was called, and of what it then
            returned.
        results: what the calls that are left return, with the state of their blocks.
    """

    index: int
    level: Level
    leaves: list[Any]
    spec: Any
    outs: list[Any]
    settings: Any
    before: list[Any]
    after: list[Any]
    # by the place of an argument, that of the output it comes from
    feeds: dict[int, int] = dataclasses.field(default_factory=dict)
    versions: list[int] = dataclasses.field(default_factory=list)
    results: list[Any] = dataclasses.field(default_factory=list)


class _Sequence:
    """The blocks of one list, and how far a run through them has come."""

    def __init__(
        self, name: str, blocks: list[nn.Module], remat: bool | Policy, asked: bool = True
    ) -> None:
        """asked: whether the user has asked for the loop, and is told what stands against it."""
        self.name, self.blocks, self.remat, self.asked = name, blocks, remat, asked
        self.thread = threading.get_ident()
        self.forwards = [_without_loop(block.forward) for block in blocks]
        self.next: _Expected | None = None

    def refused(self, reason: str) -> BaseException:
        """The exception for a loop that is not what the calls do."""
        if not self.asked:
            return OneByOne(self.blocks, reason)
        return RuntimeError(
            f"scan_blocks: {reason}. Blocks that are compiled once must be equal and be called one "
            "after the other, with the same arguments or with what the block before returned; name "
            f"other lists, or do without scan_blocks{at_line()}"
        )

    def title(self, index: int) -> str:
        return f"{self.name}.{index}" if self.name else str(index)

    @contextlib.contextmanager
    def replaced(self) -> Iterator[None]:
        """While entered, the blocks' forwards are ``called``; at the end, a run through some of the
        blocks only is refused.
        """
        before = [block.__dict__.get("forward") for block in self.blocks]
        for index, (block, forward) in enumerate(zip(self.blocks, self.forwards, strict=True)):
            block.forward = called = functools.wraps(forward)(functools.partial(self.called, index))
            vars(called)["asked"] = self.asked
        try:
            yield
            if self.next is not None and not (self.asked and self.next.level.closed):
                after = self.title(self.next.index)
                raise self.refused(
                    f"{after} and the blocks after it are not called, and the "
                    "loop has run through them"
                )
        finally:
            for block, own in zip(self.blocks, before, strict=True):
                block.__dict__.pop("forward", None)
                if own is not None:
                    block.forward = own

    def called(self, index: int, *args: Any, **kwargs: Any) -> Any:
        """A block's forward."""
        level = state.level
        if level is None or len(self.blocks) < _FEWEST or threading.get_ident() != self.thread:
            return self.forwards[index](*args, **kwargs)
        # of a trace that was given up
        if self.next is not None and self.next.level.closed and self.asked:
            self.next = None
        leaves, spec = trees.flatten((args, kwargs))
        held = _held(leaves)
        if not self.asked and not (
            _cannot_change((args, tuple(kwargs.values()))) and all(map(is_constant, leaves))
        ):
            raise self.refused(f"{self.title(index)} takes an object that may be changed")
        settings = ambient(), torch.is_grad_enabled(), private.forward_mode_enabled()
        if self.next is None:
            if index:
                raise self.refused(f"{self.title(index)} is called before {self.title(0)}")
            forward, before = self.forwards[0], self._state(level, leaves)
            out = (
                rematerialized(forward, args, kwargs, policy_of(self.remat))
                if self.remat
                else forward(*args, **kwargs)
            )
            now, structure = trees.flatten((args, kwargs))
            if structure != spec or _held(now) != held:
                raise self.refused(
                    f"{self.title(index)} changes one of its arguments, or what is in it, which "
                    "a loop would do once; return what it adds"
                )
            outs = trees.flatten(out)[0]
            after = _versions(outs)
            self.next = _Expected(1, level, leaves, spec, outs, settings, before, after)
            return out
        if settings != self.next.settings:
            raise self.refused(
                f"{self.title(index)} is called with other settings (grad mode, autocast) than "
                f"{self.title(0)}"
            )
        if index != self.next.index or level is not self.next.level:
            raise self.refused(
                f"{self.title(index)} is called where {self.title(self.next.index)} comes next"
            )
        if index == 1:
            try:
                self._run(self.next, leaves, spec)
            except (Exception, AskedForGradients) as error:
                if self.asked and not isinstance(error, Differ):
                    raise
                raise self.refused(str(error)) from None
        else:
            self._check(self.next, leaves, spec)
        return self._result(self.next)

    def _run(self, expected: _Expected, leaves: list[Any], spec: Any) -> None:
        """Run the loop from the second call on."""
        before = {id(x): k for k, x in reversed([*enumerate(expected.outs)]) if type(x) is Traced}
        constant = {id(x) for x in expected.leaves}
        feeds = {
            k: before[id(x)]
            for k, x in enumerate(leaves)
            if id(x) in before and id(x) not in constant
        }

        def run(first: int, leaves: list[Any]) -> tuple[Loop, list[Any], Any]:
            titles = [self.title(k) for k in range(first, len(self.blocks))]
            blocks, forwards = self.blocks[first:], self.forwards[first:]
            remat, asked, again = self.remat, self.asked, not first
            loop = Loop(blocks, forwards, titles, leaves, spec, feeds, remat, asked, again)
            outs, (meta, count) = apply(loop.compute, loop.operands)
            return loop, [outs[k : k + count] for k in range(0, len(outs), count or 1)], meta

        first = int(not self._repeats(expected, leaves, spec, feeds))
        try:
            loop, rows, meta = run(first, expected.leaves if not first else leaves)
        except Differ:
            if first:
                raise
            first = 1
            loop, rows, meta = run(1, leaves)
        expected.feeds, expected.leaves, expected.spec = feeds, leaves, spec
        expected.versions = [
            node_of(x).root.version if k in loop.where else 0 for k, x in enumerate(leaves)
        ]
        kept = [
            (part.tensors(), [node_of(t).root.version for t in part.tensors()])
            for part in loop.parts
        ]
        expected.results = [
            (put_together(row, meta), *state) for row, state in zip(rows, kept, strict=True)
        ][1 - first :]
        if not first:
            self._mark(expected)

    def _state(self, level: Level, leaves: Sequence[Any]) -> list[Any]:
        """What tells whether the first block, called again with these arguments, does the same."""
        drawn = level.root.drawn
        draws = source(level).draws, None if drawn is None else drawn.mark()
        return [draws, *_versions([*leaves, *parts(self.blocks[0]).tensors()])]

    def _repeats(
        self, expected: _Expected, leaves: list[Any], spec: Any, feeds: dict[int, int]
    ) -> bool:
        """Whether the loop may begin with the first block, which has been called with what the
        second one takes, has changed nothing, and gave what nobody has changed or has hooks on.
        """
        return (
            spec == expected.spec
            and expected.before == self._state(expected.level, expected.leaves)
            and expected.after == _versions(expected.outs)
            and not any(
                isinstance(x, torch.Tensor) and (x.retains_grad or node_of(x).hooked)
                for x in expected.outs
            )
            and all(
                _like(x, before) if k in feeds else equal(x, before)
                for k, (x, before) in enumerate(zip(leaves, expected.leaves, strict=True))
            )
        )

    def _mark(self, expected: _Expected) -> None:
        """Let the gradient of what a block hands on be refused: the loop does not compute it."""
        for out in expected.feeds.values():
            node_of(expected.outs[out]).loop = self.refused

    def _check(self, expected: _Expected, leaves: list[Any], spec: Any) -> None:
        """Refuse a call whose arguments, or whose block's state, are not those that the loop has
        assumed.
        """
        if spec != expected.spec:
            raise self.refused(
                f"{self.title(expected.index)} takes arguments of another structure than "
                f"{self.title(expected.index - 1)}"
            )
        names = trees.paths(spec)
        for k, (now, before) in enumerate(zip(leaves, expected.leaves, strict=True)):
            wanted = expected.outs[expected.feeds[k]] if k in expected.feeds else before
            if not equal(now, wanted) or (
                isinstance(now, Traced) and node_of(now).root.version != expected.versions[k]
            ):
                what = (
                    f"what {self.title(expected.index - 1)} returned"
                    if k in expected.feeds
                    else "the one that the blocks before took"
                )
                raise self.refused(
                    f"argument {'.'.join(map(str, names[k][1:]))} of {self.title(expected.index)} "
                    f"is not {what}"
                )
        _, tensors, versions = expected.results[0]
        now = parts(self.blocks[expected.index]).tensors()
        if (
            any(a is not b for a, b in zip(now, tensors, strict=True))
            or [node_of(t).root.version for t in now] != versions
        ):
            raise self.refused(
                f"parameters or buffers of {self.title(expected.index)} are changed between the "
                "calls of the blocks"
            )

    def _result(self, expected: _Expected) -> Any:
        out, *_ = expected.results.pop(0)
        expected.outs = trees.flatten(out)[0]
        expected.index += 1
        for k, place in expected.feeds.items():
            expected.versions[k] = node_of(expected.outs[place]).root.version
        if expected.results:
            self._mark(expected)
        else:
            self.next = None
        return out


def _without_loop(forward: Any) -> Any:
    """A block's forward, without the loop that would run by itself."""
    return forward.__wrapped__ if getattr(forward, "asked", True) is False else forward


def _versions(leaves: Iterable[Any]) -> list[Any]:
    """The identities of tensors, and how often they have been written to."""
    return [(id(x), node_of(x).root.version) for x in leaves if isinstance(x, torch.Tensor)]


def _like(a: Any, b: Any) -> bool:
    """Whether two traced tensors have the same properties."""
    described = [
        type(x) is Traced and (x.shape, x.stride(), x.dtype, x.device, x.requires_grad, x.is_leaf)
        for x in (a, b)
    ]
    return described[0] == described[1] is not False


def _held(leaves: Sequence[Any]) -> list[int]:
    """The identities of a call's arguments, and of what the objects among them hold."""
    objects = [
        vars(x) for x in leaves if not isinstance(x, torch.Tensor) and hasattr(x, "__dict__")
    ]
    return [*map(id, leaves), *map(id, trees.flatten(objects)[0])]


def _cannot_change(tree: Any) -> bool:
    """Whether the containers in a tree of arguments are tuples, so that a block cannot put anything
    into them.
    """
    return (
        all(map(_cannot_change, tree))
        if isinstance(tree, tuple)
        else not isinstance(tree, list | dict | set)
    )
