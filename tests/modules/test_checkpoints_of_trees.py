"""Checkpoints: what is saved is what is loaded, in files of others too; what is at a path, damage,
and processes that are killed.
"""

from __future__ import annotations

import dataclasses
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from flax import nnx
from flax.training.train_state import TrainState
from torch import nn

import bridge
from bridge import checkpoint_files, checkpoints
from bridge.modules import as_tensor

FORMATS = ["state.safetensors", "state.orbax", "state"]


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass(frozen=True)
class Run:
    step: int
    weights: Any


@flax.struct.dataclass
class Struct:
    step: Any
    name: str = flax.struct.field(pytree_node=False)
    weights: Any = None


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def stepped(kind: Callable[..., torch.optim.Optimizer], **options: Any) -> dict[str, Any]:
    model = net()
    optimizer = kind(model.parameters(), **options)
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    return optimizer.state_dict()


DTYPES = [
    "bool",
    *(f"{sign}int{n}" for sign in ("", "u") for n in (8, 16, 32, 64)),
    "float16",
    "bfloat16",
    "float32",
    "float64",
]
DTYPES += [
    "complex64",
    "complex128",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
]


def numbers(dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    return np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)


def of_jax() -> dict[str, Any]:
    with jax.enable_x64(True):
        return {
            d: {str(s): jnp.asarray(numbers(d, s)) for s in ((2, 3), (), (0, 4), (1,))}
            for d in DTYPES
        }


CASES: dict[str, Callable[[], Any]] = {
    "params": lambda: bridge.params(net()),
    "adam of optax": lambda: optax.adam(0.1).init(bridge.params(net())),
    "chain of optax": lambda: optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(0.1, 10))
    ).init(bridge.params(net())),
    "state_dict": lambda: dict(net().state_dict()),
    "ordered": lambda: net().state_dict(),
    "SGD": lambda: stepped(torch.optim.SGD, lr=0.1, momentum=0.9),
    "Adam": lambda: stepped(torch.optim.Adam, betas=(0.8, 0.99), amsgrad=True),
    "everything": lambda: {
        "model": net().state_dict(),
        "optimizer": stepped(torch.optim.AdamW),
        "epoch": 3,
        "best": 0.1,
        "config": {"name": "é"},
    },
    "dtypes of jax": of_jax,
    "dtypes of numpy": lambda: {
        d: [numbers(d, (2, 3)), numbers(d, ()), numbers(d, (3, 0)), numbers(d, (1,))[0]]
        for d in DTYPES
    },
    "dtypes of torch": lambda: {
        d: [as_tensor(x).clone() for x in (numbers(d, (2, 3)), numbers(d, ()), numbers(d, (3, 0)))]
        for d in DTYPES
    },
    "special values": lambda: {
        "f": np.array([np.nan, np.inf, -0.0]),
        "p": [float("inf"), -0.0, float("nan"), 1e-320, complex(0, float("inf"))],
    },
    "containers": lambda: Pair(
        [jnp.ones(2, jnp.bfloat16), (np.arange(3),)],
        {
            "a/b%c": torch.tensor([True, False]),
            "no": None,
            5: OrderedDict(x=1),
            "empty": {},
            "list": [],
            "é": '日本\n"',
            "": 3,
        },
    ),
    "dataclass": lambda: Run(10**30, {"w": torch.ones(2)}),
    "struct of Flax": lambda: Struct(jnp.ones((), int), "static", [jnp.ones(2)]),
    "Python's": lambda: {
        "t": True,
        "i": -7,
        "f": 0.1,
        "s": "",
        "n": None,
        "c": 1 + 2j,
        "l": [1, 2.5],
    },
    "alone": lambda: jnp.ones((2, 3)),
    "a number": lambda: 5,
    "torch": lambda: [
        torch.ones(2, dtype=torch.bfloat16, requires_grad=True),
        torch.tensor(3),
        torch.randn(2, 3).t(),
        torch.ones(1).expand(4),
    ],
    "keys": lambda: {
        "key": jax.random.key(3),
        "several": jax.random.split(jax.random.key(1, impl="rbg"), 3),
    },
    "nnx": lambda: nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0))),
    "nothing": dict,
}


def same(a: Any, b: Any) -> None:
    assert type(a) is type(b) or isinstance(b, nn.Parameter)
    if isinstance(a, torch.Tensor):
        assert (a.dtype, a.shape, a.requires_grad) == (b.dtype, b.shape, b.requires_grad)
        a, b = bridge.to_jax(a.detach()), bridge.to_jax(b.detach())
    if hasattr(a, "dtype"):
        assert a.dtype == b.dtype and a.shape == b.shape
        if isinstance(a, jax.Array) and jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    else:
        assert repr(a) == repr(b)


def all_same(a: Any, b: Any) -> None:
    if isinstance(
        b, torch.Tensor | jax.Array | np.ndarray | np.generic | str | int | float | complex | None
    ):
        same(a, b)
    elif isinstance(b, dict | list | tuple):
        assert type(a) is type(b) and len(a) == len(b)
        keys = list(b) if isinstance(b, dict) else range(len(b))
        assert not isinstance(b, dict) or list(a) == keys
        for key in keys:
            all_same(a[key], b[key])
    elif isinstance(b, Run):
        all_same(a.__dict__, b.__dict__)
    else:
        assert jax.tree.structure(a) == jax.tree.structure(b)
        all_same(jax.tree.leaves(a), jax.tree.leaves(b))


@pytest.mark.parametrize("file", ["new/state.safetensors", "new/state.orbax"])
@pytest.mark.parametrize("name", CASES)
def test_what_is_saved_is_loaded(name: str, file: str, tmp_path: Path) -> None:
    tree = CASES[name]()
    path = checkpoints.save(tmp_path / file, tree)
    all_same(checkpoints.load(path, like=tree), tree)
    by_name = checkpoints.load(path)
    assert all(
        isinstance(x, jax.Array | str | int | float | complex | None) for x in by_name.values()
    )
    if name in (
        "containers",
        "adam of optax",
        "chain of optax",
        "dataclass",
        "struct of Flax",
        "nnx",
    ):
        with pytest.raises(
            checkpoints.CheckpointError,
            match=r"as_saved: the tree has a .*, which only like can make again",
        ):
            checkpoints.load(path, as_saved=True)
    elif name != "torch":  # where a tensor requires grad, which is not saved
        all_same(checkpoints.load(path, as_saved=True), tree)
    assert os.listdir(path.parent) == [path.name]


def test_a_torch_optimizer_goes_on_where_it_was(tmp_path: Path) -> None:
    def run(steps: int, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        for i in range(steps):
            optimizer.zero_grad()
            model(torch.full((2, 3), float(i))).square().sum().backward()
            optimizer.step()

    made = lambda: (m := nn.Linear(3, 2), torch.optim.Adam(m.parameters(), 0.1))
    model, optimizer = made()
    run(3, optimizer, model)
    path = checkpoints.save(
        tmp_path / "a.safetensors",
        {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
    )
    other, again = made()
    state = checkpoints.load(path, as_saved=True)
    other.load_state_dict(state["model"])
    again.load_state_dict(state["optimizer"])
    run(3, optimizer, model)
    run(3, again, other)
    torch.testing.assert_close(other.state_dict(), model.state_dict(), rtol=0, atol=0)


# -- files of others -------------------------------------------------------------------------------
def test_safetensors_are_read_by_others(tmp_path: Path) -> None:
    model = net()
    checkpoints.save(
        tmp_path / "a.safetensors",
        {**model.state_dict(), "half": torch.ones(2, dtype=torch.float8_e4m3fn), "step": 3},
    )
    found = safetensors.torch.load_file(tmp_path / "a.safetensors")
    assert found.pop("half").dtype == torch.float8_e4m3fn
    torch.testing.assert_close(found, dict(model.state_dict()))


def test_safetensors_of_others(tmp_path: Path) -> None:
    state = {
        "w": torch.randn(2, 3),
        "h": torch.ones(2).to(torch.float8_e5m2),
        "b": torch.ones(2, dtype=torch.bfloat16),
    }
    safetensors.torch.save_file(state, tmp_path / "a.safetensors")
    all_same(checkpoints.load(tmp_path / "a.safetensors", like=state), state)
    assert sorted(checkpoints.load(tmp_path / "a.safetensors")) == ["b", "h", "w"]
    with pytest.raises(checkpoints.CheckpointError, match=r"bridge.checkpoints.save did not write"):
        checkpoints.load(tmp_path / "a.safetensors", as_saved=True)


def of_flax() -> dict[str, Any]:
    params = {
        "params": {"Dense_0": {"kernel": jnp.ones((2, 3)), "bias": jnp.zeros(3, jnp.bfloat16)}}
    }
    return {
        "params": params,
        "nested": {
            "params": params,
            "opt": optax.adam(0.1).init(params),
            "step": 3,
            "rate": 0.5,
            "list": [jnp.ones(2), (jnp.zeros(1),)],
        },
        "TrainState": TrainState.create(apply_fn=len, params=params, tx=optax.adam(0.1)),
        "nnx": nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.Param),
    }


@pytest.mark.parametrize("writer", ["StandardCheckpointer", "PyTreeCheckpointer"])
@pytest.mark.parametrize("name", of_flax())
def test_orbax_checkpoints_of_flax(name: str, writer: str, tmp_path: Path) -> None:
    tree = of_flax()[name]
    with getattr(orbax.checkpoint, writer)() as checkpointer:
        checkpointer.save(tmp_path / "theirs", tree)
    all_same(checkpoints.load(tmp_path / "theirs", like=tree), tree)
    if name == "nested":
        found = checkpoints.load(tmp_path / "theirs")
        assert (
            found["params.params.Dense_0.bias"].dtype == jnp.bfloat16
            and found["step"] == 3
            and found["opt.0.count"] == 0
        )
        shapes = jax.eval_shape(lambda: {**tree, "list": [jnp.ones(2), (jnp.zeros(1),)]})
        assert checkpoints.load(tmp_path / "theirs", like=shapes)["params"]["params"]["Dense_0"][
            "kernel"
        ].shape == (2, 3)


def test_a_checkpoint_manager(tmp_path: Path) -> None:
    tree = of_flax()["params"]
    with orbax.checkpoint.CheckpointManager(tmp_path / "run") as manager:
        manager.save(10, args=orbax.checkpoint.args.StandardSave(tree))
    all_same(checkpoints.load(tmp_path / "run/10/default", like=tree), tree)
    with pytest.raises(
        checkpoints.CheckpointError,
        match=r"run/10: no checkpoint, but default in it is; give that path",
    ):
        checkpoints.load(tmp_path / "run/10")


def test_orbax_reads_ours(tmp_path: Path) -> None:
    checkpoints.save(tmp_path / "a", {"w": jnp.ones((2, 3)), "step": 3})
    np.testing.assert_array_equal(
        orbax.checkpoint.PyTreeCheckpointer().restore(tmp_path / "a")["w"], np.ones((2, 3))
    )


# -- refusals --------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "format", "message"),
    [
        (
            "state.safetensor",
            None,
            (
                r"the extension of .*state.safetensor' says no format; expected "
                r"'.safetensors'.*'.orbax' or none"
            ),
        ),
        ("model.pt", None, "says no format"),
        ("v1.5", None, "says no format"),
        (
            "state.safetensors",
            "orbax",
            "'orbax' was given, but the extension .* says 'safetensors'",
        ),
        (
            "state.orbax",
            "safetensors",
            "'safetensors' was given, but the extension .* says 'orbax'",
        ),
        ("state", "pickle", "expected 'safetensors' or 'orbax', got 'pickle'"),
    ],
)
def test_the_extension_says_the_format(
    name: str, format: str | None, message: str, tmp_path: Path
) -> None:
    for call in (
        lambda: checkpoints.save(tmp_path / name, {}, format=format),
        lambda: checkpoints.load(tmp_path / name, format=format),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("format", ["safetensors", "orbax"])
def test_a_format_for_another_extension(format: str, tmp_path: Path) -> None:
    path = checkpoints.save(tmp_path / "v1.5", {"a": 1}, format=format)
    assert path.is_dir() == (format == "orbax") and checkpoints.load(path, format=format) == {
        "a": 1
    }


@pytest.mark.parametrize("file", FORMATS)
def test_trees_refused(file: str, tmp_path: Path) -> None:
    path = tmp_path / file
    with pytest.raises(FileNotFoundError, match="state"):
        checkpoints.load(path)
    wrong: list[tuple[Any, type[Exception], str]] = [
        (
            {"a": [object()]},
            TypeError,
            r"expected arrays, numbers, .* got <class 'object'> at 'a.0'",
        ),
        (
            {"a": jax.ShapeDtypeStruct((2,), jnp.float32)},
            TypeError,
            "expected arrays, .* got .*ShapeDtypeStruct'> at 'a'",
        ),
        ({"a": [np.array([None])]}, TypeError, r"'a.0' is a numpy array of Python objects"),
        ({"a": torch.ones(2, device="meta")}, TypeError, "'a'"),
        ({"a": torch.ones(2, dtype=torch.complex32)}, TypeError, "'a': .*complex32"),
        ({"a.b": jnp.ones(1), "a": {"b": jnp.ones(1)}}, ValueError, r"two leaves are called 'a.b'"),
        ({"1": 2, 1: 2}, ValueError, "two leaves are called '1'"),
        ({"__metadata__": jnp.ones(1)}, ValueError, "no leaf can be called '__metadata__'"),
    ]
    for tree, kind, message in wrong:
        with pytest.raises(kind, match=message):
            checkpoints.save(path, tree)
    assert not any(tmp_path.iterdir())
    checkpoints.save(
        path,
        {
            "a": np.array([1.5, 300]),
            "n": 2**40,
            "c": np.ones(1) * 1j,
            "s": "text",
            "big": np.array(1e10),
        },
    )
    refused: list[tuple[dict[str, Any], str]] = [
        (
            {"b": jnp.ones(2)},
            r"has \['b'\] that was not saved, and lacks \['a', 'big', 'c', 'n', 's'\] that was",
        ),
        ({"a": jnp.ones(3)}, r"'a' has shape \(3,\), but \(2,\) was saved"),
        (
            {"a": torch.ones(2, dtype=torch.int32)},
            r"'a': expected int32, got float64 that it cannot hold, 1.5 for one",
        ),
        ({"a": 2.0}, r"'a' is a float, but an array of shape \(2,\) was saved"),
        (
            {"n": np.zeros((), np.int32)},
            r"'n': expected int32, got int64 that it cannot hold, 1099511627776",
        ),
        ({"n": "text"}, r"'n' is a str, but 1099511627776 was saved"),
        ({"n": True}, r"'n' is a bool, but"),
        ({"s": 1}, "'s' is a int, but 'text' was saved"),
        ({"s": np.zeros(())}, "'s' is an array, but the string 'text' was saved"),
        ({"c": jnp.ones(1)}, r"'c': expected float32, got complex128"),
        (
            {"big": torch.ones((), dtype=torch.float16)},
            r"'big': expected float16, got float64 that it cannot hold, 10000000000",
        ),
    ]
    whole: dict[str, Any] = checkpoints.load(path)
    for change, message in refused:
        with pytest.raises(checkpoints.CheckpointError, match=rf"{file}: like: .*{message}"):
            checkpoints.load(path, like={**whole, **change} if "b" not in change else change)
    with pytest.raises(ValueError, match="like or as_saved, got both"):
        checkpoints.load(path, like=whole, as_saved=True)


@pytest.mark.parametrize(
    ("file", "package"), [("state.safetensors", "safetensors.numpy"), ("state", "orbax.checkpoint")]
)
def test_without_the_package(
    file: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=r"pip install 'torchfunc-jax\[checkpoints\]'"):
        checkpoints.save(tmp_path / file, {"a": jnp.ones(2)})


# -- what is at the path ---------------------------------------------------------------------------
def project(path: Path) -> None:
    (path / "src").mkdir(parents=True)
    (path / "src/main.py").write_text("print()")


def of_orbax(path: Path) -> None:
    orbax.checkpoint.PyTreeCheckpointer().save(path, {"a": np.ones(2)})


def with_a_note(path: Path) -> None:
    checkpoints.save(path, whole(1), format="orbax")
    (path / "note.txt").write_text("mine")


def damaged(path: Path) -> None:
    checkpoints.save(path, whole(1), format="orbax")
    (path / "torchfunc_jax.json").write_text("{}")


THERE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a project": (project, "a folder that bridge.checkpoints.save did not write"),
    "a text": (
        lambda path: path.write_text("text"),
        "a file that bridge.checkpoints.save did not write",
    ),
    "an empty file": (
        lambda path: path.write_text(""),
        "a file that bridge.checkpoints.save did not write",
    ),
    "safetensors of another program": (
        lambda path: safetensors.numpy.save_file({"a": np.ones(2)}, path),
        "a file that .* did not write",
    ),
    "a checkpoint of Orbax": (of_orbax, "a folder that .* did not write"),
    "a checkpoint in whose folder there is something else": (
        with_a_note,
        "a checkpoint with other files in its folder, note.txt",
    ),
    "a damaged checkpoint": (damaged, "a folder whose checkpoint is damaged"),
}


def everything(path: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(path)): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()
    }


@pytest.mark.parametrize("file", FORMATS)
@pytest.mark.parametrize("name", THERE)
def test_what_others_wrote_is_left_alone(name: str, file: str, tmp_path: Path) -> None:
    make, whose = THERE[name]
    if file.endswith("safetensors") and make in (with_a_note, damaged):
        whose = "a folder that .* did not write"
    path = tmp_path / file
    make(tmp_path / "made")
    (tmp_path / "made").rename(path)
    before = everything(tmp_path)
    with pytest.raises(
        FileExistsError,
        match=rf"{file} is {whose}, which is left alone; give another path, or overwrite=True",
    ):
        checkpoints.save(path, {"a": 1})
    assert everything(tmp_path) == before
    with pytest.warns(UserWarning, match=rf"{file} was {whose}; it is now .*{file}.replaced-1"):
        checkpoints.save(path, {"a": 1}, overwrite=True)
    checkpoints.save(path, {"a": 2})
    kept = {
        k.replace(f"{file}.replaced-1", file, 1): v
        for k, v in everything(tmp_path).items()
        if f"{file}.replaced-1" in k
    }
    assert kept == before and checkpoints.load(path) == {"a": 2}


@pytest.mark.parametrize("file", FORMATS)
def test_our_own_is_replaced(file: str, tmp_path: Path) -> None:
    path = tmp_path / file
    path.mkdir()  # an empty folder is nothing
    for i in range(3):
        checkpoints.save(path, {str(i): i, "w": np.full(3, i)})
        assert checkpoints.load(path)[str(i)] == i
        assert os.listdir(tmp_path) == [file]
    (tmp_path / "latest").symlink_to(path)
    options = (
        {}
        if path.suffix == ""
        else {"format": "safetensors" if path.suffix == ".safetensors" else "orbax"}
    )
    checkpoints.save(tmp_path / "latest", {"new": 1}, **options)
    assert (tmp_path / "latest").is_symlink() and checkpoints.load(path) == {"new": 1}


# -- damage ----------------------------------------------------------------------------------------
def whole(n: int) -> dict[str, Any]:
    return {
        "w": np.full((40, 5), n, np.float32),
        "steps": [n, torch.tensor(n)],
        "name": f"run {n}",
        "rate": n / 7,
    }


@pytest.mark.parametrize("file", FORMATS[:2])
def test_damaged_files(file: str, tmp_path: Path) -> None:
    """A byte changed at 100 random places: an error that names the file, or the right values."""
    draw = random.Random(0)
    path = checkpoints.save(tmp_path / file, whole(3))
    places = [(p, i) for p in checkpoint_files.files(path) for i in range(p.stat().st_size)]
    refused, clean = 0, checkpoints.load(path)
    for p, i in draw.sample(places, 100):
        before = p.read_bytes()
        p.write_bytes(before[:i] + bytes([before[i] ^ draw.randrange(1, 256)]) + before[i + 1 :])
        for like in (whole(0), None):
            try:
                found = checkpoints.load(path, like)
            except checkpoints.CheckpointError as error:
                assert file in str(error)
                refused += 1
            else:
                all_same(found, whole(3) if like else clean)
        p.write_bytes(before)
    assert refused > 150
    all_same(checkpoints.load(path, whole(0)), whole(3))


@pytest.mark.parametrize("file", FORMATS[:2])
def test_truncated_files(file: str, tmp_path: Path) -> None:
    path = checkpoints.save(tmp_path / file, whole(3))
    for p in checkpoint_files.files(path):
        before = p.read_bytes()
        for length in (0, 1, len(before) // 2, len(before) - 1):
            p.write_bytes(before[:length])
            with pytest.raises(checkpoints.CheckpointError, match=f"{file}: damaged"):
                checkpoints.load(path, whole(0))
        p.unlink()
        if path.is_dir() and p.name != "torchfunc_jax.json":
            with pytest.raises(
                checkpoints.CheckpointError,
                match=rf"{file}: damaged: the file .*{p.name} is missing",
            ):
                checkpoints.load(path, whole(0))
        p.write_bytes(before)


@pytest.mark.parametrize("file", FORMATS)
def test_what_is_no_checkpoint_is_not_read(file: str, tmp_path: Path) -> None:
    path = tmp_path / file
    path.write_text("text" * 100)
    with pytest.raises(
        checkpoints.CheckpointError,
        match=rf"{file}: (damaged, or no|expected a folder of Orbax.*found a file)",
    ):
        checkpoints.load(path)
    path.unlink()
    project(path)
    with pytest.raises(
        checkpoints.CheckpointError,
        match=rf"{file}: (expected a safetensors file.*found a folder|no Orbax checkpoint)",
    ):
        checkpoints.load(path)


def test_damage_in_an_orbax_checkpoint_of_flax_has_a_cause(tmp_path: Path) -> None:
    of_orbax(tmp_path / "a")
    for p in checkpoint_files.files(tmp_path / "a/d") or checkpoint_files.files(tmp_path / "a"):
        p.write_bytes(b"\0" * 10)
    with pytest.raises(
        checkpoints.CheckpointError, match=r"/a: damaged, or no orbax checkpoint: \w+: .+"
    ):
        checkpoints.load(tmp_path / "a")


# -- errors while writing --------------------------------------------------------------------------
WRITE = """
import resource, signal, sys
import numpy as np
from bridge import checkpoints
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))
for path in sys.argv[1:]:
    try:
        checkpoints.save(path, {"w": np.random.rand(100000)})
    except OSError as error:
        print("OSError", error, flush=True)
"""


def test_a_full_disk(tmp_path: Path) -> None:
    """A limit of the size of files stands for it."""
    paths = [checkpoints.save(tmp_path / file, whole(3)) for file in FORMATS[:2]]
    command = [sys.executable, "-c", WRITE, *map(str, paths)]
    # Python cuts compiled modules off at the limit, and reads them the next time
    kept = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    out = subprocess.run(
        command, capture_output=True, text=True, cwd=Path(__file__).parents[2], env=kept
    ).stdout
    for path, said in zip(paths, out.split("OSError")[1:], strict=True):
        assert path.name in said and "was not written, and what was there is as it was" in said
        all_same(checkpoints.load(path, whole(0)), whole(3))
    assert sorted(os.listdir(tmp_path)) == sorted(FORMATS[:2])


@pytest.mark.parametrize("function", ["rename", "replace", "mkdir", "fsync"])
@pytest.mark.parametrize("file", FORMATS[:2])
def test_refusals_of_the_file_system(
    file: str, function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoints.save(tmp_path / file, whole(3))
    real = getattr(os, function)
    for nth in range(3):  # of the calls that concern this folder, that one fails
        calls = iter(range(100))

        def refuse(*args: Any, nth: int = nth, calls: Any = calls, **kwargs: Any) -> Any:
            if (isinstance(args[0], int) or str(tmp_path) in str(args[0])) and next(calls) == nth:
                raise PermissionError(13, "Permission denied")
            return real(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(os, function, refuse)
            try:
                checkpoints.save(path, whole(3 + nth))
                written = 3 + nth
            except OSError as error:
                assert file in str(error) and "Permission denied" in str(error)
                written = 3
        found = checkpoints.load(path, whole(0))
        all_same(found, whole(found["steps"][0]))
        assert found["steps"][0] in (written, 3 + nth)
        assert os.listdir(tmp_path) == [file]
        checkpoints.save(path, whole(3))


@pytest.mark.parametrize("file", FORMATS[:2])
def test_a_folder_that_is_read_only(file: str) -> None:
    root = os.geteuid() == 0  # may write anywhere: for this time it is nobody
    with tempfile.TemporaryDirectory() as folder:
        path = checkpoints.save(Path(folder, file), whole(3))
        os.chmod(folder, 0o555)
        try:
            if root:
                os.seteuid(65534)
            with pytest.raises(
                PermissionError,
                match=rf"Permission denied; the checkpoint was not written, .*{file}",
            ):
                checkpoints.save(path, whole(4))
        finally:
            if root:
                os.seteuid(0)
            os.chmod(folder, 0o700)
        all_same(checkpoints.load(path, whole(0)), whole(3))
        assert os.listdir(folder) == [file]


# -- processes that are killed ---------------------------------------------------------------------
# Starts a process of its own for each line that it reads, before JAX has threads, and kills it at a
# random moment of its saves.
KILLED = """
import os, random, signal, sys, time
import numpy as np, torch, orbax.checkpoint, safetensors.numpy
from bridge import checkpoints
draw = random.Random(0)
for line in sys.stdin:
    path, n = line.rsplit(maxsplit=1)
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        n = int(n)
        while True:
            n += 1
            os.write(writing, b"%d " % n)
            checkpoints.save(path, {
                "w": np.full((200, 300), n, np.float32), "steps": [n, torch.tensor(n)],
                **{str(i): np.full(9, n) for i in range(9)},
            })
            os.write(writing, b"ok ")
    os.close(writing)
    said = b""
    while said.count(b"ok") < 1:
        said += os.read(reading, 100)
    started = time.monotonic()
    while said.count(b"ok") < 2:
        said += os.read(reading, 100)
    time.sleep(draw.random() * (time.monotonic() - started) * 1.5)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    while more := os.read(reading, 1000):
        said += more
    words = said.split()
    whole = words[-1] == b"ok"
    print(words[-2 if whole else -1].decode(), whole, flush=True)
"""


@pytest.mark.parametrize("times", [5, pytest.param(50, marks=pytest.mark.slow)])
def test_killed_while_it_saves(times: int, tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    ) as process:
        for file in FORMATS[:2]:
            path, n, found = tmp_path / file, 0, []
            for _ in range(times):
                process.stdin.write(f"{path} {n}\n")
                process.stdin.flush()
                last, finished = process.stdout.readline().split()
                n = int(last)
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", message=".*ended before it was done")
                    state = checkpoints.load(path, as_saved=True)
                step = state["steps"][0]
                assert step in ([n] if finished == "True" else [n - 1, n])
                assert all(
                    (np.asarray(x) == step).all()
                    for x in (*state["steps"], *(v for k, v in state.items() if k != "steps"))
                )
                found.append("between" if finished == "True" else "new" if step == n else "old")
            print(file, {kind: found.count(kind) for kind in ("old", "new", "between")})
            checkpoints.save(path, whole(1))
            all_same(checkpoints.load(path, whole(0)), whole(1))
        process.stdin.close()
    assert sorted(os.listdir(tmp_path)) == sorted(FORMATS[:2])


@pytest.mark.parametrize("moment", ["before", "between", "after"])
def test_killed_between_the_two_renames(moment: str, tmp_path: Path) -> None:
    path = checkpoints.save(tmp_path / "state", whole(1))
    shutil.copytree(path, tmp_path / "new")
    if moment != "before":
        path.rename(checkpoint_files.set_aside(path))
        if moment == "after":
            (tmp_path / "new").rename(path)
        else:
            with pytest.warns(
                UserWarning,
                match="ended before it was done; the checkpoint that was there before is loaded",
            ):
                all_same(checkpoints.load(path, whole(0)), whole(1))
    if moment != "between":
        all_same(checkpoints.load(path, whole(0)), whole(1))
    checkpoints.save(path, whole(2))
    all_same(checkpoints.load(path, whole(0)), whole(2))
    assert not checkpoint_files.set_aside(path).exists()


def test_threads_that_save_one_checkpoint(tmp_path: Path) -> None:
    for file in FORMATS[:2]:
        failed: list[Exception] = []

        def work(n: int, file: str = file, failed: list[Exception] = failed) -> None:
            try:
                for i in range(10):
                    checkpoints.save(tmp_path / file, whole(10 * n + i))
            except Exception as error:
                failed.append(error)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        found = checkpoints.load(tmp_path / file, whole(0))
        assert not failed and found["steps"][0] % 10 == 9
        all_same(found, whole(found["steps"][0]))
    assert sorted(os.listdir(tmp_path)) == sorted(FORMATS[:2])


def test_reading_while_another_thread_writes(tmp_path: Path) -> None:
    for file in FORMATS[:2]:
        path = checkpoints.save(tmp_path / file, {"w": np.zeros(3)})
        writer = threading.Thread(
            target=lambda path=path: [
                checkpoints.save(path, {"w": np.full(3, n)}) for n in range(1, 15)
            ]
        )
        writer.start()
        seen = []
        while writer.is_alive():
            w = np.asarray(checkpoints.load(path)["w"])
            assert len(set(w)) == 1
            seen.append(int(w[0]))
        assert seen == sorted(seen) and checkpoints.load(path)["w"][0] == 14
