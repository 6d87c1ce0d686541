"""A parallel drafter drafts what its layers say of the source, the target's states and its masks, in one pass."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from bild_lab.engine.acceptance import ExactMatch
from bild_lab.engine.decode import DraftThenVerify
from bild_lab.engine.draft_vocabulary import DraftVocabulary
from bild_lab.engine.drafters import ParallelDrafter
from bild_lab.engine.heads.parallel import ParallelHeads
from bild_lab.engine.request import Limits, Request, Source
from bild_lab.engine.session import Growth
from bild_lab.engine.trace import Trace
from bild_lab.errors import UserError
from tests.engine.drafters.naive import Behind, drafted, grown, parallel_behind, texts_before
from tests.engine.heads.tiny import random_parallel
from tests.engine.models.test_states import ENCODED, ENGINES
from tests.engine.test_decode import NEVER, autoregressive, finished
from tests.policies import in_memory, load
from tests.stubs import uncached
from tests.tiny import PAD, VOCABULARY, tiny_t5

LENGTH, BLOCK = 12, 4


@torch.inference_mode()
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("part", [None, DraftVocabulary(range(0, VOCABULARY, 2))], ids=["all", "part"])
@pytest.mark.parametrize(("tree", "layers", "rank"), [("chain", 2, 5), ("dynamic", 1, 5), ("full_tree", 2, 0)])
def test_proposals_are_those_of_the_layers_without_a_cache(
    tree: str, layers: int, rank: int, part: DraftVocabulary | None, engine: str
) -> None:
    module = tiny_t5(4, layers=3)
    heads = random_parallel(module.config, layers, BLOCK, rank).requires_grad_(False)
    heads.part = part
    source, target = Source((PAD,), ENCODED), in_memory(module, engine)
    trace, request = Trace(), Request(source, Limits(1, LENGTH, NEVER))
    drafter = ParallelDrafter(target, heads, tree, 9, top_k=2, nodes=6, width=2, children=3)
    actual = DraftThenVerify(target, drafter, ExactMatch()).decode(request, trace)
    assert actual == autoregressive(uncached(module, source), (PAD,), finished(source, LENGTH, NEVER))
    assert trace.rounds[0].drafted == ()
    for text, each in texts_before(trace.rounds, actual, 1):
        depth, whole = min(BLOCK, 1 + LENGTH - len(text)), parallel_behind(heads, module, text)

        def behind(branch: list[int], whole: Behind = whole) -> Tensor:
            return whole(branch) if part is None else part.masked(whole(branch)[None])[0]

        if tree == "dynamic":
            assert list(each.drafted) == grown(behind, Growth(6, depth, 2, 3, NEVER))
        else:
            assert list(each.drafted) == drafted(behind, tree, 2, BLOCK, depth)
    ours = [one for one in trace.forwards if one.config.num_decoder_layers == layers and not one.encoder]
    assert sum(each.draft_calls for each in trace.rounds) == len(ours) > 1
    assert [(one.rows, one.cached, one.scored, one.source) for one in ours[:1]] == [(BLOCK, 0, BLOCK, 5)]
    assert ours[-1].scored == depth < BLOCK  # near the limit no place is filled that cannot be kept


def test_a_drafter_starts_as_the_targets_last_layers_and_comes_back_from_its_folder(tmp_path: Path) -> None:
    module = tiny_t5(4, layers=3)
    heads = ParallelHeads.fresh(module, {"path": "a tiny model"}, 2, BLOCK, 5, 0)
    heads.save(tmp_path)
    again, last = ParallelHeads.load(tmp_path), module.decoder.block[-1].layer
    assert again.config == heads.config and not again.markov.after.any() and again.masks.any()
    assert torch.equal(again.layers["cross_query"][1], last[1].EncDecAttention.q.weight)
    assert torch.equal(again.layers["outer"][1], last[2].DenseReluDense.wo.weight)


def test_what_cannot_draft_is_refused(tmp_path: Path, checkpoints: Path) -> None:
    with pytest.raises(UserError, match="needs a T5 or mT5 that we can run, but its architecture is llama"):
        load(checkpoints, "llama", "parallel", heads=str(tmp_path))
    with pytest.raises(UserError, match="this policy needs a folder of a parallel drafter; make one with"):
        load(checkpoints, "t5", "parallel", heads=None)
    another = {"path": "another", "fingerprint": "of other weights"}
    ParallelHeads.fresh(tiny_t5(0), another, 1, BLOCK, 5, 0).save(tmp_path)
    with pytest.raises(UserError, match="trained for another, whose weights are not those of"):
        load(checkpoints, "t5", "bild_parallel", heads=str(tmp_path))
    with pytest.raises(UserError, match="module.layers must be a whole number >= 1 and <= 3, got 4"):
        ParallelHeads.fresh(tiny_t5(4, layers=3), {}, 4, BLOCK, 5, 0)
