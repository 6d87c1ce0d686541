"""A Weights & Biases server on the loopback interface: answers the public client, and keeps what it
is sent.
"""

from __future__ import annotations

import gzip
import json
import re
import threading
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

ENTITY, KEY = "our-team", "0123456789abcdef" * 3  # of the account; any 40 or more characters
_VIEWER = {
    "id": "1",
    "entity": ENTITY,
    "username": "us",
    "email": "",
    "flags": "{}",
    "teams": {"edges": []},
}
_ANSWERS: dict[str, dict] = {  # the same every time
    **{name: {"viewer": _VIEWER} for name in ("Viewer", "GetViewer", "GetDefaultEntity")},
    "ServerFeaturesQuery": {"serverInfo": {"features": []}},
    "XXHashDigestsEnabled": {"entity": {"xxhashDigestsEnabled": False}},
    "ArtifactType": {"project": {"artifact": None}},
    "FetchArtifactDigestAlgorithm": {"project": {"artifactType": None}},
    "MarkRunFilesUploaded": {"markRunFilesUploaded": {"success": True}},
    "RunResumeStatus": {
        "model": {"id": "1", "name": "ours", "entity": {"id": "1", "name": ENTITY}, "bucket": None}
    },
}


@dataclass
class LoopbackWandb:
    """What was sent: runs by name, with "about" (the last `upsertBucket`), "summary", "files";
    artifacts; reports.
    """

    url: str = ""
    runs: dict[str, dict[str, Any]] = field(default_factory=dict)
    artifacts: list[dict[str, Any]] = field(default_factory=list)
    reports: list[dict[str, Any]] = field(default_factory=list)

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [run for run in self.runs.values() if run["about"]["jobType"] == kind]

    def answer(self, name: str, given: dict[str, Any]) -> dict[str, Any]:
        """What /graphql returns for an operation and its variables.

        Raises KeyError for one it does not know.
        """
        return _ANSWERS[name] if name in _ANSWERS else {
            "UpsertBucket": self._run, "CreateRunFiles": self._run_files, "CreateArtifact": self._artifact,
            "CreateArtifactManifest": self._manifest, "UpdateArtifactManifest": self._manifest,
            "CreateArtifactFiles": self._artifact_files, "CommitArtifact": self._commit,
            "Runs": self._listed, "GetProjects": self._projects, "upsertView": self._report,
        }[name](given)  # fmt: skip

    def _run(self, given: dict) -> dict:
        inserted = given["name"] not in self.runs
        run = self.runs.setdefault(given["name"], {"about": {}, "summary": {}, "files": {}})
        run["about"] |= {key: value for key, value in given.items() if value is not None}
        project = {
            "id": "1",
            "name": run["about"]["project"],
            "entity": {"id": "1", "name": ENTITY},
        }
        bucket = dict.fromkeys(("id", "name", "displayName"), given["name"]) | {
            "project": project,
            "config": "{}",
        }
        return {
            "upsertBucket": {
                "bucket": {**bucket, "sweepName": None, "historyLineCount": 0},
                "inserted": inserted,
            }
        }

    def _run_files(self, given: dict) -> dict:
        files = [
            {"name": name, "uploadUrl": self._upload("run", given["run"], name)}
            for name in given["files"]
        ]
        return {"createRunFiles": {"runID": given["run"], "uploadHeaders": [], "files": files}}

    def _artifact(self, given: dict) -> dict:
        self.artifacts.append({"about": given["input"], "files": set(), "committed": False})
        artifact = {
            "id": str(len(self.artifacts) - 1),
            "state": "PENDING",
            "artifactSequence": {"latestArtifact": None},
        }
        return {"createArtifact": {"artifact": artifact}}

    def _manifest(self, given: dict) -> dict:
        file = {
            "id": "1",
            "uploadUrl": self._upload("manifest", "1", "manifest"),
            "uploadHeaders": [],
        }
        manifest = {"artifactManifest": {"id": "1", "file": file}}
        return {"createArtifactManifest": manifest, "updateArtifactManifest": manifest}

    def _artifact_files(self, given: dict) -> dict:
        sent, nodes = given["input"]["artifactFiles"], []
        for one in sent:
            self.artifacts[int(one["artifactID"])]["files"].add(one["name"])
            url = {
                "uploadUrl": self._upload("artifact", one["artifactID"], one["name"]),
                "uploadHeaders": [],
            }
            own = {
                "storagePath": one["name"],
                "artifact": {"id": one["artifactID"]},
                "uploadMultipartUrls": None,
            }
            nodes.append({**url, **own})
        return {"createArtifactFiles": {"files": _page(nodes)}}

    def _commit(self, given: dict) -> dict:
        artifact = self.artifacts[int(given["artifactID"])]
        artifact["committed"] = True
        return {
            "commitArtifact": {
                "artifact": {"id": given["artifactID"], "digest": artifact["about"]["digest"]}
            }
        }

    def _listed(self, given: dict) -> dict:
        wanted = {
            {"group": "groupName"}.get(key, key): value
            for key, value in json.loads(given["filters"]).items()
        }
        found = [run for run in self.runs.values() if wanted.items() <= run["about"].items()]
        if given["project"] not in {run["about"]["project"] for run in self.runs.values()}:
            return {"project": None}
        about = dict.fromkeys(
            ("id", "projectId", "displayName", "state", "createdAt", "heartbeatAt"), "1"
        )
        texts = {
            "user": {"name": "us", "username": "us"},
            "tags": [],
            "config": "{}",
            "systemMetrics": "{}",
        }
        nodes = [
            {
                **about,
                **texts,
                "name": run["about"]["name"],
                "summaryMetrics": json.dumps(run["summary"]),
            }
            for run in found
        ]
        return {
            "project": {
                "internalId": "1",
                "runCount": len(found),
                "readOnly": False,
                "runs": _page(nodes),
            }
        }

    def _projects(self, given: dict) -> dict:
        names = {run["about"]["project"] for run in self.runs.values()}
        more = {
            "entityName": ENTITY,
            "createdAt": "2026-11-22T00:00:00Z",
            "isBenchmark": False,
            "user": None,
        }
        return {"models": _page([{"id": name, "name": name, **more} for name in names])}

    def _report(self, given: dict) -> dict:
        self.reports.append({**given, "spec": json.loads(given["spec"])})
        own = {key: given[key] for key in ("type", "name", "displayName", "description", "spec")}
        project = {"id": "1", "name": given["projectName"], "entityName": given["entityName"]}
        view = {"id": "Vmlld1", **own, "project": project, "updatedAt": "2026-11-22T00:00:00Z"}
        return {"upsertView": {"view": view, "inserted": True}}

    def _upload(self, *place: str) -> str:
        return "/".join(
            [self.url, "upload", *(urllib.parse.quote(part, safe="") for part in place)]
        )

    def stream(self, run: dict[str, Any], sent: dict[str, Any]) -> None:
        """Take in a part of a run's summary."""
        for line in (sent.get("files") or {}).get("wandb-summary.json", {}).get("content", []):
            run["summary"] = json.loads(line)


@contextmanager
def loopback_wandb() -> Iterator[LoopbackWandb]:
    """Serve on a free port until the block ends; yields what was sent so far."""
    served = LoopbackWandb()

    class Handler(_Handler):
        kept = served

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    # the client leaves without closing
    server.daemon_threads, server.handle_error = True, lambda *_: None
    served.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield served
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    kept: LoopbackWandb
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        sent = self._body()
        if self.path == "/graphql":
            asked = json.loads(sent)
            name = re.search(r"(?:query|mutation)\s+(\w+)", asked["query"])[1]
            try:
                return self._answer({"data": self.kept.answer(name, asked.get("variables") or {})})
            except KeyError as error:
                return self._answer(
                    {"errors": [{"message": f"this server does not know {name}: {error}"}]}, 400
                )
        if found := re.fullmatch(r"/files/[^/]+/[^/]+/([^/]+)/file_stream", self.path):
            self.kept.stream(self.kept.runs[urllib.parse.unquote(found[1])], json.loads(sent))
        self._answer({"limits": {}})  # and to how the client itself fares

    def do_PUT(self) -> None:
        content, (kind, owner, name) = (
            self._body(),
            map(urllib.parse.unquote, self.path.split("/")[2:]),
        )
        if kind == "run":
            self.kept.runs[owner]["files"][name] = content
        self._answer({})

    def _body(self) -> bytes:
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        return (
            gzip.decompress(content) if self.headers.get("Content-Encoding") == "gzip" else content
        )

    def _answer(self, content: dict[str, Any], status: int = 200) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Keep the test's output clean."""


def _page(nodes: list[dict]) -> dict[str, Any]:
    edges = [{"node": node, "cursor": "end"} for node in nodes]
    return {"edges": edges, "pageInfo": {"hasNextPage": False, "endCursor": None}}
