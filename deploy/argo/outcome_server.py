"""Offers each outcome once: `python3 outcome_server.py DIRECTORY PORT`.

GET /NAME answers with DIRECTORY/NAME.json and takes the file away, so that an outcome decides one analysis and no later
one. 404 means that there is none yet, which an analysis counts as an error and asks again. HEAD /healthz answers 200.
"""

from __future__ import annotations

import re
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

NAME = re.compile(r"/([A-Za-z0-9][A-Za-z0-9-]{0,127})")


def handler(directory: Path) -> type[BaseHTTPRequestHandler]:
    class Outcomes(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked = NAME.fullmatch(self.path)
            path = None if asked is None else directory / f"{asked[1]}.json"
            try:
                body = b"" if path is None else path.read_bytes()
                if path is not None:
                    path.unlink()
            except FileNotFoundError:
                path = None
            self.send_response(404 if path is None else 200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(b'{"outcome": "none yet"}' if path is None else body)

        def do_HEAD(self) -> None:
            self.send_response(200 if self.path == "/healthz" else 404)
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            print(self.address_string(), *arguments[1:], flush=True)

    return Outcomes


def main() -> None:
    directory, port = Path(sys.argv[1]), int(sys.argv[2])
    with ThreadingHTTPServer(("", port), handler(directory)) as server:
        print(f"listening on {server.server_port}", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()
