"""What servers tell of their speculative decoding, in their own fields, as one record.

Sources: vLLM's page "Per-Request Acceptance Metrics" (`metrics.speculative_decoding` of the chunk
with the usage), SGLang's `SpecTokensDetails` (`sglext.spec_tokens_details` of a chunk without
choices, in `entrypoints/openai/protocol.py`), llama-server's `timings` of the last chunk.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bild_lab.engine.trace import ReportedRounds


def reported_rounds(answer: Mapping[str, Any]) -> ReportedRounds | None:
    """The rounds of a request, as the server reports them; None if it reports nothing.

    answer: an object of a stream, or a whole answer. A server that was asked without drafting
    reports zero drafted tokens, or nothing. Fields of another form, as those of another version may
    be, and counts that cannot be report nothing either.
    """
    try:
        rounds = _rounds(answer)
        if rounds is None or 0 <= rounds.accepted <= rounds.drafted:
            return rounds
    except (AttributeError, KeyError, TypeError, ValueError):
        pass
    return None


def _rounds(answer: Mapping[str, Any]) -> ReportedRounds | None:
    """The prompt's forward is one of them, which llama-server alone counts."""
    vllm = (answer.get("metrics") or {}).get("speculative_decoding")
    if vllm:
        return _of_vllm(vllm)
    sglang = (answer.get("sglext") or {}).get("spec_tokens_details")
    if sglang:
        return _of_sglang(sglang)
    llama_cpp = answer.get("timings") or {}
    if "predicted_n" in llama_cpp:
        return _of_llama_cpp(llama_cpp)
    return None


def over_all_forwards(rounds: ReportedRounds, completion_tokens: int | None) -> ReportedRounds:
    """The rounds with those forwards that verified no draft.

    vLLM and SGLang count none of them. Each forward gives one token beside the accepted ones, of
    which the end of the text may cut some.
    completion_tokens: how many tokens the server counts in the text; None if it does not tell.
    """
    undrafted = (completion_tokens or 0) - rounds.accepted
    return replace(rounds, verifications=max(rounds.verifications, undrafted, 1))


def _of_vllm(fields: Mapping[str, Any]) -> ReportedRounds:
    return ReportedRounds(
        verifications=fields["num_spec_steps"] + 1,
        drafted=fields["num_draft_tokens"],
        accepted=fields["num_accepted_draft_tokens"],
        steps=_steps_of_vllm(fields),
    )


def _steps_of_vllm(fields: Mapping[str, Any]) -> dict[tuple[int, int], int] | None:
    """How many steps there were by the length of their draft and the tokens accepted of it.

    Versions before the histogram by length tell it where all drafts had the greatest length.
    """
    by_length = fields.get("acceptance_histogram_by_draft_length") or {}
    greatest = fields.get("num_spec_tokens") or 0
    if not by_length and fields["num_draft_tokens"] == greatest * fields["num_spec_steps"]:
        by_length = {greatest: fields.get("acceptance_histogram") or ()}
    steps = {
        (int(drafted), accepted): count
        for drafted, counts in by_length.items()
        for accepted, count in enumerate(counts)
        if count
    }
    return steps or None


def _of_sglang(fields: Mapping[str, Any]) -> ReportedRounds:
    """Its histogram of accepted tokens says nothing of the drafts' lengths, which may vary."""
    return ReportedRounds(
        verifications=fields["spec_verify_ct"] + 1,
        drafted=fields["spec_num_proposed_drafts"],
        accepted=fields["spec_num_correct_drafts"],
    )


def _of_llama_cpp(fields: Mapping[str, Any]) -> ReportedRounds:
    """Every verification emits what it accepted and one token more.

    A text for which nothing was drafted has no `draft_n`. mlx-vlm's server, which has these fields
    too, also counts what it accepted after the end of a text; it tells its rounds itself.
    """
    accepted, rounds = fields.get("draft_n_accepted") or 0, fields.get("draft_rounds")
    return ReportedRounds(
        verifications=rounds + 1 if rounds else fields["predicted_n"] - accepted,
        drafted=fields.get("draft_n") or 0,
        accepted=accepted,
    )
