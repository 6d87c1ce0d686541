"""Checkpoints in folders and in memory: what they cannot give is told in words."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from jinja2 import UndefinedError
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE, WordLevel
from tokenizers.processors import TemplateProcessing
from transformers import AutoConfig, AutoModelForSeq2SeqLM, PreTrainedTokenizerFast

from bild_lab.engine.models.checkpoint.chat import (
    ChatSettings,
    CompleteText,
    chat_text,
)
from bild_lab.engine.models.checkpoint.checkpoint import Checkpoint
from bild_lab.engine.models.checkpoint.loaded_checkpoint import LoadedCheckpoint
from bild_lab.errors import UserError, warn_once
from bild_lab.lab.point.load import load
from tests.policies import shipped
from tests.tiny import save, tiny_llama
from tests.tiny_architectures import (
    END,
    PAD,
    START,
    VOCABULARY,
    build,
    relative_of,
    word_tokenizer,
)

ENGINES = ("native", "hf", "auto")
TEMPLATE = (
    "{{ bos_token }}{% for one in messages %}{{ one['role'] }} {{ one['content'] }} {% endfor %}w8"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    build("llama").save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    return folder


def test_a_folder_without_tokenizer_files_is_refused(folder: Path, tmp_path: Path) -> None:
    """Transformers would make a tokenizer of a few special tokens, which shares one with the
    target's.
    """
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    with pytest.raises(UserError, match=rf"{tmp_path} has no tokenizer files; copy tokenizer.json"):
        load(folder, tmp_path, policy="speculative")


def test_an_adapter_alone_is_refused(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')
    with pytest.raises(
        UserError, match="is an adapter; merge it into its base with peft's merge_and_unload first"
    ):
        Checkpoint(str(tmp_path)).check()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"quant_method": "awq", "bits": 4, "group_size": 8, "version": "gemm"},
            r"are quantized \(awq\) .*gptqmodel",
        ),
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True},
            r"are quantized \(bitsandbytes\) .* requires bits",
        ),
        (
            {"quant_method": "compressed-tensors", "config_groups": {}},
            r"are quantized \(compressed-tensors\) .*require",
        ),
    ],
)
def test_quantized_weights_without_their_package_are_refused_in_a_sentence(
    settings: dict[str, object], message: str, folder: Path, tmp_path: Path
) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    with pytest.raises(UserError, match=r"cannot run natively, as its weights are quantized"):
        load(tmp_path, policy=shipped("vanilla"), engine="native")
    decoder = load(tmp_path, policy=shipped("vanilla"))
    assert decoder.target.engine == "hf"
    with pytest.raises(UserError, match=message):
        decoder.load_weights()


def test_a_folder_and_a_model_in_memory_decode_alike(folder: Path) -> None:
    module = build("llama")
    pair = ((module, word_tokenizer()), (relative_of(module), word_tokenizer()))
    texts = [
        load(folder, policy=shipped("vanilla"), engine="native")
        .generate("w5 w9 w12", 12)
        .token_ids,
        load(str(folder), policy=shipped("vanilla"), engine="hf")
        .generate("w5 w9 w12", 12)
        .token_ids,
        load(*pair, policy=shipped("speculative")).generate("w5 w9 w12", 12).token_ids,
    ]
    assert texts[0] == texts[1] == texts[2]
    with pytest.raises(
        UserError, match="a model in memory runs on hf, on one device, got other settings"
    ):
        load(*pair, policy=shipped("speculative"), engine="native")
    with pytest.raises(
        UserError,
        match=r"in float32, and bfloat16 was asked for.*\.to\(torch.bfloat16\), or .*='float32'",
    ):
        load(*pair, policy=shipped("speculative"), dtype="bfloat16").load_weights()


def test_a_model_in_memory_is_known_by_its_weights() -> None:
    prints = [
        load(
            (build("llama", seed), word_tokenizer()), policy=shipped("vanilla")
        ).target.checkpoint.fingerprint
        for seed in (0, 0, 1)
    ]
    assert prints[0] == prints[1] != prints[2]


def test_a_prompt_may_be_text_token_ids_or_messages(folder: Path) -> None:
    checkpoint = Checkpoint(str(folder))
    assert checkpoint.source("w5 w9").prompt == checkpoint.source([5, 9]).prompt == (5, 9)
    assert checkpoint.source(torch.tensor([5, 9, 12]).tolist(), 2).prompt == (5, 9)
    with pytest.raises(
        UserError, match="must be from 0 to 39, as .* has 40 embeddings, got 40; resize"
    ):
        checkpoint.source([5, 40])
    # written from nothing
    assert checkpoint.source("").prompt == (checkpoint.tokenizer.bos_token_id,)
    checkpoint.tokenizer.bos_token = None
    for nothing in ([], ""):
        with pytest.raises(
            UserError,
            match=re.escape(f"the prompt {nothing!r} has no tokens; a model needs at least"),
        ):
            checkpoint.source(nothing)
    checkpoint.tokenizer.bos_token = "<s>"
    messages = [{"role": "w3", "content": "w9"}]
    with pytest.raises(UserError, match="has no chat template; give the prompt as text"):
        checkpoint.source(messages)
    checkpoint.tokenizer.chat_template = TEMPLATE
    assert checkpoint.source(messages).prompt == (START, 3, 9, 8)
    assert checkpoint.end_tokens == {END}


def test_a_list_of_prompts_gives_a_list(folder: Path) -> None:
    decoder = load(folder, policy=shipped("vanilla"))
    one, other = decoder.generate("w5 w9", 6), decoder.generate("w7 w7 w12", 6)
    for prompts in (
        ["w5 w9", "w7 w7 w12"],
        [[5, 9], [7, 7, 12]],
        ("w5 w9", torch.tensor([7, 7, 12]).tolist()),
    ):
        assert [each.token_ids for each in decoder.generate(prompts, 6)] == [
            one.token_ids,
            other.token_ids,
        ]
    (batch_of_one,) = decoder.generate(torch.tensor([[5, 9]]), 6)
    assert (
        batch_of_one.token_ids
        == decoder.generate(torch.tensor([5, 9]), 6).token_ids
        == one.token_ids
    )
    with pytest.raises(UserError, match="a stream has one prompt, got a list of 2; use generate"):
        next(decoder.stream(["w5", "w9"], 6))


def test_a_complete_text_gets_no_special_tokens(tmp_path: Path) -> None:
    # whose tokenizer adds <s>
    checkpoint = Checkpoint(str(save(tiny_llama(0), tmp_path / "llama")))
    assert checkpoint.source(CompleteText("w5 w9")).prompt == (5, 9)
    assert checkpoint.source(CompleteText("<s> w5") + " w9").prompt == (START, 5, 9)
    assert checkpoint.source(CompleteText("w5 w9"), max_tokens=1).prompt == (5,)


def test_a_text_that_has_its_start_token_starts_once(tmp_path: Path) -> None:
    # whose tokenizer adds <s>
    checkpoint = Checkpoint(str(save(tiny_llama(0), tmp_path / "llama")))
    assert (
        checkpoint.source("w5 w9").prompt == checkpoint.source("<s> w5 w9").prompt == (START, 5, 9)
    )
    assert checkpoint.source("w5 <s> <s> w9").prompt == (START, 5, START, START, 9)
    checkpoint.tokenizer.chat_template = TEMPLATE
    messages = [{"role": "w3", "content": "w9"}]
    written = checkpoint.tokenizer.apply_chat_template(messages, tokenize=False)
    assert written.startswith("<s>")
    assert (
        checkpoint.source(written).prompt == checkpoint.source(messages).prompt == (START, 3, 9, 8)
    )


PARTS = (
    "{% for one in messages %}{{ one['role'] }} {% for part in one['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }} {% endif %}{% endfor %}{% endfor %}w8"
)


@pytest.mark.parametrize(
    ("template", "prompt", "told"),
    [
        ("<s> $A </s>", "w5 w6", True),
        ("$A </s>", "w5", True),
        ("<s> $A", "w5 </s>", False),  # the prompt's own
        ("<s> $A </s>", CompleteText("w5"), False),
        ("</s> $A", "w5", False),  # one token for both ends, as of OPT and GPT-2
    ],
)
def test_an_end_token_that_a_tokenizer_writes_after_prompts_is_named(
    template: str, prompt: str, told: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = save(tiny_llama(0), tmp_path / "llama")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = TemplateProcessing(
        single=template, special_tokens=[("<s>", START), ("</s>", END)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    warn_once.cache_clear()
    Checkpoint(str(folder)).source(prompt)
    assert ("writes an end token behind every prompt" in caplog.text) is told


def test_an_end_token_that_tokenizer_config_asks_for_is_switched_off_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Planted: told to correct tokenizer.json, where Transformers asks that file alone, and there is
    none.
    """
    folder = save(tiny_llama(0), tmp_path / "llama")
    (folder / "tokenizer.json").unlink()
    BPE({"<|endoftext|>": END, "a": 5, "b": 6}, []).save(str(folder))

    def told(adds: bool) -> str:
        settings = {"tokenizer_class": "GPT2Tokenizer", "add_eos_token": adds}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        warn_once.cache_clear()
        caplog.clear()
        Checkpoint(str(folder)).source("b")
        return caplog.text

    assert "set add_eos_token to false in its tokenizer_config.json" in told(True)
    assert "end token" not in told(False)


SYSTEM_APART = (
    "{% for one in messages %}{% if one['role'] == 'system' %}{{ one['content'] + ' ' }}{% else %}"
    "{% for part in one['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }} {% endif %}"
    "{% endfor %}{% endif %}{% endfor %}w8"
)


@pytest.mark.parametrize(
    ("template", "written"),
    [
        (SYSTEM_APART, "w9 w7 w8"),
        (SYSTEM_APART.replace("+ ' ' ", ""), "w9w7 w8"),  # planted: parts as Python shows them
        ("{{ messages[1]['content'] | capitalize }} w8", "W7 w8"),
        ("{{ messages[1]['content'][:1] }} w8", "w w8"),
    ],
)
def test_parts_are_never_written_as_python_shows_them(
    template: str, written: str, tmp_path: Path
) -> None:
    tokenizer = Checkpoint(str(save(tiny_llama(0), tmp_path / "llama"))).tokenizer
    tokenizer.chat_template = template
    messages = [{"role": "system", "content": "w9"}, {"role": "user", "content": "w7"}]
    assert chat_text(tokenizer, "it", messages, ChatSettings()) == written


def test_a_template_that_takes_a_content_as_parts_alone_gets_parts(tmp_path: Path) -> None:
    """As those of models that also read images: of a text it writes nothing, without a word."""
    checkpoint = Checkpoint(str(save(tiny_llama(0), tmp_path / "llama")))
    checkpoint.tokenizer.chat_template = PARTS
    messages = [{"role": "w3", "content": "w9 w7"}, {"role": "w4", "content": " w6 "}]
    lost = checkpoint.tokenizer.apply_chat_template(messages, tokenize=False)
    assert "w9" not in lost  # planted: what Transformers writes
    assert checkpoint.source(messages).prompt == (3, 9, 7, 4, 6, 8)
    checkpoint.tokenizer.chat_template = (
        "{% for one in messages %}{{ one['content'][0]['text'] + ' ' }}{% endfor %}w8"
    )
    with pytest.raises(UndefinedError):
        checkpoint.tokenizer.apply_chat_template(messages, tokenize=False)
    assert checkpoint.source(messages).prompt == (9, 7, 6, 8)
    checkpoint.tokenizer.chat_template = "w5 w8"  # which writes no content of any kind
    assert checkpoint.source(messages).prompt == (5, 8)
    checkpoint.tokenizer.chat_template = "{{ messages[0]['content'].strip() }} w8"  # no parts
    assert checkpoint.source(messages).prompt == (9, 7, 8)


ALL_PARTS = "{% for one in messages %}{% for part in one['content'] %}{{ part['text'] }} {% endfor %}{% endfor %}"
TEXT_ELSE_PARTS = (
    "{% for one in messages %}{% if one['content'] is string %}{{ one['content'] | trim }} {% else %}"
    "{% for part in one['content'] %}{{ part['text'] }} {% endfor %}{% endif %}{% endfor %}"
)
SYSTEM = {"role": "system", "content": "w9"}


@pytest.mark.parametrize(
    ("template", "messages", "written"),
    [
        # of the system, too
        (f"{ALL_PARTS}w8", [SYSTEM, {"role": "user", "content": "w7"}], "w9 w7 w8"),
        # what has parts keeps them
        (
            f"{ALL_PARTS}w8",
            [
                {"role": "user", "content": [{"type": "text", "text": "w5"}]},
                {"role": "user", "content": "w7"},
            ],
            "w5 w7 w8",
        ),
        # a text as it is where it is written, whatever spaces are cut off
        (f"{TEXT_ELSE_PARTS}w8", [{"role": "user", "content": " w7 "}], "w7 w8"),
        # an error of Python's own in place of the template's
        (
            ALL_PARTS.replace("one['content']", "one['content'] + []") + "w8",
            [{"role": "user", "content": "w7"}],
            "w7 w8",
        ),
        # which leaves out the last content of either kind
        (
            "{% if messages[0]['content'] is string %}{{ messages[0]['content'] }}{% endif %} w8",
            [SYSTEM, {"role": "user", "content": "w7"}],
            "w9 w8",
        ),
        ("{% if mood %}{{ mood }} {% endif %}" + ALL_PARTS + "w8", [SYSTEM], "w4 w9 w8"),
    ],
)
def test_contents_are_written_as_a_template_takes_them(
    template: str, messages: list[dict], written: str, tmp_path: Path
) -> None:
    tokenizer = Checkpoint(str(save(tiny_llama(0), tmp_path / "llama"))).tokenizer
    tokenizer.chat_template = template
    chat = ChatSettings(values={"mood": "w4"} if "mood" in template else {})
    assert chat_text(tokenizer, "it", messages, chat) == written


LEADING_SYSTEM = (
    "{% for one in messages %}{% if one['role'] != 'system' or loop.first %}"
    "{{ one['content'].split('</think>')[-1] + ' ' }}{% endif %}{% endfor %}w8"
)


@pytest.mark.parametrize(
    ("template", "roles", "left_out"),
    [
        (LEADING_SYSTEM, ["system", "user", "system", "user"], "a message from the system"),
        (LEADING_SYSTEM, ["system", "user", "assistant", "user"], None),
        (
            f"{SYSTEM_APART}".replace("{{ one['content'] + ' ' }}", ""),
            ["system", "user"],
            "a message from the system",
        ),
        (SYSTEM_APART, ["system", "user"], None),
        # written otherwise, but written
        (
            "{% for one in messages %}{{ one['content'] | upper }} {% endfor %}w8",
            ["system", "user"],
            None,
        ),
    ],
)
def test_a_message_that_a_template_leaves_out_is_named(
    template: str,
    roles: list[str],
    left_out: str | None,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As gpt-oss's template leaves out a system's message behind the first. Planted: without a word,
    for each conversation anew, and of messages that are samples alone.
    """
    warn_once.cache_clear()
    tokenizer = Checkpoint(str(save(tiny_llama(0), tmp_path / "llama"))).tokenizer
    tokenizer.chat_template = template
    contents = ["w5 w6", "w7", "<think>w9</think>w10", "w11"]
    messages = [
        {"role": role, "content": text} for role, text in zip(roles, contents, strict=False)
    ]
    chat_text(tokenizer, "it", messages, ChatSettings(), warns=False)
    assert not caplog.text
    for longer in range(2):
        chat_text(tokenizer, "it", [*messages, *messages[-1:] * longer], ChatSettings())
    if left_out is None:
        assert not caplog.text
    else:
        words = " ".join(caplog.text.split())
        assert words.count(f"its chat template leaves out {left_out}") == 1


@pytest.mark.parametrize(
    ("condition", "value", "refused"),
    [
        ("thinking", "false", True),
        ("thinking", "No", True),
        ("thinking", False, False),
        ("thinking", "true", False),
        ("thinking == 'none'", "none", False),  # a text that the template knows
        ("thinking == 'high'", "none", False),
    ],
)
def test_a_text_that_a_template_takes_for_its_contrary_is_refused(
    condition: str, value: object, refused: bool, tmp_path: Path
) -> None:
    """Planted: enable_thinking='false', a text and so true, made the model think."""
    tokenizer = Checkpoint(str(save(tiny_llama(0), tmp_path / "llama"))).tokenizer
    tokenizer.chat_template = (
        f"{{% if {condition} %}}w4 {{% endif %}}{{{{ messages[0]['content'] }}}} w8"
    )
    messages, chat = [{"role": "user", "content": "w7"}], ChatSettings(values={"thinking": value})
    if refused:
        with pytest.raises(UserError, match=f"takes the text thinking='{value}' for true"):
            chat_text(tokenizer, "it", messages, chat)
    else:
        assert chat_text(tokenizer, "it", messages, chat).endswith("w7 w8")


TURNS = "{% for one in messages %}{{ one['content'] }}ENDS{% endfor %}{% if add_generation_prompt %}w8{% endif %}"


@pytest.mark.parametrize(
    ("ends", "stop", "told"),
    [
        (" w9", None, True),
        ("w9 </s>", None, True),  # the model ends a turn with the first of them
        ("w9", "w9", False),
        (" </s>", None, False),
        (" w10", None, False),  # no special token
        ("", None, False),
        ("{% if loop.last %}</s>{% else %}w9{% endif %}", None, False),
    ],
)
def test_an_answers_end_that_is_no_end_token_is_named(
    ends: str, stop: str | None, told: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As of chat models whose generation_config.json kept the end token of their base. Planted: texts
    that go on behind their answers to the length limit.
    """
    warn_once.cache_clear()
    folder = save(tiny_llama(0), tmp_path / "llama")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["w9"]})
    tokenizer.chat_template = TURNS.replace("ENDS", ends)
    tokenizer.save_pretrained(folder)
    decoder = load(str(folder), policy="vanilla", stop=stop)
    decoder.request("w5", 4)
    assert not caplog.text  # no chat
    for prompt in ([{"role": "user", "content": "w5"}], CompleteText("w5 w8")):
        decoder.request(prompt, 4)
    wanted = "ends an answer with w9, which is no end token"
    assert " ".join(caplog.text.split()).count(wanted) == told


@pytest.mark.parametrize("content", ["w7", "", [{"type": "text", "text": "w7"}]])
def test_messages_that_a_template_refuses_are_refused_in_its_words(
    content: object, tmp_path: Path
) -> None:
    tokenizer = Checkpoint(str(save(tiny_llama(0), tmp_path / "llama"))).tokenizer
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(UserError, match="of it refuses these messages: roles must alternate"):
        chat_text(tokenizer, "it", [SYSTEM, {"role": "user", "content": content}], ChatSettings())


def test_several_templates_without_a_default_are_refused(tmp_path: Path) -> None:
    checkpoint = Checkpoint(str(save(tiny_llama(0), tmp_path / "llama")))
    checkpoint.tokenizer.chat_template = {"rag": TEMPLATE, "tool_use": TEMPLATE}
    messages = [{"role": "w3", "content": "w9"}]
    with pytest.raises(UserError, match="several chat templates, of which none is called default"):
        checkpoint.source(messages)
    checkpoint.tokenizer.chat_template["default"] = TEMPLATE
    assert checkpoint.source(messages).prompt == (START, 3, 9, 8)


def test_weights_of_other_shapes_are_refused_in_a_sentence(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "wide")
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "wide" / "config.json").write_text(json.dumps(config | {"intermediate_size": 64}))
    for engine in ("native", "hf"):
        with pytest.raises(
            UserError,
            match="do not have the shapes of its config.json: .*give the config.json that",
        ):
            load(tmp_path / "wide", policy=shipped("vanilla"), engine=engine).load_weights()


def test_a_kind_of_rotary_scaling_that_transformers_does_not_know_is_refused(
    folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["rope_parameters"]
    config |= {"rope_theta": 500.0, "rope_scaling": {"type": "newest", "factor": 4.0}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"does not know 'newest' of its config\.json; install a"):
        load(tmp_path, policy="vanilla").load_weights()


def test_a_folder_of_pickles_says_how_to_save_it_anew(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "old", ignore=shutil.ignore_patterns("*.safetensors"))
    torch.save(build("llama").state_dict(), tmp_path / "old" / "pytorch_model.bin")
    with pytest.raises(
        UserError, match=r"has pytorch_model.bin and no safetensors .*save_pretrained\(NEW_DIR\)"
    ):
        load(tmp_path / "old", policy=shipped("vanilla"))


def test_a_continuation_keeps_its_indentation() -> None:
    vocabulary = {
        "<pad>": PAD,
        "</s>": END,
        "<s>": START,
        "▁▁▁▁return": 3,
        "▁▁": 4,
        "▁x": 5,
        ":": 6,
    }
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=":"))
    tokenizer.decoder = decoders.Metaspace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", bos_token="<s>"
    )
    decoder = load((build("llama"), fast), policy=shipped("vanilla"))
    assert decoder.text([3, 5, END]) == "    return x"
    assert decoder.text([4, 5]) == "   x"
    assert decoder.text([6, 5]) == ": x"
    assert load((build("bart"), fast), policy=shipped("vanilla")).text([3, 5]) == "return x"


def test_a_stray_window_changes_no_engine(tmp_path: Path) -> None:
    module = build("llama")
    module.config.sliding_window = 6
    module.save_pretrained(tmp_path)
    word_tokenizer().save_pretrained(tmp_path)
    prompt = [5, 9, 12, 30, 7, 9, 12, 33]
    texts = [
        load(tmp_path, policy=shipped("vanilla"), engine=each).generate(prompt, 20).token_ids
        for each in ENGINES
    ]
    plain = (
        load((build("llama"), word_tokenizer()), policy=shipped("vanilla"))
        .generate(prompt, 20)
        .token_ids
    )
    assert texts == [plain] * len(ENGINES)


USER = {"role": "user", "content": "w5"}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"name": "w7"}]}


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([{"role": "user", "contents": "w5"}], "message 1 of the chat must have text as role and"),
        ([{"rol": "user", "content": "w5"}], "got {'rol': 'user', 'content': 'w5'}; write"),
        ([USER, {"role": "assistant", "content": None}, USER], "message 2 of the chat must have"),
        ([{"role": "user", "content": [{"type": "image"}]}], "content of a message must be text"),
        ([USER, 5], "message 2 of the chat must have text as role and content, got 5"),
        ([5, USER], "message 1 of the chat must have text as role and content, got 5"),
        (
            [{"role": "usr", "content": "w5"}],
            (
                "the role of message 1 of the chat must be one of system, developer, user,"
                " assistant, tool, function, function_call, observation, ipython, got 'usr'; did you mean user?"
            ),
        ),
        (
            [USER, {"role": "assistant", "content": "w7"}],
            "got one of the assistant; end the chat with a message of the user",
        ),
        (["w5", USER], "a message stands in the list of its chat"),
    ],
)
def test_messages_that_are_no_chat_are_refused_in_a_sentence(
    messages: list, message: str, tmp_path: Path
) -> None:
    save(tiny_llama(1), tmp_path)
    decoder = load(tmp_path, policy="vanilla")
    decoder.target.checkpoint.tokenizer.chat_template = TEMPLATE
    with pytest.raises(UserError, match=re.escape(message)):
        decoder.generate(messages, max_new_tokens=2)
    in_parts = [{"role": "user", "content": [{"type": "text", "text": "w5"}]}]
    texts = [decoder.generate(chat, max_new_tokens=2).text for chat in (in_parts, [USER])]
    assert texts[0] == texts[1]
    called = [USER, CALL, {"role": "tool", "content": "w9"}]
    assert len(decoder.generate(called, max_new_tokens=2).token_ids) == 2


@pytest.mark.parametrize("prompt", ["w5 \ud800", [{"role": "user", "content": "w5 \udfff"}]])
def test_half_a_character_in_a_prompt_is_refused(tmp_path: Path, prompt: object) -> None:
    save(tiny_llama(1), tmp_path)
    decoder = load(tmp_path, policy="vanilla")
    decoder.target.checkpoint.tokenizer.chat_template = TEMPLATE
    with pytest.raises(
        UserError, match=r"a prompt must be Unicode text, got \\ud[8f][0f][0f] alone at character"
    ):
        decoder.generate(prompt, max_new_tokens=2)


def test_a_decoder_without_a_start_token_begins_with_that_of_a_text_as_in_generate(
    checkpoints: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(checkpoints / "t5", tmp_path / "t5")
    for name in ("config.json", "generation_config.json"):
        settings = json.loads((folder / name).read_text())
        settings.pop("decoder_start_token_id", None)
        (folder / name).write_text(json.dumps({**settings, "bos_token_id": START}))
    decoder = load(folder, policy="vanilla")
    decoder.target.checkpoint.check()
    module = AutoModelForSeq2SeqLM.from_pretrained(folder)
    start, *expected = module.generate(torch.tensor([[5, 9, 12, 1]]), max_new_tokens=8)[0].tolist()
    assert start == START
    assert decoder.generate([5, 9, 12, 1], 8).token_ids == expected


def test_a_loaded_model_in_a_wrapper_has_the_outline_of_its_architecture() -> None:
    """The wrapper's class is built from something else than a configuration."""
    module = torch.compile(tiny_llama(0))
    outline = LoadedCheckpoint("compiled", module=module).weightless()
    assert type(outline) is type(tiny_llama(0)) and outline.device.type == "meta"


class WithTwoVocabularies:
    """A tokenizer in Python that reads words by one table and writes them by another."""

    is_fast, unk_token, unk_token_id = False, "w3", 3

    def __init__(self, read: list[str], written: list[str]) -> None:
        self._read, self._written = read, written

    def get_vocab(self) -> dict[str, int]:
        return {word: token for token, word in enumerate(self._read)}

    def convert_ids_to_tokens(self, token: int) -> str:
        return self._written[token]


def test_a_prompt_may_have_a_vocabulary_of_its_own() -> None:
    words = [f"w{token}" for token in range(VOCABULARY)]
    found = []
    for written in (words, words[::-1]):
        checkpoint = LoadedCheckpoint("m", None, False, False, build("marian"))
        vars(checkpoint)["tokenizer"] = WithTwoVocabularies(words, written)
        found.append(checkpoint.one_vocabulary)
        assert checkpoint.source([5, 9]).one_vocabulary == found[-1]
    assert found == [True, False]
    decoder = LoadedCheckpoint("m", None, False, False, build("llama"))
    vars(decoder)["tokenizer"] = WithTwoVocabularies(words, words[::-1])
    assert decoder.one_vocabulary and decoder.source([5, 9]).one_vocabulary


def test_the_source_vocabulary_of_a_translator_may_be_the_larger_one() -> None:
    """Fault: prompts of facebook/wmt19-en-ru were held against its Russian vocabulary."""
    checkpoint = Checkpoint("translator")
    vars(checkpoint)["config"] = AutoConfig.for_model(
        "fsmt", langs=["en", "ru"], src_vocab_size=50, tgt_vocab_size=VOCABULARY
    )
    assert (checkpoint.rows, checkpoint.source_rows) == (VOCABULARY, 50)
    assert not checkpoint.one_vocabulary
