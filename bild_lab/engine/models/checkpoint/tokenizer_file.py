"""Whether a tokenizer of Transformers cuts texts as the file that it was read from says."""

from __future__ import annotations

from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

TOKENIZER_JSON = "tokenizer.json"
# what rules of cutting differ in: digits, case, spaces, line ends, marks, letters of many scripts
PROBE = (
    "The year 2023, isn't it?  Two  spaces\n\n\tdef f(x):\n        return x_1 + 12345678  # NaOH"
    " Straße café e\u0301 ① ﬁ 東京 мир — “eBay” 🙂 "
)


def may_be_rebuilt(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a class of Transformers may have put rules of its own in place of the file's.

    `PreTrainedTokenizerFast` itself takes the file as it is. Classes with languages write their
    codes beside a text.
    """
    return (
        isinstance(tokenizer, PreTrainedTokenizerFast)
        and type(tokenizer) is not PreTrainedTokenizerFast
        and type(tokenizer).__module__.startswith("transformers.models.")
        and not hasattr(tokenizer, "src_lang")
    )


def cut_alike(tokenizer: PreTrainedTokenizerBase, own: PreTrainedTokenizerBase) -> bool:
    """Whether two tokenizers cut texts alike: one with all that rules differ in, and words behind
    special tokens, where some write a space that is not there, as in every chat of Llama 2.
    """
    specials = dict.fromkeys(filter(None, (own.bos_token, own.eos_token)))
    text = PROBE + "".join(f"{special}word{special} word" for special in specials)
    ids, own_ids = (
        one(text, add_special_tokens=False, verbose=False)["input_ids"] for one in (tokenizer, own)
    )
    return ids == own_ids


def set_prefix_space(own: PreTrainedTokenizerFast, tokenizer: PreTrainedTokenizerBase) -> None:
    """Have bytes begin with a space where tokenizer_config.json, which `tokenizer` was read with,
    asks for it: the one rule that is not in the file alone.
    """
    asked, stored = tokenizer.init_kwargs.get("add_prefix_space"), own.backend_tokenizer
    if asked is not None and isinstance(stored.pre_tokenizer, ByteLevel):
        stored.pre_tokenizer.add_prefix_space = asked
