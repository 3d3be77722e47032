"""Measurements on one GPU. Every number is a ratio's half: alternatives are timed in the same run.

    python -m benchmarks.run op=conv2d batch=128     one op at the shapes of a model
    python -m benchmarks.train_step batch=32,128     a whole training step
    python -m benchmarks.profile batch=128           where a step's time goes, kernel by kernel
    python -m benchmarks.profile mode=sample         and an evaluation's, for sampling
    python -m benchmarks.plots                       pictures and docs/ops.md, from the CSV
    python -m benchmarks.summary                     that table alone

Nothing is timed before its result has been compared with the reference in the same process, and
every row is kept, the losing ones too.
"""
