"""What servers tell of their speculative decoding, in their own fields, as one record.

Sources: vLLM's page "Per-Request Acceptance Metrics" (`metrics.speculative_decoding`), SGLang's
`meta_info`, llama-server's `timings`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bild_lab.engine.trace import ReportedRounds


def reported_rounds(answer: Mapping[str, Any], choice: Mapping[str, Any]) -> ReportedRounds | None:
    """The rounds of a request, as the server tells them; None if it tells nothing.

    answer: the last object of a stream that has such fields, or a whole answer. choice: its first
    choice. A server that was asked without drafting tells zero drafted tokens, or nothing.
    """
    vllm = (answer.get("metrics") or {}).get("speculative_decoding")
    if vllm:
        return _of_vllm(vllm)
    sglang = choice.get("meta_info") or answer.get("meta_info") or {}
    if "spec_verify_ct" in sglang:
        return _of_sglang(sglang)
    llama_cpp = answer.get("timings") or {}
    if "predicted_n" in llama_cpp:
        return _of_llama_cpp(llama_cpp)
    return None


def _of_vllm(fields: Mapping[str, Any]) -> ReportedRounds:
    """By the length of a draft, how many steps accepted 0, 1, … of its tokens."""
    by_length = fields.get("acceptance_histogram_by_draft_length") or {}
    steps = {
        (int(drafted), accepted): count
        for drafted, counts in by_length.items()
        for accepted, count in enumerate(counts)
        if count
    }
    return ReportedRounds(
        verifications=fields["num_spec_steps"],
        drafted=fields["num_draft_tokens"],
        accepted=fields["num_accepted_draft_tokens"],
        steps=steps or None,
    )


def _of_sglang(fields: Mapping[str, Any]) -> ReportedRounds:
    return ReportedRounds(
        verifications=fields["spec_verify_ct"],
        drafted=fields.get("spec_draft_token_num"),
        accepted=fields.get("spec_accept_token_num"),
    )


def _of_llama_cpp(fields: Mapping[str, Any]) -> ReportedRounds:
    """Every verification emits what it accepted and one token more.

    A text for which nothing was drafted has no `draft_n`.
    """
    accepted = fields.get("draft_n_accepted", 0)
    return ReportedRounds(
        verifications=fields["predicted_n"] - accepted,
        drafted=fields.get("draft_n", 0),
        accepted=accepted,
    )
