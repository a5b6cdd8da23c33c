"""CUDA kernels of the state methods, compiled and launched with CuPy."""
