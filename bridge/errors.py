"""Errors raised while tracing; their messages name the line of the user's code, the operator, and
what to do.
"""

from __future__ import annotations

import contextlib
import functools
import linecache
import os
import sys
import sysconfig
import types
from collections.abc import Callable, Iterator, Sequence
from types import FrameType, TracebackType
from typing import Any, TypeVar

import jax
import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Class = TypeVar("_Class", bound=type)
_HERE = os.path.dirname(os.path.abspath(__file__))
_OURS = tuple(
    os.path.join(os.path.dirname(_HERE), name, "") for name in ("bridge", "torchfunc_jax")
)
_INSTALLED, _STANDARD = sysconfig.get_paths()["purelib"], sysconfig.get_paths()["stdlib"]
_TORCH, _JAX = (os.path.join(os.path.dirname(package.__file__), "") for package in (torch, jax))
_OPTIM = os.path.join(_TORCH, "optim", "")
_LIBRARIES = (_INSTALLED, _STANDARD, _TORCH, _JAX)


class DataDependentError(RuntimeError):
    """The function asked for a value, or for a shape that depends on values, while only shapes are
    known (under vmap or jit).
    """


class NoLoweringError(NotImplementedError):
    """An operator has neither a lowering nor a decomposition."""


class EscapedTensorError(RuntimeError):
    """A tensor that belongs to a transform was used after the transform had returned."""


class NeedsTorch(BaseException):  # the user's code must not catch it
    """The function does what only PyTorch can do, so the call starts again in torch.func; under jit
    the function itself is called.
    """


class NeedsJax(BaseException):
    """The function calls what only a trace of JAX's can do (``bridge.call``), so an un-jitted call
    with jax.Arrays starts again in JAX.
    """


class CalledItself(NeedsTorch):
    """No program can do again what a jitted function does to Python objects, so jit calls the
    function itself, also in later calls.
    """


class NotInLoopError(RuntimeError):
    """The steps of a loop cannot be compiled as one step that runs several times, so they run one
    by one.
    """


def is_users(filename: str) -> bool:
    """Whether a file has the user's own code: neither ours, nor the standard library's, nor an
    installed package's.
    """
    return (
        not filename.startswith(_OURS)
        and not filename.startswith(_LIBRARIES)
        and not filename.startswith("<frozen")
    )


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
    """`` (at file.py:12: y = x.nonzero())``, the end of a message, for the innermost frame of the
    user's own code; "" if there is none.
    """
    frame = _of_user(sys._getframe(1))
    return "" if frame is None else f" (at {shown_line(frame.f_code.co_filename, frame.f_lineno)})"


#: Words of PyTorch's and JAX's that do not say what to do -> what to do; it becomes a note of the
#: error.
_ADVICE = {
    "data-dependent control flow": (
        "Each lane of a vmap has a value of its own, and Python takes one branch: compute both "
        "branches and choose by torch.where(condition, a, b), or use torch.cond."
    ),
    "calling .item() on a Tensor": (
        "Keep it a tensor: x * x.sum() in the place of x * x.sum().item(), "
        "torch.sin in the place of math.sin."
    ),
    "dynamic shape": (
        "Keep the shape and choose by the mask: torch.where(mask, x, 0.0).sum() in the place of "
        "x[mask].sum()."
    ),
    "Cannot access data pointer of Tensor": (
        "NumPy cannot see the values of a tensor inside of a transform: call PyTorch's function of "
        "that name, or NumPy's outside of the transform."
    ),
    "as an abstract array": (
        "If a function of JAX's was called with a torch tensor: bridge.from_jax(f) makes a torch "
        "function of it, and bridge.to_jax(x) an array of a tensor outside of transforms."
    ),
    "must be Tensor, not DynamicJaxprTracer": (
        "bridge.from_jax takes functions of jax.Arrays; call a function of torch tensors as it is."
    ),
}


_OF_OPTIMIZERS = (
    "torch.optim asks for the value here. With capturable=True its optimizers and functions that "
    "have this argument compute with tensors alone; adafactor has no such way."
)


#: JAX's note that it has shortened a traceback
_OF_TRACEBACKS = "JAX has removed its internal frames"


def advice(error: BaseException) -> list[str]:
    """What there is to do about an error in the words of PyTorch or JAX that do not say it."""
    return [advised for words, advised in _ADVICE.items() if words in str(error)]


def _in_optimizer(error: BaseException) -> bool:
    """Whether a function of torch.optim was running."""
    place = error.__traceback__
    while place is not None and not place.tb_frame.f_code.co_filename.startswith(_OPTIM):
        place = place.tb_next
    return place is not None


def for_user(error: BaseException) -> None:
    """Prepare an error that leaves a public function: a note says what to do where the words of
    others do not, and tracebacks are short.

    The frames of this library, and of what it has called, go from the tracebacks of the error and
    of its causes, and so does JAX's note of the frames that it took. What is left are those of the
    user's code and of what that calls: the last line is the user's. A bare ``raise`` after this
    adds no frame. With TORCHFUNC_JAX_TRACEBACK=full in the environment all frames stay.
    """
    if isinstance(error, DataDependentError):
        if _in_optimizer(error) and _OF_OPTIMIZERS not in getattr(error, "__notes__", ()):
            error.add_note(_OF_OPTIMIZERS)
    elif type(error).__module__ != __name__:  # our own errors say it themselves
        text = str(error)
        # to the user it is a Tensor
        if isinstance(error, AttributeError) and type(error.obj).__module__.startswith("bridge."):
            error.args = (text.replace(f"'{type(error.obj).__name__}' object", "'Tensor' object"),)
        for advised in advice(error):
            if advised not in getattr(error, "__notes__", ()):
                error.add_note(advised)
    if os.environ.get("TORCHFUNC_JAX_TRACEBACK") == "full":
        return
    met: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in met:
        met.add(id(following))
        if notes := getattr(following, "__notes__", None):
            notes[:] = [note for note in notes if _OF_TRACEBACKS not in note]
        following.__traceback__ = _without_ours(following.__traceback__)
        following = following.__cause__ or (
            None if following.__suppress_context__ else following.__context__
        )


def _without_ours(traceback: TracebackType | None) -> TracebackType | None:
    left: list[TracebackType] = []
    inside = False  # in what this library has called
    while traceback is not None:
        filename = traceback.tb_frame.f_code.co_filename
        inside = filename.startswith(_OURS) or (inside and _is_called_by_us(filename))
        if not inside:
            left.append(traceback)
        traceback = traceback.tb_next
    short = None
    for each in reversed(left):
        short = TracebackType(short, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return short


def _is_called_by_us(filename: str) -> bool:
    """Whether a file is of torch, JAX or the standard library; not torch.nn's modules and
    functions, which are the user's to call.
    """
    if filename.startswith(_STANDARD) and not filename.startswith(_INSTALLED):
        return True
    part = filename.removeprefix(_TORCH).replace(os.sep, "/")
    return filename.startswith(("<frozen", _JAX, _TORCH)) and not part.startswith(
        ("nn/modules/", "nn/functional.py")
    )


def public(func: _Function) -> _Function:
    """Decorator of a function that users call: its errors go through ``for_user``."""

    @functools.wraps(func)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return func(*args, **kwargs)
        except Exception as error:
            for_user(error)
            raise

    return run  # type: ignore[return-value]


def public_methods(cls: _Class) -> _Class:
    """Decorator of a class that users make objects of: errors of its constructor, its ``[i]`` and
    its methods go through ``for_user``.
    """
    for name, attribute in list(vars(cls).items()):
        if isinstance(attribute, types.FunctionType) and (
            name in ("__init__", "__getitem__") or not name.startswith("_")
        ):
            setattr(cls, name, public(attribute))
        elif isinstance(attribute, classmethod) and not name.startswith("_"):
            setattr(cls, name, classmethod(public(attribute.__func__)))
    return cls


#: Ends the message of an error in a program that calls from several lines run; ``at_this_line``
#: puts the line there.
HERE = " (at this call)"


def at_this_line(error: Exception) -> Exception:
    """The error with the line of the user's that calls now."""
    text = error.args[0] if error.args else None
    return (
        type(error)(text.removesuffix(HERE) + at_line())
        if isinstance(text, str) and text.endswith(HERE)
        else error
    )


@contextlib.contextmanager
def rewording() -> Iterator[None]:
    """While entered, JAX's errors about the backward pass of a while loop, and of what is not
    linear, are raised in torch's terms.
    """
    try:
        yield
    except ValueError as error:
        if not str(error).startswith(
            "Reverse-mode differentiation does not work for lax.while_loop"
        ):
            raise
        raise RuntimeError(
            (
                "while_loop: it has no reverse-mode derivative (grad, vjp, jacrev, hessian, "
                "backward) where the number of its steps is unknown, as under jit and vmap; use "
                "torch's scan with a fixed number of steps, or forward mode (jvp, jacfwd)"
            )
            + at_line()
        ) from error.__cause__
    except (AssertionError, NotImplementedError) as error:
        # one operand too many that is a tangent, or a function of one
        if "Accum" not in str(error) and not str(error).startswith("Transpose rule"):
            raise
        raise RuntimeError(
            (
                "jvp: a rule for forward mode, such as the jvp of an autograd.Function, is not "
                "linear in its tangents, so that its backward pass is not defined; expected sums "
                "of tangents, each times what does not depend on them"
            )
            + at_line()
        ) from error.__cause__


_DIMENSIONS = {"mm": (2, 2), "mv": (2, 1), "bmm": (3, 3), "dot": (1, 1)}


def escaped(level: Any = None) -> EscapedTensorError:
    """The error for a tensor of a transform that has returned, or that another thread runs; level:
    the transform's, if it is known.
    """
    if level is not None and not getattr(level, "closed", not getattr(level, "open", False)):
        return EscapedTensorError(
            "tensor: it belongs to a transform that another thread runs, and has no values in this "
            "one; a transformed function computes in the thread that calls it: start threads "
            f"around the call, and not in the function{at_line()}"
        )
    said = "it was made"
    while level is not None:
        if level.kind.maps:
            said = "your tensor may have escaped from inside a function being vmapped: it was made"
        level = level.parent
    return EscapedTensorError(
        f"tensor: {said} inside a transform that has returned and holds no values any more; return "
        f"it from the transformed function instead of keeping it elsewhere{at_line()}"
    )


def in_words_of_vmap(name: str, args: Sequence[Any], error: Exception) -> Exception:
    """The error of a function of that name inside a vmap; torch.func.vmap has its own for products
    of tensors of wrong dimensions.
    """
    wanted = _DIMENSIONS.get(name)
    given = tuple([getattr(x, "ndim", None) for x in args])
    if wanted is None or given == wanted or len(given) != 2:
        return error
    if name == "dot":
        return RuntimeError("Got wrong shapes for dot")
    return RuntimeError(
        f"Shape mismatch: Got incorrect dims for {name}(a, b). a has dim {given[0]}and b has dim "
        f"{given[1]}but expected them to have dim {wanted[0]} and dim {wanted[1]}"
    )


def is_no_jvp(error: TypeError) -> bool:
    """Whether an error is JAX's refusal of forward mode for a Function that has only a backward."""
    return "(jvp) to a custom_vjp" in str(error)


def no_jvp(name: str, instead: str = "") -> NotImplementedError:
    """The refusal of ``is_no_jvp`` in torch's words; name: the Function's name; instead: a sentence
    about what to do.
    """
    return NotImplementedError(
        f"{name}: You must implement the jvp function for custom autograd.Function to use it with "
        f"forward mode AD.{instead}{at_line()}"
    )
