"""Drop-in use: ``patch()`` replaces torch.func's and functorch's functions in all modules by this
library's.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import threading
from types import ModuleType, SimpleNamespace, TracebackType
from typing import Any

import torch

from bridge.process import process
from bridge.record.programs import checked_cold

_NAMES = (
    *torch.func.__all__,
    "chunk_vmap",
    "make_functional",
    "make_functional_with_buffers",
    "make_functional_deprecated_v1",
    "make_functional_with_buffers_deprecated_v1",
    "combine_state_for_ensemble",
    "functional_init",
    "functional_init_with_buffers",
    "FunctionalModule",
    "FunctionalModuleWithBuffers",
)
_SOURCES = (
    "torch.func",
    "torch",
    "functorch",
    "functorch.experimental",
    "torch._functorch.make_functional",
)

# Namespaces that other programs import from are changed; torch's other modules and ours are left
# alone.
_CHANGED = frozenset({"torch", "torch.func", "functorch", "functorch.experimental"})
_LEFT_ALONE = frozenset({"torch", "functorch", "bridge", "torchfunc_jax"})


@functools.cache
def _sources() -> list[ModuleType]:
    """The modules that have torch's functions, without those that this version of torch lacks."""
    found = []
    for name in _SOURCES:
        with contextlib.suppress(ImportError):
            found.append(importlib.import_module(name))
    return found


@functools.cache
def _replacements() -> dict[int, tuple[Any, Any]]:
    """id of torch's object -> (torch's object, ours); read before anything is patched."""
    found: dict[int, tuple[Any, Any]] = {}
    for name in _NAMES:
        ours = getattr(OURS, name, None)
        if ours is None:  # a name of a later torch that this library does not have
            continue
        for source in _sources():
            theirs = vars(source).get(name, ours)
            if theirs is not ours:
                found[id(theirs)] = (theirs, ours)
    return found


#: The names of this library; the package fills it when it is imported.
OURS = SimpleNamespace()
#: torch.func as it is without a patch.
ORIGINAL = SimpleNamespace(**{name: getattr(torch.func, name) for name in torch.func.__all__})
with contextlib.suppress(ImportError, AttributeError):  # in a version without functorch
    ORIGINAL.chunk_vmap = importlib.import_module("functorch.experimental").chunk_vmap
_lock = threading.RLock()


def _apply() -> None:
    with _lock:
        try:
            for name, module in list(sys.modules.items()):
                if name in _CHANGED or name.partition(".")[0] not in _LEFT_ALONE:
                    namespace = getattr(module, "__dict__", None)
                    if type(namespace) is dict:
                        _change(namespace)
        except BaseException:
            if not process.patches:
                _restore()
            raise
        process.patches += 1


def _change(namespace: dict[str, Any]) -> None:
    table = _replacements()
    for name, value in list(namespace.items()):
        if id(value) in table:
            theirs, ours = table[id(value)]
            process.patched.append((namespace, name, theirs, ours))
            namespace[name] = ours


def _release() -> None:
    with _lock:
        process.patches -= 1
        if not process.patches:
            _restore()


def _restore() -> None:
    while process.patched:
        namespace, name, theirs, ours = process.patched.pop()
        # a name that was bound to something else meanwhile keeps its new value
        if namespace.get(name) is ours:
            namespace[name] = theirs


class Patch:
    """The result of ``patch()``; it is in effect until ``undo()``, or until the end of its ``with``
    block.
    """

    def __init__(self, cold: str | None) -> None:
        self._cold = [] if cold is None else [checked_cold(cold)]
        self._depth = 0
        self._held = False
        self._hold()

    def _hold(self) -> None:
        if not self._held:
            _apply()
            self._held = True
            process.cold += self._cold

    def undo(self) -> None:
        """Restore torch's functions; a second call does nothing. Names stay patched while another
        patch is in effect.
        """
        with _lock:
            if self._held:
                self._held = False
                for cold in self._cold:
                    process.cold.remove(cold)
                _release()

    def __enter__(self) -> Patch:
        with _lock:
            self._hold()
            self._depth += 1
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with _lock:
            self._depth -= 1
            if not self._depth:
                self.undo()


def patch(*, cold: str | None = None) -> Patch:
    """Replace ``torch.func.*``, ``torch.vmap`` and ``functorch.*`` by this library's, for a
    ``with`` block or until ``undo()``.

    Modules that imported the names earlier (``from torch.func import vmap``) are changed too,
    except for torch's own. References that are not names of a module are not changed: default
    arguments, class attributes, closures. A module that is imported while the patch is in effect
    keeps the functions that it imported. The change holds for all threads of the process; patches
    may be nested and overlap. ``functorch.make_fx`` and ``functorch.compile`` stay torch's.

    Args:
        cold: who runs calls whose programs are not compiled yet, while the patch is in effect, as
            for ``torchfunc_jax.cold``; None: no change.

    Returns:
        Patch: it is already in effect; it is a context manager and has ``undo()``.

    Raises:
        ValueError: another word for cold.

    Source: ``unittest.mock.patch``,
    https://docs.python.org/3/library/unittest.mock.html#patch-methods-start-and-stop

    Example:
        >>> import torch, torchfunc_jax
        >>> with torchfunc_jax.patch():
        ...     torch.vmap is torchfunc_jax.vmap, torch.func.grad(torch.sin)(torch.tensor(0.0))
        (True, tensor(1.))
        >>> torch.vmap is torchfunc_jax.vmap
        False
        >>> patched = torchfunc_jax.patch()
        >>> patched.undo()
    """
    return Patch(cold)
