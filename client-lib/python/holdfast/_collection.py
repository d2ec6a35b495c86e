"""The cyclic garbage collector while thousands of objects are made."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """The collector starts again and again as thousands of objects are made, goes through all that
    the process has, and finds nothing: half of the time that a save of small tensors takes. Only in
    the main thread: beside it, the loop may set the collector itself.
    """
    if not gc.isenabled() or threading.current_thread() is not threading.main_thread():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
