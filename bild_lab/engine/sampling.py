"""From logits to the next token: temperature, top-k, top-p and argmax as one distribution."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from bild_lab.errors import UserError, require_finite, require_number, require_whole

Logits = Float[Tensor, "n vocab"]
Probs = Float[Tensor, "n vocab"]
Tokens = Int[Tensor, " n"]
Mask = Bool[Tensor, "n vocab"]

# logits divided by such a temperature stay finite in float32, and differ from each other
COOLEST, HOTTEST = 1e-5, 1e5


@dataclass(frozen=True)
class Sampling:
    """Standardized sampling (speculative decoding §2.2): one adjusted distribution for every model.

    temperature: 0 is argmax.
    top_k: keeps the k most likely tokens, and others as likely as the last of them.
    top_p: keeps the smallest set of the most likely tokens whose probability reaches p.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        require_temperature("decoding.temperature", self.temperature)
        if self.top_k is not None:
            require_whole("decoding.top_k", self.top_k, 1, remedy="null switches it off")
        if self.top_p is not None:
            require_number(
                "decoding.top_p", self.top_p, 0, 1, above=True, remedy="null switches it off"
            )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def plain(self) -> bool:
        """Whether every token may be drawn: neither top-k nor top-p."""
        return self.top_k is None and self.top_p in (None, 1.0)

    def probs(self, logits: Logits) -> Probs:
        """The adjusted distribution, in float32 or better."""
        logits = precise(logits)
        if self.greedy:
            return one_hot(most_likely(logits), logits)
        logits = logits / self.temperature
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            outside = outside_top_k(logits, self.top_k)
            logits = logits.masked_fill(outside, float("-inf"))
        if self.top_p is not None and self.top_p < 1.0:
            outside = outside_nucleus(logits, self.top_p)
            logits = logits.masked_fill(outside, float("-inf"))
        return logits.softmax(-1)

    def choose(self, logits: Logits, generator: torch.Generator | None) -> Tokens:
        """One token per row: the most likely, or a draw from the adjusted distribution."""
        if self.greedy:
            return most_likely(precise(logits))
        return draw(self.probs(logits), generator)


def require_temperature(key: str, value: float) -> None:
    """Raise UserError unless the value is 0, for greedy decoding, or a temperature that logits can
    be divided by.
    """
    require_finite(key, value, 0, remedy="0 is greedy decoding")
    if value != 0 and not COOLEST <= value <= HOTTEST:
        raise UserError(
            f"{key} must lie in [{COOLEST:g}, {HOTTEST:g}] or be 0, which is greedy decoding, got"
            f" {value!r}; set 0 for the most likely tokens"
        )


def one_hot(tokens: Tokens, logits: Logits) -> Probs:
    """The distribution of each row that gives its token probability 1, as wide as the logits."""
    return torch.zeros_like(logits).scatter_(-1, tokens[:, None], 1.0)


def outside_top_k(logits: Logits, top_k: int) -> Mask:
    """Which tokens are less likely than the k-th most likely one."""
    top_logits = logits.topk(top_k, dim=-1).values
    return logits < top_logits[..., -1:]


def outside_nucleus(logits: Logits, top_p: float) -> Mask:
    """Which tokens lie outside the smallest set of the most likely tokens whose probability reaches
    top_p.
    """
    sorted_probs, order = logits.softmax(-1).sort(-1, descending=True)
    likelier_mass = sorted_probs.cumsum(-1) - sorted_probs  # the probability of likelier tokens
    outside = likelier_mass >= top_p
    outside &= likelier_mass > 0  # a top_p that rounds to 0 keeps the most likely token, too
    return torch.zeros_like(outside).scatter(-1, order, outside)


def pick(probs: Probs, uniforms: Float[Tensor, " n"]) -> Tokens:
    """One token per row, drawn by a number in [0, 1): the first whose cumulative probability
    exceeds that share of the row's sum.
    """
    cumulative = probs.double().cumsum(-1)
    totals = cumulative[:, -1:]
    below = cumulative <= uniforms[:, None] * totals
    last_token = probs.shape[-1] - 1
    return below.sum(-1).clamp(max=last_token)


def most_likely(logits: Logits) -> Tokens:
    """The argmax of each row, the first of equal ones."""
    if logits.device.type != "cpu":
        return logits.argmax(-1)
    # NumPy's is up to ten times as fast as PyTorch's on a CPU
    return torch.from_numpy(logits.numpy().argmax(-1))


def draw(probs: Probs, generator: torch.Generator | None) -> Tokens:
    """Sample one token per row."""
    columns = torch.multinomial(probs, 1, generator=generator)  # [n, 1]
    return columns[:, 0]


def precise(logits: Tensor) -> Tensor:
    """Half-precision logits as float32; float32 and float64 untouched."""
    if logits.dtype in (torch.float16, torch.bfloat16):
        return logits.float()
    return logits
