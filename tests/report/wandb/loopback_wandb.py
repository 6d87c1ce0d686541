"""A Weights & Biases server on the loopback interface: answers the public client, and keeps what it is sent."""

from __future__ import annotations

import gzip
import json
import re
import sys
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

ENTITY = "our-team"
KEY = "0123456789abcdef" * 3  # any 40 or more characters
_NOW = "2026-11-22T00:00:00Z"
_PAGE = {"pageInfo": {"hasNextPage": False, "endCursor": None}}
_VIEWER = {"id": "1", "entity": ENTITY, "username": "us", "email": "", "flags": "{}", "teams": {"edges": [], **_PAGE}}
_ANSWERS: dict[str, dict] = {  # of /graphql, the same every time
    **{name: {"viewer": _VIEWER} for name in ("Viewer", "GetViewer", "GetDefaultEntity")},
    "ServerFeaturesQuery": {"serverInfo": {"features": []}},
    "XXHashDigestsEnabled": {"entity": {"xxhashDigestsEnabled": False}},
    "ArtifactType": {"project": {"artifact": None}},
    "FetchArtifactDigestAlgorithm": {"project": {"artifactType": None}},
    "MarkRunFilesUploaded": {"markRunFilesUploaded": {"success": True}},
}


@dataclass
class ServedRun:
    """One run as the server knows it. about: the last values of `upsertBucket`. exit_code: None until it ended."""

    id: str
    about: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    exit_code: int | None = None

    @property
    def config(self) -> dict[str, Any]:
        return {key: one["value"] for key, one in json.loads(self.about["config"]).items()}

    def table(self, key: str) -> dict[str, Any]:
        """The last table logged under a key: its columns and its data."""
        (*_, last) = (row[key] for row in self.history if key in row)
        return json.loads(self.files[last["path"]])


@dataclass
class ServedArtifact:
    """One version of an artifact. about: the input of `createArtifact`."""

    about: dict[str, Any]
    files: dict[str, bytes] = field(default_factory=dict)
    committed: bool = False


@dataclass
class LoopbackWandb:
    """What was sent, by the names of the runs. unanswered: requests that the server does not know."""

    url: str = ""
    runs: dict[str, ServedRun] = field(default_factory=dict)
    artifacts: dict[str, ServedArtifact] = field(default_factory=dict)
    reports: list[dict[str, Any]] = field(default_factory=list)
    projects: set[str] = field(default_factory=set)
    unanswered: list[str] = field(default_factory=list)

    # the answers of /graphql that depend on what was sent, by the operation's name; they take its variables

    def RunResumeStatus(self, given: dict) -> dict:
        known = self.runs.get(given["name"])
        bucket = None
        if known is not None:
            tails = {"historyTail": json.dumps([json.dumps(row) for row in known.history[-1:]]), "eventsTail": "[]"}
            counts = {"historyLineCount": len(known.history), "eventsLineCount": 0, "logLineCount": 0}
            texts = {"summaryMetrics": json.dumps(known.summary), "config": known.about.get("config") or "{}"}
            names = {"id": known.id, "name": known.id, "displayName": known.about.get("displayName")}
            bucket = {**names, **texts, **tails, **counts, "tags": [], "notes": None, "wandbConfig": '{"t": 1}'}
        return {"model": {**self._project(given), "bucket": bucket}}

    def UpsertBucket(self, given: dict) -> dict:
        inserted = given["name"] not in self.runs
        run = self.runs.setdefault(given["name"], ServedRun(given["name"]))
        run.about |= {key: value for key, value in given.items() if value is not None}
        self.projects.add(run.about["project"])
        bucket = {"id": run.id, "name": run.id, "displayName": run.about.get("displayName"), "sweepName": None}
        bucket |= {"project": self._project(run.about), "historyLineCount": len(run.history), "config": "{}"}
        return {"upsertBucket": {"bucket": bucket, "inserted": inserted}}

    def CreateRunFiles(self, given: dict) -> dict:
        files = [{"name": name, "uploadUrl": self._upload("run", given["run"], name)} for name in given["files"]]
        return {"createRunFiles": {"runID": given["run"], "uploadHeaders": [], "files": files}}

    def CreateArtifact(self, given: dict) -> dict:
        identity = f"artifact-{len(self.artifacts)}"
        self.artifacts[identity] = ServedArtifact(given["input"])
        sequence = {"latestArtifact": None}
        return {"createArtifact": {"artifact": {"id": identity, "state": "PENDING", "artifactSequence": sequence}}}

    def CreateArtifactManifest(self, given: dict) -> dict:
        return {"createArtifactManifest": self._manifest(given["artifactID"], given["name"])}

    def UpdateArtifactManifest(self, given: dict) -> dict:
        return {"updateArtifactManifest": self._manifest(given["artifactManifestID"], "wandb_manifest.json")}

    def CreateArtifactFiles(self, given: dict) -> dict:
        nodes = [
            {
                "storagePath": one["name"],
                "uploadUrl": self._upload("artifact", one["artifactID"], one["name"]),
                "uploadHeaders": [],
                "uploadMultipartUrls": None,
                "artifact": {"id": one["artifactID"]},
            }
            for one in given["input"]["artifactFiles"]
        ]
        return {"createArtifactFiles": {"files": _edges(nodes)}}

    def CommitArtifact(self, given: dict) -> dict:
        artifact = self.artifacts[given["artifactID"]]
        artifact.committed = True
        return {"commitArtifact": {"artifact": {"id": given["artifactID"], "digest": artifact.about["digest"]}}}

    def Runs(self, given: dict) -> dict:
        if given["project"] not in self.projects:
            return {"project": None}
        group = json.loads(given["filters"])["group"]
        count = sum(run.about.get("groupName") == group for run in self.runs.values())
        return {"project": {"internalId": "1", "runCount": count, "readOnly": False, "runs": _edges([])}}

    def GetProjects(self, _: dict) -> dict:
        nodes = [
            {"id": name, "name": name, "entityName": ENTITY, "createdAt": _NOW, "isBenchmark": False, "user": None}
            for name in sorted(self.projects)
        ]
        return {"models": _edges(nodes)}

    def upsertView(self, given: dict) -> dict:
        self.reports.append(given)
        project = {"id": "1", "name": given["projectName"], "entityName": given["entityName"]}
        own = {key: given[key] for key in ("type", "name", "displayName", "description", "spec")}
        view = {"id": "Vmlld1", **own, "project": project, "updatedAt": _NOW}
        return {"upsertView": {"view": view, "inserted": True}}

    def _project(self, given: dict) -> dict:
        return {"id": "1", "name": given.get("project"), "entity": {"id": "1", "name": given.get("entity") or ENTITY}}

    def _manifest(self, identity: str, name: str) -> dict:
        file = {"id": "1", "uploadUrl": self._upload("manifest", identity, name), "uploadHeaders": []}
        return {"artifactManifest": {"id": identity, "file": file}}

    def _upload(self, *place: str) -> str:
        return "/".join([self.url, "upload", *(urllib.parse.quote(part, safe="") for part in place)])

    # the other requests

    def keep(self, kind: str, owner: str, name: str, content: bytes) -> None:
        """Keep an uploaded file."""
        if kind == "run":
            self.runs[owner].files[name] = content
        elif kind == "artifact":
            self.artifacts[owner].files[name] = content

    def stream(self, run: ServedRun, sent: dict) -> None:
        """Take in a part of a run's history and summary."""
        files = sent.get("files") or {}
        run.history += [json.loads(line) for line in files.get("wandb-history.jsonl", {}).get("content", [])]
        for line in files.get("wandb-summary.json", {}).get("content", []):
            run.summary = json.loads(line)
        if sent.get("complete"):
            run.exit_code = sent.get("exitcode")


@contextmanager
def loopback_wandb() -> Iterator[LoopbackWandb]:
    """Serve on a free port until the block ends; yields what was sent so far."""
    served = LoopbackWandb()

    class Handler(_Handler):
        kept = served

    server = _Server(("127.0.0.1", 0), Handler)
    served.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield served
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """The client's process ends without closing its connections; any other error is shown."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    kept: LoopbackWandb
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        sent = self._body()
        if self.path == "/graphql":
            self._graphql(json.loads(sent))
        elif found := re.fullmatch(r"/files/[^/]+/[^/]+/([^/]+)/file_stream", self.path):
            self.kept.stream(self.kept.runs[urllib.parse.unquote(found[1])], json.loads(sent))
            self._answer({"limits": {}})
        elif self.path.startswith("/sdk/otel/"):  # how the client itself fares
            self._answer({})
        else:
            self._unknown(self.path)

    def do_PUT(self) -> None:
        content, (_, _, *place) = self._body(), self.path.split("/")
        self.kept.keep(*(urllib.parse.unquote(part) for part in place), content)
        self._answer({})

    def do_GET(self) -> None:
        self._unknown(self.path)

    def _graphql(self, sent: dict) -> None:
        name = re.search(r"(?:query|mutation)\s+(\w+)", sent["query"])[1]
        answer: Callable[[dict], dict] | None = getattr(self.kept, name, None)
        if name in _ANSWERS:
            self._answer({"data": _ANSWERS[name]})
        elif answer is None:
            self._unknown(name)
        else:
            self._answer({"data": answer(sent.get("variables") or {})})

    def _unknown(self, what: str) -> None:
        self.kept.unanswered.append(what)
        self._answer({"errors": [{"message": f"this server does not know {what}"}]}, 400)

    def _body(self) -> bytes:
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        return gzip.decompress(content) if self.headers.get("Content-Encoding") == "gzip" else content

    def _answer(self, content: dict, status: int = 200) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Keep the test's output clean."""


def _edges(nodes: list[dict]) -> dict:
    return {"edges": [{"node": node, "cursor": "end"} for node in nodes], **_PAGE}
