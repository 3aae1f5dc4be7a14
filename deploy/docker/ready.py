#!/usr/bin/env python3
"""Exit code 0 when the server in this container accepts requests: the image's HEALTHCHECK."""

import os
import ssl
import sys
import urllib.error
import urllib.request

TIMEOUT_S = 4.0


def main() -> int:
    scheme = "https" if os.environ.get("TRACE_SERVE_TLS_CERT") else "http"
    url = f"{scheme}://127.0.0.1:{os.environ.get('TRACE_SERVE_PORT', '8080')}/health/ready"
    # No proxy of the environment may answer for this container, and its certificate names another host than loopback.
    trusting = ssl.create_default_context()
    trusting.check_hostname = False
    trusting.verify_mode = ssl.CERT_NONE
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=trusting))
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
