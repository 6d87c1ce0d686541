"""A Hugging Face hub on the loopback interface, serving datasets from memory."""

from __future__ import annotations

import json
import threading
import urllib.parse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def loopback_hub(datasets: Mapping[str, Mapping[str, bytes]]) -> Iterator[str]:
    """Serve `{"owner/name": {"data/test.jsonl": b"..."}}`; yields the endpoint's URL."""

    class Handler(_HubHandler):
        repositories = datasets

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _HubHandler(BaseHTTPRequestHandler):
    repositories: Mapping[str, Mapping[str, bytes]] = {}
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        for prefix in ("/api/datasets/", "/datasets/"):
            if path.startswith(prefix):
                owner, name, *rest = path.removeprefix(prefix).split("/")
                files = self.repositories.get(f"{owner}/{name}")
                if files is None:
                    return self._error("RepoNotFound")
                if prefix == "/datasets/" and rest[:1] == ["resolve"]:
                    return self._file(files, "/".join(rest[2:]))
                return self._api(f"{owner}/{name}", files, rest)
        return self._error("EntryNotFound")

    do_HEAD = do_GET

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._error("EntryNotFound")

    def _api(self, repository: str, files: Mapping[str, bytes], rest: list[str]) -> None:
        if rest[:1] == ["tree"]:
            return self._tree(files, "/".join(rest[2:]))
        siblings = [{"rfilename": path} for path in files]
        self._json({"id": repository, "sha": COMMIT, "siblings": siblings, "private": False, "gated": False})

    def _tree(self, files: Mapping[str, bytes], folder: str) -> None:
        prefix = f"{folder}/" if folder else ""
        inside = [path for path in files if path.startswith(prefix)]
        if not inside:
            return self._error("EntryNotFound")
        entries: dict[str, dict[str, object]] = {}
        recursive = "recursive=true" in self.path.lower()
        for path in inside:
            head, *tail = path.removeprefix(prefix).split("/")
            if tail and not recursive:
                entries[head] = {"type": "directory", "path": prefix + head, "size": 0, "oid": COMMIT}
            else:
                oid = sha1(files[path]).hexdigest()
                entries[path] = {"type": "file", "path": path, "size": len(files[path]), "oid": oid}
        self._json(list(entries.values()))

    def _file(self, files: Mapping[str, bytes], path: str) -> None:
        if path not in files:
            return self._error("EntryNotFound")
        headers = {"ETag": f'"{sha1(files[path]).hexdigest()}"', "X-Repo-Commit": COMMIT}
        self._reply(200, files[path], headers)

    def _json(self, value: object) -> None:
        self._reply(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _error(self, code: str) -> None:
        self._reply(404, b"{}", {"X-Error-Code": code})

    def _reply(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        """Stay silent."""
