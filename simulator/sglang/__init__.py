"""SGLang as an engine of the simulator: its two memory pools, its ledger and its scheduler (SGLang 0.5.23)."""
