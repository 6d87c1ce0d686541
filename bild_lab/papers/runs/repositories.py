"""The hub's repositories that commands read: whether their weights are pickles, who may read them, and
the commits that they are pinned to.

The hub itself is asked where it can be reached, else `hub.yaml` answers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from bild_lab import files
from bild_lab.errors import UserError, first_line
from bild_lab.lab.config.compose import config_dir
from bild_lab.papers.runs.paper_runs import hub

ASK_TIMEOUT_S = 5.0  # for a repository
CARD_PICKLES = "pickle"  # of `format` in hub.yaml
LICENCE = "accept the terms on its page, then hf auth login"
MODEL_KEYS = {  # of a configuration: the path of a model, and its revision
    "pair.target": "pair.target_revision",
    "model.path": "model.revision",
    "unaligned.path": "unaligned.revision",
}
DRAFT_KEYS = {
    "pair.draft": "pair.draft_revision",
    "pair.second_draft": "pair.second_draft_revision",
}


@dataclass(frozen=True)
class Repository:
    """A repository that a command reads.

    kind: models or datasets. revision: a branch, tag or commit; None: the main branch.
    allow_pickles: the command may read its weights from pickles.
    """

    kind: str
    name: str
    revision: str | None = None
    allow_pickles: bool = False

    @property
    def key(self) -> str:
        """Its key in `pins.yaml`."""
        return self.name if self.revision is None else f"{self.name}@{self.revision}"

    @property
    def pin(self) -> Mapping[str, str] | None:
        """What it is pinned to; None without a pin."""
        return files.pin_of(self.kind, self.name, self.revision)


@dataclass(frozen=True)
class RepositoryState:
    """What is known of a repository. pickled: its weights are in pickles alone. gated: it wants consent.

    readable: whether this login may read it; None: it was not asked. asked: the hub says all this,
    and not a card of `hub.yaml`.
    """

    pickled: bool
    gated: bool
    readable: bool | None
    asked: bool


def repositories_in(
    configurations: Iterable[DictConfig], policies: Sequence[str]
) -> tuple[Repository, ...]:
    """Those that a command with these configurations reads, each once.

    policies: that it decodes with; a pair's drafters are read if one of them drafts with a model.
    """
    read = [repository for cfg in configurations for repository in _in_configuration(cfg, policies)]
    return tuple(dict.fromkeys(read))


def _in_configuration(cfg: DictConfig, policies: Sequence[str]) -> Iterator[Repository]:
    from bild_lab.engine.models.checkpoint.checkpoint import Checkpoint  # late: it loads torch

    allowed = OmegaConf.select(cfg, "runtime.allow_pickles") is True
    drafting = any(map(drafts_with_a_model, policies))
    for path_key, revision_key in (MODEL_KEYS | (DRAFT_KEYS if drafting else {})).items():
        path = OmegaConf.select(cfg, path_key)
        if isinstance(path, str) and Checkpoint(path).on_hub:
            yield Repository("models", path, OmegaConf.select(cfg, revision_key), allowed)
    tokenizer = OmegaConf.select(cfg, "model.tokenizer")
    if isinstance(tokenizer, str) and Checkpoint(tokenizer).on_hub:
        yield Repository("models", tokenizer, allow_pickles=True)  # no weights are read
    dataset = cfg.get("dataset")
    if dataset is not None and dataset.get("hub_id") and not dataset.get("path"):
        yield Repository("datasets", dataset.hub_id, dataset.get("hub_revision"))


@cache
def drafts_with_a_model(policy: str) -> bool:
    """Whether a policy needs a small model, as the second line of its file says; true for a user's
    own policy.
    """
    file = config_dir() / "policy" / f"{policy}.yaml"
    if not file.is_file():
        return True
    cells = file.read_text(encoding="utf-8").splitlines()[1].split(" | ")
    return any(cell.startswith("needs:") and "draft" in cell for cell in cells)


def known_repositories() -> list[Repository]:
    """Every repository that an experiment of the project reads."""
    known = [
        Repository("models", name) for name in hub()["models"] if not name.startswith("outputs/")
    ]
    for file in sorted((config_dir() / "dataset").glob("*.yaml")):
        dataset = yaml.safe_load(file.read_text(encoding="utf-8"))
        if dataset.get("hub_id"):
            known.append(Repository("datasets", dataset["hub_id"], dataset.get("hub_revision")))
    return list(dict.fromkeys(known))


def state_of(repository: Repository) -> RepositoryState:
    """What the hub says of a repository at the commit that is read, or its card where the hub
    cannot be asked.
    """
    pin = repository.pin
    revision = repository.revision if pin is None else pin["revision"]
    if hub_is_reachable():
        state = _state_on_hub(repository.kind, repository.name, revision)
        if state is not None:
            return state
    card = hub()[repository.kind].get(repository.name, {})
    # cards are of the main branch
    on_main = repository.revision is None and (pin is None or "branch" not in pin)
    pickled = on_main and card.get("format") == CARD_PICKLES
    return RepositoryState(pickled, bool(card.get("gated")), readable=None, asked=False)


@cache
def hub_is_reachable() -> bool:
    """Whether the hub answers; the first call takes up to two seconds."""
    from bild_lab.engine.models.checkpoint.hub import hub_problem  # late: it loads torch

    return hub_problem() is None


@cache
def _state_on_hub(kind: str, name: str, revision: str | None) -> RepositoryState | None:
    """What the hub says; None if it does not answer, or has no such repository for this login."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, HTTPError

    from bild_lab.engine.models.checkpoint.weight_files import is_pickled, opened_weight_file

    repo_type = kind.removesuffix("s")
    try:
        info = HfApi().repo_info(
            name, repo_type=repo_type, revision=revision, timeout=ASK_TIMEOUT_S
        )
    except GatedRepoError:
        return RepositoryState(pickled=False, gated=True, readable=False, asked=True)
    except (HTTPError, OSError):
        return None
    weights = opened_weight_file([file.rfilename for file in info.siblings or ()])
    readable = None
    if info.gated:
        try:
            HfApi().auth_check(name, repo_type=repo_type)
            readable = True
        except GatedRepoError:
            readable = False
        except (HTTPError, OSError):  # the hub is in trouble, which says nothing of the login
            readable = None
    pickled = kind == "models" and weights is not None and is_pickled(weights)
    return RepositoryState(pickled, bool(info.gated), readable, asked=True)


def blocked_by_repositories(
    repositories: Iterable[Repository], logged_in: bool, tries: bool
) -> str | None:
    """Why a command that reads these repositories cannot run, and what to do; None if it can.

    logged_in: there is a token of the hub, which counts where the hub cannot be asked. tries: what
    only a card says does not count.
    """
    for repository in repositories:
        state = state_of(repository)
        if tries and not state.asked:
            continue
        if not may_read(state, logged_in):
            return f"gated: {repository.name} may not be read with this login; {LICENCE}"
        if state.pickled and not repository.allow_pickles:
            return (
                f"{repository.name} has its weights in pickles alone: add"
                " runtime.allow_pickles=true, or pin a branch that has safetensors: python"
                f" scripts/paper_run.py pins {repository.name}=refs/pr/NUMBER"
            )
    return None


def may_read(state: RepositoryState, logged_in: bool) -> bool:
    """Whether the files of a repository can be read. logged_in: there is a token of the hub."""
    if not state.gated:
        return True
    return logged_in if state.readable is None else state.readable


def unpinned(repositories: Iterable[Repository]) -> list[Repository]:
    """Those without a pin, each once."""
    by_key = {(repository.kind, repository.key): repository for repository in repositories}
    return [repository for repository in by_key.values() if repository.pin is None]


def pin(branches: Mapping[Repository, str | None]) -> tuple[dict[str, str], dict[str, str]]:
    """Pin repositories to the hub's commits of today, in `pins.yaml`.

    branches: what is read in place of the revision that a command names; None: that one. Returns
    the commits of those that are pinned now, and why others are not, by their keys. Raises OSError
    if the file cannot be written.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HTTPError

    text = files.PINS.read_text(encoding="utf-8")
    pins: dict[str, dict[str, Any]] = yaml.load(text, yaml.BaseLoader)
    pinned: dict[str, str] = {}
    failed: dict[str, str] = {}
    for repository, branch in branches.items():
        try:
            info = HfApi().repo_info(
                repository.name,
                repo_type=repository.kind.removesuffix("s"),
                revision=branch or repository.revision,
                timeout=ASK_TIMEOUT_S,
            )
        except (HTTPError, OSError) as error:
            failed[repository.key] = first_line(error)
            continue
        entry = {"revision": info.sha, "date": f"{datetime.now(UTC):%Y-%m-%d}"}
        if branch is not None:
            entry["branch"] = branch
        pins[repository.kind][repository.key] = entry
        pinned[repository.key] = info.sha
    if pinned:
        head = "".join(line for line in text.splitlines(keepends=True) if line.startswith("#"))
        files.write_atomically(files.PINS, (head + yaml.safe_dump(pins)).encode())
        files.forget_pins()
    return pinned, failed


def named_repositories(words: Sequence[str]) -> dict[Repository, str | None]:
    """What the words of `paper_run.py pins` name: ID, or ID=BRANCH; all without words.

    Raises UserError for an id that no experiment reads.
    """
    known = known_repositories()
    if not words:
        return dict.fromkeys(known)
    named = dict(word.partition("=")[::2] for word in words)
    if unknown := named.keys() - {repository.name for repository in known}:
        raise UserError(
            f"no experiment reads {', '.join(sorted(unknown))}; see bild_lab/papers/runs/hub.yaml"
        )
    return {
        repository: named[repository.name] or None
        for repository in known
        if repository.name in named
    }
