"""How a rank's process ends. No torch."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from typing import NoReturn


def end_process(code: int) -> NoReturn:
    """End this process as Python does, except that the interpreter is not torn down.

    A worker thread of gloo frees the tensors of the last collective when it gets to it. If it asks for the
    interpreter's lock while the interpreter is torn down, Python ends the thread inside a C++ destructor, and
    the process dies by SIGABRT ("terminate called without an active exception") with all its work done.

    Call it in the main thread; all other threads that are not daemons are waited for.
    """
    threading._shutdown()  # wakes the workers of executors, too, that nobody has shut down
    atexit._run_exitfuncs()  # what other libraries have asked for, such as monitors that send their last data
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
