"""The wheel, the lock files, the Makefile, and what a fresh clone must find in them."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPO = Path(__file__).resolve().parents[1]
PYPROJECT: dict[str, Any] = tomllib.loads((REPO / "pyproject.toml").read_text("utf-8"))
PROJECT = PYPROJECT["project"]
PACKAGES: list[str] = PYPROJECT["tool"]["setuptools"]["packages"]["find"]["include"]
FOLDERS = sorted({name.split(".")[0] for name in PACKAGES})
HASH = re.compile(r"--hash=sha256:[0-9a-f]{64}")


@cache
def files() -> list[str]:
    """Every file that is tracked, or would be if added."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=True).stdout
    return [path for path in listed.split("\0") if path and (REPO / path).is_file()]


def lock_entries(name: str) -> list[str]:
    """The requirements of a lock file, continuation lines joined."""
    text = (REPO / name).read_text("utf-8").replace("\\\n", " ")
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def pins(name: str) -> dict[str, str]:
    parsed = [Requirement(HASH.sub("", entry)) for entry in lock_entries(name)]
    return {canonicalize_name(each.name): str(each.specifier)[2:] for each in parsed}


def scripts() -> list[str]:
    """The files that are run as `python folder/script.py`; pretrain/run.py must be one."""
    guarded = [
        path
        for path in files()
        if path.endswith(".py")
        and path.split("/")[0] in FOLDERS
        and re.search(r"^if __name__ == .__main__.", (REPO / path).read_text("utf-8"), re.MULTILINE)
    ]
    return sorted({*guarded, "pretrain/run.py"})


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy, so that the checkout gets no build folder."""
    source = tmp_path_factory.mktemp("source")
    for path in files():
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        (source / path).write_bytes((REPO / path).read_bytes())
    target = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    command += ["--no-build-isolation", "--no-index", "--wheel-dir", str(target), str(source)]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    (result,) = target.iterdir()
    return result


def test_listed_packages_are_those_on_disk() -> None:
    on_disk = {
        str(Path(path).parent).replace("/", ".")
        for path in files()
        if path.endswith("/__init__.py")
    }
    assert on_disk == set(PACKAGES), (
        "list each package in pyproject.toml; tests have no __init__.py"
    )


def test_every_module_lies_in_a_listed_package() -> None:
    folders = {
        str(Path(path).parent).replace("/", ".")
        for path in files()
        if path.endswith(".py") and path.split("/")[0] in FOLDERS
    }
    assert folders <= set(PACKAGES), "a folder of modules needs an __init__.py and a line"


def test_wheel_holds_all_packages_and_nothing_else(wheel: Path) -> None:
    names = {name for name in ZipFile(wheel).namelist() if ".dist-info/" not in name}
    wanted = {
        path
        for path in files()
        if path.split("/")[0] in FOLDERS
        and path.endswith((".py", ".yaml", "py.typed", ".html.j2", ".css"))
    }
    assert names == wanted


def test_version_has_one_place(wheel: Path) -> None:
    tree = ast.parse((REPO / "instdisc" / "__init__.py").read_text("utf-8"))
    values = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__version__"
    ]
    assert [wheel.name.split("-")[1]] == values
    assert "version" not in PROJECT
    assert not re.search(r"^version:", (REPO / "CITATION.cff").read_text("utf-8"), re.MULTILINE)
    others = [
        path
        for path in files()
        if path.endswith(".py")
        and re.search(r"^__version__\s*=", (REPO / path).read_text("utf-8"), re.MULTILINE)
    ]
    assert others == ["instdisc/__init__.py"]


@pytest.mark.parametrize(("command", "target"), sorted(PROJECT["scripts"].items()))
def test_console_script_points_at_a_function(command: str, target: str) -> None:
    module, _, function = target.partition(":")
    path = REPO / (module.replace(".", "/") + ".py")
    assert path.is_file(), f"{command}: there is no module {module}"
    assigned = [n for n in ast.parse(path.read_text("utf-8")).body if isinstance(n, ast.Assign)]
    defined = [ast.unparse(target) for node in assigned for target in node.targets]
    assert function in defined, f"{command}: {module} defines no {function}"


def test_lock_pins_every_declared_dependency() -> None:
    pinned = pins("requirements.lock")
    declared = [*PROJECT["dependencies"], *PYPROJECT["build-system"]["requires"]]
    for extra in PROJECT["optional-dependencies"].values():
        declared += extra
    for requirement in map(Requirement, declared):
        version = pinned.get(canonicalize_name(requirement.name))
        assert version, f"requirements.lock lacks {requirement.name}: CONTRIBUTING.md says how"
        assert requirement.specifier.contains(version), f"{requirement} does not admit {version}"


@pytest.mark.parametrize("name", ["requirements.lock", "requirements-detectron2.lock"])
def test_every_lock_entry_is_pinned_with_hashes(name: str) -> None:
    entries = lock_entries(name)
    assert entries
    for entry in entries:
        requirement = Requirement(HASH.sub("", entry))  # an option or an address is no requirement
        assert re.fullmatch(r"==[^*,]+", str(requirement.specifier)), entry
        assert not requirement.url, entry
        assert HASH.search(entry), f"no hash: {entry}"


def test_detectron2_is_one_wheel_with_one_hash() -> None:
    (entry,) = lock_entries("requirements-detectron2.lock")
    assert entry.startswith("sal-detectron2==")
    assert len(HASH.findall(entry)) == 1


def test_makefile_is_short_and_has_the_commands() -> None:
    text = (REPO / "Makefile").read_text("utf-8")
    assert len(text.splitlines()) < 60
    assert {"demo", "test", "check", "bench", "setup"} <= set(re.findall(r"^(\w+):", text, re.M))


@pytest.mark.parametrize("script", scripts())
def test_script_runs_from_another_folder(script: str, tmp_path: Path) -> None:
    if not (REPO / script).is_file():
        pytest.skip(f"{script} is not written yet")
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    shown = subprocess.run(
        [sys.executable, str(REPO / script), "--help"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert shown.returncode == 0, shown.stderr
    assert "usage:" in shown.stdout
    assert list(tmp_path.iterdir()) == [], "asking for help left files behind"


# Written in pieces, so that this file does not catch itself.
HOSTS = r"pypi\.(org|io)|pythonhos[t]ed|download\.pytorch|npmjs\.|deb\.debian|anaconda\.(org|com)"
PATHS = r"(?<![\w.<~*})\]-])/(?:work|root|home|Users|tmp|opt)\b"


def machine_words(text: str) -> list[str]:
    """`line: word` for each package index and each folder of somebody's machine."""
    lines = enumerate(text.splitlines(), 1)
    return [f"{n}: {m.group()}" for n, line in lines for m in re.finditer(f"{HOSTS}|{PATHS}", line)]


def test_text_names_no_package_index_and_no_machine_path() -> None:
    found = []
    for path in files():
        data = (REPO / path).read_bytes()
        if b"\0" not in data:
            found += [f"{path}:{each}" for each in machine_words(data.decode("utf-8", "replace"))]
    assert not found, "\n".join(["what is committed holds on every machine:", *found])


@pytest.mark.parametrize(
    "bad", ["https://pypi." + "org/simple", "cd /" + "work/main", "'/" + "tmp'"]
)
def test_machine_words_are_found(bad: str) -> None:
    assert machine_words(f"fine\n{bad}\n")[0].startswith("2: ")


def test_machine_words_lets_other_text_pass() -> None:
    assert (
        machine_words('https://example.org/work/a path/to/root </root> "$TMPDIR/x" /workers') == []
    )
