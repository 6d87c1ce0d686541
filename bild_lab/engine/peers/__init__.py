"""Other engines as peers: CTranslate2 and OpenVINO decode the same checkpoint, each in a process of its own."""

from bild_lab.engine.peers.methods import CTranslate2, OpenVINO, OpenVINOSpeculative

__all__ = ["CTranslate2", "OpenVINO", "OpenVINOSpeculative"]
