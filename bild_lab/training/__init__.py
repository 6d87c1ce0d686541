"""Training: a model's own weights, a drafter on its target's answers, small modules beside a frozen model.

What each command calls:

- `scripts/finetune.py`: `finetuning.finetune.finetune`, a checkpoint or a fresh model on a dataset.
- `scripts/generate_calibration.py`: `calibration.generate.generate_calibration`, a model's greedy answers to a dataset.
- `scripts/align.py`: `alignment.align.align`, a drafter on its target's answers (BiLD §3.5.1).
- `scripts/train_bita.py`, `train_medusa.py`, `train_lm_heads.py`: `frozen.train.train_module`.
- `scripts/train_judge.py`: `judge.job.train_judge`, labels by search and a linear classifier.
- `scripts/build_ngrams.py`: `ngrams.estimate`, n-gram tables of a corpus.
- `python -m bild_lab.training.toy NAME`: `toy.train_member`, a model of the toy pair.

The modules at this level are what the trainings share: `run` takes any of them from its job to its result.
"""
