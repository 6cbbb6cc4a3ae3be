"""The table of PyTorch's ambient state: what each state does to what runs in JAX, beside torch.func
in the same place.

A ``State`` is a way to put PyTorch in a state and a program that shows it. ``observed`` runs one
cell of the table: a state, set inside the function, around the call or between two calls; one way
to transform; tensors that are captured or passed. tests/unjitted/test_ambient_state.py runs the
cells, docs/ambient_state.py prints them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import tempfile
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules import module as modules
from torch.nn.utils import parametrizations, parametrize
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import torchfunc_jax

WHENS = ("inside", "around", "between")
TENSORS = ("captured", "passed")


def torch_func_gives_zeros() -> bool:
    """Whether torch.func's derivatives in inference mode are zero, as those of PyTorch 2.11 are."""
    with torch.inference_mode():
        return not torch.func.grad(torch.sin)(torch.tensor(0.5)).any()


# -- programs and states ---------------------------------------------------------------------------
class Program:
    """A layer, its weight, and what a state keeps of them; made anew for each cell and each of the
    two libraries.

    Attributes:
        T: torch.func, or torchfunc_jax.
        layer: what ``linear`` calls.
        weight: its parameter, which functions capture, or get passed.
        kept: whatever a state puts there.
    """

    def __init__(self, T: Any) -> None:
        torch.manual_seed(0)
        self.T = T
        self.layer: Any = nn.Linear(3, 2, bias=False)
        self.weight = self.layer.weight
        self.kept: Any = None

    def linear(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """The layer, with the weight that it has or with the one that is passed."""
        if w is self.weight:
            return self.layer(x)
        name = next(n for n, p in self.layer.named_parameters() if p.shape == w.shape)
        return self.T.functional_call(self.layer, {name: w}, (x,))


Scope = Callable[[Program], contextlib.AbstractContextManager[Any]]
Wrap = Callable[[Program, Callable[..., Any]], Callable[..., Any]]


class Other:
    """What a cell holds that is not "as torch.func".

    Args:
        says: "refused", "works" (torch.func refuses) or "differs".
        reason: why, in a sentence for the page.
        match: what the message of ours says where it is refused.
        error: its class.
        when, ways, tensors: which cells; empty: all.
    """

    def __init__(
        self,
        says: str,
        reason: str,
        *,
        match: str = "",
        error: type[BaseException] = RuntimeError,
        when: str = "",
        ways: str = "",
        tensors: str = "",
    ) -> None:
        self.says, self.reason, self.match, self.error = says, reason, match, error
        self.when, self.ways, self.tensors = (
            tuple(s.strip() for s in t.split(",") if s.strip()) for t in (when, ways, tensors)
        )

    def holds(self, when: str, way: str, tensors: str) -> bool:
        asked = zip((when, way, tensors), (self.when, self.ways, self.tensors), strict=True)
        return all(not among or one in among for one, among in asked)

    @property
    def text(self) -> str:
        return f"refused: {self.error.__name__}" if self.says == "refused" else self.says


@dataclasses.dataclass(frozen=True)
class State:
    """One row of the table.

    Attributes:
        name: of the state.
        wrap: gives a function that sets the state, calls, and sets it back.
        body: (program, x, w) -> a tensor that shows the state.
        make: prepares the program before it is used, in no state.
        random: whether it draws random numbers.
        rtol, atol: within which the numbers agree; None: torch's own for the dtype.
        others: the cells that are not "as torch.func".
    """

    name: str
    wrap: Wrap
    body: Callable[[Program, torch.Tensor, torch.Tensor], torch.Tensor]
    make: Callable[[Program], Any] | None
    random: bool
    rtol: float | None
    atol: float | None
    others: tuple[Other, ...]


STATES: dict[str, State] = {}


def state(
    name: str,
    scope: Scope | None = None,
    body: Callable[..., Any] = Program.linear,
    *others: Other,
    wrap: Wrap | None = None,
    make: Callable[[Program], Any] | None = None,
    random: bool = False,
    rtol: float | None = None,
    atol: float | None = None,
) -> None:
    """Add a row; the state is a context manager, or, by ``wrap``, whatever makes another function
    of a function.
    """
    if wrap is None:
        assert scope is not None
        wrap = functools.partial(_in_scope, scope)
    assert name not in STATES, name
    STATES[name] = State(name, wrap, body, make, random, rtol, atol, others)


def _in_scope(scope: Scope, program: Program, f: Callable[..., Any]) -> Callable[..., Any]:
    def within(*args: Any) -> Any:
        with scope(program):
            return f(*args)

    return within


def _left(setting: Callable[[], Any]) -> Wrap:
    """A function that sets a state and leaves it so."""

    def wrap(program: Program, f: Callable[..., Any]) -> Callable[..., Any]:
        def set_and_call(*args: Any) -> Any:
            setting()
            return f(*args)

        return set_and_call

    return wrap


def _setting(setter: Callable[[Any], Any], value: Any, back: Any) -> Scope:
    """A state that a function sets."""

    @contextlib.contextmanager
    def scope(_: Program) -> Iterator[None]:
        setter(value)
        try:
            yield
        finally:
            setter(back)

    return scope


def _hook(add: Callable[[Program], Any]) -> Scope:
    """A hook that is added, and removed by its handle."""

    @contextlib.contextmanager
    def scope(program: Program) -> Iterator[None]:
        handle = add(program)
        try:
            yield
        finally:
            handle.remove()

    return scope


def _both(*scopes: Scope) -> Scope:
    @contextlib.contextmanager
    def scope(program: Program) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for each in scopes:
                stack.enter_context(each(program))
            yield

    return scope


# -- ways to call, and what is seen ----------------------------------------------------------------
def _vmap(T: Any, f: Any, count: int, random: bool) -> Any:
    return T.vmap(f, in_dims=(0, None)[:count], randomness="different" if random else "error")


def _grad(T: Any, f: Any, count: int, random: bool) -> Any:
    return T.grad(lambda *args: f(*args).sum(), argnums=tuple(range(count)))


def _jvp(T: Any, f: Any, count: int, random: bool) -> Any:
    return lambda *args: T.jvp(f, args, tuple(torch.full_like(a.detach(), 0.5) for a in args))


#: name -> (theirs, ours), each of (library, function, number of arguments, whether it draws random
#: numbers)
WAYS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "functionalize": (lambda T, f, *_: f, lambda T, f, *_: T.functionalize(f)),
    "jit": (lambda T, f, *_: f, lambda T, f, *_: T.jit(f)),
    "grad": (_grad, _grad),
    "jit(grad)": (_grad, lambda T, *given: T.jit(_grad(T, *given))),
    "vmap": (_vmap, _vmap),
    "jvp": (_jvp, _jvp),
}


@dataclasses.dataclass
class Seen:
    """What one call gave: the results and the gradients through them, up to an error if there is
    one; and the ambient state afterwards.
    """

    results: list[Any]
    error: BaseException | None
    after: dict[str, Any]
    generator: torch.Tensor


def run(state: State, when: str, way: str, tensors: str, ours: bool) -> list[Seen]:
    """The calls of one cell, by torch.func or by us."""
    T = torchfunc_jax if ours else torch.func
    with unchanged(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = Program(T)
        if state.make is not None:
            state.make(program)

        def passed(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            return state.body(program, x, w)

        f = passed if tensors == "passed" else lambda x: state.body(program, x, program.weight)
        count = 2 if tensors == "passed" else 1
        made = WAYS[way][ours](
            T, state.wrap(program, f) if when == "inside" else f, count, state.random
        )
        # where it is captured the weight alone requires grad
        recorded = way in ("functionalize", "jit") and tensors == "passed"

        def call(x: torch.Tensor, found: list[torch.Tensor]) -> None:
            args = [
                x,
                program.weight.detach().clone().requires_grad_(program.weight.requires_grad),
            ][:count]
            out = made(*args)
            outs = list(out) if isinstance(out, tuple) else [out]
            found += outs  # also if torch.autograd.grad raises an error
            wanted = [a for a in (*args, *program.layer.parameters()) if a.requires_grad]
            total = sum(o.float().sum() for o in outs if o.requires_grad)
            if isinstance(total, torch.Tensor) and wanted:
                found += torch.autograd.grad(
                    total, wanted, allow_unused=True, materialize_grads=True
                )
            found += [b.clone() for b in program.layer.buffers()]

        around = state.wrap(program, call)
        every = {"inside": [call] * 2, "around": [around] * 2, "between": [call, around] * 2}[when]
        return [
            _seen(one, torch.linspace(0.5, 2.5, 12).reshape(4, 3).sub(k).requires_grad_(recorded))
            for k, one in enumerate(every)
        ]


def _seen(call: Callable[..., Any], x: torch.Tensor) -> Seen:
    before = torch.get_rng_state()
    results: list[torch.Tensor] = []
    error = None
    try:
        call(x, results)
    except Exception as e:
        error = e
    drawn = torch.get_rng_state()
    return Seen(results, error, ambient() | {"drawn": not torch.equal(before, drawn)}, drawn)


def declared(state: State, when: str, way: str, tensors: str) -> Other | None:
    """What the table says of a cell; None: "as torch.func"."""
    return next((other for other in state.others if other.holds(when, way, tensors)), None)


def observed(state: State, when: str, way: str, tensors: str) -> tuple[str, str]:
    """What a cell holds: "as torch.func", "refused: <class of the error>", "works", or "differs";
    and the details.

    "works": torch.func raises an error, ours does not.
    """
    theirs, ours = (run(state, when, way, tensors, mine) for mine in (False, True))
    refused = ""
    for k, (t, o) in enumerate(zip(theirs, ours, strict=True)):
        if o.error is not None and (t.error is None or not isinstance(o.error, type(t.error))):
            refused = refused or f"refused: {type(o.error).__name__}"
            detail = f"call {k}: {o.error!r} where torch.func has {t.error!r}"
            if o.after | {"drawn": False} != t.after | {"drawn": False} and t.error is None:
                return "differs", f"call {k}: afterwards {_differences(t.after, o.after)}; {detail}"
    if refused:
        return refused, detail
    for k, (t, o) in enumerate(zip(theirs, ours, strict=True)):
        if t.error is not None and o.error is None:
            return "works", f"call {k}: torch.func has {t.error!r}"
        if o.after != t.after:
            return "differs", f"call {k}: afterwards {_differences(t.after, o.after)}"
        difference = _difference([*o.results, o.generator], [*t.results, t.generator], state)
        if difference:
            return "differs", f"call {k}: {difference}"
    return "as torch.func", repr(ours[0].error or "")


def _differences(theirs: dict[str, Any], ours: dict[str, Any]) -> str:
    return ", ".join(
        f"{name} is {ours[name]} for {theirs[name]}"
        for name in theirs
        if theirs[name] != ours[name]
    )


def _difference(ours: list[Any], theirs: list[Any], state: State) -> str:
    facts = [
        [(type(t), t.dtype, t.shape, t.device, t.requires_grad) for t in found]
        for found in (ours, theirs)
    ]
    if facts[0] != facts[1]:
        return f"{facts[0]} is not {facts[1]}"
    for o, t in zip(ours, theirs, strict=True):
        if t.device.type == "meta":
            continue
        try:
            torch.testing.assert_close(
                o.detach(), t.detach(), rtol=state.rtol, atol=state.atol, equal_nan=True
            )
        except AssertionError as error:
            return f"{o} is not {t}: {error}"
    return ""


# -- the ambient state itself ----------------------------------------------------------------------
_GLOBAL_HOOKS = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)


def _flushes() -> bool:
    return torch.tensor([1e-38]).mul(1e-3).item() == 0


def ambient() -> dict[str, Any]:
    """PyTorch's ambient state, by name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {
            "default dtype": torch.get_default_dtype(),
            "default device": torch.get_default_device(),
            "grad mode": torch.is_grad_enabled(),
            "inference mode": torch.is_inference_mode_enabled(),
            "deterministic algorithms": torch.get_deterministic_debug_mode(),
            "filled memory": torch.utils.deterministic.fill_uninitialized_memory,
            "float32 precision": _precisions(),
            "autocast": [
                (torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")
            ],
            "autocast cache": torch.is_autocast_cache_enabled(),
            "anomaly mode": (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
            "modes": (
                len(torch.overrides._get_current_function_mode_stack()),
                torch._C._len_torch_dispatch_stack(),
            ),
            "global hooks": [len(getattr(modules, name)) for name in _GLOBAL_HOOKS],
            "saved tensor hooks": torch._C._autograd._top_saved_tensors_default_hooks(True)
            is not None,
            "denormals": _flushes(),
            "forward AD": torch._C._is_fwd_grad_enabled(),
        }


def _precisions() -> Any:
    return [
        torch._C._get_fp32_precision_getter(backend, "matmul" if op else "all")
        for backend, op in (("mkldnn", 1), ("cuda", 1))
    ]


@contextlib.contextmanager
def unchanged() -> Iterator[None]:
    """Whatever happens inside, PyTorch is afterwards as every process starts."""
    hooks = [dict(getattr(modules, name)) for name in _GLOBAL_HOOKS]
    torch.set_float32_matmul_precision("highest")  # as below
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
        torch.set_grad_enabled(True)
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True
        torch.set_float32_matmul_precision("highest")
        torch.set_autocast_enabled("cpu", False)
        torch.set_autocast_dtype("cpu", torch.bfloat16)
        torch.set_autocast_cache_enabled(True)
        torch.clear_autocast_cache()
        torch.autograd.set_detect_anomaly(False, True)
        torch.set_flush_denormal(False)
        for name, before in zip(_GLOBAL_HOOKS, hooks, strict=True):
            getattr(modules, name).clear()
            getattr(modules, name).update(before)


# -- what is not as torch.func, and why ------------------------------------------------------------
_BY_JIT = "jit, jit(grad)"
_NO_DATA = Other(
    "refused",
    "JAX computes with data, which tensors on the device meta do not have.",
    error=TypeError,
    match="on device 'meta'",
    ways=_BY_JIT,
)
_MODULE_HOOKS = Other(
    "works",
    "torch.func refuses full backward hooks of modules under grad; here they are called, as "
    "PyTorch calls them.",
    ways="jit(grad)",
)
_SAVED = Other(
    "refused",
    "The values that JAX keeps for its derivatives are not those that PyTorch would save, "
    "so hooks on these could not be called.",
    match="don't yet support saved tensor hooks",
    ways="jit",
)
_KEPT = (
    "JAX's values are never changed in place, so that the gradient is right "
    "where PyTorch refuses it."
)
_INFERENCE = Other(
    "works",
    "Tensors made in inference mode are ordinary tensors in JAX; torch.func cannot "
    "differentiate them.",
    when="inside",
    tensors="passed",
    ways="jit(grad)",
)


# -- autocast --------------------------------------------------------------------------------------
def _autocast(dtype: torch.dtype = torch.bfloat16, **options: Any) -> Scope:
    return lambda _: torch.autocast("cpu", dtype, **options)


def _layer_ran(program: Program) -> contextlib.AbstractContextManager[None]:
    """Autocast, with its copies of the weights made before."""

    @contextlib.contextmanager
    def scope() -> Iterator[None]:
        with torch.autocast("cpu", torch.bfloat16):
            program.layer(torch.ones(1, 3))
            yield

    return scope()


def _layer_runs_after(program: Program, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """The layer twice, the second time by what autocast has kept of the first."""
    return program.linear(x, w) + program.linear(x * 2, w)


def _reads(question: Callable[[], Any]) -> Callable[..., torch.Tensor]:
    """A program that asks PyTorch for its state, and takes another branch for each answer."""
    return lambda program, x, w: program.linear(x, w) * (1 + sum(map(ord, repr(question()))))


for _dtype in (torch.bfloat16, torch.float16):
    _name = str(_dtype).removeprefix("torch.")
    state(f"autocast, {_name}", _autocast(_dtype), rtol=0.03, atol=0.03)
    state(
        f"autocast, {_name}, no cache",
        _autocast(_dtype, cache_enabled=False),
        _layer_runs_after,
        rtol=0.03,
        atol=0.06,
    )
state("autocast, the layer called twice", _autocast(), _layer_runs_after, rtol=0.03, atol=0.06)
state("autocast, the layer called before", _layer_ran, rtol=0.03, atol=0.03)
state("autocast switched off in autocast", _both(_autocast(), _autocast(enabled=False)))
state(
    "autocast's dtype",
    _setting(lambda d: torch.set_autocast_dtype("cpu", d), torch.float16, torch.bfloat16),
    lambda p, x, w: _within(torch.autocast("cpu"), p, x, w),
    rtol=0.03,
    atol=0.03,
)
state(
    "autocast's cache",
    _setting(torch.set_autocast_cache_enabled, False, True),
    lambda p, x, w: _within(torch.autocast("cpu"), p, x, w),
    rtol=0.03,
    atol=0.03,
)
state(
    "autocast's cache, asked for",
    _setting(torch.set_autocast_cache_enabled, False, True),
    _reads(torch.is_autocast_cache_enabled),
    Other(
        "differs",
        "While a function runs in JAX, autocast keeps no copies of weights, and "
        "is_autocast_cache_enabled() is False.",
        when="between",
        ways="jit, jit(grad)",
    ),
)
state(
    "autocast, asked for",
    _autocast(),
    _reads(lambda: (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"))),
    rtol=0.03,
    atol=0.03,
)


def _within(context: Any, program: Program, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with context:
        return program.linear(x, w)


# -- defaults of factories -------------------------------------------------------------------------
def _factories(program: Program, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (
        program.linear(x, w) * torch.tensor([0.1, 0.3])
        + torch.full((2,), 0.1)
        + torch.arange(2) / 3
        + torch.ones(2).mean()
    )


def _explicit(program: Program, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (
        program.linear(x, w) * torch.tensor([0.1, 0.3], device="cpu")
        + x.new_ones(2)
        + torch.zeros_like(w[:, 0])
    )


def _factory_alone(program: Program, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.ones(2)


for _dtype in (torch.float64, torch.float16, torch.bfloat16):
    state(
        f"default dtype {_dtype}",
        _setting(torch.set_default_dtype, _dtype, torch.float32),
        _factories,
        rtol=1e-4,
        atol=1e-4,
    )
state(
    "default dtype, asked for",
    _setting(torch.set_default_dtype, torch.float64, torch.float32),
    _reads(torch.get_default_dtype),
)
_META: dict[str, tuple[Other, ...]] = {
    "cpu": (),
    "meta": (
        Other(
            "refused",
            "An operator on a tensor without data and one with data raises an error in torch.func "
            "too; Python's operators raise their TypeError instead of our error.",
            error=TypeError,
            match="unsupported operand|on device 'meta'",
            ways=_BY_JIT,
        ),
    ),
}
for _device in ("cpu", "meta"):
    for _name, _scope in {
        f"default device {_device}": _setting(torch.set_default_device, _device, None),
        f"with torch.device({_device})": lambda _, device=_device: torch.device(device),
    }.items():
        state(f"{_name}, a factory", _scope, _factories, *_META[_device])
        state(f"{_name}, devices given", _scope, _explicit)
        if _device == "meta":
            state(f"{_name}, a factory alone", _scope, _factory_alone, _NO_DATA)


def _grad_fails_on_meta() -> bool:
    """Whether torch.func.grad of a function that makes a tensor fails where the default device is
    meta, as in PyTorch 2.13.
    """
    with torch.device("meta"):
        try:
            torch.func.grad(lambda x: x * torch.tensor([]).ndim)(torch.ones((), device="cpu"))
        except RuntimeError:
            return True
    return False


state(
    "default device, asked for",
    _setting(torch.set_default_device, "meta", None),
    _reads(torch.get_default_device),
    *[
        Other(
            "works",
            "torch.func's own grad and jvp fail where the default device is meta.",
            ways="jit(grad)",
        )
    ]
    * _grad_fails_on_meta(),
    rtol=1e-4,
    atol=1e-3,
)


# -- what autograd records -------------------------------------------------------------------------
for _name, _scope in {
    "no_grad": lambda _: torch.no_grad(),
    "enable_grad": lambda _: torch.enable_grad(),
    "set_grad_enabled(False)": lambda _: torch.set_grad_enabled(False),
    "enable_grad in no_grad": _both(lambda _: torch.no_grad(), lambda _: torch.enable_grad()),
    "no_grad in enable_grad": _both(lambda _: torch.enable_grad(), lambda _: torch.no_grad()),
    "inference mode": lambda _: torch.inference_mode(),
    "inference_mode(False)": lambda _: torch.inference_mode(False),
    "no inference mode in inference mode": _both(
        lambda _: torch.inference_mode(), lambda _: torch.inference_mode(False)
    ),
}.items():
    state(_name, _scope, Program.linear, *[_INFERENCE] * (_name == "inference mode"))
state("grad mode, asked for", lambda _: torch.no_grad(), _reads(torch.is_grad_enabled))
state(
    "inference mode, asked for",
    lambda _: torch.inference_mode(),
    _reads(torch.is_inference_mode_enabled),
    _INFERENCE,
)
_REQUIRES_GRAD = "torch.func refuses requires_grad_() in a transformed function."
state(
    "the weight without requires_grad",
    lambda p: _flag(p.layer.requires_grad_, False, True),
    Program.linear,
    Other("works", _REQUIRES_GRAD, when="inside", ways="jit(grad)"),
    Other("works", _REQUIRES_GRAD, when="inside", ways="grad, vmap, jvp", tensors="passed"),
    Other(
        "differs",
        "The library reads requires_grad of a captured tensor before and after the function runs, "
        "but not in between.",
        when="inside",
        tensors="captured",
        ways="jit",
    ),
)


@contextlib.contextmanager
def _flag(setter: Callable[[Any], Any], value: Any, back: Any) -> Iterator[None]:
    setter(value)
    try:
        yield
    finally:
        setter(back)


# -- deterministic algorithms, precision, denormals ------------------------------------------------
def _put(program: Program, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return program.linear(x, w) + torch.zeros(2).put_(
        torch.tensor([0, 1]), torch.tensor([1.0, 2.0])
    )


def _uninitialized(program: Program, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Uninitialized memory, where it is known what is in there."""
    y = program.linear(x, w)
    if (
        torch.are_deterministic_algorithms_enabled()
        and torch.utils.deterministic.fill_uninitialized_memory
    ):
        return (
            y
            + torch.empty(2)
            + torch.empty_like(w[:, 0])
            + x.new_empty(2)
            + torch.empty(2, dtype=torch.int64)
        )
    return y


_deterministic = _setting(torch.use_deterministic_algorithms, True, False)
state("deterministic algorithms", _deterministic)
_WITHOUT = "XLA for CPUs is deterministic, so no operator is refused."
state(
    "deterministic algorithms, an operator without", _deterministic, _put, Other("works", _WITHOUT)
)
state(
    "deterministic algorithms, uninitialized memory",
    _deterministic,
    _uninitialized,
    Other(
        "differs",
        "Uninitialized memory is zero here, in every mode; PyTorch fills it with NaN in this one.",
        ways="functionalize, jit, vmap, jvp",
    ),
)
state(
    "deterministic algorithms, warnings alone",
    lambda _: _flag(lambda on: torch.use_deterministic_algorithms(on, warn_only=True), True, False),
    _put,
)
state(
    "deterministic algorithms, asked for",
    _deterministic,
    _reads(torch.are_deterministic_algorithms_enabled),
)
state(
    "uninitialized memory not filled",
    _both(
        _deterministic,
        lambda _: _flag(
            functools.partial(setattr, torch.utils.deterministic, "fill_uninitialized_memory"),
            False,
            True,
        ),
    ),
    _uninitialized,
)
for _precision in ("high", "medium"):
    state(
        f"float32 precision {_precision}",
        _setting(torch.set_float32_matmul_precision, _precision, "highest"),
        rtol=0.02,
        atol=0.02,
    )
state(
    "float32 precision, asked for",
    _setting(torch.set_float32_matmul_precision, "high", "highest"),
    _reads(torch.get_float32_matmul_precision),
)
state(
    "float32 precision of one backend",
    lambda _: _flag(
        functools.partial(setattr, torch.backends.mkldnn.matmul, "fp32_precision"), "bf16", "ieee"
    ),
    rtol=0.02,
    atol=0.02,
)
state(
    "float32 precision of one backend, asked for",
    lambda _: _flag(
        functools.partial(setattr, torch.backends.mkldnn.matmul, "fp32_precision"), "bf16", "ieee"
    ),
    _reads(lambda: torch.backends.mkldnn.matmul.fp32_precision),
    rtol=0.02,
    atol=0.02,
)
state("set_flush_denormal", _setting(torch.set_flush_denormal, True, False))
state(
    "set_flush_denormal, denormal numbers",
    _setting(torch.set_flush_denormal, True, False),
    lambda p, x, w: (p.linear(x, w) * 0 + 1e-38) * 1e-3 * 1e36,
)


# -- generators ------------------------------------------------------------------------------------
def _draws(program: Program, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return program.linear(x, w) * 0 + torch.rand(2)


def _draws_from(program: Program, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return program.linear(x, w) * 0 + torch.rand(2, generator=program.kept)


def _at_entry(setting: Callable[[Program], Any]) -> Scope:
    @contextlib.contextmanager
    def scope(program: Program) -> Iterator[None]:
        setting(program)
        yield

    return scope


@contextlib.contextmanager
def _put_back(_: Program) -> Iterator[None]:
    before = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(before)


def _keep_rng_state(program: Program) -> None:
    program.kept = torch.manual_seed(3).get_state()


def _keep_generator(program: Program) -> None:
    program.kept = torch.Generator().manual_seed(3)


state("no seed", lambda _: contextlib.nullcontext(), _draws, random=True)
state("manual_seed", _at_entry(lambda _: torch.manual_seed(7)), _draws, random=True)
state(
    "set_rng_state",
    _at_entry(lambda p: torch.set_rng_state(p.kept)),
    _draws,
    make=_keep_rng_state,
    random=True,
)
state("get_rng_state, and set back", _put_back, _draws, random=True)
state("fork_rng", lambda _: torch.random.fork_rng(devices=[]), _draws, random=True)
state(
    "fork_rng and manual_seed",
    _both(lambda _: torch.random.fork_rng(devices=[]), _at_entry(lambda _: torch.manual_seed(7))),
    _draws,
    random=True,
)
state(
    "a generator's manual_seed",
    _at_entry(lambda p: p.kept.manual_seed(7)),
    _draws_from,
    make=_keep_generator,
    random=True,
)
state("manual_seed, nothing drawn", _at_entry(lambda _: torch.manual_seed(7)), Program.linear)
state("fork_rng, nothing drawn", lambda _: torch.random.fork_rng(devices=[]))


# -- hooks -----------------------------------------------------------------------------------------
def _scaled(gradients: Any, by: float) -> Any:
    return tuple(None if g is None else g * by for g in gradients)


def _flagged(program: Program) -> contextlib.AbstractContextManager[None]:
    return _flag(functools.partial(setattr, program, "kept"), True, None)


def _hook_on_result(program: Program, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = program.linear(x, w)
    if program.kept and y.requires_grad:
        y.register_hook(lambda g: g * 7)
    return y * y


def _changed_after(program: Program, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = program.linear(x, w)
    z = y * y
    y.mul_(2)
    return z


for _name, _add in {
    "forward hook": lambda p: p.layer.register_forward_hook(lambda m, a, y: y * 2),
    "forward hook with keywords": lambda p: p.layer.register_forward_hook(
        lambda m, a, k, y: y * 2, with_kwargs=True
    ),
    "forward pre-hook": lambda p: p.layer.register_forward_pre_hook(lambda m, a: (a[0] + 1,)),
    "full backward hook": lambda p: p.layer.register_full_backward_hook(lambda m, i, o: None),
    "full backward hook that replaces": lambda p: p.layer.register_full_backward_hook(
        lambda m, i, o: _scaled(i, 3)
    ),
    "full backward pre-hook": lambda p: p.layer.register_full_backward_pre_hook(
        lambda m, o: _scaled(o, 5)
    ),
    "backward hook, the old kind": lambda p: p.layer.register_backward_hook(lambda m, i, o: None),
    "hook on the weight": lambda p: p.weight.register_hook(lambda g: g * 2),
    "global forward hook": lambda p: modules.register_module_forward_hook(lambda m, a, y: y * 2),
    "global forward pre-hook": lambda p: modules.register_module_forward_pre_hook(
        lambda m, a: (a[0] + 1,)
    ),
    "global full backward hook": lambda p: modules.register_module_full_backward_hook(
        lambda m, i, o: _scaled(i, 3)
    ),
    "global full backward pre-hook": lambda p: modules.register_module_full_backward_pre_hook(
        lambda m, o: _scaled(o, 5)
    ),
}.items():
    others = (_MODULE_HOOKS,) * ("full backward" in _name)
    state(_name, _hook(_add), Program.linear, *others)
state(
    "a second forward hook",
    _hook(lambda p: p.layer.register_forward_hook(lambda m, a, y: y * 2)),
    make=lambda p: p.layer.register_forward_hook(lambda m, a, y: y + 1),
)
state("hook on a result", _flagged, _hook_on_result)
state(
    "saved_tensors_hooks",
    lambda _: torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t),
    lambda p, x, w: p.linear(x, w) ** 2,
    _SAVED,
)
state(
    "save_on_cpu",
    lambda _: torch.autograd.graph.save_on_cpu(),
    Program.linear,
    Other(
        "works",
        "It changes where tensors are kept, but no values, and JAX keeps its own tensors.",
        when="around, between",
        ways="jit(grad)",
    ),
)
state(
    "disable_saved_tensors_hooks",
    lambda _: torch.autograd.graph.disable_saved_tensors_hooks("no hooks here"),
)
state(
    "allow_mutation_on_saved_tensors",
    lambda _: torch.autograd.graph.allow_mutation_on_saved_tensors(),
    _changed_after,
    Other("works", _KEPT, when="inside", ways="jit"),
    Other("works", _KEPT, when="between"),
)


# -- modes -----------------------------------------------------------------------------------------
class SinIsCos(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (torch.cos if func in (torch.sin, torch.Tensor.sin) else func)(
            *args, **(kwargs or {})
        )


class Watches(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class DispatchedSinIsCos(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (torch.ops.aten.cos.default if func is torch.ops.aten.sin.default else func)(
            *args, **(kwargs or {})
        )


class DispatchWatches(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


for _name, _mode in {
    "function mode that watches": Watches,
    "function mode that changes": SinIsCos,
    "dispatch mode that watches": DispatchWatches,
    "dispatch mode that changes": DispatchedSinIsCos,
}.items():
    state(
        _name,
        lambda _, mode=_mode: mode(),
        lambda p, x, w: p.linear(x, w).sin(),
        *[
            Other(
                "differs",
                "The derivative is that of the operator that the mode runs, "
                "and not of the one that was called.",
                when="inside",
                ways=_BY_JIT,
            )
        ]
        * (_name == "dispatch mode that changes"),
    )
state(
    "DisableTorchFunctionSubclass",
    lambda _: torch._C.DisableTorchFunctionSubclass(),
    lambda p, x, w: p.linear(x, w)[..., 1:],
)


# -- looked on: anomaly mode, profilers, compilers -------------------------------------------------
def _nan_gradient(program: Program, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (program.linear(x, w) * 0).sqrt()


for _name, _body in {"": Program.linear, ", a gradient that is NaN": _nan_gradient}.items():
    state(f"anomaly mode{_name}", lambda _: torch.autograd.detect_anomaly(), _body)
    state(
        f"anomaly mode without check_nan{_name}",
        lambda _: torch.autograd.detect_anomaly(check_nan=False),
        _body,
    )
state(
    "anomaly mode, asked for",
    lambda _: torch.autograd.set_detect_anomaly(True),
    _reads(torch.is_anomaly_enabled),
)
state(
    "profiler", lambda _: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
)
state("record_function", lambda _: torch.profiler.record_function("here"))
state(
    "torch.compile",
    wrap=lambda _, f: torch.compile(f, backend="eager"),
    make=lambda _: torch.compiler.reset(),
)


# -- modules ---------------------------------------------------------------------------------------
class Doubled(nn.Module):
    def forward(self, w: torch.Tensor) -> torch.Tensor:
        return w * 2


def _swapped(program: Program) -> contextlib.AbstractContextManager[None]:
    return _flag(functools.partial(setattr, program, "layer"), program.kept, program.layer)


def _keep(change: Callable[[nn.Module], nn.Module]) -> Callable[[Program], None]:
    def make(program: Program) -> None:
        torch.manual_seed(1)
        program.kept = change(nn.Linear(3, 2, bias=False))

    return make


@contextlib.contextmanager
def _parametrized(program: Program) -> Iterator[None]:
    parametrize.register_parametrization(program.layer, "weight", Doubled())
    try:
        yield
    finally:
        parametrize.remove_parametrizations(program.layer, "weight", leave_parametrized=False)


def _parametrize(program: Program) -> None:
    parametrize.register_parametrization(program.layer, "weight", Doubled())
    program.weight = program.layer.parametrizations.weight.original


def _ddp(layer: nn.Module) -> nn.Module:
    if not torch.distributed.is_initialized():
        place = tempfile.mkdtemp()
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{place}/store", rank=0, world_size=1
        )
    return nn.parallel.DistributedDataParallel(layer)


def _replaced(program: Program, name: str, value: Any) -> contextlib.AbstractContextManager[None]:
    return _flag(
        functools.partial(setattr, program.layer, name), value, getattr(program.layer, name)
    )


def _add_dropout(program: Program) -> None:
    program.layer = nn.Sequential(program.layer, nn.Dropout(1.0))


for _name, _change in {
    "register_parametrization": lambda m: parametrize.register_parametrization(
        m, "weight", Doubled()
    ),
    "parametrizations.weight_norm": parametrizations.weight_norm,
    "parametrizations.spectral_norm": parametrizations.spectral_norm,
    "parametrizations.orthogonal": parametrizations.orthogonal,
    "utils.weight_norm": nn.utils.weight_norm,
    "utils.spectral_norm": nn.utils.spectral_norm,
    "DistributedDataParallel": _ddp,
}.items():
    others = ()
    if "_norm" in _name:
        others = (
            Other(
                "works",
                "PyTorch's operators have no forward-mode derivative; JAX's have.",
                tensors="passed",
                ways="jvp",
            ),
        )
    if "weight_norm" in _name:
        others += (
            Other(
                "differs",
                "PyTorch's second derivative of weight_norm is wrong; the one here agrees with "
                "finite differences.",
                tensors="passed",
                ways="grad, jit(grad)",
            ),
        )
    state(f"a layer with {_name}", _swapped, Program.linear, *others, make=_keep(_change))
_WRAPS = (
    "The function gives the captured weight other memory, or reads its memory, which the weight "
    "does not have while a function runs in JAX."
)
state(
    "register_parametrization, and removed",
    _parametrized,
    Program.linear,
    Other(
        "works",
        "It sets the weight's memory to the weight's own, which changes nothing; torch.func "
        "refuses it.",
        when="inside",
        ways="jit(grad)",
    ),
)
state("parametrize.cached", lambda _: parametrize.cached(), _layer_runs_after, make=_parametrize)
state(
    "DistributedDataParallel made there",
    lambda p: _flag(functools.partial(setattr, p, "layer"), _ddp(p.layer), p.layer),
    Program.linear,
    Other("refused", _WRAPS, when="inside", ways="jit", match="not allocated"),
)
state("evaluation mode", lambda p: _flag(p.layer.train, False, True), make=_add_dropout)
state(
    "forward replaced", lambda p: _replaced(p, "forward", lambda x: F.linear(x, p.layer.weight) + 1)
)
state(
    "weight replaced",
    lambda p: _replaced(p, "weight", p.kept),
    make=lambda p: setattr(p, "kept", nn.Parameter(torch.ones(2, 3))),
)


# -- set, and left so ------------------------------------------------------------------------------
for _name, _set, _body in (
    ("default dtype", lambda: torch.set_default_dtype(torch.float64), _factories),
    ("default device", lambda: torch.set_default_device("cpu"), _factories),
    ("grad mode", lambda: torch._C._set_grad_enabled(False), Program.linear),
    ("deterministic algorithms", lambda: torch.use_deterministic_algorithms(True), Program.linear),
    ("float32 precision", lambda: torch.set_float32_matmul_precision("high"), Program.linear),
    ("autocast", lambda: torch.set_autocast_enabled("cpu", True), Program.linear),
    ("autocast's dtype", lambda: torch.set_autocast_dtype("cpu", torch.float16), Program.linear),
    ("anomaly mode", lambda: torch.autograd.set_detect_anomaly(True), Program.linear),
    ("set_flush_denormal", lambda: torch.set_flush_denormal(True), Program.linear),
    (
        "global forward hook",
        lambda: modules.register_module_forward_hook(lambda m, a, y: y * 2),
        Program.linear,
    ),
):
    state(f"{_name}, left so", None, _body, wrap=_left(_set), rtol=0.03, atol=0.03)


def cells() -> Iterator[tuple[str, str, str, str]]:
    """(state, when, way, tensors) of every cell."""
    yield from itertools.product(STATES, WHENS, WAYS, TENSORS)
