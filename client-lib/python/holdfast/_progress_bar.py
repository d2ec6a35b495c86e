"""A bar on the terminal for a restore that takes long, by rich or tqdm where the program has one of them.

bar = bar_on_terminal("job 'llama': restore step 900", total)  # None: no terminal, or neither package
if bar is not None:
    bar.show("job 'llama': restore step 900", read, total)
    bar.close()
"""

from __future__ import annotations

import importlib
import sys
from typing import Any, Protocol


class Bar(Protocol):
    def show(self, title: str, done: int, total: int) -> None: ...
    def close(self) -> None: ...


def bar_on_terminal(title: str, total: int) -> Bar | None:
    if sys.stderr is None or not sys.stderr.isatty():
        return None
    for kind in (_RichBar, _TqdmBar):
        try:
            return kind(title, total)
        except Exception:  # noqa: S112 - not installed; or the program shows a bar of its own just now
            continue
    return None


class _RichBar:
    def __init__(self, title: str, total: int) -> None:
        progress: Any = importlib.import_module("rich.progress")
        console: Any = importlib.import_module("rich.console")
        self._progress: Any = progress.Progress(
            progress.TextColumn("{task.description}", markup=False),
            progress.BarColumn(),
            progress.DownloadColumn(),
            progress.TransferSpeedColumn(),
            progress.TimeRemainingColumn(),
            console=console.Console(file=sys.stderr),
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._progress.start()
        self._task = self._progress.add_task(title, total=total)

    def show(self, title: str, done: int, total: int) -> None:
        self._progress.update(
            self._task, description=title, completed=done, total=total, refresh=True
        )

    def close(self) -> None:
        self._progress.stop()


class _TqdmBar:
    def __init__(self, title: str, total: int) -> None:
        self._bar: Any = importlib.import_module("tqdm").tqdm(
            desc=title, total=total, unit="B", unit_scale=True, leave=False, file=sys.stderr
        )

    def show(self, title: str, done: int, total: int) -> None:
        self._bar.set_description(title, refresh=False)
        self._bar.total, self._bar.n = total, done
        self._bar.refresh()

    def close(self) -> None:
        self._bar.close()
