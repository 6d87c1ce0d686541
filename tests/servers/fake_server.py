"""A server of completions on the loopback whose texts are a tiny checkpoint's own, in the fields of
vLLM, SGLang or llama-server, also badly: python -m tests.servers.fake_server PORT CHECKPOINT

Fields are those of vLLM's pages (`return_token_ids`, "Per-Request Acceptance Metrics"), SGLang's
`meta_info` and llama-server's `timings`. The drafting that is told of is made up: `DRAFTED` tokens
a step, of which all but the last are accepted.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Lock, Thread
from typing import Any

import bild_lab
from bild_lab.lab.point.decoder import Decoder

MODEL = "tiny"
DRAFTED = 3  # tokens of a made-up draft, of which two are accepted
PIECE = DRAFTED  # tokens of a piece: two accepted ones and the target's own


@dataclass
class FakeServer:
    """What a server does. dialect: vllm, sglang, llama_cpp, or plain, which gives text alone.

    fault: what it does badly, and how many requests it does so: -1 for all. requests: the bodies
    that it got. arrived_s: when they came. most_at_work: on how many it
    worked at once.
    """

    decoder: Decoder
    dialect: str = "vllm"
    fault: str | None = None
    faults_left: int = -1
    requests: list[dict[str, Any]] = field(default_factory=list)
    arrived_s: list[float] = field(default_factory=list)
    at_work: int = 0
    most_at_work: int = 0
    lock: Lock = field(default_factory=Lock)
    released: Event = field(default_factory=Event)

    def takes_fault(self) -> str | None:
        if self.fault is None or self.faults_left == 0:
            return None
        self.faults_left -= 1
        return self.fault

    def events(self, body: dict[str, Any], fault: str | None) -> Iterator[dict[str, Any] | str]:
        """The stream's objects, and its last word."""
        prompt = body["prompt"] if "prompt" in body else body["messages"][0]["content"]
        with self.lock:
            self.at_work += 1
            self.most_at_work = max(self.most_at_work, self.at_work)
        if fault == "slow":
            time.sleep(0.2)
        with self.lock:
            generation = self.decoder.generate(
                prompt, body["max_tokens"], stop=body.get("stop", ())
            )
            self.at_work -= 1
        tokens = list(generation.token_ids)
        ended = len(tokens) < body["max_tokens"]
        if fault == "other text":
            tokens = [tokens[0] + 1 if tokens[0] < 38 else 10, *tokens[1:]]
        if fault == "other vocabulary":
            tokens = [50_000, *tokens[1:]]
        emitted = 0
        for start in range(0, len(tokens), PIECE):
            if fault == "cut" and start:
                return
            if fault == "stall" and start:
                self.released.wait(20)
            if fault == "error in the stream" and start:
                yield {"error": {"message": "out of memory", "code": 500}}
                return
            piece = tokens[start : start + PIECE]
            text = self.decoder.text(tokens[: start + len(piece)])
            choice = {"index": 0, "finish_reason": None, **self._piece(body, text[emitted:], piece)}
            emitted = len(text)
            yield {"model": MODEL, "choices": [choice]}
        steps = -(-len(tokens) // PIECE)
        last = {"index": 0, "finish_reason": "stop" if ended else "length", "text": ""}
        if self.dialect == "sglang" and body.get("return_meta_info"):
            last["meta_info"] = {
                "spec_verify_ct": steps,
                "spec_draft_token_num": steps * DRAFTED,
                "spec_accept_token_num": steps * (DRAFTED - 1),
            }
        final = {"model": MODEL, "choices": [last]}
        if self.dialect == "llama_cpp":
            final["timings"] = {
                "predicted_n": len(tokens),
                "draft_n": steps * DRAFTED,
                "draft_n_accepted": len(tokens) - steps,
            }
        yield final
        read = 1 if fault == "other prompt" else len(body.get("prompt", ()))
        usage: dict[str, Any] = {"choices": [], "usage": {"prompt_tokens": read}}
        if self.dialect == "vllm":
            usage["metrics"] = {
                "speculative_decoding": {
                    "acceptance_histogram_by_draft_length": {str(DRAFTED): [0, 0, steps, 0]},
                    "num_spec_steps": steps,
                    "num_accepted_draft_tokens": steps * (DRAFTED - 1),
                    "num_draft_tokens": steps * DRAFTED,
                }
            }
        if body.get("stream_options", {}).get("include_usage"):
            yield usage
        yield "[DONE]"

    def _piece(self, body: dict[str, Any], text: str, tokens: list[int]) -> dict[str, Any]:
        fields = {"delta": {"content": text}} if "messages" in body else {"text": text}
        name = {"vllm": "token_ids", "sglang": "response_token_ids"}.get(self.dialect)
        if name is not None and body.get("return_token_ids"):
            fields[name] = tokens
        return fields


def handler(server: FakeServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            print("asked", self.path, flush=True) if __name__ == "__main__" else None

        def do_GET(self) -> None:
            answers = {"/v1/models": {"data": [{"id": MODEL}]}, "/version": {"version": "0.32.0"}}
            self._send(200 if self.path in answers else 404, answers.get(self.path, {}))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with server.lock:
                server.requests.append(body)
                server.arrived_s.append(time.perf_counter())
            fault = server.takes_fault()
            if fault == "500":
                self._send(500, {"error": {"message": "the engine has died"}})
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Connection", "close")
            self.end_headers()
            self.close_connection = True
            for event in server.events(body, fault):
                data = event if isinstance(event, str) else json.dumps(event)
                self.wfile.write(f"data: {data}\n\n".encode())
                self.wfile.flush()
                time.sleep(0.001)

        def _send(self, status: int, content: dict[str, Any]) -> None:
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    return Handler


@contextmanager
def serving(server: FakeServer, port: int = 0) -> Iterator[str]:
    """Serves until the block ends. Yields the URL, with /v1."""
    http = ThreadingHTTPServer(("127.0.0.1", port), handler(server))
    http.daemon_threads = True
    thread = Thread(target=http.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_port}/v1"
    finally:
        server.released.set()
        http.shutdown()
        http.server_close()


def main() -> None:
    port, checkpoint = int(sys.argv[1]), sys.argv[2]
    with serving(FakeServer(bild_lab.load(checkpoint, policy="vanilla")), port) as url:
        print("ready at", url, flush=True)
        Event().wait()


if __name__ == "__main__":
    main()
