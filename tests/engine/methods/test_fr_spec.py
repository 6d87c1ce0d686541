"""Where the tokens of a draft vocabulary come from, what is refused, and that they reach decoding
and its records.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bild_lab.engine.methods.fr_spec import NarrowModel
from bild_lab.engine.models.checkpoint.checkpoint import Checkpoint
from bild_lab.engine.trace import Forward
from bild_lab.errors import UserError
from bild_lab.lab.config.compose import compose_policy, config_dir, resolved_policy
from bild_lab.lab.measure.cost import dimensions, total_cost
from bild_lab.lab.store.hashing import named_files
from tests.checkpoints import tiny_checkpoints
from tests.engine.methods.drafters.tables import ngram_table
from tests.policies import load
from tests.tiny import END, VOCABULARY

DRAFTING = [
    "block_verification",
    "speculative",
    "speculative_tree",
    "early_exit_speculative",
    "layer_skip",
]


def tokens_of(policy: str = "speculative", **knobs: object) -> list[int]:
    model = load(tiny_checkpoints(), "llama", policy, **knobs).method.drafter._model
    return (
        model.vocabulary.tokens.tolist()
        if isinstance(model, NarrowModel)
        else list(range(VOCABULARY))
    )


def test_tokens_come_from_a_file_or_are_the_most_frequent_of_a_table(tmp_path: Path) -> None:
    (tmp_path / "ids.txt").write_text("9\n30\n5\n9\n7\n")
    (tmp_path / "ids.json").write_text("[9, 30, 5, 7]")
    assert tokens_of() == list(range(VOCABULARY))
    for file in (str(tmp_path / "ids.txt"), str(tmp_path / "ids.json")):
        assert tokens_of(draft_vocabulary=file) == [END, 5, 7, 9, 30]
        assert tokens_of(draft_vocabulary=2, draft_vocabulary_from=file) == [END, 9, 30]
    table = str(ngram_table(tiny_checkpoints() / "llama"))
    # the end token is frequent there
    assert len(tokens_of(draft_vocabulary=12, draft_vocabulary_from=table)) == 12


def test_what_ranks_no_tokens_is_refused_in_a_line(tmp_path: Path) -> None:
    few, foreign, words = (tmp_path / name for name in ("few.txt", "foreign.txt", "words.txt"))
    few.write_text("5 6")
    foreign.write_text("5\n4000\n")
    words.write_text("w5 w6")
    wrong = {
        "got 8 and None": {"draft_vocabulary": 8},
        "got None": {"draft_vocabulary_from": str(few)},
        "and <= 2, got 3; .*few.txt ranks 2": {
            "draft_vocabulary": 3,
            "draft_vocabulary_from": str(few),
        },
        ">= 1 and <= 2, got 0": {"draft_vocabulary": 0, "draft_vocabulary_from": str(few)},
        "got True": {"draft_vocabulary": True, "draft_vocabulary_from": str(few)},
        "names the token 4000, which": {"draft_vocabulary": str(foreign)},
        "module=ngram counts, got '.*words.txt'": {"draft_vocabulary": str(words)},
        "got '.*missing'": {"draft_vocabulary": str(tmp_path / "missing")},
    }
    for message, knobs in wrong.items():
        with pytest.raises(UserError, match=message) as error:
            tokens_of(**knobs)
        assert "\n" not in str(error.value)


@pytest.mark.fast("block_verification")
@pytest.mark.parametrize("policy", DRAFTING)
def test_a_policy_with_few_tokens_emits_the_targets_text_alone_and_in_a_batch(
    policy: str, tmp_path: Path
) -> None:
    few = list(range(3, VOCABULARY, 3))
    (tmp_path / "ids").write_text(str(few))
    narrow, prompts = (
        load(tiny_checkpoints(), "t5", policy, draft_vocabulary=str(tmp_path / "ids")),
        ["w5 w9 w12", "w8"],
    )
    own = [one.token_ids for one in load(tiny_checkpoints(), "t5", "vanilla").generate(prompts, 24)]
    found = narrow.generate(prompts, 24)
    assert (
        [one.token_ids for one in found]
        == [one.token_ids for one in narrow.generate(prompts, 24, batch=2)]
        == own
    )
    assert {token for one in found for each in one.trace.rounds for token in each.drafted} <= {
        END,
        *few,
    }


def test_every_policy_whose_draft_model_drafts_has_the_knobs_and_their_files_count_with_their_content() -> (
    None
):
    texts = {file.stem: file.read_text() for file in (config_dir() / "policy").glob("*.yaml")}
    drafting = {
        name for name, text in texts.items() if re.search(r"drafters\.Model(Tree)?Drafter\n", text)
    }
    counts = [texts[name].count("draft_vocabulary") for name in drafting]
    assert counts.count(5) > 15 and {*counts} <= {0, 5}
    for knobs in ({"draft_vocabulary_from": "some/folder"}, {"draft_vocabulary": "some/file"}):
        assert named_files(resolved_policy(compose_policy("bild", knobs))) == knobs


def test_a_forward_with_few_tokens_costs_their_share_of_the_head() -> None:
    config = Checkpoint(str(tiny_checkpoints() / "t5")).config
    whole, part = (
        total_cost([Forward(config, 2, 3, scored=2, vocabulary=n)], 4) for n in (None, 10)
    )
    sizes, fewer = dimensions(config), VOCABULARY - 10
    assert whole.flops - part.flops == 2 * 2 * sizes.dim * fewer
    assert whole.bytes_moved - part.bytes_moved == 4 * (sizes.dim * fewer + 2 * fewer)
    assert sizes.share_with(10) == pytest.approx(
        1 - sizes.dim * fewer / (sizes.layers.values + sizes.head.values)
    )
