"""A checkpoint in a folder or on the hub: small files are read first, weights only on request."""

from __future__ import annotations

import copy
import hashlib
import os
import pickle
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from operator import index
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi, try_to_load_from_cache
from huggingface_hub.errors import HTTPError
from safetensors import SafetensorError
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers import __version__ as transformers_version
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from bild_lab.engine.models.checkpoint.chat import (
    ChatSettings,
    chat_text,
    end_of_answer,
    lacks_special_tokens,
)
from bild_lab.engine.models.checkpoint.hub import (
    hub_problem,
    no_conversion_service,
    no_progress_bars,
    note_commit,
    require_hub,
)
from bild_lab.engine.models.checkpoint.pieces import METASPACE, Pieces, piece_of, prompt_tokens
from bild_lab.engine.models.checkpoint.tokenizer_file import (
    TOKENIZER_JSON,
    cut_alike,
    default_tokens,
    may_be_rebuilt,
    set_prefix_space,
)
from bild_lab.engine.models.checkpoint.weight_files import (
    INDEX_SUFFIX,
    holds_weights,
    in_folder,
    is_pickled,
    named_in_config,
    require_no_adapter,
    require_weights,
)
from bild_lab.engine.models.checkpoint.weights import StoredWeights
from bild_lab.engine.request import Source
from bild_lab.errors import UserError, first_line, require_unicode, warn_once
from bild_lab.files import file_digest, pin_of, shipped_folder

PICKLE_REMEDY = (
    "set runtime.allow_pickles=true to read tensors from them, and nothing else, or give a revision"
    " that has safetensors, or save them anew with Transformers: AutoModelForCausalLM or"
    " AutoModelForSeq2SeqLM, .from_pretrained(DIR).save_pretrained(NEW_DIR)"
)
REMOTE_CODE = (
    "runs Python code of its own; look at it first, then set runtime.trust_remote_code=true"
)
HUB_REMEDY = (
    "check its name, its revision and your access (`hf auth login`), repeat the command where a"
    " download broke off, or give a local folder in Hugging Face layout with safetensors weights"
)
IN_A_LAYER = re.compile(r"\.\d+(\.|$)")  # a module's name, of or within a numbered one
# in files of the first T5s: of the distances between the decoder and its source, which none reads
UNREAD_BIAS = "EncDecAttention.relative_attention_bias.weight"
TOKENIZER_FILE = re.compile(r"token|vocab|tekken|\.model$")
# a training's log files: times and paths, no effect on the weights
ACCOUNTS = ("README.md", "metrics.json")
Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]


@dataclass(frozen=True)
class FileStamp:
    """A file as it was: its number in the file system, its size in bytes, its time in ns."""

    file: Path
    inode: int
    size: int
    changed_ns: int

    @classmethod
    def of(cls, file: Path) -> FileStamp:
        status = file.stat()
        return cls(file, status.st_ino, status.st_size, status.st_mtime_ns)

    def overwritten(self) -> bool:
        """Whether the same file has another content now."""
        try:
            now = FileStamp.of(self.file)
        except OSError:  # it is gone: who has opened it still has it
            return False
        return now.inode == self.inode and now != self


@dataclass(frozen=True)
class Checkpoint:
    """A model's files.

    path: a folder, a hub id, toy:large or toy:small.
    revision: a branch, tag or commit on the hub; one that `pins.yaml` pins is read at its commit.
    trust_remote_code: run Python code that comes with the checkpoint; without it such a checkpoint
        is refused.
    allow_pickles: where there are no safetensors, read tensors, and nothing else, from pickles
        (PyTorch's `weights_only`); without it such a checkpoint is refused.
    """

    path: str
    revision: str | None = None
    trust_remote_code: bool = False
    allow_pickles: bool = False

    @property
    def location(self) -> str:
        """The folder or hub id to read from."""
        return str(Path(shipped_folder(self.path)).expanduser())

    @property
    def in_folder(self) -> bool:
        return Path(self.location).is_dir()

    @property
    def on_hub(self) -> bool:
        """Whether the path can only be a hub id."""
        named_as_folder = self.path.startswith(("/", ".", "~")) or self.path.count("/") > 1
        return not self.in_folder and not named_as_folder

    @property
    def switches(self) -> tuple[str, ...]:
        """What a command that is to read it must also say."""
        return ("runtime.allow_pickles=true",) if self.allow_pickles else ()

    @property
    def pin(self) -> Mapping[str, str] | None:
        """The commit and date that the revision is pinned to on the hub; None without a pin."""
        return pin_of("models", self.path, self.revision) if self.on_hub else None

    @property
    def commit(self) -> str | None:
        """What is read from the hub: the pinned commit, or the revision as it was given."""
        return self.revision if (pin := self.pin) is None else pin["revision"]

    @cached_property
    def config(self) -> PreTrainedConfig:
        return self._read("configuration", AutoConfig, trust_remote_code=self.trust_remote_code)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The checkpoint's own tokenizer: what its tokenizer.json says.

        Transformers 5 takes vocabulary and merges alone from that file where it knows a class for
        the architecture, and the rules that cut a text from the class. Of tokenizers that mark
        languages and of those with code of their own the class counts.
        """
        try:
            tokenizer = self._read(
                "tokenizer", AutoTokenizer, trust_remote_code=self.trust_remote_code
            )
        except TypeError:  # the class is of another kind than the file, or code of its own fails
            if self.trust_remote_code or not (self.files / TOKENIZER_JSON).is_file():
                raise
            return self._read("tokenizer", PreTrainedTokenizerFast)
        if not may_be_rebuilt(tokenizer) or not (self.files / TOKENIZER_JSON).is_file():
            return tokenizer
        file_tokenizer = self._read("tokenizer", PreTrainedTokenizerFast)
        set_prefix_space(file_tokenizer, tokenizer)
        alike = cut_alike(tokenizer, file_tokenizer)
        if not alike and (added := default_tokens(file_tokenizer, tokenizer, self.files)):
            file_tokenizer = self._read("tokenizer", PreTrainedTokenizerFast, **added)
            set_prefix_space(file_tokenizer, tokenizer)
            alike = cut_alike(tokenizer, file_tokenizer)
        if alike:
            return tokenizer
        warn_once(
            f"{self.path}: texts are cut into tokens, and tokens joined, as its {TOKENIZER_JSON}"
            f" says; AutoTokenizer of transformers takes it for a {type(tokenizer).__name__}, which"
            " does so otherwise"
        )
        return file_tokenizer

    @cached_property
    def generation(self) -> GenerationConfig:
        try:
            if not self.in_folder or (Path(self.location) / "generation_config.json").is_file():
                return self._read("generation settings", GenerationConfig)
        except UserError:
            if self.in_folder:
                raise
        # older checkpoints have no such file
        return GenerationConfig.from_model_config(self.config)

    def check(self) -> None:
        """Raise UserError unless the small files exist and fit together, and the weights are safe
        to read.
        """
        _ = self.vocabulary
        for token in sorted(self.end_tokens):
            self.require_row(token, "an end token")
        self._require_weights()
        if self.encoder_decoder:
            self.require_row(self.decoder_start, "the decoder's start token")

    def require_row(self, token: int, what: str, rows: int | None = None) -> None:
        """Raise UserError for a token without an embedding. rows: how many there are; None: the
        decoder's.
        """
        rows = self.rows if rows is None else rows
        if 0 <= token < rows:
            return
        piece = piece_of(self.tokenizer, token) if token >= 0 else None
        named = "" if piece is None else f" ({piece!r})"
        raise UserError(
            f"{what} must be from 0 to {rows - 1}, as {self.path} has {rows} embeddings, got"
            f" {token}{named}; resize the model's embeddings to its tokenizer"
            " (resize_token_embeddings) and save both, or take both from one checkpoint"
        )

    def require_rows(self, source: Source) -> None:
        """Raise UserError for a source with a token that the model has no embedding for."""
        for token in {min(source.prompt), max(source.prompt)}:
            self.require_row(token, "the tokens of a prompt")
        if source.encoder_ids is not None:
            for token in {int(source.encoder_ids.min()), int(source.encoder_ids.max())}:
                self.require_row(token, "the tokens of a prompt", self.source_rows)

    def _require_weights(self) -> None:
        """Raise UserError unless there are weights that Transformers reads, all of them, and safe
        to read.
        """
        if not (names := self._file_names):
            return
        weight_file = require_weights(self.path, names, named_in_config(self.files / "config.json"))
        if is_pickled(weight_file) and not self.allow_pickles:
            raise UserError(
                f"{self.path} has {weight_file} and no safetensors weights; {PICKLE_REMEDY}"
            )
        if not self.in_folder:
            return
        folder = Path(self.location)
        if missing := [name for name in in_folder(folder) if not (folder / name).is_file()]:
            raise UserError(
                f"{self.path} lacks {missing[0]}, which its {weight_file} lists; copy it from where"
                f" the model came from, or remove {weight_file} if the weights are in another file"
            )

    @cached_property
    def _file_names(self) -> Sequence[str]:
        """The files of the folder or the hub's repository; none for a hub that cannot be asked."""
        if self.in_folder:
            return os.listdir(self.location)
        if self.on_hub and hub_problem() is None:
            with suppress(HTTPError, OSError, ValueError):  # the configuration came from the cache
                return HfApi().list_repo_files(self.location, revision=self.commit)
        return []

    @property
    def encoder_decoder(self) -> bool:
        return bool(self.config.is_encoder_decoder)

    @property
    def auto_class(
        self,
    ) -> type[AutoModelForCausalLM | AutoModelForSeq2SeqLM | AutoModelForImageTextToText]:
        """The class of Transformers that builds the model."""
        return auto_class_of(self.config)

    @property
    def depth(self) -> int:
        """How many decoder layers the model has."""
        return decoder_depth(self.config)

    @cached_property
    def vocabulary(self) -> dict[str, int]:
        return self.tokenizer.get_vocab()

    @cached_property
    def rows(self) -> int:
        """How many tokens the decoder embeds."""
        # models whose encoder has another vocabulary say so
        decoder_rows = getattr(self.config, "decoder_vocab_size", None)
        return decoder_rows or self.config.get_text_config(decoder=True).vocab_size

    @property
    def columns(self) -> int:
        """How many scores the head gives."""
        return self.rows

    @cached_property
    def source_rows(self) -> int:
        """How many tokens the encoder embeds; of a decoder-only model, how many a prompt may
        have.
        """
        source_rows = getattr(self.config, "src_vocab_size", None)  # FSMT's
        encoder_rows = getattr(self.config.get_text_config(encoder=True), "vocab_size", None)
        return source_rows or encoder_rows or self.rows

    @cached_property
    def one_vocabulary(self) -> bool:
        """Whether an id is the same token in a prompt as in an answer. Marian and FSMT models may
        have a vocabulary for each language.
        """
        if not self.encoder_decoder:
            return True
        if self.source_rows != self.rows:
            return False
        return self.tokenizer.is_fast or all(
            piece_of(self.tokenizer, token) == piece for piece, token in self.vocabulary.items()
        )

    @cached_property
    def ids_without_token(self) -> tuple[int, ...]:
        """The ids that have a score and no token, as in models padded beyond their tokenizer.

        Nobody can read such an id, so no text has one: its score is −inf in every forward. End
        tokens are known.
        """
        known = {*self.vocabulary.values(), *self.end_tokens}
        spare = [token for token in range(self.columns) if token not in known]
        return tuple(
            token
            for token in spare
            if token >= self.rows or piece_of(self.tokenizer, token) is None
        )

    @cached_property
    def silent_special_tokens(self) -> dict[str, int]:
        """The special tokens that no text shows, by their names; without the one for unknown
        text.
        """
        added, unknown = self.tokenizer.get_added_vocab(), self.tokenizer.unk_token_id
        decode = self.tokenizer.decode
        return {
            piece: token
            for piece, token in added.items()
            if token != unknown and decode([token], skip_special_tokens=True) == ""
        }

    @cached_property
    def pieces(self) -> Pieces:
        """What each token writes."""
        return Pieces(self.tokenizer)

    @cached_property
    def end_tokens(self) -> frozenset[int]:
        configured = getattr(self.config.get_text_config(decoder=True), "eos_token_id", None)
        for ids in (self.generation.eos_token_id, configured, self.tokenizer.eos_token_id):
            if ids is not None:
                return frozenset([ids] if isinstance(ids, int) else ids)
        return frozenset()

    @cached_property
    def _unknown_end(self) -> str | None:
        """The special token that the chat template writes after an answer, if it is no end token."""
        if self.tokenizer.chat_template is None:
            return None
        answer_end = end_of_answer(self.tokenizer, self.path, ChatSettings()).lstrip()
        ids = self.tokenizer(answer_end, verbose=False, add_special_tokens=False)["input_ids"]
        pieces = {token: piece for piece, token in self.silent_special_tokens.items()}
        return pieces.get(ids[0]) if ids and ids[0] not in self.end_tokens else None

    def warn_of_unknown_end(self, stop: Sequence[str]) -> None:
        """Warn, for texts in the checkpoint's own chat template, where answers end with a token that
        is no end token and none of these stop strings.
        """
        if self._unknown_end not in (None, *stop):
            warn_once(
                f"{self.path}: its chat template ends an answer with {self._unknown_end}, which is no"
                " end token, so that texts go on behind their answers; set"
                f" decoding.stop=['{self._unknown_end}'], or add its id to eos_token_id in"
                " generation_config.json"
            )

    @property
    def decoder_start(self) -> int:
        configured = getattr(self.config, "decoder_start_token_id", None)
        named = (self.generation.decoder_start_token_id, configured)
        # T5Gemma begins with the begin-of-text token, as `generate` does where no other is named
        for token in (*named, self.generation.bos_token_id):
            if token is not None:
                return token
        raise UserError(
            f"{self.path} names no decoder_start_token_id; add it to its generation_config.json"
        )

    def prompt_length(self, prompt: Prompt) -> int:
        """How many tokens the model reads of a prompt."""
        return self.source(prompt).length

    def source(self, prompt: Prompt, max_tokens: int | None = None) -> Source:
        """The prompt as token ids, at most max_tokens of them.

        prompt: text, to which the tokenizer's special tokens are added unless it is a
        `CompleteText`, an empty one the begin-of-text token alone; token ids, taken as they are; or
        messages ("role", "content") for the tokenizer's chat template. Raises UserError for a
        prompt without tokens, for a token without an embedding, for text that is no Unicode, and
        for messages without a template.
        """
        limit = {} if max_tokens is None else {"truncation": True, "max_length": max_tokens}
        if isinstance(prompt, str):
            require_unicode("a prompt", prompt)
            (ids,) = prompt_tokens(self.tokenizer, [prompt], **limit)
        elif prompt and isinstance(prompt[0], Mapping):
            ids = self.chat_tokens(prompt, ChatSettings())[:max_tokens]
        else:
            ids = _token_ids(prompt)[:max_tokens]
        if not ids:
            raise UserError(f"the prompt {prompt!r} has no tokens; a model needs at least one")
        for token in (min(ids), max(ids)):
            self.require_row(token, "the tokens of a prompt", self.source_rows)
        if self.encoder_decoder:
            return Source(
                prompt=(self.decoder_start,),
                encoder_ids=torch.tensor([ids]),
                one_vocabulary=self.one_vocabulary,
            )
        if isinstance(prompt, str) and lacks_special_tokens(prompt) and self._ends_prompts:
            remedy = f"take it out of the post_processor in its {TOKENIZER_JSON}"
            if getattr(self.tokenizer, "add_eos_token", False):
                remedy = "set add_eos_token to false in its tokenizer_config.json"
            warn_once(
                f"{self.path}: its tokenizer writes an end token behind every prompt, as for a"
                f" training, so that texts may be empty or begin anew; {remedy}"
            )
        return Source(prompt=tuple(ids))

    @cached_property
    def _ends_prompts(self) -> bool:
        """Whether the tokenizer takes a prompt for a whole text."""
        (ids,) = prompt_tokens(self.tokenizer, ["a"])
        return bool(ids) and ids[-1] in self.end_tokens

    def continuation(self, tokens: Sequence[int]) -> str:
        """What new tokens write after a prompt, without special tokens.

        Leading spaces are kept.
        """
        text = self.tokenizer.decode(list(tokens), skip_special_tokens=True)
        if self.encoder_decoder:
            return text
        pieces = self.tokenizer.convert_ids_to_tokens(list(tokens), skip_special_tokens=True)
        written = "".join(piece or "" for piece in pieces)
        spaces = len(written) - len(written.lstrip(METASPACE))
        return " " * spaces + text.lstrip(" ") if spaces else text

    def chat_tokens(self, messages: Sequence[Mapping[str, str]], chat: ChatSettings) -> list[int]:
        """The messages of a chat as token ids.

        Raises UserError for a tokenizer without a chat template.
        """
        if self.tokenizer.chat_template is None:
            raise UserError(
                f"the tokenizer of {self.path} has no chat template; give the prompt as text"
            )
        text = chat_text(self.tokenizer, self.path, messages, chat)
        require_unicode("a prompt", text)
        return self.tokenizer(text, verbose=False, add_special_tokens=False)["input_ids"]

    def weights(self, dtype: torch.dtype, **placement: Any) -> PreTrainedModel:
        """Load the model on the CPU, or where these options of `from_pretrained` put it.

        Raises UserError if the checkpoint lacks any weight, has two of one, or has one that the layers
        have no place for.
        """
        _ = self.weight_files  # looks for weights that two files store
        with no_progress_bars(), no_conversion_service():
            model, info = self._read(
                "weights",
                self.auto_class,
                dtype=dtype,
                use_safetensors=None if self.allow_pickles else True,
                weights_only=True,
                output_loading_info=True,
                trust_remote_code=self.trust_remote_code,
                **placement,
            )
        if missing := sorted(info["missing_keys"]):
            raise UserError(
                f"the checkpoint {self.path} lacks {len(missing)} of its model's weights,"
                f" {missing[0]} first; it may be truncated or belong to another architecture"
            )
        if lost := self._without_zeros(without_place(info["unexpected_keys"], model)):
            raise UserError(
                f"the checkpoint {self.path} has {len(lost)} weights that its layers have no place"
                f" for, as its config.json describes them, {lost[0]} first, and would decode without"
                " them; give the config.json that belongs to the weights"
            )
        return model

    def _without_zeros(self, names: Sequence[str]) -> list[str]:
        """These stored weights without those that are 0: some tools store biases of 0 for layers
        without any.
        """
        zeros: set[str] = set()
        stored = self.weight_files
        if stored is not None:
            known = [name for name in names if name in stored.shapes]
            zeros = {name for name in known if not stored.read(name, torch.float32).any()}
        elif names:
            for file in in_folder(self.files):
                if file.endswith(INDEX_SUFFIX):
                    continue
                tensors = torch.load(self.files / file, map_location="cpu", weights_only=True)
                zeros |= {name for name in names if name in tensors and not tensors[name].any()}
        return [name for name in names if name not in zeros]

    def weightless(self) -> PreTrainedModel:
        """The architecture on the meta device, without weights, for checks before they load.

        Raises UserError for one that Transformers cannot build.
        """
        # read now: a GGUF file's configuration is computed with tensors
        auto_class, config = self.auto_class, copy.deepcopy(self.config)
        own_class = (getattr(config, "auto_map", None) or {}).get(auto_class.__name__)
        try:
            build = auto_class.from_config
            if self.trust_remote_code and own_class is not None:
                build = get_class_from_dynamic_module(
                    own_class, self.location, revision=self.commit
                )._from_config
            with torch.device("meta"):
                return build(config, dtype=torch.bfloat16)
        except KeyError as error:  # such as a kind of rotary scaling that is newer
            raise UserError(
                f"transformers {transformers_version} cannot build the model of {self.path}, as it"
                f" does not know {error} of its config.json; install a newer version, or correct"
                " the file"
            ) from error
        except (ValueError, ImportError, OSError) as error:
            raise UserError(
                f"transformers cannot build the model of {self.path}:"
                f" {first_line(error)}; give a checkpoint of a language model"
            ) from error

    @property
    def weight_files(self) -> StoredWeights | None:
        """The files that hold the weights as they are, fetched if need be; None without."""
        return self._read("weights", StoredWeights)

    @property
    def files(self) -> Path:
        """The folder of the files that have been read: of the hub's, the one in its cache, named
        after their commit.
        """
        if self.in_folder:
            return Path(self.location)
        _ = self.config  # now it is in the hub's cache
        cached = try_to_load_from_cache(self.location, "config.json", revision=self.commit)
        if not isinstance(cached, str):
            raise UserError(
                f"{self.path} left no commit in the hub's cache; give a local folder instead"
            )
        return Path(cached).parent

    @cached_property
    def fingerprint(self) -> str:
        """Identifies the weights: the hub's commit, or a hash of the files of a folder that can be
        read for its model.

        Files with weights that are not read do not count, nor do a training's log files. Python
        code of a checkpoint may read any file, so all count beside it.
        """
        if not self.in_folder:
            return self.files.name
        digest = hashlib.sha256()
        for file in self._files_read():
            digest.update(file.name.encode() + bytes.fromhex(file_digest(file)))
        return digest.hexdigest()[:16]

    def _files_read(self) -> list[Path]:
        """The files of a folder that `fingerprint` is of."""
        folder, names = Path(self.location), set(os.listdir(self.location)) - set(ACCOUNTS)
        if not any(name.endswith(".py") for name in names):
            names = {name for name in names if not holds_weights(name)}
        files = [folder / name for name in sorted(names | set(in_folder(folder)))]
        return [file for file in files if file.is_file()]

    def file_stamps(self) -> tuple[FileStamp, ...]:
        """The stamp of each file here that can be read for the model, as it is now; none for a hub
        id, whose files never change.
        """
        place = Path(self.location)
        files: list[Path] = []
        if place.is_file():
            files = [place]
        elif self.in_folder:
            files = self._files_read()
        return tuple(map(FileStamp.of, files))

    @cached_property
    def opened(self) -> tuple[FileStamp, ...]:
        """`file_stamps` when this was first asked for: when the model was loaded."""
        return self.file_stamps()

    def require_not_overwritten(self) -> None:
        """Raise UserError where a file of weights was written anew in place since it was opened.

        Weights that stay in their file would be those of two models. A file that was replaced by
        another one stays for those who have opened it.
        """
        for stamp in self.opened:
            if holds_weights(stamp.file.name) and stamp.overwritten():
                raise UserError(
                    f"{stamp.file} was overwritten after it was loaded; load the model anew, and"
                    " save each state of a training in a folder of its own"
                )

    def _read(self, component: str, kind: Any, **options: Any) -> Any:
        """Call a `from_pretrained`. Raises UserError with a clear message if it fails."""
        self._require_files(component)
        if (commit := self.commit) is not None:
            options["revision"] = commit
        # files downloaded before can still be used
        if not self.in_folder and hub_problem() is not None:
            options["local_files_only"] = True
        try:
            component_read = kind.from_pretrained(self.location, **options)
            self._note_commit()
            return component_read
        except UserError:
            raise
        except (ImportError, RuntimeError) as error:
            if lines := [
                line.strip() for line in str(error).splitlines() if "mismatch" in line.lower()
            ]:
                raise UserError(
                    f"the weights of {self.path} do not have the shapes of its config.json:"
                    f" {lines[0]}; give the config.json that belongs to the weights"
                ) from error
            if (method := quantization(self.config)) is None:
                raise
            raise UserError(
                f"the weights of {self.path} are quantized ({method}) and cannot be read here:"
                f" {root_cause(error)}; install what is missing, or give a checkpoint that is not"
                " quantized"
            ) from error
        except (
            OSError,
            HTTPError,  # a download that broke off
            ValueError,
            KeyError,
            SafetensorError,
            pickle.UnpicklingError,
        ) as error:
            if options.get("local_files_only"):
                require_hub(
                    f"the checkpoint {self.path}",
                    "give a local folder instead: pair.target=DIR, pair.draft=DIR",
                )
            raise UserError(self._complaint(component, error)) from error

    def _note_commit(self) -> None:
        """Note which commit of the hub was read. It is the name of the files' folder in the
        cache.
        """
        if self.in_folder:
            return
        cached = try_to_load_from_cache(self.location, "config.json", revision=self.commit)
        if isinstance(cached, str):
            note_commit(self.path, self.revision, Path(cached).parent.name)

    def _require_files(self, component: str) -> None:
        """Raise UserError for a path that holds nothing that can be read."""
        folder = Path(self.location)
        has_config = (folder / "config.json").is_file()
        if (folder / "adapter_config.json").is_file():
            require_no_adapter(self.path, os.listdir(folder))
        if not has_config and (files := sorted(folder.glob("*.gguf"))):
            raise UserError(
                f"{self.path} is a folder with a GGUF file; give the file:"
                f" {self.path}/{files[0].name}"
            )
        if folder.is_file():
            raise UserError(
                f"{self.path} is a file; give a folder in Hugging Face layout, as only decoding"
                " reads GGUF"
            )
        if self.in_folder and not has_config:
            raise UserError(f"{self.path} has no config.json; give a folder in Hugging Face layout")
        # without them Transformers makes a tokenizer of a few special tokens
        if (
            component == "tokenizer"
            and self.in_folder
            and not any(map(TOKENIZER_FILE.search, os.listdir(folder)))
        ):
            files = (
                "tokenizer.json (or tokenizer.model, or vocab.json and merges.txt) and"
                " tokenizer_config.json"
            )
            raise UserError(
                f"{self.path} has no tokenizer files; copy {files} from where the model came from"
            )
        if not self.in_folder and not self.on_hub:
            raise UserError(
                f"no checkpoint folder {self.path}; give a folder with config.json or a hub id such"
                " as org/name"
            )

    def _complaint(self, component: str, error: Exception) -> str:
        """The message for a file that cannot be read, with what the user can do about it."""
        text, detail = str(error), first_line(error)
        if "trust_remote_code" in text:
            return f"the {component} of {self.path} {REMOTE_CODE}"
        if "use_safetensors" in text:
            return f"{self.path} has no safetensors weights; {PICKLE_REMEDY}"
        if not self.in_folder:
            return (
                f"cannot read the {component} of {self.path} from the hub: {detail}"
                f" ({root_cause(error)}); {HUB_REMEDY}"
            )
        return (
            f"cannot read the {component} of {self.path}: {detail}; "
            "a checkpoint in Hugging Face layout with safetensors weights is needed"
        )


def _token_ids(prompt: Sequence[Any]) -> list[int]:
    """Token ids as Python's numbers. Raises UserError for anything but whole numbers, such as words."""
    try:
        return [index(token) for token in prompt]
    except TypeError as error:
        raise UserError(
            f"token ids must be whole numbers, got {prompt!r:.80}; give a text, or a list of texts"
        ) from error


def without_place(names: Collection[str], model: PreTrainedModel) -> list[str]:
    """Of stored weights that a model does not have those of its own layers, in the order of the
    alphabet: a bias of a layer without one, and a layer inside another one.

    Others change no text: modules beside the model, such as those that predict further tokens,
    buffers of older versions, and scales of a quantized cache. Names may lack the prefix of the model
    without its head, which Transformers then adds.
    """
    modules = dict(model.named_modules())
    prefix = f"{model.base_model_prefix}." if model.base_model_prefix else ""

    def belongs(name: str) -> bool:
        if name.endswith(UNREAD_BIAS):
            return False
        layer, _, kind = name.rpartition(".")
        if layer in modules:
            return kind == "bias" and hasattr(modules[layer], "weight")
        around = layer.rpartition(".")[0]
        return kind == "weight" and around in modules and IN_A_LAYER.search(around) is not None

    return sorted(name for name in names if belongs(name) or belongs(f"{prefix}{name}"))


def root_cause(error: BaseException) -> str:
    """The first error of the chain, in one line."""
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    return first_line(error)


def quantization(config: PreTrainedConfig) -> str | None:
    """How a checkpoint's weights are quantized, such as awq; None if they are not."""
    settings = getattr(config, "quantization_config", None)
    if settings is None:
        return None
    named = settings if isinstance(settings, Mapping) else vars(settings)
    method = named.get("quant_method") or "in an unknown way"
    return str(getattr(method, "value", method))


def auto_class_of(
    config: PreTrainedConfig,
) -> type[AutoModelForCausalLM | AutoModelForSeq2SeqLM | AutoModelForImageTextToText]:
    """The class of Transformers that builds a model. One that also reads images is given text
    alone.
    """
    if config.is_encoder_decoder:
        return AutoModelForSeq2SeqLM
    images = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    only_with_images = images and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING
    return AutoModelForImageTextToText if only_with_images else AutoModelForCausalLM


def decoder_depth(config: PreTrainedConfig) -> int:
    text = config.get_text_config(decoder=True)
    layers = getattr(text, "num_decoder_layers", None)
    # Transformers writes `decoder_layers` there, and leaves the class's default under its own name
    return layers if config.is_encoder_decoder and layers else text.num_hidden_layers
