"""The bench: operands, the gate against the oracle, timers, and the comparison of two results."""
