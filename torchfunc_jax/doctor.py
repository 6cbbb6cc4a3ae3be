"""The beginning of a bug report: installed versions, their known problems, and a self-check of the
transforms.

``KNOWN`` is the table of known problems and ``CHECKS`` the table of checks. ``examine`` runs the
checks in a process of their own, so that a crash becomes a line of the report.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch import nn

import torchfunc_jax
from bridge import compiling
from torchfunc_jax._machine import machine

#: The oldest and the newest version that the tests run on; docs/versions.md has their results.
TESTED = {"python": ("3.11", "3.13"), "torch": ("2.11.0", "2.15.0"), "jax": ("0.10.2", "0.12.0.1")}
_PACKAGES = ("jaxlib", "flax", "numpy")
_VARIABLES = re.compile(r"(JAX|XLA|LIBTPU|TPU|TORCH|PYTORCH|TORCHFUNC_JAX|CUDA|NVIDIA|OMP|MKL)_")
_PATIENCE = 60.0  # the seconds that one check may take
_PROGRAM = "from torchfunc_jax.doctor import _serve; _serve()"


@dataclasses.dataclass(frozen=True, slots=True)
class Known:
    """A known problem, or a setting that changes numbers.

    Attributes:
        title: a short name of the problem.
        status: "worked around" if the user need not do anything; "untested", "unsupported";
            "setting" for a setting of the user's.
        what: the effect, and what to do.
    """

    title: str
    status: str
    what: str


@dataclasses.dataclass(frozen=True, slots=True)
class Checked:
    """The result of one check.

    Attributes:
        name: the name of the check.
        difference: the difference between torch.func and this library; None if they agree.
        seconds: the duration of the check, compilation included.
    """

    name: str
    difference: str | None
    seconds: float


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """The result of ``examine``.

    Attributes:
        versions: of Python, the operating system, and each package, by name.
        cpu: the processor's name, cores, architecture, and the widest instructions that torch uses.
        devices: JAX's and torch's names of the devices.
        environment: the environment variables that JAX, XLA and torch read, by name.
        settings: JAX's and torch's settings that change numbers, by name.
        known: the known problems that this combination has.
        checks: the results of the self-check.
    """

    versions: dict[str, str]
    cpu: dict[str, Any]
    devices: list[str]
    environment: dict[str, str]
    settings: dict[str, Any]
    known: list[Known]
    checks: list[Checked]

    @property
    def ok(self) -> bool:
        """Whether every check agreed with torch.func."""
        return all(c.difference is None for c in self.checks)


def examine(
    checks: bool = True, on_check: Callable[[str, Checked | None], None] | None = None
) -> Report:
    """Report what is installed and its known problems, and compare the transforms with
    torch.func's.

    Args:
        checks: False leaves the self-check out, which takes a minute or two.
        on_check: called with the name of each check before it runs and None, and with its result
            afterwards.

    Returns:
        Report

    Source: ``torch.utils.collect_env``, for the idea.

    Example:
        >>> from torchfunc_jax.doctor import examine
        >>> report = examine(checks=False)
        >>> sorted(report.versions)
        ['flax', 'jax', 'jaxlib', 'numpy', 'os', 'python', 'torch', 'torchfunc-jax']
        >>> report.ok
        True
    """
    facts = _facts()
    known = [row for applies, row in KNOWN if applies(facts)]
    done = []
    for name, result in _run_checks() if checks else ():
        if on_check is not None:
            on_check(name, result)
        if result is not None:
            done.append(result)
    return dataclasses.replace(facts, known=known, checks=done)


# -- what is installed -----------------------------------------------------------------------------
def _facts() -> Report:
    here = machine()
    versions = {"python": here["python"], "torch": here["torch"], "jax": here["jax"]}
    versions |= {name: _version(name) for name in _PACKAGES}
    versions |= {"torchfunc-jax": here["torchfunc_jax"], "os": platform.platform()}
    cpu = {
        "name": here["cpu"],
        "cores": here["cores"],
        "architecture": platform.machine(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
    }
    settings = {
        name: getattr(jax.config, name)
        for name in ("jax_enable_x64", "jax_default_matmul_precision")
    }
    settings |= {
        "torch.get_float32_matmul_precision()": torch.get_float32_matmul_precision(),
        "torch.get_default_dtype()": str(torch.get_default_dtype()),
    }
    environment = {
        name: value for name, value in sorted(os.environ.items()) if _VARIABLES.match(name)
    }
    return Report(versions, cpu, _devices(), environment, settings, [], [])


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _devices() -> list[str]:
    found = []
    for backend in ("cpu", "gpu", "tpu"):
        try:
            devices = jax.devices(backend)
        except RuntimeError:  # no such backend here
            continue
        default = ", the default" if devices[0].platform == jax.devices()[0].platform else ""
        found += [f"jax {d.platform}:{d.id} ({d.device_kind}{default})" for d in devices]
    found += [
        f"torch cuda:{i} ({torch.cuda.get_device_name(i)})"
        for i in range(torch.cuda.device_count())
    ]
    found += ["torch mps"] * torch.backends.mps.is_available()
    return found


# -- known problems --------------------------------------------------------------------------------
def _parts(version: str) -> tuple[int, ...]:
    """The numbers of a version: (2, 15, 0) for "2.15.0+cpu"."""
    return tuple(int(part) for part in re.findall(r"\d+", re.split(r"[^\d.]", version)[0]))


def _older(name: str) -> Callable[[Report], bool]:
    return lambda facts: _parts(facts.versions[name]) < _parts(TESTED[name][0])


def _newer(name: str) -> Callable[[Report], bool]:
    newest = _parts(TESTED[name][1])
    return lambda facts: _parts(facts.versions[name])[: len(newest)] > newest


def _has(facts: Report, device: str) -> bool:
    return any(d.startswith(device) for d in facts.devices)


#: whether a problem is there, and the problem
KNOWN: tuple[tuple[Callable[[Report], bool], Known], ...] = (
    *(
        (
            _older(name),
            Known(
                f"{name} before {TESTED[name][0]}",
                "unsupported",
                f"The library needs {name} {TESTED[name][0]} or later.",
            ),
        )
        for name in TESTED
    ),
    *(
        (
            _newer(name),
            Known(
                f"{name} after {TESTED[name][1]}",
                "untested",
                f"{TESTED[name][1]} is the newest {name} that the tests run on. Go by the "
                "self-check below, and report what fails.",
            ),
        )
        for name in TESTED
    ),
    (
        lambda facts: facts.versions["jax"] != facts.versions["jaxlib"],
        Known(
            "jax and jaxlib of two versions",
            "untested",
            "The tests run with both of one version: pip install -U jax jaxlib",
        ),
    ),
    (
        lambda facts: compiling.miscompiles(),
        Known(
            "jaxlib 0.10.2 and 0.11.0 on x86 CPUs",
            "worked around",
            "XLA computes a part of a program with the library YNNPACK, and then gives wrong "
            "numbers in long batches or ends the process. torchfunc-jax uses that library for "
            "products of matrices only, which are right. For your own jax.jit, "
            "XLA_FLAGS=--xla_cpu_experimental_ynn_fusion_type= in the environment switches it off. "
            "jaxlib 0.11.1 and later are right (Python 3.12 and later).",
        ),
    ),
    (
        lambda facts: _has(facts, "jax cpu") and not _newer("jax")(facts),
        Known(
            "writes that overlap what they read, on CPUs",
            "worked around",
            "XLA reads what it has just written in y = a.reshape(3, 2); y.at[1:].set(y[:-1]) and "
            "its kind, in every jaxlib so far. torchfunc-jax reads first, also inside your own "
            "jax.jit. JAX code of your own is right with jnp.concatenate or jnp.where instead of "
            ".at[...]: https://github.com/openxla/xla/issues/49176",
        ),
    ),
    (
        lambda facts: (
            _has(facts, "jax gpu")
            and facts.settings["torch.get_float32_matmul_precision()"] != "highest"
        ),
        Known(
            "TF32",
            "setting",
            "Float32 products on the GPU have the precision that "
            "torch.set_float32_matmul_precision asks for, "
            'which is not "highest": differences of about 1e-3 are expected.',
        ),
    ),
    (
        lambda facts: (
            _has(facts, "jax gpu") and "XLA_PYTHON_CLIENT_PREALLOCATE" not in facts.environment
        ),
        Known(
            "memory of the GPU",
            "setting",
            "JAX takes three quarters of the GPU's memory when it starts, and torch gets what is "
            "left. XLA_PYTHON_CLIENT_PREALLOCATE=false changes that.",
        ),
    ),
    (
        lambda facts: _has(facts, "torch cuda") and not _has(facts, "jax gpu"),
        Known(
            "JAX without the GPU",
            "setting",
            "torch sees a GPU and JAX does not, so programs run on the CPU: pip install "
            '"jax[cuda13]", or jax[cuda12] for CUDA 12',
        ),
    ),
    (
        lambda facts: facts.settings["jax_enable_x64"],
        Known(
            "jax_enable_x64",
            "setting",
            "Nothing changes for torch tensors. JAX arrays that you make yourself have 64 bits.",
        ),
    ),
    (
        lambda facts: "fast_math=true" in facts.environment.get("XLA_FLAGS", ""),
        Known(
            "fast math in XLA_FLAGS",
            "setting",
            "XLA may then ignore NaN, infinities and signed zeros. PyTorch's results have them.",
        ),
    ),
)


# -- the self-check --------------------------------------------------------------------------------
class _Scaled(torch.autograd.Function):
    """x³ with a backward that is ten times too large, so that it shows whether it was used."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x**3

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * 30 * ctx.saved_tensors[0] ** 2

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return tangents[0] * 30 * ctx.saved_tensors[0] ** 2


_scaled = _Scaled.apply  # users keep such copies


def _energy(x: torch.Tensor) -> torch.Tensor:
    return (x.sin() * x.cumsum(0)).sum() + (x @ x.exp()).tanh()


def _products(x: torch.Tensor) -> torch.Tensor:
    return x.cumprod(0).tanh()


def _written(x: torch.Tensor) -> torch.Tensor:
    y = torch.zeros_like(x)
    y[0] = x[1] ** 2
    y[1:].mul_(2).add_(x[1:])
    return y.sum()


def _shifted(x: torch.Tensor) -> torch.Tensor:
    y = x.reshape(4, 3) * 2
    z = y.clone()
    z[1:] = y[:-1]
    return z.reshape(-1)


def _per_sample(api: Any) -> Callable[..., Any]:
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.GELU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 3)
    )
    weights = {name: p.detach() for name, p in model.named_parameters()}

    def loss(weights: Any, image: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(
            api.functional_call(model, weights, image[None]), label[None]
        )

    return lambda images: api.vmap(api.grad(loss), in_dims=(None, 0, 0))(
        weights, images, torch.arange(len(images)) % 3
    )


def _ensemble(api: Any) -> Callable[..., Any]:
    members = [nn.Linear(3, 2) for _ in range(4)]
    stacked, buffers = api.stack_module_state(members)
    return lambda x: api.vmap(lambda w, b: api.functional_call(members[0], (w, b), x))(
        stacked, buffers
    )


def _running(api: Any) -> Callable[..., Any]:
    """What a BatchNorm in a captured module counts and averages is changed
    when the call returns.
    """
    norm = nn.BatchNorm1d(3)

    def run(x: torch.Tensor) -> Any:
        out = _compiled(api, norm)(x)
        return out, norm.running_mean.clone(), norm.num_batches_tracked.clone()

    return run


def _backward(api: Any, fn: Any) -> Callable[..., Any]:
    def run(x: torch.Tensor) -> Any:
        weight = torch.full((3,), 0.7, requires_grad=True)
        leaf = x.clone().requires_grad_()
        api.vmap(lambda row: fn(row * weight))(leaf).square().sum().backward()
        return leaf.grad, weight.grad

    return run


def _recaptured(api: Any) -> Callable[..., Any]:
    """jit reads a captured tensor at each call, and compiles again for another shape."""

    def run(x: torch.Tensor) -> Any:
        scale = torch.tensor(2.0)
        compiled = _compiled(api, lambda x: torch.sin(x * scale))
        first = compiled(x)
        scale.mul_(3)
        return first, compiled(x), compiled(x[:2])

    return run


def _repeated(api: Any) -> Callable[..., Any]:
    """Whether a seed repeats the numbers of vmap,
    and whether those differ from sample to sample.
    """

    def run(x: torch.Tensor) -> Any:
        def draw() -> torch.Tensor:
            torch.manual_seed(1)
            return api.vmap(lambda row: row * 0 + torch.rand(3), randomness="different")(x)

        first = draw()
        return torch.equal(first, draw()), torch.equal(first[0], first[1])

    return run


def _as_arrays(api: Any) -> Callable[..., Any]:
    """JAX arrays in and out, inside the user's own jax.jit."""
    if api is torch.func:
        return api.grad(_energy)
    compiled = jax.jit(api.grad(_energy), compiler_options=compiling.options())
    return lambda x: torch.from_dlpack(compiled(jnp.asarray(x.numpy()))).clone()


def _linearized(api: Any) -> Callable[..., Any]:
    def run(x: torch.Tensor) -> Any:
        out, derivative = api.linearize(_energy, x)
        return out, derivative(x.cos())

    return run


def _vjp(api: Any) -> Callable[..., Any]:
    def run(x: torch.Tensor) -> Any:
        out, pullback = api.vjp(torch.sin, x)
        return out, pullback(x)

    return run


def _compiled(api: Any, fn: Callable[..., Any]) -> Callable[..., Any]:
    return fn if api is torch.func else api.jit(fn)


@dataclasses.dataclass(frozen=True, slots=True)
class _Check:
    """A function of torch.func or torchfunc_jax that makes a program, the shapes of its arguments,
    and whether jit takes all of it.
    """

    program: Callable[[Any], Callable[..., Any]]
    shapes: tuple[tuple[int, ...], ...] = ((3,),)
    jit: bool = True
    dtype: torch.dtype = torch.float32


_ROWS = ((5, 3),)
_DEEP = (3, 1, 2, 2, 8, 8, 8)

#: by name
CHECKS: dict[str, _Check] = {
    "vmap": _Check(lambda api: api.vmap(_energy), _ROWS),
    "grad": _Check(lambda api: api.grad(_energy)),
    "grad_and_value": _Check(lambda api: api.grad_and_value(_energy)),
    "vjp": _Check(_vjp),
    "jvp": _Check(lambda api: lambda x: api.jvp(_energy, (x,), (x.cos(),))),
    "linearize": _Check(_linearized),
    "jacrev": _Check(lambda api: api.jacrev(_products)),
    "jacfwd": _Check(lambda api: api.jacfwd(_products)),
    "hessian": _Check(lambda api: api.hessian(_energy)),
    "grad, float64": _Check(lambda api: api.grad(_energy), dtype=torch.float64),
    "vmap(grad)": _Check(lambda api: api.vmap(api.grad(_energy)), _ROWS),
    "functionalize": _Check(lambda api: api.functionalize(_written)),
    "grad of a function that writes in place": _Check(lambda api: api.grad(_written)),
    "vmap of writes that overlap what they read": _Check(
        lambda api: api.vmap(_shifted), ((2, 12),)
    ),
    "grad of writes that overlap what they read": _Check(
        lambda api: api.grad(lambda x: (_shifted(x) ** 2).sum()), ((12,),)
    ),
    "functional_call: gradients of each sample of a CNN": _Check(_per_sample, ((4, 1, 8, 8),)),
    "stack_module_state: an ensemble": _Check(_ensemble, _ROWS),
    "jit: a BatchNorm's running statistics": _Check(_running, _ROWS, jit=False),
    "jit: captured tensors that change, other shapes": _Check(_recaptured, jit=False),
    "autograd.Function: its backward": _Check(lambda api: api.grad(lambda x: _scaled(x).sum())),
    "autograd.Function: its jvp": _Check(lambda api: lambda x: api.jvp(_scaled, (x,), (x,))),
    "autograd.Function: vmap(grad)": _Check(
        lambda api: api.vmap(api.grad(lambda x: _scaled(x).sum())), _ROWS
    ),
    ".backward() through vmap": _Check(lambda api: _backward(api, torch.sin), _ROWS, jit=False),
    ".backward() through an autograd.Function": _Check(
        lambda api: _backward(api, _scaled), _ROWS, jit=False
    ),
    "random numbers: a seed repeats them": _Check(_repeated, _ROWS, jit=False),
    "JAX arrays inside jax.jit": _Check(_as_arrays, jit=False),
    "more than 32,768 samples": _Check(
        lambda api: lambda x, m: api.vmap(lambda row: ((m @ row) ** 2).sum())(x),
        ((32769, 3), (3, 3)),
    ),
    "three nested vmaps of rank 7": _Check(
        lambda api: api.vmap(api.vmap(api.vmap(lambda a, b: (a * b).sum(0)))), (_DEEP, _DEEP)
    ),
}


def compare(name: str) -> str | None:
    """Run one of the checks in this process.

    Args:
        name: one of ``CHECKS``.

    Returns:
        str | None: the first difference from torch.func; None where there is none.

    Raises:
        KeyError: there is no such check.

    Example:
        >>> from torchfunc_jax.doctor import compare
        >>> compare("vmap(grad)") is None
        True
    """
    check = CHECKS[name]

    def run(api: Any, compiled: Callable[[Any], Any] = lambda program: program) -> Any:
        torch.manual_seed(0)
        args = [torch.randn(shape, dtype=check.dtype) for shape in check.shapes]
        return compiled(check.program(api))(*args)

    expected = run(torch.func)
    rtol = 1e-4 if check.dtype is torch.float32 else 1e-9
    ways: dict[str, Callable[[], Any]] = {"un-jitted": lambda: run(torchfunc_jax)}
    if check.jit:
        ways["compiled"] = lambda: run(torchfunc_jax, torchfunc_jax.jit)
    for way, ours in ways.items():
        try:
            torch.testing.assert_close(ours(), expected, rtol=rtol, atol=rtol)
        except Exception as error:  # a difference, or whatever was raised instead of a result
            kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
            return f"{way}: {kind}{' '.join(str(error).split())}"
    return None


def _serve() -> None:
    """The other process: answers each name that it reads with the difference, both as a line of
    JSON.
    """
    torch.set_num_threads(1)  # the programs are small
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else prints
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(compare(json.loads(line))), file=answers, flush=True)


class _Process:
    """The process that runs checks."""

    def __init__(self) -> None:
        command = [sys.executable, "-c", _PROGRAM]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
        )
        self.answers: queue.Queue[str] = queue.Queue()
        self.errors: list[str] = []
        self.readers = [
            threading.Thread(target=self._read, daemon=True),
            threading.Thread(target=lambda: self.errors.extend(self.process.stderr), daemon=True),
        ]
        for reader in self.readers:
            reader.start()
        self.answers.get()  # it has started, or ended

    def _read(self) -> None:
        for line in self.process.stdout:
            self.answers.put(line)
        self.answers.put("")

    def ask(self, name: str) -> str | None:
        """The difference that the check finds, or how the process ended; None where all is well."""
        try:
            print(json.dumps(name), file=self.process.stdin, flush=True)
            answer = self.answers.get(timeout=_PATIENCE)
        except queue.Empty:
            self.end()
            return f"it took longer than {_PATIENCE:g} seconds and was stopped"
        except BrokenPipeError:
            answer = ""
        if answer:
            return json.loads(answer)
        code = self.process.wait()
        for reader in self.readers:
            reader.join()
        last = next((line.strip() for line in reversed(self.errors) if line.strip()), "")
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}: {last}"
        return f"the process ended {how}"

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def _run_checks() -> Iterator[tuple[str, Checked | None]]:
    """Each name before its check and after, then with the result; a process that ends is started
    again for the next.
    """
    process: _Process | None = None
    try:
        for name in CHECKS:
            yield name, None
            process = _Process() if process is None or process.ended else process
            start = time.monotonic()
            difference = process.ask(name)
            yield name, Checked(name, difference, time.monotonic() - start)
    finally:
        if process is not None:
            process.end()
