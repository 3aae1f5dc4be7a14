#!/usr/bin/env python3
"""Exit code 0 when the server in this container accepts requests: the image's HEALTHCHECK."""

import os
import sys
import urllib.error
import urllib.request

TIMEOUT_S = 4.0


def main() -> int:
    url = f"http://127.0.0.1:{os.environ.get('TRACE_SERVE_PORT', '8080')}/health/ready"
    # A proxy of the environment must not answer for this container.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=TIMEOUT_S) as answer:
            print(answer.read(500).decode(errors="replace"))
    except urllib.error.HTTPError as exc:
        print(f"{url}: {exc.code} {exc.read(500).decode(errors='replace')}")
        return 1
    except OSError as exc:
        print(f"{url}: {exc}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
