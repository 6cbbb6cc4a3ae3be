"""Errors raised while tracing; their messages name the line of the user's code, the operator, and what to do."""
from __future__ import annotations

import contextlib
import linecache
import os
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))
_OURS = (_HERE, os.path.join(os.path.dirname(_HERE), "torchfunc_jax"))
_LIBRARIES = (sysconfig.get_paths()["purelib"], sysconfig.get_paths()["stdlib"])


class DataDependentError(RuntimeError):
    """The function asked for a value, or for a shape that depends on values, while only shapes are known (under vmap or jit)."""


class NoLoweringError(NotImplementedError):
    """An operator has neither a lowering nor a decomposition."""


class EscapedTensorError(RuntimeError):
    """A tensor that belongs to a transform was used after the transform had returned."""


class NeedsTorch(BaseException):  # the user's code must not catch it
    """The function does what only PyTorch can do, so the call starts again in torch.func; under jit the function itself is called."""


class NeedsJax(BaseException):
    """The function calls what only a trace of JAX's can do (``bridge.call``), so an un-jitted call with jax.Arrays starts again in JAX."""


class CalledItself(NeedsTorch):
    """No program can do again what a jitted function does to Python objects, so jit calls the function itself, also in later calls."""


class NotInLoopError(RuntimeError):
    """The steps of a loop cannot be compiled as one step that runs several times, so they run one by one."""


def is_users(filename: str) -> bool:
    """Whether a file has the user's own code: neither ours, nor the standard library's, nor an installed package's."""
    return not filename.startswith(_OURS) and not filename.startswith(_LIBRARIES) and not filename.startswith("<frozen")


def shown_line(filename: str, number: int) -> str:
    """``file.py:12: y = x.nonzero()``."""
    text = linecache.getline(filename, number).strip()
    return f"{filename}:{number}" + (f": {text}" if text else "")


def _of_user(frame: FrameType | None) -> FrameType | None:
    """The innermost frame of the user's own code, from this one on."""
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def at_line() -> str:
    """`` (at file.py:12: y = x.nonzero())``, the end of a message, for the innermost frame of the user's own code; "" if there is none."""
    frame = _of_user(sys._getframe(1))
    return "" if frame is None else f" (at {shown_line(frame.f_code.co_filename, frame.f_lineno)})"


#: Ends the message of an error in a program that calls from several lines run; ``at_this_line`` puts the line there.
HERE = " (at this call)"


def at_this_line(error: Exception) -> Exception:
    """The error with the line of the user's that calls now."""
    text = error.args[0] if error.args else None
    return type(error)(text.removesuffix(HERE) + at_line()) if isinstance(text, str) and text.endswith(HERE) else error


@contextlib.contextmanager
def rewording() -> Iterator[None]:
    """While entered, JAX's errors about the backward pass of a while loop, and of what is not linear, are raised in torch's terms."""
    try:
        yield
    except ValueError as error:
        if not str(error).startswith("Reverse-mode differentiation does not work for lax.while_loop"):
            raise
        raise RuntimeError(
            "while_loop: it has no reverse-mode derivative (grad, vjp, jacrev, hessian, backward) where the number of its steps is "
            "unknown, as under jit and vmap; use torch's scan with a fixed number of steps, or forward mode (jvp, jacfwd)"
            + at_line()
        ) from error.__cause__
    except (AssertionError, NotImplementedError) as error:
        # one operand too many that is a tangent, or a function of one
        if "Accum" not in str(error) and not str(error).startswith("Transpose rule"):
            raise
        raise RuntimeError(
            "jvp: a rule for forward mode, such as the jvp of an autograd.Function, is not linear in its tangents, so that its "
            "backward pass is not defined; expected sums of tangents, each times what does not depend on them" + at_line()
        ) from error.__cause__


_DIMENSIONS = {"mm": (2, 2), "mv": (2, 1), "bmm": (3, 3), "dot": (1, 1)}


def escaped(level: Any = None) -> EscapedTensorError:
    """The error for a tensor of a transform that has returned; level: the transform's, if it is known."""
    said = "it was made"
    while level is not None:
        if level.kind == "vmap":
            said = "your tensor may have escaped from inside a function being vmapped: it was made"
        level = level.parent
    return EscapedTensorError(
        f"tensor: {said} inside a transform that has returned and holds no values any more; return it from the transformed function "
        f"instead of keeping it elsewhere{at_line()}"
    )


def in_words_of_vmap(name: str, args: Sequence[Any], error: Exception) -> Exception:
    """The error of a function of that name inside a vmap; torch.func.vmap has its own for products of tensors of wrong dimensions."""
    wanted = _DIMENSIONS.get(name)
    given = tuple([getattr(x, "ndim", None) for x in args])
    if wanted is None or given == wanted or len(given) != 2:
        return error
    if name == "dot":
        return RuntimeError("Got wrong shapes for dot")
    return RuntimeError(
        f"Shape mismatch: Got incorrect dims for {name}(a, b). a has dim {given[0]}and b has dim {given[1]}but expected them to have dim "
        f"{wanted[0]} and dim {wanted[1]}"
    )


def is_no_jvp(error: TypeError) -> bool:
    """Whether an error is JAX's refusal of forward mode for a Function that has only a backward."""
    return "(jvp) to a custom_vjp" in str(error)


def no_jvp(name: str) -> NotImplementedError:
    """The refusal of ``is_no_jvp`` in torch's words; name: the Function's name."""
    return NotImplementedError(
        f"{name}: You must implement the jvp function for custom autograd.Function to use it with forward mode AD.{at_line()}"
    )
