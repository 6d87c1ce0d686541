"""How `hf` fares on small random models of many architectures: python -m tests.models_tried writes
docs/models.md.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import transformers
from transformers import PreTrainedModel

from bild_lab.engine.decode import DraftThenVerify
from bild_lab.engine.draft import ROOT, Draft
from bild_lab.engine.methods.speculative.exact_match import ExactMatch
from bild_lab.engine.models.checkpoint.loaded_checkpoint import LoadedCheckpoint
from bild_lab.engine.models.hf.admission import (
    BRANCHING,
    KEPT,
    ROLLED_BACK,
    ROW_BY_ROW,
    TOGETHER,
    WHOLE,
)
from bild_lab.engine.models.hf.model import HuggingFaceModel
from bild_lab.engine.protocols import Drafter, Method
from bild_lab.engine.request import Request, Source
from bild_lab.engine.session import Session
from bild_lab.engine.trace import Trace
from bild_lab.errors import UserError
from bild_lab.lab.config.compose import compose_policy
from bild_lab.lab.point.build import build_method
from bild_lab.lab.point.decoder import Decoder
from tests.tiny_architectures import ALL, VOCABULARY, build, relative_of, word_tokenizer

PROMPTS = ([5, 9, 12, 30, 7], [8, 8, 20, 11, 25, 8, 8, 20])
NEW_TOKENS, FEWER = 24, 12  # the text then passes windows of 8 and contexts of 24; or does not
POLICIES = ("hf_generate", "vanilla", "speculative", "prompt_lookup")
TREES = "trees"
MARK = "<!-- the table is written by tests/models_tried.py -->\n"
EXACT = "exact"
SHORT = {
    "state holds all rows": "a state does not branch",
    "takes no cache": "it takes no cache",
    "tree drafts need": "no trees on this encoder–decoder",
}
Prompt = tuple[int, ...]


@dataclass(frozen=True)
class Tried:
    """How an architecture fared: for each policy `exact`, `exact up to N tokens`, `refused: CHECK`,
    or a fault.
    """

    name: str
    outcomes: dict[str, str]

    @property
    def faults(self) -> dict[str, str]:
        """What is neither exact nor refused.

        Transformers' own generate is shown, but not judged.
        """
        judged = {policy: said for policy, said in self.outcomes.items() if policy != "hf_generate"}
        return {
            policy: said
            for policy, said in judged.items()
            if not said.startswith((EXACT, "refused"))
        }


class SiblingTrees(Drafter):
    """Drafts trees whose last branch is a text that is known already, after siblings that are
    wrong.

    texts: the new tokens after each prompt.
    """

    drafts_trees = True

    def __init__(self, texts: dict[Prompt, list[int]]) -> None:
        self._texts = texts

    def begin(self, request: Request, target: Session) -> None:
        self._text, self._prompt = self._texts[prompt_of(request)], len(request.source.prompt)

    def propose(self, tokens: list[int]) -> Draft:
        done = len(tokens) - self._prompt
        right = self._text[done : done + 2]
        wrong = [(token + 1) % VOCABULARY for token in right]
        rows = [*wrong[:1] * 2, *right[:1], *wrong[1:], *right[1:]]
        return Draft(
            torch.tensor(rows, dtype=torch.long),
            torch.tensor([ROOT, ROOT, ROOT, 2, 2][: len(rows)]),
        )


def try_architecture(name: str) -> Tried:
    """Decode with every policy, and compare."""
    module = build(name)
    target, draft = in_memory(module, name), in_memory(relative_of(module), f"{name} with noise")
    given = {"target": lambda: target, "draft": lambda: draft}
    known: dict[Prompt, list[int]] = {}
    outcomes = {}
    for policy in POLICIES:
        make = partial(build_method, compose_policy(policy), given)
        outcomes[policy] = outcome(make, (target, draft), known)
    trees = DraftThenVerify(target, SiblingTrees(known), ExactMatch())
    outcomes[TREES] = outcome(lambda: trees, (target,), known)
    return Tried(name, outcomes)


def outcome(
    make: Callable[[], Method], models: tuple[HuggingFaceModel, ...], known: dict[Prompt, list[int]]
) -> str:
    """How a method fares. known: the texts of `generate`, which runs first."""
    target = models[0]
    for new_tokens, said in (
        (NEW_TOKENS, EXACT),
        (FEWER, f"{EXACT} up to {target.session_positions} tokens"),
    ):
        try:
            decoder = Decoder(target, make(), models)
            decoder.load_weights()
            requests = [decoder.request(prompt, new_tokens) for prompt in PROMPTS]
            texts = [
                decoder.method.decode(request, Trace())[len(request.source.prompt) :]
                for request in requests
            ]
        except UserError as error:
            if "reads at most" in str(error):
                continue
            return f"refused: {reason(str(error))}"
        except Exception as error:  # what a user would see as a traceback
            return f"{type(error).__name__}: {error}".splitlines()[0][:100]
        own = [is_own(target, request, text) for request, text in zip(requests, texts, strict=True)]
        theirs = [
            known.setdefault(prompt_of(request), text)
            for request, text in zip(requests, texts, strict=True)
        ]
        right = [
            mine or text == other[: len(text)]
            for mine, text, other in zip(own, texts, theirs, strict=True)
        ]
        if decoder.method.draft_shape is None and not all(own):
            return "not that of one forward"
        return said if all(right) else f"WRONG {right.count(False)}/{len(right)}"
    return "refused: too few positions"


def is_own(model: HuggingFaceModel, request: Request, new: list[int]) -> bool:
    """Whether each new token is the most likely after the text before it, by one forward without a
    cache.
    """
    source = request.source
    text = Source((*source.prompt, *new[:-1]), source.encoder_ids, source.device)
    return model.text_logits(text)[len(source.prompt) - 1 :].argmax(-1).tolist() == new


def prompt_of(request: Request) -> Prompt:
    source = request.source
    return source.prompt if source.encoder_ids is None else tuple(source.encoder_ids[0].tolist())


def in_memory(module: PreTrainedModel, name: str) -> HuggingFaceModel:
    """The module as a model of the engine hf."""
    checkpoint = LoadedCheckpoint(name, module=module, loaded_tokenizer=word_tokenizer())
    return HuggingFaceModel(checkpoint, torch.device("cpu"), module.dtype)


def reason(message: str) -> str:
    """The part of a refusal that differs between architectures, at most a few words."""
    if said := next((words for words in SHORT if words in message), None):
        return SHORT[said]
    for check in (WHOLE, ROW_BY_ROW, TOGETHER, ROLLED_BACK, KEPT, BRANCHING):
        if f"but {check} " in message:
            said = message.partition(f"but {check} ")[2].partition(";")[0]
            return f"{check}: {said[:80]}"
    return message.partition(";")[0][:80]


def page(tried: Sequence[Tried]) -> str:
    """A row for each way to fare, with the architectures that fared so; the most frequent first."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for each in tried:
        vanilla, *drafts, trees = (
            each.outcomes[column].partition(":")[0] for column in (*POLICIES[1:], TREES)
        )
        rows.setdefault((vanilla, " / ".join(dict.fromkeys(drafts)), trees), []).append(each.name)
    lines = ["| `vanilla` | drafts | trees | architectures |", "|---|---|---|---|"]
    for outcomes, names in sorted(rows.items(), key=lambda row: -len(row[1])):
        lines.append(f"| {' | '.join((*outcomes, ', '.join(names)))} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Try all of them anew. Ends with status 1 if one is neither exact nor refused."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as cache:
        os.environ["BILD_LAB_CACHE"] = cache  # check anew
        tried = [try_architecture(name) for name in ALL]
    file = Path(__file__).resolve().parents[1] / "docs" / "models.md"
    head, mark, _ = file.read_text(encoding="utf-8").partition(MARK)
    versions = f"\n{len(tried)} architectures of Transformers {transformers.__version__}:\n\n"
    file.write_text(head + mark + versions + page(tried), encoding="utf-8")
    raise SystemExit(", ".join(each.name for each in tried if each.faults) or 0)


if __name__ == "__main__":
    main()
