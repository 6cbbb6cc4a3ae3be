"""torchfunc_jax.distributed.utils beside torch's private originals, and its collective functions in
real processes over loopback.
"""

from __future__ import annotations

import collections
import dataclasses
import inspect
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import distributed_jobs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.distributed._functional_collectives  # the originals use it and do not import it
import torch.distributed.utils as originals
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import torchfunc_jax
from torchfunc_jax.distributed import utils

ROOT = Path(__file__).resolve().parents[2]

CPU = torch.device("cpu")
COLLECTIVE = {
    "verify_param_shape_across_processes",
    "sync_module_states",
    "sync_params_and_buffers",
}


class Point(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class Pair:
    first: Any
    second: Any = None
    made: int = 0

    def __post_init__(self) -> None:
        self.made += 1


class Words(list):
    """A list of another class."""


def seen(x: Any) -> Any:
    """A value as something that == compares: types, structure, dtypes and numbers."""
    match x:
        case torch.Tensor():
            return "tensor", str(x.dtype).removeprefix("torch."), x.tolist()
        case jax.Array():
            return "tensor", str(x.dtype), np.asarray(x).tolist()
        case PackedSequence() | tuple() | list():
            return type(x), [seen(y) for y in x]
        case dict():
            return type(x), [(seen(k), seen(v)) for k, v in x.items()]
        case set():
            return type(x), sorted(str(seen(y)) for y in x)
        case Pair():
            return "Pair", [seen(y) for y in vars(x).values()]
        case BaseException():
            return type(x), str(x)
    return x


def result(f: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        return seen(f(*args, **kwargs))
    except Exception as error:
        return seen(error)


def both(name: str) -> tuple[Any, Any]:
    return getattr(utils, name), getattr(originals, f"_{name}")


def containers(make: Any) -> dict[str, Any]:
    """Containers of each kind around tensors or arrays that make makes of numbers."""
    x, n = make(np.array([1.0, 2.5], np.float32)), make(np.array([3, 4], np.int32))
    return {
        "itself": x,
        "number": 3,
        "none": None,
        "empty": [(), [], {}, set()],
        "empty tuple": (),
        "tuple": (x, "text", (n,)),
        "list": [x, [n, None]],
        "list of another class": Words([x, n]),
        "dict": {"a": x, 3: {"b": n}},
        "OrderedDict": collections.OrderedDict(b=x, a=[n]),
        "defaultdict": collections.defaultdict(list, a=x),
        "namedtuple": Point(x, Point(n, 1)),
        "set": {1, "a"},
        "dataclass": Pair(x, [n]),
        "dataclass in a list": [Pair(n, Pair(x)), np.ones(2)[0]],
    }


CASES = list(containers(torch.tensor))
MAKE = {"torch": torch.tensor, "jax": jnp.array}


@pytest.mark.parametrize("name", utils.__all__)
def test_signatures_are_the_originals(name: str) -> None:
    mine, theirs = (
        [(p.name, p.kind, p.default) for p in inspect.signature(f).parameters.values()]
        for f in both(name)
    )
    assert [p for p in mine if p[0] != "timeout"] == theirs
    assert ("timeout" in [p[0] for p in mine]) == (name in COLLECTIVE)
    assert ">>> " in inspect.getdoc(getattr(utils, name)) and f"_{name}" in inspect.getdoc(
        getattr(utils, name)
    )


def test_there_are_fourteen() -> None:
    every = {f"_{name}" for name in utils.__all__}
    theirs = {
        name
        for name, f in vars(originals).items()
        if inspect.isfunction(f) and f.__module__ == originals.__name__
    }
    assert theirs - every <= {"_get_root_modules"} and len(every) == 14


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", MAKE)
def test_apply_to_tensors(case: str, kind: str) -> None:
    mine, theirs = both("apply_to_tensors")
    double = lambda x: x + x
    assert result(mine, double, containers(MAKE[kind])[case]) == result(
        theirs, double, containers(torch.tensor)[case]
    )


def test_apply_to_tensors_of_a_packed_sequence() -> None:
    packed = pack_sequence([torch.ones(3), torch.zeros(2)])
    for apply in both("apply_to_tensors"):
        met: list[Any] = []
        assert (
            apply(lambda x, met=met: met.append(x) or x + 1, packed) is packed
            and len(met) == 1
            and met[0] is packed.data
        )


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("dtype", [None, torch.float16, torch.bfloat16, torch.float32])
def test_cast_forward_inputs(case: str, kind: str, dtype: torch.dtype | None) -> None:
    mine, theirs = both("cast_forward_inputs")
    ours, reference = containers(MAKE[kind])[case], containers(torch.tensor)[case]
    assert result(mine, dtype, ours, k=ours) == result(theirs, dtype, reference, k=reference)


def test_cast_forward_inputs_keeps_tensors_and_gradients() -> None:
    x = torch.ones(2, requires_grad=True)
    (same, cast), _ = utils.cast_forward_inputs(torch.float32, x, x.double())
    assert same is x and cast.dtype == torch.float32 and cast.requires_grad
    assert utils.cast_forward_inputs(jnp.bfloat16, x)[0][0].dtype == torch.bfloat16
    assert (
        jax.grad(
            lambda a: utils.cast_forward_inputs(torch.bfloat16, a)[0][0].sum().astype("float32")
        )(jnp.ones(2)).dtype
        == "float32"
    )


@pytest.mark.parametrize("args", [((), {}), ((1, 2), {"a": 3, "b": 4}), ((), {"a": 1}), ((1,), {})])
def test_pack_and_unpack(args: tuple[Any, Any]) -> None:
    flat = [pack(*args[0], **args[1]) for pack in both("pack_kwargs")]
    assert flat[0] == flat[1]
    assert [unpack(*flat[0]) for unpack in both("unpack_kwargs")] == [args, args]


def test_unpack_refuses_too_many_keys() -> None:
    mine, theirs = (result(unpack, (1,), ("a", "b")) for unpack in both("unpack_kwargs"))
    assert mine == theirs and mine[0] is AssertionError


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("side_stream", [False, True])
def test_recursive_to(case: str, kind: str, side_stream: bool) -> None:
    mine, theirs = both("recursive_to")
    if (
        case in ("list of another class", "defaultdict")
        and theirs(unmoved := [1], CPU, side_stream)[0] is unmoved
    ):
        pytest.skip(
            "this version of PyTorch returns a container in which nothing "
            "moves as it is, whatever its class"
        )
    assert result(mine, containers(MAKE[kind])[case], CPU, side_stream) == result(
        theirs, containers(torch.tensor)[case], CPU, side_stream
    )


@pytest.mark.parametrize("case", [case for case in CASES if case != "defaultdict"])
def test_recursive_to_another_device(case: str) -> None:
    """The device "meta", which every machine has."""
    places = []
    for to in both("recursive_to"):
        met: list[torch.device] = []
        originals._apply_to_tensors(
            lambda x, met=met: met.append(x.device),
            to(containers(torch.tensor)[case], torch.device("meta"), True),
        )
        places.append(met)
    assert places[0] == places[1]
    with pytest.raises(ValueError, match="no JAX device 'meta'"):
        utils.recursive_to(jnp.ones(2), torch.device("meta"), True)


def test_recursive_to_where_it_is_already() -> None:
    x, packed = (
        torch.ones(2, requires_grad=True),
        pack_sequence([torch.ones(3), torch.zeros(2)], enforce_sorted=False),
    )
    for to in both("recursive_to"):
        assert to([x], CPU, True)[0][0] is x and to(packed, CPU, False)[0] is packed


def test_recursive_to_jax() -> None:
    """Tensors become arrays of their own, on a device and spread over one mesh; arrays stay arrays,
    nothing else is touched.
    """
    t = torch.arange(6.0).reshape(2, 3).t()
    packed = pack_sequence([torch.zeros(2), torch.ones(3)], enforce_sorted=False)
    rows = jax.sharding.NamedSharding(jax.make_mesh((1,), ("d",)), jax.P("d"))
    for target in (jax.devices()[0], rows):
        for side_stream in (False, True):
            (moved,) = utils.recursive_to(
                {"t": (t, jnp.ones(3)), "p": packed, "n": "text"}, target, side_stream
            )
            array, other = moved["t"]
            assert (
                isinstance(array, jax.Array)
                and isinstance(other, jax.Array)
                and moved["n"] == "text"
            )
            assert (array.sharding == rows) == (target is rows)
            np.testing.assert_array_equal(array, t.numpy())
            assert isinstance(moved["p"].data, jax.Array) and isinstance(
                moved["p"].batch_sizes, torch.Tensor
            )
    t.fill_(7.0)
    assert array[0, 1] == 3.0, "an array must not change with the tensor"
    with pytest.raises(TypeError, match=re.escape(".to_dense()")):
        utils.recursive_to(torch.eye(2).to_sparse(), rows, False)


@pytest.mark.parametrize(
    "args", [((), {}), ((), None), (("x",), None), ((), {"k": "x"}), (("x", 1), {"k": ["x"]})]
)
@pytest.mark.parametrize("kind", MAKE)
def test_to_kwargs(args: tuple[Any, Any], kind: str) -> None:
    mine, theirs = both("to_kwargs")

    def filled(make: Any) -> Any:
        def fill(v: Any) -> Any:
            return (
                make([1.0])
                if v == "x"
                else type(v)(map(fill, v))
                if isinstance(v, list | tuple)
                else v
            )

        return fill(args[0]), args[1] and {k: fill(v) for k, v in args[1].items()}

    assert result(mine, *filled(MAKE[kind]), CPU, False) == result(
        theirs, *filled(torch.tensor), CPU, False
    )


def test_p_assert(capsys: pytest.CaptureFixture[str]) -> None:
    for check in both("p_assert"):
        assert check(1, "unsaid") is None and check([], "said", False) is None
        with pytest.raises(AssertionError, match="raised"):
            check(0, "raised")
        printed = capsys.readouterr()
        assert printed.out == "said\nraised\n" and "test_p_assert" in printed.err


def storage_steps(alloc: Any, free: Any, allocated: Any) -> list[Any]:
    t, half = torch.ones(6, dtype=torch.float64), torch.ones(6)[3:]
    steps: list[Any] = [allocated(t)]
    for step in (
        lambda: alloc(t, t.shape),
        lambda: free(t),
        lambda: free(t),
        lambda: alloc(t, torch.Size([2, 3])),
        lambda: alloc(t, t.shape),
        lambda: alloc(t, torch.Size([5])),
        lambda: free(half),
        lambda: free(torch.from_numpy(np.ones(3))),
        lambda: free(torch.ones(2, device="meta")),
        lambda: free(torch.ones(0)),
    ):
        steps += [result(step), allocated(t), t.untyped_storage().nbytes(), t.shape]
    return steps


def test_storage() -> None:
    names = ("alloc_storage", "free_storage", "data_ptr_allocated")
    mine = storage_steps(*(getattr(utils, name) for name in names))
    theirs = storage_steps(*(getattr(originals, f"_{name}") for name in names))
    assert str(mine) == str(theirs).replace("got PLACEHOLDER", "got 6")


def test_storage_of_arrays() -> None:
    x = jnp.ones(3)
    assert utils.data_ptr_allocated(x)
    utils.free_storage(x)
    utils.free_storage(x)
    assert not utils.data_ptr_allocated(x) and x.shape == (3,)
    with pytest.raises(
        TypeError, match=r"make another one, for example jnp.zeros\(\(3,\), 'float32'\)"
    ):
        utils.alloc_storage(x, torch.Size([3]))


@pytest.mark.parametrize("way", ["vmap", "grad", "jit"])
@pytest.mark.parametrize("name", ["alloc_storage", "free_storage", "data_ptr_allocated"])
def test_storage_inside_a_transform_is_refused(name: str, way: str) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        with pytest.raises(RuntimeError, match=f"{name}: tensor: .* call it outside"):
            getattr(utils, name)(x, *([x.shape] if name == "alloc_storage" else []))
        return x.sum()

    getattr(torchfunc_jax, way)(f)(torch.ones(2))


@pytest.mark.parametrize(
    "prefixes", [("a.", "b."), ("", "x."), ("a.", ""), ("a.", "a.a."), ("z", "y"), ("a.", "a.")]
)
def test_replace_by_prefix(prefixes: tuple[str, str]) -> None:
    found = []
    for replace in both("replace_by_prefix"):
        state = {"a.w": 1, "b.w": 2, "a.a.w": 3, "w": 4}
        found.append([result(replace, state, *prefixes), list(state.items())])
    assert found[0] == found[1]


def test_one_process_keeps_everything() -> None:
    model = torch.nn.Linear(2, 2)
    before = distributed_jobs.bits(dict(model.named_parameters()))
    synced = utils.sync_module_states(model, None, 1, 0, ())
    assert distributed_jobs.bits(synced) == before and synced["weight"] is model.weight
    with pytest.raises(ValueError, match="src: expected a place in a group of 1, got 1"):
        utils.sync_params_and_buffers(None, [torch.ones(1)], 1, 1)
    with pytest.raises(ValueError, match="process_group: expected different indices below 1"):
        utils.verify_param_shape_across_processes([0, 1], [])
    sparse = torch.eye(2).to_sparse()
    for state, words in (
        ([1.0], "expected a torch.Tensor or a jax.Array"),
        (jax.random.key(0), "got key"),
        (sparse, "to_dense"),
    ):
        with pytest.raises(TypeError, match=words):
            utils.sync_params_and_buffers(None, [state], 1, 0)


def test_buckets_hold_at_least_their_size() -> None:
    states = {str(i): torch.ones(n) for i, n in enumerate((1, 1, 3, 1, 0, 9, 1))}
    for size, expected in (
        (8, ["01", "2", "345", "6"]),
        (1, ["0", "1", "2", "3", "45", "6"]),
        (1000, ["0123456"]),
    ):
        assert ["".join(bucket) for bucket in utils._buckets(states, size)] == expected


# -- real processes --------------------------------------------------------------------------------
def in_processes(count: int, jobs: list[str], absent: int | None = None) -> list[dict[str, Any]]:
    """What each process prints; all of them are ended when one fails or takes longer than five
    minutes.
    """
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
    }
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    running = [
        subprocess.Popen(
            [sys.executable, distributed_jobs.__file__, *map(str, (p, count, port)), *jobs],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for p in range(count)
        if p != absent
    ]
    try:
        said = [process.communicate(timeout=300) for process in running]
        assert [process.returncode for process in running] == [0] * len(running), "\n".join(
            error[-3000:] for _, error in said
        )
        return [json.loads(out.splitlines()[-1]) for out, _ in said]
    finally:
        for process in running:
            process.kill()


JOBS = [
    "synced",
    "synced_from_last",
    "synced_arrays",
    "verified",
    "disagreeing",
    "disagreeing_lists",
    "other_source",
    "other_order",
    "parts",
    "placed",
    "refused",
    "absent",
]


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_real_processes(count: int) -> None:
    last, parameters, ignored = (
        count - 1,
        dict(distributed_jobs.module(0).named_parameters()),
        {"0.bias", "mask"},
    )
    own = [distributed_jobs.states_of(distributed_jobs.module(p)) for p in range(count)]
    without_0 = "process 1" if count == 2 else "processes 1, 2, 3"
    without_1 = "process 0" if count == 2 else "processes 0, 2, 3"
    disagreeing = (
        "RuntimeError: verify_param_shape_across_processes: 'weight' is float32[3, 5] in process 0 "
        f"and float32[3, 4] in {without_0}; 'bias' is float32[3] in {without_1} and float64[3] in "
        f"process 1; 'more' is missing in {without_1} and float32[1] in process 1; "
    )
    for p, results in enumerate(in_processes(count, JOBS)):
        assert results["synced"] == distributed_jobs.bits(
            {name: own[p if name in ignored else 0][name] for name in own[0]}
        )
        from_last = {name: own[last if name in parameters else p][name] for name in own[0]}
        assert results["synced_from_last"] == distributed_jobs.bits(from_last)
        arrays = {
            "wide": np.full(3, 0.1),
            "spread": np.arange(4, dtype="f"),
            "tensor": np.zeros(2, "f"),
            "kept": np.full(2, p, "i4"),
        }
        assert results["synced_arrays"] == [
            distributed_jobs.bits(arrays),
            True,
            True,
            [p + 0.1] * 3,
        ]
        assert results["verified"] == "passed"
        assert (
            results["disagreeing"].startswith(disagreeing)
            and "'scale'" not in results["disagreeing"]
        )
        assert (
            f"'module_states[1]' is float32[2] in {without_1} and float32[3] in process 1; every"
            in results["disagreeing_lists"]
        )
        assert (
            "states[0]" not in results["disagreeing_lists"]
            and "another order" in results["other_order"]
        )
        assert (
            f"'argument src' is 0 in {without_1} and 1 in process 1; every process"
            in results["other_source"]
        )
        assert results["parts"] == (count // 2 - 1 if p < count // 2 else last)
        assert results["placed"] == p
        assert [error.partition(":")[0] for error in results["refused"]] == [
            "ValueError",
            "ValueError",
            "TypeError",
        ]
        said, seconds = results["absent"]
        assert (
            said == "absent"
            if p == last
            else f"process {last} did not come within 2 seconds" in said and 2 <= seconds < 20
        )


@pytest.mark.parametrize(
    ("count", "absent"), [(2, 1), *(pytest.param(3, p, marks=pytest.mark.slow) for p in (0, 1))]
)
def test_a_process_missing_at_the_start_is_named(count: int, absent: int) -> None:
    for results in in_processes(count, ["start"], absent):
        said, seconds = results["start"]
        assert re.match(
            rf"RuntimeError: initialize: process {absent} of {count} did not come to 127.0.0.1:\d+ "
            r"within 3 seconds; ",
            said,
        )
        assert 2.9 <= seconds < 20
