"""The sections of a run report, one module each."""
