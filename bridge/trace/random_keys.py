"""The source of the random numbers that JAX draws: keys from torch's generators. torch_random.py
has those that torch draws.

Outside a compiled function the root key is drawn from torch's generator at each call, so
``torch.manual_seed`` repeats a run. A vmap with randomness="different" gives every lane its own
key; with "same" all lanes share one key.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import torch

from bridge import private, private_jax
from bridge.process import having
from bridge.trace.folding import NotConstant
from bridge.trace.levels import Level, around, refuse_in_loop, state, vmaps_of_draws
from bridge.trace.torch_random import ERROR


def seed_from(generator: torch.Generator | None) -> int:
    """A seed drawn from a torch generator, which advances by one draw; None: from torch's default
    generator.
    """
    device = "cpu" if generator is None else generator.device
    with private.below_python():
        return int(
            torch.empty((), dtype=torch.int64, device=device).random_(generator=generator).item()
        )


def next_key(generator: torch.Generator | None = None) -> jax.Array:
    """The next JAX key of the trace in progress, for an operator that was given this generator;
    None: torch's default one.
    """
    level = state.level
    if level is None:
        return jax.random.key(seed_from(generator))
    if any(each.randomness == "error" for each in vmaps_of_draws()):
        raise RuntimeError(ERROR)
    refuse_in_loop("a random number")
    level = source(level)
    level.draws += 1
    return _key_of(level, generator, level.draws)


class SeededInside(RuntimeError):
    """A function that is being compiled sets the state of a generator; its compiled program would
    not repeat that.
    """


class Watch:
    """Notices if the Python of a function that is being compiled changes torch's generators,
    because the program would not repeat that.

    Each draw of the program advances the generator by one number, and at the end it must be where
    so many numbers lead.

    Args:
        generators: the generators that the function reaches besides the default one.
    """

    def __init__(self, generators: Sequence[torch.Generator]) -> None:
        every = [torch.default_generator, *generators]
        self.before = {private.which_generator(g): (g, _state_of(g)) for g in every}
        self.drawn = dict.fromkeys(self.before, 0)

    def draw(self, generator: torch.Generator | None) -> None:
        """Called before the program takes a seed from a generator; it advances the generator, so
        that a later reset is noticed.
        """
        g = torch.default_generator if generator is None else generator
        which = private.which_generator(g)
        if which not in self.before:
            raise SeededInside(
                _SEEDED.format(
                    "makes a torch.Generator, or reaches it in a way that is not looked into"
                )
            )
        _advance(g, 1)
        self.drawn[which] += 1

    def check(self) -> None:
        now = self._now()
        self.restore()
        for which, (g, _) in self.before.items():
            _advance(g, self.drawn[which])
        expected = self._now()
        if now != expected:
            _set_states(now)
            raise SeededInside(
                _SEEDED.format(
                    "sets the state of one of torch's generators (manual_seed, "
                    "set_rng_state, fork_rng)"
                )
            )

    def _now(self) -> dict[Any, tuple[torch.Generator, bytes]]:
        return {which: (g, _state_of(g)) for which, (g, _) in self.before.items()}

    @contextlib.contextmanager
    def watching(self) -> Iterator[Watch]:
        """Watch while entered; on exit, the generators get their earlier states back."""
        # advanced, so that setting a generator to the state that it had is noticed too
        for g, _ in self.before.values():
            self.draw(g)
        try:
            yield self
            self.check()
        finally:
            self.restore()

    @contextlib.contextmanager
    def again(self, start: torch.Tensor | None = None) -> Iterator[None]:
        """While entered, the generators have their earlier states, for a program that draws its
        numbers before the one that will draw them.

        Args:
            start: the state of torch's default generator from which it draws, if it does not begin
                with the first number.
        """
        now = self._now()
        self.restore()
        try:
            if start is not None:
                torch.default_generator.set_state(start)
            yield
        finally:
            _set_states(now)

    def restore(self) -> None:
        """Give the generators their earlier states back."""
        _set_states(self.before)


def _advance(generator: torch.Generator, count: int) -> None:
    """Draw so many numbers from a generator."""
    # on a GPU, two draws of one number are not one of two
    together = count if generator.device.type == "cpu" else 1
    with private.below_python():
        numbers = torch.empty(together, dtype=torch.int64, device=generator.device)
        for _ in range(count // max(together, 1)):
            numbers.random_(generator=generator)


def _set_states(states: dict[Any, tuple[torch.Generator, bytes]]) -> None:
    with private.below_python():
        for g, state in states.values():
            g.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def _state_of(generator: torch.Generator) -> bytes:
    with private.below_python():
        return generator.get_state().numpy().tobytes()


_SEEDED = (
    "it {}, where a program would draw other numbers and leave the generator in another state; do "
    "it around the call instead"
)


class NoKeyError(RuntimeError):
    """The function that gives the key of a random operator raised ``reason``; torch's operators do
    not raise this class.

    ``reason`` is kept beside ``__cause__``, which those who pass the error on may set.
    """

    def __init__(self, reason: Exception) -> None:
        super().__init__(str(reason))
        self.reason = reason


@contextlib.contextmanager
def drawing_from(key: jax.Array | Callable[[], jax.Array]) -> Iterator[None]:
    """While entered, random operators of the current level draw from this key, or from the key that
    the function returns at a draw.

    Operators that are given a torch generator do so too, because the numbers of a generator that is
    read while a program is compiled would never change. An exception of the function is raised as
    ``NoKeyError``.
    """

    def asked(*_: Any) -> jax.Array:
        if not callable(key):
            return key
        try:
            return key()
        except Exception as error:
            raise NoKeyError(error) from error

    level = state.level
    level.key = asked
    # a whole program that is being staged has its own seeds for each call
    with having(level, keyed=True), having(level.root, seeds=level.root.seeds or asked):
        yield


def source(level: Level) -> Level:
    """The level whose key this level's random operators draw from: the nearest one with a key, else
    the root.
    """
    while level.parent is not None and level.key is None:
        level = level.parent
    return level


def drawing_again() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Returns a function for ``with again():``, in which random operators draw the numbers again
    that they draw from here on.
    """
    if state.level is None:  # JAX calls a rule when its trace has closed
        return contextlib.nullcontext
    own, drawn = source(state.level), state.level.root.drawn
    draws, at = own.draws, 0 if drawn is None else drawn.at

    @contextlib.contextmanager
    def again() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(having(own, draws=draws))
            if drawn is not None:
                stack.enter_context(having(drawn, at=at))
            yield

    return again


def _key_of(level: Level, generator: torch.Generator | None, draw: int) -> jax.Array:
    # the key comes from the generator alone; the number of each enclosing lane is folded in
    if generator is not None:
        key = _root_key(level.root, generator)
        for each in around():
            key = key if each.lane is None else jax.random.fold_in(key, each.lane)
    else:
        key = _root_key(level, None) if level.parent is None else level.key()
    if jax.sharding.get_abstract_mesh().manual_axes and private_jax.folds_constants():
        # the number of the draw is to vary over the mesh as the key does
        raise NotConstant
    return jax.random.fold_in(key, draw)


def key_of_lane(
    parent: Level, lane: jax.Array, first: list[int] | None = None
) -> Callable[[], jax.Array]:
    """A function that gives a lane's own key under vmap(randomness="different").

    It is the key that comes next in the parent when the lane first draws, with the lane's number
    folded in. It is computed at each draw, because a draw may stand in a trace of JAX's inside of
    the lane's, as in jet. first: an empty list that keeps which key of the parent's this is, for
    lanes that are traced again.
    """
    level = source(parent)
    first = [] if first is None else first

    def key() -> jax.Array:
        if not first:
            level.draws += 1
            first.append(level.draws)
        return jax.random.fold_in(_key_of(level, None, first[0]), lane)

    return key


def _root_key(root: Level, generator: torch.Generator | None) -> jax.Array:
    if root.seeds is not None:
        return root.seeds(generator)
    which = None if generator is None else private.which_generator(generator)
    if which not in root.keys:
        # a trace of JAX's in progress, as that of jet, may end before the next draw
        with jax.ensure_compile_time_eval():
            root.keys[which] = generator, jax.random.key(seed_from(generator))
    return root.keys[which][1]
