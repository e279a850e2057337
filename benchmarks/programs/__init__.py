"""Whole training programs: each algorithm as a loop by hand, with engram, and as users of other libraries write it.

A module has one algorithm: its settings, its networks and its learner, which both forms share, and the forms side by
side. `python -m benchmarks.programs.dqn --rounds 3` measures one of them alone. Tests run the same classes, and show
that the loop by hand and engram take the same actions and learn the same weights (`tests/programs`).
"""
