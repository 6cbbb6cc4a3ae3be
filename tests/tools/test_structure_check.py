"""tools/structure.py finds each breach of the contract in made-up trees of files, and nothing where
there is none.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "structure.py"
_spec = importlib.util.spec_from_file_location("structure", TOOL)
assert _spec is not None and _spec.loader is not None
structure = importlib.util.module_from_spec(_spec)
sys.modules["structure"] = structure  # dataclasses look their module up there
_spec.loader.exec_module(structure)


@pytest.fixture
def report(tmp_path, monkeypatch):
    """The report on a tree with these files: name in the package bridge (or
    torchfunc_jax) -> text.
    """
    monkeypatch.setattr(structure, "STATE", {})
    monkeypatch.setattr(structure, "PRIVATE", {})

    def make(files: dict[str, str]) -> dict:
        for name, text in files.items():
            path = tmp_path / (name if name.startswith("torchfunc_jax") else f"bridge/{name}")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            for folder in path.relative_to(tmp_path).parents[:-1]:
                (tmp_path / folder / "__init__.py").touch()
        return structure.report(tmp_path)

    return make


CIRCLES = {
    "two files": (
        {"a.py": "import bridge.b", "b.py": "from bridge import a"},
        [["bridge.a", "bridge.b"]],
    ),
    "a name of the other file": (
        {"a.py": "from bridge.b import f", "b.py": "from bridge.a import g"},
        [["bridge.a", "bridge.b"]],
    ),
    "relative imports": (
        {"r/a.py": "from .b import f", "r/b.py": "from . import a"},
        [["bridge.r.a", "bridge.r.b"]],
    ),
    "relative imports of a package": (
        {"r/__init__.py": "from .a import f", "r/a.py": "from . import g"},
        [["bridge.r", "bridge.r.a"]],
    ),
    "a relative import of the parent": (
        {"r/a.py": "from ..b import f", "b.py": "from .r import a"},
        [["bridge.b", "bridge.r.a"]],
    ),
    "inside a function": (
        {
            "torchfunc_jax/a.py": "import torchfunc_jax.b",
            "torchfunc_jax/b.py": "def f():\n    from torchfunc_jax.a import g",
        },
        [["torchfunc_jax.a", "torchfunc_jax.b"]],
    ),
    "for type checkers": (
        {
            "a.py": "from bridge import b",
            "b.py": "import typing\nif typing.TYPE_CHECKING:\n    from bridge.a import A",
        },
        [["bridge.a", "bridge.b"]],
    ),
    "three files": (
        {
            "a.py": "import bridge.b",
            "b.py": "import bridge.c",
            "c.py": "import bridge.a",
            "d.py": "import bridge.a",
        },
        [["bridge.a", "bridge.b", "bridge.c"]],
    ),
    "two circles, the larger first": (
        {
            "a.py": "import bridge.b",
            "b.py": "import bridge.a",
            "c.py": "import bridge.d",
            "d.py": "import bridge.e",
            "e.py": "import bridge.c, bridge.a",
        },
        [["bridge.c", "bridge.d", "bridge.e"], ["bridge.a", "bridge.b"]],
    ),
    "none: a package that imports its files": (
        {"__init__.py": "from bridge.a import f", "a.py": "import bridge.b", "b.py": ""},
        [],
    ),
    "none: a diamond": (
        {
            "a.py": "from bridge import b, c",
            "b.py": "import bridge.d",
            "c.py": "import bridge.d",
            "d.py": "",
        },
        [],
    ),
}


@pytest.mark.parametrize("files, expected", CIRCLES.values(), ids=CIRCLES)
def test_circles(report, files, expected):
    assert report(files)["circles"] == expected


LAZY = {
    "a file of ours": ("def f():\n    from bridge import b", ["bridge.b"]),
    "another package": ("def f():\n    import numpy.linalg", ["numpy.linalg"]),
    "in a method, in a branch": (
        "class A:\n    def f(self):\n        if self:\n            import json",
        ["json"],
    ),
    "by text": ("def f():\n    importlib.import_module('bridge.b')", ["bridge.b"]),
    "by text that is computed": ("def f(name):\n    return __import__(name)", ["a computed name"]),
    "none: an optional package": (
        "def f():\n    from safetensors import safe_open\n    import orbax.checkpoint",
        [],
    ),
    "none: at module level, in a branch": (
        "try:\n    import json\nexcept ImportError:\n    import numpy",
        [],
    ),
}


@pytest.mark.parametrize("text, expected", LAZY.values(), ids=LAZY)
def test_imports_inside_functions(report, text, expected):
    found = report({"a.py": text, "b.py": "", "torchfunc_jax/c.py": "def f():\n    import json"})
    assert [breach["imports"] for breach in found["lazy imports"]] == expected
    assert len(found["broken"]) == len(expected)


STATE = {
    "a dictionary": ("x = {}\ndef f(k):\n    x[k] = 1", ["x"]),
    "an item that is deleted": ("x = {1: 2}\ndef f(k):\n    del x[k]", ["x"]),
    "a list by its method": ("x: list[int] = []\ndef f(k):\n    x.append(k)", ["x"]),
    "a set, added to": ("x = set()\ndef f(k):\n    x.add(k)", ["x"]),
    "an ordered dictionary": (
        "x = collections.OrderedDict()\ndef f(k):\n    x.move_to_end(k)",
        ["x"],
    ),
    "weak keys": ("x = weakref.WeakKeyDictionary()\ndef f(k):\n    x[k] = 1", ["x"]),
    "a container in a container": ("x = {1: []}\ndef f(k):\n    x[1].append(k)", ["x"]),
    "what a container's method gives": ("x = {}\ndef f(k):\n    x.setdefault(k, {})[1] = k", ["x"]),
    "a dictionary's union": ("x = {1: 2} | {3: 4}\ndef f(k):\n    x.clear()", ["x"]),
    "a counter": ("x = itertools.count()\ndef f():\n    return next(x)", ["x"]),
    "a thread's own": ("x = threading.local()", ["x"]),
    "a context variable": ("x: ContextVar[int] = ContextVar('x')", ["x"]),
    "a class made from a thread's own": ("class A(threading.local):\n    y = 1\nx = A()", ["x"]),
    "a number that is rebound": ("x = 0\ndef f():\n    global x\n    x += 1", ["x"]),
    "a method that rebinds": (
        "x = None\nclass A:\n    def f(self):\n        global x\n        x = self",
        ["x"],
    ),
    "an object whose attribute a function sets": (
        "class A:\n    pass\nx = A()\ndef f():\n    x.y = 1",
        ["x"],
    ),
    "an object whose attribute setattr sets": (
        "x = SimpleNamespace()\ndef f():\n    setattr(x, 'y', 1)",
        ["x"],
    ),
    "an object that changes itself": (
        "class A:\n    def f(self):\n        self.n = 1\nx = A()",
        ["x"],
    ),
    "a class's attribute": ("class A:\n    x = {}\ndef f(k):\n    A.x[k] = 1", ["A.x"]),
    "in a branch": ("if True:\n    x = {}\ndef f(k):\n    x.update(k)", ["x"]),
    "in a lambda": ("x = []\nf = lambda k: x.append(k)", ["x"]),
    "none: a table": ("x = {1: 2}\ndef f(k):\n    return x[k], x.get(k)", []),
    "none: a table that is filled at import": ("x = {}\nfor k in range(3):\n    x[k] = k", []),
    "none: a local variable of that name": (
        "x = {}\ndef f():\n    x = {}\n    x[1] = 2\n    def g():\n        x[3] = 4",
        [],
    ),
    "none: a parameter of that name": ("x = {}\ndef f(x):\n    x[1] = 2", []),
    "none: an object that never changes": (
        "class A:\n    def __init__(self):\n        self.n = 1\nx = A()",
        [],
    ),
    "none: a lock": ("x = threading.Lock()\ndef f():\n    x.acquire()", []),
}


@pytest.mark.parametrize("text, expected", STATE.values(), ids=STATE)
def test_state_at_module_level(report, text, expected):
    found = report({"a.py": text})
    assert list(found["state"]) == [f"bridge.a.{name}" for name in expected]
    assert len(found["broken"]) == len(expected)


@pytest.mark.parametrize(
    "text",
    [
        "from bridge import a\ndef f():\n    a.x[1] = 2",
        "from bridge import a\ndef f():\n    a.x = {}",
        "from bridge.a import x\ndef f():\n    x.update({})",
        "from bridge.a import x as y\ndef f():\n    y[1] = 2",
        "import bridge.a as b\ndef f():\n    b.x.clear()",
    ],
)
def test_state_that_another_file_changes(report, text):
    assert list(report({"a.py": "x = {}", "torchfunc_jax/b.py": text})["state"]) == ["bridge.a.x"]


def test_the_list_of_state_is_true_and_short(report, monkeypatch):
    files = {"a.py": "x = {}\ndef f():\n    x[1] = 2"}
    monkeypatch.setattr(structure, "STATE", {"bridge.a.x": "a reason"})
    assert report(files)["broken"] == []
    structure.STATE["bridge.a.gone"] = "another"
    assert ["bridge.a.gone" in sentence for sentence in report(files)["broken"]] == [True]
    text = "".join(
        f"x{i} = {{}}\ndef f{i}():\n    x{i}[1] = 2\n" for i in range(structure.LIMIT + 1)
    )
    monkeypatch.setattr(
        structure, "STATE", {f"bridge.a.x{i}": "a reason" for i in range(structure.LIMIT + 1)}
    )
    assert ["the limit" in sentence for sentence in report({"a.py": text})["broken"]] == [True]


def test_lines_outside_lowering(report):
    found = report(
        {
            "a.py": "1\n2\n",
            "lowering/b.py": "3\n",
            "lowering_of_mine.py": "4\n",
            "torchfunc_jax/c.py": "5\n",
        }
    )
    assert found["lines of bridge outside lowering"] == 3


def test_the_command(report, tmp_path):
    report(
        {
            "a.py": "import bridge.b\nx = []\n",
            "b.py": "import bridge.a\ndef f():\n    import json\n",
        }
    )

    def run(*arguments: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, str(TOOL), "--root", str(tmp_path), *arguments],
            capture_output=True,
            text=True,
        )

    told = run()
    assert told.returncode == 1 and "2 files import each other: bridge.a, bridge.b" in told.stdout
    assert (
        "bridge/b.py:3: json is imported inside a function" in told.stdout
        and "lines of bridge outside lowering: 5" in told.stdout
    )
    read = json.loads(run("--json").stdout)
    assert (
        read["circles"] == [["bridge.a", "bridge.b"]]
        and len([s for s in read["broken"] if " lists " not in s]) == 2
    )
    assert "STATE" not in run("--imports").stdout and "import each other" in run("--imports").stdout
    help_text = run("--help").stdout
    assert "No import circle" in help_text and "--json" in help_text and "STATE" in help_text


PRIVATE = {
    "an attribute": ("import torch\ntorch._C.f()", ["torch._C"]),
    "an attribute of an alias": (
        "import torch.nn as nn\nnn._reduction.get_enum",
        ["torch.nn._reduction"],
    ),
    "a private module": ("from jax._src import core", ["jax._src.core"]),
    "a private name": (
        "from torch.nn.modules.conv import _ConvNd",
        ["torch.nn.modules.conv._ConvNd"],
    ),
    "in a function": ("import jax\ndef f():\n    return jax._src", ["jax._src"]),
    "none: operators, dunders and names of ours": (
        (
            "import torch\nfrom bridge import a\ntorch.ops.aten._softmax, torch.__version__, a._b, "
            "torch.Tensor.__add__"
        ),
        [],
    ),
}


@pytest.mark.parametrize("text, expected", PRIVATE.values(), ids=PRIVATE)
def test_private_names(report, text, expected):
    found = report({"file.py": text, "private.py": text, "a.py": ""})
    assert [row["name"] for row in found["private names"]] == expected
    assert len(
        [sentence for sentence in found["broken"] if "is a private name" in sentence]
    ) == len(expected)
