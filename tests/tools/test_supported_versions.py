"""The versions that are supported: `make test-versions`, what it asks and writes, and a PyTorch
that lacks what ours was written for.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from torchfunc_jax import doctor

ROOT = Path(__file__).resolve().parents[2]
_spec = importlib.util.spec_from_file_location("versions", ROOT / "docs" / "versions.py")
assert _spec is not None and _spec.loader is not None
versions = importlib.util.module_from_spec(_spec)
sys.modules["versions"] = versions
_spec.loader.exec_module(versions)
Combination, Row = versions.Combination, versions.Row

OLD, NEW = versions.OLDEST[0], versions.NEWEST[0]
WHERE = {"date": "2026-01-02", "commit": "abc", "machine": "a machine, 2 cores, Linux"}


# -- which combinations ----------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("asked", "here", "expected", "said"),
    [
        (["oldest", "newest"], ["3.11", "3.12", "3.13"], [OLD, NEW], 0),
        (["oldest", "newest"], ["3.11"], [OLD, ("3.11", "2.15.0", "0.10.2")], 1),
        (["newest"], ["3.12", "3.14"], [("3.12", "2.15.0", "0.12.0.1")], 1),
        (["oldest"], ["3.13"], [("3.13", "2.11.0", "0.10.2")], 1),
        (["all"], ["3.11"], list(versions.ALL), 0),
        (["all", "oldest"], ["3.11"], list(versions.ALL), 0),
        (["3.12,2.14.1,0.12.0.1"], [], [("3.12", "2.14.1", "0.12.0.1")], 0),
    ],
)
def test_the_combinations_that_this_machine_allows(
    asked: list[str], here: list[str], expected: list[tuple[str, ...]], said: int
) -> None:
    found, lines = versions.chosen(asked, dict.fromkeys(here, "python"))
    assert (found, len(lines)) == ([Combination(*c) for c in expected], said)


@pytest.mark.parametrize(
    ("word", "here"),
    [
        ("latest", ["3.13"]),
        ("3.13,2.15", ["3.13"]),
        ("3.13,2.15.0,", ["3.13"]),
        ("newest", ["3.9"]),
    ],
)
def test_other_words_are_refused(
    word: str, here: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "pythons", lambda: dict.fromkeys(here, "python"))
    assert versions.main(["--only", word]) == 2
    assert f"--only {word}" in capsys.readouterr().err


@pytest.mark.skipif(os.name == "nt", reason="the Pythons are shell scripts")
def test_pythons_that_make_no_environment_are_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pyenv's shims of versions that are not switched on end with 127; Debian's Python has no
    ensurepip.
    """
    for folder, name, program in (
        ("path", "python3.12", "echo 3.12"),
        ("path", "python3.13", "exit 127"),
        ("path", "python3.13-config", "echo 3.13"),
        ("pyenv/versions/3.13.5/bin", "python3.13", "echo 3.13"),
    ):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / name).write_text(f"#!/bin/sh\n{program}\n")
        (tmp_path / folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'path'}:{tmp_path / 'nothing here'}:/bin")
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path))
    found = {v: p for v, p in versions.pythons().items() if p.startswith(str(tmp_path))}
    assert found == {
        "3.12": f"{tmp_path}/path/python3.12",
        "3.13": f"{tmp_path}/pyenv/versions/3.13.5/bin/python3.13",
    }


def test_the_bounds_are_what_is_tested() -> None:
    """pyproject.toml, the doctor, constraints.txt and the combinations agree on the oldest, the
    newest, and what is broken.
    """
    assert (OLD.python, NEW.python) == doctor.TESTED["python"]
    assert (OLD.torch, NEW.torch) == doctor.TESTED["torch"] and (OLD.jax, NEW.jax) == doctor.TESTED[
        "jax"
    ]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needs = {re.match(r"[\w-]+", d)[0]: d for d in project["dependencies"]}  # type: ignore[index]
    assert (
        project["requires-python"] == f">={OLD.python},<3.{int(NEW.python.removeprefix('3.')) + 1}"
    )
    assert f">={OLD.torch.removesuffix('.0')}," in needs["torch"]
    for name in ("jax", "jaxlib"):
        assert f">={OLD.jax}," in needs[name] and "!=0.11.0," in needs[name]
    assert f"Python {OLD.python} to {NEW.python}," in (ROOT / "README.md").read_text()
    pythons = {c.rpartition(" ")[2] for c in project["classifiers"] if re.search(r":: 3\.\d+$", c)}
    assert pythons == {c.python for c in versions.ALL}
    assert f"jax=={OLD.jax}\n" in (ROOT / "constraints.txt").read_text()


def test_the_core_is_what_is_neither_slow_nor_a_sweep() -> None:
    for option in ("slow", "sweep"):
        assert (
            f"not {option}" in versions.CORE
            and f'"{option}: ' in (ROOT / "pyproject.toml").read_text()
        )


# -- what is written -------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("limit", "ends", "told"),
    [
        (1.0, "", {"passed": 1, "failed": 2, "skipped": 1}),
        # what failed before the end of the time counts
        (0.05, "import time; time.sleep(60)", {"passed": 1, "failed": 2, "skipped": 1}),
        (1.0, "import sys; sys.exit(3)", "pytest ended with 3: the last line"),
    ],
)
def test_the_lines_of_a_run_are_counted(
    limit: float,
    ends: str,
    told: dict[str, int] | str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = (
        "created: 2/2 workers",
        "[gw0] [  9%] PASSED tests/test_a.py::test_one[x] ",
        "[gw1] [ 50%] SKIPPED tests/test_a.py::test_two ",
        "[gw0] [ 70%] FAILED tests/test_b.py::test_three[y/z] ",
        "[gw1] [100%] ERROR bridge/convert/trees.py::flatten ",
        "the last line",
    )
    program = f"print({chr(10).join(lines)!r}, flush=True); {ends}"
    monkeypatch.setattr(versions, "_python", lambda folder: [sys.executable, "-c", program])
    seen: list[tuple[int, int]] = []
    if isinstance(told, str):
        with pytest.raises(versions.NotTested, match=told):
            versions.core(tmp_path, [], 2, limit, lambda *progress: seen.append(progress))
        return
    counts, failures = versions.core(
        tmp_path, [], 2, limit, lambda *progress: seen.append(progress)
    )
    assert (counts, list(failures)) == (
        told,
        ["bridge/convert/trees.py::flatten", "tests/test_b.py::test_three[y/z]"],
    )
    assert seen == [(9, 0), (50, 0), (70, 1), (100, 2)]


def test_too_little_time_is_the_machines_problem_if_no_test_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = (
        "print('[gw0] [ 40%] PASSED tests/test_a.py::test_one', flush=True); import time; "
        "time.sleep(60)"
    )
    monkeypatch.setattr(versions, "_python", lambda folder: [sys.executable, "-c", program])
    with pytest.raises(
        versions.NotHere, match=r"after 0\.05 minutes, at 40 %; 1 had passed, and none had failed"
    ):
        versions.core(tmp_path, [], 2, 0.05, lambda *progress: None)


def test_a_run_keeps_the_rows_that_it_was_not_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "RESULTS", tmp_path / "versions.json")
    monkeypatch.setattr(versions, "PAGE", tmp_path / "versions.md")
    versions.write(
        [
            Row(
                NEW,
                {},
                {"passed": 5, "failed": 1, "skipped": 0},
                ["tests/test_b.py::test_three"],
                where=WHERE,
            )
        ]
    )
    versions.write([Row(OLD, problem="Python 3.11 is not on this machine", where=WHERE)])
    page = (tmp_path / "versions.md").read_text()
    assert page.index("| 2.11.0 |") < page.index("| 2.15.0 |")
    assert (
        "- `tests/test_b.py::test_three`" in page
        and "- Python 3.11 is not on this machine" in page
        and WHERE["machine"] in page
    )
    versions.write([Row(NEW, {}, {"passed": 6, "failed": 0, "skipped": 0}, where=WHERE)])
    assert "test_three" not in (tmp_path / "versions.md").read_text() and [
        row.right for row in versions.load()
    ] == [False, True]


def test_a_switch_is_on_in_the_tests_and_its_errors_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = (
        "import os; print('[gw0] [ 50%] FAILED tests/test_a.py::test_one[a - b]'); "
        "print('[gw0] [100%] PASSED tests/test_a.py::test_one'); "
        "print('FAILED tests/test_a.py::test_one[a - b] - KeyError: /a/b.py', "
        "os.environ.get('JAX_SCAN3'), '\\\\n')"
    )
    monkeypatch.setattr(versions, "_python", lambda folder: [sys.executable, "-c", program])
    for switch, error in (("jax_scan3", "KeyError: b.py 1"), ("none", "KeyError: b.py None")):
        _, errors = versions.core(tmp_path, [], 1, 1.0, lambda *progress: None, switch)
        assert errors == {"tests/test_a.py::test_one[a - b]": error}


def test_rows_of_switches_stand_beside_those_of_the_core(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "RESULTS", tmp_path / "versions.json")
    monkeypatch.setattr(versions, "PAGE", tmp_path / "versions.md")
    counts = {"passed": 5, "failed": 0, "skipped": 0}
    versions.write([Row(NEW, {}, counts, where=WHERE)])
    errors = {f"tests/test_a.py::test_{n}": "KeyError: 'scan'" for n in ("one", "two")}
    bad = {"passed": 3, "failed": 2, "skipped": 0}
    versions.write(
        [
            Row(NEW, {}, bad, list(errors), where=WHERE, switch="jax_scan3", errors=errors),
            Row(NEW, {}, counts, where=WHERE, switch="none"),
        ]
    )
    assert [row.switch for row in versions.load()] == ["", "none", "jax_scan3"]
    core, _, switches = (tmp_path / "versions.md").read_text().partition("## JAX's coming defaults")
    assert "| 5 | 0 | 0 |" in core and "jax_scan3" not in core and "What failed" not in core
    assert f"| {NEW.jax} | `jax_scan3=1` | 3 | 2 | 0 |" in switches
    assert "- 2 tests, such as `tests/test_a.py::test_one`: `` KeyError: 'scan' ``" in switches


def test_the_files_that_run_with_switches_exist() -> None:
    assert all((ROOT / name).is_file() for name in versions.SWITCHED)


def test_the_page_is_what_was_written() -> None:
    rows = versions.load()
    assert versions.PAGE.read_text() == versions.page(rows), (
        "docs/versions.md is written by: make test-versions"
    )
    assert {OLD, NEW} <= {row.combination for row in rows}
    assert "docs/versions.md" in (ROOT / "README.md").read_text()


# -- a run -----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("combination", "room", "told"),
    [
        ("3.9,2.15.0,0.10.2", 1e12, "Python 3.9 is not on this machine"),
        ("{here},2.15.0,0.10.2", 2e9, "2.0 GB are free"),
        pytest.param(
            "{here},2.99.0,0.10.2",
            1e12,
            "not installed: No matching distribution found",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_cannot_be_installed_is_a_row(
    combination: str,
    room: float,
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    here = f"{sys.version_info[0]}.{sys.version_info[1]}"
    monkeypatch.setenv("TORCHFUNC_JAX_VERSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setattr(versions, "pythons", lambda: {here: sys.executable})
    monkeypatch.setattr(versions.shutil, "disk_usage", lambda path: SimpleNamespace(free=room))
    assert versions.main(["--only", combination.format(here=here), "--json", "--no-write"]) == 1
    (row,) = json.loads(capsys.readouterr().out)
    assert re.search(told, row["problem"]), row
    assert row["counts"] == {}
    assert (
        versions.main(
            ["--only", combination.format(here=here), "--json", "--no-write", "--if-possible"]
        )
        == 0
        and row["of_machine"]
    )


#: A Python that makes environments of itself, and ends as these lines say for pip, -c and pytest.
FAKE = """#!/bin/sh
case "$*" in
    *"-m venv"*) mkdir -p "$4/bin" && cp "$0" "$4/bin/python";;
    *"-m pip"*) {pip};;
    *"-m pytest"*) echo "No module named pytest"; exit 1;;
    *) {c};;
esac
"""
GIVES = """echo '{"python": "3.13.0"}'"""
FAILED_INSTALLS = {
    "pip fails": ("echo 'ERROR: No matching distribution found'; exit 1", GIVES, "No matching"),
    "a package is missing": ("true", "echo 'PackageNotFoundError: flax' >&2; exit 1", "flax"),
    "pytest is missing": ("true", GIVES, "pytest ended with 1: No module named pytest"),
    "there is no such Python": (None, None, "Python 3.13 is not on this machine"),
    "the interpreter is gone": ("", None, "No such file or directory"),
}


@pytest.mark.skipif(os.name == "nt", reason="the Python is a shell script")
@pytest.mark.parametrize("arguments", [[], ["--switches", "none"]], ids=["core", "switches"])
@pytest.mark.parametrize("name", FAILED_INSTALLS)
def test_a_failed_install_keeps_the_results_of_an_earlier_one(
    name: str,
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pip, c, told = FAILED_INSTALLS[name]
    fake = tmp_path / "python"
    if c is not None:
        fake.write_text(FAKE.replace("{pip}", str(pip)).replace("{c}", c))
        fake.chmod(0o755)
    monkeypatch.setenv("TORCHFUNC_JAX_VERSIONS_DIR", str(tmp_path / "environments"))
    monkeypatch.setattr(versions, "pythons", lambda: {} if pip is None else {"3.13": str(fake)})
    monkeypatch.setattr(versions.shutil, "disk_usage", lambda path: SimpleNamespace(free=1e12))
    monkeypatch.setattr(versions, "RESULTS", tmp_path / "versions.json")
    monkeypatch.setattr(versions, "PAGE", tmp_path / "versions.md")
    asked = ["--only", ",".join(NEW), *arguments]
    assert versions.main(asked) == 1  # the first time there is no row to keep
    (row,) = versions.load()
    assert told in row.problem and told in (tmp_path / "versions.md").read_text()
    assert "keeps the results" not in capsys.readouterr().err
    counts = {"passed": 5, "failed": 1, "skipped": 0}
    versions.write(
        [Row(NEW, {}, counts, ["tests/test_a.py::test_one"], where=WHERE, switch=row.switch)]
    )
    before = [(tmp_path / name).read_text() for name in ("versions.json", "versions.md")]
    assert versions.main(asked) == 1
    assert [(tmp_path / name).read_text() for name in ("versions.json", "versions.md")] == before
    said = capsys.readouterr().err
    assert told in said and "docs/versions.md keeps the results of 2026-01-02" in said


def test_results_take_the_place_of_other_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "RESULTS", tmp_path / "versions.json")
    monkeypatch.setattr(versions, "PAGE", tmp_path / "versions.md")
    good = Row(NEW, {}, {"passed": 5, "failed": 0, "skipped": 0}, where=WHERE)
    bad = Row(NEW, {}, {"passed": 0, "failed": 5, "skipped": 0}, ["tests/a.py::b"], where=WHERE)
    for row in (Row(NEW, problem="not installed: no room", where=WHERE), good, bad):
        assert versions.write([row]) == {} and versions.load() == [row]
    # of one run: a problem after the results of the same combination
    problem = Row(NEW, problem="not installed: no room", where=WHERE)
    assert list(versions.write([good, problem]).values()) == [good]
    assert versions.load() == [good]


# -- another PyTorch -------------------------------------------------------------------------------
# In the place of a version that is not known yet: this one without some of its names.
WITHOUT = """
import sys, torch
def without(path):
    owner, _, name = path.rpartition(".")
    owner = eval(owner)
    if isinstance(owner, torch._ops._OpNamespace):
        hidden.add(name)
        owner.__dict__.pop(name, None)
    else:
        delattr(owner, name)
hidden = set()
found = torch._ops._OpNamespace.__getattr__
def lookup(self, name):
    if name in hidden or "every operator" in hidden and self.name == "aten":
        raise AttributeError(f"'_OpNamespace' '{self.name}' object has no attribute '{name}'")
    return found(self, name)
torch._ops._OpNamespace.__getattr__ = lookup
"""
PRIVATE = (
    "torch._C._dynamo.eval_frame._FrameExecStrategy",
    "torch._C.DisableTorchFunctionSubclass",
    "torch._C._functorch.peek_interpreter_stack",
    "torch._C._len_torch_dispatch_stack",
    "torch._C._is_any_autocast_enabled",
    "torch._C._len_torch_function_stack",
)
IMPORTS = (
    "import bridge.flax, bridge.operators.plan, torchfunc_jax, torchfunc_jax.examples.digits, "
    "torchfunc_jax.doctor; hidden.clear()"
)


def run_without(*lines: str) -> str:
    """What a Python prints in which these lines run after PyTorch has lost something."""
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", "\n".join([WITHOUT, *lines])],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=env,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_package_imports_without_operators_private_names_and_functorch() -> None:
    """No operator of aten is needed; a private name is asked for where it is used; patch() does
    without functorch.
    """
    printed = run_without(
        *(f"without({path!r})" for path in PRIVATE),
        "for name in list(torch.ops.aten): without('torch.ops.aten.' + name)",
        "hidden.add('every operator'); sys.modules['functorch'] = "
        "sys.modules['functorch.experimental'] = None",
        IMPORTS,
        "with torchfunc_jax.patch(): print(torch.func.grad is torchfunc_jax.grad)",
        "try: torchfunc_jax.grad(lambda x: x.sin().sum())(torch.ones(3))\nexcept RuntimeError as "
        "error: print(error)",
    )
    patched, _, told = printed.partition("\n")
    assert patched == "True"
    assert re.match(
        rf"torch\.\w.*: torch {re.escape(torch.__version__)} does not have this name", told
    ), told


def test_an_operator_that_is_missing_is_missed_where_it_is_used() -> None:
    """Others work, also those in the same tables."""
    printed = run_without(
        *(
            f"without('torch.ops.aten.{name}')"
            for name in ("native_batch_norm", "_conj", "cummax", "_linalg_det", "split")
        ),
        IMPORTS,
        "from torchfunc_jax import grad, vmap",
        "print(vmap(grad(lambda x: (x[1:].sin() * 2).sum()))(torch.zeros(2, 2)).tolist())",
        "try: vmap(lambda x: x.cummax(0).values)(torch.ones(2, 3))\nexcept RuntimeError as error: "
        "print(type(error).__name__, error)",
    )
    first, _, second = printed.partition("\n")
    assert first == "[[0.0, 2.0], [0.0, 2.0]]"
    assert second.startswith("NoLoweringError") and "aten.cummax" in second, second
