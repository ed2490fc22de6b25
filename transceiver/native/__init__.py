"""The C++ half of the transceivers: `engine`, built by the installation."""
