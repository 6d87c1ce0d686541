"""A server that answers every request with the same bytes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread


@contextmanager
def sending(chunks: Sequence[bytes | float], status: int = 200, **headers: str) -> Iterator[str]:
    """A server that answers with these bytes, and waits for so many seconds in between. Yields the
    URL, with /v1.
    """

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            for chunk in chunks:
                if isinstance(chunk, float):
                    time.sleep(chunk)
                else:
                    self.wfile.write(chunk)

        def handle(self) -> None:
            with suppress(OSError):  # the client has gone
                super().handle()

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    Thread(target=http.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{http.server_port}/v1"
    finally:
        http.shutdown()
        http.server_close()
