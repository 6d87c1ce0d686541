"""A drafter that learns the target's distributions, on answers or on texts of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from bild_lab.engine.models.checkpoint.checkpoint import Checkpoint
from bild_lab.errors import UserError
from bild_lab.training import distillation
from bild_lab.training.batches import Collator, TokenizedExample
from bild_lab.training.distillation import DIVERGENCES, Distillation, DistillationSpec, on_engine
from bild_lab.training.finetune import finetune
from bild_lab.training.start import FromCheckpoint
from tests.tiny import END, PAD
from tests.training.jobs import LLAMA, T5, Kill, job, losses

CPU = (torch.device("cpu"), torch.float32)
P, Q = (
    torch.tensor([[0.7, 0.2, 0.1]], dtype=torch.float64),
    torch.tensor([[0.3, 0.3, 0.4]], dtype=torch.float64),
)
M = (P + Q) / 2
CLOSED = {
    "kl": (P * (P / Q).log()).sum(),
    "reverse_kl": (Q * (Q / P).log()).sum(),
    "js": ((P * (P / M).log()).sum() + (Q * (Q / M).log()).sum()) / 2,
    # speculative decoding's 1 - α (Leviathan et al., Corollary 3.6)
    "tv": 1 - torch.minimum(P, Q).sum(),
    "nla": -torch.minimum(P, Q).sum().log(),
    "lk": (share := (-3 * torch.minimum(P, Q).sum()).exp()) * (P * (P / Q).log()).sum()
    + (1 - share) * (1 - torch.minimum(P, Q).sum()),
}


@pytest.mark.parametrize("name", DIVERGENCES)
def test_a_divergence_is_its_closed_form_and_0_only_between_equals(name: str) -> None:
    found = DIVERGENCES[name](P.log(), Q.log())
    assert found.shape == (1,) and found.item() == pytest.approx(CLOSED[name].item())
    assert DIVERGENCES[name](P.log(), P.log()).item() == pytest.approx(0, abs=1e-12)


def test_the_share_between_lks_divergences_has_no_gradient() -> None:
    log_q, fixed = (Q.log().requires_grad_() for _ in range(2))
    DIVERGENCES["lk"](P.log(), log_q).sum().backward()
    kl, tv = (DIVERGENCES[name](P.log(), fixed).sum() for name in ("kl", "tv"))
    share = (-3 * torch.minimum(P, Q).sum()).exp()
    (share * kl + (1 - share) * tv).backward()
    assert torch.allclose(log_q.grad, fixed.grad)


def test_the_two_directions_of_kl_differ() -> None:
    """Exchanged arguments are found."""
    assert CLOSED["kl"].item() != pytest.approx(CLOSED["reverse_kl"].item(), rel=0.05)


def steps(
    name: str, checkpoints: Path, distillation_spec: DistillationSpec
) -> tuple[Distillation, torch.nn.Module]:
    teacher, own = (
        on_engine(Checkpoint(str(checkpoints / one)), *CPU) for one in (name, f"{name}-draft")
    )
    collate = Collator(PAD, PAD if name == "t5" else None)
    model = own.checkpoint.weights(torch.float32).train()
    return Distillation(distillation_spec, teacher, collate, frozenset({END}), 6, seed=3), model


PROMPTS = [[5, 6, 7, 8], [9, 4], [3, 4, 5, 6, 7]]
EXAMPLES = [TokenizedExample(np.array(one), np.array([8, 4, END])) for one in PROMPTS]


def one_by_one(
    found: Distillation, model: torch.nn.Module, examples: Sequence[TokenizedExample]
) -> list[Tensor]:
    """Both models' log-probabilities at every learned token of every text, without batches."""
    pairs = []
    for one in examples:
        prompt, answer = torch.tensor([one.prompt.tolist()]), one.answer.tolist()
        for module in (found.teacher.transformers.module, model):
            if found.collate.start is None:
                whole = torch.cat([prompt, torch.tensor([answer])], 1)
                logits = module(input_ids=whole).logits[0, len(one.prompt) - 1 : -1]
            else:
                logits = module(
                    input_ids=prompt, decoder_input_ids=torch.tensor([[PAD, *answer[:-1]]])
                ).logits[0]
            pieces = max(found.teacher.checkpoint.vocabulary.values()) + 1
            pairs.append(logits[:, :pieces].log_softmax(-1))
    return pairs


@pytest.mark.parametrize("name", ["t5", "llama"])
def test_the_loss_is_the_divergence_at_each_token_whatever_the_padding(
    name: str, checkpoints: Path
) -> None:
    found, model = steps(name, checkpoints, DistillationSpec("answers", "kl"))
    model.eval()
    pairs = one_by_one(found, model, EXAMPLES)
    divergences = [
        (p.exp() * (p - q)).sum().item()
        for log_p, log_q in zip(pairs[::2], pairs[1::2], strict=True)
        for p, q in zip(log_p, log_q, strict=True)
    ]
    assert found(model, EXAMPLES, 0).item() == pytest.approx(np.mean(divergences), rel=1e-4)


def shake(model: torch.nn.Module) -> None:
    """Until it often disagrees with its target."""
    scale = 0.27 if model.config.is_encoder_decoder else 0.3
    with torch.no_grad():
        for each in model.parameters():
            each.add_(scale * torch.randn(each.shape, generator=torch.Generator().manual_seed(1)))


@pytest.mark.fast("kernels-t5", "hf-llama")
@pytest.mark.parametrize("name", ["t5", "llama"])
@pytest.mark.parametrize("hf", [False, True], ids=["kernels", "hf"])
def test_the_drafter_writes_its_own_greedy_texts_as_it_is_now(
    name: str, hf: bool, checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the verification's rows are the target's distributions there.

    Fault: those of the token before.
    """
    if hf:
        monkeypatch.setattr(distillation, "why_not_native", lambda config, dtype: "a test says so")
    found, model = steps(name, checkpoints, DistillationSpec("drafter", "kl", temperature=0.0))
    for shaken in (False, True):
        if shaken:
            shake(model)
        texts, log_p = found.decoded(model, EXAMPLES, 0)
        assert model.training  # as it was
        model.eval()
        pairs = one_by_one(found, model, texts)
        assert torch.allclose(log_p, torch.cat(pairs[::2]), atol=1e-4) and not log_p.requires_grad
        for one, plain, log_q in zip(texts, EXAMPLES, pairs[1::2], strict=True):
            ((alone,), _) = found.decoded(model, [plain], 0)  # without a batch
            assert one.answer.tolist() == alone.answer.tolist() and np.array_equal(
                one.prompt, plain.prompt
            )
            assert log_q.argmax(-1).tolist() == one.answer.tolist()
            assert END not in one.answer[:-1] and (one.answer[-1] == END or len(one.answer) == 6)
        model.train()


BILD = {"temperature": 0.0, "fallback": 0.4, "rollback": 3.0}


@pytest.mark.fast(
    "{'temperature': 0.0, 'fallback': 0.4, 'rollback': 3.0}-t5",
    "{'temperature': 0.0, 'fallback': 0.0, 'rollback': 3.0}-llama",
)
@pytest.mark.parametrize("name", ["t5", "llama"])
@pytest.mark.parametrize(
    "knobs", [BILD, {**BILD, "rollback": 0}, {**BILD, "fallback": 0.0}], ids=str
)
def test_texts_are_the_targets_where_the_drafter_is_unsure_or_the_target_disagrees(
    name: str, knobs: dict, checkpoints: Path
) -> None:
    """Elsewhere they are the drafter's. Fault: the place after it."""
    found, model = steps(name, checkpoints, DistillationSpec("drafter", "kl", **knobs))
    shake(model)
    texts, _ = found.decoded(model, EXAMPLES, 0)
    model.eval()
    wanted, pairs = [], one_by_one(found, model, texts)
    for one, log_p, log_q in zip(texts, pairs[::2], pairs[1::2], strict=True):
        for token, p, q in zip(one.answer.tolist(), log_p, log_q, strict=True):
            drafted = int(q.argmax())
            refused = (
                drafted != p.argmax() if knobs["rollback"] == 0 else -p[drafted] > knobs["rollback"]
            )
            wanted.append(bool(q.max().exp() < knobs["fallback"] or refused))
            assert token == (p.argmax() if wanted[-1] else drafted)
    assert 0 < sum(wanted) < len(wanted)


@pytest.mark.parametrize("knobs", [{}, {"rollback": 0}], ids=str)
def test_sampled_texts_depend_on_the_step_alone(knobs: dict, checkpoints: Path) -> None:
    found, model = steps(
        "llama", checkpoints, DistillationSpec("drafter", "tv", temperature=20.0, **knobs)
    )
    state = torch.random.get_rng_state()
    first, again, other = (
        [one.answer.tolist() for one in found.decoded(model, EXAMPLES, step)[0]]
        for step in (4, 4, 5)
    )
    assert first == again != other
    # the training's own generator is left alone
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize("data", ["answers", "drafter"])
def test_ids_without_a_token_between_the_tokens_are_no_part_of_a_distribution(
    data: str, checkpoints: Path
) -> None:
    """The engine gives them no probability, and 0 · log 0 is no number."""
    greedy = {} if data == "answers" else {"temperature": 0.0}
    found, model = steps("llama", checkpoints, DistillationSpec(data, "kl", **greedy))
    vars(found.teacher.checkpoint)["ids_without_token"] = (10, 39)
    model.eval()
    loss = found(model, EXAMPLES, 0)
    texts = EXAMPLES if data == "answers" else found.decoded(model, EXAMPLES, 0)[0]
    model.eval()
    kept = [token for token in range(found.pieces) if token not in (10, 39)]
    pairs = [rows[:, kept].log_softmax(-1) for rows in one_by_one(found, model, texts)]
    wanted = torch.cat(
        [(p.exp() * (p - q)).sum(-1) for p, q in zip(pairs[::2], pairs[1::2], strict=True)]
    ).mean()
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-3)


def test_a_mixture_takes_turns() -> None:
    assert [DistillationSpec("mixture", "kl").decodes_at(step) for step in range(4)] == [
        False,
        True,
        False,
        True,
    ]
    assert DistillationSpec("drafter", "kl").decodes_at(0) and not DistillationSpec(
        "answers", "kl"
    ).decodes_at(1)


@pytest.mark.fast("llama")
@pytest.mark.parametrize("shape", [T5, LLAMA], ids=["t5", "llama"])
def test_a_training_that_was_killed_resumes_with_the_same_losses(
    shape: dict, tmp_path: Path
) -> None:
    finetune(job(tmp_path / "teacher", max_steps=2, model=shape))
    teacher = Checkpoint(str(tmp_path / "teacher" / "checkpoint"))
    distillation_spec = DistillationSpec("mixture", "js", **BILD)
    words = {
        "start": FromCheckpoint(teacher),
        "teacher": teacher,
        "distillation_spec": distillation_spec,
    }
    whole = finetune(job(tmp_path / "whole", **words))
    with pytest.raises(KeyboardInterrupt):
        finetune(job(tmp_path / "killed", callbacks=(Kill(3),), **words))
    assert losses(finetune(job(tmp_path / "killed", **words))) == losses(whole)
    assert (
        whole["identity"]["align.data"] == "mixture"
        and whole["identity"]["teacher"] == teacher.fingerprint
    )


@pytest.mark.fast("llama")
@pytest.mark.parametrize("shape", [T5, LLAMA], ids=["t5", "llama"])
def test_half_precision_decodes_what_it_trains(
    shape: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: a module's sessions are compared with its forward under autocast to the last bits of
    float32.
    """
    finetune(job(tmp_path / "teacher", max_steps=2, model=shape))
    teacher, found = Checkpoint(str(tmp_path / "teacher" / "checkpoint")), []
    words = {
        "start": FromCheckpoint(teacher),
        "teacher": teacher,
        "distillation_spec": DistillationSpec("drafter", "tv", **BILD),
    }
    for engine in ("kernels", "hf"):
        found += losses(
            finetune(job(tmp_path / engine, precision="bfloat16", max_steps=1, **words))
        )[:1]
        monkeypatch.setattr(distillation, "why_not_native", lambda config, dtype: "a test says so")
    # it is its own teacher
    assert found[0][1] == pytest.approx(found[1][1], abs=0.02) and found[0][1] < 0.3


def test_a_step_in_several_passes_has_their_mean_loss(tmp_path: Path) -> None:
    """Fault: their sum, of which each pass is as large as the whole step."""
    finetune(job(tmp_path / "teacher", max_steps=2))
    finetune(job(tmp_path / "start", max_steps=2, seed=5))
    teacher, small = (
        Checkpoint(str(tmp_path / name / "checkpoint")) for name in ("teacher", "start")
    )
    words = {
        "start": FromCheckpoint(small),
        "teacher": teacher,
        "distillation_spec": DistillationSpec("answers", "kl"),
        "max_steps": 3,
    }
    whole, passes = (
        losses(finetune(job(tmp_path / str(count), accumulate=count, **words))) for count in (1, 2)
    )
    assert [value for _, value in passes] == pytest.approx([value for _, value in whole], rel=0.1)


@pytest.mark.slow
def test_distributions_learned_by_kl_come_nearer_to_the_targets(tmp_path: Path) -> None:
    """A drafter that starts elsewhere learns a target's answers as well as the target, from its own
    texts alone.
    """
    finetune(job(tmp_path / "teacher", max_steps=40, evaluate_every=40))
    finetune(job(tmp_path / "start", max_steps=2, seed=5))
    teacher, small = (
        Checkpoint(str(tmp_path / name / "checkpoint")) for name in ("teacher", "start")
    )
    assert teacher.vocabulary == small.vocabulary
    words = {
        "start": FromCheckpoint(small),
        "teacher": teacher,
        "max_steps": 40,
        "evaluate_every": 10,
    }
    history = finetune(
        job(tmp_path / "own", distillation_spec=DistillationSpec("drafter", "kl"), **words)
    )["history"]
    scored = [entry["eval_loss"] for entry in history if "eval_loss" in entry]
    assert scored[-1] < 0.9 * scored[0]


def test_what_cannot_be_learned_is_refused(tmp_path: Path, checkpoints: Path) -> None:
    refused = {
        "align.data must be one of": {"data": "target", "loss": "kl"},
        "align.loss must be one of null, kl, .*, MODULE.FUNCTION, got 'l2'": {"loss": "l2"},
        "align.data=drafter needs the target's distributions": {"data": "drafter"},
        r"align\.fallback must lie in": {"fallback": 2},
        r"align\.window must be": {"window": 0},
        "null never rolls back": {"rollback": -1},
        "align.temperature must lie in": {"loss": "kl", "temperature": -1},
        r"align\.fallback=0\.25 has no effect": {"fallback": 0.25, "rollback": 2.5},
        r"align\.temperature=0 has no effect": {"temperature": 0, "window": 5},
        r"align\.rollback=2\.5 has no effect with align\.data=answers": {
            "loss": "kl",
            "rollback": 2.5,
        },
    }
    for message, words in refused.items():
        with pytest.raises(UserError, match=message):
            DistillationSpec(**words)
    taught = {
        "distillation_spec": DistillationSpec("drafter", "kl"),
        "teacher": Checkpoint(str(checkpoints / "t5")),
    }
    for wrong in ({"soft_targets": 2}, {"label_smoothing": 0.1}, {"loss": "calm"}):
        with pytest.raises(UserError, match=r"set train\.loss=last, train\.soft_targets=0"):
            job(tmp_path, **taught, **wrong)
    with pytest.raises(UserError, match="or that teaches"):
        job(tmp_path, distillation_spec=DistillationSpec("drafter", "kl"))


OWN_LOSSES = """
def hellinger(log_p, log_q):
    return 1 - ((log_p + log_q) / 2).exp().sum(-1)

def kl(log_p, log_q):
    return (log_p.exp() * (log_p - log_q)).sum(-1)

def mean(log_p, log_q):
    return kl(log_p, log_q).mean()

def detached(log_p, log_q):
    return kl(log_p, log_q).detach()

def infinite(log_p, log_q):
    return kl(log_p, log_q) / 0

def none(log_p, log_q):
    return None

def failing(log_p, log_q):
    return log_p.nothing

class Losses:
    kl = staticmethod(kl)
"""


@pytest.fixture
def own_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module with losses of a user's own."""
    (tmp_path / "losses_of_ones_own.py").write_text(OWN_LOSSES)
    monkeypatch.syspath_prepend(tmp_path)
    return "losses_of_ones_own"


def test_a_loss_of_ones_own_is_learned_and_its_code_is_part_of_the_training(
    own_losses: str, checkpoints: Path
) -> None:
    ours, own = (
        steps("llama", checkpoints, DistillationSpec("answers", loss))
        for loss in ("kl", f"{own_losses}.kl")
    )
    for _, model in (ours, own):
        model.eval()
    assert own[0](own[1], EXAMPLES, 0).item() == pytest.approx(ours[0](ours[1], EXAMPLES, 0).item())
    identity = DistillationSpec("answers", f"{own_losses}.hellinger").identity
    assert identity["align.loss"] == f"{own_losses}.hellinger"
    assert len(identity["align.loss.code"]) == 12
    of_class = DistillationSpec("answers", f"{own_losses}.Losses.kl").identity
    assert of_class["align.loss.code"] == identity["align.loss.code"]
    assert "align.loss.code" not in DistillationSpec("answers", "kl").identity


@pytest.mark.parametrize(
    ("loss", "told"),
    [
        (
            "mean",
            r"has given a tensor \[\] of float32 for two tensors \[3, 7\]; it gets .* a loss for",
        ),
        ("none", "has given NoneType"),
        ("detached", "must give a gradient for the drafter"),
        ("infinite", "must give finite numbers"),
        ("failing", "fails: AttributeError: .*'nothing'.*; it gets the log-probabilities"),
        ("missing", "cannot be used .* give MODULE.FUNCTION of your own"),
    ],
)
def test_a_loss_of_ones_own_that_cannot_be_learned_is_refused_before_weights_load(
    loss: str, told: str, own_losses: str
) -> None:
    with pytest.raises(UserError, match=rf"the loss {own_losses}\.{loss} {told}"):
        DistillationSpec("answers", f"{own_losses}.{loss}")
    with pytest.raises(UserError, match=r"the loss os\.system cannot be used"):
        DistillationSpec("answers", "os.system")
