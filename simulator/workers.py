"""Tasks in parallel processes: progress as they finish, dead workers replaced, nothing left running."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait
from typing import Any

from lab.errors import UsageError

#: How often dead workers are replaced before the rest is given up.
WORKER_DEATHS = 3

Task = tuple[Any, ...]


def run_all(
    work: Callable[..., None], tasks: Sequence[Task], done: Callable[[Task], bool], jobs: int
) -> Iterator[None]:
    """Run `work(*task)` for every task that is not `done`; yields once per task that is.

    The first task runs in this process, where it compiles what the workers then find in the cache on disk. Raises
    `UsageError` when workers keep dying.
    """
    pending = [task for task in tasks if not done(task)]
    yield from (None for _ in range(len(tasks) - len(pending)))
    for task in pending if jobs == 1 else pending[:1]:
        work(*task)
        yield None
    for attempt in range(WORKER_DEATHS + 1):
        pending = [task for task in pending if not done(task)]
        if not pending:
            return
        try:
            yield from run_parallel(work, pending, jobs)
        except BrokenProcessPool:
            if attempt == WORKER_DEATHS:
                raise UsageError(
                    f"worker processes died {attempt + 1} times (out of memory?); use --resume and fewer --jobs"
                ) from None


def run_parallel(work: Callable[..., None], tasks: Sequence[Task], jobs: int) -> Iterator[None]:
    """Run all tasks in `jobs` processes; an error or an interruption ends the processes at once."""
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(min(jobs, len(tasks)), mp_context=context, initializer=_end_with_parent)
    try:
        for future in as_completed([pool.submit(work, *task) for task in tasks]):
            future.result()
            yield None
    except BaseException:
        for process in multiprocessing.active_children():
            process.terminate()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _end_with_parent() -> None:
    """Let a worker end when the process that started it is gone, however it went."""
    parent = multiprocessing.parent_process()

    def watch() -> None:
        if parent is not None:
            wait([parent.sentinel])
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
