"""What a command needs of the process it is in: UTF-8, and streams that can be used."""

import os
import sys
from pathlib import Path
from typing import Any


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


def open_streams() -> None:
    """Makes all three streams usable, whatever the caller has closed or encodes them in."""
    if sys.stdin is None:
        # Else the next file that is opened gets the number 0, and any child would read from it.
        sys.stdin = Path(os.devnull).open(encoding="utf-8")  # noqa: SIM115 (kept)
    for stream in (sys.stdout, sys.stderr):
        reconfigure: Any = getattr(stream, "reconfigure", None)
        if reconfigure is not None and getattr(stream, "errors", "") == "strict":
            reconfigure(errors="backslashreplace")  # no run dies of a letter
