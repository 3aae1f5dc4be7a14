"""`python -m trace_serve`: the same as `trace-serve`."""

import sys

from trace_serve.cli import main

if __name__ == "__main__":
    sys.exit(main())
