"""Exported programs give PyTorch's results for every batch, also where PyTorch cannot be imported;
what cannot be exported says why.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib.util
import math
import re
import subprocess
import sys
import venv
from collections import namedtuple
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bridge.errors import DataDependentError
from bridge.export.exported import Exported
from torchfunc_jax import export, grad, hessian, jit, vmap

ROOT = Path(__file__).resolve().parents[2]
needs_files = pytest.mark.skipif(
    importlib.util.find_spec("flatbuffers") is None,
    reason="jax.export writes files with flatbuffers",
)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.GELU(), nn.Linear(8, 2))


def cnn(training: bool) -> nn.Module:
    layers = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(4 * 3 * 3, 5),
    )
    layers[1].running_mean.uniform_()
    return layers.train(training)


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()


def per_sample(model: nn.Module) -> Callable[..., Any]:
    params = dict(model.named_parameters())

    def loss(params: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(torch.func.functional_call(model, params, (x[None],)), y[None])

    return lambda x, y: vmap(grad(loss), in_dims=(None, 0, 0))(params, x, y)


Pair = namedtuple("Pair", "first second")


@dataclasses.dataclass
class Point:
    x: torch.Tensor
    y: torch.Tensor


torch.export.register_dataclass(Point)


def causal(x: torch.Tensor) -> torch.Tensor:
    n = x.shape[1]
    position = torch.arange(n, dtype=torch.float32)[:, None] / torch.tensor([1.0, 10.0, 100.0])
    x = x + position.sin()
    score = (x @ x.mT / x.shape[1] ** 0.5).masked_fill(torch.ones(n, n).triu(1).bool(), -math.inf)
    return score.softmax(-1) @ x


class Case(NamedTuple):
    name: str
    make: Callable[[], Any]  # the function
    args: Callable[[int], tuple[Any, ...]]  # its arguments for a batch of n
    batch: Any = "b"
    sizes: tuple[int, ...] = (1, 3, 8)
    tolerance: float = 1e-6


def images(n: int) -> tuple[torch.Tensor]:
    return (torch.randn(n, 2, 6, 6),)


def rows(n: int) -> tuple[torch.Tensor]:
    return (torch.randn(n, 3),)


CASES = [
    Case("MLP", mlp, rows),
    Case("CNN, BatchNorm in evaluation mode", lambda: cnn(False), images),
    Case("CNN, BatchNorm in training mode", lambda: cnn(True), images),
    Case("transformer encoder", transformer, lambda n: (torch.randn(n, 5, 8),)),
    Case(
        "numbers made of sizes",
        lambda: (
            lambda x: (
                x.mean(),
                x.var(0, correction=0),
                x.sum(0) / x.shape[0] ** 0.5,
                x.shape[0],
                x.reshape(-1),
                x @ x.T,
                torch.eye(x.shape[0]),
            )
        ),
        rows,
    ),
    Case(
        "trees",
        lambda: lambda p, q: {"b": Pair(p.x * q["k"], None), "a": [Point(p.y, 2.5)]},
        lambda n: (
            Point(torch.randn(n, 2), torch.randn(n)),
            {"k": torch.randn(n, 2), "name": "mean"},
        ),
    ),
    Case(
        "two sizes",
        lambda: lambda x, y: torch.cdist(x, y),
        lambda n: (torch.randn(n, 3), torch.randn(n + 2, 3)),
        ("b", {0: "c"}),
    ),
    Case("bfloat16", lambda: lambda x: (x.bfloat16() * 3).sin(), rows, tolerance=1e-2),
    Case("integers", lambda: nn.Embedding(10, 4), lambda n: (torch.randint(0, 10, (n, 3)),)),
    Case(
        "an argument that is written to, and its aliases",
        lambda: lambda x: (x.mul_(2), x[:, 0], x.T),
        rows,
    ),
    Case(
        "static arguments",
        lambda: lambda x, k, by=None: x * k if by is None else x,
        lambda n: (torch.randn(n, 3), 3),
    ),
    Case(
        "running sums, products and extrema",
        lambda: lambda x: (x.logcumsumexp(0), x.cumsum(0), x.cumprod(0), x.cummax(0), x.cummin(0)),
        rows,
        tolerance=1e-5,
    ),
    Case(
        "the gradient of a running sum",
        lambda: grad(lambda x: x.logcumsumexp(0).cos().sum()),
        rows,
        tolerance=1e-5,
    ),
    Case(
        "a Fourier transform of each row",
        lambda: lambda x: torch.fft.irfft(torch.fft.rfft(x)),
        lambda n: (torch.randn(n, 6),),
    ),
    Case("jit inside", lambda: jit(lambda x: x.cumsum(0)), rows),
]
SLOW = [
    Case(
        "per-sample gradients",
        lambda: per_sample(mlp()),
        lambda n: (torch.randn(n, 3), torch.randint(0, 2, (n,))),
    ),
    Case(
        "per-sample gradients of a CNN",
        lambda: per_sample(cnn(False)),
        lambda n: (*images(n), torch.randint(0, 5, (n,))),
    ),
    Case("Hessians", lambda: lambda x: vmap(hessian(lambda v: v.sin().prod()))(x), rows),
    Case("LSTM", lambda: nn.LSTM(3, 4, batch_first=True), lambda n: (torch.randn(n, 4, 3),)),
    Case(
        "symbolic images",
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3, stride=2), nn.MaxPool2d(2), nn.Flatten(2)),
        lambda n: (torch.randn(n, 3, n + 9, n + 10),),
        "b, _, h, w",
    ),
    Case(
        "symbolic texts: positions and a causal mask",
        lambda: causal,
        lambda n: (torch.randn(n, n + 3, 3),),
        "b, n, _",
    ),
    Case(
        "linear systems",
        lambda: lambda x: torch.linalg.solve(x @ x.mT + torch.eye(3), x),
        lambda n: (torch.randn(n, 3, 3),),
        tolerance=1e-5,
    ),
    Case(
        "tables of floats",
        lambda: lambda x: torch.linspace(0, 1, x.shape[0])[:, None] * x.quantile(0.3, 0),
        rows,
        sizes=(2, 3, 8),
    ),
    Case("unbiased variances", lambda: lambda x: (x.std(0), x.var()), rows, sizes=(2, 3, 8)),
    Case(
        "attention",
        lambda: lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True),
        lambda n: (torch.randn(n, 2, n + 2, 4),),
        "b, _, n, _",
    ),
]


def numpy_tree(tree: Any) -> Any:
    """A tree as the exported program takes and returns it."""
    if isinstance(tree, torch.Tensor):
        return (
            tree.detach().float().numpy() if tree.dtype == torch.bfloat16 else tree.detach().numpy()
        )
    if dataclasses.is_dataclass(tree):
        return {k: numpy_tree(v) for k, v in vars(tree).items()}
    if isinstance(tree, dict):
        return {k: numpy_tree(v) for k, v in tree.items()}
    if isinstance(tree, list | tuple):
        return (list if isinstance(tree, list) else tuple)(map(numpy_tree, tree))
    return tree


def arguments(tree: Any) -> Any:
    return jax.tree.map(lambda x: x if isinstance(x, np.ndarray) else None, numpy_tree(tree))


def same(found: Any, expected: Any, tolerance: float) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert a.shape == b.shape
        np.testing.assert_allclose(
            a.astype(b.dtype), b, rtol=0, atol=tolerance * max(1e-30, abs(b).max(initial=0))
        )


def state_after(fn: Any, args: tuple[Any, ...], written: tuple[str, ...]) -> dict[str, Any]:
    """The written tensors after a call of fn."""
    state = (
        dict(fn.state_dict())
        if isinstance(fn, nn.Module)
        else {f"args[{i}]": x for i, x in enumerate(args)}
    )
    return {name: numpy_tree(state[name]) for name in written}


@functools.cache
def made(name: str) -> tuple[Any, Exported]:
    """A case's function and its export, which has changed none of its tensors."""
    case = next(c for c in [*CASES, *SLOW] if c.name == name)
    torch.manual_seed(0)
    fn = case.make()
    before = copy.deepcopy(fn.state_dict()) if isinstance(fn, nn.Module) else {}
    exported = export(fn, *case.args(4), batch=case.batch)
    assert all(
        torch.equal(t, before[name]) for name, t in (fn.state_dict() if before else {}).items()
    )
    return fn, exported


def check(case: Case) -> None:
    fn, exported = made(case.name)
    weights = () if exported.weights is None else (exported.weights,)
    for n in case.sizes:
        args = case.args(n)
        given = arguments(args)
        copied = copy.deepcopy(fn) if isinstance(fn, nn.Module) else fn
        with jax.enable_x64(True):
            found = exported.program.call(*weights, *jax.tree.map(np.array, given))
        expected = copied(*args)
        if exported.written:
            found, after = found
            same(after, state_after(copied, args, exported.written), case.tolerance)
        same(found, numpy_tree(expected), case.tolerance)


@pytest.mark.thin(4)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_any_batch(case: Case) -> None:
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW, ids=lambda case: case.name)
def test_any_batch_of_more(case: Case) -> None:
    check(case)


BLOCKED = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "torchfunc_jax", "bridge"):
            raise ImportError(name)
sys.meta_path.insert(0, Blocked())
"""
RUN = """
for case in {cases}:
    jax.config.update("jax_enable_x64", True)
    program = jax.export.deserialize(bytearray(open(case + "/program.stablehlo", "rb").read()))
    weights = dict(numpy.load(case + "/weights.npz"))
    for n in (1, 3, 8):
        out = program.call(weights, numpy.load(case + f"/in{{n}}.npy"))
        numpy.save(case + f"/out{{n}}.npy", out[0] if isinstance(out, tuple) else out)
assert "torch" not in sys.modules
"""


def _environment(folder: Path) -> str:
    """The Python of a new environment that has JAX, and flatbuffers to read programs, but neither
    torch nor this project.
    """
    venv.create(folder, with_pip=True)
    python = str(next(folder.glob("*/python")))
    wanted = [f"{name}=={version(name)}" for name in ("jax", "jaxlib", "numpy", "flatbuffers")]
    subprocess.run([python, "-m", "pip", "install", "--quiet", *wanted], check=True, timeout=600)
    assert subprocess.run([python, "-c", "import torch"], capture_output=True).returncode
    return python


@needs_files
@pytest.mark.parametrize(
    "environment", ["this one", pytest.param("a new one", marks=pytest.mark.slow)]
)
def test_without_torch(environment: str, tmp_path: Path) -> None:
    """The lines that the page shows, and the acceptance models, where torch and this project cannot
    be imported.
    """
    python = sys.executable if environment == "this one" else _environment(tmp_path / "environment")
    page = (ROOT / "docs" / "export.md").read_text()
    (lines,) = re.findall(r"^```py\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert len(lines.splitlines()) == 4
    model = nn.Linear(20, 3)
    export(model, torch.randn(4, 20)).save(tmp_path / "model")
    expected: dict[str, Any] = {}
    for k, case in enumerate(CASES[:4]):
        fn, exported = made(case.name)
        folder = exported.save(tmp_path / str(k))
        for n in case.sizes:
            (x,) = case.args(n)
            np.save(folder / f"in{n}.npy", x.numpy())
            expected[f"{k}/out{n}.npy"] = copy.deepcopy(fn)(x).detach().numpy()
    code = BLOCKED + lines + RUN.format(cases=[str(k) for k in range(4)])
    found = subprocess.run(
        [python, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert not found.returncode, found.stderr
    printed = np.array(re.findall(r"[-\d.e]+", found.stdout), np.float32).reshape(7, 3)
    np.testing.assert_allclose(
        printed, model(torch.ones(7, 20)).detach().numpy(), rtol=1e-4, atol=1e-5
    )
    for name, value in expected.items():
        same(np.load(tmp_path / name), value, 1e-6)


def test_buffers_of_the_next_call() -> None:
    layer = nn.BatchNorm1d(3)
    exported = export(layer, torch.randn(4, 3))
    weights = exported.weights
    with jax.enable_x64(True):
        for n in (5, 2):
            x = torch.randn(n, 3)
            out, written = exported.program.call(weights, x.numpy())
            weights = weights | written
            same(out, numpy_tree(layer(x)), 1e-6)
    same(weights, {k: numpy_tree(v) for k, v in layer.state_dict().items()}, 1e-6)


def test_random_numbers_come_from_the_seed() -> None:
    exported = export(nn.Dropout(0.25), torch.ones(4, 3))
    draw = lambda seed, n=1000: np.asarray(
        exported.program.call(np.ones((n, 3), np.float32), seed=np.uint32(seed))
    )
    assert exported.random and exported.weights is None
    assert np.array_equal(draw(1), draw(1)) and not np.array_equal(draw(1), draw(2))
    assert abs((draw(3) == 0).mean() - 0.25) < 0.05 and set(np.unique(draw(3))) == {
        0,
        np.float32(4 / 3),
    }


@needs_files
@pytest.mark.parametrize("form", ["npz", "safetensors", "inside"])
def test_weights(form: str, tmp_path: Path) -> None:
    layer = nn.Linear(3, 2, dtype=torch.bfloat16)
    folder = export(layer, torch.randn(4, 3, dtype=torch.bfloat16), weights=form).save(
        tmp_path / "model"
    )
    # it replaces its own
    folder = export(layer, torch.randn(4, 3, dtype=torch.bfloat16), weights=form).save(folder)
    program = jax.export.deserialize(bytearray((folder / "program.stablehlo").read_bytes()))
    weights: tuple[Any, ...] = ()
    if form == "npz":
        weights = (dict(np.load(folder / "weights.npz")),)
    if form == "safetensors":
        load_file = pytest.importorskip("safetensors.numpy").load_file
        weights = (load_file(folder / "weights.safetensors"),)
    found = program.call(*weights, jax.numpy.ones((7, 3), jax.numpy.bfloat16))
    same(
        np.asarray(found, np.float32),
        numpy_tree(layer(torch.ones(7, 3, dtype=torch.bfloat16))),
        1e-2,
    )


@needs_files
def test_other_folders_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("")
    with pytest.raises(FileExistsError, match="save did not write it"):
        export(torch.sin, torch.ones(3)).save(tmp_path)


def test_a_size_of_one_is_a_case_of_its_own() -> None:
    exported = export(lambda x: x.squeeze(), torch.randn(4, 3))
    assert exported.constraints == ("b >= 2",)
    assert exported.program.call(np.ones((2, 3), np.float32)).shape == (2, 3)
    with pytest.raises(ValueError, match="b >= 2"):
        exported.program.call(np.ones((1, 3), np.float32))


def test_bounds_of_dims() -> None:
    dim = torch.export.Dim("n", min=2, max=40)
    exported = export(
        nn.Embedding(40, 2).weight.detach().__getitem__, torch.arange(4), batch={0: dim}
    )
    assert exported.constraints == ("n >= 2", "n <= 40")


def loop(x: torch.Tensor) -> Any:
    return sum(row.sin() for row in x)


def branch(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.shape[0] % 2 else x + 1


REFUSED = [
    ("a value", lambda x: x if x.sum() > 0 else -x, {}, DataDependentError, r"test_export.py:\d+"),
    (
        "a shape that depends on values",
        lambda x: x[x > 0],
        {},
        DataDependentError,
        r"aten.index.Tensor",
    ),
    (
        "a loop over the batch",
        loop,
        {},
        RuntimeError,
        r"aten.select.*test_export.py:\d+: return sum\(row",
    ),
    (
        "a size that Python branches on",
        branch,
        {},
        RuntimeError,
        r"other operations at other sizes.*test_export.py:\d+: return x \* 2",
    ),
    (
        "a choice at a larger size",
        lambda x: x * 2 if x.shape[0] > 200 else x,
        {},
        RuntimeError,
        "gives other results",
    ),
    (
        "an operator of fixed size",
        lambda x: torch.fft.fft(x, dim=0),
        {},
        RuntimeError,
        r"fft in aten.fft_r2c \(at .*test_export.py:\d+",
    ),
    (
        "a logarithm of a size",
        lambda x: x * math.log(x.shape[0]),
        {},
        RuntimeError,
        r"mul \(at .*test_export.py:\d+.*no formula",
    ),
    (
        "a table",
        lambda x: x[torch.triu_indices(x.shape[0], x.shape[0])[0], 0],
        {},
        RuntimeError,
        "a table in .* has the shapes",
    ),
    (
        "a size that is fixed",
        lambda x: x + torch.ones(4, 3),
        {},
        RuntimeError,
        "expected shape should be broadcastable",
    ),
    (
        "sizes that contradict each other",
        lambda x: x,
        {"batch": "b, b"},
        ValueError,
        "'b' is 4 .*, and 3 in dimension 1",
    ),
    (
        "a tree of other arguments",
        lambda x: x,
        {"batch": (None, "b")},
        ValueError,
        "expected one entry for all arguments",
    ),
    ("a name that is none", lambda x: x, {"batch": 3}, ValueError, "expected names of dimensions"),
    (
        "a dimension that is not there",
        lambda x: x,
        {"batch": {2: "b"}},
        ValueError,
        "has 2 dimensions",
    ),
    (
        "a shape of another length",
        lambda x: x,
        {"batch": "b, n, m"},
        ValueError,
        "expected for args.0., which has shape",
    ),
    (
        "constraints that do not hold",
        lambda x: x,
        {"constraints": ["b >= 5"]},
        ValueError,
        "do not hold",
    ),
    (
        "constraints that fix the size",
        lambda x: x,
        {"constraints": ["b <= 4"]},
        ValueError,
        "allow too few",
    ),
    (
        "a format that is none",
        lambda x: x,
        {"weights": "pickle"},
        ValueError,
        "expected one of 'npz', 'safetensors', 'inside'",
    ),
    ("an argument's name", lambda x, seed: x, {"kwargs": {"seed": 1}}, ValueError, "'seed'"),
    ("an output that is no array", lambda x: (x, "mean"), {}, TypeError, r"output\[1\] is a str"),
]


@pytest.mark.parametrize(
    ("name", "fn", "options", "error", "words"), REFUSED, ids=[row[0] for row in REFUSED]
)
def test_what_cannot_be_exported_says_why(
    name: str, fn: Any, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        export(fn, torch.randn(4, 3), **options)


@pytest.mark.parametrize("weights", ["npz", "inside"])
def test_what_is_exported_does_not_change_with_the_module(weights: str) -> None:
    model, x = torch.nn.Linear(4, 3), torch.randn(3, 4)
    expected = model(x).detach().numpy()
    exported = export(model, x, weights=weights)
    with torch.no_grad():
        model.weight.zero_()
    given = () if exported.weights is None else (exported.weights,)
    np.testing.assert_allclose(
        exported.program.call(*given, x.numpy()), expected, rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("transform", [vmap, grad, jit])
def test_a_captured_tensor_of_a_transform_is_refused(transform: Callable[..., Any]) -> None:
    def inside(row: torch.Tensor) -> torch.Tensor:
        export(lambda y: y * row, torch.ones(3, 4))
        return row.sum()

    with pytest.raises(RuntimeError, match="export"):
        transform(inside)(torch.ones(4) if transform is grad else torch.ones(2, 4))
