"""A session gives the states of chosen layers, and with them those of the prompt's rows, as
Transformers does.
"""

from __future__ import annotations

import pytest
import torch

from bild_lab.engine.draft import Tree
from bild_lab.engine.request import Source
from bild_lab.engine.session import OutputSpec, Rows
from tests.policies import in_memory
from tests.sessions import needs_kernels
from tests.tiny import PAD, START, VOCABULARY, tiny_llama, tiny_t5

ENGINES = ["native", "hf", pytest.param("kernels", marks=needs_kernels)]
ENCODED = torch.tensor([[5, 9, 12, 30, 1]])
LONG = 70  # more than the kernels run together with the first rows


@torch.inference_mode()
def states_of(module, tokens: list[int]) -> list[torch.Tensor]:
    """The output of the final norm, then the states after the first layer and the second."""
    options = {"output_hidden_states": True}
    if module.config.is_encoder_decoder:
        memory = module.get_encoder()(ENCODED).last_hidden_state
        ran = module.get_decoder()(torch.tensor([tokens]), encoder_hidden_states=memory, **options)
    else:
        ran = module.get_decoder()(torch.tensor([tokens]), **options)
    scale = (
        module.config.d_model**-0.5
        if getattr(module.config, "scale_decoder_outputs", False)
        else 1.0
    )
    return [(scale * ran.last_hidden_state)[0], ran.hidden_states[1][0], ran.hidden_states[2][0]]


@pytest.mark.fast("t5-native", "llama-kernels", "long llama-hf")
@torch.inference_mode()
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("family", ["t5", "llama", "long llama"])
def test_states_of_the_prompt_and_of_a_tree(family: str, engine: str) -> None:
    module = tiny_t5(0, layers=3) if family == "t5" else tiny_llama(0, layers=3)
    words = torch.randint(
        3, VOCABULARY, (LONG,), generator=torch.Generator().manual_seed(0)
    ).tolist()
    prompt = [PAD] if family == "t5" else [START, *words[: LONG if family == "long llama" else 4]]
    source = Source(tuple(prompt), ENCODED if family == "t5" else None)
    session = in_memory(module, engine).start(source, 20)
    output_spec = OutputSpec(head_input=True, hidden=(1, 2), prompt=True)
    rows = Rows([prompt[-1], 7, 8, 9], Tree(torch.tensor([-1, 0, 0, 2])))
    scores = session.extend(rows, output_spec)
    assert scores.logits.shape[0] == 4  # none of the prompt's other rows
    assert [each.shape[0] for each in (scores.head_input, *scores.hidden)] == [len(prompt) + 3] * 3
    chosen, other = states_of(module, [*prompt, 8, 9]), states_of(module, [*prompt, 7])
    for found, on_branch, beside in zip(
        (scores.head_input, *scores.hidden), chosen, other, strict=True
    ):
        torch.testing.assert_close(
            found[: len(prompt)], on_branch[: len(prompt)], rtol=1e-3, atol=1e-3
        )
        torch.testing.assert_close(found[len(prompt) + 1 :], on_branch[-2:], rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(found[len(prompt)], beside[-1], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(
        scores.logits, module.get_output_embeddings()(scores.head_input[-4:])
    )
    session.keep([0, 2, 3])
    after = session.extend([11], output_spec)
    assert [each.shape[0] for each in (after.head_input, *after.hidden)] == [1] * 3
    for found, expected in zip(
        (after.head_input, *after.hidden), states_of(module, [*prompt, 8, 9, 11]), strict=True
    ):
        torch.testing.assert_close(found[0], expected[-1], rtol=1e-3, atol=1e-3)
