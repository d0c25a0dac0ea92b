"""Route the signals that end a run to the running event loop."""

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable, Generator


@contextlib.contextmanager
def signals(interrupt: Callable[[], None], abandon: Callable[[], None]) -> Generator[None]:
    """Ctrl-C calls `interrupt`; SIGTERM and a lost terminal call `abandon`: they do not wait.

    Only the main thread has signals; elsewhere nothing is routed.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, interrupt)
    loop.add_signal_handler(signal.SIGTERM, abandon)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:  # nohup ignores it: so do we
        loop.add_signal_handler(signal.SIGHUP, abandon)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.remove_signal_handler(number)
