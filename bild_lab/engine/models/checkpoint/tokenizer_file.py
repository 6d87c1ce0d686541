"""Whether a tokenizer of Transformers cuts texts as the file that it was read from says, and what
it knows that the file does not say.
"""

from __future__ import annotations

from pathlib import Path

from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.models.auto.tokenization_auto import get_tokenizer_config

TOKENIZER_JSON = "tokenizer.json"
# names of classes that have no special tokens of their own
CLASSES_OF_FILES = ("PreTrainedTokenizerFast", "TokenizersBackend")
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


def cut_alike(tokenizer: PreTrainedTokenizerFast, file_tokenizer: PreTrainedTokenizerFast) -> bool:
    """Whether two tokenizers make the same tokens of a text, and the same text of these tokens.

    The text has all that rules differ in, and words after special tokens, where some write a space
    that is not there, as in every chat of Llama 2. Special tokens around it count, too.
    """
    specials = dict.fromkeys(filter(None, (file_tokenizer.bos_token, file_tokenizer.eos_token)))
    text = PROBE + "".join(f"{special}word{special} word" for special in specials)
    ids, file_ids = (
        reader(text, verbose=False)["input_ids"] for reader in (tokenizer, file_tokenizer)
    )
    joined, file_joined = (
        reader.backend_tokenizer.decode(ids) for reader in (tokenizer, file_tokenizer)
    )
    return ids == file_ids and joined == file_joined


def default_tokens(
    file_tokenizer: PreTrainedTokenizerFast, tokenizer: PreTrainedTokenizerFast, folder: Path
) -> dict[str, str]:
    """The special tokens that `file_tokenizer` lacks, as tokenizer_config.json names none, and that
    the class of `tokenizer` has by default, such as `<s>`; those that the file knows.

    None where tokenizer_config.json names no class that has such tokens. folder: of both files.
    """
    if get_tokenizer_config(str(folder)).get("tokenizer_class") in CLASSES_OF_FILES:
        return {}
    names = ("bos_token", "eos_token", "unk_token", "pad_token")
    tokens = {
        name: getattr(tokenizer, name) for name in names if getattr(file_tokenizer, name) is None
    }
    known = file_tokenizer.backend_tokenizer.token_to_id
    return {name: token for name, token in tokens.items() if token and known(token) is not None}


def set_prefix_space(
    file_tokenizer: PreTrainedTokenizerFast, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Have bytes begin with a space where tokenizer_config.json, which `tokenizer` was read with, or
    else its class asks for it: the one rule that is not in the file alone.
    """
    asked, stored = tokenizer.init_kwargs.get("add_prefix_space"), file_tokenizer.backend_tokenizer
    if asked is not None and isinstance(stored.pre_tokenizer, ByteLevel):
        stored.pre_tokenizer.add_prefix_space = asked
