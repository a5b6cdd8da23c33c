"""Calibration: a measured engine result beside the simulated one, and a few named constants fitted to the difference.

`results` reads what a benchmark client wrote, `units` refuses figures in the wrong unit, `levels` turns a result into
a simulated load level, `measure` runs it, `compare` tells the errors, `constants` names what may be fitted, `fit` fits
it, and `file` holds the file that a scenario may name.
"""
