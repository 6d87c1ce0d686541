"""Where a dataset is, which of its columns are used, and how outputs are scored: the group
`dataset`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from bild_lab.engine.models.checkpoint.chat import ChatSettings, chat_text
from bild_lab.errors import UserError, require_whole
from bild_lab.lab.data.formats import plain_stem, suffix_of
from bild_lab.lab.data.rows import SPLIT_WORDS, canonical_split, split_of
from bild_lab.lab.metrics.programs import ANSWER
from bild_lab.lab.metrics.text_metrics import METRIC_NAMES, metric_named, needs_references
from bild_lab.lab.metrics.writing import Writing, require_language, require_tokenizer

if TYPE_CHECKING:
    from bild_lab.engine.models.checkpoint.checkpoint import Checkpoint

SHOT = "{source}\n{reference}\n\n"
REFERENCES = "references"
CHECKPOINT, ROLES = "checkpoint", {"user": "question", "assistant": "answer"}
# of a model's own template that writes questions without the spaces around them
TRIMMING = "checkpoint, trimming"
_COLUMNS = ("source_column", "input_column", "reference_column", "id_column", "category_column")


@dataclass(frozen=True)
class Template:
    """The prompt format of a chat model (BiTA Table 6).

    first_turn: contains {question}. next_turn: contains {answer}, to the previous turn, and then
    {question}; None: no turn can follow another. complete: they hold all special tokens, as a
    model's own template does; otherwise the tokenizer adds the start token. Raises UserError if a
    placeholder is missing, or if `first_turn` begins with a start token that the tokenizer adds.
    """

    first_turn: str = "{question}"
    next_turn: str | None = "\n{answer}\n{question}"
    complete: bool = False
    trims: bool = False

    def __post_init__(self) -> None:
        started_twice = self.first_turn.startswith("<s>") and not self.complete
        if "{question}" not in self.first_turn or started_twice:
            raise UserError(
                "dataset.chat_template must contain {question}, and not begin with <s>, which"
                f" the tokenizer adds, got {self.first_turn!r}"
            )
        if self.next_turn is not None and not re.search(
            r"\{answer\}.*\{question\}", self.next_turn, flags=re.DOTALL
        ):
            raise UserError(
                "dataset.next_turn_template must contain {answer} and then {question}, got"
                f" {self.next_turn!r}"
            )

    @property
    def around_answer(self) -> tuple[str, str]:
        """What comes between a turn and its answer, and behind that, with {question}.

        Raises UserError if no turn can follow another.
        """
        if self.next_turn is None:
            raise UserError(
                "the chat template writes a first turn otherwise once it is answered, so no question"
                " can follow it; give dataset.chat_template and next_turn_template as text"
            )
        between, _, question_template = self.next_turn.partition("{answer}")
        return between, question_template


def fill_template(template: str, **values: str) -> str:
    """The template with its placeholders replaced.

    Other braces, and braces in the values, are unchanged.
    """
    if not values:
        return template
    names = "|".join(map(re.escape, values))
    return re.sub("{(" + names + ")}", lambda match: values[match[1]], template)


@dataclass(kw_only=True, unsafe_hash=True)
class DatasetSpec:
    """Where a dataset is and which of its columns are used: the fields of `conf/dataset/*.yaml`.

    A `name` that is None becomes that of the data's file, folder or hub id. A `metric` that is None
    becomes agreement, if there are no references. `path` overrides `hub_id`. A column is a dotted
    path ("translation.de"), or a list of paths: the first one that a row has is used, but of
    `reference_column` all are. `chat_template` and `next_turn_template` belong to a chat model, as
    in `conf/template/*.yaml`; `for_model` writes a model's own as [checkpoint, TEXT]. Raises
    UserError for values that no dataset can satisfy.
    """

    # what tables and logs call the dataset; null: the name of the file, folder or hub id
    name: str | None
    hub_id: str | None = None  # of the Hugging Face hub
    hub_config: str | None = None  # the configuration of a dataset of the hub, such as de-en
    hub_data_dir: str | None = None  # a folder, or one file, inside a dataset of the hub
    hub_revision: str | None = None  # branch, tag or commit of the hub
    # a folder or a file (.jsonl .json .csv .tsv .parquet .arrow, also compressed), in place of the
    # hub; toy:corpus is shipped
    path: str | None = None
    # train, validation, test, or another split of the dataset; null: of a file that its name says,
    # else test
    split: str | None = "test"
    skip: int = 0  # rows before the first, such as those that chose the thresholds
    limit: int | None = None  # so many rows only, at least 1; null: all
    # the text to decode from; of a list the turns of a conversation, of messages {"role",
    # "content"} or {"from", "value"} the questions. Columns: a name, a.b for a field inside one, or
    # a list of which the first one that a row has is taken
    source_column: Any
    input_column: Any = None  # for {input} of the prompt, else below the source
    # a text, a number, or a list of them; of several columns all are references; null:
    # dataset.metric=agreement
    reference_column: Any = None
    id_column: Any = None  # null: examples are numbered
    category_column: Any = None  # the dataset's own division; reports have a table by it
    categories: Any = None  # only the rows of these, a name or a list; null: all
    # states the task, with {source} in it; empty: the begin-of-text token alone, for unconditional
    # generation
    prompt_template: str = "{source}"
    # holds {question}; with several, each question is asked in all; checkpoint: as the model's
    # tokenizer writes turns
    chat_template: Any = "{question}"
    # of chat_template=checkpoint: the day for templates that write the date, such as 2026-01-01,
    # which null means
    chat_template_date: str | None = None
    # of chat_template=checkpoint: what its template is told, such as {enable_thinking: false}
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict, hash=False)
    # holds {answer}, to the turn before, and then {question}; null: no turn can follow another
    next_turn_template: str | None = Template.next_turn
    turns: int | None = 1  # how many turns of a conversation, at least 1; null: all
    # a file or folder with columns `id` and `answer`, which later turns continue; references: the
    # dataset's own answers
    history: str | None = None
    # bleu, chrf, ter (as 100 minus TER), rouge1, rouge2, rougeL (or rouge), rougeLsum (by
    # sentences), exact_match, numeric (the last number), pass_at_1 (of programs),
    # evaluate:NAME_OR_PATH, or without references: agreement (the share of texts that are the
    # baseline's own), log_probability (of each token, by the target, in nats), length (tokens of a
    # text); null: agreement
    metric: str | None
    metrics: Any = None  # several at once, of which the first leads; null: metric alone
    # the words of bleu and rouge. bleu: 13a, intl, zh, ja-mecab, ko-mecab, char, none, flores200,
    # of sacrebleu; rouge: ascii, unicode, zh, ja-mecab, ko-mecab, char; null: by the language
    tokenize: str | None = None
    # of the references: en, de, zh-CN and so on; it chooses the words and a decimal comma; null:
    # pair.target_language, else by the script of the references
    language: str | None = None
    # stop strings of the task, which decoding.stop takes: a text ends before the first of them
    cut: Any = None
    # a reference made of columns, {NAME} each; pass_at_1 wants a program with its tests, and
    # {answer} for the output
    reference_template: str | None = None
    shots: int = 0  # how many solved examples come before every question
    shot_split: str = "train"  # the first examples of this split; it must be another one than split
    shot_template: str = SHOT  # of a solved example; must hold both
    # a longer prompt loses the end of its source, at least 1; null: never
    max_source_tokens: int | None = None

    def __post_init__(self) -> None:
        for key in (*_COLUMNS, "categories", "metrics", "cut"):
            setattr(self, key, _names(key, getattr(self, key)))
        for key in ("limit", "max_source_tokens", "turns"):
            if getattr(self, key) is not None:
                require_whole(
                    f"dataset.{key}", getattr(self, key), 1, remedy="use null for no limit"
                )
        require_whole("dataset.skip", self.skip, 0)
        require_whole("dataset.shots", self.shots, 0)
        self._set_chat_template()
        if self.name is None:
            self.name = _name_of(self.path, self.hub_id)
        if self.split is None:
            file = PurePath(self.path or "")
            file_split = split_of(PurePath(file.name), "test") if suffix_of(file) else None
            self.split = file_split or "test"
        lead = self.metrics[0] if self.metrics else self.metric
        self.metric = lead if lead or self.has_references else "agreement"
        self._require_prompt()
        self._require_metrics()
        self._require_rows()
        self._require_shots()

    def _set_chat_template(self) -> None:
        """Make one template a tuple of one. Raises UserError for other values, and for settings of a
        model's own template beside another one.
        """
        one_or_several = self.chat_template
        templates = (one_or_several,) if isinstance(one_or_several, str) else one_or_several or ()
        templates = tuple(templates)
        if not templates or not all(isinstance(template, str) for template in templates):
            raise UserError(
                f"dataset.chat_template must be text or several texts, got {one_or_several!r}"
            )
        self.chat_template = templates
        if templates != (CHECKPOINT,):
            _ = self.templates  # refuses
            _require(
                self.chat_template_date is None and not self.chat_template_kwargs,
                "chat_template_date and chat_template_kwargs have an effect on a model's own chat"
                " template alone; set template=chat, or leave them out",
            )
        _ = self.chat  # refuses

    def _require_prompt(self) -> None:
        _require(self.split, "split must name a split (train, validation, test), got an empty one")
        # reading a path shows its columns, which the message can then name
        _require(
            self.source_column or self.path,
            "source_column must name the column to decode from, got none",
        )
        prompt_template = self.prompt_template or ""
        _require(
            "{source}" in prompt_template or not prompt_template,
            "prompt_template must contain {source}, or be empty for unconditional generation,"
            f" got {prompt_template!r}",
        )
        _require(
            "{input}" not in prompt_template or self.input_column,
            f"prompt_template holds {{input}}, got {prompt_template!r}; set dataset.input_column, or"
            " leave it out",
        )

    def _require_metrics(self) -> None:
        _require(self.metric, f"metric must be one of {METRIC_NAMES}, got none")
        _require(
            len(set(self.scored)) == len(self.scored),
            f"metrics must be different ones, got {self.scored}",
        )
        for metric in self.scored:
            metric_named(metric)
        require_tokenizer(self.tokenize, self.scored)
        require_language(self.language)
        judged = [metric for metric in self.scored if needs_references(metric)]
        remedy = "set dataset.reference_column, or use dataset.metric=agreement"
        _require(
            self.has_references or not judged, f"metric={self.metric} needs references: {remedy}"
        )
        _require(
            self.turns == 1 or not judged,
            f"turns after the first have no references, which metric={self.metric} needs; set"
            " dataset.turns=1, or dataset.metric=agreement",
        )
        _require(
            "pass_at_1" not in judged or (self.reference_template or "").count(ANSWER) == 1,
            f"metric=pass_at_1 needs dataset.reference_template, a program that holds {ANSWER}"
            f" once, got {self.reference_template!r}; conf/dataset/humaneval.yaml has one",
        )

    def _require_rows(self) -> None:
        _require(
            self.max_source_tokens is None or self.turns == 1,
            "max_source_tokens cuts the source of a first turn, and later turns need whole ones, "
            f"got {self.max_source_tokens}; set dataset.max_source_tokens=null or dataset.turns=1",
        )
        _require(
            self.path or self.hub_id, f"path=DIR or dataset.hub_id must be set for {self.name!r}"
        )
        _require(
            self.category_column or not self.categories,
            f"categories={self.categories} needs the column that has them: set"
            " dataset.category_column",
        )

    def _require_shots(self) -> None:
        if not self.shots:
            return
        shot_template = self.shot_template or ""
        _require(
            "{source}" in shot_template and "{reference}" in shot_template,
            f"shot_template must hold {{source}} and {{reference}}, got {self.shot_template!r}",
        )
        _require(
            "{input}" not in shot_template or self.input_column,
            f"shot_template holds {{input}}, got {shot_template!r}; set dataset.input_column, or"
            " leave it out",
        )
        _require(
            "{input}" in shot_template or "{input}" not in (self.prompt_template or ""),
            "shot_template must hold {input}, as prompt_template does, got"
            f" {self.shot_template!r}",
        )
        _require(
            canonical_split(self.shot_split or "") != canonical_split(self.split),
            f"shot_split must be another split than dataset.split, got {self.split!r} twice: the"
            " prompt would show the answers",
        )
        _require(
            self.reference_column,
            f"shots={self.shots} needs answers to show: set dataset.reference_column",
        )

    @property
    def scored(self) -> tuple[str, ...]:
        """The metrics; the first leads."""
        return tuple(self.metrics) if self.metrics else (self.metric,)

    def writing(self, target_language: str | None) -> Writing:
        """How the references are written. target_language: of a translation model."""
        return Writing(self.tokenize, self.language or target_language)

    @property
    def chat(self) -> ChatSettings:
        """What the model's own chat template is told."""
        return ChatSettings(self.chat_template_date, self.chat_template_kwargs)

    @property
    def has_references(self) -> bool:
        return bool(self.reference_column or self.reference_template)

    @property
    def templates(self) -> tuple[Template, ...]:
        """The templates; every question is asked once with each.

        Those of a checkpoint are known after `for_model`.
        """
        is_own, trims = self.has_own_template, self.chat_template[0] == TRIMMING
        return tuple(
            Template(first_turn, self.next_turn_template, complete=is_own, trims=trims)
            for first_turn in (self.chat_template[1:] if is_own else self.chat_template)
        )

    @property
    def has_own_template(self) -> bool:
        """Whether the template is the model's own, which writes all special tokens itself."""
        return self.chat_template[0] in (CHECKPOINT, TRIMMING) and len(self.chat_template) > 1


def for_model(spec: DatasetSpec, checkpoint: Checkpoint) -> DatasetSpec:
    """The dataset with the model's own chat template as text, where `chat_template` is
    `checkpoint`.

    Raises UserError for a tokenizer without one, and, for later turns, one whose turns do not
    continue each other.
    """
    if spec.chat_template != (CHECKPOINT,):
        return spec
    first_turn, next_turn, trims = own_template(checkpoint, spec.chat)
    if not next_turn and spec.turns != 1:
        raise UserError(
            f"the chat template of {checkpoint.path} writes a first turn otherwise once it is"
            " answered, so later turns cannot continue it; set dataset.turns=1, or give"
            " dataset.chat_template and next_turn_template as text"
        )
    texts = {
        "chat_template": (TRIMMING if trims else CHECKPOINT, first_turn),
        "next_turn_template": next_turn or None,
    }
    # they are in these texts
    return replace(spec, **texts, chat_template_date=None, chat_template_kwargs={})


def own_template(checkpoint: Checkpoint, chat: ChatSettings) -> tuple[str, str | None, bool]:
    """A tokenizer's chat template as the texts of `Template`, and whether it trims questions; None
    for later turns that do not continue the first.

    The system prompt is the template's own. What it does to the target's own answers
    `answer_in_history` says; those of `history` and of a conversation stay as they are.
    """
    tokenizer = checkpoint.tokenizer
    if tokenizer.chat_template is None:
        raise UserError(
            f"dataset.chat_template={CHECKPOINT}: the tokenizer of {checkpoint.path} has no chat"
            " template; give another, such as template=vicuna_short, or leave it out for a model"
            " that was not trained to chat"
        )
    question, answer = ({"role": role, "content": f"{{{text}}}"} for role, text in ROLES.items())
    one_turn, two_turns = (
        chat_text(tokenizer, checkpoint.path, turns, chat, warns=False)
        for turns in ([question], [question, answer, question])
    )
    next_turn = two_turns.removeprefix(one_turn) if two_turns.startswith(one_turn) else None
    apart = {**question, "content": f"\n\t {question['content']} \t\n"}
    trims = chat_text(tokenizer, checkpoint.path, [apart], chat, warns=False) == one_turn
    return one_turn, next_turn, trims


def _require(ok: object, message: str) -> None:
    if not ok:
        raise UserError(f"dataset.{message}")


def _name_of(path: str | None, hub_id: str | None) -> str:
    """The name of data without one: that of the file or folder, or of the folder of a file named
    after its split.
    """
    if not path:
        return (hub_id or "local").rpartition("/")[2]
    location = Path(path).expanduser().resolve()
    stem = plain_stem(location) if suffix_of(location) else location.name
    return location.parent.name if stem.lower() in SPLIT_WORDS else stem


def _names(field: str, names_value: object) -> tuple[str, ...] | None:
    """One or several names as a tuple. Raises UserError for anything else."""
    if names_value is None:
        return None
    names = [names_value] if isinstance(names_value, str) else names_value
    if (
        not isinstance(names, Sequence)
        or not names
        or not all(isinstance(name, str) and name for name in names)
    ):
        raise UserError(f"dataset.{field} must be a name or a list of names, got {names_value!r}")
    return tuple(names)
