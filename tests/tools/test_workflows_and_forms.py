"""What the repository tells others to run exists: targets of make in the workflows, commands in the
forms for issues, hooks for commits.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def steps(job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield from job.get("steps", ())


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"}  # what a job needs beyond, it asks for
    for name, job in workflow["jobs"].items():
        if "uses" in job:  # another workflow
            assert (ROOT / job["uses"]).exists()
            continue
        assert 0 < job["timeout-minutes"] <= 360, name
        for step in steps(job):
            assert ("uses" in step) != ("run" in step)
            assert re.fullmatch(r"[\w-]+/[\w-]+@(v\d+|release/v1)", step.get("uses", "a/b@v1"))
            for target in re.findall(r"^make ([\w-]+)", step.get("run", ""), re.MULTILINE):
                assert target in TARGETS
            assert not re.search(r"\bpip install|\bpytest\b", step.get("run", "")), (
                "a target of make does that"
            )


def test_a_release_is_published_after_the_tests_and_without_a_password() -> None:
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())["jobs"]
    publish = jobs["publish"]
    assert {"tests", "version"} == set(publish["needs"]) and "tests.yml" in jobs["tests"]["uses"]
    assert publish["permissions"] == {"id-token": "write"} and publish["environment"] == "pypi"
    assert not any("password" in step.get("with", {}) for step in steps(publish))


@pytest.mark.parametrize(
    ("form", "command"), [("1_bug", "doctor"), ("2_wrong_number", "parity"), ("3_slow", "explain")]
)
def test_a_form_for_issues_asks_for_what_a_maintainer_needs(form: str, command: str) -> None:
    asked = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / f"{form}.yml").read_text())
    assert asked["name"] and asked["description"]
    fields = {field["id"]: field for field in asked["body"]}
    assert len(fields) == len(asked["body"]) and {command, "doctor", "program"} <= set(fields)
    for field in fields.values():
        assert (
            field["type"] == "textarea"
            and field["attributes"]["label"]
            and field["validations"] == {"required": True}
        )
    assert command in fields[command]["attributes"]["label"]


def test_a_commit_is_checked_by_what_lint_runs() -> None:
    (hooks,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert [hook["entry"] for hook in hooks["hooks"]] == ["make lint"] and "lint" in TARGETS
