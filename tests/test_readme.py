"""What the documents tell a user to type is what the commands accept; links lead somewhere."""

import re
import shlex
from pathlib import Path

import pytest

import pretrain.export
import pretrain.import_weights
import pretrain.run
import transfer.detect
import transfer.knn
import transfer.linear
import transfer.report
import transfer.retrieve
import transfer.semisup
import transfer.suite
from instdisc.cli import build_parser
from pretrain.config import PretrainConfig

DOCS = Path(__file__).resolve().parents[1] / "docs"
TRANSFER = [
    *(transfer.detect, transfer.knn, transfer.linear, transfer.report, transfer.retrieve),
    *(transfer.semisup, transfer.suite),
]
DOCUMENTS = ["README.md", "CONTRIBUTING.md", *sorted(f"docs/{p.name}" for p in DOCS.glob("*.md"))]
COMMANDS = [pretrain.run, pretrain.export, pretrain.import_weights, *TRANSFER]


def commands(text: str, script: str) -> list[list[str]]:
    """Arguments of every `... script ...` line in the code blocks of a document."""
    found = []
    for block in re.findall(r"^```\n(.*?)^```", text, flags=re.M | re.S):
        for line in block.replace("\\\n", " ").splitlines():
            if script in line:
                words = shlex.split(line, comments=True)
                found.append(words[words.index(script) + 1 :])
    return found


@pytest.mark.parametrize("document", DOCUMENTS)
def test_pretraining_commands_in_the_documents_parse(document: str, repo: Path) -> None:
    parser = build_parser(PretrainConfig, prog="x", description="")
    for argv in commands((repo / document).read_text(), "pretrain/run.py"):
        parser.parse_args(argv)


def test_the_readme_shows_what_must_work(repo: Path) -> None:
    text = (repo / "README.md").read_text()
    first_screen = text.partition("\n## ")[0]
    assert "make demo" in first_screen
    assert "make test" in first_screen
    assert ["--arch", "resnet50"] in commands(text, "pretrain/run.py")
    assert ["--labeled", "0.01"] in commands(text, "transfer/semisup.py")
    assert ["--cfg", "detection_configs/faster_r50.yaml"] in commands(text, "transfer/detect.py")
    assert len(commands(text, "pretrain/run.py")) >= 4
    assert commands(text, "pretrain/export.py")
    assert commands(text, "pretrain/import_weights.py")


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_to_files_lead_somewhere(document: str, repo: Path) -> None:
    path = repo / document
    for target in re.findall(r"\]\(([^)#:]+)\)", path.read_text()):
        assert (path.parent / target).exists(), target


@pytest.mark.parametrize("module", COMMANDS)
def test_help_teaches(module: object, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        module.main(["--help"])  # type: ignore[attr-defined]
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert "default" in text
    assert len(text.splitlines()) > 10
