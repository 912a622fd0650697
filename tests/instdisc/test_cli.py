"""Flags from dataclasses: order of sources, types, one-line errors, the provenance guard."""

import dataclasses
import errno
import json
import os
import subprocess
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import pytest

from instdisc import cli
from instdisc.errors import EXIT_PIPE


@dataclasses.dataclass(frozen=True, kw_only=True)
class Example(cli.CommandConfig):
    PROG = "example"
    DESCRIPTION = ""

    size: Literal["small", "large"] = cli.option("small", "how big", aliases=["-s"])
    rate: float = cli.option(0.5, "how fast; 100% is 1.0")
    steps: tuple[int, ...] = cli.option((1, 2), "when")
    where: Path | None = cli.option(None, "folder", volatile=True)
    files: tuple[Path, ...] = cli.option((), "inputs")
    loud: bool = cli.option(False, "say more")
    parts: tuple[str, ...] | None = cli.option(None, "which", choices=("all", "partN", "by:NAME"))

    def __post_init__(self) -> None:
        if self.rate < 0:
            raise cli.UserError("--rate must not be negative")

    @classmethod
    def recipe_defaults(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        return {"rate": 0.25} if given.get("size") == "large" else {}


def parse(*argv: str) -> Example:
    return cli.parse(Example, argv)


def test_flags_win_over_config_file_over_recipe_over_defaults(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"size": "large", "steps": [5]}))
    assert parse() == Example()
    assert parse("-s", "large").rate == 0.25
    assert parse("--config", str(file)) == Example(size="large", rate=0.25, steps=(5,))
    assert parse("--config", str(file), "--rate", "1", "--steps", "7", "8") == Example(
        size="large", rate=1.0, steps=(7, 8)
    )


def test_choices_that_stand_for_many(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("all", "part1", "part12", "by:a_1.b2")
    assert parse("--parts", *words).parts == words
    for word in ("part", "part0", "partN1", "party", "by:", "by:a/b", "by:a:b", "all "):
        with pytest.raises(SystemExit):
            parse("--parts", word)
        assert "(choose from 'all', 'partN', 'by:NAME')" in capsys.readouterr().err


def test_a_config_written_is_a_config_read(tmp_path: Path) -> None:
    config = Example(
        size="large", where=Path("a b"), loud=True, steps=(), files=(Path("x"), Path("y"))
    )
    (tmp_path / "config.json").write_text(json.dumps(cli.to_dict(config)))
    assert parse("--config", str(tmp_path / "config.json")) == config


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("{", "not JSON"),
        ("[]", "not an object"),
        ('{"sise": "small"}', "unknown keys sise"),
        ('{"rate": "fast"}', "rate = 'fast'"),
        ('{"loud": 1}', "loud = 1"),
        ('{"size": "huge"}', "size = 'huge'"),
        ('{"steps": [1, "x"]}', "steps = 'x'"),
        ('{"parts": ["all", "part0"]}', "choose from all, partN, by:NAME"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_bad_config_files_end_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, expected: str
) -> None:
    file = tmp_path / "config.json"
    file.write_text(content)
    code = cli.run_command(Example, lambda _: 0, ["--config", str(file)])
    error = capsys.readouterr().err
    assert code == 2
    assert expected in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("argv", ["--size huge", "--unknown", "--rate x", "--si x"])
def test_bad_flags_end_in_one_line(argv: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parse(*argv.split())
    assert stop.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("raised", "code", "text"),
    [
        (cli.UserError("do\nthis"), 2, "do | this"),
        (OSError(errno.ENOSPC, "No space", "f"), 2, "the disk is full"),
        (ModuleNotFoundError("x", name="detectron2.utils"), 2, "make setup"),
        (cli.Interrupted("saved"), 75, "saved"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_what_the_user_can_mend_is_one_line(
    raised: BaseException, code: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def execute(config: Example) -> int:
        raise raised

    assert cli.run_command(Example, execute, []) == code
    error = capsys.readouterr().err
    assert text in error
    assert error.count("\n") == 1


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A module whose `run` is what a command names."""
    module = types.ModuleType("example_work")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


@pytest.mark.parametrize(
    ("returned", "code"),
    [(None, 0), (0, 0), (1, 1), (75, 75), (True, 0), (Path("backbone.pt"), 0), ("done", 0)],
)
def test_an_exit_code_is_an_int_that_the_function_returns(
    work: types.ModuleType, returned: object, code: int
) -> None:
    seen = []
    work.run = lambda config: (seen.append(config), returned)[1]  # type: ignore[attr-defined]
    assert cli.command(Example, "example_work:run")(["--rate", "1"]) == code
    assert seen == [Example(rate=1.0)]


def test_the_function_is_imported_only_when_it_runs(capsys: pytest.CaptureFixture[str]) -> None:
    main = cli.command(Example, "instdisc.no_such_module:run")
    assert main(["--rate", "-1"]) == 2
    with cli.parse_only() as parsed:
        assert main([]) == 0
    assert parsed == [Example()]
    with pytest.raises(ModuleNotFoundError):  # a bug, and no package to install
        main([])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Words(cli.CommandConfig):
    PROG = "words"
    DESCRIPTION = """
    What it does:
      indented
    """

    files: tuple[Path, ...] = cli.option((), "inputs", metavar="FILE", positional=True)
    loud: bool = cli.option(False, "say more")
    seen: tuple[str, ...] = ()

    @classmethod
    def recipe_defaults(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        return {"seen": tuple(sorted(given))}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rest(Words):
    task: tuple[str, ...] = cli.option((), "and its flags", rest=True)
    files: tuple[Path, ...] = ()


def test_words_without_a_flag_may_stand_anywhere(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.parse(Words, []) == Words()
    found = cli.parse(Words, ["a", "--loud", "b"])
    assert found == Words(files=(Path("a"), Path("b")), loud=True, seen=("files", "loud"))
    with pytest.raises(SystemExit):
        cli.parse(Words, ["--help"])
    assert "\nWhat it does:\n  indented\n" in capsys.readouterr().out


def test_what_follows_a_task_is_the_tasks() -> None:
    assert cli.parse(Rest, ["--loud"]) == Rest(loud=True, seen=("loud", "task"))
    found = cli.parse(Rest, ["--loud", "knn", "--no-loud", "--k", "5", "--help"])
    assert found.loud
    assert found.task == ("knn", "--no-loud", "--k", "5", "--help")


def test_bugs_keep_their_traceback() -> None:
    def execute(config: Example) -> int:
        raise OSError(errno.EBADF, "broken")

    with pytest.raises(OSError, match="broken"):
        cli.run_command(Example, execute, [])


SPEAK = """
import sys
from instdisc.cli import CommandConfig, run_command, say
CommandConfig.PROG, CommandConfig.DESCRIPTION = "speak", ""
sys.exit(run_command(CommandConfig, lambda _: [say("line") for _ in range(2)]))
"""


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    "argv", [["transfer/report.py", "--help"], ["transfer/report.py", "--repair"], ["-c", SPEAK]]
)
def test_a_reader_that_has_gone_ends_a_command_without_a_word(
    argv: list[str], unbuffered: str, repo: Path, tmp_path: Path
) -> None:
    """As `| head -1` does, once it has its line."""
    reading, writing = os.pipe()
    os.close(reading)
    with subprocess.Popen(
        [sys.executable, *argv],
        cwd=repo,
        env={**os.environ, "INSTDISC_RUNS": str(tmp_path), "PYTHONUNBUFFERED": unbuffered},
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        os.close(writing)
        _, said = process.communicate(timeout=120)
    assert said == ""
    # Unbuffered, argparse itself swallows the error.
    assert process.returncode == (0 if unbuffered and "--help" in argv else EXIT_PIPE)


def test_a_broken_pipe_that_is_not_stdout_is_a_bug() -> None:
    def execute(_: Example) -> None:
        raise BrokenPipeError(errno.EPIPE, "a worker's pipe")

    with pytest.raises(BrokenPipeError):
        cli.run_command(Example, execute, [])


def test_help_shows_default_reason_and_percent_signs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--help")
    text = " ".join(capsys.readouterr().out.split())
    assert "100% is 1.0 (default: 0.5)" in text
    assert "when (default: 1 2)" in text
    assert "folder --files" in text  # nothing is the default, and the text says what that means
    assert "--no-loud" in text
    assert "-s {small,large}" in text


def test_a_second_copy_of_the_project_is_refused(tmp_path: Path, repo: Path) -> None:
    """An old wheel and a newer checkout would otherwise mix in silence."""
    copy = tmp_path / "pretrain"
    copy.mkdir()
    (copy / "run.py").write_text((repo / "pretrain" / "run.py").read_text())
    done = subprocess.run(
        [sys.executable, str(copy / "run.py"), "--arch", "resnet18"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 2
    assert "is not the installed copy" in done.stderr
