"""The CPU kernels in C++. `kernels` is the compiled module; it may be missing where no compiler was at hand."""
