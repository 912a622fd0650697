"""The wheel, the lock files, the Makefile, and what a fresh clone must find in them."""

import ast
import base64
import hashlib
import os
import re
import runpy
import subprocess
import sys
import tomllib
from functools import cache
from importlib.metadata import Distribution
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

REPO = Path(__file__).resolve().parents[1]
PYPROJECT: dict[str, Any] = tomllib.loads((REPO / "pyproject.toml").read_text("utf-8"))
PROJECT = PYPROJECT["project"]
PACKAGES: list[str] = PYPROJECT["tool"]["setuptools"]["packages"]["find"]["include"]
FOLDERS = sorted({name.split(".")[0] for name in PACKAGES})
CLEAN = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
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
    code = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    command = [sys.executable, "-c", code, str(target)]  # not by pip: uv's environments have none
    built = subprocess.run(command, cwd=source, capture_output=True, text=True)
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
        and path.endswith((".py", ".yaml", "py.typed", ".html.j2", ".css", ".js", ".csv"))
    }
    assert names == wanted


@pytest.fixture(scope="module")
def empty(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scripts of an environment that has the wheel and nothing else."""
    pytest.importorskip("ensurepip", reason="this Python makes environments without pip")
    folder = tmp_path_factory.mktemp("empty") / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    install = [folder / "bin" / "python", "-m", "pip", "install", "--no-deps", "--no-index", wheel]
    subprocess.run(install, check=True, capture_output=True)
    return folder / "bin"


@pytest.mark.parametrize("command", sorted(PROJECT["scripts"]))
def test_console_script_runs_in_an_empty_environment(
    command: str, empty: Path, tmp_path: Path
) -> None:
    shown = subprocess.run(
        [empty / command, "--help"], cwd=tmp_path, capture_output=True, text=True, env=CLEAN
    )
    assert shown.returncode == 0, shown.stderr
    assert "usage:" in shown.stdout


def test_console_script_says_what_is_missing(empty: Path, tmp_path: Path) -> None:
    said = subprocess.run(
        [empty / "instdisc-knn", "--weights", "random:resnet18"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=CLEAN,
    )
    assert said.returncode == 2
    assert re.fullmatch(r".*\binstall.*\n", said.stderr), said.stderr


def test_amended_wheel_says_what_was_verified(tmp_path: Path) -> None:
    info = tmp_path / "sal_detectron2-0.7.2.dist-info"
    compiled = tmp_path / "detectron2" / "_C.cpython-310-x86_64-linux-gnu.so"
    code = tmp_path / "detectron2" / "__init__.py"
    metadata = "Name: sal-detectron2\nVersion: 0.7.2\nRequires-Dist: numpy<2\nRequires-Dist: yacs\n"
    tags = "Root-Is-Purelib: false\nTag: cp310-cp310-linux_x86_64\n"
    content = {info / "METADATA": metadata, info / "WHEEL": tags, code: "", compiled: "ELF"}
    for path, text in content.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    names = [str(path.relative_to(tmp_path)) for path in [*content, info / "RECORD"]]
    (info / "RECORD").write_text("".join(f"{name},sha256=x,1\n" for name in names))
    script = runpy.run_path(str(REPO / ".ci" / "amend_detectron2.py"))
    assert script["amend"](Distribution.at(info))
    assert "Requires-Dist: numpy<3\nRequires-Dist: yacs\n" in (info / "METADATA").read_text()
    assert (info / "WHEEL").read_text() == "Root-Is-Purelib: true\nTag: py3-none-any\n"
    assert not compiled.exists()
    found = {str(each): each for each in Distribution.at(info).files or []}
    assert set(found) == {name for name in names if not name.endswith(".so")}
    for path in (info / "METADATA", info / "WHEEL"):
        entry = found[str(path.relative_to(tmp_path))]
        digest = base64.urlsafe_b64encode(hashlib.sha256(path.read_bytes()).digest()).decode()
        assert entry.size == path.stat().st_size
        assert entry.hash is not None
        assert entry.hash.value == digest.rstrip("=")
    assert not script["amend"](Distribution.at(info)), "a second call changed something"


def test_ci_runs_every_python_that_is_declared() -> None:
    versions = [each.rpartition(" ")[2] for each in PROJECT["classifiers"] if ":: 3." in each]
    ranges = SpecifierSet(PROJECT["requires-python"])
    assert [v for v in (f"3.{minor}" for minor in range(30)) if f"{v}.0" in ranges] == versions
    workflow = yaml.safe_load((REPO / ".github/workflows/ci.yml").read_text("utf-8"))
    job = workflow["jobs"]["test"]
    assert job["strategy"]["matrix"]["python"] == versions
    commands = [step["run"] for step in job["steps"] if "run" in step]
    assert commands[:2] == ["make setup PYTHON=python", "make test"]


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
    assert len(text.splitlines()) < 70
    assert {"demo", "test", "check", "bench", "setup"} <= set(re.findall(r"^(\w+):", text, re.M))


@pytest.mark.parametrize("script", scripts())
def test_script_runs_from_another_folder(script: str, tmp_path: Path) -> None:
    if not (REPO / script).is_file():
        pytest.skip(f"{script} is not written yet")
    shown = subprocess.run(
        [sys.executable, str(REPO / script), "--help"],
        cwd=tmp_path,
        env=CLEAN,
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
