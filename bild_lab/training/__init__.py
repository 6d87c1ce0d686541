"""Training: a model's own weights, a drafter on its target's answers, small modules beside a frozen model.

What each command calls:

- `scripts/finetune.py`: `finetune.finetune`, a checkpoint or a fresh model on a dataset.
- `scripts/generate_calibration.py`: `calibration.generate_calibration`, a model's greedy answers to a dataset.
- `scripts/align.py`: `align.align`, a drafter on its target's answers (BiLD §3.5.1).
- `scripts/train_bita.py`, `train_lm_heads.py`, `train_module.py`: `modules.frozen.train_beside_frozen`; for n-grams
  `ngrams.estimate`.

`run.TrainingRun` takes each gradient training from its settings to its result; a training adds its objective and data.
"""
