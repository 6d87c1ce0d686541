"""What points were measured with is read again, once for all that share it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from bild_lab.lab.config.compose import compose_config
from bild_lab.lab.data.dataset_spec import DatasetSpec
from bild_lab.lab.data.examples import cached_examples
from bild_lab.lab.schema.result import Result
from bild_lab.lab.store import inputs
from bild_lab.lab.store.hashing import data_hash
from bild_lab.lab.store.inputs import examples_of
from bild_lab.lab.store.records import Sweep
from tests.report.sample import sample_result


def stored(sweep: Sweep, data: str, *words: str) -> Result:
    """A point of these words, measured on this data."""
    config = OmegaConf.to_yaml(compose_config(["policy=bild", *words]))
    knobs = {"words": " ".join(words)}
    result = sample_result("bild", knobs, 1.5, setting={"data": data})
    return replace(result, folder=sweep.write_point(result.point, config, result, []))


def test_data_that_has_changed_are_read_once_for_all_points_that_differ_in_their_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: the configuration of each of a thousand points is read, a hundredth of a second each,
    and each asks for the missing data.
    """
    sweep, read = Sweep(tmp_path), []
    monkeypatch.setattr(
        inputs, "cached_examples", lambda dataset: read.append(dataset) or cached_examples(dataset)
    )
    old = [
        stored(sweep, "changed", f"policy.fallback={fallback}", f"policy.rollback={rollback}")
        for fallback in (0.1, 0.2, 0.3)
        for rollback in (1, 2)
    ]
    assert examples_of(old) == (None, "dataset toy has changed since") and len(read) == 1
    fewer = stored(sweep, "changed", "dataset.limit=3")
    assert examples_of([*old, fewer])[0] is None and len(read) == 1 + 2
    new = stored(sweep, data_hash(cached_examples(read[0])), "policy.fallback=0.4")
    examples, why = examples_of([*old, fewer, new])
    assert len(examples) == len(cached_examples(read[0])) and not why


def test_a_point_whose_configuration_is_damaged_hides_no_other(tmp_path: Path) -> None:
    sweep, config = Sweep(tmp_path), compose_config(["policy=bild"])
    data = data_hash(cached_examples(DatasetSpec(**OmegaConf.to_container(config.dataset))))
    damaged = stored(sweep, data)
    whole = stored(sweep, data, "policy.fallback=0.4")
    for content in (b"\xff", b"- 1", b"", b"policy: [", b"dataset: 3"):
        (damaged.folder / "config.yaml").write_bytes(content)
        assert examples_of([damaged])[0] is None
        assert examples_of([damaged, whole])[0], content
