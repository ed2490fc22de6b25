"""Manager V2's bookkeeping core in C++; `core` is built with the package."""
