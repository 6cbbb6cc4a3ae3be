"""Checks a release before it is published: builds it, installs it where nothing else is, runs what
a stranger runs first.

    python tools/release_check.py                         everything; what has passed for the same
                                                          files is not done again
    python tools/release_check.py --pythons 3.13          on this Python alone
    python tools/release_check.py --fresh                 everything anew, also the environments
    python tools/release_check.py --list                  the steps, and which of them have passed

`make release-check` installs what this needs (the extra "release") and runs it. For the oldest and
the newest Python of pyproject.toml that this machine has there is an environment in build/release
with the wheel and what it depends on, and nothing else: 6 GB each with PyPI's torch on Linux, and a
tenth of that with PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu. At the end it lists
what only a human can do. Ends with 1 if a step has failed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "docs"))
from versions import RESULTS, pythons  # noqa: E402  docs/versions.py

VERSION = re.findall(
    r'^__version__ = "(.*)"$', (ROOT / "bridge" / "version.py").read_text(), re.MULTILINE
)[0]
PLACE = ROOT / "build" / "release"
DONE, DIST = PLACE / "passed.json", PLACE / "dist"
#: what goes into the wheel, and what is run with it
SOURCES = (
    "pyproject.toml",
    "README.md",
    "LICENSE",
    "_torchfunc_jax_pytest.py",
    "bridge",
    "torchfunc_jax",
    "tests/lib/typed_usage.py",
)
_MOST = 2_000_000  # bytes of the wheel: it has Python files and nothing else


class Failed(Exception):
    """What is wrong with the release."""


def run(command: list[Any], folder: Path = ROOT) -> str:
    """What a command prints; Failed if it ends with an error. It sees no Python path and no
    settings of ours.
    """
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "TORCHFUNC_JAX"))
    }
    done = subprocess.run(
        list(map(str, command)),
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        raise Failed(
            f"{' '.join(map(str, command))} ended with {done.returncode}:\n{done.stdout[-3000:]}"
        )
    return done.stdout


def fingerprint() -> str:
    """A hash of the files that are released."""
    files = [
        file
        for name in SOURCES
        for file in ([ROOT / name] if (ROOT / name).is_file() else sorted((ROOT / name).rglob("*")))
    ]
    found = hashlib.sha256()
    for file in files:
        if file.is_file() and "__pycache__" not in file.parts:
            found.update(f"{file.relative_to(ROOT)}\0".encode() + file.read_bytes())
    return found.hexdigest()


# -- steps: each returns what there is to say about it ---------------------------------------------
def wheel() -> Path:
    """The wheel that was built."""
    return next(DIST.glob("*.whl"))


def build() -> str:
    """The sdist, and the wheel made of it."""
    shutil.rmtree(DIST, ignore_errors=True)
    run([sys.executable, "-m", "build", "--outdir", DIST])
    return ", ".join(
        f"{file.name} {file.stat().st_size / 1e6:.1f} MB" for file in sorted(DIST.iterdir())
    )


def look_at_files() -> str:
    """twine's checks, and what is in the wheel."""
    run([sys.executable, "-m", "twine", "check", "--strict", *DIST.iterdir()])
    names = zipfile.ZipFile(wheel()).namelist()
    about = f"torchfunc_jax-{VERSION}.dist-info"
    for name in (
        "bridge/py.typed",
        "torchfunc_jax/py.typed",
        "_torchfunc_jax_pytest.py",
        f"{about}/licenses/LICENSE",
    ):
        if name not in names:
            raise Failed(f"the wheel has no {name}")
    others = {name.split("/")[0] for name in names} - {
        "bridge",
        "torchfunc_jax",
        "_torchfunc_jax_pytest.py",
        about,
    }
    if others or wheel().stat().st_size > _MOST:
        raise Failed(
            f"the wheel has {wheel().stat().st_size / 1e6:.1f} MB, and beside the packages "
            f"{sorted(others) or 'nothing'}"
        )
    return f"{len(names)} files"


def environment(python: str) -> Path:
    """The folder of a Python's environment."""
    return PLACE / f"python{python}"


def executable(python: str, name: str = "python") -> Path:
    """A program of a Python's environment."""
    return environment(python) / ("Scripts" if os.name == "nt" else "bin") / name


def install(python: str, path: str, extras: str = "") -> str:
    """The wheel in an environment of its own; what it depends on stays from the last time."""
    if not executable(python).exists():
        run([path, "-m", "venv", "--clear", environment(python)])
    pip = [executable(python), "-m", "pip", "--disable-pip-version-check"]
    run([*pip, "uninstall", "--quiet", "--yes", "torchfunc-jax"])
    run([*pip, "install", "--quiet", f"{wheel()}{extras}"])
    run([*pip, "check"])
    shown = dict(line.split("==") for line in run([*pip, "freeze"]).splitlines() if "==" in line)
    return ", ".join(f"{name} {shown[name]}" for name in ("torch", "jax", "flax", "numpy"))


def in_empty_folder(python: str) -> Path:
    """A folder with nothing in it, as a stranger's."""
    folder = PLACE / f"folder{python}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def sixty_seconds(python: str) -> str:
    """README's first examples, which print what their comments say."""
    section = (ROOT / "README.md").read_text().split("## In sixty seconds\n")[1].split("\n## ")[0]
    program = "\n".join(re.findall(r"^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL))
    folder, promised = (
        in_empty_folder(python),
        re.findall(r"^print\(.*\)  # (.*)$", program, re.MULTILINE),
    )
    (folder / "readme.py").write_text(program)
    start = time.monotonic()
    printed = run([executable(python), "readme.py"], folder).splitlines()
    if printed != promised or not promised:
        raise Failed(f"README promises {promised}, and the program prints {printed}")
    return f"{len(promised)} lines printed as promised, {time.monotonic() - start:.0f} s"


def doctor(python: str) -> str:
    """`torchfunc-jax doctor` finds nothing wrong."""
    said = run([executable(python, "torchfunc-jax"), "doctor"], in_empty_folder(python))
    if f"torchfunc-jax {VERSION}" not in said:
        raise Failed(f"the doctor does not name version {VERSION}:\n{said}")
    return said.strip().splitlines()[-1]


def typed_usage(python: str, path: str) -> str:
    """A user's typed program: pyright and mypy know all types in it, and it runs."""
    install(python, path, "[checkpoints,export]")
    folder = in_empty_folder(python)
    shutil.copy(ROOT / "tests" / "lib" / "typed_usage.py", folder)
    of = executable(python)
    run([sys.executable, "-m", "pyright", "--pythonpath", of, "typed_usage.py"], folder)
    strict = ["--config-file=", "--strict", "--disallow-any-unimported", "--python-executable", of]
    run(
        [sys.executable, "-m", "mypy", *strict, "--follow-imports=silent", "typed_usage.py"], folder
    )
    run([of, "typed_usage.py"], folder)
    return "pyright and mypy --strict find no error, and it runs"


def steps(chosen: dict[str, str]) -> Iterator[tuple[str, Callable[[], str]]]:
    """Every step by its name, in order; chosen: the path of each Python."""
    yield "sdist and wheel", build
    yield "twine check, contents of the wheel", look_at_files
    for python, path in chosen.items():
        yield (
            f"Python {python}: the wheel in an empty environment",
            lambda python=python, path=path: install(python, path),
        )
        yield (
            f"Python {python}: README's sixty seconds",
            lambda python=python: sixty_seconds(python),
        )
        yield f"Python {python}: torchfunc-jax doctor", lambda python=python: doctor(python)
        yield (
            f"Python {python}: a typed program",
            lambda python=python, path=path: typed_usage(python, path),
        )


# -- what a human has left -------------------------------------------------------------------------
def left() -> list[str]:
    """What a human has to do yet, in order."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    heading = re.search(
        rf"^## {re.escape(VERSION)}.*$", (ROOT / "docs" / "changelog.md").read_text(), re.MULTILINE
    )
    head = git("rev-parse", "--short", "HEAD")
    found = []
    if not project.get("urls"):
        found.append(
            "give the addresses of the repository, its issues, the documentation and the "
            "changelog: [project.urls] in pyproject.toml, repository-code in CITATION.cff, "
            "repo_url in mkdocs.yml"
        )
    if heading is None or not re.search(r"\d{4}-\d\d-\d\d", heading[0]):
        found.append(
            f"write the date into the heading of {VERSION} in docs/changelog.md, and date-released "
            "into CITATION.cff"
        )
    for row in json.loads(RESULTS.read_text()):
        if row.get("switch"):  # a coming default of JAX's, which no release needs
            continue
        name = ", ".join(map(str, row["combination"]))
        if row["failures"] or row["problem"]:
            found.append(
                f"make test-versions: {name} has "
                f"{row['problem'] or 'failed tests: ' + ', '.join(row['failures'])}"
            )
        elif row["where"]["commit"] != head:
            found.append(
                f"make test-versions: {name} was tested at {row['where']['commit']}, "
                f"and this is {head}"
            )
    if git("status", "--porcelain"):
        found.append("commit, or take away, what git status lists")
    if f"v{VERSION}" not in git("tag").splitlines():
        found.append(
            f"git tag v{VERSION} && git push origin v{VERSION}: "
            ".github/workflows/release.yml publishes it"
        )
    return [
        *found,
        (
            "PyPI must know the workflow: a trusted publisher for release.yml and the environment "
            "pypi (docs/releases.md)"
        ),
    ]


def git(*words: str) -> str:
    """What git prints; "" outside of a repository."""
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--pythons",
        nargs="+",
        metavar="3.X",
        help="on these; otherwise the oldest and the newest that are here",
    )
    parser.add_argument(
        "--fresh", action="store_true", help="do everything anew, and make the environments anew"
    )
    parser.add_argument(
        "--list", action="store_true", help="print the steps, and which of them have passed"
    )
    asked = parser.parse_args()
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    here = pythons()
    known = [c.rpartition(" ")[2] for c in classifiers if re.search(r":: 3\.\d+$", c)]
    usable = [python for python in known if python in here]
    wanted = asked.pythons or list(dict.fromkeys([*usable[:1], *usable[-1:]]))
    if missing := [python for python in wanted if python not in here]:
        parser.error(
            f"--pythons: this machine has no Python {', '.join(missing)}; it has "
            f"{', '.join(sorted(here))}"
        )
    if asked.fresh:
        shutil.rmtree(PLACE, ignore_errors=True)
    PLACE.mkdir(parents=True, exist_ok=True)
    key = fingerprint()
    passed = json.loads(DONE.read_text()) if DONE.exists() else {}
    if passed.get("key") != key:
        passed = {"key": key}
    todo = list(steps({python: here[python] for python in wanted}))
    failed = False
    for i, (name, step) in enumerate(todo, 1):
        print(f"[{i}/{len(todo)}] {name} ...", end=" ", flush=True)
        if name in passed or asked.list:
            print(f"passed before: {passed[name]}" if name in passed else "to do")
            continue
        start = time.monotonic()
        try:
            passed[name] = step()
        except Failed as why:
            print(f"FAILED after {time.monotonic() - start:.0f} s\n{why}", flush=True)
            failed = True
            break  # the next steps need this one, or would say the same
        DONE.write_text(json.dumps(passed, indent=1))
        print(f"{passed[name]} ({time.monotonic() - start:.0f} s)", flush=True)
    print(f"\nLeft for a human before {VERSION} is published:")
    for i, what in enumerate(left(), 1):
        print(f"{i}. {what}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
