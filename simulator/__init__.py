"""Discrete-event simulator of a continuous-batching engine, fed by measured step costs."""
