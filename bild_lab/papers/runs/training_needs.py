"""Closed forms of what a training takes on a GPU: bytes of a row of its batch and of what is trained,
and the work of a step.

They hold for Transformers' modules under autocast in bfloat16, with fused attention, as a GPU runs
them. Counted are the tensors that wait for the backward pass, and what is beside them at the peak:
small ones and the buffers of kernels are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

HALF, FULL = 2, 4  # bytes of bfloat16 and float32
FINE_TUNING, BITA, MEDUSA, LAYER_HEADS = "fine-tuning", "bita", "medusa", "layer heads"
LOGITS = 3  # of their size in float32, as the loss goes back: log-softmax, its gradient and theirs
# rows of logits that per-layer heads hold at a time (training/modules/layer_heads.py)
HEAD_ROWS = 2048
# numbers for each trained weight: gradients, and AdamW's moments, which Adafactor factors
STATES = {"adafactor": 1, "adamw": 3}


@dataclass(frozen=True)
class Training:
    """How a setting trains. kind: of this module's; others have no closed form.

    steps: of the optimizer; None: `passes` over the data. accumulate: passes of a step, at least.
    target_tokens, all_tokens: the longest answer, and prompt and answer together (None: no limit).
    trainings: one for each learning rate. evaluate_every: steps. evaluated: texts that each
    evaluation decodes. module: the values of `bita`, `module` or `heads`, with `layers` of heads.
    """

    kind: str
    steps: int | None
    passes: float
    batch_size: int
    accumulate: int
    optimizer: str
    target_tokens: int
    all_tokens: int | None
    trainings: int = 1
    evaluate_every: int | None = None
    evaluated: int = 0
    loss: str = "last"
    module: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model that its training's memory depends on.

    queries: of all heads together. cached: keys and values of a token in a layer. shared_heads:
    several heads of queries share keys. hidden: of the feed-forward block. gated: T5's of version
    1.1. encoder: its layers, 0 for a decoder.
    """

    dim: int
    queries: int
    cached: int
    heads: int
    shared_heads: bool
    hidden: int
    gated: bool
    layers: int
    encoder: int
    vocabulary: int


@dataclass(frozen=True)
class TrainingMemory:
    """In bytes. trained: the weights that are trained and their copies, where they are not the
    model's own. state: gradients and optimizer, and what a pass takes whatever its rows. row: of
    each row.
    """

    trained: int
    state: int
    row: int


def shape_of(config: Any) -> ModelShape:
    """The sizes in a configuration of Transformers: T5, mT5, Llama or GPT-2."""
    heads = config.num_attention_heads
    groups = getattr(config, "num_key_value_heads", heads)
    head_dim = getattr(config, "head_dim", config.hidden_size // heads)
    hidden_names = ("d_ff", "intermediate_size", "n_inner")
    return ModelShape(
        dim=config.hidden_size,
        queries=heads * head_dim,
        cached=2 * groups * head_dim,
        heads=heads,
        shared_heads=groups < heads,
        hidden=next(getattr(config, name) for name in hidden_names if hasattr(config, name)),
        gated=getattr(config, "is_gated_act", False),
        layers=getattr(config, "num_decoder_layers", config.num_hidden_layers),
        encoder=config.num_layers if config.is_encoder_decoder else 0,
        vocabulary=config.vocab_size,
    )


def training_memory(
    training: Training, shape: ModelShape, weights: int, prompt_tokens: int
) -> TrainingMemory | None:
    """What a training of this model takes besides the model's weights.

    weights: of the model. prompt_tokens: of the longest prompt. None without a closed form.
    """
    answer = training.target_tokens
    together = prompt_tokens + answer
    if training.all_tokens is not None:
        together = min(together, training.all_tokens)
    match training.kind:
        case "bita":
            return _bita(training, shape, together)
        case "medusa":
            return _medusa(training, shape, together, answer)
        case "layer heads":
            return _layer_heads(training, shape, together, answer)
        case "fine-tuning" if shape.encoder:
            row = _encoder_decoder_row(training, shape, prompt_tokens, answer)
        case "fine-tuning":
            row = _decoder_row(shape, together)
        case _:
            return None
    # beside the float32 weights, autocast holds each in bfloat16
    copies = HALF * weights
    return TrainingMemory(copies, STATES[training.optimizer] * FULL * weights, row)


def training_flops(
    training: Training, shape: ModelShape, weights: int, prompt: int, answer: int
) -> float | None:
    """FLOPs of a row, forward and back: twice each weight that a token meets forward, twice for the
    gradient of its values, and twice for its own where it is trained.

    prompt, answer: tokens of a mean row. None without a closed form.
    """
    module, together = training.module, prompt + answer
    if training.all_tokens is not None:
        together = min(together, training.all_tokens)
    match training.kind:
        case "bita":
            rows = module["splits"] * module["mask_tokens"]
            return weights * (2 * together + 4 * rows)
        case "medusa":
            contexts = answer if module["contexts"] is None else module["contexts"]
            return 2 * weights * together + 6 * _medusa_weights(module, shape) * contexts
        case "layer heads":  # logits are computed again on the way back
            return 2 * weights * together + 8 * _head_weights(module, shape) * answer
        case "fine-tuning" if shape.encoder:
            return _encoder_decoder_flops(training, shape, prompt, answer)
        case "fine-tuning":
            return 6 * (weights - shape.vocabulary * shape.dim) * together
    return None


def _encoder_decoder_flops(
    training: Training, shape: ModelShape, prompt: int, answer: int
) -> float:
    """The FLOPs of a row of a fine-tuning of T5 or mT5, each of whose weights is trained."""
    projection = shape.dim * shape.queries
    feed_forward = shape.dim * shape.hidden * (3 if shape.gated else 2)
    encoder = shape.encoder * (4 * projection + feed_forward)
    decoder = shape.layers * (6 * projection + feed_forward)
    encoder_keys_and_values = shape.layers * 2 * projection
    scores = {"last": 1, "early_exit": 2, "calm": shape.layers}[training.loss]
    head = scores * shape.vocabulary * shape.dim
    return 6 * ((encoder + encoder_keys_and_values) * prompt + (decoder + head) * answer)


def _medusa_weights(module: Mapping[str, Any], shape: ModelShape) -> int:
    matrices = module["heads"] * module["layers"] * shape.dim * (shape.dim + 1)
    if module["shared"]:
        return matrices
    return matrices + module["heads"] * shape.vocabulary * shape.dim


def _head_weights(module: Mapping[str, Any], shape: ModelShape) -> int:
    rank = module["rank"]
    if rank is None:
        return len(module["layers"]) * shape.vocabulary * shape.dim
    return len(module["layers"]) * rank * (shape.vocabulary + shape.dim)


def _bita(training: Training, shape: ModelShape, tokens: int) -> TrainingMemory:
    """Rows of masks, and of a shallow prompt, go forward and back over the keys and values of the
    text, which are cached (training/modules/bita.py).
    """
    module = training.module
    prompt = module["prompt_tokens"]
    masks = module["splits"] * module["mask_tokens"]
    rows = masks
    if module["prompt"] == "shallow":
        rows += prompt
    deep = module["prompt"] == "deep"
    columns = tokens + rows
    if deep:
        columns += prompt

    norms = 2 * FULL * shape.dim  # what both read
    queries = 2 * HALF * shape.queries  # with what attention gives
    normalizers = FULL * shape.heads
    feed_forward = 3 * HALF * shape.hidden  # gate, its activation, and what it is multiplied with
    mask = HALF * columns  # as attention adds it
    layer = rows * (norms + queries + normalizers + feed_forward + mask)
    if shape.shared_heads:
        layer += columns * HALF * 2 * shape.queries  # keys and values, once for each head
    else:
        layer += columns * HALF * shape.cached  # joined with the prompt's, or the cache itself

    cache = 0
    if deep or shape.shared_heads:  # a copy
        cache = shape.layers * (tokens + rows) * HALF * shape.cached
    forward = cache + masks * shape.vocabulary * (HALF + FULL)
    backward = masks * shape.vocabulary * LOGITS * FULL
    row = shape.layers * layer + rows * FULL * shape.dim + max(forward, backward)

    trained = module["mask_tokens"] * shape.dim
    if deep:
        trained += prompt * shape.layers * shape.cached
    elif module["prompt"] != "none":
        trained += prompt * shape.dim
    return TrainingMemory(FULL * trained, STATES[training.optimizer] * FULL * trained, row)


def _medusa(training: Training, shape: ModelShape, tokens: int, answer: int) -> TrainingMemory:
    """All heads' logits at every context of an answer; the model itself keeps nothing for them
    (training/modules/medusa.py).
    """
    module = training.module
    contexts = min(answer, tokens) if module["contexts"] is None else module["contexts"]
    places = module["heads"] * contexts
    matrices = _medusa_weights(module, shape)
    blocks = module["layers"] * (FULL + HALF) + HALF  # what each reads and its activation, the end
    logits = places * shape.vocabulary * LOGITS * FULL
    row = max(places * shape.dim * blocks + logits, _forward_alone(shape, tokens))
    state = (STATES[training.optimizer] * FULL + 2 * HALF) * matrices
    return TrainingMemory(FULL * matrices, state, row)


def _layer_heads(training: Training, shape: ModelShape, tokens: int, answer: int) -> TrainingMemory:
    """The states of the layers that have heads, and the logits of some rows at a time
    (training/modules/layer_heads.py).
    """
    count, rank = len(training.module["layers"]), training.module["rank"]
    matrices = _head_weights(training.module, shape)
    frozen = 0 if rank is None else shape.vocabulary * shape.dim
    contexts = min(answer, tokens)
    states = shape.layers * tokens * HALF * shape.dim  # what each layer reads
    learned = count * contexts * HALF * shape.dim
    row = max(
        states + _forward_alone(shape, tokens),
        (count + 1) * tokens * HALF * shape.dim + 2 * learned,
    )
    logits = HEAD_ROWS * shape.vocabulary * (LOGITS * FULL + HALF)
    head = HALF * shape.vocabulary * shape.dim  # as autocast reads it
    gradients = FULL * matrices
    # a head's gradients lie among zeros for all: with the sum so far and the next there are three
    passing = max(3 * gradients, 2 * gradients + head + logits)
    state = (STATES[training.optimizer] - 1) * gradients + passing
    return TrainingMemory(FULL * (matrices + frozen), state, row)


def _forward_alone(shape: ModelShape, tokens: int) -> int:
    """The most of a forward that keeps nothing for a backward pass: a feed-forward block."""
    return tokens * HALF * (3 * shape.hidden + 2 * shape.dim)


def _encoder_decoder_row(training: Training, shape: ModelShape, source: int, answer: int) -> int:
    """T5 and mT5."""
    encoder = shape.encoder * (
        _t5_attention(shape, source, source) + _t5_feed_forward(shape, source)
    )
    decoder = shape.layers * (
        _t5_attention(shape, answer, answer)
        + _t5_attention(shape, answer, source, crossed=True)
        + _t5_feed_forward(shape, answer)
    )
    biases = FULL * shape.heads * (source * source + answer * answer)
    inner = {"last": 0, "early_exit": 1, "calm": shape.layers - 1}[training.loss]
    logits = answer * shape.vocabulary * FULL * (LOGITS + inner)
    return encoder + decoder + biases + logits


def _t5_attention(shape: ModelShape, rows: int, columns: int, crossed: bool = False) -> int:
    """Saved by one block: its norm, casts, queries, keys, values, output, bias and dropout."""
    norm = 2 * FULL * shape.dim
    read = HALF * shape.dim * (1 if crossed else 3)
    projected = HALF * shape.queries * (3 if crossed else 5)
    bias_and_scores = FULL * shape.heads + HALF * shape.heads * columns + shape.dim
    keys = columns * (2 * HALF * shape.dim + HALF * shape.cached) if crossed else 0
    return rows * (norm + read + projected + bias_and_scores) + keys


def _t5_feed_forward(shape: ModelShape, rows: int) -> int:
    """Saved by one block: its norm, casts, hidden values and dropout."""
    norm = 2 * FULL * shape.dim
    if shape.gated:
        hidden, read = shape.hidden * (7 * HALF + 1), 2 * HALF * shape.dim
    else:
        hidden, read = shape.hidden * (2 * HALF + 1), HALF * shape.dim
    return rows * (norm + read + hidden + shape.dim)


def _decoder_row(shape: ModelShape, tokens: int) -> int:
    """GPT-2 without dropout."""
    layer = 11 * HALF * shape.dim + FULL * shape.heads + 2 * HALF * shape.hidden
    logits = shape.vocabulary * LOGITS * FULL
    return tokens * (shape.layers * layer + logits)
