"""`python -m vmd`."""

import os
import sys

from vmd.cli import main, several_processes

try:
    main()
except SystemExit as end:
    if several_processes() and isinstance(end.code, int):
        # All is said and done; threads of the process group may abort the process while the interpreter clears up.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(end.code)
    raise
