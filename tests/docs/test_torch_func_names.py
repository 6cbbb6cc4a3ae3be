"""The list of torch.func's and functorch's names in docs/ is complete and true, and the signatures
are torch's.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import torchfunc_jax

ROOT = Path(__file__).resolve().parents[2]
_spec = importlib.util.spec_from_file_location(
    "torch_func_names", ROOT / "docs" / "torch_func_names.py"
)
assert _spec is not None and _spec.loader is not None
names = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(names)

EVERY = [
    (namespace, name)
    for namespace, found in names.namespaces().items()
    for name in found
    if name not in names.LEFT
]


def ours(name: str) -> Any:
    module, _, attribute = names.home(name).rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def test_the_page_is_up_to_date() -> None:
    if (
        f"torch=={torch.__version__.partition('+')[0]}\n"
        not in (ROOT / "constraints.txt").read_text()
    ):
        pytest.skip("the page tells of the torch in constraints.txt")
    assert names.PAGE.read_text() == names.page(), "run: python docs/torch_func_names.py"


@pytest.mark.parametrize(("namespace", "name"), EVERY, ids=lambda x: x)
def test_each_name_has_its_test(namespace: str, name: str) -> None:
    for test in names.TESTS[name]:
        file, _, function = test.partition("::")
        text = (ROOT / "tests" / file).read_text()
        assert re.search(rf"^def {function}\(", text, re.M), test


#: The options that torch's functions do not have: keyword-only, and without them a call means what
#: it means in torch.
OURS = {
    "vmap": {"memory_limit"},
    "jacfwd": {"chunk_size"},
    "hessian": {"chunk_size"},
    "functional_call": {"return_buffers"},
}


@pytest.mark.parametrize(("namespace", "name"), EVERY, ids=lambda x: x)
def test_signatures(namespace: str, name: str) -> None:
    def parameters(f: Any) -> list[tuple[str, Any, Any]]:
        return [(p.name, p.kind, p.default) for p in inspect.signature(f).parameters.values()]

    theirs = getattr(importlib.import_module(namespace), name)
    # functorch.einops.rearrange, once the module of that name was imported
    if inspect.ismodule(theirs):
        theirs = getattr(theirs, name)
    found = parameters(ours(name))
    more = [p for p in found if p[0] in OURS.get(name, ())]
    assert {p[0] for p in more} == OURS.get(name, set()) and all(
        p[1] is inspect.Parameter.KEYWORD_ONLY and not p[2] for p in more
    )
    assert [p for p in found if p not in more] == parameters(theirs)


@pytest.mark.parametrize("name", sorted({name for _, name in EVERY}))
def test_docstrings_tell_everything(name: str) -> None:
    text = inspect.getdoc(ours(name)) or ""
    assert ">>> " in text and (name == "rearrange" or "Source: " in text)


def unwrapped(api: Any, wrap: Any, x: torch.Tensor, **options: Any) -> torch.Tensor:
    """What debug_unwrap shows inside a transform."""
    found = []

    def look(x: torch.Tensor) -> torch.Tensor:
        found.append(api.debug_unwrap(x, **options))
        return x

    wrap(api, look)(x)
    return found[0]


@pytest.mark.parametrize(
    "wrap",
    [
        lambda api, f: api.vmap(f),
        lambda api, f: api.vmap(f, in_dims=1, out_dims=1),
        lambda api, f: api.grad(lambda x: f(x).sum()),
        lambda api, f: api.vmap(api.grad(lambda x: f(x).sum())),
    ],
)
def test_debug_unwrap(wrap: Any) -> None:
    x = torch.arange(6.0).reshape(2, 3)
    mine = unwrapped(torchfunc_jax, wrap, x)
    assert type(mine) is torch.Tensor and sorted(mine.shape) == sorted(
        unwrapped(torch.func, wrap, x).shape
    )
    torch.testing.assert_close(mine.flatten().sort()[0], x.flatten())
    assert torchfunc_jax.debug_unwrap(x) is x


def test_debug_unwrap_in_a_jitted_function() -> None:
    """The values are not known: what is shown has their shape, without the dimensions of inner
    transforms.
    """

    def look(x: torch.Tensor) -> torch.Tensor:
        shapes.append(tuple(torchfunc_jax.debug_unwrap(x).shape))
        return x * 2

    for wrap, expected in (
        (lambda f: f, (2, 3)),
        (torchfunc_jax.vmap, (2, 3)),
        (lambda f: torchfunc_jax.vmap(f, 1, 1), (3, 2)),
    ):
        shapes: list[tuple[int, ...]] = []
        assert torch.equal(torchfunc_jax.jit(wrap(look))(torch.ones(2, 3)), torch.full((2, 3), 2.0))
        assert shapes[-1] == expected


def test_debug_unwrap_of_one_level() -> None:
    for api in (torchfunc_jax, torch.func):
        assert unwrapped(
            api, lambda api, f: api.vmap(api.vmap(f)), torch.ones(2, 3, 4), recurse=False
        ).shape == (3, 4)
