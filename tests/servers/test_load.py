"""Several requests on their way at once, and requests that arrive at random."""

from __future__ import annotations

import time

import numpy as np
import pytest

import bild_lab
from bild_lab.engine.batch_decoding import arrival_times, decode_batch
from bild_lab.engine.batch_scheduler import Batch
from bild_lab.errors import UserError
from bild_lab.lab.point.decoder import Decoder
from tests.checkpoints import tiny_checkpoints, vanilla
from tests.servers.fake_server import FakeServer, serving

PROMPTS = ["w5 w9 w12", "w7 w8", "w21 w5 w6", "w11 w5 w6", "w5", "w9 w9"]
LIMIT = 8


def asking(url: str, **knobs: object) -> Decoder:
    return bild_lab.load(str(tiny_checkpoints() / "llama"), policy="server", url=url, **knobs)


def test_a_batch_is_so_many_requests_on_their_way_and_each_text_is_that_of_batch_1() -> None:
    server = FakeServer(vanilla(), fault="slow")
    with serving(server) as url:
        decoder = asking(url)
        requests = decoder.requests(PROMPTS, LIMIT)
        decoder.method.prepare(requests[0])
        texts = decode_batch(decoder.method, requests, Batch(3))
    expected = [vanilla().generate(prompt, LIMIT).token_ids for prompt in PROMPTS]
    assert [text.token_ids for text in texts] == expected
    assert server.most_at_work == 3
    # shares add up to the seconds of all, of which each of three at once waits its own
    assert sum(text.share_s for text in texts) < sum(text.latency_s for text in texts)


def test_generation_of_several_prompts_asks_for_them_together() -> None:
    server = FakeServer(vanilla(), fault="slow")
    with serving(server) as url:
        generations = asking(url).generate(PROMPTS, LIMIT, batch=4)
    assert server.most_at_work == 4
    assert generations[1].token_ids == vanilla().generate(PROMPTS[1], LIMIT).token_ids


def test_requests_arrive_at_random_at_the_rate_and_the_same_for_every_method() -> None:
    assert arrival_times(None, 3) is None
    arrivals = arrival_times(50.0, 4000)
    gaps = np.diff(arrivals)
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.1)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.1)  # exponential
    assert list(arrivals[:5]) == list(arrival_times(50.0, 5))
    server = FakeServer(vanilla())
    with serving(server) as url:
        decoder = asking(url, arrival_rate=10.0)
        requests = decoder.requests(PROMPTS, LIMIT)
        decoder.method.prepare(requests[0])
        begun = time.perf_counter()
        decode_batch(decoder.method, requests, Batch(6))
    arrived = np.array(sorted(server.arrived_s)) - begun
    assert (arrived >= arrival_times(10.0, len(PROMPTS))).all()  # none is sent before its time


def test_a_text_that_waits_for_its_place_has_waited_since_it_arrived() -> None:
    server = FakeServer(vanilla(), fault="slow")
    with serving(server) as url:
        decoder = asking(url, arrival_rate=1000.0)
        requests = decoder.requests(PROMPTS[:3], LIMIT)
        decoder.method.prepare(requests[0])
        texts = decode_batch(decoder.method, requests, Batch(1))
    latencies = [text.latency_s for text in texts]
    assert latencies[2] > latencies[1] + 0.15 > latencies[0] + 0.3


def test_seconds_of_failed_attempts_do_not_count_in_a_batch_either() -> None:
    server = FakeServer(vanilla(), fault="429", faults_left=2)
    with serving(server) as url:
        decoder = asking(url)
        requests = decoder.requests(PROMPTS[:3], LIMIT)
        decoder.method.prepare(requests[0])
        vanilla().generate(PROMPTS[0], LIMIT)  # its weights are loaded
        texts = decode_batch(decoder.method, requests, Batch(2))
    assert sum(text.trace.report.attempts > 1 for text in texts) >= 1
    assert max(text.trace.paused_s for text in texts) >= 1.0
    assert max(text.latency_s for text in texts) < 0.9


@pytest.mark.parametrize("rate", [0, -1.0, "fast"])
def test_a_rate_that_is_none_is_refused(rate: object) -> None:
    with pytest.raises(UserError, match="policy.arrival_rate"):
        asking("http://127.0.0.1:9/v1", arrival_rate=rate)
