"""Other engines as peers: each decodes in a process of its own, the same checkpoint or, of
llama.cpp, a GGUF file.
"""

from bild_lab.engine.peers.methods import (
    CTranslate2,
    LlamaCpp,
    LlamaCppSpeculative,
    OpenVINO,
    OpenVINOSpeculative,
)
