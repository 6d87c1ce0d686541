"""A server of completions on the loopback whose texts are a tiny checkpoint's own, in the fields of
vLLM, SGLang or llama-server, also badly: python -m tests.servers.fake_server PORT CHECKPOINT

Its streams have the objects of `dialogues/DIALECT.jsonl`, a stream a file, in its order:

- vllm: `vllm/entrypoints/openai/completion/serving.py` and its page on acceptance metrics;
- sglang: `sglang/srt/entrypoints/openai/serving_completions.py`, `protocol.py`, `utils.py`;
- llama_cpp: recorded from llama-server, which drafted for itself;
- plain: OpenAI's own fields.

The drafting that is told of is made up: `DRAFTED` tokens a step, of which all but the last are
accepted.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any

import bild_lab
from bild_lab.lab.point.decoder import Decoder
from tests.tiny import END

MODEL = "tiny"
DRAFTED = 3  # tokens of a made-up draft, of which two are accepted
PIECE = DRAFTED  # tokens of a piece: two accepted ones and the target's own
# the fields that a server may know, and no others
OF_OPENAI = {"model", "prompt", "max_tokens", "temperature", "top_p", "stream", "stream_options"}
DIALOGUES = Path(__file__).parent / "dialogues"


def dialogue(dialect: str) -> list[Any]:
    """The objects of an engine's stream, and its last word."""
    lines = (DIALOGUES / f"{dialect}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


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
        tokens = [] if fault == "no text" else list(generation.token_ids)
        ended = len(tokens) < body["max_tokens"]
        if fault == "other text":
            tokens = [10 if tokens[0] != 10 else 11, *tokens[1:]]
        if fault == "other vocabulary":
            tokens = [50_000, *tokens[1:]]
        if fault == "no end":
            tokens = [*tokens[:-3], END, *tokens[-2:]]
        emitted = 0
        pieces = range(0, len(tokens), PIECE)
        first, piece, *_, last = (event for event in self.objects if event.get("choices"))
        for start in pieces:
            if fault == "cut" and start:
                return
            if fault == "stall" and start:
                self.released.wait(20)
            if fault == "error in the stream" and start:
                yield {"error": {"message": "out of memory", "code": 500}}
                yield "[DONE]"
                return
            ids = tokens[start : start + PIECE]
            text = self.decoder.text(tokens[: start + len(ids)])
            event = deepcopy(piece if start else first)
            self._fill(event["choices"][0], body, text[emitted:], ids)
            emitted = len(text)
            yield event
        last = deepcopy(last)
        self._fill(last["choices"][0], body, "", [])
        ended = ended or fault == "other count"
        last["choices"][0]["finish_reason"] = "stop" if ended else "length"
        if fault == "aborted":
            last["choices"][0]["finish_reason"] = "abort"
        read = len(body.get("prompt", ()))
        counted = Counted(
            prompt=1 if fault == "other prompt" else read + (fault == "longer prompt"),
            tokens=len(tokens) - 3 if fault == "other count" else len(tokens),
            steps=len(pieces),
            kept=read - 1 if fault == "kept prompt" else 0,
        )
        for event in (last, *self.trailing):
            filled = counted.filled(event)
            if fault == "other model":
                filled["model"] = "other"
            if filled.get("usage") and not body.get("stream_options", {}).get("include_usage"):
                continue
            if "sglext" in filled and not body.get("return_spec_tokens_details"):
                continue
            yield filled
        yield "[DONE]"

    @property
    def objects(self) -> list[dict[str, Any]]:
        return [event for event in dialogue(self.dialect) if isinstance(event, dict)]

    @property
    def trailing(self) -> list[dict[str, Any]]:
        """Those without a choice: usage and drafting."""
        return [event for event in self.objects if not event["choices"]]

    def _fill(
        self, choice: dict[str, Any], body: dict[str, Any], text: str, tokens: list[int]
    ) -> None:
        """Write a piece's text and tokens where the engine has them."""
        choice["text"] = text
        for name, value in (("prompt_token_ids", body.get("prompt")), ("token_ids", tokens)):
            if name in choice:
                choice[name] = value
                if not body.get("return_token_ids"):
                    del choice[name]
        if "messages" in body:
            choice["delta"] = {"content": choice.pop("text")}


@dataclass
class Counted:
    """What a server counts of a text: tokens of the prompt and of the text, steps; and those of the
    prompt that it had kept from earlier requests.
    """

    prompt: int
    tokens: int
    steps: int
    kept: int = 0

    def filled(self, event: dict[str, Any]) -> dict[str, Any]:
        """An engine's object with these numbers where it has such."""
        event = deepcopy(event)
        accepted, drafted = self.steps * (DRAFTED - 1), self.steps * DRAFTED
        if event.get("usage"):
            total = self.prompt + self.tokens
            event["usage"] |= {
                "prompt_tokens": self.prompt,
                "completion_tokens": self.tokens,
                "total_tokens": total,
            }
            if self.kept:
                event["usage"]["prompt_tokens_details"] = {"cached_tokens": self.kept}
        if "metrics" in event:
            event["metrics"]["speculative_decoding"] |= {
                "acceptance_histogram": [0, 0, self.steps, 0],
                "acceptance_histogram_by_draft_length": {str(DRAFTED): [0, 0, self.steps, 0]},
                "num_spec_steps": self.steps,
                "num_accepted_draft_tokens": accepted,
                "num_draft_tokens": drafted,
            }
        if "sglext" in event:
            event["sglext"]["spec_tokens_details"] |= {
                "spec_verify_ct": self.steps,
                "spec_num_proposed_drafts": drafted,
                "spec_num_correct_drafts": accepted,
                "spec_correct_drafts_histogram": [0, 0, self.steps, 0],
            }
        if "timings" in event:
            event["timings"] |= {
                "predicted_n": self.tokens,
                "draft_n": drafted,
                "draft_n_accepted": self.tokens - self.steps,
            }
        return event


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
            if fault == "429":
                self._send(429, {"error": {"message": "too many requests"}}, {"Retry-After": "1"})
                return
            if fault == "401":
                self._send(401, {"error": {"message": f"not {self.headers['Authorization']}"}})
                return
            if fault == "strict" and (unknown := sorted(set(body) - OF_OPENAI)):
                self._send(400, {"error": {"message": f"{unknown[0]}: no such field"}})
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

        def _send(
            self, status: int, content: dict[str, Any], headers: dict[str, str] | None = None
        ) -> None:
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            for name, value in (headers or {}).items():
                self.send_header(name, value)
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
