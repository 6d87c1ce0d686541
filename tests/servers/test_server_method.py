"""`policy=server`: the server's own texts, times and drafting; what it does badly is said."""

from __future__ import annotations

import re
import time
from dataclasses import replace

import pytest

import bild_lab
from bild_lab.engine.sampling import Sampling
from bild_lab.engine.trace import EngineReport, ReportedRounds, Trace
from bild_lab.errors import UserError, warn_once
from bild_lab.lab.measure.summary import counts, stream_summary
from bild_lab.lab.measure.timing import Timed
from bild_lab.lab.point.decoder import Decoder
from bild_lab.servers import server_method
from bild_lab.servers.acceptance_reports import over_all_forwards, reported_rounds
from bild_lab.servers.completions import (
    AT_LENGTH,
    EXTENSIONS,
    STOPPED,
    CompletionsClient,
    ServerAnswer,
)
from tests.checkpoints import tiny_checkpoints, vanilla
from tests.servers.fake_server import DRAFTED, OF_OPENAI, FakeServer, serving

PROMPT = "w5 w9 w30 w12"
LIMIT = 12


def asking(url: str, family: str = "llama", **knobs: object) -> Decoder:
    return bild_lab.load(str(tiny_checkpoints() / family), policy="server", url=url, **knobs)


@pytest.mark.parametrize("dialect", ["vllm", "sglang", "llama_cpp", "plain"])
def test_a_servers_text_has_the_targets_tokens_with_ids_and_without(dialect: str) -> None:
    expected = vanilla().generate(PROMPT, LIMIT)
    server = FakeServer(vanilla(), dialect)
    with serving(server) as url:
        generation = asking(url).generate(PROMPT, LIMIT)
    assert generation.token_ids == expected.token_ids
    assert server.requests[0]["prompt"] == list(vanilla().request(PROMPT, LIMIT).source.prompt)
    report = generation.trace.report
    assert report.attempts == 1 and len(report.pieces_s) == LIMIT // DRAFTED
    assert list(report.pieces_s) == sorted(report.pieces_s)
    gives_ids = dialect in ("vllm", "sglang")
    assert report.later_tokens == (LIMIT - DRAFTED if gives_ids else None)


@pytest.mark.parametrize(
    "baseline", [{"baseline_url": "http://127.0.0.1:9/v1"}, {"baseline_body": {}}]
)
def test_without_the_targets_weights_a_text_is_written_by_the_tokenizer(baseline: dict) -> None:
    with serving(FakeServer(vanilla(), "plain")) as url:
        decoder = asking(url, **baseline)
        generation = decoder.generate(PROMPT, LIMIT)
    assert decoder.running == ()
    text = vanilla().generate(PROMPT, LIMIT).text
    written = vanilla().target.checkpoint.tokenizer.encode(text, add_special_tokens=False)
    assert generation.token_ids == written[:LIMIT]


def new_tokens(decoder: Decoder, answer: ServerAnswer, **knobs: object) -> list[int]:
    """The tokens of an answer, however it came."""
    request = decoder.request(PROMPT, LIMIT, **knobs)
    tokens = decoder.method.read(request, Trace(), answer)
    return tokens[request.limits.prompt_length :]


@pytest.mark.parametrize(
    ("beside", "knobs"), [({"baseline_body": {}}, {}), ({}, {"sampling": Sampling(1.0)})]
)
def test_a_text_that_the_server_ended_itself_has_an_end_token_and_one_alone(
    beside: dict, knobs: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside another server, and where it is sampled: the target does not write it."""
    monkeypatch.setattr(server_method, "written_answer", None)
    decoder = asking("http://127.0.0.1:9/v1", **beside)
    checkpoint = decoder.target.checkpoint
    (end,) = checkpoint.end_tokens
    words = checkpoint.tokenizer.encode("w5 w9", add_special_tokens=False)

    def written(token_ids: list[int] | None, reason: str, **further: object) -> list[int]:
        answer = ServerAnswer("w5 w9", token_ids, finish_reason=reason)
        return new_tokens(decoder, answer, **knobs, **further)

    assert written(None, STOPPED) == [*words, end] and written(None, AT_LENGTH) == words
    assert written(words, STOPPED) == written([*words, end], STOPPED) == [*words, end]
    assert written([*words, end], AT_LENGTH) == [*words, end]  # it came at the limit
    # a stop string may have ended it
    assert written(None, STOPPED, stop=["w7"]) == written(words, STOPPED, stop=["w7"]) == words


def test_the_first_id_that_the_target_does_not_have_is_another_models() -> None:
    def written(token: int) -> list[int]:
        decoder = asking("http://127.0.0.1:9/v1", baseline_body={})
        return new_tokens(decoder, ServerAnswer("", [5, token], finish_reason=AT_LENGTH))

    assert written(39) == [5, 39]
    with pytest.raises(UserError, match="gave token 40, and pair.target has 40"):
        written(40)


def test_of_several_models_one_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CompletionsClient, "models", lambda _: ["small", "large"])
    assert asking("http://127.0.0.1:9/v1", model="large").method._served_model == "large"
    with pytest.raises(UserError, match="serves small, large, got policy.model=None"):
        _ = asking("http://127.0.0.1:9/v1").method._served_model


def test_the_drafting_of_each_dialect_is_read() -> None:
    reports = {}
    for dialect in ("vllm", "sglang", "llama_cpp", "plain"):
        with serving(FakeServer(vanilla(), dialect)) as url:
            reports[dialect] = asking(url).generate(PROMPT, LIMIT).trace.report.rounds
    steps = LIMIT // DRAFTED
    assert reports["plain"] is None
    for dialect in ("vllm", "sglang", "llama_cpp"):
        told = reports[dialect]
        forwards = steps + (dialect != "llama_cpp")  # the prompt's, which the others leave out
        assert (told.verifications, told.drafted, told.accepted) == (forwards, 3 * steps, 2 * steps)
    assert reports["vllm"].steps == {(DRAFTED, DRAFTED - 1): steps}
    assert reports["llama_cpp"].steps is None


def test_a_text_without_drafts_counts_as_many_forwards_as_tokens() -> None:
    """llama-server tells of drafts only where it drafted."""
    told = reported_rounds({"timings": {"predicted_n": 7}})
    assert (told.verifications, told.drafted, told.accepted) == (7, 0, 0)
    nothing = {"draft_rounds": None, "draft_n": None, "draft_n_accepted": None}  # as mlx-vlm's says
    assert reported_rounds({"timings": {"predicted_n": 7, **nothing}}) == told
    texts = [
        Timed([5] * 7, [1.0], Trace(report=EngineReport(rounds=told))),
        Timed(
            [5] * 8,
            [1.0],
            Trace(report=EngineReport(rounds=ReportedRounds(2, drafted=9, accepted=6))),
        ),
        Timed([5] * 90, [1.0], Trace(report=EngineReport())),  # of which nothing was told
    ]
    measured = counts(texts)
    assert measured.tokens_per_target_call == 15 / 9 and measured.accepted_share == 6 / 9


def test_what_was_accepted_after_the_end_of_a_text_hides_no_verification() -> None:
    """Planted: five tokens, of which mlx-vlm's server accepted four and two after the end, in three
    rounds after the prompt's forward.
    """
    timings = {"predicted_n": 5, "draft_rounds": 3, "draft_n": 9, "draft_n_accepted": 4}
    told = over_all_forwards(reported_rounds({"timings": timings}), completion_tokens=5)
    assert (told.verifications, told.drafted, told.accepted) == (4, 9, 4)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("500", "status 500.*the engine has died"),
        ("cut", "ended after 1 pieces, unfinished"),
        ("stall", "nothing came for 1 s after 1 pieces"),
        ("error in the stream", "error in the stream.*out of memory"),
        ("aborted", "finish_reason abort"),
    ],
)
def test_a_request_that_fails_is_sent_again_and_then_an_error(fault: str, message: str) -> None:
    expected = vanilla().generate(PROMPT, LIMIT)  # its weights are loaded, too
    server = FakeServer(vanilla(), fault=fault, faults_left=1)
    with serving(server) as url:
        decoder = asking(url, stall_s=1.0, attempts=2)
        generation = decoder.generate(PROMPT, LIMIT)
        assert generation.token_ids == expected.token_ids
        assert generation.trace.report.attempts == 2 and generation.trace.report.error is None
        server.faults_left = 2
        failed = decoder.generate(PROMPT, LIMIT)
    assert failed.token_ids == [] and failed.trace.report.attempts == 2
    assert len(server.requests) == 4
    assert re.search(message, failed.trace.report.error)


def test_no_text_is_begun_with_what_the_server_kept_of_another() -> None:
    """llama-server took 11.6 s for the first token of a prompt, and 0.2 s when it came again."""
    server = FakeServer(vanilla())
    with serving(server) as url:
        decoder = asking(url)
        for _ in range(2):
            decoder.generate(PROMPT, LIMIT)
        asking(url, body={"cache_prompt": True, "cache_salt": "shared"}).generate(PROMPT, LIMIT)
    first, second, shared = server.requests
    assert first["cache_prompt"] is second["cache_prompt"] is False
    assert first["cache_salt"] != second["cache_salt"]
    assert shared["cache_prompt"] is True and shared["cache_salt"] == "shared"


def test_a_server_samples_as_it_is_asked_and_not_as_it_would_by_itself() -> None:
    """llama-server has top_k 40, top_p 0.95 and min_p 0.05, vLLM the checkpoint's own."""
    server = FakeServer(vanilla())
    with serving(server) as url:
        asking(url).generate(PROMPT, LIMIT, temperature=1.0)
        asking(url).generate(PROMPT, LIMIT, temperature=1.0, top_k=5)
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    whole, five = ([body[name] for name in names] for body in server.requests)
    assert whole == [1.0, -1, 1.0, 0.0, 1.0] and five == [1.0, 5, 1.0, 0.0, 1.0]


def test_a_strict_server_is_asked_without_the_fields_that_it_refuses() -> None:
    server = FakeServer(vanilla(), "plain", fault="strict")
    with serving(server) as url:
        decoder = asking(url, attempts=1)
        for _ in range(2):
            generation = decoder.generate(PROMPT, LIMIT)
            assert generation.trace.report.error is None
        assert decoder.method.about()["refused"] == list(EXTENSIONS)
        other = asking(url, attempts=1, body={"odd": 1})
        refused = other.generate(PROMPT, LIMIT)
        assert "refused" not in other.method.about()  # it answered nothing without them
    assert generation.token_ids == vanilla().generate(PROMPT, LIMIT).token_ids
    assert (
        set(server.requests[len(EXTENSIONS) + 1]) <= OF_OPENAI
        and "odd" in refused.trace.report.error
    )


def test_a_server_that_is_too_busy_is_left_alone_for_as_long_as_it_asks() -> None:
    expected = vanilla().generate(PROMPT, LIMIT)
    server = FakeServer(vanilla(), fault="429", faults_left=1)
    with serving(server) as url:
        generation = asking(url, attempts=2).generate(PROMPT, LIMIT)
    assert generation.token_ids == expected.token_ids and generation.trace.paused_s >= 1.0
    assert server.arrived_s[1] - server.arrived_s[0] >= 1.0


def test_the_seconds_that_find_token_ids_are_none_of_a_texts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with serving(FakeServer(vanilla(), "plain")) as url:
        decoder = asking(url)
        read = decoder.method.read
        monkeypatch.setattr(
            type(decoder.method), "read", lambda _, *given: time.sleep(0.1) or read(*given)
        )
        generation = decoder.generate(PROMPT, LIMIT)
    assert generation.trace.report.error is None and generation.trace.paused_s >= 0.1


def test_a_key_is_sent_and_never_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THE_KEY", "sesame-7")
    with serving(FakeServer(vanilla(), fault="401")) as url:
        decoder = asking(url, attempts=1, key_variable="THE_KEY")
        error = decoder.generate(PROMPT, LIMIT).trace.report.error
        assert "status 401" in error and "Bearer …" in error and "sesame" not in error
        # as a file of Windows ends, as one is copied, and as one is forgotten
        for key in ("sesame-7\r", "sesame-7 ", ""):
            monkeypatch.setenv("THE_KEY", key)
            with pytest.raises(UserError, match="printable ASCII") as caught:
                asking(url, key_variable="THE_KEY")  # before a sweep, as a point is checked
            assert "sesame" not in str(caught.value)


@pytest.mark.parametrize("fault", ["other vocabulary", "other prompt", "other model"])
def test_another_models_text_is_an_error_once_a_text_was_the_targets(fault: str) -> None:
    server = FakeServer(vanilla())
    with serving(server) as url:
        decoder = asking(url)
        expected = decoder.generate(PROMPT, LIMIT).token_ids
        server.fault, server.faults_left = fault, 1
        failed = decoder.generate(PROMPT, LIMIT)
        again = decoder.generate(PROMPT, LIMIT)
    assert failed.token_ids == [] and "another model" in failed.trace.report.error
    assert again.token_ids == expected and again.trace.report.error is None


def test_an_older_vllm_tells_steps_only_where_all_drafts_had_the_greatest_length() -> None:
    told = {"num_spec_steps": 4, "num_draft_tokens": 12, "num_accepted_draft_tokens": 8}
    told |= {"num_spec_tokens": 3, "acceptance_histogram": [0, 1, 2, 1]}

    def steps(drafted: int) -> dict[tuple[int, int], int] | None:
        own = {**told, "num_draft_tokens": drafted}
        return reported_rounds({"metrics": {"speculative_decoding": own}}).steps

    assert steps(12) == {(3, 1): 1, (3, 2): 2, (3, 3): 1} and steps(11) is None


def test_drafting_that_cannot_be_tells_nothing() -> None:
    timings = {"predicted_n": 3, "draft_n": 8, "draft_n_accepted": 7}  # of which the end cut some
    assert over_all_forwards(reported_rounds({"timings": timings}), 3).verifications == 1
    assert reported_rounds({"timings": {**timings, "draft_n_accepted": 9}}) is None
    assert reported_rounds({"timings": {**timings, "draft_n_accepted": "7"}}) is None
    assert reported_rounds({"metrics": {"speculative_decoding": {"num_steps": 4}}}) is None
    assert reported_rounds({"metrics": [1]}) is None


def test_a_text_in_one_piece_says_nothing_of_the_seconds_between_tokens() -> None:
    whole = Timed([5] * 7, [1.0], Trace(), reports=[EngineReport(pieces_s=(0.5,))])
    streamed = Timed([5] * 7, [1.0], Trace(), reports=[EngineReport(pieces_s=(0.5, 0.8))])
    assert stream_summary([whole], 0).token_p50 is None
    assert stream_summary([whole, streamed], 0).token_p50 == pytest.approx(0.05)
    assert stream_summary([whole, streamed], 0).first_token_p50 == 0.5
    assert stream_summary([whole, streamed], 0).gap_p50 == pytest.approx(0.3)


def test_seconds_of_failed_attempts_do_not_count() -> None:
    vanilla().generate(PROMPT, LIMIT)  # its weights are loaded
    with serving(FakeServer(vanilla(), fault="stall", faults_left=1)) as url:
        decoder = asking(url, stall_s=1.0)
        trace = decoder.generate(PROMPT, LIMIT).trace
    assert trace.paused_s >= 1.0


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"url": None}, "policy.url=http"),
        ({"url": "127.0.0.1:8000"}, "policy.url=http"),
        ({"url": "http://127.0.0.1:9/v1"}, "no server with completions answers"),
        ({"url": "http://127.0.0.1:x/v1"}, "policy.url=http"),
        ({"url": "http:///v1"}, "policy.url=http"),
        ({"url": "http://me:word@127.0.0.1:9/v1"}, "has a password.*policy.key_variable"),
        ({"baseline_url": "127.0.0.1:9"}, "policy.baseline_url=http"),
        ({"model": "other"}, "serves tiny, got policy.model=other"),
        ({"chat": True}, "compare with a server"),
        ({"attempts": 0}, "policy.attempts"),
        ({"body": "min_p: 0.1"}, "policy.body must be fields of a request"),
        ({"baseline_body": "none"}, "policy.baseline_body must be fields of a request"),
    ],
)
def test_what_cannot_be_asked_is_refused(knobs: dict, message: str) -> None:
    with serving(FakeServer(vanilla())) as url, pytest.raises(UserError, match=message):
        asking(**{"url": url, **knobs}).generate(PROMPT, LIMIT)


def test_an_address_without_its_end_is_told_what_it_lacks() -> None:
    """Fault: a link of httpx's came first, and the remedy was cut off."""
    refusal = (
        r"404 Not Found' for url '[^']+/models'; start it, or correct policy.url, which ends with"
    )
    with serving(FakeServer(vanilla())) as url, pytest.raises(UserError, match=refusal):
        asking(url.removesuffix("/v1")).generate(PROMPT, LIMIT)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("other prompt", "read 1 tokens of a prompt of"),
        ("longer prompt", "read 7 tokens of a prompt of 6"),  # as one with a second start token
        ("other vocabulary", "gave token 50000, and pair.target has 40"),
        ("no end", "wrote 2 tokens behind an end token"),  # as with ignore_eos
    ],
)
def test_a_server_of_another_model_is_refused(fault: str, message: str) -> None:
    with (
        serving(FakeServer(vanilla(), fault=fault)) as url,
        pytest.raises(UserError, match=message),
    ):
        asking(url).generate(PROMPT, LIMIT)


@pytest.mark.parametrize("fault", ["kept prompt", None])
def test_tokens_that_a_server_keeps_of_earlier_prompts_are_told(
    fault: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Planted: a server that keeps prompts whatever it is asked, and begins a text the sooner."""
    warn_once.cache_clear()
    with serving(FakeServer(vanilla(), "plain", fault=fault)) as url:
        decoder = asking(url)
        prompts = [PROMPT, "w5 w9"]
        lengths = [len(decoder.request(prompt, LIMIT).source.prompt) for prompt in prompts]
        for prompt in prompts:
            decoder.generate(prompt, LIMIT)
        facts = decoder.method.about()
    if fault is None:
        assert "kept_tokens" not in facts and not caplog.text
    else:
        assert facts["kept_tokens"] == sum(lengths) - 2
        assert caplog.text.count("did not read prompts anew") == 1


@pytest.mark.parametrize("fault", ["other count", None])
def test_a_text_of_other_tokens_than_the_server_counts_is_told(
    fault: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Planted: words of which the tokenizer makes more tokens than the model wrote."""
    warn_once.cache_clear()
    with serving(FakeServer(vanilla(), "plain", fault=fault)) as url:
        decoder = asking(url, baseline_body={})
        for _ in range(2):
            decoder.generate(PROMPT, LIMIT)
    assert caplog.text.count("counts other tokens") == (fault is not None)


def test_processors_that_no_server_would_know_are_refused() -> None:
    ngram = {"_target_": "transformers.NoRepeatNGramLogitsProcessor", "ngram_size": 3}
    with pytest.raises(UserError, match="server knows neither processors nor target languages"):
        asking("http://127.0.0.1:9/v1", processors=[ngram])


def test_an_encoder_decoder_is_refused() -> None:
    with pytest.raises(UserError, match="decoder-only"):
        asking("http://127.0.0.1:9/v1", family="t5")


def test_sampling_settings_body_and_stop_strings_are_sent() -> None:
    server = FakeServer(vanilla())
    with serving(server) as url:
        decoder = asking(url, body={"speculative.n_max": 0})
        decoder.generate(PROMPT, LIMIT, temperature=0.7, top_k=5, top_p=0.9, seed=3, stop="w7")
        asking(url, body={"temperature": 0.4}).generate(PROMPT, LIMIT)
    sent, own = server.requests
    assert own["temperature"] == 0.4  # policy.body is the last word
    assert (sent["temperature"], sent["top_k"], sent["top_p"]) == (0.7, 5, 0.9)
    assert (
        sent["seed"] == 3 * 1_000_003 and sent["stop"] == ["w7"] and sent["speculative.n_max"] == 0
    )


def test_the_chat_endpoint_gets_the_prompt_as_a_message() -> None:
    server = FakeServer(vanilla())
    with serving(server) as url:
        tokens = asking(url, chat=True, baseline_body={}).generate("w5 w9 w12", LIMIT).token_ids
    assert server.requests[0]["messages"] == [{"role": "user", "content": "w5 w9 w12"}]
    assert tokens == vanilla().generate("w5 w9 w12", LIMIT).token_ids


@pytest.mark.parametrize("told_thoughts", [True, False])
def test_tokens_around_thoughts_are_no_other_count(
    told_thoughts: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Planted: a server takes <think>, </think> and the spaces around them out of a text, and counts
    them.
    """
    warn_once.cache_clear()
    with serving(FakeServer(vanilla(), "plain")) as url:
        decoder = asking(url, baseline_body={})
        answer = ServerAnswer("w5 w9", token_ids=None, completion_tokens=6, finish_reason=STOPPED)
        new_tokens(decoder, replace(answer, told_thoughts=told_thoughts))
    assert ("counts other tokens" in caplog.text) is not told_thoughts
