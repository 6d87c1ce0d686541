"""Whether a text that was decoded over a record differs from the live one by rounding alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxtyping import Int
from torch import Tensor

from bild_lab.engine.record import RecordedModel
from bild_lab.engine.request import Request
from bild_lab.engine.sampling import precise
from bild_lab.engine.session import EVERYTHING, LoadedModel, Prefix, Rows, Scores, Session, Want
from bild_lab.engine.trace import Forward, Trace
from bild_lab.lab.decoding.decoder import Decoder
from bild_lab.lab.measure.certificate import DEFECT, TIE, most_noise
from bild_lab.lab.measure.recorder import difference

Wrap = Callable[[LoadedModel], LoadedModel]


@dataclass(frozen=True)
class Judged:
    """The verdict on a replayed text that differs from the live one.

    largest: of the differences between rows that the replay was given and the model's own for the same calls, relative
    to the largest score; inf if decoding once more gave yet another text.
    """

    verdict: str
    largest: float


def judge(decoder_over: Callable[[Wrap], Decoder], records: Wrap, request: Request, tokens: Sequence[int]) -> Judged:
    """Decode a replayed text again with the models themselves beside the record.

    A policy is the same program over both, so a difference is a tie if no row that it was given is further from the
    model's own than rounding explains: then a choice or a threshold lay within the rounding. Otherwise the record or
    its sessions have a defect.

    decoder_over: gives the policy's decoder over wrapped models. records: gives a model with its record.
    """
    compared: dict[int, ComparedModel] = {}
    decoder = decoder_over(lambda model: compared.setdefault(id(model), ComparedModel(records(model))))
    again = decoder.method.decode(request, Trace())[request.limits.prompt_length :]
    largest = max(model.largest for model in compared.values())
    if list(again) != list(tokens):
        return Judged(DEFECT, float("inf"))
    rounding = all(model.largest <= most_noise(model.dtype, model.depth) for model in compared.values())
    return Judged(TIE if rounding else DEFECT, largest)


class ComparedModel:
    """A recorded model whose sessions run the model itself beside. largest: of a row so far."""

    def __init__(self, recorded: RecordedModel) -> None:
        self.recorded, self.largest = recorded, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.recorded, name)

    def start(
        self,
        source: Any,
        room: int,
        forwards: list[Forward] | None = None,
        target: Session | None = None,
        prefix: Prefix | None = None,
    ) -> ComparedSession:
        served, own = (target.served, target.own) if isinstance(target, ComparedSession) else (target, target)
        return ComparedSession(
            self,
            self.recorded.start(source, room, forwards, served, prefix),
            self.recorded.model.start(source, room, None, own, prefix),
        )


class ComparedSession:
    """Passes every call to a recorded session and to the model's own, and answers as the recorded one does."""

    def __init__(self, model: ComparedModel, served: Session, own: Session) -> None:
        self._model, self.served, self.own, self.forwards = model, served, own, served.forwards

    @property
    def length(self) -> int:
        return self.served.length

    def extend(self, rows: Rows | Sequence[int] | Int[Tensor, " m"], want: Want = EVERYTHING) -> Scores:
        served, own = self.served.extend(rows, want), self.own.extend(rows, want)
        for one, other in ((served.logits, own.logits), (served.head_input, own.head_input)):
            if one is not None:
                self._model.largest = max(self._model.largest, difference(precise(one), precise(other)))
        return served

    def draft(self, rows: Sequence[int], chain: Any) -> None:
        """Row by row, so that each can be compared."""

    def grow(self, rows: Sequence[int], growth: Any) -> None:
        """Level by level."""

    def keep(self, path: Sequence[int]) -> None:
        self.served.keep(path)
        self.own.keep(path)

    def rollback(self, length: int) -> None:
        self.served.rollback(length)
        self.own.rollback(length)

    def prefill(self) -> None:
        self.served.prefill()
        self.own.prefill()
