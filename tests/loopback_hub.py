"""A Hugging Face hub on the loopback interface, serving datasets and models from memory, also
badly.

Its models `{"google/mt5-small": contents(folder)}` are a checkpoint under a published id, and
`pickled` makes its weights a pickle.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import threading
import urllib.parse
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import torch
from safetensors.torch import load

OID = "0123456789abcdef0123456789abcdef01234567"  # of every folder
CONVERSION = "refs/convert/parquet"
REPOSITORY = Path(__file__).resolve().parents[1]
NO_CONSENT: Mapping[str, Collection[str]] = {}
NOTHING: Mapping[str, Mapping[str, bytes]] = {}
_LOAD_ALL = """
import json, sys
from types import SimpleNamespace
import huggingface_hub.file_download
from bild_lab.lab.data.dataset_spec import DatasetSpec
from bild_lab.lab.data.examples import load_examples
from bild_lab.errors import UserError
huggingface_hub.file_download.time = SimpleNamespace(sleep=lambda seconds: None)  # it waits before each new try
columns = dict(name="x", source_column="translation.de", reference_column="translation.en", metric="bleu")
for fields in json.loads(sys.argv[1]):
    try:
        print([example.source for example in load_examples(DatasetSpec(**columns, **fields))])
    except UserError as error:
        print(" ".join(str(error).split()))
"""


def printed_in_a_fresh_process(
    code: str, endpoint: str, home: Path, *words: str, token: str = ""
) -> list[str]:
    """The lines that this code prints; the hub's libraries read their variables only once, at
    import.
    """
    switches = {
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_XET": "1",
        "HF_TOKEN": token,
    }
    inherited = {
        name: value for name, value in os.environ.items() if name != "HUGGING_FACE_HUB_TOKEN"
    }
    environment = {**inherited, **switches, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code, *words]
    done = subprocess.run(
        command, env=environment, cwd=home, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()


def contents(folder: Path) -> dict[str, bytes]:
    """The files of a repository, by their paths in it."""
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in folder.rglob("*")
        if file.is_file()
    }


def pickled(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """A checkpoint whose weights are in `pytorch_model.bin` instead of `model.safetensors`."""
    return {
        **{name: files[name] for name in files if name != "model.safetensors"},
        "pytorch_model.bin": pickle_of(load(files["model.safetensors"])),
    }


def pickle_of(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """The tensors as PyTorch pickles them."""
    written = io.BytesIO()
    torch.save(dict(tensors), written)
    return written.getvalue()


def commit_of(repository: str, branch: str = "main") -> str:
    """The commit at the end of a branch, of each repository another one: a checkpoint is known by
    it.
    """
    return sha1(f"{repository}@{branch}".encode()).hexdigest()


def load_in_a_fresh_process(
    endpoint: str, home: Path, *specs: dict[str, str], token: str = ""
) -> list[str]:
    """What each load of a dataset printed."""
    return printed_in_a_fresh_process(_LOAD_ALL, endpoint, home, json.dumps(specs), token=token)


@contextmanager
def loopback_hub(
    datasets: Mapping[str, Mapping[str, bytes]],
    models: Mapping[str, Mapping[str, bytes]] = NOTHING,
    gated: Collection[str] = (),
    consent: Mapping[str, Collection[str]] = NO_CONSENT,
    truncated: Collection[str] = (),
    shortened: Collection[str] = (),
    fetched: list[str] | None = None,
) -> Iterator[str]:
    """Serve `{"owner/name": {"data/test.jsonl": b"..."}}`; yields the endpoint's URL.

    A key `owner/name@refs/convert/parquet` is a branch, with its own files and commit; without it
    there is none. A repository with branches alone has an empty main.
    gated: repositories whose files want a login and a permission. consent: by token, those of them
    that it may read. truncated: names of files that end before the length they announce. shortened:
    of those that announce, when asked for, half their length only.
    fetched: takes `owner/name@branch/path` of every file that was sent.
    """

    class Handler(_HubHandler):
        kinds = {"datasets": _by_branch(datasets), "models": _by_branch(models)}
        withheld, permitted = frozenset(gated), consent
        cut, halved = frozenset(truncated), frozenset(shortened)
        sent = [] if fetched is None else fetched

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _by_branch(
    repositories: Mapping[str, Mapping[str, bytes]],
) -> dict[str, dict[str, Mapping[str, bytes]]]:
    """The files of every repository by the name of the branch."""
    branches: dict[str, dict[str, Mapping[str, bytes]]] = {}
    for name, files in repositories.items():
        repository, _, branch = name.partition("@")
        branches.setdefault(repository, {"main": {}})[branch or "main"] = files
    return branches


class _HubHandler(BaseHTTPRequestHandler):
    kinds: Mapping[str, Mapping[str, Mapping[str, Mapping[str, bytes]]]] = {}
    sent: list[str] = []
    withheld: frozenset[str] = frozenset()
    permitted: Mapping[str, Collection[str]] = NO_CONSENT
    cut: frozenset[str] = frozenset()
    halved: frozenset[str] = frozenset()
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        # a revision such as refs%2Fpr%2F1 is one segment
        path = [
            urllib.parse.unquote(part)
            for part in urllib.parse.urlsplit(self.path).path.split("/")[1:]
        ]
        api = path[:1] == ["api"]
        path = path[api:]
        # files of models have no prefix
        kind = path.pop(0) if path[:1] in (["datasets"], ["models"]) else "models"
        repository, rest = "/".join(path[:2]), path[2:]
        branches = self.kinds[kind].get(repository)
        if branches is None:
            return self._error("RepoNotFound")
        revision = rest[1] if rest[:1] in (["resolve"], ["revision"], ["tree"]) else "main"
        known = {name: name for name in branches} | {
            commit_of(repository, name): name for name in branches
        }
        if revision not in known:
            return self._error("RevisionNotFound")
        files, commit = branches[known[revision]], commit_of(repository, known[revision])
        refused = repository in self.withheld and repository not in self._permitted()
        if api and rest[:1] != ["auth-check"]:
            return self._api(repository, commit, files, rest)
        if refused:
            return self._error("GatedRepo", 403 if "Authorization" in self.headers else 401)
        if api:
            return self._json({})
        path = "/".join(rest[2:])
        if self.command == "GET" and path in files:
            self.sent.append(f"{repository}@{known[revision]}/{path}")
        return self._file(files, commit, path)

    do_HEAD = do_GET

    def _permitted(self) -> Collection[str]:
        """The gated repositories that the request's token may read."""
        return self.permitted.get(self.headers.get("Authorization", "").removeprefix("Bearer "), ())

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._error("EntryNotFound")

    def _api(
        self, repository: str, commit: str, files: Mapping[str, bytes], rest: list[str]
    ) -> None:
        if rest[:1] == ["tree"]:
            return self._tree(files, "/".join(rest[2:]))
        siblings = [{"rfilename": path} for path in files]
        gated = "auto" if repository in self.withheld else False
        self._json(
            {
                "id": repository,
                "sha": commit,
                "siblings": siblings,
                "private": False,
                "gated": gated,
            }
        )

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
                entries[head] = {"type": "directory", "path": prefix + head, "size": 0, "oid": OID}
            else:
                oid = sha1(files[path]).hexdigest()
                entries[path] = {"type": "file", "path": path, "size": len(files[path]), "oid": oid}
        self._json(list(entries.values()))

    def _file(self, files: Mapping[str, bytes], commit: str, path: str) -> None:
        if path not in files:
            return self._error("EntryNotFound")
        headers = {"ETag": f'"{sha1(files[path]).hexdigest()}"', "X-Repo-Commit": commit}
        if path in self.cut and self.command == "GET":
            self.close_connection = True
            return self._reply(200, files[path], headers, sent=len(files[path]) // 2)
        if path in self.halved and self.command == "GET":
            return self._reply(200, files[path][: len(files[path]) // 2], headers)
        self._reply(200, files[path], headers)

    def _json(self, value: object) -> None:
        self._reply(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _error(self, code: str, status: int = 404) -> None:
        self._reply(status, b"{}", {"X-Error-Code": code})

    def _reply(
        self, status: int, body: bytes, headers: Mapping[str, str], sent: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[:sent])

    def log_message(self, *arguments: object) -> None:
        """Stay silent."""
