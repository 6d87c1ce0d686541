"""A stop string ends a text with the token that completes it, whatever wrote it and however it was
decoded.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from bild_lab.engine.batch_decoding import decode_batch
from bild_lab.engine.batch_scheduler import Batch
from bild_lab.engine.decode import DraftThenVerify
from bild_lab.engine.draft import Draft, Verdict
from bild_lab.engine.methods.hf_generation import (
    HuggingFaceAssisted,
    HuggingFaceGenerate,
    HuggingFacePromptLookup,
)
from bild_lab.engine.methods.speculative.draft_model import ModelDrafter
from bild_lab.engine.methods.speculative.exact_match import ExactMatch
from bild_lab.engine.models.checkpoint.checkpoint import Checkpoint
from bild_lab.engine.protocols import Method
from bild_lab.engine.request import Limits, Request, Source
from bild_lab.engine.session import LoadedModel
from bild_lab.engine.stop import StopStrings, before_stop
from bild_lab.engine.trace import Trace
from bild_lab.errors import UserError
from bild_lab.lab.point.build import build_method
from bild_lab.lab.point.read_model import load_model
from tests.policies import shipped
from tests.tiny import START, VOCABULARY, WORDS, tiny_tokenizer

SYLLABLES = [
    "lo",
    "re",
    "m i",
    "psum",
    " do",
    "lor",
    ".",
    " .",
    "\n",
    "\n\n",
    "Q:",
    " Q",
    "é",
    "你",
    " n't",
    "  ",
]


def byte_level() -> PreTrainedTokenizerFast:
    """Single bytes, and a few longer pieces, written as Qwen's are."""
    table = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    longer = [table.pre_tokenize_str(text)[0][0] for text in ("lore", "ps", "Q:", "\n\n")]
    vocabulary = {piece: place for place, piece in enumerate(dict.fromkeys([*pieces, *longer]))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = table, decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def sentence_piece() -> PreTrainedTokenizerFast:
    """Pieces with a sign for spaces, and single bytes for what has no piece, as Llama 2's."""
    pieces = [
        "<unk>",
        "<s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁lo",
        "re",
        "▁",
        "Q:",
        "▁Q",
        ".",
        "n't",
        "▁n",
    ]
    tokenizer = Tokenizer(
        models.BPE({piece: place for place, piece in enumerate(pieces)}, [], unk_token="<unk>")
    )
    steps = [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
    tokenizer.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>")


def word_piece() -> PreTrainedTokenizerFast:
    """Whole words and their ends, with spaces before punctuation removed, as BERT's."""
    pieces = ["[UNK]", "[SEP]", "lo", "##re", "##m", "q", ".", ",", "'", "s", "n't", "?"]
    tokenizer = Tokenizer(
        models.WordPiece({piece: place for place, piece in enumerate(pieces)}, unk_token="[UNK]")
    )
    tokenizer.decoder = decoders.WordPiece()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="[UNK]",
        sep_token="[SEP]",
        clean_up_tokenization_spaces=True,
    )


TOKENIZERS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "bytes": byte_level,
    "SentencePiece": sentence_piece,
    "WordPiece": word_piece,
    "words": lambda: tiny_tokenizer(False),
}


def checkpoint_of(tokenizer: PreTrainedTokenizerFast) -> Checkpoint:
    checkpoint = Checkpoint("none")
    vars(checkpoint).update(tokenizer=tokenizer, config=SimpleNamespace(is_encoder_decoder=False))
    return checkpoint


def random_text(tokenizer: PreTrainedTokenizerFast, name: str, chance: random.Random) -> list[int]:
    """Tokens of the vocabulary, some of them those that write words and characters of several
    bytes.
    """
    if name in ("bytes", "SentencePiece"):
        text = "".join(chance.choices(SYLLABLES, k=30))
        named = text.encode() if name == "SentencePiece" else None
        tokens = tokenizer.encode(text) if named is None else [2 + byte for byte in named]
        extra = chance.choices(range(len(tokenizer)), k=10)
        place = chance.randrange(len(tokens))
        return [*tokens[:place], *extra, *tokens[place:]]
    return chance.choices(range(len(tokenizer)), k=60)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_last_tokens_decide_as_the_whole_text_would(name: str) -> None:
    tokenizer, chance, stopped = TOKENIZERS[name](), random.Random(3), 0
    checkpoint = checkpoint_of(tokenizer)
    for _ in range(40):
        tokens = random_text(tokenizer, name, chance)
        whole = checkpoint.continuation(tokens)
        start = chance.randrange(max(1, len(whole) - 8))
        strings = (whole[start : start + chance.randint(1, 7)] or "x", "never there")
        written = [checkpoint.continuation(tokens[: place + 1]) for place in range(len(tokens))]
        end = next(
            (place for place, text in enumerate(written) if any(stop in text for stop in strings)),
            None,
        )
        stop = StopStrings(strings, checkpoint)
        found = next(
            (place for place in range(len(tokens)) if stop.completed(tokens[: place + 1])), None
        )
        assert found == end, (strings, tokens)
        stopped += end is not None and end > 20
    assert stopped > 5


def test_only_a_tail_is_decoded() -> None:
    tokenizer = byte_level()
    checkpoint, lengths = checkpoint_of(tokenizer), []
    decode = tokenizer.decode
    tokenizer.decode = lambda tokens, **options: (
        lengths.append(len(tokens)) or decode(tokens, **options)
    )
    stop, tokens = StopStrings(("never",), checkpoint), tokenizer.encode("lorem ipsum dolor " * 60)
    assert not stop.completed(tokens) and len(tokens) > 800
    assert max(lengths) < 60


def test_a_text_ends_before_the_first_of_the_strings() -> None:
    assert before_stop("    return 1\n\ndef g():\nclass", ["\nclass", "\ndef"]) == "    return 1\n"
    assert before_stop("one END two END three", ["END"]) == "one "
    assert before_stop("END of it", ["END"]) == ""
    assert before_stop("nothing", ["\ndef"]) == before_stop("nothing", ()) == "nothing"


def test_limits_cut_a_draft_after_the_token_that_completes_a_stop_string() -> None:
    checkpoint = checkpoint_of(tiny_tokenizer(False))  # writes "w5 w6 w7"
    limits = Limits(2, 9, frozenset([1]), stop=StopStrings(("5 w6",), checkpoint))
    # the prompt's w5 is no part of the text
    assert limits.append([2, 5], [4, 5, 6, 7]) == [2, 5, 4, 5, 6]
    assert limits.append([2, 5], [6, 7]) == [2, 5, 6, 7]
    assert (
        limits.reached([2, 5, 4, 5, 6])
        and limits.ended([2, 5, 4, 5, 6])
        and not limits.reached([2, 5, 4, 5])
    )
    assert limits.append([2, 5, 4, 5], [6, 7]) == [2, 5, 4, 5, 6]
    assert (
        limits.tokens_until_stop([2, 5, 4, 5, 6], 3) == 2
        and limits.tokens_until_stop([2, 5, 4], 3) is None
    )


def with_special(*pieces: str) -> Checkpoint:
    tokenizer = tiny_tokenizer(False)
    tokenizer.add_special_tokens({"additional_special_tokens": list(pieces)})
    return checkpoint_of(tokenizer)


def test_a_stop_string_that_names_a_special_token_ends_a_text_with_that_token() -> None:
    """No text shows the token, so the string would never be found."""
    checkpoint = with_special("<turn>")
    stop = StopStrings(("<turn>", "w7"), checkpoint)
    assert stop.completed([5, 40]) and stop.completed([7]) and not stop.completed([5, 6])
    assert Limits(1, 99, stop=stop).append([2], [5, 40, 6]) == [2, 5, 40]
    # which stands for unknown text
    assert (
        "<s>" in checkpoint.silent_special_tokens and "w3" not in checkpoint.silent_special_tokens
    )


def test_a_stop_string_with_a_special_token_in_it_is_refused() -> None:
    with pytest.raises(
        UserError, match=r"got '\\n<turn>', and no text shows the special token <turn>"
    ):
        StopStrings(("w7", "\n<turn>"), with_special("<turn>"))


def test_what_was_drafted_after_a_stop_string_does_not_count() -> None:
    trace, chain = Trace(), Draft(torch.tensor([5, 6, 7, 8]))
    trace.step(chain, Verdict((0, 1, 2), 9, {"distance": (0.1, 0.2, 0.3, 0.4)}), stopped=2)
    trace.step(chain, Verdict((0, 1, 2), 9), stopped=4)  # the target's own token completes it
    trace.step(chain, None, stopped=3)
    trace.step(chain, Verdict((0, 1, 2), 9), stopped=3)  # the last that was accepted does
    assert [one.drafted for one in trace.rounds] == [(5, 6), (5, 6, 7, 8), *[(5, 6, 7)] * 2]
    assert [(one.accepted, one.next_token, one.rollback) for one in trace.rounds] == [
        (2, 7, False),
        (3, 9, True),
        (3, None, False),
        (3, 9, False),
    ]
    assert trace.rounds[0].stats == {"distance": (0.1, 0.2)}
    tree = Draft(torch.tensor([5, 6, 7]), parents=torch.tensor([-1, 0, 1]))
    trace.step(tree, Verdict((0, 1, 2), 9), stopped=1)
    assert (trace.rounds[-1].accepted, trace.rounds[-1].branch) == (1, 1)


def models_for(folder: Path) -> dict[str, LoadedModel]:
    places = {"target": str(folder), "draft": f"{folder}-draft"}
    return {
        name: load_model(place, None, "cpu", torch.float32, "native")
        for name, place in places.items()
    }


def method_of(folder: Path, policy: str) -> Method:
    return build_method(
        shipped(policy),
        {name: partial(models_for(folder).get, name) for name in ("target", "draft")},
    )


@lru_cache(maxsize=2)
def with_stops(folder: Path) -> list[Request]:
    """Requests whose texts hold a stop string that lies in two words, somewhere behind their
    beginning.
    """
    checkpoint, vanilla, found = (
        checkpoint_of(tiny_tokenizer(False)),
        method_of(folder, "vanilla"),
        [],
    )
    chance = random.Random(6)
    while len(found) < 6:
        words = chance.choices(range(3, VOCABULARY), k=chance.randint(2, 9))
        source = Source((START, *words))
        request = Request(source, Limits(len(source.prompt), LONGEST))
        text = vanilla.decode(request, Trace())[request.limits.prompt_length :]
        written = [WORDS[token - 3] for token in text if token >= 3]
        if len(written) < 4:
            continue
        place = len(written) // 2
        stop = StopStrings((f"{written[place][-1]} {written[place + 1]}", "nothing"), checkpoint)
        found.append(replace(request, limits=replace(request.limits, stop=stop)))
    return found


def texts_of(method: Method, requests: list[Request]) -> list[list[int]]:
    return [method.decode(one, Trace()) for one in requests]


LONGEST = 24
POLICIES = (
    "speculative speculative_tree prompt_lookup suffix token_recycling lookahead"
    " block_verification ppd".split()
)


def test_lossless_policies_end_where_vanilla_ends_alone_and_in_batches(checkpoints: Path) -> None:
    folder = checkpoints / "llama"
    requests = with_stops(folder)
    wanted = texts_of(method_of(folder, "vanilla"), requests)
    shorter = [
        len(text) - one.limits.prompt_length < LONGEST
        for one, text in zip(requests, wanted, strict=True)
    ]
    assert sum(shorter) > 4
    for policy in POLICIES:
        method = method_of(folder, policy)
        assert texts_of(method, requests) == wanted, policy
        together = decode_batch(method, requests, Batch(3))
        assert [
            [*one.source.prompt, *text.token_ids]
            for one, text in zip(requests, together, strict=True)
        ] == wanted


@pytest.mark.slow
def test_generate_of_transformers_ends_where_vanilla_ends(checkpoints: Path) -> None:
    folder = checkpoints / "llama"
    requests, models = with_stops(folder), models_for(folder)
    wanted = texts_of(method_of(folder, "vanilla"), requests)
    generating = HuggingFaceGenerate(models["target"])
    assert texts_of(generating, requests) == wanted
    assert generating.decode_batch(requests[:4]) == wanted[:4]
    assert texts_of(HuggingFaceAssisted(models["target"], models["draft"]), requests) == wanted
    assert texts_of(HuggingFacePromptLookup(models["target"], 3, 2), requests) == wanted


def test_generate_runs_no_further_than_the_stop_string(checkpoints: Path) -> None:
    folder, ran = checkpoints / "llama", []
    target = models_for(folder)["target"]
    assert not target.transformers.reads_padding  # what tells it runs forwards of its own
    hook = target.transformers.module.register_forward_hook(lambda *_: ran.append(1))
    try:
        texts = texts_of(HuggingFaceGenerate(target), with_stops(folder))
        alone = len(ran)
        HuggingFaceGenerate(target).decode_batch(with_stops(folder))
    finally:
        hook.remove()
    lengths = [
        len(text) - one.limits.prompt_length
        for one, text in zip(with_stops(folder), texts, strict=True)
    ]
    assert alone == sum(lengths) < 6 * LONGEST
    assert len(ran) - alone == max(lengths)


@pytest.mark.parametrize("verify_tail", [True, False])
def test_the_last_round_of_a_text_counts_no_draft_after_its_stop_string(
    checkpoints: Path, verify_tail: bool
) -> None:
    folder, in_drafts = checkpoints / "llama", 0
    models = models_for(folder)
    drafter = ModelDrafter(models["target"], 5)  # all that it drafts is accepted
    method = DraftThenVerify(models["target"], drafter, ExactMatch(), verify_tail=verify_tail)
    for request in with_stops(folder):
        trace = Trace()
        new = method.decode(request, trace)[request.limits.prompt_length :]
        *earlier, last = trace.rounds
        emitted = len(new) - sum(one.accepted + 1 for one in earlier)
        assert last.accepted <= emitted
        if last.accepted == emitted:
            assert list(last.drafted) == new[-emitted:]
            in_drafts += emitted < 5
    assert in_drafts > 1
