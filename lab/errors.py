"""Errors that the command line turns into one clear sentence.

`UsageError` ends a command with exit code 2 (unusable input), `MissingError` and `LaunchError` with 3 (a device or an
extra is missing, or the device's driver refuses).
A message names the field, the value found and what is allowed, so that the reader knows what to change.
"""

from __future__ import annotations

import sys
from collections.abc import Callable


class UsageError(ValueError):
    """Input that cannot be used as it is; the message says which field, which value and what is allowed."""


class InfeasibleError(UsageError):
    """Well-formed input whose combination cannot run (a tree on a chain-only method, a pool too small for one request).

    A sweep leaves such a cell out and says why; a single run ends with the message.
    """


class InterruptedSweepError(RuntimeError):
    """The user stopped a sweep or a bench; what is finished is kept for `--resume`."""


class MissingError(RuntimeError):
    """A device, a tool or an optional dependency that the request needs is not there."""


class LaunchError(RuntimeError):
    """The driver refused to launch a kernel; the message has the driver's word for why."""


def exit_code(command: Callable[[], int | None]) -> int:
    """Run a command line and return its exit code; a known error becomes one sentence on stderr."""
    try:
        return command() or 0
    except UsageError as error:
        return _failed(f"error: {error}", 2)
    except MissingError as error:
        return _failed(f"missing: {error}", 3)
    except LaunchError as error:
        return _failed(f"error: {error}", 3)
    except InterruptedSweepError as error:
        return _failed(f"interrupted: {error}", 130)
    except BrokenPipeError:
        sys.stderr.close()  # the reader of stdout is gone; there is nobody to tell
        return 1
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        return _failed(f"error: {place}{error.strerror or error}", 2)


def _failed(message: str, code: int) -> int:
    print(message, file=sys.stderr)
    return code
