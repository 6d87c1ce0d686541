"""What a screening screens, keeps and confirms: the group `screen` of its configuration."""

from __future__ import annotations

from dataclasses import dataclass, field

from bild_lab.errors import UserError, require_choice, require_finite, require_whole
from bild_lab.lab.data.rows import canonical_split
from bild_lab.screening.guarantee import GuaranteeSpec

# what stays on disk: for finer lists of knobs, or for whoever reads what the points wrote
SCORES, TEXTS = KEEPS = ("scores", "texts")


@dataclass(frozen=True)
class ScreenSpec:
    """What to screen and confirm on: `conf/screen.yaml`.

    select, confirm: splits. confirmations: how many points of the front are measured live.
    max_loss: the quality that a confirmed point may have lost on `select`, in the metric's unit;
    None: any. each_policy: confirm so many points of every policy's own front. timed_s: seconds of
    live decoding for the cost model; 0: nothing is timed, and no speed is predicted. batch:
    examples that are recorded at once, where the models decode batches. keep: "scores" of all
    texts, or all "texts" and of the scores the first 512 MiB a model. space: lists of
    values. guarantee: what to certify on `confirm`.
    """

    select: str
    confirm: str
    confirmations: int
    max_loss: float | None
    each_policy: bool
    timed_s: float
    batch: int
    space: list[str]
    keep: str = SCORES
    guarantee: GuaranteeSpec = field(default_factory=GuaranteeSpec)

    def __post_init__(self) -> None:
        require_choice("screen.keep", self.keep, KEEPS)
        require_whole("screen.confirmations", self.confirmations, 0)
        require_whole("screen.batch", self.batch, 1)
        require_finite("screen.timed_s", self.timed_s, 0)
        if self.max_loss is not None:
            require_finite("screen.max_loss", self.max_loss, 0)
        if not self.timed_s and self.confirmations:
            raise UserError(
                "points are confirmed by their predicted speed, and screen.timed_s=0 predicts none;"
                " set screen.confirmations=0, or give seconds"
            )
        if self.uses_confirm and canonical_split(str(self.select)) == canonical_split(
            str(self.confirm)
        ):
            raise UserError(
                f"screen.select and screen.confirm must be two splits, got {self.select!r} twice:"
                " points would be reported on the texts they were chosen on; change one of them"
            )

    @property
    def uses_confirm(self) -> bool:
        """Whether anything is measured or certified on `confirm`."""
        return bool(self.confirmations) or self.guarantee.loss is not None
