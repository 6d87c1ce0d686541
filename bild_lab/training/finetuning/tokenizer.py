"""A tokenizer trained on the training data, for models that start from random weights."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

PAD, END, UNKNOWN, START = "<pad>", "</s>", "<unk>", "<s>"  # ids 0, 1, 2 as in T5; decoders have 3 too
_LONGEST_TEXT = 512  # tokens; the dataset decides whether longer texts are cut


def train_tokenizer(texts: Iterable[str], pieces: int, encoder_decoder: bool) -> PreTrainedTokenizerFast:
    """A byte-pair tokenizer of at most `pieces` pieces, one vocabulary for prompts and answers.

    The texts of an encoder–decoder end with </s>, as T5's do; the texts of a decoder start with <s>, as Llama's do.
    The same texts give the same vocabulary.
    """
    specials = [PAD, END, UNKNOWN] if encoder_decoder else [PAD, END, UNKNOWN, START]
    tokenizer = Tokenizer(models.BPE(unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Metaspace(), pre_tokenizers.Punctuation()])
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=pieces, special_tokens=specials, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    single, pair = (f"$A {END}", f"$A {END} $B {END}") if encoder_decoder else (f"{START} $A", f"{START} $A $B")
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single, pair=pair, special_tokens=[(name, specials.index(name)) for name in specials]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        bos_token=None if encoder_decoder else START,
        clean_up_tokenization_spaces=False,
        model_max_length=_LONGEST_TEXT,
    )
