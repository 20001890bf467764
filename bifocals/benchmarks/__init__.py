"""One question per file. The oracle runs first: no timing is printed on a wrong result."""
