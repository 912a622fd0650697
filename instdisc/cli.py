"""Commands: dataclass -> flags, exit codes, provenance guard. Imports no torch.

A command is a frozen dataclass whose fields are made by `option`, and a function of it; `command`
makes a script's `main` of the two. Values are found in this order, first wins: flags,
`--config FILE`, the recipe (`recipe_defaults`), the field's own default, which is the paper's.
"""

import argparse
import contextlib
import dataclasses
import importlib
import importlib.util
import inspect
import json
import multiprocessing
import os
import re
import select
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from instdisc.errors import EXIT_INTERRUPTED, EXIT_PIPE, Interrupted, UserError, explain

PACKAGES = ("instdisc", "pretrain", "transfer", "slurm", "detection_configs")
MAX_CONFIG = 1 << 20  # characters of a config.json
INSTALL = "run `make setup`, or see README.md, section Install"

# What a process does before `end_process` ends it, with the exit code and the line.
LAST_ACTS: list[Callable[[int, str], object]] = []
_running: list[str] = []  # PROG of the command that this process runs

_PARSED: ContextVar[list[Any] | None] = ContextVar("parsed", default=None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommandConfig:
    """Base of every command's dataclass: what `--help` says besides the flags.

    Attributes:
        PROG: name of the command, with which its error lines begin.
        DESCRIPTION: what it does; indented as the class is.
        EPILOG: examples, and what the command writes.
    """

    PROG: ClassVar[str]
    DESCRIPTION: ClassVar[str]
    EPILOG: ClassVar[str] = ""

    @classmethod
    def recipe_defaults(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Defaults that depend on the values that were given."""
        return {}


Config = TypeVar("Config", bound=CommandConfig)


class Choices(tuple[str, ...]):
    """Words, some of which stand for many: `stageN` for stage1, stage2, ..."""

    def __contains__(self, value: object) -> bool:
        patterns = (
            re.escape(word).replace("NAME", r"\w[\w.]*").replace("N", r"[1-9]\d*") for word in self
        )
        return any(re.fullmatch(pattern, str(value)) for pattern in patterns)


def option(
    default: Any,
    help: str,
    *,
    group: str = "options",
    aliases: Sequence[str] = (),
    metavar: str | None = None,
    choices: Sequence[str] = (),
    volatile: bool = False,
    positional: bool = False,
    rest: bool = False,
) -> Any:
    """Declares a dataclass field that is also a flag.

    Args:
        default: the paper's value, where the paper gives one.
        help: what it does and why the default is what it is.
        group: heading under which `--help` shows it.
        aliases: other spellings of the flag.
        metavar: placeholder in the help text.
        choices: words that are taken, where a Literal cannot list them: N in a word stands for a
            number, NAME for a name.
        volatile: may change when a run is resumed, because no result depends on it.
        positional: takes the words that follow no flag; for one tuple.
        rest: takes the first word that follows no flag and all behind it, flags included.
    """
    metadata = {
        "help": help,
        "group": group,
        "aliases": tuple(aliases),
        "metavar": metavar,
        "choices": Choices(choices),
        "volatile": volatile,
        "positional": positional or rest,
        "rest": rest,
    }
    return dataclasses.field(default=default, metadata=metadata)


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> typing.NoReturn:
        """Ends with exit code 2 and the pointer to the help text."""
        self.exit(2, f"{self.prog}: error: {message} (see --help)\n")


def _strip_optional(hint: Any) -> tuple[Any, bool]:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        members = [a for a in typing.get_args(hint) if a is not type(None)]
        assert len(members) == 1, f"one type or None, not {hint}"
        return members[0], True
    return hint, False


def _describe(help: str, default: Any) -> str:
    """The help of a flag; where nothing is the default, the text itself says what that means."""
    values = default if isinstance(default, tuple | list) else [default]
    shown = " ".join(str(value) for value in values if value is not None)
    return (f"{help} (default: {shown})" if shown else help).replace("%", "%%")


def _add_flag(group: Any, field: "dataclasses.Field[Any]", hint: Any) -> None:
    hint, _ = _strip_optional(hint)
    meta = field.metadata
    flags = [*meta["aliases"], "--" + field.name.replace("_", "-")]
    flags.sort(key=lambda flag: flag.startswith("--"))  # -a before --arch
    shown = _describe(meta["help"], field.default)
    kwargs: dict[str, Any] = {"dest": field.name, "help": shown, "default": argparse.SUPPRESS}
    if hint is bool:
        group.add_argument(*flags, action=argparse.BooleanOptionalAction, **kwargs)
        return
    if typing.get_origin(hint) is tuple:
        hint = typing.get_args(hint)[0]
        kwargs["nargs"] = argparse.REMAINDER if meta["rest"] else "*"
    if meta["positional"]:
        flags = [kwargs.pop("dest")]
    if meta["choices"] or typing.get_origin(hint) is Literal:
        kwargs["choices"] = meta["choices"] or typing.get_args(hint)
        hint = str
    else:
        kwargs["metavar"] = meta["metavar"] or hint.__name__.upper()
    group.add_argument(*flags, type=hint, **kwargs)


def _types(config_type: type[CommandConfig]) -> dict[str, Any]:
    """Types of the fields by name."""
    hints = typing.get_type_hints(config_type)
    return {field.name: hints[field.name] for field in dataclasses.fields(config_type)}


def build_parser(config_type: type[CommandConfig]) -> argparse.ArgumentParser:
    """Builds the parser of a config dataclass; only flags that were given reach the namespace."""
    parser = Parser(
        prog=config_type.PROG,
        description=inspect.cleandoc(config_type.DESCRIPTION),
        epilog=inspect.cleandoc(config_type.EPILOG),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config",
        type=Path,
        default=argparse.SUPPRESS,
        metavar="FILE",
        help="replay the config.json of an earlier run; flags given beside it win",
    )
    types = _types(config_type)
    groups: dict[str, Any] = {"options": parser}
    for field in dataclasses.fields(config_type):
        if not field.metadata:
            continue  # no flag
        name = field.metadata["group"]
        if name not in groups:
            groups[name] = parser.add_argument_group(name)
        _add_flag(groups[name], field, types[field.name])
    return parser


def _convert(name: str, value: Any, hint: Any) -> Any:
    """Turns a JSON value into the field's type, or says why it cannot."""
    hint, optional = _strip_optional(hint)
    if value is None and optional:
        return None
    if typing.get_origin(hint) is tuple and isinstance(value, list):
        return tuple(_convert(name, item, typing.get_args(hint)[0]) for item in value)
    if typing.get_origin(hint) is Literal and value in typing.get_args(hint):
        return value
    if hint is Path and isinstance(value, str):
        return Path(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(hint, type) and type(value) is hint:
        return value
    raise UserError(f"config: {name} = {value!r} is not of the type that --help gives")


def from_dict(config_type: type[Config], values: Mapping[str, Any]) -> dict[str, Any]:
    """Checks names and types of values read from JSON; returns them as constructor arguments."""
    known = _types(config_type)
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise UserError(f"config: unknown keys {', '.join(unknown)}: remove them")
    choices: dict[str, Any] = {
        f.name: f.metadata.get("choices") for f in dataclasses.fields(config_type)
    }
    for name, value in values.items():
        words = value if isinstance(value, list) else [value]
        if choices[name] and any(word is not None and word not in choices[name] for word in words):
            raise UserError(f"config: {name} = {value!r}: choose from {', '.join(choices[name])}")
    return {name: _convert(name, value, known[name]) for name, value in values.items()}


def to_dict(config: CommandConfig) -> dict[str, Any]:
    """The config as JSON values."""

    def plain(value: Any) -> Any:
        if isinstance(value, tuple):
            return [plain(item) for item in value]
        return str(value) if isinstance(value, Path) else value

    return {name: plain(value) for name, value in dataclasses.asdict(config).items()}


def volatile_fields(config_type: type[CommandConfig]) -> set[str]:
    """Names of the fields that may change when a run is resumed."""
    return {f.name for f in dataclasses.fields(config_type) if f.metadata.get("volatile")}


def read_config_file(path: Path) -> dict[str, Any]:
    """Reads a config.json, or ends with a line that says what is wrong with it."""
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(MAX_CONFIG + 1)
        if len(text) > MAX_CONFIG:
            raise ValueError(f"more than {MAX_CONFIG:,} characters")
        values = json.loads(text)
    except FileNotFoundError:
        raise UserError(f"--config {path}: no such file") from None
    except (ValueError, RecursionError) as error:  # also numbers of thousands of digits
        raise UserError(f"--config {path}: not JSON ({error}): give a run's config.json") from None
    if not isinstance(values, dict):
        raise UserError(f"--config {path}: not an object: give a run's config.json")
    return values


def parse(config_type: type[Config], argv: Sequence[str] | None = None) -> Config:
    """Flags -> config. `config_type.recipe_defaults(given)` may supply defaults for the rest."""
    parser = build_parser(config_type)
    rest = any(field.metadata.get("rest") for field in dataclasses.fields(config_type))
    given = vars(parser.parse_args(argv) if rest else parser.parse_intermixed_args(argv))
    for name, value in given.items():
        given[name] = tuple(value) if isinstance(value, list) else value
    if "config" in given:
        replayed = from_dict(config_type, read_config_file(given.pop("config")))
        given = {**replayed, **given}
    return config_type(**{**config_type.recipe_defaults(given), **given})


def _script() -> Path:
    """What Python was started with."""
    return Path(getattr(sys.modules["__main__"], "__file__", None) or "").resolve()


def check_provenance() -> None:
    """Refuses to run a mixture of two copies of the project, which Python would do silently."""
    homes: dict[Path, list[str]] = {}
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:
            homes.setdefault(Path(spec.origin).resolve().parent.parent, []).append(name)
    if len(homes) > 1:
        where = "; ".join(f"{', '.join(names)} in {home}" for home, names in homes.items())
        raise UserError(f"packages of two copies are mixed ({where}): pip install -e . in one")
    script = _script()
    if script.parent.name in PACKAGES and script.parent.parent not in homes:
        home = next(iter(homes))
        raise UserError(f"{script} is not the installed copy ({home}): pip install -e . beside it")


@contextlib.contextmanager
def parse_only() -> Iterator[list[Any]]:
    """Within it a command only checks its arguments, and leaves its config in the list."""
    parsed: list[Any] = []
    token = _PARSED.set(parsed)
    try:
        yield parsed
    finally:
        _PARSED.reset(token)


def command(config_type: type[CommandConfig], function: str) -> Callable[..., int]:
    """The `main(argv=None)` of a script: flags -> config -> function -> exit code.

    Args:
        config_type: the command's flags and help.
        function: what runs, as `package.module:function`. It is imported once the arguments are
            found to be right, so that neither `--help` nor an error in them waits for torch.
    """

    def execute(config: CommandConfig) -> object:
        module, _, name = function.partition(":")
        return getattr(importlib.import_module(module), name)(config)

    def main(argv: Sequence[str] | None = None) -> int:
        return run_command(config_type, execute, argv)

    return main


def run_command(
    config_type: type[Config],
    execute: Callable[[Config], object],
    argv: Sequence[str] | None = None,
) -> int:
    """Parses, runs, and turns errors that have a fix into one line and exit code 2.

    What `execute` returns is the exit code if it is an int; otherwise the exit code is 0. A command
    whose reader closes the pipe early (`| head -1`) ends silently.
    """
    try:
        try:
            code = _run(config_type, execute, argv)
        except SystemExit:  # --help
            flush_output()
            raise
        flush_output()
        return code
    except BrokenPipeError:
        if not reader_has_gone():
            raise  # another pipe: a bug
        with Path(os.devnull).open("wb") as nothing:  # for what Python writes at its end
            os.dup2(nothing.fileno(), sys.stdout.fileno())
        return EXIT_PIPE


def _run(
    config_type: type[Config], execute: Callable[[Config], object], argv: Sequence[str] | None
) -> int:
    def refuse(message: object) -> int:
        line = re.sub(r"\s*\n\s*", " | ", str(message).strip())
        sys.stderr.write(f"{config_type.PROG}: error: {line}\n")
        return 2

    if _script().parent.name in PACKAGES:
        use_utf8()
    open_streams()
    try:
        check_provenance()
        config = parse(config_type, argv)
        if (parsed := _PARSED.get()) is not None:
            parsed.append(config)
            return 0
        _running[:] = [config_type.PROG]
        code = execute(config)
        return code if isinstance(code, int) and not isinstance(code, bool) else 0
    except UserError as error:
        return refuse(error)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in PACKAGES:
            raise
        return refuse(f"package {error.name} is not installed: {INSTALL}")
    except (OSError, MemoryError, RuntimeError) as error:
        line = explain(error, _types(config_type))
        if line is None:
            raise  # a bug
        return refuse(line)
    except Interrupted as stop:
        sys.stderr.write(f"{config_type.PROG}: {stop}\n")
        return EXIT_INTERRUPTED
    except KeyboardInterrupt:
        sys.stderr.write(f"{config_type.PROG}: interrupted\n")
        return 130


def end_process(code: int, line: str) -> typing.NoReturn:
    """Ends the process from one of its threads, with what `run_command` would say and return.

    For the case that the main thread waits for something that will not come, and cannot be woken.
    What is on disk is as after SIGKILL: whole files, of before.
    """
    for child in multiprocessing.active_children():
        if child.daemon:  # loader processes would wait for their parent
            child.kill()
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"{': '.join([*_running, line])}\n")
        sys.stderr.flush()
    for act in LAST_ACTS:
        act(code, line)
    os._exit(code)


def say(line: str = "") -> None:
    """Writes a line to stdout at once, so that a log shows it while the command runs."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


# What a command needs of the process it is in: UTF-8, and streams that can be used.


def use_utf8() -> None:
    """Starts the process again in Python's UTF-8 mode where the locale is something else.

    Names of files would otherwise be other strings than under UTF-8, and with them the fingerprint
    of the data and all that is written about it; it cannot be changed once Python runs.
    """
    if sys.getfilesystemencoding() == "utf-8" or not sys.executable:
        return
    os.environ["PYTHONUTF8"] = "1"  # for the processes that this one starts
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])


def flush_output() -> None:
    """Writes what is left, while an error can still be caught; Python would do it at its end."""
    if sys.stdout is not None:
        sys.stdout.flush()


def reader_has_gone() -> bool:
    """Whether stdout is a pipe that was closed at its other end."""
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
    except (AttributeError, OSError):  # no stdout, or one that is no file
        return False
    return any(event & select.POLLERR for _, event in poll.poll(0))


def open_streams() -> None:
    """Makes all three streams usable, whatever the caller has closed or encodes them in."""
    if sys.stdin is None:
        # Else the next file that is opened gets the number 0, and any child would read from it.
        sys.stdin = Path(os.devnull).open(encoding="utf-8")  # noqa: SIM115 (kept)
    for stream in (sys.stdout, sys.stderr):
        reconfigure: Any = getattr(stream, "reconfigure", None)
        if reconfigure is not None and getattr(stream, "errors", "") == "strict":
            reconfigure(errors="backslashreplace")  # no run dies of a letter
