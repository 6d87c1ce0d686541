"""Train the toy pair with Hugging Face's Trainer: tokenizer, two T5 models, a progress bar."""

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy
import torch
from accelerate.state import AcceleratorState
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    DataCollatorForSeq2Seq,
    PreTrainedTokenizerFast,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    TrainerCallback,
    get_cosine_schedule_with_warmup,
)
from transformers.optimization import Adafactor
from transformers.trainer_callback import PrinterCallback
from transformers.utils import logging as transformers_logging

from bild_lab.training.toy import Recipe, Shape

PAD, EOS, UNKNOWN = "<pad>", "</s>", "<unk>"  # ids 0, 1, 2, as in T5
_LONGEST_ANSWER = 96  # tokens; the longest reference has about half as many


def train_pair(recipe: Recipe, pairs: list[dict[str, str]], target: Path, draft: Path, progress: bool) -> None:
    """Train both models on the sentence pairs and write them, each with the tokenizer."""
    tokenizer = train_tokenizer(pairs, recipe.vocabulary)
    examples = _encode(tokenizer, pairs)
    with _isolated(recipe), _bar(progress) as bar:
        for name, shape, folder in (
            ("target", recipe.target, target),
            ("draft", recipe.draft, draft),
        ):
            task = bar.add_task(f"training the toy {name}", total=shape.steps, loss="")
            model = train_model(recipe, shape, tokenizer, examples, _ShowProgress(bar, task), folder)
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)


def train_tokenizer(pairs: list[dict[str, str]], vocabulary: int) -> PreTrainedTokenizerFast:
    """A byte-pair tokenizer for both languages that ends every text with </s>."""
    tokenizer = Tokenizer(models.BPE(unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Metaspace(), pre_tokenizers.Punctuation()])
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=[PAD, EOS, UNKNOWN], show_progress=False)
    tokenizer.train_from_iterator([text for pair in pairs for text in pair.values()], trainer)
    eos = tokenizer.token_to_id(EOS)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {EOS}", pair=f"$A {EOS} $B {EOS}", special_tokens=[(EOS, eos)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )


def train_model(
    recipe: Recipe,
    shape: Shape,
    tokenizer: PreTrainedTokenizerFast,
    examples: list[dict[str, list[int]]],
    callback: TrainerCallback,
    scratch: Path,
) -> T5ForConditionalGeneration:
    """One T5 trained from random weights; call it inside ``_isolated``, it seeds globally."""
    torch.manual_seed(recipe.seed)
    # eager attention: the fused kernel's backward pass is slower for sentences this short
    model = T5ForConditionalGeneration._from_config(_config(shape, len(tokenizer)), attn_implementation="eager")
    model.config.architectures = [type(model).__name__]
    model.generation_config.max_new_tokens = _LONGEST_ANSWER
    optimizer = Adafactor(
        model.parameters(),
        lr=recipe.learning_rate,
        scale_parameter=True,
        relative_step=False,
        warmup_init=False,
    )
    schedule = get_cosine_schedule_with_warmup(optimizer, shape.warm_up_steps, shape.steps)
    trainer = Seq2SeqTrainer(
        model=model,
        args=_arguments(recipe, shape, scratch),
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
        train_dataset=examples,
        optimizers=(optimizer, schedule),
        callbacks=[callback, _YieldToOthers()],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return model.eval()


def _config(shape: Shape, vocabulary: int) -> T5Config:
    return T5Config(
        vocab_size=vocabulary,
        d_model=shape.width,
        d_kv=shape.width // shape.heads,
        d_ff=shape.feed_forward,
        num_heads=shape.heads,
        num_layers=shape.layers,
        num_decoder_layers=shape.layers,
        feed_forward_proj="gated-gelu",
        dropout_rate=0.0,  # the corpus is seen little more than twice; drawing masks costs a third
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=1,
    )


def _arguments(recipe: Recipe, shape: Shape, scratch: Path) -> Seq2SeqTrainingArguments:
    return Seq2SeqTrainingArguments(
        output_dir=str(scratch),
        per_device_train_batch_size=recipe.batch,
        max_steps=shape.steps,
        label_smoothing_factor=recipe.label_smoothing,
        max_grad_norm=0.0,  # Adafactor clips its own updates
        train_sampling_strategy="group_by_length",
        seed=recipe.seed,
        use_cpu=True,
        bf16=torch.backends.cpu.get_cpu_capability() == "AVX512",  # slower than float32 elsewhere
        dataloader_pin_memory=False,
        logging_steps=10,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )


def _encode(tokenizer: PreTrainedTokenizerFast, pairs: list[dict[str, str]]) -> list[dict[str, list[int]]]:
    sources = tokenizer([pair["de"] for pair in pairs])["input_ids"]
    labels = tokenizer([pair["en"] for pair in pairs])["input_ids"]
    return [
        {"input_ids": source, "attention_mask": [1] * len(source), "labels": label}
        for source, label in zip(sources, labels, strict=True)
    ]


class _ShowProgress(TrainerCallback):
    """Moves a rich progress bar, because the Trainer's own bar would print its logs too."""

    def __init__(self, bar: Progress, task: int):
        self.bar, self.task = bar, task

    def on_step_end(self, args, state, control, **kwargs):
        """One step further."""
        self.bar.update(self.task, completed=state.global_step)

    def on_log(self, args, state, control, logs=None, **kwargs):
        """Show the mean loss, in nats a token, of the steps since the last log."""
        if logs and "loss" in logs:
            self.bar.update(self.task, loss=f"loss {float(logs['loss']):.2f}")


class _YieldToOthers(TrainerCallback):
    """Goes down to one thread once several steps stalled.

    OpenMP threads wait for each other by spinning: on a machine whose cores are taken, two of
    them need up to a hundred times as long, one does not.
    """

    stall_s = 1.0  # an ordinary step takes a tenth of it
    patience = 3

    def __init__(self):
        self.started_s, self.stalls = 0.0, 0

    def on_step_begin(self, args, state, control, **kwargs):
        """Start the clock."""
        self.started_s = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        """Count a stall, and act on the last one allowed."""
        self.stalls += time.perf_counter() - self.started_s > self.stall_s
        if self.stalls == self.patience:
            torch.set_num_threads(1)


def _bar(progress: bool) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        disable=not progress,
    )


@contextmanager
def _isolated(recipe: Recipe) -> Iterator[None]:
    """Restore what the Trainer changes globally: generators, threads, precision and log level."""
    threads, level = torch.get_num_threads(), transformers_logging.get_verbosity()
    python_state, numpy_state = random.getstate(), numpy.random.get_state()
    torch.set_num_threads(recipe.threads)
    transformers_logging.set_verbosity_error()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)  # else it keeps every later user to bf16
        torch.set_num_threads(threads)
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()
        random.setstate(python_state)
        numpy.random.set_state(numpy_state)
