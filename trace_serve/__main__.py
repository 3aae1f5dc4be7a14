"""`python -m trace_serve`: the same as `trace-serve`."""

import sys

from trace_serve.cli import main

sys.exit(main())
