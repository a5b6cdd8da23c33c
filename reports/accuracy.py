"""How far apart figures must be before the report tells them apart, and what validation found.

The sentences sum up docs/validation.md by hand: when that page changes, change them too (a test compares the number).
"""

from __future__ import annotations

#: Relative difference up to which two configurations are called tied.
TIE = 0.05
#: Statements about ranges of load rest on relative differences beyond this one.
CLEAR = 0.10
#: The two as the report prints them.
TIE_TEXT, CLEAR_TEXT = (f"{100 * share:g}\N{NO-BREAK SPACE}%" for share in (TIE, CLEAR))

#: Summary of docs/validation.md: below the knee (table 3), past it (knee table and table 4).
VALIDATED = (
    "below the knee results are up to 12\N{NO-BREAK SPACE}% too favourable to treewy",
    "past it the block pool is larger than a real engine's, so memory binds later than it will in service",
    "output tokens/s were 30 to 34\N{NO-BREAK SPACE}% above those runs: trust ratios before absolute figures",
)
CONFIDENCE = f"Simulated, not measured. Against published runs (docs/validation.md), {'; '.join(VALIDATED)}."
