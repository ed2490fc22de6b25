"""Other systems on this machine, for the comparisons: installing them, converting weights, and their step children."""
