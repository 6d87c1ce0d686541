"""Another engine in its own environment (`make peers`): converts a checkpoint, or decodes token ids greedily.

    python -I peer_worker.py convert '{"engine": "openvino", "encoder_decoder": false, "source": DIR, "folder": DIR}'
    python -I peer_worker.py serve '{"engine": "openvino", "encoder_decoder": false, "model": DIR, "draft": null,
                                "window": null, "dtype": "float32", "threads": 2}'

`serve` answers {"ready": true} when the model is loaded, or {"error": TEXT}. Then every line of its input,
{"encoder": IDS or null, "prompt": IDS, "most": COUNT, "end": IDS}, is answered by {"tokens": IDS, "seconds": TIMES},
the new tokens only and when each was there (of engines that give them all at once the time of the whole), or by
{"error": TEXT}; an empty object is answered by one. It ends with its input. It imports nothing of bild_lab, as that
environment has other versions.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

Decode = Callable[[dict[str, Any]], Iterable[int]]
KILL_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl
LLAMA_CPP_ERROR = 4  # GGML_LOG_LEVEL_ERROR in the pinned version


def main() -> None:
    work, job = sys.argv[1], json.loads(sys.argv[2])
    if work == "convert":
        CONVERT[job["engine"]](job)
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when an interrupt ends us
    if sys.platform == "linux":  # the end of our input would not reach us while we are stopped
        ctypes.CDLL(None).prctl(KILL_WITH_PARENT, signal.SIGKILL)
    answers = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)  # what the libraries print is no answer
    serve(job, answers.write)


def serve(job: dict[str, Any], write: Callable[[str], Any]) -> None:
    """Load the model, then answer each line of standard input."""

    def answer(content: dict[str, Any]) -> None:
        write(json.dumps(content) + "\n")

    try:
        decode = LOAD[job["engine"], job["encoder_decoder"]](job)
    except Exception as error:  # it is for the parent to report
        answer({"error": text_of(error)})
        return
    answer({"ready": True})
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer(decoded(decode, request) if request else {})
        except Exception as error:
            answer({"error": text_of(error)})


def decoded(decode: Decode, request: dict[str, Any]) -> dict[str, Any]:
    """The new tokens of a text, and after how many seconds each was there."""
    started, tokens, times = time.perf_counter(), [], []
    for token in decode(request):
        tokens.append(token)
        times.append(time.perf_counter() - started)
    return {"tokens": tokens, "seconds": times}


def text_of(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1].strip() if lines else ''}"


def convert_for_ctranslate2(job: dict[str, Any]) -> None:
    from ctranslate2.converters import TransformersConverter

    precision = "float32" if job["bits"] is None else f"int{job['bits']}"
    TransformersConverter(job["source"]).convert(job["folder"], quantization=precision, force=True)


def load_ctranslate2_translator(job: dict[str, Any]) -> Decode:
    """An encoder–decoder. Tokens go in and come out as the strings of the vocabulary."""
    import ctranslate2

    model = ctranslate2.Translator(job["model"], **ctranslate2_options(job))
    names = json.loads(Path(job["model"], "shared_vocabulary.json").read_text(encoding="utf-8"))
    ids = {name: index for index, name in enumerate(names)}
    start = ids[
        json.loads(Path(job["model"], "config.json").read_text(encoding="utf-8"))[
            "decoder_start_token"
        ]
    ]

    def decode(request: dict[str, Any]) -> list[int]:
        if request["prompt"] != [start]:
            raise ValueError(
                f"CTranslate2 starts its decoder with token {start}, not with {request['prompt']}"
            )
        (result,) = model.translate_batch(
            [[names[token] for token in request["encoder"]]],
            beam_size=1,
            max_input_length=0,  # never cut
            max_decoding_length=request["most"],
            end_token=request["end"],
            return_end_token=True,
        )
        return [ids[name] for name in result.hypotheses[0]]

    return decode


def load_ctranslate2_generator(job: dict[str, Any]) -> Decode:
    """A decoder-only model."""
    import ctranslate2

    model = ctranslate2.Generator(job["model"], **ctranslate2_options(job))
    names = json.loads(Path(job["model"], "vocabulary.json").read_text(encoding="utf-8"))

    def decode(request: dict[str, Any]) -> list[int]:
        (result,) = model.generate_batch(
            [[names[token] for token in request["prompt"]]],
            beam_size=1,
            max_length=request["most"],
            end_token=request["end"],
            return_end_token=True,
            include_prompt_in_result=False,
        )
        return list(result.sequences_ids[0])

    return decode


def ctranslate2_options(job: dict[str, Any]) -> dict[str, Any]:
    precision = job["dtype"] if job["bits"] is None else f"int{job['bits']}"
    return {
        "device": "cpu",
        "compute_type": precision,
        "inter_threads": 1,
        "intra_threads": job["threads"],
    }


def convert_for_openvino(job: dict[str, Any]) -> None:
    from optimum.exporters.openvino import main_export
    from optimum.intel.openvino import OVConfig

    task = (
        "text2text-generation-with-past" if job["encoder_decoder"] else "text-generation-with-past"
    )
    options = {
        "library_name": "transformers",
        "convert_tokenizer": False,
        "ov_config": OVConfig(dtype="fp32"),
    }
    main_export(job["source"], output=job["folder"], task=task, **options)
    if not job["encoder_decoder"]:
        save_stand_in_tokenizer(Path(job["folder"]))
    if job["bits"] is not None:
        compress(Path(job["folder"]), job["bits"])


def compress(folder: Path, bits: int) -> None:
    """Quantize the weights of a folder's models, with the settings of Optimum's --weight-format."""
    import nncf
    import openvino

    mode = {8: nncf.CompressWeightsMode.INT8_ASYM, 4: nncf.CompressWeightsMode.INT4_ASYM}[bits]
    options = {} if bits == 8 else {"group_size": 128, "ratio": 1.0}
    for path in folder.glob("openvino_*model.xml"):
        small = nncf.compress_weights(openvino.Core().read_model(path), mode=mode, **options)
        openvino.save_model(small, folder / "small.xml", compress_to_fp16=False)
        del small  # it reads the file that is replaced
        for suffix in (".xml", ".bin"):
            (folder / f"small{suffix}").replace(path.with_suffix(suffix))


def save_stand_in_tokenizer(folder: Path) -> None:
    """A tokenizer of single bytes.

    Pipelines with a draft model want one, though ids alone go in and come out.
    """
    import openvino
    from openvino_tokenizers import convert_tokenizer
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=letters[0], pad_token=letters[0]
    )
    for model, name in zip(
        convert_tokenizer(fast, with_detokenizer=True), ("tokenizer", "detokenizer"), strict=True
    ):
        openvino.save_model(model, folder / f"openvino_{name}.xml")


def load_openvino_pipeline(job: dict[str, Any]) -> Decode:
    """A decoder-only model, alone or with a draft model."""
    import numpy
    import openvino
    import openvino_genai as genai

    properties = openvino_properties(job)
    # one text at a time: the pipeline without a scheduler, whose cache begins anew each time
    if job["draft"] is None:
        model = genai.LLMPipeline(job["model"], "CPU", ATTENTION_BACKEND="SDPA", **properties)
    else:
        scheduler = genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False  # each text is read anew
        scheduler.max_num_batched_tokens = 2**31  # a prompt runs in one forward
        draft = genai.draft_model(job["draft"], "CPU", **properties)
        model = genai.LLMPipeline(
            job["model"], "CPU", draft_model=draft, scheduler_config=scheduler, **properties
        )

    def decode(request: dict[str, Any]) -> list[int]:
        config = genai.GenerationConfig()
        config.max_new_tokens = request["most"]
        config.ignore_eos = not request["end"]
        if request["end"]:
            config.set_eos_token_id(request["end"][0])
            config.stop_token_ids = set(request["end"])
        if job["window"] is not None:
            config.num_assistant_tokens = job["window"]
        ids = numpy.array([request["prompt"]], dtype=numpy.int64)
        inputs = genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(numpy.ones_like(ids)))
        return list(model.generate(inputs, config).tokens[0])

    return decode


def load_openvino_encoder_decoder(job: dict[str, Any]) -> Decode:
    """An encoder–decoder: OpenVINO runs its forwards, the loop is that of Transformers."""
    import torch
    from optimum.intel import OVModelForSeq2SeqLM
    from transformers import GenerationConfig

    torch.set_num_threads(1)  # it picks tokens only
    properties = {name: str(value) for name, value in openvino_properties(job).items()}
    model = OVModelForSeq2SeqLM.from_pretrained(job["model"], device="CPU", ov_config=properties)

    def decode(request: dict[str, Any]) -> list[int]:
        model.generation_config = GenerationConfig(
            max_new_tokens=request["most"],
            eos_token_id=request["end"] or None,
            pad_token_id=0,
            decoder_start_token_id=request["prompt"][0],
            do_sample=False,
        )
        ids = torch.tensor([request["encoder"]])
        prompt = torch.tensor([request["prompt"]])
        out = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), decoder_input_ids=prompt
        )
        return out[0, prompt.shape[1] :].tolist()

    return decode


def openvino_properties(job: dict[str, Any]) -> dict[str, Any]:
    """Unless weights are quantized the precision everywhere: by default the cache and activations
    would be int8.
    """
    precision = {"float32": "f32", "bfloat16": "bf16"}[job["dtype"]]
    exact = {"KV_CACHE_PRECISION": precision, "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}
    return {
        "INFERENCE_PRECISION_HINT": precision,
        "INFERENCE_NUM_THREADS": job["threads"],
        "NUM_STREAMS": 1,
        **(exact if job["bits"] is None else {}),
    }


def open_gguf(file: str, **options: Any) -> Any:
    """A `Llama`.

    Raises ValueError with the first error that llama.cpp logs: the library only says that it
    failed.
    """
    import llama_cpp

    logged: list[tuple[int, bytes]] = []
    log = llama_cpp.llama_log_callback(lambda level, text, _: logged.append((level, text)))
    llama_cpp.llama_log_set(log, None)
    try:
        return llama_cpp.Llama(file, verbose=False, **options)
    except ValueError as error:
        errors = [
            text.decode(errors="replace") for level, text in logged if level == LLAMA_CPP_ERROR
        ]
        raise ValueError(errors[0] if errors else str(error)) from error
    finally:
        llama_cpp.llama_log_set(llama_cpp._logger.llama_log_callback, None)  # the library's own


def load_llama_cpp(job: dict[str, Any]) -> Decode:
    """A GGUF file."""
    threads = {"n_threads": job["threads"], "n_threads_batch": job["threads"]}
    model = open_gguf(job["model"], n_ctx=job["positions"], **threads)

    def decode(request: dict[str, Any]) -> Iterator[int]:
        model.reset()  # each text is read anew
        for token in itertools.islice(model.generate(request["prompt"], temp=0.0), request["most"]):
            yield token
            if token in request["end"]:
                return

    list(decode({"prompt": [0], "most": 2, "end": []}))  # the first forwards reserve memory
    return decode


CONVERT = {"ctranslate2": convert_for_ctranslate2, "openvino": convert_for_openvino}
LOAD = {
    ("ctranslate2", True): load_ctranslate2_translator,
    ("ctranslate2", False): load_ctranslate2_generator,
    ("llama_cpp", False): load_llama_cpp,
    ("openvino", True): load_openvino_encoder_decoder,
    ("openvino", False): load_openvino_pipeline,
}

if __name__ == "__main__":
    main()
